//! Single records of a store's names, found without reading all of them.
//!
//! A manifest lists its chunks with their first keys, so one record is one chunk away, and what
//! lies together in the table lies in few of them.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use super::format::{ChunkEntry, Root};
use super::{Row, read_chunk, read_root, versions};
use crate::BlobStore;
use crate::error::Result;
use crate::name::{Sequence, StoreId};
use kvfs_encoding::content::ContentHash;

/// Chunks that stay in memory between two records, some 100 KB each: what belongs to a page lies in
/// four places of the table.
const CHUNKS_KEPT: usize = 8;

/// A manifest of names, read in parts.
#[derive(Debug)]
pub struct Table {
    store: Arc<dyn BlobStore>,
    root: Root,
    kept: Mutex<VecDeque<(ContentHash, Arc<Vec<Row>>)>>,
}

impl Table {
    /// The newest manifest of a store, unless it is the one that is `known`.
    ///
    /// # Errors
    /// Those of the remote; a damaged manifest is one as well.
    pub fn newer(
        store: &Arc<dyn BlobStore>, id: StoreId, known: Option<Sequence>,
    ) -> Result<Option<Table>> {
        let newest = versions(store.as_ref(), id)?.pop();
        let Some(newest) = newest.filter(|newest| Some(*newest) != known) else {
            return Ok(None);
        };
        let root = read_root(store.as_ref(), id, newest)?;
        Ok(Some(Table { store: Arc::clone(store), root, kept: Mutex::default() }))
    }

    /// Whose names they are.
    pub fn store_id(&self) -> StoreId {
        self.root.store
    }

    /// Number of the manifest.
    pub fn sequence(&self) -> Sequence {
        self.root.sequence
    }

    /// Version of the rows.
    pub fn layout(&self) -> u32 {
        self.root.layout
    }

    /// One record.
    ///
    /// # Errors
    /// Those of the remote, [`RemoteError::Missing`](crate::RemoteError::Missing) if
    /// newer manifests have taken the place of this one.
    pub fn get(&self, key: &[u8]) -> Result<Option<Row>> {
        let after = self.root.chunks.partition_point(|chunk| chunk.first_key.as_slice() <= key);
        let Some(entry) = after.checked_sub(1).and_then(|index| self.root.chunks.get(index)) else {
            return Ok(None);
        };
        let rows = self.chunk(entry)?;
        let found = rows.binary_search_by(|row| row.key.as_slice().cmp(key));
        Ok(found.ok().map(|index| rows[index].clone()))
    }

    /// The chunks in which keys may be that begin like this, in order.
    pub fn chunks_with(&self, prefix: &[u8]) -> &[ChunkEntry] {
        let chunks = &self.root.chunks;
        let is_before = |chunk: &ChunkEntry| chunk.first_key.as_slice() < prefix;
        let begin = chunks.partition_point(is_before).saturating_sub(1);
        let is_behind = |chunk: &&ChunkEntry| {
            chunk.first_key.as_slice() > prefix && !chunk.first_key.starts_with(prefix)
        };
        let count = chunks[begin..].iter().take_while(|chunk| !is_behind(chunk)).count();
        &chunks[begin..begin + count]
    }

    /// The rows of a chunk, in order.
    ///
    /// # Errors
    /// As [`get`](Self::get).
    pub fn chunk(&self, entry: &ChunkEntry) -> Result<Arc<Vec<Row>>> {
        let hash = entry.hash();
        let kept = || self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, rows)) = kept().iter().find(|(known, _)| *known == hash) {
            return Ok(Arc::clone(rows));
        }
        let rows = Arc::new(read_chunk(self.store.as_ref(), entry)?);
        let mut kept = kept();
        kept.truncate(CHUNKS_KEPT - 1);
        kept.push_front((hash, Arc::clone(&rows)));
        Ok(rows)
    }

    /// Lets go of what is in memory.
    pub fn forget_chunks(&self) {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Remote;
    use crate::RemoteSpec;
    use crate::hold::Grace;
    use crate::names::Publisher;

    fn rows() -> Vec<Row> {
        let row = |number: u32| Row {
            key: [b"abH".as_slice(), &number.to_be_bytes()].concat(),
            value: vec![7; 9],
            blob: None,
        };
        let mut rows: Vec<Row> = (0..20_000).map(row).collect();
        let edge = |key: &[u8]| Row { key: key.to_vec(), value: vec![1], blob: None };
        rows.insert(0, edge(b"abG"));
        rows.push(edge(b"abI"));
        rows
    }

    #[test]
    fn every_record_is_found_and_no_other() {
        let directory = tempfile::tempdir().unwrap();
        let spec = RemoteSpec::Directory(directory.path().to_owned());
        let remote = Arc::new(Remote::open(&spec, crate::Options::default()).unwrap());
        remote.wait_for_answer(std::time::Duration::from_secs(30));
        let store = remote as Arc<dyn BlobStore>;
        let id = StoreId(7);
        let mut publisher = Publisher::new(Arc::clone(&store), id, Grace::default()).unwrap();
        publisher.publish(1, rows().into_iter().map(Ok), None).unwrap();

        let table = Table::newer(&store, id, None).unwrap().unwrap();
        assert!(Table::newer(&store, id, Some(table.sequence())).unwrap().is_none());
        for row in rows().iter().step_by(97) {
            assert_eq!(table.get(&row.key).unwrap().as_ref(), Some(row));
        }
        for absent in [b"a".as_slice(), b"abH", b"abHzzzzz", b"zz"] {
            assert_eq!(table.get(absent).unwrap(), None);
        }
        let with = |prefix: &[u8]| -> usize {
            let chunks = table.chunks_with(prefix).iter();
            let rows = chunks.flat_map(|chunk| table.chunk(chunk).unwrap().to_vec());
            rows.filter(|row| row.key.starts_with(prefix)).count()
        };
        assert_eq!((with(b"abH"), with(b"abG"), with(b"abI")), (20_000, 1, 1));
        assert_eq!((with(b""), with(b"b"), with(b"Z")), (20_002, 0, 0));
        assert!(table.chunks_with(b"abG").len() <= 2);
    }
}
