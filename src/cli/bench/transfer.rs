//! Reading, mapping and publishing pages.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Instant;

use memmap2::{Advice, Mmap, MmapMut, MmapOptions};
use nix::fcntl::{AT_FDCWD, renameat};

use super::build::{Model, Pages, layer_path, native_path};
use super::figure::{Better, Figure, Target};
use super::measure::{Rounds, at, interleave, microseconds_each, open, throughput, timed};
use super::workplace::Workplace;
use super::{Sizes, note};

/// Bytes per read, as readers of large files choose.
const READ_BYTES: usize = 1 << 20;
/// A pass over all files lasts at least so long: shorter ones measure the timer and the
/// scheduler.
const PASS_BYTES_MIN: u64 = 1 << 29;
/// Filling memory that the machine has at hand is faster, asking the host for it far slower.
const SETTLED_GB_PER_S: f64 = 2.0;
/// A machine that never gets as fast is measured as it is.
const SETTLE_PASSES_MAX: usize = 8;
/// Pages opened and closed per round.
const OPENS: u64 = 512;

/// Figures of pages that are there.
pub(super) fn reading(workplace: &Workplace, sizes: &Sizes) -> Result<Vec<Figure>, String> {
    let mut figures = Vec::new();
    for (model, target, read, copy) in [
        (Model::Large, 0.95, "read_4mib_open", "mmap_copy_4mib_mapped"),
        (Model::Medium, 0.85, "read_1mib_open", "mmap_copy_1mib_mapped"),
    ] {
        note(&format!("reading {} pages", model.name()));
        let kvfs = Files::of(&layer_path(workplace, model, "s"))?;
        let native = Files::of(&native_path(workplace, model, "s"))?;
        let rounds = interleave(sizes.rounds, |_| kvfs.read(), |_| native.read())?;
        figures.push(gigabytes(read, target, rounds));
        let rounds = interleave(sizes.rounds, |_| kvfs.copy(), |_| native.copy())?;
        figures.push(gigabytes(copy, target, rounds));
    }
    note("opening pages");
    let kvfs = paths(&layer_path(workplace, Model::Large, "s"))?;
    let native = paths(&native_path(workplace, Model::Large, "s"))?;
    let rounds = interleave(sizes.rounds, |_| open_and_map(&kvfs), |_| open_and_map(&native))?;
    figures.push(Figure {
        name: "open_mmap_munmap_close",
        unit: "us",
        better: Better::Lower,
        target: Target::Absolute(50.0),
        values: rounds.kvfs,
        baselines: rounds.native,
    });
    let rounds = interleave(sizes.rounds, |_| open_and_read(&kvfs), |_| open_and_read(&native))?;
    figures.push(gigabytes("open_read_close_4mib", 0.75, rounds));
    Ok(figures)
}

pub(super) fn gigabytes(name: &'static str, target: f64, rounds: Rounds) -> Figure {
    Figure {
        name,
        unit: "GB/s",
        better: Better::Higher,
        target: Target::TimesBaseline(target),
        values: rounds.kvfs,
        baselines: rounds.native,
    }
}

/// Pages of a directory in the order of their names.
pub(super) fn paths(directory: &Path) -> Result<Vec<PathBuf>, String> {
    let entries = fs::read_dir(directory).map_err(at(directory))?;
    let paths = entries.map(|entry| Ok(entry.map_err(at(directory))?.path()));
    let mut paths = paths.collect::<Result<Vec<_>, String>>()?;
    paths.sort();
    Ok(paths)
}

/// Open and mapped files, all of them in the page cache.
pub(super) struct Files {
    opened: Vec<File>,
    maps: Vec<Mmap>,
    bytes: u64,
    passes: u64,
}

impl Files {
    pub(super) fn of(directory: &Path) -> Result<Files, String> {
        let paths = paths(directory)?;
        let files = paths.iter().map(open).collect::<Result<Vec<_>, _>>()?;
        let length = length_of(&paths)?;
        let maps = files.iter().map(|file| map(file, length).map_err(at(directory)));
        let maps = maps.collect::<Result<Vec<_>, _>>()?;
        let bytes: u64 = maps.iter().map(|map| map.len() as u64).sum();
        let passes = PASS_BYTES_MIN.div_ceil(bytes.max(1));
        let made = Files { opened: files, maps, bytes, passes };
        // The first pass brings everything into memory and sets the page tables up.
        made.read()?;
        made.copy()?;
        Ok(made)
    }

    fn read(&self) -> Result<f64, String> {
        let mut buffer = vec![0; READ_BYTES];
        let duration = timed(|| {
            for file in (0..self.passes).flat_map(|_| &self.opened) {
                read_all(file, &mut buffer).map_err(|error| format!("reading: {error}"))?;
            }
            Ok(())
        })?;
        Ok(throughput(self.bytes * self.passes, duration))
    }

    /// GB/s of copying out of the mappings.
    pub(super) fn copy(&self) -> Result<f64, String> {
        let mut buffer = vec![0; READ_BYTES];
        let duration = timed(|| {
            for map in (0..self.passes).flat_map(|_| &self.maps) {
                for piece in map.chunks(READ_BYTES) {
                    buffer[..piece.len()].copy_from_slice(piece);
                    std::hint::black_box(&buffer);
                }
            }
            Ok(())
        })?;
        Ok(throughput(self.bytes * self.passes, duration))
    }
}

