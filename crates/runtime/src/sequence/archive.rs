//! The state of a sequence as one stream: a tar archive of its files.
//!
//! `manifest.json` comes first and says which model's state it is, `tokens` last and says that it is
//! complete. Shared pages are in it as a whole. Any tar reads it, and one that tar has made of the same
//! files in that order is read here.

use std::ffi::OsString;
use std::fmt;
use std::fs::{self, File};
use std::io::{self, BufWriter, Read, Seek as _, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

use tar::{Archive, Builder, EntryType, Header};

use super::held::{Held, named};
use super::opened::Turn;
use super::rebuild::{Rebuild, is_recurrent};
use super::source::{Listed, attempt};
use super::work::Work;
use super::{SequenceError, Sequences, beside, files, whole};
use crate::page::limits::MANIFEST_BYTES_READ;
use crate::page::names::{self, LayerEntry};
use crate::page::{Layer, Manifest};
use crate::reader::page::Home;
use crate::sys;

impl Sequences {
    /// Writes the state of a sequence. Rows that are appended meanwhile are not in it; where it is changed in another
    /// way, the stream ends before `tokens`.
    ///
    /// # Errors
    /// [`SequenceError::NoSuchSequence`], [`SequenceError::Read`], [`SequenceError::State`] for a
    /// sequence without `tokens`, [`SequenceError::Changed`], and [`SequenceError::Io`] of the sequence or of the stream.
    pub fn state_write(&self, name: &str, to: impl Write) -> Result<(), SequenceError> {
        let turn = self.begin_reading(name)?;
        let to = Target { to, path: Path::new("the stream") };
        turn.write_once(name, to).map_err(|error| named(error, &self.path(name)))
    }

    /// The same into a file with this path, which is written anew where the sequence was changed.
    ///
    /// # Errors
    /// As [`state_write`](Self::state_write); what is in the file is nothing then.
    pub fn state_write_file(
        &self, name: &str, mut to: &File, path: &Path,
    ) -> Result<(), SequenceError> {
        let turn = self.begin_reading(name)?;
        attempt(&self.path(name), || {
            to.set_len(0).and_then(|()| to.rewind()).map_err(SequenceError::io(path))?;
            turn.write_once(name, Target { to: BufWriter::new(to), path })
        })
    }

    /// Makes a sequence of a state, or fills an empty one.
    ///
    /// # Errors
    /// [`SequenceError::Exists`], [`SequenceError::State`] for the state of another model's cache or
    /// a stream that is none, [`SequenceError::Io`], also for pages that the mount refuses. The
    /// sequence is as it was then.
    pub fn state_read(&self, name: &str, from: impl Read) -> Result<(), SequenceError> {
        self.make(name, |work| {
            self.unpack(from, work)?;
            whole::check(work, &self.manifest)?;
            files::sync(work)
        })
    }

    /// Makes a sequence of what `fill` puts into a directory that it is given, or fills an empty one: all of
    /// it or nothing, whatever ends the program. `fill` makes durable what it writes.
    ///
    /// # Errors
    /// [`SequenceError::Exists`], [`SequenceError::Io`], and those of `fill`. The sequence is as it was then.
    pub fn make(
        &self, name: &str, fill: impl FnOnce(&Path) -> Result<(), SequenceError>,
    ) -> Result<(), SequenceError> {
        let turn = self.begin(name)?;
        let there = if turn.has(name)? { Some(turn.list(name)?) } else { None };
        if there.as_ref().is_some_and(|there| there.rows > 0) {
            return Err(SequenceError::Exists(name.to_owned()));
        }
        let like = there.as_ref().map(Listed::directory);
        like.map_or(Ok(()), Held::check_may_change)?;
        let made = Work::make(&turn.directory, name, like);
        let made = made.and_then(|made| made.fill(fill)?.give_away());
        turn.take_over(made, name, there.is_some())
    }

    fn unpack(&self, from: impl Read, to: &Path) -> Result<(), SequenceError> {
        let mut archive = Archive::new(from);
        let (mut is_known, mut is_complete) = (false, false);
        for entry in archive.entries().map_err(|error| broken(&error, is_known))? {
            let mut entry = entry.map_err(|error| broken(&error, is_known))?;
            if entry.header().entry_type().is_dir() {
                continue;
            }
            let path = entry.path().map_err(|error| broken(&error, is_known))?.into_owned();
            if path == Path::new(names::MANIFEST) {
                self.check_manifest(entry)?;
                is_known = true;
                continue;
            }
            if !is_known {
                let why = format!("does not begin with {}", names::MANIFEST);
                return Err(SequenceError::State(why));
            }
            if !entry.header().entry_type().is_file() || !self.is_state_file(&path) {
                let why = format!("{} is no file of a sequence", path.display());
                return Err(SequenceError::State(why));
            }
            let length = entry.size();
            is_complete = path == Path::new(names::TOKENS);
            if is_complete {
                // A mount would refuse others, and not say why.
                whole::ids(length)?;
            }
            if self.unpack_file(&mut entry, &to.join(&path))? < length {
                is_complete = false;
                break;
            }
        }
        if is_complete { Ok(()) } else { Err(SequenceError::State("is not complete".to_owned())) }
    }

    fn check_manifest(&self, from: impl Read) -> Result<(), SequenceError> {
        let mut json = Vec::new();
        let read = from.take(MANIFEST_BYTES_READ).read_to_end(&mut json);
        read.map_err(|error| SequenceError::State(error.to_string()))?;
        let manifest =
            Manifest::parse(&json).map_err(|error| SequenceError::State(error.to_string()))?;
        if manifest.same_cache(&self.manifest) {
            return Ok(());
        }
        let differs = whole::differences(&manifest, &self.manifest);
        Err(SequenceError::State(format!("is of another cache: {differs}")))
    }

    /// What is written under a name of its own appears when it is complete and checked. Returns how
    /// many bytes there were.
    fn unpack_file(&self, from: &mut impl Read, path: &Path) -> Result<u64, SequenceError> {
        let failed = SequenceError::io(path);
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent).map_err(&failed)?;
        }
        let mut name = path.as_os_str().to_owned();
        name.push(".tmp");
        let staging = PathBuf::from(name);
        let mut file = File::create_new(&staging).map_err(&failed)?;
        let length = io::copy(from, &mut file).map_err(&failed)?;
        if self.home == Home::Directory {
            file.sync_all().map_err(&failed)?;
        }
        drop(file);
        files::rename(&staging, path).map(|()| length)
    }

    fn is_state_file(&self, path: &Path) -> bool {
        let parts: Vec<&[u8]> = path
            .components()
            .map(|part| match part {
                Component::Normal(name) => name.as_bytes(),
                _ => b"",
            })
            .collect();
        match parts[..] {
            [name] => {
                name == names::TOKENS.as_bytes()
                    || name == names::POSITIONS.as_bytes()
                    || names::parse_checkpoints(name).is_some()
            }
            [layer, name] => {
                let layers = self.manifest.geometry().num_layers();
                names::parse_layer(layer).is_some_and(|layer| layer.0 < layers)
                    && (is_state(names::layer_entry(name))
                        || names::parse_window_rows(name).is_some())
            }
            _ => false,
        }
    }
}

