//! Opening a file: its bytes are resident and checked before the open answers, so that no read
//! is ever short or wrong.

use std::sync::Arc;
use std::time::Instant;

use super::attributes::Caller;
use super::demotion::Commits;
use super::extended::LOSSY;
use super::hits::PageOpen;
use super::opened::{Caching, Opened, OpenedBy};
use super::prefixes::Blocks;
use super::publish::Publishing;
use super::residency::{Residency, tier_here};
use super::verify::{Depth, Verify};
use super::{
    Choices, FileSystem, FsError, Invalidation, batch, descriptors, dialogue, prefixes, seen,
    synchronous, views,
};
use crate::core::Core;
use crate::core::guard::StateGuard;
use crate::core::handle::{Handle, Served};
use crate::core::node::Node;
use crate::core::recalled;
use crate::core::state::State;
use crate::core::waits::READ_AT_ONCE_BYTES;
use kvfs_page::Layer;
use kvfs_storage::ingest::seal;
use kvfs_storage::store::disk::{Access, DiskFile};
use kvfs_storage::store::record::{FileRecord, Inode, InodeId, ObjectId, Role, Time};

/// Flag of an open by execve(2) (`__FMODE_EXEC`). The kernel protects a running program from
/// writers, but learns only after an open with `O_RDONLY | O_TRUNC` that it should have refused.
const EXECUTES: i32 = 0x20;

/// What opens files of the store, to be read and to be changed in place.
#[derive(Clone, Copy)]
pub(super) struct Opening<'a> {
    pub(super) core: &'a Core,
    pub(super) residency: Residency<'a>,
    pub(super) publishing: Publishing<'a>,
    pub(super) choices: &'a Choices,
    blocks: &'a Blocks,
    commits: &'a dyn Commits,
}

impl FileSystem {
    pub(super) fn opening(&self) -> Opening<'_> {
        Opening {
            core: &self.core,
            residency: self.residency(),
            publishing: self.publishing(),
            choices: &self.choices,
            blocks: &self.blocks,
            commits: self,
        }
    }

    /// Opens a file for a user; the kernel has checked the permissions of what is in the store, but what is
    /// virtual stands for other things.
    pub fn open_for(&self, id: InodeId, flags: i32, caller: Caller) -> Result<Opened, FsError> {
        if prefixes::is_virtual(id) {
            return self.virtual_directories().open(id, flags, caller);
        }
        if batch::is_batch(id) {
            return batch::open(self, id, flags, caller);
        }
        if views::is_settings(id) {
            dialogue::check_caller(caller)?;
        }
        let opened = self.open_file(id, flags)?;
        if flags & libc::O_TRUNC != 0
            && caller.uid != 0
            && let Err(error) = drop_privileges(&self.core, id, caller)
        {
            self.release(opened.handle)?;
            return Err(error);
        }
        Ok(opened)
    }

    /// Opens a sealed file for reading whose backing file the kernel still holds from an earlier
    /// open. `None` if that file is not the one on the disk any more.
    pub fn open_held(&self, id: InodeId) -> Result<Option<u64>, FsError> {
        if self.choices.verify() == Verify::Always {
            return Ok(None);
        }
        let begun = Instant::now();
        let known = {
            let state = self.core.state();
            let node = state.nodes.get(&id);
            node.and_then(|node| {
                let area = self.core.hits.areas.of(&state, node.found_in);
                Some((node.verified?, node.page_tokens, Layer(node.page_layer), area))
            })
        };
        let Some(((object, known), tokens, layer, area)) = known else {
            return Ok(None);
        };
        match self.core.store.stat_object(object) {
            Ok(stat) if stat.is_same_content(&known) => {}
            _ => return Ok(None),
        }
        if self.core.store.packs.holds(object) {
            return Ok(None);
        }
        let page = PageOpen { layer, tokens, took: begun.elapsed() };
        let from = (tier_here(&self.core, object), known.length);
        seen::note_open(&self.core, area, from, Some(page));
        seen::note_use_of_tiers(self.residency(), object, known.length);
        seen::note_use(&self.core, object, None, known.length);
        let handle = Handle::new(id, false, Served::Passthrough);
        Ok(Some(self.core.state().add_handle(handle)))
    }

    /// Whether opening a file for reading will read much of it first, to check or to decode it.
    pub fn must_read_to_open(&self, id: InodeId) -> bool {
        if self.residency().comes_from(id).is_some()
            || self.virtual_directories().is_slot(id)
            || views::takes_long(id)
        {
            return true;
        }
        let state = self.core.state();
        let is_known = match self.choices.verify() {
            Verify::First => state.nodes.get(&id).is_some_and(|node| node.verified.is_some()),
            Verify::Always => false,
            Verify::Never => true,
        };
        if is_known {
            return false;
        }
        let inode = state.metadata.inode(id).ok().flatten();
        let file = inode.as_ref().and_then(Inode::file);
        file.is_some_and(|file| file.size > READ_AT_ONCE_BYTES && !file.unsettled)
    }
}

