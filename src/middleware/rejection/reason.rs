//! The reason of a rejection.

use std::{error, fmt};

use http::StatusCode;

use super::super::{
    events::{Event, Events},
    extract::KeyError,
};
use crate::{check::NeverFits, decision::Decision, error::Error};

/// Why a request did not reach the service. See the [module docs](super).
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Rejection {
    /// A limit refused it. Some methods return a refusal as a value: `.map_err(Rejection::Limited)?` makes it an error.
    Limited(Decision),
    /// It costs more than a limit ever admits.
    NeverFits(NeverFits),
    /// It has no key.
    NoKey(KeyError),
    /// Its key is on a list of [denied](crate::RateLimitLayer::deny) keys.
    Denied,
    /// The store could not decide or no limit could be chosen, and the layer fails closed. Or it fails local, and the
    /// request costs more than the [share](crate::Share).
    Unavailable(Error),
}

impl Rejection {
    /// The status of the response.
    #[must_use]
    pub fn status(&self) -> StatusCode {
        match self {
            Self::Limited(_) | Self::NeverFits(_) => StatusCode::TOO_MANY_REQUESTS,
            Self::NoKey(error) => error.status(),
            Self::Denied => StatusCode::FORBIDDEN,
            Self::Unavailable(_) => StatusCode::SERVICE_UNAVAILABLE,
        }
    }

    /// The label in metrics.
    pub(crate) fn label(&self) -> &'static str {
        match self {
            Self::Limited(_) => "limited",
            Self::NeverFits(_) => "never_fits",
            // The server's mistake. Clients cannot cause it, so it can be an alert.
            Self::NoKey(error) if error.status().is_server_error() => "not_set_up",
            Self::NoKey(_) => "no_key",
            Self::Denied => "denied",
            Self::Unavailable(_) => "unavailable",
        }
    }

    /// Logs a mistake in the set-up of limits or server. A client's mistake is not logged.
    pub(crate) fn log(&self, events: &Events) {
        match self {
            Self::NeverFits(error) => events.log(Event::NeverFits(error)),
            Self::NoKey(error) if error.status().is_server_error() => events.log(Event::NoKey(error)),
            _ => {}
        }
    }
}

/// The rejection of a layer that fails closed.
impl From<Error> for Rejection {
    fn from(error: Error) -> Self {
        match error {
            Error::NeverFits(error) => Self::NeverFits(error),
            error => Self::Unavailable(error),
        }
    }
}

impl From<KeyError> for Rejection {
    fn from(error: KeyError) -> Self {
        Self::NoKey(error)
    }
}

impl fmt::Display for Rejection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Limited(decision) => write!(
                f,
                "over the limit {:?}; retry in {:?}",
                decision.limit().name(),
                decision.retry_after().unwrap_or_default(),
            ),
            Self::NeverFits(error) => error.fmt(f),
            Self::NoKey(error) => error.fmt(f),
            Self::Denied => f.write_str("denied"),
            Self::Unavailable(error) => error.fmt(f),
        }
    }
}

impl error::Error for Rejection {
    fn source(&self) -> Option<&(dyn error::Error + 'static)> {
        // The error's text is this one's already.
        if let Self::Unavailable(error) = self { error.source() } else { None }
    }
}
