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
    let units = ["decisions/s", "refusals/s", "requests/s", "µs", "k/s", "M/s", "us"];
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
    let read = |path: &str| fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(path)).unwrap();
    let plots =
        ["throughput", "costs"].map(|name| read(&format!("benches/results/{name}.svg")).replace(['<', '>'], " "));
    let (plotted, told) = (figures(&plots.concat()), figures(&read("README.md")));
    assert!(!told.is_empty() && !plotted.is_empty());
    for (value, step) in told {
        // Rounded to the last digit of either.
        let is_plotted = |&(plotted, fine): &(f64, f64)| (plotted - value).abs() <= (step + fine) / 2.0;
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
    files.into_iter().filter_map(|file| fs::read_to_string(file).ok()).collect()
}

/// The words in backticks that are outside of programs.
fn code_spans(page: &str) -> impl Iterator<Item = &str> {
    let text = page.split("```").step_by(2);
    text.flat_map(|text| text.split('`').skip(1).step_by(2))
}

/// Whether the text looks like a name in the code, and not like a word or a program.
fn is_name(text: &str) -> bool {
    let is_word = text.chars().all(|char| char.is_ascii_alphanumeric() || char == '_');
    let is_type = text.starts_with(|char: char| char.is_ascii_uppercase());
    is_word && (is_type || text.contains('_')) && !text.starts_with(|char: char| char.is_ascii_digit())
}

/// Those of CONTRIBUTING.md, and of the READMEs and how-tos of folders. Paths may begin in any
/// folder.
#[test]
fn the_files_and_names_that_the_docs_name_exist() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = Vec::new();
    for folder in [".ci", "src", "tests", "conformance", "examples", "benches"] {
        paths(&root.join(folder), &mut files);
    }
    // Not the docs, which would find their own words.
    let sources = files.iter().filter(|file| file.extension().is_none_or(|kind| kind != "md"));
    let sources: String = sources.filter_map(|file| fs::read_to_string(file).ok()).collect();
    let words: HashSet<&str> = sources.split(|char: char| !char.is_ascii_alphanumeric() && char != '_').collect();
    let mut named = 0;
    let mut missing = Vec::new();
    let mut pages = ["CONTRIBUTING.md", "tests/README.md", "benches/README.md"].map(|page| root.join(page)).to_vec();
    pages.extend(files.iter().filter(|file| file.ends_with("HOWTO.md")).cloned());
    for page in pages {
        let text = fs::read_to_string(&page).unwrap();
        for span in code_spans(&text).filter_map(|span| span.rsplit("::").next()) {
            let is_path = [".rs", ".lua", ".sh"].iter().any(|end| span.ends_with(end));
            let is_there = match (is_path, is_name(span)) {
                (true, _) if !span.contains([' ', '*']) => files.iter().any(|file| file.ends_with(span)),
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
    let map: HashSet<&str> =
        code_spans(page.split("## ").find(|section| section.starts_with("Map")).unwrap()).collect();
    let mut files = Vec::new();
    paths(&root.join("src"), &mut files);
    let folders: HashSet<PathBuf> = files.into_iter().filter_map(|file| Some(file.parent()?.to_owned())).collect();
    let is_told = |folder: &&PathBuf| map.iter().any(|span| span.ends_with('/') && folder.ends_with(span));
    let missing: Vec<&PathBuf> = folders.iter().filter(|folder| !is_told(folder)).collect();
    assert!(folders.len() > 15 && missing == [&root.join("src")], "{missing:?} are not in the map");
}

#[test]
fn the_tests_that_the_guide_names_exist() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let sources = [texts(&root.join("tests/suite")), texts(&root.join("src"))].concat();
    let mut named = 0;
    for page in texts(&root.join("src/guide")) {
        for note in page.split("<!-- test: ").skip(1) {
            for test in note.split(" -->").next().unwrap().split(", ") {
                assert!(
                    sources.iter().any(|source| source.contains(&format!("fn {test}("))),
                    "there is no test {test}"
                );
                named += 1;
            }
        }
    }
    assert!(named > 40, "{named}");
}
