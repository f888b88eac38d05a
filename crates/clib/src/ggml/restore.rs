//! Rows that the engine loads from a slot file, where references stand for pages.
//!
//! A page that a reference names is mapped into the cache, privately: rows that change after that, when
//! positions are shifted or a conversation goes on, are the engine's own copies, and the page stays what
//! it is. Which references are followed is up to the key of the model that `KVFS_MODEL` names.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use kvfs_formats::slot::reference::{KEY_ATTRIBUTE, Key, Reference, is_referred};
use nix::fcntl::{OFlag, open, openat};
use nix::sys::stat::Mode;

use super::rows::Rows;
use crate::page::limits::{MANIFEST_BYTES_READ, PAYLOAD_OFFSET};
use crate::page::names::{MANIFEST, PREFIXES, format_page_of_prefix};
use crate::page::{Layer, Manifest, PrefixHash};
use crate::sys::{extended_attribute, read_no_follow};

/// Most pages that stay open between K and V, and most prefixes between layers: together half of the
/// descriptors that a process usually has.
const OPENED_MAX: usize = 256;

/// The environment variable that names the model whose references are followed.
pub(super) const VARIABLE: &str = "KVFS_MODEL";

/// A model whose references are followed.
#[derive(Debug)]
pub(super) struct Model {
    directory: PathBuf,
    manifest: Manifest,
    key: Key,
    opened: Mutex<Opened>,
}

/// What is needed again soon: slots have K of all layers before V of the first. To open a page by its
/// path is five questions to the daemon, from the directory of its prefix two.
#[derive(Debug, Default)]
struct Opened {
    /// Directories of prefixes that have pages in further layers.
    prefixes: HashMap<PrefixHash, OwnedFd>,
    /// Pages of which K was mapped.
    pages: HashMap<(PrefixHash, u32), File>,
}

impl Model {
    /// Reads manifest and key.
    ///
    /// # Errors
    /// A line that says why it cannot be used.
    pub(super) fn open(directory: &Path) -> Result<Self, String> {
        let fail =
            |why: &dyn std::fmt::Display| format!("{VARIABLE}={}: {why}", directory.display());
        let path = directory.join(MANIFEST);
        let json = read_no_follow(&path, MANIFEST_BYTES_READ);
        let json = json.map_err(|error| fail(&error))?;
        let manifest = Manifest::parse(&json).map_err(|error| fail(&error))?;
        let key = extended_attribute(directory, KEY_ATTRIBUTE).map_err(|error| fail(&error))?;
        let key = key.and_then(|bytes| Key::new(&bytes));
        let key = key.ok_or_else(|| fail(&"no model of a mount: name MOUNT/models/NAME"))?;
        Ok(Self { directory: directory.to_owned(), manifest, key, opened: Mutex::default() })
    }

    /// The page with which rows begin, and where they are in its file.
    fn find(&self, from: &[u8], rows: &Rows<'_>) -> Result<Found, String> {
        let reference = Reference::parse(from, &self.key)?;
        let geometry = self.manifest.geometry();
        let heads = u64::from(geometry.num_kv_heads());
        let row_bytes =
            if reference.is_v { geometry.v_row_bytes() } else { geometry.k_row_bytes() };
        let row_bytes = heads * row_bytes;
        let is_here = (reference.layer, reference.is_v) == (rows.layer, rows.is_v);
        if !is_here || row_bytes != rows.row_bytes as u64 {
            return Err("a reference is of another layer, or of rows of another shape".to_owned());
        }
        let file = self.open_page(&reference)?;
        let k_bytes = geometry.k_bytes(reference.tokens);
        let (before, bytes) = if reference.is_v {
            (k_bytes, geometry.v_bytes(reference.tokens))
        } else {
            (0, k_bytes)
        };
        let bytes = usize::try_from(bytes).map_err(|error| error.to_string())?;
        Ok(Found { reference, file, offset: PAYLOAD_OFFSET + before, bytes })
    }