/// Opens a file whose bytes can be had.
pub(super) fn open_present(fs: &FileSystem, id: InodeId, flags: i32) -> Result<Opened, FsError> {
    if views::is_view(id) {
        return views::open(fs, id, flags);
    }
    if prefixes::is_virtual(id) {
        // Requests for those come with who asks.
        return fs.virtual_directories().open(id, flags, Caller::DAEMON);
    }
    if !fs.core.is_passthrough() {
        descriptors::check(&fs.core)?;
    }
    let writes = flags & libc::O_ACCMODE != libc::O_RDONLY;
    let truncates = flags & libc::O_TRUNC != 0;
    if truncates {
        fs.pacing().throttle_rewriting()?;
    }
    let state = fs.core.state();
    if state.nodes.get(&id).is_some_and(|node| node.stale) {
        return Err(FsError::Stale);
    }
    let inode = state.inode(id)?;
    let file = match inode.file() {
        Some(file) => file,
        None if inode.is_directory() => return Err(FsError::IsDirectory),
        None => return Err(FsError::Invalid),
    };
    match file.role {
        Role::Page(_) | Role::Manifest if writes || truncates => {
            return Err(FsError::NotPermitted);
        }
        Role::Tail { .. } | Role::Tokens => {}
        _ if truncates || writes => {}
        _ => {
            let opened = fs.opening().open_reader(state, id, &inode, file)?;
            if flags & EXECUTES != 0
                && let Some(handle) = fs.core.state().handles.get_mut(&opened.handle)
            {
                handle.executes = true;
            }
            return Ok(opened);
        }
    }
    if truncates && !writes && state.is_running(id) {
        return Err(FsError::Busy);
    }
    drop(state);
    if file.role.is_append_only() {
        return fs.opening().open_append(id, writes, truncates);
    }
    if synchronous::is_synchronous(flags) {
        synchronous::leave_memory(fs, id)?;
    }
    let opening = fs.opening();
    if truncates {
        let resident = fs.tiers.is_none();
        // Bytes that are to be thrown away need not come here first.
        if let Some(opened) = opening.open_truncated(id, writes, resident)? {
            return Ok(opened);
        }
    }
    opening.with_resident(id, || {
        if truncates {
            opening.open_truncated(id, writes, true)?.ok_or(FsError::Stale)
        } else {
            opening.check_bytes(id)?;
            opening.open_writer(id)
        }
    })
}

impl<'a> Opening<'a> {
    pub(super) fn open_reader(
        &self, mut state: StateGuard<'_>, id: InodeId, inode: &Inode, file: &FileRecord,
    ) -> Result<Opened, FsError> {
        let begun = Instant::now();
        let object = state.current_object(id, file).ok_or(FsError::Stale)?;
        // Counted before the lock goes, so that nobody replaces the bytes meanwhile.
        let node = state.nodes.entry(id).or_default();
        node.readers += 1;
        let found_in = node.found_in;
        let verified = node.verified.filter(|_| self.choices.verify() != Verify::Always);
        let settled = !file.unsettled && !state.unsettled.contains_key(id);
        let depth = self.depth_at_open();
        let area = self.core.hits.areas.of(&state, found_in);
        drop(state);
        // Before it is fetched: coming in is told of as a use already.
        seen::note_use_of_tiers(self.residency, object, file.size);
        let outcome = self.residency.open_verified((id, inode), (object, settled), verified, depth);
        let page = match &file.role {
            Role::Page(page) => PageOpen::of(page, begun.elapsed()),
            _ => None,
        };
        match &outcome {
            Ok((_, stat, tier)) => {
                seen::note_open(self.core, area, (*tier, stat.length), page);
                seen::note_use(self.core, object, Some(file.role), stat.length);
            }
            Err(error) => seen::note_failed_open(self.core, object, error),
        }
        let mut state = self.core.state();
        if let Some(node) = state.nodes.get_mut(&id) {
            node.readers -= 1;
        }
        match outcome {
            Ok((opened, ..)) if self.core.is_passthrough() && is_outdated(&state, id, &opened) => {
                drop(opened);
                let inode = state.inode(id)?;
                let file = inode.file().ok_or(FsError::Invalid)?;
                self.open_reader(state, id, &inode, file)
            }
            Ok((opened, stat, _)) => {
                if settled && depth == Depth::Bytes {
                    state.known_damage.remove(&id);
                }
                if let Some(node) = state.nodes.get_mut(&id) {
                    // Unless opens compare bytes by now, and this one did not.
                    let is_known =
                        settled && (depth == Depth::Bytes || self.depth_at_open() == depth);
                    node.verified = is_known.then_some((object, stat));
                    (node.page_layer, node.page_tokens) =
                        page.map_or((0, 0), |page| (page.layer.0, page.tokens));
                }
                let sealed = file.role.is_sealed();
                let is_packed = self.core.is_passthrough() && opened.descriptor().is_none();
                let mut opened = add_opened(self.core, &mut state, id, opened, false, sealed);
                let is_known = verified
                    .is_some_and(|(last, known)| last == object && known.is_same_content(&stat));
                if is_packed && !sealed && !is_known {
                    // The kernel may have kept another version when that was in a pack.
                    opened.caching = Caching::Anew;
                }
                Ok(opened)
            }
            Err(error) => {
                state.drop_node_if_idle(id)?;
                Err(error)
            }
        }
    }

