//! No limiter.

use super::{Contender, Inner, Layered};

pub(crate) fn nothing() -> impl Contender {
    Layered(Inner)
}
