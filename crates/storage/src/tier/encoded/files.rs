//! A raw object file into an encoded one, and back.

use std::io;

use crate::page::Checksum;
use crate::store::Store;
use crate::store::disk::{Access, DiskFile, DiskPath};
use crate::store::record::{EncodedCopy, ObjectId};
use crate::tier::encoding::{
    Encoding, EncodingError, Lossless, Stored, Subject, decode_local, encode,
};
use crate::tier::exchange::Item;
use crate::tier::exchange::bytes::Cursor;

/// An encoded copy must be smaller by so many per cent: less is not worth decoding at every open.
const SAVING_PERCENT_MIN: u64 = 10;

/// Encodes an object's raw file into [`DiskPath::Encoding`], durably, and reads it back. `None` if
/// that saves too little.
///
/// # Errors
/// [`io::ErrorKind::NotFound`] if the disk has no raw file; [`io::ErrorKind::InvalidData`] if its
/// bytes are not those on record, or do not come back.
pub fn pack(store: &Store, item: &Item, lossless: Lossless) -> io::Result<Option<EncodedCopy>> {
    let path = DiskPath::Encoding(item.object);
    let source = store.disk.open(&DiskPath::Object(item.object), Access::Read)?;
    remove(store, &path)?;
    let target = store.disk.create(&path)?;
    let outcome = pack_into(source.as_ref(), item, lossless, target.as_ref());
    if matches!(outcome, Ok(Some(_))) {
        keep_note(store, item.object);
    } else {
        remove(store, &path)?;
    }
    outcome
}

/// The copy says what the raw file says, which may go. It is only a note.
fn keep_note(store: &Store, object: ObjectId) {
    if let Ok(Some(note)) = store.disk.note(&DiskPath::Object(object)) {
        let _ = store.disk.set_note(&DiskPath::Encoding(object), &note);
    }
}

fn pack_into(
    source: &dyn DiskFile, item: &Item, lossless: Lossless, target: &dyn DiskFile,
) -> io::Result<Option<EncodedCopy>> {
    let (reader, writer) = (&mut Cursor::new(source), &mut Cursor::new(target));
    let encoded = encode(reader, item.length, lossless, &item.subject, writer);
    let encoded = encoded.map_err(as_io)?;
    check(encoded.digest.checksum, item)?;
    let copy = EncodedCopy { encoding: encoded.encoding, stored_bytes: encoded.stored_bytes };
    if copy.stored_bytes > item.length / 100 * (100 - SAVING_PERCENT_MIN) {
        return Ok(None);
    }
    target.sync()?;
    check(decode_into(target, item, &copy, &mut io::sink()).map_err(as_io)?, item)?;
    Ok(Some(copy))
}

/// Writes a blob that holds an object's bytes to [`DiskPath::Encoding`], durably, and reads it back.
///
/// # Errors
/// [`io::ErrorKind::InvalidData`] if the object's bytes do not come back.
pub fn pack_blob(
    store: &Store, item: &Item, encoding: Encoding, blob: &[u8],
) -> io::Result<EncodedCopy> {
    let path = DiskPath::Encoding(item.object);
    remove(store, &path)?;
    let target = store.disk.create(&path)?;
    let copy = EncodedCopy { encoding, stored_bytes: blob.len() as u64 };
    let outcome = target.write_all_at(blob, 0).and_then(|()| target.sync()).and_then(|()| {
        let found = decode_into(target.as_ref(), item, &copy, &mut io::sink());
        check(found.map_err(as_io)?, item)
    });
    match outcome {
        Ok(()) => keep_note(store, item.object),
        Err(_) => remove(store, &path)?,
    }
    outcome.map(|()| copy)
}

/// Writes the bytes of an encoded object to `target`, an empty file.
///
/// # Errors
/// [`io::ErrorKind::InvalidData`] if the copy is damaged or another object's; what was written is
/// garbage then.
pub fn unpack(
    store: &Store, item: &Item, copy: &EncodedCopy, target: &dyn DiskFile,
) -> io::Result<()> {
    let source = store.disk.open(&DiskPath::Encoded(item.object), Access::Read)?;
    let found = decode_into(source.as_ref(), item, copy, &mut Cursor::new(target));
    check(found.map_err(as_io)?, item)
}

/// Reads the encoded copy of an object and compares.
///
/// # Errors
/// As [`unpack`].
pub fn verify(store: &Store, item: &Item, copy: &EncodedCopy) -> io::Result<()> {
    let source = store.disk.open(&DiskPath::Encoded(item.object), Access::Read)?;
    let found = decode_into(source.as_ref(), item, copy, &mut io::sink());
    check(found.map_err(as_io)?, item)
}

/// What the file of an encoded copy says of itself, which no record does: the object's length, and
/// how it is encoded. `None` if it is no such file.
pub fn recognise(store: &Store, object: ObjectId) -> io::Result<Option<(u64, EncodedCopy)>> {
    let file = store.disk.open(&DiskPath::Encoded(object), Access::Read)?;
    let stored = Stored::recognise(&mut Cursor::new(file.as_ref()), file.stat()?.length)?;
    Ok(stored.map(|Stored { encoding, stored_bytes, length }| {
        (length, EncodedCopy { encoding, stored_bytes })
    }))
}

/// The checksum of the bytes that an encoded copy decodes to, as of a plain file; `None` if it
/// cannot be decoded.
pub fn checksum_of_copy(
    store: &Store, object: ObjectId, length: u64, copy: &EncodedCopy,
) -> io::Result<Option<Checksum>> {
    let file = store.disk.open(&DiskPath::Encoded(object), Access::Read)?;
    let EncodedCopy { encoding, stored_bytes } = *copy;
    let stored = Stored { encoding, stored_bytes, length };
    let source = &mut Cursor::new(file.as_ref());
    match decode_local(source, &stored, &Subject::File, &mut io::sink()) {
        Ok(checksum) => Ok(Some(checksum)),
        Err(error) => match as_io(error) {
            error if error.kind() == io::ErrorKind::InvalidData => Ok(None),
            error => Err(error),
        },
    }
}

fn decode_into(
    file: &dyn DiskFile, item: &Item, copy: &EncodedCopy, sink: &mut dyn io::Write,
) -> Result<Checksum, EncodingError> {
    let EncodedCopy { encoding, stored_bytes } = *copy;
    let stored = Stored { encoding, stored_bytes, length: item.length };
    decode_local(&mut Cursor::new(file), &stored, &item.subject, sink)
}

fn check(found: Checksum, item: &Item) -> io::Result<()> {
    if found == item.checksum {
        return Ok(());
    }
    let what = format!("object {}: the bytes are not those on record", item.object);
    Err(io::Error::new(io::ErrorKind::InvalidData, what))
}

fn remove(store: &Store, path: &DiskPath) -> io::Result<()> {
    match store.disk.remove(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

fn as_io(error: EncodingError) -> io::Error {
    match error {
        EncodingError::Source(error) | EncodingError::Sink(error) => error,
        error => io::Error::new(io::ErrorKind::InvalidData, error.to_string()),
    }
}

#[cfg(test)]
mod tests;
