//! The key of a rule: its parts, of a request or as a program says them.

use axum::http::{HeaderName, request::Parts};
use tower_sliding_window::{ApiKey, ClientIp, Header, Key, KeyExtractor, Secret, extract::KeyError};

/// As of a header that is a key.
pub(crate) const MOST_BYTES: usize = 4096;

/// A part of a rule's key.
#[derive(Clone)]
pub(crate) enum Part {
    Client(ClientIp),
    Header(Header),
    ApiKey(ApiKey),
    Path(String),
    Text,
}

/// The values in the path of a request.
#[derive(Clone, PartialEq)]
pub(crate) struct PathValues(pub(crate) Vec<(String, String)>);

impl Part {
    pub(crate) fn read(
        text: &str,
        client: &ClientIp,
        secret: Option<&Secret>,
        ignore_case: bool,
    ) -> Result<Self, String> {
        let (kind, name) = text.split_once(':').unwrap_or((text, ""));
        let header =
            || HeaderName::from_bytes(name.as_bytes()).map_err(|_| format!("the key {text:?} names no header"));
        Ok(match kind {
            "client" if name.is_empty() => Self::Client(client.clone()),
            "text" if name.is_empty() => Self::Text,
            "header" => Self::Header(Header::new(header()?)),
            "api-key" => {
                Self::ApiKey(ApiKey::header(header()?, secret.ok_or("an API key needs secret = { env = \"..\" }")?))
            }
            "path" if !name.is_empty() => Self::Path(if ignore_case { name.to_lowercase() } else { name.to_owned() }),
            _ => {
                return Err(format!(
                    "the key {text:?} is none of client, header:NAME, api-key:HEADER, path:NAME and text"
                ));
            }
        })
    }

    pub(crate) fn of_request(&self, request: &Parts) -> Result<Key, KeyError> {
        match self {
            Self::Client(client) => client.extract(request),
            Self::Header(header) => header.extract(request),
            Self::ApiKey(header) => header.extract(request),
            Self::Path(name) => {
                let values = request.extensions.get::<PathValues>().map_or(&[][..], |values| &values.0);
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

    pub(crate) fn of_text(&self, text: &str) -> Result<Key, String> {
        Ok(match self {
            Self::Client(client) => client.key(text.parse().map_err(|_| format!("the key {text:?} is no address"))?),
            Self::Header(header) => header.key(text),
            Self::ApiKey(header) => header.key(text),
            Self::Path(_) => Key::new("path", text),
            Self::Text => Key::from(text),
        })
    }
}

/// One key of several.
pub(crate) fn joined<E>(keys: impl Iterator<Item = Result<Key, E>>) -> Result<Key, E> {
    let pair = |first: Option<Key>, next: Result<Key, E>| {
        let next = next?;
        Ok(Some(first.map_or_else(|| next.clone(), |first| Key::from((&first, &next)))))
    };
    Ok(keys.into_iter().try_fold(None, pair)?.unwrap_or_else(|| Key::new("everyone", "")))
}
