//! Where the K and V of one page's tokens lie in a file that an engine lays out itself.
//!
//! An engine that runs its own allocator in one large file (as Vineyard's blobs are used) has no
//! page files. It tells where the buffers of a page are instead, and readers take them from there.
//!
//! ```json
//! {"file": "files/pool", "layer": 0, "shape": [2, 2, 1], "sizes": [4096, 4096],
//!  "offsets": [0, 65536, 4096, 69632]}
//! ```
//!
//! `shape` is `[layers, 2, buffers]`: for each layer from `layer` on K, then V, each in that many
//! buffers. `sizes` are the bytes of each buffer of K and of V, `offsets` where they begin in the
//! file, in the order of the shape. The buffers of K one after the other are the tensor `k` of a full
//! page, in the manifest's layout and dtype, and those of V are `v`.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::error::PageError;
use super::layer_kind::LayerKind;
use super::limits::index;
use super::manifest::Manifest;
use super::{Layer, PrefixHash, names};

/// Buffers of one block, which bounds its JSON to some 1.4 MiB.
pub const BUFFERS_MAX: usize = 1 << 16;

/// K or V.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Part {
    /// Keys.
    K,
    /// Values.
    V,
}

/// A block: which file, and where in it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BlockMap {
    /// Path of the file, from the mountpoint.
    pub file: String,
    /// The first layer.
    pub layer: u32,
    /// `[layers, 2, buffers]`
    pub shape: [u32; 3],
    /// Bytes of each buffer of K, and of V.
    pub sizes: [u64; 2],
    /// Where each buffer begins.
    pub offsets: Vec<u64>,
    /// The file's inode number, in answers: another one under the same name is another file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub inode: Option<u64>,
    /// Counts registrations, in answers: another number is another block.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub registration: Option<u64>,
}

impl BlockMap {
    /// Whether it describes a full page of layers of this cache.
    ///
    /// # Errors
    /// [`PageError::Place`] for layers that keep no pages, [`PageError::Size`] for anything else.
    pub fn check(&self, manifest: &Manifest) -> Result<(), PageError> {
        let [layers, parts, buffers] = self.shape;
        let count = (u64::from(layers) * u64::from(parts)).saturating_mul(u64::from(buffers));
        if layers == 0 || parts != 2 || buffers == 0 || count > BUFFERS_MAX as u64 {
            return Err(PageError::Size(format!(
                "shape {:?} of a block: [layers, 2, buffers] with 1 to {BUFFERS_MAX} buffers in all",
                self.shape
            )));
        }
        if self.offsets.len() as u64 != count {
            return Err(PageError::Size(format!(
                "a block of shape {:?} has {count} offsets, not {}",
                self.shape,
                self.offsets.len()
            )));
        }
        let end = u64::from(self.layer) + u64::from(layers);
        if end > u64::from(manifest.geometry().num_layers()) {
            return Err(PageError::Place(format!("there is no layer {}", end - 1)));
        }
        for layer in self.layers() {
            let kind = manifest.layer_kind(layer);
            if !kind.as_ref().is_some_and(LayerKind::has_rows_of_tokens) {
                return Err(PageError::Place(format!("layer {layer} keeps no pages")));
            }
            // An answer with K and V alone would be taken for the whole page.
            if manifest.side_rows(layer).is_some() {
                return Err(PageError::Place(format!(
                    "layer {layer} keeps side rows, for which a block has no buffers: write pages"
                )));
            }
        }
        let geometry = manifest.geometry();
        let tokens = geometry.page_tokens();
        let expected = [geometry.k_bytes(tokens), geometry.v_bytes(tokens)];
        let found = self.sizes.map(|size| size.checked_mul(u64::from(buffers)));
        if found != expected.map(Some) {
            return Err(PageError::Size(format!(
                "{buffers} buffers of {:?} bytes are not the {expected:?} bytes of K and V of a page",
                self.sizes
            )));
        }
        self.end().map(drop).ok_or_else(|| PageError::Size("an offset overflows".to_owned()))
    }

    /// The layers.
    pub fn layers(&self) -> impl Iterator<Item = Layer> + use<> {
        (self.layer..self.layer.saturating_add(self.shape[0])).map(Layer)
    }

    /// Where the last byte is; `None` if that overflows.
    pub fn end(&self) -> Option<u64> {
        let buffers = self.shape[2].max(1) as usize;
        let mut ends = self.offsets.iter().enumerate().map(|(number, offset)| {
            let size = self.sizes[number / buffers % 2];
            offset.checked_add(size)
        });
        ends.try_fold(0, |last: u64, end| end.map(|end| last.max(end)))
    }

