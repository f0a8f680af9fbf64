//! `ApiKey`: bearer tokens and API keys, hashed with a secret.

use axum::response::IntoResponse;
use tower_sliding_window::{ApiKey, Key, KeyExtractor, Rejection, Secret, extract::KeyError};

use super::{secret, with};

fn bearer(value: &str) -> Result<Key, KeyError> {
    ApiKey::bearer(&secret()).extract(&with(&[("authorization", value)]))
}

#[test]
fn the_key_is_a_keyed_hash_of_128_bits() {
    let extract = |secret: &Secret| {
        ApiKey::header("x-api-key", secret)
            .extract(&with(&[("x-api-key", "k3y")]))
            .unwrap()
    };
    let key = extract(&secret());
    assert_eq!(key.value().len(), 16);
    assert_eq!(key, extract(&secret()), "the same on every instance");
    // It must stay the same in the next version.
    assert_eq!(
        u128::from_be_bytes(key.value().try_into().unwrap()),
        0xc57cb5e434cecdcb279fc5b856d26767
    );
    assert_ne!(
        key,
        extract(&Secret::new("another secret of ours").unwrap())
    );
}

/// An authentication layer may accept all of these as the same token. If they were several keys,
/// they would multiply the quota.
#[test]
fn every_spelling_of_a_bearer_token_is_one_key() {
    for spelling in [
        "bearer t0ken",
        "BEARER t0ken",
        "Bearer   t0ken",
        "Bearer t0ken  ",
        "Bearer\tt0ken",
    ] {
        assert_eq!(
            bearer(spelling).unwrap(),
            bearer("Bearer t0ken").unwrap(),
            "{spelling:?}"
        );
    }
    assert_ne!(
        bearer("Bearer T0ken").unwrap(),
        bearer("Bearer t0ken").unwrap()
    );
}

#[test]
fn a_missing_or_malformed_key_is_a_401_with_a_challenge() {
    for value in [
        "",
        "Bearer",
        "Bearer ",
        "Bearer a b",
        "Basic dXNlcjpwYXNz",
        "t0ken",
    ] {
        let error = bearer(value).unwrap_err();
        assert!(
            !error.to_string().contains("t0ken"),
            "the value is nobody's business: {error}"
        );
        let response = Rejection::from(error).into_response();
        assert_eq!(
            (
                response.status().as_u16(),
                &response.headers()["www-authenticate"]
            ),
            (401, &"Bearer".parse().unwrap())
        );
    }
    let key = ApiKey::header("x-api-key", &secret());
    for lines in [
        &[][..],
        &[("x-api-key", "a"), ("x-api-key", "a")],
        &[("x-api-key", &"a".repeat(4097))],
    ] {
        assert_eq!(key.extract(&with(lines)).unwrap_err().status(), 401);
    }
}

#[test]
fn a_short_secret_is_an_error_and_no_secret_is_shown() {
    let error = Secret::new("too short").unwrap_err();
    assert_eq!(
        error.to_string(),
        "a secret must have at least 16 bytes, not 9: `openssl rand -hex 32` makes one"
    );
    let shown = format!(
        "{:?} {:?}",
        secret(),
        ApiKey::header("x-api-key", &secret())
    );
    assert!(!shown.contains("0123456789abcdef"));
}

/// As of a buffer that nothing has filled.
#[test]
fn a_secret_of_one_byte_again_and_again_is_an_error() {
    for secret in [[0; 32], [b'x'; 32]] {
        let error = Secret::new(secret).unwrap_err().to_string();
        assert_eq!(
            error,
            "a secret must not be one byte again and again: `openssl rand -hex 32` makes one"
        );
    }
}

#[test]
fn a_secret_out_of_an_example_is_an_error() {
    for text in [
        "32 random bytes, the same on every instance",
        "32 random bytes out of the vault",
        // As an environment file and a file have it.
        "\"32 random bytes out of the vault\"",
        "everybody can read this secret\n",
        // Where no shell has replaced the command.
        "$(openssl rand -hex 32)",
    ] {
        let error = Secret::new(text).unwrap_err().to_string();
        assert_eq!(
            error,
            "a secret must not stand in an example: `openssl rand -hex 32` makes one"
        );
    }
}
