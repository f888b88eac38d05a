//! What each request does: one call into [`kvfs_fs`], on this thread or beside it if it may wait.

use std::sync::Arc;
use std::time::Instant;

use fuser::{Errno, FopenFlags, INodeNo};

use super::answer::{
    Entry, ExtendedAttribute, Handle, Made, Position, Reply, ReplyBytes, ReplyListing, Shown,
    Written,
};
use super::dispatch::Operations;
use super::passthrough::Backing;
use super::shared::{Shared, is_reader, quiet};
use kvfs_fs::{
    Answers, Awaited, Caller, FileSystem, Listing, NewNode, OpenedBy, Pace, Place, SetAttributes,
    WriteOutcome, extended_attribute_for, is_synchronous,
};
use kvfs_observe::Operation;
use kvfs_storage::store::disk::{Allocation, Seek, Space};
use kvfs_storage::store::record::InodeId;

/// Bytes that one request copies: others take their turn in between. Whoever copies asks for the rest.
const COPY_BYTES_MAX: u64 = 16 << 20;

/// A write between its two halves: bytes that came in, and the answer.
#[derive(Debug)]
pub(super) enum Writing {
    /// The bytes are written, or will not be.
    Done(Result<Written, Errno>),
    /// Where the bytes go, and they, for a thread that may wait.
    MustWait(u64, Vec<u8>),
}

/// Where and how much a `copy_file_range` copies.
#[derive(Clone, Copy, Debug)]
pub(super) struct CopyRange {
    /// Handle and offset.
    pub(super) from: (u64, u64),
    /// Handle and offset.
    pub(super) to: (u64, u64),
    /// In bytes.
    pub(super) length: u64,
}

/// Names.
impl Operations {
    /// The answer to opendir. A listing needs no handle: its offsets are hashes of names. ENOSYS makes the
    /// kernel skip opendir and releasedir from now on, and cache listings until they change.
    pub(super) const NO_HANDLE_OF_DIRECTORIES: Errno = Errno::ENOSYS;
    /// The answer to ioctl: Python asks each file that it opens whether it is a terminal.
    pub(super) const NO_COMMANDS: Errno = Errno::ENOTTY;

    pub(super) fn lookup(&self, place: Place, caller: Caller, reply: impl Reply<Entry>) {
        let _held = self.held(Operation::Lookup);
        let awaited = self.fs.look_up_waits(place.parent).or_else(|| self.waits().lookup(&place));
        self.once(awaited, move |shared: &Shared| {
            let outcome = shared.call(Operation::Lookup, |fs| fs.lookup_for(&place, caller));
            reply.send(outcome.and_then(Entry::of_lookup));
        });
    }

    pub(super) fn forget(&self, inode: InodeId, count: u64) {
        let _held = self.held(Operation::Forget);
        self.backings.let_go(inode);
        self.fs.forget(inode, count);
    }

    pub(super) fn make(
        &self, place: Place, node: NewNode, mode: u16, caller: Caller, reply: impl Reply<Entry>,
    ) {
        let _held = self.held(Operation::Make);
        let Some(reply) = self.to_change(reply) else { return };
        let is_file = matches!(node, NewNode::Special { file_type: libc::S_IFREG, .. });
        let waits = is_file && self.waits().creating(&place);
        self.change_in_turn(waits, move |shared| {
            let found = shared.call(Operation::Make, |fs| fs.make(&place, &node, mode, caller));
            reply.send(found.map(Entry::from));
        });
    }

    pub(super) fn unlink(&self, place: Place, reply: impl Reply<()>) {
        let _held = self.held(Operation::Unlink);
        let Some(reply) = self.to_change(reply) else { return };
        self.change(move |shared| {
            reply.send(shared.call(Operation::Unlink, |fs| fs.unlink(&place)));
        });
    }

    pub(super) fn remove_directory(&self, place: Place, reply: impl Reply<()>) {
        let _held = self.held(Operation::Rmdir);
        let Some(reply) = self.to_change(reply) else { return };
        let awaited = self.waits().replacing(&place);
        let answer = move |shared: &Shared| {
            reply.send(shared.call(Operation::Rmdir, |fs| fs.remove_directory(&place)));
        };
        self.change_once(awaited, answer);
    }

