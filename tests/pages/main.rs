//! Pages, tails, token files and manifests on real mounts: what a writer, a reader, a backup and
//! a crash see of them.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../common/mod.rs"]
#[macro_use]
mod common;

mod damaged;
mod descriptors;
mod durability;
mod full_disk;
mod history;
mod in_place;
mod manifest;
mod names;
mod python;
mod ram;
mod refused;
mod rename;
mod sealing;
mod synchronous;
mod tail;
mod tools;
mod views;
