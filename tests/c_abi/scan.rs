//! A program in C attends to a sequence on a GPU, which is none, layer by layer.

use std::path::{Path, PathBuf};
use std::process::Command;

use half::f16;
use kvfs::attention::{Attention, Options, Queries, Shape};
use kvfs::page::{Dtype, Layer, Manifest, ManifestFields, PagePlace, TokenStart, names, pack_page};
use kvfs::reader::Sequence;

use crate::common::mount::scratch_directory;
use crate::library::{can_build, driver};
use crate::program::{Link, build, run};

/// As in `scan.c`.
const STEPS: usize = 4;
const LAYERS: u32 = 3;
const VALUES: usize = 6 * 64;

const PAGE_TOKENS: u32 = 32;
const PAGES: u32 = 7;
const TAIL_TOKENS: u32 = 9;

/// From -1 to 1, another one for each number.
fn noise(number: u64) -> f32 {
    let bits = (number + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(23);
    let bits = bits.wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 48;
    f32::from(u16::try_from(bits).unwrap()) / 32768.0 - 1.0
}

/// Pages and tails of a sequence in a plain directory.
fn write_sequence(root: &Path) -> PathBuf {
    let fields = ManifestFields {
        page_tokens: PAGE_TOKENS,
        ..ManifestFields::new("test", Dtype::F16, LAYERS, 2, 64)
    };
    let manifest = Manifest::new(fields).unwrap();
    let model = root.join("models/m");
    let sequence = model.join("sequences/s");
    for layer in (0..LAYERS).map(Layer) {
        let place = sequence.join(names::format_layer(layer));
        std::fs::create_dir_all(&place).unwrap();
        let rows = |start: u32, tokens: u32| -> Vec<u8> {
            let values = u64::from(start) * 256..u64::from(start + tokens) * 256;
            let value = |at: u64| f16::from_f32(noise(at * 10 + u64::from(layer.0))).to_le_bytes();
            values.flat_map(value).collect()
        };
        for start in (0..PAGES * PAGE_TOKENS).step_by(PAGE_TOKENS as usize) {
            let at = TokenStart(u64::from(start));
            let page = PagePlace::new(&manifest, layer, at).unwrap();
            let page = pack_page(&page, &rows(start, PAGE_TOKENS), PAGE_TOKENS).unwrap();
            std::fs::write(place.join(names::format_page(at)), page).unwrap();
        }
        let end = PAGES * PAGE_TOKENS;
        let tail = place.join(names::format_tail(TokenStart(u64::from(end))));
        std::fs::write(tail, rows(end, TAIL_TOKENS)).unwrap();
    }
    std::fs::write(model.join(names::MANIFEST), manifest.to_json()).unwrap();
    sequence
}

/// What the CPU gives, `[STEPS, LAYERS, VALUES]`.
fn expected(directory: &Path, q: &[f32]) -> Vec<f32> {
    let cpu = Attention::new(Shape::new(6, 2, 64, 64).unwrap(), 1).unwrap();
    let sequence = Sequence::open(directory).unwrap();
    let tokens = u64::from(PAGES * PAGE_TOKENS + TAIL_TOKENS);
    let mut layers = q.chunks_exact(VALUES);
    let mut results = Vec::new();
    for _ in 0..STEPS {
        let mut stream = sequence.stream(0..tokens).unwrap();
        while stream.layer().is_some() {
            let queries = Queries { q: layers.next().unwrap(), positions: &[tokens - 1] };
            let partials = stream.attend(&cpu, &queries, &Options::default()).unwrap();
            results.extend(partials.finish(None).unwrap());
        }
    }
    results
}

#[test]
fn of_a_sequence_in_the_order_of_a_stream() {
    require!(cc);
    if !can_build() {
        return;
    }
    let directory = scratch_directory();
    let program = build("tests/c_abi/scan.c", Link::Shared, directory.path());
    let sequence = write_sequence(directory.path());
    let count = STEPS * LAYERS as usize * VALUES;
    let q: Vec<f32> = (0..count as u64).map(|at| 2.0 * noise(at + (1 << 40))).collect();
    let (given, got) = (directory.path().join("queries"), directory.path().join("results"));
    std::fs::write(&given, q.iter().flat_map(|q| q.to_le_bytes()).collect::<Vec<u8>>()).unwrap();
    let expected = expected(&sequence, &q);
    let driver = driver(&[("F16", "f16", 64)]);
    // The first value that is off, where `plan` takes long or is forgotten.
    let attend = |plan: &[(&str, &str)]| {
        let mut command = Command::new(&program);
        command.env("LD_LIBRARY_PATH", &driver).env("KVFS_FAKE_MODULES", &driver);
        run(command.envs(plan.iter().copied()).arg(&sequence).arg(&given).arg(&got));
        let found = std::fs::read(&got).unwrap();
        let found = found.as_chunks().0.iter().map(|value| f32::from_le_bytes(*value));
        let found: Vec<f32> = found.collect();
        assert_eq!(found.len(), count);
        let is_close = |(a, b): (&f32, &f32)| (a - b).abs() <= 3e-6 * (1.0 + b.abs());
        found.iter().zip(&expected).position(|pair| !is_close(pair))
    };
    for slow in ["KVFS_FAKE_COPY_US", "KVFS_FAKE_KERNEL_US", "KVFS_FAKE_BACK_US"] {
        assert_eq!(attend(&[(slow, "3000")]), None, "{slow}");
    }
    // As if the library did not make its streams wait for the caller's, and the caller's for them.
    for (forgotten, slow) in
        [("computes", "KVFS_FAKE_COPY_US_LEAST"), ("copies", "KVFS_FAKE_KERNEL_US_LEAST")]
    {
        let plan = [("KVFS_FAKE_IGNORE", forgotten), (slow, "4000")];
        assert!(attend(&plan).is_some(), "nobody noticed {plan:?}");
    }
}
