//! The store on a simulated disk: the power is cut before every step that the disk is asked to do,
//! every step fails, every byte is damaged. Without a kernel and without a real disk, so a state costs
//! milliseconds.
//!
//! A workload runs once and the disk writes down what is asked of it (`log`). From that follows what
//! the disk may hold after a cut at any step (`cut`), given what was synced by then. Each such image is
//! mounted and compared with what the model allows (`model`, `check`).
//!
//! | variable | |
//! |---|---|
//! | `KVFS_SIM_STATES` | states after power cuts (10,000; a night takes 1,000,000) |
//! | `KVFS_SIM_FAULTS` | runs with a failing disk |
//! | `KVFS_SIM_SEED` | what the random choices begin with |

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(clippy::print_stdout, reason = "how much was tested, and the seed")]

#[path = "../common/mod.rs"]
#[macro_use]
mod common;

mod check;
mod content;
mod cut;
mod damage;
mod disk;
mod driver;
mod fault;
mod faults;
mod lie;
mod lies;
mod log;
mod meanwhile;
mod model;
mod mounted;
mod power;

mod remote;
mod workloads;
