//! Keyed digests of limits and keys. Tables find their entries by them.
//!
//! Keys come from clients, so a digest is keyed by randomness of the process: no client can make two of them collide.

use std::hash::{BuildHasher, Hasher, RandomState};

use crate::{key::Key, limit::Limit};

/// Makes digests under a secret of its own.
#[derive(Debug, Default)]
pub(crate) struct Digester(RandomState);

impl Digester {
    /// The digest of a limit's name and a key.
    pub(crate) fn of_key(&self, limit: &Limit, key: &Key) -> u64 {
        let mut hasher = self.0.build_hasher();
        // No UTF-8 text contains 0xff, and the length follows the value, so no two pairs give the same bytes.
        for part in [limit.name().as_bytes(), &[0xff], key.namespace().as_bytes(), &[0xff], key.value()] {
            hasher.write(part);
        }
        hasher.write_usize(key.value().len());
        hasher.finish()
    }
}

/// A hasher for tables whose keys are digests already: it takes the digest for the hash.
#[derive(Debug, Default)]
pub(crate) struct Prehashed(u64);

impl Hasher for Prehashed {
    fn write_u64(&mut self, hash: u64) {
        self.0 = hash;
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.0 = self.0.rotate_left(8) ^ u64::from(*byte));
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_limits_and_keys_have_one_digest_and_different_ones_do_not() {
        let (digester, limit) = (Digester::default(), Limit::per_second("a", 10));
        let all = [
            (limit.clone(), Key::new("k", "1")),
            (limit.clone(), Key::new("k", "")),
            (limit.clone(), Key::new("k1", "")),
            (limit.clone(), Key::new("", "k1")),
            (Limit::per_second("ak", 10), Key::new("", "1")),
        ];
        let digest = |(limit, key): &(Limit, Key)| digester.of_key(limit, key);
        for (place, one) in all.iter().enumerate() {
            assert_eq!(digest(one), digest(one));
            assert!(all[..place].iter().all(|other| digest(other) != digest(one)), "{one:?}");
        }
        assert_eq!(digester.of_key(&Limit::per_minute("a", 7), &all[0].1), digest(&all[0]), "a limit is its name");
    }

    #[test]
    fn texts_of_all_lengths_have_digests_of_their_own() {
        let (digester, limit, bytes) = (Digester::default(), Limit::per_second("a", 10), [7; 400]);
        let digests = (0..bytes.len()).map(|length| digester.of_key(&limit, &Key::new("k", &bytes[..length])));
        let mut digests: Vec<u64> = digests.collect();
        assert_eq!(digests[300], digester.of_key(&limit, &Key::new("k", &bytes[..300])));
        digests.sort_unstable();
        digests.dedup();
        assert_eq!(digests.len(), bytes.len());
    }
}
