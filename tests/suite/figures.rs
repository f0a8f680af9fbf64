//! The figures of the README are those of the plots that a run of the benchmark has made, and the
//! tests that the guide names exist.

use std::{fs, path::Path};

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

/// The texts of all files of these folders.
fn texts(folder: &Path, texts: &mut Vec<String>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            self::texts(&path, texts);
        } else if let Ok(text) = fs::read_to_string(path) {
            texts.push(text);
        }
    }
}

#[test]
fn the_tests_that_the_guide_names_exist() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let (mut sources, mut pages, mut named) = (Vec::new(), Vec::new(), 0);
    texts(&root.join("tests/suite"), &mut sources);
    texts(&root.join("src"), &mut sources);
    texts(&root.join("src/guide"), &mut pages);
    for page in &pages {
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
