//! One rule: its limits with their keys, and the requests, texts or descriptors that it is about.

use std::{convert::Infallible, fmt, num::NonZeroU64, sync::Arc};

use anyhow::{Context, Result, bail, ensure};
use axum::{
    body::Body,
    http::{Method, Request, StatusCode, request::Parts},
    response::{IntoResponse, Response},
};
use tower::{Layer, service_fn, util::BoxCloneSyncService};
use tower_sliding_window::{Limit, Limiter, RateLimitLayer, limiter::Share};

use crate::{
    file::{File, OnFailure, RuleText},
    key::{LimitKey, Sources},
    path,
};

/// More would let one descriptor of a proxy cost many look-ups.
pub(crate) const MOST_ENTRIES: usize = 8;

type Guard = BoxCloneSyncService<Request<Body>, Response, Infallible>;

pub(crate) struct Rule {
    pub(crate) name: String,
    /// Those of the rule's own key come first.
    pub(crate) limits: Vec<KeyedLimit>,
    pub(crate) limiter: Limiter,
    pub(crate) on_failure: OnFailure,
    pub(crate) route: Option<Route>,
    pub(crate) descriptor: Option<Descriptor>,
}

pub(crate) struct KeyedLimit {
    pub(crate) limit: Limit,
    pub(crate) is_shadow: bool,
    pub(crate) key: Arc<LimitKey>,
}

/// The requests of a proxy that a rule is about.
pub(crate) struct Route {
    pub(crate) path: String,
    pub(crate) methods: Vec<Method>,
    /// Answers the questions of the proxy.
    pub(crate) guard: Guard,
}

/// The descriptors of Envoy that a rule is about. An entry without a value is a part of the key.
pub(crate) struct Descriptor {
    pub(crate) domain: String,
    pub(crate) entries: Vec<(String, Option<String>)>,
}

impl Rule {
    pub(crate) fn read(text: &RuleText, file: &File, sources: &Sources, limiter: &Limiter) -> Result<Self> {
        let descriptor = Descriptor::read(text)?;
        let open = descriptor.as_ref().map(|descriptor| descriptor.entries.iter().filter(|(_, value)| value.is_none()));
        let open = open.map(Iterator::count);
        let own_key = text.key.clone().unwrap_or_else(|| match (open, &text.path) {
            (Some(open), _) => vec!["text".to_owned(); open],
            (None, Some(_)) => vec!["client".to_owned()],
            (None, None) => vec!["text".to_owned()],
        });
        if let Some(open) = open {
            ensure!(
                own_key.len() == open,
                "its key has {} parts, and its descriptor {open} entries without a value",
                own_key.len()
            );
        }
        let mut limits = read_limits(own_key, &text.limits, &text.shadow, sources)?;
        for also in &text.also {
            ensure!(text.path.is_some() && descriptor.is_none(), "also needs a path, and no domain");
            limits.extend(read_limits(also.key.clone(), &also.limits, &also.shadow, sources)?);
        }
        for KeyedLimit { limit, key, .. } in &limits {
            let is_asked = text.path.is_some() || descriptor.is_some();
            ensure!(
                !(is_asked && limit.is_concurrent()),
                "\"{limit}\": no proxy says when a request ends, so only POST /check takes places"
            );
            let Some(path) = &text.path else { continue };
            ensure!(key.texts.iter().all(|part| part != "text"), "a request has no key \"text\"");
            let mut names = key.texts.iter().filter_map(|part| part.strip_prefix("path:"));
            if let Some(name) = names.find(|name| !path::has_value(path, name)) {
                bail!("its path has no value for the key \"path:{name}\"");
            }
        }
        let on_failure = text.on_failure.unwrap_or(file.on_failure);
        let limiter = match on_failure {
            OnFailure::Local(processes) => limiter.clone().fail_local(Share::from(processes)),
            _ => limiter.clone(),
        };
        let mut rule = Self { name: text.name.clone(), limits, limiter, on_failure, route: None, descriptor };
        rule.route = rule.read_route(text, file, sources)?;
        Ok(rule)
    }

