//! The app of a row: the layer with its options, the layers around it, and how requests reach it.

use std::{
    any::Any,
    panic::{AssertUnwindSafe, catch_unwind},
    time::Duration,
};

use axum::{Router, body::Body, extract::Request, middleware::from_fn};
use http::{HeaderMap, StatusCode};
use http_body_util::BodyExt;
use tokio::time::timeout;
#[cfg(feature = "grpc")]
use tower_sliding_window::middleware::GrpcResponse;
use tower_sliding_window::{
    Charge, Check, Decision, Everyone, Key, Limit, Limiter, RateLimitLayer,
};

use super::{
    book::{Book, DOINGS, Doing, HANDLED, Said},
    covering::Row,
    stores::Stores,
    table::{self, Apply, CLIENT, LISTED, LISTED_ADDRESS, PLACES, UNITS, WINDOW},
};
use crate::support::{http_client::HttpClient, http_server::serve};

const DOING: &str = "x-doing";
const GRPC: &str = "application/grpc";

/// The name of the limit under test, and of the place beside it.
pub(super) const MAIN: &str = "main";
pub(super) const PLACE: &str = "place";

pub(super) struct App {
    pub(super) row: Row,
    pub(super) book: Book,
    pub(super) limiter: Limiter,
    pub(super) limit: Limit,
    beside: Option<Limit>,
    /// The layer under test, to peek and to reset.
    layer: RateLimitLayer,
    /// `None` without a transport.
    url: Option<(String, HttpClient)>,
}

/// What a client sees.
pub(super) struct Reply {
    pub(super) status: StatusCode,
    pub(super) headers: HeaderMap,
    pub(super) body: String,
}

impl Reply {
    /// True if the handler has made it.
    pub(super) fn is_handled(&self) -> bool {
        self.headers.contains_key(HANDLED)
    }
}

/// A value for `Decision` as the layer under test left it, for the handler behind an inner layer.
#[derive(Clone, Copy)]
struct Subject(Option<Said>);

fn said(decision: &Decision) -> Option<Said> {
    let is_subject = decision
        .statuses()
        .any(|status| status.limit.name() == MAIN);
    is_subject.then(|| Said {
        at: decision.at(),
        is_local: decision.local_cause().is_some(),
    })
}

fn text_of(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().cloned();
    text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()))
        .unwrap_or_default()
}

impl App {
    /// What building refuses is an error, or a panic with the sentence.
    pub(super) async fn build(row: Row, stores: &Stores) -> Result<Self, (Row, String)> {
        let limiter = match stores.limiter(&row).await {
            Ok(limiter) => limiter,
            Err(sentence) => return Err((row, sentence)),
        };
        let made = catch_unwind(AssertUnwindSafe(|| Self::layer_of(&row, &limiter)));
        match made.unwrap_or_else(|panic| Err(text_of(&*panic))) {
            Err(sentence) => Err((row, sentence)),
            Ok((limit, beside, layer)) => {
                let mut app = Self {
                    row,
                    book: Book::default(),
                    limiter,
                    limit,
                    beside,
                    layer,
                    url: None,
                };
                if !app.is_alone() {
                    app.url = Some(app.serve().await);
                }
                Ok(app)
            }
        }
    }

    fn layer_of(
        row: &Row,
        limiter: &Limiter,
    ) -> Result<(Limit, Option<Limit>, RateLimitLayer), String> {
        let mut limit = Limit::new(MAIN, UNITS, WINDOW).unwrap();
        for value in &row.values {
            if let Apply::Limit(apply) = value.apply {
                limit = apply(limit);
            }
        }
        let mut keyed = table::keyed(row.of("kind"), row.of("chosen"), &limit);
        let beside = match row.of("beside") {
            "a place" | "a place of another key" => Some(Limit::concurrent(PLACE, PLACES)),
            "a window" | "a window of another key" => Some(Limit::per_hour("beside", 1_000)),
            _ => None,
        };
        let mut layer = RateLimitLayer::new(limiter.clone());
        for value in &row.values {
            match value.apply {
                Apply::Keyed(apply) => keyed = apply(keyed),
                Apply::Layer(apply) => layer = apply(layer),
                _ => {}
            }
        }
        // For a limit that is chosen, each request would be refused instead.
        if row.of("chosen") != "by" {
            let mut fixed = table::keyed(row.of("kind"), "by", &limit);
            for value in &row.values {
                if let Apply::Keyed(apply) = value.apply {
                    fixed = apply(fixed);
                }
            }
            drop(
                layer
                    .clone()
                    .limits([fixed])
                    .map_err(|error| error.to_string())?,
            );
        }
        let limits = [
            Some(keyed),
            beside.clone().map(|limit| {
                if row.of("beside").ends_with("of another key") {
                    limit.by(table::by_tenant)
                } else {
                    limit.by(table::by_client)
                }
            }),
        ];
        let layer = layer
            .limits(limits.into_iter().flatten())
            .map_err(|error| error.to_string())?;
        Ok((limit, beside, layer))
    }

