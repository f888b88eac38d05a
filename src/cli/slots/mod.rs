//! `kvfs slots`: conversations of a running llama.cpp server become sequences of a model, and come back
//! after a restart, by the beginning of a prompt or the latest of them.
//!
//! The server writes and reads slot files in a directory of its own (`--slot-save-path`). A saved one
//! is imported and removed; to restore one, a link there leads to the model's `slots/` for as long as
//! the server reads it, or maps it. What sequences have in common is stored once, as with any pages. A conversation
//! that went on takes the place of what it was. `watch` does both while a server runs, with the same parts.

mod name;
mod restore;
mod save;
mod server;
mod state;
mod watch;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use serde_json::{Value, json};

use super::output::{Failure, Outcome, Report, complain};
use super::prefix::{read, read_tokens};
use crate::reader::longest_prefix;
use name::Naming;
use restore::{Restored, Source};
use save::{Saver, remove_rests};
use server::Server;
use state::SlotState;
use watch::WatchArguments;

/// Of the commands together.
pub(super) const SLOTS_EXAMPLE: &str =
    "Example: kvfs slots watch --directory /mnt/kv/files/slots /mnt/kv/models/llama";

const SAVE_EXAMPLE: &str =
    "Example: kvfs slots save --directory /mnt/kv/files/slots /mnt/kv/models/llama";

const RESTORE_EXAMPLE: &str = "\
Example:
  kvfs slots restore --directory /mnt/kv/files/slots --prompt request.json /mnt/kv/models/llama";

/// `kvfs slots`.
#[derive(Debug, Subcommand)]
pub(crate) enum SlotsCommand {
    /// Make a sequence of what each slot of the server has
    Save(SaveSlotArguments),
    /// Give the slots that nobody has used the latest conversations, or one the longest prefix of
    /// a prompt
    Restore(RestoreSlotArguments),
    /// Save each conversation when its turn has ended, and restore the latest when the server starts,
    /// until Ctrl-C
    Watch(WatchArguments),
}

/// The server, and which of its slots.
#[derive(Clone, Debug, Args)]
pub(crate) struct ServerArguments {
    /// Where it listens
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:8080")]
    pub server: String,
    /// What the server wants to be told (its --api-key)
    #[arg(long, value_name = "KEY", env = "LLAMA_API_KEY", hide_env_values = true)]
    pub api_key: Option<String>,
    /// Only the slot of this number
    #[arg(long, value_name = "NUMBER")]
    pub slot: Option<u32>,
    /// The server's --slot-save-path
    #[arg(long, value_name = "DIRECTORY")]
    pub directory: PathBuf,
}

/// `kvfs slots save`.
#[derive(Debug, Args)]
#[command(after_help = SAVE_EXAMPLE)]
pub(crate) struct SaveSlotArguments {
    #[command(flatten)]
    pub server: ServerArguments,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// The model's directory, `MOUNT/models/NAME`
    pub model: PathBuf,
}

/// `kvfs slots restore`.
#[derive(Debug, Args)]
#[command(after_help = RESTORE_EXAMPLE)]
pub(crate) struct RestoreSlotArguments {
    #[command(flatten)]
    pub server: ServerArguments,
    /// The prompt's token ids, u32 little endian as in a file `tokens`; - reads standard input
    #[arg(long, value_name = "FILE")]
    pub tokens: Option<PathBuf>,
    /// The prompt's text, or a request to `/v1/chat/completions` with its messages, of which the server
    /// makes tokens; - reads standard input
    #[arg(long, value_name = "FILE", conflicts_with = "tokens")]
    pub prompt: Option<PathBuf>,
    /// Map the pages instead of copying them: for a server with the ggml backend and this model as its
    /// `KVFS_MODEL`
    #[arg(long)]
    pub mapped: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// The model's directory, `MOUNT/models/NAME`
    pub model: PathBuf,
}

/// Saves or restores.
pub(crate) fn run(command: &SlotsCommand) -> Outcome {
    match command {
        SlotsCommand::Save(arguments) => save(arguments),
        SlotsCommand::Restore(arguments) => restore(arguments),
        SlotsCommand::Watch(arguments) => watch::run(arguments),
    }
}

