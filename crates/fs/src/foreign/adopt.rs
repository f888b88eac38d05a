//! A sequence of another store appears here, as `NAME@STORE`.
//!
//! It is a sequence like any other from then on: listed, counted against limits, published with this
//! store's names. Only the bytes of its pages are missing until somebody opens them. What it shares
//! with sequences that are here already becomes more names of their pages. It goes on where it ended
//! when more of it is wanted, unless somebody has written to it.

use std::sync::PoisonError;

use super::index::ForeignStore;
use super::source::{ForeignPage, ForeignSequence, Source, Wanted};
use super::{Foreign, FsError, ORIGIN};
use crate::attributes::{Caller, Place};
use crate::core::Core;
use crate::core::latest::open_tokens;
use crate::core::state::State;
use crate::create::new_inode;
use crate::insert::{Origin, Verified};
use crate::prefixes::{Finder, Indexed, Match, TOKEN_BYTES};
use crate::tiers::Tiers;
use crate::tree::Tree;
use crate::{FileSystem, Invalidation};
use kvfs_page::{PrefixHash, TokenStart, names};
use kvfs_storage::ingest::model::Model;
use kvfs_storage::store::disk::read_all;
use kvfs_storage::store::metadata::Life;
use kvfs_storage::store::record::{
    Entry, FileRecord, InodeId, Kind, ObjectKind, ObjectRecord, Role,
};
use kvfs_storage::tier::remote::StoreId;

/// Pages that appear at once: some milliseconds.
const PAGES_AT_ONCE: usize = 256;

/// Names that a sequence of another store may have here: its user may change its end, so that what was taken over is
/// another conversation.
const NAMES_MAX: usize = 8;

/// What a sequence of another store is called here, as the so many-th of that name: `NAME@STORE`, `NAME@STORE.2`. Of a
/// name that is too long for that its beginning.
fn name_here(name: &[u8], store: StoreId, number: usize) -> Vec<u8> {
    let number = if number == 1 { String::new() } else { format!(".{number}") };
    let end = format!("@{:.8}{number}", store.to_string());
    let mut here = name[..name.len().min(crate::NAME_BYTES_MAX - end.len())].to_vec();
    if here.len() < name.len() {
        // Not within a character.
        let whole = std::str::from_utf8(&here).map_or_else(|error| error.valid_up_to(), str::len);
        here.truncate(whole.max(here.len().saturating_sub(3)));
    }
    here.extend_from_slice(end.as_bytes());
    here
}

/// The directory of a sequence here, and the tokens that it has: one that goes on with them or ends within them,
/// or a new one. None if all names lead to other conversations.
fn directory_for(
    core: &Core, tree: &dyn Tree, sequences: InodeId, found: &ForeignSequence, store: StoreId,
) -> Result<Option<(InodeId, Vec<u8>)>, FsError> {
    for number in 1..=NAMES_MAX {
        let name = name_here(&found.name, store, number);
        let is_file = {
            let state = core.state();
            let entry = state.entry(sequences, &name)?;
            entry.is_some_and(|entry| entry.file_type != libc::S_IFDIR)
        };
        if is_file {
            continue;
        }
        let directory = directory_in(core, tree, sequences, &name)?;
        let known = tokens_in(core, directory)?;
        if found.tokens.starts_with(&known) || known.starts_with(&found.tokens) {
            return Ok(Some((directory, known)));
        }
    }
    Ok(None)
}

/// Where pages come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Provenance {
    pub(crate) store: StoreId,
    /// The sequence there.
    pub(super) sequence: InodeId,
    /// The directory of the model here.
    pub(super) model: InodeId,
}

/// Takes over sequences of other stores.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Adoption<'a> {
    core: &'a Core,
    tiers: Option<&'a Tiers>,
    foreign: &'a Foreign,
    finder: Finder<'a>,
    indexed: &'a dyn Indexed,
    tree: &'a dyn Tree,
}

impl FileSystem {
    pub(crate) fn adoption(&self) -> Adoption<'_> {
        Adoption {
            core: &self.core,
            tiers: self.tiers.as_ref(),
            foreign: &self.foreign,
            finder: self.finder(),
            indexed: self,
            tree: self,
        }
    }
}

