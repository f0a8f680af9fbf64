//! From a request to its check: which requests are counted, under which limits, by which keys and costs.

mod check;
mod chosen;
mod cost;
mod decide;
mod filter;
mod keyed_limit;

pub(super) use self::{
    check::{CheckBuilder, CheckDetails, Limits},
    decide::{Decided, Decider, DecisionFuture, record_time_waited, time_waited},
    filter::{RequestFilter, key_list},
    keyed_limit::{Cost, DraftCharge},
};
pub use self::{cost::Exchange, keyed_limit::KeyedLimit};
