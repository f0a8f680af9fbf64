//! HTTP servers on this machine.

use std::{error::Error, net::SocketAddr};

use axum::{Router, body::Body};
use http::{Request, Response};
use hyper::body::Bytes;
use hyper_util::{
    rt::{TokioExecutor, TokioIo},
    server::conn::auto::Builder,
    service::TowerToHyperService,
};
use tokio::net::TcpListener;
use tower::{Service, ServiceExt};

/// Serves an app until the test ends, and returns its URL.
pub(crate) async fn serve(app: Router) -> String {
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async {
        axum::serve(
            listener,
            app.into_make_service_with_connect_info::<SocketAddr>(),
        )
        .await
    });
    url
}

/// Serves a service by hyper, in HTTP/1.1 and HTTP/2, until the test ends, and returns its URL.
pub(crate) async fn serve_by_hyper<S, B>(service: S) -> String
where
    S: Service<
            Request<Body>,
            Response = Response<B>,
            Future: Send,
            Error: Into<Box<dyn Error + Send + Sync>>,
        >,
    S: Clone + Send + Sync + 'static,
    B: http_body::Body<Data = Bytes, Error: Into<Box<dyn Error + Send + Sync>>> + Send + 'static,
{
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move {
        while let Ok((connection, _)) = listener.accept().await {
            let service = service
                .clone()
                .map_request(|request: Request<hyper::body::Incoming>| request.map(Body::new));
            tokio::spawn(async move {
                let service = TowerToHyperService::new(service);
                let builder = Builder::new(TokioExecutor::new());
                drop(
                    builder
                        .serve_connection(TokioIo::new(connection), service)
                        .await,
                );
            });
        }
    });
    url
}
