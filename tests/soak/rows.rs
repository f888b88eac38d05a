//! Sequences that grow at their end, over the borders of pages, while the daemon is killed: what was
//! synced must be there, byte for byte, as pages, tails and tokens, and nothing that nobody wrote.

use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use kvfs::page::{TokenStart, names, pack_page};

use crate::common::sys::{close, open, sync_directory};
use crate::common::{Model, Mount, fill};
use crate::work::{Worker, count};

const SEQUENCES: usize = 3;
const LAYERS: u32 = 2;
/// A sequence is removed, and begins anew under another name, when it has so many pages.
const PAGES_MAX: u64 = 12;
/// Appended at once to a layer: up to two pages and a half.
const APPENDED_BYTES_MAX: usize = 10_240;

/// How long a stream of bytes must be, and can be: a sync was answered, or it was tried.
#[derive(Clone, Copy, Debug, Default)]
struct Extent {
    acknowledged: u64,
    tried: u64,
}

/// What is known of a sequence: of each layer's rows, and of its tokens behind them.
#[derive(Debug, Default)]
struct Known {
    generation: u64,
    extents: [Extent; LAYERS as usize + 1],
}

/// All sequences that grow.
pub(crate) struct Rows {
    directory: PathBuf,
    model: Model,
    sequences: Vec<Mutex<Known>>,
}

impl Rows {
    pub(crate) fn new(mount: &Mount, model: &Model) -> Rows {
        let directory = model.directory(mount).join(names::SEQUENCES);
        let sequences = (0..SEQUENCES).map(|_| Mutex::default()).collect();
        Rows { directory, model: model.clone(), sequences }
    }

    /// Bytes of the rows of a full page.
    fn page_bytes(&self) -> u64 {
        self.model.row_bytes() as u64 * u64::from(self.model.page_tokens())
    }

    fn sequence(&self, number: usize, generation: u64) -> PathBuf {
        self.directory.join(format!("rows-{number}-{generation}"))
    }

    /// A page and a tail of a layer that begin at a byte of its rows.
    fn names(&self, layer: &Path, at: u64) -> (PathBuf, PathBuf) {
        let start = TokenStart(at / self.model.row_bytes() as u64);
        (layer.join(names::format_page(start)), layer.join(names::format_tail(start)))
    }

    /// How many bytes of rows a layer has: its pages from the first on, then its tail.
    fn rows_length(&self, layer: &Path) -> io::Result<u64> {
        let mut at = 0;
        loop {
            let (page, tail) = self.names(layer, at);
            if length(&page)?.is_none() {
                return Ok(at + length(&tail)?.unwrap_or(0));
            }
            at += self.page_bytes();
        }
    }

    /// While nobody writes: every sequence is as long as it must be, and what was written.
    #[track_caller]
    pub(crate) fn compare_all(&self) {
        for (number, known) in self.sequences.iter().enumerate() {
            let known = known.lock().unwrap();
            let sequence = self.sequence(number, known.generation);
            for (stream, extent) in (0..).zip(known.extents) {
                let seed = seed(number, known.generation, stream);
                let path = sequence.join(name(stream));
                let found = if stream < LAYERS {
                    self.compare_layer(&path, stream, seed)
                } else {
                    let bytes = std::fs::read(&path).or_else(absent_is(Vec::new())).unwrap();
                    assert!(bytes == fill(seed, bytes.len()), "{}: other ids", path.display());
                    bytes.len() as u64
                };
                let expected = extent.acknowledged..=extent.tried;
                assert!(expected.contains(&found), "{}: {found}, {extent:?}", path.display());
            }
        }
    }

    /// Compares all bytes of a layer, and tells how many bytes of rows that are. What lies behind a hole
    /// is seen as well: there is no more in the directory.
    #[track_caller]
    fn compare_layer(&self, layer: &Path, number: u32, seed: u64) -> u64 {
        let length = self.rows_length(layer).unwrap();
        let rows = fill(seed, usize::try_from(length).unwrap());
        let page_bytes = usize::try_from(self.page_bytes()).unwrap();
        let mut files = 0;
        for (at, rows) in (0..).step_by(page_bytes).zip(rows.chunks(page_bytes)) {
            let (page, tail) = self.names(layer, at);
            files += 1;
            if rows.len() < page_bytes {
                let found = std::fs::read(&tail).unwrap();
                assert!(found == rows, "{}: other rows", tail.display());
            } else {
                let found = std::fs::read(&page).unwrap();
                let place = self.model.place(number, at / self.model.row_bytes() as u64);
                let packed = pack_page(&place, rows, self.model.page_tokens()).unwrap();
                assert!(found[4096..] == packed[4096..], "{}: other rows", page.display());
            }
        }
        let listed = std::fs::read_dir(layer).map(Iterator::count).or_else(absent_is(0)).unwrap();
        // The tail behind the last page may be there without a row.
        assert!((files..=files + 1).contains(&listed), "{}: {listed} files", layer.display());
        length
    }

