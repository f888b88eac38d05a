//! `kvfs doctor` says of an engine what the engine itself shows.

use std::path::Path;
use std::process::{Command, Stdio};

use crate::common::mount::scratch_directory;
use crate::common::require::llama_directory;
use crate::common::{Mode, Mount, eventually};
use crate::engine::command;
use crate::gguf::Model;
use crate::program::{Link, library};

/// Whether all is well, and what was said.
fn examined(engine: &Path, variables: &[(&str, &Path)]) -> (bool, String) {
    let mut doctor = Command::new(env!("CARGO_BIN_EXE_kvfs"));
    doctor.arg("doctor").arg(engine).env_remove("GGML_BACKEND_PATH").env_remove("KVFS_KV");
    let output = doctor.envs(variables.iter().copied()).output().unwrap();
    (output.status.success(), String::from_utf8_lossy(&output.stdout).into_owned())
}

#[test]
fn libraries_and_variables() {
    require!(fuse, llama, cc);
    let mount = Mount::new(Mode::Served);
    let variables = [("GGML_BACKEND_PATH", library(Link::Shared)), ("KVFS_KV", mount.path())];
    let lib = llama_directory().join("lib");
    for engine in [lib.clone(), lib.join("libllama-common.so")] {
        let (is_well, text) = examined(&engine, &variables);
        assert!(is_well && text.contains("good: ggml 0.25.1"), "{text}");
    }
    let (is_well, text) = examined(&lib, &[]);
    assert!(!is_well && text.contains("bad:  GGML_BACKEND_PATH is not set"), "{text}");
    let nowhere = scratch_directory();
    let variables = [("GGML_BACKEND_PATH", nowhere.path()), ("KVFS_KV", nowhere.path())];
    let (is_well, text) = examined(nowhere.path(), &variables);
    assert!(!is_well && text.contains("so the engine's backends are built in"), "{text}");
    assert!(text.contains("is not in a mount: kvfs mount STORE DIRECTORY"), "{text}");
}

#[test]
fn a_process() {
    require!(fuse, llama, cc);
    let directory = scratch_directory();
    let path = directory.path().join("tiny.gguf");
    Model::write_tiny(&path);
    let mount = Mount::new(Mode::Served);
    let arguments = "--predict 30000 --context 32768";
    for (cache, line) in [
        (Some(mount.path()), "good: its KV cache is in the mount"),
        (None, "bad:  it has not loaded the library"),
    ] {
        let mut engine = command(&path, &format!("--flash on {arguments}"), cache);
        let mut engine = engine.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let number = engine.id().to_string();
        let said = eventually("the engine to be what it is", || {
            let (is_well, text) = examined(Path::new(&number), &[]);
            (text.contains(line) && text.contains("good: ggml 0.25.1")).then_some((is_well, text))
        });
        engine.kill().unwrap();
        engine.wait().unwrap();
        assert_eq!(said.0, cache.is_some(), "{}", said.1);
    }
}
