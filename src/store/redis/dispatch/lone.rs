//! The short form of a check that is alone: `lone.lua` describes it. No other file knows it.

use redis::{Cmd, Value};

use super::job::{Job, single};

/// Appends the argument of the short form, if the job has one.
pub(super) fn write(job: &Job, command: &mut Cmd) -> bool {
    let Some(limit) = single(job) else { return false };
    let [units, window] = [limit.units(), limit.window_micros()].map(|figure| (figure as f64).to_le_bytes());
    command.arg([units, window, job.id.0.to_be_bytes()].as_flattened());
    true
}

/// The fields of the short reply: the time, the units used, and the microseconds until fewer are.
pub(super) fn read(numbers: &[u8]) -> Option<Vec<Value>> {
    let (numbers, rest) = numbers.as_chunks::<8>();
    let is_whole = numbers.len() == 3 && rest.is_empty();
    is_whole.then(|| numbers.iter().map(|number| Value::Int(f64::from_le_bytes(*number) as i64)).collect())
}
