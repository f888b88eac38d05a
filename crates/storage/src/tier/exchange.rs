//! Objects on their way between this machine and the remote.
//!
//! Up: encode, put or find ([`Holder`]), read back, decode, compare. Down: get, decode, compare.
//! What is compared is the checksum on record and the hash that the remote calls the bytes by, so
//! a damaged or foreign copy never becomes an object. Which record says what, and when a local copy
//! may go, is decided above (`kvfs-fs`).

pub(super) mod bytes;

use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::content::ContentHash;
use super::encoding::{
    ColdEncoding, Digest, Encoding, EncodingError, Lossless, Stored, Subject, ZstdLevel, decode,
    encode,
};
use super::remote::hold::{Grace, Held, Holder};
use super::remote::{
    BlobName, BlobStore, Extent, Put, PutMode, Remote, RemoteError, RemoteName, Result, Source,
};
use crate::page::Checksum;
use crate::store::Store;
use crate::store::disk::{Access, DiskFile, DiskPath};
use crate::store::record::{EncodedCopy, ObjectId, RemoteCopy};
use bytes::{Cursor, FileBytes};

/// How long an open waits for the first answer of a remote: as long as for any other.
const CONNECTING_MAX: Duration = Duration::from_secs(30);

/// An object, and what its bytes are known by.
#[derive(Clone, Copy, Debug)]
pub struct Item {
    /// The object.
    pub object: ObjectId,
    /// Its bytes.
    pub length: u64,
    /// Checksum on record.
    pub checksum: Checksum,
    /// What the checksum is bound to.
    pub subject: Subject,
    /// A copy on the disk that decodes to it: what goes up where the raw file is missing.
    pub encoded: Option<EncodedCopy>,
}

/// An object that the remote holds and that was not read back yet.
#[derive(Clone, Copy, Debug)]
pub struct Uploaded {
    /// The object.
    pub item: Item,
    /// What the remote calls it.
    pub blob: BlobName,
    /// Its length there.
    pub stored_bytes: u64,
    /// Since when, and whether it was there before.
    pub held: Held,
}

impl Uploaded {
    /// How long to wait before reading it back proves that it stays.
    pub fn due_in(&self) -> Duration {
        self.held.verify_after.saturating_sub(self.held.since.age())
    }
}

/// The two ways.
#[derive(Debug)]
pub struct Exchange {
    remote: Arc<Remote>,
    holder: Holder,
    cold: Mutex<ColdEncoding>,
}

impl Exchange {
    /// With a remote, and how copies there are encoded.
    pub fn new(remote: Arc<Remote>, grace: Grace, cold: ColdEncoding) -> Exchange {
        let store: Arc<dyn BlobStore> = Arc::clone(&remote) as Arc<dyn BlobStore>;
        Exchange { remote, holder: Holder::new(store, grace), cold: Mutex::new(cold) }
    }

    /// Copies that go there from now on are encoded otherwise.
    pub fn set_cold(&self, cold: ColdEncoding) {
        *self.cold.lock().unwrap_or_else(PoisonError::into_inner) = cold;
    }

    /// The remote.
    pub fn remote(&self) -> &Arc<Remote> {
        &self.remote
    }

    /// How long what nobody needs stays in the remote.
    pub fn grace(&self) -> Grace {
        self.holder.grace()
    }

    /// Puts an object, or finds it.
    ///
    /// # Errors
    /// [`RemoteError::Local`] with [`io::ErrorKind::InvalidData`] if its bytes are not those on
    /// record; otherwise as [`Holder::hold`].
    pub fn upload(&self, store: &Store, item: &Item) -> Result<Uploaded> {
        let (blob, source) = self.encode(store, item)?;
        let held = self.holder.hold(RemoteName::Blob(blob), &source)?;
        Ok(Uploaded { item: *item, blob, stored_bytes: source.length(), held })
    }

    /// Reads an uploaded object back and compares. A damaged copy that somebody else put is
    /// replaced, once.
    ///
    /// # Errors
    /// [`RemoteError::Corrupt`] if the remote does not keep what is put.
    pub fn verify(&self, store: &Store, uploaded: &Uploaded) -> Result<()> {
        match self.read_back(store, uploaded) {
            Err(RemoteError::Corrupt(why)) if uploaded.held.put == Put::AlreadyThere => {
                log::warn!("{why}: replaced");
                let (blob, source) = self.encode(store, &uploaded.item)?;
                self.remote.put(RemoteName::Blob(blob), source, PutMode::Replace)?;
                self.read_back(store, uploaded)
            }
            outcome => outcome,
        }
    }

