//! A disk that remembers what it was asked for and fails when it is told to: what a store promises of durability and of
//! disks that are full or broken shows on no other. Only for tests.

use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use memmap2::Mmap;

use super::disk::{
    Access, Allocation, Disk, DiskDirectory, DiskFile, DiskPath, FileStat, Seek, Space,
};
use super::local_disk::LocalDisk;
use super::record::Time;

/// What somebody else does in the meantime.
pub(super) struct Meanwhile(pub(super) Box<dyn FnOnce() + Send>);

impl std::fmt::Debug for Meanwhile {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("Meanwhile")
    }
}

/// What is asked of one file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Call {
    Open,
    Read,
    Stat,
    Write,
    Sync,
}

/// What happens on the disk, and what is to happen.
#[derive(Debug)]
pub(super) struct Events {
    /// What was made durable, and `from -> to` for each rename, in this order.
    steps: Mutex<Vec<String>>,
    /// The bytes of each write to a pack.
    pub(super) written_bytes: Mutex<Vec<usize>>,
    /// What cannot be made durable, and why.
    unsyncable: Mutex<Option<(String, i32)>>,
    /// A call that fails, and with what.
    pub(super) failing_call: Mutex<Option<(Call, DiskPath, i32)>>,
    /// With what each write to a file in `staging/`, and each allocation, fails.
    pub(super) failing_with: Mutex<Option<i32>>,
    /// Happens while a file is synced the next time.
    pub(super) meanwhile: Mutex<Option<Meanwhile>>,
    /// As many writes to packs find room.
    pub(super) writes_left: AtomicU64,
    /// Bytes of each pack that cannot be read.
    pub(super) unreadable: Mutex<Range<u64>>,
    /// Room that the disk says it has.
    pub(super) available_bytes: AtomicU64,
}

impl Default for Events {
    fn default() -> Events {
        Events {
            steps: Mutex::default(),
            written_bytes: Mutex::default(),
            unsyncable: Mutex::default(),
            failing_call: Mutex::default(),
            failing_with: Mutex::default(),
            meanwhile: Mutex::default(),
            writes_left: AtomicU64::new(u64::MAX),
            unreadable: Mutex::new(0..0),
            available_bytes: AtomicU64::new(u64::MAX),
        }
    }
}

impl Events {
    /// What was made durable and renamed since somebody asked last.
    pub(super) fn take_steps(&self) -> Vec<String> {
        std::mem::take(&mut self.steps.lock().unwrap())
    }

    fn note(&self, step: String) {
        self.steps.lock().unwrap().push(step);
    }

    /// Fails to make this durable from now on, for want of room.
    pub(super) fn fail_to_sync(&self, what: Option<&str>) {
        *self.unsyncable.lock().unwrap() = what.map(|what| (what.to_owned(), libc::ENOSPC));
    }

    /// Finds no descriptor to open this with that is to be made durable.
    pub(super) fn fail_to_open_for_sync(&self, what: &str) {
        *self.unsyncable.lock().unwrap() = Some((what.to_owned(), libc::EMFILE));
    }

    fn check_call(&self, call: Call, path: &DiskPath) -> io::Result<()> {
        match &*self.failing_call.lock().unwrap() {
            Some((failing, of, code)) if (failing, of) == (&call, path) => {
                Err(io::Error::from_raw_os_error(*code))
            }
            _ => Ok(()),
        }
    }

    fn check(&self) -> io::Result<()> {
        let failing_with = *self.failing_with.lock().unwrap();
        failing_with.map_or(Ok(()), |code| Err(io::Error::from_raw_os_error(code)))
    }

    fn sync(&self, what: &Path, below: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
        let what = what.to_str().unwrap().to_owned();
        match &*self.unsyncable.lock().unwrap() {
            Some((unsyncable, code)) if *unsyncable == what => {
                return Err(io::Error::from_raw_os_error(*code));
            }
            _ => {}
        }
        self.note(what);
        below()
    }
}

#[derive(Debug)]
pub(super) struct FaultyDisk {
    below: LocalDisk,
    pub(super) events: Arc<Events>,
}

#[derive(Debug)]
struct FaultyFile {
    below: Box<dyn DiskFile>,
    path: DiskPath,
    events: Arc<Events>,
}

impl FaultyDisk {
    pub(super) fn open(path: &Path) -> FaultyDisk {
        FaultyDisk { below: LocalDisk::open(path).unwrap(), events: Arc::default() }
    }

    fn file(&self, path: &DiskPath, below: Box<dyn DiskFile>) -> Box<dyn DiskFile> {
        Box::new(FaultyFile { below, path: path.clone(), events: Arc::clone(&self.events) })
    }
}

impl Disk for FaultyDisk {
    fn is_read_only(&self) -> bool {
        self.events.available_bytes.load(Ordering::Relaxed) == 0
    }

    fn syncs_at_once(&self) -> usize {
        3
    }

    fn sync_all_files(&self, instead_of: usize) -> io::Result<bool> {
        let is_worth_it = instead_of > 99;
        if is_worth_it {
            self.events.note("everything".to_owned());
        }
        Ok(is_worth_it)
    }

