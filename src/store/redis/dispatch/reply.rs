//! The script's reply: `head.lua` says in which form.

use std::{iter, time::Duration};

use redis::Value;

use super::{
    dispatcher::ASKING,
    job::{Answer, Job},
    lone,
};
use crate::{
    check::Check,
    clock::system_time,
    decision::{Decision, LimitStatus},
    error::StoreError,
    store::redis::connect::errors::kind_of_reply,
};

/// The figures of a charge after all copies of its check: the units used, the microseconds until fewer are, the reserved units,
/// and the retry time, also if all of those were given back now.
type Figures = [u64; 5];

/// Appends the answers of all jobs and of their copies: the decision, and whether a settlement was applied. `None` if the reply
/// is not the script's, but probably of a proxy in front of Redis.
pub(super) fn read(reply: Value, jobs: &[Box<Job>], answers: &mut Vec<Answer>) -> Option<()> {
    let mut fields = match reply {
        Value::Array(fields) => fields,
        Value::BulkString(numbers) => lone::read(&numbers)?,
        _ => return None,
    }
    .into_iter();
    let now = number(&mut fields)?;
    // Their memory is used again: that saves 1.3 % of a check with a key of its own.
    let mut figures: Vec<Figures> = Vec::new();
    for job in jobs {
        let (check, count) = (job.check(), job.count());
        figures.clear();
        // Mostly all copies are admitted, and nothing is reserved.
        let (admitted, counted_at) = if let Some(Value::Int(_)) = fields.as_slice().first() {
            for _ in check.charges() {
                figures.push([number(&mut fields)?, number(&mut fields)?, 0, 0, 0]);
            }
            (count, None)
        } else {
            match fields.next()? {
                Value::Array(record) => read_record(record, check, &mut figures)?,
                Value::BulkString(text) => {
                    // The other jobs of the batch have results of their own.
                    let error = || Err(key_error(check, &text));
                    answers.extend(iter::repeat_with(error).take(count as usize));
                    continue;
                }
                _ => return None,
            }
        };
        if admitted > count {
            return None;
        }
        let at = system_time(counted_at.unwrap_or(now));
        for copy in 0..count {
            // If an earlier try has counted the copies, each gets the present status.
            let later = if counted_at.is_some() { 0 } else { admitted.saturating_sub(copy + 1) };
            let mut figures = figures.iter();
            let decision = Decision::new(check, at, job.id.following(copy), |charge| {
                let [used, reset, reserved, retry, least] = figures.next().copied().unwrap_or_default();
                let has_retry = (copy >= admitted || charge.is_shadow()) && retry > 0;
                let retry = has_retry.then(|| Duration::from_micros(retry));
                let used = used.saturating_sub(later.saturating_mul(charge.cost()));
                LimitStatus::new(charge, used, Duration::from_micros(reset), retry)
                    .with_reserved(reserved, Duration::from_micros(least))
            });
            answers.push(Ok((decision, admitted > 0)));
        }
    }
    fields.next().is_none().then_some(())
}

/// Reads the figures of a check's record. Returns how many copies are admitted, and when an earlier try has counted them, if one has.
fn read_record(record: Vec<Value>, check: &Check, figures: &mut Vec<Figures>) -> Option<(u64, Option<u64>)> {
    let mut fields = record.into_iter();
    let admitted = number(&mut fields)?;
    let Value::Int(at) = fields.next()? else { return None };
    for _ in check.charges() {
        let mut charge = Figures::default();
        for figure in &mut charge {
            *figure = number(&mut fields)?;
        }
        figures.push(charge);
    }
    fields.next().is_none().then_some((admitted, u64::try_from(at).ok()))
}

fn number(fields: &mut impl Iterator<Item = Value>) -> Option<u64> {
    match fields.next()? {
        Value::Int(number) => u64::try_from(number).ok(),
        _ => None,
    }
}

/// The error of a key that has a value of another application, or cannot be written. The script's text begins with the number
/// of the charge, counted from 1.
fn key_error(check: &Check, text: &[u8]) -> StoreError {
    let text = String::from_utf8_lossy(text);
    let (number, text) = text.split_once(' ').unwrap_or(("", &text));
    let index = number.parse().unwrap_or(1_usize).saturating_sub(1);
    let limit = check.charges().nth(index).map_or("an unknown limit", |charge| charge.limit().name());
    let cause = format!("the key of the limit {limit:?} cannot be read or written: {}", text.trim_end());
    StoreError::new(ASKING, cause).of_kind(kind_of_reply(text)).of_one_check()
}
