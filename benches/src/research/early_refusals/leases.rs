//! The lease of a usual quota server, simulated in memory without any delay: a process takes units,
//! which are counted when it takes them, spends them until the lease ends, and then gives back the
//! rest.

use std::{
    collections::{BTreeMap, HashMap},
    time::Duration,
};

use super::{Arrival, UNITS, WINDOW, judge::Answer};

/// The units that a process holds.
struct Lease {
    taken: Duration,
    unspent: usize,
}

/// The answers to one of the loads. A lease has at most so many units, or an eighth of the units
/// that are left. Leases of one unit are an exact log.
pub(super) fn lease(
    arrivals: &[Arrival],
    load: usize,
    life: Duration,
    most: Option<usize>,
) -> Vec<Answer> {
    // The units of each lease, by its time and process.
    let mut log: BTreeMap<(Duration, usize), usize> = BTreeMap::new();
    let mut leases: HashMap<usize, Lease> = HashMap::new();
    let mut answers = Vec::new();
    for &Arrival { at, process, .. } in arrivals.iter().filter(|arrival| arrival.load == load) {
        leases.retain(|process, lease| {
            let is_over = at - lease.taken >= life;
            if let Some(counted) = log.get_mut(&(lease.taken, *process)).filter(|_| is_over) {
                *counted -= lease.unspent;
            }
            !is_over && lease.unspent > 0
        });
        while log
            .first_entry()
            .is_some_and(|oldest| at - oldest.key().0 >= WINDOW)
        {
            log.pop_first();
        }
        let lease = leases.entry(process).or_insert_with(|| {
            let left = UNITS - log.values().sum::<usize>();
            let units = most.map_or(left.div_ceil(8), |most| left.min(most));
            log.insert((at, process), units);
            Lease {
                taken: at,
                unspent: units,
            }
        });
        let admitted = lease.unspent > 0;
        lease.unspent -= usize::from(admitted);
        answers.push(Answer { at, admitted });
    }
    answers
}
