//! Keys: each key's units are counted separately.
//!
//! 1. A key consists of a namespace and a value. Equal values in different namespaces are different
//!    keys, so an address never collides with an API key or user name that looks like it.
//! 2. A value can be personal, so [`Debug`](std::fmt::Debug) shows only the namespace, and
//!    `RedisStore` sends only a digest. Readers of Redis can still brute-force guessable values,
//!    unless the store has a [`Secret`](crate::Secret).
//! 3. Do not use a secret as a value. [`ApiKey`](crate::ApiKey) and
//!    [`Secret::key`](crate::Secret::key) hash it instead.
//!
//! ```
//! use tower_sliding_window::Key;
//!
//! assert_ne!(Key::new("tenant", "7"), Key::new("user", "7"));
//! assert_eq!(format!("{:?}", Key::new("user", "ada@example.org")), r#"Key("user")"#);
//!
//! // Outside HTTP a plain string, a number or an address is enough.
//! let key: Key = "nightly-import".into();
//! assert_eq!(Key::from(7), Key::from("7"));
//! ```
//!
//! # The key of a layer
//!
//! A string becomes a key without a namespace. A layer's extractor makes keys in its own namespace,
//! so its key for `acme` differs from the key that the string becomes:
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), tower_sliding_window::Error> {
//! use tower_sliding_window::{Header, Key, Limit, Limiter, MemoryStore};
//!
//! assert_ne!(Header::new("x-tenant").key("acme"), Key::from("acme"));
//!
//! // What a layer has counted for the tenant: `peek(&CALLS, "acme")` and `reset(&CALLS, "acme")` would mean another key.
//! const CALLS: Limit = Limit::per_hour("calls", 100);
//! let limiter = Limiter::new(MemoryStore::new());
//! let key = Header::new("x-tenant").key("acme");
//! println!("{} left", limiter.peek(&CALLS, &key).await?.remaining());
//! limiter.reset(&CALLS, &key).await?;
//! # Ok(()) }
//! ```

use std::{
    borrow::Cow,
    collections::HashMap,
    fmt,
    hash::{BuildHasher, BuildHasherDefault, Hash, Hasher, RandomState},
    net::IpAddr,
};

/// The client, user, tenant or resource that spends units. See the [module docs](self).
#[derive(Clone, PartialEq, Eq, Hash)]
#[must_use]
pub struct Key {
    namespace: &'static str,
    value: Value,
}

/// The maximum length of a short value, in bytes. A larger number would make every `Value` larger.
const SHORT: usize = 22;

/// The bytes of a key. Short values, such as addresses, hashes and most names, are stored inline:
/// making, cloning or comparing one does not allocate or follow a pointer.
#[derive(Clone, PartialEq, Eq, Hash)]
enum Value {
    /// The first `length` bytes are the value. The rest is zero, so that equal values have equal
    /// arrays.
    Short {
        length: u8,
        bytes: [u8; SHORT],
    },
    Long(Box<[u8]>),
}

impl Key {
    /// A key with arbitrary bytes as its value.
    pub fn new(namespace: &'static str, value: impl AsRef<[u8]>) -> Self {
        Self::joined(namespace, &[value.as_ref()])
    }

    /// Makes a key whose value is all `parts` concatenated.
    #[inline]
    pub(crate) fn joined(namespace: &'static str, parts: &[&[u8]]) -> Self {
        let mut bytes = [0; SHORT];
        let value = match join(parts, &mut bytes) {
            Some(length) => Value::Short {
                length: length as u8,
                bytes,
            },
            None => Value::Long(parts.concat().into()),
        };
        Self { namespace, value }
    }

    /// The namespace.
    pub fn namespace(&self) -> &'static str {
        self.namespace
    }

    /// The value, for stores. A value may be personal: do not log it.
    pub fn value(&self) -> &[u8] {
        match &self.value {
            Value::Short { length, bytes } => &bytes[..usize::from(*length)],
            Value::Long(bytes) => bytes,
        }
    }
}

/// Makes a key without a namespace. Keys from numbers and addresses do not have one either: see
/// [the key of a layer](self#the-key-of-a-layer).
impl From<&str> for Key {
    fn from(value: &str) -> Self {
        Self::new("", value)
    }
}

impl From<&String> for Key {
    fn from(value: &String) -> Self {
        Self::new("", value)
    }
}

/// Makes a key from the decimal digits.
impl From<u64> for Key {
    fn from(value: u64) -> Self {
        Self::from(value.to_string())
    }
}

/// Makes a key from the address as text. An IPv4-mapped IPv6 address has the IPv4 address's key.
/// [`PeerIp`](crate::PeerIp) makes different keys: see its method `key`.
impl From<IpAddr> for Key {
    fn from(address: IpAddr) -> Self {
        Self::from(address.to_canonical().to_string())
    }
}

impl From<&Self> for Key {
    fn from(key: &Self) -> Self {
        key.clone()
    }
}

