//! Counts the instructions of processes, by callgrind.

use std::{
    collections::{BTreeMap, BTreeSet},
    env,
    ffi::OsStr,
    fs,
    path::{Path as FilePath, PathBuf},
    process::Command,
};

use crate::{
    paths::{Path, Redis},
    server::Server,
};

/// Tells a process under valgrind how many requests to send on which path, and the URL of
/// redis-server.
pub(crate) const ASKED: &str = "RATCHET";

/// What counts of this program.
const OF_CLIENT: &[&str] = &["ratchet::paths::counted*"];

/// What counts of redis-server: the functions that read and run requests and write replies, and not
/// the last of these, which looks keys and commands up. How long a look-up takes depends on a
/// random seed. So do the timer and the waiting on time.
const OF_REDIS: &[&str] = &["readQueryFromClient", "writeToClient", "dictFind"];

/// Bytes.
pub(crate) const CACHE_LINE: usize = 64;

/// Room for a longer `PATH` than any.
const MAX_PATH: usize = 8_192;

/// The instructions of a request.
#[derive(Clone, Default, PartialEq, Eq)]
pub(crate) struct Count {
    pub(crate) instructions: u64,
    /// Those of each function, without those of the functions that it calls.
    pub(crate) functions: BTreeMap<String, u64>,
    /// The lines of the crate that have run: their files in `src`, and their numbers.
    pub(crate) lines: BTreeSet<(String, usize)>,
    /// The cache lines of code that have run: the program or library, and the number in it.
    pub(crate) code: BTreeSet<(String, usize)>,
}

/// A file of the repository.
pub(crate) fn of_root(file: &str) -> PathBuf {
    FilePath::new(env!("CARGO_MANIFEST_DIR"))
        .ancestors()
        .nth(2)
        .unwrap_or(FilePath::new(""))
        .join(file)
}

/// The counts of a path by their names: of its client, and of redis-server if it is counted.
///
/// Each is what twice as many requests take more, so that start and end of the processes do not
/// count.
pub(crate) fn count(path: &Path) -> Result<Vec<(&'static str, Count)>, String> {
    let (once, twice) = (run(path, path.requests)?, run(path, 2 * path.requests)?);
    let requests = path.requests as u64;
    Ok(once
        .into_iter()
        .zip(twice)
        .map(|((name, once), (_, twice))| (name, twice.less(&once).per(requests)))
        .collect())
}

impl Count {
    fn less(mut self, other: &Self) -> Self {
        self.instructions = self.instructions.saturating_sub(other.instructions);
        for (function, instructions) in &mut self.functions {
            *instructions =
                instructions.saturating_sub(other.functions.get(function).copied().unwrap_or(0));
        }
        self
    }

    fn per(mut self, requests: u64) -> Self {
        let divide = |sum: &mut u64| *sum = (*sum + requests / 2) / requests;
        divide(&mut self.instructions);
        self.functions.values_mut().for_each(divide);
        self
    }

    /// Of a file of callgrind. A line that begins with `fn=` names a function, lines that begin
    /// with a position are its own instructions, and the line after `calls=` has those of the
    /// function that it calls. A position is the address of an instruction and the number of a line
    /// of the source, or their differences from the position before. The file of that line is the
    /// last that `fl=`, `fi=` or `fe=` has named: code that is inlined keeps its own file.
    fn read(file: &FilePath) -> Result<Self, String> {
        let text = fs::read_to_string(file)
            .map_err(|error| format!("valgrind has not written its counts: {error}"))?;
        let (mut count, mut function, mut names) =
            (Self::default(), String::new(), Names::default());
        let mut files = Names::default();
        let sources = of_root("src/");
        let (mut file, mut object) = ("", "");
        let mut objects = Names::default();
        let mut position = (0, 0);
        let mut lines = text.lines();
        while let Some(line) = lines.next() {
            match line.split_once('=') {
                Some(("fn", name)) => function = readable(names.of(name)),
                Some(("cfn", name)) => _ = names.of(name),
                Some(("fl" | "fi" | "fe", name)) => file = files.of(name),
                Some(("cfi" | "cfl", name)) => _ = files.of(name),
                Some(("ob", name)) => object = objects.of(name),
                Some(("cob", name)) => _ = objects.of(name),
                Some(("calls", _)) => {
                    let of_call = lines.next().unwrap_or_default();
                    position = moved(position, of_call);
                }
                _ if line
                    .starts_with(|first: char| first.is_ascii_digit() || "+-*".contains(first)) =>
                {
                    position = moved(position, line);
                    if let Some(file) = FilePath::new(file)
                        .strip_prefix(&sources)
                        .ok()
                        .and_then(FilePath::to_str)
                    {
                        count.lines.insert((file.to_owned(), position.1));
                    }
                    count
                        .code
                        .insert((object.to_owned(), position.0 / CACHE_LINE));
                    let own = line
                        .split(' ')
                        .nth(2)
                        .and_then(|own| own.parse().ok())
                        .unwrap_or(0);
                    *count.functions.entry(function.clone()).or_default() += own;
                    count.instructions += own;
                }
                _ => {}
            }
        }
        Ok(count)
    }
}

