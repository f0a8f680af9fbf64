//! Addresses: from what a connection or a header shows to what a limit counts by.

use std::{
    error, fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use crate::key::Key;

/// How many leading bits of an IPv6 address make a key: a single subscriber has at least a /64 (RFC 6177).
#[derive(Clone, Copy, Debug)]
pub(super) struct Ipv6Prefix(u8);

impl Ipv6Prefix {
    pub(super) fn new(bits: u8) -> Result<Self, InvalidPrefix> {
        if (1..=128).contains(&bits) { Ok(Self(bits)) } else { Err(InvalidPrefix { bits }) }
    }

    /// The key of an address: an IPv4 address whole, an IPv6 address by its prefix.
    pub(super) fn key(self, address: IpAddr) -> Key {
        match canonical(address) {
            IpAddr::V4(address) => Key::new("ip", address.octets()),
            IpAddr::V6(address) => {
                let mask = u128::MAX << (128 - u32::from(self.0));
                Key::new("ip", (address.to_bits() & mask).to_be_bytes())
            }
        }
    }
}

impl Default for Ipv6Prefix {
    fn default() -> Self {
        Self(64)
    }
}

/// An IPv4 address stays one however it is written: as it is, mapped into IPv6 by a dual-stack listener
/// (`::ffff:a.b.c.d`), or translated by NAT64 (`64:ff9b::a.b.c.d`, RFC 6052). Grouped by /64, all of the latter two
/// would share one key.
pub(super) fn canonical(address: IpAddr) -> IpAddr {
    const NAT64: u128 = Ipv6Addr::new(0x64, 0xff9b, 0, 0, 0, 0, 0, 0).to_bits();

    match address.to_canonical() {
        IpAddr::V6(address) if address.to_bits() >> 32 == NAT64 >> 32 => {
            IpAddr::V4(Ipv4Addr::from_bits(address.to_bits() as u32))
        }
        address => address,
    }
}

/// An IPv6 prefix length that is not 1 to 128 bits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InvalidPrefix {
    bits: u8,
}

impl fmt::Display for InvalidPrefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "an IPv6 prefix must have 1 to 128 bits, not {}", self.bits)
    }
}

impl error::Error for InvalidPrefix {}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(address: &str) -> Key {
        Ipv6Prefix::default().key(address.parse().unwrap())
    }

    #[test]
    fn every_spelling_of_an_ipv4_address_is_one_key_and_no_two_addresses_share_one() {
        for spelling in ["::ffff:192.0.2.1", "::ffff:c000:201", "64:ff9b::192.0.2.1"] {
            assert_eq!(key(spelling), key("192.0.2.1"), "{spelling}");
        }
        assert_ne!(key("::ffff:192.0.2.1"), key("::ffff:192.0.2.2"));
    }

    #[test]
    fn ipv6_addresses_share_a_key_within_their_prefix_only() {
        assert_eq!(key("2001:db8:1:2::1"), key("2001:db8:1:2:ffff::"));
        assert_ne!(key("2001:db8:1:2::1"), key("2001:db8:1:3::1"));
        let single = Ipv6Prefix::new(128).unwrap();
        assert_ne!(single.key("2001:db8::1".parse().unwrap()), single.key("2001:db8::2".parse().unwrap()));
    }

    #[test]
    fn a_prefix_without_bits_or_with_too_many_is_refused_by_value() {
        assert_eq!(Ipv6Prefix::new(129).unwrap_err().to_string(), "an IPv6 prefix must have 1 to 128 bits, not 129");
        assert!(Ipv6Prefix::new(0).is_err());
    }
}
