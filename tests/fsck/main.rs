//! `kvfs fsck`: every kind of damage is found, repaired, and gone in the second run. Nothing else
//! is lost, and without repair not a byte of the store changes.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

#[path = "../common/mod.rs"]
mod common;

mod bytes;
mod names;
mod patient;
mod rebuild;
mod remote;
mod sectors;
