//! A walk over everything below a directory with a limit, and then the removal of what it found.
//!
//! A step looks at so many names that nobody waits for the state noticeably; what changes behind the
//! walk is for the next one. Only the files that were used longest ago are remembered.

use std::collections::{BTreeMap, BinaryHeap, VecDeque};
use std::time::Instant;

use super::Reason;
use super::below::NamesBelow;
use super::enforcer::Enforcer;
use super::policy::{Ttl, after};
use super::remove::{Kept, Removal};
use super::rights::Root;
use super::steps::Walked;
use crate::FsError;
use crate::attributes::Place;
use crate::core::state::State;
use kvfs_storage::store::record::{DirectoryClass, Inode, InodeId, Kind, Role, Time};

/// Names looked at with the state held: a request may have to wait for them.
const NAMES_AT_ONCE: usize = 64;
/// Names looked at in one step.
const NAMES_PER_STEP: usize = 4096;
/// Files and sequences removed in one step.
const REMOVALS_PER_STEP: usize = 64;
/// Files and sequences that a walk remembers, some 150 bytes each. If all of them go, the next walk
/// finds more.
const UNITS_MAX: usize = 1 << 16;
/// What exceeds a size is removed until this part of it is free, so that not each new file is
/// followed by a walk.
const FREED_PART: u64 = 20;

/// What is removed as one: a file, or a sequence from its end.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Unit {
    /// First of all, so that units are ordered by it.
    pub(super) used: Time,
    pub(super) what: What,
}

/// See [`Unit`].
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum What {
    File(InodeId, Place),
    Sequence(InodeId),
}

/// A directory that is being read.
#[derive(Debug)]
struct Frame {
    directory: InodeId,
    offset: u64,
    ttl: Option<Ttl>,
    /// It is a sequence, or lies in one.
    in_sequence: bool,
    /// Only what belongs to the owner of the limit may go from here.
    own_only: bool,
}

/// What was seen of a sequence.
#[derive(Debug)]
struct SeenSequence {
    directory: InodeId,
    /// Last use of what it does not share, and of everything.
    used_alone: Option<Time>,
    used: Option<Time>,
    changed: Option<Time>,
    /// Something in it is not for the limit's owner to remove, and so it stays as a whole.
    is_protected: bool,
}

/// A walk, and what comes of it.
#[derive(Debug)]
pub(super) struct Pass {
    pub(super) root: InodeId,
    limited: Root,
    /// Nothing is too old by a clock that is doubted.
    is_clock_good: bool,
    begun: Instant,
    now: Time,
    names_changed: u64,
    frames: Vec<Frame>,
    sequence: Option<SeenSequence>,
    bytes: u64,
    files: u64,
    /// Of files with several names, which count once.
    names: NamesBelow,
    next_expiry: Option<Time>,
    expired: VecDeque<(Unit, Reason)>,
    /// The newest of the oldest on top.
    oldest: BinaryHeap<Unit>,
    /// What goes for room, once it was decided that something must.
    leaving: VecDeque<Unit>,
    phase: Phase,
    is_unfinished: bool,
}

/// How far a walk is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Walking,
    /// Everything was seen; what is too old goes.
    Removing,
    /// Others go for room.
    MakingRoom,
}

/// What a batch has removed, in files and bytes, by the reason.
#[derive(Debug, Default)]
struct Gone(BTreeMap<&'static str, (u64, u64)>);

impl Gone {
    fn add(&mut self, reason: Reason, removal: &Removal) {
        if removal.files > 0 {
            let (files, bytes) = self.0.entry(reason.name()).or_default();
            *files += removal.files;
            *bytes += removal.bytes;
        }
    }
}

impl std::fmt::Display for Gone {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (number, (reason, (files, bytes))) in self.0.iter().enumerate() {
            let separator = if number == 0 { "" } else { ", " };
            write!(formatter, "{separator}{files} files, {bytes} bytes for their {reason}")?;
        }
        Ok(())
    }
}

