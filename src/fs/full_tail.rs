//! A full tail becomes a page, and the next tail begins.
//!
//! The append that fills a tail does it. If that fails the rows of that append go again, so the writer
//! may repeat it. Where a crash came between the two steps, the tail is full without being a page: the next
//! append to it seals it first, and each mount seals such tails beside the requests.

use super::append::{append_turn, rows_bytes};
use super::attributes::Place;
use super::insert::{Origin, Verified};
use super::publish::page_role;
use super::state::State;
use super::{FileSystem, FsError};
use crate::ingest::seal::{self, SealError};
use crate::page::{PagePlace, TokenStart, names, pack_page};
use crate::store::disk::{Access, DiskFile, read_all};
use crate::store::record::{Inode, InodeId, ObjectId, Role, Time};

impl FileSystem {
    /// Seals a full tail and opens the next. The caller has the turn to append.
    pub(super) fn seal_tail(
        &self, id: InodeId, tail: &Inode, file: &dyn DiskFile, (place, page): (&Place, &PagePlace),
    ) -> Result<(), FsError> {
        let tokens = page.geometry().page_tokens();
        let rows = read_all(file, rows_bytes(page))?;
        let bytes = pack_page(page, &rows, tokens)
            .map_err(|error| self.report(place, SealError::Refused(error)))?;
        // Whatever needs room on the disk comes before the first name changes.
        let (object, made) = self.new_disk_object()?;
        let next = self.new_disk_object().map(|(next, _)| next);
        let next = next.inspect_err(|_| self.drop_unused(object))?;
        let verified = self.write_page((object, made.as_ref()), &bytes, page);
        let verified = verified.inspect_err(|_| {
            self.drop_unused(object);
            self.drop_unused(next);
        })?;
        let mut state = self.state_to_change()?;
        let start = page.start().0;
        let name = names::format_page(page.start()).into_bytes();
        let mut sealed = tail.clone();
        sealed.mtime = Time::now();
        let origin = Origin { is_dated: false, ..state.origin(id, sealed)? };
        state.remove_source(id, place, false)?;
        let to = Place { parent: place.parent, name };
        self.insert_sealed(&mut state, &origin, &to, (object, &verified))?;
        self.announce(&to);
        self.open_next_tail(&mut state, tail, place.parent, (start + u64::from(tokens), next))
    }

    fn new_disk_object(&self) -> Result<(ObjectId, Box<dyn DiskFile>), FsError> {
        let object = self.state().metadata.new_object();
        let made = self.store.create_object(object).inspect_err(|_| self.drop_unused(object));
        Ok((object, made?))
    }

    fn drop_unused(&self, object: ObjectId) {
        self.state().metadata.remove_object(object);
    }

    fn write_page(
        &self, (object, file): (ObjectId, &dyn DiskFile), bytes: &[u8], page: &PagePlace,
    ) -> Result<Verified, FsError> {
        file.write_all_at(bytes, 0)?;
        let verified = seal::verify_file(file, page).map_err(|error| match error {
            SealError::Io(error) => FsError::Io(error),
            SealError::Refused(_) => FsError::Corrupt,
        })?;
        let role = page_role(page, verified.header.tokens, verified.digest.page.0);
        let checksum = verified.digest.object.0;
        let twin = self.find_twin(object, role, checksum)?;
        Ok(Verified { role, checksum, length: bytes.len() as u64, twin })
    }

    /// Begins the tail behind a page, with an object made for it, unless its rows are somewhere already.
    fn open_next_tail(
        &self, state: &mut State, tail: &Inode, parent: InodeId, (start, object): (u64, ObjectId),
    ) -> Result<(), FsError> {
        let tail_name = names::format_tail(TokenStart(start)).into_bytes();
        let page_name = names::format_page(TokenStart(start)).into_bytes();
        if state.entry(parent, &tail_name)?.is_some()
            || state.entry(parent, &page_name)?.is_some()
            || state.is_pending(parent, &page_name)
        {
            state.metadata.remove_object(object);
            return Ok(());
        }
        let now = Time::now();
        let inode = Inode { mtime: now, ctime: now, atime: now, links: 1, ..tail.clone() };
        self.insert_append(
            state,
            &Place { parent, name: tail_name },
            &inode,
            (object, Role::Tail { start, directory: parent }),
        )
    }

    /// Seals tails that are full, beside the mount: a crash may have come before they were. Returns how
    /// many.
    pub fn seal_full_tails(&self) -> Result<usize, FsError> {
        let snapshot = self.state().metadata.snapshot()?;
        let mut growing = Vec::new();
        snapshot.for_each::<()>(b'U', |id, ()| growing.push(InodeId(id)))?;
        drop(snapshot);
        let mut sealed = 0;
        for id in growing {
            match self.seal_if_full(id) {
                Ok(is_sealed) => sealed += usize::from(is_sealed),
                // It was removed meanwhile.
                Err(FsError::NotFound | FsError::Stale) => {}
                Err(FsError::ReadOnly) => return Err(FsError::ReadOnly),
                Err(error) => log::warn!("the full tail of inode {} stays one: {error}", id.0),
            }
        }
        Ok(sealed)
    }

    fn seal_if_full(&self, id: InodeId) -> Result<bool, FsError> {
        let turn = {
            let mut state = self.state_to_change()?;
            let inode = state.inode(id)?;
            let role = inode.file().map(|file| file.role);
            if !matches!(role, Some(Role::Tail { .. })) || inode.links == 0 {
                return Ok(false);
            }
            append_turn(&mut state, id)
        };
        let guard = turn.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let outcome = self.seal_if_full_in_turn(id);
        drop(guard);
        self.state().drop_node_if_idle(id)?;
        outcome
    }

    fn seal_if_full_in_turn(&self, id: InodeId) -> Result<bool, FsError> {
        let inode = self.state().inode(id)?;
        let record = inode.file().filter(|_| inode.links > 0).ok_or(FsError::Stale)?;
        let (Role::Tail { start, directory }, Some(object)) = (record.role, record.object) else {
            return Ok(false);
        };
        let (place, page) = self.tail_place(directory, start)?;
        let file = self.store.open_object(object, Access::Read)?;
        if file.stat()?.length != rows_bytes(&page) {
            return Ok(false);
        }
        let name = names::format_page(page.start()).into_bytes();
        if self.state().entry(directory, &name)?.is_some() {
            // The rows are a page already, which somebody else has written.
            return Ok(false);
        }
        self.seal_tail(id, &inode, file.as_ref(), (&place, &page))?;
        Ok(true)
    }
}
