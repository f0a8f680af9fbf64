//! The RTT estimate for a store, the deadline that suits this estimate, and the times at which the
//! store's parts last answered. The round trip is an EWMA with a mean deviation, as in TCP's
//! retransmission timer ([RFC 6298](https://www.rfc-editor.org/rfc/rfc6298#section-2)).

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use super::lock;
use crate::clock::micros;

/// The deadline for a store that is near, or whose round trip is not known.
pub(crate) const SHORTEST_DEADLINE: Duration = Duration::from_millis(50);

/// The longest deadline that follows the round trip. It is also the deadline until the first reply,
/// since the first call has to open a connection.
pub(crate) const LONGEST_DEADLINE: Duration = Duration::from_secs(1);

/// The most store parts for which the time of the last answer is kept, to bound the memory. When
/// this number is reached, the next answer clears all these times.
#[cfg(feature = "redis")]
const MOST_PARTS: usize = 1_024;

pub(crate) struct RoundTrip {
    /// The smoothed round trip and its mean deviation in microseconds, 32 bits each. Zero until the
    /// first reply.
    both: AtomicU64,
    made: Instant,
    /// When `both` was last changed, in microseconds since this value was made.
    learnt_at: AtomicU64,
    /// The store's distance: the least time that a reply can take, in microseconds. A new
    /// connection measures it, and a faster reply corrects it. Zero until it is measured.
    pub(crate) distance: Arc<AtomicU64>,
    first_deadline: Duration,
    /// Among the answered calls, the one that was sent last. `last_answered_by` has the same for
    /// each named part.
    last_answered: Answered,
    last_answered_by: Mutex<HashMap<Arc<str>, Answered>>,
}

/// A call that was answered: when it was sent, in microseconds since the [`RoundTrip`] was made,
/// and how many microseconds the answer took. Zero before the first answer.
#[derive(Default)]
struct Answered {
    sent: AtomicU64,
    took: AtomicU64,
}

impl Answered {
    /// Records an answer. If two answers arrive at once, one may be missed.
    #[cfg(feature = "redis")]
    fn note(&self, sent: u64, took: u64) {
        if self.sent.fetch_max(sent, Ordering::Relaxed) <= sent {
            self.took.store(took, Ordering::Relaxed);
        }
    }

    /// True if the answer arrived within the last `time`, and took less than `time`.
    fn is_within(&self, now: u64, time: u64) -> bool {
        let sent = self.sent.load(Ordering::Relaxed);
        let took = self.took.load(Ordering::Relaxed);
        sent > 0 && took < time && now.saturating_sub(sent.saturating_add(took)) < time
    }
}

impl RoundTrip {
    /// A round trip that is not known yet. Until the first reply, the deadline is `first_deadline`.
    pub(crate) fn new(first_deadline: Duration) -> Self {
        Self {
            both: AtomicU64::new(0),
            made: Instant::now(),
            learnt_at: AtomicU64::new(0),
            distance: Arc::default(),
            first_deadline,
            last_answered: Answered::default(),
            last_answered_by: Mutex::default(),
        }
    }

    /// Records a store part's answer to a call: when the call was `sent`, and how long the answer
    /// `took`.
    #[cfg(feature = "redis")]
    pub(crate) fn answered(&self, part: Option<Arc<str>>, sent: Instant, took: Duration) {
        let sent = micros(sent.saturating_duration_since(self.made));
        let took_micros = micros(took);
        self.learn(took, sent.saturating_add(took_micros));
        self.last_answered.note(sent, took_micros);
        if let Some(part) = part {
            let mut parts = lock(&self.last_answered_by);
            if parts.len() >= MOST_PARTS {
                parts.clear();
            }
            parts.entry(part).or_default().note(sent, took_micros);
        }
    }

    /// True if this store part has answered a call within the last `time`, and the answer took less
    /// than `time`. If `part` names several parts, each must have answered such a call.
    pub(crate) fn has_answered_within(&self, part: Option<&str>, time: Duration) -> bool {
        let (now, time) = (micros(self.made.elapsed()), micros(time));
        let Some(part) = part else {
            return self.last_answered.is_within(now, time);
        };
        let parts = lock(&self.last_answered_by);
        part.split(' ').all(|part| {
            let last = parts.get(part);
            last.is_some_and(|last| last.is_within(now, time))
        })
    }

