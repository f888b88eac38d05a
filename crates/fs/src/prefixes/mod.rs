//! Directories of a model that are made when somebody looks: `prefixes/`, pages found by what they are
//! about instead of by where they stand, and `slots/`, sequences as files that llama.cpp loads.
//!
//! | path | answers |
//! |---|---|
//! | `prefixes/ab/HASH/` | whether a sequence has the page that ends this prefix, in every layer, or the state after it |
//! | `prefixes/ab/HASH/007.safetensors` | that page of layer 7: the file in the sequence itself |
//! | `prefixes/match` | written the tokens of a prompt: which sequence has most of them |
//! | `slots/NAME.bin`, `.bin4` | the sequence of that name as a slot file of version 3, 4 (`slot`); written, it becomes that sequence (`slot_draft`) |
//! | `slots/NAME.ref`, `.ref4` | the same with references to pages in the place of their rows |
//! | `blocks/HASH.LAYER` | where a page lies in a file that an engine lays out itself (`block`) |
//!
//! The index behind it (`index`) is derived from the token files and may lag behind what happens
//! to pages, so a hit is believed only after the names of the pages were looked up (`find`). It is
//! not listed, as `.kvfs/` is not (`view`).

mod access;
mod block;
mod edited;
mod find;
mod index;
mod key;
mod live_blocks;
mod owned;
mod present;
mod query;
mod room;
mod shares;
mod slot;
mod slot_draft;
mod slot_file;
mod tiers;
mod view;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::FsError;
use kvfs_page::PrefixHash;
use kvfs_storage::store::record::InodeId;

pub(super) use block::{Blocks, Draft, register_block, unlink_block};
pub(super) use edited::fetch_positions;
pub(super) use find::{Finder, Indexed, Match};
pub use index::Indexer;
pub(super) use index::TOKEN_BYTES;
pub(super) use key::{SLOT_KEY, key_bytes};
pub(super) use live_blocks::LiveBlocks;
pub(super) use owned::prefix_owned_by;
pub(super) use query::Query;
pub(super) use shares::{Share, Shares};
pub(super) use slot::OpenSlot;
pub(super) use slot_draft::{SlotDraft, SlotSaving};
pub use slot_draft::{look_at_beginning, look_is_due, remove_unfinished_saves};
pub(super) use view::is_prefix_name;
pub use view::{Answers, VirtualDirectories, read_answers};

/// Numbers of virtual inodes begin here; those of stored ones end long before.
const FIRST_NUMBER: u64 = 1 << 63;

/// Whether an inode belongs to such a directory.
pub(super) fn is_virtual(id: InodeId) -> bool {
    id.0 >= FIRST_NUMBER
}

/// A virtual inode: the model's directory, and what it is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Virtual {
    /// `prefixes/`
    Root(InodeId),
    /// `prefixes/ab/`
    Shard(InodeId, u8),
    /// `prefixes/ab/HASH/`
    Prefix(InodeId, PrefixHash),
    /// `prefixes/match`
    Match(InodeId),
    /// `slots/`
    Slots(InodeId),
    /// `slots/NAME.bin`
    Slot(slot::SlotKey),
    /// One that is being written and has no name yet, by a number of its own.
    NewSlot(InodeId, u64),
    /// `blocks/`
    Blocks(InodeId),
    /// `blocks/HASH.LAYER`
    Block(block::BlockKey),
}

impl Virtual {
    fn model(self) -> InodeId {
        let (Virtual::Root(model)
        | Virtual::Shard(model, _)
        | Virtual::Prefix(model, _)
        | Virtual::Match(model)
        | Virtual::Slots(model)
        | Virtual::Slot(slot::SlotKey { model, .. })
        | Virtual::NewSlot(model, _)
        | Virtual::Blocks(model)
        | Virtual::Block(block::BlockKey { model, .. })) = self;
        model
    }
}

/// The virtual inodes that the kernel holds.
#[derive(Debug, Default)]
pub(crate) struct Numbers {
    next: u64,
    by_number: BTreeMap<InodeId, (Virtual, u64)>,
    by_meaning: BTreeMap<Virtual, InodeId>,
}

impl Numbers {
    /// The last number that was given.
    pub(crate) fn last(&self) -> u64 {
        self.next
    }