    /// Opens for writing in place. What a commit may already have promised about the bytes is
    /// taken back, durably, before the first of them can change.
    fn open_writer(&self, id: InodeId) -> Result<Opened, FsError> {
        let (opened, wait) = {
            let mut state = self.core.state_to_change()?;
            let wait = self.residency.begin_in_place(&mut state, id)?;
            let inode = state.inode(id)?;
            let file = inode.file().ok_or(FsError::Invalid)?;
            let object = state.current_object(id, file).ok_or(FsError::Stale)?;
            let access = access_of(self.core, &state, id, object);
            let opened = self.core.store.open_object(object, access)?;
            let bytes = opened.stat()?.length;
            self.core.observer.opened(bytes);
            seen::note_use_of_tiers(self.residency, object, bytes);
            recalled::note_in_memory(&self.core.store, &mut state, id, object);
            (add_opened(self.core, &mut state, id, Arc::from(opened), true, false), wait)
        };
        if wait && let Err(error) = self.commits.commit() {
            self.publishing.release(opened.handle)?;
            return Err(error);
        }
        Ok(opened)
    }

    /// Opens with `O_TRUNC`: the new version is made beside the old one, which comes back after a
    /// crash, unless somebody still has the old one open or mapped. `None` if that one changes in
    /// place then, and is not known to be `resident`.
    fn open_truncated(
        &self, id: InodeId, writes: bool, resident: bool,
    ) -> Result<Option<Opened>, FsError> {
        let mut state = self.core.wait_for_readers(self.core.state_to_change()?, id);
        self.core.settle_if_at_rest(&mut state, id)?;
        let inode = state.inode(id)?;
        let old = inode.file().and_then(|file| file.object).ok_or(FsError::Stale)?;
        let held = state.nodes.get(&id).is_some_and(|node| node.handles() > 0);
        let changing = state.unsettled.contains_key(id) || state.sealing.contains(&id);
        let must_stay = held || changing || inode.links == 0;
        if must_stay || !is_away_or_at_rest(self.core, old)? {
            if !resident {
                return Ok(None);
            }
            return self.truncate_in_place(state, id, writes).map(Some);
        }
        let is_served = recalled::must_serve(self.core, &state, id, false);
        let access = if is_served { Access::ReadWrite } else { self.core.writer_access() };
        let new = match self.core.spares.take(access) {
            Some(spare) => spare,
            None => self.core.make_file(state.metadata.new_object(), access)?,
        };
        self.core.observer.opened(0);
        self.blocks.forget_file(id);
        state.unsettled.insert(id, new.object);
        state.unsettled.note_made(new.object, new.made, new.made_ahead);
        let node = state.nodes.entry(id).or_default();
        node.replacement = Some(new.object);
        node.verified = None;
        state.metadata.touched.note_at_risk(id);
        Ok(Some(add_opened(self.core, &mut state, id, new.file, writes, false)))
    }

    fn truncate_in_place(
        &self, state: StateGuard<'a>, id: InodeId, writes: bool,
    ) -> Result<Opened, FsError> {
        let mut state = self.set_length_in_place(state, id, 0)?;
        let inode = state.inode(id)?;
        let file = inode.file().ok_or(FsError::Invalid)?;
        let object = state.current_object(id, file).ok_or(FsError::Stale)?;
        let opened =
            self.core.store.open_object(object, access_of(self.core, &state, id, object))?;
        self.core.observer.opened(0);
        Ok(add_opened(self.core, &mut state, id, Arc::from(opened), writes, false))
    }

