//! Extractors. An extractor finds in a request the key that the request is charged to.
//!
//! 1. An extractor returns a key or a [`KeyError`], never "no limit". A request without a key is
//!    rejected with the status of the error.
//! 2. Do not make a value that clients can choose freely the only key of your limits, since each
//!    new value has a new budget. Use a key that an earlier layer has verified, or add a limit by
//!    address.
//! 3. Any closure over [`Parts`](http::request::Parts) is an extractor, for example for host names,
//!    or for the extensions of an authentication layer. Write the type of the closure's argument:
//!    `|parts: &Parts|`. Make no key of a text that clients can spell in several ways, such as a
//!    path: [`choosing_keys`](crate::guide::choosing_keys#by-a-value-in-the-path) shows how to use
//!    a value in the path.
//! 4. [`and`](KeyExtractor::and) makes one key of two. [`or`](KeyExtractor::or) uses the second key
//!    only if the first is absent. If the first key is malformed, the request is rejected. So a
//!    client cannot skip the first extractor by sending garbage.
//! 5. The built-in extractors also make the key of a given value, for a reset or a list: see
//!    [`ApiKey::key`].
//!
//! ```
//! use http::{Request, request::Parts};
//! use tower_sliding_window::{Header, Key, KeyExtractor, extract::KeyError};
//!
//! #[derive(Clone)]
//! struct Tenant(&'static str); // put into the extensions by your authentication
//!
//! let tenant = |parts: &Parts| match parts.extensions.get() {
//!     Some(Tenant(tenant)) => Ok(Key::new("tenant", *tenant)),
//!     None => Err(KeyError::missing("tenant")),
//! };
//! let request = Request::get("/items").extension(Tenant("7")).header("x-region", "eu");
//! let (parts, ()) = request.body(()).unwrap().into_parts();
//! assert_eq!(tenant.extract(&parts).unwrap(), Key::new("tenant", "7"));
//!
//! // One budget for each tenant in each region.
//! assert!(tenant.and(Header::new("x-region")).extract(&parts).is_ok());
//! ```

mod address;
mod address_list;
mod api_key;
mod client_ip;
mod extractor;
mod forwarded;
mod header;
mod upstream_host;

pub use self::{
    address_list::AddressList,
    api_key::ApiKey,
    client_ip::{ClientIp, PeerIp},
    extractor::{Everyone, KeyError, KeyExtractor},
    header::Header,
    upstream_host::UpstreamHost,
};
pub use crate::secret::Secret;
