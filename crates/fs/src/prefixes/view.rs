//! What `prefixes/` and `slots/` look like from outside.
//!
//! The directories take owner and permissions from the model's. Pages are the inodes of the
//! sequence that has them, so they are opened, mapped and cached as there.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::block::{BlockDirectory, BlockKey};
use super::find::{Finder, Indexed, PrefixPage};
use super::query::Query;
use super::slot::{SlotShape, Slots};
use super::slot_draft::SlotSaving;
use super::{Prefixes, Virtual, is_virtual};
use crate::attributes::{Attributes, Caller, Found, Place};
use crate::core::Core;
use crate::core::handle::{Handle, Served};
use crate::core::waits::Awaited;
use crate::create::Created;
use crate::foreign::Adoption;
use crate::list::{Listed, Listing};
use crate::lookup::Lookup;
use crate::opened::{Opened, OpenedBy};
use crate::{FileSystem, FsError, batch, views};
use kvfs_page::block_map::parse_block;
use kvfs_page::{Layer, PrefixHash, names};
use kvfs_storage::store::record::{DirectoryClass, InodeId};

/// What a read answers before it has bytes to give.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answers {
    /// A question that may have to ask the remote, or rows of a slot.
    Question,
    /// A question about many names, which asks this machine alone.
    Batch,
}

/// Looks at a slot that is replaced again and again while it is looked at.
const LOOKS_MAX: usize = 16;

/// `prefixes/`, `slots/` and `blocks/` of all models.
#[derive(Clone, Copy, Debug)]
pub struct VirtualDirectories<'a> {
    pub(super) core: &'a Core,
    pub(super) prefixes: &'a Prefixes,
    pub(super) finder: Finder<'a>,
    pub(super) indexed: &'a dyn Indexed,
    blocks: BlockDirectory<'a>,
    slots: Slots<'a>,
    saving: SlotSaving<'a>,
    pub(super) adoption: Adoption<'a>,
}

impl FileSystem {
    /// `prefixes/`, `slots/` and `blocks/` of all models.
    pub fn virtual_directories(&self) -> VirtualDirectories<'_> {
        VirtualDirectories {
            core: &self.core,
            prefixes: &self.prefixes,
            finder: self.finder(),
            indexed: self,
            blocks: BlockDirectory::of(self),
            slots: self.slots(),
            saving: SlotSaving::of(self),
            adoption: self.adoption(),
        }
    }
}

