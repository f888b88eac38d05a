//! `slots/NAME.bin` and `.bin4`: a sequence as llama.cpp's slot file of version 3 and 4, made of its pages
//! while it is read. In `NAME.ref` and `.ref4` references stand in the place of the rows of whole pages:
//! an engine with the backend maps those, instead of reading them. There is little in such a file, so it
//! is made when it is opened where the kernel can read it by itself (`slot_file`).
//!
//! Nothing is kept: the head is made when the file is opened, rows are gathered page by page. The
//! bytes are those that `kvfs export` writes, so an engine restores a conversation from pages without
//! knowing of them. Only what slots can say has a file: layers that see everything, layers with one window, states that
//! the manifest describes, and no token moved. References are for the first of these alone.
//!
//! Here is which slot a name means, and what is known of it once it is open; `read` reads it.

mod marks;
mod read;

use std::sync::{Arc, Mutex};

use super::access::{Files, Readers};
use super::find::{Finder, Question};
use super::index::TOKEN_BYTES;
use super::key::key_of;
use super::shares::Share;
use super::slot_file::{SlotFile, SlotFiles};
use crate::core::Core;
use crate::core::state::State;
use crate::{FileSystem, FsError};
use kvfs_page::names::{REFERENCES_4_SUFFIX, REFERENCES_SUFFIX, SLOT_4_SUFFIX, SLOT_SUFFIX};
use kvfs_page::{Geometry, Layer, Layout as PageLayout, PrefixHash, TokenStart, names};
use kvfs_storage::ingest::model::Model;
use kvfs_storage::store::metadata::watches::Watch;
use kvfs_storage::store::record::{InodeId, Time};

use kvfs_formats::slot::reference::{Key, REFERENCE_BYTES};
use kvfs_formats::slot::{Format, Head, Layout, Version};
use marks::Marks;
use read::Page;
pub(super) use read::Stretch;

/// Tokens of a slot that can be opened: as long as a prompt may be.
const TOKENS_MAX: u64 = 4 << 20;

/// What a slot is made to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Kind {
    pub(super) version: Version,
    /// Whether references stand for pages.
    has_references: bool,
}

impl Kind {
    /// The kind that a name is of, and the rest of it.
    pub(super) fn of_name(name: &str) -> Option<(&str, Self)> {
        let kinds = Version::ALL.into_iter().flat_map(|version| {
            [false, true].map(|has_references| Self { version, has_references })
        });
        kinds.into_iter().find_map(|kind| Some((name.strip_suffix(kind.suffix())?, kind)))
    }

    /// What names of this kind end in.
    pub(super) fn suffix(self) -> &'static str {
        match (self.version, self.has_references) {
            (Version::Three, false) => SLOT_SUFFIX,
            (Version::Four, false) => SLOT_4_SUFFIX,
            (Version::Three, true) => REFERENCES_SUFFIX,
            (Version::Four, true) => REFERENCES_4_SUFFIX,
        }
    }
}

/// A slot as it is at some time: when its sequence has grown, or is another one, so is the slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct SlotKey {
    pub(super) model: InodeId,
    /// Its directory.
    pub(super) sequence: InodeId,
    pub(super) kind: Kind,
    ids: u32,
    cells: u32,
    /// Bytes of what a server keeps to go back to earlier tokens.
    checkpoints: u64,
    /// When its ids were written: `(seconds, nanoseconds)`.
    written: (i64, u32),
}

/// An open slot.
#[derive(Debug)]
pub(crate) struct OpenSlot {
    rules: Arc<Model>,
    sequence: InodeId,
    /// The directories of its layers.
    layers: Vec<Option<InodeId>>,
    /// Whether files in them were replaced, removed or changed since.
    watch: Watch,
    /// Who could open it.
    readers: Readers,
    /// Flags of open(2): whether what is read of it was used.
    flags: i32,
    layout: Layout,
    /// What stands before the tensors of each cache.
    heads: Vec<Vec<u8>>,
    /// What must stay what it was, beside pages and tails.
    marks: Marks,
    cells: u32,
    references: Option<References>,
    /// The page that was read last: readers go on where they were.
    page: Mutex<Option<Page>>,
    /// Where the kernel reads it.
    file: Option<Arc<SlotFile>>,
    /// Counted.
    _open: Share,
}

/// What references of a slot are made of.
#[derive(Debug)]
struct References {
    key: Key,
    /// Of the whole pages.
    prefixes: Vec<PrefixHash>,
}

/// What a slot is made of.
pub(super) struct SlotShape {
    rules: Arc<Model>,
    key: SlotKey,
    format: Format,
    layout: Layout,
}

impl SlotShape {
    /// What a slot is made of, also when there is another one by now.
    pub(super) fn of(core: &Core, key: SlotKey) -> Result<SlotShape, FsError> {
        let rules = core.model_of(&mut core.state(), key.model).map_err(|_| FsError::Stale)?;
        let format = Format::of_version(&rules.manifest, key.kind.version);
        let format = format.map_err(|_| FsError::Stale)?;
        let layout = Layout::new(&format, key.kind.version, key.ids, key.cells)
            .with_checkpoints(key.checkpoints);
        Ok(SlotShape { rules, key, format, layout })
    }

