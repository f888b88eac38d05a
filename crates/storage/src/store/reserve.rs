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
pub(super) fn is_full(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOSPC | libc::EDQUOT))
}

fn is_unsupported(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::ENOSYS))
}

#[cfg(test)]
mod tests {
    use super::*;
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
}
