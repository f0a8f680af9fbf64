//! IP addresses: their keys, address ranges, and range lists that may change at run time.
//!
//! 1. An IPv4 address has one key, however it is written. These IPv6 addresses stand for an IPv4
//!    address:
//!
//!    | address | what it is |
//!    |---|---|
//!    | `::ffff:a.b.c.d` | mapped by a dual-stack listener (RFC 4291) |
//!    | `::a.b.c.d`, but not `::` and `::1` | "compatible", long deprecated (RFC 4291) |
//!    | `::ffff:0:a.b.c.d` | translated (RFC 2765) |
//!    | `64:ff9b::a.b.c.d` | translated by NAT64 (RFC 6052) |
//!    | `2002:aabb:ccdd::/48` | 6to4 (RFC 3056): a network behind the IPv4 address whose bytes are `aa`, `bb`, `cc` and `dd` |
//!    | `2001::/32` | Teredo (RFC 4380): a host behind the IPv4 address in the last 32 bits, which are inverted |
//!
//!    If these were grouped by /64, clients with different IPv4 addresses would share one key, and
//!    a 6to4 network would have 65,536 keys.
//! 2. In `64:ff9b:1::/48` (RFC 8215), only the network's operator knows which bits are the IPv4
//!    address, so the whole IPv6 address is the key. A client still has only one key: a translator
//!    makes exactly one IPv6 address from each IPv4 address, and other networks do not route
//!    `64:ff9b:1::/48`.
//! 3. The key for any other IPv6 address is its prefix, together with the prefix length.

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    sync::{Arc, PoisonError, RwLock},
};

use ipnet::{IpNet, Ipv4Net};

use crate::{error::ConfigError, key::Key};

/// The key of an address. For IPv6, it covers the first `bits`, 1 to 128.
pub(super) fn key(address: IpAddr, bits: u8) -> Key {
    match canonical(address) {
        IpAddr::V4(address) => Key::new("ip", address.octets()),
        IpAddr::V6(address) => {
            let is_translated_locally = matches!(address.segments(), [0x64, 0xff9b, 1, ..]);
            let bits = if is_translated_locally { 128 } else { bits };
            let mask = u128::MAX << (128 - u32::from(bits));
            Key::joined("ip", &[&[bits], &(address.to_bits() & mask).to_be_bytes()])
        }
    }
}

/// The IPv4 address that `address` stands for, or `address` itself.
fn canonical(address: IpAddr) -> IpAddr {
    let IpAddr::V6(v6) = address else {
        return address;
    };
    embedded(v6).map_or(address, IpAddr::V4)
}

/// Returns the IPv4 range that an IPv6 range stands for: `2002:a00::/24` becomes `10.0.0.0/8`. This
/// works only if the prefix ends within the embedded IPv4 address. Any other range stays as it is,
/// and so do Teredo ranges. The range of all mapped addresses, `::ffff:0:0/96`, means all IPv4
/// addresses. A translator's whole range, such as `2002::/16`, does not mean IPv4 addresses.
fn canonical_range(range: IpNet) -> IpNet {
    let IpNet::V6(v6) = range else { return range };
    let (before, least) = match v6.network().segments() {
        [0x2001, ..] => return range,
        [0x2002, ..] => (16, 1),
        [0, 0, 0, 0, 0, 0xffff, ..] => (96, 0),
        _ => (96, 1),
    };
    let bits = v6
        .prefix_len()
        .checked_sub(before)
        .filter(|bits| *bits >= least);
    let spelled = bits.and_then(|bits| Ipv4Net::new(embedded(v6.network())?, bits).ok());
    spelled.map_or(range, IpNet::V4)
}

/// Parses ranges and addresses, and returns the ranges merged and sorted.
pub(super) fn parse_ranges<R: AsRef<str>>(
    texts: impl IntoIterator<Item = R>,
) -> Result<Vec<IpNet>, ConfigError> {
    let ranges = texts
        .into_iter()
        .map(|text| parse_range(text.as_ref()))
        .collect::<Result<_, _>>()?;
    Ok(IpNet::aggregate(&ranges))
}