    /// Records a reply that took the time `sample`, and arrives now.
    pub(super) fn answered_in(&self, sample: Duration) {
        self.learn(sample, micros(self.made.elapsed()));
    }

    /// Records a reply that took the time `sample`, and arrives `now`, in microseconds. If two
    /// replies arrive at once, one may be missed.
    ///
    /// Among replies that arrive as early as expected, only one per round trip counts, as in TCP.
    /// Otherwise the many early replies in a few batches would outweigh a late one.
    fn learn(&self, sample: Duration, now: u64) {
        if sample < self.distance() {
            self.distance.fetch_min(micros(sample), Ordering::Relaxed);
        }
        let learnt_at = self.learnt_at.load(Ordering::Relaxed);
        let is_new = now >= learnt_at.saturating_add(self.read().0);
        if !is_new && sample <= self.mostly() {
            return;
        }
        self.learnt_at.store(now, Ordering::Relaxed);
        // A reply that took longer than the longest deadline counts as if it took that deadline. A
        // longer time may only mean that the caller was not polled. If it counted in full, it would
        // raise the round trip for too long.
        let sample = micros(sample.min(LONGEST_DEADLINE)).max(1);
        let (smoothed, deviation) = match self.read() {
            (0, _) => (sample, sample / 2),
            (smoothed, deviation) => (
                (7 * smoothed + sample) / 8,
                (3 * deviation + smoothed.abs_diff(sample)) / 4,
            ),
        };
        self.both
            .store(smoothed.max(1) << 32 | deviation, Ordering::Relaxed);
    }

    /// The least time that a reply can take; zero if it was not measured.
    pub(crate) fn distance(&self) -> Duration {
        Duration::from_micros(self.distance.load(Ordering::Relaxed))
    }

    /// The smoothed round trip; `None` until the first reply.
    pub(crate) fn known(&self) -> Option<Duration> {
        Some(self.smoothed()).filter(|trip| !trip.is_zero())
    }

    /// The smoothed round trip; zero until the first reply.
    pub(crate) fn smoothed(&self) -> Duration {
        Duration::from_micros(self.read().0)
    }

    /// The time within which most replies arrive: the round trip plus four deviations, as in TCP.
    pub(super) fn mostly(&self) -> Duration {
        let (smoothed, deviation) = self.read();
        Duration::from_micros(smoothed + 4 * deviation)
    }

    /// The deadline for limiters that do not set one: see
    /// [`Limiter::deadline`](crate::Limiter::deadline).
    ///
    /// It leaves time for most replies, and for four further round trips, since a check may wait
    /// for its batch, or be sent again over a new connection after the old one was cut.
    pub(crate) fn deadline(&self) -> Duration {
        match self.smoothed() {
            Duration::ZERO => self.first_deadline,
            smoothed => (smoothed * 4 + self.mostly()).clamp(SHORTEST_DEADLINE, LONGEST_DEADLINE),
        }
    }

    /// The longest value that [`deadline`](Self::deadline) may have later.
    pub(crate) fn longest_deadline(&self) -> Duration {
        if self.smoothed().is_zero() {
            self.first_deadline
        } else {
            LONGEST_DEADLINE
        }
    }

