//! What is computed about logical bytes while they pass.

use std::fmt;

use crate::content::{ContentHash, ContentHasher};
use kvfs_page::{Checksum, PageHasher, PageIdentity};

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
    /// What the record of an object holds for them.
    pub checksum: Checksum,
}

/// Takes logical bytes as they pass, in order.
pub(super) trait Hash {
    fn update(&mut self, bytes: &[u8]);
}

/// Computes a [`Digest`].
pub(super) struct Digester {
    content: ContentHasher,
    checksum: Checksummer,
}

/// Computes the checksum alone.
#[expect(clippy::large_enum_variant, reason = "there is one per copy, on the stack")]
pub(super) enum Checksummer {
    File(kvfs_page::ContentHasher),
    Page(PageHasher, PageIdentity),
}

impl Checksummer {
    /// One that has seen nothing.
    pub(super) fn new(subject: &Subject) -> Checksummer {
        match subject {
            Subject::File => Checksummer::File(kvfs_page::ContentHasher::new()),
            Subject::Page(identity) => Checksummer::Page(PageHasher::new(), *identity),
        }
    }

    /// The checksum of all bytes taken so far.
    pub(super) fn finish(&self) -> Checksum {
        match self {
            Checksummer::File(hasher) => hasher.finish(),
            Checksummer::Page(hasher, identity) => hasher.finish(identity).object,
        }
    }
}

impl Hash for Checksummer {
    fn update(&mut self, bytes: &[u8]) {
        match self {
            Checksummer::File(hasher) => hasher.update(bytes),
            Checksummer::Page(hasher, _) => hasher.update(bytes),
        }
    }
}

impl Digester {
    /// One that has seen nothing.
    pub(super) fn new(subject: &Subject) -> Digester {
        Digester { content: ContentHasher::default(), checksum: Checksummer::new(subject) }
    }

    /// The digest of all bytes taken so far.
    pub(super) fn finish(&self) -> Digest {
        Digest { content: self.content.finish(), checksum: self.checksum.finish() }
    }
}

impl Hash for Digester {
    fn update(&mut self, bytes: &[u8]) {
        self.content.update(bytes);
        self.checksum.update(bytes);
    }
}

impl fmt::Debug for Digester {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Digester").finish_non_exhaustive()
    }
}
