//! What of the metadata only the memory of a daemon has, for the one that takes its mount over.
//!
//! That is what must not outlive a crash: names of files that are still being written, and inodes that have none any
//! more. Whatever else there is a commit has written before.

use serde::{Deserialize, Serialize};

use super::super::record::ObjectId;
use super::Metadata;

/// See the module.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unwritten {
    /// Keys and values of the volatile layer.
    records: Vec<(Vec<u8>, Option<Vec<u8>>)>,
    /// Objects whose file lies in `staging/`.
    staged: Vec<ObjectId>,
}

/// What is in memory only; `None` while changes wait for a commit, pages for the remote, or files to be removed.
pub fn unwritten(metadata: &Metadata) -> Option<Unwritten> {
    let is_written = metadata.active.is_empty() && metadata.committing.is_none();
    if !is_written || !metadata.held_back.is_empty() || !metadata.discarded.is_empty() {
        return None;
    }
    let records = &metadata.volatile.records;
    Some(Unwritten {
        records: records.iter().map(|(key, value)| (key.clone(), value.clone())).collect(),
        staged: metadata.staged.iter().copied().collect(),
    })
}

/// Goes on with what another daemon had in memory.
pub fn go_on_with(metadata: &mut Metadata, unwritten: Unwritten) {
    metadata.volatile.records.extend(unwritten.records);
    metadata.staged.extend(unwritten.staged);
}