    fn read(&self) -> (u64, u64) {
        let both = self.both.load(Ordering::Relaxed);
        (both >> 32, both & u64::from(u32::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the deadline in milliseconds after each of the `replies`. Each reply takes `millis`
    /// milliseconds.
    fn deadlines(trip: &RoundTrip, replies: usize, millis: u64) -> Vec<u128> {
        let learn = |_| {
            let now = trip.learnt_at.load(Ordering::Relaxed) + 1_000_000;
            trip.learn(Duration::from_millis(millis), now);
            trip.deadline().as_millis()
        };
        (0..replies).map(learn).collect()
    }

    #[test]
    fn the_deadline_follows_the_round_trip() {
        let trip = RoundTrip::new(LONGEST_DEADLINE);
        assert_eq!(trip.deadline(), LONGEST_DEADLINE, "nothing is known yet");
        assert_eq!(deadlines(&trip, 3, 1), [50, 50, 50]);
        assert_eq!(
            deadlines(&trip, 1, 80),
            [134],
            "a reply that is late by far moves it at once"
        );
        assert!(
            deadlines(&trip, 40, 80)[5..]
                .iter()
                .all(|deadline| (400..660).contains(deadline))
        );
        assert_eq!(trip.smoothed().as_millis(), 79);
        assert_eq!(deadlines(&trip, 60, 1).last(), Some(&50));
        assert_eq!(deadlines(&trip, 60, 900).last(), Some(&1_000));
    }

    /// A thousand replies a second, of which one is lost and sent again after 200 ms.
    #[test]
    fn a_late_reply_is_remembered_for_some_round_trips() {
        let trip = RoundTrip::new(LONGEST_DEADLINE);
        let learn = |millis: u64, now: u64| trip.learn(Duration::from_millis(millis), 1_000 * now);
        for now in 0..2_000 {
            learn(40, now);
        }
        assert!(trip.deadline().as_millis() < 210);
        learn(240, 2_000);
        for now in 2_001..2_100 {
            learn(40, now);
        }
        assert!(trip.deadline().as_millis() > 240, "{:?}", trip.deadline());
        for now in 2_100..3_000 {
            learn(40, now);
        }
        assert!(trip.deadline().as_millis() < 230, "{:?}", trip.deadline());
    }

    /// The server was busy with another script when a connection was opened.
    #[test]
    fn a_reply_that_is_faster_corrects_the_distance() {
        let trip = RoundTrip::new(LONGEST_DEADLINE);
        let distance = || trip.distance.load(Ordering::Relaxed);
        trip.learn(Duration::from_millis(1), 0);
        assert_eq!(distance(), 0, "not measured yet");
        trip.distance.store(40_000, Ordering::Relaxed);
        for (now, millis, expected) in [(1, 90, 40_000), (2, 2, 2_000), (3, 100, 2_000)] {
            trip.learn(Duration::from_millis(millis), now);
            assert_eq!(distance(), expected);
        }
    }

    #[test]
    fn no_reply_is_too_late_for_its_numbers() {
        let trip = RoundTrip::new(LONGEST_DEADLINE);
        trip.learn(Duration::ZERO, 0);
        for _ in 0..200 {
            trip.learn(Duration::MAX, u64::MAX);
            trip.learn(Duration::MAX, u64::MAX);
            trip.learn(Duration::ZERO, u64::MAX);
        }
        assert_eq!(trip.deadline(), LONGEST_DEADLINE);
    }

    /// At most one prompt reply counts in each round trip, so many of them need time.
    #[test]
    fn a_deadline_that_late_replies_have_raised_falls_with_prompt_ones() {
        // Late replies, milliseconds between prompt ones, and how many of these are needed.
        for (late, apart, needed) in [
            (1, 1, 500..2_000),
            (1, 1_000, 20..35),
            (60, 1, 5_000..10_000),
        ] {
            let trip = RoundTrip::new(LONGEST_DEADLINE);
            let mut now = 0;
            let mut learn = |millis, apart: u64| {
                now += 1_000 * apart;
                trip.learn(Duration::from_millis(millis), now);
                trip.deadline()
            };
            assert!((0..100).all(|_| learn(1, 1) == SHORTEST_DEADLINE));
            assert!((0..late).all(|_| learn(1_000, 1_000) == LONGEST_DEADLINE));
            let prompt = (1..)
                .find(|_| learn(1, apart) == SHORTEST_DEADLINE)
                .unwrap();
            assert!(
                needed.contains(&prompt),
                "{prompt} after {late}, {apart} ms apart"
            );
        }
    }

    /// The caller of the late reply was not polled for an hour.
    #[test]
    fn a_reply_that_is_read_much_later_is_soon_forgotten() {
        let trip = RoundTrip::new(LONGEST_DEADLINE);
        let learn = |sample, now: u64| trip.learn(sample, 1_000 * now);
        for now in 0..100 {
            learn(Duration::from_millis(1), now);
        }
        learn(Duration::from_secs(3_600), 100);
        assert_eq!(trip.deadline(), LONGEST_DEADLINE);
        for now in 101..2_100 {
            learn(Duration::from_millis(1), now);
        }
        assert_eq!(trip.deadline(), SHORTEST_DEADLINE);
    }
}
