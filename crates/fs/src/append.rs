//! Tails and token files: the daemon serves them and lets them only grow.
//!
//! A tail holds token rows, `K[num_kv_heads, head_dim]` then `V[num_kv_heads, v_head_dim]`. The
//! append that fills the page seals it, transposed to the manifest's layout, and opens the next
//! tail; where that fails, the row is taken back. After a crash between the two, recovery seals.

use std::sync::{Arc, Mutex};

use super::attributes::Place;
use super::handle::{Handle, Served};
use super::insert::{Origin, Verified};
use super::open::{Caching, Opened, OpenedBy};
use super::publish::page_role;
use super::state::State;
use super::transfer::{WriteMode, WriteOutcome};
use super::waits::sealing_takes_long;
use super::{FileSystem, FsError, descriptors};
use kvfs_page::{PageError, PagePlace, names, pack_page};
use kvfs_storage::ingest::seal::{self, SealError};
use kvfs_storage::store::disk::{Access, DiskFile, read_all};
use kvfs_storage::store::metadata::{Life, TokensChange};
use kvfs_storage::store::record::{
    DirectoryClass, Entry, FileRecord, Inode, InodeId, Kind, ObjectId, ObjectKind, Role, Time,
};

/// Bytes of one token id.
const TOKEN_BYTES: u64 = 4;

impl State {
    /// Rows go: who reads them by the name of their file must not take later ones for them.
    pub(super) fn tell_watches_of_rows(&self, file: Option<&FileRecord>) {
        if let Some(Role::Tail { directory, .. }) = file.map(|file| file.role) {
            self.metadata.watches.tell(directory);
        }
    }
}

impl FileSystem {
    pub(super) fn open_append(
        &self, id: InodeId, writes: bool, truncates: bool,
    ) -> Result<Opened, FsError> {
        descriptors::check()?;
        let mut state = if writes { self.state_to_change()? } else { self.state() };
        let inode = state.inode(id)?;
        let object = inode.file().and_then(|file| file.object).ok_or(FsError::Stale)?;
        let access = if writes || truncates { Access::ReadWrite } else { Access::Read };
        let file: Arc<dyn DiskFile> = Arc::from(self.store.open_object(object, access)?);
        let handle = state.add_handle(Handle::new(id, writes, Served::Append(Arc::clone(&file))));
        let turn = append_turn(&mut state, id);
        drop(state);
        if truncates {
            let _turn = turn.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            self.state().tell_watches_of_rows(inode.file());
            if let Err(error) = file.set_length(0) {
                self.release(handle)?;
                return Err(error.into());
            }
            self.publish_rows(inode.file().ok_or(FsError::Invalid)?);
            self.note_tokens(id, TokensChange::Truncated);
        }
        Ok(Opened {
            handle,
            by: OpenedBy::Daemon,
            is_sealed: false,
            caching: Caching::Never,
            closes_quietly: !writes,
        })
    }

    /// Appends to a tail or token file: a descriptor without `O_APPEND` must name the end.
    pub(super) fn append(
        &self, id: InodeId, file: &dyn DiskFile, bytes: &[u8], mode: WriteMode,
    ) -> Result<WriteOutcome, FsError> {
        let mut state = self.state_to_change()?;
        let turn = append_turn(&mut state, id);
        drop(state);
        let _turn = match turn.try_lock() {
            Ok(turn) => turn,
            Err(_) if mode.may_wait => {
                turn.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
            }
            Err(_) => return Ok(WriteOutcome::MustWait),
        };
        let inode = self.state().inode(id)?;
        let record = inode.file().ok_or(FsError::Invalid)?.clone();
        let size = file.stat()?.length;
        if !mode.appends && mode.offset != size {
            return Err(FsError::NotPermitted);
        }
        let border = match record.role {
            _ if inode.links == 0 => return Err(FsError::CrossesPage),
            Role::Tail { start, directory } => Some(self.tail_place(directory, start)?),
            _ => None,
        };
        let end = size + bytes.len() as u64;
        if border.as_ref().is_some_and(|(_, page)| end > rows_bytes(page)) {
            return Err(FsError::CrossesPage);
        }
        let full = border.filter(|(_, page)| end == rows_bytes(page));
        if !mode.may_wait && full.as_ref().is_some_and(|(_, page)| sealing_takes_long(page)) {
            return Ok(WriteOutcome::MustWait);
        }
        if let Err(error) = file.write_all_at(bytes, size) {
            // A full disk may have taken a part of it: rows are appended whole or not at all.
            file.set_length(size)?;
            return Err(error.into());
        }
        self.publish_rows(&record);
        if record.role == Role::Tokens {
            self.note_tokens(id, TokensChange::Grown);
        }
        if let Some((place, page)) = full {
            let sealed = self.seal_tail(id, &inode, file, (&place, &page));
            sealed.inspect_err(|_| self.take_back(id, file, size))?;
        }
        Ok(WriteOutcome::Done)
    }

