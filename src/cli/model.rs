//! `kvfs model`: what concerns a model as a whole.

use std::path::PathBuf;

use clap::Subcommand;
use serde_json::json;

use super::consent::Consent;
use super::output::{Failure, Outcome, Report};
use super::seq::with_consent;
use crate::sequence::{Sequences, begin_revision};

/// `kvfs model`.
#[derive(Debug, Subcommand)]
pub(crate) enum ModelCommand {
    /// Begin an empty cache for other weights of the same shape; what the old ones computed is deleted, and
    /// programs that have some of it open read on
    #[command(after_help = "Example: kvfs model bump --dry-run /mnt/kv/models/llama 2026-11")]
    Bump {
        /// MOUNTPOINT/models/NAME
        model: PathBuf,
        /// Commit or version of the new weights
        revision: String,
        #[command(flatten)]
        consent: Consent,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
}

/// Does it.
pub(crate) fn run(command: &ModelCommand) -> Outcome {
    let ModelCommand::Bump { model, revision, consent, json } = command;
    if revision.is_empty() {
        return Err(Failure::Usage("REVISION is empty".to_owned()));
    }
    let all = Sequences::open(model).map_err(Failure::failed)?;
    let place = model.display();
    if all.manifest().fields().model_revision.as_ref() == Some(revision) {
        // What an interrupted one left goes.
        begin_revision(model, revision).map_err(Failure::failed)?;
        let nothing = json!({
            "dry_run": consent.dry_run, "deleted_sequences": 0, "deleted_files": 0, "deleted_bytes": 0,
        });
        return Ok(Report::answer(*json, &nothing, format!("{place} has revision {revision}\n")));
    }
    let names = all.names().map_err(Failure::failed)?;
    with_consent(&all, &names, (*consent, *json), || begin_revision(model, revision).map(drop))
}
