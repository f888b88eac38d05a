//! Room on a disk that is nearly full: nothing can be copied out of packs there, so what is not valid becomes holes
//! where it is.
//!
//! A pack keeps its length and its index, and whoever looks for its records finds zeros in the place of some that
//! nobody needs. That a record is not valid is for good, on the disk as well: what is removed or replaced was so in
//! the database before. A disk that makes no holes keeps the room until there is some to copy to.

use std::collections::{HashMap, HashSet};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::Packs;
use super::index::Condition;
use super::opening::Pack;
use super::pack::PackFile;
use super::record::{Header, Kind, Place};
use super::writer::PACK_BYTES;
use crate::store::disk::{Access, Allocation, DiskPath, is_of_file};

/// With less room than that, what is valid may not fit beside the pack that it is copied out of.
const NEARLY_FULL_BYTES: u64 = 2 * PACK_BYTES;

/// A pack is looked at again once so many more of its bytes are not valid: its index is read for that.
const INVALID_BYTES_MIN: u64 = 64 << 10;

/// What disks make holes of.
const BLOCK_BYTES: u64 = 4096;

/// Records that somebody has open: their bytes stay, valid or not.
#[derive(Debug, Default)]
pub(super) struct Opened(Mutex<HashMap<Place, usize>>);

/// An open record, until it is dropped.
#[derive(Debug)]
pub(super) struct HeldOpen {
    place: Place,
    opened: Arc<Opened>,
}

impl Opened {
    fn places(&self) -> MutexGuard<'_, HashMap<Place, usize>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts an open record. Only while the index says that it is valid, and nobody can change that.
    pub(super) fn hold(self: &Arc<Self>, place: Place) -> HeldOpen {
        *self.places().entry(place).or_default() += 1;
        HeldOpen { place, opened: Arc::clone(self) }
    }

    fn has(&self, place: Place) -> bool {
        self.places().contains_key(&place)
    }
}

impl Drop for HeldOpen {
    fn drop(&mut self) {
        let mut places = self.opened.places();
        if let Some(count) = places.get_mut(&self.place) {
            *count -= 1;
            if *count == 0 {
                places.remove(&self.place);
            }
        }
    }
}

/// What was found when holes were made in a pack last.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Hollow {
    /// Bytes of records that were not valid.
    invalid_bytes: u64,
    /// Bytes of holes.
    pub(super) hole_bytes: u64,
}

/// The records that a pack has.
struct Records {
    all: Vec<(Place, Header)>,
    /// Those among them, and of other packs, that no object has been told to count yet.
    awaited: HashSet<Place>,
}

impl Packs {
    /// Makes holes in packs if the disk is nearly full. For whoever holds `compacting`.
    pub(super) fn make_holes_if_full(&self) -> io::Result<()> {
        if self.disk.space()?.available_bytes >= NEARLY_FULL_BYTES {
            return Ok(());
        }
        let wasteful: Vec<(Arc<Pack>, u64)> = {
            let index = self.index();
            let packs = index.packs.values();
            let invalid = packs.map(|known| (known, known.bytes.saturating_sub(known.live_bytes)));
            let wasteful = invalid.filter(|(known, invalid_bytes)| {
                known.condition == Condition::Sound
                    && *invalid_bytes >= known.hollow.invalid_bytes + INVALID_BYTES_MIN
            });
            wasteful.map(|(known, invalid)| (Arc::clone(&known.pack), invalid)).collect()
        };
        for (pack, invalid_bytes) in wasteful {
            let hole_bytes = match self.make_holes(&pack) {
                // It keeps nobody from the others.
                Err(error)
                    if is_of_file(&error) && error.raw_os_error() != Some(libc::EOPNOTSUPP) =>
                {
                    log::debug!("packs/{:08x} keeps room for nothing: {error}", pack.number);
                    continue;
                }
                made => made?,
            };
            if let Some(known) = self.index_mut().packs.get_mut(&pack.number) {
                known.hollow = Hollow { invalid_bytes, hole_bytes };
            }
        }
        Ok(())
    }

    fn make_holes(&self, pack: &Pack) -> io::Result<u64> {
        let disk_file = self.disk.open(&DiskPath::Pack(pack.number), Access::ReadWrite)?;
        let file = PackFile { number: pack.number, file: Arc::from(disk_file) };
        let records = self.records_of(&file)?;
        let is_needed = |place: Place, header: &Header| match header.kind {
            Kind::Bytes => {
                records.awaited.contains(&place)
                    || self.index().is_valid(place, header)
                    || self.opened.has(place)
            }
            Kind::Note => self.index().is_valid(place, header),
            // Headers of what they are about may be in the index of the pack, and outlive it.
            Kind::Gone(_) | Kind::Index | Kind::End(_) => true,
        };
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        let mut hole_bytes = 0;
        for (offset, length) in holes(&records.all, is_needed) {
            file.file.allocate(Allocation { mode, offset, length })?;
            hole_bytes += length;
        }
        Ok(hole_bytes)
    }

    /// # Errors
    /// The file is another one, which somebody has put in the place of the pack.
    fn records_of(&self, file: &PackFile) -> io::Result<Records> {
        let writer = self.writer();
        let awaited = writer.unadopted.keys().copied().collect();
        if let Some(open) = writer.without_index(file.number) {
            let all = open.contents.records.clone();
            let [own, found] = [&open.pack, file].map(|pack| pack.file.stat());
            let is_own = own?.inode == found?.inode;
            let other = || io::Error::from(io::ErrorKind::NotFound);
            return is_own.then_some(Records { all, awaited }).ok_or_else(other);
        }
        drop(writer);
        Ok(Records { all: self.contents(file)?.records, awaited })
    }
}

/// Whole blocks that only hold records that are not needed: where they begin, and how many bytes they are.
fn holes(
    records: &[(Place, Header)], is_needed: impl Fn(Place, &Header) -> bool,
) -> Vec<(u64, u64)> {
    let mut runs: Vec<(u64, u64)> = Vec::new();
    for (place, header) in records {
        if is_needed(*place, header) {
            continue;
        }
        let begin = u64::from(place.offset);
        let end = begin + header.record_bytes();
        match runs.last_mut() {
            Some((_, last_end)) if *last_end == begin => *last_end = end,
            _ => runs.push((begin, end)),
        }
    }
    let whole = |(begin, end): (u64, u64)| {
        let begin = begin.next_multiple_of(BLOCK_BYTES);
        let end = end - end % BLOCK_BYTES;
        (end > begin).then(|| (begin, end - begin))
    };
    runs.into_iter().filter_map(whole).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::record::{ObjectId, Time};

    #[test]
    fn holes_are_whole_blocks_of_what_nobody_needs() {
        let payload = vec![7; 4000];
        let header = |object| Header::of(Kind::Bytes, ObjectId(object), Time::default(), &payload);
        // Records of 4096 bytes, the first at 64.
        let place = |number: u32| Place { pack: 1, offset: 64 + number * 4096 };
        let records: Vec<(Place, Header)> =
            (0..10).map(|number| (place(number), header(u64::from(number)))).collect();
        let made = |needed: &[u64]| holes(&records, |_, header| needed.contains(&header.object.0));
        assert_eq!(made(&[]), [(4096, 9 * 4096)]);
        assert_eq!(made(&[3]), [(4096, 2 * 4096), (5 * 4096, 5 * 4096)]);
        // One alone shares its blocks with its neighbours.
        assert_eq!(made(&[0, 2, 4, 6, 8]), []);
    }
}
