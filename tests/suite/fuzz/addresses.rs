//! `X-Forwarded-For`, `Forwarded` and single-value headers: text that the client wrote never
//! changes the key.

use std::{
    collections::HashSet,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
};

use http::{Request, request::Parts};
use proptest::{collection::vec, option, prelude::*};
use tower_sliding_window::{ClientIp, Key, KeyExtractor, PeerIp};

use super::{fuzz, header_text, header_value};

const PROXY: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1));
const SIGNS: &[u8] = b",,,;;==\"\"\\\\[]::..ffoorr  0129";

/// The header of a chain of hops.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Style {
    XForwardedFor,
    Forwarded,
}

impl Style {
    fn name(self) -> &'static str {
        match self {
            Self::XForwardedFor => "x-forwarded-for",
            Self::Forwarded => "forwarded",
        }
    }

    fn extractor(self) -> ClientIp {
        let extractor = ClientIp::behind(["10.0.0.0/8"]).unwrap();
        if self == Self::Forwarded {
            extractor.forwarded()
        } else {
            extractor
        }
    }

    /// The element that a proxy appends for a peer, whose host name the client has chosen.
    fn element(self, hop: &Hop) -> Vec<u8> {
        let node = hop.node.as_bytes();
        if self == Self::XForwardedFor {
            return node.to_vec();
        }
        let mut element = [b"for=\"", node, b"\""].concat();
        if let Some(host) = &hop.host {
            element.extend(b";host=\"");
            host.iter().for_each(|byte| {
                let escape: &[u8] = if b"\"\\".contains(byte) { b"\\" } else { b"" };
                element.extend(escape.iter().chain([byte]));
            });
            element.push(b'"');
        }
        element
    }
}

/// A peer as a proxy writes it.
#[derive(Clone, Debug)]
struct Hop {
    address: IpAddr,
    node: String,
    host: Option<Vec<u8>>,
}

/// A hop with one of these addresses, in one of the ways to write it.
fn hop(address: impl Strategy<Value = IpAddr>) -> impl Strategy<Value = Hop> {
    (
        address,
        0..4_u8,
        any::<u16>(),
        option::of(header_text(SIGNS)),
    )
        .prop_map(|(address, form, port, host)| {
            let node = match (form, address) {
                (0, _) => address.to_string(),
                (1, IpAddr::V4(address)) => format!("::ffff:{address}"),
                (2, IpAddr::V4(address)) => format!("[::ffff:{address}]:{port}"),
                (1 | 2, IpAddr::V6(address)) => format!("[{address}]"),
                _ => SocketAddr::new(address, port).to_string(),
            };
            Hop {
                address,
                node,
                host,
            }
        })
}

/// An address that is not a proxy.
fn stranger() -> impl Strategy<Value = IpAddr> {
    let v4 = (11..=255_u8, any::<[u8; 3]>()).prop_map(|(a, [b, c, d])| IpAddr::from([a, b, c, d]));
    let v6 = any::<u64>().prop_map(|low| {
        IpAddr::from(Ipv6Addr::from_bits(
            0x2001_0db8 << 96 | u128::from(low) << 32,
        ))
    });
    prop_oneof![v4, v6]
}

fn trusted() -> impl Strategy<Value = IpAddr> {
    any::<[u8; 3]>().prop_map(|[b, c, d]| IpAddr::from([10, b, c, d]))
}

fn style() -> impl Strategy<Value = Style> {
    prop_oneof![Just(Style::XForwardedFor), Just(Style::Forwarded)]
}

/// Headers that a client sends: lines of garbage, or lines that look like hops.
fn claims() -> impl Strategy<Value = Vec<Vec<u8>>> {
    let hops = vec(hop(prop_oneof![stranger(), trusted()]), 0..4).prop_map(|hops| {
        let elements: Vec<_> = hops
            .iter()
            .map(|hop| Style::Forwarded.element(hop))
            .collect();
        elements.join(&b", "[..])
    });
    let list = vec(hop(prop_oneof![stranger(), trusted()]), 0..4).prop_map(|hops| {
        let nodes: Vec<_> = hops.into_iter().map(|hop| hop.node.into_bytes()).collect();
        nodes.join(&b", "[..])
    });
    vec(
        prop_oneof![2 => header_text(SIGNS), 1 => hops, 1 => list],
        0..3,
    )
}

fn request(peer: IpAddr, name: &str, lines: &[Vec<u8>]) -> Parts {
    let request = lines.iter().fold(Request::builder(), |request, line| {
        request.header(name, header_value(line))
    });
    request
        .extension(SocketAddr::new(peer, 50_000))
        .body(())
        .unwrap()
        .into_parts()
        .0
}

fn key(address: IpAddr) -> Key {
    PeerIp::new().key(address)
}

