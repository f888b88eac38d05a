//! Models of many shapes give what stock gives.

use crate::common::mount::scratch_directory;
use crate::common::{Mode, Mount};
use crate::engine::ran;
use crate::gguf::Model;

/// Of the spread of the logits. Stock rounds queries and weights to f16; the runtime does not.
const TOLERANCE: f32 = 4e-3;

fn check(model: &Model, arguments: &str) {
    let directory = scratch_directory();
    let path = directory.path().join("model.gguf");
    model.write_random(7, &path);
    let stock = ran(&path, arguments, None);
    let mount = Mount::new(Mode::Served);
    let ours = stock.followed(&path, &format!("{arguments} --flash on"), Some(mount.path()));
    ours.assert_attention_was_ours();
    ours.assert_like(&stock, TOLERANCE);
}

/// The real model, in both modes of a mount, and with flash attention as the engine decides.
fn tiny(mode: Mode) {
    require!(llama, cc);
    let directory = scratch_directory();
    let path = directory.path().join("tiny.gguf");
    Model::write_tiny(&path);
    let arguments = "--prompt-tokens 700 --predict 64 --context 1024 --ubatch 256";
    let stock = ran(&path, arguments, None);
    assert_eq!(stock.attention, None);
    let mount = Mount::new(mode);
    let ours = stock.followed(&path, &format!("{arguments} --flash auto"), Some(mount.path()));
    ours.assert_attention_was_ours();
    ours.assert_like(&stock, TOLERANCE);
    // The rows are in the files.
    for name in ["cache_k_l0", "cache_v_l3"] {
        let bytes = std::fs::read(mount.join("files/llama/0").join(name)).unwrap();
        assert_eq!(bytes.len(), 1024 * 2 * 64 * 2, "{name}");
        let row = |cell: usize| &bytes[cell * 256..][..256];
        assert!(row(763).iter().any(|byte| *byte != 0), "{name}: the last row");
        assert!(row(764).iter().all(|byte| *byte == 0), "{name}: a row that nobody stored");
    }
}

in_both_modes!(tiny);

#[test]
fn shapes_of_heads() {
    require!(fuse, llama, cc);
    for (heads, kv_heads, head_dim) in
        [(4, 4, 64), (8, 2, 128), (6, 1, 64), (10, 2, 80), (2, 1, 256)]
    {
        let model = Model { heads, kv_heads, head_dim, layers: 2, ..Model::tiny() };
        check(&model, "--prompt-tokens 100");
    }
}

/// A soft cap, and layers with a sliding window that is shorter than the prompt.
#[test]
fn soft_cap_and_sliding_window() {
    require!(fuse, llama, cc);
    let model = Model { architecture: "gemma2", ..Model::tiny() };
    check(&model, "--prompt-tokens 150 --ubatch 64");
}
