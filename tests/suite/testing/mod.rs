//! The module `testing`: what its faulty store does, and which responses its assertions let pass;
//! and the report of the kit for authors of stores.

mod faulty_store;
mod report;
mod responses;
