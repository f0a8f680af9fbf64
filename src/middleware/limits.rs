//! The limits of a layer.

use std::{error, fmt, iter, sync::Arc};

use super::{dropped::WhenDropped, keyed_limit::KeyedLimit};
use crate::limit::Limit;

/// The limits of a layer, at least one. No two that are not chosen for each request have one name.
#[derive(Clone, Debug)]
pub struct Limits {
    first: KeyedLimit,
    rest: Vec<KeyedLimit>,
    traits: Traits,
    /// By their places, if one of them settles requests that are dropped.
    when_dropped: Option<Arc<[WhenDropped]>>,
}

/// What is asked of all limits for each request, and does not change from one to the next.
#[derive(Clone, Copy, Debug)]
pub(super) struct Traits {
    /// Whether one of them settles.
    pub(super) settles: bool,
    /// Whether one of them heeds the upstream.
    pub(super) heeds_upstream: bool,
    /// Whether one of them is chosen for each request.
    pub(super) chooses: bool,
    /// Whether one of them is in the shadow.
    pub(super) has_shadow: bool,
    /// Whether all of them are.
    pub(super) is_shadow: bool,
}

impl Limits {
    pub(super) fn new(first: KeyedLimit) -> Self {
        let mut limits = Self { traits: Traits::of(&first), first, rest: Vec::new(), when_dropped: None };
        limits.when_dropped = limits.list_dropped();
        limits
    }

    /// Adds a limit, unless there is one of that name already.
    pub(super) fn push(&mut self, limit: KeyedLimit) -> Result<(), InvalidLimits> {
        if let Some(name) = limit.limit().map(Limit::name)
            && self.iter().any(|other| other.limit().is_some_and(|other| other.name() == name))
        {
            return Err(InvalidLimits::SameName { name: name.to_owned() });
        }
        self.traits = self.traits.and(Traits::of(&limit));
        self.rest.push(limit);
        self.when_dropped = self.list_dropped();
        Ok(())
    }

    fn list_dropped(&self) -> Option<Arc<[WhenDropped]>> {
        let all: Arc<[_]> = self.iter().map(KeyedLimit::when_dropped).collect();
        all.iter().any(|limit| matches!(limit, WhenDropped::Costs(_))).then_some(all)
    }

    pub(super) fn when_dropped(&self) -> Option<Arc<[WhenDropped]>> {
        self.when_dropped.clone()
    }

    pub(super) fn traits(&self) -> Traits {
        self.traits
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &KeyedLimit> {
        iter::once(&self.first).chain(&self.rest)
    }

    /// Their names, for a log line.
    pub(super) fn listed(&self) -> String {
        let names = self.iter().map(|limit| limit.limit().map_or("a chosen one", Limit::name));
        names.collect::<Vec<_>>().join(", ")
    }

    pub(super) fn get(&self, place: usize) -> Option<&KeyedLimit> {
        place.checked_sub(1).map_or(Some(&self.first), |place| self.rest.get(place))
    }
}

impl Traits {
    fn of(limit: &KeyedLimit) -> Self {
        Self {
            settles: limit.settles().is_some(),
            heeds_upstream: limit.heeds_upstream(),
            chooses: limit.limit().is_none(),
            has_shadow: limit.is_shadow(),
            is_shadow: limit.is_shadow(),
        }
    }

    fn and(self, other: Self) -> Self {
        Self {
            settles: self.settles || other.settles,
            heeds_upstream: self.heeds_upstream || other.heeds_upstream,
            chooses: self.chooses || other.chooses,
            has_shadow: self.has_shadow || other.has_shadow,
            is_shadow: self.is_shadow && other.is_shadow,
        }
    }
}

/// Limits that no layer can have.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum InvalidLimits {
    /// There are none, so nothing would be limited.
    None,
    /// Two have the same name, so they would count into each other.
    SameName {
        /// The name.
        name: String,
    },
}

impl fmt::Display for InvalidLimits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("a layer needs at least one limit"),
            Self::SameName { name } => write!(f, "two limits of one layer are named {name:?}"),
        }
    }
}

impl error::Error for InvalidLimits {}
