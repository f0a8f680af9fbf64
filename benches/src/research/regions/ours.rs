//! This crate: a log in one store, and prefetches whose life and size are those of
//! `src/local/prefetch/`. Each check is a message, although those of one process travel together.

use std::{
    cmp::Reverse,
    collections::{BinaryHeap, HashMap, VecDeque},
    mem,
};

use super::{
    Events, SECOND, Scheme, TRIPS, Tally, Time, WINDOW,
    pace::{Pace, Spending, first_units, rate},
    region,
};

pub(super) struct Ours {
    has_prefetch: bool,
    processes: Vec<Process>,
    store: Store,
    events: Events<Event>,
}

#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// At the store: a check; the prefetches that are given back, by number and spent units, with
    /// the units of the next one.
    Check,
    Prefetch(Vec<(u64, u64)>, Option<u64>),
    /// At the process: the used units, if the store has admitted a check; the number and units of a
    /// prefetch, and the used units.
    Admitted(u64),
    Taken(Option<(u64, u64)>, u64),
    /// A prefetch ends, or the process may ask again.
    Timer,
}

struct Process {
    pace: Pace,
    /// Requests since then, before the first prefetch.
    began: Time,
    requests: u64,
    is_kept: bool,
    held: VecDeque<Held>,
    asked: Option<Time>,
    asks_from: Time,
    spending: Spending,
    /// As the store has last replied.
    used: u64,
}

struct Held {
    number: u64,
    units: u64,
    left: u64,
    /// With so many left, the next one is asked for.
    low: u64,
    until: Time,
}

impl Ours {
    /// Without prefetches if they have no life.
    pub(super) fn new(processes: usize, units: usize, life: Time) -> Self {
        let store = Store {
            units: units as u64,
            ..Store::default()
        };
        let processes = (0..processes)
            .map(|process| Process::at(TRIPS[region(process)], life))
            .collect();
        Self {
            has_prefetch: life > 0,
            processes,
            store,
            events: Events::new(),
        }
    }

    fn happen(&mut self, at: Time, process: usize, event: Event, is_cut: bool, tally: &mut Tally) {
        let (own, replied) = (
            &mut self.processes[process],
            at + TRIPS[region(process)] / 2,
        );
        match event {
            Event::Check if is_cut => {
                tally.undecided += tally.one();
                return;
            }
            Event::Check => {
                tally.messages += tally.one();
                let is_admitted = self.store.check(at);
                tally.decide(at, is_admitted);
                if is_admitted && self.has_prefetch {
                    self.events
                        .add(replied, process, Event::Admitted(self.store.used));
                }
                return;
            }
            Event::Prefetch(_, None) if is_cut => {}
            Event::Prefetch(..) if is_cut => {
                // The store's timeout.
                self.events
                    .add(at + SECOND, process, Event::Taken(None, own.used));
                return;
            }
            Event::Prefetch(over, wanted) => {
                tally.messages += tally.one();
                over.into_iter()
                    .for_each(|(number, spent)| self.store.give_back(at, number, spent));
                if let Some(units) = wanted {
                    let number = self.store.take(at, units, own.pace.life);
                    let taken = number.map(|number| (number, units));
                    self.events
                        .add(replied, process, Event::Taken(taken, self.store.used));
                }
                return;
            }
            Event::Admitted(used) => own.note(at, used, self.store.units),
            Event::Taken(taken, used) => {
                let asked = own.asked.take().unwrap_or(at);
                own.used = used;
                let timers = if let Some((number, units)) = taken {
                    let until = asked + own.pace.life;
                    own.spending.measure_anew(at, own.pace);
                    own.held.push_back(Held {
                        number,
                        units,
                        left: units,
                        low: own.pace.low(units),
                        until,
                    });
                    [until - own.pace.lead, until]
                } else {
                    own.asks_from = at + own.pace.life;
                    [own.asks_from; 2]
                };
                timers
                    .into_iter()
                    .for_each(|timer| self.events.add(timer.max(at), process, Event::Timer));
            }
            Event::Timer => {}
        }
        self.step(at, process);
    }

    /// Gives back what is over, and asks for the next prefetch if it is time for it.
    fn step(&mut self, at: Time, process: usize) {
        let own = &mut self.processes[process];
        let wanted = own.wanted(at, self.store.units).filter(|_| own.is_kept);
        let (over, held): (Vec<Held>, _) = mem::take(&mut own.held)
            .into_iter()
            .partition(|held| held.left == 0 || held.until <= at);
        (own.held, own.asked) = (held.into(), own.asked.or(wanted.map(|_| at)));
        own.is_kept = !own.held.is_empty() || own.asked.is_some() || at < own.asks_from;
        if wanted.is_some() || !over.is_empty() {
            let over = over
                .iter()
                .map(|held| (held.number, held.units - held.left))
                .collect();
            self.events.add(
                at + TRIPS[region(process)] / 2,
                process,
                Event::Prefetch(over, wanted),
            );
        }
    }
}

