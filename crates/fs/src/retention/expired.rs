//! Files with a time to live of their own. Nothing leads from a file to its names, so those that are
//! too old are looked for among all names, which is done seldom.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use super::enforcer::Enforcer;
use super::remove::Removal;
use super::rights::Right;
use super::steps::{LOOK_INTERVAL, WALKS_APART};
use super::{Reason, TTL, policy};
use crate::FsError;
use crate::attributes::Place;
use crate::core::state::State;
use kvfs_storage::store::keys;
use kvfs_storage::store::record::{Inode, InodeId, Role, Time};

/// Files removed in one step.
const FILES_PER_STEP: usize = 1024;

impl Enforcer<'_> {
    /// Removes files whose own time has come.
    pub(super) fn remove_expired_files(
        &self, last: &mut Option<(Instant, Duration)>,
    ) -> Result<(), FsError> {
        let is_time =
            last.is_none_or(|(at, took)| at.elapsed() >= LOOK_INTERVAL.max(took * WALKS_APART));
        if !is_time {
            return Ok(());
        }
        let begun = Instant::now();
        let expired = self.expired_files()?;
        if !expired.is_empty() {
            let mut total = Removal::default();
            for (id, place) in self.names_of(&expired)? {
                let right = Right::OwnTime(id, &place);
                let why = Some("its own time to live was over");
                let removal = self.remove_file(id, &place, right, why)?;
                self.retention.counters.removed(Reason::Ttl.name(), removal.files, removal.bytes);
                total.files += removal.files;
                total.bytes += removal.bytes;
                if let Some(kept) = removal.kept {
                    self.retention.counters.kept(kept.name());
                }
            }
            if total.files > 0 {
                let Removal { files, bytes, .. } = total;
                log::info!("deleted {files} files, {bytes} bytes: their own time to live was over");
            }
        }
        *last = Some((Instant::now(), begun.elapsed()));
        Ok(())
    }

    /// Some of the files that are too old.
    fn expired_files(&self) -> Result<BTreeSet<InodeId>, FsError> {
        let files = self.retention.policies().files.clone();
        let now = Time::now();
        let mut expired = BTreeSet::new();
        for id in files {
            let mut state = self.core.state();
            // No walk puts its uses on record, of which only some are remembered.
            if let Some(mut inode) = state.metadata.inode(id)?.filter(|inode| inode.links > 0) {
                self.retention.last_use(&mut state, (id, &mut inode))?;
            }
            let time = self.own_time(&state, id)?;
            let is_limited = state.metadata.attribute(id, TTL)?.is_some();
            drop(state);
            if !is_limited {
                self.retention.policies().forget(id);
            }
            if time.is_some_and(|time| time <= now) {
                expired.insert(id);
            }
            if expired.len() >= FILES_PER_STEP {
                break;
            }
        }
        Ok(expired)
    }

    /// When a file will have lived for its own time; nothing for what has none, or is no plain file.
    pub(super) fn own_time(&self, state: &State, id: InodeId) -> Result<Option<Time>, FsError> {
        let value = state.metadata.attribute(id, TTL)?;
        let ttl = value.and_then(|value| policy::parse(TTL, &value)).map(policy::Limit::ttl);
        let inode = state.metadata.inode(id)?;
        let is_plain = |inode: &Inode| inode.file().is_some_and(|file| file.role == Role::Plain);
        let (Some(inode), Some(ttl)) = (inode.filter(is_plain), ttl) else { return Ok(None) };
        let shown = state.attributes_of(&self.core.store, id, &inode);
        let changed = shown.map_or(inode.mtime, |shown| shown.mtime);
        let used = self.retention.use_until_now((state, &self.core.store), id, &inode)?;
        Ok(Some(ttl.end(changed, used)))
    }

    /// The names of some files, as of the last commit.
    fn names_of(&self, files: &BTreeSet<InodeId>) -> Result<Vec<(InodeId, Place)>, FsError> {
        let snapshot = self.core.state().metadata.snapshot()?;
        let mut found = Vec::new();
        for record in snapshot.records(&keys::table(b'E'))? {
            let (key, value) = record?;
            if key.first() != Some(&b'E') {
                break;
            }
            let entry: kvfs_storage::store::record::Entry =
                kvfs_storage::store::database::decode(&value)?;
            if files.contains(&entry.inode)
                && let (Some(parent), Some((_, name))) =
                    (keys::number(&key), keys::split_entry(&key))
            {
                found.push((entry.inode, Place { parent: InodeId(parent), name: name.to_vec() }));
            }
        }
        Ok(found)
    }
}
