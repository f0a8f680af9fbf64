//! `Header`: the value of one header.

use http::HeaderValue;
use tower_sliding_window::{Header, Key, KeyExtractor, extract::KeyError};

use super::with;

fn tenant(lines: &[(&str, &str)]) -> Result<Key, KeyError> {
    Header::new("X-Tenant").extract(&with(lines))
}

#[test]
fn the_key_is_the_trimmed_value() {
    assert_eq!(
        tenant(&[("x-tenant", "seven")]).unwrap(),
        tenant(&[("x-tenant", "  seven\t")]).unwrap()
    );
    assert_ne!(
        tenant(&[("x-tenant", "seven")]).unwrap(),
        tenant(&[("x-tenant", "Seven")]).unwrap()
    );
}

#[test]
fn two_headers_never_give_one_key() {
    let request = with(&[("x-tenant", "7"), ("x-user", "7")]);
    let keys = ["x-tenant", "x-user"].map(|name| Header::new(name).extract(&request).unwrap());
    assert_ne!(keys[0], keys[1]);
}

#[test]
fn a_missing_or_malformed_value_is_rejected() {
    let long = "x".repeat(4097);
    for (lines, problem) in [
        (&[][..], "missing"),
        (&[("x-tenant", "")], "empty"),
        (&[("x-tenant", "  ")], "empty"),
        (&[("x-tenant", "7"), ("x-tenant", "8")], "repeated"),
        (&[("x-tenant", &long)], "longer than 4 KiB"),
    ] {
        let error = tenant(lines).unwrap_err();
        assert_eq!(
            (error.status().as_u16(), error.to_string()),
            (400, format!("x-tenant: {problem}"))
        );
    }
    assert!(tenant(&[("x-tenant", &long[1..])]).is_ok());
    let mut request = with(&[]);
    request
        .headers
        .insert("x-tenant", HeaderValue::from_bytes(b"\xff\xfe").unwrap());
    assert_eq!(
        Header::new("x-tenant")
            .extract(&request)
            .unwrap_err()
            .to_string(),
        "x-tenant: not UTF-8"
    );
}

#[test]
#[should_panic = "a header name must be a token"]
fn an_invalid_header_name_panics_where_the_layer_is_built() {
    let _ = Header::new("x tenant");
}
