//! Tails and token ids: files of rows that only grow.

use std::io;
use std::sync::{Arc, Mutex};

use crate::FsError;
use crate::attributes::Place;
use crate::core::Core;
use crate::core::refuse::tell_refused;
use crate::core::state::State;
use kvfs_page::{PageError, PagePlace, TokenStart, names};
use kvfs_storage::ingest::seal::SealError;
use kvfs_storage::store::disk::DiskFile;
use kvfs_storage::store::metadata::{Life, TokensChange};
use kvfs_storage::store::record::{
    DirectoryClass, Entry, FileRecord, Inode, InodeId, Kind, ObjectId, ObjectKind, Role, Time,
};

/// Bytes of one token id.
pub(crate) const TOKEN_BYTES: u64 = 4;

impl State {
    /// Rows went: who reads them by the name of their file must not take later ones for them.
    fn tell_watches_of_rows(&self, role: Role) {
        if let Role::Tail { directory, start } = role {
            self.metadata.watches.tell_of_rows(directory, TokenStart(start));
        }
    }
}

impl Core {
    /// Takes rows, or what was written of one, off the end of a file; nobody appends to it meanwhile.
    pub(crate) fn cut_rows(&self, role: Role, file: &dyn DiskFile, length: u64) -> io::Result<()> {
        let cut = file.set_length(length);
        // Whoever read before knows those that went; whoever reads next finds them gone, or others.
        self.state().tell_watches_of_rows(role);
        cut
    }

    /// The page found no room, so the row that completes it has not come: the writer tries again.
    pub(crate) fn take_back(&self, (id, role): (InodeId, Role), file: &dyn DiskFile, size: u64) {
        if let Err(error) = self.cut_rows(role, file, size) {
            log::warn!("a row without a page could not be taken back: {error}");
            self.state().full_tails.insert(id);
        }
    }

    /// The next commit makes what was appended durable: no record tells of it.
    pub(crate) fn publish_rows(&self, record: &FileRecord) {
        if let Some(object) = record.object {
            self.state().metadata.publish(object);
        }
    }

    /// The page that a tail becomes, and the tail's name.
    pub(crate) fn tail_place(
        &self, parent: InodeId, start: u64,
    ) -> Result<(Place, PagePlace), FsError> {
        let mut state = self.state();
        let (_, class) = state.directory(parent)?;
        let DirectoryClass::Layer(layer) = class else {
            return Err(FsError::Invalid);
        };
        let name = names::format_tail(TokenStart(start)).into_bytes();
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
    pub(crate) fn check_tail(
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
                tell_refused(self, place.parent, (path, None), &error)
            }
        })?;
        let name = names::format_page(kvfs_page::TokenStart(start));
        match state.entry(place.parent, name.as_bytes())? {
            Some(_) => Err(FsError::Exists),
            None => Ok(page),
        }
    }

    pub(crate) fn open_next_tail(
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
    pub(crate) fn insert_append(
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

    /// Checks that a file can be the content of a tail or token file. Returns whether it is a tail of
    /// a whole page, which is to be sealed.
    pub(crate) fn check_rows(&self, id: InodeId, to: &Place, role: Role) -> Result<bool, FsError> {
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

    /// The directory and the first token of a tail; `None` of anything else.
    pub(crate) fn tail_of(&self, id: InodeId) -> Result<Option<(InodeId, u64)>, FsError> {
        let inode = self.state().metadata.inode(id)?.filter(|inode| inode.links > 0);
        Ok(match inode.as_ref().and_then(|inode| inode.file()).map(|file| file.role) {
            Some(Role::Tail { start, directory }) => Some((directory, start)),
            _ => None,
        })
    }

    /// The token file changed in place.
    pub(crate) fn note_tokens(&self, id: InodeId, change: TokensChange) {
        let mut state = self.state();
        let sequence = state.nodes.get(&id).and_then(|node| node.found_in);
        if let Some(sequence) = sequence {
            state.metadata.tokens_changed(sequence, change);
        }
    }
}

/// Bytes of a full tail.
pub(crate) fn rows_bytes(page: &PagePlace) -> u64 {
    page.geometry().row_bytes() * u64::from(page.geometry().page_tokens())
}

/// Held while rows are appended to a file, or become a page.
pub(crate) fn append_turn(state: &mut State, id: InodeId) -> Arc<Mutex<()>> {
    Arc::clone(state.nodes.entry(id).or_default().append.get_or_insert_default())
}
