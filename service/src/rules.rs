//! All rules: how a request, a text or a descriptor finds its own.

use std::{
    collections::HashMap,
    fmt::Write,
    sync::{Arc, atomic::AtomicBool},
};

use anyhow::{Context, Result, anyhow, bail, ensure};
use axum::http::{Method, StatusCode};
use tower_sliding_window::{ClientIp, Limiter};

use crate::{
    file::{self, Ask, File, Proxy, Variable},
    key::{PathValues, Sources},
    path,
    question::Questions,
    rule::{KeyedLimit, MOST_ENTRIES, Route, Rule},
};

#[derive(Default)]
pub(crate) struct Rules {
    pub(crate) all: Vec<Arc<Rule>>,
    by_name: HashMap<String, Arc<Rule>>,
    /// With the place among the limits of its rule.
    by_limit: HashMap<String, (Arc<Rule>, usize)>,
    /// One for each method that a rule names, and one for all others.
    routes: HashMap<Option<Method>, matchit::Router<Arc<Rule>>>,
    by_descriptor: HashMap<String, Arc<Rule>>,
    ignore_case: bool,
    pub(crate) questions: Option<Questions>,
    pub(crate) refusal_status: Option<StatusCode>,
    /// True if the log has said that a question cannot be answered. Clients could fill it.
    pub(crate) has_told_of_questions: AtomicBool,
}

impl Rules {
    pub(crate) fn build(text: &str, file: &File, limiter: &Limiter) -> Result<Self> {
        let addresses = file
            .proxy
            .as_ref()
            .map_or(&[][..], |proxy| &proxy.addresses);
        let sources = Sources {
            client: ClientIp::behind(addresses).context("[proxy] addresses")?,
            secret: file
                .secret
                .as_ref()
                .map(Variable::secret)
                .transpose()?
                .map(|(secret, _)| secret),
            ignore_case: file.proxy.as_ref().is_some_and(|proxy| proxy.ignore_case),
        };
        let mut rules = Self {
            ignore_case: sources.ignore_case,
            ..Self::default()
        };
        if let Some(proxy) = &file.proxy {
            rules.read_proxy(proxy)?;
        }
        for rule in &file.rule {
            let read = Rule::read(rule.get_ref(), file, &sources, limiter);
            read.and_then(|rule| rules.add(Arc::new(rule)))
                .with_context(|| {
                    format!(
                        "{}: rule {:?}",
                        file::position(text, rule.span().start),
                        rule.get_ref().name
                    )
                })?;
        }
        rules.serve_head();
        // As of a file that somebody is writing.
        ensure!(!rules.all.is_empty(), "it has no [[rule]]");
        Ok(rules)
    }

    fn read_proxy(&mut self, proxy: &Proxy) -> Result<()> {
        self.questions = Some(Questions::from(&proxy.addresses, proxy.ask)?);
        let status = proxy.refusal_status.map(StatusCode::from_u16).transpose();
        let status = status
            .ok()
            .filter(|status| status.is_none_or(|status| status.as_u16() >= 400));
        self.refusal_status = status.context("[proxy] refusal_status must be 400 to 999")?;
        let is_known_to_nginx =
            !matches!(proxy.ask, Ask::Original) || proxy.refusal_status.is_some();
        ensure!(
            is_known_to_nginx,
            "[proxy] ask = \"original\" needs refusal_status = 403: nginx makes a 500 of a 429"
        );
        Ok(())
    }

    fn add(&mut self, rule: Arc<Rule>) -> Result<()> {
        let is_first = self
            .by_name
            .insert(rule.name.clone(), Arc::clone(&rule))
            .is_none();
        ensure!(is_first, "there is another rule of this name");
        for (place, keyed) in rule.limits.iter().enumerate() {
            let name = keyed.limit.name();
            let Some((other, at)) = self
                .by_limit
                .insert(name.to_owned(), (Arc::clone(&rule), place))
            else {
                continue;
            };
            ensure!(
                !Arc::ptr_eq(&other, &rule),
                "it has the limit {name:?} twice"
            );
            let same = &other.limits[at];
            let differs = if same.limit != keyed.limit {
                format!("is \"{}\"", same.limit)
            } else if same.key.texts != keyed.key.texts {
                "has another key".to_owned()
            } else if same.is_shadow != keyed.is_shadow || other.on_failure != rule.on_failure {
                "has another shadow or on_failure".to_owned()
            } else {
                continue;
            };
            bail!(
                "its limit \"{}\" {differs} in rule {:?}: give one of them another name",
                keyed.limit,
                other.name
            );
        }
        if let Some(descriptor) = &rule.descriptor {
            let entries = descriptor
                .entries
                .iter()
                .map(|(key, value)| (&**key, value.as_deref()));
            let text = descriptor_text(&descriptor.domain, entries);
            if let Some(other) = self.by_descriptor.insert(text, Arc::clone(&rule)) {
                bail!(
                    "it has the domain and the descriptor of rule {:?}",
                    other.name
                );
            }
        }
        if let Some(route) = &rule.route {
            self.add_route(route, &rule)?;
        }
        self.all.push(rule);
        Ok(())
    }

