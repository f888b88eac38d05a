//! `blocks/HASH.LAYER`: K and V of a page, somewhere in a file that an engine lays out itself.
//!
//! Writing a description there registers it, reading gives it back, unlinking withdraws it. They are
//! told in the memory of the mount: what an engine has mapped and not synced is lost in a crash, so
//! nothing may say afterwards that it is there. A block is forgotten when its file has no name any
//! more, is cut or punched; inode numbers are never reused, so a file that took another's name is
//! told from it.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::shares::{Share, Shares};
use crate::attributes::{Caller, Place};
use crate::core::Core;
use crate::core::handle::{Handle, Served};
use crate::core::rights::User;
use crate::opened::Opened;
use crate::{FileSystem, FsError};
use kvfs_page::block_map::{BUFFERS_MAX, BlockMap, format_block, parse_block};
use kvfs_page::{Layer, PageError, PrefixHash};
use kvfs_storage::ingest::seal::SealError;
use kvfs_storage::store::record::InodeId;

/// Blocks of a mount. With one buffer for K and V of each of 32 layers: 800 bytes each.
const BLOCKS_MAX: usize = 1 << 18;
/// Buffers of all of them: 256 MiB.
const BUFFERS_TOTAL_MAX: usize = 1 << 25;
/// A description: 20 digits for each buffer, and the rest.
const TEXT_BYTES_MAX: usize = BUFFERS_MAX * 21 + (64 << 10);

/// What descriptions that are being written may take of memory, of one user and of all: an engine has a few
/// of them open at a time.
const DRAFT_BYTES_OF_EACH: u64 = 16 << 20;
const DRAFT_BYTES_OF_ALL: u64 = 64 << 20;
/// What an empty one counts as.
const DRAFT_BYTES_MIN: u64 = 1 << 10;

/// What a block is found by: the model's directory, the prefix that it ends, its first layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct BlockKey {
    pub(super) model: InodeId,
    pub(super) hash: PrefixHash,
    pub(super) layer: Layer,
}

/// The blocks of a mount.
#[derive(Debug)]
pub(crate) struct Blocks {
    registered: Mutex<Registered>,
    draft_bytes: Arc<Shares>,
}

impl Default for Blocks {
    fn default() -> Blocks {
        let draft_bytes = Shares::new(DRAFT_BYTES_OF_EACH, DRAFT_BYTES_OF_ALL);
        Blocks { registered: Mutex::default(), draft_bytes }
    }
}

/// A block that is registered.
#[derive(Clone, Debug)]
pub(super) struct Block {
    pub(super) file: InodeId,
    /// Who has registered it.
    pub(super) owner: u32,
    pub(super) map: Arc<BlockMap>,
}

#[derive(Debug, Default)]
pub(super) struct Registered {
    pub(super) by_key: BTreeMap<BlockKey, Block>,
    by_file: BTreeMap<InodeId, Vec<BlockKey>>,
    pub(super) buffers: usize,
    pub(super) last: u64,
}

impl Blocks {
    pub(super) fn registered(&self) -> MutexGuard<'_, Registered> {
        self.registered.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many there are.
    pub(crate) fn count(&self) -> usize {
        self.registered().by_key.len()
    }

    /// Forgets the blocks in a file: their bytes are gone, or may be.
    pub(crate) fn forget_file(&self, file: InodeId) {
        let mut registered = self.registered();
        for key in registered.by_file.remove(&file).unwrap_or_default() {
            registered.forget(key);
        }
    }
}

impl Registered {
    fn put(
        &mut self, key: BlockKey, (file, owner): (InodeId, u32), mut map: BlockMap,
    ) -> Result<(), FsError> {
        self.withdraw(key);
        let is_full =
            self.by_key.len() >= BLOCKS_MAX || self.buffers + map.offsets.len() > BUFFERS_TOTAL_MAX;
        if is_full {
            return Err(FsError::NoRoom);
        }
        self.last += 1;
        (map.inode, map.registration) = (Some(file.0), Some(self.last));
        self.insert(key, Block { file, owner, map: Arc::new(map) });
        Ok(())
    }

