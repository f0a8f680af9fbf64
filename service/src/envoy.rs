//! What Envoy asks: `envoy.service.ratelimit.v3.RateLimitService`.

use std::sync::Arc;

use axum::http::{HeaderMap, header};
use envoy_types::pb::{
    envoy::{
        config::core::v3::HeaderValue,
        extensions::common::ratelimit::v3::{
            RateLimitDescriptor, rate_limit_descriptor::RateLimitOverride,
        },
        service::ratelimit::v3::{
            RateLimitRequest, RateLimitResponse,
            rate_limit_response::{Code, DescriptorStatus, RateLimit, rate_limit::Unit},
            rate_limit_service_server::RateLimitService,
        },
        r#type::v3::RateLimitUnit,
    },
    google::protobuf,
};
use metrics::counter;
use tonic::{Request, Response, Status};
use tower_sliding_window::{Check, Decision, HeaderSets, Key, Limit, decision::LimitStatus};

use crate::{
    Service, check, decide,
    rule::{KeyedLimit, Rule},
    rules::Rules,
};

pub(crate) struct Envoy(pub(crate) Arc<Service>);

/// A limit for one key, and the descriptors that count in it.
struct Asked {
    limit: KeyedLimit,
    key: Key,
    hits: u64,
    places: Vec<usize>,
}

#[tonic::async_trait]
impl RateLimitService for Envoy {
    async fn should_rate_limit(
        &self,
        request: Request<RateLimitRequest>,
    ) -> Result<Response<RateLimitResponse>, Status> {
        let request = request.into_inner();
        if request.domain.is_empty() || request.descriptors.is_empty() {
            return Err(Status::invalid_argument(
                "a request needs a domain and descriptors",
            ));
        }
        if request.descriptors.len() > check::MOST_CHARGES {
            // As an error, Envoy would let it pass.
            let overall_code = Code::OverLimit.into();
            return Ok(Response::new(RateLimitResponse {
                overall_code,
                ..RateLimitResponse::default()
            }));
        }
        let all = self.0.rules();
        let mut rules = Vec::new();
        let mut asked = Vec::<Asked>::new();
        for (place, descriptor) in request.descriptors.iter().enumerate() {
            let hits = match (&descriptor.hits_addend, descriptor.is_negative_hits) {
                (_, true) => return Err(Status::invalid_argument("hits are never given back")),
                (Some(hits), _) => hits.value,
                (None, _) => u64::from(request.hits_addend.max(1)),
            };
            let Some((rule, key, limits)) = limits_of(&all, &request.domain, descriptor) else {
                continue;
            };
            rules.push(rule);
            for limit in limits {
                let new = Asked {
                    limit,
                    key: key.clone(),
                    hits,
                    places: vec![place],
                };
                match asked.iter_mut().find(|other| other.shares_units_with(&new)) {
                    Some(other) => other.add(new),
                    None => asked.push(new),
                }
            }
        }
        let mut response = RateLimitResponse {
            overall_code: Code::Ok.into(),
            ..RateLimitResponse::default()
        };
        response.statuses = vec![
            DescriptorStatus {
                code: Code::Ok.into(),
                ..DescriptorStatus::default()
            };
            request.descriptors.len()
        ];
        let mut check: Option<Check> = None;
        for Asked {
            limit,
            key,
            hits,
            places,
        } in &asked
        {
            let Ok(charge) = limit.charge(key.clone(), *hits) else {
                for place in places {
                    response.statuses[*place] = DescriptorStatus {
                        code: Code::OverLimit.into(),
                        current_limit: Some(told(&limit.limit)),
                        ..DescriptorStatus::default()
                    };
                }
                response.overall_code = Code::OverLimit.into();
                continue;
            };
            check = Some(match check {
                None => Check::new(charge),
                Some(check) => check
                    .and(charge)
                    .map_err(|error| Status::invalid_argument(error.to_string()))?,
            });
        }
        let Some(check) = check.filter(|_| response.overall_code == i32::from(Code::Ok)) else {
            return Ok(Response::new(response));
        };
        match decide(&rules, &self.0.limiter, check).await {
            Ok(Ok(decision)) => tell(&decision, &asked, &mut response),
            Ok(Err(_)) => {}
            // Envoy would let it pass.
            Err(_) => response.overall_code = Code::OverLimit.into(),
        }
        Ok(Response::new(response))
    }
}

impl Asked {
    /// The sizes of the limits may differ, since descriptors bring them along.
    fn shares_units_with(&self, other: &Self) -> bool {
        let [(one, key), (other, other_key)] =
            [self, other].map(|asked| (&asked.limit.limit, &asked.key));
        let has_same_identity = one.name() == other.name()
            && one.window() == other.window()
            && one.algorithm() == other.algorithm();
        has_same_identity && key == other_key
    }

