//! The state of a recurrent layer: its header, and what its bytes are worth.
//!
//! What is accepted, the crate `safetensors` must read as well, and its checksum must be the one that
//! `docs/contract.md` defines, over the tokens that the header names.

use kvfs::page::{
    Dtype, Layer, LayerKind, Manifest, ManifestFields, PrefixHash, StatePlace, StateShape,
    StateTensor, TokenStart, VerifiedState, pack_state,
};
use twox_hash::XxHash3_128;

use super::engine::{Outcome, Target};
use super::header::{HEADER_BYTES, with_header};
use crate::common::fill;

const ROW: u64 = 100;

/// Places of states of one tensor that fills its pages, of two, and of the most that there may be.
fn places() -> Vec<StatePlace> {
    let place = |tensors: &[(&str, Dtype, &[u32])]| {
        let tensor = |(name, dtype, shape): &(&str, Dtype, &[u32])| StateTensor {
            name: (*name).to_owned(),
            dtype: *dtype,
            shape: shape.to_vec(),
        };
        let kind = LayerKind::State(StateShape { state: tensors.iter().map(tensor).collect() });
        let mut fields = ManifestFields::new("test/fuzz", Dtype::F16, 2, 2, 16);
        fields.layers = Some(vec![LayerKind::Attention, kind]);
        StatePlace::new(&Manifest::new(fields).unwrap(), Layer(1), TokenStart(ROW)).unwrap()
    };
    let names = ["a", "b", "c", "d", "e", "f", "g", "h"];
    let most: Vec<_> = names.map(|name| (name, Dtype::F8E4m3, &[3_u32, 5][..])).to_vec();
    vec![
        place(&[("ssm", Dtype::F32, &[2, 32, 16])]),
        place(&[("conv", Dtype::F16, &[8, 3]), ("ssm", Dtype::Bf16, &[2, 2, 2, 2, 2])]),
        place(&most),
    ]
}

fn file(place: &StatePlace) -> Vec<u8> {
    let bytes = usize::try_from(place.shape().payload_bytes()).unwrap();
    pack_state(place, PrefixHash([0x5a; 32]), &fill(7, bytes)).unwrap()
}

/// An input is: which place, how the rest is meant, the rest. It is the JSON of the header, or the
/// first bytes of the file; in both cases before the payload of a state that is whole.
fn seeds() -> Vec<Vec<u8>> {
    let mut seeds = Vec::new();
    for (index, place) in (0_u8..).zip(places()) {
        let file = file(&place);
        let json = file[8..HEADER_BYTES].trim_ascii_end();
        seeds.push([&[index, 0], json].concat());
        seeds.push([&[index, 1], &file[..8], json].concat());
    }
    seeds
}

pub(crate) fn target() -> Target {
    let places = places();
    let files: Vec<Vec<u8>> = places.iter().map(file).collect();
    Target {
        name: "state",
        length_max: HEADER_BYTES + 64,
        seeds: seeds(),
        words: &[
            b"\"ssm\"",
            b"\"conv\"",
            b"\"_pad\"",
            b"\"__metadata__\"",
            b"\"dtype\":\"F32\"",
            b"\"U8\"",
            b"\"shape\":[2,32,16]",
            b"\"data_offsets\":[0,4096]",
            b"kvfs.checksum",
            b"kvfs.model",
            b"kvfs.layer",
            b"kvfs.prefix",
            b"kvfs.row",
            b"\\u0000",
            b"\\ud800",
            b"1e999",
            b"-0",
            b"{}",
            b"[[[[[[[[",
        ],
        allocation_max: 1 << 20,
        run: Box::new(move |input| {
            let [which, form, rest @ ..] = input else {
                return Outcome::refused(&"too short");
            };
            let which = usize::from(*which) % places.len();
            let file = with_header(&files[which], form & 1 == 1, rest);
            match places[which].verify_bytes(&file) {
                Err(error) => Outcome::refused(&error),
                Ok(verified) => {
                    check_accepted(&places[which], &file, &verified);
                    Outcome::accepted((which, verified.header.checksum.is_some()))
                }
            }
        }),
    }
}

fn check_accepted(place: &StatePlace, file: &[u8], verified: &VerifiedState) {
    assert_eq!(file.len() as u64, place.shape().file_bytes());
    let read = safetensors::SafeTensors::deserialize(file).unwrap();
    let mut at = HEADER_BYTES;
    for tensor in &place.shape().state {
        let found = read.tensor(&tensor.name).unwrap();
        let shape: Vec<u32> =
            found.shape().iter().map(|count| u32::try_from(*count).unwrap()).collect();
        assert_eq!(shape, tensor.shape);
        assert!(file[at..].starts_with(found.data()), "{} lies elsewhere", tensor.name);
        at += found.data().len();
    }
    // What its header says: an implementation of its own reads it.
    let (_, metadata) = safetensors::SafeTensors::read_metadata(file).unwrap();
    let said = metadata.metadata().as_ref().unwrap();
    assert_eq!(said["kvfs.prefix"], verified.header.prefix.to_string());
    let payload = XxHash3_128::oneshot(&file[HEADER_BYTES..]).to_be_bytes();
    let model = place.identity().model;
    let prefix = &said["kvfs.prefix"];
    let line = format!("kvfs-state-v1 model={model} layer=1 row={ROW} prefix={prefix}\n");
    let expected = format!("{:032x}", XxHash3_128::oneshot(&[line.as_bytes(), &payload].concat()));
    assert_eq!(verified.digest.page.to_string(), expected);
    let places = [
        ("kvfs.model", model.to_string()),
        ("kvfs.layer", "1".to_owned()),
        ("kvfs.row", ROW.to_string()),
        ("kvfs.checksum", expected),
    ];
    for (name, true_value) in places {
        assert!(said.get(name).is_none_or(|value| *value == true_value), "{name}: {said:?}");
    }
}