fn parse_range(text: &str) -> Result<IpNet, ConfigError> {
    let text = text.trim();
    let range = match text.split_once('/') {
        None => text.parse::<IpAddr>().map(IpNet::from).ok(),
        // `IpNet` alone would accept `010.0.0.0`, whose first number may be octal.
        Some((address, _)) if address.parse::<IpAddr>().is_err() => None,
        Some(_) => text.parse().ok(),
    };
    range.map(canonical_range).ok_or_else(|| {
        ConfigError::new(format!(
            "{text:?} is not an address range such as 10.1.2.0/28 or 2001:db8::/32"
        ))
    })
}

/// True if one of these [parsed](parse_ranges) ranges contains the address. An IPv4 range also
/// contains the IPv6 addresses that stand for an address in it.
pub(super) fn have(ranges: &[IpNet], address: IpAddr) -> bool {
    have_exactly(ranges, canonical(address)) || have_exactly(ranges, address)
}

fn have_exactly(ranges: &[IpNet], address: IpAddr) -> bool {
    let begun = &ranges[..ranges.partition_point(|range| range.network() <= address)];
    begun.last().is_some_and(|range| range.contains(&address))
}

/// The IPv4 address that an IPv6 address stands for.
fn embedded(address: Ipv6Addr) -> Option<Ipv4Addr> {
    let (high, low) = match address.segments() {
        [0, 0, 0, 0, 0, 0, 0, 0 | 1] => return None,
        [0, 0, 0, 0, 0, 0 | 0xffff, high, low]
        | [0, 0, 0, 0, 0xffff, 0, high, low]
        | [0x64, 0xff9b, 0, 0, 0, 0, high, low]
        | [0x2002, high, low, ..] => (high, low),
        [0x2001, 0, .., high, low] => (!high, !low),
        _ => return None,
    };
    Some(Ipv4Addr::from_bits(u32::from(high) << 16 | u32::from(low)))
}

/// Address ranges that a layer [exempts](crate::RateLimitLayer::exempt) or
/// [denies](crate::RateLimitLayer::deny). Clones share the ranges, so a task can update them for
/// every layer through one clone.
///
/// ```
/// use tower_sliding_window::{ClientIp, Limit, MemoryStore, RateLimitLayer, extract::AddressList};
///
/// let client_ip = ClientIp::behind(["10.1.2.0/28"])?;
/// let (office, abusers) = (AddressList::new(["203.0.113.0/24", "2001:db8:7::/48"])?, AddressList::default());
/// let layer = RateLimitLayer::new(MemoryStore::new())
///     .limit(Limit::per_minute("requests", 60).by(client_ip.clone()))
///     .exempt(client_ip.clone().within(&office))
///     .deny(client_ip.within(&abusers));
///
/// // Later, while the layer serves requests.
/// abusers.replace(["198.51.100.0/24", "192.0.2.7"])?;
/// assert!(abusers.contains("198.51.100.1".parse()?));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// * `0.0.0.0/0` contains all IPv4 addresses, and `::/0` all IPv6 addresses. An IPv4 range also
///   contains the IPv6 addresses that stand for an address in it, as in [`PeerIp`](super::PeerIp).
///   A translator's whole range, such as `2002::/16`, does not contain IPv4 addresses.
/// * A look-up is a binary search, so a list may have a hundred thousand ranges.
#[derive(Clone, Default)]
pub struct AddressList(Arc<RwLock<Vec<IpNet>>>);

impl AddressList {
    /// A list of ranges and addresses.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] if an item is neither a range nor an address. The error names the item.
    pub fn new<R: AsRef<str>>(ranges: impl IntoIterator<Item = R>) -> Result<Self, ConfigError> {
        Ok(Self(Arc::new(RwLock::new(parse_ranges(ranges)?))))
    }

    /// Replaces all ranges at once, for all clones.
    ///
    /// # Errors
    ///
    /// As for [`new`](Self::new). After an error, the list is unchanged.
    pub fn replace<R: AsRef<str>>(
        &self,
        ranges: impl IntoIterator<Item = R>,
    ) -> Result<(), ConfigError> {
        let ranges = parse_ranges(ranges)?;
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = ranges;
        Ok(())
    }

    /// True if one of the ranges contains the address.
    #[must_use]
    pub fn contains(&self, address: IpAddr) -> bool {
        have(
            &self.0.read().unwrap_or_else(PoisonError::into_inner),
            address,
        )
    }
}

