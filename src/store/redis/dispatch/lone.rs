//! The fast path for a lone check, while few others are in flight. Such a check takes one unit
//! under an exact log, or has any cost under an algorithm that adds units up. If a process is not
//! busy, most requests make such a check. Its caller sends it, without a job, batch or task. The
//! general way takes over if the server does not know the script, if the reply is not the short
//! one, or after an error.

use std::{
    sync::{Arc, Weak},
    time::{Duration, Instant},
};

use redis::{Cmd, RedisResult, Value};
use tokio::runtime::Handle;

use super::{
    batch::Batch,
    dispatcher::{Common, Dispatcher, is_unknown, known, of_double},
    job::{Job, sum},
    queue::Permit,
    send::answer_alone,
};
use crate::{
    check::{AdmissionId, Charge, Check},
    clock::system_time,
    decision::{Decision, LimitStatus},
    error::StoreError,
    metrics,
    store::redis::{connect::Connection, script::SHA1},
};

/// The permit to send a lone check, and the means to send it.
pub(crate) struct Lone {
    common: Arc<Common>,
    dispatcher: Weak<Dispatcher>,
    slot: Option<u16>,
    permit: Permit,
    connection: Arc<Connection>,
    /// The figures for a check whose units are added up; `None` for an exact log's unit.
    sum: Option<[f64; 5]>,
}

impl Lone {
    /// Returns `None` if the check has to go the general way. The caller waits for at most
    /// `deadline`.
    pub(crate) fn new(common: &Arc<Common>, check: &Check, deadline: Duration) -> Option<Self> {
        let charge = check.only_charge()?;
        let sum = if is_single(charge) {
            None
        } else {
            Some(sum(check)?)
        };
        // If the caller gives up within the reply timeout anyway, no other timer is needed.
        let is_brief = deadline <= common.server.settings.reply_timeout;
        if !is_brief || check.id().is_some() || common.clock.is_some() {
            return None;
        }
        let runtime = Handle::try_current().ok()?;
        let dispatcher = known(&common.dispatchers, runtime.id())?;
        let slot = dispatcher.slot_of(charge.key());
        let connection = dispatcher.pool.share()?;
        // A check without an id must not be sent twice. So the general way tests an idle connection
        // first.
        if sum.is_some() && connection.is_idle(slot.unwrap_or_default(), Instant::now()) {
            return None;
        }
        let permit = dispatcher.lone_permit(slot)?;
        Some(Self {
            common: Arc::clone(common),
            dispatcher: Arc::downgrade(&dispatcher),
            slot,
            permit,
            connection,
            sum,
        })
    }

    /// Sends the check, and waits for the decision. The caller gives up after `deadline`.
    pub(crate) async fn decide(
        self,
        check: Arc<Check>,
        deadline: Duration,
    ) -> Result<Decision, StoreError> {
        let Self {
            common,
            dispatcher,
            slot,
            permit,
            connection,
            sum,
        } = self;
        metrics::batch(1, || 0);
        let id = AdmissionId::fresh();
        let command = common.short(check.first(), id, sum);
        let sent = Instant::now();
        let generation = common.local_state.refusals.generation();
        let reply = connection.send_briefly(&command, sent).await;
        permit.end();
        // The caller may have polled late, so `deadline` bounds which replies count as samples.
        common.heard(slot, sent, deadline, &reply);
        if let Some([now, used, reset]) = short_reply(&reply) {
            connection.note_reply(slot.unwrap_or_default(), sent);
            return Ok(Decision::new(&check, system_time(now), id, |charge| {
                LimitStatus::of_micros(charge, used, 0, reset, None)
            }));
        }
        let job = Job::decide_as(id, check, deadline);
        let mut batch = Batch::sent(job, slot, &common, (sent, generation), &reply);
        // Boxed, since few checks need this future.
        let answer = Box::pin(async move {
            let reply = if is_unknown(&reply) {
                batch.eval(&connection, false).await
            } else {
                reply
            };
            answer_alone(batch, reply, dispatcher).await
        });
        Ok(answer.await?.0)
    }
}

impl Common {
    /// The short form of a check's script call: see `head.lua`.
    fn short(&self, charge: &Charge, id: AdmissionId, sum: Option<[f64; 5]>) -> Cmd {
        let limit = charge.limit();
        let key = self.keys.of(limit, charge.key());
        let (single, sum) = (
            [
                id.0.to_be_bytes(),
                (limit.units() as f64).to_le_bytes(),
                (limit.window_micros() as f64).to_le_bytes(),
            ],
            sum.map(|figures| figures.map(f64::to_le_bytes)),
        );
        let short = sum
            .as_ref()
            .map_or(single.as_flattened(), |sum| sum.as_flattened());
        let size = "EVALSHA".len() + SHA1.len() + 1 + key.len() + short.len();
        let mut command = Cmd::with_capacity(5, size);
        command.arg("EVALSHA").arg(&*SHA1);
        command.arg(b"1").arg(key).arg(short);
        command
    }
}

/// True if a check with this charge alone has the short form for a single unit.
fn is_single(charge: &Charge) -> bool {
    charge.cost() == 1 && !charge.limit().is_concurrent() && charge.is_plain()
}

/// Reads the numbers in the reply to a short-form check that was admitted.
fn short_reply(reply: &RedisResult<Value>) -> Option<[u64; 3]> {
    let Ok(Value::BulkString(bytes)) = reply else {
        return None;
    };
    let (numbers, []) = bytes.as_chunks() else {
        return None;
    };
    let numbers: &[_; 3] = numbers.try_into().ok()?;
    let [now, used, reset] = numbers.map(of_double);
    Some([now?, used?, reset?])
}
