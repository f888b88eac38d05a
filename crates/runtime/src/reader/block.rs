//! Blocks that an engine lays out itself, in one large file of the mount.
//!
//! ```no_run
//! use kvfs_page::{Layer, PrefixHash};
//! use kvfs_runtime::reader::Block;
//!
//! let model = "/mnt/kv/models/llama".as_ref();
//! let hash: PrefixHash = "5d85718ec594b982c252d0279e5966ffca33a5eaf2a455038d3ab331fde70cea".parse()?;
//! if let Some(block) = Block::find(model, &hash, Layer(0))? {
//!     let mut k_and_v = vec![0; block.layer_bytes(Layer(0))];
//!     let kv = block.read(Layer(0), 0, &mut k_and_v)?; // for kvfs_runtime::attention
//!     if block.is_current()? {
//!         // what was read is what the engine has registered
//! #       drop(kv);
//!     }
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use super::{ReadError, listing};
use crate::attention::{KvBlock, Tensor, Values};
use crate::page::block_map::{BlockMap, Part, format_block, tensor_bytes};
use crate::page::limits::index;
use crate::page::{Layer, Layout, Manifest, PrefixHash, Strides, names};
use crate::sys;

/// A block that is registered, with its file open.
#[derive(Debug)]
pub struct Block {
    path: PathBuf,
    map: BlockMap,
    manifest: Manifest,
    file: File,
}

/// Registers where the K and V of a page lie, which a prefix ends; another block there is replaced.
///
/// # Errors
/// [`ReadError::Io`]: EINVAL if the block does not fit the model or its file (`.kvfs/errors` says
/// why), ENOSPC if there are too many.
pub fn register_block(model: &Path, hash: &PrefixHash, block: &BlockMap) -> Result<(), ReadError> {
    let path = path_of(model, hash, Layer(block.layer));
    let text = serde_json::to_vec(block).map_err(|error| ReadError::io(&path)(error.into()))?;
    let write = || -> io::Result<()> {
        let mut options = File::options();
        let mut file = options.write(true).create(true).truncate(true).open(&path)?;
        file.write_all(&text)?;
        // Only close() tells whether it was refused.
        Ok(nix::unistd::close(file)?)
    };
    write().map_err(ReadError::io(&path))
}

/// Withdraws a block; whether it was registered.
///
/// # Errors
/// [`ReadError::Io`] and [`ReadError::Disconnected`].
pub fn unregister_block(model: &Path, hash: &PrefixHash, layer: Layer) -> Result<bool, ReadError> {
    let path = path_of(model, hash, layer);
    match fs::remove_file(&path) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(ReadError::io(&path)(error)),
    }
}

