//! Retention: what a directory may hold, and what goes when it holds more.
//!
//! Leaving for the remote keeps every byte; this deletes. It happens only below directories that
//! somebody gave a limit (`policy`), and takes what was used longest ago first: whole files, and of
//! sequences the last pages, never something out of the middle (`cut`). What is pinned, open,
//! mapped or being written stays.
//!
//! [`Retention`] has the limits and the uses. A thread (`steps`) walks what is below each limit (`pass`), some names at a
//! time, and then removes (`remove`) through the operations on names (`enforcer`). What a directory holds is known from the
//! last walk, less what was removed since, so a limit may be exceeded for as long as it takes until the next. Uses go on
//! record now and then without any limit as well (`on_record`).

mod below;
mod clock;
mod cut;
mod dated;
mod enforcer;
mod expired;
mod on_record;
mod pass;
mod policy;
mod remove;
mod rights;
mod steps;
#[cfg(test)]
mod tests;
mod tree;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use super::FsError;
use crate::core::Core;
use crate::core::state::State;
use crate::core::uses::{self, Uses};
use clock::Clock;
use kvfs_observe::RetentionCounters;
use kvfs_storage::store::disk::Space;
use kvfs_storage::store::record::{DEPTH_MAX, Inode, InodeId, Kind, Time};
use policy::{Policies, Policy};

pub(super) use dated::{USED, kept_use, recorded_use};
pub use enforcer::{record_uses, retain};
pub use policy::check_limit;
pub(super) use policy::{AGE, QUOTA, TTL, check_reader, is_limit};
pub use steps::Retainer;
pub(super) use tree::InUse;

/// Directories of which `.kvfs/status` tells.
const TOLD_MAX: usize = 64;

/// Why something was removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reason {
    /// The directory holds more than it may.
    Size,
    /// It was not used for too long.
    Age,
    /// It was written too long ago.
    Ttl,
}

impl Reason {
    /// The same for people, of what went for a limit of this directory.
    fn explain(self, path: &str, policy: Policy) -> String {
        match self {
            Reason::Size => {
                format!("{path} may hold {} bytes", policy.bytes.unwrap_or_default())
            }
            Reason::Age => {
                let age = policy.age.unwrap_or_default().as_secs();
                format!("not used for {age} s, the limit of {path}")
            }
            Reason::Ttl => format!("written longer ago than the limits below {path} allow"),
        }
    }

    fn name(self) -> &'static str {
        match self {
            Reason::Size => "size",
            Reason::Age => "age",
            Reason::Ttl => "ttl",
        }
    }
}

/// What the last walk found below a directory, and what was removed there since the mount began.
#[derive(Clone, Copy, Debug, Default)]
struct Report {
    bytes: u64,
    files: u64,
    removed_bytes: u64,
    removed_files: u64,
}

/// What a mount knows of its limits and of uses.
#[derive(Debug, Default)]
pub struct Retention {
    /// There is some limit.
    is_active: AtomicBool,
    policies: Mutex<Policies>,
    /// Those of [`Core`].
    uses: Arc<Mutex<Uses>>,
    clock: Mutex<Clock>,
    reports: Mutex<BTreeMap<InodeId, Report>>,
    counters: RetentionCounters,
}

impl Retention {
    /// No limit is known yet.
    pub(super) fn new(uses: Arc<Mutex<Uses>>) -> Retention {
        Retention { uses, ..Retention::default() }
    }

