//! Only what its place says is a page or a state.

use super::*;
use crate::ingest::model::{MANIFEST_BYTES_MAX, ManifestError, Model};
use crate::page::{PageError, PrefixHash, pack_page, pack_state};
use crate::store::disk::DiskPath;

const MANIFEST: ObjectId = ObjectId(1);
const OBJECT: ObjectId = ObjectId(2);
const MANIFEST_JSON: &str = r#"{"schema_version": 1, "model_id": "m", "dtype": "f16", "num_layers": 2,
    "num_kv_heads": 2, "head_dim": 8, "page_tokens": 16, "layers": ["attention",
    {"recurrent": {"state": [{"name": "conv", "dtype": "f16", "shape": [8]}]}}]}"#;

struct Fixture {
    _directory: tempfile::TempDir,
    store: Store,
    model: Model,
}

impl Fixture {
    fn new() -> Fixture {
        let directory = tempfile::tempdir().unwrap();
        let store = Store::open_or_create(directory.path()).unwrap();
        write(&store, MANIFEST, MANIFEST_JSON.as_bytes());
        let model = Model::load(&store, MANIFEST).unwrap();
        Fixture { _directory: directory, store, model }
    }

    fn page(&self) -> (SealedPlace, Vec<u8>) {
        let place = self.model.place(0, 16).unwrap();
        let rows = vec![1; usize::try_from(place.geometry().row_bytes()).unwrap() * 16];
        let bytes = pack_page(&place, &rows, 16).unwrap();
        (SealedPlace::Page(place), bytes)
    }

    fn state(&self) -> (SealedPlace, Vec<u8>) {
        let place = self.model.state_place(1, 16).unwrap();
        let bytes = pack_state(&place, PrefixHash([7; 32]), &[5; 16]).unwrap();
        (SealedPlace::State(Box::new(place)), bytes)
    }

    /// What a writer who is still there, and one who is gone, are told.
    fn check(&self, place: &SealedPlace, bytes: &[u8]) -> Result<Sealed, SealError> {
        let path = DiskPath::Staging(OBJECT);
        let _ = self.store.disk.remove(&path);
        let writer = self.store.create_object(OBJECT).unwrap();
        writer.write_all_at(bytes, 0).unwrap();
        let told = check_header(&self.store, OBJECT, place);
        assert!(!is_at_rest(&self.store, OBJECT).unwrap());
        drop(writer);
        assert!(is_at_rest(&self.store, OBJECT).unwrap());
        let sealed = verify(&self.store, OBJECT, place);
        assert_eq!(told.is_ok(), sealed.is_ok(), "{told:?} {sealed:?}");
        sealed
    }
}

fn write(store: &Store, object: ObjectId, bytes: &[u8]) {
    let file = store.create_object(object).unwrap();
    file.write_all_at(bytes, 0).unwrap();
}

#[test]
fn a_page_and_a_state_are_sealed_as_what_they_are() {
    let fixture = Fixture::new();
    for ((place, bytes), tokens) in [(fixture.page(), 16), (fixture.state(), 0)] {
        let sealed = fixture.check(&place, &bytes).unwrap();
        assert_eq!((sealed.length, sealed.record.tokens), (bytes.len() as u64, tokens));
        let file = fixture.store.open_written(OBJECT, Access::Read).unwrap();
        assert_eq!(page_checksum(file.as_ref(), &sealed.record).unwrap(), sealed.checksum);
        copy(&fixture.store, OBJECT, ObjectId(3)).unwrap();
        let copied = fixture.store.open_written(ObjectId(3), Access::Read).unwrap();
        assert_eq!(page_checksum(copied.as_ref(), &sealed.record).unwrap(), sealed.checksum);
        fixture.store.disk.remove(&DiskPath::Staging(ObjectId(3))).unwrap();
    }
}

#[test]
fn what_is_damaged_or_elsewhere_is_refused() {
    let fixture = Fixture::new();
    let (page, state) = (fixture.page(), fixture.state());
    let elsewhere = SealedPlace::Page(fixture.model.place(0, 0).unwrap());
    let other_row = SealedPlace::State(Box::new(fixture.model.state_place(1, 17).unwrap()));
    for (place, other, bytes) in [(&page.0, &elsewhere, &page.1), (&state.0, &other_row, &state.1)]
    {
        let refused = |place: &SealedPlace, bytes: &[u8]| match fixture.check(place, bytes) {
            Err(SealError::Refused(error)) => error,
            other => panic!("{other:?}"),
        };
        assert!(matches!(refused(other, bytes), PageError::Place(_)));
        let mut changed = bytes.clone();
        changed[4096] ^= 1;
        assert!(matches!(refused(place, &changed), PageError::Checksum { .. }));
        refused(place, &bytes[..bytes.len() - 1]);
        refused(place, &[&bytes[..], &[0; 1]].concat());
        refused(place, &[&bytes[..], &vec![0; 1 << 20]].concat());
        refused(place, b"");
    }
    let outcome = verify(&fixture.store, ObjectId(99), &page.0);
    assert!(matches!(outcome, Err(SealError::Io(_))));
    assert!(matches!(check_header(&fixture.store, ObjectId(99), &page.0), Err(SealError::Io(_))));
}

#[test]
fn a_checksum_is_that_of_all_bytes() {
    let fixture = Fixture::new();
    let piece = READ_BYTES;
    for length in [0, 1, piece - 1, piece, piece + 1, 3 * piece + 5] {
        let bytes: Vec<u8> = (0..=250).cycle().take(length).collect();
        let _ = fixture.store.disk.remove(&DiskPath::Staging(OBJECT));
        write(&fixture.store, OBJECT, &bytes);
        let file = fixture.store.open_written(OBJECT, Access::Read).unwrap();
        let mut hasher = ContentHasher::new();
        hasher.update(&bytes);
        assert_eq!(content_checksum(file.as_ref()).unwrap(), hasher.finish().0, "{length}");
    }
    assert_eq!((READ_BYTES, POPULATE_BYTES), (131_072, 16_777_216));
}

#[test]
fn a_manifest_is_a_page_of_text() {
    let fixture = Fixture::new();
    let load = |bytes: &[u8]| {
        let _ = fixture.store.disk.remove(&DiskPath::Staging(OBJECT));
        write(&fixture.store, OBJECT, bytes);
        Model::load(&fixture.store, OBJECT)
    };
    assert_eq!(load(MANIFEST_JSON.as_bytes()).unwrap().identity, fixture.model.identity);
    let mut long = MANIFEST_JSON.as_bytes().to_vec();
    long.resize(usize::try_from(MANIFEST_BYTES_MAX).unwrap(), b' ');
    assert!(load(&long).is_ok());
    long.push(b' ');
    assert!(matches!(load(&long), Err(ManifestError::Io(_))));
    assert!(matches!(load(b"{"), Err(ManifestError::Refused(_))));
    assert!(matches!(Model::load(&fixture.store, ObjectId(99)), Err(ManifestError::Io(_))));
    // Two K and V rows of 8 elements for each of two heads and 16 tokens, and a state of 16 bytes.
    let model = &fixture.model;
    assert_eq!(model.file_bytes_max(0), fixture.page().1.len() as u64);
    assert_eq!(model.file_bytes_max(1), fixture.state().1.len() as u64);
    assert!(model.place(1, 0).is_err() && model.state_place(0, 16).is_err());
}