    /// Cuts or extends a file in place. Meanwhile it counts as having one more writer: the commit
    /// that is waited for, or any other, must not take it for settled before the length changes.
    pub(super) fn set_length_in_place(
        &self, mut state: StateGuard<'a>, id: InodeId, length: u64,
    ) -> Result<StateGuard<'a>, FsError> {
        let wait = self.residency.begin_in_place(&mut state, id)?;
        if state.attributes(&self.core.store, id)?.size > length {
            self.blocks.forget_file(id);
        }
        let inode = state.inode(id)?;
        let file = inode.file().ok_or(FsError::Invalid)?;
        let object = state.current_object(id, file).ok_or(FsError::Stale)?;
        state.nodes.entry(id).or_default().writers += 1;
        drop(state);
        let waited = if wait { self.commits.commit() } else { Ok(()) };
        let outcome = waited.and_then(|()| {
            let file = self.core.store.open_object(object, Access::ReadWrite)?;
            Ok(file.set_length(length)?)
        });
        let mut state = self.core.state();
        if let Some(node) = state.nodes.get_mut(&id) {
            node.writers -= 1;
        }
        if let Err(error) = outcome {
            state.drop_node_if_idle(id)?;
            return Err(error);
        }
        Ok(state)
    }
}

/// Takes the bits away with which a program runs as its owner or group: it is another one now. The kernel
/// does so at writes, and leaves it to the daemon where opening a file cuts it.
fn drop_privileges(core: &Core, id: InodeId, caller: Caller) -> Result<(), FsError> {
    let mut state = core.state_to_change()?;
    let mut inode = state.inode(id)?;
    // Without execution by the group that bit means something else, to those who are in it.
    let keeps_group = inode.mode & 0o010 == 0 && caller.gid == inode.gid;
    let dropped = if keeps_group { 0o4000 } else { 0o6000 };
    if inode.mode & dropped != 0 {
        inode.mode &= !dropped;
        inode.ctime = Time::now();
        state.put_inode(id, &inode);
        core.invalidate(Invalidation::Inode(id));
    }
    Ok(())
}

/// Nobody can write to an object that is not here, be it away or lost.
fn is_away_or_at_rest(core: &Core, object: ObjectId) -> Result<bool, FsError> {
    match seal::is_at_rest(&core.store, object) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(true),
        outcome => Ok(outcome?),
    }
}

/// The descriptor that the daemon keeps of a file that somebody may have open: the kernel serves all of its
/// handles, or none.
fn access_of(core: &Core, state: &State, id: InodeId, object: ObjectId) -> Access {
    let is_served = state.nodes.get(&id).is_some_and(Node::is_served)
        || recalled::must_serve(core, state, id, false);
    if is_served || core.store.buffer.holds(object) {
        Access::ReadWrite
    } else {
        core.writer_access()
    }
}

fn add_opened(
    core: &Core, state: &mut State, inode: InodeId, file: Arc<dyn DiskFile>, writes: bool,
    is_sealed: bool,
) -> Opened {
    let node = state.nodes.get(&inode);
    // The bytes of a sealed file are the same in whatever file the kernel has.
    let has_file =
        file.descriptor().is_some() || is_sealed && node.is_some_and(|node| node.is_left_open);
    let is_backed = core.is_passthrough()
        && !node.is_some_and(Node::is_served)
        && !recalled::must_serve(core, state, inode, is_sealed)
        && has_file;
    let (served, by) = if is_backed {
        (Served::Passthrough, OpenedBy::Kernel { file })
    } else {
        (Served::File(file), OpenedBy::Daemon)
    };
    let handle = state.add_handle(Handle::new(inode, writes, served));
    // Such a page was another version once.
    let is_lossy = || state.metadata.attribute(inode, LOSSY).ok().flatten().is_some();
    let is_doubtful = state.nodes.get(&inode).is_some_and(|node| node.has_refused_writes);
    let is_another = is_doubtful || is_sealed && is_lossy();
    let caching = if is_another { Caching::Anew } else { Caching::Kept };
    Opened { handle, by, is_sealed, caching, closes_quietly: !writes }
}

/// Whether a file that is in a pack or in memory was put into a file of its own since it was opened, and somebody has that
/// open through the kernel: it refuses to have handles of both kinds (EIO).
fn is_outdated(state: &State, id: InodeId, opened: &Arc<dyn DiskFile>) -> bool {
    let is_passed_through =
        |handle: &Handle| handle.inode == id && matches!(handle.served, Served::Passthrough);
    let is_open = |node: &Node| node.handles() > 0 && !node.is_served() && !node.is_left_open;
    opened.descriptor().is_none()
        && state.nodes.get(&id).is_some_and(is_open)
        && state.handles.values().any(is_passed_through)
}

#[cfg(test)]
mod tests;