/// A name, and what it leads to.
struct Seen {
    place: Place,
    id: InodeId,
    inode: Inode,
    bytes: u64,
    used: Time,
    has_own_ttl: bool,
}

impl Pass {
    pub(super) fn new(limited: Root, names_changed: u64, is_clock_good: bool) -> Pass {
        let mut pass = Pass {
            root: limited.id,
            limited,
            is_clock_good,
            begun: Instant::now(),
            now: Time::now(),
            names_changed,
            frames: Vec::new(),
            sequence: None,
            bytes: 0,
            files: 0,
            names: NamesBelow::default(),
            next_expiry: None,
            expired: VecDeque::new(),
            oldest: BinaryHeap::new(),
            leaving: VecDeque::new(),
            phase: Phase::Walking,
            is_unfinished: false,
        };
        let frame = Frame {
            directory: limited.id,
            offset: 0,
            ttl: limited.policy.ttl,
            in_sequence: false,
            own_only: false,
        };
        pass.enter(frame, limited.class);
        pass
    }

    pub(super) fn walked(self) -> Walked {
        Walked {
            policy: self.limited.policy,
            at: Instant::now(),
            took: self.begun.elapsed(),
            names_changed: self.names_changed,
            next_expiry: self.next_expiry,
            is_unfinished: self.is_unfinished,
        }
    }

    fn enter(&mut self, mut frame: Frame, class: DirectoryClass) {
        if class == DirectoryClass::Sequence {
            frame.in_sequence = true;
            self.sequence = Some(SeenSequence {
                directory: frame.directory,
                used_alone: None,
                used: None,
                changed: None,
                is_protected: false,
            });
        }
        self.frames.push(frame);
    }

    /// What is not for the limit's owner to remove is not looked into.
    fn pass_by(&mut self, frame: &Frame) {
        if let Some(sequence) = self.sequence.as_mut().filter(|_| frame.in_sequence) {
            sequence.is_protected = true;
        }
    }

    /// A directory was read to its end.
    fn leave(&mut self, frame: &Frame) {
        let is_whole = |sequence: &SeenSequence| sequence.directory == frame.directory;
        let Some(sequence) = self.sequence.take_if(|sequence| is_whole(sequence)) else {
            return;
        };
        if sequence.is_protected {
            return;
        }
        let used = sequence.used_alone.or(sequence.used);
        if let (Some(used), Some(changed)) = (used, sequence.changed) {
            let unit = Unit { used, what: What::Sequence(sequence.directory) };
            self.judge(unit, changed, frame.ttl);
        }
    }

    /// A file was found.
    fn see(&mut self, frame: (bool, Option<Ttl>), seen: Seen) {
        let (in_sequence, ttl) = frame;
        let is_shared = seen.inode.links > 1;
        if !is_shared || self.names.see(seen.id) {
            self.bytes = self.bytes.saturating_add(seen.bytes);
            self.files += 1;
        }
        if in_sequence {
            if let Some(sequence) = &mut self.sequence {
                sequence.used = sequence.used.max(Some(seen.used));
                sequence.changed = sequence.changed.max(Some(seen.inode.mtime));
                if !is_shared {
                    sequence.used_alone = sequence.used_alone.max(Some(seen.used));
                }
            }
            return;
        }
        let is_removable = seen.inode.file().is_some_and(|file| file.role == Role::Plain);
        if is_removable {
            let changed = seen.inode.mtime;
            let unit = Unit { used: seen.used, what: What::File(seen.id, seen.place) };
            self.judge(unit, changed, ttl.filter(|_| !seen.has_own_ttl));
        }
    }

