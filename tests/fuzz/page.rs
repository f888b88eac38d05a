//! A page file: its header, and what its bytes are worth.
//!
//! What is accepted, the crate `safetensors` must read as well, and its checksum must be the one that
//! `docs/contract.md` defines.

use kvfs::page::{
    Dtype, Geometry, Layer, LayerKind, Layout, Manifest, ManifestFields, Metadata, PagePlace,
    PageView, SideRows, TokenStart, VerifiedPage, pack_page, pack_rows, unpack_rows,
};
use twox_hash::XxHash3_128;

use super::engine::{Outcome, Target};
use super::header::{HEADER_BYTES, with_header};
use crate::common::fill;

/// Places of pages of different shapes, two tokens at most where a token is large.
fn places() -> Vec<PagePlace> {
    let place = |dtype, heads, head_dim, change: fn(&mut ManifestFields)| {
        let mut fields = ManifestFields::new("test/fuzz", dtype, 2, heads, head_dim);
        fields.page_tokens = 32;
        change(&mut fields);
        let manifest = Manifest::new(fields).unwrap();
        PagePlace::new(&manifest, Layer(1), TokenStart(64)).unwrap()
    };
    vec![
        place(Dtype::F16, 2, 16, |_| {}),
        place(Dtype::F32, 3, 20, |fields| fields.layout = Layout::Nhd),
        place(Dtype::Bf16, 1, 72, |fields| fields.v_head_dim = Some(0)),
        place(Dtype::Q8_0, 2, 64, |fields| fields.v_head_dim = Some(32)),
        place(Dtype::Bf16, 1, 72, |fields| {
            fields.v_head_dim = Some(0);
            let side = SideRows { name: "index_k".to_owned(), row_bytes: 37 };
            fields.layers = Some(vec![LayerKind::Attention, LayerKind::WithSide(side)]);
        }),
    ]
}

fn page(place: &PagePlace, tokens: u32) -> Vec<u8> {
    let bytes = place.geometry().row_bytes() * u64::from(tokens);
    pack_page(place, &fill(7, usize::try_from(bytes).unwrap()), tokens).unwrap()
}

/// An input is: which place, how the rest is meant, the rest. It is the JSON of the header, or the
/// first bytes of the file; in both cases before the payload of a page that is whole.
fn seeds() -> Vec<Vec<u8>> {
    let mut seeds = Vec::new();
    for (index, place) in (0_u8..).zip(places()) {
        for tokens in [32, 5] {
            let file = page(&place, tokens);
            let json = file[8..HEADER_BYTES].trim_ascii_end();
            let short = if tokens < 32 { 2 } else { 0 };
            seeds.push([&[index, short], json].concat());
            seeds.push([&[index, short | 1], &file[..8], json].concat());
        }
    }
    seeds
}

pub(crate) fn target() -> Target {
    let places = places();
    let files: Vec<[Vec<u8>; 2]> =
        places.iter().map(|place| [page(place, 32), page(place, 5)]).collect();
    Target {
        name: "page",
        length_max: HEADER_BYTES + 64,
        seeds: seeds(),
        words: &[
            b"\"k\"",
            b"\"v\"",
            b"\"side\"",
            b"\"_pad\"",
            b"\"__metadata__\"",
            b"\"dtype\":\"F16\"",
            b"\"U8\"",
            b"\"shape\":[2,32,16]",
            b"\"data_offsets\":[0,0]",
            b"kvfs.checksum",
            b"kvfs.model",
            b"kvfs.layer",
            b"kvfs.start",
            b"\\u0000",
            b"\\ud800",
            b"1e999",
            b"-0",
            b"{}",
            b"[[[[[[[[",
            b"\xef\xbb\xbf",
        ],
        allocation_max: 1 << 20,
        run: Box::new(move |input| {
            let [which, form, rest @ ..] = input else {
                return Outcome::refused(&"too short");
            };
            let which = usize::from(*which) % places.len();
            let file = with_header(&files[which][usize::from(form & 2 != 0)], form & 1 == 1, rest);
            match places[which].verify_bytes(&file) {
                Err(error) => Outcome::refused(&error),
                Ok(verified) => {
                    check_accepted(&places[which], &file, &verified);
                    let declared = &verified.header.declared;
                    let says = (declared.checksum.is_some(), declared.model.is_some());
                    Outcome::accepted((which, verified.header.tokens, says))
                }
            }
        }),
    }
}

fn check_accepted(place: &PagePlace, file: &[u8], verified: &VerifiedPage) {
    let geometry = place.geometry();
    let tokens = verified.header.tokens;
    assert_eq!(file.len() as u64, geometry.file_bytes(tokens));
    let read = safetensors::SafeTensors::deserialize(file).unwrap();
    let shape: Vec<u64> =
        read.tensor("k").unwrap().shape().iter().map(|count| *count as u64).collect();
    assert_eq!(shape, geometry.k_shape(tokens));
    check_rows(file, geometry, tokens);

    let payload = XxHash3_128::oneshot(&file[HEADER_BYTES..]).to_be_bytes();
    let identity = place.identity(tokens);
    let mut text = format!(
        "kvfs-page-v1 model={} layer=1 start=64 tokens={tokens} dtype={}\n",
        identity.model,
        geometry.dtype().name()
    )
    .into_bytes();
    text.extend(payload);
    let expected = format!("{:032x}", XxHash3_128::oneshot(&text));
    assert_eq!(verified.digest.page.to_string(), expected);
    if let Some(declared) = verified.header.declared.checksum {
        assert_eq!(declared.to_string(), expected);
    }
}

/// Rows out of the page and into one give the same tensors.
fn check_rows(file: &[u8], geometry: &Geometry, tokens: u32) {
    let view = PageView::parse(file, geometry).unwrap();
    let packed = pack_rows(geometry, &unpack_rows(&view), tokens, &Metadata::new()).unwrap();
    let again = PageView::parse(&packed, geometry).unwrap();
    assert!(again.k() == view.k() && again.v() == view.v() && again.side() == view.side());
}
