//! Releases of llama.cpp since ggml 0.9.7 give what they give without the backend.
//!
//! `mount-scripts/fetch-llama.sh --releases` fetches them. The oldest and the newest are tried whole, the
//! others as shortly as proves it; `cargo test --test ggml -- --ignored every_release` tries all of them
//! whole, also one that `--newest` has fetched since.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::common::mount::scratch_directory;
use crate::common::require::llama_releases;
use crate::common::{Mode, Mount};
use crate::engine::{Ran, command_of, compile, finish};
use crate::gguf::Model;

/// Of the spread of the logits.
const TOLERANCE: f32 = 4e-3;

/// A release, with the program that runs its engine.
struct Release {
    llama: PathBuf,
    program: PathBuf,
    directory: tempfile::TempDir,
    mount: Mount,
}

impl Release {
    fn new(llama: &Path) -> Self {
        let directory = scratch_directory();
        let program = compile("tests/ggml/engine.c", llama, directory.path());
        Self { llama: llama.to_owned(), program, directory, mount: Mount::new(Mode::Served) }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn command(&self, model: &Path, arguments: &str, ours: bool) -> Command {
        let cache = ours.then(|| self.mount.path());
        command_of(&self.program, &self.llama, model, arguments, cache)
    }

    fn ran(&self, model: &Path, arguments: &str, ours: bool) -> Ran {
        let ran = finish(None, &mut self.command(model, arguments, ours));
        if ours {
            ran.assert_attention_was_ours();
        }
        ran
    }

    /// The tokens of stock, and its logits along them.
    #[track_caller]
    fn check(&self, model: &Path, arguments: &str) {
        let stock = self.ran(model, arguments, false);
        assert_eq!(stock.attention, None);
        let tokens = self.path("tokens");
        stock.write_tokens(&tokens);
        let follow = format!("{arguments} --flash auto --follow {}", tokens.display());
        self.ran(model, &follow, true).assert_like(&stock, TOLERANCE);
    }

    fn tiny(&self) -> PathBuf {
        let path = self.path("tiny.gguf");
        Model::write_tiny(&path);
        path
    }

    /// Greedy tokens of the tiny model, each chosen by the engine itself.
    #[track_caller]
    fn shortly(&self) {
        let tiny = self.tiny();
        let arguments = "--flash on --prompt-tokens 200 --predict 24";
        let (stock, ours) = (self.ran(&tiny, arguments, false), self.ran(&tiny, arguments, true));
        assert_eq!(ours.tokens, stock.tokens, "{}", self.llama.display());
    }

    #[track_caller]
    fn whole(&self) {
        self.shortly();
        self.check(&self.tiny(), "--prompt-tokens 700 --predict 64 --context 1024 --ubatch 256");
        let wide = Model { heads: 8, kv_heads: 2, head_dim: 128, layers: 2, ..Model::tiny() };
        let windows = Model { architecture: "gemma2", ..Model::tiny() };
        for model in [wide, windows] {
            let path = self.path("random.gguf");
            model.write_random(7, &path);
            self.check(&path, "--prompt-tokens 150 --ubatch 64");
        }
        self.slots();
    }

    /// Slot files cross in both directions.
    #[track_caller]
    fn slots(&self) {
        let tiny = self.tiny();
        for kind in ["f16", "q8_0"] {
            let slot = |ours| self.path(&format!("slot-{kind}-{ours}")).display().to_string();
            for ours in [false, true] {
                let save = format!("--flash on --type {kind} --prompt-tokens 300 --predict 0");
                self.ran(&tiny, &format!("{save} --save {}", slot(ours)), ours);
            }
            let load = |from, ours| {
                let load = format!("--flash on --type {kind} --predict 24 --load {}", slot(from));
                self.ran(&tiny, &load, ours).tokens
            };
            let expected = load(false, false);
            for (from, to) in [(false, true), (true, true), (true, false)] {
                assert_eq!(load(from, to), expected, "{}: {kind}", self.llama.display());
            }
        }
    }
}

#[test]
fn the_oldest_and_the_newest() {
    require!(fuse, llama_releases, cc);
    let releases = llama_releases();
    for llama in [releases.first(), releases.last()].into_iter().flatten() {
        Release::new(llama).whole();
    }
}

#[test]
fn those_between() {
    require!(fuse, llama_releases, cc);
    for llama in llama_releases() {
        Release::new(&llama).shortly();
    }
}

#[test]
#[ignore = "takes a minute or two; for a release that was fetched since"]
fn every_release() {
    require!(fuse, llama_releases, cc);
    let releases = llama_releases();
    assert!(releases.len() >= 8, "mount-scripts/fetch-llama.sh --releases fetches more");
    for llama in &releases {
        let release = Release::new(llama);
        release.whole();
        let mut command = release.command(&release.tiny(), "--flash on --predict 1", true);
        let output = command.output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        let line = text.lines().find(|line| line.starts_with("kvfs: ggml ")).unwrap();
        eprintln!("{}: {line}", llama.file_name().unwrap().display());
    }
}