    /// The page found no room, so the row that completes it has not come: the writer tries again.
    fn take_back(&self, id: InodeId, file: &dyn DiskFile, size: u64) {
        if let Err(error) = file.set_length(size) {
            log::warn!("a row without a page could not be taken back: {error}");
            self.state().full_tails.insert(id);
        }
    }

    /// The next commit makes what was appended durable: no record tells of it.
    fn publish_rows(&self, record: &FileRecord) {
        if let Some(object) = record.object {
            self.state().metadata.publish(object);
        }
    }

    /// The page that a tail becomes, and the tail's name.
    fn tail_place(&self, parent: InodeId, start: u64) -> Result<(Place, PagePlace), FsError> {
        let mut state = self.state();
        let (_, class) = state.directory(parent)?;
        let DirectoryClass::Layer(layer) = class else {
            return Err(FsError::Invalid);
        };
        let name = names::format_tail(kvfs_page::TokenStart(start)).into_bytes();
        let place = Place { parent, name };
        let model = self.model_of(&mut state, parent);
        drop(state);
        let page = model.and_then(|model| model.place(layer, start).map_err(SealError::Refused));
        match page {
            Ok(page) => Ok((place, page)),
            Err(error) => Err(self.report(&place, error)),
        }
    }

    /// Checks that a tail may begin at a token.
    pub(super) fn check_tail(
        &self, state: &mut State, place: &Place, start: u64,
    ) -> Result<PagePlace, FsError> {
        let (_, class) = state.directory(place.parent)?;
        let DirectoryClass::Layer(layer) = class else {
            return Err(FsError::Invalid);
        };
        let page = self
            .model_of(state, place.parent)
            .and_then(|model| model.place(layer, start).map_err(SealError::Refused));
        let page = page.map_err(|error| match error {
            SealError::Io(error) => FsError::Io(error),
            SealError::Refused(error) => {
                let path = state.path(place.parent, &place.name);
                self.observer.refused(&path, error.reason(), &error.to_string());
                FsError::Refused
            }
        })?;
        let name = names::format_page(kvfs_page::TokenStart(start));
        match state.entry(place.parent, name.as_bytes())? {
            Some(_) => Err(FsError::Exists),
            None => Ok(page),
        }
    }

    /// Seals a full tail and opens the next.
    pub(super) fn seal_tail(
        &self, id: InodeId, tail: &Inode, file: &dyn DiskFile, (place, page): (&Place, &PagePlace),
    ) -> Result<(), FsError> {
        let tokens = page.geometry().page_tokens();
        let rows = read_all(file, rows_bytes(page))?;
        let bytes = pack_page(page, &rows, tokens)
            .map_err(|error| self.report(place, SealError::Refused(error)))?;
        let [object, next] = [(); 2].map(|()| self.state().metadata.new_object());
        // Both files are made before anything changes: afterwards nothing may fail for want of room.
        let made = self.write_page(object, &bytes, page).and_then(|verified| {
            self.store.create_object(next)?;
            Ok(verified)
        });
        let verified = made.inspect_err(|_| {
            let mut state = self.state();
            state.metadata.remove_object(object);
            state.metadata.remove_object(next);
        })?;
        let mut state = self.state_to_change()?;
        let start = page.start().0;
        let name = names::format_page(page.start()).into_bytes();
        let mut sealed = tail.clone();
        sealed.mtime = Time::now();
        let origin = Origin { is_dated: false, ..state.origin(id, sealed)? };
        let to = Place { parent: place.parent, name };
        // The rows stay where they are.
        let suspended = state.metadata.watches.suspend(place.parent);
        let inserted = state
            .remove_source(id, place, false)
            .and_then(|()| self.insert_sealed(&mut state, &origin, &to, (object, &verified)));
        state.metadata.watches.resume(suspended);
        inserted?;
        self.announce(&to);
        let end = start + u64::from(tokens);
        self.open_next_tail(&mut state, tail, (place.parent, end), next)
    }

    fn write_page(
        &self, object: ObjectId, bytes: &[u8], page: &PagePlace,
    ) -> Result<Verified, FsError> {
        let file = self.store.create_object(object)?;
        file.write_all_at(bytes, 0)?;
        let verified = seal::verify_file(file.as_ref(), page).map_err(|error| match error {
            SealError::Io(error) => FsError::Io(error),
            SealError::Refused(_) => FsError::Corrupt,
        })?;
        let role = page_role(page, verified.header.tokens, verified.digest.page.0);
        let checksum = verified.digest.object.0;
        let twin = self.find_twin(object, role, checksum)?;
        Ok(Verified { role, checksum, length: bytes.len() as u64, twin })
    }

