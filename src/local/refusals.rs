//! The refusal cache. [`Limiter::refusal_cache`](crate::Limiter::refusal_cache) has the rules.

use std::{
    hash::BuildHasherDefault,
    iter,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, SystemTime},
};

use quick_cache::{UnitWeighter, sync::Cache};

use crate::{
    check::{AdmissionId, Charge, Check},
    clock::{Clock, micros},
    decision::{Decision, LimitStatus},
    key::{Digester, Prehashed},
    limit::Limit,
};

/// A store's reset time may be too long by this many microseconds.
const RESET_SLACK: u64 = 1_000;

/// The most limits and keys that are remembered as refusing.
const CAPACITY: usize = 10_000;

/// The number of slots that all limits and keys share. A slot has the last generation in which
/// units were given back. Each limit and key has two slots. A refusal is outdated once both slots
/// of its limit and key have a newer generation than the refusal. A settlement writes a new
/// generation into the two slots of its limit and key, and hardly any other key has the same two
/// slots. So a settlement outdates almost no refusals of other keys: 260 settlements in a second
/// outdate one in a thousand of these refusals.
const GENERATIONS: usize = 16_384;

/// While a check asks the store whether a refusal still stands, other checks are refused. After
/// this time without a reply, another check asks.
const LONGEST_ANSWER: Duration = Duration::from_millis(100);

/// Tells which refusals are outdated because units were given back. Also has the clock by which
/// refusals end.
pub(super) struct Generations {
    pub(super) clock: Clock,
    pub(super) digester: Digester,
    /// How often units were given back: the number of the last generation.
    last: AtomicU64,
    /// The last generation in which units were given back, by the digest of a limit and key.
    of_keys: Box<[AtomicU64]>,
}

/// The refusals, by the digest of a limit and key and the number of units.
type Table = Cache<u64, Arc<Refusal>, UnitWeighter, BuildHasherDefault<Prehashed>>;

/// The refusals that limiters remember. Clones share them.
#[derive(Clone)]
pub(crate) struct Refusals {
    max_age: Duration,
    /// Whether each check asks the store. If so, a remembered refusal is used only when the store
    /// fails.
    pub(crate) is_asking: bool,
    pub(super) generations: Arc<Generations>,
    /// The first refusal makes the table.
    table: Arc<OnceLock<Table>>,
}

/// The status of a limit and key at the time when the store refused a check.
struct Refusal {
    status: LimitStatus,
    cost: u64,
    /// The newest of the [`Generations`] at the time when the store was asked.
    generation: u64,
    /// The refusal may be used from this time on.
    asked_at: u64,
    /// Until this time, the status refuses each check whose cost is above the units that are left.
    until: u64,
    /// From this time on, the next check asks the store whether the refusal still stands.
    asks_at: AtomicU64,
    /// When the reply arrived. The times of the status count down from then, so that no client is
    /// told to come back too early.
    replied_at: u64,
    at: SystemTime,
    id: AdmissionId,
}

/// A refusal that the cache remembers for the limit and key of a charge, and whether it applies to
/// this charge.
struct Known {
    refusal: Arc<Refusal>,
    refuses: bool,
    /// Whether it is sure that no units were given back since the refusal.
    is_sure: bool,
}

/// A check as the cache looks it up.
pub(crate) struct Lookup {
    asked_at: u64,
    generation: u64,
    /// Whether the check is to ask the store although its refusal is known. If the store fails, the
    /// refusal stands.
    pub(crate) asks: bool,
    /// Whether other checks are refused until this check is answered, at most for
    /// [`LONGEST_ANSWER`].
    pub(crate) has_turn: bool,
    first: Account,
    others: Box<[Account]>,
}

/// A charge as the cache knows it, by the digest of its limit and key.
struct Account {
    digest: u64,
    cost: u64,
}

impl Generations {
    pub(super) fn new(clock: Clock) -> Self {
        let of_keys = iter::repeat_with(AtomicU64::default)
            .take(GENERATIONS)
            .collect();
        Self {
            clock,
            digester: Digester::default(),
            last: AtomicU64::new(0),
            of_keys,
        }
    }

    /// Outdates all refusals of a limit and key for which the store was asked before this call.
    pub(super) fn advance(&self, digest: u64) {
        let generation = self.last.fetch_add(1, Ordering::SeqCst) + 1;
        self.of(digest)
            .for_each(|last| _ = last.fetch_max(generation, Ordering::SeqCst));
    }

    fn of(&self, digest: u64) -> impl Iterator<Item = &AtomicU64> {
        [digest, digest >> 32]
            .into_iter()
            .map(|part| &self.of_keys[part as usize % GENERATIONS])
    }
}

