//! The examples as programs of their own.

use std::{env, process::Command};

/// All settings that examples take. Those of whoever runs the tests are not theirs.
const SETTINGS: [&str; 13] = [
    "PORT",
    "REDIS_URL",
    "TRUSTED_PROXIES",
    "API_KEY_SECRET",
    "CALLS",
    "WINDOW",
    "WORKERS",
    "PAGES",
    "PATIENCE",
    "TOKEN",
    "LISTS",
    "SEARCHES",
    "CALL_MILLIS",
];

/// An example with these settings and no others. Cargo builds the examples together with the tests, into a folder beside
/// them.
pub(crate) fn example(name: &str, settings: &[(&str, &str)]) -> Command {
    let folder = env::current_exe().unwrap().parent().unwrap().parent().unwrap().join("examples");
    let program = folder.join(format!("{name}{}", env::consts::EXE_SUFFIX));
    assert!(program.exists(), "the example {name} is not built: run `cargo build --examples --all-features`");
    let mut command = Command::new(program);
    SETTINGS.iter().for_each(|setting| {
        command.env_remove(setting);
    });
    command.envs(settings.iter().copied());
    command
}
