//! HTTP servers on this machine.

use std::net::SocketAddr;

use axum::Router;
use tokio::net::TcpListener;

/// Serves an app until the test ends, and returns its URL.
pub(crate) async fn serve(app: Router) -> String {
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async { axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).await });
    url
}
