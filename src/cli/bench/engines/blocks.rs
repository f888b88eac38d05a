//! Blocks of sixteen threads, buffered and with direct I/O.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use memmap2::MmapMut;
use nix::fcntl::{AT_FDCWD, renameat};

use super::Sizes;
use crate::cli::bench::figure::Figure;
use crate::cli::bench::measure::{at, interleave, throughput, timed};
use crate::cli::bench::note;
use crate::cli::bench::transfer::{self, gigabytes};
use crate::cli::bench::workplace::Workplace;

/// As many as engines have for their disk tier.
const THREADS: usize = 16;
/// What a block must reach of plain files.
const TARGET: f64 = 0.9;

/// How blocks reach the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Io {
    Buffered,
    Direct,
}

impl Io {
    fn flags(self) -> i32 {
        match self {
            Io::Buffered => 0,
            Io::Direct => libc::O_DIRECT,
        }
    }
}

/// Length of a block, how it is moved, and the names of its figures.
const CASES: [(usize, Io, &str, &str); 6] = [
    (1 << 20, Io::Buffered, "blocks_1mib_buffered_write", "blocks_1mib_buffered_read"),
    (4 << 20, Io::Buffered, "blocks_4mib_buffered_write", "blocks_4mib_buffered_read"),
    (32 << 20, Io::Buffered, "blocks_32mib_buffered_write", "blocks_32mib_buffered_read"),
    (1 << 20, Io::Direct, "blocks_1mib_direct_write", "blocks_1mib_direct_read"),
    (4 << 20, Io::Direct, "blocks_4mib_direct_write", "blocks_4mib_direct_read"),
    (32 << 20, Io::Direct, "blocks_32mib_direct_write", "blocks_32mib_direct_read"),
];

pub(super) fn figures(workplace: &Workplace, sizes: &Sizes) -> Result<Vec<Figure>, String> {
    let mut figures = Vec::new();
    for (length, io, write, read) in CASES {
        note(&format!("{io:?} blocks of {} MiB", length >> 20));
        let case = Case::new(length, io, sizes)?;
        let kvfs = Blocks::new(workplace, &workplace.mount().join("files"), &case)?;
        let native = Blocks::new(workplace, &workplace.native(), &case)?;
        let rounds = interleave(sizes.rounds, |_| kvfs.write(), |_| native.write())?;
        figures.push(gigabytes(write, TARGET, rounds));
        kvfs.keep()?;
        native.keep()?;
        let rounds = interleave(sizes.rounds, |_| kvfs.read(), |_| native.read())?;
        figures.push(gigabytes(read, TARGET, rounds));
        kvfs.remove()?;
        native.remove()?;
    }
    Ok(figures)
}

/// What both sides do.
struct Case {
    length: usize,
    io: Io,
    count: usize,
    /// One for each thread, aligned to OS pages. Both sides have the same: how the OS pages of a buffer lie
    /// in memory decides how large the pieces are in which a disk fills it.
    buffers: Vec<Mutex<MmapMut>>,
}

impl Case {
    fn new(length: usize, io: Io, sizes: &Sizes) -> Result<Case, String> {
        let buffer = || {
            let mut buffer = MmapMut::map_anon(length)?;
            // Without structure, and in memory before anything is timed.
            for (word, place) in (1_u64..).zip(buffer.chunks_exact_mut(8)) {
                place.copy_from_slice(&word.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
            }
            Ok(Mutex::new(buffer))
        };
        let buffers = (0..THREADS).map(|_| buffer()).collect::<io::Result<_>>();
        let buffers = buffers.map_err(|error| format!("memory: {error}"))?;
        let wanted = usize::try_from(sizes.block_bytes).unwrap_or(usize::MAX) / length;
        Ok(Case { length, io, count: wanted.max(THREADS), buffers })
    }
}

/// The blocks of one case in one directory.
struct Blocks<'a> {
    workplace: &'a Workplace,
    directory: PathBuf,
    case: &'a Case,
}

