//! The dots of the page: the admissions and refusals of the last windows.

use std::{
    collections::{HashMap, VecDeque},
    net::{IpAddr, Ipv4Addr},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use tower_sliding_window::{
    Algorithm, ApiKey, Check, Decision, Key, Limit, PeerIp, decision::LimitStatus,
};

/// The clients of the page: 127.0.0.1 to 127.0.0.9, with the API keys `client-1` to `client-9`.
pub(super) const CLIENTS: u8 = 9;

/// The most dots that are kept, and the most marks of refusals.
const MOST_DOTS: usize = 4_000;

/// Dots stay for a minute longer than their window, so that a page can show the most units in any
/// window of late.
const EXTRA_MICROS: u64 = 60_000_000;

/// Marks of refusals that are closer than this are one.
const MARK_MICROS: u64 = 100_000;

/// A limit as the page shows it.
#[derive(Clone)]
pub(super) struct Lane {
    pub(super) limit: Limit,
    /// The path that spends from it, or with a `/` at its end the start of such paths. `None` for a
    /// limit that is shown only beside another one.
    pub(super) path: Option<&'static str>,
    pub(super) by_api_key: bool,
}

impl Lane {
    pub(super) fn is_spent_by(&self, path: &str) -> bool {
        self.path
            .is_some_and(|own| path == own || own.ends_with('/') && path.starts_with(own))
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Admitted,
    /// Admitted by another server on the same Redis.
    Elsewhere,
    /// Let through without a decision.
    Uncounted,
    /// Admitted by this process under a share of the limit.
    Local,
    Refused,
    /// Rejected with a 503.
    Unavailable,
}

#[derive(Clone, Copy)]
pub(super) struct Dot {
    number: u64,
    client: u8,
    pub(super) lane: usize,
    /// Microseconds since the Unix epoch, by the store's clock.
    pub(super) at: u64,
    pub(super) units: u64,
    pub(super) kind: Kind,
}

/// Clones are one history.
#[derive(Clone)]
pub(super) struct History(Arc<Shared>);

struct Shared {
    lanes: Vec<Lane>,
    clients: HashMap<Key, u8>,
    dots: Mutex<Dots>,
}

#[derive(Default)]
struct Dots {
    last_number: u64,
    dots: VecDeque<Dot>,
    marks: VecDeque<Dot>,
    /// Rises when dots have gone before their time, for example since Redis was flushed.
    epoch: u64,
    /// The store's clock minus that of the process.
    clock_offset: i64,
    /// Checks that cost units: those that have begun, and those that have also ended.
    begun: u64,
    ended: u64,
}

/// Until it is dropped, the figures of the store may be ahead of the history.
pub(super) struct Deciding(Option<History>);

impl Drop for Deciding {
    fn drop(&mut self) {
        if let Some(history) = &self.0 {
            history.dots().ended += 1;
        }
    }
}

impl History {
    pub(super) fn new(lanes: Vec<Lane>, api_key: &ApiKey) -> Self {
        let mut clients = HashMap::new();
        for client in 1..=CLIENTS {
            clients.insert(PeerIp::new().key(address(client)), client);
            clients.insert(api_key.key(&format!("client-{client}")), client);
        }
        Self(Arc::new(Shared {
            lanes,
            clients,
            dots: Mutex::default(),
        }))
    }

    pub(super) fn lanes(&self) -> &[Lane] {
        &self.0.lanes
    }

    pub(super) fn client(&self, key: &Key) -> Option<u8> {
        self.0.clients.get(key).copied()
    }

    pub(super) fn is_of_requests(&self, limit: &Limit) -> bool {
        self.lane_of(limit)
            .is_some_and(|lane| self.0.lanes[lane].path.is_some())
    }

    pub(super) fn deciding(&self, check: &Check) -> Deciding {
        let costs = check.charges().any(|charge| charge.cost() > 0);
        if costs {
            self.dots().begun += 1;
        }
        Deciding(costs.then(|| self.clone()))
    }

    /// Adds the dots of an admitted check.
    pub(super) fn decided(&self, check: &Check, decision: &Decision) {
        let at = micros(decision.at());
        let mut dots = self.dots();
        dots.clock_offset = at.cast_signed() - micros(SystemTime::now()).cast_signed();
        for charge in check
            .charges()
            .filter(|charge| charge.cost() > 0 && decision.is_allowed())
        {
            if let (Some(lane), Some(client)) =
                (self.lane_of(charge.limit()), self.client(charge.key()))
            {
                dots.add(Dot {
                    number: 0,
                    client,
                    lane,
                    at,
                    units: charge.cost(),
                    kind: Kind::Admitted,
                });
            }
        }
    }

    /// Adds a mark to the lanes of the limits that have refused.
    pub(super) fn refused(&self, client: u8, decision: &Decision) {
        let refused = decision
            .statuses()
            .filter(|status| status.retry_after().is_some());
        self.mark(
            client,
            refused.filter_map(|status| self.lane_of(&status.limit)),
            Kind::Refused,
        );
    }

    /// Adds a mark to these lanes, now.
    pub(super) fn mark(&self, client: u8, lanes: impl Iterator<Item = usize>, kind: Kind) {
        let mut dots = self.dots();
        let at = dots.now();
        lanes.for_each(|lane| {
            dots.mark(Dot {
                number: 0,
                client,
                lane,
                at,
                units: 1,
                kind,
            });
        });
    }

    /// The number of checks so far, if none is being decided.
    pub(super) fn quiet(&self) -> Option<u64> {
        let dots = self.dots();
        (dots.begun == dots.ended).then_some(dots.begun)
    }

    /// Compares the dots of a client with the figures of the store. Units that are missing here
    /// were admitted elsewhere. `quiet` is what [`quiet`](Self::quiet) returned before the store
    /// was asked.
    pub(super) fn compare(&self, client: u8, figures: &Decision, quiet: Option<u64>) {
        let at = micros(figures.at());
        let mut dots = self.dots();
        if quiet.is_some_and(|begun| (dots.begun, dots.ended) == (begun, begun)) {
            for (lane, status) in figures.statuses().enumerate() {
                dots.compare(client, lane, status, at);
            }
        }
        dots.forget(&self.0.lanes);
    }

    /// The time of the store, the epoch, the last number, and the dots after number `after`. All
    /// dots if the epoch is another one.
    pub(super) fn since(
        &self,
        client: u8,
        after: Option<(u64, u64)>,
    ) -> (u64, (u64, u64), Vec<Dot>) {
        let dots = self.dots();
        let after = after
            .filter(|(epoch, _)| *epoch == dots.epoch)
            .map_or(0, |(_, number)| number);
        let new = dots
            .dots
            .iter()
            .chain(&dots.marks)
            .filter(|dot| dot.number > after && dot.client == client);
        (
            dots.now(),
            (dots.epoch, dots.last_number),
            new.copied().collect(),
        )
    }

    fn lane_of(&self, limit: &Limit) -> Option<usize> {
        self.0
            .lanes
            .iter()
            .position(|lane| lane.limit.name() == limit.name())
    }

    fn dots(&self) -> MutexGuard<'_, Dots> {
        self.0.dots.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Dots {
    fn now(&self) -> u64 {
        micros(SystemTime::now()).saturating_add_signed(self.clock_offset)
    }

    fn add(&mut self, dot: Dot) {
        self.last_number += 1;
        self.dots.push_back(Dot {
            number: self.last_number,
            ..dot
        });
        if self.dots.len() > MOST_DOTS {
            self.dots.pop_front();
        }
    }

    fn mark(&mut self, mark: Dot) {
        let same = |other: &&mut Dot| {
            (other.lane, other.client) == (mark.lane, mark.client) && other.kind == mark.kind
        };
        if matches!(mark.kind, Kind::Refused | Kind::Unavailable)
            && let Some(last) = self.marks.iter_mut().rev().take(16).find(same)
            && mark.at.abs_diff(last.at) < MARK_MICROS
        {
            return;
        }
        self.last_number += 1;
        self.marks.push_back(Dot {
            number: self.last_number,
            ..mark
        });
        if self.marks.len() > MOST_DOTS {
            self.marks.pop_front();
        }
    }

    fn compare(&mut self, client: u8, lane: usize, status: &LimitStatus, at: u64) {
        let window = micros_of(status.limit.window());
        let begins = match status.limit.algorithm() {
            algorithm if algorithm == Algorithm::SLIDING_LOG => at.saturating_sub(window) + 1,
            algorithm if algorithm == Algorithm::FIXED_WINDOW => at - at % window,
            // For example since Redis was flushed.
            _ if status.used == 0 => 0,
            // The figure of a counter is an estimate.
            _ => return,
        };
        // The oldest dots of a larger limit may have been dropped.
        if status.limit.units() > 1_000 {
            return;
        }
        let counts = |dot: &Dot| (dot.client, dot.lane) == (client, lane) && dot.at >= begins;
        let shown: u64 = self
            .dots
            .iter()
            .filter(|dot| counts(dot))
            .map(|dot| dot.units)
            .sum();
        for _ in shown..status.used {
            self.add(Dot {
                number: 0,
                client,
                lane,
                at,
                units: 1,
                kind: Kind::Elsewhere,
            });
        }
        for _ in status.used..shown {
            let elsewhere = self
                .dots
                .iter()
                .position(|dot| counts(dot) && dot.kind == Kind::Elsewhere);
            if let Some(place) = elsewhere.or_else(|| self.dots.iter().position(counts)) {
                self.dots.remove(place);
                self.epoch += 1;
            }
        }
        // The reset time shows exactly when the oldest dot was admitted.
        let is_log = status.limit.algorithm() == Algorithm::SLIDING_LOG;
        let oldest = self
            .dots
            .iter_mut()
            .filter(|dot| counts(dot))
            .min_by_key(|dot| dot.at);
        if let Some(oldest) = oldest.filter(|dot| is_log && dot.kind == Kind::Elsewhere) {
            let admitted = (at + micros_of(status.reset_after())).saturating_sub(window);
            // Redis reports the reset time a millisecond late at most.
            if admitted.abs_diff(oldest.at) > 2_000 {
                oldest.at = admitted;
                self.epoch += 1;
            }
        }
    }

    fn forget(&mut self, lanes: &[Lane]) {
        let now = self.now();
        let is_recent = |dot: &Dot| {
            let window = lanes
                .get(dot.lane)
                .map_or(0, |lane| micros_of(lane.limit.window()));
            dot.at + window + EXTRA_MICROS > now
        };
        self.dots.retain(is_recent);
        self.marks.retain(is_recent);
    }
}

/// The address of a client.
pub(super) fn address(client: u8) -> IpAddr {
    Ipv4Addr::new(127, 0, 0, client).into()
}

pub(super) fn micros(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).map_or(0, micros_of)
}

fn micros_of(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}