    /// Whom the slot lets in.
    pub(super) fn readers(&self, core: &Core) -> Result<Readers, FsError> {
        core.state().readers_of_layers(self.key.sequence, self.rules.manifest.geometry())
    }

    pub(super) fn length(&self) -> u64 {
        self.layout.length()
    }
}

impl State {
    /// The directory of a model's sequence of this name.
    fn sequence_named(&self, model: InodeId, name: &str) -> Result<Option<InodeId>, FsError> {
        let Some(all) = self.entry(model, names::SEQUENCES.as_bytes())? else {
            return Ok(None);
        };
        let entry = self.entry(all.inode, name.as_bytes())?;
        Ok(entry.filter(|entry| entry.file_type == libc::S_IFDIR).map(|entry| entry.inode))
    }

    /// The directories of a sequence's layers, as far as they are there, whose first `tokens` are watched from now on.
    fn watch_layers(
        &mut self, sequence: InodeId, geometry: &Geometry, tokens: u32,
    ) -> Result<(Vec<Option<InodeId>>, Watch), FsError> {
        let mut layers = Vec::new();
        for layer in (0..geometry.num_layers()).map(Layer) {
            let entry = self.entry(sequence, names::format_layer(layer).as_bytes())?;
            layers.push(entry.map(|entry| entry.inode));
        }
        let there = layers.iter().copied().flatten();
        let watch = self.metadata.watches.watch(there, u64::from(tokens));
        Ok((layers, watch))
    }
}

/// What finds slots, opens and reads them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Slots<'a> {
    pub(super) core: &'a Core,
    pub(super) slot_files: &'a SlotFiles,
    finder: Finder<'a>,
    files: &'a dyn Files,
}

impl FileSystem {
    pub(crate) fn slots(&self) -> Slots<'_> {
        let slot_files = &self.prefixes.slot_files;
        Slots { core: &self.core, slot_files, finder: self.finder(), files: self }
    }
}