impl Scheme for Ours {
    fn ask(&mut self, at: Time, process: usize, tally: &mut Tally) {
        let own = &mut self.processes[process];
        if let Some(held) = own
            .held
            .iter_mut()
            .find(|held| at < held.until && held.left > 0)
        {
            held.left -= 1;
            own.spending.count(1);
            tally.decide(at, true);
            if own.is_low(at) {
                self.step(at, process);
            }
        } else {
            tally.waits += tally.one();
            self.events
                .add(at + TRIPS[region(process)] / 2, process, Event::Check);
        }
    }

    fn advance(&mut self, until: Time, cut: Option<usize>, tally: &mut Tally) {
        while let Some((at, process, event)) = self.events.next(until) {
            self.happen(at, process, event, cut == Some(region(process)), tally);
        }
    }
}

impl Process {
    /// Replies do not deviate.
    fn at(trip: Time, life: Time) -> Self {
        let pace = Pace::new(life, SECOND, trip, trip);
        Self {
            pace,
            began: 0,
            requests: 0,
            is_kept: false,
            held: VecDeque::new(),
            asked: None,
            asks_from: 0,
            spending: Spending::new(0, 0, pace),
            used: 0,
        }
    }

    /// True if the newest prefetch may be spent before the next one is there.
    fn is_low(&self, at: Time) -> bool {
        let alive = || self.held.iter().filter(|held| at < held.until);
        alive().map(|held| held.left).sum::<u64>()
            <= alive().next_back().map_or(0, |newest| newest.low)
    }

    /// Takes note of a request that the store has admitted.
    fn note(&mut self, at: Time, used: u64, units: u64) {
        self.used = used;
        if self.is_kept {
            self.spending.count(1);
            return;
        }
        if at >= self.began + self.pace.life {
            (self.began, self.requests) = (at, 0);
        }
        self.requests += 1;
        if self.requests < self.pace.fewest_requests {
            return;
        }
        let requests = rate(self.requests, at - self.began, self.pace.life);
        if let Some(first) = first_units(requests, 1, (used, units - used), self.pace) {
            (self.is_kept, self.requests, self.spending) =
                (true, 0, Spending::new(first, at, self.pace));
            self.spending.count(1);
        }
    }

    fn wanted(&mut self, at: Time, units: u64) -> Option<u64> {
        let ends_soon = self
            .held
            .back()
            .is_some_and(|newest| newest.until - self.pace.lead <= at);
        let is_due = (self.is_low(at) || ends_soon) && self.asked.is_none() && at >= self.asks_from;
        self.spending
            .next_units(at, self.pace, units - self.used)
            .filter(|_| is_due)
    }
}

#[derive(Default)]
struct Store {
    units: u64,
    used: u64,
    /// When the units of checks leave.
    checks: VecDeque<Time>,
    /// The units of prefetches that are not given back yet, by their number, and when they leave.
    prefetches: HashMap<u64, (u64, Time)>,
    taken: u64,
    /// When prefetches leave, by their number, and units that were spent of one.
    leaving: BinaryHeap<Reverse<(Time, u64, u64)>>,
}

impl Store {
    fn forget(&mut self, at: Time) {
        while self.checks.front().is_some_and(|leaves| *leaves <= at) {
            self.checks.pop_front();
            self.used -= 1;
        }
        while let Some(Reverse((_, number, spent))) =
            self.leaving.peek().filter(|next| next.0.0 <= at)
        {
            self.used -= self.prefetches.remove(number).map_or(0, |(units, _)| units) + spent;
            self.leaving.pop();
        }
    }

    fn check(&mut self, at: Time) -> bool {
        self.forget(at);
        let is_admitted = self.used < self.units;
        if is_admitted {
            self.used += 1;
            self.checks.push_back(at + WINDOW);
        }
        is_admitted
    }

    /// The number of a prefetch, if there is room for it. It counts until a window after its life.
    fn take(&mut self, at: Time, units: u64, life: Time) -> Option<u64> {
        self.forget(at);
        (self.used + units <= self.units).then(|| {
            let leaves = at + WINDOW + life;
            (self.used, self.taken) = (self.used + units, self.taken + 1);
            self.prefetches.insert(self.taken, (units, leaves));
            self.leaving.push(Reverse((leaves, self.taken, 0)));
            self.taken
        })
    }

    /// Spent units count for another window, or until the prefetch would have left.
    fn give_back(&mut self, at: Time, number: u64, spent: u64) {
        self.forget(at);
        if let Some((units, leaves)) = self.prefetches.remove(&number) {
            self.used -= units - spent;
            self.leaving
                .push(Reverse((leaves.min(at + WINDOW), 0, spent)));
        }
    }
}
