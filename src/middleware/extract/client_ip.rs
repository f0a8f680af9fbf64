//! The client's address behind trusted proxies.

use std::{error, fmt, net::IpAddr};

use http::{HeaderName, request::Parts};
use ipnet::IpNet;

use super::{
    address::{InvalidPrefix, Ipv6Prefix, Range},
    extractor::KeyExtractor,
    forwarded::{Hop, Hops, Style},
    header::{header_name, single_value},
    key_error::KeyError,
    peer_ip::peer,
};
use crate::key::Key;

const MAX_HOPS: usize = 32;

/// The client's address behind trusted proxies.
///
/// 1. A peer outside the trusted ranges is the client, whatever headers it sends.
/// 2. Behind a trusted peer, exactly one header is read. Default: `X-Forwarded-For`. All others are ignored, since a proxy
///    passes on the headers that it does not overwrite.
/// 3. `X-Forwarded-For` and `Forwarded` are read from right to left, over all of their lines. A trusted hop vouches for the
///    hop before it. The first hop that is not trusted is the client. At an element without a readable address, and after 32
///    hops, the last known hop is the client. A request whose trusted hops take more than 16 KiB gets a 400.
/// 4. A single-value header must be present exactly once, with an address in it. Otherwise the request gets a 400.
/// 5. Addresses have the keys of [`PeerIp`](super::PeerIp): one for each IPv4 address, however it is written, and one for
///    each IPv6 /64. Ranges match all spellings of an address, too.
///
/// ```
/// use std::net::SocketAddr;
/// use http::Request;
/// use tower_sliding_window::{ClientIp, KeyExtractor};
///
/// let client_ip = ClientIp::behind(["10.0.0.0/8"])?;
/// let proxy: SocketAddr = "10.0.0.1:4000".parse()?;
/// // The client wrote the first address itself; the proxy appended the second.
/// let request = Request::get("/").header("x-forwarded-for", "198.51.100.1, 203.0.113.7").extension(proxy);
/// let (parts, ()) = request.body(())?.into_parts();
/// assert_eq!(client_ip.extract(&parts)?.value(), [203, 0, 113, 7]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct ClientIp {
    trusted: Vec<Range>,
    source: Source,
    prefix: Ipv6Prefix,
}

#[derive(Clone, Debug)]
enum Source {
    Chain(HeaderName, Style),
    Single(HeaderName),
}

impl ClientIp {
    /// The client behind proxies in these ranges or at these addresses, such as `10.0.0.0/8` or `2001:db8::1`. Reads
    /// `X-Forwarded-For`.
    ///
    /// # Errors
    ///
    /// [`InvalidCidr`] if one is neither a range nor an address.
    pub fn behind<R: AsRef<str>>(trusted: impl IntoIterator<Item = R>) -> Result<Self, InvalidCidr> {
        let trusted = trusted.into_iter().map(|range| parse_range(range.as_ref())).collect::<Result<_, _>>()?;
        let source = Source::Chain(HeaderName::from_static("x-forwarded-for"), Style::Plain);
        Ok(Self { trusted, source, prefix: Ipv6Prefix::default() })
    }

    /// Reads `Forwarded` (RFC 7239) instead of `X-Forwarded-For`.
    #[must_use]
    pub fn forwarded(mut self) -> Self {
        self.source = Source::Chain(http::header::FORWARDED, Style::Rfc7239);
        self
    }

    /// Reads a header with a single address instead, such as `cf-connecting-ip` or `x-real-ip`. Use it only if the proxy
    /// always overwrites the header.
    ///
    /// # Panics
    ///
    /// If `name` is a text that is not a header name. A [`HeaderName`] never panics.
    #[must_use]
    #[track_caller]
    pub fn single_header(mut self, name: impl TryInto<HeaderName>) -> Self {
        self.source = Source::Single(header_name(name));
        self
    }

    /// Groups IPv6 addresses by this many leading bits. Default: 64. Prefixes of different lengths have different keys.
    ///
    /// # Errors
    ///
    /// [`InvalidPrefix`] if `bits` is not 1 to 128.
    pub fn ipv6_prefix(mut self, bits: u8) -> Result<Self, InvalidPrefix> {
        self.prefix = Ipv6Prefix::new(bits)?;
        Ok(self)
    }

    /// The key of an address, for lists and resets. An IPv6 address has the key of its whole prefix.
    #[must_use]
    pub fn key(&self, address: IpAddr) -> Key {
        self.prefix.key(address)
    }

    fn is_trusted(&self, address: IpAddr) -> bool {
        self.trusted.iter().any(|range| range.contains(address))
    }

    fn client(&self, parts: &Parts) -> Result<IpAddr, KeyError> {
        let peer = peer(parts)?;
        if !self.is_trusted(peer) {
            return Ok(peer);
        }
        match &self.source {
            Source::Chain(name, style) => {
                let (mut client, mut hops) = (peer, Hops::of(&parts.headers, name.as_str(), *style).take(MAX_HOPS));
                while self.is_trusted(client) {
                    match hops.next() {
                        Some(Hop::Address(address)) => client = address,
                        Some(Hop::TooFar) => {
                            return Err(KeyError::invalid(name.as_str().to_owned(), "longer than 16 KiB"));
                        }
                        Some(Hop::Unknown) | None => break,
                    }
                }
                Ok(client)
            }
            Source::Single(name) => {
                let address = single_value(&parts.headers, name)?;
                address.parse().map_err(|_| KeyError::invalid(name.as_str().to_owned(), "not an address"))
            }
        }
    }
}

impl KeyExtractor for ClientIp {
    fn extract(&self, parts: &Parts) -> Result<Key, KeyError> {
        self.client(parts).map(|client| self.key(client))
    }
}

fn parse_range(range: &str) -> Result<Range, InvalidCidr> {
    let range = range.trim();
    let single = || range.parse::<IpAddr>().map(IpNet::from).ok();
    let parsed = range.parse().ok().or_else(single).ok_or_else(|| InvalidCidr { range: range.to_owned() })?;
    Ok(Range::new(parsed))
}

/// A text that is neither an address range nor an address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InvalidCidr {
    range: String,
}

impl fmt::Display for InvalidCidr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} is not an address range such as 10.0.0.0/8 or 2001:db8::/32", self.range)
    }
}

impl error::Error for InvalidCidr {}
