//! An encoded copy is smaller, durable and of the object's bytes, or there is none.

use super::*;
use crate::ingest::seal::content_checksum;
use crate::store::disk::read_all;
use crate::tier::encoding::ZstdLevel;

const OBJECT: ObjectId = ObjectId(7);
const ZSTD: Lossless = Lossless::Zstd(ZstdLevel::DEFAULT);

fn fixture(bytes: &[u8]) -> (tempfile::TempDir, Store, Item) {
    let directory = tempfile::tempdir().unwrap();
    let store = Store::open_or_create(directory.path()).unwrap();
    let path = DiskPath::Object(OBJECT);
    store.disk.create(&path).unwrap().write_all_at(bytes, 0).unwrap();
    let file = store.disk.open(&path, Access::Read).unwrap();
    let checksum = Checksum(content_checksum(file.as_ref()).unwrap());
    let length = bytes.len() as u64;
    let item = Item { object: OBJECT, length, checksum, subject: Subject::File, encoded: None };
    (directory, store, item)
}

fn is_there(store: &Store, path: &DiskPath) -> bool {
    store.disk.stat(path).is_ok()
}

fn place(store: &Store) {
    let (from, to) = (DiskPath::Encoding(OBJECT), DiskPath::Encoded(OBJECT));
    store.disk.rename(&from, &to).unwrap();
}

#[test]
fn bytes_come_back() {
    let (_directory, store, item) = fixture(&[3; 10_000]);
    store.disk.set_note(&DiskPath::Object(OBJECT), b"note").unwrap();
    // What an attempt left that failed.
    store.disk.create(&DiskPath::Encoding(OBJECT)).unwrap().write_all_at(&[1; 99], 0).unwrap();
    let copy = pack(&store, &item, ZSTD).unwrap().unwrap();
    let path = DiskPath::Encoding(OBJECT);
    assert_eq!(store.disk.stat(&path).unwrap().length, copy.stored_bytes);
    assert!(copy.stored_bytes < 1000);
    assert_eq!(store.disk.note(&path).unwrap().as_deref(), Some(&b"note"[..]));
    place(&store);
    verify(&store, &item, &copy).unwrap();
    let target = store.scratch().unwrap();
    unpack(&store, &item, &copy, target.as_ref()).unwrap();
    assert!(read_all(target.as_ref(), u64::MAX).unwrap() == [3; 10_000]);
    assert_eq!(recognise(&store, OBJECT).unwrap(), Some((10_000, copy)));
    let found = checksum_of_copy(&store, OBJECT, 10_000, &copy).unwrap();
    assert_eq!(found, Some(item.checksum));
    let other = Item { checksum: Checksum([1; 16]), ..item };
    for outcome in [verify(&store, &other, &copy), unpack(&store, &other, &copy, target.as_ref())] {
        assert_eq!(outcome.unwrap_err().kind(), io::ErrorKind::InvalidData);
    }
    // The same as a blob that somebody has put together.
    let encoded = store.disk.open(&DiskPath::Encoded(OBJECT), Access::Read).unwrap();
    let blob = read_all(encoded.as_ref(), u64::MAX).unwrap();
    assert_eq!(pack_blob(&store, &item, copy.encoding, &blob).unwrap(), copy);
    assert_eq!(store.disk.note(&path).unwrap().as_deref(), Some(&b"note"[..]));
    let wrong = pack_blob(&store, &other, copy.encoding, &blob).unwrap_err();
    assert_eq!(wrong.kind(), io::ErrorKind::InvalidData);
    assert!(!is_there(&store, &path));
    // Damaged, it is nothing.
    let file = store.disk.open(&DiskPath::Encoded(OBJECT), Access::ReadWrite).unwrap();
    file.write_all_at(&[0xa5], copy.stored_bytes - 1).unwrap();
    assert_eq!(checksum_of_copy(&store, OBJECT, 10_000, &copy).unwrap(), None);
    file.write_all_at(&[0; 64], 0).unwrap();
    assert_eq!(recognise(&store, OBJECT).unwrap(), None);
    store.disk.remove(&DiskPath::Encoded(OBJECT)).unwrap();
    let missing = checksum_of_copy(&store, OBJECT, 10_000, &copy).unwrap_err();
    assert_eq!(missing.kind(), io::ErrorKind::NotFound);
}

#[test]
fn what_saves_little_or_is_not_on_record_leaves_nothing() {
    let mut state = 1_u64;
    let noise: Vec<u8> = std::iter::repeat_with(|| {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        state.to_be_bytes()[0]
    })
    .take(10_000)
    .collect();
    let packed = |zeros: usize| {
        let mut bytes = noise.clone();
        bytes[..zeros].fill(0);
        let (_directory, store, item) = fixture(&bytes);
        let copy = pack(&store, &item, ZSTD).unwrap();
        assert_eq!(is_there(&store, &DiskPath::Encoding(OBJECT)), copy.is_some());
        copy.map(|copy| copy.stored_bytes)
    };
    assert_eq!((packed(0), packed(900)), (None, None));
    assert!(packed(1200).is_some_and(|bytes| bytes > 8_700 && bytes <= 9_000));
    let (_directory, store, item) = fixture(&[3; 10_000]);
    let other = Item { checksum: Checksum([1; 16]), ..item };
    let wrong = pack(&store, &other, ZSTD).unwrap_err();
    assert_eq!(wrong.kind(), io::ErrorKind::InvalidData);
    assert!(!is_there(&store, &DiskPath::Encoding(OBJECT)));
    store.disk.remove(&DiskPath::Object(OBJECT)).unwrap();
    assert_eq!(pack(&store, &item, ZSTD).unwrap_err().kind(), io::ErrorKind::NotFound);
}
