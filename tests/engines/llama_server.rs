//! llama.cpp's server saves its slot to the mount; engine and daemon are killed, the file goes to the
//! remote, compressed, and leaves the disk; a new engine restores it and goes on as if nothing was.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::common::sys::{getxattr, setxattr, sync_directory};
use crate::common::{Mode, Mount, eventually, forks};
use crate::engine::{Engine, PROMPT_TOKENS, STEP_TOKENS, create, prompt, write_model};
use crate::in_repository;

in_both_modes!(
    a_slot_survives_engine_daemon_and_disk,
    conversations_come_back_by_themselves,
    another_program_goes_on_from_a_slot,
);

fn a_slot_survives_engine_daemon_and_disk(mode: Mode) {
    require!(xllamacpp);
    let remote = crate::common::mount::scratch_directory();
    let place = remote.path().to_str().unwrap().to_owned();
    let options = ["--remote", &place, "--ssd", "64M", "--cold", "zstd:3"];
    let mut mount = Mount::with_options(mode, &options);
    // The weights come from the mount as well: the engine maps them.
    let model = mount.files("tiny.gguf");
    write_model(&model);
    let slots = mount.files("slots");
    std::fs::create_dir(&slots).unwrap();

    let mut prompt = prompt();
    let mut engine = Engine::start(&model, &slots);
    let first = engine.complete(&prompt);
    assert_eq!((first.tokens.len(), first.cached), (STEP_TOKENS, 0));
    let saved = engine.slot("save", "ruth.bin");
    prompt.extend(&first.tokens);
    let expected = engine.complete(&prompt);
    sync_directory(mount.path()).unwrap();
    engine.kill();

    let file = slots.join("ruth.bin");
    let bytes = std::fs::read(&file).unwrap();
    assert_eq!(saved["n_written"].as_u64().unwrap(), bytes.len() as u64);
    // The kernel may not have heard yet that the engine has closed it.
    eventually("the file to be moved", || setxattr(&file, "user.kvfs.tier", b"remote").ok());
    eventually("the slot to leave the disk", || {
        (getxattr(&file, "user.kvfs.tier").unwrap() == "remote").then_some(())
    });
    let encoding = getxattr(&file, "user.kvfs.encoding").unwrap();
    assert!(encoding.contains("zst"), "{encoding}");
    let stored: usize = getxattr(&file, "user.kvfs.stored_bytes").unwrap().parse().unwrap();
    assert!(stored < bytes.len(), "{stored} of {}", bytes.len());
    sync_directory(mount.path()).unwrap();
    mount.crash();

    let mut engine = Engine::start(&model, &slots);
    let restored = engine.slot("restore", "ruth.bin");
    assert_eq!(restored["n_restored"], saved["n_saved"]);
    assert_eq!(restored["n_read"], saved["n_written"]);
    let again = engine.complete(&prompt);
    assert_eq!(String::from_utf8_lossy(&again.tokens), String::from_utf8_lossy(&expected.tokens));
    // The last token is always computed, since its logits are not in the file.
    assert!(again.cached + 1 >= prompt.len() as u64 - 1, "cached {}", again.cached);
    assert!(again.computed <= 2, "computed {}", again.computed);
    engine.kill();

    // Without the file everything is computed anew: what was cached came from there.
    let mut engine = Engine::start(&model, &slots);
    let anew = engine.complete(&prompt);
    assert_eq!((anew.cached, anew.computed), (0, prompt.len() as u64));
    engine.kill();
    assert!(std::fs::read(&file).unwrap() == bytes);
}

/// `kvfs slots`, for a running engine.
fn kvfs_slots(action: &str, engine: &mut Engine, slots: &Path, rest: &[&str]) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvfs"));
    command.args(["slots", action, "--server", &engine.address(), "--directory"]).arg(slots);
    forks::succeed(command.args(rest))
}

/// Pages of all sequences that begin at token 512 of layer 2, as inodes.
fn inodes(model: &Path) -> Vec<u64> {
    let sequences = std::fs::read_dir(model.join("sequences")).unwrap();
    let page = |path: PathBuf| path.join("002/0000512.safetensors").metadata().unwrap().ino();
    sequences.map(|entry| page(entry.unwrap().path())).collect()
}