    /// Puts a rule into the routers of its methods, or of all.
    fn add_route(&mut self, Route { path, methods, .. }: &Route, rule: &Arc<Rule>) -> Result<()> {
        self.routes.entry(None).or_default();
        for method in methods.iter().cloned().map(Some) {
            if !self.routes.contains_key(&method) {
                self.routes.insert(method, self.routes[&None].clone());
            }
        }
        let is_own = |method: &Option<Method>| {
            method
                .as_ref()
                .is_some_and(|method| methods.contains(method))
        };
        for (_, router) in self
            .routes
            .iter_mut()
            .filter(|(method, _)| methods.is_empty() || is_own(method))
        {
            router
                .insert(path.clone(), Arc::clone(rule))
                .map_err(|error| {
                    let with = if let matchit::InsertError::Conflict { with } = &error {
                        with
                    } else {
                        ""
                    };
                    let is_other = |other: &&Arc<Rule>| {
                        other.route.as_ref().is_some_and(|route| route.path == with)
                    };
                    match self.all.iter().find(is_other) {
                        Some(other) => anyhow!(
                            "its path {path:?} is hidden by {with:?} of rule {:?}",
                            other.name
                        ),
                        None => anyhow!("its path {path:?}: {error}"),
                    }
                })?;
        }
        Ok(())
    }

    /// Applications answer `HEAD` by `GET`, so a rule for `GET` is about both, but for the paths of
    /// rules that name `HEAD`.
    fn serve_head(&mut self) {
        for rule in &self.all {
            let Some(Route { path, methods, .. }) = &rule.route else {
                continue;
            };
            if methods.contains(&Method::GET) && !methods.contains(&Method::HEAD) {
                let others = self.routes[&None].clone();
                let _ = self
                    .routes
                    .entry(Some(Method::HEAD))
                    .or_insert(others)
                    .insert(path.clone(), Arc::clone(rule));
            }
        }
    }

    /// The rules of a request, with the values in its path: one for each reading of the path, if
    /// they differ.
    pub(crate) fn find(&self, method: &Method, path: &str) -> Vec<(&Rule, PathValues)> {
        // Some applications take `post` for `POST`.
        let method = method.as_str().to_ascii_uppercase().parse().ok();
        let routes = self.routes.get(&method).or_else(|| self.routes.get(&None));
        let mut found: Vec<(&Rule, PathValues)> = Vec::new();
        for path in path::readings(path) {
            let path = if self.ignore_case {
                path.to_lowercase()
            } else {
                path
            };
            let Some(one) = routes.and_then(|routes| find_route(routes, &path)) else {
                continue;
            };
            if !found
                .iter()
                .any(|(other, values)| other.name == one.0.name && *values == one.1)
            {
                found.push(one);
            }
        }
        found
    }

    pub(crate) fn find_limit(&self, name: &str) -> Option<(&Rule, &KeyedLimit)> {
        let (rule, place) = self.by_limit.get(name)?;
        Some((rule, &rule.limits[*place]))
    }

    /// The rule of a descriptor, and the values that are its key. A rule that says the first
    /// values wins.
    pub(crate) fn find_descriptor<'a>(
        &self,
        domain: &str,
        entries: &[(&'a str, &'a str)],
    ) -> Option<(&Rule, Vec<&'a str>)> {
        if entries.len() > MOST_ENTRIES {
            return None;
        }
        // A bit for each entry whose value is open, the last one first.
        let is_open = |open: usize, at: usize| open >> (entries.len() - 1 - at) & 1 == 1;
        (0..1_usize << entries.len()).find_map(|open| {
            let numbered = || entries.iter().enumerate();
            let said =
                numbered().map(|(at, (key, value))| (*key, (!is_open(open, at)).then_some(*value)));
            let rule = self.by_descriptor.get(&descriptor_text(domain, said))?;
            let values = numbered()
                .filter(|(at, _)| is_open(open, *at))
                .map(|(_, (_, value))| *value);
            Some((&**rule, values.collect()))
        })
    }
}

/// The most specific rule of a path. The router does not find an empty rest of `/files/{*path}`.
fn find_route<'a>(
    routes: &'a matchit::Router<Arc<Rule>>,
    path: &str,
) -> Option<(&'a Rule, PathValues)> {
    let has_rest = |rule: &Rule| {
        rule.route
            .as_ref()
            .is_some_and(|route| route.path.contains("{*"))
    };
    let mut found = routes.at(path).ok();
    let mut said = usize::MAX;
    let below = format!("{}/-", path.trim_end_matches('/'));
    if found.as_ref().is_none_or(|found| has_rest(found.value))
        && let Ok(empty) = routes.at(&below)
        && has_rest(empty.value)
        && empty
            .params
            .iter()
            .last()
            .is_some_and(|(_, rest)| rest == "-")
    {
        said = empty.params.len() - 1;
        found = Some(empty);
    }
    let found = found?;
    let values = found
        .params
        .iter()
        .take(said)
        .map(|(name, value)| (name.to_owned(), path::text_of(value)));
    Some((found.value, PathValues(values.collect())))
}

/// No two lists of entries give the same text, since each part says its length.
fn descriptor_text<'a>(
    domain: &str,
    entries: impl Iterator<Item = (&'a str, Option<&'a str>)>,
) -> String {
    let mut text = format!("{}:{domain}", domain.len());
    for part in entries.flat_map(|(key, value)| [Some(key), value]) {
        let _ = match part {
            Some(part) => write!(text, "{}:{part}", part.len()),
            None => write!(text, "*"),
        };
    }
    text
}
