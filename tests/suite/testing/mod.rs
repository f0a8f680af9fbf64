//! The public test kit: what it does with a store, and which responses its assertions let pass.

mod faulty_store;
mod report;
mod responses;
