//! What the engine computed, as pages of a mount and back.

use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::process::Command;

use half::f16;
use kvfs::attention::{Attention, Options, Queries, Shape};
use kvfs::page::{Layout, PageView};
use kvfs::reader::Sequence;

use crate::common::mount::scratch_directory;
use crate::common::{Mode, Mount, fill};
use crate::engine::ran;
use crate::gguf::Model;
use crate::program::run;
use crate::slot_file;

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

/// Query heads of the tiny model, and elements of one.
const QO_HEADS: usize = 4;
const HEAD_DIM: usize = 64;
const LAYERS: usize = 4;
/// The runtime adds in f32, in an order that depends on the processor.
const RELATIVE_ERROR_MAX: f64 = 1e-4;

/// `[qo_heads, head_dim]`
fn query() -> Vec<f32> {
    let bytes = fill(5, QO_HEADS * HEAD_DIM);
    bytes.iter().map(|byte| f32::from(byte.cast_signed()) / 64.0).collect()
}

/// Attention over each layer of a sequence.
fn attend(sequence: &Path) -> Vec<f32> {
    let sequence = Sequence::open(sequence).unwrap();
    let shape = Shape::new(QO_HEADS, 2, HEAD_DIM, HEAD_DIM).unwrap();
    let attention = Attention::new(shape, 2).unwrap();
    let q = query();
    let queries = Queries { q: &q, positions: &[TOKENS as u64 - 1] };
    let mut stream = sequence.stream(0..TOKENS as u64).unwrap();
    let mut all = Vec::new();
    while stream.layer().is_some() {
        let partials = stream.attend(&attention, &queries, &Options::default()).unwrap();
        all.extend(partials.finish(None).unwrap());
    }
    all
}

/// The same in f64, over the rows as the engine's cache has them.
fn reference(mount: &Mount) -> Vec<f64> {
    let mut all = Vec::new();
    for layer in 0..LAYERS {
        let [k, v] = ["k", "v"].map(|name| {
            let cache = mount.join(format!("files/llama/0/cache_{name}_l{layer}"));
            let bytes = std::fs::read(cache).unwrap();
            let halves = bytes[..TOKENS * ROW_BYTES].chunks_exact(2);
            let value = |half: &[u8]| f16::from_le_bytes([half[0], half[1]]).to_f64();
            halves.map(value).collect::<Vec<f64>>()
        });
        for (head, q) in query().chunks_exact(HEAD_DIM).enumerate() {
            let rows = |values: &[f64]| {
                let rows = values.chunks_exact(HEAD_DIM).skip(head / 2).step_by(2);
                rows.map(<[f64]>::to_vec).collect::<Vec<_>>()
            };
            let score = |k: &Vec<f64>| {
                k.iter().zip(q).map(|(k, q)| k * f64::from(*q)).sum::<f64>() / 64_f64.sqrt()
            };
            let scores: Vec<f64> = rows(&k).iter().map(score).collect();
            let most = scores.iter().copied().fold(f64::MIN, f64::max);
            let weights: Vec<f64> = scores.iter().map(|score| (score - most).exp()).collect();
            let sum: f64 = weights.iter().sum();
            let v = rows(&v);
            all.extend((0..HEAD_DIM).map(|element| {
                weights.iter().zip(&v).map(|(weight, v)| weight * v[element]).sum::<f64>() / sum
            }));
        }
    }
    all
}

/// In the norm, since elements may cancel to next to nothing.
#[track_caller]
fn compare(found: &[f32], expected: &[f64]) {
    assert_eq!(found.len(), LAYERS * QO_HEADS * HEAD_DIM);
    assert_eq!(found.len(), expected.len());
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>().sqrt();
    let length = norm(&mut expected.iter().copied());
    let pairs = found.iter().zip(expected);
    let error = norm(&mut pairs.map(|(found, expected)| f64::from(*found) - expected)) / length;
    assert!(length > 1.0, "there is next to nothing to attend to: {length}");
    assert!(error < RELATIVE_ERROR_MAX, "relative error {error}");
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

    let expected = reference(&mount);
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
        compare(&attend(&sequence), &expected);
    }

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
    let slot = directory.path().join("slot");
    ran(&path, &format!("--flash on --predict 0 --save {}", text(&slot)), None);
    check(&slot, "other", "layer 0 has K of 256 bytes for each token, the manifest of 128");
    check(&path, "tiny", "is no slot file of llama.cpp");
}

