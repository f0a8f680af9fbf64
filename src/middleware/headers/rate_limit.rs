//! `RateLimit-Policy` and `RateLimit`, as [`HeaderSets::rate_limit`](super::HeaderSets::rate_limit) describes them.

use std::{
    fmt::{self, Write},
    sync::Arc,
    time::Duration,
};

use http::{HeaderMap, HeaderName, HeaderValue};

use super::number::seconds_rounded_up;
use crate::{
    check::{Charge, Check},
    decision::{Decision, LimitStatus},
    secret::{Domain, Secret},
};

pub(super) const POLICY: HeaderName = HeaderName::from_static("ratelimit-policy");
pub(super) const RATE_LIMIT: HeaderName = HeaderName::from_static("ratelimit");

/// The largest Integer of a Structured Field (RFC 9651, section 3.3.1).
const MAX_INTEGER: u64 = 999_999_999_999_999;

/// The domain of the HMAC of partition keys.
const DOMAIN: &[u8] = b"tower-sliding-window partition key v1\0";

impl Decision {
    /// Writes `RateLimit-Policy` and `RateLimit` as a layer with [`HeaderSets::rate_limit`](crate::HeaderSets::rate_limit) does: for
    /// a handler that calls a limiter itself. Layers around the handler add their limits to the list.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use http::HeaderMap;
    /// use tower_sliding_window::{Limit, Limiter, MemoryStore};
    ///
    /// let limiter = Limiter::new(MemoryStore::new());
    /// let decision = limiter.check(&Limit::per_hour("reports", 100), "everybody", 1).await?;
    /// let mut headers = HeaderMap::new();
    /// decision.write_rate_limit(&mut headers);
    /// assert_eq!(headers["ratelimit-policy"], r#""reports";q=100;w=3600"#);
    /// assert_eq!(headers["ratelimit"], r#""reports";r=99;t=3600"#);
    /// # Ok(()) }
    /// ```
    pub fn write_rate_limit(&self, headers: &mut HeaderMap) {
        if let Some(quotas) = Quotas::of(self, Vec::new()) {
            quotas.write(headers);
        }
    }
}

/// The limits of a decision that clients see.
pub(crate) struct Quotas {
    decision: Decision,
    /// One for each status of the decision, or none.
    partition_keys: Vec<PartitionKey>,
}

impl Quotas {
    /// `None` if clients see no limit.
    pub(crate) fn of(decision: &Decision, partition_keys: Vec<PartitionKey>) -> Option<Self> {
        decision.visible()?;
        Some(Self { decision: decision.clone(), partition_keys })
    }

    /// Shows the figures after a settlement.
    pub(crate) fn settle(&mut self, settled: &Decision) {
        self.decision = settled.clone();
    }

    /// Writes the items of the limits in front of those that the headers have.
    pub(crate) fn write(&self, headers: &mut HeaderMap) {
        let (mut policies, mut quotas) = (String::new(), String::new());
        let shows_shadow = self.decision.statuses().all(LimitStatus::is_shadow);
        for (status, partition_key) in self.statuses().filter(|(status, _)| shows_shadow || !status.is_shadow()) {
            // Writing to a String cannot fail.
            let _ = write_policy(&mut policies, status, partition_key);
            let _ = write_quota(&mut quotas, status, partition_key);
        }
        prepend(headers, POLICY, policies);
        prepend(headers, RATE_LIMIT, quotas);
    }

    fn statuses(&self) -> impl Iterator<Item = (&LimitStatus, Option<&PartitionKey>)> {
        let statuses = self.decision.statuses().enumerate().filter(|(_, status)| !status.is_hidden());
        statuses.map(|(index, status)| (status, self.partition_keys.get(index)))
    }
}

fn write_policy(text: &mut String, status: &LimitStatus, partition_key: Option<&PartitionKey>) -> fmt::Result {
    let limit = status.limit();
    write_name(text, status)?;
    write!(text, ";q={}", limit.units().min(MAX_INTEGER))?;
    if let Some(unit) = limit.unit().name_unless_default() {
        write!(text, ";qu=\"{unit}\"")?;
    }
    if limit.window().as_secs() > 0 {
        write!(text, ";w={}", seconds_rounded_up(limit.window()))?;
    }
    write_partition_key(text, partition_key)
}

