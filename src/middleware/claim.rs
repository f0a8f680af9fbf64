//! What a request takes: its check, and what has to be known of it afterwards.

use super::{draft::Draft, rejection::Rejection, shadow::LeftOut};
use crate::{
    check::{Charge, Check},
    error::{ChoiceError, Error},
};

/// What a request takes.
#[derive(Default)]
pub(super) struct Claim {
    /// What is to be decided, if anything is.
    pub(super) check: Option<Check>,
    pub(super) record: Option<Box<Record>>,
    is_kept: bool,
}

/// What has to be known of a request once it is decided. Most have none, so it is in a box.
#[derive(Default)]
pub(super) struct Record {
    /// The check, and of which limit of the layer each of its charges is, if that is kept.
    pub(super) check: Option<Check>,
    pub(super) places: Vec<usize>,
    pub(super) left_out: Vec<LeftOut>,
}

impl Claim {
    /// That of drafts in the order of the layer's limits, some of which were chosen: then two can be the same.
    pub(super) fn of(drafts: Vec<Draft>, is_kept: bool) -> Result<Self, Error> {
        let mut claim = Self::default();
        claim.keep(is_kept);
        for (place, draft) in drafts.into_iter().enumerate() {
            match draft {
                Draft::Charge(charge) => claim.add_chosen(place, charge)?,
                draft => claim.add(place, draft),
            }
        }
        claim.complete();
        Ok(claim)
    }

    /// Before anything is added: whether it is kept, so that it can be settled afterwards.
    #[inline]
    pub(super) fn keep(&mut self, is_kept: bool) {
        self.is_kept = is_kept;
    }

    /// Adds what the limit in this place of the layer makes of the request.
    pub(super) fn add(&mut self, place: usize, draft: Draft) {
        match draft {
            Draft::Charge(charge) => self.charge(place, charge),
            Draft::LeftOut(left_out) => self.record().left_out.push(left_out),
            Draft::Nothing | Draft::Open(_) | Draft::Choosing(_) => {}
        }
    }

    /// Adds a charge on the limit in this place of the layer, on which there is no other.
    #[inline]
    pub(super) fn charge(&mut self, place: usize, charge: Charge) {
        if self.is_kept {
            self.record().places.push(place);
        }
        match &mut self.check {
            Some(check) => check.add_distinct(charge),
            none => *none = Some(Check::new(charge)),
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
            (None, _) | (_, None) => self.charge(place, charge),
            (Some((_, _, error)), _) if charge.is_shadow() => self.leave_out(&charge, error),
            (Some((index, true, error)), Some(check)) => {
                let shadow = check.replace(index, charge);
                if let Some(kept) = self.record.as_mut().and_then(|record| record.places.get_mut(index)) {
                    *kept = place;
                }
                self.leave_out(&shadow, error);
            }
            (Some((_, false, error)), _) => return Err(error.into()),
        }
        Ok(())
    }

    fn leave_out(&mut self, charge: &Charge, error: ChoiceError) {
        let left_out = LeftOut::new(Some(charge.limit().clone()), Rejection::Unavailable(error.into()));
        self.record().left_out.push(left_out);
    }

    /// When all is added.
    #[inline]
    pub(super) fn complete(&mut self) {
        if self.is_kept
            && let Some(record) = &mut self.record
        {
            record.check.clone_from(&self.check);
        }
    }

    fn record(&mut self) -> &mut Record {
        self.record.get_or_insert_default()
    }
}
