//! What requests on files do: making, opening, reading, writing, syncing and closing them.

use std::sync::Arc;
use std::time::Instant;

use fuser::{Errno, FopenFlags};

use crate::answer::{Entry, Handle, Made, Position, Reply, ReplyBytes, Written};
use crate::dispatch::Operations;
use crate::passthrough::Backing;
use crate::shared::{Shared, is_reader, quiet};
use kvfs_fs::takeover;
use kvfs_fs::{
    Answers, Awaited, Caller, FileSystem, OpenedBy, Pace, Place, Subject, WriteOutcome,
    is_synchronous,
};
use kvfs_observe::Operation;
use kvfs_storage::store::disk::{Allocation, Seek};
use kvfs_storage::store::record::InodeId;

/// Bytes that one request copies: others take their turn in between. Whoever copies asks for the rest.
const COPY_BYTES_MAX: u64 = 16 << 20;

/// A write between its two halves: bytes that came in, and the answer.
#[derive(Debug)]
pub(crate) enum Writing {
    /// The bytes are written, or will not be.
    Done(Result<Written, Errno>),
    /// Where the bytes go, and they, for a thread that may wait.
    MustWait(u64, Vec<u8>),
}

/// Where and how much a `copy_file_range` copies.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CopyRange {
    /// Handle and offset.
    pub(crate) from: (u64, u64),
    /// Handle and offset.
    pub(crate) to: (u64, u64),
    /// In bytes.
    pub(crate) length: u64,
}

