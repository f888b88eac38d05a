//! Everything that changes logits or hides tokens.

use half::f16;
use serde_json::json;

use super::fixture::{Cache, Place, Random};
use super::reference::{self, relative_l2};
use super::{RELATIVE_L2_MAX, check, shape, supported};
use crate::attention::{
    Attention, KvBlock, Mask, Options, Pairing, Queries, Rotation, Tensor, Values,
};
use crate::page::{Dtype, Layout, Rope, Strides};

#[test]
fn windows_caps_slopes_sinks_and_scales() {
    let slopes = [0.25, 0.5, 0.01, 0.7, 0.3];
    let sinks = [0.5, -3.0, 4.0, 0.0, 10.0];
    for dtype in [Dtype::F16, Dtype::Q8_0] {
        let cache = Cache::new(
            shape((5, 1), (64, 64)),
            dtype,
            Place::Page(Layout::Hnd),
            &[64, 40],
            false,
            2,
        );
        let positions = [103, 80, 31];
        let plain = Options::default();
        for options in [
            Options { window: Some(1), ..plain },
            Options { window: Some(33), ..plain },
            Options { window: Some(1 << 40), ..plain },
            Options { window: Some(20), causal: false, ..plain },
            Options { soft_cap: Some(1.5), ..plain },
            Options { soft_cap: Some(50.0), ..plain },
            Options { alibi_slopes: Some(&slopes), ..plain },
            Options { sm_scale: Some(0.9), ..plain },
            Options { soft_cap: Some(5.0), alibi_slopes: Some(&slopes), window: Some(70), ..plain },
        ] {
            check(&cache, &positions, &options, None);
            check(&cache, &positions, &options, Some(&sinks));
        }
    }
}

#[test]
fn additive_masks() {
    let cache = Cache::new(shape((4, 2), (64, 64)), Dtype::F16, Place::Tail, &[64, 33], false, 4);
    let mut random = Random(8);
    let values: Vec<f16> =
        (0..3 * 97)
            .map(|_| {
                if random.below(3) == 0 {
                    f16::NEG_INFINITY
                } else {
                    f16::from_f32(random.normal())
                }
            })
            .collect();
    let positions = [96, 50, 96];
    let options = Options { mask: Some(Mask::F16(&values)), ..Options::default() };
    check(&cache, &positions, &options, None);
    let mut values: Vec<f32> = values.iter().map(|value| value.to_f32()).collect();
    // The last query sees nothing.
    values[2 * 97..].fill(f32::NEG_INFINITY);
    let options = Options { mask: Some(Mask::F32(&values)), ..Options::default() };
    check(&cache, &positions, &options, Some(&[0.1; 4]));
}

/// Memory that ends the process if anybody touches it.
fn inaccessible(bytes: usize) -> memmap2::MmapMut {
    let mut map = memmap2::MmapMut::map_anon(bytes).unwrap();
    // SAFETY: the map is this function's own, and what touches it later is what is looked for.
    let result = unsafe { libc::mprotect(map.as_mut_ptr().cast(), map.len(), libc::PROT_NONE) };
    assert_eq!(result, 0);
    map
}

/// Every K and V that a mask, a window or causality hides is NaN, and pages that are hidden as a
/// whole are not mapped.
#[test]
fn hidden_tokens_are_never_touched() {
    let shape = shape((4, 2), (64, 64));
    let strides = Strides { head: 128 * 64 * 2, token: 64 * 2 };
    let nan: Vec<u8> = f16::NAN.to_le_bytes().repeat(2 * 128 * 64);
    let mut visible = nan.clone();
    let seen = |token: usize| token % 5 == 2 && token < 90;
    for token in (0..128).filter(|token| seen(*token)) {
        for head in 0..2 {
            let at = head * strides.head + token * strides.token;
            visible[at..at + 128].copy_from_slice(&f16::ONE.to_le_bytes().repeat(64));
        }
    }
    let unmapped = inaccessible(nan.len());
    let block = |bytes, first_position| {
        let tensor = Tensor { bytes, strides };
        KvBlock {
            k: tensor,
            v: Values::Rows(tensor),
            dtype: Dtype::F16,
            tokens: 128,
            first_position,
            shift: 0,
        }
    };
    let blocks =
        [block(&unmapped, 0), block(&visible, 128), block(&unmapped, 256), block(&unmapped, 500)];
    let q = Random(3).normals(4 * 64);
    let queries = Queries { q: &q, positions: &[400] };
    let mut mask = vec![f32::NEG_INFINITY; 4 * 128];
    (0..128).filter(|token| seen(*token)).for_each(|token| mask[128 + token] = 0.25);
    for set in supported() {
        for threads in [1, 2] {
            let attention = Attention::with_instructions(shape, threads, set).unwrap();
            let options = Options { mask: Some(Mask::F32(&mask)), ..Options::default() };
            let out = attention.run(&queries, &blocks, &options).unwrap().finish(None).unwrap();
            assert!(out.iter().all(|value| (value - 1.0).abs() < 1e-6), "{set:?}");
        }
    }
}

fn rope(scaling: Option<serde_json::Value>, dims: Option<u32>) -> Rope {
    Rope { theta: 10_000.0, scaling, dims, other: serde_json::Map::new() }
}

