//! Places for remotes whose files a test can reach behind the remote's back.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use kvfs::tier::content::ContentHash;
use kvfs::tier::encoding::Encoding;
use kvfs::tier::remote::directory::Directory;
use kvfs::tier::remote::{
    BlobName, BlobStore, Extent, MemorySink, PutMode, Remote, RemoteError, RemoteName, Result,
    Source, State, attach,
};

/// Longest time in which a remote says what is wrong; a client may repeat requests for 15 s.
const PATIENCE: Duration = Duration::from_secs(60);

/// Why a remote cannot be used.
pub(crate) fn refusal(remote: &Remote) -> RemoteError {
    match remote.wait_for_answer(PATIENCE) {
        State::Down { error, .. } => {
            assert!(!error.to_string().contains('\n'), "one line: {error}");
            error
        }
        state => panic!("{state:?}"),
    }
}

/// An open remote, and the directory that its objects are files of.
pub(crate) struct Place {
    pub(crate) store: Arc<dyn BlobStore>,
    pub(crate) files: PathBuf,
    /// What must live as long: a temporary directory, a server.
    _owner: Box<dyn std::any::Any>,
}

impl Place {
    pub(crate) fn new(
        store: Arc<dyn BlobStore>, files: PathBuf, owner: Box<dyn std::any::Any>,
    ) -> Place {
        attach(store.as_ref(), None).unwrap();
        Place { store, files, _owner: owner }
    }

    pub(crate) fn directory() -> Place {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().to_owned();
        Place::new(Arc::new(Directory::open(&path).unwrap()), path, Box::new(directory))
    }

    /// In memory, where there is such a place, for tests with short deadlines: a busy disk must
    /// not look like a remote that hangs.
    pub(crate) fn quick() -> Place {
        let memory = Path::new("/dev/shm");
        if memory.is_dir() { Place::below(memory) } else { Place::directory() }
    }

    pub(crate) fn below(path: &Path) -> Place {
        let directory = tempfile::tempdir_in(path).unwrap();
        let path = directory.path().to_owned();
        Place::new(Arc::new(Directory::open(&path).unwrap()), path, Box::new(directory))
    }

    pub(crate) fn file(&self, name: RemoteName) -> PathBuf {
        self.files.join(name.to_string())
    }

    pub(crate) fn make_older(&self, name: RemoteName, age: Duration) {
        let file = std::fs::File::options().append(true).open(self.file(name)).unwrap();
        file.set_modified(SystemTime::now() - age).unwrap();
    }
}

/// The name of an object with these bytes.
pub(crate) fn named(bytes: &[u8]) -> RemoteName {
    RemoteName::Blob(BlobName { content: ContentHash::of(bytes), encoding: Encoding::Raw })
}

/// Bytes that differ at every offset and for every seed.
pub(crate) fn bytes(seed: u64, length: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = Vec::with_capacity(length + 8);
    while bytes.len() < length {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(length);
    bytes
}

/// Puts bytes under their name.
pub(crate) fn put(store: &dyn BlobStore, bytes: &[u8]) -> RemoteName {
    let name = named(bytes);
    store.put(name, Source::of(bytes.to_vec()), PutMode::IfAbsent).unwrap();
    name
}

/// Reads an object into memory.
pub(crate) fn get(store: &dyn BlobStore, name: RemoteName, extent: Extent) -> Result<Vec<u8>> {
    let sink = MemorySink::new(64 << 20);
    let count = store.get(name, extent, sink.clone())?;
    let bytes = sink.take();
    assert_eq!(bytes.len() as u64, count);
    Ok(bytes)
}

pub(crate) const WHOLE: Extent = Extent::Whole { bytes: None };
