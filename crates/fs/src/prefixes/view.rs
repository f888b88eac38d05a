//! What `prefixes/` and `slots/` look like from outside.
//!
//! The directories take owner and permissions from the model's. Pages are the inodes of the
//! sequence that has them, so they are opened, mapped and cached as there.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

use super::Virtual;
use super::find::Match;
use super::index::TOKEN_BYTES;
use super::shares::Share;
use super::slot::SlotShape;
use crate::attributes::{Attributes, Caller, Found, Place};
use crate::core::Core;
use crate::core::handle::{Handle, Served};
use crate::list::{Listed, Listing};
use crate::lookup::Lookup;
use crate::opened::{Opened, OpenedBy};
use crate::reply::Reply;
use crate::{FileSystem, FsError, batch, views};
use kvfs_page::{PrefixHash, names};
use kvfs_storage::store::record::{DirectoryClass, InodeId};

/// Bytes of a prompt: four million tokens, more than any model takes.
const PROMPT_BYTES_MAX: usize = (4 << 20) * TOKEN_BYTES;

/// An open `prefixes/match`.
#[derive(Debug)]
pub(crate) struct Query {
    model: InodeId,
    dialogue: Mutex<Dialogue>,
    /// Counts the bytes of the prompt.
    held: Mutex<Share>,
    /// Counted.
    _open: Share,
}

/// What a read answers before it has bytes to give.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answers {
    /// A question that may have to ask the remote, or rows of a slot.
    Question,
    /// A question about many names, which asks this machine alone.
    Batch,
}

/// What was written, and the answer to it once somebody has read it.
#[derive(Debug, Default)]
struct Dialogue {
    prompt: Vec<u8>,
    /// What this machine has of it, once somebody has looked.
    local: Option<LocalAnswer>,
    reply: Reply,
}

/// The best that this machine has, if it has anything.
#[derive(Debug)]
struct LocalAnswer(Option<Match>);

impl Query {
    /// Adds tokens to the question; `offset` tells only where the descriptor is then.
    pub(crate) fn ask(&self, bytes: &[u8], offset: u64) -> Result<(), FsError> {
        // Whoever answers it may be waiting for the remote.
        let mut dialogue = match self.dialogue.try_lock() {
            Err(TryLockError::WouldBlock) => return Err(FsError::TryAgain),
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Ok(dialogue) => dialogue,
        };
        if dialogue.prompt.len() + bytes.len() > PROMPT_BYTES_MAX {
            return Err(FsError::TooLarge);
        }
        if !self.held.lock().unwrap_or_else(PoisonError::into_inner).grow(bytes.len() as u64) {
            return Err(FsError::NoRoom);
        }
        dialogue.prompt.extend_from_slice(bytes);
        dialogue.local = None;
        dialogue.reply.withdraw();
        dialogue.reply.note_question(offset, bytes.len());
        Ok(())
    }

    fn dialogue(&self) -> MutexGuard<'_, Dialogue> {
        self.dialogue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Looks at a slot that is replaced again and again while it is looked at.
const LOOKS_MAX: usize = 16;

impl FileSystem {
    /// Finds a name in a model's directory that is virtual, or in a virtual directory.
    pub(crate) fn lookup_prefix(
        &self, parent: InodeId, name: &[u8],
    ) -> Result<Option<Lookup>, FsError> {
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
                Virtual::Shard(..) if self.prepare_to_find().is_err() => return absent,
                Virtual::Shard(model, shard) => match text.parse::<PrefixHash>() {
                    Ok(hash)
                        if hash.0[0] == shard
                            && (self.finder().pages_of_prefix(model, hash)?.is_some()
                                || self.finder().is_elsewhere(model, hash)) =>
                    {
                        Virtual::Prefix(model, hash)
                    }
                    _ => return absent,
                },
                Virtual::Prefix(model, hash) => return self.lookup_page(model, hash, name),
                Virtual::Slots(model) => match self.slots().named(model, text)? {
                    Some(key) => Virtual::Slot(key),
                    None => return absent,
                },
                Virtual::Blocks(model) => match self.block_directory().named(model, text)? {
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
            let is_root = is_prefix_name(&self.core, &Place { parent, name: name.to_vec() });
            match root(parent, name).filter(|_| is_root) {
                Some(found) => found,
                None => return Ok(None),
            }
        };
        let id = self.prefixes.numbers().hold(found);
        let attributes =
            self.prefix_attributes(id).inspect_err(|_| self.prefixes.numbers().forget(id, 1))?;
        Ok(Some(Lookup::Found(Found { attributes, name_is_stable: false })))
    }

