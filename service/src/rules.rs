//! Rules: how a request, a text or a descriptor finds its rule.

use std::{
    collections::HashMap,
    convert::Infallible,
    fmt::{self, Write},
    num::NonZeroU64,
    sync::{Arc, atomic::AtomicBool},
};

use axum::{
    body::Body,
    http::{Method, Request, StatusCode, request::Parts},
    response::{IntoResponse, Response},
};
use tower::{Layer, service_fn, util::BoxCloneSyncService};
use tower_sliding_window::{
    ClientIp, Key, Limit, Limiter, RateLimitLayer, Secret, limiter::Share, middleware::OriginalRequestLayer,
};

use crate::{
    file::{Ask, File, OnFailure, RuleText, Variable},
    key::{Part, PathValues, joined},
};

/// More would let one descriptor of a proxy cost many look-ups.
const MOST_ENTRIES: usize = 8;

type Guard = BoxCloneSyncService<Request<Body>, Response, Infallible>;

pub(crate) struct Rule {
    pub(crate) name: String,
    /// With whether each is in the shadow.
    pub(crate) limits: Vec<(Limit, bool)>,
    pub(crate) limiter: Limiter,
    pub(crate) on_failure: OnFailure,
    key: Vec<Part>,
    /// As the file says it.
    key_text: Vec<String>,
    route: Option<(String, Vec<Method>)>,
    descriptor: Option<String>,
    descriptor_said: String,
    pub(crate) guard: Option<Guard>,
}

#[derive(Default)]
pub(crate) struct Rules {
    pub(crate) all: Vec<Rule>,
    by_name: HashMap<String, usize>,
    by_limit: HashMap<String, (usize, usize)>,
    /// One for each method that a rule names, and one for all others.
    routes: HashMap<Option<Method>, matchit::Router<usize>>,
    by_descriptor: HashMap<String, usize>,
    ignore_case: bool,
    pub(crate) questions: Option<OriginalRequestLayer>,
    pub(crate) refusal_status: Option<StatusCode>,
    /// Whether the log has said that a question cannot be answered. Clients could fill it.
    pub(crate) has_told_of_questions: AtomicBool,
}

impl Rules {
    pub(crate) fn build(text: &str, file: &File, limiter: &Limiter) -> Result<Self, String> {
        let secret = file.secret.as_ref().map(Variable::secret).transpose()?.map(|(secret, _)| secret);
        let addresses = file.proxy.as_ref().map_or(&[][..], |proxy| &proxy.addresses);
        let client = ClientIp::behind(addresses).map_err(|error| format!("[proxy] addresses: {error}"))?;
        let mut rules = Self::default();
        if let Some(proxy) = &file.proxy {
            let layer = OriginalRequestLayer::behind(addresses).map_err(|error| error.to_string())?;
            rules.questions = Some(match proxy.ask {
                Ask::Forwarded => layer,
                Ask::Original => layer.headers("x-original-method", "x-original-uri"),
                Ask::AsSent => layer.as_sent("/auth"),
            });
            let status = proxy.refusal_status.map(StatusCode::from_u16).transpose();
            let status = status.ok().filter(|status| status.is_none_or(|status| status.as_u16() >= 400));
            rules.refusal_status = status.ok_or("[proxy] refusal_status must be 400 to 999")?;
            if matches!(proxy.ask, Ask::Original) && proxy.refusal_status.is_none() {
                return Err(
                    "[proxy] ask = \"original\" needs refusal_status = 403: nginx makes a 500 of a 429".to_owned()
                );
            }
            rules.ignore_case = proxy.ignore_case;
        }
        for rule in &file.rule {
            let name = &rule.get_ref().name;
            let read = Rule::read(rule.get_ref(), file, &client, secret.as_ref(), limiter, rules.ignore_case);
            read.and_then(|rule| rules.add(rule)).map_err(|problem| {
                let before = text.get(..rule.span().start).unwrap_or_default();
                let (line, column) =
                    (before.matches('\n').count() + 1, before.chars().rev().take_while(|c| *c != '\n').count() + 1);
                format!("line {line}, column {column}: rule {name:?}: {problem}")
            })?;
        }
        // As of a file that somebody is writing.
        if rules.all.is_empty() { Err("it has no [[rule]]".to_owned()) } else { Ok(rules) }
    }