    /// What goes next, with so many bytes left below the directory.
    fn next_to_go(&mut self, held: u64) -> Option<(Unit, Reason)> {
        if let Some(expired) = self.expired.pop_front() {
            return Some(expired);
        }
        if self.phase == Phase::Removing
            && self.limited.policy.bytes.is_some_and(|limit| held > limit)
        {
            self.phase = Phase::MakingRoom;
            self.leaving = std::mem::take(&mut self.oldest).into_sorted_vec().into();
        }
        if self.phase != Phase::MakingRoom || self.excess(held) == 0 {
            return None;
        }
        let next = self.leaving.pop_front();
        // The walk did not remember enough of them.
        self.is_unfinished |= next.is_none() && self.files > UNITS_MAX as u64;
        next.map(|unit| (unit, Reason::Size))
    }

    fn go_on_with(&mut self, unit: Unit, reason: Reason) {
        match reason {
            Reason::Size => self.leaving.push_front(unit),
            Reason::Age | Reason::Ttl => self.expired.push_front((unit, reason)),
        }
    }

    /// Bytes that must go, if any, for a part of the size to be free.
    fn excess(&self, held: u64) -> u64 {
        self.limited.policy.bytes.map_or(0, |limit| held.saturating_sub(limit - limit / FREED_PART))
    }

    /// Decides whether something is too old, or could go for room.
    fn judge(&mut self, unit: Unit, changed: Time, ttl: Option<Ttl>) {
        let ends = [
            (self.limited.policy.age.map(|age| after(unit.used, age)), Reason::Age),
            (ttl.map(|ttl| ttl.end(changed, unit.used)), Reason::Ttl),
        ];
        for (end, reason) in ends {
            let Some(end) = end else { continue };
            if !self.is_clock_good {
                self.is_unfinished = true;
                continue;
            }
            self.next_expiry = Some(self.next_expiry.map_or(end, |next| next.min(end)));
            if end > self.now {
                continue;
            }
            if self.expired.len() < UNITS_MAX {
                self.expired.push_back((unit, reason));
            } else {
                self.is_unfinished = true;
            }
            return;
        }
        if self.limited.policy.bytes.is_some() {
            self.oldest.push(unit);
            if self.oldest.len() > UNITS_MAX {
                self.oldest.pop();
            }
        }
    }
}

