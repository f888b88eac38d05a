//! `kvfs slots`: conversations of a running llama.cpp server become sequences of a model, and come back
//! after a restart, by the beginning of a prompt or the latest of them.
//!
//! The server writes and reads slot files in a directory of its own (`--slot-save-path`). A saved one
//! is imported and removed; to restore one, a link there leads to the model's `slots/` for as long as
//! the server reads it, or maps it. What sequences have in common is stored once, as with any pages. A conversation
//! that went on takes the place of what it was.

use std::fs::remove_dir_all;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use clap::{Args, Subcommand};
use kvfs_formats::Rows;
use kvfs_formats::slot::Slot;
use reqwest::blocking::Client;
use serde_json::{Value, json};

use super::arguments::ImportArguments;
use super::convert::import_to_text;
use super::output::{Failure, Outcome, Report};
use super::prefix::read_tokens;
use crate::page::names::{
    REFERENCES_4_SUFFIX, REFERENCES_SUFFIX, SEQUENCES, SLOT_4_SUFFIX, SLOT_SUFFIX, SLOTS, TOKENS,
};
use crate::reader::{Sequence, longest_prefix};

/// The server answers once it has a slot's turn, and has written or read it.
const ANSWER_MAX: Duration = Duration::from_secs(600);
/// Hexadecimal digits of a conversation's name: 128 bits.
const NAME_DIGITS: usize = 32;

/// `kvfs slots`.
#[derive(Debug, Subcommand)]
pub(crate) enum SlotsCommand {
    /// Make a sequence of what each slot of the server has
    Save(SaveSlotArguments),
    /// Give the slots that nobody has used the latest conversations, or one the longest beginning of
    /// a prompt
    Restore(RestoreSlotArguments),
}

/// The server, and which of its slots.
#[derive(Debug, Args)]
pub(crate) struct ServerArguments {
    /// Where it listens
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:8080")]
    pub server: String,
    /// Only the slot of this number
    #[arg(long, value_name = "NUMBER")]
    pub slot: Option<u32>,
    /// The server's --slot-save-path
    #[arg(long, value_name = "DIRECTORY")]
    pub directory: PathBuf,
}

/// `kvfs slots save`.
#[derive(Debug, Args)]
pub(crate) struct SaveSlotArguments {
    #[command(flatten)]
    pub server: ServerArguments,
    /// The model's directory, `MOUNT/models/NAME`
    pub model: PathBuf,
}

/// `kvfs slots restore`.
#[derive(Debug, Args)]
pub(crate) struct RestoreSlotArguments {
    #[command(flatten)]
    pub server: ServerArguments,
    /// The prompt's token ids, u32 little endian as in a file `tokens`; - reads standard input
    #[arg(long, value_name = "FILE")]
    pub tokens: Option<PathBuf>,
    /// Map the pages instead of copying them: for a server with the ggml backend and this model as its
    /// `KVFS_MODEL`
    #[arg(long)]
    pub mapped: bool,
    /// The model's directory, `MOUNT/models/NAME`
    pub model: PathBuf,
}

/// Saves or restores.
pub(crate) fn run(command: &SlotsCommand) -> Outcome {
    match command {
        SlotsCommand::Save(arguments) => save(arguments),
        SlotsCommand::Restore(arguments) => restore(arguments),
    }
}

/// A running server.
struct Server<'a> {
    client: Client,
    arguments: &'a ServerArguments,
}

impl<'a> Server<'a> {
    fn new(arguments: &'a ServerArguments) -> Result<Self, Failure> {
        let client = Client::builder().timeout(ANSWER_MAX).build().map_err(Failure::failed)?;
        Ok(Self { client, arguments })
    }

    fn url(&self, path: &str) -> String {
        format!("{}/slots{path}", self.arguments.server.trim_end_matches('/'))
    }

    /// Asks the server to do something with a slot.
    fn ask(&self, slot: u64, action: &str, file: &Exchanged) -> Result<Value, Failure> {
        let url = self.url(&format!("/{slot}?action={action}"));
        let request = self.client.post(&url).json(&json!({ "filename": file.name }));
        answer(&url, request.send())
    }

    /// What the server says of its slots.
    fn slots(&self) -> Result<Vec<Value>, Failure> {
        let url = self.url("");
        match answer(&url, self.client.get(&url).send())? {
            Value::Array(slots) => Ok(slots),
            _ => Err(Failure::Failed(format!("{url}: no list of slots"))),
        }
    }