    /// Finds a name for a user. In `slots/` and `blocks/` what he may not read is not there for him: lengths
    /// and hashes tell of conversations. Where a group may read a slot, only the kernel knows who is in it,
    /// so the slot is shown to all, and read by those.
    pub fn lookup_for(&self, place: &Place, caller: Caller) -> Result<Lookup, FsError> {
        views::check_lookup(place, caller)?;
        let mut found = self.lookup(place.parent, &place.name)?;
        let Lookup::Found(Found { attributes, .. }) = &mut found else { return Ok(found) };
        if batch::is_batch(attributes.inode) {
            attributes.inode = batch::inode_of(caller.uid);
        }
        let id = attributes.inode;
        if caller.uid == 0 || !super::is_virtual(id) {
            return Ok(found);
        }
        let is_shown = match self.prefixes.meaning_of(id)? {
            Virtual::Slot(_) => {
                let is_shared = attributes.mode & 0o044 != 0;
                is_shared || attributes.uid == caller.uid && attributes.mode & 0o400 != 0
            }
            Virtual::Block(key) => self.block_directory().shows(key, caller)?,
            _ => true,
        };
        if is_shown {
            return Ok(found);
        }
        self.prefixes.numbers().forget(id, 1);
        Ok(Lookup::Absent { stable: false })
    }

    /// Whether the pages of a virtual directory must come from another store first.
    pub(super) fn must_adopt_to_list(&self, id: InodeId) -> bool {
        match self.prefixes.meaning_of(id) {
            Ok(Virtual::Prefix(model, hash)) => {
                matches!(self.finder().pages_of_prefix(model, hash), Ok(None))
                    && self.finder().is_elsewhere(model, hash)
            }
            _ => false,
        }
    }

    /// Finds the page of a layer that ends a prefix.
    fn lookup_page(
        &self, model: InodeId, hash: PrefixHash, name: &[u8],
    ) -> Result<Option<Lookup>, FsError> {
        let pages = self.pages_of_prefix_anywhere(model, hash)?;
        let page = pages.iter().find(|(layer, _)| page_name(*layer).as_bytes() == name);
        let Some((_, entry)) = page else {
            return Ok(Some(Lookup::Absent { stable: false }));
        };
        let mut state = self.core.state();
        let attributes = state.attributes(&self.core.store, entry.inode)?;
        state.nodes.entry(entry.inode).or_default().lookups += 1;
        Ok(Some(Lookup::Found(Found { attributes, name_is_stable: false })))
    }

