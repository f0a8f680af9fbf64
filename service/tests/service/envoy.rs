//! What Envoy's filter for rate limits asks.

use envoy_types::pb::{
    envoy::{
        extensions::common::ratelimit::v3::{
            RateLimitDescriptor,
            rate_limit_descriptor::{Entry, RateLimitOverride},
        },
        service::ratelimit::v3::{
            RateLimitRequest, RateLimitResponse,
            rate_limit_response::{Code, rate_limit::Unit},
            rate_limit_service_client::RateLimitServiceClient,
        },
    },
    google::protobuf::UInt64Value,
};
use serde_json::json;
use tonic::{Status, transport::Channel};

use crate::support::{Redis, Service, stores};

pub(crate) const RULES: &str = r#"
[[rule]]
name = "route"
domain = "web"
descriptor = ["route=api"]
limits = ["route=100/s"]
[[rule]]
name = "client"
domain = "web"
descriptor = ["route=api", "remote_address"]
key = ["client"]
limits = ["client=3/min"]
shadow = ["client-strict=1/min"]
[[rule]]
name = "office"
domain = "web"
descriptor = ["route=api", "remote_address=198.51.100.1"]
limits = ["office=50/h"]
[[rule]]
name = "tenant"
domain = "web"
descriptor = ["tenant"]
limits = ["tenant=5/7d"]
"#;

pub(crate) fn descriptor(entries: &[(&str, &str)]) -> RateLimitDescriptor {
    let entry = |(key, value): &(&str, &str)| Entry {
        key: (*key).to_owned(),
        value: (*value).to_owned(),
    };
    RateLimitDescriptor {
        entries: entries.iter().map(entry).collect(),
        ..RateLimitDescriptor::default()
    }
}

pub(crate) async fn connect(service: &Service) -> RateLimitServiceClient<Channel> {
    RateLimitServiceClient::connect(service.grpc.clone())
        .await
        .unwrap()
}

pub(crate) async fn ask(
    client: &RateLimitServiceClient<Channel>,
    descriptors: &[RateLimitDescriptor],
    hits: u32,
) -> Result<RateLimitResponse, Status> {
    let request = RateLimitRequest {
        domain: "web".to_owned(),
        descriptors: descriptors.to_vec(),
        hits_addend: hits,
    };
    client
        .clone()
        .should_rate_limit(request)
        .await
        .map(tonic::Response::into_inner)
}

fn header<'a>(response: &'a RateLimitResponse, name: &str) -> &'a str {
    response
        .response_headers_to_add
        .iter()
        .find(|header| header.key == name)
        .map_or("", |header| &header.value)
}

#[tokio::test]
async fn all_descriptors_are_decided_all_or_nothing() {
    for (store, _server) in stores() {
        let service = Service::start(&format!("store = {store:?}\n{RULES}"));
        let client = connect(&service).await;
        let three = [
            descriptor(&[("route", "api")]),
            descriptor(&[("route", "api"), ("remote_address", "203.0.113.7")]),
            descriptor(&[("tenant", "acme")]),
        ];
        for turn in 1..=3 {
            let response = ask(&client, &three, 0).await.unwrap();
            assert_eq!(response.overall_code(), Code::Ok);
            let status = &response.statuses[1];
            let limit = status.current_limit.as_ref().unwrap();
            assert_eq!(
                (&*limit.name, limit.requests_per_unit, limit.unit()),
                ("client", 3, Unit::Minute)
            );
            assert_eq!(
                (status.limit_remaining, response.statuses[2].limit_remaining),
                (3 - turn, 5 - turn)
            );
            assert_eq!(
                response.statuses[2].current_limit.as_ref().unwrap().unit(),
                Unit::Week
            );
            assert_eq!(
                header(&response, "x-ratelimit-remaining"),
                (3 - turn).to_string()
            );
        }
        for _ in 0..2 {
            let refused = ask(&client, &three, 0).await.unwrap();
            assert_eq!(refused.overall_code(), Code::OverLimit);
            let codes: Vec<_> = refused
                .statuses
                .iter()
                .map(|status| status.code())
                .collect();
            assert_eq!(codes, [Code::Ok, Code::OverLimit, Code::Ok]);
            // The others are not charged.
            assert_eq!(refused.statuses[2].limit_remaining, 2);
            let reset = refused.statuses[1].duration_until_reset.as_ref().unwrap();
            assert!(
                (30..=60).contains(&reset.seconds) && !header(&refused, "retry-after").is_empty()
            );
        }
        // A program sees the same units.
        let peeked = service
            .post("/peek", json!({ "limit": "client", "key": "203.0.113.7" }))
            .await
            .json();
        assert_eq!(peeked["remaining"], 0);
    }
}

