//! What programs ask: `POST /check`, `/peek`, `/settle` and `/reset`.

use std::{
    fmt::Display,
    sync::Arc,
    time::{Duration, Instant, UNIX_EPOCH},
};

use axum::{
    body::Bytes,
    extract::State,
    http::{HeaderMap, StatusCode, header},
    response::{IntoResponse, Response},
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use tower_sliding_window::{
    Charge, Check, Decision, Error, HeaderSets, Key, Limit, Rejection, check::AdmissionId,
    decision::LimitStatus, error::NeverFits, settlement::Settlement,
};

use crate::{
    Service, decide,
    key::MOST_BYTES,
    rule::{KeyedLimit, Rule},
    rules::Rules,
};

#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct Asked {
    limit: String,
    #[serde(default)]
    key: Texts,
    #[serde(default = "one")]
    cost: u64,
    /// Seconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    lease: Option<f64>,
}

#[derive(Deserialize, Serialize)]
#[serde(untagged, expecting = "expected a key: a text, or a list of texts")]
enum Texts {
    One(String),
    Several(Vec<String>),
}

/// An admission, for the program that settles it.
#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct Admission {
    id: String,
    at: u64,
    charges: Vec<Asked>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Settling {
    admission: Admission,
    actual: Actual,
}

#[derive(Deserialize)]
#[serde(
    untagged,
    expecting = "expected what it has cost: a number of at least 0, or a list of one for each charge"
)]
enum Actual {
    One(u64),
    Each(Vec<u64>),
}

#[derive(Serialize)]
struct Figures {
    limit: String,
    of: u64,
    used: u64,
    remaining: u64,
    /// Seconds.
    reset: f64,
    retry: Option<f64>,
}

/// With the words of services that answer `allowed`, `currentCount` and `ttl`.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Answer {
    allowed: bool,
    #[serde(flatten)]
    binding: Option<Figures>,
    current_count: Option<u64>,
    ttl: Option<u64>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    limits: Vec<Figures>,
    #[serde(skip_serializing_if = "Option::is_none")]
    admission: Option<Admission>,
    #[serde(skip_serializing_if = "Option::is_none")]
    undecided: Option<String>,
}

/// An error of the caller, as problem details.
pub(crate) struct Problem(pub(crate) StatusCode, pub(crate) String);

type Outcome = Result<Response, Response>;

pub(crate) const MOST_CHARGES: usize = 64;
const LONGEST_LEASE: f64 = 365.0 * 86_400.0;

fn one() -> u64 {
    1
}

impl Default for Texts {
    fn default() -> Self {
        Self::Several(Vec::new())
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let Self(status, detail) = self;
        let body = serde_json::json!({ "title": status.canonical_reason(), "status": status.as_u16(), "detail": detail });
        (
            status,
            [(header::CONTENT_TYPE, "application/problem+json")],
            body.to_string(),
        )
            .into_response()
    }
}

fn mistake(detail: impl Display) -> Response {
    Problem(StatusCode::UNPROCESSABLE_ENTITY, format!("{detail:#}")).into_response()
}

/// JSON alone: a page in a browser cannot send it here without being asked first.
fn read<T: DeserializeOwned>(headers: &HeaderMap, body: &[u8]) -> Result<T, Response> {
    let kind = headers
        .get(header::CONTENT_TYPE)
        .and_then(|kind| kind.to_str().ok())
        .unwrap_or_default();
    if !kind
        .split(';')
        .next()
        .unwrap_or_default()
        .trim()
        .eq_ignore_ascii_case("application/json")
    {
        let detail = "the content type must be application/json".to_owned();
        return Err(Problem(StatusCode::UNSUPPORTED_MEDIA_TYPE, detail).into_response());
    }
    serde_json::from_slice(body).map_err(mistake)
}

/// One charge, or a list of them.
fn read_charges(headers: &HeaderMap, body: &[u8]) -> Result<(Vec<Asked>, bool), Response> {
    let is_list = body.trim_ascii_start().starts_with(b"[");
    let asked: Vec<Asked> = if is_list {
        read(headers, body)?
    } else {
        vec![read(headers, body)?]
    };
    let is_few = (1..=MOST_CHARGES).contains(&asked.len());
    if is_few {
        Ok((asked, is_list))
    } else {
        Err(mistake(format!("a list has 1 to {MOST_CHARGES} charges")))
    }
}

