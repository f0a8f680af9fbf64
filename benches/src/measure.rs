//! Measures the sides in turn, round by round, so that their ratio holds while the machine's speed
//! drifts.

use std::time::Duration;

/// The size of a measurement.
#[derive(Clone, Copy)]
pub(crate) struct Effort {
    pub(crate) rounds: usize,
    pub(crate) round: Duration,
    /// Entries in the window of a busy key.
    pub(crate) entries: usize,
    /// Calls to an upstream that admits ten a second.
    pub(crate) calls: usize,
}

/// The unit of a figure.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unit {
    PerSecond,
    Micros,
    /// Script calls on Redis.
    Scripts,
    /// Commands on Redis, and those that its scripts run.
    Commands,
    Bytes,
}

impl Unit {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::PerSecond => "a second",
            Self::Micros => "us",
            Self::Scripts => "scripts",
            Self::Commands => "commands",
            Self::Bytes => "bytes",
        }
    }

    pub(crate) fn more_is_better(self) -> bool {
        self == Self::PerSecond
    }

    pub(crate) fn show(self, figure: f64) -> String {
        match self {
            Self::PerSecond if figure >= 1e6 => format!("{:.2} M/s", figure / 1e6),
            Self::PerSecond if figure >= 1e3 => format!("{:.1} k/s", figure / 1e3),
            Self::PerSecond => format!("{figure:.2} /s"),
            Self::Micros => format!("{figure:.2} us"),
            Self::Scripts | Self::Commands => format!("{figure:.4}"),
            Self::Bytes => format!("{figure:.1} B"),
        }
    }
}

/// Sides that are measured in turn.
pub(crate) struct Sides<'a, F>(Vec<(String, Box<dyn FnMut() -> F + 'a>)>);

impl<'a, F> Sides<'a, F> {
    pub(crate) fn new() -> Self {
        Self(Vec::new())
    }

    /// Adds a side, with the function that measures the figures of one round.
    pub(crate) fn side(
        mut self,
        label: impl Into<String>,
        measure: impl FnMut() -> F + 'a,
    ) -> Self {
        self.0.push((label.into(), Box::new(measure)));
        self
    }

    /// The label of each side, and its figures, one per round. Measures every side in every round:
    /// forwards, then backwards, so that no side always comes first.
    pub(crate) fn measure(mut self, rounds: usize) -> Vec<(String, Vec<F>)> {
        let mut figures: Vec<_> = self.0.iter().map(|_| Vec::with_capacity(rounds)).collect();
        for round in 0..rounds {
            for turn in 0..self.0.len() {
                let side = if round % 2 == 0 {
                    turn
                } else {
                    self.0.len() - 1 - turn
                };
                figures[side].push((self.0[side].1)());
            }
        }
        self.0
            .into_iter()
            .map(|(label, _)| label)
            .zip(figures)
            .collect()
    }
}

/// Sides that are measured against the first of them.
pub(crate) struct Contest<'a> {
    what: String,
    unit: Unit,
    sides: Sides<'a, f64>,
}

impl<'a> Contest<'a> {
    pub(crate) fn new(what: impl Into<String>, unit: Unit) -> Self {
        Self {
            what: what.into(),
            unit,
            sides: Sides::new(),
        }
    }

    /// Adds a side, with the function that measures one figure of it. The first side is ours.
    pub(crate) fn side(
        mut self,
        label: impl Into<String>,
        measure: impl FnMut() -> f64 + 'a,
    ) -> Self {
        self.sides = self.sides.side(label, measure);
        self
    }

    /// Measures every side in every round.
    pub(crate) fn measure(self, rounds: usize) -> Comparison {
        Comparison::of(
            self.what,
            self.unit,
            &self.sides.measure(rounds),
            |figure| *figure,
        )
    }
}

/// The figures of one side, one per round.
pub(crate) struct Series {
    pub(crate) label: String,
    pub(crate) figures: Vec<f64>,
}

impl Series {
    pub(crate) fn spread(&self) -> Spread {
        Spread::of(self.figures.iter().copied())
    }
}

/// The comparisons of a scenario, or one line that says why there are none.
pub(crate) type Outcome = Result<Vec<Comparison>, String>;

/// Us against the others, over all rounds.
pub(crate) struct Comparison {
    pub(crate) what: String,
    pub(crate) unit: Unit,
    pub(crate) us: Series,
    pub(crate) others: Vec<Series>,
}

impl Comparison {
    /// By one of the figures that were measured. The first side is ours.
    pub(crate) fn of<F>(
        what: impl Into<String>,
        unit: Unit,
        measured: &[(String, Vec<F>)],
        figure: impl Fn(&F) -> f64,
    ) -> Self {
        let mut sides = measured.iter().map(|(label, figures)| Series {
            label: label.clone(),
            figures: figures.iter().map(&figure).collect(),
        });
        let us = sides.next().expect("a comparison has a first side");
        Self {
            what: what.into(),
            unit,
            us,
            others: sides.collect(),
        }
    }

    /// Our figure divided by theirs, round by round.
    pub(crate) fn ratios<'a>(&'a self, other: &'a Series) -> impl Iterator<Item = f64> + 'a {
        self.us
            .figures
            .iter()
            .zip(&other.figures)
            .map(|(us, them)| us / them)
    }
}

/// The median of some figures, and the least and the most.
#[derive(Clone, Copy)]
pub(crate) struct Spread {
    pub(crate) least: f64,
    pub(crate) median: f64,
    pub(crate) most: f64,
}

impl Spread {
    pub(crate) fn of(figures: impl Iterator<Item = f64>) -> Self {
        let mut figures: Vec<f64> = figures.collect();
        figures.sort_by(f64::total_cmp);
        let last = figures.len() - 1;
        Self {
            least: figures[0],
            median: figures[figures.len() / 2],
            most: figures[last],
        }
    }
}
