//! What each request does: one call into [`kvfs_fs`], on this thread or beside it if it may wait.

mod files;

use fuser::Errno;

use super::answer::{Entry, ExtendedAttribute, Reply, ReplyListing, Shown};
use super::dispatch::Operations;
use super::shared::Shared;
pub(super) use files::{CopyRange, Writing};
use kvfs_fs::{
    Caller, CollectionRequest, Listing, NewNode, Place, SetAttributes, Subject, check_limit,
    collect_garbage, extended_attribute_for, set_extended_attribute_for,
};
use kvfs_observe::Operation;
use kvfs_storage::store::disk::Space;
use kvfs_storage::store::record::InodeId;

/// Names.
impl Operations {
    /// The answer to opendir. A listing needs no handle: its offsets are hashes of names. ENOSYS makes the
    /// kernel skip opendir and releasedir from now on, and cache listings until they change.
    pub(super) const NO_HANDLE_OF_DIRECTORIES: Errno = Errno::ENOSYS;
    /// The answer to ioctl: Python asks each file that it opens whether it is a terminal.
    pub(super) const NO_COMMANDS: Errno = Errno::ENOTTY;

    pub(super) fn lookup(&self, place: Place, caller: Caller, reply: impl Reply<Entry>) {
        let _held = self.held(Operation::Lookup);
        let awaited = self
            .fs
            .virtual_directories()
            .waits_to_look(place.parent)
            .or_else(|| self.waits().lookup(&place));
        self.once(awaited, move |shared: &Shared| {
            let outcome = shared
                .call(Operation::Lookup, Subject::Name(&place), |fs| fs.lookup_for(&place, caller));
            reply.send(outcome.and_then(Entry::of_lookup));
        });
    }

    pub(super) fn forget(&self, inode: InodeId, count: u64) {
        let _held = self.held(Operation::Forget);
        self.backings.let_go(inode);
        // The kernel knew it before this daemon, and does not any more.
        if self.fs.forget(inode, count)
            && let Some(handle) = self.backings.forget_left(inode)
        {
            kvfs_fs::recalled::note_left_closed(&self.fs.core, inode);
            if let Err(error) = self.fs.release(handle) {
                log::error!("opens of inode {} that a daemon had left: {error}", inode.0);
            }
        }
    }

    pub(super) fn make(
        &self, place: Place, node: NewNode, mode: u16, caller: Caller, reply: impl Reply<Entry>,
    ) {
        let _held = self.held(Operation::Make);
        let Some(reply) = self.to_change(reply) else { return };
        let is_file = matches!(node, NewNode::Special { file_type: libc::S_IFREG, .. });
        let waits = is_file && self.waits().creating(&place);
        self.change_in_turn(waits, move |shared| {
            let found = shared.call(Operation::Make, Subject::Name(&place), |fs| {
                fs.make(&place, &node, mode, caller)
            });
            reply.send(found.map(Entry::from));
        });
    }

    pub(super) fn unlink(&self, place: Place, reply: impl Reply<()>) {
        let _held = self.held(Operation::Unlink);
        let Some(reply) = self.to_change(reply) else { return };
        self.change(move |shared| {
            reply.send(
                shared.call(Operation::Unlink, Subject::Name(&place), |fs| fs.unlink(&place)),
            );
        });
    }

    pub(super) fn remove_directory(&self, place: Place, reply: impl Reply<()>) {
        let _held = self.held(Operation::Rmdir);
        let Some(reply) = self.to_change(reply) else { return };
        let awaited = self.waits().replacing(&place);
        let answer =
            move |shared: &Shared| {
                reply.send(shared.call(Operation::Rmdir, Subject::Name(&place), |fs| {
                    fs.remove_directory(&place)
                }));
            };
        self.change_once(awaited, answer);
    }