    /// The buffers of one tensor, in order; empty for a layer that it does not have.
    pub fn buffers(&self, layer: Layer, part: Part) -> impl Iterator<Item = Range<u64>> + '_ {
        let buffers = self.shape[2] as usize;
        let number = layer.0.checked_sub(self.layer).filter(|number| *number < self.shape[0]);
        let (part, size) = match part {
            Part::K => (0, self.sizes[0]),
            Part::V => (1, self.sizes[1]),
        };
        let first = number.map(|number| (number as usize * 2 + part) * buffers);
        let offsets = first.and_then(|first| self.offsets.get(first..first + buffers));
        offsets.unwrap_or_default().iter().map(move |offset| *offset..offset.saturating_add(size))
    }
}

/// The name of a block: of the prefix that it ends, and its first layer.
pub fn format_block(hash: &PrefixHash, layer: Layer) -> String {
    format!("{hash}.{}", names::format_layer(layer))
}

/// What the name of a block says.
pub fn parse_block(name: &str) -> Option<(PrefixHash, Layer)> {
    let (hash, layer) = name.split_once('.')?;
    Some((hash.parse().ok()?, names::parse_layer(layer.as_bytes())?))
}

/// Bytes of a tensor, as memory has them.
pub fn tensor_bytes(buffers: impl Iterator<Item = Range<u64>>) -> usize {
    buffers.map(|buffer| index(buffer.end - buffer.start)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Dtype, ManifestFields};

    /// K and V of a page of 32 tokens are 2048 bytes each.
    fn manifest() -> Manifest {
        let mut fields = ManifestFields::new("test", Dtype::F16, 3, 2, 16);
        fields.page_tokens = 32;
        fields.layers = Some(vec![
            LayerKind::Attention,
            LayerKind::Sliding { window: 64 },
            LayerKind::Recurrent,
        ]);
        Manifest::new(fields).unwrap()
    }

    fn block() -> BlockMap {
        BlockMap {
            file: "files/pool".to_owned(),
            layer: 0,
            shape: [2, 2, 2],
            sizes: [1024, 1024],
            offsets: vec![0, 1024, 4096, 5120, 8192, 9216, 100_000, 99],
            inode: None,
            registration: None,
        }
    }

    #[test]
    fn a_block_is_a_full_page_of_layers_that_keep_pages() {
        fn check(change: impl Fn(&mut BlockMap), expected: bool) {
            let mut block = block();
            change(&mut block);
            assert_eq!(block.check(&manifest()).is_ok(), expected, "{block:?}");
        }
        check(|_| {}, true);
        check(|block| (block.shape, block.layer) = ([1, 2, 4], 1), false);
        check(|block| (block.shape, block.layer, block.sizes) = ([1, 2, 4], 1, [512; 2]), true);
        check(|block| block.layer = 1, false);
        check(|block| block.layer = u32::MAX, false);
        check(|block| block.shape = [2, 1, 4], false);
        check(|block| block.shape = [0, 2, 2], false);
        check(|block| block.shape = [u32::MAX; 3], false);
        check(|block| block.offsets.truncate(7), false);
        check(|block| block.sizes = [1024, 1023], false);
        check(|block| block.sizes = [u64::MAX; 2], false);
        check(|block| block.offsets[0] = u64::MAX - 5, false);
    }

    #[test]
    fn a_layer_with_side_rows_has_no_blocks() {
        let mut fields = manifest().fields().clone();
        let side = crate::SideRows { name: "index_k".to_owned(), row_bytes: 8 };
        fields.layers.as_mut().unwrap()[0] = LayerKind::WithSide(side);
        let error = block().check(&Manifest::new(fields).unwrap()).unwrap_err();
        assert_eq!(error.reason(), "place");
        assert!(error.to_string().starts_with("layer 0 keeps side rows"), "{error}");
    }

    #[test]
    fn buffers_are_where_the_shape_says() {
        let block = block();
        let of = |layer, part| block.buffers(Layer(layer), part).collect::<Vec<_>>();
        assert_eq!(of(0, Part::K), [0..1024, 1024..2048]);
        assert_eq!(of(0, Part::V), [4096..5120, 5120..6144]);
        assert_eq!(of(1, Part::V), [100_000..101_024, 99..1123]);
        assert!(of(2, Part::K).is_empty());
        assert_eq!(block.end(), Some(101_024));
        assert_eq!(tensor_bytes(block.buffers(Layer(1), Part::V)), 2048);
    }

    #[test]
    fn one_block_has_one_name() {
        let hash = PrefixHash([7; 32]);
        let name = format_block(&hash, Layer(12));
        assert_eq!(parse_block(&name), Some((hash, Layer(12))));
        for wrong in ["", "07", &name[..66], &name.to_uppercase(), &format!("{name}x")] {
            let same = wrong == name;
            assert_eq!(parse_block(wrong).is_some(), same, "{wrong}");
        }
    }
}