impl Enforcer<'_> {
    /// One step of a walk; whether there is more to do.
    pub(super) fn advance(&self, pass: &mut Pass) -> Result<bool, FsError> {
        if pass.phase != Phase::Walking {
            return self.remove_some(pass);
        }
        let mut looked_at = 0;
        while looked_at < NAMES_PER_STEP {
            let Some(frame) = pass.frames.pop() else {
                self.end_walk(pass);
                return Ok(true);
            };
            looked_at += self.read_some(pass, frame)?.max(1);
        }
        Ok(true)
    }

    /// Reads some names of a directory, which goes back to where it was if there are more or a
    /// directory in it comes first. Returns how many.
    fn read_some(&self, pass: &mut Pass, mut frame: Frame) -> Result<usize, FsError> {
        let mut state = self.core.state();
        let mut entries = Vec::new();
        state.metadata.entries(frame.directory, frame.offset, |offset, name, entry| {
            entries.push((offset, name.to_vec(), entry));
            entries.len() < NAMES_AT_ONCE && entry.file_type != libc::S_IFDIR
        })?;
        let count = entries.len();
        for (offset, name, entry) in entries {
            frame.offset = offset + 1;
            let place = Place { parent: frame.directory, name };
            let Some(inode) = state.metadata.inode(entry.inode)? else {
                continue;
            };
            if let Kind::Directory { class, parent, .. } = inode.kind {
                // Forged names may form a ring: a directory is only in the one above it.
                if parent != frame.directory || entry.inode == pass.root {
                    continue;
                }
                drop(state);
                let is_own = inode.uid == pass.limited.owner;
                let goes_with_it = class == DirectoryClass::Sequence || frame.in_sequence;
                if !pass.limited.user().may_change(&inode)
                    || frame.own_only && goes_with_it && !is_own
                {
                    pass.pass_by(&frame);
                    pass.frames.push(frame);
                    return Ok(count);
                }
                let own = self.retention.policies().directories.get(&entry.inode).copied();
                let below = Frame {
                    directory: entry.inode,
                    offset: 0,
                    ttl: own.and_then(|policy| policy.ttl).or(frame.ttl),
                    in_sequence: frame.in_sequence,
                    own_only: pass.limited.user().removes_only_own(&inode),
                };
                pass.frames.push(frame);
                pass.enter(below, class);
                return Ok(count);
            }
            if frame.own_only && inode.uid != pass.limited.owner {
                pass.pass_by(&frame);
                continue;
            }
            if let Some(seen) = self.look_at(&mut state, place, entry.inode, inode)? {
                pass.see((frame.in_sequence, frame.ttl), seen);
            }
        }
        drop(state);
        if count == 0 {
            pass.leave(&frame);
        } else {
            pass.frames.push(frame);
        }
        Ok(count)
    }

    fn look_at(
        &self, state: &mut State, place: Place, id: InodeId, mut inode: Inode,
    ) -> Result<Option<Seen>, FsError> {
        if inode.file().is_none() {
            return Ok(None);
        }
        // The file of one that is being written may go any moment.
        let shown = state.attributes_of(&self.core.store, id, &inode);
        let bytes = shown.as_ref().map_or(0, |shown| shown.size);
        inode.mtime = shown.map_or(inode.mtime, |shown| shown.mtime);
        let used = self.retention.last_use(state, (id, &mut inode))?;
        let has_own_ttl = self.retention.policies().files.contains(&id);
        Ok(Some(Seen { place, id, inode, bytes, used, has_own_ttl }))
    }

    fn end_walk(&self, pass: &mut Pass) {
        let mut reports = self.retention.reports();
        let report = reports.entry(pass.root).or_default();
        (report.bytes, report.files) = (pass.bytes, pass.files);
        pass.phase = Phase::Removing;
    }

    /// Removes some of what is to go; whether there is more.
    fn remove_some(&self, pass: &mut Pass) -> Result<bool, FsError> {
        let mut gone = Gone::default();
        let path = self.core.state().directory_path(pass.root).unwrap_or_default();
        let outcome = self.remove_batch(pass, &mut gone, &path);
        if !gone.0.is_empty() {
            log::info!("{path}: deleted beyond its limits ({}): {gone}", pass.limited.policy);
        }
        outcome
    }

    fn remove_batch(&self, pass: &mut Pass, gone: &mut Gone, path: &str) -> Result<bool, FsError> {
        for _ in 0..REMOVALS_PER_STEP {
            let held = self.retention.reports().get(&pass.root).map_or(0, |report| report.bytes);
            let Some((unit, reason)) = pass.next_to_go(held) else {
                return Ok(false);
            };
            let bytes_max = match reason {
                Reason::Size => pass.excess(held),
                Reason::Age | Reason::Ttl => u64::MAX,
            };
            let why = reason.explain(path, pass.limited.policy);
            let removal = self.remove_unit((&pass.limited, &pass.names), &unit, bytes_max, &why)?;
            gone.add(reason, &removal);
            let is_committing = removal.kept == Some(Kept::Committing);
            if !is_committing || removal.files > 0 {
                self.count_removal(pass.root, reason, &removal);
            }
            pass.is_unfinished |= removal.kept == Some(Kept::InUse);
            if removal.has_more || is_committing {
                pass.go_on_with(unit, reason);
            }
            if is_committing {
                // The rest of it is next, not something that was used later.
                return Ok(true);
            }
        }
        Ok(true)
    }

    fn count_removal(&self, root: InodeId, reason: Reason, removal: &Removal) {
        let counters = &self.retention.counters;
        counters.removed(reason.name(), removal.files, removal.bytes);
        if let Some(why) = removal.kept {
            counters.kept(why.name());
        }
        if let Some(report) = self.retention.reports().get_mut(&root) {
            report.bytes = report.bytes.saturating_sub(removal.bytes);
            report.files = report.files.saturating_sub(removal.files);
            report.removed_bytes += removal.bytes;
            report.removed_files += removal.files;
        }
    }
}

#[cfg(test)]
mod tests;
