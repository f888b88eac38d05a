//! What goes to a remote comes back, and nothing else does.

use std::path::PathBuf;

use super::super::encoding::Encoding;
use super::super::remote::{Options, RemoteSpec};
use super::*;
use crate::ingest::seal::content_checksum;
use crate::page::{Dtype, Layer, ModelIdentity, PageHasher, PageIdentity, TokenStart};
use crate::store::record::RemoteState;

const OBJECT: ObjectId = ObjectId(7);

struct Fixture {
    directory: tempfile::TempDir,
    store: Store,
    exchange: Exchange,
}

impl Fixture {
    fn new(cold: ColdEncoding) -> Fixture {
        let directory = tempfile::tempdir().unwrap();
        let place = directory.path().join("remote");
        std::fs::create_dir(&place).unwrap();
        let spec = RemoteSpec::Directory(place);
        let remote = Arc::new(Remote::open(&spec, Options::default()).unwrap());
        let store = Store::open_or_create(&directory.path().join("store")).unwrap();
        remote.wait_for_answer(CONNECTING_MAX);
        Fixture { directory, store, exchange: Exchange::new(remote, Grace::default(), cold) }
    }

    fn write(&self, bytes: &[u8]) {
        let path = DiskPath::Object(OBJECT);
        let _ = self.store.disk.remove(&path);
        self.store.disk.create(&path).unwrap().write_all_at(bytes, 0).unwrap();
    }

    /// A file of these bytes.
    fn file(&self, bytes: &[u8]) -> Item {
        self.write(bytes);
        let file = self.store.open_object(OBJECT, Access::Read).unwrap();
        let checksum = Checksum(content_checksum(file.as_ref()).unwrap());
        let length = bytes.len() as u64;
        Item { object: OBJECT, length, checksum, subject: Subject::File, encoded: None }
    }

    fn fetch(&self, item: &Item, copy: &RemoteCopy) -> Result<Vec<u8>> {
        let target: Arc<dyn DiskFile> = self.store.scratch().unwrap().into();
        self.exchange.download(&self.store, item, copy, &target)?;
        Ok(crate::store::disk::read_all(target.as_ref(), u64::MAX).unwrap())
    }

    /// The files of objects in the remote.
    fn blobs(&self) -> Vec<PathBuf> {
        let (mut found, mut left) = (Vec::new(), vec![self.directory.path().join("remote/blobs")]);
        while let Some(path) = left.pop() {
            let Ok(entries) = path.read_dir() else { continue };
            for entry in entries.map(|entry| entry.unwrap()) {
                let is_directory = entry.file_type().unwrap().is_dir();
                if is_directory { left.push(entry.path()) } else { found.push(entry.path()) }
            }
        }
        found
    }

    fn damage(&self) {
        let [path] = &self.blobs()[..] else { panic!("{:?}", self.blobs()) };
        let mut bytes = std::fs::read(path).unwrap();
        let last = bytes.len() - 1;
        bytes[last] ^= 1;
        std::fs::write(path, bytes).unwrap();
    }
}

fn copy_of(uploaded: &Uploaded) -> RemoteCopy {
    RemoteCopy {
        content: uploaded.blob.content.0,
        encoding: uploaded.blob.encoding,
        stored_bytes: uploaded.stored_bytes,
        state: RemoteState::Held,
    }
}

fn is_local(error: &RemoteError, kind: io::ErrorKind) -> bool {
    matches!(error, RemoteError::Local(error) if error.kind() == kind)
}

fn zstd() -> ColdEncoding {
    ColdEncoding::Zstd(ZstdLevel::DEFAULT)
}

