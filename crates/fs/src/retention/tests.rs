//! Limits over files and sequences without a mount: what goes, what stays, and what is told of it.

mod dated;
mod limits;
mod rights;
mod slots;
mod walk;

use std::time::Duration;

use super::steps::{LOOK_INTERVAL, REST_MIN, Walked};
use super::*;
use crate::FileSystem;
use crate::unmounted::{FILES, Unmounted, at, place};
use kvfs_storage::store::event::{self, Event};

/// Takes steps as the thread that removes does, until there is nothing to do.
pub(super) fn run(fs: &FileSystem, retainer: &mut Retainer) {
    run_by(fs, retainer, true);
}

pub(super) fn run_by(fs: &FileSystem, retainer: &mut Retainer, is_clock_good: bool) {
    while fs.enforcer().step(retainer, is_clock_good).unwrap() {}
}

/// Now, less so many seconds.
pub(super) fn ago(seconds: i64) -> Time {
    let now = Time::now();
    Time { seconds: now.seconds - seconds, ..now }
}

impl Unmounted {
    pub(super) fn limit(&self, id: InodeId, name: &[u8], value: &str) {
        self.fs.retention.set_limit(&self.fs.core, id, name, value.as_bytes()).unwrap();
    }

    pub(super) fn report(&self, id: InodeId) -> Report {
        self.fs.retention.reports()[&id]
    }

    pub(super) fn deleted(&self) -> Vec<Event> {
        self.events().into_iter().filter(|event| event.what == event::What::Deleted).collect()
    }

    pub(super) fn status(&self) -> String {
        let mut text = String::new();
        self.fs.retention.status(&self.fs.core, &mut text);
        text
    }
}
