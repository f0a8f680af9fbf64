//! What of a URL may be shown, and which URLs cannot be told apart from a password.
//!
//! 1. A user name and a password stand before the host, and may hold any character. Where a `/`, `?` or `#` in them is not
//!    percent-encoded, what follows is read as something else, and what comes before it as the host.
//! 2. So of a broken URL only the host is shown, and only where nothing else can stand in its place.

/// The schemes that the client knows.
const SCHEMES: [&str; 7] = ["redis", "rediss", "valkey", "valkeys", "redis+unix", "valkey+unix", "unix"];

/// The host, if it certainly is one.
pub(super) fn host(url: &str) -> Option<&str> {
    let (scheme, rest) = url.split_once("://")?;
    if !SCHEMES.contains(&scheme) || is_ambiguous(url) {
        return None;
    }
    let (authority, _) = split_authority(rest);
    let place = authority.rsplit_once('@').map_or(authority, |(_, place)| place);
    let (host, port) = match place.strip_prefix('[').and_then(|place| place.split_once(']')) {
        Some((host, port)) => (host, port.strip_prefix(':').or_else(|| port.is_empty().then_some(""))?),
        None => place.split_once(':').unwrap_or((place, "")),
    };
    let is_literal = place.starts_with('[');
    let is_of_host = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_') || is_literal && c == ':';
    let is_host = !host.is_empty() && host.chars().all(is_of_host) && port.chars().all(|c| c.is_ascii_digit());
    is_host.then_some(host)
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
        for (url, shown) in [
            ("redis://10.0.0.1/db", Some("10.0.0.1")),
            ("rediss://shop:s3cr3t@redis-1.internal:6380/0", Some("redis-1.internal")),
            ("redis://shop:s3@cr3t@host:6379", Some("host")),
            ("redis://:s3cr3t@[2001:db8::1]:6379/x", Some("2001:db8::1")),
            ("redis://[::1]", Some("::1")),
            ("redis+unix://user:s3cr3t@localhost/tmp/redis.sock", Some("localhost")),
            ("redis://shop:s3cr3t?p4ss@host", None),
            ("redis://shop:12/s3cr3t@host", None),
            ("redis://shop:s3cr3t", None),
            ("redis://shop:s3cr3t@", None),
            ("redis://shop:s3cr3t@host:port", None),
            ("redis://shop:s3cr3t@[::1", None),
            ("redis://shop:s3cr3t@[::1]6379", None),
            ("redis://shop:s3cr3t@ho st", None),
            ("http://127.0.0.1", None),
            ("default:s3cr3t", None),
            ("s3cr3t@host", None),
            ("redis:shop:s3cr3t@host", None),
            ("", None),
        ] {
            assert_eq!(host(url), shown, "{url}");
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