impl Turn<'_> {
    fn write_once(&self, name: &str, to: Target<'_, impl Write>) -> Result<(), SequenceError> {
        let path = to.path;
        self.write_stream(name, to).map_err(|error| of_target(error, path))
    }

    fn write_stream(&self, name: &str, to: impl Write) -> Result<(), SequenceError> {
        let listed = self.list(name)?;
        if !listed.held().join(names::TOKENS).is_file() {
            let why = format!("{} has no {}", listed.path.display(), names::TOKENS);
            return Err(SequenceError::State(why));
        }
        let (positions, end) = (&listed.listing.positions, listed.rows);
        let from = Rebuild { from: &listed, positions, end, keeps_layers: true };
        let mut archive = Builder::new(to);
        let written = self.write_layers(&from, &mut archive);
        // Before `tokens`, which say that all is there.
        listed.check_grown(&self.all.manifest, end)?;
        written?;
        let ids = from.token_ids()?.ok_or_else(|| listed.changed("its tokens were removed"))?;
        let failed = SequenceError::io(&listed.path);
        append(&mut archive, Path::new(names::TOKENS), &ids).map_err(&failed)?;
        archive.into_inner().and_then(|mut to| to.flush()).map_err(&failed)
    }

    /// All but `tokens`, in the order in which it is read.
    fn write_layers(
        &self, from: &Rebuild<'_>, archive: &mut Builder<impl Write>,
    ) -> Result<(), SequenceError> {
        let failed = SequenceError::io(&from.from.path);
        let manifest = self.all.manifest.to_json();
        append(archive, Path::new(names::MANIFEST), manifest.as_bytes()).map_err(&failed)?;
        if let Some(json) = from.positions.to_json() {
            append(archive, Path::new(names::POSITIONS), json.as_bytes()).map_err(&failed)?;
        }
        for layer in (0..self.all.manifest.geometry().num_layers()).map(Layer) {
            if let Some(directory) = from.from.layer(layer)? {
                directory.within(|path| self.write_layer(from, archive, (layer, path)))?;
            }
        }
        for name in beside::checkpoints(&from.from.held(), from.end)? {
            let path = from.from.held().join(&name);
            append_file(archive, Path::new(&name), &path)?;
        }
        Ok(())
    }

    fn write_layer(
        &self, from: &Rebuild<'_>, archive: &mut Builder<impl Write>,
        (layer, directory): (Layer, &Path),
    ) -> Result<(), SequenceError> {
        let inside = PathBuf::from(names::format_layer(layer));
        let mut append_file = |name: OsString| {
            let path = directory.join(&name);
            append_file(archive, &inside.join(name), &path)
        };
        if is_recurrent(&self.all.manifest, layer) {
            return states(directory, from.end)?.into_iter().try_for_each(append_file);
        }
        let rows = beside::window_rows(directory, &self.all.manifest, layer, from.end)?;
        rows.into_iter().try_for_each(&mut append_file)?;
        let (pages, tail) = from.rows(&self.all.manifest, layer, directory)?;
        pages.into_iter().try_for_each(|page| append_file(names::format_page(page).into()))?;
        let Some((start, rows)) = tail else { return Ok(()) };
        let path = inside.join(names::format_tail(start));
        append(archive, &path, &rows).map_err(SequenceError::io(&from.from.path))
    }
}

