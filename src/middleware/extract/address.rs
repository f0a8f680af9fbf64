//! IP addresses: the key of an address, and ranges of addresses.
//!
//! 1. An IPv4 address has one key, however it is written. These IPv6 addresses stand for an IPv4 address:
//!
//!    | address | what it is |
//!    |---|---|
//!    | `::ffff:a.b.c.d` | mapped by a dual-stack listener (RFC 4291) |
//!    | `::a.b.c.d`, but not `::` and `::1` | "compatible", long deprecated (RFC 4291) |
//!    | `::ffff:0:a.b.c.d` | translated (RFC 2765) |
//!    | `64:ff9b::a.b.c.d` | translated by NAT64 (RFC 6052) |
//!    | `2002:aabb:ccdd::/48` | 6to4 (RFC 3056): a network behind that address |
//!    | `2001::/32` | Teredo (RFC 4380): a host behind the address in the last 32 bits, which are inverted |
//!
//!    Grouped by /64, clients would share a key, or one client would have 65,536.
//! 2. In `64:ff9b:1::/48` (RFC 8215), only the operator knows the place of the IPv4 address. So the whole address is the key.
//!    A client still has one key only: a translator makes one address of each IPv4 address, and no other network routes that
//!    prefix.
//! 3. Any other IPv6 address has the key of its prefix. The length of the prefix is part of the key.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

use crate::{
    error::{ConfigError, ConfigErrorKind},
    key::Key,
};

/// The leading bits of an IPv6 address that make its key. Default: 64, since a subscriber has at least a /64 (RFC 6177).
#[derive(Clone, Copy, Debug)]
pub(super) struct Ipv6Prefix(u8);

impl Ipv6Prefix {
    const WHOLE: Self = Self(128);

    pub(super) fn new(bits: u8) -> Result<Self, ConfigError> {
        if (1..=128).contains(&bits) {
            return Ok(Self(bits));
        }
        let text = format!("an IPv6 prefix must have 1 to 128 bits, not {bits}");
        Err(ConfigError::new(ConfigErrorKind::Address, text))
    }

    pub(super) fn key(self, address: IpAddr) -> Key {
        match canonical(address) {
            IpAddr::V4(address) => Key::new("ip", address.octets()),
            IpAddr::V6(address) => {
                let Self(bits) = if is_translated_locally(address) { Self::WHOLE } else { self };
                let mask = u128::MAX << (128 - u32::from(bits));
                Key::joined("ip", &[&[bits], &(address.to_bits() & mask).to_be_bytes()])
            }
        }
    }
}

impl Default for Ipv6Prefix {
    fn default() -> Self {
        Self(64)
    }
}

/// A prefix of IPv6 addresses that stand for IPv4 addresses.
struct Embedding {
    prefix: Ipv6Addr,
    bits: u8,
    /// The bits after the IPv4 address.
    behind: u8,
    is_inverted: bool,
}

static EMBEDDINGS: [Embedding; 6] = [
    Embedding::of_last_bits([0, 0, 0, 0, 0, 0xffff], 96),
    Embedding::of_last_bits([0; 6], 96),
    Embedding::of_last_bits([0, 0, 0, 0, 0xffff, 0], 96),
    Embedding::of_last_bits([0x64, 0xff9b, 0, 0, 0, 0], 96),
    Embedding { behind: 80, ..Embedding::of_last_bits([0x2002, 0, 0, 0, 0, 0], 16) },
    Embedding { is_inverted: true, ..Embedding::of_last_bits([0x2001, 0, 0, 0, 0, 0], 32) },
];

impl Embedding {
    const fn of_last_bits([a, b, c, d, e, f]: [u16; 6], bits: u8) -> Self {
        Self { prefix: Ipv6Addr::new(a, b, c, d, e, f, 0, 0), bits, behind: 0, is_inverted: false }
    }

    fn has(&self, address: Ipv6Addr) -> bool {
        (address.to_bits() ^ self.prefix.to_bits()) >> (128 - self.bits) == 0
    }

    fn address_in(&self, address: Ipv6Addr) -> Ipv4Addr {
        let embedded = (address.to_bits() >> self.behind) as u32;
        Ipv4Addr::from_bits(if self.is_inverted { !embedded } else { embedded })
    }

    /// The IPv4 range that an IPv6 range spells: its prefix ends within the IPv4 address.
    fn range_in(&self, range: Ipv6Net) -> Option<Ipv4Net> {
        let is_all_of_it = self.bits + 32 + self.behind == 128;
        let bits = range.prefix_len().checked_sub(self.bits).filter(|bits| is_all_of_it && *bits <= 32)?;
        Ipv4Net::new(self.address_in(range.network()), bits).ok()
    }
}

