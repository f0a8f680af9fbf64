//! What a request takes: its check, and what has to be known of it afterwards.

use super::{draft::Draft, shadow::LeftOut};
use crate::check::{Charge, Check};

/// The charges of a request, as they come together.
#[derive(Default)]
pub(super) struct Charges {
    first: Option<Charge>,
    rest: Vec<Charge>,
    /// Of which limit of the layer each of them is, where that is kept.
    places: Vec<usize>,
    left_out: Vec<LeftOut>,
    is_kept: bool,
}

/// What a request takes.
pub(super) struct Claim {
    /// What is to be decided, if anything is.
    pub(super) check: Option<Check>,
    pub(super) record: Option<Box<Record>>,
}

/// What has to be known of a request once it is decided. Most have none, so it is in a box.
pub(super) struct Record {
    /// The check, and of which limit of the layer each of its charges is, if that is kept.
    pub(super) check: Option<Check>,
    pub(super) places: Vec<usize>,
    pub(super) left_out: Vec<LeftOut>,
}

impl Charges {
    /// Of at most so many limits. What `is_kept` can be settled afterwards.
    pub(super) fn of(limits: usize, is_kept: bool) -> Self {
        Self { rest: Vec::with_capacity(limits.saturating_sub(1)), is_kept, ..Self::default() }
    }

    /// Adds what the limit in this place of the layer makes of the request.
    pub(super) fn add(&mut self, place: usize, draft: Draft) {
        match draft {
            Draft::Charge(charge) => {
                if self.is_kept {
                    self.places.push(place);
                }
                match self.first {
                    None => self.first = Some(charge),
                    Some(_) => self.rest.push(charge),
                }
            }
            Draft::LeftOut(left_out) => self.left_out.push(left_out),
        }
    }

    pub(super) fn claim(self) -> Claim {
        let check = self.first.map(|first| Check::of_distinct(first, self.rest));
        let kept = check.as_ref().filter(|_| self.is_kept).cloned();
        let is_recorded = kept.is_some() || !self.left_out.is_empty();
        let record = Record { check: kept, places: self.places, left_out: self.left_out };
        Claim { check, record: is_recorded.then(|| Box::new(record)) }
    }
}
