//! The output of a run: a table on the terminal, figures for other programs, and plots.

mod figures;
mod machine;
mod plot;
mod table;

use std::{fs, io, path::Path};

pub(crate) use self::{machine::describe as machine, table::HEADING};
use crate::measure::Comparison;

/// A comparison, and the scenario that made it.
pub(crate) struct Finding {
    pub(crate) scenario: &'static str,
    pub(crate) comparison: Comparison,
}

#[derive(Default)]
pub(crate) struct Report {
    pub(crate) findings: Vec<Finding>,
}

impl Report {
    /// Writes all files, and returns their names.
    pub(crate) fn write(&self, folder: &Path) -> io::Result<Vec<String>> {
        fs::create_dir_all(folder)?;
        let machine = machine::describe();
        let (more, less): (Vec<_>, Vec<_>) = self
            .findings
            .iter()
            .partition(|finding| finding.comparison.unit.more_is_better());
        let mut files = vec![
            ("rounds.csv", figures::rounds(&self.findings, &machine)),
            ("summary.csv", figures::summary(&self.findings, &machine)),
        ];
        // On a scale, either more or less is better, so there is one plot for each.
        for (name, title, findings) in [
            ("throughput.svg", "more is better", more),
            ("costs.svg", "less is better", less),
        ] {
            if !findings.is_empty() {
                files.push((name, plot::bars(title, &findings)));
            }
        }
        let write = |(name, text): (&str, String)| {
            let path = folder.join(name);
            fs::write(&path, text)?;
            Ok(path.display().to_string())
        };
        files.into_iter().map(write).collect()
    }
}
