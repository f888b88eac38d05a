//! What the engine computed, as pages of a mount and back.

use std::path::Path;
use std::process::Command;

use kvfs::attention::{Attention, Options, Queries, Shape};
use kvfs::page::{Layout, PageView};
use kvfs::reader::Sequence;

use crate::common::mount::scratch_directory;
use crate::common::{Mode, Mount, fill};
use crate::engine::ran;
use crate::gguf::Model;
use crate::program::run;

const TOKENS: usize = 300;
const PAGE_TOKENS: usize = 128;
/// K of one token and layer of the tiny model: two heads of 64 in f16.
const ROW_BYTES: usize = 2 * 64 * 2;

fn kvfs(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvfs"));
    command.args(arguments);
    command
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn create(mount: &Mount, name: &str, layout: &str, heads: &str) {
    let model = mount.join("models").join(name);
    let sizes = ["--layers", "4", "--kv-heads", heads, "--head-dim", "64", "--page-tokens", "128"];
    run(kvfs(&["create", text(&model), "--layout", layout]).args(sizes));
}

/// The result of one attention call for each layer.
fn attend(sequence: &Path) -> Vec<f32> {
    let sequence = Sequence::open(sequence).unwrap();
    let attention = Attention::new(Shape::new(4, 2, 64, 64).unwrap(), 2).unwrap();
    let q: Vec<f32> = fill(5, 4 * 64).iter().map(|b| f32::from(b.cast_signed()) / 64.0).collect();
    let queries = Queries { q: &q, positions: &[TOKENS as u64 - 1] };
    let mut stream = sequence.stream(0..TOKENS as u64).unwrap();
    let mut all = Vec::new();
    while stream.layer().is_some() {
        let partials = stream.attend(&attention, &queries, &Options::default()).unwrap();
        all.extend(partials.finish(None).unwrap());
    }
    assert_eq!(all.len(), 4 * 4 * 64);
    all
}

#[test]
fn a_slot_becomes_pages_and_a_slot_again() {
    require!(fuse, llama, cc);
    let directory = scratch_directory();
    let path = directory.path().join("tiny.gguf");
    Model::write_tiny(&path);
    let mount = Mount::new(Mode::Served);
    let slot = mount.join("files/slot.bin");
    let arguments =
        format!("--flash on --prompt-tokens {TOKENS} --predict 0 --save {}", text(&slot));
    ran(&path, &arguments, Some(mount.path())).assert_attention_was_ours();

    let mut results = Vec::new();
    for layout in ["nhd", "hnd"] {
        create(&mount, layout, layout, "2");
        let sequence = mount.join("models").join(layout).join("sequences/chat");
        run(&mut kvfs(&["import", text(&slot), text(&sequence)]));
        let exported = mount.join("files").join(layout);
        run(&mut kvfs(&["export", text(&sequence), text(&exported)]));
        assert!(std::fs::read(&exported).unwrap() == std::fs::read(&slot).unwrap(), "{layout}");
        let inspected = run(&mut kvfs(&["inspect", text(&sequence)]));
        let inspected = String::from_utf8(inspected.stdout).unwrap();
        assert!(inspected.contains("301"), "{inspected}");
        results.push(attend(&sequence));
    }
    let differences = results[0].iter().zip(&results[1]).map(|(nhd, hnd)| (nhd - hnd).abs());
    assert!(differences.fold(0.0, f32::max) < 1e-5);
    assert!(results[0].iter().any(|value| value.abs() > 0.01));

    // With the engine's order of heads and tokens a page is a slice of its cache.
    let sequence = mount.join("models/nhd/sequences/chat");
    let sequence_manifest = Sequence::open(&sequence).unwrap().manifest().clone();
    assert_eq!(sequence_manifest.geometry().layout(), Layout::Nhd);
    for (layer, start) in [(0, 0), (2, 1)] {
        let page = sequence.join(format!("{layer:03}/{:07}.safetensors", start * PAGE_TOKENS));
        let page = std::fs::read(page).unwrap();
        let page = PageView::parse(&page, sequence_manifest.geometry()).unwrap();
        let rows = start * PAGE_TOKENS * ROW_BYTES..(start + 1) * PAGE_TOKENS * ROW_BYTES;
        for (tensor, name) in [(page.k(), "cache_k_l"), (page.v(), "cache_v_l")] {
            let cache = mount.join(format!("files/llama/0/{name}{layer}"));
            assert!(tensor == &std::fs::read(cache).unwrap()[rows.clone()], "{name}{layer}");
        }
    }
}

#[test]
fn what_is_no_sequence_of_pages_is_refused() {
    require!(fuse, llama, cc);
    let directory = scratch_directory();
    let path = directory.path().join("tiny.gguf");
    Model::write_tiny(&path);
    let mount = Mount::new(Mode::Served);
    create(&mount, "tiny", "nhd", "2");
    create(&mount, "other", "nhd", "1");
    let check = |slot: &Path, model: &str, line: &str| {
        let sequence = mount.join("models").join(model).join("sequences/chat");
        let output = kvfs(&["import", text(slot), text(&sequence)]).output().unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!((output.status.code(), error.lines().count()), (Some(1), 1), "{error}");
        assert!(error.contains(line), "{error}");
        assert!(!sequence.exists(), "half a sequence is left");
    };
    for (flash, model, line) in [
        ("on", "other", "256 bytes of K and 256 of V for each token, the manifest 128 and 128"),
        ("off", "tiny", "V transposed: save it with flash attention on"),
    ] {
        let slot = directory.path().join(flash);
        let arguments = format!("--flash {flash} --predict 0 --save {}", text(&slot));
        ran(&path, &arguments, None);
        check(&slot, model, line);
    }
    check(&path, "tiny", "is no slot file of llama.cpp");
}
