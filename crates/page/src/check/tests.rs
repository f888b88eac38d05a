//! Which files may appear where.

use super::*;
use crate::{Dtype, ManifestFields, build_header, pack_page, pack_rows};
use proptest::prelude::*;

fn manifest() -> Manifest {
    let mut fields = ManifestFields::new("m", Dtype::F16, 3, 2, 64);
    fields.page_tokens = 512;
    fields.layers =
        Some(vec![LayerKind::Attention, LayerKind::Sliding { window: 64 }, LayerKind::Recurrent]);
    Manifest::new(fields).unwrap()
}

fn place(layer: u32, start: u64) -> PagePlace {
    PagePlace::new(&manifest(), Layer(layer), TokenStart(start)).unwrap()
}

fn page(place: &PagePlace, tokens: u32) -> Vec<u8> {
    let rows = vec![7; usize::try_from(u64::from(tokens) * place.geometry().row_bytes()).unwrap()];
    pack_page(place, &rows, tokens).unwrap()
}

/// Verifies a file that lies in memory, read in pieces of at most `piece_bytes`.
fn verify(place: &PagePlace, file: &[u8], piece_bytes: usize) -> Result<VerifiedPage, VerifyError> {
    let mut read_at = |offset: u64, buffer: &mut [u8]| {
        let rest = &file[usize::try_from(offset).unwrap().min(file.len())..];
        let bytes = rest.len().min(buffer.len()).min(piece_bytes);
        buffer[..bytes].copy_from_slice(&rest[..bytes]);
        Ok(bytes)
    };
    place.verify(&mut read_at, file.len() as u64)
}

#[test]
fn places() {
    fn check(layer: u32, start: u64, expected: Result<(), &str>) {
        let found = PagePlace::new(&manifest(), Layer(layer), TokenStart(start));
        let found = found.map(|_| ()).map_err(|error| error.to_string());
        assert_eq!(found, expected.map_err(str::to_owned));
    }
    check(0, 0, Ok(()));
    check(1, 512, Ok(()));
    check(0, 1 << 40, Ok(()));
    check(2, 0, Err("layer 2 is recurrent: it keeps state snapshots, not pages"));
    check(3, 0, Err("layer 3 does not exist: the manifest has num_layers 3"));
    check(u32::MAX, 0, Err("layer 4294967295 does not exist: the manifest has num_layers 3"));
    check(0, 511, Err("no page starts at token 511: page_tokens is 512"));
    check(0, 1 << 41, Err("no page starts at token 2199023255552: the limit is 1099511627776"));
}

#[test]
fn accepted_in_pieces_of_any_size() {
    fn check(tokens: u32, piece_bytes: usize) {
        let place = place(1, 512);
        let file = page(&place, tokens);
        let verified = verify(&place, &file, piece_bytes).unwrap();
        let mut hasher = PageHasher::new();
        hasher.update(&file);
        assert_eq!(verified.digest, hasher.finish(&place.identity(tokens)));
        assert_eq!(verified.header.tokens, tokens);
        assert_eq!(verified.header.declared.checksum, Some(verified.digest.page));
    }
    check(1, usize::MAX);
    check(1, 1);
    check(512, usize::MAX);
    check(512, 4095);
    check(511, 100_000);
}

#[test]
fn a_writer_may_leave_metadata_out() {
    let place = place(0, 0);
    let rows = vec![1; 512];
    let file = pack_rows(place.geometry(), &rows, 1, &crate::Metadata::new()).unwrap();
    let verified = verify(&place, &file, usize::MAX).unwrap();
    assert_eq!(verified.header.declared, Declared::default());
}

#[test]
fn refused() {
    fn check(place: &PagePlace, file: &[u8], reason: &str, expected: &str) {
        let error = verify(place, file, usize::MAX).unwrap_err();
        assert!(error.to_string().contains(expected), "{error}");
        match error {
            VerifyError::Page(error) => assert_eq!(error.reason(), reason),
            VerifyError::Io(error) => panic!("{error}"),
        }
    }
    let here = place(0, 512);
    let file = page(&here, 3);
    let elsewhere = "the page belongs elsewhere";
    check(&place(1, 512), &file, "place", "kvfs.layer 0, this place is 1: ");
    check(&place(0, 0), &file, "place", "kvfs.start 512, this place is 0: ");
    let mut fields = manifest().fields().clone();
    fields.tenant = Some("other".to_owned());
    let other = Manifest::new(fields).unwrap();
    let other = PagePlace::new(&other, Layer(0), TokenStart(512)).unwrap();
    check(&other, &file, "place", elsewhere);
    check(&here, &file[..4096], "size", "file is 4096 bytes");
    check(&here, &file[..4095], "header", "header ends after 4095");
    check(&here, &[], "header", "file is 0 bytes: not a kvfs page");

    let mut damaged = file.clone();
    damaged[5000] ^= 1;
    check(&here, &damaged, "checksum", "damaged, or another page's bytes");

    // Only the checksum is declared: the bytes alone give away that they lie elsewhere.
    let digest = verify(&here, &file, usize::MAX).unwrap().digest;
    let declared = Declared { checksum: Some(digest.page), ..Declared::default() };
    let mut swapped = file.clone();
    let header = build_header(here.geometry(), 3, &declared.to_metadata()).unwrap();
    swapped[..4096].copy_from_slice(&header);
    assert!(verify(&here, &swapped, usize::MAX).is_ok());
    check(&place(1, 512), &swapped, "checksum", "header declares kvfs.checksum");
}

