//! The script's reply: `head.lua` says in which form.

use std::{error, fmt, time::Duration, vec};

use redis::Value;

use super::queue::Job;
use crate::{
    check::{Charge, Check},
    decision::{Decision, LimitStatus},
    error::StoreError,
    store::clock::system_time,
};

/// The reply, read job by job.
pub(super) struct Reply {
    fields: vec::IntoIter<Value>,
    /// The script's time, in microseconds.
    now: u64,
    /// The statuses of the present job. Kept for the next one, so that it needs no memory of its own.
    statuses: Vec<Status>,
}

impl Reply {
    pub(super) fn new(reply: Value) -> Result<Self, MalformedReply> {
        let Value::Array(fields) = reply else { return Err(MalformedReply) };
        let mut fields = fields.into_iter();
        let now = number(&mut fields)?;
        Ok(Self { fields, now, statuses: Vec::new() })
    }

    /// Appends the results of a job and its copies: the decision, and whether a settlement was applied.
    pub(super) fn read(
        &mut self,
        job: &Job,
        results: &mut Vec<Result<(Decision, bool), StoreError>>,
    ) -> Result<(), MalformedReply> {
        let (check, count) = (job.check(), job.count());
        let counted_at = self.counted_at()?;
        let at = system_time(counted_at.unwrap_or(self.now));
        let admitted = self.admitted(count)?;
        let has_retries = admitted.is_some() && matches!(job, Job::Decide { .. });
        let admitted = admitted.unwrap_or(Ok(count));
        self.statuses.clear();
        for _ in check.charges() {
            self.statuses.push(Status::read(&mut self.fields, has_retries)?);
        }
        for copy in 0..count {
            results.push(match &admitted {
                // The other jobs of the batch have results of their own.
                Err(text) => Err(StoreError::new(job.doing(), KeyError::new(check, text)).of_one_check()),
                Ok(admitted) => {
                    // If an earlier try has counted the copies, each gets the present status.
                    let later = if counted_at.is_some() { 0 } else { admitted.saturating_sub(copy + 1) };
                    let mut statuses = self.statuses.iter();
                    let decision = Decision::new(check, at, job.id().following(copy), |charge| {
                        statuses.next().copied().unwrap_or_default().of_copy(charge, later, copy >= *admitted)
                    });
                    Ok((decision, *admitted > 0))
                }
            });
        }
        Ok(())
    }

    /// Checks that nothing is left.
    pub(super) fn end(mut self) -> Result<(), MalformedReply> {
        if self.fields.next().is_some() { Err(MalformedReply) } else { Ok(()) }
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
        if admitted.as_ref().is_ok_and(|admitted| *admitted > copies) {
            Err(MalformedReply)
        } else {
            Ok(Some(admitted))
        }
    }
}

/// The status of a charge after all copies of its check. The times are microseconds.
#[derive(Clone, Copy, Default)]
struct Status {
    used: u64,
    reset: u64,
    retry: u64,
    reserved: u64,
    /// The retry time if all reserved units were given back.
    least: u64,
}

impl Status {
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
        if self.reserved == 0 {
            return status;
        }
        status.with_reserved(self.reserved, Duration::from_micros(self.least))
    }
}

fn number(fields: &mut vec::IntoIter<Value>) -> Result<u64, MalformedReply> {
    match fields.next() {
        Some(Value::Int(number)) => u64::try_from(number).map_err(|_| MalformedReply),
        _ => Err(MalformedReply),
    }
}

/// A key of a check has a value of another application, or cannot be written.
#[derive(Debug)]
struct KeyError {
    limit: String,
    text: String,
}

impl KeyError {
    /// `text` begins with the number of the charge, counted from 1.
    fn new(check: &Check, text: &str) -> Self {
        let (number, text) = text.split_once(' ').unwrap_or(("", text));
        let index = number.parse().unwrap_or(1_usize).saturating_sub(1);
        let limit = check.charges().nth(index).map_or("an unknown limit", |charge| charge.limit().name());
        Self { limit: limit.to_owned(), text: text.trim_end().to_owned() }
    }
}

impl fmt::Display for KeyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the key of the limit {:?} cannot be read or written: {}", self.limit, self.text)
    }
}

impl error::Error for KeyError {}

/// The reply is not of the script: probably from a proxy in front of Redis.
#[derive(Debug)]
pub(super) struct MalformedReply;

impl fmt::Display for MalformedReply {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the reply is not the script's")
    }
}

impl error::Error for MalformedReply {}
