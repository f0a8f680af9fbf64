//! The key layout in Redis: `<prefix>:{<digest>}:<limit>/<window>`. For any algorithm but the exact
//! log, `:<algorithm>` follows.
//!
//! 1. The digest is the first 128 bits of a BLAKE3 hash over the [`Key`]'s namespace and value. If
//!    the store has a secret, the hash is keyed. The digest is written as 22 characters in
//!    base64url (RFC 4648, section 5). The value itself is never in a Redis key, so a client cannot
//!    reach another client's key. Without a secret, a reader of Redis can find a value by brute
//!    force, if there are few possible values.
//! 2. The braces are a cluster's hash tag. So all limits under one [`Key`] share a slot, and the
//!    keys spread over all slots.
//! 3. A limit is identified by its name, window and algorithm. The window is written as in a
//!    limit's text: the counts for `login=5/min` are stored in
//!    `tsw1:{UeHXs0Ucg6aO500kcLta5A}:login/min`.
//! 4. The default prefix ends with the version of this layout.

use std::{array, fmt::Write};

use crate::{
    algorithm::Kind,
    key::{JOINED, Key, joined},
    limit::{Identity, Limit, text::write_window},
    secret::{Secret, truncated},
};

pub(super) const DEFAULT_PREFIX: &str = "tsw1";

/// The keyed hashes' domain: see `Secret::domain`.
const DOMAIN: &str = "tower-sliding-window redis key v1";

/// The number of characters in a digest. Each has six bits, except the last, which has two.
const DIGEST_LENGTH: usize = 22;

/// The number of slots in a cluster.
pub(super) const HASH_SLOTS: u16 = 16_384;

const BASE64URL: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";

/// Makes one store's Redis keys.
pub(super) struct Keys {
    pub(super) prefix: String,
    domain: Option<Secret>,
}

impl Keys {
    pub(super) fn new(prefix: String, secret: Option<&Secret>) -> Self {
        Self {
            prefix,
            domain: secret.map(|secret| secret.domain(DOMAIN)),
        }
    }

    /// The Redis key that stores a limit's counts for a key.
    pub(super) fn of(&self, limit: &Limit, key: &Key) -> String {
        let Identity {
            name,
            window_micros,
            algorithm,
        } = &limit.identity;
        let mut text = String::with_capacity(self.prefix.len() + DIGEST_LENGTH + name.len() + 12);
        text.push_str(&self.prefix);
        text.push_str(":{");
        text.extend(str::from_utf8(&self.digest(key)));
        text.push_str("}:");
        text.push_str(name);
        // A limit's name has neither a slash nor a colon.
        text.push('/');
        write_window(&mut text, *window_micros);
        // Each algorithm has its own layout for a sorted set, so it needs its own Redis key.
        match algorithm.kind {
            Kind::Log => {}
            // Writing to a String cannot fail.
            Kind::Compact { entries } => drop(write!(text, ":compact{entries}")),
            _ => text.extend([":", &algorithm.word()]),
        }
        text
    }

    /// The cluster slot for all limits under a key: CRC-16/XMODEM over the text between the braces,
    /// modulo the number of slots.
    pub(super) fn hash_slot(&self, key: &Key) -> u16 {
        let mut crc: u16 = 0;
        for digit in self.digest(key) {
            crc ^= u16::from(digit) << 8;
            for _ in 0..8 {
                // The polynomial is subtracted if the bit that leaves is 1.
                crc = (crc << 1) ^ ((crc >> 15) * 0x1021);
            }
        }
        crc % HASH_SLOTS
    }

    /// A key's digest, in base64url.
    fn digest(&self, key: &Key) -> [u8; DIGEST_LENGTH] {
        // The namespace's length comes first, so that different namespaces and values never give
        // the same bytes.
        let length = (key.namespace().len() as u64).to_le_bytes();
        let parts = [&length, key.namespace().as_bytes(), key.value()];
        let mut bytes = [0; JOINED];
        let bytes = joined(&parts, &mut bytes);
        let digest = u128::from_be_bytes(match &self.domain {
            Some(domain) => domain.hash(&bytes),
            None => truncated(blake3::hash(&bytes)),
        });
        // Each character takes six bits, the highest first.
        array::from_fn(|index| BASE64URL[(digest << (6 * index) >> 122) as usize])
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::algorithm::Algorithm;

    fn plain(prefix: &str) -> Keys {
        Keys::new(prefix.to_owned(), None)
    }

    fn keyed(secret: &str) -> Keys {
        Keys::new("tsw1".to_owned(), Some(&Secret::new(secret).unwrap()))
    }

    #[test]
    fn a_key_is_made_of_the_fixed_alphabet_and_one_hash_tag() {
        let limit = Limit::per_minute("login", 5);
        let text = plain("tsw1").of(&limit, &Key::new("tenant", "a}:{b{c}\r\n\0"));
        let (digest, rest) = text
            .strip_prefix("tsw1:{")
            .unwrap()
            .split_once('}')
            .unwrap();
        assert!(digest.len() == 22 && digest.bytes().all(|byte| BASE64URL.contains(&byte)));
        assert_eq!(rest, ":login/min");
    }

    /// The digest is BLAKE3 over the length of "tenant" in eight bytes, "tenant", and "7". If the
    /// digest changed, all counts would be forgotten.
    #[test]
    fn the_digest_stays_what_it_is() {
        let text = plain("tsw1").of(&Limit::per_minute("login", 5), &Key::new("tenant", "7"));
        assert_eq!(text, "tsw1:{UeHXs0Ucg6aO500kcLta5A}:login/min");
    }

    #[test]
    fn each_identity_has_a_key_of_its_own() {
        let ends = [
            (Limit::per_hour("api", 5), "api/h"),
            (Limit::per_hour("api", 9), "api/h"),
            (
                Limit::per("api", 5, Duration::from_micros(90_000_001)),
                "api/90000001us",
            ),
            (
                Limit::per_hour("api", 5).with_algorithm(Algorithm::compact_log(16)),
                "api/h:compact16",
            ),
        ];
        for (limit, end) in ends {
            let text = plain("tsw1").of(&limit, &Key::new("tenant", "7"));
            assert_eq!(text, format!("tsw1:{{UeHXs0Ucg6aO500kcLta5A}}:{end}"));
        }
    }

    /// The digest is BLAKE3 over the same bytes as in the test above, keyed by the secret for this
    /// domain.
    #[test]
    fn the_digest_under_a_secret_stays_what_it_is() {
        let limit = Limit::per_minute("login", 5);
        let key = Key::new("tenant", "7");
        let text = keyed("a secret that only the tests know").of(&limit, &key);
        assert_eq!(text, "tsw1:{YWzSpMKbslgrcCEfoSdj5g}:login/min");
        assert_ne!(
            text,
            keyed("another secret that only tests know").of(&limit, &key)
        );
    }

    #[test]
    fn namespace_and_value_cannot_be_shifted_into_each_other() {
        let limit = Limit::per_minute("login", 5);
        assert_ne!(
            plain("p").of(&limit, &Key::new("ab", "c")),
            plain("p").of(&limit, &Key::new("a", "bc"))
        );
    }

    /// This slot is the reply to `CLUSTER KEYSLOT tsw1:{UeHXs0Ucg6aO500kcLta5A}:login/min`.
    #[test]
    fn the_slot_is_that_of_the_digest() {
        assert_eq!(plain("tsw1").hash_slot(&Key::new("tenant", "7")), 4023);
    }
}