    pub(super) fn is_alone(&self) -> bool {
        self.row.of("transport") == "no transport"
    }

    fn is_grpc(&self) -> bool {
        self.row.of("transport") == "gRPC"
    }

    async fn serve(&self) -> (String, HttpClient) {
        let (book, ends_with_head) = (
            self.book.clone(),
            self.row.of("response") == "free_with_head",
        );
        let handler = move |request: Request| {
            let (book, (parts, _)) = (book.clone(), request.into_parts());
            async move {
                let header = |name| parts.headers.get(name).unwrap().to_str().unwrap();
                let doing = DOINGS[header(DOING).parse::<usize>().unwrap()];
                let said = parts
                    .extensions
                    .get::<Subject>()
                    .and_then(|subject| subject.0);
                let decision = parts.extensions.get::<Decision>().cloned();
                let client = header(CLIENT).to_owned();
                drop(parts.extensions);
                book.handle(client, doing, said, decision, ends_with_head)
                    .await
            }
        };
        let notes = from_fn(async |mut request: Request, next: axum::middleware::Next| {
            let subject = Subject(request.extensions().get::<Decision>().and_then(said));
            request.extensions_mut().insert(subject);
            next.run(request).await
        });
        let other = |name| {
            RateLimitLayer::new(self.limiter.clone())
                .limit(Limit::per_hour(name, 1_000_000).by(Everyone))
        };
        let mut app = Router::new().fallback(handler);
        if self.row.of("stack") == "in front of another layer" {
            app = app.layer(other("inner"));
        }
        app = app.layer(notes);
        app = match (self.row.of("response"), self.row.of("transport")) {
            #[cfg(feature = "grpc")]
            (_, "gRPC") => app.layer(self.layer.clone().respond_with(GrpcResponse)),
            ("respond_with", _) => app.layer(self.layer.clone().respond_with(table::respond)),
            _ => app.layer(self.layer.clone()),
        };
        if self.row.of("stack") == "behind another layer" {
            app = app.layer(other("outer"));
        }
        (serve(app).await, self.http_client())
    }

    /// A key of this row alone.
    pub(super) fn client(&self, name: &str) -> String {
        format!("{}-{}-{name}", self.row.seed, self.row.number)
    }

    /// The charge of the limiter alone, for a request of a client.
    fn check(&self, client: &str) -> Result<Check, String> {
        let key = Key::new(CLIENT, client);
        let cost = match self.row.of("charge") {
            "a cost of 2" | "a layer's cost of 2" => 2,
            "a cost of 0" => 0,
            _ => 1,
        };
        let (limit, part) = match self.row.of("kind") {
            "split" => {
                let split = table::split(&self.limit);
                (split.part.clone(), split.next_key(key.clone()))
            }
            _ => (self.limit.clone(), key.clone()),
        };
        let charge = Charge::new(limit, part, cost).map_err(|error| error.to_string())?;
        let charge = match self.row.of("show") {
            "in_shadow" => charge.in_shadow(),
            "hidden" => charge.hidden(),
            _ => charge,
        };
        let beside = self
            .beside
            .clone()
            .map(|limit| Charge::new(limit, self.key_beside(client), 1).unwrap());
        Ok(beside
            .into_iter()
            .fold(Check::new(charge), |check, charge| {
                check.and(charge).unwrap()
            }))
    }

    pub(super) async fn call(&self, client: &str, doing: Doing) -> Reply {
        self.call_as(client, doing, &[]).await
    }

    /// As one that the lists of the layer name.
    pub(super) async fn call_listed(&self, client: &str) -> Reply {
        self.call_as(
            client,
            Doing::Reply,
            &[(LISTED, "yes"), ("x-forwarded-for", LISTED_ADDRESS)],
        )
        .await
    }

    async fn call_as(&self, client: &str, doing: Doing, headers: &[(&str, &str)]) -> Reply {
        let response = self.open(client, doing, headers).await;
        let (mut head, body) = response.into_parts();
        let body = body
            .collect()
            .await
            .map(|body| body.to_bytes())
            .unwrap_or_default();
        // As HTTP would say it.
        match head
            .headers
            .get("grpc-status")
            .map(|status| status.to_str().unwrap())
        {
            Some("8") => head.status = StatusCode::TOO_MANY_REQUESTS,
            Some("7") => head.status = StatusCode::FORBIDDEN,
            Some("14") => head.status = StatusCode::SERVICE_UNAVAILABLE,
            _ => {}
        }
        Reply {
            status: head.status,
            headers: head.headers,
            body: String::from_utf8_lossy(&body).into_owned(),
        }
    }

    /// Until the head of the response.
    pub(super) async fn open(
        &self,
        client: &str,
        doing: Doing,
        headers: &[(&str, &str)],
    ) -> http::Response<Body> {
        match &self.url {
            Some((_, http)) => self.open_over(http, client, doing, headers).await,
            None => self.ask_limiter(client, doing).await,
        }
    }

