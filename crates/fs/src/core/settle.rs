//! A writer is done: its file comes to rest and becomes part of the next commit.

use std::time::{Duration, Instant};

use crate::FsError;
use crate::core::Core;
use crate::core::guard::StateGuard;
use crate::core::node::{ComingRelease, Node};
use crate::core::recalled;
use crate::core::state::State;
use kvfs_storage::ingest::seal;
use kvfs_storage::store::disk::{Access, FileStat};
use kvfs_storage::store::record::{DirectoryClass, InodeId, ObjectId, ObjectKind, Role, Time};

/// `close()` returns before the daemon hears of it. A writer whose descriptors have all been
/// closed is waited for this long; it takes some 20 us unless the machine is overloaded.
pub(crate) const RELEASE_WAIT_MAX: Duration = Duration::from_millis(50);
/// A commit has the bytes of what was closed also without its release: everybody who syncs would wait for those who
/// close what dup and fork made.
const RELEASE_BEFORE_COMMIT_WAIT_MAX: Duration = Duration::from_millis(10);
/// The release behind a write-back leaves the kernel with the answer to that: it is waited for so long where
/// the file may as well be mapped still, and everybody's commit waits too.
const RELEASE_BEHIND_WRITE_WAIT_MAX: Duration = Duration::from_millis(10);
/// A release that was taken from the kernel is waited for longer: it comes, but may stand behind the disk.
const RELEASE_IN_HAND_WAIT_MAX: Duration = Duration::from_secs(2);
/// How often it is looked whether a release is still in hand, beside the signal that it gives when it is done.
const IN_HAND_LOOK_EVERY: Duration = Duration::from_millis(5);
/// A reader leaves no such trace: it is waited for only before a truncation, which would otherwise
/// take the bytes from under a mapping that outlived its descriptor.
const READER_WAIT_MAX: Duration = Duration::from_millis(20);
/// Files that are settled before others may have the state: some 10 us each.
const SETTLED_AT_A_TIME: usize = 32;
/// Files that are looked at before others may have the state: some 0.1 us each.
const LOOKED_AT_AT_A_TIME: usize = 512;

impl Core {
    /// Whether somebody may have the file open for writing, or be about to: the probe of its bytes
    /// could fall between the answer to an open and the kernel's opening of the backing file.
    ///
    /// With passthrough a descriptor that was closed is proof that the kernel had opened the
    /// backing file; if the probe then finds no writer, the handle is gone for good and its release
    /// is on its way. The daemon's own descriptor of a handle that it serves would answer the probe.
    pub(crate) fn has_writers(&self, state: &State, id: InodeId) -> bool {
        let settled = if self.is_passthrough() && !state.nodes.get(&id).is_some_and(Node::is_served)
        {
            Node::all_closed
        } else {
            Node::all_released
        };
        !state.nodes.get(&id).is_none_or(settled)
    }