    /// Adds one that is not there.
    pub(super) fn insert(&mut self, key: BlockKey, block: Block) {
        self.buffers += block.map.offsets.len();
        self.by_file.entry(block.file).or_default().push(key);
        self.by_key.insert(key, block);
    }

    /// Whether it was there.
    fn withdraw(&mut self, key: BlockKey) -> bool {
        let Some(file) = self.by_key.get(&key).map(|block| block.file) else { return false };
        self.forget(key);
        if let Some(keys) = self.by_file.get_mut(&file) {
            keys.retain(|other| *other != key);
            if keys.is_empty() {
                self.by_file.remove(&file);
            }
        }
        true
    }

    fn forget(&mut self, key: BlockKey) {
        if let Some(block) = self.by_key.remove(&key) {
            self.buffers -= block.map.offsets.len();
        }
    }
}

/// A description that is being written.
#[derive(Debug)]
pub(crate) struct Draft {
    key: BlockKey,
    /// Who writes it.
    caller: Caller,
    text: Mutex<Text>,
}

#[derive(Debug)]
struct Text {
    bytes: Vec<u8>,
    /// Counts them.
    held: Share,
    /// `close()` comes once more for each copy of the descriptor that dup or fork made. What was withdrawn
    /// meanwhile must not come back with it.
    is_registered: bool,
    /// How much there was when it was refused. Unless more was written since, another `close()` is refused
    /// too: whoever reads why must not find it registered later.
    refused_bytes: Option<usize>,
}

impl Draft {
    /// Adds to it; only at its end.
    pub(crate) fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), FsError> {
        let mut text = self.text();
        if text.is_registered || offset != text.bytes.len() as u64 {
            return Err(FsError::NotPermitted);
        }
        if text.bytes.len() + bytes.len() > TEXT_BYTES_MAX {
            return Err(FsError::TooLarge);
        }
        if !text.held.grow(bytes.len() as u64) {
            return Err(FsError::NoRoom);
        }
        text.bytes.extend_from_slice(bytes);
        Ok(())
    }

    fn text(&self) -> MutexGuard<'_, Text> {
        self.text.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The blocks of a mount, beside what it knows of their files.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BlockDirectory<'a> {
    blocks: &'a Blocks,
    core: &'a Core,
}

/// `close()` of a description registers it.
pub(crate) fn register_block(fs: &FileSystem, draft: &Draft) -> Result<(), FsError> {
    let publish = || fs.publishing().publish_manifest_above(draft.key.model);
    BlockDirectory::of(fs).register(draft, publish)
}

/// Withdraws a block; none if the place is another one.
pub(crate) fn unlink_block(fs: &FileSystem, place: &Place) -> Option<Result<(), FsError>> {
    let model = fs.prefixes.model_of_blocks(place.parent)?;
    let name = std::str::from_utf8(&place.name).unwrap_or_default();
    let key = parse_block(name).map(|(hash, layer)| BlockKey { model, hash, layer });
    let withdrawn = key.is_some_and(|key| fs.blocks.registered().withdraw(key));
    Some(if withdrawn { Ok(()) } else { Err(FsError::NotFound) })
}