    fn read_route(&self, text: &RuleText, file: &File, sources: &Sources) -> Result<Option<Route>> {
        let Some(path) = &text.path else {
            let has_none = text.methods.is_empty() && text.cost.is_none() && text.cost_from.is_none();
            ensure!(has_none, "methods and costs need a path: others say the cost themselves");
            return Ok(None);
        };
        ensure!(file.proxy.is_some(), "its path needs [proxy], which says who may ask");
        ensure!(text.cost.is_none() || text.cost_from.is_none(), "cost and cost_from: only one of them");
        let path = path::pattern(path)?;
        let path = if sources.ignore_case { path.to_lowercase() } else { path };
        let methods = text.methods.iter().map(|name| method(name)).collect::<Result<_>>()?;
        Ok(Some(Route { path, methods, guard: self.guard(text)? }))
    }

    fn guard(&self, text: &RuleText) -> Result<Guard> {
        let limits = self.limits.iter().map(|keyed| {
            let key = Arc::clone(&keyed.key);
            let limit = keyed.limit.clone().by(move |request: &Parts| key.of_request(request));
            if keyed.is_shadow { limit.in_shadow() } else { limit }
        });
        let cost = text.cost.map_or(1, NonZeroU64::get);
        let from = text.cost_from.clone();
        let layer = RateLimitLayer::new(self.limiter.clone())
            .limits(limits)?
            .named(self.name.clone())
            .cost(move |request| from.as_ref().map_or(cost, |from| from.of(request)));
        let layer = if self.on_failure == OnFailure::Closed { layer.fail_closed() } else { layer };
        let admitted = service_fn(|_| async { Ok(StatusCode::OK.into_response()) });
        Ok(BoxCloneSyncService::new(layer.layer(admitted)))
    }
}

fn read_limits(key: Vec<String>, limits: &[Limit], shadow: &[Limit], sources: &Sources) -> Result<Vec<KeyedLimit>> {
    let key = Arc::new(LimitKey::read(key, sources)?);
    let keyed = |limit: &Limit, is_shadow| KeyedLimit { limit: limit.clone(), is_shadow, key: Arc::clone(&key) };
    let limits = limits.iter().map(|limit| keyed(limit, false));
    let limits: Vec<_> = limits.chain(shadow.iter().map(|limit| keyed(limit, true))).collect();
    ensure!(!limits.is_empty(), "it has no limits");
    Ok(limits)
}

/// Methods are written in capitals, and the type knows others, too.
fn method(name: &str) -> Result<Method> {
    let is_one = !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_uppercase() || byte == b'-');
    ensure!(is_one, "{name:?} is no method, such as \"POST\"");
    name.parse().with_context(|| format!("the method {name:?}"))
}

impl Descriptor {
    fn read(text: &RuleText) -> Result<Option<Self>> {
        ensure!(
            text.domain.is_some() != text.descriptor.is_empty() && text.descriptor.len() <= MOST_ENTRIES,
            "a domain needs a descriptor of 1 to {MOST_ENTRIES} entries, and a descriptor a domain"
        );
        let entry = |entry: &String| match entry.split_once('=') {
            Some((key, value)) => (key.to_owned(), Some(value.to_owned())),
            None => (entry.clone(), None),
        };
        let entries = text.descriptor.iter().map(entry).collect();
        Ok(text.domain.clone().map(|domain| Self { domain, entries }))
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rule {:?}:", self.name)?;
        for KeyedLimit { limit, is_shadow, key } in &self.limits {
            write!(f, " {limit}{} by {}", if *is_shadow { " in the shadow" } else { "" }, key.texts.join(" and "))?;
        }
        if let Some(Route { path, methods, .. }) = &self.route {
            let methods = methods.iter().map(Method::as_str).collect::<Vec<_>>().join(" ");
            write!(f, ", {} {path}", if methods.is_empty() { "all methods" } else { &methods })?;
        }
        self.descriptor.as_ref().map_or(Ok(()), |Descriptor { domain, entries }| {
            let entry = |(key, value): &(String, Option<String>)| match value {
                Some(value) => format!("{key}={value}"),
                None => key.clone(),
            };
            write!(f, ", descriptor {} of {domain}", entries.iter().map(entry).collect::<Vec<_>>().join(", "))
        })
    }
}
