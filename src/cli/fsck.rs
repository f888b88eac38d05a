//! `kvfs fsck`: checks a store that no daemon uses.

use std::fmt::Write;
use std::path::PathBuf;

use clap::Args;
use serde_json::json;

use super::output::{EXIT_FSCK_ERRORS, EXIT_OK, Failure, Outcome, Report, bytes};
use super::progress::{self, Scale};
use crate::store::fsck::{self, FsckOptions, Rebuilt};
use crate::store::{Store, StoreError};

/// `kvfs fsck`.
#[derive(Debug, Args)]
#[command(after_help = "Example: kvfs fsck --repair /var/lib/kvfs")]
pub(crate) struct FsckArguments {
    /// Repair what can be repaired, move the rest to quarantine
    #[arg(long)]
    pub repair: bool,
    /// Make lost or unreadable metadata anew from the objects, then repair
    #[arg(long, conflicts_with_all = ["repair", "read_data_subset"])]
    pub rebuild: bool,
    /// Read the bytes of only the K-th of N parts of the objects [default: of all]
    #[arg(long, value_name = "K/N", value_parser = parse_subset)]
    pub read_data_subset: Option<(u32, u32)>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// Directory of the store
    pub store: PathBuf,
}

pub(super) fn parse_subset(text: &str) -> Result<(u32, u32), String> {
    let numbers = text.split_once('/').and_then(|(part, parts)| {
        let numbers: (u32, u32) = (part.parse().ok()?, parts.parse().ok()?);
        (1..=numbers.1).contains(&numbers.0).then_some(numbers)
    });
    numbers.ok_or_else(|| "must be K/N with K from 1 to N, such as 1/10".to_owned())
}

/// Checks, and repairs if asked to.
pub(crate) fn run(arguments: &FsckArguments) -> Outcome {
    let store = Store::open(&arguments.store).map_err(|error| match error {
        StoreError::NotAStore(path) => {
            Failure::Failed(format!("{} is not a kvfs store", path.display()))
        }
        StoreError::Io(error) => {
            Failure::Failed(format!("store {}: {error}", arguments.store.display()))
        }
        error => Failure::failed(error),
    })?;
    let options = FsckOptions { repair: arguments.repair, subset: arguments.read_data_subset };
    let bar = progress::bar("checking", Scale::Bytes(0));
    let progress = |done, total| {
        bar.set_length(total);
        bar.set_position(done);
    };
    quiet_the_database();
    let outcome = if arguments.rebuild {
        fsck::rebuild(&store, &progress).map(|(rebuilt, found)| (Some(rebuilt), found))
    } else {
        fsck::run(&store, &options, &progress).map(|found| (None, found))
    };
    bar.finish_and_clear();
    let (rebuilt, found) = outcome.map_err(Failure::failed)?;
    let text = if arguments.json {
        format!("{:#}\n", to_json(rebuilt.as_ref(), &found))
    } else {
        rebuilt.as_ref().map_or_else(String::new, told) + &to_text(&found)
    };
    let exit = if found.findings.is_empty() { EXIT_OK } else { EXIT_FSCK_ERRORS };
    Ok(Report::ending(text, exit))
}

/// The database panics at some damage. That is caught and reported as damage, in one line; what the
/// panic says would only hide it.
fn quiet_the_database() {
    let others = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        let is_of_database = panic.location().is_some_and(|at| at.file().contains("/redb-"));
        if !is_of_database {
            others(panic);
        }
    }));
}

fn told(rebuilt: &Rebuilt) -> String {
    let Rebuilt { files, lost } = rebuilt;
    format!(
        "meta.redb was made anew: {files} files are where they were, {lost} in files/lost+found\n"
    )
}

fn to_text(found: &fsck::Report) -> String {
    let mut text = String::new();
    for finding in &found.findings {
        let end = if finding.repaired { " (repaired)" } else { "" };
        // Writing to a String cannot fail.
        let _ = writeln!(text, "{}{end}", finding.what);
    }
    let left = &found.leftovers;
    let leftovers = left.staged + left.unsettled + left.unreferenced;
    if leftovers > 0 {
        let _ = writeln!(
            text,
            "not errors: {} unfinished files, {} changed in place, {} unreferenced objects: the \
             next mount tidies up",
            left.staged, left.unsettled, left.unreferenced
        );
    }
    if found.only_remote > 0 {
        let _ = writeln!(
            text,
            "not errors: {} objects are only in the remote, which was not asked",
            found.only_remote
        );
    }
    let count = found.findings.len();
    let read = bytes(found.bytes_read);
    let _ = writeln!(
        text,
        "{} inodes, {} objects, {read} read: {}",
        found.inodes,
        found.objects,
        match count {
            0 => "no errors".to_owned(),
            1 => "1 error".to_owned(),
            count => format!("{count} errors"),
        }
    );
    text
}

fn to_json(rebuilt: Option<&Rebuilt>, found: &fsck::Report) -> serde_json::Value {
    let errors = found
        .findings
        .iter()
        .map(|finding| json!({ "what": finding.what, "repaired": finding.repaired }));
    json!({
        "rebuilt": rebuilt.map(|made| json!({ "files": made.files, "lost": made.lost })),
        "inodes": found.inodes,
        "objects": found.objects,
        "bytes_read": found.bytes_read,
        "only_remote": found.only_remote,
        "leftovers": {
            "staged": found.leftovers.staged,
            "unsettled": found.leftovers.unsettled,
            "unreferenced": found.leftovers.unreferenced,
        },
        "errors": errors.collect::<Vec<_>>(),
    })
}
