//! The floors of the crate: a module uses only modules of its own floor and of those below, and
//! modules that are side by side, files or folders, do not use each other in a circle.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    iter::{Peekable, zip},
    path::Path,
};

use crate::docs::paths;

/// From the top. All other modules are values, on the lowest floor. `src/lib.rs` is above all.
const FLOORS: [&[&str]; 4] = [
    &["middleware", "testing"],
    &["limiter"],
    &["store"],
    &["local"],
];

/// Its names, from the root of the crate on.
type Module = Vec<String>;

/// The number of the floors above.
fn floor(module: &Module) -> usize {
    FLOORS
        .iter()
        .position(|floor| floor.contains(&&*module[0]))
        .unwrap_or(FLOORS.len())
}

/// The code of a file without comments and inline tests.
fn code(text: &str) -> String {
    let mut lines = text
        .lines()
        .map(|line| line.split("//").next().unwrap_or_default());
    let mut code = String::new();
    while let Some(line) = lines.next() {
        code += line;
        code.push('\n');
        if line.starts_with("#[cfg(test)]")
            && let Some(item) = lines.next()
        {
            if item.starts_with("mod ") {
                lines.find(|line| *line == "}");
            } else {
                code += item;
            }
        }
    }
    code
}

/// Words, `::`, and all other characters.
fn tokens(code: &str) -> Vec<&str> {
    let is_word = |char: char| char.is_alphanumeric() || char == '_';
    let mut tokens = Vec::new();
    let mut rest = code.trim_start();
    while let Some(first) = rest.chars().next() {
        let length = match rest.find(|char| !is_word(char)).unwrap_or(rest.len()) {
            0 if rest.starts_with("::") => 2,
            0 => first.len_utf8(),
            length => length,
        };
        tokens.push(&rest[..length]);
        rest = rest[length..].trim_start();
    }
    tokens
}

/// Appends the path that begins here, or those of a group in braces.
fn take_paths<'a>(
    tokens: &mut Peekable<impl Iterator<Item = &'a str>>,
    mut path: Vec<&'a str>,
    paths: &mut Vec<Vec<&'a str>>,
) {
    while let Some(token) = tokens.next() {
        if token == "{" {
            while tokens.peek().is_some_and(|token| *token != "}") {
                take_paths(tokens, path.clone(), paths);
                tokens.next_if_eq(&",");
            }
            tokens.next();
            return;
        }
        path.push(token);
        if tokens.next_if_eq(&"::").is_none() {
            break;
        }
    }
    if tokens.next_if_eq(&"as").is_some() {
        tokens.next();
    }
    paths.push(path);
}

/// All paths within the crate, also those outside of `use`.
fn paths_of(code: &str) -> Vec<Vec<&str>> {
    let mut tokens = tokens(code).into_iter().peekable();
    let mut paths = Vec::new();
    while let Some(token) = tokens.peek() {
        if ["crate", "super", "self"].contains(token) {
            take_paths(&mut tokens, Vec::new(), &mut paths);
        } else {
            tokens.next();
        }
    }
    paths
}

/// The module that a path of another one leads to.
fn module_at(path: &[&str], from: &Module, modules: &BTreeMap<Module, String>) -> Module {
    let mut module = if path[0] == "crate" {
        Vec::new()
    } else {
        from.clone()
    };
    for name in path {
        match *name {
            "crate" | "self" => {}
            "super" => drop(module.pop()),
            name => module.push(name.to_owned()),
        }
    }
    while !module.is_empty() && !modules.contains_key(&module) {
        module.pop();
    }
    module
}

/// All modules that a module uses, and that those use.
fn reached(from: &Module, uses: &BTreeMap<Module, BTreeSet<Module>>) -> BTreeSet<Module> {
    let mut reached = BTreeSet::new();
    let mut left = vec![from];
    while let Some(module) = left.pop() {
        left.extend(
            uses.get(module)
                .into_iter()
                .flatten()
                .filter(|used| reached.insert((*used).clone())),
        );
    }
    reached
}

#[test]
fn modules_use_only_what_is_below_them() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    paths(&source, &mut files);
    let mut modules = BTreeMap::new();
    for file in files
        .iter()
        .filter(|file| file.extension().is_some_and(|kind| kind == "rs"))
    {
        let path = file.strip_prefix(&source).unwrap().with_extension("");
        let mut module: Module = path
            .iter()
            .map(|name| name.to_str().unwrap().to_owned())
            .collect();
        module.pop_if(|name| name == "mod");
        modules.insert(module, code(&fs::read_to_string(file).unwrap()));
    }
    modules.remove(&vec!["lib".to_owned()]);
    let mut uses: BTreeMap<Module, BTreeSet<Module>> = BTreeMap::new();
    let mut problems = BTreeSet::new();
    for (from, code) in &modules {
        for to in paths_of(code)
            .iter()
            .map(|path| module_at(path, from, &modules))
        {
            let common = zip(from, &to)
                .take_while(|(one, other)| one == other)
                .count();
            // A module and those within it belong together.
            if common == from.len() || common == to.len() {
                continue;
            }
            if floor(&to) < floor(from) {
                problems.insert(format!("upward: {} uses {}", from.join("/"), to.join("/")));
            }
            uses.entry(from[..=common].to_vec())
                .or_default()
                .insert(to[..=common].to_vec());
        }
    }
    for module in uses.keys() {
        let mut circle = reached(module, &uses);
        circle.retain(|other| reached(other, &uses).contains(module));
        if !circle.is_empty() {
            let names: Vec<_> = circle.iter().map(|module| module.join("/")).collect();
            problems.insert(format!("circle: {}", names.join(", ")));
        }
    }
    let arrows: usize = uses.values().map(BTreeSet::len).sum();
    let problems = Vec::from_iter(problems).join("\n");
    assert!(
        modules.len() > 80 && arrows > 150 && problems.is_empty(),
        "{arrows} arrows\n{problems}"
    );
}
