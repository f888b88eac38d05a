//! Slots of models that have more than one kind of layer become sequences and slots again, and the engine goes on from
//! them with the tokens that it gives without an interruption.

use std::path::{Path, PathBuf};

use crate::common::mount::scratch_directory;
use crate::common::{Mode, Mount};
use crate::conversation::kvfs;
use crate::engine::{Ran, ran};
use crate::gguf::Model;
use crate::program::run;

/// Layers with a window of 48 tokens, one that sees everything, and one more.
fn with_windows() -> Model {
    Model { architecture: "gemma3", layers: 7, ..Model::tiny() }
}

/// Two recurrent layers, one that attends, and a recurrent one.
fn hybrid() -> Model {
    Model { architecture: "jamba", ..Model::tiny() }
}

/// A model's file, and its pages in a mount.
struct Case {
    mount: Mount,
    directory: tempfile::TempDir,
    engine: String,
}

impl Case {
    fn new(model: &Model, engine: &str, create: &[&str]) -> Self {
        let directory = scratch_directory();
        let case =
            Self { mount: Mount::new(Mode::Passthrough), directory, engine: engine.to_owned() };
        model.write_random(7, &case.file("model.gguf"));
        let mut command = kvfs("create", &[&case.model()]);
        command.arg("--from").arg(case.file("model.gguf"));
        run(command.args(["--page-tokens", "32"]).args(create));
        case
    }

    fn file(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn model(&self) -> PathBuf {
        self.mount.join("models/kinds")
    }

    fn sequence(&self, name: &str) -> PathBuf {
        self.model().join("sequences").join(name)
    }

    fn run(&self, arguments: &str) -> Ran {
        ran(&self.file("model.gguf"), &format!("{} {arguments}", self.engine), None)
    }

    fn save(&self, to: &Path) {
        self.run(&format!("--prompt-tokens 300 --predict 0 --save {}", to.display()));
    }

    fn import(&self, from: &Path, name: &str) {
        run(&mut kvfs("import", &[from, &self.sequence(name)]));
    }

    fn export(&self, name: &str, options: &[&str]) -> Vec<u8> {
        let to = self.file("exported");
        run(kvfs("export", &[&self.sequence(name), &to]).args(options));
        std::fs::read(to).unwrap()
    }

    /// The engine goes on from a slot as if it had never stopped.
    #[track_caller]
    fn assert_goes_on(&self, slot: &Path) {
        let whole = self.run("--prompt-tokens 300 --predict 24");
        let restored = self.run(&format!("--predict 24 --load {}", slot.display()));
        assert_eq!(restored.tokens, whole.tokens, "{}", slot.display());
    }
}

/// What an engine saved comes back byte by byte, from `kvfs export` and from `slots/`, and an engine that saves there
/// needs no import.
#[track_caller]
fn comes_back(case: &Case, export: &[&str]) {
    let saved = case.file("saved");
    case.save(&saved);
    let bytes = std::fs::read(&saved).unwrap();
    case.import(&saved, "chat");
    assert!(case.export("chat", export) == bytes, "another slot is exported");
    case.assert_goes_on(&case.file("exported"));
    if export.is_empty() {
        let slot = case.model().join("slots/chat.bin");
        assert!(std::fs::read(&slot).unwrap() == bytes, "another slot is in slots/");
        case.assert_goes_on(&slot);
        let written = case.model().join("slots/written.bin");
        case.save(&written);
        assert!(std::fs::read(&written).unwrap() == bytes, "another slot is written");
        assert!(!case.model().join("slots/chat.ref").exists());
    }
    let tokens = case.sequence("chat").join("tokens");
    let found = run(kvfs("match", &[&case.model()]).arg("--tokens").arg(&tokens));
    let found = String::from_utf8(found.stdout).unwrap();
    assert!(found.lines().any(|line| line == "tokens: 300"), "{found}");
}

#[test]
fn windows_come_back() {
    require!(fuse, llama, cc);
    comes_back(&Case::new(&with_windows(), "--flash on", &[]), &[]);
    comes_back(&Case::new(&with_windows(), "--flash off", &[]), &["--transposed-v"]);
}

#[test]
fn states_come_back() {
    require!(fuse, llama, cc);
    comes_back(&Case::new(&hybrid(), "--flash on", &[]), &[]);
}

/// A short cache of the layers with a window takes cells again that the window has passed, so its cells stand in another
/// order than the tokens.
#[test]
fn a_cache_that_went_round_comes_back_in_order() {
    require!(fuse, llama, cc);
    let case = Case::new(&with_windows(), "--flash on --ubatch 64 --swa-full 0", &[]);
    let saved = case.file("saved");
    case.save(&saved);
    case.import(&saved, "chat");
    let exported = case.export("chat", &[]);
    let bytes = std::fs::read(&saved).unwrap();
    assert!(exported.len() == bytes.len() && exported != bytes, "it did not go round");
    case.assert_goes_on(&case.file("exported"));
    case.import(&case.file("exported"), "again");
    assert!(case.export("again", &[]) == exported);
}

/// What lacks rows or states that an engine would go on from is no slot, and says so.
#[test]
fn what_is_not_whole_is_no_slot() {
    require!(fuse, llama, cc);
    let check = |model: &Model, layer: &str, name: &str, line: &str| {
        let case = Case::new(model, "--flash on", &[]);
        let saved = case.file("saved");
        case.save(&saved);
        case.import(&saved, "chat");
        std::fs::remove_file(case.sequence("chat").join(layer).join(name)).unwrap();
        assert!(!case.model().join("slots/chat.bin").exists());
        let to = case.file("exported");
        let output = kvfs("export", &[&case.sequence("chat"), &to]).output().unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!((output.status.code(), error.lines().count()), (Some(1), 1), "{error}");
        assert!(error.contains(line), "{error}");
    };
    check(&with_windows(), "003", "window-0000252.rows", "lacks rows of tokens 252 to 256");
    check(&with_windows(), "003", "0000256.safetensors", "lacks rows of tokens 256 to 288");
    check(&hybrid(), "001", "state-0000300.safetensors", "has no tokens after which");
}
