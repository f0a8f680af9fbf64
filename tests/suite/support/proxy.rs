//! A proxy in front of redis-server that can lose a reply.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};

use super::redis_server::RedisServer;

pub(crate) struct Proxy {
    url: String,
    to_lose: Arc<AtomicUsize>,
}

impl Proxy {
    /// Forwards to `server`, until the test's runtime ends.
    pub(crate) async fn start(server: &RedisServer) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let url = format!("redis://{}/", listener.local_addr().unwrap());
        let target = server.url().trim_start_matches("redis://").trim_end_matches('/').to_owned();
        let to_lose = Arc::new(AtomicUsize::new(0));
        let lose = Arc::clone(&to_lose);
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let server = TcpStream::connect(&target).await.unwrap();
                tokio::spawn(forward(client, server, Arc::clone(&lose)));
            }
        });
        Self { url, to_lose }
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

async fn forward(client: TcpStream, server: TcpStream, to_lose: Arc<AtomicUsize>) {
    let ((mut from_client, mut to_client), (mut from_server, mut to_server)) =
        (client.into_split(), server.into_split());
    let requests = tokio::spawn(async move {
        let _ = tokio::io::copy(&mut from_client, &mut to_server).await;
    });
    let mut reply = vec![0; 64 * 1024];
    while let Ok(length @ 1..) = from_server.read(&mut reply).await {
        let lost = to_lose.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1)).is_ok();
        if lost || to_client.write_all(&reply[..length]).await.is_err() {
            break;
        }
    }
    requests.abort();
}
