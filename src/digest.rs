//! Keyed digests of limits and keys: what tables find their entries by.
//!
//! 1. Keys come from clients, so each digest is keyed by randomness of the process's own: nobody outside can make two of
//!    them meet.
//! 2. All that goes into one is put together first, since a hasher takes one text more quickly than its pieces.

use std::hash::{BuildHasher, DefaultHasher, Hasher, RandomState};

use crate::{
    algorithm::{Algorithm, Kind},
    check::{Charge, Check},
    key::Key,
    limit::Limit,
};

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

    /// Of everything that makes a difference to a check's outcome, but its id.
    pub(crate) fn of_check(&self, check: &Check) -> u64 {
        let mut text = self.text();
        check.charges().for_each(|charge| text.push_charge(charge));
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

    fn push_charge(&mut self, charge: &Charge) {
        let limit = charge.limit();
        self.push_key(limit, charge.key());
        let lease = charge.lease_micros().unwrap_or(0);
        let numbers = [limit.units(), limit.window_micros(), charge.cost(), lease];
        numbers.into_iter().for_each(|number| self.push(&number.to_le_bytes()));
        self.push(&[charge.is_shadow().into()]);
        self.push(&number(limit.algorithm()).to_le_bytes());
    }

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

fn number(algorithm: Algorithm) -> u16 {
    match algorithm.kind() {
        Kind::Log => 0,
        Kind::Fixed => 1,
        Kind::Counter => 2,
        // At least 3.
        Kind::Compact { entries } => entries,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn charge(limit: Limit, key: Key, cost: u64) -> Charge {
        Charge::new(limit, key, cost).unwrap()
    }

    #[test]
    fn equal_checks_have_one_digest_and_different_ones_do_not() {
        let (digester, limit) = (Digester::default(), Limit::per_second("a", 10));
        let key = |value: &str| Key::new("k", value);
        let charges = [
            charge(limit.clone(), key("1"), 1),
            charge(limit.clone(), key("1"), 2),
            charge(limit.clone(), key("1"), 1).reserve(Duration::from_millis(1)),
            charge(limit.clone(), key("1"), 1).in_shadow(),
            charge(limit.clone(), key(""), 1),
            charge(limit.clone(), Key::new("k1", ""), 1),
            charge(limit.clone(), Key::new("", "k1"), 1),
            charge(Limit::per_second("ak", 10), Key::new("", "1"), 1),
            charge(Limit::per_second("a", 11), key("1"), 1),
            charge(Limit::per_minute("a", 10), key("1"), 1),
            charge(limit.clone().with_algorithm(Algorithm::fixed()), key("1"), 1),
            charge(limit.clone().with_algorithm(Algorithm::counter()), key("1"), 1),
            charge(limit.clone().with_algorithm(Algorithm::compact(3)), key("1"), 1),
            charge(limit.with_algorithm(Algorithm::compact(4)), key("1"), 1),
        ];
        let digest = |charge: &Charge| digester.of_check(&Check::new(charge.clone()));
        for (place, charge) in charges.iter().enumerate() {
            assert_eq!(digest(charge), digest(charge));
            assert!(charges[..place].iter().all(|other| digest(other) != digest(charge)), "{charge:?}");
        }
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
