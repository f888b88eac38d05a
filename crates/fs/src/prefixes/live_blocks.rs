//! Registered blocks go on with another daemon: nobody else knows of them.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::block::{Block, BlockKey, Blocks};
use kvfs_page::block_map::BlockMap;
use kvfs_page::{Layer, PrefixHash};
use kvfs_storage::store::record::InodeId;

/// Buffers that are handed over at most: writing down so many takes some 50 ms, in which requests wait.
const BUFFERS_MAX: usize = 1 << 21;

/// All blocks of a mount.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct LiveBlocks {
    all: Vec<LiveBlock>,
    /// The number of the last registration.
    last: u64,
}

#[derive(Debug, Serialize, Deserialize)]
struct LiveBlock {
    model: InodeId,
    hash: [u8; 32],
    file: InodeId,
    owner: u32,
    path: String,
    layer: u32,
    shape: [u32; 3],
    sizes: [u64; 2],
    offsets: Vec<u64>,
    registration: u64,
}

impl Blocks {
    /// What another daemon goes on with.
    ///
    /// # Errors
    /// How many buffers there are, if they are too many.
    pub(crate) fn live(&self) -> Result<LiveBlocks, usize> {
        let registered = self.registered();
        if registered.buffers > BUFFERS_MAX {
            return Err(registered.buffers);
        }
        let live = |(key, block): (&BlockKey, &Block)| LiveBlock {
            model: key.model,
            hash: key.hash.0,
            file: block.file,
            owner: block.owner,
            path: block.map.file.clone(),
            layer: block.map.layer,
            shape: block.map.shape,
            sizes: block.map.sizes,
            offsets: block.map.offsets.clone(),
            registration: block.map.registration.unwrap_or_default(),
        };
        let all = registered.by_key.iter().map(live).collect();
        Ok(LiveBlocks { all, last: registered.last })
    }

    /// Goes on with those of the daemon before.
    pub(crate) fn go_on(&self, live: LiveBlocks) {
        let mut registered = self.registered();
        for one in live.all {
            let LiveBlock { file, owner, layer, shape, sizes, offsets, .. } = one;
            let key =
                BlockKey { model: one.model, hash: PrefixHash(one.hash), layer: Layer(layer) };
            let (inode, registration) = (Some(file.0), Some(one.registration));
            let map =
                BlockMap { file: one.path, layer, shape, sizes, offsets, inode, registration };
            registered.insert(key, Block { file, owner, map: Arc::new(map) });
        }
        registered.last = live.last;
    }
}
