//! A server that gives any reply to the script: each is a decision or a typed error, and never a
//! panic.

use std::{
    cell::Cell,
    io::Write,
    net::{TcpListener, TcpStream},
    sync::{Arc, Mutex},
    thread,
    time::Duration,
};

use axum::body::Body;
use http::Response;
use proptest::{collection::vec, prelude::*, sample::select};
use redis::{Parser, Value};
use tower::{Layer, ServiceExt, service_fn};
use tower_sliding_window::{
    Charge, Check, Error, HeaderSets, Limit, Limiter, RateLimitLayer, RedisStore, limiter::Breaker,
};

use super::fuzz;
use crate::support::{
    TEST_TIMEOUT, one_thread,
    requests::{anyone, hello, request},
};

const CALLS: Limit = Limit::per_minute("calls", 10);
const OTHER: Limit = Limit::per_hour("other", 100);

/// A server that sends a fixed reply, and closes the connection if the reply is incomplete.
struct Impostor {
    url: String,
    says: Arc<Mutex<Says>>,
}

#[derive(Clone, Debug)]
enum Says {
    Reply(Vec<u8>),
    /// Sends the bytes and closes the connection.
    Last(Vec<u8>),
}

impl Impostor {
    /// Each connection has its own thread.
    fn start() -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let url = format!("redis://{}/", listener.local_addr().unwrap());
        let says = Arc::new(Mutex::new(Says::Reply(b"+OK\r\n".to_vec())));
        let said = Arc::clone(&says);
        thread::spawn(move || {
            for connection in listener.incoming() {
                let said = Arc::clone(&said);
                thread::spawn(move || talk(connection.unwrap(), &said));
            }
        });
        Self { url, says }
    }

    fn says(&self, says: Says) {
        *self.says.lock().unwrap() = says;
    }

    fn limiter(&self) -> Limiter {
        let store = RedisStore::builder(&self.url).build().unwrap();
        Limiter::new(store)
            .deadline(TEST_TIMEOUT)
            .breaker(Breaker::OFF)
    }
}

fn talk(mut connection: TcpStream, says: &Mutex<Says>) {
    connection.set_nodelay(true).unwrap();
    let mut parser = Parser::new();
    while let Ok(Value::Array(request)) = parser.parse_value(&connection) {
        let is_script = matches!(&request[0], Value::BulkString(name) if name.starts_with(b"EVAL"));
        let says = if is_script {
            says.lock().unwrap().clone()
        } else {
            Says::Reply(b"+OK\r\n".to_vec())
        };
        let (Says::Reply(bytes) | Says::Last(bytes)) = &says;
        if connection.write_all(bytes).is_err() || matches!(says, Says::Last(_)) {
            break;
        }
    }
}

fn number() -> impl Strategy<Value = i64> {
    prop_oneof![
        4 => 0..200_i64,
        1 => -20..0_i64,
        1 => -2..0_i64,
        1 => any::<i64>(),
        1 => select(vec![i64::MIN, i64::MAX, i64::MIN + 1, 1 << 53, 1_800_000_000_000_000]),
    ]
}

/// Any reply, as bytes of the protocol.
fn reply() -> impl Strategy<Value = Vec<u8>> {
    let bulk = |bytes: &[u8]| [format!("${}\r\n", bytes.len()).as_bytes(), bytes, b"\r\n"].concat();
    let leaf = prop_oneof![
        6 => number().prop_map(|number| format!(":{number}\r\n").into_bytes()),
        1 => vec(any::<u8>(), 0..20).prop_map(move |bytes| bulk(&bytes)),
        1 => "[ -~]{0,20}".prop_map(|text| format!("+{text}\r\n").into_bytes()),
        1 => "(ERR|NOSCRIPT|BUSY|OOM|READONLY|MOVED|LOADING|)[ -~]{0,20}"
            .prop_map(|text| format!("-{text}\r\n").into_bytes()),
        1 => select(vec![&b"$-1\r\n"[..], b"*-1\r\n", b"*0\r\n", b"_\r\n", b"#t\r\n", b",1.5\r\n"])
            .prop_map(<[u8]>::to_vec),
    ];
    leaf.prop_recursive(2, 24, 8, |inner| {
        vec(inner, 0..8).prop_map(|items| {
            [format!("*{}\r\n", items.len()).into_bytes(), items.concat()].concat()
        })
    })
}

/// The figures of a charge in the record of a check.
const FIGURES: usize = 5;

/// A record of one check, mostly as the script might send it to a check of one charge or of two.
fn record() -> impl Strategy<Value = Vec<u8>> {
    let figure = || prop_oneof![20 => 0..200_i64, 1 => number()];
    let length = prop_oneof![4 => select(vec![FIGURES, 2 * FIGURES]), 1 => 0..2 * FIGURES + 2];
    let figures = length.prop_flat_map(move |length| vec(figure(), length));
    (0..3_i64, number(), figures).prop_map(|(admitted, at, figures)| {
        let numbers = [admitted, at]
            .into_iter()
            .chain(figures)
            .map(|number| format!(":{number}\r\n"));
        let numbers: Vec<_> = numbers.collect();
        format!(
            "*2\r\n:1800000000000000\r\n*{}\r\n{}",
            numbers.len(),
            numbers.concat()
        )
        .into_bytes()
    })
}

