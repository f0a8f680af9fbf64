//! One rule: its limits with their keys, and the requests, texts or descriptors that it is about.

use std::{fmt, num::NonZeroU64, sync::Arc};

use anyhow::{Context, Result, bail, ensure};
use axum::http::{Method, request::Parts};
use tower_sliding_window::{
    Charge, Key, Limit, Limiter, error::NeverFits, extract::KeyError, limiter::Share,
};

use crate::{
    file::{CostFrom, File, OnFailure, RuleText},
    key::{LimitKey, Sources},
    path,
};

/// More would let one descriptor of a proxy cost many look-ups.
pub(crate) const MOST_ENTRIES: usize = 8;

pub(crate) struct Rule {
    pub(crate) name: String,
    /// Those of the rule's own key come first.
    pub(crate) limits: Vec<KeyedLimit>,
    pub(crate) limiter: Limiter,
    pub(crate) on_failure: OnFailure,
    pub(crate) route: Option<Route>,
    pub(crate) descriptor: Option<Descriptor>,
}

#[derive(Clone)]
pub(crate) struct KeyedLimit {
    pub(crate) limit: Limit,
    pub(crate) is_shadow: bool,
    pub(crate) key: Arc<LimitKey>,
}

/// The requests of a proxy that a rule is about.
pub(crate) struct Route {
    pub(crate) path: String,
    pub(crate) methods: Vec<Method>,
    cost: u64,
    cost_from: Option<CostFrom>,
}

/// The descriptors of Envoy that a rule is about. An entry without a value is a part of the key.
pub(crate) struct Descriptor {
    pub(crate) domain: String,
    pub(crate) entries: Vec<(String, Option<String>)>,
}

impl Rule {
    pub(crate) fn read(
        text: &RuleText,
        file: &File,
        sources: &Sources,
        limiter: &Limiter,
    ) -> Result<Self> {
        let descriptor = Descriptor::read(text)?;
        let open = descriptor.as_ref().map(|descriptor| {
            descriptor
                .entries
                .iter()
                .filter(|(_, value)| value.is_none())
        });
        let open = open.map(Iterator::count);
        let own_key = text
            .key
            .clone()
            .unwrap_or_else(|| match (open, &text.path) {
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
            ensure!(
                text.path.is_some() && descriptor.is_none(),
                "also needs a path, and no domain"
            );
            limits.extend(read_limits(
                also.key.clone(),
                &also.limits,
                &also.shadow,
                sources,
            )?);
        }
        for KeyedLimit { limit, key, .. } in &limits {
            let is_asked = text.path.is_some() || descriptor.is_some();
            ensure!(
                !(is_asked && limit.is_concurrent()),
                "\"{limit}\": no proxy says when a request ends, so only POST /check takes places"
            );
            let Some(path) = &text.path else { continue };
            ensure!(
                key.texts.iter().all(|part| part != "text"),
                "a request has no key \"text\""
            );
            let mut names = key
                .texts
                .iter()
                .filter_map(|part| part.strip_prefix("path:"));
            if let Some(name) = names.find(|name| !path::has_value(path, name)) {
                bail!("its path has no value for the key \"path:{name}\"");
            }
        }
        let on_failure = text.on_failure.unwrap_or(file.on_failure);
        let limiter = match on_failure {
            OnFailure::Local(processes) => {
                limiter.clone().fail_local(Share::one_of(processes.get()))
            }
            _ => limiter.clone(),
        };
        let route = Route::read(text, file, sources)?;
        Ok(Self {
            name: text.name.clone(),
            limits,
            limiter,
            on_failure,
            route,
            descriptor,
        })
    }
}

impl Route {
    fn read(text: &RuleText, file: &File, sources: &Sources) -> Result<Option<Self>> {
        let Some(path) = &text.path else {
            let has_none =
                text.methods.is_empty() && text.cost.is_none() && text.cost_from.is_none();
            ensure!(
                has_none,
                "methods and costs need a path: others say the cost themselves"
            );
            return Ok(None);
        };
        ensure!(
            file.proxy.is_some(),
            "its path needs [proxy], which says who may ask"
        );
        ensure!(
            text.cost.is_none() || text.cost_from.is_none(),
            "cost and cost_from: only one of them"
        );
        let path = path::pattern(path)?;
        let path = if sources.ignore_case {
            path.to_lowercase()
        } else {
            path
        };
        let methods = text
            .methods
            .iter()
            .map(|name| method(name))
            .collect::<Result<_>>()?;
        let cost = text.cost.map_or(1, NonZeroU64::get);
        Ok(Some(Self {
            path,
            methods,
            cost,
            cost_from: text.cost_from.clone(),
        }))
    }