    /// Removes all sequences, also those whose removal a kill undid.
    pub(crate) fn remove_all(&self) {
        for entry in std::fs::read_dir(&self.directory).unwrap() {
            let entry = entry.unwrap();
            if entry.file_name().to_string_lossy().starts_with("rows-") {
                std::fs::remove_dir_all(entry.path()).unwrap();
            }
        }
        sync_directory(&self.directory).unwrap();
    }
}

impl Worker {
    /// Appends to sequences, syncs and removes them.
    pub(crate) fn append(mut self) {
        let soak = Arc::clone(&self.soak);
        while !self.is_over() {
            let _working = soak.pause.read().unwrap();
            let number = self.random.below(SEQUENCES);
            let mut known = soak.rows.sequences[number].lock().unwrap();
            let sequence = soak.rows.sequence(number, known.generation);
            let full = PAGES_MAX * soak.rows.page_bytes();
            if known.extents[0].tried > full {
                *known = Known { generation: known.generation + 1, ..Known::default() };
                let outcome = std::fs::remove_dir_all(&sequence);
                self.note("remove a sequence", outcome, &soak.counts.removed);
                continue;
            }
            let outcome = self.grow(number, &sequence, &mut known);
            let is_there = outcome.is_ok();
            self.note("append", outcome, &soak.counts.appended);
            if is_there && self.random.one_in(3) {
                // Everything is closed: this is a sync of all that happened before.
                let outcome = sync_directory(&sequence);
                if outcome.is_ok() {
                    known.extents.iter_mut().for_each(|extent| extent.acknowledged = extent.tried);
                }
                self.note("sync rows", outcome, &soak.counts.rows_synced);
            }
        }
    }

    /// Appends rows to each layer and then the ids of those that all have. A kill may have taken what was
    /// not synced, so each begins where the mount says that it ends.
    fn grow(&mut self, number: usize, sequence: &Path, known: &mut Known) -> io::Result<()> {
        let soak = Arc::clone(&self.soak);
        let rows = &soak.rows;
        make_directory(sequence)?;
        let mut whole = u64::MAX;
        for layer in 0..LAYERS {
            let path = sequence.join(name(layer));
            make_directory(&path)?;
            let begin = rows.rows_length(&path)?;
            let end = begin + self.random.below(APPENDED_BYTES_MAX) as u64;
            let extent = &mut known.extents[layer as usize];
            assert!(begin >= extent.acknowledged, "{}: {begin}, {extent:?}", path.display());
            extent.tried = extent.tried.max(end);
            let bytes = fill(seed(number, known.generation, layer), usize::try_from(end).unwrap());
            self.append_rows(&path, &bytes, begin)?;
            extent.tried = end;
            whole = whole.min(end / rows.model.row_bytes() as u64);
        }
        let path = sequence.join(names::TOKENS);
        let begin = length(&path)?.unwrap_or(0);
        let end = begin.max(whole * 4);
        let extent = &mut known.extents[LAYERS as usize];
        extent.tried = extent.tried.max(end);
        let ids = fill(seed(number, known.generation, LAYERS), usize::try_from(end).unwrap());
        append_at(&path, &ids[usize::try_from(begin).unwrap()..], begin)?;
        extent.tried = end;
        Ok(())
    }

    /// Appends what `bytes` have from `at` on: an append that crosses a border is refused, so each page
    /// gets one of its own.
    fn append_rows(&self, layer: &Path, bytes: &[u8], mut at: u64) -> io::Result<()> {
        let page_bytes = self.soak.rows.page_bytes();
        while at < bytes.len() as u64 {
            let page = at / page_bytes * page_bytes;
            let end = (page + page_bytes).min(bytes.len() as u64);
            let piece = &bytes[usize::try_from(at).unwrap()..usize::try_from(end).unwrap()];
            append_at(&self.soak.rows.names(layer, page).1, piece, at - page)?;
            if end == page + page_bytes {
                count(&self.soak.counts.sealed);
            }
            at = end;
        }
        Ok(())
    }
}

/// A file that may only grow refuses bytes that are not at its end.
fn append_at(path: &Path, bytes: &[u8], at: u64) -> io::Result<()> {
    let file = open(path, libc::O_WRONLY | libc::O_CREAT)?;
    file.write_all_at(bytes, at)?;
    close(file)
}

fn make_directory(path: &Path) -> io::Result<()> {
    match std::fs::create_dir(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        outcome => outcome,
    }
}

fn length(path: &Path) -> io::Result<Option<u64>> {
    std::fs::metadata(path).map(|found| Some(found.len())).or_else(absent_is(None))
}

fn absent_is<T>(value: T) -> impl FnOnce(io::Error) -> io::Result<T> {
    |error| if error.raw_os_error() == Some(libc::ENOENT) { Ok(value) } else { Err(error) }
}

/// A stream's name in its sequence: the layers, then the tokens.
fn name(stream: u32) -> String {
    if stream < LAYERS {
        names::format_layer(kvfs::page::Layer(stream))
    } else {
        names::TOKENS.to_owned()
    }
}

fn seed(number: usize, generation: u64, stream: u32) -> u64 {
    (number as u64) << 48 | generation << 8 | u64::from(stream)
}