impl Refusals {
    pub(super) fn new(max_age: Duration, generations: Arc<Generations>) -> Self {
        Self {
            max_age,
            is_asking: max_age.is_zero(),
            generations,
            table: Arc::default(),
        }
    }

    /// The check as the cache looks it up; `None` if the cache cannot remember a refusal of the
    /// check.
    pub(crate) fn look_up(&self, check: &Check) -> Option<Lookup> {
        if check.id().is_some() || !check.can_be_refused() {
            return None;
        }
        let digester = &self.generations.digester;
        let account = |charge: &Charge| Account {
            digest: charge.digest(digester),
            cost: charge.cost(),
        };
        let (first, others) = check.map_charges(account);
        let generation = self.generations.last.load(Ordering::SeqCst);
        let asked_at = self.generations.clock.now();
        Some(Lookup {
            asked_at,
            generation,
            asks: false,
            has_turn: false,
            first,
            others: others.into(),
        })
    }

    /// The refusal of a check, if the cache remembers that one of its limits refuses. Statuses with
    /// reserved units are used for at most `reserved_for`. If `may_ask` is set, the check may be
    /// chosen to [ask](Lookup::asks) the store, while other checks are refused.
    pub(crate) fn recall(
        &self,
        check: &Check,
        lookup: &mut Lookup,
        reserved_for: Duration,
        may_ask: bool,
    ) -> Option<Decision> {
        let table = self.table.get()?;
        let now = lookup.asked_at;
        let find = |charge: &Charge, digest: u64| {
            let refusal = table.get(&table_key(digest, charge.limit()))?;
            // Since the refusal, callers can only have spent further units. So a cost above the
            // units that were left then does not fit now, either.
            let refuses = charge.can_refuse() && charge.cost() > refusal.status.remaining();
            let is_sure = self.is_sure(digest, refusal.generation);
            let may_stand = is_sure || refuses && refusal.status.reserved == 0;
            // A status that is younger than `max_age` may be shown in any refusal, even if its own
            // limit would admit the check.
            let is_shown = refuses || now < refusal.asked_at.saturating_add(micros(self.max_age));
            let stands = may_stand && is_shown && refusal.stands_for(charge, now, reserved_for);
            stands.then_some(Known {
                refusal,
                refuses,
                is_sure,
            })
        };
        let mut charges = check.charges();
        let first = find(charges.next()?, lookup.first.digest);
        let others: Vec<_> = charges
            .zip(&lookup.others)
            .map(|(charge, account)| find(charge, account.digest))
            .collect();
        let known = || iter::once(&first).chain(&others).map(Option::as_ref);

        // If units may have been given back to all limits that refuse, each check asks the store.
        // If the store fails, the refusal stands.
        let is_unsure = !known()
            .flatten()
            .any(|known| known.is_sure && known.refuses);
        let counts = |known: &&Known| known.is_sure || is_unsure;
        let refusing = || {
            known()
                .flatten()
                .filter(counts)
                .filter(|known| known.refuses)
        };
        let refused = &refusing().next()?.refusal;
        let is_due = |known: &Known| known.refusal.asks_at.load(Ordering::Relaxed) <= now;
        let is_asked_for = || !may_ask || refused.is_asked_for(now, self.max_age);
        let asks_each_time = self.is_asking || is_unsure;
        lookup.has_turn = !asks_each_time && refusing().all(is_due) && is_asked_for();
        lookup.asks = asks_each_time || lookup.has_turn;
        let mut found = known();
        Some(Decision::new(
            check,
            refused.at + refused.age(now),
            refused.id,
            |charge| {
                let known = found.next().flatten().filter(counts);
                let mut status = known.map_or_else(
                    || LimitStatus::estimate(charge, false),
                    |known| known.refusal.status(charge, now),
                );
                status.set_retry_reserved_after(reserved_for);
                status
            },
        ))
    }