impl Asked {
    fn charge<'a>(&self, rules: &'a Rules, make: Make) -> Result<(&'a Rule, Charge), Response> {
        let (rule, keyed) = rules
            .find_limit(&self.limit)
            .ok_or_else(|| mistake(format!("there is no limit {:?}", self.limit)))?;
        let limit = &keyed.limit;
        let texts: Vec<&str> = match &self.key {
            Texts::One(text) => vec![text],
            Texts::Several(texts) => texts.iter().map(|text| &**text).collect(),
        };
        if texts.iter().any(|text| text.len() > MOST_BYTES) {
            return Err(mistake(format!("a key has at most {MOST_BYTES} bytes")));
        }
        let key = keyed.key.of_texts(&texts).map_err(mistake)?;
        let charge = make(self, keyed, key).map_err(mistake)?;
        match self.lease {
            Some(lease) if !(0.001..=LONGEST_LEASE).contains(&lease) => {
                Err(mistake("a lease must be 0.001 to 31536000 seconds"))
            }
            Some(lease) if !limit.is_concurrent() => {
                Ok((rule, charge.reserve(Duration::from_secs_f64(lease))))
            }
            None if limit.is_concurrent() && charge.cost() > 0 => Err(mistake(format!(
                "the limit {:?} is of places: say for how many seconds at most, as lease",
                self.limit
            ))),
            _ => Ok((rule, charge)),
        }
    }
}

/// The charges as text, to compare a settlement with its admission.
fn said(asked: &[Asked]) -> String {
    serde_json::to_string(asked).unwrap_or_default()
}

/// Makes the charge that a question asks for.
type Make = fn(&Asked, &KeyedLimit, Key) -> Result<Charge, NeverFits>;

const TO_SPEND: Make = |asked, keyed, key| keyed.charge(key, asked.cost);
const TO_SEE: Make = |_, keyed, key| keyed.charge(key, 0);
/// The limit may have become smaller since its units were reserved. They are found under any size.
const TO_SETTLE: Make = |asked, keyed, key| {
    if keyed.is_shadow || keyed.limit.is_concurrent() {
        return keyed.charge(key, asked.cost);
    }
    let units = asked.cost.clamp(keyed.limit.units(), Limit::MAX_UNITS);
    Charge::new(keyed.limit.clone().with_units(units), key, asked.cost)
};

/// The check, and the rules of its charges.
fn check_of<'a>(
    rules: &'a Rules,
    asked: Vec<&Asked>,
    make: Make,
) -> Result<(Vec<&'a Rule>, Check), Response> {
    let charges = asked
        .into_iter()
        .map(|asked| asked.charge(rules, make))
        .collect::<Result<Vec<_>, _>>()?;
    let (rules, charges): (Vec<_>, Vec<_>) = charges.into_iter().unzip();
    let mut charges = charges.into_iter();
    let first = charges
        .next()
        .ok_or_else(|| mistake("there is no charge"))?;
    Ok((
        rules,
        charges
            .try_fold(Check::new(first), Check::and)
            .map_err(mistake)?,
    ))
}

/// Whole seconds that are long enough.
pub(crate) fn seconds(wait: Duration) -> u64 {
    wait.as_secs()
        .saturating_add(u64::from(wait.subsec_nanos() > 0))
}

fn figures(status: &LimitStatus) -> Figures {
    Figures {
        limit: status.limit.name().to_owned(),
        of: status.limit.units(),
        used: status.used,
        remaining: status.remaining(),
        reset: status.reset_after().as_secs_f64(),
        retry: status.retry_after().map(|wait| wait.as_secs_f64()),
    }
}

fn answer(
    decision: Result<&Decision, &Error>,
    is_list: bool,
    admission: Option<Admission>,
) -> Response {
    let mut headers = HeaderMap::new();
    let known = decision.ok();
    if let Some(decision) = known {
        decision.write_headers(HeaderSets::X_RATE_LIMIT, &mut headers);
    }
    if let Some(wait) = known.and_then(Decision::retry_after) {
        headers.insert(header::RETRY_AFTER, seconds(wait).into());
    }
    let answer = Answer {
        allowed: known.is_none_or(Decision::is_allowed),
        binding: known.map(|decision| figures(decision.binding())),
        current_count: known.map(|decision| decision.binding().used),
        ttl: known.map(|decision| seconds(decision.binding().reset_after())),
        limits: known
            .filter(|_| is_list)
            .map(|decision| decision.statuses().map(figures).collect())
            .unwrap_or_default(),
        admission,
        undecided: decision.err().map(Error::to_string),
    };
    (headers, axum::Json(answer)).into_response()
}