    fn add(&mut self, rule: Rule) -> Result<(), String> {
        let index = self.all.len();
        if self.by_name.insert(rule.name.clone(), index).is_some() {
            return Err("there is another rule of this name".to_owned());
        }
        for (place, (limit, _)) in rule.limits.iter().enumerate() {
            let Some((other, at)) = self.by_limit.insert(limit.name().to_owned(), (index, place)) else { continue };
            let Some(other) = self.all.get(other) else {
                return Err(format!("it has the limit {:?} twice", limit.name()));
            };
            let ((same, is_shadow), name) = (&other.limits[at], &other.name);
            if *is_shadow != rule.limits[place].1 || other.on_failure != rule.on_failure {
                return Err(format!(
                    "its limit {:?} has another shadow or on_failure in rule {name:?}: give one of them another name",
                    limit.name()
                ));
            }
            if same != limit {
                return Err(format!(
                    "its limit \"{limit}\" is \"{same}\" in rule {name:?}: give one of them another name, or the same size"
                ));
            }
            if other.key_text != rule.key_text {
                return Err(format!(
                    "its limit {:?} has another key in rule {name:?}: give one of them another name",
                    limit.name()
                ));
            }
        }
        if let Some(other) = rule.descriptor.as_ref().and_then(|text| self.by_descriptor.insert(text.clone(), index)) {
            return Err(format!("it has the domain and the descriptor of rule {:?}", self.all[other].name));
        }
        self.add_route(&rule, index)?;
        self.all.push(rule);
        Ok(())
    }

    /// Puts a rule into the routers of its methods, or of all.
    fn add_route(&mut self, rule: &Rule, index: usize) -> Result<(), String> {
        let Some((path, methods)) = &rule.route else { return Ok(()) };
        self.routes.entry(None).or_default();
        for method in methods.iter().cloned().map(Some) {
            if !self.routes.contains_key(&method) {
                self.routes.insert(method, self.routes[&None].clone());
            }
        }
        let is_own = |method: &Option<Method>| method.as_ref().is_some_and(|method| methods.contains(method));
        for (_, router) in self.routes.iter_mut().filter(|(method, _)| methods.is_empty() || is_own(method)) {
            router.insert(path.clone(), index).map_err(|error| {
                let with = if let matchit::InsertError::Conflict { with } = &error { with } else { "" };
                let is_other = |other: &&Rule| other.route.as_ref().is_some_and(|(path, _)| path == with);
                match self.all.iter().find(is_other) {
                    Some(other) => format!("its path {path:?} is hidden by {with:?} of rule {:?}", other.name),
                    None => format!("its path {path:?}: {error}"),
                }
            })?;
        }
        Ok(())
    }

    /// The rules of a request, with the values in its path: one for each way in which an
    /// application may read the path, if they differ.
    pub(crate) fn find(&self, method: &Method, path: &str) -> Vec<(&Rule, PathValues)> {
        let mut found: Vec<(&Rule, PathValues)> = Vec::new();
        for path in [as_it_stands(path), resolved(path)] {
            let path = if self.ignore_case { path.to_lowercase() } else { path };
            if let Some((rule, values)) = self.find_read(method, &path)
                && !found
                    .iter()
                    .any(|(other, same)| other.name == rule.name && (*same == values || !rule.counts_by_path()))
            {
                found.push((rule, values));
            }
        }
        found
    }

    /// `HEAD` is answered by `GET`, unless a rule names it.
    fn find_read(&self, method: &Method, path: &str) -> Option<(&Rule, PathValues)> {
        let own = self.find_route(method, path);
        if method != Method::HEAD || own.as_ref().is_some_and(|(rule, _)| rule.is_of(method)) {
            return own;
        }
        self.find_route(&Method::GET, path)
    }

    fn find_route(&self, method: &Method, path: &str) -> Option<(&Rule, PathValues)> {
        let routes = self.routes.get(&Some(method.clone())).or_else(|| self.routes.get(&None))?;
        // The router finds no empty rest: `/files` is a path of `/files/{*path}`, too.
        let below = format!("{}/-", path.trim_end_matches('/'));
        let (found, has_rest) = match routes.at(path) {
            Ok(found) => (found, true),
            Err(_) => (routes.at(&below).ok()?, false),
        };
        let rule = &self.all[*found.value];
        if !has_rest && !rule.route.as_ref().is_some_and(|(path, _)| path.contains("{*")) {
            return None;
        }
        let said = found.params.len() - usize::from(!has_rest);
        let value = |value: &str| value.replace("%2F", "/");
        let values = found.params.iter().take(said).map(|(name, said)| (name.to_owned(), value(said))).collect();
        Some((rule, PathValues(values)))
    }

    pub(crate) fn find_limit(&self, name: &str) -> Option<(&Rule, &(Limit, bool))> {
        let (rule, place) = self.by_limit.get(name)?;
        Some((&self.all[*rule], &self.all[*rule].limits[*place]))
    }

