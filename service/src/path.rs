//! Paths: how applications read them, and the patterns of rules.

use anyhow::{Result, ensure};

/// The two readings of a path. An application decodes it first, or splits it first.
pub(crate) fn readings(path: &str) -> [String; 2] {
    [split_first(path), decoded_first(path)]
}

/// Decodes each segment. An encoded slash stays one.
fn split_first(path: &str) -> String {
    path.split('/').map(|segment| decoded(segment).replace('/', "%2F")).collect::<Vec<_>>().join("/")
}

/// Decodes the path, and resolves `.`, `..` and empty segments.
pub(crate) fn decoded_first(path: &str) -> String {
    let mut segments = Vec::new();
    let decoded = decoded(path);
    for segment in decoded.split('/') {
        match segment {
            "" | "." => {}
            ".." => drop(segments.pop()),
            segment => segments.push(segment),
        }
    }
    format!("/{}", segments.join("/"))
}

fn decoded(text: &str) -> String {
    percent_encoding::percent_decode_str(text).decode_utf8_lossy().into_owned()
}

/// A pattern of a rule, as the router takes it.
pub(crate) fn pattern(text: &str) -> Result<String> {
    ensure!(text.starts_with('/'), "its path {text:?} must begin with /");
    let outside = text.split('{').enumerate().map(|(at, part)| match at {
        0 => part,
        _ => part.split_once('}').map_or("", |(_, outside)| outside),
    });
    ensure!(
        !outside.into_iter().any(|part| part.contains([':', '*', '<', '}'])),
        "its path {text:?} has a :, * or < outside of braces: write /page/{{number}} or /files/{{*path}}"
    );
    Ok(decoded_first(text))
}

/// Whether a pattern has a value of this name.
pub(crate) fn has_value(pattern: &str, name: &str) -> bool {
    pattern.contains(&format!("{{{name}}}")) || pattern.contains(&format!("{{*{name}}}"))
}