/// K as it would be, had it been rotated for where it stands now.
#[test]
fn shifted_pages_equal_pages_that_were_rotated_anew() {
    let llama3 = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 256});
    let yarn = json!({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512});
    for pairing in [Pairing::Halves, Pairing::Interleaved] {
        for (rope, first) in [
            (rope(None, None), 0),
            (rope(None, Some(32)), 0),
            (rope(None, Some(16)), 48),
            (rope(Some(json!({"type": "linear", "factor": 2.0})), None), 0),
            (rope(Some(llama3.clone()), None), 0),
            (rope(Some(yarn.clone()), None), 0),
        ] {
            let rotation = Rotation::new(&rope, 64, pairing).unwrap().starting_at(first);
            let shape = shape((4, 2), (64, 64));
            let mut cache =
                Cache::new(shape, Dtype::F32, Place::Page(Layout::Hnd), &[40, 40, 33], false, 6);
            let shifts = [0, 1000, -30];
            for (run, shift) in cache.runs.iter_mut().zip(shifts) {
                run.shift = shift;
                run.first_position = run.first_position.checked_add_signed(shift).unwrap();
            }
            let q = Random(5).normals(4 * 64);
            let queries = Queries { q: &q, positions: &[2000] };
            let options = Options { rotation: Some(&rotation), ..Options::default() };
            let found = Attention::new(shape, 1).unwrap().run(&queries, &cache.blocks(), &options);
            // The reference knows no shift: give it K rotated for where it stands.
            let run_of = |token| usize::from(token >= 40) + usize::from(token >= 80);
            for (row, k) in cache.k.chunks_exact_mut(64).enumerate() {
                rotation.rotate(k, shifts[run_of(row / 2)]);
            }
            let expected = reference::attend(&cache, &queries, &options, None);
            let error = relative_l2(&found.unwrap().finish(None).unwrap(), &expected);
            assert!(error <= RELATIVE_L2_MAX, "{error:.1e} off, {pairing:?} {rope:?}");
        }
    }
}

/// Frequencies that were computed by the formulas of the `transformers` library's
/// `modeling_rope_utils`, apart from this program: pairs that are kept, stretched, and between.
#[test]
fn frequencies_of_scaled_rotations() {
    let llama3 = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192});
    let yarn = json!({"type": "yarn", "factor": 16.0, "original_max_position_embeddings": 4096});
    let untruncated = json!({"rope_type": "yarn", "factor": 32.0, "truncate": false,
        "beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 4096});
    let check = |theta, dims: usize, scaling: &serde_json::Value, expected: &[(usize, f64)]| {
        let rope = Rope { theta, ..rope(Some(scaling.clone()), None) };
        let rotation = Rotation::new(&rope, dims, Pairing::Halves).unwrap();
        for (pair, frequency) in expected {
            // So many positions that the pair turns by about a radian.
            #[allow(clippy::cast_possible_truncation, reason = "below 2^24")]
            let positions = (1.0 / frequency) as i32;
            let mut row = vec![0.0; dims];
            row[*pair] = 1.0;
            rotation.rotate(&mut row, i64::from(positions));
            let angle = f64::from(row[pair + dims / 2]).atan2(f64::from(row[*pair]));
            let found = angle / f64::from(positions);
            assert!((found / frequency - 1.0).abs() < 1e-6, "{pair}: {found}, not {frequency}");
        }
    };
    // Llama 3.1
    let expected = [
        (0, 1.0),
        (20, 0.016_560_440_1),
        (28, 0.003_211_445_99),
        (29, 0.002_166_570_76),
        (31, 0.000_856_751_413),
        (33, 0.000_312_693_75),
        (35, 9.556_212_35e-05),
        (40, 3.428_102_2e-05),
        (63, 3.068_925_99e-07),
    ];
    check(500_000.0, 128, &llama3, &expected);
    let expected = [
        (0, 1.0),
        (10, 0.237_137_371),
        (20, 0.056_234_132_5),
        (21, 0.046_940_86),
        (30, 0.008_526_843_77),
        (40, 0.000_881_788_963),
        (46, 8.334_508_95e-05),
        (50, 4.686_838_81e-05),
        (63, 7.217_387_4e-06),
    ];
    check(10_000.0, 128, &yarn, &expected);
    let expected = [
        (0, 1.0),
        (8, 0.050_813_274_8),
        (9, 0.031_705_696_2),
        (12, 0.006_794_959_49),
        (16, 0.000_456_483_919),
        (17, 0.000_129_318_701),
        (18, 3.830_881_24e-05),
        (31, 3.023_511_43e-07),
    ];
    check(150_000.0, 64, &untruncated, &expected);
}

#[test]
fn rotations() {
    // One position turns the first pair by a radian, whatever the length.
    let mut row = [1.0, 0.0, 0.0, 0.0];
    Rotation::new(&rope(None, None), 4, Pairing::Halves).unwrap().rotate(&mut row, 1);
    assert!((row[0] - 1_f32.cos()).abs() < 1e-6 && (row[2] - 1_f32.sin()).abs() < 1e-6);
    let mut row = [0.0, 0.0, 1.0, 0.0];
    Rotation::new(&rope(None, None), 4, Pairing::Interleaved).unwrap().rotate(&mut row, -100);
    assert!((row[2] - 1_f32.cos()).abs() < 1e-6 && (row[3] + 1_f32.sin()).abs() < 1e-6);

    let refused = |scaling, dims| {
        Rotation::new(&rope(scaling, dims), 64, Pairing::Halves).unwrap_err().to_string()
    };
    assert!(refused(None, Some(66)).contains("66 of 64 elements"));
    assert!(refused(Some(json!({"type": "linear"})), None).contains("without factor"));
    let dynamic = refused(Some(json!({"type": "dynamic", "factor": 2.0})), None);
    assert!(dynamic.contains("is not supported"), "{dynamic}");
}