    /// The rule of a descriptor, and the values that are its key. A rule that says the first
    /// values wins.
    pub(crate) fn find_descriptor<'a>(
        &self,
        domain: &str,
        entries: &[(&'a str, &'a str)],
    ) -> Option<(&Rule, Vec<&'a str>)> {
        let open = |open: usize, at: usize| open >> (entries.len() - 1 - at) & 1 == 1;
        (0..1_usize << entries.len().min(MOST_ENTRIES + 1)).filter(|_| entries.len() <= MOST_ENTRIES).find_map(|mask| {
            let said = entries.iter().enumerate().map(|(at, (key, value))| (*key, (!open(mask, at)).then_some(*value)));
            let rule = &self.all[*self.by_descriptor.get(&descriptor_text(domain, said))?];
            let values = entries.iter().enumerate().filter(|(at, _)| open(mask, *at)).map(|(_, (_, value))| *value);
            Some((rule, values.collect()))
        })
    }
}

/// No two lists of entries give the same text, since each part says its length.
fn descriptor_text<'a>(domain: &str, entries: impl Iterator<Item = (&'a str, Option<&'a str>)>) -> String {
    let mut text = format!("{}:{domain}", domain.len());
    for part in entries.flat_map(|(key, value)| [Some(key), value]) {
        let Some(part) = part else {
            text.push('*');
            continue;
        };
        let _ = write!(text, "{}:{part}", part.len());
    }
    text
}

/// A path as an application reads it that splits it first, and decodes each segment then. An
/// encoded slash stays one.
fn as_it_stands(path: &str) -> String {
    let decoded = |segment: &str| {
        let text = percent_encoding::percent_decode_str(segment).decode_utf8_lossy().into_owned();
        text.replace('/', "%2F")
    };
    path.split('/').map(decoded).collect::<Vec<_>>().join("/")
}

/// A path as an application reads it that decodes it first, and resolves `.`, `..` and empty
/// segments.
fn resolved(path: &str) -> String {
    let decoded = percent_encoding::percent_decode_str(path).decode_utf8_lossy();
    let mut segments = Vec::new();
    for segment in decoded.split('/') {
        match segment {
            "" | "." => {}
            ".." => drop(segments.pop()),
            segment => segments.push(segment),
        }
    }
    format!("/{}", segments.join("/"))
}

