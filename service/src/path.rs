//! Paths: how applications read them, and the patterns of rules.
//!
//! In a segment, an encoded slash is `%2f`, and an encoded `%` is `%25`: so a segment has no slash,
//! and no two texts are one segment.

use anyhow::{Result, ensure};

/// The readings of a path, of which several may be equal. Some applications drop the parameters of
/// segments, such as `;session=1`.
pub(crate) fn readings(path: &str) -> Vec<String> {
    let mut readings = readings_of_text(path).to_vec();
    if path.contains(';') {
        readings.extend(readings_of_text(&without_parameters(path)));
    }
    readings
}

/// An application decodes a path first, or splits it first, and resolves `.` and `..`, or does not.
/// A parser of URLs takes `\` for a slash when it resolves.
fn readings_of_text(path: &str) -> [String; 4] {
    let split = || path.split('/').map(|segment| escaped(&decoded(segment)));
    let split_at_both = path
        .split(['/', '\\'])
        .map(|segment| escaped(&decoded(segment)));
    let decoded = decoded(path);
    let parts = || {
        decoded
            .split('/')
            .map(|segment| segment.replace('%', "%25"))
    };
    [
        joined(split()),
        joined(parts()),
        resolved(split_at_both),
        resolved(parts().filter(|part| !part.is_empty())),
    ]
}

/// The parameters of a segment (RFC 3986, section 3.3) begin at its first semicolon.
fn without_parameters(path: &str) -> String {
    let segments = path
        .split('/')
        .map(|segment| segment.split(';').next().unwrap_or_default().to_owned());
    joined(segments)
}

fn joined(segments: impl Iterator<Item = String>) -> String {
    segments.collect::<Vec<_>>().join("/")
}

/// Without the segments `.` and `..`.
fn resolved(segments: impl Iterator<Item = String>) -> String {
    let mut kept: Vec<String> = Vec::new();
    for segment in segments {
        match &*segment {
            "." => {}
            ".." => drop(kept.pop()),
            _ => kept.push(segment),
        }
    }
    // A path begins with a slash, so its first segment is empty.
    format!("/{}", kept.join("/").trim_start_matches('/'))
}

fn decoded(text: &str) -> String {
    percent_encoding::percent_decode_str(text)
        .decode_utf8_lossy()
        .into_owned()
}

fn escaped(segment: &str) -> String {
    segment.replace('%', "%25").replace('/', "%2f")
}

/// The text of a segment, or of several.
pub(crate) fn text_of(segment: &str) -> String {
    segment.replace("%2f", "/").replace("%25", "%")
}

/// A pattern of a rule, as the router takes it.
pub(crate) fn pattern(text: &str) -> Result<String> {
    ensure!(text.starts_with('/'), "its path {text:?} must begin with /");
    ensure!(
        !text.contains(['?', '#', '\\']),
        "its path {text:?} has a ?, # or \\, which no path has"
    );
    let segments = text.split('/').skip(1);
    ensure!(
        segments
            .clone()
            .all(|segment| segment != "." && segment != ".."),
        "its path {text:?} has a segment . or .., which no request has"
    );
    let outside = text.split('{').enumerate().map(|(at, part)| match at {
        0 => part,
        _ => part.split_once('}').map_or("", |(_, outside)| outside),
    });
    ensure!(
        !outside
            .into_iter()
            .any(|part| part.contains([':', '*', '<', '}'])),
        "its path {text:?} has a :, * or < outside of braces: write /page/{{number}} or /files/{{*path}}"
    );
    let [.., resolved] = readings_of_text(text);
    Ok(resolved)
}

/// True if a pattern has a value of this name.
pub(crate) fn has_value(pattern: &str, name: &str) -> bool {
    pattern.contains(&format!("{{{name}}}")) || pattern.contains(&format!("{{*{name}}}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_read_as_applications_read_it() {
        for (path, expected) in [
            ("/login", ["/login", "/login", "/login", "/login"]),
            ("//x/", ["//x/", "//x/", "/x/", "/x"]),
            ("/%6cogin/.", ["/login/.", "/login/.", "/login", "/login"]),
            ("/a%2Fb/../c", ["/a%2fb/../c", "/a/b/../c", "/c", "/a/c"]),
            ("/x/%2e%2E/y", ["/x/../y", "/x/../y", "/y", "/y"]),
            ("/x\\..\\y", ["/x\\..\\y", "/x\\..\\y", "/y", "/x\\..\\y"]),
            ("/a%252Fb", ["/a%252Fb", "/a%252Fb", "/a%252Fb", "/a%252Fb"]),
            ("/../..", ["/../..", "/../..", "/", "/"]),
        ] {
            assert_eq!(readings_of_text(path), expected, "{path}");
            assert_eq!(readings(path)[..4], expected, "{path}");
        }
        for path in [
            "/login;x=1",
            "/login;",
            "/x;y/..;z/login",
            "/;a/login;x/",
            "/%6cogin;x=1;y=2",
        ] {
            assert!(
                readings(path).iter().any(|reading| reading == "/login"),
                "{path}"
            );
        }
        assert_eq!(readings("/a/b").len(), 4);
        assert_eq!(
            ["a%252Fb", "a%2fb", "a%25"].map(text_of),
            ["a%2Fb", "a/b", "a%"]
        );
    }
}
