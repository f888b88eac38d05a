//! `.kvfs/hottest`: where the files lie that were opened last.
//!
//! An open leaves the file's number beside the time of its use, and nothing more. Whoever reads the view pays for finding the
//! sequences: some hundred numbers, with the state held for one directory at a time.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fmt::Write;

use super::FileSystem;
use crate::core::state::State;
use kvfs_storage::store::record::{DirectoryClass, InodeId, Kind};

/// What stands for files whose place nobody has asked for lately.
const ELSEWHERE: &str = "-";

/// A line `OPENS PATH` for each sequence, or directory that is in none, the most opens first.
pub(super) fn text(fs: &FileSystem) -> String {
    let latest = fs.retention.latest_uses();
    let mut by_directory = BTreeMap::<Option<InodeId>, u64>::new();
    {
        let state = fs.core.state();
        for id in latest {
            let found_in = state.nodes.get(&id).and_then(|node| node.found_in);
            *by_directory.entry(found_in).or_default() += 1;
        }
    }
    let mut by_path = BTreeMap::<String, u64>::new();
    for (directory, opens) in by_directory {
        let path = directory.and_then(|directory| path_of(&fs.core.state(), directory));
        *by_path.entry(path.unwrap_or_else(|| ELSEWHERE.to_owned())).or_default() += opens;
    }
    let mut lines: Vec<_> = by_path.into_iter().collect();
    lines.sort_by_key(|(_, opens)| Reverse(*opens));
    lines.iter().fold(String::new(), |mut text, (path, opens)| {
        // Writing to a String cannot fail.
        let _ = writeln!(text, "{opens} {path}");
        text
    })
}

/// The path of a sequence, or of the one that has this layer.
fn path_of(state: &State, directory: InodeId) -> Option<String> {
    let (mut parent, mut name, class) = place_of(state, directory)?;
    if matches!(class, DirectoryClass::Layer(_)) {
        (parent, name, _) = place_of(state, parent)?;
    }
    Some(state.path(parent, &name))
}

fn place_of(state: &State, directory: InodeId) -> Option<(InodeId, Vec<u8>, DirectoryClass)> {
    match state.inode(directory).ok()?.kind {
        Kind::Directory { parent, name, class, .. } => Some((parent, name, class)),
        _ => None,
    }
}
