//! From the question of a proxy to the request that the proxy asks about.
//!
//! 1. Only a proxy may ask.
//! 2. The method and the path are read from exactly one source. A proxy passes on the headers that
//!    it does not overwrite, so a client could write a path of its own choice into any other
//!    source.
//! 3. The headers with the method and the path are removed, so they cannot become a key.

use axum::http::{HeaderMap, Method, StatusCode, Uri, request::Parts, uri::PathAndQuery};
use tower_sliding_window::{
    ConfigError, PeerIp,
    extract::{AddressList, KeyError},
};

use crate::file::Ask;

/// The path that `as-sent` questions have in front.
const PREFIX: &str = "/auth";

/// The headers from which proxies and applications take a method or a path.
const REMOVED: [&str; 6] = [
    "x-forwarded-method",
    "x-forwarded-uri",
    "x-original-method",
    "x-original-uri",
    "x-original-url",
    "x-rewrite-url",
];

/// The proxies that may ask, and where the answers read the method and the path.
pub(crate) struct Questions {
    proxies: AddressList,
    ask: Ask,
}

impl Questions {
    pub(crate) fn from(proxies: &[String], ask: Ask) -> Result<Self, ConfigError> {
        Ok(Self {
            proxies: AddressList::new(proxies)?,
            ask,
        })
    }

    /// Turns a question into the request that the proxy asks about.
    pub(crate) fn read(&self, parts: &mut Parts) -> Result<(), KeyError> {
        if !self.proxies.contains(PeerIp::new().address(parts)?) {
            return Err(KeyError::invalid("peer", "no proxy of this service")
                .with_status(StatusCode::FORBIDDEN));
        }
        match self.ask {
            Ask::Forwarded => read_pair(parts, "x-forwarded-method", "x-forwarded-uri")?,
            Ask::Original => read_pair(parts, "x-original-method", "x-original-uri")?,
            Ask::AsSent => {
                let path = parts
                    .uri
                    .path_and_query()
                    .map_or("", PathAndQuery::as_str)
                    .strip_prefix(PREFIX);
                parts.uri = path_of("path", path.unwrap_or_default().as_bytes())?;
            }
        }
        for name in REMOVED {
            parts.headers.remove(name);
        }
        Ok(())
    }
}

/// Reads the method and the path from these two headers.
fn read_pair(parts: &mut Parts, method: &'static str, path: &'static str) -> Result<(), KeyError> {
    let read = Method::from_bytes(single_line(&parts.headers, method)?);
    parts.method = read.map_err(|_| KeyError::invalid(method, "no method"))?;
    parts.uri = path_of(path, single_line(&parts.headers, path)?)?;
    Ok(())
}

/// The value of a header that must be present exactly once.
fn single_line<'a>(headers: &'a HeaderMap, name: &'static str) -> Result<&'a [u8], KeyError> {
    let mut lines = headers.get_all(name).into_iter();
    match (lines.next(), lines.next()) {
        (Some(line), None) => Ok(line.as_bytes()),
        (None, _) => Err(KeyError::missing(name)),
        _ => Err(KeyError::invalid(name, "repeated")),
    }
}

