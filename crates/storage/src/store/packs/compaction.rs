//! Room is taken back: what is valid is copied out of a pack that mostly holds what is not, and the pack goes.

use std::collections::HashSet;
use std::io;
use std::sync::{Arc, PoisonError, TryLockError};

use super::index::{Condition, Dead};
use super::pack::PackFile;
use super::record::{Header, Kind, Place};
use super::writer::{PACK_BYTES, Writer};
use super::{APPENDED_BYTES_MAX, Packs};
use crate::store::disk::{DiskDirectory, DiskPath, is_of_file};

/// So many packs of less than a quarter of what one may hold are put together: each mount begins a new one.
const SHORT_PACKS_MAX: usize = 16;

/// [`Packs::end`] while the store is in use; false, and nothing done, while packs are rewritten. No commit may run: the
/// end declares invalid what was appended and that nobody has been told to have yet.
///
/// # Errors
/// The disk fails, or has no room.
pub fn end_quietly(packs: &Packs) -> io::Result<bool> {
    let _turn = match packs.compacting.try_lock() {
        Err(TryLockError::WouldBlock) => return Ok(false),
        Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
        Ok(turn) => turn,
    };
    packs.end().map(|()| true)
}

/// Why a pack was not rewritten.
#[derive(Debug)]
pub(super) enum CompactionError {
    /// It cannot be read.
    Unreadable(io::Error),
    /// The copies cannot be written, or something is used up.
    Failed(io::Error),
}

fn of_reading(error: io::Error) -> CompactionError {
    if is_of_file(&error) {
        CompactionError::Unreadable(error)
    } else {
        CompactionError::Failed(error)
    }
}

impl From<io::Error> for CompactionError {
    fn from(error: io::Error) -> CompactionError {
        CompactionError::Failed(error)
    }
}

impl From<CompactionError> for io::Error {
    fn from(error: CompactionError) -> io::Error {
        match error {
            CompactionError::Unreadable(error) | CompactionError::Failed(error) => error,
        }
    }
}

impl Packs {
    /// Copies what is valid out of one pack, if there is one that is worth it, and removes it. Whether there was.
    ///
    /// # Errors
    /// There is no room for the copies, or the disk fails; nothing is lost.
    pub fn compact(&self) -> io::Result<bool> {
        let _turn = self.compacting.lock().unwrap_or_else(PoisonError::into_inner);
        self.try_to_make_holes();
        if let Some(number) = self.worth_compacting() {
            return match self.compact_one(number) {
                Err(CompactionError::Unreadable(error)) => {
                    log::error!("packs/{number:08x} keeps room for nothing: {error}");
                    self.set_aside(number);
                    Ok(true)
                }
                outcome => Ok(outcome.map(|()| true)?),
            };
        }
        if self.is_current_wasteful() {
            self.writer().turn()?;
            return Ok(true);
        }
        Ok(false)
    }

    /// Takes all room back, from every pack that holds anything invalid. Returns how many bytes.
    ///
    /// # Errors
    /// As [`Packs::compact`]; or a pack cannot be read whole, which stays as it is. The others are rewritten.
    pub fn compact_all(&self) -> io::Result<u64> {
        let _turn = self.compacting.lock().unwrap_or_else(PoisonError::into_inner);
        let without_holes = self.packed().bytes;
        self.try_to_make_holes();
        let hole_bytes = without_holes.saturating_sub(self.packed().bytes);
        self.write_dead()?;
        self.writer().turn()?;
        let before = self.packed().bytes;
        let wasteful: Vec<u32> = {
            let writer = self.writer();
            let others = not_to_be_copied(&writer);
            let index = self.index();
            let packs = index.packs.iter().filter(|(number, _)| !others.contains(number));
            let wasteful =
                packs.filter(|(_, known)| known.live_bytes < known.bytes && !known.is_lost());
            wasteful.map(|(number, _)| *number).collect()
        };
        let mut unreadable = None;
        for number in wasteful {
            match self.compact_one(number) {
                // What could be given back where it is was.
                Err(CompactionError::Failed(error))
                    if error.kind() == io::ErrorKind::StorageFull =>
                {
                    break;
                }
                Err(CompactionError::Unreadable(error)) => {
                    let told = format!("packs/{number:08x} cannot be read: {error}");
                    unreadable.get_or_insert_with(|| io::Error::other(told));
                }
                outcome => outcome?,
            }
        }
        if let Some(error) = unreadable {
            return Err(error);
        }
        Ok(hole_bytes + before.saturating_sub(self.packed().bytes))
    }

    /// On a disk that makes none, or fails, the room is taken back by copying, once there is some.
    fn try_to_make_holes(&self) {
        if let Err(error) = self.make_holes_if_full() {
            log::debug!("packs keep room for nothing: {error}");
        }
    }