fn embedding(address: Ipv6Addr) -> Option<&'static Embedding> {
    let is_itself = matches!(address, Ipv6Addr::UNSPECIFIED | Ipv6Addr::LOCALHOST);
    EMBEDDINGS.iter().find(|embedding| embedding.has(address)).filter(|_| !is_itself)
}

fn is_translated_locally(address: Ipv6Addr) -> bool {
    matches!(address.segments(), [0x64, 0xff9b, 1, ..])
}

/// The IPv4 address that an address stands for, or the address.
pub(super) fn canonical(address: IpAddr) -> IpAddr {
    match address {
        IpAddr::V6(address) => {
            embedding(address).map_or_else(|| address.into(), |found| found.address_in(address).into())
        }
        address => address,
    }
}

/// A range of addresses. A range of IPv4 addresses contains all their spellings, even if the range is written in IPv6.
#[derive(Clone, Copy, Debug)]
pub(super) struct Range(IpNet);

impl Range {
    pub(super) fn new(range: IpNet) -> Self {
        let embedded = match range {
            IpNet::V6(range) => embedding(range.network()).and_then(|found| found.range_in(range)),
            IpNet::V4(_) => None,
        };
        Self(embedded.map_or(range, IpNet::V4))
    }

    pub(super) fn contains(&self, address: IpAddr) -> bool {
        match self.0 {
            IpNet::V4(_) => self.0.contains(&canonical(address)),
            IpNet::V6(_) => self.0.contains(&address),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    fn key(address: &str) -> Key {
        Ipv6Prefix::default().key(address.parse().unwrap())
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
        for other in ["::", "::1", "64:ff9b:0:1::192.0.2.1", "2003:c000:201::", "2001:1::3fff:fdfe", "::fffe:192.0.2.1"]
        {
            assert_eq!(canonical(other.parse().unwrap()), other.parse::<IpAddr>().unwrap());
        }
    }

    /// Wherever the operator puts the IPv4 address in it.
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
        let keys: HashSet<_> = translated.into_iter().chain(["192.0.2.1", "192.0.2.2"]).map(key).collect();
        assert_eq!(keys.len(), 10);
        let wide = Ipv6Prefix::new(32).unwrap();
        assert_eq!(wide.key(translated[0].parse().unwrap()), key(translated[0]));
    }

    #[test]
    fn ipv6_addresses_share_a_key_within_their_prefix_only() {
        assert_eq!(key("2001:db8:1:2::1"), key("2001:db8:1:2:ffff::"));
        assert_ne!(key("2001:db8:1:2::1"), key("2001:db8:1:3::1"));
        let single = Ipv6Prefix::new(128).unwrap();
        assert_ne!(single.key("2001:db8::1".parse().unwrap()), single.key("2001:db8::2".parse().unwrap()));
    }

    #[test]
    fn a_range_is_the_ipv4_range_that_it_spells_or_itself() {
        let holds = |range: &str, address: &str| Range::new(range.parse().unwrap()).contains(address.parse().unwrap());
        for range in [
            "10.0.0.0/8",
            "::ffff:10.0.0.0/104",
            "::10.0.0.0/104",
            "::ffff:0:10.0.0.0/104",
            "64:ff9b::10.0.0.0/104",
            "2002:a00::/24",
        ] {
            for address in ["10.1.2.3", "::ffff:10.1.2.3", "64:ff9b::10.1.2.3", "2002:a01:203:4::5"] {
                assert!(holds(range, address), "{range} {address}");
            }
            for address in ["11.1.2.3", "::ffff:11.1.2.3", "2002:b01:203::", "2001:db8::a01:203"] {
                assert!(!holds(range, address), "{range} {address}");
            }
        }
        // Narrower than the IPv4 address: nothing else is in it.
        assert!(holds("2002:a01:203:4::/64", "2002:a01:203:4::5"));
        assert!(!holds("2002:a01:203:4::/64", "2002:a01:203:5::5") && !holds("2002:a01:203:4::/64", "10.1.2.3"));
        assert!(holds("64:ff9b:1::/48", "64:ff9b:1::10.1.2.3") && !holds("64:ff9b:1::/48", "10.1.2.3"));
        assert!(!holds("::1/128", "0.0.0.1") && holds("::1/128", "::1"));
    }

    #[test]
    fn a_prefix_without_bits_or_with_too_many_is_refused_by_value() {
        assert_eq!(Ipv6Prefix::new(129).unwrap_err().to_string(), "an IPv6 prefix must have 1 to 128 bits, not 129");
        assert!(Ipv6Prefix::new(0).is_err());
    }
}
