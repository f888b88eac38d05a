//! An unmodified llama.cpp server that tests talk to, with the tiny model.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use serde_json::{Value, json};

use crate::common::forks;
use crate::in_repository;

pub(crate) const PROMPT_TOKENS: usize = 1290;
/// Tokens that a turn makes.
pub(crate) const STEP_TOKENS: usize = 48;

/// An engine in a process of its own.
pub(crate) struct Engine {
    process: Child,
    questions: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Engine {
    pub(crate) fn start(model: &Path, slots: &Path) -> Engine {
        Engine::start_with(model, slots, &[])
    }

    /// With parameters of the engine, as `n_parallel=2`.
    pub(crate) fn start_with(model: &Path, slots: &Path, parameters: &[&str]) -> Engine {
        let mut command = Command::new(crate::python());
        command.arg(in_repository("tests/engines/llama_server.py")).arg(model).arg(slots);
        command.args(parameters);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut process = forks::spawn(&mut command).unwrap();
        let questions = process.stdin.take().unwrap();
        let answers = BufReader::new(process.stdout.take().unwrap());
        Engine { process, questions, answers }
    }

    fn answer(&mut self, question: &Value) -> Value {
        writeln!(self.questions, "{question}").unwrap();
        let mut line = String::new();
        self.answers.read_line(&mut line).unwrap();
        serde_json::from_str(&line).expect("the engine answers")
    }

    pub(crate) fn address(&mut self) -> String {
        let answer = self.answer(&json!({ "path": null }));
        answer.as_str().unwrap().to_owned()
    }

    pub(crate) fn ask(&mut self, path: &str, body: &Value) -> Value {
        let answer = self.answer(&json!({ "path": path, "body": body }));
        assert!(answer.get("error").is_none(), "{path}: {answer}");
        answer
    }

    /// In the first slot.
    pub(crate) fn complete(&mut self, prompt: &[u8]) -> Completion {
        self.complete_in(0, prompt)
    }

    /// In a slot; the engine chooses it for -1.
    pub(crate) fn complete_in(&mut self, slot: i32, prompt: &[u8]) -> Completion {
        let answer = self.ask(
            "/completion",
            &json!({
                "prompt": prompt, "n_predict": STEP_TOKENS, "temperature": 0, "id_slot": slot,
                "cache_prompt": true, "return_tokens": true,
            }),
        );
        let tokens = answer["tokens"].as_array().unwrap();
        Completion {
            tokens: tokens
                .iter()
                .map(|token| token.as_u64().unwrap().try_into().unwrap())
                .collect(),
            cached: answer["timings"]["cache_n"].as_u64().unwrap(),
            computed: answer["timings"]["prompt_n"].as_u64().unwrap(),
        }
    }

    pub(crate) fn slot(&mut self, action: &str, file: &str) -> Value {
        self.ask(&format!("/slots/0?action={action}"), &json!({ "filename": file }))
    }

    pub(crate) fn kill(mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

pub(crate) struct Completion {
    /// Its tokens are bytes.
    pub(crate) tokens: Vec<u8>,
    pub(crate) cached: u64,
    pub(crate) computed: u64,
}

pub(crate) fn write_model(path: &Path) {
    let mut command = Command::new(crate::python());
    command.arg(in_repository("examples/python/tiny_llama_gguf.py"));
    command.arg(in_repository("tests/fixtures/tiny-llama")).arg(path);
    forks::succeed(&mut command);
}

/// A model's directory for that file.
pub(crate) fn create(model: &Path, file: &Path) {
    let mut create = Command::new(env!("CARGO_BIN_EXE_kvfs"));
    create.arg("create").arg(model).arg("--from").arg(file);
    forks::succeed(create.args(["--page-tokens", "256"]));
}

/// The beginning of a book.
pub(crate) fn prompt() -> Vec<u8> {
    let mut prompt = std::fs::read(in_repository("tests/fixtures/tiny-llama/prompt.txt")).unwrap();
    prompt.truncate(PROMPT_TOKENS);
    prompt
}
