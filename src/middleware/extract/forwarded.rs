//! The addresses in `X-Forwarded-For` and `Forwarded`, from right to left.
//!
//! Every proxy appends an element on the right, so only the right end comes from a known proxy.
//! Text to the left of an element does not change how that element is read. A client's text is on
//! the left, so the client cannot change how the known proxy's element is read. Empty elements are
//! ignored (RFC 9110, section 5.6.1).

use std::{
    iter,
    net::{IpAddr, SocketAddr},
};

use http::{HeaderMap, HeaderName, HeaderValue};

/// The most bytes to read, from the right end: 32 hops of 512 bytes each. An element fits into 512
/// bytes, since even a host name has at most half as many.
const MAX_BYTES: usize = 32 * 512;

/// A header element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Hop {
    Address(IpAddr),
    /// The element has no readable address.
    Unknown,
    /// The element begins too far to the left to be read completely.
    TooFar,
}

/// The elements of all header lines, from last to first, without empty elements.
pub(super) fn hops<'a>(
    headers: &'a HeaderMap,
    name: &HeaderName,
    style: Style,
) -> impl Iterator<Item = Hop> + use<'a> {
    let mut lines = headers
        .get_all(name)
        .into_iter()
        .rev()
        .map(HeaderValue::as_bytes);
    let mut rest = None;
    let mut bytes_left = MAX_BYTES;
    let elements = iter::from_fn(move || {
        let line: &[u8] = rest.take().or_else(|| lines.next())?;
        let near = &line[line.len().saturating_sub(bytes_left)..];
        let comma = match style {
            Style::Rfc7239 => last_outside_quotes(near, b','),
            _ => near.iter().rposition(|byte| *byte == b','),
        };
        if comma.is_none() && near.len() < line.len() {
            bytes_left = 0;
            return Some(Some(Hop::TooFar));
        }
        let element = &near[comma.map_or(0, |at| at + 1)..];
        bytes_left = bytes_left.saturating_sub(element.len() + 1);
        rest = comma.map(|_| &line[..line.len() - element.len() - 1]);
        let is_empty = element.trim_ascii().is_empty();
        Some((!is_empty).then(|| style.address(element).map_or(Hop::Unknown, Hop::Address)))
    });
    elements.flatten()
}

/// How a header writes addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Style {
    /// `X-Forwarded-For`: addresses between commas.
    Plain,
    /// `Forwarded` (RFC 7239): elements between commas, parameters between semicolons. Inside
    /// quotes, these characters do not separate anything.
    Rfc7239,
    /// One address.
    Single,
    /// One address, a colon and a port, even after an IPv6 address without brackets. If it were
    /// read as [`Single`](Self::Single), the port would become part of such an address.
    SingleWithPort,
}

impl Style {
    /// The address in an element or single-address header. All styles but
    /// [`SingleWithPort`](Self::SingleWithPort) share one grammar.
    pub(super) fn address(self, element: &[u8]) -> Option<IpAddr> {
        let node = match self {
            Self::Rfc7239 => for_parameter(element)?,
            _ => element.trim_ascii().to_vec(),
        };
        let node = str::from_utf8(&node).ok()?;
        let Self::SingleWithPort = self else {
            return parse_node(node);
        };
        let (address, port) = node.rsplit_once(':')?;
        let v6 = format!("[{address}]:{port}").parse();
        v6.or_else(|_| node.parse::<SocketAddr>())
            .map(|address| address.ip())
            .ok()
    }
}

/// Parses an address, with or without brackets and port. The port may be a name (RFC 7239, section
/// 6.3). A node that is a name, such as `unknown` or `_hidden`, has no address.
fn parse_node(node: &str) -> Option<IpAddr> {
    if let Ok(address) = node.parse() {
        return Some(address);
    }
    if let Ok(address) = node.parse::<SocketAddr>() {
        return Some(address.ip());
    }
    let (address, port) = node.rsplit_once(":_").unwrap_or((node, "none"));
    if port.is_empty() || !port.bytes().all(may_be_in_name) {
        return None;
    }
    match address.strip_prefix('[') {
        Some(rest) => rest.strip_suffix(']')?.parse().map(IpAddr::V6).ok(),
        None => address.parse().map(IpAddr::V4).ok(),
    }
}

fn may_be_in_name(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"._-".contains(&byte)
}

