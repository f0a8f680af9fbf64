//! What a request takes: its check, and what has to be known of it afterwards.

use super::{draft::Draft, rejection::Rejection, shadow::LeftOut};
use crate::{
    check::{Charge, Check},
    error::{ChoiceError, Error},
};

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

    /// Those of drafts in the order of the layer's limits, some of which were chosen: then two can be the same.
    pub(super) fn claim_all(drafts: Vec<Draft>, is_kept: bool) -> Result<Claim, Error> {
        let mut charges = Self::of(drafts.len(), is_kept);
        for (place, draft) in drafts.into_iter().enumerate() {
            match draft {
                Draft::Charge(charge) => charges.add_chosen(place, charge)?,
                draft => charges.add(place, draft),
            }
        }
        Ok(charges.claim())
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
            Draft::Nothing | Draft::Choosing(_) => {}
        }
    }

    /// Adds a charge that may be on the limit and key of another. Then one in the shadow gives way.
    fn add_chosen(&mut self, place: usize, charge: Charge) -> Result<(), Error> {
        let mut all = self.first.iter_mut().chain(&mut self.rest).enumerate();
        let same = all.find_map(|(index, other)| {
            // Who decides what a duplicate is: the check.
            let duplicate = Check::new(other.clone()).and(charge.clone()).err()?;
            Some((index, other, ChoiceError::Duplicate(duplicate)))
        });
        match same {
            None => self.add(place, Draft::Charge(charge)),
            Some((_, _, error)) if charge.is_shadow() => self.leave_out(&charge, error),
            Some((index, other, error)) if other.is_shadow() => {
                let shadow = std::mem::replace(other, charge);
                if let Some(kept) = self.places.get_mut(index) {
                    *kept = place;
                }
                self.leave_out(&shadow, error);
            }
            Some((_, _, error)) => return Err(error.into()),
        }
        Ok(())
    }

    fn leave_out(&mut self, charge: &Charge, error: ChoiceError) {
        self.left_out.push(LeftOut::new(Some(charge.limit().clone()), Rejection::Unavailable(error.into())));
    }

    pub(super) fn claim(self) -> Claim {
        let check = self.first.map(|first| Check::of_distinct(first, self.rest));
        let kept = check.as_ref().filter(|_| self.is_kept).cloned();
        let is_recorded = kept.is_some() || !self.left_out.is_empty();
        let record = Record { check: kept, places: self.places, left_out: self.left_out };
        Claim { check, record: is_recorded.then(|| Box::new(record)) }
    }
}