#[test]
fn an_object_comes_back_however_it_is_encoded() {
    for (cold, encoding) in [(ColdEncoding::None, Encoding::Raw), (zstd(), Encoding::Zstd)] {
        let fixture = Fixture::new(cold);
        let bytes = vec![3; 10_000];
        let item = fixture.file(&bytes);
        let uploaded = fixture.exchange.upload(&fixture.store, &item).unwrap();
        assert_eq!((uploaded.blob.encoding, uploaded.held.put), (encoding, Put::Stored));
        let stored_bytes = std::fs::metadata(&fixture.blobs()[0]).unwrap().len();
        assert_eq!(uploaded.stored_bytes, stored_bytes);
        assert_eq!(stored_bytes == 10_000, encoding == Encoding::Raw);
        fixture.exchange.verify(&fixture.store, &uploaded).unwrap();
        let copy = copy_of(&uploaded);
        assert!(fixture.exchange.has(&copy).unwrap());
        let longer = RemoteCopy { stored_bytes: copy.stored_bytes + 1, ..copy };
        assert!(!fixture.exchange.has(&longer).unwrap());
        assert!(!fixture.exchange.has(&RemoteCopy { content: [1; 32], ..copy }).unwrap());
        assert!(fixture.fetch(&item, &copy).unwrap() == bytes);
        let target: Arc<dyn DiskFile> = fixture.store.scratch().unwrap().into();
        let known = (OBJECT, item.length);
        fixture.exchange.download_unrecorded(&fixture.store, known, &copy, &target).unwrap();
        assert!(crate::store::disk::read_all(target.as_ref(), u64::MAX).unwrap() == bytes);
    }
}

#[test]
fn what_is_not_on_record_does_not_leave() {
    for cold in [ColdEncoding::None, zstd()] {
        let fixture = Fixture::new(cold);
        let item = fixture.file(&[3; 10_000]);
        fixture.write(&[4; 10_000]);
        let error = fixture.exchange.upload(&fixture.store, &item).unwrap_err();
        assert!(is_local(&error, io::ErrorKind::InvalidData), "{error:?}");
        assert!(fixture.blobs().is_empty());
        fixture.store.disk.remove(&DiskPath::Object(OBJECT)).unwrap();
        let error = fixture.exchange.upload(&fixture.store, &item).unwrap_err();
        assert!(is_local(&error, io::ErrorKind::NotFound), "{error:?}");
    }
}

#[test]
fn a_copy_that_is_damaged_does_not_come_back() {
    for cold in [ColdEncoding::None, zstd()] {
        let fixture = Fixture::new(cold);
        let item = fixture.file(&[3; 10_000]);
        let uploaded = fixture.exchange.upload(&fixture.store, &item).unwrap();
        fixture.damage();
        let copy = copy_of(&uploaded);
        for outcome in [
            fixture.fetch(&item, &copy).map(drop),
            fixture.exchange.verify(&fixture.store, &uploaded),
        ] {
            assert!(matches!(outcome, Err(RemoteError::Corrupt(_))), "{outcome:?}");
        }
        // It is somebody else's: it is replaced, and is right then.
        let found = fixture.exchange.upload(&fixture.store, &item).unwrap();
        assert_eq!(found.held.put, Put::AlreadyThere);
        fixture.exchange.verify(&fixture.store, &found).unwrap();
        assert_eq!(fixture.fetch(&item, &copy).unwrap().len(), 10_000);
        // Sound, but not what the record tells.
        let other = Item { checksum: Checksum([1; 16]), ..item };
        let outcome = fixture.fetch(&other, &copy);
        assert!(matches!(outcome, Err(RemoteError::Corrupt(_))), "{outcome:?}");
    }
}

#[test]
fn bytes_that_no_record_describes_are_named_by_their_hash() {
    let fixture = Fixture::new(zstd());
    let (blob, held) = fixture.exchange.hold_bytes(b"bytes".to_vec()).unwrap();
    assert_eq!((blob.encoding, held.put), (Encoding::Raw, Put::Stored));
    let copy = RemoteCopy {
        content: blob.content.0,
        encoding: Encoding::Raw,
        stored_bytes: 5,
        state: RemoteState::Held,
    };
    let target: Arc<dyn DiskFile> = fixture.store.scratch().unwrap().into();
    let fetch =
        || fixture.exchange.download_unrecorded(&fixture.store, (OBJECT, 5), &copy, &target);
    fetch().unwrap();
    assert_eq!(crate::store::disk::read_all(target.as_ref(), 5).unwrap(), b"bytes");
    fixture.damage();
    assert!(matches!(fetch(), Err(RemoteError::Corrupt(_))));
}