    fn read_back(&self, store: &Store, uploaded: &Uploaded) -> Result<()> {
        let stored = Stored {
            encoding: uploaded.blob.encoding,
            stored_bytes: uploaded.stored_bytes,
            length: uploaded.item.length,
        };
        let scratch = self.get(store, uploaded.blob, stored.stored_bytes)?;
        let digest =
            self.decoded(&uploaded.item, uploaded.blob, &stored, scratch.as_ref(), io::sink())?;
        self.check(&digest, &uploaded.item, uploaded.blob)
    }

    /// Writes an object's bytes to `target`, an empty file, and compares them.
    ///
    /// # Errors
    /// [`RemoteError::Corrupt`] if the copy is not the object; what was written is garbage then.
    pub fn download(
        &self, store: &Store, item: &Item, copy: &RemoteCopy, target: &Arc<dyn DiskFile>,
    ) -> Result<()> {
        // Right after the mount began, the remote may not have answered yet.
        self.remote.wait_for_answer(CONNECTING_MAX);
        let blob = BlobName { content: ContentHash(copy.content), encoding: copy.encoding };
        let stored_bytes = copy.stored_bytes;
        let stored = Stored { encoding: copy.encoding, stored_bytes, length: item.length };
        let digest = if copy.encoding == Encoding::Raw {
            self.get_into(blob, stored_bytes, Arc::clone(target))?;
            self.decoded(item, blob, &stored, target.as_ref(), io::sink())?
        } else {
            let scratch = self.get(store, blob, stored_bytes)?;
            self.decoded(item, blob, &stored, scratch.as_ref(), Cursor::new(target.as_ref()))?
        };
        self.check(&digest, item, blob)
    }

    /// Whether the remote has a copy, by its name and length.
    pub fn has(&self, copy: &RemoteCopy) -> Result<bool> {
        let blob = BlobName { content: ContentHash(copy.content), encoding: copy.encoding };
        let found = self.remote.head(RemoteName::Blob(blob))?;
        Ok(found.is_some_and(|found| found.bytes == copy.stored_bytes))
    }

    /// Puts bytes that no record describes, or finds them.
    pub fn hold_bytes(&self, bytes: Vec<u8>) -> Result<(BlobName, Held)> {
        let blob = BlobName { content: ContentHash::of(&bytes), encoding: Encoding::Raw };
        let held = self.holder.hold(RemoteName::Blob(blob), &Source::of(bytes))?;
        Ok((blob, held))
    }

    /// [`Exchange::download`] of `length` bytes of which nothing is known but their hash.
    pub fn download_unrecorded(
        &self, store: &Store, (object, length): (ObjectId, u64), copy: &RemoteCopy,
        target: &Arc<dyn DiskFile>,
    ) -> Result<()> {
        let blob = BlobName { content: ContentHash(copy.content), encoding: copy.encoding };
        let stored_bytes = copy.stored_bytes;
        let stored = Stored { encoding: copy.encoding, stored_bytes, length };
        let (checksum, subject) = (Checksum([0; 16]), Subject::File);
        let item = Item { object, length, checksum, subject, encoded: None };
        let scratch = self.get(store, blob, stored_bytes)?;
        let sink = Cursor::new(target.as_ref());
        let digest = self.decoded(&item, blob, &stored, scratch.as_ref(), sink)?;
        self.check(&digest, &Item { checksum: digest.checksum, ..item }, blob)
    }

    fn encode(&self, store: &Store, item: &Item) -> Result<(BlobName, Source)> {
        let file: Arc<dyn DiskFile> =
            match (store.open_object(item.object, Access::Read), item.encoded) {
                (Err(error), Some(copy)) if error.kind() == io::ErrorKind::NotFound => {
                    return self.as_encoded(store, item, &copy);
                }
                (file, _) => file.map_err(RemoteError::local)?.into(),
            };
        let mut reader = Cursor::new(file.as_ref());
        let (encoded, file) = match self.lossless() {
            Lossless::Raw => {
                let sink = &mut io::sink();
                let encoded = encode(&mut reader, item.length, Lossless::Raw, &item.subject, sink);
                (encoded, Arc::clone(&file))
            }
            zstd @ Lossless::Zstd(_) => {
                let scratch: Arc<dyn DiskFile> =
                    store.scratch().map_err(RemoteError::local)?.into();
                let sink = &mut Cursor::new(scratch.as_ref());
                (encode(&mut reader, item.length, zstd, &item.subject, sink), scratch)
            }
        };
        let encoded = encoded.map_err(local)?;
        check_local(&encoded.digest, item)?;
        let blob = self.named(&encoded.digest, &item.subject, encoded.encoding);
        Ok((blob, Source::new(Arc::new(FileBytes(file)), encoded.stored_bytes)))
    }

