//! What a request takes: its check, and what has to be known of it afterwards.

use super::{
    draft::{Draft, Unchosen},
    errand::Errand,
    rejection::Rejection,
    shadow::LeftOut,
};
use crate::{
    check::{Charge, Check, DuplicateCharge, NeverFits},
    error::{ChoiceError, Error},
    split::is_of_one_whole,
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
    /// The check, and of which limits of the layer its charges are, if that is kept.
    pub(super) check: Option<Check>,
    pub(super) origins: Vec<Origin>,
    pub(super) left_out: Vec<LeftOut>,
    pub(super) unchosen: Vec<Unchosen>,
    /// What settles the request if it is dropped, where that is known before the others.
    pub(super) dropped: Option<Errand<()>>,
}

/// A limit of the layer that a charge is made for. A charge may have two, where one was chosen.
#[derive(Clone, Copy, Debug)]
pub(super) struct Origin {
    /// Which of the check's charges.
    pub(super) charge: usize,
    /// Which of the layer's limits.
    pub(super) place: usize,
    /// What the limit by itself would charge.
    pub(super) cost: u64,
}

impl Claim {
    /// An empty one, of a request for which these limits could not be chosen.
    pub(super) fn without(unchosen: Vec<Unchosen>) -> Self {
        let mut claim = Self::default();
        if !unchosen.is_empty() {
            claim.record().unchosen = unchosen;
        }
        claim
    }

    /// Adds drafts in the order of the layer's limits, some of which were chosen: then two can be the same.
    pub(super) fn add_all(&mut self, drafts: Vec<Draft>, is_kept: bool) -> Result<(), Error> {
        self.keep(is_kept);
        for (place, draft) in drafts.into_iter().enumerate() {
            match draft {
                Draft::Charge(charge) => self.add_chosen(place, charge)?,
                draft => self.add(place, draft),
            }
        }
        self.complete();
        Ok(())
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
            let index = self.check.iter().flat_map(Check::charges).count();
            self.record().origins.push(Origin { charge: index, place, cost: charge.cost() });
        }
        match &mut self.check {
            Some(check) => check.add_distinct(charge),
            none => *none = Some(Check::new(charge)),
        }
    }

    /// Adds a charge that may be on the limit and key of another. Then the stricter of them is charged, and one in the
    /// shadow gives way.
    fn add_chosen(&mut self, place: usize, charge: Charge) -> Result<(), Error> {
        let same = self.check.iter().flat_map(Check::charges).enumerate().find(|(_, other)| is_same(other, &charge));
        let Some((index, other)) = same.map(|(index, other)| (index, other.clone())) else {
            self.charge(place, charge);
            return Ok(());
        };
        let origin = Origin { charge: index, place, cost: charge.cost() };
        match (other.is_shadow(), charge.is_shadow()) {
            (false, true) => self.leave_out(&charge),
            (true, false) => {
                if let Some(record) = &mut self.record {
                    record.origins.retain(|other| other.charge != index);
                }
                if let Some(shadow) = self.replace(charge, origin) {
                    self.leave_out(&shadow);
                }
            }
            (_, is_shadow) => match stricter(&other, &charge) {
                Ok(stricter) => drop(self.replace(stricter, origin)),
                Err(error) if is_shadow => self.leave_out_by(&charge, Rejection::NeverFits(error)),
                Err(error) => return Err(error.into()),
            },
        }
        Ok(())
    }

    /// Puts a charge in the place of the one that its origin names, which it returns.
    fn replace(&mut self, charge: Charge, origin: Origin) -> Option<Charge> {
        let old = self.check.as_mut().map(|check| check.replace(origin.charge, charge));
        if self.is_kept {
            self.record().origins.push(origin);
        }
        old
    }

    fn leave_out(&mut self, charge: &Charge) {
        let error = ChoiceError::Duplicate(DuplicateCharge::new(charge.limit().clone()));
        self.leave_out_by(charge, Rejection::Unavailable(error.into()));
    }

    fn leave_out_by(&mut self, charge: &Charge, rejection: Rejection) {
        self.record().left_out.push(LeftOut::new(Some(charge.limit().clone()), rejection, charge.is_hidden()));
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

/// Whether both count under one name for one key, or for two parts of it.
fn is_same(one: &Charge, other: &Charge) -> bool {
    one.limit().name() == other.limit().name() && is_of_one_whole(one.key(), other.key())
}

/// One charge in the place of two: on the limit of fewer units, of a longer window where they are equal, at the larger
/// cost, and hidden if one of them is. If only one of them is reserved, the other would stay for its window: so does this.
/// One that only asks if anything is left is settled with the other, which is reserved for it.
fn stricter(one: &Charge, other: &Charge) -> Result<Charge, NeverFits> {
    let slack = |charge: &Charge| (charge.limit().units(), std::cmp::Reverse(charge.limit().window()));
    let kept = if slack(other) < slack(one) { other } else { one };
    let is_hidden = one.is_hidden() || other.is_hidden();
    let (limit, key) = (kept.limit().clone(), kept.key().clone());
    let charge = if one.takes_nothing() && other.takes_nothing() {
        Ok(Charge::any_left(limit, key))
    } else {
        Charge::new(limit, key, one.cost().max(other.cost()))
    };
    let charge = if is_hidden { charge.map(Charge::hidden).map_err(NeverFits::hidden) } else { charge }?;
    let charge = match (one.lease(), other.lease()) {
        (None, None) if one.takes_nothing() == other.takes_nothing() => charge,
        (Some(one), Some(other)) => charge.reserve(one.max(other)),
        (Some(lease), None) if other.takes_nothing() => charge.reserve(lease),
        (None, Some(lease)) if one.takes_nothing() => charge.reserve(lease),
        _ => charge.reserve(kept.limit().window()),
    };
    Ok(if kept.is_shadow() { charge.in_shadow() } else { charge })
}