/// Behind any number of proxies, each of which appends to the last line or begins a new one.
#[test]
fn the_left_end_never_changes_the_key() {
    let values = (
        style(),
        claims(),
        hop(stranger()),
        vec((hop(trusted()), any::<bool>()), 0..6),
        any::<bool>(),
    );
    fuzz(
        &values,
        |(style, mut lines, client, proxies, is_new_line)| {
            let written = [(client.clone(), is_new_line)].into_iter().chain(proxies);
            for (hop, is_new_line) in written {
                let element = style.element(&hop);
                match lines.last_mut().filter(|_| !is_new_line) {
                    Some(line) => {
                        line.extend(b", ");
                        line.extend(element);
                    }
                    None => lines.push(element),
                }
            }
            let parts = request(PROXY, style.name(), &lines);
            prop_assert_eq!(
                style.extractor().extract(&parts).unwrap(),
                key(client.address)
            );
            Ok(())
        },
    );
}

#[test]
fn an_untrusted_peer_is_the_client() {
    fuzz(&(style(), claims(), stranger()), |(style, lines, peer)| {
        let parts = request(peer, style.name(), &lines);
        prop_assert_eq!(style.extractor().extract(&parts).unwrap(), key(peer));
        let single = style.extractor().single_header(style.name());
        prop_assert_eq!(single.extract(&parts).unwrap(), key(peer));
        Ok(())
    });
}

/// If the last proxy did not know the address, the hops before it are not read.
#[test]
fn nothing_is_read_left_of_an_unreadable_address() {
    let unreadable = prop_oneof![
        Just("unknown"),
        Just("_hidden"),
        Just("999.1.1.1"),
        Just("[::"),
        Just("\"")
    ];
    fuzz(
        &(style(), claims(), unreadable, trusted()),
        |(style, mut lines, node, proxy)| {
            let hop = |node: String| {
                style.element(&Hop {
                    address: proxy,
                    node,
                    host: None,
                })
            };
            let line = [hop(node.to_owned()), hop(proxy.to_string())].join(&b", "[..]);
            match lines.last_mut() {
                Some(last) => last.extend([b", ", &line[..]].concat()),
                None => lines.push(line),
            }
            let parts = request(PROXY, style.name(), &lines);
            prop_assert_eq!(style.extractor().extract(&parts).unwrap(), key(proxy));
            Ok(())
        },
    );
}

/// Garbage in all lines gives a key or an error for the client.
#[test]
fn every_header_is_read_without_a_panic() {
    fuzz(&(style(), claims()), |(style, lines)| {
        let parts = request(PROXY, style.name(), &lines);
        prop_assert!(style.extractor().extract(&parts).is_ok());
        let single = style
            .extractor()
            .single_header(style.name())
            .extract(&parts);
        let only = if let [line] = &lines[..] {
            str::from_utf8(line).ok().map(str::trim)
        } else {
            None
        };
        // One address has the same grammar alone and in a list.
        let parts = request(
            PROXY,
            Style::XForwardedFor.name(),
            &[only.unwrap_or_default().as_bytes().to_vec()],
        );
        let listed = Style::XForwardedFor.extractor().extract(&parts).unwrap();
        match only.filter(|line| !line.contains(',') && listed != key(PROXY)) {
            Some(_) => prop_assert_eq!(single.unwrap(), listed),
            None => prop_assert_eq!(
                single.map_or_else(|error| error.status().as_u16(), |_| 200),
                400
            ),
        }
        Ok(())
    });
}

/// A header with one address reads it in every form of a list, and that of CloudFront with any
/// port.
#[test]
fn a_single_address_is_read_in_every_form_and_its_port_makes_no_other_key() {
    fuzz(&(hop(stranger()), any::<[u16; 2]>()), |(hop, ports)| {
        let extractor = |name| {
            Style::XForwardedFor
                .extractor()
                .single_header(name)
                .ipv6_prefix(128)
                .unwrap()
        };
        let whole = PeerIp::new().ipv6_prefix(128).unwrap().key(hop.address);
        let parts = request(PROXY, "x-real-ip", &[hop.node.into_bytes()]);
        prop_assert_eq!(
            extractor("x-real-ip").extract(&parts).unwrap(),
            whole.clone()
        );
        for port in ports {
            let name = "cloudfront-viewer-address";
            let parts = request(
                PROXY,
                name,
                &[format!("{}:{port}", hop.address).into_bytes()],
            );
            prop_assert_eq!(extractor(name).extract(&parts).unwrap(), whole.clone());
        }
        Ok(())
    });
}