    fn create(&self, path: &DiskPath) -> io::Result<Box<dyn DiskFile>> {
        Ok(self.file(path, self.below.create(path)?))
    }

    fn open(&self, path: &DiskPath, access: Access) -> io::Result<Box<dyn DiskFile>> {
        self.events.check_call(Call::Open, path)?;
        Ok(self.file(path, self.below.open(path, access)?))
    }

    fn stat(&self, path: &DiskPath) -> io::Result<FileStat> {
        self.events.check_call(Call::Stat, path)?;
        self.below.stat(path)
    }

    fn rename(&self, from: &DiskPath, to: &DiskPath) -> io::Result<()> {
        self.below.rename(from, to)?;
        self.events.note(format!("{} -> {}", from.relative().display(), to.relative().display()));
        Ok(())
    }

    fn remove(&self, path: &DiskPath) -> io::Result<()> {
        self.below.remove(path)
    }

    fn create_directory(&self, directory: DiskDirectory) -> io::Result<()> {
        self.below.create_directory(directory)
    }

    fn sync_directory(&self, directory: DiskDirectory) -> io::Result<()> {
        self.events.sync(&directory.relative(), || self.below.sync_directory(directory))
    }

    fn list(&self, directory: DiskDirectory) -> io::Result<Vec<String>> {
        self.below.list(directory)
    }

    fn space(&self) -> io::Result<Space> {
        let available_bytes = self.events.available_bytes.load(Ordering::Relaxed);
        Ok(Space { available_bytes, ..self.below.space()? })
    }

    fn stack_depth(&self) -> io::Result<u32> {
        Ok(7)
    }

    fn database(&self, path: &DiskPath) -> io::Result<Box<dyn redb::StorageBackend>> {
        let (below, path) = (self.below.database(path)?, path.clone());
        Ok(Box::new(FaultyDatabase { below, path, events: Arc::clone(&self.events) }))
    }
}

#[derive(Debug)]
struct FaultyDatabase {
    below: Box<dyn redb::StorageBackend>,
    path: DiskPath,
    events: Arc<Events>,
}

impl redb::StorageBackend for FaultyDatabase {
    fn len(&self) -> io::Result<u64> {
        self.below.len()
    }
    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.below.read(offset, out)
    }
    fn set_len(&self, length: u64) -> io::Result<()> {
        self.below.set_len(length)
    }
    fn sync_data(&self) -> io::Result<()> {
        self.events.check_call(Call::Sync, &self.path)?;
        self.below.sync_data()
    }
    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.events.check_call(Call::Write, &self.path)?;
        self.below.write(offset, data)
    }
    fn close(&self) -> io::Result<()> {
        self.below.close()
    }
}

impl DiskFile for FaultyFile {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        let unreadable = self.events.unreadable.lock().unwrap().clone();
        let end = offset + buffer.len() as u64;
        let is_pack = matches!(self.path, DiskPath::Pack(_));
        if is_pack && offset < unreadable.end && unreadable.start < end {
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        self.events.check_call(Call::Read, &self.path)?;
        self.below.read_at(buffer, offset)
    }

    fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        if matches!(self.path, DiskPath::Pack(_)) {
            let left = self.events.writes_left.load(Ordering::Relaxed);
            if left == 0 {
                return Err(io::Error::from_raw_os_error(libc::ENOSPC));
            }
            self.events.writes_left.store(left - 1, Ordering::Relaxed);
            self.events.written_bytes.lock().unwrap().push(bytes.len());
        }
        if matches!(self.path, DiskPath::Staging(_)) {
            self.events.check()?;
        }
        self.below.write_all_at(bytes, offset)
    }

    fn set_length(&self, length: u64) -> io::Result<()> {
        self.below.set_length(length)
    }

    fn map_at_rest(&self) -> Option<Mmap> {
        self.below.map_at_rest()
    }

    fn allocate(&self, allocation: Allocation) -> io::Result<()> {
        self.events.check()?;
        self.below.allocate(allocation)
    }

    fn seek(&self, offset: i64, seek: Seek) -> io::Result<u64> {
        self.below.seek(offset, seek)
    }

    fn copy_to(
        &self, offset: u64, target: &dyn DiskFile, target_offset: u64, length: u64,
    ) -> io::Result<u64> {
        self.below.copy_to(offset, target, target_offset, length)
    }

    fn sync(&self) -> io::Result<()> {
        let meanwhile = self.events.meanwhile.lock().unwrap().take();
        if let Some(Meanwhile(act)) = meanwhile {
            act();
        }
        self.events.sync(&self.path.relative(), || self.below.sync())
    }

    fn stat(&self) -> io::Result<FileStat> {
        self.below.stat()
    }

    fn set_modified(&self, mtime: Time) -> io::Result<()> {
        self.below.set_modified(mtime)
    }

    fn is_at_rest(&self) -> io::Result<bool> {
        self.below.is_at_rest()
    }

    fn is_unused(&self) -> io::Result<bool> {
        self.below.is_unused()
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.below.descriptor()
    }
}
