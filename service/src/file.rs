//! What a file of rules says, as TOML.

use std::{
    env, iter,
    num::{NonZeroU32, NonZeroU64},
};

use anyhow::{Context, Result, anyhow};
use axum::http::request::Parts;
use percent_encoding::percent_decode_str;
use serde::Deserialize;
use toml::Spanned;
use tower_sliding_window::{Limit, Secret, extract::KeyError};

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

#[derive(Clone, Copy, Default, Deserialize)]
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

impl OnFailure {
    /// How many processes share a limit while each decides by itself; 0 if they do not decide.
    pub(crate) fn processes(self) -> u32 {
        if let Self::Local(processes) = self {
            processes.get()
        } else {
            0
        }
    }
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
    #[serde(default)]
    pub(crate) also: Vec<AlsoText>,
    pub(crate) cost: Option<NonZeroU64>,
    pub(crate) cost_from: Option<CostFrom>,
    pub(crate) on_failure: Option<OnFailure>,
    pub(crate) domain: Option<String>,
    #[serde(default)]
    pub(crate) descriptor: Vec<String>,
}

/// Limits by another key.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct AlsoText {
    pub(crate) key: Vec<String>,
    #[serde(default)]
    pub(crate) limits: Vec<Limit>,
    #[serde(default)]
    pub(crate) shadow: Vec<Limit>,
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
    pub(crate) fn secret(&self) -> Result<(Secret, String)> {
        let said = || {
            format!(
                "the variable {}, such as of `openssl rand -hex 32`",
                self.env
            )
        };
        let value = env::var(&self.env).with_context(said)?;
        Ok((Secret::new(&value).with_context(said)?, value))
    }
}

impl File {
    /// An error has the line and the column of the mistake, and not the line itself: it may hold a
    /// password.
    pub(crate) fn read(text: &str) -> Result<Self> {
        toml::from_str(text).map_err(|error: toml::de::Error| {
            anyhow!(
                "{}: {}",
                position(text, error.span().map_or(0, |span| span.start)),
                error.message()
            )
        })
    }

    /// True if all is the same that is read only at the start.
    pub(crate) fn has_settings_of(&self, other: &Self) -> bool {
        let settings = |file: &Self| {
            (
                file.listen.clone(),
                file.grpc_listen.clone(),
                file.store.clone(),
                file.token.clone(),
            )
        };
        settings(self) == settings(other)
    }

    pub(crate) fn store_url(&self) -> String {
        self.store
            .clone()
            .or_else(|| env::var("REDIS_URL").ok())
            .unwrap_or_else(|| "memory:".to_owned())
    }

    pub(crate) fn listeners(&self) -> impl Iterator<Item = &String> {
        iter::once(&self.listen).chain(&self.grpc_listen)
    }
}

/// The line and the column of a byte.
pub(crate) fn position(text: &str, byte: usize) -> String {
    let before = text.get(..byte).unwrap_or_default();
    let column = before
        .chars()
        .rev()
        .take_while(|symbol| *symbol != '\n')
        .count()
        + 1;
    format!("line {}, column {column}", before.matches('\n').count() + 1)
}

impl CostFrom {
    /// The largest of the numbers that a client says; 1 if none is above 1. Applications read other
    /// spellings of numbers in many ways, so these are errors.
    pub(crate) fn of(&self, request: &Parts) -> Result<u64, KeyError> {
        let plain = |text: &str| {
            let text = text.replace('+', " ");
            percent_decode_str(&text)
                .decode_utf8_lossy()
                .trim()
                .to_owned()
        };
        let (Self::Header(name) | Self::Query(name)) = self;
        let said: Vec<String> = match self {
            Self::Header(name) => {
                let lines = request.headers.get_all(name).into_iter();
                let lines = lines.map(|line| String::from_utf8_lossy(line.as_bytes()).into_owned());
                lines
                    .flat_map(|line| {
                        line.split(',')
                            .map(|number| number.trim().to_owned())
                            .collect::<Vec<_>>()
                    })
                    .collect()
            }
            Self::Query(name) => {
                let pairs = request
                    .uri
                    .query()
                    .unwrap_or_default()
                    .split('&')
                    .filter_map(|pair| pair.split_once('='));
                pairs
                    .filter(|(key, _)| plain(key) == *name)
                    .map(|(_, value)| plain(value))
                    .collect()
            }
        };
        let mut most = 1.0;
        for number in said {
            match number.parse::<f64>() {
                Ok(number) => most = f64::max(most, number),
                Err(_) if number.contains(char::is_numeric) => {
                    return Err(KeyError::invalid(name.clone(), "not a plain number"));
                }
                Err(_) => {}
            }
        }
        // Beyond what a number of units may be, no limit admits it.
        Ok(most.ceil() as u64)
    }
}