    /// Waits until every writer that has closed its descriptors is gone.
    ///
    /// With passthrough only those are waited for that close without a FLUSH: then the probe tells
    /// whether there is anybody to wait for.
    pub(crate) fn wait_for_release<'a>(
        &'a self, state: StateGuard<'a>, id: InodeId,
    ) -> StateGuard<'a> {
        self.wait_so_long_for_release(state, id, RELEASE_WAIT_MAX)
    }

    /// The same, for so long unless the release is in hand.
    pub(crate) fn wait_so_long_for_release<'a>(
        &'a self, state: StateGuard<'a>, id: InodeId, longest: Duration,
    ) -> StateGuard<'a> {
        if self.is_passthrough() && !state.nodes.get(&id).is_some_and(Node::is_served) {
            let closes_quietly = awaits_rename(&state, id) && self.has_writers(&state, id);
            let object = state.unsettled.get(id).filter(|_| closes_quietly);
            if object.is_some_and(|object| seal::is_at_rest(&self.store, *object).unwrap_or(false))
            {
                return self.wait_while(state, id, longest, |node| !node.all_released());
            }
            return state;
        }
        let mut state = self.wait_while(state, id, longest, Node::is_being_released);
        state = self.wait_while(
            state,
            id,
            RELEASE_BEHIND_WRITE_WAIT_MAX.min(longest),
            Node::may_be_released,
        );
        state = self.wait_while(state, id, RELEASE_IN_HAND_WAIT_MAX, |node| {
            self.releases.is_last_in_hand(node, id)
        });
        if let Some(node) = state.nodes.get_mut(&id).filter(|node| node.is_closed_only()) {
            node.release = ComingRelease::Overdue;
        }
        state
    }

    /// Waits for closed writers and for readers, which may all be open still.
    pub(crate) fn wait_for_readers<'a>(
        &'a self, state: StateGuard<'a>, id: InodeId,
    ) -> StateGuard<'a> {
        self.wait_while(state, id, READER_WAIT_MAX, |node| node.handles() > 0 && node.all_closed())
    }

    fn wait_while<'a>(
        &'a self, mut state: StateGuard<'a>, id: InodeId, longest: Duration,
        closing: impl Fn(&Node) -> bool,
    ) -> StateGuard<'a> {
        let deadline = Instant::now() + longest;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || !state.nodes.get(&id).is_some_and(&closing) {
                return state;
            }
            state.waiting_for_release += 1;
            self.released.wait_for(&mut state, left.min(IN_HAND_LOOK_EVERY));
            state.waiting_for_release -= 1;
        }
    }

    /// Settles a file unless somebody still has it mapped for writing. Returns whether it did.
    pub(crate) fn settle_if_at_rest(
        &self, state: &mut State, id: InodeId,
    ) -> Result<bool, FsError> {
        let Some(&object) = state.unsettled.get(id) else {
            return Ok(true);
        };
        let pending = state.nodes.get(&id).is_some_and(|node| node.pending.is_some());
        if pending || self.has_writers(state, id) {
            return Ok(false);
        }
        let file = self.store.open_written(object, Access::Read)?;
        if !file.is_at_rest()? {
            return Ok(false);
        }
        // Before anything is noted: if this fails, the file is still to be settled.
        let stat = file.stat()?;
        self.settle(state, (id, object), &stat)?;
        Ok(true)
    }

    /// What was written is the file now.
    fn settle(
        &self, state: &mut State, (id, object): (InodeId, ObjectId), stat: &FileStat,
    ) -> Result<(), FsError> {
        let mut inode = state.inode(id)?;
        let modified = state.unsettled.modified(object, stat.mtime);
        state.unsettled.remove(id);
        recalled::note_in_memory(&self.store, state, id, object);
        if let Some(node) = state.nodes.get_mut(&id) {
            node.is_closed_anew = false;
        }
        if inode.links == 0 {
            return Ok(());
        }
        if let Some(ram) = &self.store.ram {
            ram.note_at_rest(object);
        }
        let directory = state.fresh.get(&id).map(|place| place.parent);
        if let Some(node) = directory.and_then(|directory| state.nodes.get_mut(&directory)) {
            node.has_small_files = stat.length <= self.store.packs.packed_bytes_max();
        }
        let old = state.adopt(id, &mut inode)?;
        if let Some(file) = inode.file_mut() {
            file.size = stat.length;
            file.blocks = stat.blocks;
            file.unsettled = false;
        }
        inode.ctime = inode.ctime.max(modified.min(Time::now()));
        inode.mtime = modified;
        // Writes through a mapping changed attributes that the kernel may have cached, unless the file never was at
        // rest before.
        if directory.is_none() {
            self.invalidate(crate::Invalidation::Inode(id));
        }
        state.put_inode(id, &inode);
        state.make_durable(id)?;
        state.publish(object, ObjectKind::File, stat.length)?;
        self.sample.came_to_be(object, Role::Plain, stat.length);
        if let Some(old) = old {
            state.drop_object(old)?;
        }
        Ok(())
    }

    /// Settles every file whose last writer or mapping went away unnoticed, a few at a time: each takes
    /// calls of the kernel.
    pub(crate) fn settle_idle(&self) -> Result<(), FsError> {
        let begun = Instant::now();
        let mut last = None;
        loop {
            let (looked_at, candidates) = closed_behind(self, last);
            for some in candidates.chunks(SETTLED_AT_A_TIME) {
                let mut state = self.state();
                for &id in some {
                    state = settle_closed(self, state, id, begun.elapsed())?;
                    state.drop_node_if_idle(id)?;
                }
            }
            if looked_at.is_none() {
                return Ok(());
            }
            last = looked_at;
        }
    }
}