/// As many numbers as the script might send, perhaps in the record of a check.
fn plausible() -> impl Strategy<Value = Vec<u8>> {
    (vec(number(), 1..14), any::<bool>()).prop_map(|(numbers, is_record)| {
        let numbers: Vec<String> = numbers
            .iter()
            .map(|number| format!(":{number}\r\n"))
            .collect();
        let (now, rest) = (&numbers[0], &numbers[1..]);
        let count = rest.len();
        let reply = if is_record {
            format!("*2\r\n{now}*{count}\r\n{}", rest.concat())
        } else {
            format!("*{}\r\n{now}{}", 1 + count, rest.concat())
        };
        reply.into_bytes()
    })
}

fn says() -> impl Strategy<Value = Says> {
    prop_oneof![
        4 => plausible().prop_map(Says::Reply),
        2 => record().prop_map(Says::Reply),
        4 => reply().prop_map(Says::Reply),
        1 => vec(any::<u8>(), 0..40).prop_map(Says::Last),
        1 => (reply(), any::<prop::sample::Index>()).prop_map(|(bytes, at)| Says::Last(bytes[..at.index(bytes.len())].to_vec())),
    ]
}

/// True if the script may give this reply to a check of so many charges.
fn is_the_scripts(says: &Says, charges: usize) -> bool {
    let Says::Reply(bytes) = says else {
        return false;
    };
    let Ok(Value::Array(fields)) = redis::parse_redis_value(bytes) else {
        return false;
    };
    let is_number = |field: &Value| matches!(field, Value::Int(0..));
    match &fields[..] {
        [now, Value::Array(record)] => {
            let is_outcome = matches!(record.first(), Some(Value::Int(0..=1)));
            let is_at = matches!(record.get(1), Some(Value::Int(_)));
            let are_figures = record.iter().skip(2).all(is_number);
            is_number(now)
                && is_outcome
                && is_at
                && are_figures
                && record.len() == 2 + FIGURES * charges
        }
        fields => fields.len() == 1 + 2 * charges && fields.iter().all(is_number),
    }
}

/// With one limit and with two, with a refusal cache and without.
#[test]
fn every_reply_is_a_decision_or_an_error() {
    let (runtime, impostor) = (one_thread(), Impostor::start());
    let limiters = runtime.block_on(async {
        [
            impostor.limiter(),
            impostor.limiter().refusal_cache(Duration::ZERO),
        ]
    });
    let (keys, answers) = (Cell::new(0_u64), Cell::new((0, 0)));
    fuzz(
        &(says(), any::<bool>(), any::<bool>()),
        |(says, is_remembered, is_alone)| {
            impostor.says(says.clone());
            // A cached refusal is not sent to the server, and stands after a reply that is no
            // decision. Without one, each check has a key of its own.
            let limiter = &limiters[usize::from(!is_remembered)];
            keys.set(keys.get() + 1);
            let key = if is_remembered { 0 } else { keys.get() };
            let charge = |limit| Charge::new(limit, key, 3).unwrap();
            let mut check = Check::new(charge(CALLS));
            if !is_alone {
                check = check.and(charge(OTHER)).unwrap();
            }
            let is_right = is_the_scripts(&says, check.charges().count());
            match runtime.block_on(limiter.check_all(check.clone())) {
                Ok(decision) => {
                    prop_assert!(is_right || is_remembered, "{:?} is not the script's", says);
                    for status in decision.statuses() {
                        prop_assert!(status.remaining() <= status.limit.units());
                    }
                    let _ = (
                        decision.retry_after(),
                        decision.binding().reset_after(),
                        decision.at(),
                        format!("{decision:?}"),
                    );
                    answers.set((answers.get().0 + 1, answers.get().1));
                }
                Err(Error::Unavailable(error)) => {
                    prop_assert!(
                        !is_right && std::error::Error::source(&error).is_some(),
                        "{:?}",
                        error
                    );
                    prop_assert!(
                        !format!("{error:?}").contains("RecvError"),
                        "a task has panicked"
                    );
                    answers.set((answers.get().0, answers.get().1 + 1));
                }
                Err(error) => prop_assert!(false, "{:?}", error),
            }
            Ok(())
        },
    );
    let (decisions, errors) = answers.get();
    assert!(
        decisions > 0 && errors > 0,
        "both come up: {decisions} and {errors}"
    );
}

/// Times and numbers of any size fit into the headers of a response.
#[test]
fn every_reply_makes_a_response() {
    let (runtime, impostor) = (one_thread(), Impostor::start());
    let store = || RedisStore::builder(&impostor.url).build().unwrap();
    let services = [HeaderSets::BOTH, HeaderSets::BOTH_UNIX].map(|format| {
        // Every request must get a reply.
        let limiter = Limiter::new(store())
            .breaker(Breaker::OFF)
            .refusal_cache(Duration::ZERO)
            .deadline(TEST_TIMEOUT);
        let layer = RateLimitLayer::new(limiter)
            .limit(CALLS.by(anyone))
            .limit(OTHER.by(anyone));
        layer.fail_closed().headers(format).layer(service_fn(hello))
    });
    fuzz(&(says(), 0..2_usize), |(says, format)| {
        impostor.says(says);
        let response: Response<Body> = runtime
            .block_on(services[format].clone().oneshot(request()))
            .unwrap();
        prop_assert!(
            [200, 429, 503].contains(&response.status().as_u16()),
            "{}",
            response.status()
        );
        Ok(())
    });
}