    pub(super) fn rename(&self, from: Place, to: Place, flags: u32, reply: impl Reply<()>) {
        let _held = self.held(Operation::Rename);
        let Some(reply) = self.to_change(reply) else { return };
        let reads = || self.waits().rename_reads(&from, &to);
        let awaited = self.fs.rename_waits(&from, &to).or_else(reads);
        let answer = move |shared: &Shared| {
            let outcome = shared
                .call(Operation::Rename, Subject::Name(&from), |fs| fs.rename(&from, &to, flags));
            if let (Ok(Some(old)), Some(notifier)) = (&outcome, shared.notifier.get()) {
                // An inode that the kernel has forgotten is no error.
                let _ = notifier.forget_attributes(*old);
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
            let linked =
                shared.call(Operation::Link, Subject::Name(&place), |fs| fs.link(inode, &place));
            reply.send(linked.map(Entry::from));
        };
        self.change_once(awaited, answer);
    }

    pub(super) fn read_link(&self, inode: InodeId) -> Result<Vec<u8>, Errno> {
        let _held = self.held(Operation::ReadLink);
        self.call(Operation::ReadLink, Subject::Inode(inode), |fs| fs.read_link(inode))
    }

    pub(super) fn list(
        &self, inode: InodeId, offset: u64, listing: Listing, mut reply: impl ReplyListing,
    ) {
        let _held = self.held(Operation::List);
        let awaited = self
            .fs
            .virtual_directories()
            .waits_to_look(inode)
            .or_else(|| self.waits().listing(inode));
        self.once(awaited, move |shared: &Shared| {
            let outcome = shared.call(Operation::List, Subject::Inode(inode), |fs| {
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
        self.call(Operation::GetAttr, Subject::Inode(inode), |fs| fs.attributes(inode))
            .map(Shown::from)
    }

    pub(super) fn set_attributes(
        &self, inode: InodeId, set: SetAttributes, reply: impl Reply<Shown>,
    ) {
        let _held = self.held(Operation::SetAttr);
        let Some(reply) = self.to_change(reply) else { return };
        let answer = move |shared: &Shared| {
            let outcome = shared.call(Operation::SetAttr, Subject::Inode(inode), |fs| {
                fs.set_attributes(inode, &set)
            });
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
        self.call(Operation::StatFs, Subject::Inode(inode), |fs| fs.space_at(inode))
    }

    pub(super) fn set_extended_attribute(
        &self, (inode, caller): (InodeId, Caller), name: Vec<u8>, value: Vec<u8>, flags: i32,
        reply: impl Reply<()>,
    ) {
        let _held = self.held(Operation::SetXattr);
        let Some(reply) = self.to_change(reply) else { return };
        match self.call(Operation::SetXattr, Subject::Inode(inode), |fs| {
            check_limit(&fs.core, inode, &name, caller)?;
            let request = CollectionRequest::of_attribute(inode, &name, &value)?;
            request.map(|request| fs.collection.begin().map(|()| request)).transpose()
        }) {
            Ok(None) => {}
            Ok(Some(request)) => {
                reply.send(Ok(()));
                return self.aside(move |shared| collect_garbage(&shared.fs, &request));
            }
            Err(error) => return reply.send(Err(error)),
        }
        let waits = self.fs.attribute_waits(inode, &name, &value);
        let answer = move |shared: &Shared| {
            reply.send(shared.call(Operation::SetXattr, Subject::Inode(inode), |fs| {
                set_extended_attribute_for(fs, inode, (&name, &value, flags), caller)
            }));
        };
        self.change_once(waits, answer);
    }

    pub(super) fn extended_attribute(
        &self, (inode, caller): (InodeId, Caller), name: &[u8], buffer_bytes: u32,
    ) -> Result<ExtendedAttribute, Errno> {
        let _held = self.held(Operation::GetXattr);
        self.call(Operation::GetXattr, Subject::Inode(inode), |fs| {
            extended_attribute_for(fs, inode, name, caller)
        })
        .and_then(|value| ExtendedAttribute::new(value, buffer_bytes))
    }

    pub(super) fn list_extended_attributes(
        &self, (inode, caller): (InodeId, Caller), buffer_bytes: u32,
    ) -> Result<ExtendedAttribute, Errno> {
        let _held = self.held(Operation::ListXattr);
        self.call(Operation::ListXattr, Subject::Inode(inode), |fs| {
            fs.list_extended_attributes(inode, caller)
        })
        .and_then(|names| ExtendedAttribute::new(names, buffer_bytes))
    }

    pub(super) fn remove_extended_attribute(
        &self, (inode, caller): (InodeId, Caller), name: &[u8],
    ) -> Result<(), Errno> {
        if self.is_read_only {
            return Err(Errno::EROFS);
        }
        let _held = self.held(Operation::RemoveXattr);
        self.call(Operation::RemoveXattr, Subject::Inode(inode), |fs| {
            check_limit(&fs.core, inode, name, caller)?;
            fs.remove_extended_attribute(inode, name)
        })
    }
}