/// Two conversations whose first pages are the same have them once.
#[test]
fn a_beginning_in_common_is_stored_once() {
    require!(fuse);
    let mount = Mount::new(Mode::Served);
    create(&mount, "tiny", "nhd", "2");
    let sequences = mount.join("models/tiny/sequences");
    for (name, tokens) in [("long", TOKENS), ("short", TOKENS - PAGE_TOKENS / 2)] {
        let slot = mount.join("files").join(name);
        slot_file::write(&slot, &Model::tiny(), tokens);
        run(&mut kvfs(&["import", text(&slot), text(&sequences.join(name))]));
    }
    for layer in 0..LAYERS {
        let file = |name: &str, page: usize| {
            let page = format!("{layer:03}/{:07}.safetensors", page * PAGE_TOKENS);
            sequences
                .join(name)
                .join(page)
                .metadata()
                .map(|metadata| (metadata.ino(), metadata.nlink()))
        };
        let [long, short] = ["long", "short"].map(|name| file(name, 0).unwrap());
        assert_eq!(long, short);
        assert_eq!(long.1, 2);
        assert!(file("short", 1).is_err(), "a page of {PAGE_TOKENS} tokens cannot be whole");
    }
}

/// The view `slots/` has the same file without anybody making it, and stock goes on from there.
fn a_sequence_is_a_slot_by_itself(mode: Mode) {
    require!(llama, cc);
    let directory = scratch_directory();
    let path = directory.path().join("tiny.gguf");
    Model::write_tiny(&path);
    let mount = Mount::new(mode);
    let slot = directory.path().join("slot.bin");
    let arguments =
        format!("--flash on --prompt-tokens {TOKENS} --predict 0 --save {}", text(&slot));
    ran(&path, &arguments, None);
    let expected = std::fs::read(&slot).unwrap();
    let go_on = |slot: &Path| format!("--flash on --predict 24 --load {}", text(slot));
    let stock = ran(&path, &go_on(&slot), None);
    for layout in ["nhd", "hnd"] {
        create(&mount, layout, layout, "2");
        let model = mount.join("models").join(layout);
        run(&mut kvfs(&["import", text(&slot), text(&model.join("sequences/chat"))]));
        let view = model.join("slots/chat.bin");
        assert_eq!(view.metadata().unwrap().len(), expected.len() as u64);
        assert!(std::fs::read(&view).unwrap() == expected, "{layout}");
        // Pieces that begin and end anywhere.
        let file = File::open(&view).unwrap();
        for index in 0..60 {
            let offset = index * (expected.len() / 60) + index % 7;
            let mut piece = vec![0; 997.min(expected.len() - offset)];
            file.read_exact_at(&mut piece, offset as u64).unwrap();
            assert!(piece == expected[offset..][..piece.len()], "{layout}: from {offset}");
        }
        stock.followed(&path, &go_on(&view), None).assert_like(&stock, 0.0);
    }
    let slots = mount.join("models/nhd/slots");
    assert_eq!(std::fs::read_dir(&slots).unwrap().count(), 0, "nothing virtual is listed");
    for absent in ["other.bin", "chat", "chat.bin.tmp"] {
        assert!(!slots.join(absent).exists(), "{absent}");
    }
    let denied = |outcome: std::io::Result<()>| outcome.unwrap_err().raw_os_error().unwrap();
    let view = slots.join("chat.bin");
    assert_eq!(denied(std::fs::remove_file(&view)), libc::EPERM);
    assert_eq!(denied(File::options().write(true).open(&view).map(drop)), libc::EPERM);
    // Pages that go take the slot along, back to where they begin.
    let page = mount.join("models/nhd/sequences/chat/003/0000128.safetensors");
    std::fs::remove_file(page).unwrap();
    let head = 28 + 4 * 129 + 12 * 128;
    let rows = 8 * (12 + 128 * ROW_BYTES);
    assert_eq!(std::fs::read(&view).unwrap().len(), head + rows);
    run(&mut kvfs(&["import", text(&view), text(&mount.join("models/nhd/sequences/less"))]));
}

in_both_modes!(a_sequence_is_a_slot_by_itself);