    pub(crate) fn cost(&self, request: &Parts) -> Result<u64, KeyError> {
        self.cost_from
            .as_ref()
            .map_or(Ok(self.cost), |from| from.of(request))
    }
}

impl KeyedLimit {
    /// A shadow refuses nothing, so a cost above it counts as all of its units.
    pub(crate) fn charge(&self, key: Key, cost: u64) -> Result<Charge, NeverFits> {
        if self.is_shadow {
            return Ok(
                Charge::new(self.limit.clone(), key, cost.min(self.limit.units()))?.in_shadow(),
            );
        }
        Charge::new(self.limit.clone(), key, cost)
    }
}

fn read_limits(
    key: Vec<String>,
    limits: &[Limit],
    shadow: &[Limit],
    sources: &Sources,
) -> Result<Vec<KeyedLimit>> {
    let key = Arc::new(LimitKey::read(key, sources)?);
    let keyed = |limit: &Limit, is_shadow| KeyedLimit {
        limit: limit.clone(),
        is_shadow,
        key: Arc::clone(&key),
    };
    let limits = limits.iter().map(|limit| keyed(limit, false));
    let limits: Vec<_> = limits
        .chain(shadow.iter().map(|limit| keyed(limit, true)))
        .collect();
    ensure!(!limits.is_empty(), "it has no limits");
    Ok(limits)
}

/// Methods are written in capitals, and the type knows others, too.
fn method(name: &str) -> Result<Method> {
    let is_one = !name.is_empty()
        && name
            .bytes()
            .all(|byte| byte.is_ascii_uppercase() || byte == b'-');
    ensure!(is_one, "{name:?} is no method, such as \"POST\"");
    name.parse().with_context(|| format!("the method {name:?}"))
}

impl Descriptor {
    fn read(text: &RuleText) -> Result<Option<Self>> {
        ensure!(
            text.domain.as_deref() != Some(""),
            "its domain is empty: Envoy always says one"
        );
        ensure!(
            text.domain.is_some() != text.descriptor.is_empty()
                && text.descriptor.len() <= MOST_ENTRIES,
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
        for KeyedLimit {
            limit,
            is_shadow,
            key,
        } in &self.limits
        {
            write!(
                f,
                " {limit}{} by {}",
                if *is_shadow { " in the shadow" } else { "" },
                key.texts.join(" and ")
            )?;
        }
        if let Some(Route { path, methods, .. }) = &self.route {
            let methods = methods
                .iter()
                .map(Method::as_str)
                .collect::<Vec<_>>()
                .join(" ");
            write!(
                f,
                ", {} {path}",
                if methods.is_empty() {
                    "all methods"
                } else {
                    &methods
                }
            )?;
        }
        self.descriptor
            .as_ref()
            .map_or(Ok(()), |Descriptor { domain, entries }| {
                let entry = |(key, value): &(String, Option<String>)| match value {
                    Some(value) => format!("{key}={value}"),
                    None => key.clone(),
                };
                write!(
                    f,
                    ", descriptor {} of {domain}",
                    entries.iter().map(entry).collect::<Vec<_>>().join(", ")
                )
            })
    }
}
