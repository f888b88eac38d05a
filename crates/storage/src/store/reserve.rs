//! Room that the store keeps on its disk for `meta.redb`, so that a full disk can be left again.
//!
//! After its first write that fails, redb refuses everything until it is opened anew. A full disk must not be that
//! failure: what removes files could not be committed either, and the disk would stay full. So some room is taken
//! while there is some, a file of its own, and given to the database when that finds none.

use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::disk::{Access, Allocation, Disk, DiskFile, DiskPath};

/// Bytes of room: a commit that removes thousands of files changes some MiB of `meta.redb`.
const RESERVE_BYTES_MAX: u64 = 16 << 20;
/// Small disks keep this share of their size at most.
const SHARE_OF_DISK: u64 = 16;
/// It is given away and taken back in such steps: somebody else may be faster than the database.
const STEP_BYTES: u64 = 512 << 10;

/// The room. What there is of it is known once somebody has asked.
#[derive(Debug, Default)]
pub(super) struct Reserve(Mutex<Option<u64>>);

impl Reserve {
    /// Takes what is missing.
    ///
    /// # Errors
    /// ENOSPC or EDQUOT if there is not as much: nothing that only adds should be committed. A disk that cannot keep
    /// room keeps none, and that is no error.
    pub(super) fn fill(&self, disk: &dyn Disk) -> io::Result<()> {
        let mut held = self.held();
        let bytes_max = RESERVE_BYTES_MAX.min(disk.space()?.total_bytes / SHARE_OF_DISK);
        let mut bytes = known(&mut held, disk)?;
        if bytes + STEP_BYTES > bytes_max {
            return Ok(());
        }
        let file = open_or_create(disk)?;
        while bytes + STEP_BYTES <= bytes_max {
            match file.allocate(Allocation { mode: 0, offset: bytes, length: STEP_BYTES }) {
                Err(error) if is_unsupported(&error) => return Ok(()),
                outcome => outcome?,
            }
            bytes += STEP_BYTES;
            *held = Some(bytes);
        }
        Ok(())
    }

    /// How much there is of it.
    pub(super) fn held_bytes(&self, disk: &dyn Disk) -> io::Result<u64> {
        known(&mut self.held(), disk)
    }

    /// Gives some of it back to the disk; whether there was any.
    fn release(&self, disk: &dyn Disk) -> bool {
        let mut held = self.held();
        let bytes = known(&mut held, disk).unwrap_or(0);
        let rest = bytes.saturating_sub(STEP_BYTES);
        let cut = || disk.open(&DiskPath::Reserve, Access::ReadWrite)?.set_length(rest);
        if bytes == 0 || cut().is_err() {
            return false;
        }
        *held = Some(rest);
        true
    }

    /// Does what needs room, with room from here where there is no other. It may begin anew.
    pub(super) fn lend<T>(
        &self, disk: &dyn Disk, act: impl Fn() -> io::Result<T>,
    ) -> io::Result<T> {
        loop {
            match act() {
                Err(error) if is_full(&error) && self.release(disk) => {}
                outcome => return outcome,
            }
        }
    }

    fn held(&self) -> MutexGuard<'_, Option<u64>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What there is, as the file says if nobody has asked before.
fn known(held: &mut Option<u64>, disk: &dyn Disk) -> io::Result<u64> {
    if let Some(bytes) = *held {
        return Ok(bytes);
    }
    let bytes = match disk.stat(&DiskPath::Reserve) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => 0,
        outcome => outcome?.length,
    };
    *held = Some(bytes);
    Ok(bytes)
}

fn open_or_create(disk: &dyn Disk) -> io::Result<Box<dyn DiskFile>> {
    match disk.open(&DiskPath::Reserve, Access::ReadWrite) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => disk.create(&DiskPath::Reserve),
        outcome => outcome,
    }
}

/// There is no room on the disk, or none left for this user.
pub fn is_full(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOSPC | libc::EDQUOT))
}