    /// What `stat` shows.
    pub(crate) fn prefix_attributes(&self, id: InodeId) -> Result<Attributes, FsError> {
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
            let shape = SlotShape::of(&self.core, key)?;
            let readers = shape.readers(&self.core);
            let readers = readers.map_err(FsError::after_lookup)?;
            (uid, gid, slot_readers) = (readers.uid, readers.gid, readers.bits);
            size = shape.length();
        }
        let is_sticky = model.mode & 0o1000 != 0;
        if let Virtual::Block(key) = meaning {
            size = self.block_directory().text(key)?.len() as u64;
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
    pub(crate) fn list_prefix(
        &self, id: InodeId, offset: u64, listing: Listing,
        mut emit: impl FnMut(&Listed<'_>) -> bool,
    ) -> Result<(), FsError> {
        let pages = match self.prefixes.meaning_of(id)? {
            Virtual::Prefix(model, hash) => self.pages_of_prefix_anywhere(model, hash)?,
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
            .map(|(layer, entry)| (page_name(layer), entry.inode, entry.file_type));
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
    pub(crate) fn open_prefix(
        &self, id: InodeId, flags: i32, caller: Caller,
    ) -> Result<Opened, FsError> {
        let writes = flags & libc::O_ACCMODE != libc::O_RDONLY;
        let meaning = self.prefixes.meaning_of(id)?;
        if let Virtual::Block(key) = meaning {
            return if writes {
                self.block_directory().open_draft(id, key, caller)
            } else {
                self.block_directory().open(id, key)
            };
        }
        if let Virtual::Slot(key) = meaning
            && writes
            && flags & libc::O_TRUNC != 0
        {
            return self.replace_slot(id, key, caller);
        }
        let open = self.prefixes.queries.take(caller.uid, 1).ok_or(FsError::TryAgain)?;
        let served = match meaning {
            Virtual::Match(model) => {
                let held = self.prefixes.prompt_bytes.take(caller.uid, 0);
                let held = Mutex::new(held.ok_or(FsError::NoRoom)?);
                let query = Query { model, dialogue: Mutex::default(), held, _open: open };
                Served::Query(Arc::new(query))
            }
            Virtual::Slot(..) if writes => return Err(FsError::NotPermitted),
            Virtual::Slot(key) => {
                let slot =
                    self.slots().open(id, (key, flags), open).map_err(FsError::after_lookup)?;
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

    /// Answers a question with one line of JSON, of which `buffer` gets what lies at `offset`.
    /// Returns how much.
    pub(crate) fn answer(
        &self, query: &Query, offset: u64, buffer: &mut [u8],
    ) -> Result<usize, FsError> {
        let mut dialogue = query.dialogue();
        if !dialogue.reply.is_given() {
            let found = match dialogue.local.take() {
                Some(LocalAnswer(found)) => found,
                None => self.local_match(query.model, &dialogue.prompt)?,
            };
            let tokens = found.as_ref().map_or(0, |found| found.tokens);
            let foreign = self.foreign_match(query.model, &dialogue.prompt, tokens)?;
            let (is_own, found) = (foreign.is_none(), foreign.or(found));
            let asked = dialogue.prompt.len() / TOKEN_BYTES;
            let answered = found.as_ref().map_or(0, |found| found.tokens);
            self.core.observer.matched(asked as u64, answered, is_own);
            self.prefixes.asked.note(query.model, asked as u64, answered);
            dialogue.reply.give(to_json(found.as_ref()), offset);
        }
        Ok(dialogue.reply.copy(offset, buffer))
    }

    fn local_match(&self, model: InodeId, prompt: &[u8]) -> Result<Option<Match>, FsError> {
        self.prepare_to_find()?;
        self.finder().longest_match(model, prompt)
    }

    /// Whether a question has an answer that another store must be asked for. Notes what this machine
    /// knows.
    fn answer_waits_for_remote(&self, query: &Query) -> Result<bool, FsError> {
        if !self.foreign.has_stores() {
            return Ok(false);
        }
        // Somebody else waits for the answer to the same question already.
        let Ok(mut dialogue) = query.dialogue.try_lock() else { return Ok(true) };
        if dialogue.reply.is_given() {
            return Ok(false);
        }
        let found = self.local_match(query.model, &dialogue.prompt)?;
        let tokens = found.as_ref().map_or(0, |found| found.tokens);
        dialogue.local = Some(LocalAnswer(found));
        self.others_have_more(query.model, &dialogue.prompt, tokens)
    }

    /// Whether reading from a handle waits for the remote. It takes a while to tell.
    pub fn read_waits_for_remote(&self, handle: u64, offset: u64, length: u32) -> bool {
        let served = self.core.state().handles.get(&handle).map(|handle| handle.served.clone());
        let waits = match served {
            Some(Served::Query(query)) => self.answer_waits_for_remote(&query),
            Some(Served::Slot(slot)) => {
                self.slots().reading_waits_for_remote(&slot, offset, length)
            }
            _ => Ok(false),
        };
        // What fails here fails again where it is answered.
        waits.unwrap_or(false)
    }

    /// Whether opening a slot waits for the remote: for the rows that stand behind its references.
    pub fn open_waits_for_remote(&self, id: InodeId) -> bool {
        match self.prefixes.meaning_of(id) {
            Ok(Virtual::Slot(key)) => self.slots().last_rows_are_away(key).unwrap_or(false),
            _ => false,
        }
    }

    /// What a read answers first, which takes a while: a question, or rows that it gathers.
    pub fn read_answers(&self, handle: u64, offset: u64, length: u32) -> Option<Answers> {
        let served = self.core.state().handles.get(&handle)?.served.clone();
        let is_question = match served {
            Served::Query(_) => true,
            Served::Settings(dialogue) => dialogue.is_asked(),
            Served::Slot(slot) => !slot.is_at_hand(offset, u64::from(length)),
            Served::Batch(batch) => return batch.is_asked().then_some(Answers::Batch),
            _ => false,
        };
        is_question.then_some(Answers::Question)
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

/// What `longest_prefix` of `kvfs-runtime` reads.
fn to_json(found: Option<&Match>) -> String {
    let tokens = found.map_or(0, |found| found.tokens);
    let sequence = found.map(|found| String::from_utf8_lossy(&found.sequence));
    format!("{}\n", serde_json::json!({ "tokens": tokens, "sequence": sequence }))
}

/// The name of a layer's page in the directory of a prefix.
fn page_name(layer: kvfs_page::Layer) -> String {
    format!("{}.safetensors", names::format_layer(layer))
}

/// Two hexadecimal digits in lower case.
fn shard(name: &str) -> Option<u8> {
    let shard = u8::from_str_radix(name, 16).ok()?;
    (format!("{shard:02x}") == name).then_some(shard)
}
