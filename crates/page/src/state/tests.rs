//! Which files are states of which place.

use std::slice;

use super::*;
use crate::{ManifestFields, StateTensor};
use proptest::prelude::*;

fn tensor(name: &str, dtype: Dtype, shape: &[u32]) -> StateTensor {
    StateTensor { name: name.to_owned(), dtype, shape: shape.to_vec() }
}

/// Attention, then two recurrent layers with a convolution and a matrix of 4 KiB in all.
fn manifest(change: impl FnOnce(&mut ManifestFields)) -> Manifest {
    let state = vec![tensor("conv", Dtype::F16, &[64, 3]), tensor("ssm", Dtype::F32, &[4, 232])];
    let kind = LayerKind::State(StateShape { state });
    let mut fields = ManifestFields::new("m", Dtype::F16, 3, 2, 64);
    fields.layers = Some(vec![LayerKind::Attention, kind.clone(), kind]);
    change(&mut fields);
    Manifest::new(fields).unwrap()
}

fn place(layer: u32, row: u64) -> StatePlace {
    StatePlace::new(&manifest(|_| {}), Layer(layer), TokenStart(row)).unwrap()
}

const PREFIX_OF_NOTHING: PrefixHash = PrefixHash([7; 32]);

fn state(place: &StatePlace) -> Vec<u8> {
    let bytes = index(place.shape().payload_bytes());
    pack_state(place, PREFIX_OF_NOTHING, &vec![5; bytes]).unwrap()
}

#[test]
fn what_was_packed_is_accepted_where_it_belongs() {
    let here = place(1, 100);
    let file = state(&here);
    assert_eq!(file.len() as u64, here.shape().file_bytes());
    let verified = here.verify_bytes(&file).unwrap();
    assert_eq!(verified.header.prefix, PREFIX_OF_NOTHING);
    assert_eq!(verified.header.checksum, Some(verified.digest.page));
    let mut read_at = |offset: u64, buffer: &mut [u8]| {
        let rest = &file[index(offset)..];
        let bytes = rest.len().min(buffer.len()).min(1000);
        buffer[..bytes].copy_from_slice(&rest[..bytes]);
        Ok(bytes)
    };
    assert_eq!(here.verify(&mut read_at, file.len() as u64).unwrap(), verified);
    // What docs/contract.md says.
    let payload = twox_hash::XxHash3_128::oneshot(&file[4096..]).to_be_bytes();
    let model = manifest(|_| {}).identity();
    let line = format!("kvfs-state-v1 model={model} layer=1 row=100 prefix={PREFIX_OF_NOTHING}\n");
    let expected = crate::content_checksum(&[line.as_bytes(), &payload].concat());
    assert_eq!(verified.digest.page, expected);
}

#[test]
fn a_state_of_another_place_is_refused() {
    fn check(at: &StatePlace, expected: &str) {
        let error = at.verify_bytes(&state(&place(1, 100))).unwrap_err();
        assert_eq!(error.to_string(), expected);
    }
    check(
        &place(2, 100),
        "header declares kvfs.layer 1, this place is 2: the page belongs elsewhere",
    );
    check(
        &place(1, 101),
        "header declares kvfs.row 100, this place is 101: the page belongs elsewhere",
    );
    let other = manifest(|fields| fields.salt = Some("s".to_owned()));
    let at = StatePlace::new(&other, Layer(1), TokenStart(100)).unwrap();
    let error = at.verify_bytes(&state(&place(1, 100))).unwrap_err();
    assert!(error.to_string().starts_with("header declares kvfs.model "), "{error}");
    let (conv, ssm) = (tensor("conv", Dtype::F16, &[64, 3]), tensor("ssm", Dtype::F32, &[4, 232]));
    let shapes: [(&[StateTensor], &str); 4] = [
        (
            &[conv.clone(), tensor("ssm", Dtype::F16, &[4, 464])],
            "tensor ssm has dtype \"F32\", this cache has F16",
        ),
        (
            &[tensor("conv", Dtype::F16, &[3, 64]), ssm.clone()],
            "tensor conv has shape [64, 3], this cache has [3, 64]",
        ),
        (slice::from_ref(&conv), "tensor \"ssm\" is unknown"),
        (&[conv.clone(), ssm, tensor("z", Dtype::F32, &[1])], "tensor z is missing"),
    ];
    for (state_of, expected) in shapes {
        let kind = LayerKind::State(StateShape { state: state_of.to_vec() });
        let other = manifest(|fields| {
            fields.layers = Some(vec![LayerKind::Attention, kind.clone(), kind]);
        });
        let at = StatePlace::new(&other, Layer(1), TokenStart(100)).unwrap();
        let error = at.verify_bytes(&state(&place(1, 100))).unwrap_err();
        assert!(error.to_string().starts_with(expected), "{error}");
    }
}