    pub(super) fn rename(&self, from: Place, to: Place, flags: u32, reply: impl Reply<()>) {
        let _held = self.held(Operation::Rename);
        let Some(reply) = self.to_change(reply) else { return };
        let reads = || self.waits().rename_reads(&from, &to);
        let awaited = self.fs.rename_waits(&from, &to).or_else(reads);
        let answer = move |shared: &Shared| {
            let outcome = shared.call(Operation::Rename, |fs| fs.rename(&from, &to, flags));
            if let (Ok(Some(old)), Some(notifier)) = (&outcome, shared.notifier.get()) {
                // A negative offset spares the cached bytes, and with them every lock that the
                // kernel holds while it waits for this answer. An inode that it has forgotten is
                // no error.
                let _ = notifier.inval_inode(INodeNo(old.0), -1, 0);
            }
            reply.send(outcome.map(drop));
        };
        self.change_once(awaited, answer);
    }

    pub(super) fn link(&self, inode: InodeId, place: Place, reply: impl Reply<Entry>) {
        let _held = self.held(Operation::Link);
        let Some(reply) = self.to_change(reply) else { return };
        let awaited = self.waits().link(inode).or_else(|| self.waits().making(&place));
        let answer = move |shared: &Shared| {
            let linked = shared.call(Operation::Link, |fs| fs.link(inode, &place));
            reply.send(linked.map(Entry::from));
        };
        self.change_once(awaited, answer);
    }

    pub(super) fn read_link(&self, inode: InodeId) -> Result<Vec<u8>, Errno> {
        let _held = self.held(Operation::ReadLink);
        self.call(Operation::ReadLink, |fs| fs.read_link(inode))
    }

    pub(super) fn list(
        &self, inode: InodeId, offset: u64, listing: Listing, mut reply: impl ReplyListing,
    ) {
        let _held = self.held(Operation::List);
        let awaited = self.fs.look_up_waits(inode).or_else(|| self.waits().listing(inode));
        self.once(awaited, move |shared: &Shared| {
            let outcome = shared.call(Operation::List, |fs| {
                fs.list(inode, offset, listing, |line| reply.add(line))
            });
            reply.send(outcome);
        });
    }
}

/// Attributes.
impl Operations {
    pub(super) fn attributes(&self, inode: InodeId) -> Result<Shown, Errno> {
        let _held = self.held(Operation::GetAttr);
        self.call(Operation::GetAttr, |fs| fs.attributes(inode)).map(Shown::from)
    }

    pub(super) fn set_attributes(
        &self, inode: InodeId, set: SetAttributes, reply: impl Reply<Shown>,
    ) {
        let _held = self.held(Operation::SetAttr);
        let Some(reply) = self.to_change(reply) else { return };
        let answer = move |shared: &Shared| {
            let outcome = shared.call(Operation::SetAttr, |fs| fs.set_attributes(inode, &set));
            reply.send(outcome.map(Shown::from));
        };
        match set.size {
            Some(_) if self.fs.waits_for_remote(inode) => self.fetch(answer),
            Some(_) => self.later(answer),
            None => self.change(answer),
        }
    }

    pub(super) fn space(&self, inode: InodeId) -> Result<Space, Errno> {
        let _held = self.held(Operation::StatFs);
        self.call(Operation::StatFs, |fs| fs.space_at(inode))
    }

    pub(super) fn set_extended_attribute(
        &self, (inode, caller): (InodeId, Caller), name: Vec<u8>, value: Vec<u8>, flags: i32,
        reply: impl Reply<()>,
    ) {
        let _held = self.held(Operation::SetXattr);
        let Some(reply) = self.to_change(reply) else { return };
        match self.call(Operation::SetXattr, |fs| {
            fs.check_limit(inode, &name, caller)?;
            let dry_run = fs.asks_for_collection(inode, &name, &value)?;
            dry_run.map(|dry_run| fs.begin_collection().map(|()| dry_run)).transpose()
        }) {
            Ok(None) => {}
            Ok(Some(dry_run)) => {
                reply.send(Ok(()));
                return self.aside(move |shared| shared.fs.collect_garbage(dry_run));
            }
            Err(error) => return reply.send(Err(error)),
        }
        let waits = self.fs.attribute_waits(inode, &name, &value);
        let answer = move |shared: &Shared| {
            reply.send(shared.call(Operation::SetXattr, |fs| {
                fs.set_extended_attribute(inode, &name, &value, flags)
            }));
        };
        self.change_once(waits, answer);
    }