/// Wherever they are, empty elements change no key.
#[test]
fn empty_elements_never_change_the_key() {
    let hops = vec((hop(prop_oneof![stranger(), trusted()]), 0..4_usize), 0..8);
    fuzz(&(style(), hops, 0..4_usize), |(style, hops, left)| {
        let join =
            |elements: Vec<Vec<u8>>| request(PROXY, style.name(), &[elements.join(&b","[..])]);
        let full = join(hops.iter().map(|(hop, _)| style.element(hop)).collect());
        let empty = |count: usize| (0..count).map(|place| b" ".repeat(place));
        let around = hops
            .iter()
            .flat_map(|(hop, right)| [style.element(hop)].into_iter().chain(empty(*right)));
        let parts = join(empty(left).chain(around).collect());
        prop_assert_eq!(
            style.extractor().extract(&parts).unwrap(),
            style.extractor().extract(&full).unwrap()
        );
        Ok(())
    });
}

/// The ways to write an IPv4 address as IPv6, with noise in the bits that are not part of it.
fn spellings(address: Ipv4Addr, noise: u128) -> Vec<IpAddr> {
    let bits = u128::from(address.to_bits());
    let low = |prefix: u128| Ipv6Addr::from_bits(prefix | bits);
    let sixto4 = Ipv6Addr::from_bits(0x2002 << 112 | bits << 80 | noise >> 48);
    let teredo = Ipv6Addr::from_bits(
        0x2001 << 112 | noise >> 64 << 32 & (u128::MAX >> 32) | bits ^ 0xffff_ffff,
    );
    let compatible = low(0);
    let written = [
        low(0xffff << 32),
        low(0xffff << 48),
        low(0x64_ff9b << 96),
        sixto4,
        teredo,
    ];
    let is_itself = compatible.is_loopback() || compatible.is_unspecified();
    let all = written
        .into_iter()
        .chain((!is_itself).then_some(compatible))
        .map(IpAddr::V6);
    all.chain([IpAddr::V4(address)]).collect()
}

/// The address behind a local translator, by the length of its prefix (RFC 6052, section 2.2).
fn translated_locally(address: Ipv4Addr, length: u8) -> IpAddr {
    let (prefix, bits) = (0x0064_ff9b_0001_u128 << 80, u128::from(address.to_bits()));
    // Bits 64 to 71 are left out, and so many bits of the address come after them.
    let behind = match length {
        48 => 16,
        56 => 24,
        64 => 32,
        _ => return Ipv6Addr::from_bits(prefix | bits).into(),
    };
    Ipv6Addr::from_bits(
        prefix | bits >> behind << 64 | (bits & ((1 << behind) - 1)) << (56 - behind),
    )
    .into()
}

/// Each IPv4 address has one key, in every spelling.
#[test]
fn all_spellings_of_an_ipv4_address_are_one_key_and_no_two_addresses_share_one() {
    let address = || any::<u32>().prop_map(Ipv4Addr::from_bits);
    // Neighbouring addresses differ in a single bit.
    let pair = (
        address(),
        prop_oneof![address().prop_map(Ok), (0..32_u32).prop_map(Err)],
    );
    fuzz(
        &(pair, any::<[u128; 2]>(), 1..=128_u8),
        |((one, other), noise, prefix)| {
            let other = other.unwrap_or_else(|bit| Ipv4Addr::from_bits(one.to_bits() ^ 1 << bit));
            let extractor = PeerIp::new().ipv6_prefix(prefix).unwrap();
            let keys = |address, noise| -> HashSet<Key> {
                spellings(address, noise)
                    .into_iter()
                    .map(|address| extractor.key(address))
                    .collect()
            };
            let (ours, theirs) = (keys(one, noise[0]), keys(other, noise[1]));
            prop_assert_eq!((ours.len(), theirs.len()), (1, 1));
            prop_assert_eq!(ours == theirs, one == other);
            for length in [48, 56, 64, 96] {
                let [ours, theirs] =
                    [one, other].map(|address| extractor.key(translated_locally(address, length)));
                prop_assert_eq!(ours == theirs, one == other);
            }
            Ok(())
        },
    );
}

/// A network has another key than its subnets, however its address ends.
#[test]
fn ipv6_prefixes_of_different_lengths_never_share_a_key() {
    let address = (any::<u128>(), 0..128_u32)
        .prop_map(|(bits, zeros)| Ipv6Addr::from_bits(bits >> zeros << zeros));
    fuzz(
        &(address, 1..=128_u8, 1..=128_u8),
        |(address, one, other)| {
            let key = |bits: u8| PeerIp::new().ipv6_prefix(bits).unwrap().key(address.into());
            let is_counted_whole = PeerIp::new().key(address.into()).value().len() == 4
                || address.segments()[..3] == [0x64, 0xff9b, 1];
            prop_assert_eq!(key(one) == key(other), one == other || is_counted_whole);
            Ok(())
        },
    );
}