    /// What is only encoded on the disk goes up as it is.
    fn as_encoded(
        &self, store: &Store, item: &Item, copy: &EncodedCopy,
    ) -> Result<(BlobName, Source)> {
        let file = store.disk.open(&DiskPath::Encoded(item.object), Access::Read);
        let file: Arc<dyn DiskFile> = file.map_err(RemoteError::local)?.into();
        let EncodedCopy { encoding, stored_bytes } = *copy;
        let stored = Stored { encoding, stored_bytes, length: item.length };
        let source = &mut Cursor::new(file.as_ref());
        let digest = decode(source, &stored, &item.subject, &mut io::sink()).map_err(local)?;
        check_local(&digest, item)?;
        let blob = self.named(&digest, &item.subject, encoding);
        Ok((blob, Source::new(Arc::new(FileBytes(file)), stored_bytes)))
    }

    /// What the remote calls bytes. In a sealed remote the name of a page follows from the cache that
    /// it is of as well, so that equal pages of two tenants have names and keys of their own.
    fn named(&self, digest: &Digest, subject: &Subject, encoding: Encoding) -> BlobName {
        let content = match subject {
            Subject::Page(identity) if self.remote.is_sealed() => {
                digest.content.within(&identity.model.0)
            }
            _ => digest.content,
        };
        BlobName { content, encoding }
    }

    fn lossless(&self) -> Lossless {
        match *self.cold.lock().unwrap_or_else(PoisonError::into_inner) {
            ColdEncoding::None => Lossless::Raw,
            ColdEncoding::Zstd(level) => Lossless::Zstd(level),
            ColdEncoding::Quantised(_) => Lossless::Zstd(ZstdLevel::DEFAULT),
        }
    }

    /// A blob in a file without a name.
    fn get(&self, store: &Store, blob: BlobName, stored_bytes: u64) -> Result<Arc<dyn DiskFile>> {
        let scratch: Arc<dyn DiskFile> = store.scratch().map_err(RemoteError::local)?.into();
        self.get_into(blob, stored_bytes, Arc::clone(&scratch))?;
        Ok(scratch)
    }

    fn get_into(&self, blob: BlobName, stored_bytes: u64, file: Arc<dyn DiskFile>) -> Result<()> {
        let extent = Extent::Whole { bytes: Some(stored_bytes) };
        self.remote.get(RemoteName::Blob(blob), extent, Arc::new(FileBytes(file))).map(drop)
    }

    fn decoded(
        &self, item: &Item, blob: BlobName, stored: &Stored, file: &dyn DiskFile,
        mut sink: impl io::Write,
    ) -> Result<Digest> {
        let outcome = decode(&mut Cursor::new(file), stored, &item.subject, &mut sink);
        outcome.map_err(|error| match error {
            EncodingError::Source(error) | EncodingError::Sink(error) => RemoteError::local(error),
            error => self.corrupt(blob, &error.to_string()),
        })
    }

    fn check(&self, digest: &Digest, item: &Item, blob: BlobName) -> Result<()> {
        let named = self.named(digest, &item.subject, blob.encoding);
        if named == blob && digest.checksum == item.checksum {
            return Ok(());
        }
        Err(self.corrupt(blob, "its bytes are not those that it is named by"))
    }

    fn corrupt(&self, blob: BlobName, why: &str) -> RemoteError {
        let name = RemoteName::Blob(blob);
        RemoteError::Corrupt(format!("remote {}: {name}: {why}", self.remote.place()))
    }
}

fn check_local(digest: &Digest, item: &Item) -> Result<()> {
    if digest.checksum == item.checksum {
        return Ok(());
    }
    let what = format!("object {}: its bytes are not those on record", item.object);
    Err(RemoteError::local(io::Error::new(io::ErrorKind::InvalidData, what)))
}

/// Encoding reads and writes files of this machine.
fn local(error: EncodingError) -> RemoteError {
    RemoteError::local(match error {
        EncodingError::Source(error) | EncodingError::Sink(error) => error,
        error => io::Error::new(io::ErrorKind::InvalidData, error.to_string()),
    })
}

#[cfg(test)]
mod tests;