impl VirtualDirectories<'_> {
    /// Whether looking up a name in a directory, or listing it, has to wait, and for what.
    pub fn waits_to_look(&self, directory: InodeId) -> Option<Awaited> {
        if !is_virtual(directory) {
            return None;
        }
        if self.must_adopt_to_list(directory) {
            return Some(Awaited::Remote);
        }
        if let Ok(Virtual::Slots(model)) = self.prefixes.meaning_of(directory) {
            // What a slot has is told by files of its sequence: of which tokens its states are by all of `tokens`, which
            // only the remote may have.
            let model = self.core.model_of(&mut self.core.state(), model);
            let has_states = model.is_ok_and(|model| model.manifest.describes_states());
            let is_remote = has_states
                && self.finder.residency.tiers.is_some_and(|tiers| tiers.exchange.is_some());
            return Some(if is_remote { Awaited::Remote } else { Awaited::Reading });
        }
        let (is_behind, is_pending) = {
            let state = self.core.state();
            (!state.metadata.unindexed.is_empty(), !state.pending.is_empty())
        };
        let is_up_to_date = || self.prefixes.turn.try_lock().is_ok_and(|turn| turn.is_noted);
        let waits = is_behind || is_pending || !is_up_to_date();
        waits.then_some(Awaited::Local)
    }

    /// Finds a name in a model's directory that is virtual, or in a virtual directory.
    pub(crate) fn lookup(&self, parent: InodeId, name: &[u8]) -> Result<Option<Lookup>, FsError> {
        for _ in 1..LOOKS_MAX {
            match self.look_once(parent, name) {
                Err(FsError::Stale) => {}
                outcome => return outcome,
            }
        }
        self.look_once(parent, name)
    }

    /// The same. What was found may be gone before it is known what it is: that is stale.
    fn look_once(&self, parent: InodeId, name: &[u8]) -> Result<Option<Lookup>, FsError> {
        let absent = Ok(Some(Lookup::Absent { stable: false }));
        let text = std::str::from_utf8(name).unwrap_or_default();
        let found = if super::is_virtual(parent) {
            match self.prefixes.meaning_of(parent)? {
                Virtual::Root(model) if name == b"match" => Virtual::Match(model),
                Virtual::Root(model) => match shard(text) {
                    Some(shard) => Virtual::Shard(model, shard),
                    None => return absent,
                },
                Virtual::Shard(..) if self.indexed.prepare_to_find().is_err() => return absent,
                Virtual::Shard(model, shard) => match text.parse::<PrefixHash>() {
                    Ok(hash) if hash.0[0] == shard => {
                        let is_there = self.finder.pages_of_prefix(model, hash)?.is_some()
                            || self.finder.is_elsewhere(model, hash);
                        self.note_prefix(model, is_there);
                        if !is_there {
                            return absent;
                        }
                        Virtual::Prefix(model, hash)
                    }
                    _ => return absent,
                },
                Virtual::Prefix(model, hash) => return self.lookup_page(model, hash, name),
                Virtual::Slots(model) => match self.slots.named(model, text)? {
                    Some(key) => Virtual::Slot(key),
                    None => return absent,
                },
                Virtual::Blocks(model) => match self.blocks.named(model, text)? {
                    Some(key) => Virtual::Block(key),
                    None => return absent,
                },
                Virtual::Match(_)
                | Virtual::Slot(..)
                | Virtual::NewSlot(..)
                | Virtual::Block(_) => {
                    return Err(FsError::NotDirectory);
                }
            }
        } else {
            let is_root = is_prefix_name(self.core, &Place { parent, name: name.to_vec() });
            match root(parent, name).filter(|_| is_root) {
                Some(found) => found,
                None => return Ok(None),
            }
        };
        let id = self.prefixes.numbers().hold(found);
        let attributes =
            self.attributes(id).inspect_err(|_| self.prefixes.numbers().forget(id, 1))?;
        Ok(Some(Lookup::Found(Found { attributes, name_is_stable: false })))
    }

    /// Whether a user is shown what was found. What he may not read in `slots/` and `blocks/` is not there for him:
    /// lengths and hashes tell of conversations. Where a group may read a slot, only the kernel knows who is in it, so
    /// the slot is shown to all, and read by those.
    pub(crate) fn shows(&self, found: &Attributes, caller: Caller) -> Result<bool, FsError> {
        let id = found.inode;
        if caller.uid == 0 || !super::is_virtual(id) {
            return Ok(true);
        }
        let is_shown = match self.prefixes.meaning_of(id)? {
            Virtual::Slot(_) => {
                let is_shared = found.mode & 0o044 != 0;
                is_shared || found.uid == caller.uid && found.mode & 0o400 != 0
            }
            Virtual::Block(key) => self.blocks.shows(key, caller)?,
            _ => true,
        };
        if !is_shown {
            self.prefixes.numbers().forget(id, 1);
        }
        Ok(is_shown)
    }

    /// Whether the pages of a virtual directory must come from another store first.
    pub(super) fn must_adopt_to_list(&self, id: InodeId) -> bool {
        match self.prefixes.meaning_of(id) {
            Ok(Virtual::Prefix(model, hash)) => {
                matches!(self.finder.pages_of_prefix(model, hash), Ok(None))
                    && self.finder.is_elsewhere(model, hash)
            }
            _ => false,
        }
    }

    /// Somebody has looked for a prefix by its hash: for the tokens of its last page.
    fn note_prefix(&self, model: InodeId, is_there: bool) {
        let rules = self.core.model_of(&mut self.core.state(), model);
        let tokens = rules.map_or(0, |rules| rules.manifest.geometry().page_tokens());
        self.core.hits.note_prefix(model, is_there);
        self.core.observer.looked_for_prefix(tokens.into(), is_there);
    }

    /// Finds the page of a layer that ends a prefix.
    fn lookup_page(
        &self, model: InodeId, hash: PrefixHash, name: &[u8],
    ) -> Result<Option<Lookup>, FsError> {
        let pages = self.pages_of(model, hash)?;
        let page = pages.iter().find(|page| page_name(page.layer).as_bytes() == name);
        let Some(PrefixPage { entry, directory, .. }) = page else {
            return Ok(Some(Lookup::Absent { stable: false }));
        };
        let mut state = self.core.state();
        let attributes = state.attributes(&self.core.store, entry.inode)?;
        let node = state.nodes.entry(entry.inode).or_default();
        node.lookups += 1;
        node.found_in = Some(*directory);
        Ok(Some(Lookup::Found(Found { attributes, name_is_stable: false })))
    }

    /// What `stat` shows.
    pub(crate) fn attributes(&self, id: InodeId) -> Result<Attributes, FsError> {
        let meaning = self.prefixes.meaning_of(id)?;
        let model = self.core.state().inode(meaning.model())?;
        let readable = model.mode & 0o444;
        let is_file = matches!(
            meaning,
            Virtual::Match(_) | Virtual::Slot(..) | Virtual::NewSlot(..) | Virtual::Block(_)
        );
        let (mut uid, mut gid, mut size) = (model.uid, model.gid, 0);
        let mut slot_readers = 0;
        if let Virtual::Slot(key) = meaning {
            let shape = SlotShape::of(self.core, key)?;
            let readers = shape.readers(self.core);
            let readers = readers.map_err(FsError::after_lookup)?;
            (uid, gid, slot_readers) = (readers.uid, readers.gid, readers.bits);
            size = shape.length();
        }
        let is_sticky = model.mode & 0o1000 != 0;
        if let Virtual::Block(key) = meaning {
            size = self.blocks.text(key)?.len() as u64;
            if is_sticky {
                uid = self.blocks.owner_of(key).unwrap_or(uid);
            }
        }
        Ok(Attributes {
            inode: id,
            file_type: if is_file { libc::S_IFREG } else { libc::S_IFDIR },
            // Who may look may ask.
            mode: match meaning {
                Virtual::Match(_) => readable | readable >> 1,
                // Its owner may put another one in its place.
                Virtual::Slot(..) => slot_readers | (slot_readers & 0o400) >> 1,
                // Who may change what is in the model's directory may, but for what a sticky bit keeps.
                Virtual::Block(_) if is_sticky => 0o600 | model.mode & 0o044,
                Virtual::Block(_) | Virtual::NewSlot(..) => model.mode & 0o666,
                // Or the kernel would let nobody ask anything of it; who may is for the daemon to say.
                Virtual::Prefix(..) => model.mode & 0o555 | readable >> 1,
                Virtual::Blocks(_) => model.mode & 0o1777,
                Virtual::Slots(_) => model.mode & 0o777,
                _ => model.mode & 0o555,
            },
            links: if is_file { 1 } else { 2 },
            uid,
            gid,
            size,
            blocks: size.div_ceil(512),
            is_at_rest: false,
            ..Attributes::of_record(id, &model)
        })
    }

    /// Lists a virtual directory: only that of a prefix shows what is in it.
    pub(crate) fn list(
        &self, id: InodeId, offset: u64, listing: Listing,
        mut emit: impl FnMut(&Listed<'_>) -> bool,
    ) -> Result<(), FsError> {
        let pages = match self.prefixes.meaning_of(id)? {
            Virtual::Prefix(model, hash) => self.pages_of(model, hash)?,
            Virtual::Match(_) | Virtual::Slot(..) | Virtual::NewSlot(..) | Virtual::Block(_) => {
                return Err(FsError::NotDirectory);
            }
            Virtual::Root(_) | Virtual::Shard(..) | Virtual::Slots(_) | Virtual::Blocks(_) => {
                Vec::new()
            }
        };
        let dots = [".", ".."].map(|name| (name.to_owned(), id, libc::S_IFDIR));
        let pages = pages
            .into_iter()
            .map(|page| (page_name(page.layer), page.entry.inode, page.entry.file_type));
        for (index, (name, inode, file_type)) in (0_u64..).zip(dots.into_iter().chain(pages)) {
            if index < offset {
                continue;
            }
            let mut state = self.core.state();
            let shows = listing == Listing::Attributes && inode != id;
            let attributes =
                shows.then(|| state.attributes(&self.core.store, inode)).transpose()?;
            let line = Listed {
                next_offset: index + 1,
                name: name.as_bytes(),
                inode,
                file_type,
                attributes,
                name_is_stable: false,
            };
            if !emit(&line) {
                break;
            }
            if shows {
                state.nodes.entry(inode).or_default().lookups += 1;
            }
        }
        Ok(())
    }

    /// Opens `prefixes/match`, a slot or a block.
    pub(crate) fn open(&self, id: InodeId, flags: i32, caller: Caller) -> Result<Opened, FsError> {
        let writes = flags & libc::O_ACCMODE != libc::O_RDONLY;
        let meaning = self.prefixes.meaning_of(id)?;
        if let Virtual::Block(key) = meaning {
            return if writes {
                self.blocks.open_draft(id, key, caller)
            } else {
                self.blocks.open(id, key)
            };
        }
        if let Virtual::Slot(key) = meaning
            && writes
            && flags & libc::O_TRUNC != 0
        {
            return self.saving.open_replacing(id, key, caller);
        }
        let open = self.prefixes.queries.take(caller.uid, 1).ok_or(FsError::TryAgain)?;
        let served = match meaning {
            Virtual::Match(model) => {
                let held = self.prefixes.prompt_bytes.take(caller.uid, 0);
                let held = held.ok_or(FsError::NoRoom)?;
                Served::Query(Arc::new(Query::new(model, held, open)))
            }
            Virtual::Slot(..) if writes => return Err(FsError::NotPermitted),
            Virtual::Slot(key) => {
                let slot =
                    self.slots.open(id, (key, flags), open).map_err(FsError::after_lookup)?;
                Served::Slot(Arc::new(slot))
            }
            _ => return Err(FsError::IsDirectory),
        };
        let by = match &served {
            Served::Slot(slot) => slot.file().cloned().map(|file| OpenedBy::Kernel { file }),
            _ => None,
        };
        let handle = self.core.state().add_handle(Handle::new(id, writes, served));
        let opened = Opened::uncached(handle, true);
        Ok(Opened { by: by.unwrap_or(OpenedBy::Daemon), ..opened })
    }

    /// Whether reading from a handle waits for the remote. It takes a while to tell.
    pub fn read_waits_for_remote(&self, handle: u64, offset: u64, length: u32) -> bool {
        let served = self.core.state().handles.get(&handle).map(|handle| handle.served.clone());
        let waits = match served {
            Some(Served::Query(query)) => self.answer_waits_for_remote(&query),
            Some(Served::Slot(slot)) => self.slots.reading_waits_for_remote(&slot, offset, length),
            _ => Ok(false),
        };
        // What fails here fails again where it is answered.
        waits.unwrap_or(false)
    }

    /// Whether opening a slot waits for the remote: for the rows that stand behind its references.
    pub fn open_waits_for_remote(&self, id: InodeId) -> bool {
        match self.prefixes.meaning_of(id) {
            Ok(Virtual::Slot(key)) => self.slots.last_rows_are_away(key).unwrap_or(false),
            _ => false,
        }
    }

    /// Whether opening it reads pages.
    pub fn is_slot(&self, id: InodeId) -> bool {
        super::is_virtual(id) && matches!(self.prefixes.meaning_of(id), Ok(Virtual::Slot(_)))
    }

    /// Whether what is written to it changes nothing in the store: a prompt, settings of the mount, or names.
    pub fn is_question(&self, id: InodeId) -> bool {
        views::is_settings(id)
            || batch::is_batch(id)
            || super::is_virtual(id)
                && matches!(self.prefixes.meaning_of(id), Ok(Virtual::Match(_)))
    }

    /// [`Finder::pages_of_prefix`], of another store if there are none here.
    fn pages_of(&self, model: InodeId, hash: PrefixHash) -> Result<Vec<PrefixPage>, FsError> {
        if let Some(pages) = self.finder.pages_of_prefix(model, hash)? {
            return Ok(pages);
        }
        if !self.adoption.adopt_prefix(model, hash)? {
            return Ok(Vec::new());
        }
        Ok(self.finder.pages_of_prefix(model, hash)?.unwrap_or_default())
    }

    /// Makes a slot in `slots/`; none if the place is another one.
    pub(crate) fn create_slot(
        &self, place: &Place, mode: u16, caller: Caller, writes: bool,
    ) -> Result<Option<Created>, FsError> {
        let parent =
            super::is_virtual(place.parent).then(|| self.prefixes.meaning_of(place.parent));
        let Some(Ok(Virtual::Slots(model))) = parent else { return Ok(None) };
        if !writes {
            return Err(FsError::NotPermitted);
        }
        let name = std::str::from_utf8(&place.name).map_err(|_| FsError::NotPermitted)?;
        let number = self.prefixes.next_slot.fetch_add(1, Ordering::Relaxed);
        let id = self.prefixes.numbers().hold(Virtual::NewSlot(model, number));
        let opened = self.saving.open_draft(id, (model, name), mode, (caller, caller));
        let opened = opened.inspect_err(|_| self.prefixes.numbers().forget(id, 1))?;
        let attributes = self.attributes(id)?;
        Ok(Some(Created { found: Found { attributes, name_is_stable: false }, opened }))
    }

    /// Makes a description in `blocks/`; none if the place is another one.
    pub(crate) fn create_block(
        &self, place: &Place, caller: Caller, writes: bool,
    ) -> Result<Option<Created>, FsError> {
        let Some(model) = self.prefixes.model_of_blocks(place.parent) else { return Ok(None) };
        let name = std::str::from_utf8(&place.name).unwrap_or_default();
        let (hash, layer) = parse_block(name).ok_or(FsError::NotPermitted)?;
        let key = BlockKey { model, hash, layer };
        let id = self.prefixes.numbers().hold(Virtual::Block(key));
        let attributes = self.attributes(id)?;
        let opened = if writes {
            self.blocks.open_draft(id, key, caller)?
        } else {
            self.blocks.open(id, key)?
        };
        let found = Found { attributes, name_is_stable: false };
        Ok(Some(Created { found, opened }))
    }
}

