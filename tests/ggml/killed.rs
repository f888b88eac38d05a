//! `kill -9` of the engine: nothing of it stays behind, and the next one goes on.

use std::io::Read;
use std::process::Stdio;

use crate::common::Mode;
use crate::conversation::{Conversation, kvfs};
use crate::program::run;

/// What it writes of 200 steps: it computes, and is not near its end.
const SOME_STEPS_BYTES: usize = 4096;

/// The engine is killed between two rows of a cache that has pages mapped into it.
fn the_engine_is_killed(mode: Mode) {
    require!(llama, cc);
    let mut conversation = Conversation::new(mode);
    let model = conversation.model("mine");
    let slot = model.join("slots/chat.ref");
    let expected = conversation.continued(&slot, Some(&model), "");
    let page = model.join("sequences/chat/002/0000128.safetensors");
    let before = std::fs::read(&page).unwrap();

    let mut engine = conversation.engine(&slot, Some(&model), "--predict 32000 --context 32768");
    let mut engine = engine.stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = engine.stdout.take().unwrap();
    lines.read_exact(&mut [0; SOME_STEPS_BYTES]).expect("the engine runs");
    engine.kill().unwrap();
    engine.wait().unwrap();

    let again = conversation.continued(&slot, Some(&model), "");
    assert_eq!(again.tokens, expected.tokens);
    assert!(again.logits == expected.logits);
    assert!(std::fs::read(&page).unwrap() == before, "the page has changed");
    let mount = &mut conversation.mount;
    let caches = std::fs::read_dir(mount.files("llama")).unwrap();
    assert_eq!(caches.count(), 1, "the next engine did not take its place");
    run(&mut kvfs("sync", &[mount.path()]));
    assert!(mount.staging().is_empty(), "{:?}", mount.staging());
    assert!(mount.errors().is_empty(), "{:?}", mount.errors());
    assert!(mount.unmount().success(), "{}", mount.log());
    run(kvfs("fsck", &[mount.store()]).args(["--read-data-subset", "1/1"]));
}

in_both_modes!(the_engine_is_killed);
