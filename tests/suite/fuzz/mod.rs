//! Any input from outside is read without a panic, and no untrusted input is trusted.
//!
//! `FUZZ_CASES=10000000` makes a long run of each test. `PROPTEST_CASES` does so for the headers of
//! upstreams, which are read in `src/middleware/response/upstream.rs`. A failing case is shrunk to
//! a short one.

mod addresses;
mod limits;
mod replies;
mod tokens;

use std::env;

use http::HeaderValue;
use proptest::{
    collection::vec,
    prelude::*,
    sample::select,
    test_runner::{Config, TestCaseError, TestRunner},
};

const CASES: u32 = 2_000;

/// Runs a test on random values.
fn fuzz<S: Strategy>(values: &S, test: impl Fn(S::Value) -> Result<(), TestCaseError>) {
    let cases = env::var("FUZZ_CASES").map_or(CASES, |cases| {
        cases.parse().expect("FUZZ_CASES is a number")
    });
    let config = Config {
        cases,
        failure_persistence: None,
        ..Config::default()
    };
    if let Err(failure) = TestRunner::new(config).run(values, test) {
        panic!("{failure}");
    }
}

/// Text that a header may hold, mostly made of `signs`, which have a meaning for the reader under
/// test.
fn header_text(signs: &'static [u8]) -> impl Strategy<Value = Vec<u8>> {
    let byte =
        prop_oneof![8 => select(signs), 1 => 0x20_u8..0x7f, 1 => 0x80_u8..=0xff, 1 => Just(b'\t')];
    vec(byte, 0..60)
}

fn header_value(text: &[u8]) -> HeaderValue {
    HeaderValue::from_bytes(text).unwrap()
}
