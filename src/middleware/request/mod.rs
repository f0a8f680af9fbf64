//! From a request to its check: which requests are counted, under which limits, by which keys and costs.

mod charge;
mod decide;
mod duplicates;
mod filter;
mod keyed_limit;
mod limits;

pub use self::keyed_limit::{Exchange, KeyedLimit};
pub(super) use self::{
    charge::{DraftCharge, LimitChoices, UnchosenLimit},
    decide::{Decided, Decider, DecisionFuture, record_time_waited, time_waited},
    filter::RequestFilter,
    keyed_limit::Cost,
    limits::{ChargedLimit, CheckBuilder, CheckDetails, Limits},
};