impl Rule {
    fn read(
        text: &RuleText,
        file: &File,
        client: &ClientIp,
        secret: Option<&Secret>,
        limiter: &Limiter,
        ignore_case: bool,
    ) -> Result<Self, String> {
        let entries: Vec<_> = text
            .descriptor
            .iter()
            .map(|entry| entry.split_once('=').map_or((&**entry, None), |(key, value)| (key, Some(value))))
            .collect();
        let open = entries.iter().filter(|(_, value)| value.is_none()).count();
        let default = if text.domain.is_some() {
            vec!["text"; open]
        } else if text.path.is_some() {
            vec!["client"]
        } else {
            vec!["text"]
        };
        let key_text = text.key.clone().unwrap_or_else(|| default.into_iter().map(str::to_owned).collect());
        let key =
            key_text.iter().map(|part| Part::read(part, client, secret, ignore_case)).collect::<Result<Vec<_>, _>>()?;
        let limits: Vec<_> = text
            .limits
            .iter()
            .map(|limit| (limit, false))
            .chain(text.shadow.iter().map(|limit| (limit, true)))
            .map(|(limit, is_shadow)| (limit.clone(), is_shadow))
            .collect();
        let is_unknown = |part: &&String| {
            let name = part.strip_prefix("path:").zip(text.path.as_ref());
            name.is_some_and(|(name, path)| {
                !path.contains(&format!("{{{name}}}")) && !path.contains(&format!("{{*{name}}}"))
            })
        };
        let is_asked = text.path.is_some() || text.domain.is_some();
        let is_literal = |path: &String| {
            !path.split('{').enumerate().any(|(at, part)| {
                let text = if at == 0 { part } else { part.split_once('}').map_or("", |(_, text)| text) };
                text.contains([':', '*', '<', '}'])
            })
        };
        if limits.is_empty() {
            return Err("it has no limits".to_owned());
        } else if text.path.is_some() && file.proxy.is_none() {
            return Err("its path needs [proxy], which says who may ask".to_owned());
        } else if let Some(path) = text.path.as_ref().filter(|path| !is_literal(path)) {
            return Err(format!(
                "its path {path:?} has a :, * or < outside of braces: write /page/{{number}} or /files/{{*path}}"
            ));
        } else if let Some((limit, _)) = limits.iter().find(|(limit, _)| is_asked && limit.is_concurrent()) {
            return Err(format!("\"{limit}\": no proxy says when a request ends, so only POST /check takes places"));
        } else if text.path.is_some() && key.iter().any(|part| matches!(part, Part::Text)) {
            return Err("a request has no key \"text\"".to_owned());
        } else if let Some(part) = key_text.iter().find(|part| is_unknown(part)) {
            return Err(format!("its path has no value for the key {part:?}"));
        } else if text.domain.is_some() == entries.is_empty() || entries.len() > MOST_ENTRIES {
            return Err(format!(
                "a domain needs a descriptor of 1 to {MOST_ENTRIES} entries, and a descriptor a domain"
            ));
        } else if text.domain.is_some() && key.len() != open {
            return Err(format!("its key has {} parts, and its descriptor {open} entries without a value", key.len()));
        } else if text.path.is_none() && (!text.methods.is_empty() || text.cost.is_some() || text.cost_from.is_some()) {
            return Err("methods and costs need a path: others say the cost themselves".to_owned());
        } else if text.cost.is_some() && text.cost_from.is_some() {
            return Err("cost and cost_from: only one of them".to_owned());
        }
        let is_method =
            |name: &&String| !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_uppercase() || byte == b'-');
        let method = |name: &String| {
            Some(name)
                .filter(is_method)
                .and_then(|name| name.parse().ok())
                .ok_or_else(|| format!("{name:?} is no method, such as \"POST\""))
        };
        let methods = text.methods.iter().map(method).collect::<Result<Vec<Method>, _>>()?;
        let path = match &text.path {
            Some(path) if !path.starts_with('/') => return Err(format!("its path {path:?} must begin with /")),
            path => path
                .as_ref()
                .map(|path| resolved(path))
                .map(|path| if ignore_case { path.to_lowercase() } else { path }),
        };
        let on_failure = text.on_failure.unwrap_or(file.on_failure);
        let limiter = match on_failure {
            OnFailure::Local(processes) => limiter.clone().fail_local(Share::from(processes)),
            _ => limiter.clone(),
        };
        let descriptor = text.domain.as_ref().map(|domain| descriptor_text(domain, entries.into_iter()));
        let mut rule = Self {
            name: text.name.clone(),
            limits,
            limiter,
            on_failure,
            key,
            key_text,
            route: path.map(|path| (path, methods)),
            descriptor,
            descriptor_said: format!("{:?} of {}", text.descriptor, text.domain.as_deref().unwrap_or_default()),
            guard: None,
        };
        rule.guard = rule.route.is_some().then(|| rule.guard(text)).transpose()?;
        Ok(rule)
    }

    fn counts_by_path(&self) -> bool {
        self.key.iter().any(|part| matches!(part, Part::Path(_)))
    }

    fn is_of(&self, method: &Method) -> bool {
        self.route.as_ref().is_some_and(|(_, methods)| methods.contains(method))
    }

    /// What answers the proxies' questions.
    fn guard(&self, text: &RuleText) -> Result<Guard, String> {
        let parts = self.key.clone();
        let key = Arc::new(move |request: &Parts| joined(parts.iter().map(|part| part.of_request(request))));
        let limits = self.limits.iter().map(|(limit, is_shadow)| {
            let key = Arc::clone(&key);
            let limit = limit.clone().by(move |request: &Parts| key(request));
            if *is_shadow { limit.in_shadow() } else { limit }
        });
        let layer = RateLimitLayer::new(self.limiter.clone()).limits(limits).map_err(|error| error.to_string())?;
        let (cost, from) = (text.cost.map_or(1, NonZeroU64::get), text.cost_from.clone());
        let layer =
            layer.named(self.name.clone()).cost(move |request| from.as_ref().map_or(cost, |from| from.of(request)));
        let layer = if self.on_failure == OnFailure::Closed { layer.fail_closed() } else { layer };
        let admitted = service_fn(|_| async { Ok(StatusCode::OK.into_response()) });
        Ok(BoxCloneSyncService::new(layer.layer(admitted)))
    }

    /// The key that a program or a descriptor says.
    pub(crate) fn key_of(&self, texts: &[&str]) -> Result<Key, String> {
        if texts.len() != self.key.len() {
            return Err(format!(
                "the key has {} parts, and rule {:?} needs {}",
                texts.len(),
                self.name,
                self.key.len()
            ));
        }
        joined(self.key.iter().zip(texts).map(|(part, text)| part.of_text(text)))
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rule {:?}:", self.name)?;
        for (limit, is_shadow) in &self.limits {
            write!(f, " {limit}{}", if *is_shadow { " in the shadow" } else { "" })?;
        }
        write!(f, " by {}", self.key_text.join(" and "))?;
        if let Some((path, methods)) = &self.route {
            write!(
                f,
                ", {} {path}",
                if methods.is_empty() { "all methods".to_owned() } else { format!("{methods:?}") }
            )?;
        }
        self.descriptor.as_ref().map_or(Ok(()), |_| write!(f, ", descriptor {}", self.descriptor_said))
    }
}