impl Adoption<'_> {
    /// Whether there is another store.
    pub(crate) fn has_stores(&self) -> bool {
        self.foreign.has_stores()
    }

    /// The longest prefix of a prompt, if another store has a page more of it than `tokens`. It is
    /// found by its full pages and goes on to the token.
    pub(crate) fn longest_match(
        &self, model: InodeId, prompt: &[u8], tokens: u64,
    ) -> Result<Option<Match>, FsError> {
        if self.foreign.count().0 == 0 {
            return Ok(None);
        }
        let Ok(rules) = self.core.model_of(&mut self.core.state(), model) else { return Ok(None) };
        let page_tokens = u64::from(rules.manifest.geometry().page_tokens());
        let hashes = self.foreign_prefixes(&rules, prompt);
        // A sequence whose pages have gone by now is passed over for one that has fewer.
        let mut best: Option<Match> = None;
        for (index, hash) in hashes.iter().enumerate().rev() {
            let reached = (index as u64 + 1) * page_tokens;
            if reached <= best.as_ref().map_or(tokens, |best| best.tokens) {
                break;
            }
            for (store, sequence, _) in self.foreign.holders(&rules.manifest, hash) {
                let wanted = Wanted::Prompt(prompt);
                let Some(adopted) = self.adopt(model, &rules, (&store, sequence), wanted)? else {
                    continue;
                };
                let found = self.finder.match_in(model, adopted, prompt)?;
                let found = found.filter(|found| found.tokens > tokens);
                best = best.into_iter().chain(found).max_by_key(|found| found.tokens);
            }
        }
        Ok(best)
    }

    /// Whether another store claims to have a page more of a prompt than `tokens`.
    pub(crate) fn others_have_more(
        &self, model: InodeId, prompt: &[u8], tokens: u64,
    ) -> Result<bool, FsError> {
        let rules =
            self.core.model_of(&mut self.core.state(), model).map_err(|_| FsError::NotFound)?;
        let page_tokens = u64::from(rules.manifest.geometry().page_tokens());
        let pages = self.foreign_prefixes(&rules, prompt).len() as u64;
        Ok(pages * page_tokens > tokens)
    }

    /// Hashes of the prompt's full pages as far as any other store claims to have them.
    fn foreign_prefixes(&self, rules: &Model, prompt: &[u8]) -> Vec<PrefixHash> {
        let page_bytes = rules.manifest.geometry().page_tokens() as usize * TOKEN_BYTES;
        let mut hashes = Vec::new();
        for page in prompt.chunks_exact(page_bytes) {
            let parent = hashes.last().copied().or_else(|| rules.manifest.prefix_root());
            let hash = PrefixHash::next(parent, page);
            if !self.foreign.has(&rules.manifest, &hash) {
                break;
            }
            hashes.push(hash);
        }
        hashes
    }

    /// Takes over a sequence that has a prefix, from another store; whether there was one.
    pub(crate) fn adopt_prefix(&self, model: InodeId, hash: PrefixHash) -> Result<bool, FsError> {
        let Ok(rules) = self.core.model_of(&mut self.core.state(), model) else { return Ok(false) };
        for (store, sequence, page) in self.foreign.holders(&rules.manifest, &hash) {
            let wanted = Wanted::Page(page, hash);
            if self.adopt(model, &rules, (&store, sequence), wanted)?.is_some() {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Takes over a sequence as far as it is wanted; its directory here.
    fn adopt(
        &self, model: InodeId, rules: &Model, (store, sequence): (&ForeignStore, InodeId),
        wanted: Wanted<'_>,
    ) -> Result<Option<InodeId>, FsError> {
        let Some(exchange) = self.tiers.and_then(|tiers| tiers.exchange.as_ref()) else {
            return Ok(None);
        };
        let adopting = &self.foreign.adopting;
        let _turn = adopting.lock().unwrap_or_else(PoisonError::into_inner);
        let source = Source { table: &store.table, exchange, store: &self.core.store };
        let found = match source.sequence(sequence, rules, wanted) {
            Ok(found) => found,
            Err(error) => {
                log::info!("a sequence of store {} is not to be had: {error}", store.id());
                if error.is_outage() {
                    return Ok(None);
                }
                None
            }
        };
        store.table.forget_chunks();
        let Some(found) = found else {
            store.refute(sequence);
            return Ok(None);
        };
        let from = Provenance { store: store.id(), sequence, model };
        match self.install_sequence(&found, from) {
            Ok(None) => {
                store.refute(sequence);
                Ok(None)
            }
            Ok(directory) => {
                self.indexed.index()?;
                Ok(directory)
            }
            // On a mount that takes no changes only what is here is found.
            Err(FsError::ReadOnly) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Pages first: the tokens say that they are there.
    fn install_sequence(
        &self, found: &ForeignSequence, from: Provenance,
    ) -> Result<Option<InodeId>, FsError> {
        let sequences =
            directory_in(self.core, self.tree, from.model, names::SEQUENCES.as_bytes())?;
        let Some((directory, known)) =
            directory_for(self.core, self.tree, sequences, found, from.store)?
        else {
            return Ok(None);
        };
        for (layer, pages) in &found.layers {
            let layer = names::format_layer(*layer);
            let layer = directory_in(self.core, self.tree, directory, layer.as_bytes())?;
            for pages in pages.chunks(PAGES_AT_ONCE) {
                self.tree.make_room_for_changes()?;
                let mut state = self.core.state_to_change()?;
                for page in pages {
                    self.add_page(&mut state, layer, page, from)?;
                }
                drop(state);
                self.core.invalidate(Invalidation::Inode(layer));
            }
        }
        if known.len() < found.tokens.len() {
            put_tokens(self.core, directory, &found.tokens)?;
        }
        Ok(Some(directory))
    }

    /// A name for a page whose bytes are in the remote, or here already.
    fn add_page(
        &self, state: &mut State, directory: InodeId, page: &ForeignPage, from: Provenance,
    ) -> Result<(), FsError> {
        let name = names::format_page(TokenStart(page.record.start)).into_bytes();
        if state.entry(directory, &name)?.is_some() || state.is_pending(directory, &name) {
            return Ok(());
        }
        let (above, _) = state.directory(directory)?;
        let role = Role::Page(page.record);
        let record = FileRecord {
            role,
            object: None,
            size: page.length,
            blocks: page.length.div_ceil(512),
            unsettled: false,
        };
        let caller = Caller { uid: above.uid, gid: above.gid };
        let mut inode = new_inode(&above, Kind::File(record), above.mode & 0o666, caller);
        inode.mtime = page.mtime;
        let (checksum, length) = (page.checksum, page.length);
        let verified = Verified { role, checksum, length, twin: None, same: None };
        let id = if let Some(twin) = state.page_like(page)?
            && let origin = (Origin {
                inode: inode.clone(),
                attributes: Vec::new(),
                is_dated: false,
                is_synced: false,
            })
            && state.share(twin, &origin, &verified)?
        {
            twin
        } else {
            let object = state.metadata.new_object();
            // There is no file to be published.
            state.metadata.staged.remove(&object);
            if let Some(file) = inode.file_mut() {
                file.object = Some(object);
            }
            let (length, checksum) = (page.length, Some(page.checksum));
            let stored = ObjectRecord { kind: ObjectKind::Page, length, checksum, references: 1 };
            state.metadata.put_object(object, &stored);
            state.metadata.put_remote_copy(object, &page.copy);
            let id = state.metadata.new_inode();
            state.metadata.put_inode(Life::Durable, id, &inode);
            state.metadata.put_attribute(Life::Durable, id, ORIGIN, from.to_string().as_bytes());
            if let Some(tiers) = self.tiers {
                tiers.copies.note_remote_copy(object, &page.copy);
                tiers.copies.note_left(object, length);
            }
            id
        };
        let entry = Entry { inode: id, file_type: libc::S_IFREG };
        state.metadata.put_entry(Life::Durable, directory, &name, entry);
        state.touch_directory(directory, 0)
    }
}

/// A directory of a model's tree, which is made if it is missing; the owner is that of the directory above.
fn directory_in(
    core: &Core, tree: &dyn Tree, parent: InodeId, name: &[u8],
) -> Result<InodeId, FsError> {
    let (entry, above) = {
        let state = core.state();
        (state.entry(parent, name)?, state.inode(parent)?)
    };
    match entry {
        Some(entry) if entry.file_type == libc::S_IFDIR => return Ok(entry.inode),
        Some(_) => return Err(FsError::Exists),
        None => {}
    }
    let place = Place { parent, name: name.to_vec() };
    let caller = Caller { uid: above.uid, gid: above.gid };
    let made = tree.make_directory(&place, above.mode & 0o777, caller)?;
    core.announce(&place);
    Ok(made)
}

/// What the token file of a sequence has.
fn tokens_in(core: &Core, sequence: InodeId) -> Result<Vec<u8>, FsError> {
    let Some(file) = open_tokens(core, sequence)? else { return Ok(Vec::new()) };
    Ok(read_all(file.as_ref(), u64::MAX)?)
}

fn put_tokens(core: &Core, sequence: InodeId, tokens: &[u8]) -> Result<(), FsError> {
    let object = core.state().metadata.new_object();
    let written = core.store.create_object(object).and_then(|file| file.write_all_at(tokens, 0));
    if let Err(error) = written {
        core.state().metadata.remove_object(object);
        return Err(error.into());
    }
    let place = Place { parent: sequence, name: names::TOKENS.as_bytes().to_vec() };
    let mut state = core.state_to_change()?;
    if let Some(entry) = state.entry(place.parent, &place.name)? {
        let mut old = state.inode(entry.inode)?;
        state.drop_link(entry.inode, &mut old)?;
    }
    let above = state.inode(sequence)?;
    let caller = Caller { uid: above.uid, gid: above.gid };
    // The file gets its role when it is inserted.
    let kind = Kind::Symlink { target: Vec::new() };
    let inode = new_inode(&above, kind, above.mode & 0o666, caller);
    core.insert_append(&mut state, &place, &inode, (object, Role::Tokens))
}

impl State {
    /// A page that is known to have the same bytes: the remote calls them by the same hash.
    fn page_like(&self, page: &ForeignPage) -> Result<Option<InodeId>, FsError> {
        let Some(id) = self.metadata.page_with(&page.checksum)? else { return Ok(None) };
        let inode = self.metadata.inode(id)?;
        let object = inode.and_then(|inode| inode.file().and_then(|file| file.object));
        let copy = object.map(|object| self.metadata.remote_copy(object)).transpose()?.flatten();
        Ok(copy.filter(|copy| copy.content == page.copy.content).map(|_| id))
    }
}

impl std::fmt::Display for Provenance {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Provenance { store, sequence, model } = self;
        write!(formatter, "{store} {:016x} {:016x}", sequence.0, model.0)
    }
}

impl Provenance {
    /// What [`ORIGIN`] holds.
    pub(super) fn parse(value: &[u8]) -> Option<Provenance> {
        let mut words = std::str::from_utf8(value).ok()?.split(' ');
        let store = words.next()?.parse().ok()?;
        let mut number = || u64::from_str_radix(words.next()?, 16).ok();
        Some(Provenance { store, sequence: InodeId(number()?), model: InodeId(number()?) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_origin_is_read_back() {
        let from = Provenance { store: StoreId(1 << 100), sequence: InodeId(7), model: InodeId(9) };
        assert_eq!(Provenance::parse(from.to_string().as_bytes()), Some(from));
        assert_eq!(Provenance::parse(b"7 8"), None);
        assert_eq!(Provenance::parse(b""), None);
    }

    #[test]
    fn names_of_other_stores_fit_and_differ() {
        let store = StoreId(0xabcd_1234 << 96);
        let check = |name: &str, number, expected: &str| {
            assert_eq!(
                String::from_utf8_lossy(&name_here(name.as_bytes(), store, number)),
                expected
            );
        };
        check("chat", 1, "chat@abcd1234");
        check("chat", 2, "chat@abcd1234.2");
        let long = "x".repeat(255);
        check(&long, 1, &format!("{}@abcd1234", &long[..246]));
        check(&long, 8, &format!("{}@abcd1234.8", &long[..244]));
        let wide = "\u{1f600}".repeat(63);
        check(&wide, 1, &format!("{}@abcd1234", "\u{1f600}".repeat(61)));
        let bytes = name_here(&[0xff; 255], store, 1);
        assert!((252..=255).contains(&bytes.len()));
    }
}
