//! What a request takes: its check, and what has to be known of it afterwards.

use super::{draft::Draft, rejection::Rejection, shadow::LeftOut};
use crate::{
    check::{Charge, Check},
    error::{ChoiceError, Error},
};

/// The charges of a request, as they come together.
#[derive(Default)]
pub(super) struct Charges {
    check: Option<Check>,
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
    /// None yet. What `is_kept` can be settled afterwards.
    pub(super) fn new(is_kept: bool) -> Self {
        Self { is_kept, ..Self::default() }
    }

    /// Those of drafts in the order of the layer's limits, some of which were chosen: then two can be the same.
    pub(super) fn claim_all(drafts: Vec<Draft>, is_kept: bool) -> Result<Claim, Error> {
        let mut charges = Self::new(is_kept);
        for (place, draft) in drafts.into_iter().enumerate() {
            match draft {
                Draft::Charge(charge) => charges.add_chosen(place, charge)?,
                draft => charges.add(place, draft),
            }
        }
        Ok(charges.claim())
    }

    /// Adds what the limit in this place of the layer makes of the request.
    #[inline]
    pub(super) fn add(&mut self, place: usize, draft: Draft) {
        match draft {
            Draft::Charge(charge) => {
                if self.is_kept {
                    self.places.push(place);
                }
                match &mut self.check {
                    None => self.check = Some(Check::new(charge)),
                    Some(check) => check.add_distinct(charge),
                }
            }
            Draft::LeftOut(left_out) => self.left_out.push(left_out),
            Draft::Nothing | Draft::Choosing(_) => {}
        }
    }

    /// Adds a charge that may be on the limit and key of another. Then one in the shadow gives way.
    fn add_chosen(&mut self, place: usize, charge: Charge) -> Result<(), Error> {
        // Who decides what a duplicate is: the check.
        let duplicate = |other: &Charge| Check::new(other.clone()).and(charge.clone()).err();
        let same = self.check.iter().flat_map(Check::charges).enumerate().find_map(|(index, other)| {
            let error = ChoiceError::Duplicate(duplicate(other)?);
            Some((index, other.is_shadow(), error))
        });
        match (same, &mut self.check) {
            (None, _) | (_, None) => self.add(place, Draft::Charge(charge)),
            (Some((_, _, error)), _) if charge.is_shadow() => self.leave_out(&charge, error),
            (Some((index, true, error)), Some(check)) => {
                let shadow = check.replace(index, charge);
                if let Some(kept) = self.places.get_mut(index) {
                    *kept = place;
                }
                self.leave_out(&shadow, error);
            }
            (Some((_, false, error)), _) => return Err(error.into()),
        }
        Ok(())
    }

    fn leave_out(&mut self, charge: &Charge, error: ChoiceError) {
        self.left_out.push(LeftOut::new(Some(charge.limit().clone()), Rejection::Unavailable(error.into())));
    }

    #[inline]
    pub(super) fn claim(self) -> Claim {
        let Self { check, places, left_out, is_kept } = self;
        let is_recorded = is_kept && check.is_some() || !left_out.is_empty();
        let record = || {
            let kept = check.as_ref().filter(|_| is_kept).cloned();
            Box::new(Record { check: kept, places, left_out })
        };
        let record = is_recorded.then(record);
        Claim { check, record }
    }
}