    fn open_page(&self, reference: &Reference) -> Result<File, String> {
        let mut opened = self.opened();
        let page = (reference.prefix, reference.layer);
        if reference.is_v
            && let Some(file) = opened.pages.remove(&page)
        {
            return Ok(file);
        }
        let path = format_page_of_prefix(reference.prefix, Layer(reference.layer));
        let path = self.directory.join(PREFIXES).join(path);
        let explain = |error: io::Error| format!("{}: {error}", path.display());
        let file = opened.open(reference.prefix, &path).map_err(explain)?;
        let length = file.metadata().map_err(explain)?.len();
        let geometry = self.manifest.layer_geometry(Layer(reference.layer));
        if length != geometry.file_bytes(reference.tokens) {
            return Err(format!("{}: no page of {} tokens", path.display(), reference.tokens));
        }
        Ok(file)
    }

    /// Keeps a page whose V comes later, and nothing of a prefix that was restored.
    fn keep(&self, found: Found) {
        let Reference { prefix, layer, is_v, .. } = found.reference;
        let mut opened = self.opened();
        if is_v {
            if layer + 1 == self.manifest.geometry().num_layers() {
                opened.prefixes.remove(&prefix);
            }
        } else if opened.pages.len() < OPENED_MAX {
            opened.pages.insert((prefix, layer), found.file);
        }
    }

    fn opened(&self) -> MutexGuard<'_, Opened> {
        self.opened.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Opened {
    /// Opens the page of a prefix that has this path.
    fn open(&mut self, prefix: PrefixHash, path: &Path) -> io::Result<File> {
        let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        if !self.prefixes.contains_key(&prefix) && self.prefixes.len() < OPENED_MAX {
            let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
            self.prefixes.insert(prefix, open(parent, flags, Mode::empty())?);
        }
        let Some(directory) = self.prefixes.get(&prefix) else { return File::open(path) };
        let page = openat(directory, name, OFlag::O_RDONLY | OFlag::O_CLOEXEC, Mode::empty())?;
        Ok(File::from(page))
    }
}

/// K, or V, of a page.
struct Found {
    reference: Reference,
    file: File,
    /// Of the rows in the file, and how many bytes they have.
    offset: u64,
    bytes: usize,
}

/// Puts rows of a slot file into a cache, with the pages that they refer to.
///
/// # Errors
/// A line that says what was refused. Rows that were are zero: nobody else's, and no harm to others.
pub(super) fn restore(rows: &Rows<'_>, from: &[u8], model: Option<&Model>) -> Result<(), String> {
    let mut at = 0;
    while is_referred(&from[at..]) {
        match restore_page(rows, at, &from[at..], model) {
            Ok(bytes) => at += bytes,
            Err(why) => {
                rows.zero(at, from.len() - at);
                return Err(format!("{}: {why}: rows of the slot were not loaded", rows.name));
            }
        }
    }
    rows.copy(at, &from[at..]);
    Ok(())
}

/// Puts one page to `at`; returns how many bytes.
fn restore_page(
    rows: &Rows<'_>, at: usize, from: &[u8], model: Option<&Model>,
) -> Result<usize, String> {
    let model = model.ok_or_else(|| format!("a slot of references, and no {VARIABLE}"))?;
    let found = model.find(from, rows)?;
    let (offset, bytes) = (found.offset, found.bytes);
    if bytes > from.len() {
        return Err("a page would be in two places: restore into an empty slot".to_owned());
    }
    // Where OS pages do not fit, or there are too many mappings, it is copied.
    if rows.map(at, &found.file, offset, bytes).is_err() {
        let mut copy = vec![0; bytes];
        found.file.read_exact_at(&mut copy, offset).map_err(|error| error.to_string())?;
        rows.copy(at, &copy);
    }
    model.keep(found);
    Ok(bytes)
}
