//! The locks of code whose interleavings are tried one by one.
//!
//! `tests/models` compiles `flights.rs` of `kvfs-fs` and [`crate::tier::ram`] once more, with the locks
//! of `shuttle` under this name, so that the test decides which thread goes on at each of them.

pub use std::sync::{Condvar, Mutex, MutexGuard};
