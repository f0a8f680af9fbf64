//! Address ranges that may change while the program runs.

use std::{
    fmt,
    net::IpAddr,
    sync::{Arc, PoisonError, RwLock},
};

use ipnet::IpNet;

use super::address::{have, parse_ranges};
use crate::error::ConfigError;

/// A list of address ranges that a layer [exempts](crate::RateLimitLayer::exempt_addresses) or
/// [denies](crate::RateLimitLayer::deny_addresses). All clones in this process share their ranges.
/// So a task can read new ranges now and then, and replace the ranges of every layer through one
/// clone.
///
/// ```
/// use tower_sliding_window::{ClientIp, Limit, MemoryStore, RateLimitLayer, extract::AddressList};
///
/// let client_ip = ClientIp::behind(["10.1.2.0/28"])?;
/// let (office, abusers) = (AddressList::new(["203.0.113.0/24", "2001:db8:7::/48"])?, AddressList::default());
/// let layer = RateLimitLayer::new(MemoryStore::new())
///     .limit(Limit::per_minute("requests", 60).by(client_ip.clone()))
///     .exempt_addresses(client_ip.clone(), &office)
///     .deny_addresses(client_ip, &abusers);
///
/// // Later, while the layer serves requests.
/// abusers.replace(["198.51.100.0/24", "192.0.2.7"])?;
/// assert!(abusers.contains("198.51.100.1".parse()?));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// * `0.0.0.0/0` has all IPv4 addresses, and `::/0` all IPv6 addresses. A range of IPv4 addresses
///   also has the IPv6 addresses that stand for these IPv4 addresses, as in
///   [`PeerIp`](super::PeerIp). A range of all addresses of a translator, such as `2002::/16`, has
///   no IPv4 addresses.
/// * A look-up takes a binary search, so a list may have a hundred thousand ranges.
#[derive(Clone, Default)]
pub struct AddressList(Arc<RwLock<Vec<IpNet>>>);

impl AddressList {
    /// A list of ranges and addresses.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] if a text is neither a range nor an address. The error names the text.
    pub fn new<R: AsRef<str>>(ranges: impl IntoIterator<Item = R>) -> Result<Self, ConfigError> {
        Ok(Self(Arc::new(RwLock::new(parse_ranges(ranges)?))))
    }

    /// Replaces all ranges at once, for all clones.
    ///
    /// # Errors
    ///
    /// As for [`new`](Self::new). After an error, the list is as it was.
    pub fn replace<R: AsRef<str>>(&self, ranges: impl IntoIterator<Item = R>) -> Result<(), ConfigError> {
        let ranges = parse_ranges(ranges)?;
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = ranges;
        Ok(())
    }

    /// Whether one of the ranges has this address.
    #[must_use]
    pub fn contains(&self, address: IpAddr) -> bool {
        have(&self.0.read().unwrap_or_else(PoisonError::into_inner), address)
    }
}

// Shows only how many ranges there are, since addresses may be personal data.
impl fmt::Debug for AddressList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("AddressList").field(&self.0.read().unwrap_or_else(PoisonError::into_inner).len()).finish()
    }
}
