//! A batch of checks on the wire: the keys and arguments of `sliding_log.lua`, and its reply.

use std::{error, fmt, time::Duration};

use redis::{Cmd, Value};

use super::keys::redis_key;
use crate::{
    admission::AdmissionId,
    check::Check,
    decision::{Decision, LimitStatus},
    error::StoreError,
    store::clock::system_time,
};

/// A check on its way, with the identity it will be counted under.
pub(super) struct Submission {
    check: Check,
    id: AdmissionId,
}

impl Submission {
    pub(super) fn new(check: Check) -> Self {
        let id = check.id().unwrap_or_else(AdmissionId::fresh);
        Self { check, id }
    }
}

/// Appends the number of keys, the keys, and the arguments. `now` is empty for the server's clock; `again` says that
/// these very submissions may have been counted by an earlier try.
pub(super) fn write(command: &mut Cmd, prefix: &str, batch: &[Submission], now: &str, again: bool) {
    let charges = || batch.iter().flat_map(|submission| submission.check.charges());
    command.arg(charges().count());
    for charge in charges() {
        command.arg(redis_key(prefix, charge.limit(), charge.key()));
    }
    command.arg(now);
    for Submission { check, id } in batch {
        let given = again || check.id().is_some();
        command.arg(check.charges().count()).arg(&id.to_bytes()).arg(u8::from(given));
        for charge in check.charges() {
            command.arg(charge.limit().units()).arg(charge.cost()).arg(charge.limit().window_micros());
        }
    }
}

/// Reads one outcome a check out of the script's reply.
pub(super) fn read(reply: Value, batch: &[Submission]) -> Result<Vec<Result<Decision, StoreError>>, MalformedReply> {
    let Value::Array(fields) = reply else { return Err(MalformedReply) };
    let mut fields = fields.into_iter();
    let now = micros(fields.next().as_ref())?;
    let outcomes = batch.iter().map(|submission| read_one(&mut fields, now, submission)).collect::<Result<_, _>>()?;
    if fields.next().is_some() { Err(MalformedReply) } else { Ok(outcomes) }
}

fn read_one(
    fields: &mut impl Iterator<Item = Value>,
    now: u64,
    submission: &Submission,
) -> Result<Result<Decision, StoreError>, MalformedReply> {
    let mut failure = None;
    let mut malformed = false;
    let decision = Decision::new(&submission.check, system_time(now), submission.id, |charge| {
        let (used, reset, retry) = (fields.next(), micros(fields.next().as_ref()), micros(fields.next().as_ref()));
        let used = match used {
            Some(Value::BulkString(text)) => {
                failure = Some(String::from_utf8_lossy(&text).into_owned());
                Ok(0)
            }
            used => micros(used.as_ref()),
        };
        malformed |= used.is_err() || reset.is_err() || retry.is_err();
        let duration = |micros: Result<u64, _>| Duration::from_micros(micros.unwrap_or_default());
        let retry = Some(duration(retry)).filter(|retry| !retry.is_zero());
        LimitStatus::new(charge, used.unwrap_or_default(), duration(reset), retry)
    });
    match failure {
        _ if malformed => Err(MalformedReply),
        Some(failure) => Ok(Err(StoreError::new("deciding a check", failure))),
        None => Ok(Ok(decision)),
    }
}

fn micros(field: Option<&Value>) -> Result<u64, MalformedReply> {
    match field {
        Some(Value::Int(number)) => u64::try_from(*number).map_err(|_| MalformedReply),
        _ => Err(MalformedReply),
    }
}

/// The script's reply is not what the script sends: something stands between us and Redis.
#[derive(Debug)]
pub(super) struct MalformedReply;

impl fmt::Display for MalformedReply {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the reply is not the script's")
    }
}

impl error::Error for MalformedReply {}
