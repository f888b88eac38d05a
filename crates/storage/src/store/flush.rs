//! Copies in memory written out to the disk, several at a time.
//!
//! One file after the other, each synced before the next is begun, reached a quarter of the disk's
//! sequential rate. Past the page cache, since the bytes are in memory anyway, and straight from
//! where they lie there unless somebody may still change them.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};

use super::Store;
use super::commit::Flushed;
use super::disk::{Access, DIRECT_ALIGNMENT, DiskFile, DiskPath, copy_all};
use crate::sys::side_by_side_with;

/// Files at a time: enough that the disk always has something to write while others are synced.
const THREADS: usize = 4;

/// Bytes per write: a page of the default geometry with its header.
const WRITE_BYTES: usize = (4 << 20) + 4096;

/// Copies objects from memory to `staging/`, durably. Those whose file is gone are left out.
pub(super) fn write_out(store: &Store, dirty: &[Flushed]) -> io::Result<Vec<Flushed>> {
    let has_failed = AtomicBool::new(false);
    let write = |buffer: &mut Buffer, copy: &Flushed| {
        if has_failed.load(Ordering::Relaxed) {
            return Ok(None);
        }
        match write_one(store, *copy, buffer) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => {
                has_failed.store(true, Ordering::Relaxed);
                Err(error)
            }
            Ok(()) => Ok(Some(*copy)),
        }
    };
    let outcomes = side_by_side_with(THREADS, dirty, Buffer::new, write);
    outcomes.into_iter().filter_map(Result::transpose).collect()
}

fn write_one(store: &Store, copy: Flushed, buffer: &mut Buffer) -> io::Result<()> {
    let path = DiskPath::Staging(copy.object);
    // An attempt that failed may have left one.
    match store.disk.remove(&path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let source = store.open_object(copy.object, Access::Read)?;
    let target = store.disk.create(&path)?;
    let length = source.stat()?.length;
    let bytes = if length.is_multiple_of(DIRECT_ALIGNMENT) && target.bypass_cache() {
        let mapped = if source.is_at_rest()? { source.map_at_rest() } else { None };
        match mapped {
            Some(mapped) if mapped.len() as u64 == length => target.write_all_at(&mapped, 0)?,
            _ => copy_directly(source.as_ref(), target.as_ref(), length, buffer.aligned())?,
        }
        length
    } else {
        copy_all(source.as_ref(), target.as_ref())?
    };
    target.set_modified(source.stat()?.mtime)?;
    // It takes the place of the file that has the note.
    store.carry_note(&DiskPath::Object(copy.object), &path);
    target.sync()?;
    if let Some(ram) = &store.ram {
        ram.count_flush(bytes);
    }
    Ok(())
}

/// Copies the `length` bytes of a file in writes that direct I/O accepts.
fn copy_directly(
    source: &dyn DiskFile, target: &dyn DiskFile, length: u64, buffer: &mut [u8],
) -> io::Result<()> {
    let mut copied = 0;
    while copied < length {
        let wanted = usize::try_from(length - copied).unwrap_or(usize::MAX).min(buffer.len());
        let piece = &mut buffer[..wanted];
        if source.read_at(piece, copied)? < wanted {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        target.write_all_at(piece, copied)?;
        copied += wanted as u64;
    }
    Ok(())
}

/// Memory that direct I/O accepts, allocated at its first use.
struct Buffer(Vec<u8>);

impl Buffer {
    fn new() -> Buffer {
        Buffer(Vec::new())
    }

    fn aligned(&mut self) -> &mut [u8] {
        let alignment = usize::try_from(DIRECT_ALIGNMENT).unwrap_or(WRITE_BYTES);
        self.0.resize(WRITE_BYTES + alignment, 0);
        let start = self.0.as_ptr().align_offset(alignment).min(alignment);
        &mut self.0[start..start + WRITE_BYTES]
    }
}