/// The value of the element's only `for` parameter, unquoted.
fn for_parameter(mut element: &[u8]) -> Option<Vec<u8>> {
    let mut found = None;
    loop {
        let semicolon = last_outside_quotes(element, b';');
        let parameter = element[semicolon.map_or(0, |at| at + 1)..].trim_ascii();
        // RFC 7239 allows empty parameters.
        if !parameter.is_empty() {
            let equals = parameter.iter().position(|byte| *byte == b'=')?;
            let name = &parameter[..equals];
            let value = &parameter[equals + 1..];
            let value = unquote(value.trim_ascii())?;
            if name.trim_ascii().eq_ignore_ascii_case(b"for") && found.replace(value).is_some() {
                return None;
            }
        }
        match semicolon {
            Some(at) => element = &element[..at],
            None => return found,
        }
    }
}

/// Unquotes a quoted string (RFC 9110, section 5.6.4).
fn unquote(value: &[u8]) -> Option<Vec<u8>> {
    if !value.contains(&b'"') {
        return Some(value.to_vec());
    }
    let mut inside = value.strip_prefix(b"\"")?.strip_suffix(b"\"")?.iter();
    let mut plain = Vec::with_capacity(inside.len());
    while let Some(byte) = inside.next() {
        plain.push(match byte {
            b'\\' => *inside.next()?,
            b'"' => return None,
            byte => *byte,
        });
    }
    Some(plain)
}