/// Maps a file whose length is known, as a runtime knows that of its pages: without a length
/// memmap2 asks for it, which is no part of what is measured.
fn map(file: &File, length: usize) -> std::io::Result<Mmap> {
    // SAFETY: the files are those of this run's own temporary directory; nobody truncates them.
    unsafe { MmapOptions::new().len(length).map(file) }
}

/// Reads a whole file; how many bytes it has.
pub(super) fn read_all(file: &File, buffer: &mut [u8]) -> std::io::Result<u64> {
    let mut offset = 0;
    loop {
        match file.read_at(buffer, offset)? {
            0 => return Ok(offset),
            count => offset += count as u64,
        }
    }
}

/// Length of the files of a directory, all of which are pages of one geometry.
fn length_of(paths: &[PathBuf]) -> Result<usize, String> {
    let path = paths.first().ok_or("there is no page to open")?;
    let length = path.metadata().map_err(at(path))?.len();
    usize::try_from(length).map_err(|error| error.to_string())
}

fn open_and_map(paths: &[PathBuf]) -> Result<f64, String> {
    let length = length_of(paths)?;
    let count = OPENS.next_multiple_of(paths.len() as u64);
    let passes = count / paths.len() as u64;
    let duration = timed(|| {
        for path in (0..passes).flat_map(|_| paths) {
            let file = open(path)?;
            let mapped = map(&file, length).map_err(at(path))?;
            std::hint::black_box(mapped.as_ptr());
            drop(mapped);
        }
        Ok(())
    })?;
    Ok(microseconds_each(duration, count))
}

fn open_and_read(paths: &[PathBuf]) -> Result<f64, String> {
    let mut buffer = vec![0; READ_BYTES];
    let mut bytes = 0;
    let duration = timed(|| {
        while bytes < PASS_BYTES_MIN {
            for path in paths {
                bytes += read_all(&open(path)?, &mut buffer).map_err(at(path))?;
            }
        }
        Ok(())
    })?;
    Ok(throughput(bytes, duration))
}

/// Publishing verified pages of 4 MiB by rename.
pub(super) fn publishing(workplace: &Workplace, sizes: &Sizes) -> Result<Vec<Figure>, String> {
    note("publishing pages");
    let pages = Pages::new(Model::Large)?;
    let pages = (0..sizes.published_pages).map(|index| pages.page(0, sizes.large_pages + index));
    let pages = pages.collect::<Result<Vec<_>, _>>()?;
    let kvfs = layer_path(workplace, Model::Large, "s");
    let native = native_path(workplace, Model::Large, "s");
    let rounds = interleave(
        sizes.rounds,
        |_| publish(&kvfs, &pages),
        |_| {
            // The mount's own commit of its last round must not disturb this one.
            open(&kvfs)?.sync_all().map_err(at(&kvfs))?;
            publish(&native, &pages)
        },
    )?;
    Ok(vec![Figure {
        name: "create_write_close_rename_4mib",
        unit: "us",
        better: Better::Lower,
        target: Target::TimesBaseline(1.0 / 0.6),
        values: rounds.kvfs,
        baselines: rounds.native,
    }])
}

/// Publishes and removes again; microseconds for each page.
fn publish(directory: &Path, pages: &[(String, Vec<u8>)]) -> Result<f64, String> {
    settle_memory(pages);
    let duration = timed(|| write_pages(directory, pages, |_| Ok(())))?;
    remove_pages(directory, pages)?;
    Ok(microseconds_each(duration, pages.len() as u64))
}

/// Gives a round of writing the same start as the one before.
pub(super) fn settle_memory(pages: &[(String, Vec<u8>)]) {
    settle(pages.iter().map(|(_, bytes)| bytes.len()).sum());
}

/// The same for a round that writes so many bytes.
pub(super) fn settle(bytes: usize) {
    // What earlier rounds left to be written back would slow this one down.
    nix::unistd::sync();
    // The host of a virtual machine takes free memory back after two seconds, in huge pages, and
    // needs 2 ms to give a MiB again. Whichever side meets that loses by a factor of ten, so both
    // find memory that was in use a moment ago.
    for _ in 0..SETTLE_PASSES_MAX {
        let start = Instant::now();
        let Ok(mut memory) = MmapMut::map_anon(2 * bytes) else { return };
        let _ = memory.advise(Advice::HugePage);
        memory.fill(1);
        std::hint::black_box(&memory);
        if throughput(memory.len() as u64, start.elapsed()) >= SETTLED_GB_PER_S {
            return;
        }
    }
}

/// Writes pages as engines do, under a temporary name; `before_close` may sync.
pub(super) fn write_pages(
    directory: &Path, pages: &[(String, Vec<u8>)],
    before_close: impl Fn(&File) -> std::io::Result<()>,
) -> Result<(), String> {
    for (name, bytes) in pages {
        let temporary = directory.join(".page.tmp");
        let mut file = File::create_new(&temporary).map_err(at(&temporary))?;
        file.write_all(bytes).map_err(at(&temporary))?;
        before_close(&file).map_err(at(&temporary))?;
        // Not by drop: an error of close() is to be seen.
        nix::unistd::close(file).map_err(at(&temporary))?;
        let path = directory.join(name);
        renameat(AT_FDCWD, &temporary, AT_FDCWD, &path).map_err(at(&path))?;
    }
    Ok(())
}

/// Removes what [`write_pages`] wrote.
pub(super) fn remove_pages(directory: &Path, pages: &[(String, Vec<u8>)]) -> Result<(), String> {
    for (name, _) in pages {
        let path = directory.join(name);
        fs::remove_file(&path).map_err(at(&path))?;
    }
    Ok(())
}
