//! A program in C writes rows from the memory of a GPU, which is none, to a sequence.

use std::path::Path;
use std::process::Command;

use kvfs::page::{Dtype, Layer, Manifest, ManifestFields, TokenStart, names};

use crate::common::mount::scratch_directory;
use crate::library::{can_build, driver};
use crate::program::{Link, build, run};

/// As in `write_back.c`.
const LAYERS: u32 = 3;
const STEPS: u32 = 3;
const TOKENS: u32 = 20;
const BYTES: u32 = TOKENS * 512;

/// Whether the sequence that the program leaves is what it gave, under a driver with a plan.
fn is_whole(program: &Path, driver: &Path, plan: &[(&str, &str)]) -> bool {
    let directory = scratch_directory();
    // 2 KV heads x 64 in f16: rows of 512 bytes.
    let fields = ManifestFields {
        page_tokens: 64,
        ..ManifestFields::new("test", Dtype::F16, LAYERS, 2, 64)
    };
    let manifest = directory.path().join(names::MANIFEST);
    std::fs::write(&manifest, Manifest::new(fields).unwrap().to_json()).unwrap();
    let sequence = directory.path().join("sequences/s");
    let layer_of = |layer| sequence.join(names::format_layer(Layer(layer)));
    (0..LAYERS).for_each(|layer| std::fs::create_dir_all(layer_of(layer)).unwrap());
    let mut command = Command::new(program);
    command.env("LD_LIBRARY_PATH", driver).env("KVFS_FAKE_MODULES", driver);
    run(command.envs(plan.iter().copied()).arg(&sequence).arg(&manifest));

    let ids = std::fs::read(sequence.join(names::TOKENS)).unwrap();
    assert_eq!(ids, (0..STEPS * TOKENS).flat_map(u32::to_le_bytes).collect::<Vec<u8>>());
    (0..LAYERS).all(|layer| {
        let bytes = (0..STEPS).flat_map(|step| {
            (0..BYTES).map(move |i| (7 * step + 13 * layer + 3 * i).to_le_bytes()[0])
        });
        let tail = layer_of(layer).join(names::format_tail(TokenStart(0)));
        bytes.eq(std::fs::read(tail).unwrap())
    })
}

#[test]
fn of_rows_in_the_order_of_a_stream() {
    require!(cc);
    if !can_build() {
        return;
    }
    let directory = scratch_directory();
    let program = build("tests/c_abi/write_back.c", Link::Shared, directory.path());
    let driver = driver(&[("F16", "f16", 64)]);
    let slow_uploads = ("KVFS_FAKE_COPY_US_LEAST", "4000");
    let slow_downloads = ("KVFS_FAKE_BACK_US_LEAST", "4000");
    for plan in [slow_uploads, slow_downloads] {
        assert!(is_whole(&program, &driver, &[plan]), "{plan:?}");
        // As if neither stream waited for the other.
        let plan = [("KVFS_FAKE_IGNORE", "copies"), plan];
        assert!(!is_whole(&program, &driver, &plan), "nobody noticed {plan:?}");
    }
}
