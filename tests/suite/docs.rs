//! The docs are true of the repository: the figures of the README are those of the plots that a run
//! of the benchmark has made, and the files, names and tests that the docs name exist.

use std::{
    collections::HashSet,
    fs,
    path::{Path, PathBuf},
};

/// The numbers before one of the units, as the text has them: `299,000 decisions/s`,
/// `1.8 million decisions/s`, `93 µs`.
fn figures(text: &str) -> Vec<(f64, f64)> {
    let words: Vec<&str> = text.split_whitespace().collect();
    let units = [
        "decisions/s",
        "refusals/s",
        "requests/s",
        "µs",
        "k/s",
        "M/s",
        "us",
    ];
    let of = |end: usize| {
        let unit = words[end].trim_end_matches(['.', ',', ';']);
        let is_million = unit == "M/s" || words[end - 1] == "million";
        let number = words[end - 1 - usize::from(words[end - 1] == "million")].replace(',', "");
        let scale = if is_million {
            1e6
        } else if unit == "k/s" {
            1e3
        } else {
            1.0
        };
        let zeros = number.len() - number.trim_end_matches('0').len();
        let step = match number.split_once('.') {
            Some((_, decimals)) => 0.1_f64.powi(decimals.len() as i32),
            None => 10_f64.powi(zeros as i32),
        };
        Some((number.parse::<f64>().ok()? * scale, step * scale))
    };
    (1..words.len())
        .filter(|&end| units.contains(&words[end].trim_end_matches(['.', ',', ';'])))
        .filter_map(of)
        .collect()
}

#[test]
fn figures_of_the_readme_stand_in_the_plots() {
    let read =
        |path: &str| fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(path)).unwrap();
    let plots = ["throughput", "costs"]
        .map(|name| read(&format!("benches/results/{name}.svg")).replace(['<', '>'], " "));
    let (plotted, told) = (figures(&plots.concat()), figures(&read("README.md")));
    assert!(!told.is_empty() && !plotted.is_empty());
    for (value, step) in told {
        // Rounded to the last digit of either.
        let is_plotted =
            |&(plotted, fine): &(f64, f64)| (plotted - value).abs() <= (step + fine) / 2.0;
        assert!(plotted.iter().any(is_plotted), "{value} is in no plot");
    }
}

/// All files of a folder and of those in it.
pub(crate) fn paths(folder: &Path, files: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            paths(&path, files);
        } else {
            files.push(path);
        }
    }
}

/// Their texts.
fn texts(folder: &Path) -> Vec<String> {
    let mut files = Vec::new();
    paths(folder, &mut files);
    files
        .into_iter()
        .filter_map(|file| fs::read_to_string(file).ok())
        .collect()
}

/// The words in backticks that are outside of programs.
fn code_spans(page: &str) -> impl Iterator<Item = &str> {
    let text = page.split("```").step_by(2);
    text.flat_map(|text| text.split('`').skip(1).step_by(2))
}

/// True if the text looks like a name in the code, and not like a word or a program.
fn is_name(text: &str) -> bool {
    let is_word = text
        .chars()
        .all(|char| char.is_ascii_alphanumeric() || char == '_');
    let is_type = text.starts_with(|char: char| char.is_ascii_uppercase());
    is_word
        && (is_type || text.contains('_'))
        && !text.starts_with(|char: char| char.is_ascii_digit())
}

/// Those of CONTRIBUTING.md, and of the READMEs and how-tos of folders. Paths may begin in any
/// folder.
#[test]
fn the_files_and_names_that_the_docs_name_exist() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = Vec::new();
    for folder in [
        ".ci",
        "src",
        "tests",
        "conformance",
        "examples",
        "benches",
        "service",
    ] {
        paths(&root.join(folder), &mut files);
    }
    // Not the docs, which would find their own words.
    let sources = files
        .iter()
        .filter(|file| file.extension().is_none_or(|kind| kind != "md"));
    let sources: String = sources
        .filter_map(|file| fs::read_to_string(file).ok())
        .collect();
    let words: HashSet<&str> = sources
        .split(|char: char| !char.is_ascii_alphanumeric() && char != '_')
        .collect();
    let mut named = 0;
    let mut missing = Vec::new();
    let mut pages = ["CONTRIBUTING.md", "tests/README.md", "benches/README.md"]
        .map(|page| root.join(page))
        .to_vec();
    pages.extend(
        files
            .iter()
            .filter(|file| file.ends_with("HOWTO.md"))
            .cloned(),
    );
    for page in pages {
        let text = fs::read_to_string(&page).unwrap();
        for span in code_spans(&text).filter_map(|span| span.rsplit("::").next()) {
            let is_path = [".rs", ".lua", ".sh"].iter().any(|end| span.ends_with(end));
            let is_there = match (is_path, is_name(span)) {
                (true, _) if !span.contains([' ', '*']) => {
                    files.iter().any(|file| file.ends_with(span))
                }
                (_, true) => words.contains(span),
                _ => continue,
            };
            named += 1;
            if !is_there {
                missing.push(format!("{}: {span}", page.display()));
            }
        }
    }
    assert!(named > 100 && missing.is_empty(), "{missing:#?} of {named}");
}