impl Operations {
    pub(crate) fn create(
        &self, place: Place, mode: u16, caller: Caller, flags: i32, reply: impl Reply<Made>,
    ) {
        let _held = self.held(Operation::Create);
        let Some(reply) = self.to_change(reply) else { return };
        let is_synchronous = is_synchronous(flags);
        // Its name is durable soon: it waits for a commit in any case.
        let syncs_behind = is_synchronous && self.fs.pacing().pace() != Pace::AtOnce;
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

    pub(crate) fn open(
        &self, inode: InodeId, flags: i32, (caller, process): (Caller, u32),
        reply: impl Reply<Handle>,
    ) {
        let held = self.held(Operation::Open);
        self.decide_io_mode();
        let reads_only = is_reader(flags);
        if self.is_read_only && !reads_only && !self.fs.virtual_directories().is_question(inode) {
            return reply.send(Err(Errno::EROFS));
        }
        if reads_only {
            self.fs.retention.note_use(&self.fs.core, inode, flags);
        }
        let is_held = self.backings.is_held(inode);
        self.fs.prefetcher().expect_more(inode, is_held);
        if reads_only
            && is_held
            && let Some((number, backing)) = self.open_held(inode, held.begun())
        {
            let flags = FopenFlags::FOPEN_NOFLUSH;
            return reply.send(Ok(Handle { number, flags, backing: Some(backing) }));
        }
        let answer = move |shared: &Shared| {
            let opened = shared.open(inode, flags, caller);
            if let Ok(opened) = &opened {
                let is_trusted = || kvfs_os::is_as_privileged(process);
                takeover::allow(&shared.fs, (inode, opened.number), is_trusted);
            }
            reply.send(opened);
        };
        if self.fs.waits_for_remote(inode) {
            self.fetch(answer);
        } else if self.fs.virtual_directories().is_slot(inode) {
            let waits =
                move |shared: &Shared| shared.fs.virtual_directories().open_waits_for_remote(inode);
            self.ask(waits, answer);
        } else if self.fs.virtual_directories().is_question(inode)
            || reads_only && !self.fs.must_read_to_open(inode)
        {
            answer(self);
        } else if flags & libc::O_TRUNC != 0 {
            self.change_later(answer);
        } else {
            self.later(answer);
        }
    }

    pub(crate) fn read(&self, handle: u64, offset: u64, length: u32, reply: impl ReplyBytes) {
        let _held = self.held(Operation::Read);
        let answer = move |shared: &Shared| {
            reply.fill(length as usize, |buffer| {
                shared.call(Operation::Read, Subject::Handle(handle), |fs| {
                    fs.read(handle, offset, buffer)
                })
            });
        };
        match kvfs_fs::read_answers(&self.fs.core, handle, offset, length) {
            Some(Answers::Question) => {
                let waits = move |shared: &Shared| {
                    shared.fs.virtual_directories().read_waits_for_remote(handle, offset, length)
                };
                self.ask(waits, answer);
            }
            Some(Answers::Batch) => self.in_batches(answer),
            None => answer(self),
        }
    }

    /// Writes what the request brings, or keeps it for a thread that may wait.
    pub(crate) fn write(&self, handle: u64, offset: u64, data: &[u8], flags: i32) -> Writing {
        let _held = self.held(Operation::Write);
        let appends = flags & libc::O_APPEND != 0;
        let write = |fs: &FileSystem| fs.write_at_once(handle, offset, data, appends);
        let outcome = self.call(Operation::Write, Subject::Handle(handle), write);
        match outcome {
            Ok(WriteOutcome::Done) => Writing::Done(Ok(Written::all(data))),
            Ok(WriteOutcome::MustWait) => Writing::MustWait(offset, data.to_vec()),
            Err(error) => Writing::Done(Err(error)),
        }
    }

    /// Answers a write. The kernel syncs by itself what it was told to sync, except what is appended.
    pub(crate) fn written(
        &self, handle: u64, flags: i32, writing: Writing, reply: impl Reply<Written>,
    ) {
        let _held = self.held(Operation::Write);
        let syncs = is_synchronous(flags) && self.fs.core.appends(handle);
        match writing {
            Writing::MustWait(offset, data) => self.in_bulk(move |shared| {
                let appends = flags & libc::O_APPEND != 0;
                let write = |fs: &FileSystem| fs.write(handle, offset, &data, appends);
                let outcome = shared.call(Operation::Write, Subject::Handle(handle), write);
                let synced =
                    outcome.and_then(|()| if syncs { shared.sync(handle) } else { Ok(()) });
                reply.send(synced.map(|()| Written::all(&data)));
            }),
            Writing::Done(Ok(written)) if kvfs_fs::look_is_due(&self.fs.core, handle) => {
                // Not where slots become sequences: whoever writes one would stand behind all of those.
                self.beside(Awaited::Reading, move |shared| {
                    let look = |fs: &FileSystem| kvfs_fs::look_at_beginning(&fs.core, handle);
                    reply.send(
                        shared
                            .call(Operation::Write, Subject::Handle(handle), look)
                            .map(|()| written),
                    );
                });
            }
            Writing::Done(Ok(written)) if syncs => {
                self.later(move |shared| reply.send(shared.sync(handle).map(|()| written)));
            }
            Writing::Done(outcome) => reply.send(outcome),
        }
    }

    pub(crate) fn flush(&self, handle: u64, reply: impl Reply<()>) {
        let _held = self.held(Operation::Flush);
        let answer = move |shared: &Shared| {
            reply.send(
                shared.call(Operation::Flush, Subject::Handle(handle), |fs| fs.flush(handle)),
            );
        };
        if self.waits().close_saves(handle) {
            self.save(answer);
        } else {
            self.once(self.waits().close(handle), answer);
        }
    }

    pub(crate) fn release(&self, inode: InodeId, handle: u64, reply: impl Reply<()>) {
        let _held = self.held(Operation::Release);
        let in_hand = self.fs.core.releases.begin(inode);
        let awaited = self.waits().close(handle);
        let answer = move |shared: &Shared| {
            let _in_hand = in_hand;
            if shared.fs.core.is_backed(handle) {
                shared.backings.detach(inode);
            }
            reply.send(
                shared.call(Operation::Release, Subject::Inode(inode), |fs| fs.release(handle)),
            );
        };
        self.once(awaited, answer);
    }

    pub(crate) fn sync_file(&self, handle: u64, reply: impl Reply<()>) {
        let _held = self.held(Operation::Fsync);
        self.later(move |shared| reply.send(shared.sync(handle)));
    }

    pub(crate) fn sync_directory(&self, inode: InodeId, reply: impl Reply<()>) {
        let _held = self.held(Operation::Fsync);
        self.later(move |shared| {
            let sync = |fs: &FileSystem| kvfs_fs::sync_directory(fs, inode);
            reply.send(shared.call(Operation::Fsync, Subject::Mount, sync));
        });
    }

    pub(crate) fn allocate(&self, handle: u64, allocation: Allocation, reply: impl Reply<()>) {
        let _held = self.held(Operation::Fallocate);
        // The disk may write for a while to find or to free so much.
        self.later(move |shared| {
            let allocate = |fs: &FileSystem| fs.allocate(handle, allocation);
            reply.send(shared.call(Operation::Fallocate, Subject::Handle(handle), allocate));
        });
    }

    pub(crate) fn seek(&self, handle: u64, offset: i64, whence: i32) -> Result<Position, Errno> {
        let _held = self.held(Operation::Seek);
        let seek = match whence {
            libc::SEEK_DATA => Seek::Data,
            libc::SEEK_HOLE => Seek::Hole,
            _ => return Err(Errno::EINVAL),
        };
        self.call(Operation::Seek, Subject::Handle(handle), |fs| fs.seek(handle, offset, seek))
            .map(Position)
    }

    pub(crate) fn copy(&self, copy: CopyRange, reply: impl Reply<Written>) {
        let _held = self.held(Operation::CopyRange);
        self.in_bulk(move |shared| {
            let CopyRange { from, to, length } = copy;
            let length = length.min(COPY_BYTES_MAX);
            let copied = shared.call(Operation::CopyRange, Subject::Handle(to.0), |fs| {
                fs.copy_range(from, to, length)
            });
            reply.send(copied.map(|copied| Written(u32::try_from(copied).unwrap_or(u32::MAX))));
        });
    }

    /// Opens a page whose backing file is still registered.
    fn open_held(&self, inode: InodeId, begun: Instant) -> Option<(u64, Arc<Backing>)> {
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
        self.fs.observer().request(Operation::Open, true, begun.elapsed());
        Some((handle, backing))
    }
}

impl Shared {
    fn sync(&self, handle: u64) -> Result<(), Errno> {
        self.call(Operation::Fsync, Subject::Handle(handle), |fs| fs.sync_file(handle))
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
        let created = self.call(Operation::Create, Subject::Name(place), |fs| {
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
        let opened = self
            .call(Operation::Open, Subject::Inode(inode), |fs| fs.open_for(inode, flags, caller))?;
        if is_synchronous(flags)
            && let Err(error) =
                self.call(Operation::Fsync, Subject::Inode(inode), |fs| fs.sync_file(opened.handle))
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
