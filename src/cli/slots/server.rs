//! A running llama.cpp server, asked over HTTP.
//!
//! Every question has a limit of time and every answer one of size: the server may hang, be busy with a
//! long prompt, or be some other program that listens there.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use kvfs_formats::slot::Slot;
use reqwest::StatusCode;
use reqwest::blocking::{Client, RequestBuilder, Response};
use serde_json::{Value, json};

use super::ServerArguments;
use super::state::SlotState;
use crate::cli::output::Failure;
use crate::cli::settings::open_regular;
use crate::sequence::Sequences;

/// The server answers once it has a slot's turn, and has written or read it.
const SLOT_ANSWER_MAX: Duration = Duration::from_secs(600);
/// Other questions wait for the batch of a prompt that is computed.
const ANSWER_MAX: Duration = Duration::from_secs(10);
/// A list of slots is some kilobytes; one with prompts in it, or the text of many tokens, some megabytes.
const ANSWER_BYTES_MAX: usize = 64 << 20;

/// Why the server has not done what it was asked for.
#[derive(Debug)]
pub(super) struct Refusal {
    /// Nobody listens there, or the model is still being read: it has no slots.
    pub(super) is_absent: bool,
    /// It was said in an answer.
    is_said: bool,
    /// The server's words, or what is wrong with them.
    why: String,
    url: String,
}

impl Refusal {
    fn other(url: &str, why: &str) -> Self {
        Self { is_absent: false, is_said: false, why: why.to_owned(), url: url.to_owned() }
    }

    /// What became of a request that has no answer.
    fn unanswered(url: &str, error: &reqwest::Error) -> Self {
        let why = if error.is_timeout() { "no answer in time".to_owned() } else { cause(error) };
        Self { is_absent: error.is_connect() && !error.is_timeout(), ..Self::other(url, &why) }
    }
}

impl From<Refusal> for Failure {
    fn from(refusal: Refusal) -> Self {
        Failure::Failed(format!("{}: {}", refusal.url, refusal.why))
    }
}

/// A running server.
#[derive(Debug)]
pub(super) struct Server {
    client: Client,
    pub(super) arguments: ServerArguments,
    /// Whoever asks does not wait longer than that.
    pub(super) ends: Option<Instant>,
    /// What is exchanged with it is called so, in the directory that both know.
    file_name: String,
}

impl Server {
    pub(super) fn new(arguments: &ServerArguments, file_name: String) -> Result<Self, Failure> {
        // An error says that it is known already.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let client = Client::builder().connect_timeout(ANSWER_MAX).build();
        let client = client.map_err(Failure::failed)?;
        Ok(Self { client, arguments: arguments.clone(), ends: None, file_name })
    }

    /// One that a command asks, which then ends.
    pub(super) fn once(arguments: &ServerArguments) -> Result<Self, Failure> {
        Self::new(arguments, format!("kvfs-{}.bin", std::process::id()))
    }

    /// Where the file is that is exchanged.
    pub(super) fn exchanged(&self) -> PathBuf {
        self.arguments.directory.join(&self.file_name)
    }

    fn url(&self, path: &str) -> String {
        format!("{}{path}", self.arguments.server.trim_end_matches('/'))
    }

    /// Sends a question and reads the answer.
    fn answer(
        &self, url: &str, question: RequestBuilder, limit: Duration,
    ) -> Result<Value, Refusal> {
        let now = Instant::now();
        let limit = self.ends.map_or(limit, |ends| limit.min(ends.saturating_duration_since(now)));
        let question = match &self.arguments.api_key {
            Some(key) => question.bearer_auth(key),
            None => question,
        };
        let sent = question.timeout(limit).send();
        let answer = sent.map_err(|error| Refusal::unanswered(url, &error))?;
        let status = answer.status();
        let bytes = read(answer, now + limit).map_err(|why| Refusal::other(url, &why))?;
        let value: Option<Value> = serde_json::from_slice(&bytes).ok();
        if status.is_success() {
            return value.ok_or_else(|| {
                Refusal::other(url, "the answer is no JSON: is this llama-server?")
            });
        }
        let value = value.unwrap_or_default();
        let why = value["error"]["message"].as_str().unwrap_or("no reason given");
        let is_absent = status == StatusCode::SERVICE_UNAVAILABLE;
        let refusal = Refusal::other(url, &format!("{status}: {why}"));
        Err(Refusal { is_absent, is_said: true, ..refusal })
    }

    fn get(&self, path: &str) -> Result<Value, Refusal> {
        let url = self.url(path);
        self.answer(&url, self.client.get(&url), ANSWER_MAX)
    }

    fn post(&self, path: &str, body: &Value, limit: Duration) -> Result<Value, Refusal> {
        let url = self.url(path);
        self.answer(&url, self.client.post(&url).json(body), limit)
    }

    /// Asks the server to do something with a slot.
    pub(super) fn ask(
        &self, slot: u64, action: &str, file: &Exchanged<'_>,
    ) -> Result<Value, Refusal> {
        let body = json!({ "filename": file.server.file_name });
        self.post(&format!("/slots/{slot}?action={action}"), &body, SLOT_ANSWER_MAX)
    }

