//! A sequence as it was listed, and whether it still is that one.
//!
//! Others may write meanwhile: an engine appends without waiting for anybody, and a slot that is saved takes the place of a
//! sequence. So whoever has read looks again at the end. The directory stays open until then, so that no other
//! can have its inode number.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use super::SequenceError;
use super::held::{Held, named};
use crate::page::{Layer, Manifest, TokenStart, names};
use crate::reader::ReadError;
use crate::reader::listing::{self, ListedLayer, Listing, layer_directory};
use crate::sys;

/// Times that an operation begins, at most, on a sequence that others change.
pub(super) const ATTEMPTS: u32 = 5;

/// Between two of them, so that an append can come to its end.
const PAUSE: Duration = Duration::from_millis(5);

/// An append that has not come to its end after so long is one that was interrupted.
pub(super) const APPEND: Duration = Duration::from_millis(50);

/// A sequence as it was listed.
#[derive(Debug)]
pub(super) struct Listed<'a> {
    pub(super) path: PathBuf,
    pub(super) listing: Listing,
    /// Tokens whose rows and ids are there.
    pub(super) rows: u64,
    name: OsString,
    above: &'a Held,
    directory: Held,
    marks: Marks,
}

/// What tells one state of a sequence from another, beside its listing.
#[derive(Debug, PartialEq, Eq)]
struct Marks {
    /// Device and inode.
    directory: (u64, u64),
    /// Inode and length.
    tokens: Option<(u64, u64)>,
    layers: Vec<LayerMarks>,
}

#[derive(Debug, PartialEq, Eq)]
struct LayerMarks {
    directory: Option<u64>,
    /// Inode and length.
    tail: Option<(u64, u64)>,
}

impl<'a> Listed<'a> {
    /// Looks at what has a name in that directory.
    pub(super) fn look(
        above: &'a Held, name: impl AsRef<OsStr>, manifest: &Manifest,
    ) -> Result<Self, SequenceError> {
        let name = name.as_ref();
        let path = above.known_path(name);
        let is_none = |error: &SequenceError| matches!(error, SequenceError::Io { error, .. } if error.kind() == io::ErrorKind::NotADirectory);
        let directory = match above.open_inside(name) {
            Ok(Some(directory)) => directory,
            Ok(None) => return Err(SequenceError::NoSuchSequence(path)),
            Err(error) if is_none(&error) => return Err(SequenceError::NoSuchSequence(path)),
            Err(error) => return Err(error),
        };
        // Of this directory, also where another one takes its name meanwhile.
        let held = directory.path();
        let listing = listing::list(&held, manifest)?;
        let rows = listing.valid_tokens(&held, manifest)?;
        let layers = (0..).map(Layer).zip(&listing.layers);
        let layers = layers.map(|(layer, listed)| LayerMarks::of(&held, layer, listed));
        let marks = Marks {
            directory: directory.identity()?,
            tokens: mark(&held.join(names::TOKENS))?,
            layers: layers.collect::<Result<_, _>>()?,
        };
        let name = name.to_owned();
        Ok(Self { path, listing, rows, name, above, directory, marks })
    }

    /// A path that leads into this directory, whatever has its name by now.
    pub(super) fn held(&self) -> PathBuf {
        self.directory.path()
    }

    pub(super) fn directory(&self) -> &Held {
        &self.directory
    }

    /// The directory of one of its layers, if it is there.
    pub(super) fn layer(&self, layer: Layer) -> Result<Option<Held>, SequenceError> {
        self.directory.open_inside(names::format_layer(layer))
    }

    /// Fails unless what has its name by now is this sequence, and nothing in it has changed.
    pub(super) fn check_same(&self, manifest: &Manifest) -> Result<(), SequenceError> {
        self.check_same_as(&self.name, manifest)
    }

    /// The same of another name.
    pub(super) fn check_same_as(
        &self, name: &OsStr, manifest: &Manifest,
    ) -> Result<(), SequenceError> {
        let now = self.look_again(name, manifest)?;
        self.check_equal(&now)
    }

    /// Fails if rows or files of them are others in another look at it.
    pub(super) fn check_equal(&self, now: &Self) -> Result<(), SequenceError> {
        if self.listing.layers == now.listing.layers && self.marks == now.marks {
            return Ok(());
        }
        Err(self.changed("somebody appended to it"))
    }

    /// Fails unless its first `end` rows are still there as they were listed: more may have come.
    pub(super) fn check_grown(&self, manifest: &Manifest, end: u64) -> Result<Self, SequenceError> {
        let now = self.look_again(&self.name, manifest)?;
        let tokens = match (self.marks.tokens, now.marks.tokens) {
            (Some(old), Some(new)) => old.0 == new.0 && old.1 <= new.1,
            (old, new) => old.is_none() && new.is_none(),
        };
        let layers = self.listing.layers.iter().zip(&self.marks.layers);
        let mut pairs = layers.zip(now.listing.layers.iter().zip(&now.marks.layers));
        if tokens && pairs.all(|(old, new)| has_grown(old, new, end)) {
            return Ok(now);
        }
        Err(self.changed("files of it were replaced or removed"))
    }

    /// As [`check_same`](Self::check_same), whatever its positions are by now.
    pub(super) fn check_rows(&self, manifest: &Manifest) -> Result<(), SequenceError> {
        self.check_equal(&Self::look(self.above, &self.name, manifest)?)
    }

