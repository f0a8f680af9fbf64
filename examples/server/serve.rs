//! Listens, says what to try, and shuts down.

use std::{
    env,
    error::Error,
    io::{self, Write, stdout},
    net::SocketAddr,
    sync::Arc,
    time::Duration,
};

use axum::Router;
use tokio::{net::TcpListener, sync::Notify, time::sleep};
use tower_sliding_window::Limit;

use crate::setting;

/// The time that open requests have at shutdown.
const GRACE: Duration = Duration::from_secs(3);

pub(crate) async fn serve(app: Router, hello: &Limit) -> Result<(), Box<dyn Error>> {
    let port = setting("PORT", "3000");
    let port: u16 = port
        .parse()
        .map_err(|error| format!("PORT={port:?} is not a port: {error}"))?;
    let listener = TcpListener::bind(("127.0.0.1", port)).await;
    let listener = listener
        .map_err(|error| format!("cannot listen on port {port}; PORT sets another: {error}"))?;
    let address = listener.local_addr()?;
    // Before the text that says the server is up, so that no signal after it is missed.
    let shutdown = shutdown_signal()?;
    writeln!(
        stdout(),
        "\
listening on http://{address}
store: {store}

route             limit                       counted by        without a store
GET  /hello       {hello:<27} client address    open
POST /login       3 in 60 s                   client address    closed (503)
GET  /api/items   10 in 1 s and 100 in 60 s   x-api-key         local: half of each limit
GET  /api/search  the same, at a cost of 10   x-api-key         closed (503): 10 is more than half of 10
GET  /health      none

watch: http://{address}/
try: curl -i http://{address}/hello",
        store = place(),
        hello = format!("{} in {} s", hello.units(), hello.window().as_secs_f64()),
    )?;

    let signalled = Arc::new(Notify::new());
    let grace = Arc::clone(&signalled);
    let shutdown = async move {
        shutdown.await;
        signalled.notify_one();
    };
    // `ClientIp` needs the address of each connection.
    let served = axum::serve(
        listener,
        app.into_make_service_with_connect_info::<SocketAddr>(),
    );
    tokio::select! {
        ended = served.with_graceful_shutdown(shutdown) => ended?,
        // A client that never ends its request, or reads no response, does not keep the server up.
        () = async { grace.notified().await; sleep(GRACE).await } => {}
    }
    writeln!(stdout(), "shut down")?;
    Ok(())
}

/// The store, in words.
pub(crate) fn place() -> &'static str {
    env::var_os("REDIS_URL").map_or("in this process; REDIS_URL shares it", |_| "Redis, shared")
}

/// Ctrl-C, and on Unix SIGTERM.
#[cfg(unix)]
pub(crate) fn shutdown_signal() -> io::Result<impl Future<Output = ()> + Send> {
    use tokio::signal::unix::{SignalKind, signal};

    let (mut interrupt, mut terminate) = (
        signal(SignalKind::interrupt())?,
        signal(SignalKind::terminate())?,
    );
    Ok(async move {
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
    })
}

#[cfg(not(unix))]
pub(crate) fn shutdown_signal() -> io::Result<impl Future<Output = ()> + Send> {
    Ok(async {
        let _ = tokio::signal::ctrl_c().await;
    })
}