#[test]
fn what_is_only_encoded_here_goes_up_as_it_is() {
    let fixture = Fixture::new(ColdEncoding::None);
    let item = fixture.file(&[3; 10_000]);
    let lossless = Lossless::Zstd(ZstdLevel::DEFAULT);
    let copy = super::super::encoded::pack(&fixture.store, &item, lossless).unwrap().unwrap();
    let (from, to) = (DiskPath::Encoding(OBJECT), DiskPath::Encoded(OBJECT));
    fixture.store.disk.rename(&from, &to).unwrap();
    let item = Item { encoded: Some(copy), ..item };
    let raw = fixture.exchange.upload(&fixture.store, &item).unwrap();
    assert_eq!(raw.blob.encoding, Encoding::Raw, "the raw file is there");
    fixture.store.disk.remove(&DiskPath::Object(OBJECT)).unwrap();
    let encoded = fixture.exchange.upload(&fixture.store, &item).unwrap();
    assert_eq!(encoded.blob.encoding, copy.encoding);
    assert_eq!((encoded.blob.content, encoded.stored_bytes), (raw.blob.content, copy.stored_bytes));
    assert!(fixture.fetch(&item, &copy_of(&encoded)).unwrap() == [3; 10_000]);
    let other = Item { checksum: Checksum([1; 16]), ..item };
    let error = fixture.exchange.upload(&fixture.store, &other).unwrap_err();
    assert!(is_local(&error, io::ErrorKind::InvalidData), "{error:?}");
    fixture.store.disk.remove(&to).unwrap();
    let error = fixture.exchange.upload(&fixture.store, &item).unwrap_err();
    assert!(is_local(&error, io::ErrorKind::NotFound), "{error:?}");
}

#[test]
fn how_copies_are_encoded_may_change() {
    let fixture = Fixture::new(ColdEncoding::None);
    assert_eq!(fixture.exchange.lossless(), Lossless::Raw);
    let level = ZstdLevel::new(7).unwrap();
    for (cold, expected) in [
        (ColdEncoding::Zstd(level), Lossless::Zstd(level)),
        (
            ColdEncoding::Quantised(super::super::encoding::Quantisation::Q8_0),
            Lossless::Zstd(ZstdLevel::DEFAULT),
        ),
        (ColdEncoding::None, Lossless::Raw),
    ] {
        fixture.exchange.set_cold(cold);
        assert_eq!(fixture.exchange.lossless(), expected);
    }
    let grace = fixture.exchange.grace();
    assert_eq!(grace.publish_within(), Grace::default().publish_within());
    assert!(!fixture.exchange.remote().is_sealed());
}

#[test]
fn equal_pages_have_one_name_where_the_remote_is_trusted() {
    let fixture = Fixture::new(ColdEncoding::None);
    let item = fixture.file(&[3; 8192]);
    let names = [1, 2].map(|model| {
        let (layer, start) = (Layer(0), TokenStart(0));
        let model = ModelIdentity([model; 16]);
        let identity = PageIdentity { model, layer, start, tokens: 16, dtype: Dtype::F16 };
        let mut hasher = PageHasher::new();
        hasher.update(&[3; 8192]);
        let checksum = hasher.finish(&identity).object;
        let item = Item { checksum, subject: Subject::Page(identity), ..item };
        let uploaded = fixture.exchange.upload(&fixture.store, &item).unwrap();
        assert!(fixture.fetch(&item, &copy_of(&uploaded)).unwrap() == [3; 8192]);
        uploaded.blob
    });
    assert_eq!(names[0], names[1]);
}

#[test]
fn a_copy_is_due_once_it_has_settled() {
    let fixture = Fixture::new(ColdEncoding::None);
    let item = fixture.file(b"bytes");
    let mut uploaded = fixture.exchange.upload(&fixture.store, &item).unwrap();
    uploaded.held.verify_after = Duration::ZERO;
    assert_eq!(uploaded.due_in(), Duration::ZERO);
    uploaded.held.verify_after = Duration::from_secs(1000);
    assert!(uploaded.due_in() > Duration::from_secs(900));
    assert!(uploaded.due_in() <= Duration::from_secs(1000));
}
