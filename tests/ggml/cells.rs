//! What happens to the cells of a cache while the engine runs.

use crate::common::mount::scratch_directory;
use crate::common::{Mode, Mount};
use crate::engine::ran;
use crate::gguf::Model;

/// Of the spread of the logits.
const TOLERANCE: f32 = 4e-3;

/// The tiny model, with the same arguments for both.
fn check(arguments: &str) {
    let directory = scratch_directory();
    let path = directory.path().join("tiny.gguf");
    Model::write_tiny(&path);
    let arguments = format!("--prompt-tokens 200 --predict 24 {arguments}");
    let stock = ran(&path, &arguments, None);
    let mount = Mount::new(Mode::Served);
    let ours = stock.followed(&path, &format!("{arguments} --flash on"), Some(mount.path()));
    ours.assert_attention_was_ours();
    ours.assert_like(&stock, TOLERANCE);
}

#[test]
fn holes_and_shifts() {
    require!(fuse, llama, cc);
    check("--remove-from 50 --remove-to 90");
    check("--remove-from 50 --remove-to 90 --shift 1");
}

#[test]
fn several_sequences() {
    require!(fuse, llama, cc);
    for unified in [0, 1] {
        check(&format!("--sequences 3 --unified {unified} --context 1536"));
        check(&format!("--sequences 3 --unified {unified} --context 1536 --copy 1"));
    }
}

/// Other types of K and V are compared with stock's own flash attention: without it V is f16.
#[test]
fn types() {
    require!(fuse, llama, cc);
    let directory = scratch_directory();
    let path = directory.path().join("tiny.gguf");
    Model::write_tiny(&path);
    for (kind, tolerance) in [("bf16", 1e-2), ("q8_0", 2e-2), ("q4_0", 2e-2)] {
        let arguments = format!("--prompt-tokens 200 --predict 1 --type {kind} --flash on");
        let stock = ran(&path, &arguments, None);
        let mount = Mount::new(Mode::Served);
        let ours = stock.followed(&path, &arguments, Some(mount.path()));
        ours.assert_attention_was_ours();
        ours.assert_like(&stock, tolerance);
    }
}