/// Settles a file whose writer has closed it and relies on this commit, which has waited so long for others. What
/// is to be sealed is not settled here.
fn settle_closed<'a>(
    core: &'a Core, mut state: StateGuard<'a>, id: InodeId, waited: Duration,
) -> Result<StateGuard<'a>, FsError> {
    let is_closed_anew = is_closed_anew(&state, id);
    if let Some(node) = state.nodes.get(&id).filter(|node| node.pending.is_none()) {
        let is_version = node.replacement.is_some();
        let longest = if is_version { RELEASE_WAIT_MAX } else { RELEASE_BEFORE_COMMIT_WAIT_MAX };
        let is_on_its_way = waited < longest && core.releases.is_awaited(node, id);
        let is_in_hand =
            waited < RELEASE_IN_HAND_WAIT_MAX && core.releases.is_last_in_hand(node, id);
        if is_on_its_way || is_in_hand {
            state = core.wait_so_long_for_release(state, id, longest);
        }
    }
    if !core.settle_if_at_rest(&mut state, id)? && is_closed_anew {
        expose_closed(&mut state, id)?;
    }
    Ok(state)
}

/// The next unsettled files behind one that no writer is known to have open, or that one has closed, and the last one looked
/// at, if there may be more: a client may have as many open as it has descriptors.
fn closed_behind(core: &Core, last: Option<InodeId>) -> (Option<InodeId>, Vec<InodeId>) {
    let state = core.state();
    let some: Vec<InodeId> = state.unsettled.behind(last).take(LOOKED_AT_AT_A_TIME).collect();
    let looked_at = some.last().copied().filter(|_| some.len() == LOOKED_AT_AT_A_TIME);
    let relies_on_commit = |id: &InodeId| {
        let is_awaited = |node: &Node| node.is_closed_anew || core.releases.is_awaited(node, *id);
        !core.has_writers(&state, *id) || state.nodes.get(id).is_some_and(is_awaited)
    };
    (looked_at, some.into_iter().filter(relies_on_commit).collect())
}

/// Whether a writer of a file has closed a descriptor, and no commit has what was written before.
fn is_closed_anew(state: &State, id: InodeId) -> bool {
    state.nodes.get(&id).map_or_else(|| state.fresh.contains_key(&id), |node| node.is_closed_anew)
}

/// A file was closed that is not at rest: its release is on its way, a mapping is left, or another descriptor: of another
/// program, or as while a program starts others. What is written is in the next commit, as if somebody had synced it, and
/// nobody waits for the release any more. A page, or what replaces an older version, is none before its writer is gone.
fn expose_closed(state: &mut State, id: InodeId) -> Result<(), FsError> {
    if let Some(node) = state.nodes.get_mut(&id) {
        node.release = ComingRelease::Overdue;
        node.is_closed_anew = false;
        if node.pending.is_some() || node.replacement.is_some() {
            return Ok(());
        }
    }
    let mut inode = state.inode(id)?;
    if let Some(&object) = state.unsettled.get(id).filter(|_| inode.links > 0) {
        state.expose(id, &mut inode)?;
        state.metadata.publish(object);
    }
    Ok(())
}

