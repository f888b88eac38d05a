//! Runs `engine.c` with the engine's own libraries, with and without the backend.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;
use std::time::Duration;

use crate::common::memory_group::MemoryGroup;
use crate::common::mount::scratch_directory;
use crate::common::require::llama_directory;
use crate::program::{Link, library, run};

/// The program for the engine that most tests use, compiled once.
fn program() -> &'static Path {
    static PROGRAM: OnceLock<(tempfile::TempDir, PathBuf)> = OnceLock::new();
    let (_, program) = PROGRAM.get_or_init(|| {
        let directory = scratch_directory();
        let program = compile("tests/ggml/engine.c", &llama_directory(), directory.path());
        (directory, program)
    });
    program
}

/// Compiles a program that has an engine's libraries.
pub(crate) fn compile(source: &str, llama: &Path, directory: &Path) -> PathBuf {
    let program = directory.join("program");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join(source);
    let mut cc = Command::new("cc");
    cc.args(["-std=c11", "-O1", "-Wall", "-Werror"]).arg("-I").arg(llama.join("include"));
    cc.arg(source).arg("-o").arg(&program).arg("-L").arg(llama.join("lib"));
    // Their names have the release in them.
    cc.args(["libllama.", "libggml.", "libggml-base."].map(|prefix| {
        let entries = std::fs::read_dir(llama.join("lib")).unwrap();
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let name = names.into_iter().find(|name| name.starts_with(prefix));
        format!("-l:{}", name.expect("the engine has its libraries"))
    }));
    run(cc.arg(format!("-Wl,-rpath,{}", llama.join("lib").display())));
    program
}

/// What a run of the engine printed.
#[derive(Debug)]
pub(crate) struct Ran {
    pub(crate) tokens: Vec<u32>,
    /// `[steps, vocabulary]`
    pub(crate) logits: Vec<f32>,
    /// Attention operations of the backend; none without it.
    pub(crate) attention: Option<u64>,
    /// Stretches of cells that it read ahead.
    pub(crate) read_ahead: Option<u64>,
    pub(crate) steps: u64,
    pub(crate) layers: u64,
    pub(crate) prefill: Duration,
    /// Of each step after the prompt.
    pub(crate) decode: Vec<Duration>,
}

/// The command, with the backend if there is a cache directory.
pub(crate) fn command(model: &Path, arguments: &str, cache: Option<&Path>) -> Command {
    command_of(program(), &llama_directory(), model, arguments, cache)
}

/// The same of a program that was compiled for an engine.
pub(crate) fn command_of(
    program: &Path, llama: &Path, model: &Path, arguments: &str, cache: Option<&Path>,
) -> Command {
    let prompt = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tiny-llama/prompt.txt");
    let mut command = Command::new(program);
    command.arg(model).arg("--backends").arg(llama.join("lib"));
    command.arg("--prompt").arg(prompt).args(arguments.split_whitespace());
    for variable in ["GGML_BACKEND_PATH", "KVFS_KV", "KVFS_MODEL", "KVFS_GGML"] {
        command.env_remove(variable);
    }
    if let Some(cache) = cache {
        command.env("GGML_BACKEND_PATH", library(Link::Shared)).env("KVFS_KV", cache);
    }
    command
}

/// Runs it to its end, which must be a good one.
pub(crate) fn ran(model: &Path, arguments: &str, cache: Option<&Path>) -> Ran {
    ran_in(None, model, arguments, cache)
}

/// The same with a bound on its memory.
pub(crate) fn ran_in(
    group: Option<&MemoryGroup>, model: &Path, arguments: &str, cache: Option<&Path>,
) -> Ran {
    finish(group, &mut command(model, arguments, cache))
}

/// Runs a command to its end.
pub(crate) fn finish(group: Option<&MemoryGroup>, command: &mut Command) -> Ran {
    let directory = scratch_directory();
    let logits = directory.path().join("logits");
    command.arg("--logits").arg(&logits);
    let output = match group {
        Some(group) => run(&mut group.bound(command)),
        None => run(command),
    };
    let bytes = std::fs::read(logits).unwrap();
    let logits = bytes.chunks_exact(4).map(|four| f32::from_le_bytes(four.try_into().unwrap()));
    let logits = logits.collect();
    let figures = figures(&output);
    let all = |name| figures.iter().filter(move |(key, _)| key == name).map(|(_, value)| *value);
    Ran {
        tokens: all("token").map(|value| u32::try_from(value).unwrap()).collect(),
        logits,
        attention: all("attention").next(),
        read_ahead: all("read_ahead").next(),
        steps: all("steps").next().unwrap(),
        layers: all("layers").next().unwrap(),
        prefill: Duration::from_micros(all("prefill_us").next().unwrap()),
        decode: all("step_us").map(Duration::from_micros).collect(),
    }
}

fn figures(output: &Output) -> Vec<(String, u64)> {
    let text = String::from_utf8_lossy(&output.stdout);
    let pairs = text.lines().filter_map(|line| line.split_once(' '));
    pairs.map(|(key, value)| (key.to_owned(), value.parse().unwrap())).collect()
}

impl Ran {
    /// Every layer of every step attended here, and nowhere else.
    #[track_caller]
    pub(crate) fn assert_attention_was_ours(&self) {
        assert_eq!(self.attention, Some(self.layers * self.steps));
    }

    /// Runs the engine over the same text: where two tokens are as likely as each other, rounding
    /// would choose between them, and nothing could be compared any more.
    pub(crate) fn followed(&self, model: &Path, arguments: &str, cache: Option<&Path>) -> Ran {
        self.followed_in(None, model, arguments, cache)
    }

    /// The same with a bound on its memory.
    pub(crate) fn followed_in(
        &self, group: Option<&MemoryGroup>, model: &Path, arguments: &str, cache: Option<&Path>,
    ) -> Ran {
        let directory = scratch_directory();
        let path = directory.path().join("tokens");
        self.write_tokens(&path);
        ran_in(group, model, &format!("{arguments} --follow {}", path.display()), cache)
    }

    /// For `--follow`.
    pub(crate) fn write_tokens(&self, path: &Path) {
        let tokens: Vec<u8> = self.tokens.iter().flat_map(|token| token.to_ne_bytes()).collect();
        std::fs::write(path, tokens).unwrap();
    }

    /// The same text, and logits that differ by at most `tolerance` of their spread.
    #[track_caller]
    pub(crate) fn assert_like(&self, other: &Self, tolerance: f32) {
        assert_eq!(self.logits.len(), other.logits.len());
        let (low, high) = other
            .logits
            .iter()
            .fold((f32::MAX, f32::MIN), |(low, high), value| (low.min(*value), high.max(*value)));
        let differences = self.logits.iter().zip(&other.logits).map(|(a, b)| (a - b).abs());
        let most = differences.fold(0.0, f32::max) / (high - low);
        assert!(most <= tolerance, "logits differ by {most} of their spread");
        assert_eq!(self.tokens, other.tokens);
    }
}
