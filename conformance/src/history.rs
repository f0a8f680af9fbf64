//! Random histories: the steps of a store that a seed stands for.

use std::{fmt, iter, time::Duration};

use tower_sliding_window::{
    Algorithm, Charge, Check, Key, Limit,
    check::{AdmissionId, Takes},
};

const STEPS: u64 = 200;
const KEYS: [&str; 3] = ["ada", "bob", "eve"];
const HOUR: u64 = 3_600_000_000;

/// The kinds of a charge: what it takes, whether it is reserved, and whether it is in the shadow.
const KINDS: u64 = 3 * 2 * 2;
const RESERVED: u64 = 3;
/// Those that are compared in pairs: of the kinds in the shadow, those that take units if they fit.
const PAIRED: [u64; 8] = [0, 1, 2, 3, 4, 5, 6, 9];

/// The steps, and when the first of them happens.
#[derive(Clone, Debug)]
pub(crate) struct History {
    pub(crate) begins: Duration,
    pub(crate) steps: Vec<(u64, Step)>,
    /// One unit of each limit and key: refused if any unit is used, and counted never.
    pub(crate) probes: Vec<Charge>,
}

/// A step. Those that refer to an earlier step by its number do nothing if that has admitted
/// nothing.
#[derive(Clone, Debug)]
pub(crate) enum Step {
    /// Decides a check so many times.
    Decide {
        check: Check,
        times: u64,
    },
    /// Decides a check again, with its id if it has one. The id may be given for another key.
    Repeat {
        step: u64,
        is_elsewhere: bool,
    },
    /// Advances to the retry time of the last refusal, or to as long before it, and decides its
    /// check again.
    Retry(Duration),
    /// Sets the cost of the first charge of an admission, or of all of them.
    Settle {
        step: u64,
        is_of_first: bool,
        cost: u64,
    },
    Reset(Limit, Key),
    Advance(Duration),
    /// Before and afterwards, each limit is asked for a unit. So those that are used refuse, and
    /// count units of later times as of now.
    ClockBack(Duration),
}

/// Numbers that look random and are the same in every run.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % end
    }

    /// True once in so many times.
    fn once_in(&mut self, times: u64) -> bool {
        self.below(times) == 0
    }

    fn one_of<T: Clone>(&mut self, values: &[T]) -> T {
        values[usize::try_from(self.below(values.len() as u64)).unwrap()].clone()
    }

    fn micros(&mut self, most: &[u64]) -> Duration {
        let most = self.one_of(most);
        Duration::from_micros(self.below(most + 1))
    }

    fn cost(&mut self) -> u64 {
        let most = self.one_of(&[1, 1, 1, 5, 40, 300]);
        if self.once_in(15) {
            0
        } else {
            1 + self.below(most)
        }
    }
}