    /// What a slot has, in a file that lasts as long as what is returned.
    /// The model is the one whose sequence it would become.
    pub(super) fn saved(&self, slot: u64, model: &Path) -> Result<(Exchanged<'_>, Slot), Failure> {
        let sequences = Sequences::open(model).map_err(Failure::failed)?;
        let file = Exchanged::new(self);
        self.ask(slot, "save", &file)?;
        // Whoever may write there may have put something else in its place.
        let opened = open_regular(&file.path).map_err(|why| file.explain(&why))?;
        let found = Slot::of(opened, sequences.manifest()).map_err(|why| {
            let path = file.path.display();
            Failure::Failed(format!("{path}: the server's slot {slot} {why}"))
        })?;
        Ok((file, found))
    }

    /// What the server says of itself; nothing where it does not say that.
    pub(super) fn properties(&self) -> Result<Value, Refusal> {
        match self.get("/props") {
            Err(refusal) if refusal.is_said && !refusal.is_absent => Ok(Value::Null),
            answer => answer,
        }
    }

    /// What the server says of its slots.
    pub(super) fn slots(&self) -> Result<Vec<SlotState>, Refusal> {
        let answer = self.get("/slots")?;
        let slots = answer.as_array().and_then(|slots| slots.iter().map(SlotState::of).collect());
        slots.ok_or_else(|| {
            Refusal::other(&self.url("/slots"), "no list of slots: is this llama-server?")
        })
    }

    /// The slot that was asked for, or those that `choose` wants.
    pub(super) fn numbers(&self, choose: impl Fn(&SlotState) -> bool) -> Result<Vec<u64>, Failure> {
        if let Some(slot) = self.arguments.slot {
            return Ok(vec![slot.into()]);
        }
        let slots = self.slots()?;
        Ok(slots.iter().filter(|slot| choose(slot)).map(|slot| slot.number).collect())
    }

    /// The text of tokens.
    pub(super) fn text(&self, tokens: &[u32]) -> Option<String> {
        let answer = self.post("/detokenize", &json!({ "tokens": tokens }), ANSWER_MAX).ok()?;
        answer["content"].as_str().map(str::to_owned)
    }

    /// What the model's template makes of messages.
    pub(super) fn prompt(&self, messages: &Value) -> Result<String, Refusal> {
        let path = "/apply-template";
        let answer = self.post(path, &json!({ "messages": messages }), ANSWER_MAX)?;
        let prompt = answer["prompt"].as_str().map(str::to_owned);
        prompt.ok_or_else(|| Refusal::other(&self.url(path), "no prompt"))
    }

    /// The tokens of a prompt.
    pub(super) fn tokens(&self, prompt: &str) -> Result<Vec<u32>, Refusal> {
        let path = "/tokenize";
        let question = json!({ "content": prompt, "add_special": true, "parse_special": true });
        let answer = self.post(path, &question, ANSWER_MAX)?;
        let tokens = answer["tokens"].as_array().and_then(|tokens| {
            tokens.iter().map(|token| u32::try_from(token.as_u64()?).ok()).collect()
        });
        tokens.ok_or_else(|| Refusal::other(&self.url(path), "no tokens"))
    }
}

/// What an error comes from.
fn cause(error: &dyn std::error::Error) -> String {
    error.source().map_or_else(|| error.to_string(), cause)
}

/// The bytes of an answer that ends in time and is not too large.
fn read(mut answer: Response, ends: Instant) -> Result<Vec<u8>, String> {
    let mut bytes = Vec::new();
    let mut piece = vec![0; 1 << 16];
    loop {
        match answer.read(&mut piece) {
            Ok(0) => return Ok(bytes),
            Ok(length) => bytes.extend(&piece[..length]),
            Err(error) => return Err(format!("the answer breaks off: {}", cause(&error))),
        }
        if bytes.len() > ANSWER_BYTES_MAX {
            return Err(format!("the answer has more than {ANSWER_BYTES_MAX} bytes"));
        }
        if Instant::now() > ends {
            return Err("the answer does not end in time".to_owned());
        }
    }
}

/// A file in the server's directory, which goes when this is dropped.
#[derive(Debug)]
pub(super) struct Exchanged<'a> {
    server: &'a Server,
    pub(super) path: PathBuf,
}

impl<'a> Exchanged<'a> {
    pub(super) fn new(server: &'a Server) -> Self {
        Self { server, path: server.exchanged() }
    }

    pub(super) fn explain(&self, why: &dyn std::fmt::Display) -> Failure {
        let path = self.path.display();
        Failure::Failed(format!("{path}: {why}: --directory is the server's --slot-save-path"))
    }
}

impl Drop for Exchanged<'_> {
    fn drop(&mut self) {
        // The server may not have got as far as to write it.
        let _ = std::fs::remove_file(&self.path);
    }
}
