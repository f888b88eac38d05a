//! What is in packs, for whoever reads it.

use std::io;
use std::sync::Arc;

use super::Packs;
use super::file::PackedFile;
use super::index::{Entry, Index};
use super::opening::Pack;
use super::pack::PackFile;
use super::record::{Header, Kind, Place};
use crate::store::disk::DiskDirectory;
use crate::store::record::ObjectId;

impl Packs {
    /// Its bytes, if an object is in a pack.
    pub(super) fn file(&self, object: ObjectId) -> io::Result<Option<PackedFile>> {
        let found = self.find_and_open(|index| {
            let entry = *index.visible(object)?;
            Some((entry.place, (entry, self.opened.hold(entry.place))))
        })?;
        Ok(found.map(|((entry, held), pack, _)| {
            let (disk, index) = (Arc::clone(&self.disk), Arc::clone(&self.index));
            PackedFile { object, entry, pack, index, disk, _held: held }
        }))
    }

    /// All bytes of an object, compared with what was written; `None` if it is in no pack.
    pub(super) fn read(&self, object: ObjectId) -> io::Result<Option<(Entry, Vec<u8>)>> {
        let found = self.find_and_open(|index| {
            let entry = *index.visible(object)?;
            Some((entry.place, (entry, self.opened.hold(entry.place))))
        })?;
        let Some(((entry, _held), _, file)) = found else { return Ok(None) };
        let offset = u64::from(entry.place.offset);
        let header = file.header(offset)?;
        let is_its = |header: &Header| header.kind == Kind::Bytes && header.object == object;
        let bytes = match header.filter(is_its) {
            Some(header) => file.payload(offset, &header)?,
            None => None,
        };
        let bytes = bytes.ok_or_else(|| io::Error::from_raw_os_error(libc::EIO))?;
        Ok(Some((entry, bytes)))
    }

    /// What was noted of an object.
    pub(super) fn note(&self, object: ObjectId) -> io::Result<Option<Vec<u8>>> {
        let found = self.find_and_open(|index| {
            let note = index.visible(object)?.note?;
            Some((note.0, note))
        })?;
        let Some(((place, length), _, file)) = found else { return Ok(None) };
        Ok(Some(file.bytes(u64::from(place.offset), u64::from(length))?))
    }

    /// Opens the pack in which something is. Nobody waits for the disk meanwhile who looks into the index.
    fn find_and_open<T>(
        &self, find: impl Fn(&Index) -> Option<(Place, T)>,
    ) -> io::Result<Option<(T, Arc<Pack>, PackFile)>> {
        loop {
            let (found, pack) = {
                let index = self.index();
                let Some((place, found)) = find(&index) else { return Ok(None) };
                let Some(pack) = index.pack(place.pack) else { return Ok(None) };
                (found, pack)
            };
            match pack.open() {
                // A pack that was rewritten stays open for those who had found it.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    self.forget(&pack)?;
                }
                opened => return opened.map(|file| Some((found, pack, file))),
            }
        }
    }

    /// Somebody has removed a pack below the mount, or put another file in its place: what was in it is missing.
    fn forget(&self, pack: &Pack) -> io::Result<()> {
        if let Err(error) = self.disk.list(DiskDirectory::Packs) {
            // All of them may come back.
            log::debug!("packs/ cannot be listed: {error}");
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        if let Some(objects) = self.index_mut().forget(pack.number) {
            log::error!("packs/{:08x} is gone, with the bytes of {objects} files", pack.number);
        }
        Ok(())
    }
}