    async fn open_over(
        &self,
        http: &HttpClient,
        client: &str,
        doing: Doing,
        headers: &[(&str, &str)],
    ) -> http::Response<Body> {
        let (url, _) = self.url.as_ref().expect("an app with a transport");
        let number = DOINGS
            .iter()
            .position(|one| *one == doing)
            .unwrap()
            .to_string();
        let mut all = vec![(CLIENT, client), (DOING, &*number)];
        all.extend(headers);
        all.extend(self.is_grpc().then_some(("content-type", GRPC)));
        http.open("POST", url, &all, "").await.map(Body::new)
    }

    /// Hangs up after this time. Each has a connection of its own, which ends then.
    pub(super) async fn call_and_leave(&self, client: &str, doing: Doing, after: Duration) {
        if self.url.is_some() {
            let http = self.http_client();
            drop(timeout(after, self.open_over(&http, client, doing, &[])).await);
        } else {
            drop(timeout(after, self.ask_limiter(client, doing)).await);
        }
    }

    fn http_client(&self) -> HttpClient {
        if self.row.of("transport") == "HTTP/1" {
            HttpClient::new()
        } else {
            HttpClient::http2()
        }
    }

    /// What a job does: it checks, and works while it keeps the decision.
    async fn ask_limiter(&self, client: &str, doing: Doing) -> http::Response<Body> {
        let status = |status| {
            http::Response::builder()
                .status(status)
                .body(Body::empty())
                .unwrap()
        };
        let decision = match self.limiter.check_all(self.check(client).unwrap()).await {
            Err(_) => return status(StatusCode::SERVICE_UNAVAILABLE),
            Ok(decision) if !decision.is_allowed() => return status(StatusCode::TOO_MANY_REQUESTS),
            Ok(decision) => decision,
        };
        let said = said(&decision);
        let response = self
            .book
            .handle(
                client.to_owned(),
                doing,
                said,
                Some(decision.clone()),
                false,
            )
            .await;
        // The decision lives as long as the body.
        let (head, body) = response.into_parts();
        let body = body.map_frame(move |frame| {
            let _ = &decision;
            frame
        });
        http::Response::from_parts(head, Body::new(body))
    }

    /// The key of the limit beside the one under test.
    fn key_beside(&self, client: &str) -> Key {
        let key = Key::new(CLIENT, client);
        if self.row.of("beside").ends_with("of another key") {
            table::tenant_of(&key)
        } else {
            key
        }
    }

    /// The units that the window of another key has counted for a client. `None` without such a
    /// limit, or without an answer of the store.
    pub(super) async fn used_beside(&self, client: &str) -> Option<u64> {
        let limit = self.beside.as_ref()?;
        if self.row.of("beside") != "a window of another key" {
            return None;
        }
        let decision = self
            .limiter
            .peek(limit, self.key_beside(client))
            .await
            .ok()?;
        Some(decision.binding().used)
    }

    /// The limits of a client and the keys under which they count, with all parts of a split limit.
    fn counted(&self, client: &str) -> Vec<(Limit, Key)> {
        let mut counted: Vec<_> = self
            .beside
            .iter()
            .map(|limit| (limit.clone(), self.key_beside(client)))
            .collect();
        counted.extend(self.parts(client));
        counted
    }

    /// The limit under test, or all of its parts.
    fn parts(&self, client: &str) -> Vec<(Limit, Key)> {
        let key = Key::new(CLIENT, client);
        if self.row.of("kind") != "split" {
            return vec![(self.limit.clone(), key)];
        }
        let split = table::split(&self.limit);
        split
            .keys(key)
            .map(|key| (split.part.clone(), key))
            .collect()
    }

    /// The places that this client holds, of all concurrent limits. `None` without an answer of the
    /// store.
    pub(super) async fn held(&self, client: &str) -> Option<u64> {
        let mut held = 0;
        for (limit, key) in self.counted(client) {
            let decision = self.limiter.peek(&limit, key).await.ok()?;
            if decision.local_cause().is_some() {
                return None;
            }
            held += if limit.is_concurrent() {
                decision.binding().used
            } else {
                0
            };
        }
        Some(held)
    }

    pub(super) async fn reset(&self, client: &str) -> bool {
        let ban = (table::ban(), Key::new(CLIENT, client));
        for (limit, key) in self.counted(client).into_iter().chain([ban]) {
            if !limit.is_concurrent() && self.limiter.reset(&limit, key).await.is_err() {
                return false;
            }
        }
        true
    }

    /// As by hand, where no layer keeps the places.
    pub(super) async fn reset_places(&self, client: &str) {
        for (limit, key) in self.counted(client) {
            if limit.is_concurrent() {
                let _ = self.limiter.reset(&limit, key).await;
            }
        }
    }

    /// Blocks all parts of the limit under test.
    pub(super) async fn block(&self, client: &str, time: Duration) -> bool {
        for (limit, key) in self.parts(client) {
            if self.limiter.block(&limit, key, time).await.is_err() {
                return false;
            }
        }
        true
    }
}