/// A file under a temporary name beside pages will most likely be one within microseconds. Settling
/// it would only keep the rename waiting for the lock; if it is not renamed, the next commit does.
pub(crate) fn awaits_rename(state: &State, id: InodeId) -> bool {
    let layer = |class| matches!(class, DirectoryClass::Layer(_));
    let place = state.fresh.get(&id);
    place.is_some_and(|place| state.directory(place.parent).is_ok_and(|(_, class)| layer(class)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Caller;
    use crate::unmounted::{FILES, Unmounted, place};

    #[test]
    fn a_commit_has_what_was_closed_though_its_release_is_late() {
        let unmounted = Unmounted::new();
        let fs = &unmounted.fs;
        let (id, handle) = unmounted.open_new("closed");
        fs.write(handle, 0, b"bytes", false).unwrap();
        fs.flush(handle).unwrap();
        fs.commit().unwrap();
        let state = fs.core.state();
        assert!(!state.fresh.contains_key(&id) && state.unsettled.contains_key(id));
        assert_eq!(
            state.nodes[&id].release,
            ComingRelease::Overdue,
            "it would be waited for again"
        );
        drop(state);
        let unmounted = unmounted.after_crash();
        assert_eq!(unmounted.size_of("closed"), Some(5));
    }

    #[test]
    fn a_commit_has_once_what_was_closed_and_is_mapped_still() {
        let unmounted = Unmounted::new();
        let fs = &unmounted.fs;
        let (id, handle) = unmounted.open_new("mapped");
        fs.write(handle, 0, b"bytes", false).unwrap();
        let object = fs.core.state().unsettled.get(id).copied().unwrap();
        let mapping = fs.core.store.open_object(object, Access::ReadWrite).unwrap();
        fs.flush(handle).unwrap();
        fs.release(handle).unwrap();
        fs.commit().unwrap();
        let state = fs.core.state();
        assert!(!state.fresh.contains_key(&id) && state.unsettled.contains_key(id));
        drop(state);
        fs.core.settle_idle().unwrap();
        assert_eq!(fs.core.state().metadata.uncommitted(), 0, "every commit would write it");
        drop(mapping);
    }

    #[test]
    fn an_older_version_stays_until_the_writer_of_the_new_one_is_gone() {
        let unmounted = Unmounted::new();
        let fs = &unmounted.fs;
        let id = unmounted.write(FILES, "file", b"old version");
        fs.commit().unwrap();
        let flags = libc::O_WRONLY | libc::O_TRUNC;
        let handle = fs.open_for(id, flags, Caller::DAEMON).unwrap().handle;
        fs.write(handle, 0, b"new", false).unwrap();
        fs.flush(handle).unwrap();
        fs.commit().unwrap();
        assert!(fs.core.state().nodes[&id].replacement.is_some());
        let unmounted = unmounted.after_crash();
        assert_eq!(unmounted.size_of("file"), Some(11));
    }

    #[test]
    fn a_file_that_was_closed_is_there_under_its_new_name_while_another_descriptor_is_left() {
        let unmounted = Unmounted::new();
        let fs = &unmounted.fs;
        let (_, handle) = unmounted.open_new("old");
        fs.write(handle, 0, b"bytes", false).unwrap();
        fs.flush(handle).unwrap();
        // It waits for the release, which does not come.
        fs.rename(&place(FILES, "old"), &place(FILES, "new"), 0).unwrap();
        fs.commit().unwrap();
        assert_eq!(unmounted.after_crash().size_of("new"), Some(5));
    }

    #[test]
    fn a_commit_has_what_one_writer_closed_while_another_goes_on() {
        let unmounted = Unmounted::new();
        let fs = &unmounted.fs;
        let (id, handle) = unmounted.open_new("log");
        let other = fs.open_for(id, libc::O_WRONLY, Caller::DAEMON).unwrap().handle;
        fs.write(handle, 0, b"bytes", false).unwrap();
        fs.commit().unwrap();
        assert!(fs.core.state().fresh.contains_key(&id), "nobody has closed it");
        fs.flush(handle).unwrap();
        fs.release(handle).unwrap();
        fs.commit().unwrap();
        fs.core.settle_idle().unwrap();
        assert_eq!(fs.core.state().metadata.uncommitted(), 0, "every commit would write it");
        fs.write(other, 5, b" and more", false).unwrap();
        assert!(unmounted.after_crash().size_of("log").is_some());
    }
}
