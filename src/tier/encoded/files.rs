//! A raw object file into an encoded one, and back.

use std::io;

use crate::page::Checksum;
use crate::store::Store;
use crate::store::disk::{Access, DiskFile, DiskPath};
use crate::store::record::EncodedCopy;
use crate::tier::encoding::{Encoding, EncodingError, Lossless, Stored, decode_local, encode};
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
    if !matches!(outcome, Ok(Some(_))) {
        remove(store, &path)?;
    }
    outcome
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
    if outcome.is_err() {
        remove(store, &path)?;
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