    pub(super) fn extended_attribute(
        &self, (inode, caller): (InodeId, Caller), name: &[u8], buffer_bytes: u32,
    ) -> Result<ExtendedAttribute, Errno> {
        let _held = self.held(Operation::GetXattr);
        self.call(Operation::GetXattr, |fs| extended_attribute_for(fs, inode, name, caller))
            .and_then(|value| ExtendedAttribute::new(value, buffer_bytes))
    }

    pub(super) fn list_extended_attributes(
        &self, inode: InodeId, buffer_bytes: u32,
    ) -> Result<ExtendedAttribute, Errno> {
        let _held = self.held(Operation::ListXattr);
        self.call(Operation::ListXattr, |fs| fs.list_extended_attributes(inode))
            .and_then(|names| ExtendedAttribute::new(names, buffer_bytes))
    }

    pub(super) fn remove_extended_attribute(
        &self, (inode, caller): (InodeId, Caller), name: &[u8],
    ) -> Result<(), Errno> {
        let _held = self.held(Operation::RemoveXattr);
        self.call(Operation::RemoveXattr, |fs| {
            fs.check_limit(inode, name, caller)?;
            fs.remove_extended_attribute(inode, name)
        })
    }
}

/// Files.
impl Operations {
    pub(super) fn create(
        &self, place: Place, mode: u16, caller: Caller, flags: i32, reply: impl Reply<Made>,
    ) {
        let _held = self.held(Operation::Create);
        let Some(reply) = self.to_change(reply) else { return };
        let is_synchronous = is_synchronous(flags);
        // Its name is durable soon: it waits for a commit in any case.
        let syncs_behind = is_synchronous && self.fs.pace() != Pace::AtOnce;
        let awaited = self.waits().making(&place);
        if let Some(awaited) = awaited.or(syncs_behind.then_some(Awaited::Local)) {
            return self.beside(awaited, move |shared| {
                let created = shared.create_and_open(&place, mode, caller, flags);
                reply.send(created.and_then(|created| shared.synced(created, flags)));
            });
        }
        if !is_synchronous {
            return self.change_in_turn(self.waits().creating(&place), move |shared| {
                reply.send(shared.create_and_open(&place, mode, caller, flags));
            });
        }
        match self.create_and_open(&place, mode, caller, flags) {
            Ok(created) => self.later(move |shared| reply.send(shared.synced(created, flags))),
            outcome => reply.send(outcome),
        }
    }

    pub(super) fn open(
        &self, inode: InodeId, flags: i32, caller: Caller, reply: impl Reply<Handle>,
    ) {
        let _held = self.held(Operation::Open);
        self.decide_io_mode();
        let reads_only = is_reader(flags);
        if self.is_read_only && !reads_only && !self.fs.is_question(inode) {
            return reply.send(Err(Errno::EROFS));
        }
        if reads_only {
            self.fs.note_use(inode, flags);
        }
        let is_held = self.backings.is_held(inode);
        self.fs.expect_more(inode, is_held);
        if reads_only
            && is_held
            && let Some((number, backing)) = self.open_held(inode)
        {
            let flags = FopenFlags::FOPEN_NOFLUSH;
            return reply.send(Ok(Handle { number, flags, backing: Some(backing) }));
        }
        let answer = move |shared: &Shared| reply.send(shared.open(inode, flags, caller));
        if self.fs.waits_for_remote(inode) {
            self.fetch(answer);
        } else if self.fs.is_slot(inode) {
            self.ask(move |shared| shared.fs.open_waits_for_remote(inode), answer);
        } else if self.fs.is_question(inode) || reads_only && !self.fs.must_read_to_open(inode) {
            answer(self);
        } else {
            self.later(answer);
        }
    }

