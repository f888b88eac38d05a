//! No number that a caller can write into a structure is worth a panic or a byte beyond its memory.

use std::ffi::c_void;
use std::ptr;

use proptest::prelude::*;

use super::super::{
    Attention, AttentionConfig, Block, Manifest, Options, Partials, Queries, Rotation, Status,
    Tensor, TokenRange, kvfs_attention_create, kvfs_attention_free, kvfs_attention_run,
    kvfs_manifest_create, kvfs_manifest_free, kvfs_page_block, kvfs_rotation_free,
    kvfs_rotation_from_json, kvfs_tail_block,
};
use super::{empty_block, last_error};

const HEADS: usize = 2;
const DIM: usize = 32;
/// Bytes of K and of V: 2 tokens of 2 heads in f32, more in other types.
const BYTES: usize = 2 * HEADS * DIM * 4;

/// Small ones, powers of two and their neighbours.
fn number() -> impl Strategy<Value = u64> {
    let powers = (0_u32..64, 0_u64..3).prop_map(|(power, more)| (1_u64 << power) - 1 + more);
    prop_oneof![0_u64..6, powers, Just(1 << 63), Just(u64::MAX), any::<u64>()]
}

/// Distances between rows, often those of a page.
fn strides() -> impl Strategy<Value = (u64, u64)> {
    prop_oneof![Just((128, 256)), Just((0, 0)), (0_u64..300, 0_u64..300), (number(), number())]
}

/// The tokens of a block: none that fit with a stride of 0 and take for ever.
fn tokens() -> impl Strategy<Value = u64> {
    prop_oneof![0_u64..6, 1_u64 << 32..=u64::MAX]
}

fn small(number: u64) -> u32 {
    u32::try_from(number & 0xffff_ffff).unwrap()
}

fn size(number: u64) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}

fn tensor(rows: &[u8], strides: (u64, u64), bytes: usize) -> Tensor {
    let data = rows.as_ptr().cast::<c_void>();
    Tensor { data, bytes, head_stride: size(strides.0), token_stride: size(strides.1) }
}

fn attention(config: &AttentionConfig) -> (Status, *mut Attention) {
    let mut attention = ptr::null_mut();
    // SAFETY: both are alive.
    let status = unsafe { kvfs_attention_create(ptr::from_ref(config), &raw mut attention) };
    (status, attention)
}

fn config() -> AttentionConfig {
    AttentionConfig {
        size: size_of::<AttentionConfig>(),
        num_qo_heads: 4,
        num_kv_heads: 2,
        head_dim: 32,
        v_head_dim: 32,
        threads: 1,
        instructions: 0,
    }
}

fn run(block: &Block, options: &Options, position: u64) -> Status {
    let (status, attention) = attention(&config());
    assert_eq!(status, Status::Ok);
    let (q, positions) = (vec![0.5; 2 * HEADS * DIM], [position]);
    let (mut o, mut m, mut l) = (vec![0.0; 2 * HEADS * DIM], [0.0; 4], [0.0; 4]);
    let queries = Queries {
        size: size_of::<Queries>(),
        q: q.as_ptr(),
        positions: positions.as_ptr(),
        num_queries: 1,
        num_qo_heads: 4,
        head_dim: 32,
    };
    let mut partials = Partials {
        size: size_of::<Partials>(),
        o: o.as_mut_ptr(),
        m: m.as_mut_ptr(),
        l: l.as_mut_ptr(),
        num_queries: 1,
        num_qo_heads: 4,
        v_head_dim: 32,
        mass: ptr::null_mut(),
        mass_count: 0,
    };
    let (queries, block, options) =
        (&raw const queries, ptr::from_ref(block), ptr::from_ref(options));
    // SAFETY: everything is alive and as long as it says.
    let status =
        unsafe { kvfs_attention_run(attention, queries, block, 1, options, &raw mut partials) };
    // SAFETY: freed once.
    unsafe { kvfs_attention_free(attention) };
    status
}

