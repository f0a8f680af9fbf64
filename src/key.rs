//! A key: in whose name units are spent.
//!
//! 1. A key is a namespace and a value. Equal values in different namespaces are different keys, so an address can
//!    never collide with an API key or a user name that looks like it.
//! 2. A value can be personal or secret, so [`Debug`](std::fmt::Debug) prints the namespace alone, and
//!    `RedisStore` sends a digest, never the value. A secret does not become a value at all: see
//!    [`ApiKey`](crate::ApiKey).
//!
//! ```
//! use tower_sliding_window::Key;
//!
//! assert_ne!(Key::new("tenant", "7"), Key::new("user", "7"));
//! assert_eq!(format!("{:?}", Key::new("user", "ada@example.org")), r#"Key("user")"#);
//!
//! // Outside HTTP a plain string is enough.
//! let key: Key = "nightly-import".into();
//! ```

use std::fmt;

/// In whose name units are spent. See the [module docs](self).
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Key {
    namespace: &'static str,
    value: Box<[u8]>,
}

impl Key {
    /// A key of any bytes in a namespace.
    #[must_use]
    pub fn new(namespace: &'static str, value: impl AsRef<[u8]>) -> Self {
        Self { namespace, value: value.as_ref().into() }
    }

    /// The key of two keys together: equal only if both are.
    #[must_use]
    pub fn pair(first: &Self, second: &Self) -> Self {
        // Each part is preceded by its length, so no two different pairs give the same bytes.
        let parts = [first.namespace.as_bytes(), &first.value, second.namespace.as_bytes(), &second.value];
        let value: Vec<u8> = parts
            .iter()
            .flat_map(|part| (part.len() as u64).to_le_bytes().into_iter().chain(part.iter().copied()))
            .collect();
        Self { namespace: "pair", value: value.into() }
    }

    /// The namespace.
    #[must_use]
    pub fn namespace(&self) -> &'static str {
        self.namespace
    }

    /// The value, for stores to digest. It may be personal: do not log it.
    #[must_use]
    pub fn value(&self) -> &[u8] {
        &self.value
    }
}

impl From<&str> for Key {
    fn from(value: &str) -> Self {
        Self::new("", value)
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
