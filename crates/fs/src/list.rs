//! readdir(3), resumable at any offset without remembering the reader.

use super::attributes::Attributes;
use super::{FileSystem, FsError, lookup, prefixes, views};
use kvfs_storage::store::keys::FIRST_NAME_OFFSET;
use kvfs_storage::store::record::{InodeId, Kind};

/// Lines of one answer. The kernel asks with room for thousands, and everybody waits while the state is looked at: so
/// many with their attributes take some 3 ms. It asks for the rest.
const LINES_AT_ONCE: usize = 512;

/// What a listing is to carry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Listing {
    /// Names and types.
    Names,
    /// Attributes as well; each one shown counts as a lookup.
    Attributes,
}

/// One line of a listing.
#[derive(Clone, Copy, Debug)]
pub struct Listed<'a> {
    /// Where the listing goes on after this line.
    pub next_offset: u64,
    /// The name.
    pub name: &'a [u8],
    /// The inode.
    pub inode: InodeId,
    /// `S_IFMT` bits.
    pub file_type: u32,
    /// Attributes, if asked for; never for `.` and `..`.
    pub attributes: Option<Attributes>,
    /// The name may be cached.
    pub name_is_stable: bool,
}

impl Listed<'_> {
    /// Name and attributes may be cached.
    pub fn is_stable(&self) -> bool {
        self.name_is_stable && self.attributes.is_some_and(|found| found.is_at_rest)
    }
}

impl FileSystem {
    /// Lists a directory from `offset` on. `emit` returns false when its buffer is full.
    pub fn list(
        &self, id: InodeId, offset: u64, listing: Listing,
        mut emit: impl FnMut(&Listed<'_>) -> bool,
    ) -> Result<(), FsError> {
        if views::is_view(id) {
            return views::list_views(id, offset, emit);
        }
        if prefixes::is_virtual(id) {
            return self.virtual_directories().list(id, offset, listing, emit);
        }
        if offset == 0 {
            self.publishing().publish_all(Some(id));
        }
        let mut state = self.core.state();
        let (inode, class) = match state.directory(id) {
            // A removed directory that somebody still has open is empty.
            Err(FsError::NotDirectory | FsError::NotFound | FsError::Stale) => return Ok(()),
            outcome => outcome?,
        };
        let Kind::Directory { parent, .. } = inode.kind else {
            return Err(FsError::NotDirectory);
        };
        for (index, name, inode) in [(0, b".".as_slice(), id), (1, b"..", parent)] {
            let line = Listed {
                next_offset: index + 1,
                name,
                inode,
                file_type: libc::S_IFDIR,
                attributes: None,
                name_is_stable: false,
            };
            if offset <= index && !emit(&line) {
                return Ok(());
            }
        }
        let (mut shown, mut lines) = (Vec::new(), 0);
        let from = offset.max(FIRST_NAME_OFFSET);
        state.metadata.entries(id, from, |at, name, entry| {
            let attributes = match listing {
                Listing::Names => None,
                Listing::Attributes => match state.attributes(&self.core.store, entry.inode) {
                    Ok(attributes) => Some(attributes),
                    // A file whose bytes are gone hides none of the others: who looks it up hears of it.
                    Err(error) => {
                        log::warn!("inode {}: {error}: run kvfs fsck", entry.inode.0);
                        None
                    }
                },
            };
            let name_is_stable = attributes
                .is_some_and(|shown| lookup::name_is_stable(class, &shown, name))
                && !state.is_pending(id, name);
            let (inode, file_type) = (entry.inode, entry.file_type);
            let next_offset = at + 1;
            let fits =
                emit(&Listed { next_offset, name, inode, file_type, attributes, name_is_stable });
            if fits && attributes.is_some() {
                shown.push(inode);
            }
            lines += 1;
            fits && lines < LINES_AT_ONCE
        })?;
        for inode in shown {
            let node = state.nodes.entry(inode).or_default();
            node.lookups += 1;
            node.found_in = Some(id);
        }
        Ok(())
    }
}