    /// Gives no number again that another daemon of the mount gave: the kernel may still know what it meant there.
    pub(crate) fn begin_behind(&mut self, last: u64) {
        self.next = last;
    }

    /// How many virtual inodes the kernel holds.
    pub(crate) fn held(&self) -> usize {
        self.by_number.len()
    }

    /// The number of a virtual inode, held once more.
    fn hold(&mut self, meaning: Virtual) -> InodeId {
        let next = &mut self.next;
        let id = *self.by_meaning.entry(meaning).or_insert_with(|| {
            *next += 1;
            InodeId(FIRST_NUMBER + *next)
        });
        self.by_number.entry(id).or_insert((meaning, 0)).1 += 1;
        id
    }

    /// The kernel drops references to a virtual inode.
    pub(crate) fn forget(&mut self, id: InodeId, count: u64) {
        let Some((meaning, held)) = self.by_number.get_mut(&id) else {
            return;
        };
        *held = held.saturating_sub(count);
        if *held == 0 {
            self.by_meaning.remove(meaning);
            self.by_number.remove(&id);
        }
    }
}

/// Questions and slots that may be open at a time, of one user and of all.
const QUERIES_OF_EACH: u64 = 16;
const QUERIES_OF_ALL: u64 = 64;
/// Bytes of their prompts: four of the longest, and sixteen.
const PROMPT_BYTES_OF_EACH: u64 = 64 << 20;
const PROMPT_BYTES_OF_ALL: u64 = 256 << 20;

/// What a mount keeps for these directories.
#[derive(Debug)]
pub(super) struct Prefixes {
    numbers: Mutex<Numbers>,
    /// Held while the index is brought up to date.
    turn: Mutex<index::Turn>,
    /// Sequences whose `positions.json` must be fetched from the remote.
    away: Mutex<BTreeSet<InodeId>>,
    /// Open questions and slots.
    queries: Arc<Shares>,
    /// Bytes of prompts that were asked.
    prompt_bytes: Arc<Shares>,
    slot_files: slot_file::SlotFiles,
    /// Number of the next slot that is written.
    next_slot: AtomicU64,
    /// Held while a slot becomes a sequence.
    importing: Mutex<()>,
}

impl Default for Prefixes {
    fn default() -> Prefixes {
        Prefixes {
            numbers: Mutex::default(),
            turn: Mutex::default(),
            away: Mutex::default(),
            queries: Shares::new(QUERIES_OF_EACH, QUERIES_OF_ALL),
            prompt_bytes: Shares::new(PROMPT_BYTES_OF_EACH, PROMPT_BYTES_OF_ALL),
            slot_files: slot_file::SlotFiles::default(),
            next_slot: AtomicU64::default(),
            importing: Mutex::default(),
        }
    }
}

impl Prefixes {
    /// The virtual inodes that the kernel holds.
    pub(crate) fn numbers(&self) -> MutexGuard<'_, Numbers> {
        self.numbers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What a virtual inode is.
    fn meaning_of(&self, id: InodeId) -> Result<Virtual, FsError> {
        let numbers = self.numbers();
        numbers.by_number.get(&id).map(|(meaning, _)| *meaning).ok_or(FsError::Stale)
    }

    /// Refuses a virtual inode whose number was not given out, or was forgotten.
    pub(crate) fn check_known(&self, id: InodeId) -> Result<(), FsError> {
        if is_virtual(id) { self.meaning_of(id).map(drop) } else { Ok(()) }
    }

    /// The model whose `blocks/` an inode is.
    fn model_of_blocks(&self, id: InodeId) -> Option<InodeId> {
        match is_virtual(id).then(|| self.meaning_of(id)) {
            Some(Ok(Virtual::Blocks(model))) => Some(model),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_virtual_inode_keeps_its_number_until_it_is_forgotten() {
        let mut numbers = Numbers::default();
        let (root, shard) = (Virtual::Root(InodeId(7)), Virtual::Shard(InodeId(7), 0));
        let first = numbers.hold(root);
        assert!(is_virtual(first));
        assert_ne!(numbers.hold(shard), first);
        assert_eq!(numbers.hold(root), first);
        numbers.forget(first, 1);
        assert_eq!(numbers.hold(root), first);
        numbers.forget(first, 2);
        assert_eq!(numbers.by_number.len(), 1);
        assert_ne!(numbers.hold(root), first);
    }
}
