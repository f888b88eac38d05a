//! A sealed page, mapped.

use std::fs::File;
use std::path::Path;

use kvfs::attention::KvBlock;
use kvfs::page::{Geometry, PageView, unpack_rows};
use memmap2::Mmap;

use super::files::about;
use crate::Result;

/// A page file, mapped for as long as the cache is open.
///
/// With passthrough the mapping outlives the daemon. Without it a daemon that dies takes the pages
/// along that were not yet read, and touching one of them is SIGBUS, as with a cut off NFS server.
#[derive(Debug)]
pub(super) struct MappedPage {
    map: Mmap,
    geometry: Geometry,
    tokens: u32,
}

impl MappedPage {
    /// Maps a page file and checks its header; the mount has verified its bytes. The file is
    /// returned as well: a new one is not yet durable.
    pub(super) fn open(path: &Path, geometry: &Geometry) -> Result<(Self, File)> {
        let file = File::open(path).map_err(about(path))?;
        // SAFETY: a mount shows a page when it is sealed, and nobody can write to it or cut it
        // from then on. Removing or replacing it changes the name, not these bytes.
        let map = unsafe { Mmap::map(&file) }.map_err(about(path))?;
        let tokens = PageView::parse(&map, geometry)?.tokens();
        let page = Self { map, geometry: *geometry, tokens };
        Ok((page, file))
    }

    /// How many tokens the page has; the last one of a sequence may be short.
    pub(super) fn tokens(&self) -> usize {
        self.tokens as usize
    }

    /// Its keys and values, where they lie.
    pub(super) fn block(&self, first_position: u64) -> Result<KvBlock<'_>> {
        Ok(KvBlock::page(&self.view()?, first_position))
    }

    /// Its rows in the order of a tail.
    pub(super) fn unpack(&self) -> Result<Vec<u8>> {
        Ok(unpack_rows(&self.view()?))
    }

    fn view(&self) -> Result<PageView<'_>> {
        Ok(PageView::new(&self.map, &self.geometry, self.tokens)?)
    }
}