    pub(super) fn read(&self, handle: u64, offset: u64, length: u32, reply: impl ReplyBytes) {
        let _held = self.held(Operation::Read);
        let answer = move |shared: &Shared| {
            reply.fill(length as usize, |buffer| {
                shared.call(Operation::Read, |fs| fs.read(handle, offset, buffer))
            });
        };
        match self.fs.read_answers(handle, offset, length) {
            Some(Answers::Question) => self
                .ask(move |shared| shared.fs.read_waits_for_remote(handle, offset, length), answer),
            Some(Answers::Batch) => self.in_batches(answer),
            None => answer(self),
        }
    }

    /// Writes what the request brings, or keeps it for a thread that may wait.
    pub(super) fn write(&self, handle: u64, offset: u64, data: &[u8], flags: i32) -> Writing {
        let _held = self.held(Operation::Write);
        let appends = flags & libc::O_APPEND != 0;
        let write = |fs: &FileSystem| fs.write_at_once(handle, offset, data, appends);
        let outcome = self.call(Operation::Write, write);
        match outcome {
            Ok(WriteOutcome::Done) => Writing::Done(Ok(Written::all(data))),
            Ok(WriteOutcome::MustWait) => Writing::MustWait(offset, data.to_vec()),
            Err(error) => Writing::Done(Err(error)),
        }
    }

    /// Answers a write. The kernel syncs by itself what it was told to sync, except what is appended.
    pub(super) fn written(
        &self, handle: u64, flags: i32, writing: Writing, reply: impl Reply<Written>,
    ) {
        let _held = self.held(Operation::Write);
        let syncs = is_synchronous(flags) && self.fs.core.appends(handle);
        match writing {
            Writing::MustWait(offset, data) => self.in_bulk(move |shared| {
                let appends = flags & libc::O_APPEND != 0;
                let write = |fs: &FileSystem| fs.write(handle, offset, &data, appends);
                let outcome = shared.call(Operation::Write, write);
                let synced =
                    outcome.and_then(|()| if syncs { shared.sync(handle) } else { Ok(()) });
                reply.send(synced.map(|()| Written::all(&data)));
            }),
            Writing::Done(Ok(written)) if self.fs.look_is_due(handle) => {
                // Not where slots become sequences: whoever writes one would stand behind all of those.
                self.beside(Awaited::Reading, move |shared| {
                    let look = |fs: &FileSystem| fs.look_at_beginning(handle);
                    reply.send(shared.call(Operation::Write, look).map(|()| written));
                });
            }
            Writing::Done(Ok(written)) if syncs => {
                self.later(move |shared| reply.send(shared.sync(handle).map(|()| written)));
            }
            Writing::Done(outcome) => reply.send(outcome),
        }
    }

    pub(super) fn flush(&self, handle: u64, reply: impl Reply<()>) {
        let _held = self.held(Operation::Flush);
        let answer = move |shared: &Shared| {
            reply.send(shared.call(Operation::Flush, |fs| fs.flush(handle)));
        };
        if self.waits().close_saves(handle) {
            self.save(answer);
        } else {
            self.once(self.waits().close(handle), answer);
        }
    }

    pub(super) fn release(&self, inode: InodeId, handle: u64, reply: impl Reply<()>) {
        let _held = self.held(Operation::Release);
        let in_hand = self.fs.core.releases.begin(inode);
        let awaited = self.waits().close(handle);
        let answer = move |shared: &Shared| {
            let _in_hand = in_hand;
            if shared.fs.core.is_backed(handle) {
                shared.backings.detach(inode);
            }
            reply.send(shared.call(Operation::Release, |fs| fs.release(handle)));
        };
        self.once(awaited, answer);
    }

    pub(super) fn sync_file(&self, handle: u64, reply: impl Reply<()>) {
        let _held = self.held(Operation::Fsync);
        self.later(move |shared| reply.send(shared.sync(handle)));
    }

    pub(super) fn sync_directory(&self, reply: impl Reply<()>) {
        let _held = self.held(Operation::Fsync);
        self.later(move |shared| {
            reply.send(shared.call(Operation::Fsync, FileSystem::commit));
        });
    }

    pub(super) fn allocate(&self, handle: u64, allocation: Allocation, reply: impl Reply<()>) {
        let _held = self.held(Operation::Fallocate);
        // The disk may write for a while to find or to free so much.
        self.later(move |shared| {
            let allocate = |fs: &FileSystem| fs.allocate(handle, allocation);
            reply.send(shared.call(Operation::Fallocate, allocate));
        });
    }

