//! `slots/NAME.bin` and `.bin4`: a sequence as llama.cpp's slot file of version 3 and 4, made of its pages
//! while it is read. In `NAME.ref` and `.ref4` references stand in the place of the rows of whole pages:
//! an engine with the backend maps those, instead of reading them. There is little in such a file, so it
//! is made when it is opened where the kernel can read it by itself (`slot_file`).
//!
//! Nothing is kept: the head is made when the file is opened, rows are gathered page by page. The
//! bytes are those that `kvfs export` writes, so an engine restores a conversation from pages without
//! knowing of them. Only what slots can say has a file: attention in every
//! layer, and no token moved.

use std::sync::{Arc, Mutex, PoisonError};

use super::access::Readers;
use super::index::TOKEN_BYTES;
use super::slot_file::SlotFile;
use crate::fs::transfer::copy_text;
use crate::fs::{FileSystem, FsError};
use crate::ggml::slot::reference::{Key, REFERENCE_BYTES, Reference};
use crate::ggml::slot::{Format, Head, Layout, Part, Version, write_tensor_head};
use crate::ingest::model::Model;
use crate::page::names::{REFERENCES_4_SUFFIX, REFERENCES_SUFFIX, SLOT_4_SUFFIX, SLOT_SUFFIX};
use crate::page::{
    Geometry, Layer, LayerKind, Layout as PageLayout, Manifest, PageView, PrefixHash, TokenStart,
    names,
};
use crate::store::disk::DiskFile;
use crate::store::record::{InodeId, Time};

/// Tokens of a slot that can be opened: as long as a prompt may be.
const TOKENS_MAX: u64 = 4 << 20;

/// What a slot is made to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
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
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct SlotKey {
    pub(super) model: InodeId,
    /// Its directory.
    pub(super) sequence: InodeId,
    pub(super) kind: Kind,
    ids: u32,
    cells: u32,
    /// When its ids were written: `(seconds, nanoseconds)`.
    written: (i64, u32),
}

/// An open slot.
#[derive(Debug)]
pub(in crate::fs) struct OpenSlot {
    rules: Arc<Model>,
    sequence: InodeId,
    /// Who could open it.
    readers: Readers,
    format: Format,
    layout: Layout,
    head: Vec<u8>,
    references: Option<References>,
    /// The page that was read last: readers go on where they were.
    page: Mutex<Option<Page>>,
    /// Where the kernel reads it.
    file: Option<Arc<SlotFile>>,
    /// Counted.
    _open: Arc<()>,
}

/// What references of a slot are made of.
#[derive(Debug)]
struct References {
    key: Key,
    /// Of the whole pages.
    prefixes: Vec<PrefixHash>,
}

/// A page, or the rows of a tail.
#[derive(Debug)]
struct Page {
    layer: u32,
    start: u64,
    bytes: Vec<u8>,
    is_tail: bool,
}

/// A stretch of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stretch {
    /// What stands before rows, and references.
    AtHand(u64),
    /// Zeros in the place of rows that are referred to.
    Zeros(u64),
    /// Rows that are read from pages.
    Rows(u64),
}

/// What a slot is made of.
pub(super) struct SlotShape {
    rules: Arc<Model>,
    key: SlotKey,
    format: Format,
    layout: Layout,
}

impl SlotShape {
    pub(super) fn length(&self) -> u64 {
        self.layout.length()
    }
}

impl FileSystem {
    /// The slot that a name in `slots/` means, if there can be one.
    pub(super) fn slot_named(
        &self, model: InodeId, name: &str,
    ) -> Result<Option<SlotKey>, FsError> {
        let Some((name, kind)) = Kind::of_name(name) else { return Ok(None) };
        let sequence = {
            let state = self.state();
            let Some(all) = state.entry(model, names::SEQUENCES.as_bytes())? else {
                return Ok(None);
            };
            state.entry(all.inode, name.as_bytes())?
        };
        let Some(sequence) = sequence.filter(|entry| entry.file_type == libc::S_IFDIR) else {
            return Ok(None);
        };
        let shape = self.slot_now(model, sequence.inode, kind)?;
        Ok(shape.map(|shape| shape.key))
    }

    /// What a slot is made of, also when there is another one by now.
    pub(super) fn slot_shape(&self, key: SlotKey) -> Result<SlotShape, FsError> {
        let rules = self.model_of(&mut self.state(), key.model).map_err(|_| FsError::Stale)?;
        let format = Format::of_version(&rules.manifest, key.kind.version);
        let format = format.map_err(|_| FsError::Stale)?;
        let layout = Layout::new(&format, key.kind.version, key.ids, key.cells);
        Ok(SlotShape { rules, key, format, layout })
    }

