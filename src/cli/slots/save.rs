//! Slots of a server become sequences of a model.

use std::fmt;
use std::fs::read_dir;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use indicatif::ProgressBar;
use kvfs_formats::Rows;
use serde_json::{Value, json};

use super::name::{self, Naming};
use super::server::Server;
use crate::cli::arguments::ImportArguments;
use crate::cli::convert::import_with;
use crate::cli::output::Failure;
use crate::page::names::{SEQUENCES, WORK_SUFFIX};
use crate::reader::{Sequence, longest_prefix};
use crate::sequence::Sequences;

/// What became of a slot that was saved.
#[derive(Debug)]
pub(super) struct Saved {
    slot: u64,
    /// Where it is now, if it has any tokens.
    pub(super) sequence: Option<PathBuf>,
    /// The rest of a line.
    told: String,
    tokens: u32,
    /// Whether anything was written.
    pub(super) is_new: bool,
    /// For how long the server wrote the slot, and did nothing else.
    pub(super) stopped: Duration,
}

impl fmt::Display for Saved {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "slot {}: {}", self.slot, self.told)
    }
}

impl Saved {
    /// The same for programs.
    pub(super) fn to_json(&self) -> Value {
        let sequence = self.sequence.as_ref().map(|path| path.display().to_string());
        let (slot, tokens, is_new) = (self.slot, self.tokens, self.is_new);
        json!({ "slot": slot, "sequence": sequence, "tokens": tokens, "new": is_new })
    }
}

/// Where conversations of a server go.
#[derive(Debug)]
pub(super) struct Saver<'a> {
    pub(super) server: &'a Server,
    /// The model's directory.
    pub(super) model: &'a Path,
    pub(super) naming: &'a Naming,
}

impl Saver<'_> {
    /// Makes a sequence of a slot, unless there is one. It takes the place of those that were saved here
    /// and have nothing but its beginning.
    pub(super) fn save(&self, slot: u64) -> Result<Saved, Failure> {
        let begin = Instant::now();
        let (file, found) = self.server.saved(slot, self.model)?;
        let stopped = begin.elapsed();
        let (tokens, count) = (found.token_ids(), found.num_tokens());
        if count == 0 {
            return Ok(Saved {
                slot,
                sequence: None,
                told: "empty".to_owned(),
                tokens: 0,
                is_new: false,
                stopped,
            });
        }
        if let Some(sequence) = self.find(tokens)? {
            let held = Sequence::open(&sequence).and_then(|sequence| sequence.valid_tokens());
            if held.is_ok_and(|held| held >= u64::from(count)) {
                let told = format!("{}: {count} tokens, as before", sequence.display());
                let sequence = Some(sequence);
                return Ok(Saved { slot, sequence, told, tokens: count, is_new: false, stopped });
            }
            // A limit has taken its end, or somebody was stopped while it was made.
            self.remove(&sequence)?;
        }
        let before = longest_prefix(self.model, tokens).map_err(Failure::failed)?.sequence;
        let before = before.filter(|before| is_beginning(before, tokens));
        let earlier = before.as_deref().and_then(name_of);
        let name = self.naming.name(self.server, tokens, earlier, SystemTime::now());
        let sequence = self.model.join(SEQUENCES).join(name);
        let arguments = ImportArguments::of_slot(file.path.clone(), sequence.clone());
        let told = import_with(&arguments, &ProgressBar::hidden())?.to_string();
        if let Some(before) = before {
            self.remove(&before)?;
        }
        let sequence = Some(sequence);
        Ok(Saved { slot, sequence, told, tokens: count, is_new: true, stopped })
    }

    /// Another who saves the same may have been faster.
    fn remove(&self, sequence: &Path) -> Result<(), Failure> {
        let Some(name) = name_of(sequence) else { return Ok(()) };
        let all = Sequences::open(self.model).map_err(Failure::failed)?;
        all.remove(name).map_err(Failure::failed)
    }

    /// The sequence that was saved here and has these tokens.
    fn find(&self, tokens: &[u32]) -> Result<Option<PathBuf>, Failure> {
        let directory = self.model.join(SEQUENCES);
        let explain =
            |error: io::Error| Failure::Failed(format!("{}: {error}", directory.display()));
        let entries = match read_dir(&directory) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            entries => entries.map_err(explain)?,
        };
        let is_called_by = name::caller(tokens);
        for entry in entries {
            let path = entry.map_err(explain)?.path();
            if name_of(&path).is_some_and(&is_called_by) && has(&path, tokens) {
                return Ok(Some(path));
            }
        }
        Ok(None)
    }
}

fn name_of(sequence: &Path) -> Option<&str> {
    sequence.file_name().and_then(|name| name.to_str())
}

/// Whether a sequence has these tokens, or a part of them where it lacks its end.
fn has(sequence: &Path, tokens: &[u32]) -> bool {
    let ids = Sequence::open(sequence).and_then(|sequence| sequence.token_ids());
    ids.is_ok_and(|ids| tokens.starts_with(&ids))
}

/// Whether a sequence that was saved here has nothing but the beginning of these tokens.
fn is_beginning(sequence: &Path, tokens: &[u32]) -> bool {
    let ids = || Sequence::open(sequence).and_then(|sequence| sequence.token_ids());
    ids().is_ok_and(|ids| {
        let is_ours = name_of(sequence).is_some_and(name::caller(&ids));
        is_ours && tokens.starts_with(&ids) && ids.len() < tokens.len()
    })
}

/// Removes what is left of conversations that somebody was stopped while making: none is called the same again.
pub(super) fn remove_rests(model: &Path) -> Result<(), Failure> {
    let sequences = Sequences::open(model).map_err(Failure::failed)?;
    let entries = match read_dir(model.join(SEQUENCES)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries.map_err(Failure::failed)?,
    };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let made = name.to_str().and_then(|name| name.strip_suffix(WORK_SUFFIX));
        if let Some(made) = made.filter(|made| name::is_of_conversation(made)) {
            // An operation waits for those who are at work, and begins by removing what they left. That there is
            // no such sequence is no failure.
            let _ = sequences.trim(made);
        }
    }
    Ok(())
}
