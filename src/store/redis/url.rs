//! What of a URL may be shown, and which URLs cannot be told apart from a password.
//!
//! 1. A user name and a password stand before the host, and may hold any character. Where a `/`, `?` or `#` in them is not
//!    percent-encoded, what follows is read as something else, and what comes before it as the host.
//! 2. So of a broken URL only the scheme and the host are shown, and only where nothing else can stand in their place.

/// Those of Redis, and others that are written by mistake.
const SCHEMES: [&str; 10] =
    ["redis", "rediss", "valkey", "valkeys", "redis+unix", "valkey+unix", "unix", "http", "https", "tcp"];

/// The scheme and the host, as in `redis://…@host…`, if they certainly are that.
pub(super) fn shown(url: &str) -> Option<String> {
    let (scheme, rest) = url.split_once("://")?;
    if !SCHEMES.contains(&scheme) || is_ambiguous(url) {
        return None;
    }
    let (authority, path) = split_authority(rest);
    let (before, place) = authority.rsplit_once('@').map_or(("", authority), |(_, place)| ("…@", place));
    let host = host(place)?;
    let behind = if place == host && path.is_empty() { "" } else { "…" };
    Some(format!("{scheme}://{before}{host}{behind}"))
}

/// What stands before the port, brackets included.
fn host(place: &str) -> Option<&str> {
    let end = place.find(']').map_or_else(|| place.find(':').unwrap_or(place.len()), |end| end + 1);
    let (host, port) = place.split_at(end);
    let literal = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
    let is_of_host = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
    let is_host = match literal {
        Some(literal) => literal.chars().all(|c| c == ':' || is_of_host(c)),
        None => host.chars().all(is_of_host),
    };
    let is_port =
        port.is_empty() || port.strip_prefix(':').is_some_and(|port| port.chars().all(|c| c.is_ascii_digit()));
    (is_host && is_port && !host.is_empty()).then_some(host)
}

/// Whether what looks like the host and what follows it may be the beginning of a user name or a password.
pub(super) fn is_ambiguous(url: &str) -> bool {
    // Those that parsers of URLs leave out.
    let url = url.replace(['\t', '\n', '\r'], "");
    let Some((_, rest)) = url.split_once("//") else { return url.contains('@') };
    let (authority, behind) = split_authority(rest);
    !authority.is_empty() && behind.contains('@')
}

fn split_authority(rest: &str) -> (&str, &str) {
    rest.split_at(rest.find(['/', '?', '#']).unwrap_or(rest.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_certainly_a_host_is_shown() {
        for (url, expected) in [
            ("redis://10.0.0.1/db", Some("redis://10.0.0.1…")),
            ("http://localhost", Some("http://localhost")),
            ("rediss://shop:s3cr3t@redis-1.internal:6380/0", Some("rediss://…@redis-1.internal…")),
            ("redis://shop:s3@cr3t@host", Some("redis://…@host")),
            ("redis://:s3cr3t@[2001:db8::1]:6379/x", Some("redis://…@[2001:db8::1]…")),
            ("redis://[::1]", Some("redis://[::1]")),
            ("redis+unix://user:s3cr3t@localhost/tmp/redis.sock", Some("redis+unix://…@localhost…")),
            ("redis://shop:s3cr3t?p4ss@host", None),
            ("redis://shop:12/s3cr3t@host", None),
            ("redis://shop:s3cr3t", None),
            ("redis://shop:s3cr3t@", None),
            ("redis://shop:s3cr3t@host:port", None),
            ("redis://shop:s3cr3t@[::1", None),
            ("redis://shop:s3cr3t@[::1]6379", None),
            ("redis://shop:s3cr3t@ho st", None),
            ("shop:s3://cr3t", None),
            ("default:s3cr3t", None),
            ("s3cr3t@host", None),
            ("redis:shop:s3cr3t@host", None),
            ("", None),
        ] {
            assert_eq!(shown(url).as_deref(), expected, "{url}");
        }
    }

    #[test]
    fn a_password_that_ends_the_authority_early_is_found() {
        for url in
            ["redis://shop:1234?p4ss@host", "redis:/\t/shop:1234/p4ss@host", " REDIS://shop:1#2@host", "redis:a@b"]
        {
            assert!(is_ambiguous(url), "{url}");
        }
        for url in ["redis://a@b@host:1/0", "redis+unix:///tmp/redis.sock?pass=p@ss", "redis://host/0", "host"] {
            assert!(!is_ambiguous(url), "{url}");
        }
    }
}
