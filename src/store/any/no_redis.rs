//! In the place of `RedisStore` without the feature `redis`: a store of which there is no value.

use std::future::Pending;

use crate::{
    check::Check,
    decision::Decision,
    error::StoreError,
    key::Key,
    limit::Limit,
    settlement::{Settled, Settlement},
    store::interface::Store,
};

pub(super) type RedisDecide = Pending<Result<Decision, StoreError>>;
pub(super) type RedisSettle = Pending<Result<Settled, StoreError>>;
pub(super) type RedisReset = Pending<Result<(), StoreError>>;

#[derive(Clone, Debug)]
pub(super) enum RedisStore {}

impl RedisStore {
    pub(super) async fn try_out(&self) -> Result<(), StoreError> {
        match *self {}
    }
}

impl Store for RedisStore {
    type Decide = RedisDecide;
    type Settle = RedisSettle;
    type Reset = RedisReset;

    fn decide(&self, _: Check) -> RedisDecide {
        match *self {}
    }

    fn settle(&self, _: Settlement) -> RedisSettle {
        match *self {}
    }

    fn reset(&self, _: Limit, _: Key) -> RedisReset {
        match *self {}
    }
}
