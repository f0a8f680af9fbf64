//! Sentinels that hang, or that are behind.

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpListener,
};
use tower_sliding_window::{RedisStore, store::RedisSource};

use crate::support::{TEST_TIMEOUT, ms, proxy::Proxy, redis_server::RedisServer, with_causes};

/// A sentinel that answers the question for the primary with these bytes, or never answers.
async fn always(reply: Option<String>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("redis://{}", listener.local_addr().unwrap());
    tokio::spawn(async move {
        while let Ok((mut client, _)) = listener.accept().await {
            let reply = reply.clone();
            tokio::spawn(async move {
                let mut bytes = vec![0; 65_536];
                while let Ok(length @ 1..) = client.read(&mut bytes).await {
                    let is_question =
                        String::from_utf8_lossy(&bytes[..length]).contains("GET-MASTER");
                    let Some(reply) = &reply else { continue };
                    let _ = client
                        .write_all(if is_question { reply } else { "+OK\r\n+OK\r\n" }.as_bytes())
                        .await;
                }
            });
        }
    });
    url
}

/// The reply that names a server at this port.
fn at(port: &str) -> Option<String> {
    Some(format!(
        "*2\r\n$9\r\n127.0.0.1\r\n${}\r\n{port}\r\n",
        port.len()
    ))
}

/// One of three sentinels hangs, as behind a firewall. The other two do not know the name.
#[tokio::test]
async fn a_sentinel_that_hangs_hides_no_wrong_name() {
    let unknown = || Some("*-1\r\n".to_owned());
    let urls = [
        always(unknown()).await,
        always(None).await,
        always(unknown()).await,
    ];
    let store =
        RedisStore::builder(RedisSource::sentinels(urls, "redis://mian")).connect_timeout(ms(500));
    let text = with_causes(&store.connect().await.unwrap_err());
    assert!(
        text.contains("no sentinel knows a primary of this name"),
        "{text}"
    );
}

/// One sentinel is behind: it names the old primary, which has another password by now. The others
/// name the new primary, and are a little slower.
#[tokio::test]
async fn an_old_primary_with_another_password_is_passed_over() {
    let old = RedisServer::start_with(&["--requirepass", "other"]);
    let new = RedisServer::start_with(&["--requirepass", "s3cret"]);
    let proxy = Proxy::start(&new).await;
    proxy.delay_replies(ms(20));
    let url = proxy.url();
    let (_, port) = url.trim_end_matches('/').rsplit_once(':').unwrap();
    let urls = [
        always(at(&old.port().to_string())).await,
        always(at(port)).await,
        always(at(port)).await,
    ];
    let store = RedisStore::builder(RedisSource::sentinels(urls, "redis://:s3cret@main"))
        .connect_timeout(TEST_TIMEOUT);
    let error = store.connect().await.err().map(|error| with_causes(&error));
    assert_eq!(error, None);
}