// Shows only the number of ranges, since addresses may be personal data.
impl fmt::Debug for AddressList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("AddressList")
            .field(&self.0.read().unwrap_or_else(PoisonError::into_inner).len())
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    fn key(address: &str) -> Key {
        key_of(address, 64)
    }

    fn key_of(address: &str, bits: u8) -> Key {
        super::key(address.parse().unwrap(), bits)
    }

    #[test]
    fn every_spelling_of_an_ipv4_address_is_one_key() {
        for spelling in [
            "::ffff:192.0.2.1",
            "::ffff:c000:201",
            "::192.0.2.1",
            "::ffff:0:192.0.2.1",
            "64:ff9b::192.0.2.1",
            "2002:c000:201::",
            "2002:c000:201:ffff::7",
            "2001:0:4136:e378:8000:63bf:3fff:fdfe",
        ] {
            assert_eq!(key(spelling), key("192.0.2.1"), "{spelling}");
        }
    }

    #[test]
    fn addresses_beside_the_spellings_stand_for_themselves() {
        for other in [
            "::",
            "::1",
            "64:ff9b:0:1::192.0.2.1",
            "2003:c000:201::",
            "2001:1::3fff:fdfe",
            "::fffe:192.0.2.1",
        ] {
            assert_eq!(
                canonical(other.parse().unwrap()),
                other.parse::<IpAddr>().unwrap()
            );
        }
    }

    /// The operator may put the IPv4 address anywhere into the translated address.
    #[test]
    fn a_locally_translated_address_is_a_key_of_its_own() {
        let translated = [
            "64:ff9b:1:c000:2:100::",
            "64:ff9b:1:c000:2:200::",
            "64:ff9b:1:c0:0:201::",
            "64:ff9b:1:c0:0:202::",
            "64:ff9b:1:0:c0:2:100:0",
            "64:ff9b:1:0:c0:2:200:0",
            "64:ff9b:1::192.0.2.1",
            "64:ff9b:1::192.0.2.2",
        ];
        let keys: HashSet<_> = translated
            .into_iter()
            .chain(["192.0.2.1", "192.0.2.2"])
            .map(key)
            .collect();
        assert_eq!(keys.len(), 10);
        assert_eq!(key_of(translated[0], 32), key(translated[0]));
    }

    #[test]
    fn ipv6_addresses_share_a_key_within_their_prefix_only() {
        assert_eq!(key("2001:db8:1:2::1"), key("2001:db8:1:2:ffff::"));
        assert_ne!(key("2001:db8:1:2::1"), key("2001:db8:1:3::1"));
        assert_ne!(key_of("2001:db8::1", 128), key_of("2001:db8::2", 128));
    }

    #[test]
    fn a_range_is_the_ipv4_range_that_it_spells_or_itself() {
        let has = |range: &str, address: &str| {
            have(&parse_ranges([range]).unwrap(), address.parse().unwrap())
        };
        for range in [
            "10.0.0.0/8",
            "::ffff:10.0.0.0/104",
            "::10.0.0.0/104",
            "::ffff:0:10.0.0.0/104",
            "64:ff9b::10.0.0.0/104",
            "2002:a00::/24",
        ] {
            for address in [
                "10.1.2.3",
                "::ffff:10.1.2.3",
                "64:ff9b::10.1.2.3",
                "2002:a01:203:4::5",
            ] {
                assert!(has(range, address), "{range} {address}");
            }
            for address in [
                "11.1.2.3",
                "::ffff:11.1.2.3",
                "2002:b01:203::",
                "2001:db8::a01:203",
            ] {
                assert!(!has(range, address), "{range} {address}");
            }
        }
        // A prefix that ends after the embedded IPv4 address does not spell an IPv4 range.
        assert!(has("2002:a01:203:4::/64", "2002:a01:203:4::5"));
        assert!(
            !has("2002:a01:203:4::/64", "2002:a01:203:5::5")
                && !has("2002:a01:203:4::/64", "10.1.2.3")
        );
        assert!(has("64:ff9b:1::/48", "64:ff9b:1::10.1.2.3") && !has("64:ff9b:1::/48", "10.1.2.3"));
        assert!(!has("::1/128", "0.0.0.1") && has("::1/128", "::1"));
    }
}