impl Slots<'_> {
    /// The slot that a name in `slots/` means, if there can be one.
    pub(super) fn named(&self, model: InodeId, name: &str) -> Result<Option<SlotKey>, FsError> {
        let Some((name, kind)) = Kind::of_name(name) else { return Ok(None) };
        let mut sequence = self.core.state().sequence_named(model, name)?;
        while let Some(found) = sequence {
            if let Some(shape) = self.slot_now(model, found, kind)? {
                return Ok(Some(shape.key));
            }
            // One that is saved takes the place of another in one step: that one may have gone while it was looked at.
            sequence = self.core.state().sequence_named(model, name)?.filter(|now| *now != found);
        }
        Ok(None)
    }

    /// What the slot of a sequence has now; nothing, if it cannot be one.
    fn slot_now(
        &self, model: InodeId, sequence: InodeId, kind: Kind,
    ) -> Result<Option<SlotShape>, FsError> {
        let Ok(rules) = self.core.model_of(&mut self.core.state(), model) else { return Ok(None) };
        let geometry = *rules.manifest.geometry();
        let stands = self.finder.positions_of(sequence)?;
        let is_plain = stands.is_some_and(|positions| positions.is_plain());
        let Ok(format) = Format::of_version(&rules.manifest, kind.version) else {
            return Ok(None);
        };
        if !is_plain
            || kind.has_references && !(format.is_plain() && has_contiguous_rows(&geometry))
        {
            return Ok(None);
        }
        let (bytes, written) = size_and_time(self.core, sequence, names::TOKENS)?;
        let known = bytes / TOKEN_BYTES as u64;
        // Of which tokens a state is can be told by these alone.
        let prompt = if rules.manifest.describes_states() {
            self.files.whole_file((sequence, names::TOKENS), Readers::NOBODY)?.unwrap_or_default()
        } else {
            Vec::new()
        };
        let question = Question::new(model, Arc::clone(&rules), &prompt);
        let cells = self.finder.present_tokens(&question, sequence, known)?;
        let ids = kind.version.ids(known, cells);
        let (Ok(ids), Ok(cells)) = (u32::try_from(ids), u32::try_from(cells)) else {
            return Ok(None);
        };
        let written = (written.seconds, written.nanoseconds);
        if ids == 0 || cells == 0 && !format.is_plain() {
            return Ok(None);
        }
        let checkpoints = match (kind.version, format.is_plain()) {
            (Version::Four, false) => {
                let name = names::format_checkpoints(TokenStart(cells.into()));
                size_and_time(self.core, sequence, &name)?.0
            }
            _ => 0,
        };
        let key = SlotKey { model, sequence, kind, ids, cells, checkpoints, written };
        let layout = Layout::new(&format, kind.version, ids, cells).with_checkpoints(checkpoints);
        Ok(Some(SlotShape { rules, key, format, layout }))
    }

    /// Opens the slot of a virtual inode.
    pub(super) fn open(
        &self, id: InodeId, (key, flags): (SlotKey, i32), open: Share,
    ) -> Result<OpenSlot, FsError> {
        let rules = SlotShape::of(self.core, key)?.rules;
        let geometry = rules.manifest.geometry();
        let (layers, watch) = self.core.state().watch_layers(key.sequence, geometry, key.cells)?;
        let marks = Marks::of(self.core, &rules.manifest, (key.sequence, &layers), key.cells)?;
        let now = self.slot_now(key.model, key.sequence, key.kind)?;
        // The kernel looks the name up again.
        let shape = now.filter(|shape| shape.key == key).ok_or(FsError::Stale)?;
        if u64::from(key.ids) > TOKENS_MAX {
            return Err(FsError::TooLarge);
        }
        let sequence = key.sequence;
        let (seconds, nanoseconds) = key.written;
        let written = Time { seconds, nanoseconds };
        let readers = shape.readers(self.core)?;
        let tokens = self.files.whole_file((sequence, names::TOKENS), readers)?;
        // What was written since `slot_now` looked is of another slot.
        let is_same = size_and_time(self.core, sequence, names::TOKENS)?.1 == written;
        let ids = tokens.filter(|_| is_same).ok_or(FsError::Stale)?;
        if ids.len() / TOKEN_BYTES < key.ids as usize {
            return Err(FsError::Stale);
        }
        self.note_use_of_sequence(sequence, flags)?;
        let references = if key.kind.has_references {
            let prefixes = whole_pages(&shape, &ids);
            Some(References { key: key_of(self.core, key.model)?, prefixes })
        } else {
            None
        };
        let ids = ids.chunks_exact(TOKEN_BYTES).take(key.ids as usize);
        let ids: Vec<u32> =
            ids.map(|id| u32::from_le_bytes([id[0], id[1], id[2], id[3]])).collect();
        let (version, cells) = (key.kind.version, key.cells);
        let head = Head { version, tokens: &ids, cells, is_transposed: false, session: None };
        let heads = (0..shape.format.caches().count()).map(|number| {
            let mut bytes = Vec::new();
            head.write_number(&mut bytes, &shape.format, number).map(|()| bytes)
        });
        let heads = heads.collect::<Result<_, _>>()?;
        let mut slot = OpenSlot {
            rules: shape.rules,
            sequence,
            layers,
            watch,
            readers,
            flags,
            layout: shape.layout,
            heads,
            marks,
            cells,
            references,
            page: Mutex::default(),
            file: None,
            _open: open,
        };
        slot.file = self.in_memory(id, &slot)?;
        Ok(slot)
    }

    /// Whether the rows of a slot behind its references lie in pages that only the remote has: those are
    /// read when it is opened.
    pub(super) fn last_rows_are_away(&self, key: SlotKey) -> Result<bool, FsError> {
        if !key.kind.has_references {
            return Ok(false);
        }
        let rules = SlotShape::of(self.core, key)?.rules;
        let geometry = rules.manifest.geometry();
        let start = u64::from(key.cells - key.cells % geometry.page_tokens());
        for layer in (0..geometry.num_layers()).map(Layer) {
            if self.page_is_away(key.sequence, layer, start)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Whoever opens a slot uses its sequence: what it is told by is the one file that no other sequence has. Pages, tails
    /// and states are used when they are read, one by one.
    fn note_use_of_sequence(&self, sequence: InodeId, flags: i32) -> Result<(), FsError> {
        let tokens = self.core.state().entry(sequence, names::TOKENS.as_bytes())?;
        if let Some(entry) = tokens {
            self.files.note_use_of(entry.inode, flags);
        }
        Ok(())
    }
}

/// Length of a file in a directory, and when it was changed; 0 without one.
pub(super) fn size_and_time(
    core: &Core, directory: InodeId, name: &str,
) -> Result<(u64, Time), FsError> {
    let state = core.state();
    let Some(entry) = state.entry(directory, name.as_bytes())? else {
        return Ok((0, Time::default()));
    };
    let attributes = state.attributes(&core.store, entry.inode)?;
    Ok((attributes.size, attributes.mtime))
}

/// Whether rows of a page lie in it as an engine has them, with room for a reference.
fn has_contiguous_rows(geometry: &Geometry) -> bool {
    let tokens = geometry.page_tokens();
    let bytes = geometry.k_bytes(tokens).min(geometry.v_bytes(tokens));
    geometry.layout() == PageLayout::Nhd && bytes >= REFERENCE_BYTES as u64
}

/// Prefix hashes of the pages of a slot that are whole.
fn whole_pages(shape: &SlotShape, ids: &[u8]) -> Vec<PrefixHash> {
    let page_tokens = shape.rules.manifest.geometry().page_tokens();
    let pages = ids.chunks_exact(page_tokens as usize * TOKEN_BYTES);
    let mut last = shape.rules.manifest.prefix_root();
    let hashes = pages.map(|page| *last.insert(PrefixHash::next(last, page)));
    hashes.take((shape.key.cells / page_tokens) as usize).collect()
}