    fn compact_one(&self, number: u32) -> Result<(), CompactionError> {
        let (pack, live_bytes) = match self.index().packs.get(&number) {
            Some(known) => (Arc::clone(&known.pack), known.live_bytes),
            None => return Ok(()),
        };
        if self.disk.space()?.available_bytes < 2 * live_bytes {
            // Others need the last of it more.
            return Err(io::Error::from_raw_os_error(libc::ENOSPC).into());
        }
        let file = match pack.open_apart() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(self.lose(&pack)?),
            opened => opened.map_err(of_reading)?,
        };
        let contents = self.contents(&file).map_err(of_reading)?;
        let mut moved = Vec::new();
        let copied = self.copy_valid(&file, contents.records, &mut moved);
        let copied = copied.and_then(|()| Ok(self.sync()?));
        let dead = if copied.is_ok() {
            self.point_at(&moved)
        } else {
            // Nobody counts on any of them.
            let bytes = moved.iter().filter(|(_, _, header)| header.kind == Kind::Bytes);
            bytes.map(|(_, to, header)| (header.object, *to)).collect()
        };
        self.dead().extend(dead);
        {
            let mut writer = self.writer();
            for (_, to, _) in &moved {
                writer.unadopted.remove(to);
            }
        }
        copied?;
        self.index_mut().packs.remove(&number);
        pack.leave(&file);
        self.disk.remove(&DiskPath::Pack(number))?;
        Ok(self.noting_failure(self.disk.sync_directory(DiskDirectory::Packs))?)
    }

    /// A pack stays as it is, and keeps nobody from the others.
    fn set_aside(&self, number: u32) {
        if let Some(known) = self.index_mut().packs.get_mut(&number)
            && known.condition == Condition::Sound
        {
            known.condition = Condition::SetAside;
        }
    }

    fn copy_valid(
        &self, pack: &PackFile, records: Vec<(Place, Header)>,
        moved: &mut Vec<(Place, Place, Header)>,
    ) -> Result<(), CompactionError> {
        let (mut some, mut bytes) = (Vec::new(), 0);
        for (place, header) in records {
            if !self.index().is_valid(place, &header) {
                continue;
            }
            bytes += usize::try_from(header.record_bytes()).unwrap_or(usize::MAX);
            some.push((place, header));
            if bytes >= APPENDED_BYTES_MAX {
                self.copy(pack, &some, moved)?;
                some.clear();
                bytes = 0;
            }
        }
        self.copy(pack, &some, moved)
    }

    /// Whether the pack that records are added to is worth to be complete already: half of what a good part of one
    /// holds is not valid.
    fn is_current_wasteful(&self) -> bool {
        let writer = self.writer();
        let Some(current) = writer.current().filter(|number| !writer.awaited().contains(number))
        else {
            return false;
        };
        let index = self.index();
        index.packs.get(&current).is_some_and(|known| {
            known.bytes >= PACK_BYTES / 4 && known.live_bytes * 2 <= known.bytes
        })
    }

    /// The oldest complete pack that is half invalid; or of those that are short, if there are many. A pack with
    /// records that objects may be told to have in a moment is neither.
    fn worth_compacting(&self) -> Option<u32> {
        let writer = self.writer();
        let others = not_to_be_copied(&writer);
        let index = self.index();
        let complete = index.packs.iter().filter(|(number, known)| {
            !others.contains(number) && known.condition == Condition::Sound
        });
        let mut short = Vec::new();
        for (number, known) in complete {
            if known.live_bytes * 2 <= known.bytes {
                return Some(*number);
            }
            if known.bytes < PACK_BYTES / 4 {
                short.push(*number);
            }
        }
        short.first().copied().filter(|_| short.len() >= SHORT_PACKS_MAX)
    }

    /// Adds records to the last pack as they are, damage included: their checksums go with them.
    pub(super) fn copy(
        &self, pack: &PackFile, records: &[(Place, Header)],
        moved: &mut Vec<(Place, Place, Header)>,
    ) -> Result<(), CompactionError> {
        let payloads: Vec<Vec<u8>> = records
            .iter()
            .map(|(place, header)| pack.bytes(u64::from(place.offset), header.length))
            .collect::<io::Result<_>>()
            .map_err(of_reading)?;
        let mut writer = self.writer();
        self.open_writer(&mut writer)?;
        let read = records.iter().zip(&payloads);
        // The last note of an object counts, so none may come behind one that was written since.
        let current: Vec<((Place, Header), &[u8])> = {
            let index = self.index();
            let is_last = |(place, header): &(Place, Header)| {
                header.kind != Kind::Note || index.is_valid(*place, header)
            };
            let kept = read.filter(|(record, _)| is_last(record));
            kept.map(|(record, payload)| (*record, payload.as_slice())).collect()
        };
        let copies: Vec<(Header, &[u8])> =
            current.iter().map(|((_, header), payload)| (*header, *payload)).collect();
        let places = writer.write(&copies)?;
        // Until objects count on them: whatever fails before that must leave none that would win.
        let bytes =
            places.iter().zip(&copies).filter(|(_, (header, _))| header.kind == Kind::Bytes);
        let unadopted: Vec<_> = bytes.map(|(place, (header, _))| (*place, header.object)).collect();
        writer.unadopted.extend(unadopted);
        let both = current.iter().zip(places);
        moved.extend(both.map(|(((from, header), _), to)| (*from, to, *header)));
        Ok(())
    }

    /// Objects have the copies from now on; returns those that nobody needs any more.
    fn point_at(&self, moved: &[(Place, Place, Header)]) -> Vec<Dead> {
        let mut dead = Vec::new();
        for some in moved.chunks(POINTED_AT_A_TIME) {
            let mut index = self.index_mut();
            for (from, to, header) in some {
                let is_current = index.relocate(*from, *to, header);
                if !is_current && header.kind == Kind::Bytes {
                    dead.push((header.object, *to));
                }
            }
        }
        dead
    }
}

/// Packs that are written to, have no index, or have records that no object has been told to count yet.
fn not_to_be_copied(writer: &Writer) -> HashSet<u32> {
    let mut others = writer.awaited();
    others.extend(writer.current());
    others.extend(writer.incomplete.iter().map(|open| open.pack.number));
    others
}

/// Objects that are pointed elsewhere before others may look into the index: some 0.1 us each.
const POINTED_AT_A_TIME: usize = 1024;