impl<'a> BlockDirectory<'a> {
    pub(super) fn of(fs: &'a FileSystem) -> BlockDirectory<'a> {
        BlockDirectory { blocks: &fs.blocks, core: &fs.core }
    }

    /// Who has registered a block, if it is there.
    pub(super) fn owner_of(&self, key: BlockKey) -> Option<u32> {
        self.blocks.registered().by_key.get(&key).map(|block| block.owner)
    }

    /// The block of that name, if it is registered and its bytes are there.
    pub(super) fn named(&self, model: InodeId, name: &str) -> Result<Option<BlockKey>, FsError> {
        let Some((hash, layer)) = parse_block(name) else { return Ok(None) };
        let key = BlockKey { model, hash, layer };
        Ok(self.block(key)?.map(|_| key))
    }

    /// A block whose file has a name and is as long as it was.
    fn block(&self, key: BlockKey) -> Result<Option<Block>, FsError> {
        let known = self.blocks.registered().by_key.get(&key).cloned();
        let Some(block) = known else { return Ok(None) };
        let file = block.file;
        let is_there = {
            let state = self.core.state();
            match state.metadata.inode(file)? {
                Some(inode) if inode.links > 0 && !state.is_known_damaged(file) => {
                    let size = state.attributes_of(&self.core.store, file, &inode)?.size;
                    block.map.end().is_some_and(|end| end <= size)
                }
                _ => false,
            }
        };
        if !is_there {
            self.blocks.forget_file(file);
        }
        Ok(Some(block).filter(|_| is_there))
    }

    /// What reading a block gives; empty while it is being described.
    pub(super) fn text(&self, key: BlockKey) -> Result<String, FsError> {
        let block = self.block(key)?;
        let text =
            block.map(|block| serde_json::to_string(block.map.as_ref()).map(|text| text + "\n"));
        Ok(text.transpose().map_err(|_| FsError::Invalid)?.unwrap_or_default())
    }

    /// Whether a user may know of a block: who has registered it, and who may read what it is in.
    pub(super) fn shows(&self, key: BlockKey, caller: Caller) -> Result<bool, FsError> {
        let known = self.blocks.registered().by_key.get(&key).cloned();
        let Some(block) = known else { return Ok(false) };
        if [0, block.owner].contains(&caller.uid) {
            return Ok(true);
        }
        let found = self.core.state().readable_file(caller, Path::new(&block.map.file))?;
        Ok(found == Some(block.file))
    }

    pub(super) fn open(&self, id: InodeId, key: BlockKey) -> Result<Opened, FsError> {
        let text: Arc<[u8]> = Arc::from(self.text(key)?.into_bytes());
        Ok(self.add_handle(Handle::new(id, false, Served::Text(text))))
    }

    pub(super) fn open_draft(
        &self, id: InodeId, key: BlockKey, caller: Caller,
    ) -> Result<Opened, FsError> {
        let held = self.blocks.draft_bytes.take(caller.uid, DRAFT_BYTES_MIN);
        let held = held.ok_or(FsError::NoRoom)?;
        let text =
            Mutex::new(Text { bytes: Vec::new(), held, is_registered: false, refused_bytes: None });
        let served = Served::Draft(Arc::new(Draft { key, caller, text }));
        Ok(self.add_handle(Handle::new(id, true, served)))
    }

    fn add_handle(&self, handle: Handle) -> Opened {
        let closes_quietly = !handle.writes;
        Opened::uncached(self.core.state().add_handle(handle), closes_quietly)
    }

    /// Registers what a description says, once the model's manifest is published.
    fn register(
        &self, draft: &Draft, publish: impl FnOnce() -> Result<(), FsError>,
    ) -> Result<(), FsError> {
        let mut text = draft.text();
        if text.bytes.is_empty() || text.is_registered {
            return Ok(());
        }
        if text.refused_bytes == Some(text.bytes.len()) {
            return Err(FsError::Refused);
        }
        let outcome = publish().and_then(|()| self.register_described(draft, &text.bytes));
        match &outcome {
            Ok(()) => (text.bytes, text.is_registered) = (Vec::new(), true),
            Err(_) => text.refused_bytes = Some(text.bytes.len()),
        }
        outcome
    }

    fn register_described(&self, draft: &Draft, text: &[u8]) -> Result<(), FsError> {
        let key = draft.key;
        let refused = |why: String| {
            let name = format_block(&key.hash, key.layer);
            let place = Place { parent: key.model, name: format!("blocks/{name}").into_bytes() };
            self.core.report(&place, SealError::Refused(PageError::Size(why)))
        };
        let block: BlockMap =
            serde_json::from_slice(text).map_err(|error| refused(error.to_string()))?;
        let rules = self.core.model_of(&mut self.core.state(), key.model);
        let rules = rules.map_err(|_| refused("the model has no manifest.json".to_owned()))?;
        block.check(&rules.manifest).map_err(|error| refused(error.to_string()))?;
        if block.layer != key.layer.0 {
            return Err(refused(format!("its first layer is {}", block.layer)));
        }
        let found = {
            let state = self.core.state();
            match state.readable_file(draft.caller, Path::new(&block.file))? {
                Some(file) => Some((file, state.attributes(&self.core.store, file)?.size)),
                None => None,
            }
        };
        let Some((file, size)) = found else {
            return Err(refused(format!(
                "{}: no file in files/ that its writer may read",
                block.file
            )));
        };
        if block.end().is_none_or(|end| end > size) {
            return Err(refused(format!("{} has {size} bytes, a buffer ends behind", block.file)));
        }
        let model = self.core.state().inode(key.model)?;
        let mut registered = self.blocks.registered();
        // Since it was opened, somebody else may have registered another one.
        let known = registered.by_key.get(&key).map(|block| block.owner);
        if known.is_some_and(|owner| !User::from(draft.caller).passes_sticky(&model, owner)) {
            return Err(FsError::NotPermitted);
        }
        registered.put(key, (file, draft.caller.uid), block)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(buffers: usize) -> BlockMap {
        BlockMap {
            file: "files/pool".to_owned(),
            layer: 0,
            shape: [1, 2, 1],
            sizes: [1, 1],
            offsets: vec![0; buffers],
            inode: None,
            registration: None,
        }
    }

    #[test]
    fn what_is_withdrawn_or_replaced_is_forgotten_everywhere() {
        let key =
            |layer| BlockKey { model: InodeId(1), hash: PrefixHash([0; 32]), layer: Layer(layer) };
        let blocks = Blocks::default();
        let put = |layer, file, buffers| {
            blocks.registered().put(key(layer), (InodeId(file), 0), block(buffers)).unwrap();
        };
        put(0, 7, 2);
        put(1, 7, 3);
        put(2, 8, 4);
        put(0, 8, 5);
        assert_eq!((blocks.count(), blocks.registered().buffers), (3, 12));
        assert_eq!(blocks.registered().by_file[&InodeId(7)], [key(1)]);
        blocks.forget_file(InodeId(8));
        assert_eq!((blocks.count(), blocks.registered().buffers), (1, 3));
        assert!(blocks.registered().withdraw(key(1)));
        assert!(!blocks.registered().withdraw(key(1)));
        let registered = blocks.registered();
        assert!(registered.by_file.is_empty() && registered.buffers == 0);
    }

    #[test]
    fn another_daemon_goes_on_with_them() {
        let key =
            |layer| BlockKey { model: InodeId(1), hash: PrefixHash([9; 32]), layer: Layer(layer) };
        let (before, after) = (Blocks::default(), Blocks::default());
        for (layer, file) in [(0, 7), (1, 7), (2, 8)] {
            let map = BlockMap { layer, ..block(2) };
            before.registered().put(key(layer), (InodeId(file), 1000), map).unwrap();
        }
        after.go_on(before.live().unwrap());
        {
            let (before, after) = (before.registered(), after.registered());
            assert_eq!(format!("{after:?}"), format!("{before:?}"));
            assert_eq!((after.buffers, after.last), (6, 3));
        }
        before.registered().buffers = usize::MAX;
        assert_eq!(before.live().unwrap_err(), usize::MAX);
    }

    #[test]
    fn there_is_an_end_to_how_many() {
        let key = BlockKey { model: InodeId(1), hash: PrefixHash([0; 32]), layer: Layer(0) };
        let mut registered = Registered { buffers: BUFFERS_TOTAL_MAX - 1, ..Default::default() };
        let outcome = registered.put(key, (InodeId(7), 0), block(2));
        assert!(matches!(outcome, Err(FsError::NoRoom)));
    }
}
