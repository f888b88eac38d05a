//! Three programs on a mount, for as long as one likes: one replaces files, one reads them, and one works
//! on a file that never leaves.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::common::random::Random;
use crate::common::sys::{open, rename, setxattr, sync_directory, write_and_close};
use crate::content;

/// Half as much again as the disk may hold.
const FILES: usize = 32;
/// Of those, replaced again and again; the others leave and come back.
const REPLACED: usize = 10;
/// An open waits for a silent remote for 30 s, and for its turn before that.
const REFUSED_WITHIN: Duration = Duration::from_secs(75);
/// Files that are here may wait for the disk, and for a slow processor.
const LOCAL_WITHIN: Duration = Duration::from_secs(10);

struct Slot {
    path: PathBuf,
    /// Version 0 is no file.
    acknowledged: AtomicU64,
    newest: AtomicU64,
}

/// What the programs share.
pub(crate) struct Load {
    root: PathBuf,
    slots: Vec<Slot>,
    is_over: AtomicBool,
    /// The server is away, or was a moment ago.
    pub(crate) is_troubled: AtomicBool,
    pub(crate) written: AtomicU64,
    read: AtomicU64,
    refused: AtomicU64,
    local: AtomicU64,
    slowest_local_ms: AtomicU64,
}

impl Load {
    pub(crate) fn new(root: &Path) -> Load {
        let slot = |number| Slot {
            path: root.join("files").join(format!("f{number}")),
            acknowledged: AtomicU64::new(0),
            newest: AtomicU64::new(0),
        };
        Load {
            root: root.to_owned(),
            slots: (0..FILES).map(slot).collect(),
            is_over: AtomicBool::new(false),
            is_troubled: AtomicBool::new(false),
            written: AtomicU64::new(0),
            read: AtomicU64::new(0),
            refused: AtomicU64::new(0),
            local: AtomicU64::new(0),
            slowest_local_ms: AtomicU64::new(0),
        }
    }

    pub(crate) fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Acquire)
    }

    /// The programs end with what they are at.
    pub(crate) fn end(&self) {
        self.is_over.store(true, Ordering::Release);
    }

    pub(crate) fn paths(&self) -> impl Iterator<Item = &Path> {
        self.slots.iter().map(|slot| slot.path.as_path())
    }

    /// Replaces files: temporary name, fsync, rename, fsync of the directory.
    pub(crate) fn write(&self, mut random: Random) {
        let staged = self.root.join("files/.staged.tmp");
        let mut first = 0..FILES;
        while !self.is_over() {
            let number = first.next().unwrap_or_else(|| random.below(REPLACED));
            let slot = &self.slots[number];
            let version = slot.newest.load(Ordering::Acquire) + 1;
            write_and_close(&staged, &content::make(number as u64, version)).unwrap();
            slot.newest.store(version, Ordering::Release);
            rename(&staged, &slot.path).unwrap();
            sync_directory(self.root.join("files")).unwrap();
            slot.acknowledged.store(version, Ordering::Release);
            self.written.fetch_add(1, Ordering::Relaxed);
            // Half a megabyte each time: less than an emulated processor moves.
            std::thread::sleep(Duration::from_millis(if first.is_empty() { 400 } else { 0 }));
        }
    }

    /// Reads files: a version that may be there, or a clear error while the server is away.
    pub(crate) fn read(&self, mut random: Random) {
        while !self.is_over() {
            let number = random.below(FILES);
            let was_troubled = self.is_troubled.load(Ordering::Acquire);
            let start = Instant::now();
            if let Err(error) = self.compare(number) {
                let is_troubled = was_troubled || self.is_troubled.load(Ordering::Acquire);
                let path = self.slots[number].path.display();
                assert!(is_troubled, "{path}: {error}, although the server is there");
                let is_clear = matches!(error.raw_os_error(), Some(libc::EIO | libc::ETIMEDOUT));
                assert!(is_clear, "{path}: {error}");
                assert!(start.elapsed() < REFUSED_WITHIN, "{path}: {:?}", start.elapsed());
                self.refused.fetch_add(1, Ordering::Relaxed);
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// Writes, syncs and reads a file that stays here.
    pub(crate) fn stay(&self) {
        let path = self.root.join("files/local");
        for version in 0_u64.. {
            if self.is_over() {
                return;
            }
            let start = Instant::now();
            std::fs::write(&path, version.to_le_bytes()).unwrap();
            if version == 0 {
                setxattr(&path, "user.kvfs.pin", b"1").unwrap();
            }
            sync_directory(self.root.join("files")).unwrap();
            assert_eq!(std::fs::read(&path).unwrap(), version.to_le_bytes());
            let took = start.elapsed();
            assert!(took < LOCAL_WITHIN, "a file that is here took {took:?}");
            let milliseconds = u64::try_from(took.as_millis()).unwrap();
            self.slowest_local_ms.fetch_max(milliseconds, Ordering::Relaxed);
            self.local.fetch_add(1, Ordering::Relaxed);
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// Reads a file; panics if it is none of the versions that may be there.
    fn compare(&self, number: usize) -> io::Result<()> {
        let slot = &self.slots[number];
        let oldest = slot.acknowledged.load(Ordering::Acquire);
        let path = slot.path.display();
        let bytes = match open(&slot.path, libc::O_RDONLY) {
            Err(error) if oldest == 0 && error.raw_os_error() == Some(libc::ENOENT) => {
                return Ok(());
            }
            Err(error) => return Err(error),
            // Whoever has it open reads it to its end, whatever the server does.
            Ok(mut file) => {
                let mut bytes = Vec::new();
                io::Read::read_to_end(&mut file, &mut bytes)
                    .unwrap_or_else(|error| panic!("{path} was open: {error}"));
                bytes
            }
        };
        let version = content::version(number as u64, &bytes)
            .unwrap_or_else(|| panic!("{path}: torn: {} bytes that nobody wrote", bytes.len()));
        let newest = slot.newest.load(Ordering::Acquire);
        assert!((oldest..=newest).contains(&version), "{path}: {version}, not {oldest}..={newest}");
        self.read.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// While the server is there: every file is what was acknowledged last.
    pub(crate) fn compare_all(&self) {
        for number in 0..FILES {
            let compared = self.compare(number);
            compared
                .unwrap_or_else(|error| panic!("{}: {error}", self.slots[number].path.display()));
        }
    }

    /// What was done; panics if that is too little to prove anything.
    pub(crate) fn report(&self, outages: usize) {
        let [written, read, refused, local, slowest] =
            [&self.written, &self.read, &self.refused, &self.local, &self.slowest_local_ms]
                .map(|count| count.load(Ordering::Relaxed));
        println!(
            "nfs: {outages} outages, {written} files acknowledged, {read} read, {refused} refused, \
             {local} times a file that is here, {slowest} ms at most; 0 lost, 0 torn"
        );
        assert!(written.min(read) > FILES as u64 && local > 20);
        assert!(refused > 0, "nothing was refused: the outages were too short to prove anything");
    }
}