fn write_quota(text: &mut String, status: &LimitStatus, partition_key: Option<&PartitionKey>) -> fmt::Result {
    write_name(text, status)?;
    write!(text, ";r={}", status.remaining().min(MAX_INTEGER))?;
    let more_after = more_after(status);
    if !more_after.is_zero() {
        write!(text, ";t={}", seconds_rounded_up(more_after).min(MAX_INTEGER))?;
    }
    write_partition_key(text, partition_key)
}

/// The time until more units are left. If more units are used than the limit has, after a settlement above it or in a pause,
/// the oldest unit leaves before that. A refusal knows a later time, an admission does not.
fn more_after(status: &LimitStatus) -> Duration {
    match status.retry_after() {
        Some(retry) if status.used() > status.limit().units() => retry,
        Some(retry) => retry.min(status.reset_after()),
        None => status.reset_after(),
    }
}

/// A name needs no escapes: see the rules of [`limit`](crate::limit).
fn write_name(text: &mut String, status: &LimitStatus) -> fmt::Result {
    let separator = if text.is_empty() { "" } else { ", " };
    write!(text, "{separator}\"{}\"", status.limit().name())
}

fn write_partition_key(text: &mut String, partition_key: Option<&PartitionKey>) -> fmt::Result {
    partition_key.map_or(Ok(()), |key| write!(text, ";pk=:{key}:"))
}

/// All field lines become one list, without those that would make clients ignore the whole list.
fn prepend(headers: &mut HeaderMap, name: HeaderName, items: String) {
    let lines = headers.get_all(&name).iter().filter_map(|line| line.to_str().ok()).filter(|line| is_list(line));
    let list = lines.fold(items, |list, line| list + ", " + line);
    if let Ok(value) = HeaderValue::try_from(list) {
        headers.insert(name, value);
    }
}

/// Whether each member of a list begins with a string, and each quote is closed. The fields of older drafts are no such lists.
fn is_list(line: &str) -> bool {
    let (mut is_quoted, mut is_escaped) = (false, false);
    let mut members = line.split(|c| {
        let ends_member = c == ',' && !is_quoted;
        is_quoted ^= c == '"' && !is_escaped;
        is_escaped = c == '\\' && is_quoted && !is_escaped;
        ends_member
    });
    let all_begin_with_a_string = members.all(|member| member.trim_start().starts_with('"'));
    all_begin_with_a_string && !is_quoted
}

/// Makes partition keys.
#[derive(Clone)]
pub(crate) struct PartitionKeys(Arc<Domain>);

impl PartitionKeys {
    pub(crate) fn new(secret: &Secret) -> Self {
        Self(Arc::new(secret.domain(DOMAIN)))
    }

    /// One for each charge of a check.
    pub(crate) fn of(&self, check: &Check) -> Vec<PartitionKey> {
        check.charges().map(|charge| self.of_charge(charge)).collect()
    }

    fn of_charge(&self, charge: &Charge) -> PartitionKey {
        let key = charge.key();
        // The length comes first, so that no two pairs of namespace and value have the same bytes.
        let length = (key.namespace().len() as u64).to_le_bytes();
        let [hash @ .., _] = self.0.hash(&[&length, key.namespace().as_bytes(), key.value()]);
        PartitionKey(hash)
    }
}

/// 120 bits of a hash, which are 20 characters of base64 without padding.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PartitionKey([u8; 15]);

/// In base64 (RFC 4648, section 4).
impl fmt::Display for PartitionKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
        for bytes in self.0.chunks_exact(3) {
            let bits = bytes.iter().fold(0, |bits, byte| bits << 8 | usize::from(*byte));
            for shift in [18, 12, 6, 0] {
                f.write_char(char::from(DIGITS[bits >> shift & 63]))?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limit::Limit;

    /// Made by `printf 'tower-sliding-window partition key v1\0\4\0\0\0\0\0\0\0usr:7' | openssl dgst -sha256 -hmac ...`.
    #[test]
    fn a_partition_key_is_a_keyed_hash_of_namespace_and_value() {
        let secret = Secret::new("32 random bytes out of the vault").unwrap();
        let charge = Charge::new(Limit::per_minute("a", 1), crate::key::Key::new("usr:", "7"), 1).unwrap();
        let text = PartitionKeys::new(&secret).of_charge(&charge).to_string();
        assert_eq!(text, "Us5XYTdtri92Qk8qWU6y");
    }
}
