//! Packs are opened when somebody reads in them, and some stay open for the next who does.
//!
//! A store has a pack for each 64 MiB of small files. With a descriptor for each, or for each that a client has a file
//! of open, a large store would take all that a process may have.

use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use super::pack::PackFile;
use crate::store::disk::{Access, Disk, DiskFile, DiskPath, FileStat};

/// Of the descriptors that the process may have, packs that nobody reads in just now take one in so many.
const SHARE: u64 = 16;

/// More packs than that do not stay open: they hold 256 GiB.
const STAY_OPEN_MAX: usize = 4096;

/// A pack, open or not.
#[derive(Debug)]
pub(super) struct Pack {
    pub(super) number: u32,
    opener: Arc<Opener>,
    opened: Mutex<Opened>,
}

#[derive(Debug, Default)]
struct Opened {
    /// The file, as long as somebody has it.
    file: Option<Weak<dyn DiskFile>>,
    /// Somebody has read in it since the opener looked.
    is_used: Arc<AtomicBool>,
    /// The file of a pack that is removed, for those who have files of it open: they cannot open it any more.
    last: Option<Arc<dyn DiskFile>>,
}

/// Opens packs, and keeps some open though nobody reads in them just now.
#[derive(Debug)]
pub(super) struct Opener {
    disk: Arc<dyn Disk>,
    /// Those opened last are at the end.
    stay_open: Mutex<VecDeque<StaysOpen>>,
    max: usize,
}

#[derive(Debug)]
struct StaysOpen {
    pack: PackFile,
    is_used: Arc<AtomicBool>,
}

impl Pack {
    pub(super) fn new(number: u32, opener: &Arc<Opener>) -> Pack {
        Pack { number, opener: Arc::clone(opener), opened: Mutex::default() }
    }

    /// A pack that somebody has open: others read in the same file as long as that is so.
    pub(super) fn of(pack: &PackFile, opener: &Arc<Opener>) -> Pack {
        let known = Opened { file: Some(Arc::downgrade(&pack.file)), ..Opened::default() };
        Pack { opened: Mutex::new(known), ..Pack::new(pack.number, opener) }
    }

    fn opened(&self) -> MutexGuard<'_, Opened> {
        self.opened.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Its file. Unless it is open already, `see` finds out whether it is what the index is about: somebody may have cut it,
    /// or put another file in its place.
    ///
    /// # Errors
    /// Those of `see`, and of opening it: `NotFound` if somebody removed it below the mount.
    pub(super) fn open(
        &self, see: impl FnOnce(&PackFile) -> io::Result<()>,
    ) -> io::Result<PackFile> {
        let mut opened = self.opened();
        if let Some(file) = self.file_of(&opened) {
            return Ok(file);
        }
        let file = self.opener.open(self.number)?;
        see(&file)?;
        opened.file = Some(Arc::downgrade(&file.file));
        let is_used = Arc::clone(&opened.is_used);
        let oldest = self.opener.keep(StaysOpen { pack: file.clone(), is_used });
        drop(opened);
        // Closed, unless somebody reads in it, where nobody waits for that.
        drop(oldest);
        Ok(file)
    }

    /// What has its name now, for one who reads all of it and finds out himself whether it is what the index is about.
    pub(super) fn open_apart(&self) -> io::Result<PackFile> {
        self.opener.open(self.number)
    }

    /// Has whoever reads in it next look whether it is still what has its name, if `found` is another file.
    pub(super) fn note_name(&self, found: &FileStat) -> io::Result<()> {
        let mut opened = self.opened();
        let Some(file) = self.file_of(&opened) else { return Ok(()) };
        if file.file.stat()?.inode != found.inode {
            opened.file = None;
            self.opener.stay_open().retain(|open| open.pack.number != self.number);
        }
        Ok(())
    }

    fn file_of(&self, opened: &Opened) -> Option<PackFile> {
        let file = opened.file.as_ref().and_then(Weak::upgrade)?;
        opened.is_used.store(true, Ordering::Relaxed);
        Some(PackFile { number: self.number, file })
    }

    /// The pack is about to be removed: its file stays open only for those who have files of it open, or it would keep
    /// its room.
    pub(super) fn leave(&self, file: &PackFile) {
        let mut opened = self.opened();
        opened.file = Some(Arc::downgrade(&file.file));
        opened.last = Some(Arc::clone(&file.file));
        self.opener.stay_open().retain(|open| open.pack.number != self.number);
    }
}

impl Opener {
    /// As many stay open as go well with the descriptors that the process may have.
    pub(super) fn new(disk: Arc<dyn Disk>) -> Opener {
        let share = kvfs_os::open_files_max().unwrap_or(0) / SHARE;
        let share = usize::try_from(share).unwrap_or(usize::MAX);
        Opener { disk, stay_open: Mutex::default(), max: share.clamp(1, STAY_OPEN_MAX) }
    }

    fn open(&self, number: u32) -> io::Result<PackFile> {
        let file = self.disk.open(&DiskPath::Pack(number), Access::Read)?;
        Ok(PackFile { number, file: Arc::from(file) })
    }

    fn stay_open(&self) -> MutexGuard<'_, VecDeque<StaysOpen>> {
        self.stay_open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps a file open; returns one that need not stay so.
    fn keep(&self, open: StaysOpen) -> Option<StaysOpen> {
        let mut stay_open = self.stay_open();
        let oldest = if stay_open.len() < self.max { None } else { make_place(&mut stay_open) };
        stay_open.push_back(open);
        oldest
    }
}