    /// The slot that was asked for, or those that `choose` wants.
    fn numbers(&self, choose: impl Fn(&Value) -> bool) -> Result<Vec<u64>, Failure> {
        if let Some(slot) = self.arguments.slot {
            return Ok(vec![slot.into()]);
        }
        let slots = self.slots()?;
        Ok(slots
            .iter()
            .filter(|slot| choose(slot))
            .filter_map(|slot| slot["id"].as_u64())
            .collect())
    }
}

fn answer(
    url: &str, answer: reqwest::Result<reqwest::blocking::Response>,
) -> Result<Value, Failure> {
    let explain = |error: reqwest::Error| Failure::Failed(format!("{url}: {error}"));
    let answer = answer.map_err(explain)?;
    let status = answer.status();
    if status.is_success() {
        return answer.json().map_err(explain);
    }
    let why: Value = answer.json().unwrap_or_default();
    let why = why["error"]["message"].as_str().unwrap_or("no reason given");
    Err(Failure::Failed(format!("{url}: {status}: {why}")))
}

/// A file in the server's directory, which goes when this is dropped.
struct Exchanged {
    name: String,
    path: PathBuf,
}

impl Exchanged {
    fn new(server: &ServerArguments) -> Self {
        let name = format!("kvfs-{}.bin", std::process::id());
        Self { path: server.directory.join(&name), name }
    }

    fn explain(&self, why: &dyn std::fmt::Display) -> Failure {
        let path = self.path.display();
        Failure::Failed(format!("{path}: {why}: --directory is the server's --slot-save-path"))
    }
}

impl Drop for Exchanged {
    fn drop(&mut self) {
        // The server may not have got as far as to write it.
        let _ = std::fs::remove_file(&self.path);
    }
}

fn save(arguments: &SaveSlotArguments) -> Outcome {
    let server = Server::new(&arguments.server)?;
    let mut text = String::new();
    for slot in server.numbers(|_| true)? {
        text += &save_slot(&server, slot, &arguments.model)?;
    }
    Ok(Report::text(text))
}

/// A line that says what became of it.
fn save_slot(server: &Server<'_>, number: u64, model: &Path) -> Result<String, Failure> {
    let file = Exchanged::new(server.arguments);
    server.ask(number, "save", &file)?;
    let slot = Slot::open(&file.path).map_err(|why| file.explain(&why))?;
    if slot.num_tokens() == 0 {
        return Ok(format!("slot {number}: empty\n"));
    }
    let name = name(slot.token_ids());
    let sequence = model.join(SEQUENCES).join(&name);
    if sequence.exists() {
        let tokens = Sequence::open(&sequence).and_then(|sequence| sequence.valid_tokens());
        if tokens.is_ok_and(|tokens| tokens >= u64::from(slot.num_tokens())) {
            let tokens = slot.num_tokens();
            return Ok(format!(
                "slot {number}: {}: {tokens} tokens, as before\n",
                sequence.display()
            ));
        }
        // Somebody was stopped while it was made.
        remove_dir_all(&sequence).map_err(Failure::failed)?;
    }
    let before = longest_prefix(model, slot.token_ids()).map_err(Failure::failed)?.sequence;
    let import = ImportArguments::of_slot(file.path.clone(), sequence);
    let report = import_to_text(&import)?;
    if let Some(before) = before.filter(|before| is_beginning(before, slot.token_ids())) {
        remove_dir_all(&before).map_err(Failure::failed)?;
    }
    Ok(format!("slot {number}: {report}"))
}

/// Whether a sequence that was saved here has nothing but the beginning of these tokens.
fn is_beginning(sequence: &Path, tokens: &[u32]) -> bool {
    let name = sequence.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let is_ours = name.len() == NAME_DIGITS && name.bytes().all(|byte| byte.is_ascii_hexdigit());
    let ids = || Sequence::open(sequence).and_then(|sequence| sequence.token_ids());
    is_ours && ids().is_ok_and(|ids| tokens.starts_with(&ids) && ids.len() < tokens.len())
}

/// A conversation is called by its tokens: saved again without a change it is the same.
fn name(tokens: &[u32]) -> String {
    let mut hasher = blake3::Hasher::new();
    for token in tokens {
        hasher.update(&token.to_le_bytes());
    }
    hasher.finalize().to_hex()[..NAME_DIGITS].to_owned()
}