pub(crate) async fn check(
    State(service): State<Arc<Service>>,
    headers: HeaderMap,
    body: Bytes,
) -> Outcome {
    let (asked, is_list) = read_charges(&headers, &body)?;
    if asked.iter().any(|asked| asked.cost == 0) {
        return Err(mistake(
            "a cost must be at least 1: POST /peek shows a limit without spending",
        ));
    }
    let all = service.rules();
    let (rules, check) = check_of(&all, asked.iter().collect(), TO_SPEND)?;
    let takes_place = check.charges().any(|charge| charge.limit().is_concurrent());
    if takes_place && service.held.is_full() {
        let detail = "this process holds as many admissions with places as it may".to_owned();
        return Err(Problem(StatusCode::SERVICE_UNAVAILABLE, detail).into_response());
    }
    let decision = match decide(&rules, &service.limiter, check)
        .await
        .map_err(|error| Rejection::from(error).into_response())?
    {
        Ok(decision) => decision,
        Err(error) => return Ok(answer(Err(&error), is_list, None)),
    };
    let leases = |is_wanted: &dyn Fn(&Asked) -> bool| {
        asked
            .iter()
            .filter(|asked| is_wanted(asked))
            .filter_map(|asked| asked.lease)
            .reduce(f64::min)
    };
    let of_a_place = leases(&|asked| {
        all.find_limit(&asked.limit)
            .is_some_and(|(_, keyed)| keyed.limit.is_concurrent())
    });
    let is_open = leases(&|_| true).is_some() && decision.is_allowed();
    let id = decision.id().0;
    let charges = said(&asked);
    let ticket = service.held.ticket(id, &charges);
    if let Some(lease) = of_a_place.filter(|_| decision.holds_place()) {
        let until = Instant::now() + Duration::from_secs_f64(lease);
        service
            .held
            .hold(ticket, decision.clone(), until, charges.len());
    }
    let at = decision
        .at()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
        .as_micros() as u64;
    let admission = is_open.then(|| Admission {
        id: format!("{id:016x}{ticket:016x}"),
        at,
        charges: asked,
    });
    Ok(answer(Ok(&decision), is_list, admission))
}

pub(crate) async fn peek(
    State(service): State<Arc<Service>>,
    headers: HeaderMap,
    body: Bytes,
) -> Outcome {
    let (asked, is_list) = read_charges(&headers, &body)?;
    let (_, check) = check_of(&service.rules(), asked.iter().collect(), TO_SEE)?;
    let decision = service
        .limiter
        .check_all(check)
        .await
        .map_err(|error| Rejection::from(error).into_response())?;
    Ok(answer(Ok(&decision), is_list, None))
}

pub(crate) async fn reset(
    State(service): State<Arc<Service>>,
    headers: HeaderMap,
    body: Bytes,
) -> Outcome {
    let (asked, _) = read_charges(&headers, &body)?;
    let (_, check) = check_of(&service.rules(), asked.iter().collect(), TO_SEE)?;
    if let Some(charge) = check
        .charges()
        .find(|charge| charge.limit().is_concurrent())
    {
        return Err(mistake(format!(
            "the limit {:?} is of places, which are held",
            charge.limit().name()
        )));
    }
    for charge in check.charges() {
        let done = service.limiter.reset(charge.limit(), charge.key()).await;
        done.map_err(|error| Rejection::from(error).into_response())?;
    }
    Ok(StatusCode::NO_CONTENT.into_response())
}

pub(crate) async fn settle(
    State(service): State<Arc<Service>>,
    headers: HeaderMap,
    body: Bytes,
) -> Outcome {
    let Settling { admission, actual } = read(&headers, &body)?;
    let number = |hex| u64::from_str_radix(hex, 16).ok();
    let told = admission
        .id
        .split_at_checked(16)
        .and_then(|(id, ticket)| Some((number(id)?, number(ticket)?)));
    let (id, ticket) =
        told.ok_or_else(|| mistake("the id of the admission is not as it was told"))?;
    let costs = match actual {
        Actual::One(cost) => vec![cost; admission.charges.len()],
        Actual::Each(costs) if costs.len() == admission.charges.len() => costs,
        Actual::Each(_) => return Err(mistake("actual needs one number for each charge")),
    };
    // A guessed id frees nothing. The place is free also if the limit has gone, or the store.
    let is_its_own = ticket == service.held.ticket(id, &said(&admission.charges));
    let frees = is_its_own && service.held.free(ticket);
    let freed =
        || Ok(axum::Json(serde_json::json!({ "settled": true, "used": null })).into_response());
    let rules = service.rules();
    let is_known = |asked: &Asked| rules.find_limit(&asked.limit).is_some();
    let known = || {
        admission
            .charges
            .iter()
            .zip(&costs)
            .filter(|(asked, _)| !frees || is_known(asked))
    };
    if frees && known().next().is_none() {
        return freed();
    }
    let (_, check) = check_of(&rules, known().map(|(asked, _)| asked).collect(), TO_SETTLE)?;
    let is_only_of_places = check.charges().all(|charge| charge.limit().is_concurrent());
    // Units without a lease are spent at once.
    let mut each = known().map(|(asked, cost)| asked.lease.map(|_| *cost));
    let at = UNIX_EPOCH
        .checked_add(Duration::from_micros(admission.at))
        .unwrap_or(UNIX_EPOCH);
    let settlement = Settlement::by_id(check, AdmissionId(id), at, |charge| {
        each.next()
            .flatten()
            .filter(|_| !charge.limit().is_concurrent())
    });
    let settled = match service.limiter.settle(settlement).await {
        Err(_) if frees && is_only_of_places => return freed(),
        settled => settled.map_err(|error| Rejection::from(error).into_response())?,
    };
    let mut body = serde_json::json!({ "settled": settled.was_applied || frees });
    body["used"] = settled.decision.binding().used.into();
    Ok(axum::Json(body).into_response())
}
