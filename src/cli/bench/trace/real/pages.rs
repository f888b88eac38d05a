//! What stands for the blocks of a trace in a mount: pages of one small layer.
//!
//! A page is a block after all blocks before it, as in a real cache. Its tokens and its bytes follow from
//! that alone, so that whoever reads it knows each byte, and two who compute it write the same.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use super::super::read::Trace;
use crate::cli::bench::build::noise;
use crate::page::{
    Dtype, Layer, Manifest, ManifestFields, PagePlace, PrefixHash, TokenStart, names, pack_page,
};

/// Tokens of a page, which stand for those of a block.
pub(super) const PAGE_TOKENS: u32 = 16;
/// 4 KiB for a token: so 16 of them take 64 KiB, and pages that are smaller never leave the disk.
const HEADS: u32 = 8;
const DIMENSION: u32 = 128;
const MODEL: &str = "replay";

/// The first page of a prompt follows none.
const NONE: u32 = u32::MAX;

/// A block after all blocks before it.
#[derive(Clone, Copy, Debug)]
struct Page {
    block: u32,
    /// How many are before it.
    place: u32,
    hash: PrefixHash,
}

/// All prompts as pages, numbered as they appear, and what the pages hold.
#[derive(Debug)]
pub(super) struct Pages {
    manifest: Manifest,
    /// The model's directory in the mount.
    model: PathBuf,
    all: Vec<Page>,
    /// Of all requests, one after the other.
    uses: Vec<u32>,
    /// Where those of a request end.
    ends: Vec<usize>,
}

impl Pages {
    pub(super) fn new(trace: &Trace, mount: &Path) -> Result<Pages, String> {
        let fields = ManifestFields {
            page_tokens: PAGE_TOKENS,
            ..ManifestFields::new(MODEL, Dtype::F16, 1, HEADS, DIMENSION)
        };
        let manifest = Manifest::new(fields).map_err(|error| error.to_string())?;
        let model = mount.join("models").join(MODEL);
        let (uses, ends) = (Vec::new(), Vec::new());
        let mut pages = Pages { manifest, model, all: Vec::new(), uses, ends };
        let mut numbers = HashMap::new();
        for request in &trace.requests {
            pages.add(&mut numbers, trace.blocks_of(*request));
        }
        Ok(pages)
    }

    fn add(&mut self, numbers: &mut HashMap<(u32, u32), u32>, blocks: &[u32]) {
        let mut before = NONE;
        for (place, block) in (0..).zip(blocks) {
            let next = u32::try_from(self.all.len()).expect("fewer than the uses");
            let number = *numbers.entry((before, *block)).or_insert(next);
            if number == next {
                let parent = self.all.get(before as usize).map(|page| page.hash);
                let hash = PrefixHash::next(parent, &tokens(*block));
                self.all.push(Page { block: *block, place, hash });
            }
            self.uses.push(number);
            before = number;
        }
        self.ends.push(self.uses.len());
    }

    /// Different ones.
    pub(super) fn count(&self) -> usize {
        self.all.len()
    }

    /// Bytes of a page's file.
    pub(super) fn file_bytes(&self) -> u64 {
        self.manifest.geometry().file_bytes(PAGE_TOKENS)
    }

    /// The pages of a request, in order.
    pub(super) fn of(&self, request: usize) -> &[u32] {
        let first = request.checked_sub(1).map_or(0, |before| self.ends[before]);
        &self.uses[first..self.ends[request]]
    }

    /// What a sequence of these pages has in its `tokens`.
    pub(super) fn tokens(&self, pages: &[u32]) -> Vec<u8> {
        pages.iter().flat_map(|page| tokens(self.all[*page as usize].block)).collect()
    }

    pub(super) fn model(&self) -> &Path {
        &self.model
    }

    pub(super) fn manifest_text(&self) -> String {
        self.manifest.to_json()
    }

    /// Where a page is found by its content.
    pub(super) fn path(&self, page: u32) -> PathBuf {
        let hash = self.all[page as usize].hash.to_string();
        let prefix = self.model.join("prefixes").join(&hash[..2]).join(&hash);
        prefix.join(format!("{}.safetensors", names::format_layer(Layer(0))))
    }

    /// Its name in a sequence.
    pub(super) fn name(&self, page: u32) -> String {
        names::format_page(self.start(page))
    }

    fn start(&self, page: u32) -> TokenStart {
        TokenStart(u64::from(self.all[page as usize].place) * u64::from(PAGE_TOKENS))
    }

    /// All bytes of a page's file.
    pub(super) fn bytes(&self, page: u32) -> Result<Vec<u8>, String> {
        let length = self.manifest.geometry().row_bytes() * u64::from(PAGE_TOKENS);
        let rows = noise(length, u64::from(page) + 1);
        let packed = PagePlace::new(&self.manifest, Layer(0), self.start(page))
            .and_then(|place| pack_page(&place, &rows, PAGE_TOKENS));
        packed.map_err(|error| error.to_string())
    }

    /// How many bytes of what was read are not those of a page, missing ones included.
    pub(super) fn wrong_bytes(&self, page: u32, read: &[u8]) -> Result<u64, String> {
        let expected = self.bytes(page)?;
        if expected == read {
            return Ok(0);
        }
        let differ = expected.iter().zip(read).filter(|(a, b)| a != b).count();
        Ok((differ + expected.len().abs_diff(read.len())) as u64)
    }
}

/// The tokens of a block's page, four bytes each.
fn tokens(block: u32) -> Vec<u8> {
    block.to_le_bytes().repeat(PAGE_TOKENS as usize)
}

#[cfg(test)]
mod tests {
    use super::super::super::read::trace_of;
    use super::*;

    fn pages(requests: &[&[u64]]) -> Pages {
        Pages::new(&trace_of(requests), Path::new("/mnt")).unwrap()
    }

    #[test]
    fn a_block_after_others_is_another_page() {
        let pages = pages(&[&[1, 2, 3], &[1, 2], &[2, 3], &[]]);
        assert_eq!((pages.count(), pages.of(0), pages.of(1)), (5, &[0, 1, 2][..], &[0, 1][..]));
        assert_eq!((pages.of(2), pages.of(3)), (&[3, 4][..], &[][..]));
        assert_ne!(pages.path(1), pages.path(3));
        assert_eq!(pages.name(4), "0000016.safetensors");
        let prefix = pages.manifest.prefix_of(&pages.tokens(&[0, 1])).unwrap();
        assert!(pages.path(1).to_string_lossy().contains(&prefix.to_string()));
    }

    #[test]
    fn a_wrong_byte_is_noticed_wherever_it_is() {
        let pages = pages(&[&[1, 2]]);
        let good = pages.bytes(1).unwrap();
        assert_eq!(good.len() as u64, pages.file_bytes());
        assert_eq!(pages.wrong_bytes(1, &good), Ok(0));
        for place in [0, 20, 4095, 4096, good.len() / 2, good.len() - 1] {
            let mut bad = good.clone();
            bad[place] ^= 1;
            assert_eq!(pages.wrong_bytes(1, &bad), Ok(1), "{place}");
        }
        assert_eq!(pages.wrong_bytes(1, &good[..good.len() - 3]), Ok(3));
        assert!(pages.wrong_bytes(0, &good).unwrap() > 50_000, "another page");
    }
}