impl<'a> Blocks<'a> {
    fn new(workplace: &'a Workplace, parent: &Path, case: &'a Case) -> Result<Blocks<'a>, String> {
        let directory = parent.join("blocks");
        fs::create_dir(&directory).map_err(at(&directory))?;
        Ok(Blocks { workplace, directory, case })
    }

    fn path(&self, index: usize) -> PathBuf {
        self.directory.join(format!("{index:016x}.bin"))
    }

    /// GB/s of writing all blocks, which are then removed.
    fn write(&self) -> Result<f64, String> {
        self.settle()?;
        let duration = self.each(|blocks, index, buffer| blocks.write_block(index, buffer))?;
        for index in 0..self.case.count {
            let path = self.path(index);
            fs::remove_file(&path).map_err(at(&path))?;
        }
        Ok(self.throughput(duration))
    }

    /// Writes the blocks that are read, to the disk.
    fn keep(&self) -> Result<(), String> {
        self.each(|blocks, index, buffer| blocks.write_block(index, buffer))?;
        self.settle()?;
        self.read().map(drop)
    }

    /// GB/s of reading all blocks.
    fn read(&self) -> Result<f64, String> {
        let duration = self.each(|blocks, index, buffer| blocks.read_block(index, buffer))?;
        Ok(self.throughput(duration))
    }

    fn remove(&self) -> Result<(), String> {
        fs::remove_dir_all(&self.directory).map_err(at(&self.directory))?;
        self.settle()
    }

    fn throughput(&self, duration: Duration) -> f64 {
        throughput((self.case.count * self.case.length) as u64, duration)
    }

    /// Nothing of what happened before disturbs what comes: the mount frees what was removed with
    /// its commit, and both sides find memory that is warm.
    fn settle(&self) -> Result<(), String> {
        let mount = self.workplace.mount();
        File::open(&mount).and_then(|file| file.sync_all()).map_err(at(&mount))?;
        transfer::settle(self.case.count * self.case.length);
        Ok(())
    }

    /// Does something with each block, on all threads.
    fn each(
        &self, act: impl Fn(&Self, usize, &mut MmapMut) -> io::Result<()> + Sync,
    ) -> Result<Duration, String> {
        let (next, failure) = (AtomicUsize::new(0), Mutex::new(None));
        let work = |buffer: &Mutex<MmapMut>| {
            let Ok(mut buffer) = buffer.lock() else { return };
            loop {
                let index = next.fetch_add(1, Ordering::Relaxed);
                if index >= self.case.count {
                    break;
                }
                if let Err(error) = act(self, index, &mut buffer)
                    && let Ok(mut failure) = failure.lock()
                {
                    failure.get_or_insert_with(|| at(&self.path(index))(error));
                }
            }
        };
        let duration = timed(|| {
            thread::scope(|scope| {
                for buffer in &self.case.buffers {
                    scope.spawn(|| work(buffer));
                }
            });
            Ok(())
        })?;
        match failure.into_inner() {
            Ok(Some(failure)) => Err(failure),
            _ => Ok(duration),
        }
    }

    fn write_block(&self, index: usize, buffer: &[u8]) -> io::Result<()> {
        let path = self.path(index);
        let temporary = path.with_extension("bin_x7.tmp");
        let mut options = OpenOptions::new();
        options.write(true).create_new(true).custom_flags(self.case.io.flags());
        let mut file = options.open(&temporary)?;
        // One call, as engines make it; a short write is an error to them.
        if file.write(buffer)? != buffer.len() {
            return Err(io::ErrorKind::WriteZero.into());
        }
        nix::unistd::close(file)?;
        renameat(AT_FDCWD, &temporary, AT_FDCWD, &path)?;
        Ok(())
    }

    fn read_block(&self, index: usize, buffer: &mut [u8]) -> io::Result<()> {
        let mut file = open(&self.path(index), self.case.io.flags())?;
        if file.read(buffer)? != buffer.len() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(())
    }
}

fn open(path: &Path, flags: i32) -> io::Result<File> {
    OpenOptions::new().read(true).custom_flags(flags).open(path)
}
