//! The script's reply: `head.lua` says in which form.

use std::{time::Duration, vec};

use redis::Value;

use super::{
    dispatcher::ASKING,
    job::{Answer, Job},
};
use crate::{
    check::{Charge, Check},
    clock::system_time,
    decision::{Decision, LimitStatus},
    error::StoreError,
    store::redis::connect::errors::kind_of_reply,
};

/// Appends the results of all jobs and of their copies: the decision, and whether a settlement was applied.
pub(super) fn read(reply: Value, jobs: &[Box<Job>], results: &mut Vec<Answer>) -> Result<(), MalformedReply> {
    let fields = match reply {
        Value::Array(fields) => fields,
        Value::BulkString(numbers) => unpacked(&numbers).ok_or(MalformedReply)?.into(),
        _ => return Err(MalformedReply),
    };
    let mut fields = fields.into_iter();
    let now = number(&mut fields)?;
    let mut reply = Reply { fields, now, statuses: Vec::new() };
    for job in jobs {
        reply.read(job, results)?;
    }
    if reply.fields.as_slice().is_empty() { Ok(()) } else { Err(MalformedReply) }
}

/// The fields of the short reply to a check that is alone.
fn unpacked(numbers: &[u8]) -> Option<[Value; 3]> {
    let (numbers, rest) = numbers.as_chunks::<8>();
    let numbers = <&[_; 3]>::try_from(numbers).ok().filter(|_| rest.is_empty())?;
    Some(numbers.map(|number| Value::Int(f64::from_le_bytes(number) as i64)))
}

/// The rest of the reply.
struct Reply {
    fields: vec::IntoIter<Value>,
    /// The script's time, in microseconds.
    now: u64,
    /// The statuses of the present job. Their memory is used again: that saves 1.3 % of a check with a key of its own.
    statuses: Vec<RawStatus>,
}

impl Reply {
    fn read(&mut self, job: &Job, results: &mut Vec<Answer>) -> Result<(), MalformedReply> {
        let (check, count) = (job.check(), job.count());
        let counted_at = self.counted_at()?;
        let at = system_time(counted_at.unwrap_or(self.now));
        let admitted = self.admitted(count)?;
        let has_retries = admitted.is_some() && job.is_check();
        let admitted = admitted.unwrap_or(Ok(count));
        self.statuses.clear();
        for _ in check.charges() {
            self.statuses.push(RawStatus::read(&mut self.fields, has_retries)?);
        }
        for copy in 0..count {
            results.push(match &admitted {
                // The other jobs of the batch have results of their own.
                Err(text) => Err(key_error(check, text)),
                Ok(admitted) => {
                    // If an earlier try has counted the copies, each gets the present status.
                    let later = if counted_at.is_some() { 0 } else { admitted.saturating_sub(copy + 1) };
                    let mut statuses = self.statuses.iter();
                    let decision = Decision::new(check, at, job.id.following(copy), |charge| {
                        statuses.next().copied().unwrap_or_default().of_copy(charge, later, copy >= *admitted)
                    });
                    Ok((decision, *admitted > 0))
                }
            });
        }
        Ok(())
    }

    /// The time at which an earlier try has counted the check, if one has.
    fn counted_at(&mut self) -> Result<Option<u64>, MalformedReply> {
        let Some(Value::Array(at)) = self.fields.as_slice().first() else { return Ok(None) };
        let [Value::Int(at)] = at[..] else { return Err(MalformedReply) };
        self.fields.next();
        u64::try_from(at).map(Some).map_err(|_| MalformedReply)
    }

    /// How many copies are admitted, or the text of an error. Mostly the reply has neither: then all are.
    fn admitted(&mut self, copies: u64) -> Result<Option<Result<u64, String>>, MalformedReply> {
        let admitted = match self.fields.as_slice().first() {
            Some(Value::Int(negative @ ..0)) => Ok(negative.unsigned_abs() - 1),
            Some(Value::BulkString(text)) => Err(String::from_utf8_lossy(text).into_owned()),
            _ => return Ok(None),
        };
        self.fields.next();
        let is_too_many = admitted.as_ref().is_ok_and(|admitted| *admitted > copies);
        if is_too_many { Err(MalformedReply) } else { Ok(Some(admitted)) }
    }
}

/// The reply is not of the script, but probably of a proxy in front of Redis.
pub(super) struct MalformedReply;

/// The status of a charge after all copies of its check. The times are microseconds.
#[derive(Clone, Copy, Default)]
struct RawStatus {
    used: u64,
    reset: u64,
    retry: u64,
    reserved: u64,
    /// The retry time if all reserved units were given back.
    least: u64,
}

impl RawStatus {
    fn read(fields: &mut vec::IntoIter<Value>, has_retry: bool) -> Result<Self, MalformedReply> {
        let mut status = Self { used: number(fields)?, ..Self::default() };
        match fields.next() {
            Some(Value::Int(negative @ ..0)) => {
                status.reset = negative.unsigned_abs() - 1;
                status.reserved = number(fields)?;
            }
            Some(Value::Int(reset)) => status.reset = reset.unsigned_abs(),
            _ => return Err(MalformedReply),
        }
        if has_retry {
            status.retry = number(fields)?;
            status.least = if status.reserved > 0 { number(fields)? } else { status.retry };
        }
        Ok(status)
    }

    /// The status after a copy, before the `later` ones were counted.
    fn of_copy(self, charge: &Charge, later: u64, is_refused: bool) -> LimitStatus {
        let has_retry = (is_refused || charge.is_shadow()) && self.retry > 0;
        let retry = has_retry.then(|| Duration::from_micros(self.retry));
        let used = self.used.saturating_sub(later.saturating_mul(charge.cost()));
        let status = LimitStatus::new(charge, used, Duration::from_micros(self.reset), retry);
        status.with_reserved(self.reserved, Duration::from_micros(self.least))
    }
}

fn number(fields: &mut vec::IntoIter<Value>) -> Result<u64, MalformedReply> {
    match fields.next() {
        Some(Value::Int(number)) => u64::try_from(number).map_err(|_| MalformedReply),
        _ => Err(MalformedReply),
    }
}

/// The error of a key that has a value of another application, or cannot be written. The script's text begins with the number
/// of the charge, counted from 1.
fn key_error(check: &Check, text: &str) -> StoreError {
    let (number, text) = text.split_once(' ').unwrap_or(("", text));
    let index = number.parse().unwrap_or(1_usize).saturating_sub(1);
    let limit = check.charges().nth(index).map_or("an unknown limit", |charge| charge.limit().name());
    let cause = format!("the key of the limit {limit:?} cannot be read or written: {}", text.trim_end());
    StoreError::new(ASKING, cause).of_kind(kind_of_reply(text)).of_one_check()
}
