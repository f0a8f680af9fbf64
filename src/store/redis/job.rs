//! What is asked of the store: a check to decide, or an admission to settle.

use tokio::sync::oneshot::Sender;

#[cfg(feature = "cluster")]
use super::keys::Keys;
use crate::{
    admission::AdmissionId,
    check::{Charge, Check},
    decision::Decision,
    error::StoreError,
    limit::Limit,
    settlement::{Settled, Settlement},
    store::local_state::LocalState,
};

pub(super) type Outcome<T> = Result<T, StoreError>;

/// What is asked of the store, and who waits for the outcome. In a box, since it goes from hand to hand.
pub(super) enum Job {
    Decide(Box<ToDecide>),
    Settle(Box<ToSettle>),
}

pub(super) struct ToDecide {
    pub(super) check: Check,
    pub(super) caller: Sender<Outcome<Decision>>,
}

pub(super) struct ToSettle {
    pub(super) settlement: Settlement,
    pub(super) caller: Sender<Outcome<Settled>>,
    pub(super) given_back: GivenBack,
}

impl Job {
    /// The check that is to be decided, or that was admitted.
    pub(super) fn check(&self) -> &Check {
        match self {
            Self::Decide(asked) => &asked.check,
            Self::Settle(asked) => asked.settlement.check(),
        }
    }

    /// The identity of an admission that is to be settled, or that the caller has given to a check.
    pub(super) fn id(&self) -> Option<AdmissionId> {
        match self {
            Self::Decide(asked) => asked.check.id(),
            Self::Settle(asked) => Some(asked.settlement.id()),
        }
    }

    /// The slot of a cluster that it is for. What is for several is taken apart before it becomes a job.
    #[cfg(feature = "cluster")]
    pub(super) fn hash_slot(&self, keys: &Keys) -> u16 {
        self.check().charges().next().map_or(0, |charge| keys.hash_slot(charge.key()))
    }

    /// Whether it makes no difference which of the two is decided first.
    pub(super) fn is_interchangeable_with(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Decide(asked), Self::Decide(other)) => asked.check.is_interchangeable_with(&other.check),
            _ => false,
        }
    }

    /// Whether a second try counts once: what is decided has an identity under which it is remembered.
    pub(super) fn is_repeatable(&self) -> bool {
        match self {
            Self::Decide(asked) => {
                let is_kept = |charge: &Charge| charge.units() == 0 || charge.lease().is_some() || charge.is_exact();
                asked.check.id().is_some() || asked.check.charges().all(is_kept)
            }
            Self::Settle(_) => true,
        }
    }

    /// What failed, if it fails.
    pub(super) fn doing(&self) -> &'static str {
        match self {
            Self::Decide(_) => "deciding a check",
            Self::Settle(_) => "settling an admission",
        }
    }

    /// Answers the caller, if it still waits: how the limits stand, and whether a settlement was known. An error is from
    /// now on this job's.
    pub(super) fn finish(self, outcome: Outcome<(Decision, bool)>) {
        let outcome = outcome.map_err(|error| error.when(self.doing()));
        match self {
            Self::Decide(asked) => drop(asked.caller.send(outcome.map(|(decision, _)| decision))),
            Self::Settle(asked) => {
                let ToSettle { caller, given_back, .. } = *asked;
                drop(given_back);
                drop(caller.send(outcome.map(|(decision, is_known)| Settled::of(decision, is_known))));
            }
        }
    }

    /// Whether it need not be done if nobody waits for it any more. What was spent has to be settled all the same.
    pub(super) fn may_be_taken_back(&self) -> bool {
        matches!(self, Self::Decide(_))
    }

    /// Whether nobody waits any more for what may be taken back.
    pub(super) fn is_given_up(&self) -> bool {
        matches!(self, Self::Decide(asked) if asked.caller.is_closed())
    }
}

/// Units may be given back as long as this lives: it ends the store's local state for the limits when it is made, and again
/// when it is dropped.
pub(super) struct GivenBack {
    local_state: LocalState,
    limits: Vec<Limit>,
}

impl GivenBack {
    pub(super) fn new(local_state: &LocalState, limits: Vec<Limit>) -> Self {
        let given_back = Self { local_state: local_state.clone(), limits };
        given_back.end_epoch();
        given_back
    }

    fn end_epoch(&self) {
        self.limits.iter().for_each(|limit| self.local_state.forget_refusals(limit));
    }
}

impl Drop for GivenBack {
    fn drop(&mut self) {
        self.end_epoch();
    }
}
