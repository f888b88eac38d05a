//! A conversation of the tiny model that was saved as pages, and engines that go on from it.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::common::mount::scratch_directory;
use crate::common::{Mode, Mount};
use crate::engine::{Ran, command, finish, ran};
use crate::gguf::Model;
use crate::program::run;

pub(crate) const TOKENS: usize = 300;
/// Of the pages of 128 tokens.
pub(crate) const REFERRED_TOKENS: usize = 256;

/// A mount with a conversation of the tiny model, as a sequence of two models.
pub(crate) struct Conversation {
    pub(crate) mount: Mount,
    pub(crate) directory: tempfile::TempDir,
}

impl Conversation {
    pub(crate) fn new(mode: Mode) -> Self {
        let directory = scratch_directory();
        let this = Self { mount: Mount::new(mode), directory };
        Model::write_tiny(&this.gguf());
        let slot = this.directory.path().join("slot");
        let sizes = format!("--flash on --prompt-tokens {TOKENS} --predict 0");
        ran(&this.gguf(), &format!("{sizes} --save {}", slot.display()), None);
        for name in ["mine", "other"] {
            let mut create = kvfs("create", &[&this.model(name)]);
            run(create.arg("--from").arg(this.gguf()).args(["--page-tokens", "128"]));
            run(&mut kvfs("import", &[&slot, &this.model(name).join("sequences/chat")]));
        }
        this
    }

    pub(crate) fn gguf(&self) -> PathBuf {
        self.directory.path().join("tiny.gguf")
    }

    pub(crate) fn model(&self, name: &str) -> PathBuf {
        self.mount.join("models").join(name)
    }

    /// The engine goes on from a slot, and may follow references of a model.
    pub(crate) fn engine(&self, slot: &Path, model: Option<&Path>, rest: &str) -> Command {
        let arguments =
            format!("--flash on --threads 1 --predict 8 --load {} {rest}", slot.display());
        let mut command = command(&self.gguf(), &arguments, Some(self.mount.path()));
        command.envs(model.map(|model| ("KVFS_MODEL", model)));
        command
    }

    pub(crate) fn continued(&self, slot: &Path, model: Option<&Path>, rest: &str) -> Ran {
        let ran = finish(None, &mut self.engine(slot, model, rest));
        ran.assert_attention_was_ours();
        ran
    }

    /// What is said of a slot whose references are not followed; the engine goes on.
    #[track_caller]
    pub(crate) fn assert_refused(&self, slot: &Path, model: Option<&Path>, line: &str) {
        let output = self.engine(slot, model, "").output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{text}");
        assert!(text.contains(line), "not said: {line}\n{text}");
    }
}

pub(crate) fn kvfs(action: &str, paths: &[&Path]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvfs"));
    command.arg(action).args(paths);
    command
}
