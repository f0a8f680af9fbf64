//! The steps of a random history.

use std::{iter, ops::Range, time::Duration};

use proptest::{
    collection::vec,
    prelude::*,
    sample::{select, subsequence},
};
use tower_sliding_window::{
    Charge, Check,
    check::{AdmissionId, Takes},
};

use super::{Clocks, KEYS, LIMITS};
use crate::support::check_of;

#[derive(Clone, Debug)]
pub(super) enum Step {
    /// Checks that arrive together, so that a store may decide them in one batch.
    Checks(Vec<Asked>),
    /// Settles the admission `back` places before the last one, `times` times.
    Settle {
        back: usize,
        cost: u64,
        times: usize,
    },
    /// Repeats the admitted check `back` places before the last one, with its id.
    Repeat {
        back: usize,
    },
    Reset {
        limit: usize,
        key: usize,
    },
    Advance(u64),
    Rewind(u64),
    /// Advances to the moment at which the last refused check will be admitted, or to one
    /// microsecond before it.
    AdvanceToRetry {
        early: bool,
    },
}

#[derive(Clone, Debug)]
pub(super) struct Asked {
    /// The places of limits and keys.
    buckets: Vec<(usize, usize)>,
    cost: u64,
    id: Option<u64>,
    /// How many callers send this check.
    copies: usize,
    /// The place of the charge that reserves its units, and its lease in microseconds.
    lease: Option<(usize, u64)>,
    /// The place of the charge in the shadow.
    shadow: Option<usize>,
    /// The place of the charge that takes nothing, or that was already spent.
    takes: Option<(usize, Takes)>,
}

pub(super) fn step(clocks: Clocks, limits: Range<usize>) -> impl Strategy<Value = Step> {
    let buckets: Vec<(usize, usize)> = limits
        .clone()
        .flat_map(|limit| [(limit, 0), (limit, 1)])
        .collect();
    let cost = prop_oneof![6 => Just(1), 3 => 0..=10u64, 2 => 0..=200u64, 1 => 100..=1_500u64];
    let id = prop_oneof![4 => Just(None), 1 => (0..6u64).prop_map(Some)];
    let copies = prop_oneof![6 => Just(1), 1 => 1..=20usize];
    let lease = prop_oneof![5 => Just(None), 1 => (0..3usize, prop_oneof![1..=1_000u64, 1..=70_000_000u64]).prop_map(Some)];
    let shadow = prop_oneof![8 => Just(None), 1 => (0..3usize).prop_map(Some)];
    let takes = prop_oneof![
        8 => Just(None),
        1 => (0..3usize, select(vec![Takes::Nothing, Takes::Always])).prop_map(Some)
    ];
    let asked = (
        subsequence(buckets, 1..=3),
        cost,
        id,
        copies,
        (lease, shadow, takes),
    )
        .prop_map(
            |(buckets, cost, id, copies, (lease, shadow, takes))| Asked {
                buckets,
                cost,
                id,
                copies,
                lease,
                shadow,
                takes,
            },
        );
    let settled = prop_oneof![3 => Just(0), 3 => 0..=10u64, 1 => 0..=2_000u64];
    let time = prop_oneof![
        0..=3u64,
        0..=1_500_000u64,
        0..=70_000_000u64,
        select(vec![1_000_000, 10_007_000, 60_000_000, 3_600_000_000])
    ];
    let back = match clocks {
        Clocks::OnlyForward => 0,
        Clocks::BothWays => 1,
    };
    prop_oneof![
        18 => asked.clone().prop_map(|asked| Step::Checks(vec![asked])),
        6 => vec(asked, 1..=8).prop_map(Step::Checks),
        4 => (0..8usize, settled, 1..=2usize).prop_map(|(back, cost, times)| Step::Settle { back, cost, times }),
        2 => (0..8usize).prop_map(|back| Step::Repeat { back }),
        1 => (limits, 0..KEYS.len()).prop_map(|(limit, key)| Step::Reset { limit, key }),
        6 => time.clone().prop_map(Step::Advance),
        back => time.prop_map(Step::Rewind),
        4 => any::<bool>().prop_map(|early| Step::AdvanceToRetry { early }),
    ]
}

impl Asked {
    pub(super) fn checks(&self) -> impl Iterator<Item = Check> {
        let charges = self
            .buckets
            .iter()
            .enumerate()
            .map(|(place, &(limit, key))| self.charge(place, limit, key));
        let check = self
            .id
            .map(AdmissionId)
            .into_iter()
            .fold(check_of(charges), Check::with_id);
        iter::repeat_n(check, self.copies)
    }

    fn charge(&self, place: usize, limit: usize, key: usize) -> Charge {
        let limit = LIMITS[limit].clone();
        let cost = self.cost.min(limit.units());
        let takes = self
            .takes
            .filter(|(of, _)| *of == place)
            .map(|(_, takes)| takes);
        let charge = match takes {
            Some(Takes::Nothing) => Charge::any_left(limit, KEYS[key]).unwrap(),
            Some(Takes::Always) => Charge::spent(limit, KEYS[key], cost),
            Some(Takes::IfAdmitted) | None => Charge::new(limit, KEYS[key], cost).unwrap(),
        };
        let lease = self.lease.filter(|(of, _)| *of == place && takes.is_none());
        let leases = lease.map(|(_, lease)| Duration::from_micros(lease));
        let charge = leases.into_iter().fold(charge, Charge::reserve);
        if self.shadow == Some(place) {
            charge.in_shadow()
        } else {
            charge
        }
    }
}
