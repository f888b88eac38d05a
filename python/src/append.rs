//! Rows that are added to a sequence: whole pages as files, the rest to the tails, token ids last.
//!
//! Until the ids are there the rows count for nobody, so a process that dies half-way has added nothing; whoever
//! appends next takes out what it left ([`Sequences::trim`]). One writer at a time has a lock on `tokens`. Tails
//! stay open from one call to the next: opening a file costs as much as writing a row to it.

use std::fs::{self, File, TryLockError};
use std::io::{self, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use kvfs_page::names::{self, TOKENS};
use kvfs_page::{Layer, LayerKind, Manifest, PagePlace, TokenStart, pack_page};
use kvfs_runtime::sequence::Sequences;

use crate::errors::Failure;
use crate::fork::Process;
use crate::rows::Rows;

const ID_BYTES: u64 = size_of::<u32>() as u64;

/// The right to add to a sequence.
#[derive(Debug)]
pub(crate) struct Appender {
    manifest: Manifest,
    path: PathBuf,
    process: Process,
    tokens: File,
    inode: u64,
    layers: Vec<OpenLayer>,
    /// The row that comes next.
    next: u64,
}

#[derive(Debug)]
struct OpenLayer {
    layer: Layer,
    tail: Option<(u64, File)>,
}

impl Appender {
    pub(crate) fn open(sequences: &Sequences, name: &str) -> Result<Self, Failure> {
        let path = sequences.path(name);
        let mut tokens = lock_tokens(&path)?;
        // Of a writer that did not come to its end. The directory is another one then.
        if sequences.trim(name)? {
            tokens = lock_tokens(&path)?;
        }
        let manifest = sequences.manifest().clone();
        let (_, next) = sequences.positions(name)?;
        let inode = tokens.metadata().map_err(Failure::io(&path))?.ino();
        if next == 0 {
            for layer in (0..manifest.geometry().num_layers()).map(Layer) {
                make_layer(&path.join(names::format_layer(layer)))?;
            }
        }
        let layers = (0..manifest.geometry().num_layers()).map(Layer).filter(|layer| {
            let kind = manifest.layer_kind(*layer);
            kind.as_ref().is_some_and(LayerKind::has_rows_of_tokens)
        });
        let layers = layers.map(|layer| OpenLayer { layer, tail: None }).collect();
        Ok(Self { manifest, path, process: Process::this(), tokens, inode, layers, next })
    }

    /// Whether the sequence is still the directory that was opened: an operation on it makes another one.
    pub(crate) fn is_current(&self) -> bool {
        let now = fs::metadata(self.path.join(TOKENS));
        now.is_ok_and(|now| now.ino() == self.inode && now.len() == self.next * ID_BYTES)
    }

    /// Adds rows of the layers that keep any, and returns how many tokens there are then.
    pub(crate) fn append(&mut self, ids: &[u32], layers: &[Rows<'_>]) -> Result<u64, Failure> {
        if layers.len() != self.layers.len() {
            return Err(Failure::argument(format!(
                "K and V of {} layers: this model keeps {}",
                layers.len(),
                self.layers.len()
            )));
        }
        for (open, rows) in self.layers.iter().zip(layers) {
            rows.check_side(open.layer, &self.manifest)?;
            let tokens = [Some(rows.k.tokens), rows.v.map(|v| v.tokens), rows.side_tokens()];
            if let Some(found) = tokens.into_iter().flatten().find(|tokens| *tokens != ids.len()) {
                return Err(Failure::argument(format!("{} token ids and {found} rows", ids.len())));
            }
        }
        for (open, rows) in self.layers.iter_mut().zip(layers) {
            open.append(&self.path, &self.manifest, self.next, rows)?;
        }
        let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        let path = self.path.join(TOKENS);
        self.tokens.write_all_at(&bytes, self.next * ID_BYTES).map_err(refused_write(&path))?;
        self.next += ids.len() as u64;
        Ok(self.next)
    }
}

impl Drop for Appender {
    fn drop(&mut self) {
        // A child of this process has the same lock, and leaves it alone.
        if self.process == Process::this() {
            let _ = self.tokens.unlock();
        }
    }
}

impl OpenLayer {
    fn append(
        &mut self, sequence: &Path, manifest: &Manifest, begin: u64, rows: &Rows<'_>,
    ) -> Result<(), Failure> {
        let page_tokens = u64::from(manifest.geometry().page_tokens());
        let row_bytes = manifest.layer_geometry(self.layer).row_bytes();
        let directory = sequence.join(names::format_layer(self.layer));
        let end = begin + rows.k.tokens as u64;
        let index = |row: u64| usize::try_from(row - begin).unwrap_or(usize::MAX);
        let mut at = begin;
        while at < end {
            let start = at / page_tokens * page_tokens;
            let stop = end.min(start + page_tokens);
            if at == start && stop == start + page_tokens {
                let place = PagePlace::new(manifest, self.layer, TokenStart(start))?;
                let path = directory.join(names::format_page(TokenStart(start)));
                write_page(&path, &place, rows, index(at), index(stop))?;
            } else {
                let path = directory.join(names::format_tail(TokenStart(start)));
                let tail = self.tail(&path, start)?;
                let bytes = rows.gather(index(at), index(stop));
                // At the place where it belongs: the mount refuses it (EPERM) if somebody else was there.
                tail.write_all_at(&bytes, (at - start) * row_bytes)
                    .map_err(refused_write(&path))?;
                if stop == start + page_tokens {
                    self.tail = None;
                }
            }
            at = stop;
        }
        Ok(())
    }

    fn tail(&mut self, path: &Path, start: u64) -> Result<&File, Failure> {
        if self.tail.as_ref().is_none_or(|(open, _)| *open != start) {
            let options = File::options().write(true).create(true).truncate(false).open(path);
            self.tail = Some((start, options.map_err(Failure::io(path))?));
        }
        self.tail.as_ref().map(|(_, file)| file).ok_or_else(|| Failure::changed("already closed"))
    }
}

/// A sequence that lost all of its tokens, and each copy of it, has lost the directories of its layers as well.
fn make_layer(directory: &Path) -> Result<(), Failure> {
    match fs::create_dir(directory) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            Err(Failure::io(directory)(error))
        }
        _ => Ok(()),
    }
}

