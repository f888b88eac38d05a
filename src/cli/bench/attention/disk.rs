//! Pages on the disk, more of them than the memory that the reader may have.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use memmap2::{Advice, MmapMut};

use super::control_group::MemoryLimit;
use super::mounted::{PAGE_TOKENS, write_sequence};
use super::throughput::gigabytes;
use super::{Sizes, shape};
use crate::attention::bench::{pattern, query};
use crate::attention::{Attention, Options, Queries};
use crate::cli::bench::daemon::Daemon;
use crate::cli::bench::figure::{Better, Figure, Target};
use crate::cli::bench::measure::{at, interleave};
use crate::cli::bench::note;
use crate::cli::bench::workplace::Workplace;
use crate::page::Dtype;
use crate::reader::{Limits, ReadError, Residents, Sequence, Settings};

/// Bytes of one read of the native file: far above what a disk needs for its full rate.
const READ_BYTES: u64 = 8 << 20;
/// Reads of the native file at a time: one to four gave the same, eight less.
const READERS: usize = 2;

/// GB/s of attention over pages on the disk, against reading a file of as many bytes.
pub(super) fn streaming(workplace: &Workplace, sizes: &Sizes) -> Result<Vec<Figure>, String> {
    note("writing pages to the disk");
    let mut daemon = Daemon::start(workplace)?;
    let path = write_sequence(workplace, "on-disk", Dtype::F16, sizes.disk_pages, 0)?;
    let directory = workplace.mount();
    File::open(&directory).and_then(|file| file.sync_all()).map_err(at(&directory))?;
    let native = write_native(workplace, sizes)?;
    let outcome = match MemoryLimit::enter(sizes.memory_limit_bytes) {
        Ok(_limit) => measure(&path, &native, sizes).map(|figure| vec![figure]),
        Err(why) => {
            note(&format!("memory cannot be bounded here ({why}): no figure of the disk"));
            Ok(Vec::new())
        }
    };
    daemon.stop()?;
    outcome
}

fn measure(path: &Path, native: &PathBuf, sizes: &Sizes) -> Result<Figure, String> {
    note("streaming from the disk");
    // Nothing is kept: every byte comes from the disk, every time.
    let residents = Arc::new(Residents::new(Limits { pages: 0, kept_bytes: 0 }));
    let settings = Settings { residents, ..Settings::default() };
    let sequence = Sequence::open_with(path, settings).map_err(|error| error.to_string())?;
    let mut native = Native::open(native)?;
    let attend = || attend(&sequence).map_err(|error| error.to_string());
    // The first time the mount verifies the pages.
    attend()?;
    native.read()?;
    // The disk alone differs by a tenth from one second to the next: many short rounds in turns.
    let rounds = interleave(sizes.rounds, |_| attend(), |_| native.read())?;
    Ok(Figure {
        name: "attend_from_disk_beyond_memory",
        unit: "GB/s",
        better: Better::Higher,
        target: Target::TimesBaseline(0.9),
        values: rounds.kvfs,
        baselines: rounds.native,
    })
}

fn attend(sequence: &Sequence) -> Result<f64, ReadError> {
    let shape = shape().map_err(ReadError::Arguments)?;
    let attention = Attention::new(shape, 2)?;
    let tokens = sequence.valid_tokens()?;
    let q = query(shape);
    let queries = Queries { q: &q, positions: &[tokens] };
    let before = sequence.counts();
    let start = Instant::now();
    let mut stream = sequence.stream(0..tokens)?;
    stream.attend(&attention, &queries, &Options::default())?;
    let seconds = start.elapsed().as_secs_f64();
    let streamed = sequence.counts().since(&before).streamed_bytes;
    Ok(gigabytes(streamed) / seconds)
}

fn write_native(workplace: &Workplace, sizes: &Sizes) -> Result<PathBuf, String> {
    let path = workplace.native().join("large");
    let page = pattern(Dtype::F16, 4);
    let mut file = File::create_new(&path).map_err(at(&path))?;
    for _ in 0..sizes.disk_pages * u64::from(PAGE_TOKENS) * 4096 / page.len() as u64 {
        file.write_all(&page).map_err(at(&path))?;
    }
    file.sync_all().map_err(at(&path))?;
    Ok(path)
}

/// A file that is read past the page cache, into memory that was in use before.
struct Native {
    file: File,
    length: u64,
    buffers: Vec<MmapMut>,
}

impl Native {
    fn open(path: &PathBuf) -> Result<Self, String> {
        let mut options = OpenOptions::new();
        let file = options.read(true).custom_flags(libc::O_DIRECT).open(path).map_err(at(path))?;
        let length = file.metadata().map_err(at(path))?.len();
        let buffer = || {
            let mut buffer = MmapMut::map_anon(usize::try_from(READ_BYTES).unwrap_or(0))?;
            // Without huge pages it is read into small ones.
            let _ = buffer.advise(Advice::HugePage);
            buffer.fill(1);
            Ok(buffer)
        };
        let buffers: std::io::Result<_> = (0..READERS).map(|_| buffer()).collect();
        Ok(Self { file, length, buffers: buffers.map_err(at(path))? })
    }

    /// GB/s
    fn read(&mut self) -> Result<f64, String> {
        let (file, length, next) = (&self.file, self.length, &AtomicU64::new(0));
        let read = |buffer: &mut MmapMut| -> std::io::Result<()> {
            loop {
                let offset = next.fetch_add(READ_BYTES, Ordering::Relaxed);
                if offset >= length {
                    return Ok(());
                }
                file.read_at(buffer, offset)?;
            }
        };
        let start = Instant::now();
        let outcome = std::thread::scope(|scope| {
            let readers = self.buffers.iter_mut().map(|buffer| scope.spawn(move || read(buffer)));
            let readers: Vec<_> = readers.collect();
            readers.into_iter().try_for_each(|reader| reader.join().expect("it does not panic"))
        });
        outcome.map_err(|error| format!("reading a file: {error}"))?;
        Ok(gigabytes(length) / start.elapsed().as_secs_f64())
    }
}