#[tokio::test]
async fn hits_and_limits_of_a_descriptor_are_heeded() {
    let service = Service::start(RULES);
    let client = connect(&service).await;
    let acme = descriptor(&[("tenant", "acme")]);
    let remaining = |response: RateLimitResponse| {
        (
            response.overall_code(),
            response.statuses[0].limit_remaining,
        )
    };
    assert_eq!(
        remaining(ask(&client, std::slice::from_ref(&acme), 3).await.unwrap()),
        (Code::Ok, 2)
    );
    let own = RateLimitDescriptor {
        hits_addend: Some(UInt64Value { value: 2 }),
        ..acme.clone()
    };
    assert_eq!(
        remaining(ask(&client, &[own], 1).await.unwrap()),
        (Code::Ok, 0)
    );
    let none = RateLimitDescriptor {
        hits_addend: Some(UInt64Value { value: 0 }),
        ..acme.clone()
    };
    assert_eq!(
        remaining(ask(&client, &[none], 1).await.unwrap()),
        (Code::Ok, 0)
    );
    assert_eq!(
        ask(&client, std::slice::from_ref(&acme), 6)
            .await
            .unwrap()
            .overall_code(),
        Code::OverLimit
    );
    // Twice in one request is the sum.
    let bob = descriptor(&[("tenant", "bob")]);
    assert_eq!(
        remaining(ask(&client, &[bob.clone(), bob.clone()], 2).await.unwrap()),
        (Code::Ok, 1)
    );
    let limit = |requests_per_unit, unit| {
        Some(RateLimitOverride {
            requests_per_unit,
            unit,
        })
    };
    let own = RateLimitDescriptor {
        limit: limit(7, 2),
        ..descriptor(&[("tenant", "eve")])
    };
    let response = ask(&client, std::slice::from_ref(&own), 1).await.unwrap();
    let told = response.statuses[0].current_limit.as_ref().unwrap();
    assert_eq!(
        (
            told.requests_per_unit,
            told.unit(),
            response.statuses[0].limit_remaining
        ),
        (7, Unit::Minute, 6)
    );
    for (unit, told) in [
        (1, Unit::Second),
        (3, Unit::Hour),
        (4, Unit::Day),
        (5, Unit::Month),
        (6, Unit::Year),
    ] {
        let own = RateLimitDescriptor {
            limit: limit(7, unit),
            ..descriptor(&[("tenant", "zoe")])
        };
        let response = ask(&client, &[own], 1).await.unwrap();
        assert_eq!(
            response.statuses[0].current_limit.as_ref().unwrap().unit(),
            told
        );
    }
    // Two sizes of one limit: both count, under the smaller one.
    let sizes = [2, 9].map(|size| RateLimitDescriptor {
        limit: limit(size, 3),
        ..descriptor(&[("tenant", "kim")])
    });
    for code in [Code::Ok, Code::OverLimit] {
        let response = ask(&client, &sizes, 1).await.unwrap();
        let of = response
            .statuses
            .iter()
            .map(|status| status.current_limit.as_ref().unwrap().requests_per_unit);
        assert_eq!(
            (response.overall_code(), of.collect::<Vec<_>>()),
            (code, vec![2, 2])
        );
    }
    let blocked = RateLimitDescriptor {
        limit: limit(0, 2),
        ..own.clone()
    };
    assert_eq!(
        ask(&client, &[blocked], 1).await.unwrap().overall_code(),
        Code::OverLimit
    );
    // A limit without a unit is that of the rule. An error would let Envoy pass the request.
    let unreadable = RateLimitDescriptor {
        limit: limit(7, 0),
        ..own.clone()
    };
    let response = ask(&client, &[unreadable], 1).await.unwrap();
    assert_ne!(
        response.statuses[0]
            .current_limit
            .as_ref()
            .unwrap()
            .requests_per_unit,
        7
    );
    let many = vec![own.clone(); 65];
    assert_eq!(
        ask(&client, &many, 1).await.unwrap().overall_code(),
        Code::OverLimit
    );
    let negative = RateLimitDescriptor {
        is_negative_hits: true,
        ..own
    };
    assert_eq!(
        ask(&client, &[negative], 1).await.unwrap_err().code(),
        tonic::Code::InvalidArgument
    );
    assert_eq!(
        ask(&client, &[], 1).await.unwrap_err().code(),
        tonic::Code::InvalidArgument
    );
}

