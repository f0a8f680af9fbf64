//! An HTTP client for servers on this machine.

use http::{HeaderMap, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::TokioExecutor,
};

#[derive(Clone)]
pub(crate) struct HttpClient(Client<HttpConnector, Full<Bytes>>);

pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) body: String,
}

impl HttpClient {
    pub(crate) fn new() -> Self {
        Self(Client::builder(TokioExecutor::new()).build_http())
    }

    /// Speaks HTTP/2 from the first byte.
    pub(crate) fn http2() -> Self {
        Self(
            Client::builder(TokioExecutor::new())
                .http2_only(true)
                .build_http(),
        )
    }

    pub(crate) async fn get(&self, url: &str) -> Answer {
        self.send("GET", url, &[]).await
    }

    pub(crate) async fn send(&self, method: &str, url: &str, headers: &[(&str, &str)]) -> Answer {
        self.send_with(method, url, headers, "").await
    }

    pub(crate) async fn send_with(
        &self,
        method: &str,
        url: &str,
        headers: &[(&str, &str)],
        body: &str,
    ) -> Answer {
        let (parts, body) = self.open(method, url, headers, body).await.into_parts();
        let body = body.collect().await.unwrap().to_bytes();
        Answer {
            status: parts.status,
            headers: parts.headers,
            body: String::from_utf8_lossy(&body).into_owned(),
        }
    }

    /// Waits for no more than the head of the response.
    pub(crate) async fn open(
        &self,
        method: &str,
        url: &str,
        headers: &[(&str, &str)],
        body: &str,
    ) -> Response<Incoming> {
        let request = Request::builder().method(method).uri(url);
        let request = headers.iter().fold(request, |request, (name, value)| {
            request.header(*name, *value)
        });
        self.0
            .request(request.body(Full::from(body.to_owned())).unwrap())
            .await
            .unwrap()
    }
}

impl Answer {
    /// The value of a header that is a number.
    pub(crate) fn number(&self, name: &str) -> Option<u64> {
        self.headers
            .get(name)
            .map(|value| value.to_str().unwrap().parse().unwrap())
    }
}