/// The last part of a model's directory.
fn directory_name(model: &Path) -> String {
    model.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

fn save(arguments: &SaveSlotArguments) -> Outcome {
    let server = Server::once(&arguments.server)?;
    let slots = server.numbers(|_| true)?;
    remove_rests(&arguments.model)?;
    let naming = Naming::of(&server, &directory_name(&arguments.model));
    let saver = Saver { server: &server, model: &arguments.model, naming: &naming };
    let (mut text, mut told) = (String::new(), Vec::new());
    for slot in slots {
        let kept = saver.save(slot)?;
        text += &kept.to_string();
        text.push('\n');
        told.push(kept.to_json());
    }
    Ok(Report::answer(arguments.json, &json!({ "slots": told }), text))
}

fn restore(arguments: &RestoreSlotArguments) -> Outcome {
    let server = Server::once(&arguments.server)?;
    let model = std::path::absolute(&arguments.model).map_err(Failure::failed)?;
    let source = Source::new(&server, &model, arguments.mapped);
    let prompt = match (&arguments.tokens, &arguments.prompt) {
        (Some(tokens), _) => read_tokens(tokens)?,
        (None, Some(prompt)) => prompt_tokens(&server, &read(prompt)?)?,
        (None, None) => {
            let restored = source.restore_latest(&BTreeSet::new())?;
            if restored.is_empty() {
                complain("kvfs", &format!("nothing is restored: {}", source.why_none()?));
            }
            return report(restored, arguments.json);
        }
    };
    let found = longest_prefix(&model, &prompt).map_err(Failure::failed)?;
    let Some(sequence) = found.sequence else {
        let line = format!("{}: no sequence begins like the prompt", model.display());
        return Err(Failure::Failed(line));
    };
    let slot = server.numbers(SlotState::is_unused)?.first().copied();
    let slot =
        slot.ok_or_else(|| Failure::Failed("every slot is used: --slot names one".into()))?;
    let outcome = Ok(source.restore_slot(slot, &sequence)?);
    let restored = Restored { slot, sequence, outcome };
    let (tokens, length) = (found.tokens, prompt.len());
    let prompt = json!({ "tokens": length, "found_tokens": tokens });
    let value = json!({ "slots": [restored.to_json()], "prompt": prompt });
    let text = restored.line() + &format!(", {tokens} of {length} of the prompt are among them\n");
    Ok(Report::answer(arguments.json, &value, text))
}

/// What the server makes of a prompt: of messages by the model's template, else of the text as it is.
fn prompt_tokens(server: &Server, text: &[u8]) -> Result<Vec<u32>, Failure> {
    let request: Value = serde_json::from_slice(text).unwrap_or_default();
    let messages = &request["messages"];
    let prompt = match messages.as_array() {
        Some(_) => server.prompt(messages)?,
        None => String::from_utf8_lossy(text).into_owned(),
    };
    Ok(server.tokens(&prompt)?)
}

/// What was restored, unless nothing was.
fn report(restored: Vec<Restored>, is_json: bool) -> Outcome {
    let told: Vec<Value> = restored.iter().map(Restored::to_json).collect();
    let text: String = restored.iter().map(|restored| restored.line() + "\n").collect();
    let has_any = restored.iter().any(|restored| restored.outcome.is_ok());
    let refused = restored.into_iter().rev().find_map(|restored| restored.outcome.err());
    match refused {
        Some(failure) if !has_any => Err(failure),
        _ => {
            let value = json!({ "slots": told, "prompt": null });
            Ok(Report::answer(is_json, &value, text))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A server that is not there.
    pub(super) fn nobody() -> ServerArguments {
        ServerArguments {
            server: "http://127.0.0.1:1".to_owned(),
            api_key: None,
            slot: None,
            directory: PathBuf::from("/nonexistent"),
        }
    }

    #[test]
    fn a_restore_fails_where_nothing_was_restored() {
        let restored = |outcome| Restored { slot: 0, sequence: PathBuf::from("/s"), outcome };
        let good = || restored(Ok(7));
        let bad = |line: &str| restored(Err(Failure::Failed(line.to_owned())));
        assert_eq!(report(Vec::new(), false), Ok(Report::default()));
        let text = "slot 0: /s: 7 tokens restored\nslot 0: /s: no room\n".to_owned();
        assert_eq!(report(vec![good(), bad("no room")], false), Ok(Report::text(text)));
        let told = report(vec![good(), bad("no room")], true).unwrap().text;
        let told: Value = serde_json::from_str(&told).unwrap();
        let refused = json!({ "slot": 0, "sequence": "/s", "tokens": null, "why": "no room" });
        assert_eq!((&told["slots"][0]["tokens"], &told["slots"][1]), (&json!(7), &refused));
        let failed = report(vec![bad("first"), bad("last")], false);
        assert_eq!(failed, Err(Failure::Failed("last".to_owned())));
    }
}