fn restore(arguments: &RestoreSlotArguments) -> Outcome {
    let server = Server::new(&arguments.server)?;
    let model = std::path::absolute(&arguments.model).map_err(Failure::failed)?;
    let source = Source { server: &server, model: &model, is_mapped: arguments.mapped };
    let Some(tokens) = &arguments.tokens else { return source.restore_latest() };
    let prompt = read_tokens(tokens)?;
    let found = longest_prefix(&model, &prompt).map_err(Failure::failed)?;
    let Some(sequence) = found.sequence else {
        let line = format!("{}: no sequence begins like the prompt", model.display());
        return Err(Failure::Failed(line));
    };
    let slot = server.numbers(is_unused)?.first().copied();
    let slot =
        slot.ok_or_else(|| Failure::Failed("every slot is used: --slot names one".into()))?;
    let text = source.restore_slot(slot, &sequence)?;
    let (tokens, length) = (found.tokens, prompt.len());
    Ok(Report::text(format!("{text}, {tokens} of {length} of the prompt are among them\n")))
}

/// Where a server gets conversations from.
struct Source<'a> {
    server: &'a Server<'a>,
    /// Its directory, as an absolute path.
    model: &'a Path,
    is_mapped: bool,
}

impl Source<'_> {
    /// Gives each slot that nobody has used one of the latest conversations.
    fn restore_latest(&self) -> Outcome {
        let path = self.model.join(SEQUENCES);
        let explain =
            |error: std::io::Error| Failure::Failed(format!("{}: {error}", path.display()));
        let mut sequences: Vec<(SystemTime, PathBuf)> = Vec::new();
        for entry in std::fs::read_dir(&path).map_err(explain)? {
            let path = entry.map_err(explain)?.path();
            // What is no conversation has none.
            if let Ok(tokens) = path.join(TOKENS).metadata() {
                sequences.push((tokens.modified().map_err(explain)?, path));
            }
        }
        sequences.sort_by(|a, b| b.cmp(a));
        let mut text = String::new();
        let (mut restored, mut refused) = (0, None);
        for (slot, (_, sequence)) in self.server.numbers(is_unused)?.into_iter().zip(&sequences) {
            // Slots share the server's cache: where an older conversation has no room, the latest stay.
            let line = match self.restore_slot(slot, sequence) {
                Ok(line) => {
                    restored += 1;
                    line
                }
                Err(failure) => {
                    let line = format!("slot {slot}: {}: {}", sequence.display(), failure.line());
                    refused = Some(failure);
                    line
                }
            };
            text += &line;
            text.push('\n');
        }
        match refused {
            Some(failure) if restored == 0 => Err(failure),
            _ => Ok(Report::text(text)),
        }
    }

    /// A line without its end that says what was restored.
    fn restore_slot(&self, slot: u64, sequence: &Path) -> Result<String, Failure> {
        let name = sequence.file_name().unwrap_or_default();
        let read = |suffix: &str| {
            let mut name = name.to_owned();
            name.push(suffix);
            let link = Exchanged::new(self.server.arguments);
            let target = self.model.join(SLOTS).join(name);
            symlink(target, &link.path).map_err(|error| link.explain(&error))?;
            self.server.ask(slot, "restore", &link)
        };
        let [newer, older] = suffixes(self.is_mapped);
        // A server does not say which version it reads, and refuses the other.
        let answer = read(newer).or_else(|_| read(older))?;
        let tokens = &answer["n_restored"];
        Ok(format!("slot {slot}: {}: {tokens} tokens restored", sequence.display()))
    }
}

/// What slots are called, of the newer version first.
fn suffixes(is_mapped: bool) -> [&'static str; 2] {
    if is_mapped { [REFERENCES_4_SUFFIX, REFERENCES_SUFFIX] } else { [SLOT_4_SUFFIX, SLOT_SUFFIX] }
}

/// Whether a slot has had no task since the server started.
fn is_unused(slot: &Value) -> bool {
    slot["id_task"].as_i64().is_none_or(|task| task < 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_conversation_is_called_by_its_tokens() {
        assert_eq!(name(&[1, 2]).len(), NAME_DIGITS);
        assert_eq!(name(&[1, 2]), name(&[1, 2]));
        assert_ne!(name(&[1, 2]), name(&[2, 1]));
    }

    #[test]
    fn slots_that_nobody_used() {
        let check = |slot: Value, expected: bool| assert_eq!(is_unused(&slot), expected, "{slot}");
        check(json!({ "id": 0, "is_processing": false }), true);
        check(json!({ "id": 0, "id_task": -1 }), true);
        check(json!({ "id": 0, "id_task": 4 }), false);
    }
}
