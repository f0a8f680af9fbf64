//! `Header`: the value of one header.

use std::panic::catch_unwind;

use http::{HeaderName, HeaderValue};
use tower_sliding_window::{ApiKey, Header, Key, KeyExtractor, extract::KeyError};

use super::{secret, with};

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

/// One token has a spelling for each way to write `bearer`, and a client adds cookies and addresses
/// as it likes: each would get all units of the limit again.
#[test]
fn a_header_with_an_extractor_of_its_own_is_no_key() {
    for (name, extractor) in [
        ("authorization", "`ApiKey::bearer`"),
        ("Authorization", "`ApiKey::bearer`"),
        ("proxy-authorization", "`Secret::key`"),
        ("cookie", "`Secret::key`"),
        ("X-Forwarded-For", "`ClientIp::behind`"),
        ("forwarded", "`ClientIp::forwarded`"),
        ("x-real-ip", "`ClientIp::single_header`"),
        ("cf-connecting-ip", "`ClientIp::single_header`"),
        ("true-client-ip", "`ClientIp::single_header`"),
        ("cloudfront-viewer-address", "`ClientIp::single_header`"),
    ] {
        let parsed = || HeaderName::try_from(name).unwrap();
        for constructor in [
            catch_unwind(|| drop(Header::new(name))),
            catch_unwind(|| drop(Header::new(parsed()))),
            catch_unwind(|| drop(ApiKey::header(name, &secret()))),
            catch_unwind(|| drop(ApiKey::header(parsed(), &secret()))),
        ] {
            let panic = constructor.expect_err(name);
            let text = panic.downcast_ref::<String>().unwrap();
            assert!(
                text.contains(extractor) && text.contains(&name.to_lowercase()),
                "{text}"
            );
            let error = name.parse::<Header>().unwrap_err();
            assert_eq!(error.to_string(), *text);
        }
    }
}

#[test]
fn a_header_out_of_a_configuration_is_parsed() {
    let request = with(&[("x-tenant", "7")]);
    let parsed: Header = "X-Tenant".parse().unwrap();
    assert_eq!(
        parsed.extract(&request).unwrap(),
        Header::new("x-tenant").extract(&request).unwrap()
    );
    for name in ["", "x tenant", "x-tenant:"] {
        let error = name.parse::<Header>().unwrap_err().to_string();
        assert!(error.contains("must be a token"), "{error}");
    }
}
