//! Records are added to one pack at a time. It gets its index when it is full, and at the end of the mount.
//!
//! As long as a mount may change where bytes count, some pack has no index: after a crash the next mount finds
//! it, and looks for files that count instead of a record ([`super::Packs::open`]).

use std::collections::{HashMap, HashSet};
use std::io;
use std::sync::{Arc, PoisonError, RwLock};

use super::index::{Dead, Index, sum_of};
use super::opening::{Opener, Pack};
use super::pack::{Contents, PackFile};
use super::record::{HEADER_BYTES, Header, Kind, Place};
use crate::store::commit::{lost, may_pass};
use crate::store::disk::{Disk, DiskDirectory, DiskPath};
use crate::store::format;
use crate::store::record::{ObjectId, Time};

/// A pack gets no record beyond that. To take room back at most as much is copied, and after a crash a mount
/// reads as much before it answers: a tenth of a second on a disk of today.
pub(super) const PACK_BYTES: u64 = 64 << 20;

/// A pack without an index, and what is in it.
#[derive(Debug)]
pub(super) struct Open {
    pub(super) pack: PackFile,
    pub(super) contents: Contents,
}

/// What is added to packs.
#[derive(Debug)]
pub(super) struct Writer {
    disk: Arc<dyn Disk>,
    index: Arc<RwLock<Index>>,
    opener: Arc<Opener>,
    /// What records are added to.
    current: Option<Open>,
    /// Packs without an index that get no records any more: a write to them failed, or the mount before crashed.
    pub(super) incomplete: Vec<Open>,
    /// Packs whose last records may not be durable.
    unsynced: Vec<PackFile>,
    /// Records that no object has been told to count yet.
    pub(super) unadopted: HashMap<Place, ObjectId>,
    /// A pack could not be read: nobody knows what is in it.
    pub(super) has_unreadable: bool,
    /// A sync failed: nobody knows what the disk holds, and the next sync would not tell.
    has_failed: bool,
    next: u32,
}

impl Writer {
    pub(super) fn new(
        disk: Arc<dyn Disk>, index: Arc<RwLock<Index>>, opener: Arc<Opener>, next: u32,
    ) -> Writer {
        Writer {
            disk,
            index,
            opener,
            current: None,
            incomplete: Vec::new(),
            unsynced: Vec::new(),
            unadopted: HashMap::new(),
            has_unreadable: false,
            has_failed: false,
            next,
        }
    }

    /// Whether some pack has no index, and that is durable.
    pub(super) fn is_open(&self) -> bool {
        self.current.is_some() || !self.incomplete.is_empty() || self.has_unreadable
    }

    /// The number of the pack that records are added to.
    pub(super) fn current(&self) -> Option<u32> {
        self.current.as_ref().map(|open| open.pack.number)
    }

    /// A pack that has no index.
    pub(super) fn without_index(&self, number: u32) -> Option<&Open> {
        self.current.iter().chain(&self.incomplete).find(|open| open.pack.number == number)
    }

    /// Packs with records that no object has been told to count yet: to the index they look like garbage.
    pub(super) fn awaited(&self) -> HashSet<u32> {
        self.unadopted.keys().map(|place| place.pack).collect()
    }

    /// Refuses whatever is to become durable once a sync has failed.
    pub(super) fn check(&self) -> io::Result<()> {
        if self.has_failed { Err(io::Error::from_raw_os_error(libc::EIO)) } else { Ok(()) }
    }

    /// An outcome after which nothing more is promised if it is an error that does not pass.
    fn judged(&mut self, outcome: io::Result<()>) -> io::Result<()> {
        self.has_failed |= outcome.as_ref().is_err_and(|error| !may_pass(error));
        outcome
    }

    pub(super) fn note_failed_sync(&mut self) {
        self.has_failed = true;
    }

    /// Sees to it that some pack has no index.
    pub(super) fn open(&mut self) -> io::Result<()> {
        self.check()?;
        if self.current.is_none() {
            self.current = Some(self.create()?);
        }
        Ok(())
    }

    fn create(&mut self) -> io::Result<Open> {
        if self.next == 1 {
            // Whoever does not know of packs would take their objects for lost; and who finds that there are some, and not
            // their directory, knows that somebody has taken it away.
            self.disk.create_directory(DiskDirectory::Packs)?;
            self.judged(
                self.disk.sync_directory(DiskDirectory::Store).map_err(|error| lost(&error)),
            )?;
            format::note_packs(self.disk.as_ref())?;
        }
        let number = self.next;
        self.next += 1;
        let file = Arc::from(self.disk.create(&DiskPath::Pack(number))?);
        let synced = self.disk.sync_directory(DiskDirectory::Packs);
        self.judged(synced.map_err(|error| lost(&error))).inspect_err(|_| {
            // Each attempt would leave one.
            if let Err(error) = self.disk.remove(&DiskPath::Pack(number)) {
                log::debug!("pack {number}, which has nothing in it, stays: {error}");
            }
        })?;
        let pack = PackFile { number, file };
        self.write_index().add_pack(Pack::of(&pack, &self.opener));
        Ok(Open { pack, contents: Contents::default() })
    }

