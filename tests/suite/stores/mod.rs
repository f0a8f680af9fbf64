//! The rules that every store must keep, and those of the in-process store.

mod concurrency;
mod conformance;
mod contention;
mod full_memory;
mod list_store;
mod memory;
mod memory_per_key;
mod memory_without_room;
mod paused_time;
mod planted_faults;
mod rules;
