//! How things are measured: in turn, round by round, so that a ratio holds while the machine's speed drifts.

use std::{fmt, time::Duration};

#[derive(Clone, Copy)]
pub(crate) struct Effort {
    pub(crate) rounds: usize,
    pub(crate) round: Duration,
}

/// What of two figures is better, and how it is written.
#[derive(Clone, Copy)]
pub(crate) enum Unit {
    PerSecond,
    Micros,
}

/// Us against one other, over all rounds.
pub(crate) struct Row {
    against: &'static str,
    unit: Unit,
    pairs: Vec<(f64, f64)>,
}

impl Row {
    pub(crate) fn new(against: &'static str, unit: Unit) -> Self {
        Self { against, unit, pairs: Vec::new() }
    }

    /// The figures of one round.
    pub(crate) fn add(&mut self, us: f64, them: f64) {
        self.pairs.push((us, them));
    }
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (us, them) = (sorted(self.pairs.iter().map(|pair| pair.0)), sorted(self.pairs.iter().map(|pair| pair.1)));
        let ratios = sorted(self.pairs.iter().map(|(us, them)| us / them));
        let middle = ratios.len() / 2;
        let shown = |figure: f64| match self.unit {
            Unit::PerSecond => format!("{:.1} k/s", figure / 1e3),
            Unit::Micros => format!("{figure:.2} us"),
        };
        write!(f, "{:>12}  {:<28} {:>12}  ", shown(us[middle]), self.against, shown(them[middle]))?;
        write!(f, "{:<8.2} ({:.2} to {:.2})", ratios[middle], ratios[0], ratios[ratios.len() - 1])
    }
}

fn sorted(figures: impl Iterator<Item = f64>) -> Vec<f64> {
    let mut figures: Vec<f64> = figures.collect();
    figures.sort_by(f64::total_cmp);
    figures
}