    fn write_index(&self) -> std::sync::RwLockWriteGuard<'_, Index> {
        self.index.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds records in one write; returns where they are. They are durable after [`Writer::unsynced`] were synced.
    pub(super) fn write(&mut self, records: &[(Header, &[u8])]) -> io::Result<Vec<Place>> {
        if records.is_empty() {
            return Ok(Vec::new());
        }
        let bytes: u64 = records.iter().map(|(header, _)| header.record_bytes()).sum();
        self.make_room(bytes)?;
        let Some(open) = &mut self.current else { return Err(io::ErrorKind::NotFound.into()) };
        let (pack, begin) = (open.pack.clone(), open.contents.end);
        let mut buffer = Vec::with_capacity(usize::try_from(bytes).map_err(io::Error::other)?);
        let mut places = Vec::with_capacity(records.len());
        for (header, payload) in records {
            let offset = begin + buffer.len() as u64;
            let offset = u32::try_from(offset).map_err(io::Error::other)?;
            let place = Place { pack: pack.number, offset };
            buffer.extend_from_slice(&header.encode(place));
            buffer.extend_from_slice(payload);
            let aligned =
                buffer.len().next_multiple_of(usize::try_from(HEADER_BYTES).unwrap_or(64));
            buffer.resize(aligned, 0);
            places.push(place);
        }
        if let Err(error) = pack.file.write_all_at(&buffer, begin) {
            // Half of it may be there.
            if pack.file.set_length(begin).is_err() {
                self.incomplete.extend(self.current.take());
            }
            return Err(error);
        }
        open.contents.end = begin + buffer.len() as u64;
        let written = places.iter().copied().zip(records.iter().map(|(header, _)| *header));
        let before = open.contents.records.len();
        open.contents.records.extend(written);
        let sum = sum_of(&open.contents.records[before..]);
        self.write_index().grow(pack.number, bytes, sum);
        if !self.unsynced.iter().any(|other| other.number == pack.number) {
            self.unsynced.push(pack);
        }
        Ok(places)
    }

    /// Goes on to the next pack if there are as many bytes in this one as there may be.
    fn make_room(&mut self, bytes: u64) -> io::Result<()> {
        let is_full = |open: &Open| open.contents.end > 0 && open.contents.end + bytes > PACK_BYTES;
        if self.current.as_ref().is_some_and(is_full) {
            self.turn()?;
        }
        self.open()
    }

    /// Completes the pack that records are added to, if it has any, and goes on to the next.
    pub(super) fn turn(&mut self) -> io::Result<()> {
        if self.current.as_ref().is_some_and(|open| open.contents.end > 0) {
            // The next one first: there is always one without an index.
            let next = self.create()?;
            if let Some(full) = self.current.replace(next) {
                self.complete(full);
            }
        }
        Ok(())
    }

    /// Gives a pack its index. If that fails, it is tried again at the end of the mount.
    fn complete(&mut self, mut open: Open) {
        let indexed = open.pack.write_index(&open.contents).and_then(|()| synced(&open.pack));
        match self.judged(indexed) {
            Ok(()) => self.unsynced.retain(|other| other.number != open.pack.number),
            Err(error) => {
                log::debug!("pack {} has no index: {error}", open.pack.number);
                open.contents.is_complete = false;
                self.incomplete.push(open);
            }
        }
    }

    /// Says of records that they are not valid any more.
    pub(super) fn bury(&mut self, dead: &[Dead]) -> io::Result<()> {
        let gone = |(object, place): &Dead| {
            let (kind, mtime) = (Kind::Gone(*place), Time::default());
            (Header { kind, object: *object, length: 0, mtime, checksum: 0 }, [].as_slice())
        };
        for some in dead.chunks(PIECES) {
            self.write(&some.iter().map(gone).collect::<Vec<_>>())?;
        }
        Ok(())
    }

    /// The packs that are to be synced for all records to be durable. They count as synced now.
    pub(super) fn take_unsynced(&mut self) -> Vec<PackFile> {
        std::mem::take(&mut self.unsynced)
    }

    /// Gives every pack its index; those without a record go. Everything that must be durable is.
    pub(super) fn complete_all(&mut self) -> io::Result<()> {
        let open: Vec<Open> = self.incomplete.drain(..).chain(self.current.take()).collect();
        let mut failure = None;
        for open in open {
            let number = open.pack.number;
            let is_empty = open.pack.file.stat().is_ok_and(|stat| stat.length == 0);
            let outcome = if open.contents.is_unreadable {
                // What cannot be read today may be tomorrow.
                self.incomplete.push(open);
                continue;
            } else if is_empty {
                let known = self.write_index().packs.remove(&number);
                if let Some(known) = known {
                    known.pack.leave(&open.pack);
                }
                self.disk.remove(&DiskPath::Pack(number))
            } else {
                open.pack.write_index(&open.contents).and_then(|()| synced(&open.pack))
            };
            if let Err(error) = self.judged(outcome) {
                self.incomplete.push(open);
                failure = Some(error);
            }
        }
        failure.map_or(Ok(()), Err)
    }
}

/// Makes a pack durable. An error of that does not pass.
fn synced(pack: &PackFile) -> io::Result<()> {
    pack.file.sync().map_err(|error| lost(&error))
}

/// Records without a payload that are written at a time.
const PIECES: usize = 16_384;