    /// What the slot of a sequence has now; nothing, if it cannot be one.
    fn slot_now(
        &self, model: InodeId, sequence: InodeId, kind: Kind,
    ) -> Result<Option<SlotShape>, FsError> {
        let Ok(rules) = self.model_of(&mut self.state(), model) else { return Ok(None) };
        let geometry = *rules.manifest.geometry();
        let stands = self.positions_of(sequence)?;
        let is_plain = stands.is_some_and(|positions| positions.is_plain());
        if !is_plain || !is_of_slots(&rules.manifest) {
            return Ok(None);
        }
        if kind.has_references && !has_contiguous_rows(&geometry) {
            return Ok(None);
        }
        let (bytes, written) = self.size_and_time(sequence, names::TOKENS)?;
        let known = bytes / TOKEN_BYTES as u64;
        let cells = self.present_tokens(&rules, sequence, known)?;
        let ids = kind.version.ids(known, cells);
        let (Ok(ids), Ok(cells)) = (u32::try_from(ids), u32::try_from(cells)) else {
            return Ok(None);
        };
        let written = (written.seconds, written.nanoseconds);
        let key = SlotKey { model, sequence, kind, ids, cells, written };
        let Some(format) =
            Format::of_version(&rules.manifest, kind.version).ok().filter(|_| ids > 0)
        else {
            return Ok(None);
        };
        let layout = Layout::new(&format, kind.version, ids, cells);
        Ok(Some(SlotShape { rules, key, format, layout }))
    }

    /// Length of a file in a directory; 0 without one.
    pub(super) fn file_bytes(&self, directory: InodeId, name: &str) -> Result<u64, FsError> {
        self.size_and_time(directory, name).map(|(size, _)| size)
    }

    fn size_and_time(&self, directory: InodeId, name: &str) -> Result<(u64, Time), FsError> {
        let state = self.state();
        let Some(entry) = state.entry(directory, name.as_bytes())? else {
            return Ok((0, Time::default()));
        };
        let attributes = state.attributes(&self.store, entry.inode)?;
        Ok((attributes.size, attributes.mtime))
    }

    /// Opens the slot of a virtual inode.
    pub(super) fn open_slot(
        &self, id: InodeId, key: SlotKey, open: Arc<()>,
    ) -> Result<OpenSlot, FsError> {
        let now = self.slot_now(key.model, key.sequence, key.kind)?;
        // The kernel looks the name up again.
        let shape = now.filter(|shape| shape.key == key).ok_or(FsError::Stale)?;
        if u64::from(key.ids) > TOKENS_MAX {
            return Err(FsError::TooLarge);
        }
        let sequence = key.sequence;
        let readers = self.slot_readers(&shape, sequence)?;
        let tokens = self.whole_file((sequence, names::TOKENS), readers)?;
        let ids = tokens.ok_or(FsError::Stale)?;
        let references = if key.kind.has_references {
            let prefixes = whole_pages(&shape, &ids);
            Some(References { key: self.slot_key(key.model)?, prefixes })
        } else {
            None
        };
        let ids = ids.chunks_exact(TOKEN_BYTES).take(key.ids as usize);
        let ids: Vec<u32> =
            ids.map(|id| u32::from_le_bytes([id[0], id[1], id[2], id[3]])).collect();
        let mut head = Vec::new();
        let (version, cells) = (key.kind.version, key.cells);
        Head { version, tokens: &ids, cells, is_transposed: false, session: None }
            .write(&mut head, &shape.format)?;
        let mut slot = OpenSlot {
            rules: shape.rules,
            sequence,
            readers,
            format: shape.format,
            layout: shape.layout,
            head,
            references,
            page: Mutex::default(),
            file: None,
            _open: open,
        };
        slot.file = self.slot_file(id, &slot)?;
        Ok(slot)
    }

    /// Fills `buffer` with what a slot has at `offset`; returns how much.
    pub(in crate::fs) fn read_slot(
        &self, slot: &OpenSlot, offset: u64, buffer: &mut [u8],
    ) -> Result<usize, FsError> {
        let mut filled = 0;
        while filled < buffer.len() {
            let Some((part, rest)) = slot.layout.part(offset + filled as u64) else { break };
            let rest = usize::try_from(rest).unwrap_or(usize::MAX);
            let count = rest.min(buffer.len() - filled);
            let to = &mut buffer[filled..filled + count];
            filled += match part {
                Part::Head { at } => copy_text(&slot.head, at, to),
                Part::TensorHead { is_v, at } => {
                    let mut head = Vec::new();
                    write_tensor_head(&mut head, &slot.format, is_v)?;
                    copy_text(&head, at, to)
                }
                Part::Rows { layer, is_v, at } => self.read_rows(slot, (layer, is_v), at, to)?,
            };
        }
        Ok(filled)
    }

