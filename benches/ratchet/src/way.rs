//! The way of a plain request: the files of the crate of which it runs a line, and the code that it
//! runs. CONTRIBUTING.md names each of the files, and a reader who follows the request has to open
//! them. Of the code, a processor's nearest cache holds 32 KB: a busy process finds the rest there
//! again, in a batch, and a process that has little to do does not.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
};

use crate::valgrind::{CACHE_LINE, Count, of_root};

/// The path of the plain request.
pub(crate) const PATH: &str = "Redis, one client";

const SECTION: &str = "The way of a request";

/// Before you raise it, look for a file that need not be on the way.
const MOST: usize = 28;

/// The same for the code, in KB. What the compiler inlines changes it by a few.
const MOST_CODE: usize = 93;

/// True if the way has no more files, and CONTRIBUTING.md names all of them.
pub(crate) fn holds(count: &Count) -> Result<bool, String> {
    let read =
        |file: &str| fs::read_to_string(of_root(file)).map_err(|error| format!("{file}: {error}"));
    let map = read("CONTRIBUTING.md")?;
    let section = map
        .split("\n## ")
        .find(|section| section.starts_with(SECTION))
        .unwrap_or_default();
    let named: Vec<&str> = section.split('`').skip(1).step_by(2).collect();
    let mut of_files = BTreeMap::<&str, BTreeSet<usize>>::new();
    for (file, line) in &count.lines {
        of_files.entry(file).or_default().insert(*line);
    }
    let mut files = Vec::new();
    for (file, lines) in of_files {
        let text = read(&format!("src/{file}"))?;
        // Nobody reads the code of a derive. The compiler's own code has the line of a comment.
        let is_code = |number: &usize| {
            let line = text
                .lines()
                .nth(number.saturating_sub(1))
                .unwrap_or_default()
                .trim_start();
            !line.is_empty() && !line.starts_with("#[") && !line.starts_with("//")
        };
        if lines.iter().any(is_code) {
            files.push(file);
        }
    }
    if files.is_empty() {
        return Err(format!(
            "{PATH:?} runs no line of the crate: does it have debug information?"
        ));
    }
    let unnamed: Vec<_> = files
        .iter()
        .filter(|file| !named.iter().any(|name| is_at_end(file, name)))
        .collect();
    println!(
        "{MOST:>9} {:>9}  {:>8}  files of a plain request",
        files.len(),
        ""
    );
    if files.len() > MOST {
        println!(
            "\nA plain request runs lines of more than {MOST} files: {}.",
            files.join(", ")
        );
    }
    if !unnamed.is_empty() {
        println!("\n{SECTION:?} in CONTRIBUTING.md does not name {unnamed:?}.");
    }
    let code = count.code.len() * CACHE_LINE / 1_000;
    println!("{MOST_CODE:>9} {code:>9}  {:>8}  KB of code", "");
    if code > MOST_CODE {
        println!("\nA plain request runs more than {MOST_CODE} KB of code.");
    }
    Ok(files.len() <= MOST && code <= MOST_CODE && unnamed.is_empty())
}

/// True if these are the last folders and the name of a file.
fn is_at_end(file: &str, name: &str) -> bool {
    file.strip_suffix(name)
        .is_some_and(|before| before.is_empty() || before.ends_with('/'))
}