/// Where the stream is no archive, or is damaged. What the archive's reader says of a header has its bytes in it, whatever
/// they are: those are nobody's to see. What the file below says is told as it is.
fn broken(error: &io::Error, is_known: bool) -> SequenceError {
    let why = match (error.raw_os_error(), is_known) {
        (Some(_), _) => error.to_string(),
        (None, false) => "it is no archive of a sequence (kvfs seq save writes those)".to_owned(),
        (None, true) => "the archive is damaged, or cut off".to_owned(),
    };
    SequenceError::State(why)
}

/// What a state is written to.
struct Target<'a, W> {
    to: W,
    /// For people.
    path: &'a Path,
}

impl<W: Write> Write for Target<'_, W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.to.write(bytes).map_err(Unwritten::wrap)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.to.flush().map_err(Unwritten::wrap)
    }
}

/// An error of what is written to: one and the same call reads the sequence.
#[derive(Debug)]
struct Unwritten(io::Error);

impl Unwritten {
    fn wrap(error: io::Error) -> io::Error {
        io::Error::new(error.kind(), Self(error))
    }
}

impl fmt::Display for Unwritten {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl std::error::Error for Unwritten {}

/// An error with the path of what is written to, if it is of that.
fn of_target(error: SequenceError, target: &Path) -> SequenceError {
    let SequenceError::Io { path, error } = error else { return error };
    match error.downcast::<Unwritten>() {
        Ok(Unwritten(error)) => SequenceError::Io { path: target.to_owned(), error },
        Err(error) => SequenceError::Io { path, error },
    }
}

fn append(archive: &mut Builder<impl Write>, path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut header = Header::new_gnu();
    header.set_size(bytes.len() as u64);
    header.set_mode(0o644);
    header.set_entry_type(EntryType::Regular);
    archive.append_data(&mut header, path, bytes)
}

/// A file as long as it is now: what is no page may grow meanwhile.
fn append_file(
    archive: &mut Builder<impl Write>, inside: &Path, path: &Path,
) -> Result<(), SequenceError> {
    let failed = SequenceError::io(path);
    let file = sys::open_regular_no_follow(path).map_err(&failed)?;
    let found = file.metadata().map_err(&failed)?;
    let mut header = Header::new_gnu();
    header.set_metadata(&found);
    let mut bytes = file.take(found.len());
    archive.append_data(&mut header, inside, &mut bytes).map_err(&failed)?;
    if bytes.limit() == 0 {
        return Ok(());
    }
    // The stream is none any more, whatever follows.
    let shorter = io::Error::new(io::ErrorKind::UnexpectedEof, "became shorter while it was read");
    Err(failed(shorter))
}

/// What a recurrent layer was after rows up to `end`, in order.
fn states(directory: &Path, end: u64) -> Result<Vec<OsString>, SequenceError> {
    beside::wanted(
        directory,
        |name| matches!(names::layer_entry(name), LayerEntry::State(tokens) if tokens.0 <= end),
    )
}

fn is_state(entry: LayerEntry) -> bool {
    matches!(entry, LayerEntry::Page(_) | LayerEntry::Tail(_) | LayerEntry::State(_))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_archive_is_told_without_what_is_in_it() {
        let other = b"root:x:0:0:root:/root:\x1b[31m/bin/sh\n".repeat(40);
        let mut entries = Archive::new(&other[..]);
        let error = entries.entries().unwrap().next().unwrap().err().unwrap();
        assert!(error.to_string().contains("root"), "{error}");
        let told = broken(&error, false).to_string();
        assert_eq!(
            told,
            "state of a sequence: it is no archive of a sequence (kvfs seq save writes those)"
        );
        let told = broken(&error, true).to_string();
        assert_eq!(told, "state of a sequence: the archive is damaged, or cut off");
        let disk = io::Error::from_raw_os_error(libc::EIO);
        assert!(broken(&disk, false).to_string().ends_with(&disk.to_string()));
    }
}