/// Takes one out. Those that were read since they were looked at last get another turn.
fn make_place(stay_open: &mut VecDeque<StaysOpen>) -> Option<StaysOpen> {
    for _ in 0..stay_open.len() {
        match stay_open.pop_front() {
            Some(oldest) if oldest.is_used.swap(false, Ordering::Relaxed) => {
                stay_open.push_back(oldest);
            }
            oldest => return oldest,
        }
    }
    stay_open.pop_front()
}

#[cfg(test)]
impl Pack {
    /// All packs are closed that nobody reads in.
    pub(super) fn close_all(&self) {
        self.opener.stay_open().clear();
    }
}

#[cfg(test)]
mod tests {
    use super::super::record::{Header, Kind, Place};
    use super::*;
    use crate::store::disk::DiskDirectory;
    use crate::store::local_disk::LocalDisk;
    use crate::store::record::{ObjectId, Time};

    fn open(pack: &Pack) -> io::Result<PackFile> {
        pack.open(|file| file.check(0, |header| header.object == ObjectId(pack.number.into())))
    }

    /// A store of so many packs, each with a record of the object of its number.
    struct Stage {
        opener: Arc<Opener>,
        packs: Vec<Pack>,
        _directory: tempfile::TempDir,
    }

    impl Stage {
        fn new(count: u32, max: usize) -> Stage {
            let directory = tempfile::tempdir().unwrap();
            crate::store::format::create_if_empty(directory.path()).unwrap();
            let disk = Arc::new(LocalDisk::open(directory.path()).unwrap());
            disk.create_directory(DiskDirectory::Packs).unwrap();
            let opener = Arc::new(Opener { max, ..Opener::new(disk) });
            let packs: Vec<Pack> = (1..=count).map(|number| Pack::new(number, &opener)).collect();
            for pack in &packs {
                let file = opener.disk.create(&DiskPath::Pack(pack.number)).unwrap();
                let place = Place { pack: pack.number, offset: 0 };
                let object = ObjectId(pack.number.into());
                let header = Header::of(Kind::Bytes, object, Time::default(), b"");
                file.write_all_at(&header.encode(place), 0).unwrap();
            }
            Stage { opener, packs, _directory: directory }
        }

        fn read(&self, index: usize) -> PackFile {
            open(&self.packs[index]).unwrap()
        }

        fn is_open(&self, index: usize) -> bool {
            let opened = self.packs[index].opened();
            opened.file.as_ref().is_some_and(|file| file.strong_count() > 0)
        }

        fn are_open(&self) -> Vec<bool> {
            (0..self.packs.len()).map(|index| self.is_open(index)).collect()
        }
    }

    #[test]
    fn as_many_packs_are_open_as_may_be_and_those_that_are_read() {
        let stage = Stage::new(5, 2);
        let first = stage.read(0);
        for index in 1..5 {
            drop(stage.read(index));
        }
        assert_eq!(stage.are_open(), [true, false, false, true, true], "one is being read");
        assert!(Arc::ptr_eq(&first.file, &stage.read(0).file));
        drop(first);
        assert_eq!(stage.are_open(), [false, false, false, true, true]);
    }

    #[test]
    fn packs_that_are_read_again_stay_open_before_others() {
        let stage = Stage::new(5, 2);
        for index in [0, 1, 0, 2, 0, 3, 0, 4] {
            drop(stage.read(index));
        }
        assert_eq!(stage.are_open(), [true, false, false, false, true]);
        // All were: the one that was opened first has to go.
        for index in [0, 4, 1] {
            drop(stage.read(index));
        }
        assert_eq!(stage.are_open(), [false, true, false, false, true]);
    }

    #[test]
    fn a_removed_pack_is_open_for_those_who_have_it_and_for_nobody_else() {
        let mut stage = Stage::new(2, 2);
        let pack = stage.packs.remove(1);
        let file = open(&pack).unwrap();
        let kept = Arc::downgrade(&file.file);
        pack.leave(&file);
        stage.opener.disk.remove(&DiskPath::Pack(2)).unwrap();
        drop(file);
        assert!(stage.opener.stay_open().is_empty());
        let again = open(&pack).unwrap();
        assert!(again.header(0).unwrap().is_some_and(|header| header.object == ObjectId(2)));
        drop(again);
        assert!(stage.opener.stay_open().is_empty(), "it would keep its room");
        drop(pack);
        assert_eq!(kept.strong_count(), 0);
        let missing = open(&Pack::new(2, &stage.opener)).unwrap_err();
        assert_eq!(missing.kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn who_makes_a_pack_shares_its_file() {
        let stage = Stage::new(1, 1);
        let disk = &stage.opener.disk;
        let made = disk.create(&DiskPath::Pack(9)).unwrap();
        let made = PackFile { number: 9, file: Arc::from(made) };
        let pack = Pack::of(&made, &stage.opener);
        assert!(Arc::ptr_eq(&made.file, &open(&pack).unwrap().file));
        assert!(stage.opener.stay_open().is_empty());
        drop(made);
        // There is no record in it.
        assert_eq!(open(&pack).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
        assert!(stage.opener.stay_open().is_empty());
        pack.open(|_| Ok(())).unwrap();
        assert_eq!(stage.opener.stay_open().len(), 1);
    }
}