fn rotation(first: u32, pairing: u32) -> *mut Rotation {
    let json = br#"{"theta": 10000.0, "dims": 8}"#;
    let mut rotation = ptr::null_mut();
    // SAFETY: both are alive.
    let status = unsafe {
        let out = &raw mut rotation;
        kvfs_rotation_from_json(json.as_ptr().cast(), json.len(), 32, pairing, first, out)
    };
    assert_ne!(status, Status::Internal, "{}", last_error());
    rotation
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16_384))]

    #[test]
    fn of_a_block(
        kind in (0_u32..8, 0_u32..3, prop_oneof![Just(BYTES), 0_usize..=BYTES]), tokens in tokens(),
        k in strides(), v in strides(), position in (number(), number()),
        shift in number(), turn in (number(), 0_u32..3),
    ) {
        let rows = vec![0x11; BYTES];
        let rows = &rows[..kind.2];
        let rotation = rotation(small(turn.0), turn.1);
        let block = Block {
            size: size_of::<Block>(),
            dtype: kind.0,
            values: kind.1,
            tokens,
            k: tensor(rows, k, rows.len()),
            v: tensor(rows, v, rows.len()),
            first_position: position.0,
            shift: shift.cast_signed(),
        };
        let options = Options { rotation, ..Options::default() };
        prop_assert_ne!(run(&block, &options, position.1), Status::Internal, "{}", last_error());
        // SAFETY: freed once; NULL is fine.
        unsafe { kvfs_rotation_free(rotation) };
    }

    #[test]
    fn of_options(
        scales in (any::<f32>(), any::<f32>()), window in number(), causality in 0_u32..3,
        range in (number(), number()), position in number(),
    ) {
        let rows = vec![0x11; BYTES];
        let rows = tensor(&rows, (128, 256), BYTES);
        let block = Block {
            size: size_of::<Block>(),
            dtype: 3,
            values: 0,
            tokens: 2,
            k: rows,
            v: rows,
            first_position: 7,
            shift: 0,
        };
        let range = TokenRange { first: range.0, end: range.1 };
        let options = Options {
            sm_scale: scales.0,
            soft_cap: scales.1,
            window,
            causality,
            selection: &raw const range,
            selection_count: 1,
            ..Options::default()
        };
        prop_assert_ne!(run(&block, &options, position), Status::Internal, "{}", last_error());
    }

    #[test]
    fn of_a_config(numbers in (number(), number(), number(), number(), number())) {
        let config = AttentionConfig {
            num_qo_heads: small(numbers.0),
            num_kv_heads: small(numbers.1),
            head_dim: small(numbers.2),
            v_head_dim: small(numbers.3),
            threads: 1,
            instructions: small(numbers.4),
            ..config()
        };
        let (status, attention) = attention(&config);
        prop_assert_ne!(status, Status::Internal, "{}", last_error());
        prop_assert_eq!(status == Status::Ok, !attention.is_null());
        // SAFETY: freed once; NULL is fine.
        unsafe { kvfs_attention_free(attention) };
    }

    #[test]
    fn of_files(layer in number(), start in number(), bytes in 0_usize..9000) {
        let json = br#"{"schema_version": 1, "model_id": "m", "dtype": "f16", "num_layers": 2,
                        "num_kv_heads": 2, "head_dim": 32, "page_tokens": 16}"#;
        let mut manifest: *mut Manifest = ptr::null_mut();
        // SAFETY: both are alive.
        let status = unsafe {
            kvfs_manifest_create(json.as_ptr().cast(), json.len(), &raw mut manifest)
        };
        prop_assert_eq!(status, Status::Ok);
        let (file, layer) = (vec![0x20_u8; bytes], small(layer));
        let mut block = empty_block();
        let (data, block) = (file.as_ptr().cast::<c_void>(), &raw mut block);
        // SAFETY: everything is alive and as long as it says.
        let page = unsafe { kvfs_page_block(manifest, layer, start, data, file.len(), block) };
        prop_assert!([Status::Page, Status::Argument].contains(&page), "{}", last_error());
        // SAFETY: everything is alive and as long as it says.
        let tail = unsafe { kvfs_tail_block(manifest, start, data, file.len(), block) };
        prop_assert_eq!(tail, Status::Ok);
        // SAFETY: freed once.
        unsafe { kvfs_manifest_free(manifest) };
    }
}
