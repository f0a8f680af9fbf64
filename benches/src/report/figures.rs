//! The figures as CSV, with the machine in comments at the top.

use super::Finding;
use crate::measure::Spread;

/// One line per round and pair.
pub(crate) fn rounds(findings: &[Finding], machine: &str) -> String {
    let mut text = format!(
        "{machine}scenario,what,unit,better,us,against,round,our figure,their figure,ratio\n"
    );
    for (about, finding) in described(findings) {
        let comparison = &finding.comparison;
        for other in &comparison.others {
            for (round, ratio) in comparison.ratios(other).enumerate() {
                let (us, them) = (comparison.us.figures[round], other.figures[round]);
                let pair = format!("{},{}", quoted(&comparison.us.label), quoted(&other.label));
                text += &format!(
                    "{about},{pair},{},{us:.3},{them:.3},{ratio:.4}\n",
                    round + 1
                );
            }
        }
    }
    text
}

/// One line per pair: the medians, and the spread of the ratio.
pub(crate) fn summary(findings: &[Finding], machine: &str) -> String {
    let mut text = format!(
        "{machine}scenario,what,unit,better,us,against,our median,their median,median ratio,least ratio,most ratio\n"
    );
    for (about, finding) in described(findings) {
        let comparison = &finding.comparison;
        let us = comparison.us.spread().median;
        for other in &comparison.others {
            let (them, ratio) = (other.spread().median, Spread::of(comparison.ratios(other)));
            let pair = format!("{},{}", quoted(&comparison.us.label), quoted(&other.label));
            text += &format!("{about},{pair},{us:.3},{them:.3},");
            text += &format!("{:.4},{:.4},{:.4}\n", ratio.median, ratio.least, ratio.most);
        }
    }
    text
}

/// Each finding, after the columns that both files begin with.
fn described(findings: &[Finding]) -> impl Iterator<Item = (String, &Finding)> {
    findings.iter().map(|finding| {
        let (what, unit) = (&finding.comparison.what, finding.comparison.unit);
        let better = if unit.more_is_better() {
            "more"
        } else {
            "less"
        };
        (
            format!(
                "{},{},{},{better}",
                finding.scenario,
                quoted(what),
                unit.name()
            ),
            finding,
        )
    })
}

/// A field that may contain commas.
fn quoted(text: &str) -> String {
    format!("\"{}\"", text.replace('"', "\"\""))
}
