//! Small objects share files: a *pack* holds the bytes of many, one record behind the other.
//!
//! A file of its own costs a small object an inode, a name in a directory, an attribute for its note and whole
//! blocks, and a commit a call of the kernel for each. In a pack it costs 64 bytes, and a commit writes and
//! syncs all of them at once.
//!
//! A pack is only added to. Where each object is stands in memory (`index`), and on the disk in the records
//! themselves and in an index at the end of each complete pack. Of several records of an object the last one
//! counts, unless a *gone* record says that it does not; a file of its own counts more than any. Room is taken
//! back by copying what is valid out of packs that mostly hold what is not (`compaction`).
//!
//! # Crashes
//! Bytes are durable before an object is told to have them ([`Packs::sync`], [`Packs::adopt`]); until the
//! database says so too, the next mount takes them for garbage, as it does with files. Gone records are written
//! when there is time: without them there is garbage, or a file of its own beside a record. Both can be only
//! after a crash, and after one some pack has no index (`writer`): then the directories of objects are looked
//! through, and files count. A torn record is one whose checksums are wrong.

mod compaction;
mod disk;
mod file;
mod holes;
mod index;
mod opening;
mod pack;
mod reading;
mod record;
#[cfg(test)]
mod tests;
mod writer;

use std::collections::HashSet;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

pub use compaction::end_quietly;
pub use disk::PackedDisk;
use holes::Opened;
use index::{Dead, Index, Replay, sum_of};
use opening::{Opener, Pack};
use pack::{Contents, PackFile};
use record::{Header, Kind, Place};
use writer::{Open, Writer};

use super::commit::{lost, may_pass};
use super::disk::{Access, Disk, DiskDirectory, DiskPath, is_damage, is_of_file, is_unreadable};
use super::record::{ObjectId, Time};

/// Larger objects are never put into packs: a pack holds sixteen of them at least.
pub const PACKED_BYTES_MAX: u64 = 1 << 20;

/// Up to this size objects are put into packs unless somebody says otherwise: opening, reading and closing 64 KiB takes
/// 43 to 60 us, and where the kernel reads a file of its own 60.
pub const DEFAULT_PACKED_BYTES_MAX: u64 = 64 << 10;

/// Bytes that are appended at a time.
pub const APPENDED_BYTES_MAX: usize = 4 << 20;

/// An object that is to be put into a pack.
#[derive(Debug)]
pub struct Small {
    /// Which.
    pub object: ObjectId,
    /// When it was changed last.
    pub mtime: Time,
    /// All of its bytes.
    pub bytes: Vec<u8>,
}

/// Bytes in a pack that no object has been told to have.
#[derive(Clone, Copy, Debug)]
pub struct Appended {
    place: Place,
    header: Header,
}

impl Appended {
    /// Whose bytes they are.
    pub fn object(&self) -> ObjectId {
        self.header.object
    }
}

/// How much there is in packs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Packed {
    /// Packs.
    pub packs: usize,
    /// Objects in them.
    pub objects: usize,
    /// Bytes of records, without what became holes.
    pub bytes: u64,
    /// Bytes of records that are valid.
    pub live_bytes: u64,
}

impl Packed {
    /// Bytes that [`Packs::compact_all`] takes back, or a little less: records that say of others that they are not
    /// valid stay as long as those do.
    pub fn invalid_bytes(&self) -> u64 {
        self.bytes.saturating_sub(self.live_bytes)
    }
}

/// The packs of a store.
#[derive(Debug)]
pub struct Packs {
    disk: Arc<dyn Disk>,
    index: Arc<RwLock<Index>>,
    writer: Mutex<Writer>,
    /// Records that are not valid any more, and that no record says so of yet.
    dead: Mutex<Vec<Dead>>,
    /// Objects in packs whose files in `staging/` are to be removed.
    staged: Mutex<HashSet<ObjectId>>,
    /// Records that somebody has open.
    opened: Arc<Opened>,
    /// Held by whoever copies what is valid out of packs, or makes holes in them.
    compacting: Mutex<()>,
    /// Held by whoever syncs packs.
    syncing: Mutex<()>,
    /// Whether some pack has no index, durably.
    is_open: AtomicBool,
    /// Objects of up to so many bytes are put into packs.
    packed_bytes_max: AtomicU64,
}