/// The index of the last `separator` outside quotes, read from the right.
fn last_outside_quotes(text: &[u8], separator: u8) -> Option<usize> {
    let mut quoted = false;
    for (at, byte) in text.iter().enumerate().rev() {
        if *byte == b'"' {
            let before = text[..at].iter().rev();
            let is_escaped = before.take_while(|byte| **byte == b'\\').count() % 2 == 1;
            quoted = !quoted || is_escaped;
        } else if *byte == separator && !quoted {
            return Some(at);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    const X: HeaderName = HeaderName::from_static("x");

    fn read(style: Style, lines: &[&str]) -> Vec<Option<String>> {
        let mut headers = HeaderMap::new();
        for line in lines {
            headers.append("x", line.parse().unwrap());
        }
        let address = |hop| {
            if let Hop::Address(address) = hop {
                Some(address.to_string())
            } else {
                None
            }
        };
        hops(&headers, &X, style).map(address).collect()
    }

    fn some(addresses: &[&str]) -> Vec<Option<String>> {
        addresses
            .iter()
            .map(|address| Some((*address).to_owned()))
            .collect()
    }

    #[test]
    fn all_lines_are_read_from_the_right_end_of_the_last() {
        let lines = ["192.0.2.1, 192.0.2.2", "192.0.2.3"];
        assert_eq!(
            read(Style::Plain, &lines),
            some(&["192.0.2.3", "192.0.2.2", "192.0.2.1"])
        );
    }

    #[test]
    fn every_way_to_write_an_address_is_read() {
        for (node, address) in [
            ("192.0.2.1", "192.0.2.1"),
            ("192.0.2.1:443", "192.0.2.1"),
            ("2001:db8::1", "2001:db8::1"),
            ("[2001:db8::1]", "2001:db8::1"),
            ("[2001:db8::1]:443", "2001:db8::1"),
            ("192.0.2.1:_p", "192.0.2.1"),
            ("[2001:db8::1]:_a.b-c_1", "2001:db8::1"),
            ("::ffff:192.0.2.1", "::ffff:192.0.2.1"),
        ] {
            assert_eq!(read(Style::Plain, &[node]), some(&[address]), "{node}");
            assert_eq!(
                read(Style::Rfc7239, &[&format!("proto=http; For=\"{node}\"")]),
                some(&[address]),
                "{node}"
            );
        }
    }

    #[test]
    fn a_node_without_an_address_is_unknown() {
        for node in [
            "unknown",
            "_hidden",
            "192.0.2.1:99999",
            "192.0.2",
            "fe80::1%eth0",
            "example.org",
            "[192.0.2.1]",
            "192.0.2.1:_",
            "192.0.2.1:_p:1",
            "192.0.2.1:_p/q",
            "192.0.2.1:_p q",
            "2001:db8::1:_p",
            "_hidden:_p",
            "[192.0.2.1]:_p",
        ] {
            assert_eq!(read(Style::Plain, &[node]), [None], "{node}");
            assert_eq!(
                read(Style::Rfc7239, &[&format!("for=\"{node}\"")]),
                [None],
                "{node}"
            );
        }
        for element in [
            "for=\"\"",
            "for=",
            "by=192.0.2.1",
            "for=192.0.2.1;for=192.0.2.2",
            "for",
            "for=\"192.0.2.1",
            "for=\"192\\\".0.2.1\"",
        ] {
            assert_eq!(read(Style::Rfc7239, &[element]), [None], "{element}");
        }
    }

    /// Empty elements do not change other elements, and count towards [`MAX_BYTES`].
    #[test]
    fn empty_elements_are_ignored() {
        for lines in [
            &["192.0.2.1, 192.0.2.2,"][..],
            &["192.0.2.1,, ,192.0.2.2", "", " , "],
            &[",192.0.2.1", ",192.0.2.2\t,"],
        ] {
            assert_eq!(
                read(Style::Plain, lines),
                some(&["192.0.2.2", "192.0.2.1"]),
                "{lines:?}"
            );
            let named: Vec<String> = lines
                .iter()
                .map(|line| line.replace("192", "for=192"))
                .collect();
            let named: Vec<&str> = named.iter().map(String::as_str).collect();
            assert_eq!(
                read(Style::Rfc7239, &named),
                some(&["192.0.2.2", "192.0.2.1"]),
                "{lines:?}"
            );
        }
        assert_eq!(read(Style::Plain, &["", ","]), []);
        let mut headers = HeaderMap::new();
        headers.append(
            "x",
            format!("192.0.2.1{}", ",".repeat(MAX_BYTES))
                .parse()
                .unwrap(),
        );
        assert_eq!(hops(&headers, &X, Style::Plain).next(), Some(Hop::TooFar));
    }

    #[test]
    fn the_port_of_a_header_that_always_has_one_is_no_part_of_the_address() {
        let read = |value: &str| {
            Style::SingleWithPort
                .address(value.as_bytes())
                .map(|address| address.to_string())
        };
        for (value, address) in [
            ("203.0.113.7:46532", "203.0.113.7"),
            ("2600:300:f:abcd::9:9985", "2600:300:f:abcd::9"),
            ("2600:300:f:abcd:1:2:3:4:9985", "2600:300:f:abcd:1:2:3:4"),
            ("2600:300:f:abcd:::80", "2600:300:f:abcd::"),
            ("[2600:300:f:abcd::9]:9985", "2600:300:f:abcd::9"),
            ("::ffff:203.0.113.7:46532", "::ffff:203.0.113.7"),
        ] {
            assert_eq!(read(value).as_deref(), Some(address), "{value}");
        }
        let without = [
            "203.0.113.7",
            "203.0.113.7:",
            "203.0.113.7:+80",
            "203.0.113.7:65536",
            "2600:300::beef",
            "[::9]",
            ":80",
        ];
        assert!(
            without.iter().all(|value| read(value).is_none()),
            "{:?}",
            without.map(read)
        );
    }

    /// A client cannot make the server read more than [`MAX_BYTES`].
    #[test]
    fn an_element_too_far_to_the_left_is_not_read() {
        let near = "for=192.0.2.1, for=192.0.2.2";
        let hops = |line: String| {
            let mut headers = HeaderMap::new();
            headers.append("x", "for=192.0.2.3".parse().unwrap());
            headers.append("x", line.parse().unwrap());
            super::hops(&headers, &X, Style::Rfc7239)
                .take(4)
                .collect::<Vec<_>>()
        };
        let [first, second, third] =
            [[192, 0, 2, 2], [192, 0, 2, 1], [192, 0, 2, 3]].map(|ip| Hop::Address(ip.into()));
        assert_eq!(hops(near.to_owned()), [first, second, third]);
        for left in [
            "x".repeat(10 * MAX_BYTES),
            "\\".repeat(10 * MAX_BYTES),
            "\"".repeat(10 * MAX_BYTES),
        ] {
            assert_eq!(
                hops(format!("{left}, {near}")),
                [first, second, Hop::TooFar, Hop::TooFar]
            );
        }
        // Exact to the byte: a line of [`MAX_BYTES`] bytes is read, and leaves none for the next
        // line.
        let full = |bytes: usize| {
            format!(
                "for=192.0.2.1;ext={}",
                "x".repeat(bytes - "for=192.0.2.1;ext=".len())
            )
        };
        assert_eq!(hops(full(MAX_BYTES)), [second, Hop::TooFar]);
        assert_eq!(hops(full(MAX_BYTES + 1)), [Hop::TooFar, Hop::TooFar]);
    }

    #[test]
    fn quotes_hide_separators() {
        let line = r#"for=192.0.2.1;host="a,b;for=6.6.6.6\"", for="192.0.2.2""#;
        assert_eq!(
            read(Style::Rfc7239, &[line]),
            some(&["192.0.2.2", "192.0.2.1"])
        );
    }

    /// If the header were read from the left, the client's open quote would invert the proxy's
    /// quotes. The host name inside them, which the client has chosen, would then be read as an
    /// element.
    #[test]
    fn an_open_quote_on_the_left_does_not_change_the_right() {
        let line = r#"for="x, for=192.0.2.1;host="a,for=6.6.6.6,b""#;
        assert_eq!(
            read(Style::Rfc7239, &[line])[0],
            Some("192.0.2.1".to_owned())
        );
    }
}