#[test]
fn layers_without_states_have_no_place_for_one() {
    fn check(layer: u32, row: u64, expected: &str) {
        let place = StatePlace::new(&manifest(|_| {}), Layer(layer), TokenStart(row));
        assert_eq!(place.unwrap_err().to_string(), expected);
    }
    check(0, 1, "layer 0 is not recurrent: it keeps pages, not states");
    check(3, 1, "layer 3 does not exist: the manifest has num_layers 3");
    check(1, 0, "no state is after 0 tokens: 1 to 1099511627776");
    check(1, u64::MAX, "no state is after 18446744073709551615 tokens: 1 to 1099511627776");
    let words = manifest(|fields| fields.layers = Some(vec![LayerKind::Recurrent; 3]));
    let error = StatePlace::new(&words, Layer(0), TokenStart(1)).unwrap_err().to_string();
    assert!(error.contains("does not say what its state consists of"), "{error}");
}

#[test]
fn a_header_says_what_the_state_has_seen() {
    let here = place(1, 100);
    let with = |entries: &[(&str, &str)]| {
        let metadata =
            entries.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        let mut file = state(&here);
        file[..4096].copy_from_slice(&build_state_header(here.shape(), &metadata).unwrap());
        here.verify_bytes(&file).map(|verified| verified.header).map_err(|error| error.to_string())
    };
    let missing = "header metadata kvfs.prefix is missing: a state says which tokens it has seen";
    assert_eq!(with(&[]), Err(missing.to_owned()));
    let error = with(&[("kvfs.prefix", "7")]).unwrap_err();
    assert!(error.contains("must be 64 lower-case hexadecimal digits"), "{error}");
    let prefix = PREFIX_OF_NOTHING.to_string();
    let header = with(&[("kvfs.prefix", &prefix), ("note", "x")]).unwrap();
    assert_eq!(header, StateHeader { prefix: PREFIX_OF_NOTHING, checksum: None });
    // The checksum is one of these tokens.
    let mut file = state(&here);
    let found = file.windows(64).position(|bytes| bytes == prefix.as_bytes()).unwrap();
    file[found] = b'1';
    assert!(matches!(here.verify_bytes(&file), Err(PageError::Checksum { .. })));
}

#[test]
fn the_largest_header_fits() {
    let name = |number: usize| format!("{number}{}", "n".repeat(63));
    let state =
        (0..8).map(|number| tensor(&name(number), Dtype::F8E4m3, &[1, 1, 1, 1, 1, 1 << 27]));
    let kind = LayerKind::State(StateShape { state: state.take(7).collect() });
    let large = manifest(|fields| fields.layers = Some(vec![kind; 3]));
    let place = StatePlace::new(&large, Layer(2), TokenStart(1 << 40)).unwrap();
    let metadata = ["kvfs.prefix", "kvfs.model", "kvfs.layer", "kvfs.row", "kvfs.checksum"]
        .map(|name| (name.to_owned(), "0".repeat(64)));
    assert!(build_state_header(place.shape(), &Metadata::from(metadata)).is_ok());
}

proptest! {
    #[test]
    fn a_changed_byte_is_noticed(at in 0..8192_usize, bit in 0..8) {
        let here = place(2, 64);
        let mut file = state(&here);
        let at = at.min(file.len() - 1);
        file[at] ^= 1_u8 << bit;
        // White space of the header may be another one; its bytes are the object's checksum's business.
        let before = here.verify_bytes(&state(&here)).unwrap();
        match here.verify_bytes(&file) {
            Err(_) => {}
            Ok(after) => {
                prop_assert!(at < 4096);
                prop_assert_ne!(after.digest.object, before.digest.object);
            }
        }
    }
}
