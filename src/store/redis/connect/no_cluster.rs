//! `cluster.rs` without the feature `cluster`: its types have no values, so the compiler removes the code that uses them.

use std::fmt;

use redis::{Cmd, RedisError, RedisResult, Value};

use super::{invalid::InvalidRedisConfig, settings::ConnectionSettings};

pub(super) enum Cluster {}

pub(crate) enum ClusterConnections {}

impl Cluster {
    pub(super) fn new(_: &[String], _: &ConnectionSettings) -> Result<Self, InvalidRedisConfig> {
        Err(InvalidRedisConfig::new("a cluster needs this crate's feature `cluster`"))
    }

    pub(super) async fn connect(&self) -> RedisResult<ClusterConnections> {
        match *self {}
    }
}

impl fmt::Display for Cluster {
    fn fmt(&self, _: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {}
    }
}

impl ClusterConnections {
    pub(super) async fn send(&self, _: &Cmd, _: bool) -> RedisResult<Value> {
        match *self {}
    }

    pub(super) fn are_silent(&self, _: u32) -> bool {
        match *self {}
    }
}

pub(crate) fn was_not_run(_: &RedisError) -> bool {
    false
}