    /// Copies rows of K or V of one page, from byte `at` of those of the layer on.
    fn read_rows(
        &self, slot: &OpenSlot, (layer, is_v): (u32, bool), at: u64, to: &mut [u8],
    ) -> Result<usize, FsError> {
        let geometry = slot.rules.manifest.geometry();
        let row_bytes = slot.layout.row_bytes(is_v);
        let token = at / row_bytes;
        let start = token - token % u64::from(geometry.page_tokens());
        let place = (layer, is_v);
        if let Some(count) = slot.read_reference(place, start, at - start * row_bytes, to) {
            return Ok(count);
        }
        let mut known = slot.page.lock().unwrap_or_else(PoisonError::into_inner);
        if known.as_ref().is_none_or(|page| (page.layer, page.start) != (layer, start)) {
            *known = Some(self.slot_page(slot, layer, start)?);
        }
        let Some(page) = known.as_ref() else { return Err(FsError::Stale) };
        let rows = page.rows(geometry)?;
        let end = start + u64::from(geometry.page_tokens());
        let mut filled = 0;
        let mut row = Vec::new();
        for token in token..end {
            if filled == to.len() {
                break;
            }
            row.clear();
            rows.push(token - start, is_v, &mut row)?;
            let skip = (at + filled as u64) % row_bytes;
            filled += copy_text(&row, skip, &mut to[filled..]);
        }
        Ok(filled)
    }

    fn slot_page(&self, slot: &OpenSlot, layer: u32, start: u64) -> Result<Page, FsError> {
        let directory = {
            let state = self.state();
            let name = names::format_layer(Layer(layer));
            state.entry(slot.sequence, name.as_bytes())?.ok_or(FsError::Stale)?.inode
        };
        let start_token = TokenStart(start);
        let page = names::format_page(start_token);
        let page = self.whole_file((directory, &page), slot.readers)?;
        let is_tail = page.is_none();
        let bytes = if let Some(bytes) = page {
            bytes
        } else {
            let tail = names::format_tail(start_token);
            let tail = self.whole_file((directory, &tail), slot.readers)?;
            tail.ok_or(FsError::Stale)?
        };
        Ok(Page { layer, start, bytes, is_tail })
    }

    /// Whom the slot of a sequence lets in.
    pub(super) fn slot_readers(
        &self, shape: &SlotShape, sequence: InodeId,
    ) -> Result<Readers, FsError> {
        self.state().readers_of_layers(sequence, shape.rules.manifest.geometry())
    }

    /// The bytes of a file that all readers of the slot may read, from whichever tier, checked as
    /// for everybody.
    pub(super) fn whole_file(
        &self, (directory, name): (InodeId, &str), readers: Readers,
    ) -> Result<Option<Vec<u8>>, FsError> {
        let (inode, size) = {
            let state = self.state();
            let Some(entry) = state.entry(directory, name.as_bytes())? else { return Ok(None) };
            if !readers.may_read(&state.inode(entry.inode)?) {
                return Err(FsError::NotPermitted);
            }
            (entry.inode, state.attributes(&self.store, entry.inode)?.size)
        };
        let handle = self.open_file(inode, libc::O_RDONLY)?.handle;
        let mut bytes = vec![0; usize::try_from(size).map_err(|_| FsError::TooLarge)?];
        let outcome = self.read(handle, 0, &mut bytes);
        self.release(handle)?;
        bytes.truncate(outcome?);
        Ok(Some(bytes))
    }
}