/// Combines two keys into one, as [`KeyExtractor::and`](crate::KeyExtractor::and) does for a
/// request. Two pairs are equal only if their first keys are equal and their second keys are equal.
impl From<(&Self, &Self)> for Key {
    fn from((first, second): (&Self, &Self)) -> Self {
        // Each part is length-prefixed, so different pairs never give the same bytes.
        let parts = [
            first.namespace.as_bytes(),
            first.value(),
            second.namespace.as_bytes(),
            second.value(),
        ];
        let lengths = parts.map(|part| (part.len() as u64).to_le_bytes());
        let framed = [0, 1, 2, 3].map(|index| [&lengths[index][..], parts[index]]);
        Self::joined("pair", framed.as_flattened())
    }
}

impl From<String> for Key {
    fn from(value: String) -> Self {
        Self::new("", value)
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Key").field(&self.namespace).finish()
    }
}

/// Computes the digests under which a table stores the entry for a limit and a key. They are keyed
/// by random bits per process (SipHash), so clients, who choose their keys, cannot cause
/// collisions.
#[derive(Debug, Default)]
pub(crate) struct Digester(RandomState);

impl Digester {
    /// Returns a 128-bit digest that stands in for the limit and the key. Its lower half is their
    /// 64-bit digest. `name` is the limit's name, and `rest` encodes the rest of the limit's
    /// identity.
    ///
    /// The upper half is a multiply-fold hash keyed by the lower half. Two inputs whose lower
    /// halves collide by chance have the same factors, which are random and unknown to clients.
    // Inlined, so callers that need only the lower half do not compute the upper half.
    #[inline(always)]
    pub(crate) fn digest(&self, name: &str, rest: u64, key: &Key) -> u128 {
        // Length-prefixed, so different limits or keys never give the same bytes.
        let lengths = (name.len() as u64) << 32 | key.namespace.len() as u64;
        let head = [rest.to_le_bytes(), lengths.to_le_bytes()];
        let parts = [
            head.as_flattened(),
            name.as_bytes(),
            key.namespace.as_bytes(),
            key.value(),
        ];
        self.of(&joined(&parts, &mut [0; JOINED]))
    }

    #[inline(always)]
    fn of(&self, bytes: &[u8]) -> u128 {
        let mut hasher = self.0.build_hasher();
        hasher.write(bytes);
        let lower = hasher.finish();
        u128::from(folded(bytes, lower)) << 64 | u128::from(lower)
    }
}

/// Multiply-fold hash over at least 16 bytes, keyed by `key`.
#[inline(always)]
fn folded(bytes: &[u8], key: u64) -> u64 {
    // The last block may overlap the one before it.
    let blocks = bytes.as_chunks().0.iter().chain(bytes.last_chunk());
    blocks.fold(key.rotate_left(21) ^ bytes.len() as u64, |hash, block| {
        let block = u128::from_le_bytes(*block);
        let factors = (block as u64 ^ hash, (block >> 64) as u64 ^ key);
        let product = u128::from(factors.0) * u128::from(factors.1);
        product as u64 ^ (product >> 64) as u64
    })
}

/// The most bytes to join without allocating.
pub(crate) const JOINED: usize = 128;

/// Concatenates parts for hashing: one write takes half the time of a write per part.
#[inline(always)]
pub(crate) fn joined<'a>(parts: &[&[u8]], bytes: &'a mut [u8; JOINED]) -> Cow<'a, [u8]> {
    match join(parts, bytes) {
        Some(length) => Cow::Borrowed(&bytes[..length]),
        None => Cow::Owned(parts.concat()),
    }
}

/// Concatenates the parts into `bytes`. Returns their length, or `None` if they do not fit.
#[inline]
fn join(parts: &[&[u8]], bytes: &mut [u8]) -> Option<usize> {
    let mut end = 0;
    for part in parts {
        let target = bytes.get_mut(end..end + part.len())?;
        target.copy_from_slice(part);
        end += part.len();
    }
    Some(end)
}

/// A table whose keys are digests.
pub(crate) type ByDigest<T> = HashMap<u64, T, BuildHasherDefault<Prehashed>>;

/// Makes room for one more entry. If the table is full, removes the entries that are not in use,
/// and grows the table to twice the number of entries that remain. So walks through the table take
/// amortized O(1) for each new entry. The table has room for at most twice as many entries as were
/// ever in use at once.
pub(crate) fn make_room<K: Eq + Hash, V, S: BuildHasher>(
    table: &mut HashMap<K, V, S>,
    mut is_in_use: impl FnMut(&mut V) -> bool,
) {
    if table.len() == table.capacity() {
        table.retain(|_, value| is_in_use(value));
        table.reserve(table.len().max(1));
    }
}

/// A hasher for tables whose keys are digests. The hash of a digest is the digest itself.
#[derive(Debug, Default)]
pub(crate) struct Prehashed(u64);

