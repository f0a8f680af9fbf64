//! What a file of rules says, as TOML.

use std::{
    env,
    num::{NonZeroU32, NonZeroU64},
};

use axum::http::request::Parts;
use serde::Deserialize;
use toml::Spanned;
use tower_sliding_window::{Limit, Secret};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct File {
    #[serde(default = "default_listen")]
    pub(crate) listen: String,
    pub(crate) grpc_listen: Option<String>,
    pub(crate) store: Option<String>,
    pub(crate) token: Option<Variable>,
    pub(crate) secret: Option<Variable>,
    #[serde(default)]
    pub(crate) on_failure: OnFailure,
    pub(crate) proxy: Option<Proxy>,
    #[serde(default)]
    pub(crate) rule: Vec<Spanned<RuleText>>,
}

#[derive(Clone, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub(crate) struct Variable {
    env: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Proxy {
    pub(crate) addresses: Vec<String>,
    #[serde(default)]
    pub(crate) ask: Ask,
    pub(crate) refusal_status: Option<u16>,
    #[serde(default)]
    pub(crate) ignore_case: bool,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Ask {
    #[default]
    Forwarded,
    Original,
    AsSent,
}

#[derive(Clone, Copy, Default, Deserialize, PartialEq)]
#[serde(rename_all = "lowercase")]
pub(crate) enum OnFailure {
    #[default]
    Open,
    Closed,
    Local(NonZeroU32),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RuleText {
    pub(crate) name: String,
    pub(crate) path: Option<String>,
    #[serde(default)]
    pub(crate) methods: Vec<String>,
    pub(crate) key: Option<Vec<String>>,
    #[serde(default)]
    pub(crate) limits: Vec<Limit>,
    #[serde(default)]
    pub(crate) shadow: Vec<Limit>,
    pub(crate) cost: Option<NonZeroU64>,
    pub(crate) cost_from: Option<CostFrom>,
    pub(crate) on_failure: Option<OnFailure>,
    pub(crate) domain: Option<String>,
    #[serde(default)]
    pub(crate) descriptor: Vec<String>,
}

#[derive(Clone, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum CostFrom {
    Query(String),
    Header(String),
}

fn default_listen() -> String {
    "127.0.0.1:8090".to_owned()
}

impl Variable {
    pub(crate) fn secret(&self) -> Result<(Secret, String), String> {
        let value = env::var(&self.env).map_err(|error| format!("the variable {}: {error}", self.env))?;
        Ok((Secret::new(&value).map_err(|error| format!("the variable {}: {error}", self.env))?, value))
    }
}

impl File {
    /// An error has the line and the column of the mistake.
    pub(crate) fn read(text: &str) -> Result<Self, String> {
        toml::from_str(text).map_err(|error| error.to_string().trim_end().to_owned())
    }

    /// Whether all is the same that is read only at the start.
    pub(crate) fn has_settings_of(&self, other: &Self) -> bool {
        let settings =
            |file: &Self| (file.listen.clone(), file.grpc_listen.clone(), file.store.clone(), file.token.clone());
        settings(self) == settings(other)
    }
}

impl CostFrom {
    /// 1 where there is no number above 0.
    pub(crate) fn of(&self, request: &Parts) -> u64 {
        let number = match self {
            Self::Header(name) => request.headers.get(name).and_then(|value| value.to_str().ok()),
            Self::Query(name) => request
                .uri
                .query()
                .unwrap_or_default()
                .split('&')
                .find_map(|pair| pair.split_once('=').filter(|(key, _)| key == name))
                .map(|(_, value)| value),
        };
        number.and_then(|number| number.parse().ok()).unwrap_or(1).max(1)
    }
}
