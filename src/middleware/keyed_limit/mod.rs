//! A limit, the extractor of its keys, and what it does otherwise than the others of its layer.

mod chosen;
mod settle;

use std::{fmt, num::NonZeroU32, sync::Arc, time::Duration};

use http::request::Parts;

use super::{
    claim::Claim,
    draft::{Choose, Draft, Open, Terms},
    dropped::WhenDropped,
    exchange::Exchange,
    extract::KeyExtractor,
    rejection::Rejection,
};
use crate::{
    check::Charge,
    key::Key,
    limit::Limit,
    split::{InvalidSplit, all_parts_of, number_of_parts},
};

/// How many units a request takes.
pub(super) type Cost = dyn Fn(&Parts) -> u64 + Send + Sync;

/// How many units a request has taken.
pub(super) type Settle = dyn Fn(&Exchange<'_>) -> u64 + Send + Sync;

/// Longer than most responses take, and short, since a client that hangs up keeps units from others for so long.
const DEFAULT_LEASE: Duration = Duration::from_secs(60);

/// A limit and the extractor of its keys: made by [`Limit::by`] or [`KeyedLimit::chosen`], taken by
/// [`RateLimitLayer::limit`](crate::RateLimitLayer::limit).
#[derive(Clone)]
pub struct KeyedLimit {
    source: Source,
    /// What is charged where none can be chosen.
    fallback: Option<Limit>,
    extractor: Arc<dyn KeyExtractor>,
    cost: Option<Arc<Cost>>,
    settle: Option<Arc<Settle>>,
    /// Whether it charges nothing before.
    counts_afterwards: bool,
    lease: Duration,
    /// What a dropped request has cost, if that is not left to its lease.
    dropped: Option<u64>,
    /// Whether it heeds the upstream, if that is not left to its extractor.
    heeds_upstream: Option<bool>,
    is_shadow: bool,
    is_hidden: bool,
    parts: Option<NonZeroU32>,
}

#[derive(Clone)]
enum Source {
    Fixed(Limit),
    Chosen(Arc<Choose>),
}

impl Limit {
    /// Counts requests by the key that `extractor` finds in them.
    #[must_use]
    pub fn by(self, extractor: impl KeyExtractor) -> KeyedLimit {
        KeyedLimit::new(Source::Fixed(self), extractor)
    }
}

impl KeyedLimit {
    fn new(source: Source, extractor: impl KeyExtractor) -> Self {
        Self {
            source,
            fallback: None,
            extractor: Arc::new(extractor),
            cost: None,
            settle: None,
            counts_afterwards: false,
            lease: DEFAULT_LEASE,
            dropped: None,
            heeds_upstream: None,
            is_shadow: false,
            is_hidden: false,
            parts: None,
        }
    }

    /// Whether an upstream that says to stay away [closes](crate::Limiter::pause) the limit, where the layer
    /// [heeds](crate::RateLimitLayer::heed_upstream) it. Default: yes for a limit by the called host, which is
    /// [`UpstreamHost`](crate::UpstreamHost), or that [and](KeyExtractor::and) something else; no for all others.
    ///
    /// The upstream closes it for all calls of the key, for its window at most. So say `true` only where all calls of a key
    /// go to one upstream: by [`Everyone`](crate::Everyone) in a client that has one upstream, or by an account there.
    ///
    /// ```
    /// use tower_sliding_window::{Everyone, Limit};
    ///
    /// let calls = Limit::per_hour("upstream", 5_000).by(Everyone).heed_upstream(true);
    /// ```
    #[must_use]
    pub fn heed_upstream(mut self, heeds: bool) -> Self {
        self.heeds_upstream = Some(heeds);
        self
    }

    /// Puts the limit into the shadow: it counts, and says what it would have refused, but refuses nothing. So a limit
    /// can be tried on real traffic.
    ///
    /// 1. What it would have refused is told by the [`Decision`](crate::Decision) in the request's extensions, by
    ///    [`ShadowRefusals`](crate::ShadowRefusals) in the response's, by a log line at most once a second, and, on
    ///    request, by a [header](crate::RateLimitLayer::shadow_header).
    /// 2. It is left out of a check that it has no key for, or whose cost is above it, and says that, too.
    /// 3. The figures that a client sees are those of the other limits of its layer, if there are any. So put it into one
    ///    layer with them: in a layer of its own it shows its figures, and of stacked layers those of the least left.
    /// 4. A layer whose limits are all in the shadow lets requests through without a decision, too, whatever its
    ///    failure mode.
    #[must_use]
    pub fn in_shadow(mut self) -> Self {
        self.is_shadow = true;
        self
    }

    /// Hides the limit from clients: it counts and refuses as any other, but neither headers nor the default body of a
    /// rejection tell of it. So a limit on the load of a whole service does not show that load to everybody. Default: clients
    /// see it.
    ///
    /// ```
    /// use tower_sliding_window::{Everyone, Limit, MemoryStore, PeerIp, RateLimitLayer};
    ///
    /// let layer = RateLimitLayer::new(MemoryStore::new())
    ///     .limit(Limit::per_second("service", 20_000).by(Everyone).hidden())
    ///     .limit(Limit::per_minute("requests", 60).by(PeerIp::new()));
    /// ```
    ///
    /// 1. The figures that a client sees are those of the layer's other limits, however little is left under this one. If
    ///    all limits of the layer are hidden, it shows none.
    /// 2. A refusal by hidden limits alone is a 429 with a `Retry-After`, which is true, but without figures: those of
    ///    another limit would say that there is something left. Its default body names no limit. If a limit that is not
    ///    hidden refuses as well, the figures and the name are that one's.
    /// 3. A cost above it is a 429 whose default body names neither the limit nor a number.
    /// 4. The server sees the limit: in the [`Decision`](crate::Decision), the extensions, metrics, log lines, and the text
    ///    of a [`Rejection`]. So a responder of your own should not hand these on.
    /// 5. In the [shadow](Self::in_shadow), its name is in no [header](crate::RateLimitLayer::shadow_header) either.
    /// 6. Of two limits that are [one](Self::chosen) for a request, the one that is decided is hidden if either is. Where one
    ///    refuses before the other is chosen, it is not known that they are one.
    ///
    /// To send no figures of any limit, tell the [layer](crate::RateLimitLayer::headers).
    #[must_use]
    pub fn hidden(mut self) -> Self {
        self.is_hidden = true;
        self
    }

    /// Splits the limit into so many parts that count apart, and charges each request to one of them: for a key that is
    /// too hot for one node of a Redis Cluster. [`split`](crate::split) has the rules.
    ///
    /// ```
    /// use tower_sliding_window::{Everyone, Limit};
    ///
    /// // 16 parts of 6,250 units, on all nodes.
    /// let requests = Limit::per_second("requests", 100_000).by(Everyone).split(16);
    /// ```
    ///
    /// 1. No window holds more than the limit, but some may hold less: the remainder is never admitted, and a request is
    ///    refused when its part is used up.
    /// 2. The figures that a client sees are those of the part. A part is asked and reset as one of a
    ///    [`Split`](crate::Split) of the same limit.
    /// 3. A [chosen](Self::chosen) limit that has fewer units than there are parts is split into as many as it has.
    /// 4. What is [settled](Self::settle) is settled in the part that was charged.
    /// 5. An upstream that is [heeded](Self::heed_upstream) closes all parts.
    ///
    /// # Panics
    ///
    /// If there are no parts, or more than units. Where their number comes from a configuration there is
    /// [`try_split`](Self::try_split).
    #[must_use]
    #[track_caller]
    pub fn split(self, parts: u32) -> Self {
        match self.try_split(parts) {
            Ok(split) => split,
            Err(error) => panic!("{error}"),
        }
    }

    /// Splits the limit, as [`split`](Self::split) does. The last number counts.
    ///
    /// # Errors
    ///
    /// [`InvalidSplit`], naming the values, if there are no parts, or more than units.
    pub fn try_split(mut self, parts: u32) -> Result<Self, InvalidSplit> {
        self.parts = Some(number_of_parts(self.limit(), parts)?);
        Ok(self)
    }

    /// The limit, whole also where it is [split](Self::split), unless it is [chosen](Self::chosen) for each request.
    #[must_use]
    pub fn limit(&self) -> Option<&Limit> {
        match &self.source {
            Source::Fixed(limit) => Some(limit),
            Source::Chosen(_) => None,
        }
    }

    pub(super) fn is_shadow(&self) -> bool {
        self.is_shadow
    }

    pub(super) fn settles(&self) -> Option<&Settle> {
        self.settle.as_deref()
    }

    pub(super) fn heeds_upstream(&self) -> bool {
        self.heeds_upstream.unwrap_or_else(|| self.extractor.is_by_upstream())
    }

    pub(super) fn when_dropped(&self) -> WhenDropped {
        match (&self.settle, self.dropped) {
            (None, _) => WhenDropped::StaysCharged,
            (Some(_), None) => WhenDropped::KeepsLease,
            (Some(_), Some(units)) => WhenDropped::Costs(units),
        }
    }

    /// Adds to a claim, in this place of the layer, what a request of this cost takes from the limit, which is not to be
    /// chosen. The layer may heed its upstream.
    #[inline]
    pub(super) fn charge(
        &self,
        parts: &Parts,
        cost: u64,
        heeds: bool,
        (place, claim): (usize, &mut Claim),
    ) -> Result<(), Rejection> {
        match &self.source {
            // Nearly always, so it is made where it stays.
            Source::Fixed(limit) if self.is_plain() && !heeds && cost <= limit.units() => {
                let key = self.extractor.extract(parts).map_err(Rejection::NoKey)?;
                claim.charge(place, Charge::fitting(limit.clone(), key, cost));
            }
            _ => claim.add(place, self.draft(parts, cost, heeds)?),
        }
        Ok(())
    }

    /// Whether there is nothing to it but a limit and the extractor of its keys.
    fn is_plain(&self) -> bool {
        self.cost.is_none() && self.settle.is_none() && !self.is_shadow && !self.is_hidden && self.parts.is_none()
    }

    /// What a request of this cost takes from the limit, in a layer that may heed its upstream.
    pub(super) fn draft(&self, parts: &Parts, cost: u64, heeds: bool) -> Result<Draft, Rejection> {
        let cost = self.cost.as_ref().map_or(cost, |own| own(parts));
        let terms = self.terms(heeds);
        let key = match self.extractor.extract(parts) {
            Ok(key) => key,
            Err(error) => return terms.forgive(self.limit(), Rejection::NoKey(error)),
        };
        match &self.source {
            Source::Fixed(limit) => terms.charge(limit.clone(), key, cost).map_err(Rejection::NeverFits),
            Source::Chosen(choose) => {
                let (choose, fallback) = (Arc::clone(choose), self.fallback.clone());
                Ok(Draft::Open(Open { choose, fallback, key, cost, terms }))
            }
        }
    }

    /// The key that was charged, or all parts of which it is one.
    pub(super) fn all_parts_of(&self, charged: &Key) -> Vec<Key> {
        self.parts.map_or_else(|| vec![charged.clone()], |parts| all_parts_of(charged, parts).collect())
    }

    #[inline]
    fn terms(&self, heeds: bool) -> Terms {
        Terms {
            lease: (self.settle.is_some() && !self.counts_afterwards).then_some(self.lease),
            heeds_upstream: heeds && self.heeds_upstream(),
            counts_afterwards: self.counts_afterwards,
            is_shadow: self.is_shadow,
            is_hidden: self.is_hidden,
            parts: self.parts,
        }
    }
}

impl fmt::Debug for KeyedLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeyedLimit")
            .field("limit", &self.limit())
            .field("fallback", &self.fallback)
            .field("settles", &self.settle.is_some())
            .field("counts_afterwards", &self.counts_afterwards)
            .field("heeds_upstream", &self.heeds_upstream())
            .field("is_shadow", &self.is_shadow)
            .field("is_hidden", &self.is_hidden)
            .field("parts", &self.parts)
            .finish_non_exhaustive()
    }
}
