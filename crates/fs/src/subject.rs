//! What a request is about, for a line in the log.

use super::FileSystem;
use super::attributes::Place;
use crate::history;
use kvfs_storage::store::record::InodeId;

/// What a request is about.
#[derive(Clone, Copy, Debug)]
pub enum Subject<'a> {
    /// A name.
    Name(&'a Place),
    /// A file or directory.
    Inode(InodeId),
    /// What a handle has open.
    Handle(u64),
    /// All of the mount.
    Mount,
}

/// Its path from the mountpoint, as far as that takes no pass over all names; else its inode.
pub fn shown(fs: &FileSystem, subject: Subject<'_>) -> String {
    let state = fs.core.state();
    let inode = match subject {
        Subject::Name(place) => return state.path(place.parent, &place.name),
        Subject::Mount => return "the mount".to_owned(),
        Subject::Inode(InodeId::ROOT) => return "the root of the mount".to_owned(),
        Subject::Inode(inode) => Some(inode),
        Subject::Handle(handle) => state.handles.get(&handle).map(|handle| handle.inode),
    };
    let Some(inode) = inode else { return "a file that is closed".to_owned() };
    let path = state.directory_path(inode).or_else(|| history::path_now(&state, inode, None));
    let found_in = state.nodes.get(&inode).and_then(|node| node.found_in);
    let path = path.or_else(|| history::path_in(&state, inode, found_in?));
    path.unwrap_or_else(|| match found_in.and_then(|directory| state.directory_path(directory)) {
        Some(directory) => format!("a file in {directory} (inode {})", inode.0),
        None => format!("inode {}", inode.0),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::unmounted::{FILES, Unmounted, place};

    #[test]
    fn what_can_be_told_without_a_search() {
        let unmounted = Unmounted::new();
        let fs = &unmounted.fs;
        let name = place(FILES, "a");
        let file = unmounted.write(FILES, "b", b"bytes");
        assert_eq!(shown(fs, Subject::Inode(file)), "files/b");
        assert_eq!(shown(fs, Subject::Name(&name)), "files/a");
        assert_eq!(shown(fs, Subject::Inode(FILES)), "files");
        assert_eq!(shown(fs, Subject::Inode(InodeId::ROOT)), "the root of the mount");
        assert_eq!(shown(fs, Subject::Inode(InodeId(77))), "inode 77");
        assert_eq!(shown(fs, Subject::Handle(77)), "a file that is closed");
        assert_eq!(shown(fs, Subject::Mount), "the mount");
    }
}
