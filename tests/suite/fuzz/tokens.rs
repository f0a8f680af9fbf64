//! Bearer tokens, API keys and header values: there is one way to read each, and no error shows
//! them.

use http::{Request, request::Parts};
use proptest::{collection::vec, prelude::*, sample::select};
use tower_sliding_window::{ApiKey, Header, KeyExtractor, Secret};

use super::{fuzz, header_text, header_value};

const SIGNS: &[u8] = b"bearerBEARER   \t\t,=\"xyz";

fn secret() -> Secret {
    Secret::new("0123456789abcdef").unwrap()
}

fn request(name: &str, lines: &[Vec<u8>]) -> Parts {
    let request = lines.iter().fold(Request::builder(), |request, line| {
        request.header(name, header_value(line))
    });
    request.body(()).unwrap().into_parts().0
}

/// Garbage, often after a scheme.
fn credentials() -> impl Strategy<Value = Vec<u8>> {
    let scheme = select(vec![
        "", "Bearer ", "bearer  ", "Basic ", "Bearer", "Bearer\t",
    ]);
    (scheme, header_text(SIGNS)).prop_map(|(scheme, rest)| [scheme.as_bytes(), &rest].concat())
}

/// An accepted value is the scheme and one token, and its key is the key of that token.
#[test]
fn a_bearer_token_is_one_token_behind_its_scheme() {
    let extractor = ApiKey::bearer(&secret());
    fuzz(&vec(credentials(), 0..3), |lines| {
        match extractor.extract(&request("authorization", &lines)) {
            Ok(key) => {
                let words: Vec<_> = str::from_utf8(&lines[0])
                    .unwrap()
                    .split_whitespace()
                    .collect();
                prop_assert!(
                    lines.len() == 1 && words.len() == 2 && words[0].eq_ignore_ascii_case("bearer")
                );
                prop_assert!(!words[1].contains([',', '"']));
                prop_assert_eq!(key, extractor.key(words[1]));
            }
            // Only an absent header is missing.
            Err(error) => prop_assert_eq!(
                (
                    error.status().as_u16(),
                    error.to_string().ends_with(": missing")
                ),
                (401, lines.is_empty())
            ),
        }
        Ok(())
    });
}

/// A client gets no second budget by writing its token in another way, and shares none with another
/// token.
#[test]
fn a_token_has_one_key_however_it_is_sent() {
    let extractor = ApiKey::bearer(&secret());
    let cases = "[bB][eE][aA][rR][eE][rR] {1,4}";
    let token = "[!-~&&[^,\"]]{1,40}";
    fuzz(
        &(cases, token, token, " {0,3}"),
        |(scheme, token, other, space)| {
            let of = |token: &str| {
                let line = format!("{scheme}{token}{space}").into_bytes();
                extractor
                    .extract(&request("authorization", &[line]))
                    .unwrap()
            };
            prop_assert_eq!(of(&token), extractor.key(&token));
            prop_assert_eq!(of(&token) == of(&other), token == other);
            Ok(())
        },
    );
}

#[test]
fn a_header_value_is_read_or_refused() {
    let (tenant, api_key) = (Header::new("x-key"), ApiKey::header("x-key", &secret()));
    fuzz(&vec(header_text(SIGNS), 0..3), |lines| {
        let parts = request("x-key", &lines);
        let only = if let [line] = &lines[..] {
            str::from_utf8(line).ok()
        } else {
            None
        };
        match only.map(str::trim).filter(|value| !value.is_empty()) {
            Some(value) => {
                prop_assert_eq!(tenant.extract(&parts).unwrap(), tenant.key(value));
                prop_assert_eq!(api_key.extract(&parts).unwrap(), api_key.key(value));
            }
            None => {
                prop_assert_eq!(tenant.extract(&parts).unwrap_err().status(), 400);
                prop_assert_eq!(api_key.extract(&parts).unwrap_err().status(), 401);
            }
        }
        Ok(())
    });
}

/// An error shows neither the token nor the value.
#[test]
fn no_error_repeats_what_was_sent() {
    fuzz(&("[A-Z]{12}", 0..4_u8), |(value, form)| {
        let lines = match form {
            0 => vec![format!("Bearer {value} {value}")],
            1 => vec![format!("Basic {value}")],
            2 => vec![format!("Bearer {value}"); 2],
            _ => vec![format!("{value}\t")],
        };
        let lines: Vec<_> = lines.into_iter().map(String::into_bytes).collect();
        let error = ApiKey::bearer(&secret())
            .extract(&request("authorization", &lines))
            .unwrap_err();
        prop_assert!(!format!("{error} {error:?}").contains(&value), "{}", error);
        Ok(())
    });
}