    /// The smaller limit holds for both.
    fn add(&mut self, other: Self) {
        self.hits = self.hits.saturating_add(other.hits);
        self.places.extend(other.places);
        if other.limit.limit.units() < self.limit.limit.units() {
            self.limit = other.limit;
        }
    }
}

/// The rule of a descriptor, its key, and its limits.
fn limits_of<'a>(
    rules: &'a Rules,
    domain: &str,
    descriptor: &RateLimitDescriptor,
) -> Option<(&'a Rule, Key, Vec<KeyedLimit>)> {
    let entries: Vec<_> = descriptor
        .entries
        .iter()
        .map(|entry| (&*entry.key, &*entry.value))
        .collect();
    let Some((rule, values)) = rules.find_descriptor(domain, &entries) else {
        counter!("rate_limit_service_descriptors_without_rule_total").increment(1);
        return None;
    };
    let first = rule.limits.first()?;
    // As an error, Envoy would let it pass: a client that sends no address would have no limit.
    let key = first
        .key
        .of_texts(&values)
        .unwrap_or_else(|_| Key::new("unreadable", ""));
    // Without a unit, or with an unknown one, the rule's own limits hold: an error would let all of
    // the request pass.
    let instead = descriptor
        .limit
        .as_ref()
        .and_then(|instead| chosen(first.limit.name(), instead));
    let limits = instead.map_or_else(
        || rule.limits.clone(),
        |limit| {
            vec![KeyedLimit {
                limit,
                ..first.clone()
            }]
        },
    );
    Some((rule, key, limits))
}

/// The limit that Envoy says in the place of a rule's own.
fn chosen(name: &str, instead: &RateLimitOverride) -> Option<Limit> {
    let window = match instead.unit() {
        RateLimitUnit::Second => "s",
        RateLimitUnit::Minute => "min",
        RateLimitUnit::Hour => "h",
        RateLimitUnit::Day => "d",
        RateLimitUnit::Month => "month",
        RateLimitUnit::Year => "365d",
        RateLimitUnit::Unknown => return None,
    };
    Limit::parse(
        name.to_owned(),
        &format!("{}/{window}", instead.requests_per_unit),
    )
    .ok()
}

fn told(limit: &Limit) -> RateLimit {
    let unit = match limit.window().as_millis() {
        1_000 => Unit::Second,
        60_000 => Unit::Minute,
        3_600_000 => Unit::Hour,
        86_400_000 => Unit::Day,
        604_800_000 => Unit::Week,
        31_536_000_000 => Unit::Year,
        // Perhaps by the calendar.
        _ => match limit.to_string().split(['/', ' ', '(']).nth(1) {
            Some("h") => Unit::Hour,
            Some("d") => Unit::Day,
            Some("week") => Unit::Week,
            Some("month") => Unit::Month,
            _ => Unit::Unknown,
        },
    };
    RateLimit {
        name: limit.name().to_owned(),
        requests_per_unit: figure(limit.units()),
        unit: unit.into(),
    }
}

fn figure(units: u64) -> u32 {
    u32::try_from(units).unwrap_or(u32::MAX)
}

/// Each descriptor has the figures of its limit that refuses, or has the least left.
fn tell(decision: &Decision, asked: &[Asked], response: &mut RateLimitResponse) {
    let order = |status: &LimitStatus| (status.retry_after().is_none(), status.remaining());
    for (place, told_status) in response.statuses.iter_mut().enumerate() {
        let own = decision
            .statuses()
            .zip(asked)
            .filter(|(status, asked)| asked.places.contains(&place) && !status.is_shadow);
        let Some((status, _)) = own.min_by_key(|(status, _)| order(status)) else {
            continue;
        };
        let code = if status.retry_after().is_some() {
            Code::OverLimit
        } else {
            Code::Ok
        };
        let wait = status.retry_after().unwrap_or_else(|| status.reset_after());
        *told_status = DescriptorStatus {
            code: code.into(),
            current_limit: Some(told(&status.limit)),
            limit_remaining: figure(status.remaining()),
            duration_until_reset: Some(protobuf::Duration {
                seconds: wait.as_secs() as i64,
                nanos: wait.subsec_nanos() as i32,
            }),
            ..DescriptorStatus::default()
        };
    }
    let mut headers = HeaderMap::new();
    decision.write_headers(HeaderSets::X_RATE_LIMIT, &mut headers);
    if let Some(wait) = decision.retry_after() {
        response.overall_code = Code::OverLimit.into();
        headers.insert(header::RETRY_AFTER, check::seconds(wait).into());
    }
    response.response_headers_to_add = headers
        .iter()
        .map(|(name, value)| HeaderValue {
            key: name.to_string(),
            value: value.to_str().unwrap_or_default().to_owned(),
            ..HeaderValue::default()
        })
        .collect();
}