/// What a write to a tail or to `tokens` says.
fn refused_write(path: &Path) -> impl Fn(io::Error) -> Failure {
    move |error| {
        if error.raw_os_error() == Some(libc::EPERM) {
            return Failure::busy(format!(
                "{}: somebody else has appended to this sequence: copy it, or let one of you write",
                path.display()
            ));
        }
        Failure::io(path)(error)
    }
}

fn lock_tokens(sequence: &Path) -> Result<File, Failure> {
    let path = sequence.join(TOKENS);
    let failed = Failure::io(&path);
    // Never made here: without it rows count without ids, and an empty one would say that there are none.
    let file = File::options().read(true).write(true).open(&path).map_err(&failed)?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => Err(Failure::busy(format!(
            "{}: another writer appends to this sequence: wait for it, or append to a copy",
            sequence.display()
        ))),
        Err(TryLockError::Error(error)) => Err(failed(error)),
    }
}

/// Writes a page of some tokens: under another name, which it loses when all of it is there.
pub(crate) fn write_page(
    path: &Path, place: &PagePlace, rows: &Rows<'_>, first: usize, end: usize,
) -> Result<(), Failure> {
    let tokens = u32::try_from(end - first).unwrap_or(u32::MAX);
    let page_tokens = place.geometry().page_tokens();
    if tokens == 0 || tokens > page_tokens {
        return Err(Failure::argument(format!(
            "{tokens} tokens: a page here has 1 to {page_tokens}"
        )));
    }
    let others = [rows.v.map(|v| v.tokens), rows.side_tokens()];
    if others.into_iter().flatten().any(|tokens| tokens != rows.k.tokens) {
        return Err(Failure::argument("K, V and side rows have not as many tokens"));
    }
    let bytes = pack_page(place, &rows.gather(first, end), tokens)?;
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let staging = path.with_file_name(format!(".{name}.{}.tmp", std::process::id()));
    if let Some(directory) = path.parent().filter(|_| place.start().0 == 0) {
        make_layer(directory)?;
    }
    let written = File::create(&staging).and_then(|mut file| file.write_all(&bytes));
    let outcome = written.map_err(Failure::io(&staging)).and_then(|()| {
        // Closed by now: a file that somebody may still write is not published.
        publish(&staging, path).map_err(Failure::io(path))
    });
    if outcome.is_err() {
        // Best effort: what failed first is what to tell.
        let _ = fs::remove_file(&staging);
    }
    outcome
}

#[expect(
    clippy::disallowed_methods,
    reason = "a client of the mount publishes by rename, as every writer does"
)]
pub(crate) fn publish(from: &Path, to: &Path) -> io::Result<()> {
    fs::rename(from, to)
}

/// Adds ids whose rows are there.
pub(crate) fn append_ids(sequence: &Path, ids: &[u32]) -> Result<(), Failure> {
    let mut file = lock_tokens(sequence)?;
    let path = sequence.join(TOKENS);
    let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
    file.seek(SeekFrom::End(0)).map_err(Failure::io(&path))?;
    file.write_all(&bytes).map_err(refused_write(&path))
}