#[test]
fn side_rows_are_bound_to_their_page() {
    let with_side = |row_bytes| {
        let mut fields = manifest().fields().clone();
        let side = crate::SideRows { name: "index_k".to_owned(), row_bytes };
        fields.layers.as_mut().unwrap()[0] = LayerKind::WithSide(side);
        Manifest::new(fields).unwrap()
    };
    let at = |manifest: &Manifest| PagePlace::new(manifest, Layer(0), TokenStart(512)).unwrap();
    let (known, other) = (with_side(132), with_side(133));
    let here = at(&known);
    let file = page(&here, 3);
    let verified = verify(&here, &file, usize::MAX).unwrap();
    assert_eq!(verified.header.tokens, 3);
    let reason = |place: &PagePlace, file: &[u8]| match verify(place, file, usize::MAX) {
        Err(VerifyError::Page(error)) => error.reason(),
        found => panic!("{found:?}"),
    };
    // Each byte of the side rows is part of what the page declares.
    let first = 4096 + 3 * 512;
    for at in [first, first + 3 * 132 - 1] {
        let mut damaged = file.clone();
        damaged[at] ^= 1;
        assert_eq!(reason(&here, &damaged), "checksum");
    }
    // Cut, without them, and of a model that has others.
    assert_eq!(reason(&here, &file[..file.len() - 4096]), "size");
    assert_eq!(reason(&here, &page(&place(0, 512), 3)), "shape");
    assert_eq!(reason(&place(0, 512), &file), "shape");
    assert_eq!(reason(&at(&other), &file), "shape");
    assert_ne!(known.identity(), other.identity());
    // A layer of the same model that keeps none has pages as before.
    let plain = PagePlace::new(&known, Layer(1), TokenStart(0)).unwrap();
    assert_eq!(plain.geometry(), manifest().geometry());
    assert_eq!(page(&plain, 512).len(), 4096 + 512 * 512);
}

#[test]
fn reading_fails() {
    fn check(mut read_at: impl FnMut(u64, &mut [u8]) -> io::Result<usize>, expected: &str) {
        let error = place(0, 0).verify(&mut read_at, 8192).unwrap_err();
        assert_eq!(error.to_string(), expected);
    }
    check(|_, _| Ok(0), "file ends at byte 0 of 8192: it was cut while it was read");
    check(
        |_, buffer| Ok(buffer.len() + 1),
        "page cannot be read: the reader gave more bytes than it was asked for",
    );
    check(|_, _| Err(io::Error::other("bad sector")), "page cannot be read: bad sector");
    let mut interrupted = false;
    let once = move |_: u64, _: &mut [u8]| {
        if std::mem::replace(&mut interrupted, true) {
            return Ok(0);
        }
        Err(io::ErrorKind::Interrupted.into())
    };
    check(once, "file ends at byte 0 of 8192: it was cut while it was read");
}

proptest! {
    /// Any damage is refused, or at least seen by the checksum that the store records.
    #[test]
    fn no_flip_goes_unseen(at in prop_oneof![0..500usize, 0..8192usize], mask in 1..=255u8) {
        let place = place(0, 0);
        let mut file = page(&place, 3);
        let before = verify(&place, &file, usize::MAX).unwrap();
        file[at] ^= mask;
        match verify(&place, &file, usize::MAX) {
            Err(VerifyError::Page(_)) => {}
            Err(VerifyError::Io(error)) => prop_assert!(false, "{}", error),
            Ok(after) => {
                prop_assert!(at < 4096);
                prop_assert_ne!(after.digest.object, before.digest.object);
                prop_assert_eq!(after.digest.page, before.digest.page);
                prop_assert_eq!(after.header.tokens, before.header.tokens);
            }
        }
    }
}