    pub(super) fn seek(&self, handle: u64, offset: i64, whence: i32) -> Result<Position, Errno> {
        let _held = self.held(Operation::Seek);
        let seek = match whence {
            libc::SEEK_DATA => Seek::Data,
            libc::SEEK_HOLE => Seek::Hole,
            _ => return Err(Errno::EINVAL),
        };
        self.call(Operation::Seek, |fs| fs.seek(handle, offset, seek)).map(Position)
    }

    pub(super) fn copy(&self, copy: CopyRange, reply: impl Reply<Written>) {
        let _held = self.held(Operation::CopyRange);
        self.in_bulk(move |shared| {
            let CopyRange { from, to, length } = copy;
            let length = length.min(COPY_BYTES_MAX);
            let copied = shared.call(Operation::CopyRange, |fs| fs.copy_range(from, to, length));
            reply.send(copied.map(|copied| Written(u32::try_from(copied).unwrap_or(u32::MAX))));
        });
    }

    /// Opens a page whose backing file is still registered.
    fn open_held(&self, inode: InodeId) -> Option<(u64, Arc<Backing>)> {
        let start = Instant::now();
        let Ok(Some(handle)) = self.fs.open_held(inode) else {
            self.backings.let_go(inode);
            return None;
        };
        let Some(backing) = self.backings.attach_held(inode) else {
            if let Err(error) = self.fs.release(handle) {
                log::error!("undoing an open: {error}");
            }
            return None;
        };
        self.fs.observer().request(Operation::Open, true, start.elapsed());
        Some((handle, backing))
    }
}

impl Shared {
    fn sync(&self, handle: u64) -> Result<(), Errno> {
        self.call(Operation::Fsync, |fs| fs.sync_file(handle))
    }

    /// A file that was made to be written synchronously: its name is durable before anybody writes to it.
    fn synced(&self, made: Made, flags: i32) -> Result<Made, Errno> {
        if !is_synchronous(flags) {
            return Ok(made);
        }
        let number = made.handle.number;
        let synced = self.sync(number);
        synced.inspect_err(|_| self.take_back(made.entry.inode(), number)).map(|()| made)
    }

    fn create_and_open(
        &self, place: &Place, mode: u16, caller: Caller, flags: i32,
    ) -> Result<Made, Errno> {
        self.decide_io_mode();
        let writes = flags & libc::O_ACCMODE != libc::O_RDONLY;
        let created = self.call(Operation::Create, |fs| {
            if is_synchronous(flags) {
                return fs.create_synchronous(place, mode, caller);
            }
            fs.create(place, mode, caller, writes)
        })?;
        let (found, opened) = (created.found, created.opened);
        let (flags, backing) = match &opened.by {
            OpenedBy::Daemon => (Shared::served_flags(&opened), None),
            OpenedBy::Kernel { file } => {
                let register = || self.register(file.as_ref());
                match self.backings.attach(found.attributes.inode, false, register) {
                    Ok(backing) => (quiet(&opened), Some(backing)),
                    Err(error) => return Err(self.undo_open(opened.handle, &error)),
                }
            }
        };
        let handle = Handle { number: opened.handle, flags, backing };
        Ok(Made { entry: Entry::of_new(&found), handle })
    }

    /// Opens a file.
    fn open(&self, inode: InodeId, flags: i32, caller: Caller) -> Result<Handle, Errno> {
        let opened = self.call(Operation::Open, |fs| fs.open_for(inode, flags, caller))?;
        if is_synchronous(flags)
            && let Err(error) = self.call(Operation::Fsync, |fs| fs.sync_file(opened.handle))
        {
            self.take_back(None, opened.handle);
            return Err(error);
        }
        let quiet = quiet(&opened);
        let number = opened.handle;
        match &opened.by {
            OpenedBy::Daemon => {
                let flags = Self::served_flags(&opened) | quiet;
                Ok(Handle { number, flags, backing: None })
            }
            OpenedBy::Kernel { file } => {
                let register = || self.register(file.as_ref());
                match self.backings.attach(inode, opened.is_sealed, register) {
                    Ok(backing) => Ok(Handle { number, flags: quiet, backing: Some(backing) }),
                    Err(error) => Err(self.undo_open(number, &error)),
                }
            }
        }
    }
}
