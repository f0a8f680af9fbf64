//! A proxy in front of redis-server, which is as far away as a benchmark wants.
//!
//! Threads carry the data, one for each end of a direction, since a timer of tokio is up to a
//! millisecond late.

use std::{
    io::{Read, Write},
    net::{Shutdown, TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
        mpsc::channel,
    },
    thread::{sleep, spawn, yield_now},
    time::{Duration, Instant},
};

use crate::{dice::Dice, server::Server};

/// A segment that is lost arrives so much later, and a round trip: the shortest retransmission
/// timeout of Linux.
const RETRANSMISSION: Duration = Duration::from_millis(200);

/// The kernel wakes a thread so much later than it has asked for, at most. The rest of a wait asks
/// for the time.
const LATE: Duration = Duration::from_micros(120);

#[derive(Clone, Copy)]
pub(crate) struct Distance {
    /// The round trip. Each direction takes half of it.
    pub(crate) trip: Duration,
    /// A round trip is longer or shorter by at most this.
    pub(crate) jitter: Duration,
    /// The part of the segments that are lost.
    pub(crate) loss: f64,
}

pub(crate) struct Proxy {
    url: String,
    /// By how many microseconds data was late at most, since the machine was busy.
    late: Arc<AtomicU64>,
}

impl Proxy {
    /// Forwards to the server for as long as this process runs.
    pub(crate) fn start(server: &Server, distance: Distance) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a port");
        let url = format!(
            "redis://{}/",
            listener.local_addr().expect("a bound address")
        );
        let (target, late) = (server.address(), Arc::default());
        let proxy = Self {
            url,
            late: Arc::clone(&late),
        };
        spawn(move || {
            for (number, client) in listener.incoming().flatten().enumerate() {
                // Without a server, the client's connection is closed at once.
                let Ok(server) = TcpStream::connect(&target) else {
                    continue;
                };
                let clones = client
                    .try_clone()
                    .and_then(|client| Ok((client, server.try_clone()?)));
                let (to_client, to_server) = clones.expect("a file descriptor is free");
                let [requests, replies] = [0, 1].map(|way| Dice::new(2 * number as u64 + way));
                // The first data leaves when the handshake is over.
                let opened = Instant::now() + distance.trip;
                let (late, lates) = (Arc::clone(&late), Arc::clone(&late));
                spawn(move || {
                    carry(
                        client,
                        to_server,
                        distance,
                        requests,
                        opened + distance.trip / 2,
                        late,
                    );
                });
                spawn(move || carry(server, to_client, distance, replies, opened, lates));
            }
        });
        proxy
    }

    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    pub(crate) fn latest(&self) -> Duration {
        Duration::from_micros(self.late.load(Ordering::Relaxed))
    }
}

/// Carries the data of one direction. What is on its way does not hold up what follows, but TCP
/// keeps the order: behind data that is lost or late, all waits.
fn carry(
    mut from: TcpStream,
    mut to: TcpStream,
    distance: Distance,
    mut dice: Dice,
    mut due: Instant,
    late: Arc<AtomicU64>,
) {
    to.set_nodelay(true).expect("a socket");
    let (leaves, arrives) = channel::<(Instant, Vec<u8>)>();
    spawn(move || {
        while let Ok((due, data)) = arrives.recv() {
            wait_until(due);
            late.fetch_max(due.elapsed().as_micros() as u64, Ordering::Relaxed);
            if to.write_all(&data).is_err() {
                break;
            }
        }
        // It may be closed already.
        let _ = to.shutdown(Shutdown::Both);
    });
    let mut data = vec![0; 64 * 1024];
    while let Ok(length @ 1..) = from.read(&mut data) {
        let mut takes =
            (distance.trip - distance.jitter) / 2 + distance.jitter.mul_f64(dice.fraction());
        if dice.fraction() < distance.loss {
            takes += RETRANSMISSION + distance.trip;
        }
        due = due.max(Instant::now() + takes);
        if leaves.send((due, data[..length].to_vec())).is_err() {
            break;
        }
    }
}

fn wait_until(due: Instant) {
    sleep(
        due.saturating_duration_since(Instant::now())
            .saturating_sub(LATE),
    );
    while Instant::now() < due {
        yield_now();
    }
}
