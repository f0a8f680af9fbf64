//! `RateLimit-Policy` and `RateLimit`: see
//! [`HeaderSets::RATE_LIMIT`](super::HeaderSets::RATE_LIMIT).

use std::{
    fmt::{self, Write},
    mem,
};

use http::{HeaderMap, HeaderName, HeaderValue};
use sfv::{Parser, Version, visitor::Ignored};

use super::{more_after, seconds_rounded_up};
use crate::decision::{Decision, LimitStatus};

pub(super) const POLICY: HeaderName = HeaderName::from_static("ratelimit-policy");
pub(super) const RATE_LIMIT: HeaderName = HeaderName::from_static("ratelimit");

/// The largest Structured Fields Integer (RFC 9651, section 3.3.1).
const MAX_INTEGER: u64 = 999_999_999_999_999;

/// Prepends an item for each limit that clients may see to the items already in the headers.
pub(super) fn write(decision: &Decision, headers: &mut HeaderMap) {
    if decision.visible().is_none() {
        return;
    }
    let mut policies = String::new();
    let mut quotas = String::new();
    let shows_shadow = decision.statuses().all(|status| status.is_shadow);
    for status in decision.statuses() {
        if !status.is_hidden() && (shows_shadow || !status.is_shadow) {
            // Writing to a String cannot fail.
            let _ = write_policy(&mut policies, status);
            let _ = write_quota(&mut quotas, status);
        }
    }
    prepend(headers, POLICY, policies);
    prepend(headers, RATE_LIMIT, quotas);
}

fn write_policy(text: &mut String, status: &LimitStatus) -> fmt::Result {
    let limit = &status.limit;
    write_name(text, status)?;
    write!(text, ";q={}", limit.units().min(MAX_INTEGER))?;
    if limit.is_concurrent() {
        text.push_str(";qu=\"concurrent-requests\"");
    }
    if limit.has_length() && limit.window().as_secs() > 0 {
        write!(text, ";w={}", seconds_rounded_up(limit.window()))?;
    }
    Ok(())
}

fn write_quota(text: &mut String, status: &LimitStatus) -> fmt::Result {
    write_name(text, status)?;
    write!(text, ";r={}", status.remaining().min(MAX_INTEGER))?;
    let more_after = more_after(status);
    if !more_after.is_zero() {
        let seconds = seconds_rounded_up(more_after).min(MAX_INTEGER);
        write!(text, ";t={seconds}")?;
    }
    Ok(())
}

/// Writes the limit's name in quotes. The name does not need escapes: see the rules in
/// [`limit`](crate::limit).
fn write_name(text: &mut String, status: &LimitStatus) -> fmt::Result {
    let separator = if text.is_empty() { "" } else { ", " };
    write!(text, "{separator}\"{}\"", status.limit.name())
}

/// Joins the new items and all lines that the field already has into one list. Lines that are not
/// lists are dropped.
fn prepend(headers: &mut HeaderMap, name: HeaderName, mut items: String) {
    for line in headers.get_all(&name).iter().flat_map(HeaderValue::to_str) {
        if is_list(line) {
            items.extend([", ", line]);
        }
    }
    if let Ok(value) = HeaderValue::try_from(items) {
        headers.insert(name, value);
    }
}

/// True if the line is a non-empty list (RFC 8941, section 3.1). Any other line would make clients
/// ignore the whole field.
fn is_list(line: &str) -> bool {
    let parser = Parser::new(line).with_version(Version::Rfc8941);
    !line.trim_matches(' ').is_empty() && parser.parse_list_with_visitor(&mut Ignored).is_ok()
}

/// Splits at separators outside quoted strings.
pub(crate) fn split(text: &str, separator: char) -> impl Iterator<Item = &str> {
    let mut is_quoted = false;
    let mut is_escaped = false;
    text.split(move |character| {
        let was_escaped = mem::take(&mut is_escaped);
        match character {
            '\\' if is_quoted && !was_escaped => is_escaped = true,
            '"' if !was_escaped => is_quoted = !is_quoted,
            _ => {}
        }
        character == separator && !is_quoted
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_does_not_begin_with_a_tab_or_end_with_a_comma() {
        assert!(
            ["\t\"a\"", " \t\"a\"", "\"a\",", "\"a\",\t"]
                .iter()
                .all(|line| !is_list(line))
        );
        assert!(is_list(" \"a\"\t,\t\"b\" "));
    }
}
