//! The file of figures.

use std::{cmp::Reverse, collections::BTreeMap, env::consts::ARCH, fs, process::Command};

use crate::valgrind::Count;

/// From the root of the repository.
pub(crate) const FILE: &str = "benches/ratchet/figures.txt";

const FILE_HERE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/figures.txt");

/// How to compare.
pub(crate) const RUN: &str = "cargo run --profile ratchet -p ratchet";

/// The sections before those of the paths, which have their names.
const VERSIONS: &str = "versions";
const INSTRUCTIONS: &str = "instructions of a request";

/// A function is in the file if it has so many percent of its path.
const LEAST_PERCENT: u64 = 1;

/// What the figures depend on beside the code. Figures of other versions cannot be compared.
#[derive(Default, PartialEq, Eq)]
pub(crate) struct Versions(BTreeMap<String, String>);

#[derive(Default)]
pub(crate) struct Figures {
    pub(crate) versions: Versions,
    pub(crate) counts: Vec<(String, Count)>,
}

pub(crate) const REDIS_SERVER: &str = "redis-server";

impl Versions {
    /// Those of this machine.
    pub(crate) fn here() -> Result<Self, String> {
        let programs = [
            ("rustc", "it comes with cargo"),
            ("valgrind", "`bash .ci/run` installs it"),
            (REDIS_SERVER, "`bash tests/run.sh` installs it"),
        ];
        let mut versions = BTreeMap::from([("processor".to_owned(), processor())]);
        // The loader of the C library, whose functions count as well. Not every system has it.
        versions.insert(
            "ldd".to_owned(),
            version("ldd").unwrap_or_else(|| "none".to_owned()),
        );
        for (program, help) in programs {
            let version =
                version(program).ok_or_else(|| format!("{program} is missing: {help}"))?;
            versions.insert(program.to_owned(), version);
        }
        Ok(Self(versions))
    }

    /// How these versions differ from others, but for redis-server.
    pub(crate) fn difference(&self, other: &Self) -> Option<String> {
        let mut names = self.0.keys().filter(|name| *name != REDIS_SERVER);
        names.find_map(|name| self.difference_of(name, other))
    }

    /// How the version of this program differs.
    pub(crate) fn difference_of(&self, name: &str, other: &Self) -> Option<String> {
        let (own, other) = (
            self.0.get(name)?,
            other.0.get(name).map_or("none", String::as_str),
        );
        (own != other).then(|| format!("{name} is {own} here, and {other} in {FILE}"))
    }
}

/// The first number in what a program says of its version.
fn version(program: &str) -> Option<String> {
    let output = Command::new(program).arg("--version").output().ok()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let words = text.split(|between: char| !between.is_ascii_digit() && between != '.');
    words
        .map(|word| word.trim_matches('.'))
        .find(|word| !word.is_empty())
        .map(str::to_owned)
}

/// With the instructions that the C library chooses its functions by.
fn processor() -> String {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") {
        return format!("{ARCH} with AVX2");
    }
    ARCH.to_owned()
}

impl Figures {
    pub(crate) fn count(&self, path: &str) -> Option<&Count> {
        self.counts
            .iter()
            .find(|(name, _)| name == path)
            .map(|(_, count)| count)
    }

    pub(crate) fn read() -> Result<Self, String> {
        let text = fs::read_to_string(FILE_HERE)
            .map_err(|error| format!("cannot read {FILE}: {error}"))?;
        let (mut figures, mut section) = (Self::default(), "");
        for line in text
            .lines()
            .map(str::trim)
            .filter(|line| !line.is_empty() && !line.starts_with('#'))
        {
            if let Some(name) = line.strip_prefix('[') {
                section = name.trim_end_matches(']');
                continue;
            }
            let (first, rest) = line.split_once(' ').unwrap_or((line, ""));
            let (number, name) = (first.parse(), rest.trim_start().to_owned());
            match (section, number) {
                (VERSIONS, _) => drop(figures.versions.0.insert(first.to_owned(), name)),
                (INSTRUCTIONS, Ok(instructions)) => {
                    figures.counts.push((
                        name,
                        Count {
                            instructions,
                            ..Count::default()
                        },
                    ));
                }
                (path, Ok(instructions)) => {
                    let count = figures.counts.iter_mut().find(|(name, _)| name == path);
                    let (_, count) =
                        count.ok_or_else(|| format!("{FILE}: {path:?} has no figure"))?;
                    count.functions.insert(name, instructions);
                }
                _ => return Err(format!("{FILE}: {line:?} has no figure")),
            }
        }
        Ok(figures)
    }

    pub(crate) fn write(&self) -> Result<(), String> {
        let mut text = format!(
            "# Instructions of a request. `{RUN} -- --write` writes this file: see ../README.md.\n"
        );
        text += &format!("\n[{VERSIONS}]\n");
        for (name, version) in &self.versions.0 {
            text += &format!("{name} {version}\n");
        }
        text += &format!("\n[{INSTRUCTIONS}]\n");
        for (path, count) in &self.counts {
            text += &format!("{:>8}  {path}\n", count.instructions);
        }
        text += &format!(
            "\n# Without those of the functions that they call. Functions with less than {LEAST_PERCENT} % are left out.\n"
        );
        for (path, count) in &self.counts {
            text += &format!("\n[{path}]\n");
            let mut functions: Vec<_> = count
                .functions
                .iter()
                .filter(|(_, own)| **own >= least(count))
                .collect();
            functions.sort_by_key(|(name, own)| (Reverse(**own), *name));
            for (name, own) in functions {
                text += &format!("{own:>8}  {name}\n");
            }
        }
        fs::write(FILE_HERE, text).map_err(|error| format!("cannot write {FILE}: {error}"))
    }
}

/// The least instructions of a function that is in the file.
pub(crate) fn least(count: &Count) -> u64 {
    (count.instructions * LEAST_PERCENT).div_ceil(100).max(1)
}