impl Packs {
    /// Finds out what is in the packs of a store; changes nothing.
    ///
    /// # Errors
    /// The directory of the packs cannot be listed, or a pack not be opened for another reason than that it is damaged.
    /// One that the disk cannot read is left alone, and its objects are missing.
    pub fn open(disk: Arc<dyn Disk>) -> io::Result<Packs> {
        let names = match disk.list(DiskDirectory::Packs) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
            Err(error) => return Err(io::Error::new(error.kind(), format!("packs: {error}"))),
            Ok(names) => names,
        };
        let mut numbers: Vec<u32> = names.iter().filter_map(|name| number_of(name)).collect();
        numbers.sort_unstable();
        let next = numbers.last().map_or(1, |last| last + 1);
        let index = Arc::new(RwLock::new(Index::new()));
        let opener = Arc::new(Opener::new(Arc::clone(&disk)));
        let mut writer =
            Writer::new(Arc::clone(&disk), Arc::clone(&index), Arc::clone(&opener), next);
        let (mut dead, mut replay) = (Vec::new(), Replay::default());
        {
            let mut index = index.write().unwrap_or_else(PoisonError::into_inner);
            for number in numbers {
                let pack = Pack::new(number, &opener);
                let mut contents = Contents::default();
                let see = |file: &PackFile| {
                    contents = file.read()?;
                    Ok(())
                };
                let file = match pack.open(see) {
                    Ok(file) => file,
                    Err(error) if !is_damage(&error) && !is_unreadable(&error) => {
                        let told = format!("packs/{number:08x}: {error}");
                        return Err(io::Error::new(error.kind(), told));
                    }
                    Err(error) => {
                        // What is in it cannot be opened; everything else can.
                        log::error!("packs/{number:08x} cannot be read: {error}");
                        writer.has_unreadable = true;
                        continue;
                    }
                };
                index.add_pack(pack);
                index.grow(number, contents.end, sum_of(&contents.records));
                for (place, header) in &contents.records {
                    index.replay(*place, header, &mut replay);
                }
                if !contents.is_complete {
                    writer.incomplete.push(Open { pack: file, contents });
                }
            }
            dead.extend(replay.into_dead());
            if writer.is_open() && index.len() > 0 {
                dead.extend(outlived(disk.as_ref(), &mut index)?);
            }
        }
        let is_open = AtomicBool::new(writer.is_open());
        let (writer, dead) = (Mutex::new(writer), Mutex::new(dead));
        Ok(Packs {
            disk,
            index,
            writer,
            dead,
            staged: Mutex::default(),
            opened: Arc::default(),
            compacting: Mutex::default(),
            syncing: Mutex::default(),
            is_open,
            packed_bytes_max: AtomicU64::new(0),
        })
    }

    /// Completes what a crash has left incomplete. Only where something may be written.
    pub fn recover(&self) -> io::Result<()> {
        let scanned = {
            let mut writer = self.writer();
            std::mem::take(&mut writer.incomplete)
        };
        let mut writable = Vec::new();
        for open in scanned {
            let number = open.pack.number;
            if open.contents.is_unreadable {
                writable.push(open);
                continue;
            }
            let file = self.disk.open(&DiskPath::Pack(number), Access::ReadWrite)?;
            writable.push(Open { pack: PackFile { number, file: Arc::from(file) }, ..open });
        }
        self.writer().incomplete = writable;
        self.end()?;
        let has_objects = self.index().len() > 0;
        // Made here, since whoever changes a packed file must not wait for the disk with everybody behind.
        if has_objects { self.begin_to_change() } else { Ok(()) }
    }

    fn index(&self) -> RwLockReadGuard<'_, Index> {
        self.index.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn index_mut(&self) -> RwLockWriteGuard<'_, Index> {
        self.index.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn writer(&self) -> MutexGuard<'_, Writer> {
        self.writer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn dead(&self) -> MutexGuard<'_, Vec<Dead>> {
        self.dead.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Objects of up to so many bytes are put into packs; 0 for none.
    pub fn packed_bytes_max(&self) -> u64 {
        self.packed_bytes_max.load(Ordering::Relaxed)
    }

    /// Puts objects of up to so many bytes into packs from now on.
    pub fn set_packed_bytes_max(&self, bytes: u64) {
        self.packed_bytes_max.store(bytes.min(PACKED_BYTES_MAX), Ordering::Relaxed);
    }

    /// Whether the bytes of an object are in a pack, and in no file of its own.
    pub fn holds(&self, object: ObjectId) -> bool {
        self.index().visible(object).is_some()
    }

    /// How much there is.
    pub fn packed(&self) -> Packed {
        let index = self.index();
        let packs = index.packs.values().filter(|known| !known.is_lost());
        packs.fold(Packed { objects: index.len(), ..Packed::default() }, |sum, known| Packed {
            packs: sum.packs + 1,
            bytes: sum.bytes + known.bytes.saturating_sub(known.hollow.hole_bytes),
            live_bytes: sum.live_bytes + known.live_bytes,
            ..sum
        })
    }

    /// Adds the bytes of objects to a pack. They are durable after [`Packs::sync`], and count after
    /// [`Packs::adopt`].
    pub fn append(&self, small: &[Small]) -> io::Result<Vec<Appended>> {
        let records: Vec<(Header, &[u8])> = small
            .iter()
            .map(|small| {
                let payload = small.bytes.as_slice();
                (Header::of(Kind::Bytes, small.object, small.mtime, payload), payload)
            })
            .collect();
        let mut writer = self.writer();
        self.open_writer(&mut writer)?;
        let places = writer.write(&records)?;
        let appended = places.into_iter().zip(&records);
        let appended: Vec<Appended> =
            appended.map(|(place, (header, _))| Appended { place, header: *header }).collect();
        writer.unadopted.extend(appended.iter().map(|one| (one.place, one.object())));
        Ok(appended)
    }

    /// Makes durable what was appended.
    pub fn sync(&self) -> io::Result<()> {
        // Who comes second waits for what the first has begun to sync.
        let _turn = self.syncing.lock().unwrap_or_else(PoisonError::into_inner);
        let unsynced = {
            let mut writer = self.writer();
            writer.check()?;
            writer.take_unsynced()
        };
        self.noting_failure(unsynced.iter().try_for_each(|pack| pack.file.sync()))
    }

    /// Whether everything that was said to be durable is.
    ///
    /// # Errors
    /// A sync has failed since the mount began.
    pub fn check(&self) -> io::Result<()> {
        self.writer().check()
    }

    fn noting_failure(&self, synced: io::Result<()>) -> io::Result<()> {
        if synced.as_ref().is_err_and(|error| !may_pass(&lost(error))) {
            self.writer().note_failed_sync();
        }
        synced
    }

    /// From now on objects have these bytes. Takes no time: the caller keeps everybody from opening them.
    /// None of them has a file in `objects/`; those in `staging/` are to be removed then ([`Packs::remove_staged`]),
    /// and [`Packs::note_adopted`] is to be told.
    pub fn adopt(&self, appended: &[Appended]) {
        self.staged().extend(appended.iter().map(Appended::object));
        let mut index = self.index_mut();
        let dead: Vec<Dead> =
            appended.iter().filter_map(|one| index.put(one.place, &one.header)).collect();
        drop(index);
        self.dead().extend(dead);
    }

    /// What was adopted is not garbage.
    pub fn note_adopted(&self, adopted: &[Appended]) {
        let mut writer = self.writer();
        for one in adopted {
            writer.unadopted.remove(&one.place);
        }
    }

    /// No object will be told to have these bytes: they are garbage.
    pub fn give_up(&self, appended: &[Appended]) {
        self.note_adopted(appended);
        self.dead().extend(appended.iter().map(|one| (one.object(), one.place)));
    }

    /// Removes the file in `staging/` that an object had before its bytes were in a pack, unless somebody has
    /// unpacked it since: then that is another.
    pub fn remove_staged(&self, object: ObjectId) -> io::Result<()> {
        let mut staged = self.staged();
        if !staged.contains(&object) {
            return Ok(());
        }
        match self.disk.remove(&DiskPath::Staging(object)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        staged.remove(&object);
        Ok(())
    }

    fn staged(&self) -> MutexGuard<'_, HashSet<ObjectId>> {
        self.staged.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Copies the bytes of a packed object to a file in `staging/`, to be changed there. Until that is
    /// published, a crash brings the bytes in the pack back. Whether it was packed.
    pub fn unpack(&self, object: ObjectId) -> io::Result<bool> {
        let note = match self.note(object) {
            Err(error) if !is_of_file(&error) => return Err(error),
            note => note.ok().flatten(),
        };
        // What is damaged must not become what somebody has changed.
        let Some((entry, bytes)) = self.read(object)? else { return Ok(false) };
        self.begin_to_change()?;
        self.remove_staged(object)?;
        let path = DiskPath::Staging(object);
        let copy = self.disk.create(&path)?;
        let written = copy.write_all_at(&bytes, 0).and_then(|()| copy.set_modified(entry.mtime));
        if let Err(error) = written {
            self.disk.remove(&path)?;
            return Err(error);
        }
        // Where no note can be kept, or none was, the file has none.
        if let Some(note) = note
            && let Err(error) = self.disk.set_note(&path, &note)
        {
            log::debug!("object {object} does not say where it belongs: {error}");
        }
        self.index_mut().hide(object);
        Ok(true)
    }

    /// Sees to it that the next mount looks for files that count instead of records, if this one crashes.
    fn begin_to_change(&self) -> io::Result<()> {
        if self.is_open.load(Ordering::Acquire) {
            return Ok(());
        }
        self.open_writer(&mut self.writer())
    }

    fn open_writer(&self, writer: &mut Writer) -> io::Result<()> {
        writer.open()?;
        self.is_open.store(true, Ordering::Release);
        Ok(())
    }

    /// The bytes of an object in a pack do not count any more.
    fn remove(&self, object: ObjectId) {
        let removed = self.index_mut().remove(object);
        self.dead().extend(removed.map(|entry| (object, entry.place)));
    }

    /// Keeps some bytes beside those of each of these objects ([`Disk::set_note`]), in one write.
    pub fn set_notes(&self, notes: &[(ObjectId, Vec<u8>)]) -> io::Result<()> {
        if notes.is_empty() {
            return Ok(());
        }
        let record = |(object, note): &(ObjectId, Vec<u8>)| {
            Header::of(Kind::Note, *object, Time::default(), note)
        };
        let headers: Vec<Header> = notes.iter().map(record).collect();
        let bytes = notes.iter().map(|(_, note)| note.as_slice());
        let records: Vec<(Header, &[u8])> = headers.iter().copied().zip(bytes).collect();
        let mut writer = self.writer();
        self.open_writer(&mut writer)?;
        let places = writer.write(&records)?;
        let mut index = self.index_mut();
        for (place, header) in places.into_iter().zip(&headers) {
            index.note(place, header);
        }
        Ok(())
    }

    /// Writes down which records are not valid any more. What cannot be written is kept for the next time.
    pub fn write_dead(&self) -> io::Result<()> {
        let dead = std::mem::take(&mut *self.dead());
        if dead.is_empty() {
            return Ok(());
        }
        let mut writer = self.writer();
        let outcome = self.open_writer(&mut writer).and_then(|()| writer.bury(&dead));
        if outcome.is_err() {
            self.dead().extend(dead);
        }
        outcome
    }

    /// The mount ends in good order, or what a crash has left is in order: every pack gets its index.
    pub fn end(&self) -> io::Result<()> {
        {
            let mut writer = self.writer();
            let unadopted = std::mem::take(&mut writer.unadopted);
            self.dead().extend(unadopted.into_iter().map(|(place, object)| (object, place)));
            if !writer.is_open() && self.dead().is_empty() {
                return Ok(());
            }
        }
        self.write_dead()?;
        self.sync()?;
        let mut writer = self.writer();
        writer.complete_all()?;
        self.is_open.store(writer.is_open(), Ordering::Release);
        Ok(())
    }
}

/// The number that a pack's name stands for.
fn number_of(name: &str) -> Option<u32> {
    let number = (name.len() == 8).then(|| u32::from_str_radix(name, 16).ok()).flatten();
    number.filter(|number| *number < NUMBERS_END)
}

/// No pack that is found has this number or a higher one: some 100 PiB of packs come before.
const NUMBERS_END: u32 = 1 << 31;

/// Takes objects out of the index that have a file of their own. After a crash both can be there, and the file
/// is the newer one.
fn outlived(disk: &dyn Disk, index: &mut Index) -> io::Result<Vec<Dead>> {
    let mut dead = Vec::new();
    for shard in 0..=u8::MAX {
        for name in disk.list(DiskDirectory::ObjectShard(shard))? {
            if let Some(DiskPath::Object(object)) = DiskPath::stored(&name)
                && let Some(entry) = index.remove(object)
            {
                dead.push((object, entry.place));
            }
        }
    }
    Ok(dead)
}
