//! The key of a limit: its parts, read from a request, or from texts of a program or of Envoy.

use anyhow::{Context, Result, bail, ensure};
use axum::http::request::Parts;
use tower_sliding_window::{
    ApiKey, ClientIp, Header, Key, KeyExtractor, Secret, extract::KeyError,
};

/// As of a header that is a key.
pub(crate) const MOST_BYTES: usize = 4096;

#[derive(Clone)]
pub(crate) struct LimitKey {
    parts: Vec<Part>,
    /// The parts as the file says them.
    pub(crate) texts: Vec<String>,
}

#[derive(Clone)]
enum Part {
    Client(ClientIp),
    Header(Header),
    ApiKey(ApiKey),
    Path { name: String, ignore_case: bool },
    Text,
}

/// The values in the path of a request.
#[derive(Clone, PartialEq)]
pub(crate) struct PathValues(pub(crate) Vec<(String, String)>);

/// The settings of the file that parts of keys need.
pub(crate) struct Sources {
    pub(crate) client: ClientIp,
    pub(crate) secret: Option<Secret>,
    pub(crate) ignore_case: bool,
}

impl LimitKey {
    pub(crate) fn read(texts: Vec<String>, sources: &Sources) -> Result<Self> {
        let parts = texts
            .iter()
            .map(|text| Part::read(text, sources))
            .collect::<Result<_>>()?;
        Ok(Self { parts, texts })
    }

    pub(crate) fn of_request(&self, request: &Parts) -> Result<Key, KeyError> {
        joined(self.parts.iter().map(|part| part.of_request(request)))
    }

    pub(crate) fn of_texts(&self, texts: &[&str]) -> Result<Key> {
        ensure!(
            texts.len() == self.parts.len(),
            "the key has {} parts, and needs {}: {}",
            texts.len(),
            self.parts.len(),
            self.texts.join(" and ")
        );
        joined(
            self.parts
                .iter()
                .zip(texts)
                .map(|(part, text)| part.of_text(text)),
        )
    }
}

impl Part {
    fn read(text: &str, sources: &Sources) -> Result<Self> {
        let (kind, name) = text.split_once(':').unwrap_or((text, ""));
        let header = || {
            name.parse::<Header>().with_context(|| {
                format!("the key {text:?} names no header that is a key; an address is \"client\"")
            })
        };
        Ok(match kind {
            "client" if name.is_empty() => Self::Client(sources.client.clone()),
            "text" if name.is_empty() => Self::Text,
            "header" => Self::Header(header()?),
            "api-key" => {
                let secret = sources
                    .secret
                    .as_ref()
                    .context("an API key needs secret = { env = \"..\" }")?;
                header()?;
                Self::ApiKey(ApiKey::header(name, secret))
            }
            "path" if !name.is_empty() => {
                let name = if sources.ignore_case {
                    name.to_lowercase()
                } else {
                    name.to_owned()
                };
                Self::Path {
                    name,
                    ignore_case: sources.ignore_case,
                }
            }
            _ => bail!(
                "the key {text:?} is none of client, header:NAME, api-key:HEADER, path:NAME and text"
            ),
        })
    }

    fn of_request(&self, request: &Parts) -> Result<Key, KeyError> {
        match self {
            Self::Client(client) => client.extract(request),
            Self::Header(header) => header.extract(request),
            Self::ApiKey(header) => header.extract(request),
            Self::Path { name, .. } => {
                let values = request
                    .extensions
                    .get::<PathValues>()
                    .map_or(&[][..], |values| &values.0);
                let value = values.iter().find(|(other, _)| other == name);
                match value {
                    Some((_, value)) if value.len() <= MOST_BYTES => Ok(Key::new("path", value)),
                    Some(_) => Err(KeyError::invalid(name.clone(), "longer than 4 KiB")),
                    None => Err(KeyError::missing(name.clone())),
                }
            }
            Self::Text => Err(KeyError::missing("text")),
        }
    }

    fn of_text(&self, text: &str) -> Result<Key> {
        Ok(match self {
            Self::Client(client) => client.key(
                text.parse()
                    .with_context(|| format!("the key {text:?} is no address"))?,
            ),
            Self::Header(header) => header.key(text),
            Self::ApiKey(header) => header.key(text),
            Self::Path {
                ignore_case: true, ..
            } => Key::new("path", text.to_lowercase()),
            Self::Path { .. } => Key::new("path", text),
            Self::Text => Key::from(text),
        })
    }
}

/// One key of several.
fn joined<E>(keys: impl Iterator<Item = Result<Key, E>>) -> Result<Key, E> {
    let joined = keys.reduce(|first, next| Ok(Key::from((&first?, &next?))));
    joined.unwrap_or_else(|| Ok(Key::new("everyone", "")))
}
