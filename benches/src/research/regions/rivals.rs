//! Others that share a limit: leases as of [Doorman](https://github.com/youtube/doorman), and fixed
//! shares.

use std::{collections::VecDeque, mem};

use super::{Events, SECOND, Scheme, TRIPS, Tally, Time, WINDOW, region};

/// As in its example `simplecluster`.
const REFRESH: Time = 5 * SECOND;
const LEASE: Time = 15 * SECOND;

/// A server hands out parts of a rate by Doorman's `ProportionalShare`. A process spends them
/// within a second, and asks for as much as it was asked for since the last time. When its lease
/// has ended, it spends the rate of the limit by the number of processes.
pub(super) struct Doorman {
    /// Units a second.
    capacity: f64,
    leases: Vec<Lease>,
    clients: Vec<Client>,
    events: Events<Event>,
}

#[derive(Clone, Default)]
struct Lease {
    has: f64,
    wants: f64,
    until: Time,
}

#[derive(Clone, Default)]
struct Client {
    rate: f64,
    until: Time,
    /// Units that it may spend at this time.
    units: f64,
    at: Time,
    requests: u32,
}

#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Refresh,
    /// At the server: the requests since the last refresh.
    Wants(u32),
    /// At the process: units in a thousand seconds.
    Gets(u64),
}

impl Doorman {
    pub(super) fn new(processes: usize, units: usize) -> Self {
        let (capacity, mut events) = (units as f64 * SECOND as f64 / WINDOW as f64, Events::new());
        for process in 0..processes {
            events.add(
                process as Time * REFRESH / processes as Time,
                process,
                Event::Refresh,
            );
        }
        let (leases, clients) = (
            vec![Lease::default(); processes],
            vec![Client::default(); processes],
        );
        Self {
            capacity,
            leases,
            clients,
            events,
        }
    }

    /// It never hands out more than is left.
    fn share(&mut self, at: Time, process: usize, wants: f64) -> f64 {
        self.leases[process] = Lease {
            has: 0.0,
            wants,
            until: at + LEASE,
        };
        let leases = || self.leases.iter().filter(|lease| lease.until > at);
        let equal = self.capacity / leases().count() as f64;
        let unused = self.capacity - leases().map(|lease| lease.has).sum::<f64>();
        let gets =
            if wants <= equal || leases().map(|lease| lease.wants).sum::<f64>() <= self.capacity {
                wants
            } else {
                let below: f64 = leases().map(|lease| (equal - lease.wants).max(0.0)).sum();
                let above: f64 = leases().map(|lease| (lease.wants - equal).max(0.0)).sum();
                equal + (wants - equal) * below / above
            };
        self.leases[process].has = gets.min(unused).max(0.0);
        self.leases[process].has
    }
}

impl Scheme for Doorman {
    fn ask(&mut self, at: Time, process: usize, tally: &mut Tally) {
        let (safe, client) = (
            self.capacity / self.clients.len() as f64,
            &mut self.clients[process],
        );
        let rate = if at < client.until { client.rate } else { safe };
        let gained = rate * (at - client.at) as f64 / SECOND as f64;
        client.units = (client.units + gained).min(rate.max(1.0));
        (client.at, client.requests) = (at, client.requests + 1);
        let is_admitted = client.units >= 1.0;
        client.units -= f64::from(u8::from(is_admitted));
        tally.decide(at, is_admitted);
    }

    fn advance(&mut self, until: Time, cut: Option<usize>, tally: &mut Tally) {
        while let Some((at, process, event)) = self.events.next(until) {
            let (is_cut, half) = (cut == Some(region(process)), TRIPS[region(process)] / 2);
            match event {
                Event::Refresh => {
                    let requests = mem::take(&mut self.clients[process].requests);
                    self.events.add(at + half, process, Event::Wants(requests));
                    self.events.add(at + REFRESH, process, Event::Refresh);
                }
                Event::Wants(_) | Event::Gets(_) if is_cut => {}
                Event::Wants(requests) => {
                    tally.messages += tally.one();
                    let gets = self.share(
                        at,
                        process,
                        f64::from(requests) * SECOND as f64 / REFRESH as f64,
                    );
                    self.events
                        .add(at + half, process, Event::Gets((gets * 1e3) as u64));
                }
                Event::Gets(rate) => {
                    let client = &mut self.clients[process];
                    (client.rate, client.until) = (rate as f64 / 1e3, at - half + LEASE);
                }
            }
        }
    }
}

/// Exact logs with equal parts of the limit. Each region asks its own.
pub(super) struct Shares {
    units: usize,
    logs: Vec<VecDeque<Time>>,
}

impl Shares {
    pub(super) fn new(parts: usize, units: usize) -> Self {
        Self {
            units: units / parts,
            logs: vec![VecDeque::new(); parts],
        }
    }
}

impl Scheme for Shares {
    fn ask(&mut self, at: Time, process: usize, tally: &mut Tally) {
        let parts = self.logs.len();
        let log = &mut self.logs[region(process) % parts];
        while log.front().is_some_and(|admitted| at - admitted >= WINDOW) {
            log.pop_front();
        }
        let is_admitted = log.len() < self.units;
        if is_admitted {
            log.push_back(at);
        }
        (tally.waits, tally.messages) = (tally.waits + tally.one(), tally.messages + tally.one());
        tally.decide(at, is_admitted);
    }

    fn advance(&mut self, _: Time, _: Option<usize>, _: &mut Tally) {}
}