/// Whether slots have all that sequences of the model keep.
pub(super) fn is_of_slots(manifest: &Manifest) -> bool {
    let kind = |layer| manifest.layer_kind(Layer(layer));
    let layers = 0..manifest.geometry().num_layers();
    layers.map(kind).all(|kind| matches!(kind, Some(LayerKind::Attention)))
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

impl OpenSlot {
    /// Where the kernel reads it, if it does.
    pub(in crate::fs) fn file(&self) -> Option<&Arc<dyn DiskFile>> {
        self.file.as_ref().map(|slot| &slot.file)
    }

    pub(super) fn length(&self) -> u64 {
        self.layout.length()
    }

    /// Whether references stand for pages.
    pub(super) fn is_of_references(&self) -> bool {
        self.references.is_some()
    }

    /// Whether what lies there needs no page.
    pub(super) fn is_at_hand(&self, offset: u64, length: u64) -> bool {
        let end = offset.saturating_add(length);
        self.stretches(offset)
            .take_while(|(at, _)| *at < end)
            .all(|(_, stretch)| !matches!(stretch, Stretch::Rows(_)))
    }

    /// What it is made of from `offset` on, and where that begins.
    pub(super) fn stretches(&self, offset: u64) -> impl Iterator<Item = (u64, Stretch)> {
        let mut next = offset;
        std::iter::from_fn(move || {
            let at = next;
            let stretch = self.stretch(at)?;
            let (Stretch::AtHand(length) | Stretch::Zeros(length) | Stretch::Rows(length)) =
                stretch;
            next += length;
            Some((at, stretch))
        })
    }

    fn stretch(&self, offset: u64) -> Option<Stretch> {
        let (part, rest) = self.layout.part(offset)?;
        let Part::Rows { is_v, at, .. } = part else { return Some(Stretch::AtHand(rest)) };
        let pages = self.references.as_ref().map_or(0, |references| references.prefixes.len());
        let row_bytes = self.layout.row_bytes(is_v);
        let page_bytes = u64::from(self.rules.manifest.geometry().page_tokens()) * row_bytes;
        if at >= pages as u64 * page_bytes {
            return Some(Stretch::Rows(rest));
        }
        let filled = Reference::filled_bytes(row_bytes).min(page_bytes);
        Some(match at % page_bytes {
            at if at < filled => Stretch::AtHand(filled - at),
            at => Stretch::Zeros(page_bytes - at),
        })
    }

    /// Fills `to` with what stands for a page's rows, from byte `at` on; returns how much. Nothing, if
    /// its rows are to be read.
    fn read_reference(
        &self, (layer, is_v): (u32, bool), start: u64, at: u64, to: &mut [u8],
    ) -> Option<usize> {
        let References { key, prefixes } = self.references.as_ref()?;
        let tokens = self.rules.manifest.geometry().page_tokens();
        let page = usize::try_from(start / u64::from(tokens)).ok()?;
        let reference = Reference { prefix: *prefixes.get(page)?, layer, is_v, tokens };
        let row_bytes = self.layout.row_bytes(is_v);
        let rest = u64::from(tokens) * row_bytes - at;
        let count = usize::try_from(rest).unwrap_or(usize::MAX).min(to.len());
        reference.write(key, row_bytes, at, &mut to[..count]);
        Some(count)
    }
}

/// The rows of a page.
enum Rows<'p> {
    Page(PageView<'p>, u32),
    /// Each K, then V; bytes of K, and of both.
    Tail(&'p [u8], usize, usize),
}

impl Page {
    /// Its header is read once, not for each row.
    fn rows(&self, geometry: &Geometry) -> Result<Rows<'_>, FsError> {
        let heads = geometry.num_kv_heads();
        if self.is_tail {
            let k_bytes = usize::try_from(u64::from(heads) * geometry.k_row_bytes());
            let row_bytes = usize::try_from(geometry.row_bytes());
            let (Ok(k_bytes), Ok(row_bytes)) = (k_bytes, row_bytes) else {
                return Err(FsError::TooLarge);
            };
            return Ok(Rows::Tail(&self.bytes, k_bytes, row_bytes));
        }
        let page = PageView::parse(&self.bytes, geometry).map_err(|_| FsError::Stale)?;
        Ok(Rows::Page(page, heads))
    }
}

impl Rows<'_> {
    /// Appends K, or V, of a token: `[kv_heads, head_dim]`.
    fn push(&self, token: u64, is_v: bool, to: &mut Vec<u8>) -> Result<(), FsError> {
        match self {
            Self::Tail(bytes, k_bytes, row_bytes) => {
                let token = usize::try_from(token).map_err(|_| FsError::TooLarge)?;
                let row = bytes.chunks_exact(*row_bytes).nth(token).ok_or(FsError::Stale)?;
                to.extend_from_slice(if is_v { &row[*k_bytes..] } else { &row[..*k_bytes] });
            }
            Self::Page(page, heads) => {
                let token = u32::try_from(token).map_err(|_| FsError::TooLarge)?;
                if token >= page.tokens() {
                    return Err(FsError::Stale);
                }
                for head in 0..*heads {
                    to.extend_from_slice(if is_v {
                        page.v_row(head, token)
                    } else {
                        page.k_row(head, token)
                    });
                }
            }
        }
        Ok(())
    }
}
