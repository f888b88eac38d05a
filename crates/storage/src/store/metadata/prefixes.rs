//! What pages are found by besides their names: the tokens that they are about, and their bytes.
//!
//! These records are derived from others and nothing else relies on them, so they may lag behind:
//! whoever finds something here looks whether it is still so.

use super::{Life, Metadata};
use crate::store::StoreError;
use crate::store::keys;
use crate::store::record::{DirectoryClass, IndexedPage, IndexedTokens, InodeId, Kind};

/// Tokens of a page that are part of a key. A page of more is found by these, and compared.
pub const LEAD_TOKENS_MAX: usize = 1024;

/// What happened to a token file since it was indexed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum TokensChange {
    /// It grew, or is another file now.
    Grown,
    /// Something was taken away: what is in it now may be anything.
    Truncated,
}

impl Metadata {
    /// A page with this checksum, unless it is another one by now.
    pub fn page_with(&self, checksum: &[u8; 16]) -> Result<Option<InodeId>, StoreError> {
        self.get(&keys::checksum(checksum))
    }

    /// A page has this checksum.
    pub fn note_page(&mut self, checksum: &[u8; 16], page: InodeId) {
        self.put(Life::Durable, keys::checksum(checksum), &page);
    }

    /// A page with this checksum is gone.
    pub fn forget_page(&mut self, checksum: &[u8; 16], page: InodeId) -> Result<(), StoreError> {
        if self.page_with(checksum)? == Some(page) {
            self.remove(Life::Durable, keys::checksum(checksum));
        }
        Ok(())
    }

    /// The tokens of a sequence changed.
    pub fn tokens_changed(&mut self, sequence: InodeId, change: TokensChange) {
        let known = self.unindexed.entry(sequence).or_insert(change);
        *known = change.max(*known);
    }

    /// A name was given to a file or taken from one.
    pub(super) fn note_tokens(&mut self, parent: InodeId, name: &[u8]) {
        if name == crate::page::names::TOKENS.as_bytes() {
            self.tokens_changed(parent, TokensChange::Grown);
        }
    }

    /// The file of that name tells where the rows of a sequence stand, if it is one's. Whether it is.
    pub fn note_positions(&mut self, parent: InodeId, name: &[u8], inode: InodeId) -> bool {
        if name != crate::page::names::POSITIONS.as_bytes() {
            return false;
        }
        let directory = self.inode(parent).ok().flatten().map(|directory| directory.kind);
        let class = DirectoryClass::Sequence;
        let is_one =
            matches!(directory, Some(Kind::Directory { class: found, .. }) if found == class);
        self.positions.extend(is_one.then_some(inode));
        is_one
    }

    /// How far a sequence is indexed.
    pub fn indexed(&self, sequence: InodeId) -> Result<Option<IndexedTokens>, StoreError> {
        self.get(&keys::indexed(sequence))
    }

    /// Notes how far a sequence is indexed.
    pub fn put_indexed(&mut self, sequence: InodeId, indexed: &IndexedTokens) {
        self.put(Life::Durable, keys::indexed(sequence), indexed);
    }

    /// A sequence has no pages in the index any more.
    pub fn remove_indexed(&mut self, sequence: InodeId) {
        self.remove(Life::Durable, keys::indexed(sequence));
    }

    /// Whether anything was ever indexed.
    pub fn has_index(&self) -> Result<bool, StoreError> {
        let (mut found, every) = (false, keys::table(b'Q'));
        self.scan(&every, &every, |_, _| {
            found = true;
            false
        })?;
        Ok(found)
    }

    /// One indexed page of a sequence.
    pub fn indexed_page(
        &self, sequence: InodeId, page: u32,
    ) -> Result<Option<IndexedPage>, StoreError> {
        self.get(&keys::indexed_page(sequence, page))
    }

    /// Adds a page of a sequence.
    pub fn add_indexed_page(
        &mut self, (model, sequence): (InodeId, InodeId), page: u32, record: &IndexedPage,
    ) {
        for key in keys_of(model, sequence, record) {
            self.put(Life::Durable, key, &page);
        }
        self.put(Life::Durable, keys::indexed_page(sequence, page), record);
    }

    /// Takes a page of a sequence out again.
    pub fn remove_indexed_page(
        &mut self, (model, sequence): (InodeId, InodeId), page: u32, record: &IndexedPage,
    ) {
        for key in keys_of(model, sequence, record) {
            self.remove(Life::Durable, key);
        }
        self.remove(Life::Durable, keys::indexed_page(sequence, page));
    }

    /// Some indexed pages of a sequence, from one on. Who removes them goes on behind them: what was removed
    /// since the last commit is still read, to be passed over.
    pub fn some_indexed_pages(
        &self, sequence: InodeId, first: u32, count: usize,
    ) -> Result<Vec<(u32, IndexedPage)>, StoreError> {
        let from = keys::indexed_page(sequence, first);
        let mut numbers = Vec::new();
        self.scan(&from, &keys::indexed(sequence), |key, _| {
            numbers.extend(key.last_chunk().map(|bytes| u32::from_be_bytes(*bytes)));
            numbers.len() < count
        })?;
        let page = |number| Ok(self.indexed_page(sequence, number)?.map(|page| (number, page)));
        numbers.into_iter().filter_map(|number| page(number).transpose()).collect()
    }

    /// Some sequences that have a prefix, and the page that ends it.
    pub fn prefix_holders(
        &self, model: InodeId, prefix: &[u8; 32], count: usize,
    ) -> Result<Vec<(InodeId, u32)>, StoreError> {
        self.some_of_index(&keys::holders(model, prefix), count)
    }

    /// Some sequences that continue a prefix with `tokens`, and the page that does.
    pub fn prefix_continuations(
        &self, model: InodeId, prefix: &[u8; 32], tokens: &[u8], count: usize,
    ) -> Result<Vec<(InodeId, u32)>, StoreError> {
        self.some_of_index(&keys::continuations(model, prefix, tokens), count)
    }

    fn some_of_index(
        &self, prefix: &[u8], count: usize,
    ) -> Result<Vec<(InodeId, u32)>, StoreError> {
        let mut found = Vec::new();
        self.scan(prefix, prefix, |key, value| {
            let page = super::decode(value).ok();
            found.extend(keys::sequence(key).zip(page));
            found.len() < count
        })?;
        Ok(found)
    }
}

/// Under which keys a page can be found.
fn keys_of(model: InodeId, sequence: InodeId, page: &IndexedPage) -> impl Iterator<Item = Vec<u8>> {
    let continues = keys::continuations(model, &page.parent, &page.lead);
    let holds = page.hash.map(|hash| keys::holders(model, &hash));
    [Some(continues), holds].into_iter().flatten().map(move |key| keys::of_sequence(key, sequence))
}
