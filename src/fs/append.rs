//! Tails and token files: the daemon serves them and lets them only grow.
//!
//! A tail holds token rows, `K[num_kv_heads, head_dim]` then `V[num_kv_heads, v_head_dim]`. The
//! append that fills the page seals it ([`full_tail`](super::full_tail)).

use std::sync::{Arc, Mutex};

use super::attributes::Place;
use super::handle::{Handle, Served};
use super::open::{Caching, Opened, OpenedBy};
use super::state::State;
use super::{FileSystem, FsError, descriptors};
use crate::ingest::seal::SealError;
use crate::page::{PageError, PagePlace, names};
use crate::store::disk::{Access, DiskFile};
use crate::store::metadata::{Life, TokensChange};
use crate::store::record::{
    DirectoryClass, Entry, FileRecord, Inode, InodeId, Kind, ObjectId, ObjectKind, Role, Time,
};

/// Bytes of one token id.
const TOKEN_BYTES: u64 = 4;

impl FileSystem {
    pub(super) fn open_append(
        &self, id: InodeId, writes: bool, truncates: bool,
    ) -> Result<Opened, FsError> {
        descriptors::check()?;
        let mut state = if writes { self.state_to_change()? } else { self.state() };
        let inode = state.inode(id)?;
        let object = inode.file().and_then(|file| file.object).ok_or(FsError::Stale)?;
        let file: Arc<dyn DiskFile> = Arc::from(self.store.open_object(object, Access::ReadWrite)?);
        let handle = state.add_handle(Handle::new(id, writes, Served::Append(Arc::clone(&file))));
        let turn = append_turn(&mut state, id);
        drop(state);
        if truncates {
            let _turn = turn.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
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

    /// Appends to a tail or token file. `offset` is `None` for a descriptor opened with
    /// `O_APPEND`; otherwise it must be the end.
    pub(super) fn append(
        &self, id: InodeId, file: &dyn DiskFile, offset: Option<u64>, bytes: &[u8],
    ) -> Result<(), FsError> {
        let mut state = self.state_to_change()?;
        let turn = append_turn(&mut state, id);
        drop(state);
        let _turn = turn.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let inode = self.state().inode(id)?;
        let record = inode.file().ok_or(FsError::Invalid)?.clone();
        let size = file.stat()?.length;
        if offset.is_some_and(|offset| offset != size) {
            return Err(FsError::NotPermitted);
        }
        let border = match record.role {
            _ if inode.links == 0 => return Err(FsError::CrossesPage),
            Role::Tail { start, directory } => Some(self.tail_place(directory, start)?),
            _ => None,
        };
        let end = size + bytes.len() as u64;
        if let Some((place, page)) = border.as_ref().filter(|(_, page)| end > rows_bytes(page)) {
            if size == rows_bytes(page) {
                // Its sealing failed, or a crash came between; the writer goes on with the next tail.
                self.seal_tail(id, &inode, file, (place, page))?;
            }
            return Err(FsError::CrossesPage);
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
        match border {
            Some((place, page)) if end == rows_bytes(&page) => {
                let outcome = self.seal_tail(id, &inode, file, (&place, &page));
                if outcome.is_err() {
                    // Whoever hears of a failure appends the same rows again.
                    file.set_length(size)?;
                }
                outcome
            }
            _ => Ok(()),
        }
    }

    /// The next commit makes what was appended durable: no record tells of it.
    fn publish_rows(&self, record: &FileRecord) {
        if let Some(object) = record.object {
            self.state().metadata.publish(object);
        }
    }

    /// The page that a tail becomes, and the tail's name.
    pub(super) fn tail_place(
        &self, parent: InodeId, start: u64,
    ) -> Result<(Place, PagePlace), FsError> {
        let mut state = self.state();
        let (_, class) = state.directory(parent)?;
        let DirectoryClass::Layer(layer) = class else {
            return Err(FsError::Invalid);
        };
        let name = names::format_tail(crate::page::TokenStart(start)).into_bytes();
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
        let name = names::format_page(crate::page::TokenStart(start));
        match state.entry(place.parent, name.as_bytes())? {
            Some(_) => Err(FsError::Exists),
            None => Ok(page),
        }
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
        let full = self.check_rows(id, to, role)?;
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
            tiers.ssd.forget(object);
        }
        self.insert_append(&mut state, to, &inode, (object, role))?;
        let entry = state.entry(to.parent, &to.name)?.ok_or(FsError::NotFound)?;
        state.replace_attributes(entry.inode, &attributes)?;
        let Some(page) = full else {
            return Ok(());
        };
        drop(state);
        let file = self.store.open_object(object, Access::Read)?;
        self.seal_tail(entry.inode, &inode, file.as_ref(), (to, &page))
    }

    /// Checks that a file can be the content of a tail or token file. A tail of a whole page is
    /// returned: it is to be sealed.
    fn check_rows(
        &self, id: InodeId, to: &Place, role: Role,
    ) -> Result<Option<PagePlace>, FsError> {
        let mut state = self.wait_for_release(self.state(), id);
        let size = state.attributes(&self.store, id)?.size;
        let Role::Tail { start, .. } = role else {
            drop(state);
            return match size % TOKEN_BYTES {
                0 => Ok(None),
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
        Ok((size == rows_bytes(&page)).then_some(page))
    }

    fn refuse_rows(&self, to: &Place, why: &str) -> FsError {
        self.report(to, SealError::Refused(PageError::Rows(why.to_owned())))
    }
}

/// Bytes of a full tail.
pub(super) fn rows_bytes(page: &PagePlace) -> u64 {
    page.geometry().row_bytes() * u64::from(page.geometry().page_tokens())
}

pub(super) fn append_turn(state: &mut State, id: InodeId) -> Arc<Mutex<()>> {
    Arc::clone(state.nodes.entry(id).or_default().append.get_or_insert_default())
}