impl Block {
    /// The block that ends a prefix, and begins with this layer; none if there is none whose bytes
    /// are there.
    ///
    /// # Errors
    /// [`ReadError::Manifest`] if the model has none, [`ReadError::Io`] and
    /// [`ReadError::Disconnected`].
    pub fn find(model: &Path, hash: &PrefixHash, layer: Layer) -> Result<Option<Self>, ReadError> {
        let path = path_of(model, hash, layer);
        let Some(map) = lookup(&path)? else { return Ok(None) };
        let manifest = listing::read_manifest(model)?;
        let refused = |error| ReadError::Refused { path: path.clone(), error };
        map.check(&manifest).map_err(refused)?;
        // MOUNT/models/NAME
        let mount = model.ancestors().nth(2).unwrap_or(model);
        let target = mount.join(&map.file);
        let file = match sys::open_regular_no_follow(&target) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            outcome => outcome.map_err(ReadError::io(&target))?,
        };
        // Another file may have its name by now.
        let metadata = file.metadata().map_err(ReadError::io(&target))?;
        let is_it = Some(metadata.ino()) == map.inode && map.end() <= Some(metadata.len());
        Ok(is_it.then_some(Self { path, map, manifest, file }))
    }

    /// Where its buffers lie.
    pub fn map(&self) -> &BlockMap {
        &self.map
    }

    /// The file that they lie in, to be mapped or read by whoever knows how.
    ///
    /// A mapping of it dies (SIGBUS) where the engine cuts the file; reading only comes out short.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Bytes of K and V of a layer; 0 for one that it does not have.
    pub fn layer_bytes(&self, layer: Layer) -> usize {
        [Part::K, Part::V].into_iter().map(|part| tensor_bytes(self.map.buffers(layer, part))).sum()
    }

    /// Reads K and V of a layer to where the caller wants them, and shows them as the block of
    /// tokens from `first_position` on: a page, without a copy in between.
    ///
    /// # Errors
    /// [`ReadError::Arguments`] if `bytes` is not [`layer_bytes`](Self::layer_bytes) long,
    /// [`ReadError::Changed`] if the file was cut, [`ReadError::Io`] and [`ReadError::Disconnected`].
    pub fn read<'bytes>(
        &self, layer: Layer, first_position: u64, bytes: &'bytes mut [u8],
    ) -> Result<KvBlock<'bytes>, ReadError> {
        let expected = self.layer_bytes(layer);
        if bytes.len() != expected || expected == 0 {
            return Err(ReadError::Arguments(format!(
                "{} bytes for layer {layer} of a block, which has {expected}",
                bytes.len()
            )));
        }
        let mut at = 0;
        for part in [Part::K, Part::V] {
            for buffer in self.map.buffers(layer, part) {
                let end = at + index(buffer.end - buffer.start);
                match self.file.read_exact_at(&mut bytes[at..end], buffer.start) {
                    Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                        return Err(ReadError::Changed(self.path.clone()));
                    }
                    outcome => outcome.map_err(ReadError::io(&self.path))?,
                }
                at = end;
            }
        }
        Ok(self.block_of(first_position, bytes))
    }

    /// `k`, then `v`, as in a page.
    fn block_of<'bytes>(&self, first_position: u64, bytes: &'bytes [u8]) -> KvBlock<'bytes> {
        let geometry = self.manifest.geometry();
        let tokens = geometry.page_tokens();
        let (k, v) = bytes.split_at(index(geometry.k_bytes(tokens)));
        let strides = |row_bytes: u64| {
            let row = index(row_bytes);
            let (tokens, heads) = (tokens as usize, geometry.num_kv_heads() as usize);
            match geometry.layout() {
                Layout::Hnd => Strides { head: row * tokens, token: row },
                Layout::Nhd => Strides { head: row, token: row * heads },
            }
        };
        let values = Tensor { bytes: v, strides: strides(geometry.v_row_bytes()) };
        KvBlock {
            k: Tensor { bytes: k, strides: strides(geometry.k_row_bytes()) },
            v: if v.is_empty() { Values::Latent } else { Values::Rows(values) },
            dtype: geometry.dtype(),
            tokens: tokens as usize,
            first_position,
            shift: 0,
        }
    }

    /// Whether it is registered still. An engine may use the buffers for something else once it has
    /// withdrawn the block, so what was read before counts only if this says so afterwards.
    ///
    /// # Errors
    /// [`ReadError::Io`] and [`ReadError::Disconnected`].
    pub fn is_current(&self) -> Result<bool, ReadError> {
        let now = lookup(&self.path)?;
        Ok(now.is_some_and(|now| now.registration == self.map.registration))
    }
}

fn path_of(model: &Path, hash: &PrefixHash, layer: Layer) -> PathBuf {
    model.join(names::BLOCKS).join(format_block(hash, layer))
}

/// What the mount says about a block.
fn lookup(path: &Path) -> Result<Option<BlockMap>, ReadError> {
    let text = match fs::read(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        outcome => outcome.map_err(ReadError::io(path))?,
    };
    // Nothing is there any more if it went between being found and being read.
    if text.is_empty() {
        return Ok(None);
    }
    serde_json::from_slice(&text).map(Some).map_err(|error| ReadError::io(path)(error.into()))
}
