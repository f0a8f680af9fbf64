//! What the script is asked: `head.lua` says in which form.

use redis::Cmd;

use super::{Batch, Submission};
use crate::{
    algorithm::Kind,
    check::Charge,
    store::redis::{job::Job, keys::Keys, script::Room},
};

impl Batch {
    /// Appends the number of keys, the keys, and the arguments. `now` is empty for the server's clock; `again` says
    /// that this very batch may have been counted by an earlier try.
    pub(in crate::store::redis) fn write(&self, command: &mut Cmd, keys: &Keys, now: &str, again: bool) {
        let charges = || self.submissions.iter().flat_map(|submission| submission.first.check().charges());
        command.arg(charges().count());
        let mut key = String::new();
        for charge in charges() {
            key.clear();
            keys.write(&mut key, charge.limit(), charge.key());
            command.arg(&key);
        }
        command.arg(now);
        for run in self.submissions.chunk_by(Submission::has_the_shape_of) {
            run[0].write_shape(command, again);
            command.arg(run.len());
            for submission in run {
                command.arg(&submission.id.to_bytes());
                if let Job::Settle(asked) = &submission.first {
                    command.arg(asked.settlement.at_micros());
                }
            }
        }
    }

    /// How much that is, about.
    pub(in crate::store::redis) fn room(&self) -> Room {
        // A key and an id each, or a few more where shapes differ.
        let arguments = 16 + 3 * self.submissions.len();
        Room { arguments, bytes: 32 * arguments }
    }
}

impl Submission {
    /// Appends all that a run of equal shapes has in common.
    fn write_shape(&self, command: &mut Cmd, again: bool) {
        let check = self.first.check();
        let is_plain = check.charges().all(is_plain);
        let kind = match &self.first {
            Job::Settle(_) if again => "settle again",
            Job::Settle(_) => "settle",
            Job::Decide(_) => match (is_plain, again || check.id().is_some()) {
                (true, false) => "plain",
                (true, true) => "again",
                (false, false) => "any",
                (false, true) => "given",
            },
        };
        command.arg(self.size()).arg(kind).arg(check.charges().count());
        let mut costs = match &self.first {
            Job::Settle(asked) => asked.settlement.accounts().map(|account| account.cost()).collect(),
            Job::Decide(_) => Vec::new(),
        }
        .into_iter();
        for charge in check.charges() {
            let limit = charge.limit();
            command.arg(limit.units()).arg(charge.cost()).arg(limit.window_micros());
            if !(is_plain && matches!(self.first, Job::Decide(_))) {
                match limit.algorithm().kind() {
                    Kind::Log => command.arg("log"),
                    Kind::Fixed => command.arg("fixed"),
                    Kind::Counter => command.arg("counter"),
                    Kind::Compact { entries } => command.arg(entries),
                };
                command.arg(charge.lease_micros().unwrap_or(0));
                match costs.next().flatten() {
                    Some(cost) => command.arg(cost),
                    None => command.arg(mode(charge)),
                };
            }
        }
    }

    /// Whether the two differ in nothing but their keys and ids.
    fn has_the_shape_of(&self, other: &Self) -> bool {
        let (Job::Decide(asked), Job::Decide(other_asked)) = (&self.first, &other.first) else {
            return false;
        };
        let figures = |charge: &Charge| {
            let limit = charge.limit();
            let numbers = (limit.units(), charge.cost(), limit.window_micros());
            (numbers, limit.algorithm(), charge.lease_micros(), mode(charge))
        };
        self.size() == other.size()
            && asked.check.id().is_some() == other_asked.check.id().is_some()
            && asked.check.charges().map(figures).eq(other_asked.check.charges().map(figures))
    }
}

/// Whether a charge is what most are: exact, not reserved, and nothing but refused or counted.
fn is_plain(charge: &Charge) -> bool {
    charge.is_exact() && charge.lease_micros().is_none() && mode(charge).is_empty()
}

/// Whether a charge refuses, and what it takes.
fn mode(charge: &Charge) -> &'static str {
    match (charge.is_shadow(), charge.takes_nothing()) {
        _ if charge.is_spent() => "spent",
        (true, true) => "left shadow",
        (true, false) => "shadow",
        (false, true) => "left",
        (false, false) => "",
    }
}
