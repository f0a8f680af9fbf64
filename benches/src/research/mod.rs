//! Questions that the design of prefetches had to answer. A user of the crate need not ask them
//! again. They run only if they are named, and `benches/README.md` has their tables.
//!
//! * `early_refusals`: how many requests are refused early because other processes hold units
//!   unspent? With a life of 100 ms none at 80 % of the limit, and up to 5 % at the limit and above.
//!   A lease refuses fewer, and admits units above the limit.
//! * `regions`: does prefetch serve a limit that five regions share? Half of the requests do not
//!   wait, and 99.8 % of the admissions of an exact log are there. Once a region is cut off, leases
//!   as of Doorman admit units above the limit.

pub(crate) mod early_refusals;
pub(crate) mod regions;