    fn policies(&self) -> MutexGuard<'_, Policies> {
        self.policies.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn uses(&self) -> MutexGuard<'_, Uses> {
        uses::held(&self.uses)
    }

    /// What the last uses were of, in no order.
    pub(super) fn latest_uses(&self) -> Vec<InodeId> {
        self.uses().latest().to_vec()
    }

    /// When a file was used for the last time; an open goes on record where what is there lags behind. The mtime is
    /// that which `stat` shows.
    fn last_use(
        &self, state: &mut State, (id, inode): (InodeId, &mut Inode),
    ) -> Result<Time, FsError> {
        let mut uses = self.uses();
        if let Some(atime) = uses.overdue(id, inode.atime) {
            inode.atime = atime;
            if let Some(mut stored) = state.metadata.inode(id)? {
                stored.atime = atime;
                state.put_inode(id, &stored);
            }
        }
        let noted = uses.of(id).unwrap_or_default();
        drop(uses);
        Ok(noted.max(recorded_use(state, id, inode)?))
    }

    fn clock(&self) -> MutexGuard<'_, Clock> {
        self.clock.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A store is mounted whose clock was last believed at that time.
    pub(super) fn begin(&self, believed: Option<Time>) {
        self.clock().begin(believed);
    }

    /// The time to put on record, unless the clock is doubted: a wrong one that is mounted again stays so, and one that went
    /// ahead by less than is doubted is not taken for right by the next mount.
    pub(super) fn believed_time(&self) -> Option<Time> {
        let (mut clock, now) = (self.clock(), Instant::now());
        if clock.look(Time::now(), now) { clock.expected(now) } else { None }
    }

    fn reports(&self) -> MutexGuard<'_, BTreeMap<InodeId, Report>> {
        self.reports.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A file is opened for reading with these flags of open(2). Whoever says so leaves no trace.
    /// It is noted without any limit, too: the first one does not delete what was just read.
    pub fn note_use(&self, core: &Core, id: InodeId, flags: i32) {
        let is_stored = !super::is_virtual(id);
        if flags & libc::O_NOATIME == 0 && is_stored && !core.store.is_read_only() {
            self.uses().note(id, Time::now());
        }
    }

    /// Counters of what retention removes.
    pub fn counters(&self) -> &RetentionCounters {
        &self.counters
    }

    fn is_active(&self) -> bool {
        self.is_active.load(Ordering::Acquire)
    }

    /// What is left of a space for a directory: not more than what the limits above it leave.
    pub(super) fn limit_space(
        &self, core: &Core, id: InodeId, mut space: Space,
    ) -> Result<Space, FsError> {
        if !self.is_active() || super::is_virtual(id) {
            return Ok(space);
        }
        let limits = self.limits_above(&core.state(), id)?;
        let reports = self.reports();
        for (directory, limit) in limits {
            let used = reports.get(&directory).map_or(0, |report| report.bytes);
            let left = limit.saturating_sub(used);
            space.total_bytes = space.total_bytes.min(limit);
            space.free_bytes = space.free_bytes.min(left);
            space.available_bytes = space.available_bytes.min(left);
        }
        Ok(space)
    }

    /// Somebody has removed a file of a directory, and its bytes are free at once: who looks at the
    /// free space and removes files until there is enough would remove them all before the next walk.
    pub(super) fn note_removed(
        &self, state: &State, directory: InodeId, bytes: u64,
    ) -> Result<(), FsError> {
        if !self.is_active() {
            return Ok(());
        }
        let limits = self.limits_above(state, directory)?;
        let mut reports = self.reports();
        for (directory, _) in limits {
            if let Some(report) = reports.get_mut(&directory) {
                report.bytes = report.bytes.saturating_sub(bytes);
            }
        }
        Ok(())
    }

    /// Directories from this one up that have a limit, and how many bytes they may hold.
    fn limits_above(&self, state: &State, id: InodeId) -> Result<Vec<(InodeId, u64)>, FsError> {
        let policies = self.policies();
        let mut limits = Vec::new();
        let mut at = id;
        for _ in 0..DEPTH_MAX {
            let inode = state.metadata.inode(at)?;
            let Some(Kind::Directory { parent, .. }) = inode.map(|inode| inode.kind) else { break };
            if let Some(limit) = policies.directories.get(&at).and_then(|policy| policy.bytes) {
                limits.push((at, limit));
            }
            if at == InodeId::ROOT {
                break;
            }
            at = parent;
        }
        Ok(limits)
    }

    /// Lines of `.kvfs/status`.
    pub(super) fn status(&self, core: &Core, text: &mut String) {
        if !self.is_active() {
            return;
        }
        let directories = self.policies().directories.clone();
        let totals = &self.counters;
        // Writing to a String cannot fail.
        let _ = writeln!(text, "retention_directories: {}", directories.len());
        let _ = writeln!(text, "retention_removed_files: {}", totals.removed_files());
        let _ = writeln!(text, "retention_removed_bytes: {}", totals.removed_bytes());
        if let Some(doubt) = self.clock().doubt(Instant::now()) {
            let seconds = doubt.as_secs();
            let _ = writeln!(
                text,
                "retention_clock: went ahead; nothing is deleted for its age for {seconds} s"
            );
        }
        for (id, policy) in directories.into_iter().take(TOLD_MAX) {
            let Some(path) = core.state().directory_path(id) else { continue };
            let report = self.reports().get(&id).copied().unwrap_or_default();
            let Report { bytes, files, removed_bytes, removed_files } = report;
            let _ = writeln!(
                text,
                "quota {path}: {policy} used_bytes={bytes} files={files} \
                 removed_bytes={removed_bytes} removed_files={removed_files}"
            );
        }
    }
}