/// The address and the line of the source at the beginning of a line, after this position.
fn moved((address, line): (usize, usize), text: &str) -> (usize, usize) {
    let mut words = text.split(' ');
    let mut next = |known: usize| {
        let text = words.next().unwrap_or_default();
        let number = |digits: &str| match digits.strip_prefix("0x") {
            Some(digits) => usize::from_str_radix(digits, 16),
            None => digits.parse(),
        };
        match text.split_at(text.len().min(1)) {
            ("*", _) => Ok(known),
            ("+", by) => number(by).map(|by| known + by),
            ("-", by) => number(by).map(|by| known.saturating_sub(by)),
            _ => number(text),
        }
        .unwrap_or_default()
    };
    (next(address), next(line))
}

/// A name stands behind its number once, and then the number stands for it.
#[derive(Default)]
struct Names<'a>(BTreeMap<&'a str, &'a str>);

impl<'a> Names<'a> {
    fn of(&mut self, text: &'a str) -> &'a str {
        let (number, name) = text.split_once(' ').unwrap_or((text, ""));
        if name.is_empty() {
            return self.0.get(number).copied().unwrap_or(number);
        }
        self.0.insert(number, name);
        name
    }
}

/// The name of a function, the same for all depths of a recursion. Most functions of redis-server's
/// Lua have only an address, which says nothing.
fn readable(name: &str) -> String {
    if name.starts_with("0x") {
        return "functions without a name".to_owned();
    }
    let is_depth = |end: &str| end.bytes().all(|byte| byte.is_ascii_digit());
    name.rsplit_once('\'')
        .filter(|(_, end)| is_depth(end))
        .map_or(name, |(name, _)| name)
        .to_owned()
}

/// The instructions of a process that sends so many requests, and of its redis-server.
fn run(path: &Path, requests: usize) -> Result<Vec<(&'static str, Count)>, String> {
    let dir = tempfile::tempdir().map_err(|error| format!("no temporary folder: {error}"))?;
    let (of_client, of_server) = (dir.path().join("client"), dir.path().join("server"));
    let mut server = match path.redis {
        Redis::Absent => None,
        Redis::Present => Some(Server::start(Command::new("redis-server"), dir.path())?),
        Redis::Counted(_) => Some(Server::start(
            under_valgrind("redis-server", OF_REDIS, &of_server),
            dir.path(),
        )?),
    };
    let this = dir.path().join("ratchet");
    env::current_exe()
        .and_then(|here| fs::copy(here, &this))
        .map_err(|error| format!("no copy of this program: {error}"))?;
    let port = server.as_ref().map_or(0, |server| server.port());
    // When malloc joins the chunks of its fast bins depends on how replies arrive: it made 11 % of
    // a path between two counts.
    let fast_bins = if server.is_some() { "000" } else { "128" };
    let output = under_valgrind(this, OF_CLIENT, &of_client)
        .env("GLIBC_TUNABLES", format!("glibc.malloc.mxfast={fast_bins}"))
        .env(
            ASKED,
            format!("{requests} redis://127.0.0.1:{port}/ {}", path.name),
        )
        .output()
        .map_err(|error| format!("valgrind does not start: {error}"))?;
    if !output.status.success() {
        return Err(format!(
            "{}: valgrind failed: {}",
            path.name,
            String::from_utf8_lossy(&output.stderr)
        ));
    }
    if let Some(server) = &mut server {
        server.shut_down()?;
    }
    let mut counts = vec![(path.name, Count::read(&of_client)?)];
    if let Redis::Counted(name) = path.redis {
        counts.push((name, Count::read(&of_server)?));
    }
    if counts.iter().any(|(_, count)| count.instructions == 0) {
        return Err(format!(
            "{}: a program has none of the functions {OF_CLIENT:?} or {OF_REDIS:?}",
            path.name
        ));
    }
    Ok(counts)
}

/// Runs a program under valgrind. Each of these functions turns counting on while it runs, or off
/// if it is on.
fn under_valgrind(program: impl AsRef<OsStr>, toggles: &[&str], counts: &FilePath) -> Command {
    let mut command = Command::new("valgrind");
    // The sizes of the environment and of the program's name decide how the stack is aligned, and
    // so what copying memory costs. A copy of this program has a name of one size.
    let path = env::var_os("PATH").unwrap_or_default();
    command
        .env_clear()
        .env("PADDING", "x".repeat(MAX_PATH.saturating_sub(path.len())))
        .env("PATH", path);
    command
        .arg("--tool=callgrind")
        .arg("--dump-instr=yes")
        .arg(format!("--callgrind-out-file={}", counts.display()));
    command
        .args(
            toggles
                .iter()
                .map(|function| format!("--toggle-collect={function}")),
        )
        .arg(program);
    command
}