/// `kvfs slots` saves what a server has as pages. The server is killed; the next one gets it before
/// anybody asks, and computes nothing of it again.
fn conversations_come_back_by_themselves(mode: Mode) {
    require!(xllamacpp);
    let mount = Mount::new(mode);
    let path = mount.files("tiny.gguf");
    write_model(&path);
    let slots = mount.files("slots");
    std::fs::create_dir(&slots).unwrap();
    let model = mount.join("models/tiny");
    create(&model, &path);
    let name = model.to_str().unwrap();

    let mut prompt = prompt();
    let mut engine = Engine::start(&path, &slots);
    assert_eq!(kvfs_slots("save", &mut engine, &slots, &[name]), "slot 0: empty\n");
    prompt.extend(engine.complete(&prompt).tokens);
    kvfs_slots("save", &mut engine, &slots, &[name]);
    let again = kvfs_slots("save", &mut engine, &slots, &[name]);
    assert!(again.contains("as before"), "{again}");
    let expected = engine.complete(&prompt);
    engine.kill();

    let mut engine = Engine::start(&path, &slots);
    let restored = kvfs_slots("restore", &mut engine, &slots, &[name]);
    assert!(restored.contains(&format!("{} tokens restored", prompt.len() - 1)), "{restored}");
    let found = engine.complete(&prompt);
    assert_eq!(String::from_utf8_lossy(&found.tokens), String::from_utf8_lossy(&expected.tokens));
    assert_eq!((found.cached, found.computed), (prompt.len() as u64 - 1, 1));
    // It goes on, and so takes the place of what it was; a slot that is used is left alone.
    kvfs_slots("save", &mut engine, &slots, &[name]);
    assert_eq!(inodes(&model).len(), 1);
    assert_eq!(kvfs_slots("restore", &mut engine, &slots, &[name]), "");
    // Another one with the same beginning: that is stored once.
    let branch = [&prompt[..1000], b"another"].concat();
    engine.complete(&branch);
    kvfs_slots("save", &mut engine, &slots, &[name]);
    let pages = inodes(&model);
    assert!(pages.len() == 2 && pages[0] == pages[1], "{pages:?}");
    engine.kill();

    // By the beginning of a prompt, which is not that of the latest.
    let tokens: Vec<u8> = prompt.iter().flat_map(|token| u32::from(*token).to_le_bytes()).collect();
    let file = mount.files("prompt");
    std::fs::write(&file, tokens).unwrap();
    let mut engine = Engine::start(&path, &slots);
    kvfs_slots("restore", &mut engine, &slots, &["--tokens", file.to_str().unwrap(), name]);
    assert_eq!(engine.complete(&prompt).cached, prompt.len() as u64 - 1);
    engine.kill();
    assert_eq!(std::fs::read_dir(&slots).unwrap().count(), 0, "what was exchanged is left");
}

/// A slot of the server becomes pages, and `examples/tiny_llama` goes on from them with the same tokens.
fn another_program_goes_on_from_a_slot(mode: Mode) {
    require!(xllamacpp);
    let mount = Mount::new(mode);
    let (path, slots) = (mount.files("tiny.gguf"), mount.files("slots"));
    write_model(&path);
    std::fs::create_dir(&slots).unwrap();
    let source = in_repository("tests/fixtures/tiny-llama");
    let mut prompt = std::fs::read(source.join("prompt.txt")).unwrap();
    prompt.truncate(PROMPT_TOKENS);
    let mut engine = Engine::start(&path, &slots);
    prompt.extend(engine.complete(&prompt).tokens);
    engine.slot("save", "ruth.bin");
    let expected = engine.complete(&prompt);
    engine.kill();

    let model = mount.join("models/tiny");
    let sequence = model.join("sequences/ruth");
    let kvfs = || Command::new(env!("CARGO_BIN_EXE_kvfs"));
    let mut create = kvfs();
    create.arg("create").arg(&model).arg("--from").arg(&path);
    forks::succeed(create.args(["--page-tokens", "256", "--layout", "hnd"]));
    forks::succeed(kvfs().arg("import").arg(slots.join("ruth.bin")).arg(&sequence));

    let text = mount.files("prompt");
    std::fs::write(&text, &prompt).unwrap();
    let mut program = Command::new(crate::common::example("tiny_llama"));
    program.arg("--model").arg(&source).arg("--prompt").arg(text).arg("--cache").arg(&sequence);
    let output = program.args(["--tokens", &STEP_TOKENS.to_string()]).output().unwrap();
    let (found, said) =
        [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap()).into();
    assert_eq!(found.trim_end_matches('\n'), String::from_utf8_lossy(&expected.tokens), "{said}");
    // The last token of the prompt is computed, and the one whose row the engine had not made.
    let held = prompt.len() - 1;
    assert!(
        said.contains(&format!("{held} of {} prompt tokens came from it", prompt.len())),
        "{said}"
    );
}
