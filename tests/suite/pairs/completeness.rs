//! The table names each option that a builder of `src` has.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use super::table::{DIMENSIONS, NO_OPTIONS};

const BUILDERS: [&str; 5] = [
    "KeyedLimit",
    "RateLimitLayer",
    "Limiter",
    "Limit",
    "RedisStoreBuilder",
];

fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

/// The builder whose `impl` block this line begins.
fn builder(line: &str) -> Option<&'static str> {
    let rest = line.strip_prefix("impl")?.strip_suffix('{')?;
    let named = rest.rsplit(' ').find(|word| !word.is_empty())?;
    let is_trait = rest.contains(" for ");
    BUILDERS
        .into_iter()
        .find(|builder| !is_trait && named.split('<').next() == Some(builder))
}

/// The public methods that take the builder itself, as `Type::name`.
fn methods(source: &str) -> Vec<String> {
    let (mut methods, mut of) = (Vec::new(), None);
    let lines: Vec<&str> = source.lines().collect();
    for (number, line) in lines.iter().enumerate() {
        if !line.starts_with([' ', '}']) && !line.is_empty() {
            of = builder(line);
        }
        let (Some(builder), Some(signature)) = (of, line.strip_prefix("    pub ")) else {
            continue;
        };
        let Some((_, rest)) = signature.split_once("fn ") else {
            continue;
        };
        let name = rest.split(['(', '<']).next().unwrap();
        // The arguments may begin on the next line.
        let text = [
            rest,
            lines.get(number + 1).copied().unwrap_or_default().trim(),
        ]
        .concat();
        let arguments = text.split_once('(').unwrap().1;
        if ["self", "mut self"]
            .iter()
            .any(|taken| arguments.starts_with(taken))
        {
            methods.push(format!("{builder}::{name}"));
        }
    }
    methods
}

#[test]
fn the_table_has_all_options() {
    let mut files = Vec::new();
    sources(
        &Path::new(env!("CARGO_MANIFEST_DIR")).join("src"),
        &mut files,
    );
    let found: BTreeSet<String> = files
        .iter()
        .flat_map(|file| methods(&fs::read_to_string(file).unwrap()))
        .collect();
    let values = DIMENSIONS.iter().flat_map(|dimension| dimension.values);
    let options = values.flat_map(|value| value.options.iter().copied());
    let named: BTreeSet<String> = options
        .chain(NO_OPTIONS.iter().map(|(name, _)| *name))
        .map(str::to_owned)
        .collect();
    let missing: Vec<_> = found.difference(&named).collect();
    assert!(
        missing.is_empty(),
        "give these options a value in `pairs::table::DIMENSIONS`: {missing:?}"
    );
    // Without a feature the table lacks its options.
    let gone: Vec<_> = named.difference(&found).collect();
    assert!(
        gone.is_empty(),
        "the table names what no builder has: {gone:?}"
    );
}

#[test]
fn methods_of_builders_are_found() {
    let source = "impl<R> RateLimitLayer<R> {\n    pub fn one(self) -> Self {\n    }\n    pub const fn two(mut self, x: u8) {\n\
                  \x20   pub fn three(\n        self,\n    pub fn peek(&self) {\n    fn private(self) {\n}\nimpl X {\n    pub fn y(self) {\n";
    assert_eq!(
        methods(source),
        [
            "RateLimitLayer::one",
            "RateLimitLayer::two",
            "RateLimitLayer::three"
        ]
    );
}