    fn look_again(&self, name: &OsStr, manifest: &Manifest) -> Result<Self, SequenceError> {
        let now = match Self::look(self.above, name, manifest) {
            Err(SequenceError::NoSuchSequence(_)) => return Err(self.changed("it was removed")),
            outcome => outcome?,
        };
        if now.marks.directory != self.marks.directory {
            return Err(self.changed("another sequence took its place"));
        }
        if now.listing.positions != self.listing.positions {
            return Err(self.changed("its positions were edited"));
        }
        Ok(now)
    }

    /// Whether every layer has the same rows, and `tokens` the ids of all of them: nobody is in the middle of an append.
    pub(super) fn is_whole(&self, manifest: &Manifest) -> Result<bool, SequenceError> {
        let keeps = |layer: u32| listing::keeps_pages(manifest, Layer(layer));
        let mut layers = (0..).zip(&self.listing.layers).filter(|(layer, _)| keeps(*layer));
        let ids = listing::token_ids(&self.held())?;
        Ok(layers.all(|(_, layer)| layer.end == self.rows)
            && ids.is_none_or(|ids| ids == self.rows))
    }

    pub(super) fn changed(&self, what: &str) -> SequenceError {
        let name = self.name.to_string_lossy().into_owned();
        SequenceError::Changed { name, attempts: 1, what: what.to_owned() }
    }
}

impl LayerMarks {
    fn of(sequence: &Path, layer: Layer, listed: &ListedLayer) -> Result<Self, SequenceError> {
        let path = layer_directory(sequence, layer);
        let tail = match listed.tail {
            None => None,
            Some(start) => mark(&path.join(names::format_tail(start)))?,
        };
        Ok(Self { directory: mark(&path)?.map(|mark| mark.0), tail })
    }
}

/// Inode and length, if it is there.
fn mark(path: &Path) -> Result<Option<(u64, u64)>, SequenceError> {
    match sys::metadata_no_follow(path) {
        Ok(found) => Ok(Some((found.ino(), found.len()))),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(SequenceError::io(path)(error)),
    }
}

/// Whether a layer has the same first `end` rows, in the same files but for a tail that became a page.
fn has_grown(
    (old, old_marks): (&ListedLayer, &LayerMarks), (new, new_marks): (&ListedLayer, &LayerMarks),
    end: u64,
) -> bool {
    let page_at = |start: TokenStart| {
        let found = new.pages.binary_search_by_key(&start, |page| page.start);
        found.ok().map(|index| new.pages[index].inode)
    };
    let tail = match old.tail.filter(|start| start.0 < end) {
        None => true,
        Some(start) if new.tail == Some(start) => match (old_marks.tail, new_marks.tail) {
            (Some(old), Some(new)) => old.0 == new.0 && old.1 <= new.1,
            _ => false,
        },
        Some(start) => page_at(start).is_some(),
    };
    let mut pages = old.pages.iter().filter(|page| page.start.0 < end);
    let directory = old_marks.directory.is_none() || old_marks.directory == new_marks.directory;
    directory && tail && pages.all(|page| page_at(page.start) == Some(page.inode))
}

/// Begins again where somebody changed the sequence at `path`, but not for ever.
pub(super) fn attempt<T>(
    path: &Path, mut once: impl FnMut() -> Result<T, SequenceError>,
) -> Result<T, SequenceError> {
    let (mut last, mut absent) = (String::new(), 0);
    for attempt in 0..ATTEMPTS {
        thread::sleep(PAUSE * attempt);
        match once().map_err(|error| named(error, path)) {
            Err(error) if is_change(&error) => {
                let what = match &error {
                    SequenceError::Changed { what, .. } => what.clone(),
                    other => other.to_string(),
                };
                let is_same = is_absent(&error) && (attempt == 0 || what == last);
                absent += u32::from(is_same);
                if absent == ATTEMPTS {
                    // Nobody changes anything: that file has a name, and cannot be opened.
                    return Err(error);
                }
                last = what;
            }
            outcome => return outcome,
        }
    }
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    Err(SequenceError::Changed { name, attempts: ATTEMPTS, what: last })
}

/// Whether a file that was listed is not there.
fn is_absent(error: &SequenceError) -> bool {
    match error {
        SequenceError::Io { error, .. } | SequenceError::Read(ReadError::Io { error, .. }) => {
            error.kind() == io::ErrorKind::NotFound
        }
        _ => false,
    }
}

/// Whether somebody has changed what was being read.
fn is_change(error: &SequenceError) -> bool {
    match error {
        SequenceError::Changed { attempts, .. } => *attempts < ATTEMPTS,
        SequenceError::Io { error, .. } | SequenceError::Read(ReadError::Io { error, .. }) => {
            error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(libc::ESTALE)
        }
        SequenceError::Read(ReadError::Changed(_)) => true,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_cannot_be_opened_is_no_change() {
        let sequence = Path::new("/mnt/models/m/sequences/chat");
        let absent = |name: &str| SequenceError::Io {
            path: sequence.join(name),
            error: io::Error::from_raw_os_error(libc::ENOENT),
        };
        let told = attempt(sequence, || Err::<(), _>(absent("tokens"))).unwrap_err().to_string();
        assert!(told.starts_with("/mnt/models/m/sequences/chat/tokens: "), "{told}");
        let mut names = ["a", "b"].iter().cycle();
        let others = attempt(sequence, || Err::<(), _>(absent(names.next().unwrap())));
        assert!(matches!(others, Err(SequenceError::Changed { attempts: ATTEMPTS, .. })));
    }
}
