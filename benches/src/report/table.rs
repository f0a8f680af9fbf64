//! The table on the terminal: one row for us against each other side.

use std::fmt;

use super::Finding;
use crate::measure::Spread;

/// The heading above the rows.
pub(crate) const HEADING: &str = "\
Medians of all rounds. The ratio is us by them, of one round each: its median, and its least and most.

scenario    what                                 us                               against                          them   ratio (spread)";

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let comparison = &self.comparison;
        let unit = comparison.unit;
        for other in &comparison.others {
            let (us, them) = (comparison.us.spread().median, other.spread().median);
            let Spread {
                least,
                median,
                most,
            } = Spread::of(comparison.ratios(other));
            let better = if unit.more_is_better() {
                "more"
            } else {
                "less"
            };
            write!(
                f,
                "{:<11} {:<36} {:>12}   ",
                self.scenario,
                comparison.what,
                unit.show(us)
            )?;
            write!(f, "{:<36} {:>12}   ", other.label, unit.show(them))?;
            writeln!(
                f,
                "{:<22} {better} is better",
                format!("{median:.2} ({least:.2} to {most:.2})")
            )?;
        }
        Ok(())
    }
}