fn is_unsupported(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::ENOSYS))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::disk::{DiskDirectory, FileStat, Space};
    use crate::store::local_disk::LocalDisk;
    use std::cell::Cell;

    fn length(disk: &LocalDisk) -> u64 {
        disk.stat(&DiskPath::Reserve).unwrap().length
    }

    #[test]
    fn what_finds_no_room_gets_some_and_it_is_taken_back() {
        let directory = tempfile::tempdir().unwrap();
        let disk = LocalDisk::open(directory.path()).unwrap();
        Reserve::default().fill(&disk).unwrap();
        let whole = length(&disk);
        assert!(whole >= STEP_BYTES, "{whole}");
        // Another mount finds it.
        let reserve = Reserve::default();
        let failures = Cell::new(2);
        let lent = reserve.lend(&disk, || match failures.get() {
            0 => Ok(7),
            left => {
                failures.set(left - 1);
                Err(io::Error::from_raw_os_error(libc::ENOSPC))
            }
        });
        assert_eq!(lent.unwrap(), 7);
        assert_eq!(length(&disk), whole - 2 * STEP_BYTES);
        assert_eq!(reserve.held_bytes(&disk).unwrap(), length(&disk));
        reserve.fill(&disk).unwrap();
        assert_eq!(length(&disk), whole);
    }

    #[test]
    fn it_ends_and_other_errors_are_told() {
        let directory = tempfile::tempdir().unwrap();
        let disk = LocalDisk::open(directory.path()).unwrap();
        let reserve = Reserve::default();
        reserve.fill(&disk).unwrap();
        for code in [libc::EIO, libc::ENOSPC] {
            let always = || io::Result::<()>::Err(io::Error::from_raw_os_error(code));
            let error = reserve.lend(&disk, always).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(code));
            assert_eq!(length(&disk) == 0, code == libc::ENOSPC);
        }
    }

    /// A disk of so many bytes in all, of which files take none.
    #[derive(Debug)]
    struct Sized(LocalDisk, u64);

    impl Disk for Sized {
        fn create(&self, path: &DiskPath) -> io::Result<Box<dyn DiskFile>> {
            self.0.create(path)
        }
        fn open(&self, path: &DiskPath, access: Access) -> io::Result<Box<dyn DiskFile>> {
            self.0.open(path, access)
        }
        fn stat(&self, path: &DiskPath) -> io::Result<FileStat> {
            self.0.stat(path)
        }
        fn rename(&self, from: &DiskPath, to: &DiskPath) -> io::Result<()> {
            self.0.rename(from, to)
        }
        fn remove(&self, path: &DiskPath) -> io::Result<()> {
            self.0.remove(path)
        }
        fn create_directory(&self, directory: DiskDirectory) -> io::Result<()> {
            self.0.create_directory(directory)
        }
        fn sync_directory(&self, directory: DiskDirectory) -> io::Result<()> {
            self.0.sync_directory(directory)
        }
        fn list(&self, directory: DiskDirectory) -> io::Result<Vec<String>> {
            self.0.list(directory)
        }
        fn space(&self) -> io::Result<Space> {
            Ok(Space { total_bytes: self.1, ..self.0.space()? })
        }
        fn stack_depth(&self) -> io::Result<u32> {
            self.0.stack_depth()
        }
        fn database(&self, path: &DiskPath) -> io::Result<Box<dyn redb::StorageBackend>> {
            self.0.database(path)
        }
    }

    #[test]
    fn it_is_a_share_of_a_small_disk_and_no_more_than_is_needed_of_a_large_one() {
        for (total_bytes, expected) in [
            (16 * STEP_BYTES - 1, None),
            (16 * STEP_BYTES, Some(STEP_BYTES)),
            (16 * (2 * STEP_BYTES + 7), Some(2 * STEP_BYTES)),
            (1 << 40, Some(16 << 20)),
        ] {
            let directory = tempfile::tempdir().unwrap();
            let disk = Sized(LocalDisk::open(directory.path()).unwrap(), total_bytes);
            let reserve = Reserve::default();
            for _ in 0..2 {
                reserve.fill(&disk).unwrap();
                let found = disk.stat(&DiskPath::Reserve).ok().map(|stat| stat.length);
                assert_eq!(found, expected, "{total_bytes}");
            }
        }
        assert_eq!(STEP_BYTES, 1 << 19);
    }

    #[test]
    fn what_is_not_full_is_told_as_it_is() {
        let error = io::Error::from_raw_os_error;
        assert!(is_full(&error(libc::ENOSPC)) && is_full(&error(libc::EDQUOT)));
        assert!(!is_full(&error(libc::EIO)) && !is_full(&error(libc::EOPNOTSUPP)));
        assert!(is_unsupported(&error(libc::EOPNOTSUPP)) && is_unsupported(&error(libc::ENOSYS)));
        assert!(!is_unsupported(&error(libc::ENOSPC)));
        // Nothing was ever kept.
        let directory = tempfile::tempdir().unwrap();
        let disk = LocalDisk::open(directory.path()).unwrap();
        let full = || io::Result::<()>::Err(error(libc::ENOSPC));
        assert!(Reserve::default().lend(&disk, full).is_err());
        // What is in its place is no room, and cannot be looked at.
        std::os::unix::fs::symlink("meta.reserve", directory.path().join("meta.reserve")).unwrap();
        assert!(open_or_create(&disk).is_err());
    }

    #[test]
    fn a_disk_that_cannot_keep_room_keeps_none_and_a_full_one_is_told() {
        let directory = tempfile::tempdir().unwrap();
        let disk = crate::store::faulty_disk::FaultyDisk::open(directory.path());
        for (code, is_told) in
            [(libc::EOPNOTSUPP, false), (libc::ENOSYS, false), (libc::ENOSPC, true)]
        {
            *disk.events.failing_with.lock().unwrap() = Some(code);
            let outcome = Reserve::default().fill(&disk);
            assert_eq!(outcome.is_err(), is_told, "{outcome:?}");
            assert_eq!(disk.stat(&DiskPath::Reserve).unwrap().length, 0);
        }
    }
}
