//! Horizontal bars as SVG, written by hand, because text and rectangles need no library.
//!
//! The colours are readable on white and on black, because an image in a README does not know its
//! background.

use super::Finding;
use crate::measure::{Comparison, Series, Spread};

const WIDTH: f64 = 760.0;
/// The start of the bars, to the right of their labels.
const LEFT: f64 = 290.0;
/// The length of the longest bar. Its figure is to the right of it.
const LONGEST: f64 = 360.0;
const HEAD: f64 = 34.0;
const ROW: f64 = 22.0;
const BAR: f64 = 14.0;
/// The space between two groups.
const GAP: f64 = 16.0;

const STYLE: &str = "\
text { font: 13px system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif; fill: #767f89 }
.title { font-weight: 600; font-size: 14px } .us text { font-weight: 600; fill: #2f81f7 }
rect { fill: #98a1ab } .us rect { fill: #2f81f7 } path { stroke: #767f89; stroke-width: 1.5; fill: none }
.us path { stroke: #114a9c }";

/// One group of bars per finding, each group with its own scale: our bar first, then the others. A
/// thin line shows the spread over the rounds.
pub(crate) fn bars(direction: &str, findings: &[&Finding]) -> String {
    let mut drawing = String::new();
    let mut y = 0.0;
    for finding in findings {
        let comparison = &finding.comparison;
        let title = format!("{}: {} ({direction})", finding.scenario, comparison.what);
        drawing += &format!(
            "<text class=\"title\" x=\"8\" y=\"{}\">{}</text>\n",
            y + 21.0,
            escaped(&title)
        );
        y += HEAD;
        let scale = LONGEST / longest(comparison);
        for (row, side) in sides(comparison).enumerate() {
            let class = if row == 0 { "us" } else { "them" };
            drawing += &format!(
                "<g class=\"{class}\" transform=\"translate(0 {y})\">{}</g>\n",
                bar(side, comparison, scale)
            );
            y += ROW;
        }
        y += GAP;
    }
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{y}\" viewBox=\"0 0 {WIDTH} {y}\" \
         role=\"img\">\n<title>{direction}</title>\n<style>\n{STYLE}\n</style>\n{drawing}</svg>\n"
    )
}

/// One side: its label, its median as a bar and in figures, and its spread as a line on the bar.
fn bar(side: &Series, comparison: &Comparison, scale: f64) -> String {
    let Spread {
        least,
        median,
        most,
    } = side.spread();
    let (length, from, to) = (median * scale, LEFT + least * scale, LEFT + most * scale);
    let (middle, base) = (BAR / 2.0, BAR - 2.5);
    format!(
        "<text x=\"{}\" y=\"{base}\" text-anchor=\"end\">{}</text>\
         <rect x=\"{LEFT}\" width=\"{length:.1}\" height=\"{BAR}\" rx=\"2\"/>\
         <path d=\"M{from:.1} {middle}H{to:.1}\"/>\
         <text x=\"{:.1}\" y=\"{base}\">{}</text>",
        LEFT - 8.0,
        escaped(&side.label),
        to.max(LEFT + length) + 8.0,
        comparison.unit.show(median),
    )
}

fn sides(comparison: &Comparison) -> impl Iterator<Item = &Series> {
    std::iter::once(&comparison.us).chain(&comparison.others)
}

/// The largest figure of a group, which sets its scale.
fn longest(comparison: &Comparison) -> f64 {
    sides(comparison)
        .map(|side| side.spread().most)
        .fold(f64::MIN_POSITIVE, f64::max)
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}