#[tokio::test]
async fn a_descriptor_finds_the_rule_that_says_most_of_it_or_none() {
    let service = Service::start(RULES);
    let client = connect(&service).await;
    let office = ask(
        &client,
        &[descriptor(&[
            ("route", "api"),
            ("remote_address", "198.51.100.1"),
        ])],
        1,
    )
    .await
    .unwrap();
    assert_eq!(
        office.statuses[0].current_limit.as_ref().unwrap().name,
        "office"
    );
    let long = vec![("a", "b"); 40];
    for unknown in [
        &[("route", "other")][..],
        &[("remote_address", "203.0.113.7")],
        &[("route", "api"), ("x", "y"), ("z", "")],
        &[],
        &long,
    ] {
        let response = ask(&client, &[descriptor(unknown)], 1).await.unwrap();
        assert_eq!(
            (
                response.overall_code(),
                response.statuses[0].current_limit.is_none()
            ),
            (Code::Ok, true)
        );
    }
    assert!(
        service
            .get("/metrics")
            .await
            .text
            .contains("rate_limit_service_descriptors_without_rule_total 5")
    );
    // What is no address is counted together: garbage in a header is no way around a limit.
    let mut admitted = 0;
    for turn in 0..9 {
        let garbage = descriptor(&[
            ("route", "api"),
            ("remote_address", &format!("garbage-{turn}")),
        ]);
        admitted +=
            u32::from(ask(&client, &[garbage], 1).await.unwrap().overall_code() == Code::Ok);
    }
    assert_eq!(admitted, 3);
}

#[tokio::test]
async fn without_the_store_the_failure_mode_of_the_rule_holds() {
    let redis = Redis::start();
    let rules = format!(
        "store = {:?}\n[proxy]\naddresses = [\"127.0.0.1\"]\n{RULES}on_failure = \"closed\"\n[[rule]]\nname = \"home\"\npath = \"/\"\nlimits = [\"home=9/min\"]\n[[rule]]\nname = \"pay\"\npath = \"/pay\"\non_failure = \"closed\"\nlimits = [\"pay=9/min\"]\n[[rule]]\nname = \"local\"\non_failure = {{ local = 3 }}\nlimits = [\"local=9/min\"]\n",
        redis.url
    );
    let service = Service::start(&rules);
    let client = connect(&service).await;
    let (open, closed) = (
        descriptor(&[("route", "api")]),
        descriptor(&[("tenant", "acme")]),
    );
    assert_eq!(
        ask(&client, &[open.clone(), closed.clone()], 1)
            .await
            .unwrap()
            .overall_code(),
        Code::Ok
    );
    redis.pause();
    assert_eq!(
        ask(&client, std::slice::from_ref(&open), 1)
            .await
            .unwrap()
            .overall_code(),
        Code::Ok
    );
    assert_eq!(
        ask(&client, &[open, closed], 1)
            .await
            .unwrap()
            .overall_code(),
        Code::OverLimit
    );
    let passed = service.ask("GET", "/", &[]).await;
    assert_eq!(
        (passed.status, passed.header("x-ratelimit-limit")),
        (200, "")
    );
    let refused = service.ask("GET", "/pay", &[]).await;
    assert_eq!(
        (refused.status, refused.header("retry-after").is_empty()),
        (503, false)
    );
    let check = async |limit, key| {
        service
            .post("/check", json!({ "limit": limit, "key": key }))
            .await
    };
    let undecided = check("home", "203.0.113.7").await;
    assert!(
        undecided.is_allowed() && undecided.json()["undecided"].is_string(),
        "{}",
        undecided.text
    );
    assert_eq!(check("pay", "203.0.113.7").await.status, 503);
    let local = [
        check("local", "a").await,
        check("local", "a").await,
        check("local", "a").await,
        check("local", "a").await,
    ];
    assert_eq!(
        local.map(|answer| answer.is_allowed()),
        [true, true, true, false]
    );
}