    fn open_next_tail(
        &self, state: &mut State, tail: &Inode, (parent, start): (InodeId, u64), object: ObjectId,
    ) -> Result<(), FsError> {
        let name = names::format_tail(kvfs_page::TokenStart(start)).into_bytes();
        let page = names::format_page(kvfs_page::TokenStart(start));
        if state.entry(parent, &name)?.is_some() || state.entry(parent, page.as_bytes())?.is_some()
        {
            state.metadata.remove_object(object);
            return Ok(());
        }
        let now = Time::now();
        let inode = Inode { mtime: now, ctime: now, atime: now, links: 1, ..tail.clone() };
        self.insert_append(
            state,
            &Place { parent, name },
            &inode,
            (object, Role::Tail { start, directory: parent }),
        )
    }

    /// Gives an append-only file its name.
    pub(super) fn insert_append(
        &self, state: &mut State, place: &Place, inode: &Inode, (object, role): (ObjectId, Role),
    ) -> Result<(), FsError> {
        let record = FileRecord { role, object: Some(object), size: 0, blocks: 0, unsettled: true };
        let id = state.metadata.new_inode();
        let inode = Inode { kind: Kind::File(record), ..inode.clone() };
        state.metadata.put_inode(Life::Durable, id, &inode);
        let entry = Entry { inode: id, file_type: libc::S_IFREG };
        state.metadata.put_entry(Life::Durable, place.parent, &place.name, entry);
        state.publish(object, ObjectKind::Rows, 0)?;
        state.touch_directory(place.parent, 0)?;
        self.announce(place);
        Ok(())
    }

    /// Renames an ordinary file onto the name of a tail or token file: its bytes become the
    /// content.
    pub(super) fn replace_append(
        &self, id: InodeId, (from, to): (&Place, &Place), role: Role,
    ) -> Result<(), FsError> {
        let is_full = self.check_rows(id, to, role)?;
        let (source, mut object, mut taken) = self.take_over(id)?;
        // Rows are added on the disk; memory is for what does not change any more.
        let mut copied = Ok(object);
        if taken && self.store.ram.as_ref().is_some_and(|ram| ram.holds(object)) {
            copied = self.copy_object(object);
            taken = false;
        }
        let mut state = self.state_to_change()?;
        state.sealing.remove(&id);
        object = copied?;
        // From now on its file on the disk tells the time; a backup has set that of the record.
        self.store.open_object(object, Access::ReadWrite)?.set_modified(source.mtime)?;
        let attributes = state.metadata.attributes(id)?;
        state.remove_source(id, from, taken)?;
        if let Some(entry) = state.entry(to.parent, &to.name)? {
            let mut old = state.inode(entry.inode)?;
            state.drop_link(entry.inode, &mut old)?;
        }
        let inode = Inode { links: 1, ctime: Time::now(), ..source };
        // Rows will be added: from now on the disk's copy is the only one.
        state.metadata.forget_remote_copy(object)?;
        if let Some(tiers) = &self.tiers {
            tiers.copies.forget_remote_copy(object);
        }
        self.insert_append(&mut state, to, &inode, (object, role))?;
        let entry = state.entry(to.parent, &to.name)?.ok_or(FsError::NotFound)?;
        state.replace_attributes(entry.inode, &attributes)?;
        if is_full {
            // The rows have their name by now: where there is no room for the page, it comes later.
            state.full_tails.insert(entry.inode);
            drop(state);
            self.seal_full_tails();
        }
        Ok(())
    }

    /// Checks that a file can be the content of a tail or token file. Returns whether it is a tail of
    /// a whole page, which is to be sealed.
    fn check_rows(&self, id: InodeId, to: &Place, role: Role) -> Result<bool, FsError> {
        let mut state = self.wait_for_release(self.state(), id);
        let size = state.attributes(&self.store, id)?.size;
        let Role::Tail { start, .. } = role else {
            drop(state);
            return match size % TOKEN_BYTES {
                0 => Ok(false),
                _ => Err(self.refuse_rows(to, &format!("{size} bytes are no whole token ids"))),
            };
        };
        let existing = state.entry(to.parent, &to.name)?.is_some();
        let page = match self.check_tail(&mut state, to, start) {
            Err(FsError::Exists) if existing => return Err(FsError::Exists),
            outcome => outcome?,
        };
        drop(state);
        let row = page.geometry().row_bytes();
        if size > rows_bytes(&page) || size % row != 0 {
            let why = format!(
                "{size} bytes are not 0..={} rows of {row} bytes",
                page.geometry().page_tokens()
            );
            return Err(self.refuse_rows(to, &why));
        }
        Ok(size == rows_bytes(&page))
    }

    fn refuse_rows(&self, to: &Place, why: &str) -> FsError {
        self.report(to, SealError::Refused(PageError::Rows(why.to_owned())))
    }
}

/// Bytes of a full tail.
pub(super) fn rows_bytes(page: &PagePlace) -> u64 {
    page.geometry().row_bytes() * u64::from(page.geometry().page_tokens())
}

/// Held while rows are appended to a file, or become a page.
pub(super) fn append_turn(state: &mut State, id: InodeId) -> Arc<Mutex<()>> {
    Arc::clone(state.nodes.entry(id).or_default().append.get_or_insert_default())
}
