//! Limits that are chosen for each request.

use std::{error::Error, sync::Arc};

use http::request::Parts;

use super::{
    super::{draft::Choice, extract::KeyExtractor},
    KeyedLimit, Source,
};
use crate::{error::ChoiceError, limit::Limit};

impl KeyedLimit {
    /// A limit that is chosen for each request, by its plan, tenant or path. `choose` reads the request, and what it
    /// returns may then take its time, in a cache or a database.
    ///
    /// ```
    /// use std::convert::Infallible;
    /// use http::request::Parts;
    /// use tower_sliding_window::{Header, KeyedLimit, Limit};
    ///
    /// const FREE: Limit = Limit::per_hour("calls", 100);
    /// const PRO: Limit = Limit::per_hour("calls", 10_000);
    ///
    /// let calls = KeyedLimit::chosen(Header::new("x-tenant"), |parts: &Parts| {
    ///     let tenant = parts.headers["x-tenant"].clone();
    ///     async move {
    ///         Ok::<_, Infallible>(match tenant.as_bytes() {
    ///             b"us" => None, // no limit
    ///             b"acme" => Some(PRO),
    ///             _ => Some(FREE),
    ///         })
    ///     }
    /// });
    /// ```
    ///
    /// 1. A key comes first: a request without one is answered before anything is chosen.
    /// 2. `None` limits nothing: the request is charged by the layer's other limits only, and if there are none, goes
    ///    through without a decision and without figures.
    /// 3. All limits of a layer that have to be chosen are chosen at once. Choice and decision have the layer's deadline
    ///    together. The choice takes no time from layers further in.
    /// 4. Nothing is chosen for a request that the layer's other limits are known to refuse: because they have refused it
    ///    just now and the [`DenyCache`](crate::DenyCache) remembers it, or because the store
    ///    [decides at once](crate::Store::decide_now), as `MemoryStore` does. Its retry time is then a true "not before".
    ///    So a client that is over a limit by address costs no look-ups, but for one each time that a refusal is forgotten,
    ///    after a second. Clients that are not over one cost a look-up a request: keep a cache in `choose`. Where even the
    ///    first refusal is to cost none, put the other limits into a layer of their own outside of this one. A layer that
    ///    [waits](crate::RateLimitLayer::wait_up_to) for room always chooses.
    /// 5. An error, or a choice that is too slow, is [`Error::LimitNotChosen`](crate::Error::LimitNotChosen), and concerns this limit
    ///    alone. With a [fallback](Self::fallback), that is charged in its place. Without one, the layer's failure mode
    ///    decides. Fail-open leaves the limit out: the others count and refuse as ever, and show their figures. Fail-closed and
    ///    fail-local answer 503 at once, and nothing is charged. In the [shadow](Self::in_shadow) the limit is left out. So
    ///    return no error for a tenant that is to be kept out, which fail-open lets in:
    ///    [`deny`](crate::RateLimitLayer::deny) it, or leave it to your authentication.
    /// 6. Two limits of one name for one key are one limit: [`PeerIp`](crate::PeerIp) and [`ClientIp`](crate::ClientIp)
    ///    give one key for a client without a proxy. The stricter of them is decided. It has fewer units, or the longer
    ///    window where these are equal. It is charged the larger cost, and [settled](Self::settle) at the larger. A limit in
    ///    the shadow is left out beside one that is not.
    /// 7. Limits of one name and one algorithm share what they count for a key. A tenant that moves from one plan to another
    ///    of the same window takes along what is used. Give all limits of a name one window. A decision forgets what has left
    ///    its own window, and an admission lets the key expire by it. So between two requests under a longer window, one under
    ///    a shorter window lets the longer one forget all that is older than the shorter one: at worst the longer one admits
    ///    its units again in each of the shorter windows. The shorter one holds if both count by an exact log, and nothing is
    ///    [reserved](Self::settle) under the longer one; otherwise it may count too little as well. Redis may tell either a
    ///    wrong reset. Limits of different algorithms count apart.
    /// 8. A choice that panics ends its own request, as a handler that panics does. Nothing is charged for it.
    #[must_use]
    pub fn chosen<E, C, F, L, X>(extractor: E, choose: C) -> Self
    where
        E: KeyExtractor,
        C: Fn(&Parts) -> F + Send + Sync + 'static,
        F: Future<Output = Result<L, X>> + Send + 'static,
        L: Into<Option<Limit>>,
        X: Into<Box<dyn Error + Send + Sync>>,
    {
        let choose = move |parts: &Parts| -> Choice {
            let choice = choose(parts);
            Box::pin(async move {
                match choice.await {
                    Ok(limit) => Ok(limit.into()),
                    Err(error) => Err(ChoiceError::Failed(error.into().into())),
                }
            })
        };
        Self::new(Source::Chosen(Arc::new(choose)), extractor)
    }

    /// The limit that is charged where no limit can be [chosen](Self::chosen), since the choice fails or is too slow. Default:
    /// none, and the layer's failure mode decides. For a limit that is not chosen it has no meaning.
    ///
    /// ```
    /// use http::request::Parts;
    /// use tower_sliding_window::{Header, KeyedLimit, Limit};
    ///
    /// # async fn plan_of(_: http::HeaderValue) -> Result<Limit, std::io::Error> { Ok(Limit::per_hour("calls", 10_000)) }
    /// // While the database of plans is gone, each tenant has what the smallest plan has.
    /// let calls = KeyedLimit::chosen(Header::new("x-tenant"), |parts: &Parts| plan_of(parts.headers["x-tenant"].clone()))
    ///     .fallback(Limit::per_hour("calls", 100));
    /// ```
    ///
    /// 1. It is decided together with the layer's other limits, in every failure mode. All that is said of a chosen limit
    ///    holds for it: its key and cost, its settlement, its parts, the shadow, and what becomes of two limits that are one.
    /// 2. Under the name of the limits that it stands in for, it shares their units, as rule 7 of [`chosen`](Self::chosen)
    ///    says: give it their window, too. A tenant that has used more than it allows is then refused. Under a name of its own
    ///    it counts by itself, so that a window may hold what both allow.
    /// 3. A cost above it is [`NeverFits`](crate::NeverFits), as it is above any limit, though it may fit into the one that
    ///    would have been chosen.
    /// 4. It is told by [`Degraded::fallbacks`](crate::Degraded::fallbacks) in the response's extensions, by a log line at
    ///    most once a second, and in the [metrics](mod@crate::metrics).
    #[must_use]
    pub fn fallback(mut self, limit: Limit) -> Self {
        self.fallback = Some(limit);
        self
    }
}
