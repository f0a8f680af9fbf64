//! A covering array: rows in which each pair of values of two dimensions stands at least once.

use std::collections::BTreeSet;

use super::table::{DIMENSIONS, Value};
use crate::support::Numbers;

/// One app.
pub(super) struct Row {
    pub(super) number: usize,
    pub(super) seed: u64,
    /// One of each dimension.
    pub(super) values: Vec<&'static Value>,
}

/// Two values as their dimensions and their places in these, the lower dimension first.
type Pair = [(usize, usize); 2];

fn pairs_of(values: &[(usize, usize)]) -> impl Iterator<Item = Pair> {
    values.iter().flat_map(|one| {
        values
            .iter()
            .filter(|other| one.0 < other.0)
            .map(|other| [*one, *other])
    })
}

fn all_pairs(sizes: &[usize]) -> BTreeSet<Pair> {
    let values: Vec<_> = sizes
        .iter()
        .enumerate()
        .flat_map(|(dimension, size)| (0..*size).map(move |value| (dimension, value)))
        .collect();
    pairs_of(&values).collect()
}

/// The pairs that a row shows: a value that hides is in all of them.
fn shown_by(
    row: &[(usize, usize)],
    hides: impl Fn((usize, usize)) -> bool,
) -> impl Iterator<Item = Pair> {
    let hiding: Vec<_> = row.iter().copied().filter(|value| hides(*value)).collect();
    pairs_of(row).filter(move |pair| hiding.iter().all(|value| pair.contains(value)))
}

/// Greedy: a row begins with a pair that no row shows yet. Each other dimension, in random order,
/// gets the value with the most new pairs.
fn cover(
    sizes: &[usize],
    hides: impl Fn((usize, usize)) -> bool,
    numbers: &mut Numbers,
) -> Vec<Vec<usize>> {
    let (mut missing, mut rows) = (all_pairs(sizes), Vec::new());
    while !missing.is_empty() {
        let mut row = missing
            .iter()
            .nth(numbers.below(missing.len() as u64) as usize)
            .unwrap()
            .to_vec();
        let mut open: Vec<usize> = (0..sizes.len())
            .filter(|one| !row.iter().any(|(taken, _)| taken == one))
            .collect();
        while !open.is_empty() {
            let dimension = open.swap_remove(numbers.below(open.len() as u64) as usize);
            let with = |value: usize| {
                let mut with = row.clone();
                with.push((dimension, value));
                with.sort_unstable();
                with
            };
            let new_pairs = |value: &usize| {
                shown_by(&with(*value), &hides)
                    .filter(|pair| missing.contains(pair))
                    .count()
            };
            // Of equals the first, which is the default: what a row need not have would hide what
            // it has.
            let best = (0..sizes[dimension]).rev().max_by_key(new_pairs).unwrap();
            row = with(best);
        }
        shown_by(&row, &hides).for_each(|pair| {
            missing.remove(&pair);
        });
        rows.push(row.into_iter().map(|(_, value)| value).collect());
    }
    rows
}

/// All pairs, in at least so many rows. Those beyond the covering array are random.
pub(super) fn rows(seed: u64, at_least: usize) -> Vec<Row> {
    let sizes: Vec<usize> = DIMENSIONS
        .iter()
        .map(|dimension| dimension.values.len())
        .collect();
    let mut numbers = Numbers(seed);
    let hides = |(dimension, value): (usize, usize)| DIMENSIONS[dimension].values[value].hides;
    let mut rows = cover(&sizes, hides, &mut numbers);
    while rows.len() < at_least {
        rows.push(
            sizes
                .iter()
                .map(|size| numbers.below(*size as u64) as usize)
                .collect(),
        );
    }
    let row = |(number, chosen): (usize, Vec<usize>)| {
        let values = DIMENSIONS
            .iter()
            .zip(chosen)
            .map(|(dimension, value)| &dimension.values[value])
            .collect();
        Row {
            number,
            seed,
            values,
        }
    };
    rows.into_iter().enumerate().map(row).collect()
}

impl Row {
    /// The value of a dimension.
    pub(super) fn of(&self, dimension: &str) -> &'static str {
        let index = DIMENSIONS
            .iter()
            .position(|one| one.name == dimension)
            .expect("a dimension of the table");
        self.values[index].name
    }

    pub(super) fn is(&self, dimension: &str, names: &[&str]) -> bool {
        names.contains(&self.of(dimension))
    }

    /// The values that are not the first of their dimensions, which are the defaults.
    pub(super) fn text(&self) -> String {
        let named = self
            .values
            .iter()
            .zip(DIMENSIONS)
            .filter(|(value, dimension)| {
                value.name != dimension.values[0].name
                    || matches!(dimension.name, "kind" | "store" | "stack" | "transport")
            });
        named
            .map(|(value, _)| value.name)
            .collect::<Vec<_>>()
            .join(", ")
    }
}

#[test]
fn each_pair_of_values_is_shown_by_a_row() {
    let sizes = [3, 2, 5, 4];
    let hides = |value| value == (2, 1);
    for seed in 0..20 {
        let rows = cover(&sizes, hides, &mut Numbers(seed));
        let shown = |row: &Vec<usize>| {
            let row: Vec<_> = row.iter().copied().enumerate().collect();
            shown_by(&row, hides).collect::<Vec<_>>()
        };
        assert_eq!(
            rows.iter().flat_map(shown).collect::<BTreeSet<_>>(),
            all_pairs(&sizes)
        );
        assert!(
            rows.len() <= 30,
            "{} rows, where the two largest dimensions have 20 pairs",
            rows.len()
        );
    }
}
