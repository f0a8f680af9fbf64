//! The module `testing`: what its faulty store does; and the report of the kit for authors of
//! stores.

mod faulty_store;
mod report;