    /// Remembers the store's refusal of a check that was looked up before.
    pub(crate) fn learn(&self, lookup: &Lookup, refusal: &Decision) {
        let replied_at = self.generations.clock.now();
        let table = self.table.get_or_init(|| {
            Cache::with(
                CAPACITY,
                CAPACITY as u64,
                UnitWeighter,
                Default::default(),
                Default::default(),
            )
        });
        let asked_at = lookup.asked_at;
        for (account, status) in lookup
            .accounts()
            .zip(refusal.statuses())
            .filter(|(_, status)| !status.is_estimate)
        {
            // Without used units there is no reset time.
            let reset = (status.used > 0).then_some(status.leaves_after);
            let retry = status.waits.map(|(_, most)| most);
            let after = |time| asked_at.saturating_add(micros(time));
            // While this check was on its way, the store may have decided another check later, such
            // as a check that has begun a ban. The refusal of that later check stays. Of two checks
            // in one batch, the later one found at least as many units used.
            let is_newer = |known: Arc<Refusal>| {
                known.overtakes(lookup, replied_at)
                    && (known.at, known.status.used) > (refusal.at(), status.used)
                    && self.is_sure(account.digest, known.generation)
            };
            let table_key = table_key(account.digest, &status.limit);
            if table.peek(&table_key).is_some_and(is_newer) {
                continue;
            }
            let remembered = Refusal {
                status: status.clone(),
                cost: account.cost,
                generation: lookup.generation,
                asked_at,
                until: after(reset.into_iter().chain(retry).min().unwrap_or_default()),
                asks_at: AtomicU64::new(after(self.max_age)),
                replied_at,
                at: refusal.at(),
                id: refusal.id(),
            };
            table.insert(table_key, Arc::new(remembered));
        }
    }

    /// Whether it is sure that no units of a limit and key were given back since this generation.
    fn is_sure(&self, digest: u64, generation: u64) -> bool {
        self.generations
            .of(digest)
            .any(|last| last.load(Ordering::SeqCst) <= generation)
    }

    /// Forgets the refusals that an admission by the store contradicts.
    pub(crate) fn forget(&self, lookup: &Lookup, admission: &Decision) {
        let Some(table) = self.table.get() else {
            return;
        };
        let now = self.generations.clock.now();
        for (account, status) in lookup.accounts().zip(admission.statuses()) {
            let is_older =
                |known: &Arc<Refusal>| !known.overtakes(lookup, now) || known.at <= admission.at();
            table.remove_if(&table_key(account.digest, &status.limit), is_older);
        }
    }
}

impl Lookup {
    fn accounts(&self) -> impl Iterator<Item = &Account> {
        iter::once(&self.first).chain(&self.others)
    }
}

/// The key of a limit and key in the table. Limits that share units but differ in the number of
/// units have different keys there.
fn table_key(digest: u64, limit: &Limit) -> u64 {
    digest.wrapping_add(limit.units().wrapping_mul(0x9e37_79b9_7f4a_7c15))
}

impl Refusal {
    /// Whether the refusal still stands for a charge at the time `now`. A time before `asked_at`
    /// means that the clock has stepped back. Then the refusal does not stand.
    fn stands_for(&self, charge: &Charge, now: u64, reserved_for: Duration) -> bool {
        // A retry time is never too long. So until it ends, each cost that is at least the refused
        // cost is refused. A reset time may be too long by [`RESET_SLACK`].
        let slack = if self.has_refused(charge) {
            0
        } else {
            RESET_SLACK
        };
        let is_settled_by = || {
            let reserved_for = micros(charge.limit().retry_reserved_after(reserved_for));
            self.status.reserved > 0 && now >= self.asked_at.saturating_add(reserved_for)
        };
        (self.asked_at..self.until.saturating_sub(slack)).contains(&now) && !is_settled_by()
    }

    /// Whether the store has told this refusal while the check of the look-up was on its way.
    fn overtakes(&self, lookup: &Lookup, now: u64) -> bool {
        (lookup.asked_at + 1..=now).contains(&self.replied_at)
    }

    /// Whether this check now asks the store, on behalf of all other checks. If so, the other
    /// checks are refused for at most [`LONGEST_ANSWER`].
    fn is_asked_for(&self, now: u64, max_age: Duration) -> bool {
        let asks_at = self.asks_at.load(Ordering::Relaxed);
        let next = now.saturating_add(micros(LONGEST_ANSWER.min(max_age)));
        asks_at <= now
            && self
                .asks_at
                .compare_exchange(asks_at, next, Ordering::Relaxed, Ordering::Relaxed)
                .is_ok()
    }

    /// Whether the limit has refused this cost or a lower one.
    fn has_refused(&self, charge: &Charge) -> bool {
        self.status.waits.is_some() && self.cost <= charge.cost()
    }

    fn age(&self, now: u64) -> Duration {
        Duration::from_micros(now.saturating_sub(self.replied_at))
    }

    fn status(&self, charge: &Charge, now: u64) -> LimitStatus {
        let age = self.age(now);
        let left = |time: Duration| time.saturating_sub(age);
        let mut status = self.status.for_charge(charge);
        status.leaves_after = left(status.leaves_after);
        let status = status.refused_until_reset(charge);
        match self.status.waits.filter(|_| self.has_refused(charge)) {
            Some((least, most)) => status.not_before((left(least), left(most))),
            None => status,
        }
    }
}
