//! What is computed about logical bytes while they pass.

use std::fmt;

use crate::page::{self, Checksum, PageHasher, PageIdentity};
use crate::tier::content::{ContentHash, ContentHasher};

/// What the bytes are, which decides what their checksum is bound to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Subject {
    /// A plain file or a manifest: the checksum is of the bytes alone.
    File,
    /// A page: the checksum binds header and payload to the page's place.
    Page(PageIdentity),
}

/// What logical bytes are known by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Digest {
    /// Their name in the tiers.
    pub content: ContentHash,
    /// What [`ObjectRecord::checksum`](crate::store::record::ObjectRecord) holds for them.
    pub checksum: Checksum,
}

/// Computes a [`Digest`].
pub(super) struct Digester {
    content: ContentHasher,
    checksum: Hasher,
}

#[expect(clippy::large_enum_variant, reason = "there is one per copy, on the stack")]
enum Hasher {
    File(page::ContentHasher),
    Page(PageHasher, PageIdentity),
}

impl Digester {
    /// One that has seen nothing.
    pub(super) fn new(subject: &Subject) -> Digester {
        let checksum = match subject {
            Subject::File => Hasher::File(page::ContentHasher::new()),
            Subject::Page(identity) => Hasher::Page(PageHasher::new(), *identity),
        };
        Digester { content: ContentHasher::default(), checksum }
    }

    /// Takes the next bytes, in order.
    pub(super) fn update(&mut self, bytes: &[u8]) {
        self.content.update(bytes);
        match &mut self.checksum {
            Hasher::File(hasher) => hasher.update(bytes),
            Hasher::Page(hasher, _) => hasher.update(bytes),
        }
    }

    /// The digest of all bytes taken so far.
    pub(super) fn finish(&self) -> Digest {
        let checksum = match &self.checksum {
            Hasher::File(hasher) => hasher.finish(),
            Hasher::Page(hasher, identity) => hasher.finish(identity).object,
        };
        Digest { content: self.content.finish(), checksum }
    }
}

impl fmt::Debug for Digester {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Digester").finish_non_exhaustive()
    }
}
