//! A proxy in front of redis-server that can lose replies, fall silent, and lead to another server.

use std::sync::{
    Arc, Mutex,
    atomic::{AtomicUsize, Ordering},
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};

use super::redis_server::RedisServer;

pub(crate) struct Proxy {
    url: String,
    target: Arc<Mutex<String>>,
    to_lose: Arc<AtomicUsize>,
    /// Connections of a lower number are silent.
    silent_below: Arc<AtomicUsize>,
    accepted: Arc<AtomicUsize>,
}

impl Proxy {
    /// Forwards to `server`, until the test's runtime ends.
    pub(crate) async fn start(server: &RedisServer) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let url = format!("redis://{}/", listener.local_addr().unwrap());
        let proxy = Self {
            url,
            target: Arc::new(Mutex::new(address(server))),
            to_lose: Arc::default(),
            silent_below: Arc::default(),
            accepted: Arc::default(),
        };
        let (target, to_lose) = (Arc::clone(&proxy.target), Arc::clone(&proxy.to_lose));
        let (silent_below, accepted) = (Arc::clone(&proxy.silent_below), Arc::clone(&proxy.accepted));
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let target = target.lock().unwrap().clone();
                let server = TcpStream::connect(target).await.unwrap();
                let number = accepted.fetch_add(1, Ordering::SeqCst);
                tokio::spawn(forward(client, server, number, Arc::clone(&to_lose), Arc::clone(&silent_below)));
            }
        });
        proxy
    }

    /// Connections made from now on lead to another server.
    pub(crate) fn lead_to(&self, server: &RedisServer) {
        *self.target.lock().unwrap() = address(server);
    }

    /// The connections that are open stay open, and nothing comes back over them any more.
    pub(crate) fn silence_what_is_open(&self) {
        self.silent_below.store(self.accepted.load(Ordering::SeqCst), Ordering::SeqCst);
    }

    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    /// The next replies, so many of them, do not arrive: each time the connection is cut after the server has answered.
    pub(crate) fn lose_replies(&self, replies: usize) {
        self.to_lose.store(replies, Ordering::SeqCst);
    }

    pub(crate) fn has_lost_them(&self) -> bool {
        self.to_lose.load(Ordering::SeqCst) == 0
    }
}

fn address(server: &RedisServer) -> String {
    server.url().trim_start_matches("redis://").trim_end_matches('/').to_owned()
}

async fn forward(
    client: TcpStream,
    server: TcpStream,
    number: usize,
    to_lose: Arc<AtomicUsize>,
    silent_below: Arc<AtomicUsize>,
) {
    let ((mut from_client, mut to_client), (mut from_server, mut to_server)) =
        (client.into_split(), server.into_split());
    let requests = tokio::spawn(async move {
        let _ = tokio::io::copy(&mut from_client, &mut to_server).await;
    });
    let mut reply = vec![0; 64 * 1024];
    while let Ok(length @ 1..) = from_server.read(&mut reply).await {
        if number < silent_below.load(Ordering::SeqCst) {
            continue;
        }
        let lost = to_lose.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1)).is_ok();
        if lost || to_client.write_all(&reply[..length]).await.is_err() {
            break;
        }
    }
    requests.abort();
}
