//! Exact, distributed rate limiting for tower and axum on Redis.
mod admission;
pub mod check;
pub mod decision;
pub mod error;
pub mod key;
pub mod limit;
pub mod limiter;
pub mod middleware;
pub mod store;
mod window;

#[cfg(feature = "redis")]
#[doc(inline)]
pub use self::store::RedisStore;
#[doc(inline)]
pub use self::{
    admission::AdmissionId,
    check::{Charge, Check, DuplicateCharge, NeverFits},
    decision::{Decision, LimitStatus},
    error::{Error, StoreError},
    key::Key,
    limit::{InvalidLimit, Limit},
    limiter::{FailureMode, Limiter},
    middleware::{
        Degraded, DuplicateLimit, EXPOSED_HEADERS, JsonResponse, KeyedLimit, RateLimit, RateLimitLayer, Rejection,
        RejectionResponse, ResetFormat,
        extract::{ApiKey, ClientIp, Header, KeyError, KeyExtractor, PeerIp, Secret},
    },
    store::{ManualClock, MemoryStore, Store},
};
