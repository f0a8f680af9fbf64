//! What the script answers: `head.lua` says in which form.

use std::{error, fmt, time::Duration, vec};

use redis::Value;

use super::{Batch, Submission};
use crate::{
    check::{Charge, Check},
    decision::{Decision, LimitStatus},
    error::StoreError,
    store::{
        clock::system_time,
        redis::job::{Job, Outcome},
    },
};

impl Batch {
    /// The outcome of every job, in the order of [`into_jobs`](Self::into_jobs).
    pub(super) fn read(&self, reply: Value) -> Result<Vec<Outcome<(Decision, bool)>>, MalformedReply> {
        let Value::Array(fields) = reply else { return Err(MalformedReply) };
        let mut fields = Fields(fields.into_iter());
        let now = fields.number()?;
        let (mut outcomes, mut statuses) = (Vec::with_capacity(self.submissions.len()), Vec::new());
        for submission in &self.submissions {
            submission.read(&mut fields, now, &mut statuses, &mut outcomes)?;
        }
        if fields.0.next().is_some() { Err(MalformedReply) } else { Ok(outcomes) }
    }
}

impl Submission {
    /// Appends the outcome of each copy. `statuses` is room to work in.
    fn read(
        &self,
        fields: &mut Fields,
        now: u64,
        statuses: &mut Vec<Status>,
        outcomes: &mut Vec<Outcome<(Decision, bool)>>,
    ) -> Result<(), MalformedReply> {
        let check = self.first.check();
        let is_settlement = matches!(self.first, Job::Settle(_));
        let counted_at = fields.counted_at()?;
        let at = system_time(counted_at.unwrap_or(now));
        let told = fields.told(self.size())?;
        let has_retries = told.is_some() && !is_settlement;
        let admitted = told.unwrap_or_else(|| Ok(self.size()));
        statuses.clear();
        for _ in check.charges() {
            statuses.push(fields.status(has_retries)?);
        }
        for copy in 0..self.size() {
            outcomes.push(match &admitted {
                // Other checks of the batch have outcomes of their own.
                Err(text) => Err(StoreError::new(self.first.doing(), OneKeyFailed::new(check, text)).of_one_check()),
                Ok(admitted) => {
                    // Those that an earlier try has counted are all told how it stands now.
                    let later = if counted_at.is_some() { 0 } else { admitted.saturating_sub(copy + 1) };
                    let mut statuses = statuses.iter();
                    let decision = Decision::new(check, at, self.id.following(copy), |charge| {
                        statuses.next().copied().unwrap_or_default().of_copy(charge, later, copy >= *admitted)
                    });
                    Ok((decision, *admitted > 0))
                }
            });
        }
        Ok(())
    }
}

/// How a charge stands after all copies of its check.
#[derive(Clone, Copy, Default)]
struct Status {
    used: u64,
    reset: u64,
    retry: u64,
    reserved: u64,
    /// The retry time if all that is reserved were given back.
    least: u64,
}

impl Status {
    /// How it stood after a copy behind which so many `later` ones were counted.
    fn of_copy(self, charge: &Charge, later: u64, is_refused: bool) -> LimitStatus {
        let is_told = is_refused || charge.is_shadow();
        let retry = (is_told && self.retry > 0).then(|| Duration::from_micros(self.retry));
        let used = self.used.saturating_sub(later.saturating_mul(charge.cost()));
        let status = LimitStatus::new(charge, used, Duration::from_micros(self.reset), retry);
        if self.reserved == 0 {
            return status;
        }
        status.with_reserved(self.reserved, Duration::from_micros(self.least))
    }
}

/// The reply, field by field.
struct Fields(vec::IntoIter<Value>);

impl Fields {
    fn number(&mut self) -> Result<u64, MalformedReply> {
        match self.0.next() {
            Some(Value::Int(number)) => u64::try_from(number).map_err(|_| MalformedReply),
            _ => Err(MalformedReply),
        }
    }

    /// When an earlier try has counted the check, if one has.
    fn counted_at(&mut self) -> Result<Option<u64>, MalformedReply> {
        let Some(Value::Array(at)) = self.0.as_slice().first() else { return Ok(None) };
        let [Value::Int(at)] = at[..] else { return Err(MalformedReply) };
        self.0.next();
        u64::try_from(at).map(Some).map_err(|_| MalformedReply)
    }

    /// How many of so many copies are admitted, or the text of an error. Mostly nothing is said: then all of them are.
    fn told(&mut self, copies: u64) -> Result<Option<Result<u64, String>>, MalformedReply> {
        let admitted = match self.0.as_slice().first() {
            Some(Value::Int(negative @ ..0)) => Ok(negative.unsigned_abs() - 1),
            Some(Value::BulkString(text)) => Err(String::from_utf8_lossy(text).into_owned()),
            _ => return Ok(None),
        };
        self.0.next();
        if admitted.as_ref().is_ok_and(|admitted| *admitted > copies) {
            Err(MalformedReply)
        } else {
            Ok(Some(admitted))
        }
    }

    fn status(&mut self, has_retry: bool) -> Result<Status, MalformedReply> {
        let mut status = Status { used: self.number()?, ..Status::default() };
        match self.0.next() {
            Some(Value::Int(negative @ ..0)) => {
                status.reset = negative.unsigned_abs() - 1;
                status.reserved = self.number()?;
            }
            Some(Value::Int(reset)) => status.reset = reset.unsigned_abs(),
            _ => return Err(MalformedReply),
        }
        if has_retry {
            status.retry = self.number()?;
            status.least = if status.reserved > 0 { self.number()? } else { status.retry };
        }
        Ok(status)
    }
}

/// A key of a check holds something that is not ours, or cannot be written.
#[derive(Debug)]
struct OneKeyFailed {
    limit: String,
    text: String,
}

impl OneKeyFailed {
    /// Of a text that begins with the place of the charge, counted from 1.
    fn new(check: &Check, text: &str) -> Self {
        let (place, text) = text.split_once(' ').unwrap_or(("", text));
        let place = place.parse().unwrap_or(1_usize).saturating_sub(1);
        let limit = check.charges().nth(place).map_or("an unknown limit", |charge| charge.limit().name());
        Self { limit: limit.to_owned(), text: text.trim_end().to_owned() }
    }
}

impl fmt::Display for OneKeyFailed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the key of the limit {:?} cannot be read or written: {}", self.limit, self.text)
    }
}

impl error::Error for OneKeyFailed {}

/// The script's reply is not what the script sends: something stands between us and Redis.
#[derive(Debug)]
pub(super) struct MalformedReply;

impl fmt::Display for MalformedReply {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the reply is not the script's")
    }
}

impl error::Error for MalformedReply {}
