//! A remote in which somebody published what he likes as the names of a store: a new store that is to
//! take them over says why it does not, or can be used.

use std::path::Path;
use std::sync::Arc;

use kvfs::fs::rebuild::{self, RebuildFrom, Rebuilt};
use kvfs::store::disk::DiskPath;
use kvfs::store::record::{ObjectId, RemoteCopy, RemoteState};
use kvfs::store::{Store, format};
use kvfs::tier::content::ContentHash;
use kvfs::tier::encoding::Encoding;
use kvfs::tier::remote::hold::Grace;
use kvfs::tier::remote::names::{Publisher, Row};
use kvfs::tier::remote::{
    BlobName, BlobStore, Options, PutMode, Remote, RemoteName, RemoteSpec, Sequence, Source,
    StoreId,
};

use super::edits::{self, Table};
use super::engine::{Outcome, Target, directory_in_memory};
use super::{damaged_store, tree};

/// What the first byte of an input makes of the rest.
const EDITS: u8 = 0;
const ROOT: u8 = 1;
const CHUNK: u8 = 2;

/// A row of a chunk in postcard: key, value, and the object that it relies on.
type WireRow = (Vec<u8>, Vec<u8>, Option<([u8; 32], Encoding)>);

/// A remote, and the rows of an honest store whose objects it has.
struct Forger {
    table: Table,
    remote: Arc<Remote>,
    files: tempfile::TempDir,
    published: u128,
}

pub(crate) fn target() -> Target {
    let mut forger = Forger::new();
    let edits = edits::seeds().into_iter().map(|seed| [vec![EDITS], seed].concat());
    let mut seeds: Vec<Vec<u8>> = edits.collect();
    let honest = forger.rows().map(|row| -> WireRow { (row.key, row.value, None) });
    let chunk = postcard::to_stdvec(&honest.take(6).collect::<Vec<_>>()).unwrap();
    seeds.push([vec![CHUNK], chunk].concat());
    seeds.push([vec![ROOT], root(StoreId(1), Vec::new())].concat());
    Target {
        name: "forged_names",
        length_max: 1200,
        seeds,
        words: edits::WORDS,
        allocation_max: 64 << 20,
        run: Box::new(move |input| {
            let Some((kind, rest)) = input.split_first() else {
                return Outcome::refused(&"empty");
            };
            forger.published += 1;
            let id = StoreId(forger.published);
            match kind % 3 {
                EDITS => forger.publish_edited(id, rest),
                ROOT => forger.publish_root(id, rest),
                _ => forger.publish_chunk(id, rest),
            }
            let outcome = forger.take_over(id);
            forger.clean(id);
            outcome
        }),
    }
}

/// `Root` in postcard: store, number, version of the rows, time, chunks.
fn root(id: StoreId, chunks: Vec<(Vec<u8>, u32, u32, [u8; 32])>) -> Vec<u8> {
    postcard::to_stdvec(&(id, Sequence(1), format::VERSION, 0_u64, chunks)).unwrap()
}

impl Forger {
    fn new() -> Forger {
        let files = directory_in_memory();
        let place = files.path().join("remote");
        std::fs::create_dir(&place).unwrap();
        let remote = Remote::open(&RemoteSpec::Directory(place), Options::default()).unwrap();
        remote.wait_for_answer(std::time::Duration::from_secs(10));
        let honest = files.path().join("honest");
        let fs = tree::open(&honest).unwrap();
        tree::populate(&fs);
        tree::settle(&fs).unwrap();
        drop(fs);
        let mut table = damaged_store::read_table(&honest.join("meta.redb"));
        table.retain(|key, _| b"EIOX".contains(&key[0]));
        let objects = table.keys().filter(|key| key[0] == b'O').cloned().collect::<Vec<_>>();
        for key in objects {
            let object = ObjectId(u64::from_be_bytes(*key[1..].first_chunk().unwrap()));
            let bytes = std::fs::read(honest.join(DiskPath::Object(object).relative())).unwrap();
            let copy = put(&remote, bytes);
            table.insert([b"R", &key[1..]].concat(), postcard::to_stdvec(&copy).unwrap());
        }
        Forger { table, remote: Arc::new(remote), files, published: 0 }
    }

