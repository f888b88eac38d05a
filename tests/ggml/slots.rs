//! Slot files cross between the engine with the backend and the engine without it.

use crate::common::mount::scratch_directory;
use crate::common::{Mode, Mount};
use crate::engine::ran;
use crate::gguf::Model;

/// Of the spread of the logits.
const TOLERANCE: f32 = 4e-3;

#[test]
fn saved_by_one_and_restored_by_the_other() {
    require!(fuse, llama, cc);
    let directory = scratch_directory();
    let path = directory.path().join("tiny.gguf");
    Model::write_tiny(&path);
    let mount = Mount::new(Mode::Served);
    let backend = Some(mount.path());
    for kind in ["f16", "q8_0"] {
        let slot = |name: &str| format!("{}-{kind}", directory.path().join(name).display());
        let save = |name, cache| {
            let sizes = format!("--flash on --type {kind} --prompt-tokens 300 --predict 0");
            ran(&path, &format!("{sizes} --save {}", slot(name)), cache)
        };
        let restore = |name| format!("--flash on --type {kind} --predict 24 --load {}", slot(name));
        save("stock", None);
        save("ours", backend).assert_attention_was_ours();
        let expected = ran(&path, &restore("stock"), None);
        for (name, cache) in [("stock", backend), ("ours", backend), ("ours", None)] {
            let restored = expected.followed(&path, &restore(name), cache);
            if cache.is_some() {
                restored.assert_attention_was_ours();
            }
            restored.assert_like(&expected, if kind == "f16" { TOLERANCE } else { 2e-2 });
        }
    }
}
