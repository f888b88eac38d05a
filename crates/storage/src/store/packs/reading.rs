//! What is in packs, for whoever reads it.

use std::io;
use std::sync::Arc;

use super::Packs;
use super::file::PackedFile;
use super::holes::HeldOpen;
use super::index::{Entry, Index, Known, sum_of};
use super::opening::Pack;
use super::pack::{Contents, PackFile};
use super::record::Place;
use crate::store::disk::{DiskDirectory, DiskPath, is_of_file, unavailable};
use crate::store::record::ObjectId;

impl Packs {
    /// Its bytes, if an object is in a pack.
    pub(super) fn file(&self, object: ObjectId) -> io::Result<Option<PackedFile>> {
        let found = self.find_and_open(object, |index| self.hold(index, object))?;
        let Some(((entry, held), pack, file)) = found else { return Ok(None) };
        // Somebody may have cut it while it was open, and another copy take its place.
        if file.file.stat()?.length < entry.end() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let (disk, index) = (Arc::clone(&self.disk), Arc::clone(&self.index));
        Ok(Some(PackedFile { object, entry, pack, index, disk, _held: held }))
    }

    /// All bytes of an object, compared with what was written; `None` if it is in no pack.
    pub(super) fn read(&self, object: ObjectId) -> io::Result<Option<(Entry, Vec<u8>)>> {
        let found = self.find_and_open(object, |index| self.hold(index, object))?;
        let Some(((entry, _held), _, file)) = found else { return Ok(None) };
        let offset = u64::from(entry.place.offset);
        let header = file.known_header(offset)?;
        let bytes = match header.filter(|header| entry.is_of(object, header)) {
            Some(header) => file.payload(offset, &header)?,
            None => None,
        };
        let bytes = bytes.ok_or_else(|| io::Error::from_raw_os_error(libc::EIO))?;
        Ok(Some((entry, bytes)))
    }

    /// Where an object's bytes are; they stay there as long as this is held.
    fn hold(&self, index: &Index, object: ObjectId) -> Option<(Place, (Entry, HeldOpen))> {
        let entry = *index.visible(object)?;
        Some((entry.place, (entry, self.opened.hold(entry.place))))
    }

    /// What was noted of an object.
    pub(super) fn note(&self, object: ObjectId) -> io::Result<Option<Vec<u8>>> {
        let found = self.find_and_open(object, |index| {
            let note = index.visible(object)?.note?;
            Some((note.0, note))
        })?;
        let Some(((place, length), _, file)) = found else { return Ok(None) };
        Ok(Some(file.bytes(u64::from(place.offset), u64::from(length))?))
    }

    /// Opens the pack in which something of an object is. Nobody waits for the disk meanwhile who looks into the index.
    fn find_and_open<T>(
        &self, object: ObjectId, find: impl Fn(&Index) -> Option<(Place, T)>,
    ) -> io::Result<Option<(T, Arc<Pack>, PackFile)>> {
        loop {
            let (place, found, pack) = {
                let index = self.index();
                let Some((place, found)) = find(&index) else { return Ok(None) };
                let Some(pack) = index.pack(place.pack) else { return Ok(None) };
                (place, found, pack)
            };
            match pack.open(|file| file.check(place.offset, |header| header.object == object)) {
                // A pack that was rewritten stays open for those who had found it.
                Err(error) if error.kind() == io::ErrorKind::NotFound => self.lose(&pack)?,
                opened => return opened.map(|file| Some((found, pack, file))),
            }
        }
    }

    /// Looks whether packs that stay open still have their names: what was in those that do not is missing.
    ///
    /// # Errors
    /// `packs/` cannot be listed, or a name in it not be looked up.
    pub fn look_for_lost(&self) -> io::Result<()> {
        let packs: Vec<Arc<Pack>> = {
            let (writer, index) = (self.writer(), self.index());
            let known = index.packs.values().filter(|known| !known.is_lost());
            let complete = known.filter(|known| writer.without_index(known.pack.number).is_none());
            complete.map(|known| Arc::clone(&known.pack)).collect()
        };
        for pack in packs {
            match self.disk.stat(&DiskPath::Pack(pack.number)) {
                // Unless it was rewritten meanwhile.
                Err(error) if error.kind() == io::ErrorKind::NotFound => self.lose(&pack)?,
                Err(error) if !is_of_file(&error) => return Err(error),
                // Whoever reads in it hears of it.
                Err(error) => log::error!("packs/{:08x}: {error}", pack.number),
                Ok(found) => pack.note_name(&found)?,
            }
        }
        Ok(())
    }

    /// What is in a pack that is complete, and not open to be written to.
    ///
    /// # Errors
    /// It is not complete any more, or another file: not all is in it that is known to be.
    pub(super) fn contents(&self, file: &PackFile) -> io::Result<Contents> {
        let Some(contents) = file.read_index()? else {
            return Err(io::Error::other("its index is not there any more"));
        };
        let sum = sum_of(&contents.records);
        let is_known = |known: &Known| known.is_of(contents.end, sum);
        if self.index().packs.get(&file.number).is_some_and(is_known) {
            Ok(contents)
        } else {
            Err(io::Error::other("it is not the one that was there"))
        }
    }

    /// Somebody has removed a pack below the mount: what was in it is missing.
    pub(super) fn lose(&self, pack: &Pack) -> io::Result<()> {
        if let Err(error) = self.disk.list(DiskDirectory::Packs) {
            // All of them may come back: no file of the store is damaged.
            return Err(unavailable(&format!("packs/ cannot be listed: {error}")));
        }
        if let Some(objects) = self.index_mut().lose(pack.number) {
            log::error!("packs/{:08x} is gone, with the bytes of {objects} files", pack.number);
        }
        Ok(())
    }
}