impl Hasher for Prehashed {
    fn write_u64(&mut self, hash: u64) {
        self.0 = hash;
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(*byte);
        }
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limit::Limit;

    /// The newest thousand entries are in use.
    #[test]
    fn a_table_is_walked_rarely_and_has_few_entries_that_are_not_in_use() {
        let (mut table, mut looked_at) = (ByDigest::<u64>::default(), 0_u64);
        for entry in 0..100_000_u64 {
            make_room(&mut table, |value| {
                looked_at += 1;
                *value + 1_000 > entry
            });
            table.insert(entry, entry);
        }
        assert!(looked_at < 300_000, "{looked_at}");
        assert!(table.capacity() < 8_000, "{}", table.capacity());
    }

    #[test]
    fn keys_of_all_lengths_are_what_they_were_made_of() {
        let text = [7; 64];
        let hasher = RandomState::new();
        for length in 0..text.len() {
            let (first, second) = text[..length].split_at(length / 3);
            let whole = Key::new("a", &text[..length]);
            let joined = Key::joined("a", &[first, second]);
            assert_eq!((whole.value(), &whole), (&text[..length], &joined));
            assert_eq!(hasher.hash_one(&whole), hasher.hash_one(&joined));
            assert_ne!(whole, Key::new("a", &text[..=length]));
            assert_ne!(whole, Key::new("b", &text[..length]));
        }
    }

    #[test]
    fn numbers_and_addresses_are_the_keys_of_their_text() {
        let text = "ada".to_owned();
        assert_eq!(
            (Key::from(&text), Key::from(text)),
            ("ada".into(), "ada".into())
        );
        assert_eq!(Key::from(u64::MAX), "18446744073709551615".into());
        for (address, text) in [
            ("203.0.113.7", "203.0.113.7"),
            ("::ffff:203.0.113.7", "203.0.113.7"),
            ("2001:DB8::1", "2001:db8::1"),
        ] {
            assert_eq!(Key::from(address.parse::<IpAddr>().unwrap()), text.into());
        }
    }

    #[test]
    fn two_pairs_are_equal_only_if_their_parts_are() {
        let key = |value: &str| Key::new("a", value);
        let pairs = [("", "ab"), ("a", "b"), ("ab", ""), ("b", "a")]
            .map(|(a, b)| Key::from((&key(a), &key(b))));
        for (index, pair) in pairs.iter().enumerate() {
            assert!(pairs[..index].iter().all(|other| other != pair));
        }
        assert_eq!(Key::from((&key("a"), &key("b"))), pairs[1]);
    }

    #[test]
    fn equal_limits_and_keys_have_one_digest_and_different_ones_do_not() {
        let digester = Digester::default();
        let limit = |name| Limit::per_second(name, 1);
        let all = [
            (limit("a"), Key::new("k", "1")),
            (limit("a"), Key::new("k", "")),
            (limit("a"), Key::new("k1", "")),
            (limit("a"), Key::new("", "k1")),
            (limit("ak"), Key::new("", "1")),
            (Limit::per_hour("a", 1), Key::new("k", "1")),
        ];
        let digest = |(limit, key): &(Limit, Key)| limit.digest(&digester, key);
        assert_eq!(
            digest(&all[0]),
            Limit::per_second("a", 9).digest(&digester, &all[0].1)
        );
        for (index, one) in all.iter().enumerate() {
            assert_eq!(digest(one), digest(one));
            assert!(
                all[..index]
                    .iter()
                    .all(|other| digest(other) != digest(one)),
                "{one:?}"
            );
        }
    }

    #[test]
    fn texts_of_all_lengths_have_digests_of_their_own() {
        let digester = Digester::default();
        let limit = &Limit::per_second("a", 1);
        let bytes = [7; 400];
        let digest = |length| limit.long_digest(&digester, &Key::new("k", &bytes[..length]));
        let halves: [fn(u128) -> u64; 2] = [|digest| digest as u64, |digest| (digest >> 64) as u64];
        for half in halves {
            let mut digests: Vec<u64> = (0..bytes.len()).map(digest).map(half).collect();
            assert_eq!(digests[300], half(digest(300)));
            digests.sort_unstable();
            digests.dedup();
            assert_eq!(digests.len(), bytes.len());
        }
    }

    /// If two lower halves collide, their upper halves are hashes under one key.
    #[test]
    fn each_bit_of_a_text_changes_its_hash_under_one_key() {
        let key = RandomState::new().hash_one(0);
        for length in [16, 17, 24, 31, 32, 33, 128, 200] {
            let text = vec![0; length];
            let mut hashes = vec![folded(&text, key)];
            for bit in 0..length * 8 {
                let mut other = text.clone();
                other[bit / 8] ^= 1 << (bit % 8);
                hashes.push(folded(&other, key));
            }
            let count = hashes.len();
            hashes.sort_unstable();
            hashes.dedup();
            assert_eq!(hashes.len(), count, "{length}");
        }
    }
}
