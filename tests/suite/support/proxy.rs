//! A proxy in front of redis-server. It can lose, delay and split the traffic, cut connections,
//! fall silent, and lead to another server.

use std::{
    future::pending,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::{Notify, broadcast, mpsc},
    time::{Instant, sleep_until},
};

use super::redis_server::RedisServer;

pub(crate) struct Proxy {
    url: String,
    wires: Arc<Wires>,
}

/// The settings of all connections.
struct Wires {
    target: Mutex<String>,
    to_lose: AtomicUsize,
    is_holding: AtomicBool,
    /// The request that is held may go on, and has been answered.
    goes_on: Notify,
    has_arrived: Notify,
    /// Connections with a lower number are silent.
    silent_below: AtomicUsize,
    accepted: AtomicUsize,
    delay_micros: AtomicU64,
    is_splitting: AtomicBool,
    cuts: broadcast::Sender<Cut>,
}

/// The way a connection ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cut {
    /// In order, as if the server had closed it.
    Close,
    /// With a RST, so that data in flight is lost.
    Reset,
}

impl Proxy {
    /// Forwards to `server` until the test's runtime ends.
    pub(crate) async fn start(server: &RedisServer) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let url = format!("redis://{}/", listener.local_addr().unwrap());
        let wires = Arc::new(Wires {
            target: Mutex::new(server.address()),
            to_lose: AtomicUsize::new(0),
            is_holding: AtomicBool::new(false),
            goes_on: Notify::new(),
            has_arrived: Notify::new(),
            silent_below: AtomicUsize::new(0),
            accepted: AtomicUsize::new(0),
            delay_micros: AtomicU64::new(0),
            is_splitting: AtomicBool::new(false),
            cuts: broadcast::Sender::new(16),
        });
        let proxy = Self {
            url,
            wires: Arc::clone(&wires),
        };
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                tokio::spawn(forward(client, Arc::clone(&wires)));
            }
        });
        proxy
    }

    /// Connections made from now on lead to another server.
    pub(crate) fn lead_to(&self, server: &RedisServer) {
        *self.wires.target.lock().unwrap() = server.address();
    }

    /// Open connections stay open, but no reply comes over them any more.
    pub(crate) fn silence_open_connections(&self) {
        self.wires
            .silent_below
            .store(self.wires.accepted.load(Ordering::SeqCst), Ordering::SeqCst);
    }

    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    pub(crate) fn port(&self) -> u16 {
        let port = self.url.rsplit(':').next().unwrap();
        port.trim_end_matches('/').parse().unwrap()
    }

    /// The next `replies` replies do not arrive. Each time, the connection is cut after the server
    /// has replied.
    pub(crate) fn lose_replies(&self, replies: usize) {
        self.wires.to_lose.store(replies, Ordering::SeqCst);
    }

    pub(crate) fn has_lost_them(&self) -> bool {
        self.wires.to_lose.load(Ordering::SeqCst) == 0
    }

    /// The next request stays in the proxy, and its connection is closed.
    pub(crate) fn hold_request(&self) {
        self.wires.is_holding.store(true, Ordering::SeqCst);
    }

    /// Passes on the request that it holds, and waits for the reply.
    pub(crate) async fn pass_on_held(&self) {
        assert!(
            !self.wires.is_holding.load(Ordering::SeqCst),
            "no request has come"
        );
        self.wires.goes_on.notify_one();
        self.wires.has_arrived.notified().await;
    }

    /// From now on each reply arrives so much later.
    pub(crate) fn delay_replies(&self, by: Duration) {
        self.wires
            .delay_micros
            .store(u64::try_from(by.as_micros()).unwrap(), Ordering::SeqCst);
    }

    /// True if all data travels byte by byte from now on, in both directions.
    pub(crate) fn split_packets(&self, is_splitting: bool) {
        self.wires
            .is_splitting
            .store(is_splitting, Ordering::SeqCst);
    }

    /// Ends every connection that is open.
    pub(crate) fn cut(&self, how: Cut) {
        // Sending fails if no connection is open.
        let _ = self.wires.cuts.send(how);
    }
}

async fn forward(mut client: TcpStream, wires: Arc<Wires>) {
    let target = wires.target.lock().unwrap().clone();
    // Without a server, the client's connection is closed at once.
    let Ok(mut server) = TcpStream::connect(target).await else {
        return;
    };
    let number = wires.accepted.fetch_add(1, Ordering::SeqCst);
    let mut cuts = wires.cuts.subscribe();
    client
        .set_nodelay(true)
        .and_then(|()| server.set_nodelay(true))
        .unwrap();
    let ((from_client, to_client), (from_server, to_server)) = (client.split(), server.split());
    let mut held = None;
    let cut = tokio::select! {
        request = requests(from_client, to_server, &wires) => { held = request; Cut::Close },
        () = replies(from_server, to_client, number, &wires) => Cut::Close,
        cut = cuts.recv() => cut.unwrap_or(Cut::Close),
    };
    if cut == Cut::Reset {
        // It may be closed already.
        let _ = client.set_zero_linger();
    }
    drop(client);
    if let Some(request) = held {
        wires.goes_on.notified().await;
        server.write_all(&request).await.unwrap();
        server.read_u8().await.unwrap();
        wires.has_arrived.notify_one();
    }
}

/// Passes on requests, and returns one that is held.
async fn requests(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    wires: &Wires,
) -> Option<Vec<u8>> {
    let mut request = vec![0; 64 * 1024];
    while let Ok(length @ 1..) = from.read(&mut request).await {
        if wires.is_holding.swap(false, Ordering::SeqCst) {
            return Some(request[..length].to_vec());
        }
        if pass_on(&request[..length], &mut to, wires).await.is_err() {
            break;
        }
    }
    None
}

/// Passes on each reply after the delay. The delay is that of the line: a reply that comes in
/// several packets, as nested ones of Redis 6.2 do, waits once.
async fn replies(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    number: usize,
    wires: &Wires,
) {
    let (arrived, mut on_the_line) = mpsc::unbounded_channel();
    let arriving = async move {
        let mut reply = vec![0; 64 * 1024];
        while let Ok(length @ 1..) = from.read(&mut reply).await {
            let delay = Duration::from_micros(wires.delay_micros.load(Ordering::SeqCst));
            let due = (!delay.is_zero()).then(|| Instant::now() + delay);
            // The other end is below, and lives as long.
            let _ = arrived.send((due, reply[..length].to_vec()));
        }
    };
    let leaving = async {
        while let Some((due, reply)) = on_the_line.recv().await {
            if let Some(due) = due {
                sleep_until(due).await;
            }
            if number < wires.silent_below.load(Ordering::SeqCst) {
                continue;
            }
            let lost = wires
                .to_lose
                .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| {
                    left.checked_sub(1)
                })
                .is_ok();
            if lost || pass_on(&reply, &mut to, wires).await.is_err() {
                break;
            }
        }
    };
    // Once the server has closed the connection, the replies on the line still leave.
    tokio::select! {
        () = leaving => {}
        () = async { arriving.await; pending::<()>().await } => {}
    }
}

async fn pass_on(
    bytes: &[u8],
    to: &mut (impl AsyncWrite + Unpin),
    wires: &Wires,
) -> std::io::Result<()> {
    let size = if wires.is_splitting.load(Ordering::SeqCst) {
        1
    } else {
        bytes.len()
    };
    for part in bytes.chunks(size) {
        to.write_all(part).await?;
    }
    Ok(())
}