/// A newcomer looks for a room there.
#[test]
fn the_map_has_each_folder_of_the_sources() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let page = fs::read_to_string(root.join("CONTRIBUTING.md")).unwrap();
    let map: HashSet<&str> = code_spans(
        page.split("## ")
            .find(|section| section.starts_with("Map"))
            .unwrap(),
    )
    .collect();
    let mut files = Vec::new();
    paths(&root.join("src"), &mut files);
    let folders: HashSet<PathBuf> = files
        .into_iter()
        .filter_map(|file| Some(file.parent()?.to_owned()))
        .collect();
    let is_told = |folder: &&PathBuf| {
        map.iter()
            .any(|span| span.ends_with('/') && folder.ends_with(span))
    };
    let missing: Vec<&PathBuf> = folders.iter().filter(|folder| !is_told(folder)).collect();
    assert!(
        folders.len() > 15 && missing == [&root.join("src")],
        "{missing:?} are not in the map"
    );
}

/// The paragraphs, items of lists and rows of tables of a page, without its programs.
fn blocks(page: &str) -> Vec<String> {
    let mut blocks = vec![String::new()];
    let mut is_program = false;
    for line in page.lines().map(str::trim) {
        // The number of an item is none of its text.
        let line = line
            .split_once(". ")
            .filter(|(number, _)| number.parse::<u32>().is_ok())
            .map_or(line, |(_, text)| text);
        let begins_block = line.is_empty()
            || ["|", "#", "* ", "- "]
                .iter()
                .any(|mark| line.starts_with(mark));
        if line.starts_with("```") {
            is_program = !is_program;
        } else if !is_program && begins_block {
            blocks.push(line.to_owned());
        } else if !is_program {
            *blocks.last_mut().unwrap() += &format!(" {line}");
        }
    }
    blocks.retain(|block| !block.is_empty() && !block.starts_with('#'));
    blocks
}

/// True if a block has a number, or a word of promises, outside of code and the targets of links.
fn promises(block: &str) -> bool {
    let without_code: String = block.split('`').step_by(2).collect();
    let mut links = without_code.split("](");
    let mut text = links.next().unwrap().to_owned();
    links.for_each(|link| text += link.split_once(')').map_or("", |(_, text)| text));
    // The names of other things.
    for name in [
        "HTTP/1.1", "HTTP/1.0", "HTTP/1", "HTTP/2", "HTTP/3", "axum 0.8", "axum 0.7", "RFC ",
    ] {
        text = text.replace(name, " _");
    }
    let mut words = text.split(|char: char| !char.is_alphanumeric() && char != '_');
    let has_number = words
        .clone()
        .any(|word| word.starts_with(|char: char| char.is_ascii_digit()));
    let has_word =
        words.any(|word| ["never", "always", "exactly", "none", "nothing"].contains(&word));
    has_number
        || has_word
        || ["at most", "no more than"]
            .iter()
            .any(|words| text.contains(words))
}

/// A note is a comment at the end of the block that it is for:
///
/// | kind | what shows the promise |
/// |---|---|
/// | `test: name, ..` | tests; `this page` is a program of the page |
/// | `script: name` | a script of `tests/` |
/// | `benchmark: name` | a scenario of `benches/README.md` |
/// | `source: ..` | the docs of another project, or arithmetic |
/// | `advice` | nothing is promised |
#[test]
fn each_promise_of_the_guide_names_what_shows_it() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let sources = ["tests/suite", "src", "conformance"]
        .map(|folder| texts(&root.join(folder)).concat())
        .concat();
    let benchmarks = fs::read_to_string(root.join("benches/README.md")).unwrap();
    let mut pages = Vec::new();
    paths(&root.join("src/guide"), &mut pages);
    let mut wrong = Vec::new();
    let mut noted = 0;
    for path in pages
        .iter()
        .filter(|path| path.extension().is_some_and(|kind| kind == "md"))
    {
        let page = fs::read_to_string(path).unwrap();
        let stands = |kind: &str, name: &str| match kind {
            "test" if name == "this page" => page.contains("assert"),
            "test" => ["(", "<"]
                .iter()
                .any(|end| sources.contains(&format!("fn {name}{end}"))),
            "script" => root.join("tests").join(name).exists(),
            "benchmark" => benchmarks.contains(&format!("`{name}`")),
            "source" => true,
            "advice" => name.is_empty(),
            _ => false,
        };
        for block in blocks(&page) {
            let (text, notes) = block.split_once("<!-- ").unwrap_or((&block, ""));
            let of_block = notes
                .split("<!-- ")
                .flat_map(|note| note.split(" -->").next().unwrap().split("; "));
            for note in of_block.filter(|note| !note.is_empty()) {
                let (kind, names) = note.split_once(": ").unwrap_or((note, ""));
                let missing = names.split(", ").filter(|name| !stands(kind, name));
                wrong.extend(missing.map(|name| format!("{}: no {kind} {name}", path.display())));
                noted += 1;
            }
            if notes.is_empty() && promises(text) {
                wrong.push(format!("{}: no note: {text}", path.display()));
            }
        }
    }
    assert!(noted > 300 && wrong.is_empty(), "{wrong:#?}, {noted} notes");
}
