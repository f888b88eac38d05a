use crate::store::metadata::{Life, Metadata};
use crate::store::record::InodeId;
use crate::store::{Store, StoreError};

fn open(path: &std::path::Path) -> Result<Metadata, StoreError> {
    Metadata::open(Store::open_or_create(path)?.metadata()?)
}

/// Whatever it is cut to, it opens, or says that it is damaged and what to do.
#[test]
fn a_database_that_was_cut_short_is_told_as_damaged() {
    const STEP_BYTES: usize = 2048 + 512;
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("store");
    let mut metadata = open(&path).unwrap();
    for number in 0..2_000 {
        let value = [number.to_string().as_bytes(), b" of some size"].concat();
        metadata.put_attribute(Life::Durable, InodeId(number), b"user.name", &value);
    }
    let layer = metadata.freeze().unwrap();
    metadata.writer().write(&layer).unwrap();
    drop((layer, metadata));
    let file = path.join("meta.redb");
    let whole = std::fs::read(&file).unwrap();
    // Without any bytes it is one that was never made.
    for length in (1..whole.len()).step_by(STEP_BYTES) {
        std::fs::write(&file, &whole[..length]).unwrap();
        if let Err(error) = open(&path) {
            assert!(error.to_string().ends_with("run kvfs fsck"), "{length}: {error}");
        }
    }
}