/// What a read answers first, which takes a while: a question, or rows that it gathers.
pub fn read_answers(core: &Core, handle: u64, offset: u64, length: u32) -> Option<Answers> {
    let served = core.state().handles.get(&handle)?.served.clone();
    let is_question = match served {
        Served::Query(_) => true,
        Served::Settings(dialogue) => dialogue.is_asked(),
        Served::Slot(slot) => !slot.is_at_hand(offset, u64::from(length)),
        Served::Batch(batch) => return batch.is_asked().then_some(Answers::Batch),
        _ => false,
    };
    is_question.then_some(Answers::Question)
}

/// Whether a name stands in such a directory, or is one itself.
pub(crate) fn is_prefix_name(core: &Core, place: &Place) -> bool {
    super::is_virtual(place.parent)
        || root(InodeId::ROOT, &place.name).is_some()
            && matches!(core.state().directory(place.parent), Ok((_, DirectoryClass::Model)))
}

/// The directory of that name in a model's.
fn root(model: InodeId, name: &[u8]) -> Option<Virtual> {
    let name = std::str::from_utf8(name).ok()?;
    match name {
        names::PREFIXES => Some(Virtual::Root(model)),
        names::SLOTS => Some(Virtual::Slots(model)),
        names::BLOCKS => Some(Virtual::Blocks(model)),
        _ => None,
    }
}

/// The name of a layer's page in the directory of a prefix.
fn page_name(layer: Layer) -> String {
    format!("{}.safetensors", names::format_layer(layer))
}

/// Two hexadecimal digits in lower case.
fn shard(name: &str) -> Option<u8> {
    let shard = u8::from_str_radix(name, 16).ok()?;
    (format!("{shard:02x}") == name).then_some(shard)
}