    fn rows(&self) -> impl Iterator<Item = Row> {
        rows(self.table.clone())
    }

    fn publish_edited(&self, id: StoreId, input: &[u8]) {
        let mut table = self.table.clone();
        edits::apply(&mut table, input);
        let store = Arc::clone(&self.remote) as Arc<dyn BlobStore>;
        let mut publisher = Publisher::new(store, id, Grace::default()).unwrap();
        publisher.publish(format::VERSION, rows(table).map(Ok), None).unwrap();
    }

    /// With the right beginning and the right hash at the end.
    fn publish_root(&self, id: StoreId, body: &[u8]) {
        // An honest root says whose it is, which changes with each try.
        let body = if body == root(StoreId(1), Vec::new()) { &root(id, Vec::new()) } else { body };
        let mut bytes = [b"kvfsname", 1_u32.to_le_bytes().as_slice(), body].concat();
        bytes.extend(ContentHash::of(&bytes).0);
        self.put(RemoteName::Manifest(id, Sequence(1)), bytes);
    }

    fn publish_chunk(&self, id: StoreId, chunk: &[u8]) {
        let rows: Option<Vec<WireRow>> = postcard::from_bytes(chunk).ok();
        let rows = rows.unwrap_or_default();
        let first = rows.first().map(|row| row.0.clone()).unwrap_or_default();
        let hash = ContentHash::of(chunk);
        let lengths = [rows.len(), chunk.len()].map(|count| u32::try_from(count).unwrap());
        self.put(RemoteName::Chunk(hash), zstd::bulk::compress(chunk, 1).unwrap());
        self.publish_root(id, &root(id, vec![(first, lengths[0], lengths[1], hash.0)]));
    }

    fn put(&self, name: RemoteName, bytes: Vec<u8>) {
        self.remote.put(name, Source::of(bytes), PutMode::Replace).unwrap();
    }

    fn take_over(&self, id: StoreId) -> Outcome {
        let directory = self.files.path().join("new");
        let outcome = take_over(&directory, &self.remote, id);
        std::fs::remove_dir_all(&directory).unwrap();
        outcome
    }

    fn clean(&self, id: StoreId) {
        let remote = self.files.path().join("remote");
        let _ = std::fs::remove_dir_all(remote.join(format!("names/{id}")));
        let _ = std::fs::remove_dir_all(remote.join("chunks"));
    }
}

fn put(remote: &Remote, bytes: Vec<u8>) -> RemoteCopy {
    let blob = BlobName { content: ContentHash::of(&bytes), encoding: Encoding::Raw };
    let stored_bytes = bytes.len() as u64;
    remote.put(RemoteName::Blob(blob), Source::of(bytes), PutMode::IfAbsent).unwrap();
    let (content, encoding) = (blob.content.0, blob.encoding);
    RemoteCopy { content, encoding, stored_bytes, state: RemoteState::Only }
}

fn rows(table: Table) -> impl Iterator<Item = Row> {
    table.into_iter().map(|(key, value)| {
        let copy = key.starts_with(b"R").then(|| postcard::from_bytes::<RemoteCopy>(&value).ok());
        let blob = copy.flatten().map(|copy| {
            let content = ContentHash(copy.content);
            BlobName { content, encoding: copy.encoding }
        });
        Row { key, value, blob }
    })
}

fn take_over(directory: &Path, remote: &Arc<Remote>, id: StoreId) -> Outcome {
    let store = Store::open_or_create(directory).unwrap();
    let rebuilt = rebuild::rebuild(&store, remote, RebuildFrom::Store(id));
    drop(store);
    match rebuilt {
        Err(error) => return Outcome::refused(&error),
        Ok(Rebuilt::From { .. }) => {}
        Ok(other) => panic!("{other:?}"),
    }
    match tree::open(directory) {
        Err(error) => Outcome::refused(&error),
        Ok(fs) => {
            let visits = tree::touch_everything(&fs);
            Outcome::accepted((visits.min(40), tree::settle(&fs).is_ok()))
        }
    }
}