/// A path with its query, as a request to an application has it.
fn path_of(name: &'static str, text: &[u8]) -> Result<Uri, KeyError> {
    // The parser of `http` accepts a path without a slash at its start, and drops a fragment.
    let path = PathAndQuery::try_from(text)
        .ok()
        .filter(|_| text.starts_with(b"/") && !text.contains(&b'#'));
    path.map(Uri::from)
        .ok_or_else(|| KeyError::invalid(name, "no path"))
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use axum::http::{HeaderValue, Request};

    use super::*;

    const PROXY: &str = "10.0.0.1";
    const FORWARDED: [&str; 2] = ["x-forwarded-method", "x-forwarded-uri"];
    const ORIGINAL: [&str; 2] = ["x-original-method", "x-original-uri"];

    fn question(method: &str, uri: &str, peer: &str, lines: &[(&'static str, &str)]) -> Parts {
        let request = Request::builder()
            .method(method)
            .uri(uri)
            .extension(SocketAddr::new(peer.parse().unwrap(), 1));
        let (mut parts, ()) = request.body(()).unwrap().into_parts();
        for (name, value) in lines {
            parts
                .headers
                .append(*name, HeaderValue::from_bytes(value.as_bytes()).unwrap());
        }
        parts
    }

    /// The method, the path and the headers that a question leads to, or its error and status.
    fn read(ask: Ask, mut parts: Parts) -> Result<String, (String, u16)> {
        let proxies = ["10.0.0.0/28", "2001:db8:ffff::/64"].map(str::to_owned);
        let questions = Questions::from(&proxies, ask).unwrap();
        questions
            .read(&mut parts)
            .map_err(|error| (error.to_string(), error.status().as_u16()))?;
        Ok(format!(
            "{} {} {:?}",
            parts.method,
            parts.uri,
            parts.headers.keys().collect::<Vec<_>>()
        ))
    }

    fn asked(method: &str, path: &str) -> Parts {
        question(
            "GET",
            "/auth",
            PROXY,
            &[(FORWARDED[0], method), (FORWARDED[1], path)],
        )
    }

    fn refused(text: &str, status: u16) -> Result<String, (String, u16)> {
        Err((text.to_owned(), status))
    }

    #[test]
    fn a_pair_has_the_method_the_path_and_the_query() {
        for (method, path) in [
            ("POST", "/login"),
            ("GET", "/search?q=a%20b&page=2"),
            ("DELETE", "//double"),
            ("PURGE", "/a/../b;c=d"),
            ("HEAD", "/%E4%BD%A0?%2F"),
        ] {
            assert_eq!(
                read(Ask::Forwarded, asked(method, path)),
                Ok(format!("{method} {path} []"))
            );
        }
        assert!(
            read(
                Ask::Forwarded,
                asked("GET", &format!("/search?q={}", "a".repeat(20_000)))
            )
            .is_ok()
        );
    }

    /// As Envoy asks.
    #[test]
    fn a_request_as_it_was_sent_loses_its_prefix() {
        for (uri, path) in [
            ("/auth/login?a=b", "/login?a=b"),
            ("/auth/", "/"),
            ("/auth/auth/x", "/auth/x"),
            ("http://app/auth/login", "/login"),
        ] {
            assert_eq!(
                read(Ask::AsSent, question("PATCH", uri, PROXY, &[])),
                Ok(format!("PATCH {path} []")),
                "{uri}"
            );
        }
        for uri in ["/login", "/authentic", "/auth", "/auth?a", "*"] {
            assert_eq!(
                read(Ask::AsSent, question("OPTIONS", uri, PROXY, &[])),
                refused("path: no path", 400),
                "{uri}"
            );
        }
    }

    /// A proxy passes on each header that it does not write.
    #[test]
    fn no_other_header_chooses_the_route_or_becomes_a_key() {
        let value = |name: &str| {
            if name.ends_with("method") {
                "GET"
            } else {
                "/free"
            }
        };
        for forged in REMOVED {
            for pair in [FORWARDED, ORIGINAL]
                .into_iter()
                .filter(|pair| !pair.contains(&forged))
            {
                let ask = if pair == FORWARDED {
                    Ask::Forwarded
                } else {
                    Ask::Original
                };
                let lines = [
                    (pair[0], "POST"),
                    (pair[1], "/login"),
                    (forged, value(forged)),
                    (forged, value(forged)),
                    ("x", "1"),
                ];
                let read = read(ask, question("GET", "/auth", PROXY, &lines));
                assert_eq!(read.as_deref(), Ok(r#"POST /login ["x"]"#), "{forged}");
            }
            let sent = question("POST", "/auth/login", PROXY, &[(forged, value(forged))]);
            assert_eq!(
                read(Ask::AsSent, sent).as_deref(),
                Ok("POST /login []"),
                "{forged}"
            );
        }
    }

    #[test]
    fn a_question_without_one_readable_pair_gets_a_400() {
        let [method, path] = FORWARDED;
        for (lines, problem) in [
            (&[][..], "x-forwarded-method: missing"),
            (&[(method, "GET")], "x-forwarded-uri: missing"),
            (&[(path, "/")], "x-forwarded-method: missing"),
            (
                &[(method, "GET"), (path, "/"), (path, "/")],
                "x-forwarded-uri: repeated",
            ),
            (
                &[(method, "GET"), (method, "GET"), (path, "/")],
                "x-forwarded-method: repeated",
            ),
            (
                &[(ORIGINAL[0], "GET"), (ORIGINAL[1], "/")],
                "x-forwarded-method: missing",
            ),
            (
                &[(method, "GET"), (ORIGINAL[1], "/")],
                "x-forwarded-uri: missing",
            ),
        ] {
            let read = read(Ask::Forwarded, question("GET", "/auth", PROXY, lines));
            assert_eq!(read, refused(problem, 400), "{lines:?}");
        }
        let no_paths = [
            "",
            "*",
            "login",
            "?a",
            "http://app/login",
            "https://app/",
            "app:80",
            "/a#b",
            "#",
            "/a b",
            "/a, /b",
            "/a\tb",
            " /a",
            "/<",
            "\\a",
        ];
        for path in no_paths {
            assert_eq!(
                read(Ask::Forwarded, asked("GET", path)),
                refused("x-forwarded-uri: no path", 400),
                "{path:?}"
            );
        }
        for method in [
            "", "GET POST", "GET,POST", " GET", "GET ", "G\u{e9}T", "GET/",
        ] {
            let read = read(Ask::Forwarded, asked(method, "/"));
            assert_eq!(
                read,
                refused("x-forwarded-method: no method", 400),
                "{method:?}"
            );
        }
    }

    /// A control character cannot be in a header.
    #[test]
    fn bytes_that_no_path_has_get_a_400() {
        for byte in (0x80..=0xff).chain([b'\t', b' ', b'"', b'<', b'>', b'^', b'`']) {
            let mut parts = asked("GET", "/");
            parts.headers.insert(
                FORWARDED[1],
                HeaderValue::from_bytes(&[b'/', byte]).unwrap(),
            );
            // A path that hyper would take from a client: the text is the same.
            let is_path = Uri::try_from(&[b'/', byte][..]).is_ok();
            assert_eq!(read(Ask::Forwarded, parts).is_ok(), is_path, "{byte:#x}");
        }
    }

    #[test]
    fn a_peer_that_is_no_proxy_gets_a_403_whatever_it_sends() {
        let lines = [
            (FORWARDED[0], "GET"),
            (FORWARDED[1], "/"),
            ("x-forwarded-for", PROXY),
        ];
        for (peer, is_proxy) in [
            ("10.0.0.1", true),
            ("::ffff:10.0.0.1", true),
            ("2001:db8:ffff::7", true),
            ("10.0.0.16", false),
            ("127.0.0.1", false),
            ("::ffff:10.0.0.16", false),
            ("2001:db8::7", false),
        ] {
            for ask in [Ask::Forwarded, Ask::AsSent] {
                let read = read(ask, question("GET", "/auth/", peer, &lines));
                let expected = refused("peer: no proxy of this service", 403);
                assert!(
                    if is_proxy {
                        read.is_ok()
                    } else {
                        read == expected
                    },
                    "{peer}: {read:?}"
                );
            }
        }
        let nobody = Questions::from(&[], Ask::Forwarded).unwrap();
        assert_eq!(
            nobody.read(&mut asked("GET", "/")).unwrap_err().status(),
            403
        );
    }

    /// As `PeerIp` does.
    #[test]
    fn a_peer_without_an_address_gets_a_500() {
        let mut parts = asked("GET", "/");
        parts.extensions.clear();
        assert_eq!(read(Ask::Forwarded, parts).unwrap_err().1, 500);
    }
}