impl History {
    pub(crate) fn random(seed: u64, algorithms: &[Algorithm]) -> Self {
        // Neighbouring seeds begin apart.
        let mut numbers = Numbers(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        let limits: Vec<Limit> = algorithms
            .iter()
            .flat_map(|algorithm| limits_by(*algorithm))
            .collect();
        // Fewer limits in a history are used more.
        let from = numbers.below(limits.len() as u64) as usize;
        let of_history = [2, 3, limits.len()][numbers.below(3) as usize];
        let limits: Vec<Limit> = limits
            .iter()
            .cycle()
            .skip(from)
            .take(of_history.min(limits.len()))
            .cloned()
            .collect();
        let pairs: Vec<(Limit, &str)> = KEYS
            .iter()
            .flat_map(|key| limits.iter().map(move |limit| (limit.clone(), *key)))
            .collect();
        let steps_back = numbers.once_in(2);
        let begins = Duration::from_micros(500_000 * HOUR + numbers.below(24 * HOUR));
        let steps = (0..STEPS)
            .map(|number| (number, step(&mut numbers, number, &pairs, steps_back)))
            .collect();
        let probe = |(limit, key): &(Limit, &'static str)| {
            Charge::any_left(limit.clone().with_units(1), *key).unwrap()
        };
        Self {
            begins,
            steps,
            probes: pairs.iter().map(probe).collect(),
        }
    }

    /// Checks of every pair of kinds, each with a key of its own, with an id and without, and
    /// settled at every cost, within the lease and after it.
    pub(crate) fn of_pairs(algorithms: &[Algorithm]) -> Self {
        let lease = Duration::from_secs(4);
        let mut steps = Vec::new();
        let cases = algorithms
            .iter()
            .flat_map(|algorithm| (0..16 * 64).map(move |case| (*algorithm, case)));
        for (algorithm, case) in cases.filter(|(_, case)| case / 16 % 8 <= case / 16 / 8) {
            let number = steps.len() as u64;
            let [first, second, ..] = limits_by(algorithm);
            let charges = [(first, case / 16 % 8), (second, case / 16 / 8)]
                .map(|(limit, kind)| charge_of(limit, &number.to_string(), 5, PAIRED[kind], lease));
            let check = check_of(charges);
            let check = if case % 2 == 0 {
                check
            } else {
                check.with_id(AdmissionId(number))
            };
            let decide = Step::Decide { check, times: 1 };
            let pass = Step::Advance(if case / 2 % 2 == 0 { lease / 2 } else { lease });
            let settle = Step::Settle {
                step: number,
                is_of_first: false,
                cost: [0, 3, 5, 8][case / 4 % 4],
            };
            // The second settlement changes nothing.
            steps.extend(iter::zip(number.., [decide, pass, settle.clone(), settle]));
        }
        Self {
            begins: Duration::from_micros(500_000 * HOUR),
            steps,
            probes: Vec::new(),
        }
    }
}

/// Some have one name, and some one window. The algorithms share the names.
fn limits_by(algorithm: Algorithm) -> [Limit; 4] {
    let limit = |name, units, seconds| {
        Limit::per(name, units, Duration::from_secs(seconds)).with_algorithm(algorithm)
    };
    [
        limit("calls", 5, 10),
        limit("calls", 40, 60),
        limit("pages", 40, 60),
        limit("calls", 300, 3_600),
    ]
}

/// A charge of one of the [kinds](KINDS).
fn charge_of(limit: Limit, key: &str, cost: u64, kind: u64, lease: Duration) -> Charge {
    let charge = match kind % 3 {
        0 => Charge::new(limit.clone(), key, cost.min(limit.units())).unwrap(),
        1 => Charge::any_left(limit, key).unwrap(),
        _ => Charge::spent(limit, key, cost),
    };
    let charge = if (kind / RESERVED).is_multiple_of(2) {
        charge
    } else {
        charge.reserve(lease)
    };
    if kind / 6 == 0 {
        charge
    } else {
        charge.in_shadow()
    }
}

fn check_of(charges: impl IntoIterator<Item = Charge>) -> Check {
    let mut charges = charges.into_iter();
    let first = Check::new(charges.next().unwrap());
    charges.try_fold(first, Check::and).unwrap()
}

fn step(
    numbers: &mut Numbers,
    number: u64,
    pairs: &[(Limit, &'static str)],
    steps_back: bool,
) -> Step {
    let before = number.saturating_sub(1 + numbers.below(8));
    match numbers.below(100) {
        0..52 => {
            let times = if numbers.once_in(20) {
                1 + numbers.below(150)
            } else {
                1
            };
            Step::Decide {
                check: check(numbers, number, pairs),
                times,
            }
        }
        52..62 => Step::Repeat {
            step: before,
            is_elsewhere: numbers.once_in(4),
        },
        62..72 => Step::Retry(Duration::from_micros(numbers.below(2))),
        72..82 => {
            let is_of_first = numbers.once_in(3);
            let cost = if numbers.once_in(15) {
                u64::MAX
            } else {
                numbers.cost()
            };
            Step::Settle {
                step: before,
                is_of_first,
                cost: if numbers.once_in(3) { 0 } else { cost },
            }
        }
        82..84 => {
            let (limit, key) = numbers.one_of(pairs);
            Step::Reset(limit, key.into())
        }
        84..88 if steps_back => Step::ClockBack(numbers.micros(&[1, 1_500_000, 12_000_000, HOUR])),
        84..88 => Step::Advance(numbers.one_of(&[10, 60, 3_600].map(Duration::from_secs))),
        _ => Step::Advance(numbers.micros(&[3, 1_500_000, 12_000_000, 70_000_000, 2 * HOUR])),
    }
}

fn check(numbers: &mut Numbers, number: u64, pairs: &[(Limit, &'static str)]) -> Check {
    let charges = match numbers.below(20) {
        0 => pairs.len(),
        1..8 => 1 + numbers.below(3.min(pairs.len() as u64)) as usize,
        _ => 1,
    };
    let from = numbers.below(pairs.len() as u64) as usize;
    let cost = numbers.cost();
    let charges = pairs
        .iter()
        .cycle()
        .skip(from)
        .take(charges)
        .map(|(limit, key)| {
            // The units of a limit may change at any time.
            let changed = [limit.units() * 2, limit.units().div_ceil(2)];
            let is_changed = numbers.once_in(12);
            let limit = limit.clone().with_units(if is_changed {
                numbers.one_of(&changed)
            } else {
                limit.units()
            });
            let lease = numbers.micros(&[1_000, 15_000_000, 70_000_000]);
            let kind = match numbers.below(8) {
                0 | 1 => numbers.below(KINDS),
                2 | 3 => RESERVED,
                _ => 0,
            };
            charge_of(
                limit,
                key,
                if numbers.once_in(40) { u64::MAX } else { cost },
                kind,
                lease,
            )
        });
    let check = check_of(charges);
    if numbers.once_in(2) {
        check.with_id(AdmissionId(number))
    } else {
        check
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Decide { check, times } => write!(f, "{times} times {}", described(check)),
            Self::Repeat {
                step,
                is_elsewhere: false,
            } => write!(f, "the check of step {step} again"),
            Self::Repeat { step, .. } => write!(f, "the check of step {step} for another key"),
            Self::Retry(early) => write!(
                f,
                "the refused check again, {early:?} before its retry time"
            ),
            Self::Settle {
                step,
                is_of_first: false,
                cost,
            } => write!(f, "settle step {step} at a cost of {cost}"),
            Self::Settle { step, cost, .. } => write!(
                f,
                "settle the first charge of step {step} at a cost of {cost}"
            ),
            Self::Reset(limit, key) => write!(f, "reset {limit} for {key:?}"),
            Self::Advance(time) => write!(f, "advance the clock by {time:?}"),
            Self::ClockBack(time) => write!(
                f,
                "step the clock back by {time:?}, and ask for a unit of each limit"
            ),
        }
    }
}

/// A check in words.
pub(crate) fn described(check: &Check) -> String {
    let charge = |charge: &Charge| {
        let limit = charge.limit();
        let cost = charge.cost();
        let units = match charge.takes() {
            Takes::Always => format!("{cost} spent units"),
            Takes::Nothing => "whether any unit is left".to_owned(),
            Takes::IfAdmitted => format!("{cost} units"),
        };
        let key = String::from_utf8_lossy(charge.key().value());
        let lease = charge
            .lease()
            .map(|lease| format!(", reserved for {lease:?}"))
            .unwrap_or_default();
        let shadow = if charge.is_shadow() {
            ", in the shadow"
        } else {
            ""
        };
        format!("{units} of {limit} for {key}{lease}{shadow}")
    };
    let charges: Vec<String> = check.charges().map(charge).collect();
    let id = check
        .id()
        .map(|id| format!(", with the {id:?}"))
        .unwrap_or_default();
    format!("check {}{id}", charges.join(" and "))
}

/// The same units for the other key, under the same id.
pub(crate) fn for_the_other_key(check: &Check) -> Option<Check> {
    let mut charges = check.charges();
    let charge = charges
        .next()
        .filter(|charge| charge.takes() == Takes::IfAdmitted)?;
    if charges.next().is_some() {
        return None;
    }
    let other = KEYS
        .into_iter()
        .find(|key| Key::from(*key) != *charge.key())?;
    let moved = Check::new(Charge::new(charge.limit().clone(), other, charge.cost()).ok()?);
    Some(check.id().into_iter().fold(moved, Check::with_id))
}
