//! What log lines have in common.

mod throttle;

use std::{error::Error, fmt};

pub(crate) use self::throttle::Throttle;

/// An error and its causes in one line.
pub(crate) struct Chain<'a>(pub(crate) &'a dyn Error);

impl fmt::Display for Chain<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = self.0.to_string();
        f.write_str(&shown)?;
        let mut cause = self.0.source();
        while let Some(error) = cause {
            // Some errors say what their cause says.
            let text = error.to_string();
            if text != shown {
                write!(f, ": {text}")?;
            }
            (shown, cause) = (text, error.source());
        }
        Ok(())
    }
}
