//! The command line.

use std::{
    env,
    path::{Path, PathBuf},
    time::Duration,
};

use crate::{
    measure::Effort,
    scenarios::{BY_NAME, SCENARIOS, Scenario},
};

/// Long enough for the median to settle.
const FULL: Effort = Effort {
    rounds: 7,
    round: Duration::from_secs(2),
    entries: 1_000_000,
    calls: 300,
};

/// Less than two minutes for all scenarios.
const QUICK: Effort = Effort {
    rounds: 3,
    round: Duration::from_millis(400),
    entries: 100_000,
    calls: 60,
};

pub(crate) struct Arguments {
    pub(crate) scenarios: Vec<&'static Scenario>,
    pub(crate) effort: Effort,
    pub(crate) out: PathBuf,
}

impl Arguments {
    pub(crate) fn read() -> Result<Self, String> {
        let (mut scenarios, mut is_quick, mut out) = (Vec::new(), false, None);
        let mut arguments = env::args().skip(1);
        while let Some(argument) = arguments.next() {
            match SCENARIOS
                .iter()
                .chain(BY_NAME)
                .find(|scenario| scenario.name == argument)
            {
                Some(scenario) => scenarios.push(scenario),
                None if argument == "--quick" => is_quick = true,
                None if argument == "--out" => {
                    out = Some(arguments.next().ok_or("--out needs a folder")?.into());
                }
                None => {
                    let names: Vec<&str> = SCENARIOS
                        .iter()
                        .chain(BY_NAME)
                        .map(|scenario| scenario.name)
                        .collect();
                    return Err(format!(
                        "{argument:?} is neither --quick nor --out nor a scenario: {}",
                        names.join(", ")
                    ));
                }
            }
        }
        let is_partial = is_quick || !scenarios.is_empty();
        if scenarios.is_empty() {
            scenarios.extend(SCENARIOS);
        }
        let results = Path::new(env!("CARGO_MANIFEST_DIR")).join("results");
        Ok(Self {
            scenarios,
            effort: if is_quick { QUICK } else { FULL },
            out: out.unwrap_or_else(|| {
                if is_partial {
                    results.join("partial")
                } else {
                    results
                }
            }),
        })
    }
}
