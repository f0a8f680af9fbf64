//! CORS preflights.

use http::{
    HeaderMap, HeaderName, HeaderValue, Method,
    header::{ACCESS_CONTROL_REQUEST_METHOD, CONTENT_LENGTH, ORIGIN, TRANSFER_ENCODING},
};

/// Whether an `OPTIONS` request of these headers is one that a browser sends by itself before a
/// request to another origin (Fetch, section 3.3.2), which is counted in its place. A preflight has
/// one origin, one method, and no body. Over HTTP/2 the headers do not tell whether there is a
/// body, and a layer takes bodies of any type, so one with a body is taken for a preflight there.
pub(super) fn is_preflight(headers: &HeaderMap) -> bool {
    only(headers, &ORIGIN).is_some()
        && only(headers, &ACCESS_CONTROL_REQUEST_METHOD)
            .is_some_and(|value| Method::from_bytes(value.as_bytes()).is_ok())
        && !headers.contains_key(TRANSFER_ENCODING)
        && headers.get_all(CONTENT_LENGTH).into_iter().all(|length| length == "0")
}

fn only<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Option<&'a HeaderValue> {
    let mut values = headers.get_all(name).into_iter();
    values.next().filter(|_| values.next().is_none())
}
