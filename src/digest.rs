//! Keyed digests of limits and keys: what tables find their entries by.
//!
//! 1. Keys come from clients, so each digest is keyed by randomness of the process's own: nobody outside can make two of
//!    them meet.
//! 2. All that goes into one is put together first, since a hasher takes one text more quickly than its pieces.

use std::hash::{BuildHasher, DefaultHasher, Hasher, RandomState};

use crate::{key::Key, limit::Limit};

/// Makes digests that mean nothing to another.
#[derive(Debug, Default)]
pub(crate) struct Digester(RandomState);

impl Digester {
    /// Of what a limit counts for a key: its name is what it counts under.
    pub(crate) fn of_key(&self, limit: &Limit, key: &Key) -> u64 {
        let mut text = self.text();
        text.push_key(limit, key);
        text.finish()
    }

    fn text(&self) -> Text {
        Text { bytes: [0; Text::ROOM], length: 0, hasher: self.0.build_hasher() }
    }
}

/// What is put together. Of what does not fit, the beginning is hashed before.
struct Text {
    bytes: [u8; Self::ROOM],
    length: usize,
    hasher: DefaultHasher,
}

impl Text {
    /// Enough for a charge with a key of usual length.
    const ROOM: usize = 128;

    /// What no UTF-8 text has in it.
    const END: [u8; 1] = [0xff];

    /// The length of the value stands behind it: read from its end, a text can be taken apart in one way only.
    fn push_key(&mut self, limit: &Limit, key: &Key) {
        self.push_with(limit.name().as_bytes(), Self::END);
        self.push_with(key.namespace().as_bytes(), Self::END);
        self.push_with(key.value(), (key.value().len() as u64).to_le_bytes());
    }

    /// Pushes a part and what stands behind it.
    fn push_with<const N: usize>(&mut self, part: &[u8], tail: [u8; N]) {
        let end = self.length + part.len();
        match self.bytes.get_mut(self.length..end + N).and_then(|room| room.split_at_mut_checked(part.len())) {
            Some((room, behind)) => {
                room.copy_from_slice(part);
                behind.copy_from_slice(&tail);
                self.length = end + N;
            }
            None => {
                self.push(part);
                self.push(&tail);
            }
        }
    }

    fn push(&mut self, part: &[u8]) {
        if part.len() > Self::ROOM - self.length {
            self.hash();
        }
        match self.bytes.get_mut(self.length..self.length + part.len()) {
            Some(room) => {
                room.copy_from_slice(part);
                self.length += part.len();
            }
            None => self.hasher.write(part),
        }
    }

    fn hash(&mut self) {
        self.hasher.write(&self.bytes[..self.length]);
        self.length = 0;
    }

    fn finish(&mut self) -> u64 {
        self.hash();
        self.hasher.finish()
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
