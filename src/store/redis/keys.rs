//! The layout of our keys in Redis: `{prefix}:{<digest>}:<limit>`, and `:<algorithm>` behind it unless that is the log.
//!
//! 1. The digest is 128 bits of the namespace and the value of the [`Key`], in 22 characters of base64url (RFC 4648,
//!    section 5): the first of their HMAC-SHA-256 where the store has a secret, or else of their SHA-256. What a user sent never
//!    stands in a key, so it cannot reach into another's key. Nor can it be read there, but without a secret it can be found
//!    by trying, if there are few enough values to try.
//! 2. The braces are a Cluster hash tag around our own digest: all limits of one identity live in one slot, and
//!    identities spread over all of them.
//! 3. The default prefix carries the version of the layout.

use std::fmt::Write;

use sha2::{Digest, Sha256};

use crate::{
    algorithm::Kind,
    key::Key,
    limit::Limit,
    secret::{Domain, Secret},
};

pub(super) const DEFAULT_PREFIX: &str = "tsw1";

/// The domain of the identities in Redis.
const IDENTITIES: &[u8] = b"tower-sliding-window redis key v1\0";

/// The characters of a digest of 128 bits: six bits each, and the last two by themselves.
const DIGEST_LENGTH: usize = 22;

/// The slots of a cluster.
#[cfg(feature = "cluster")]
pub(super) const HASH_SLOTS: u16 = 16_384;

const BASE64URL: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";

/// The keys of one store.
pub(super) struct Keys {
    prefix: String,
    identities: Option<Domain>,
}

impl Keys {
    pub(super) fn new(prefix: String, secret: Option<&Secret>) -> Self {
        Self { prefix, identities: secret.map(|secret| secret.domain(IDENTITIES)) }
    }

    pub(super) fn prefix(&self) -> &str {
        &self.prefix
    }

    /// The key that a limit counts in.
    pub(super) fn of(&self, limit: &Limit, key: &Key) -> String {
        let mut text = String::with_capacity(self.prefix.len() + DIGEST_LENGTH + limit.name().len() + 4);
        self.write(&mut text, limit, key);
        text
    }

    /// Appends the key that a limit counts in to a text.
    pub(super) fn write(&self, text: &mut String, limit: &Limit, key: &Key) {
        text.push_str(&self.prefix);
        text.push_str(":{");
        text.extend(self.digest(key));
        text.push_str("}:");
        text.push_str(limit.name());
        // Each has a layout of its own. A limit's name has no colon.
        match limit.algorithm().kind() {
            Kind::Log => {}
            Kind::Fixed => text.push_str(":fixed"),
            Kind::Counter => text.push_str(":counter"),
            // Writing to a String cannot fail.
            Kind::Compact { entries } => drop(write!(text, ":compact{entries}")),
        }
    }

    /// The slot of a cluster that all limits of a key live in: CRC-16/XMODEM of what stands between the braces.
    #[cfg(feature = "cluster")]
    pub(super) fn hash_slot(&self, key: &Key) -> u16 {
        let with_bit = |crc: u16, _| if crc & 0x8000 == 0 { crc << 1 } else { (crc << 1) ^ 0x1021 };
        let crc = self.digest(key).fold(0, |crc: u16, digit| (0..8).fold(crc ^ (digit as u16) << 8, with_bit));
        crc % HASH_SLOTS
    }

    /// The digest of a key, in base64url.
    fn digest(&self, key: &Key) -> impl Iterator<Item = char> + use<> {
        // The length first, so that no namespace and value can be split in two ways.
        let length = (key.namespace().len() as u64).to_le_bytes();
        let parts = [&length, key.namespace().as_bytes(), key.value()];
        let digest = match &self.identities {
            Some(identities) => u128::from_be_bytes(identities.hash(&parts)),
            None => {
                let mut sha = Sha256::new();
                parts.iter().for_each(|part| sha.update(part));
                sha.finalize().into_iter().take(16).fold(0, |digest, byte| digest << 8 | u128::from(byte))
            }
        };
        // Six bits after six, from the highest on.
        (0..DIGEST_LENGTH).map(move |place| char::from(BASE64URL[(digest << (6 * place) >> 122) as usize]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plain(prefix: &str) -> Keys {
        Keys::new(prefix.to_owned(), None)
    }

    fn keyed(secret: &str) -> Keys {
        Keys::new("tsw1".to_owned(), Some(&Secret::new(secret).unwrap()))
    }

    #[test]
    fn a_key_is_made_of_the_fixed_alphabet_and_one_hash_tag() {
        let limit = Limit::per_minute("login", 5);
        let text = plain("tsw1").of(&limit, &Key::new("tenant", "a}:b{c}\r\n\0"));
        let (digest, rest) = text.strip_prefix("tsw1:{").unwrap().split_once('}').unwrap();
        assert!(digest.len() == 22 && digest.bytes().all(|byte| BASE64URL.contains(&byte)));
        assert_eq!(rest, ":login");
    }

    /// SHA-256 over the length of "tenant" in eight bytes, "tenant", and "7": another digest would start every window
    /// anew.
    #[test]
    fn the_digest_stays_what_it_is() {
        let text = plain("tsw1").of(&Limit::per_minute("login", 5), &Key::new("tenant", "7"));
        assert_eq!(text, "tsw1:{uAmvOtciwcWGtISCdGweJA}:login");
    }

    /// HMAC-SHA-256 over the domain, and then the same.
    #[test]
    fn the_digest_under_a_secret_stays_what_it_is() {
        let (limit, key) = (Limit::per_minute("login", 5), Key::new("tenant", "7"));
        let text = keyed("32 random bytes out of the vault").of(&limit, &key);
        assert_eq!(text, "tsw1:{S8dlh6sS5CqqyHXGZS4t3g}:login");
        assert_ne!(text, keyed("32 other bytes out of the vault!").of(&limit, &key));
    }

    #[test]
    fn namespace_and_value_cannot_be_shifted_into_each_other() {
        let limit = Limit::per_minute("login", 5);
        assert_ne!(plain("p").of(&limit, &Key::new("ab", "c")), plain("p").of(&limit, &Key::new("a", "bc")));
    }

    /// As redis-cli's `CLUSTER KEYSLOT tsw1:{uAmvOtciwcWGtISCdGweJA}:login` says.
    #[cfg(feature = "cluster")]
    #[test]
    fn the_slot_is_that_of_the_digest() {
        assert_eq!(plain("tsw1").hash_slot(&Key::new("tenant", "7")), 4364);
    }
}
