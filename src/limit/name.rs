//! A limit's name.

use std::{
    borrow::Cow,
    fmt,
    hash::{Hash, Hasher},
    ops::Deref,
    sync::Arc,
};

/// A literal, or a name that is read at run time. Each check clones its limit's name a few times,
/// so a name that is not a literal shares its text with its clones.
#[derive(Clone)]
pub(crate) enum Name {
    Literal(&'static str),
    Shared(Arc<str>),
}

impl From<Cow<'static, str>> for Name {
    fn from(name: Cow<'static, str>) -> Self {
        match name {
            Cow::Borrowed(name) => Self::Literal(name),
            Cow::Owned(name) => Self::Shared(name.into()),
        }
    }
}

#[cfg(feature = "metrics")]
impl From<Name> for metrics::SharedString {
    fn from(name: Name) -> Self {
        match name {
            Name::Literal(name) => Self::const_str(name),
            Name::Shared(name) => Self::from_shared(name),
        }
    }
}

impl Deref for Name {
    type Target = str;

    fn deref(&self) -> &str {
        match self {
            Self::Literal(name) => name,
            Self::Shared(name) => name,
        }
    }
}

impl PartialEq for Name {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}

impl Eq for Name {}

impl Hash for Name {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (**self).hash(state);
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&**self, f)
    }
}
