//! `kvfs diff`: what two pages, tails, sequences or models have in common, and where they part.
//!
//! Pages that a mount stores once are the same without a look, and so are those with the same checksum; only of the
//! others the bytes are read, and of those that are elsewhere not even they, unless that is asked for.

mod models;
mod pages;
mod sequences;

use std::fmt::Display;
use std::path::{Path, PathBuf};

use clap::Args;
use serde_json::Value;

use super::history::shown;
use super::output::{Failure, Outcome, Report};
use super::page_values::Away;
use super::summary::Summary;
use crate::page::names::{MANIFEST, TOKENS};

const DIFF_HELP: &str = "\
Of pages and tails each value of K and V is compared; equal are those with the same bits. Of sequences and models the \
tokens are compared, and the files of each layer: \"shared\" are stored once, \"identical\" have the same bits, \"rounded\" \
is one that is the lossy copy of the other. Nothing is fetched without --fetch.

Exits with 0 if they are equal, with 1 if they differ, with 2 if that cannot be told.

Example: kvfs diff /mnt/kv/models/llama/sequences/chat-42 /mnt/kv/models/llama/sequences/chat-43";

const EXIT_DIFFERENT: u8 = 1;
const EXIT_UNKNOWN: u8 = 2;

/// `kvfs diff`.
#[derive(Debug, Args)]
#[command(after_help = DIFF_HELP)]
pub(crate) struct DiffArguments {
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Bring here what has to be read: from the remote, or out of compressed copies
    #[arg(long)]
    fetch: bool,
    /// A page, a tail, the directory of a sequence or of a model
    a: PathBuf,
    /// Another one
    b: PathBuf,
}

/// What a comparison comes to, the weightiest last.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
enum Verdict {
    #[default]
    Equal,
    /// Nothing is known to differ, and not everything was compared.
    Unknown,
    Different,
}

impl Verdict {
    fn of(is_equal: bool) -> Verdict {
        if is_equal { Verdict::Equal } else { Verdict::Different }
    }

    fn name(self) -> &'static str {
        match self {
            Verdict::Equal => "equal",
            Verdict::Unknown => "not known",
            Verdict::Different => "different",
        }
    }

    fn exit(self) -> u8 {
        match self {
            Verdict::Equal => 0,
            Verdict::Unknown => EXIT_UNKNOWN,
            Verdict::Different => EXIT_DIFFERENT,
        }
    }
}

/// What was found.
struct Found {
    verdict: Verdict,
    summary: Summary,
    /// Behind the summary, for people.
    table: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    File,
    Sequence,
    Model,
}

impl Kind {
    fn of(path: &Path) -> Result<Kind, Failure> {
        let metadata = path.metadata().map_err(|error| explain(path, error))?;
        if !metadata.is_dir() {
            return Ok(Kind::File);
        }
        if path.join(MANIFEST).is_file() {
            return Ok(Kind::Model);
        }
        let layers = sequences::layers(path).map_err(|error| explain(path, error))?;
        if layers.is_empty() && !path.join(TOKENS).is_file() {
            let why = "is neither a page, a tail, a sequence nor a model";
            return Err(explain(path, why));
        }
        Ok(Kind::Sequence)
    }

    fn name(self) -> &'static str {
        match self {
            Kind::File => "a file",
            Kind::Sequence => "a sequence",
            Kind::Model => "a model",
        }
    }
}

/// Compares.
pub(crate) fn run(arguments: &DiffArguments) -> Outcome {
    // 1 means that they differ, so whatever goes wrong is 2, as it is for diff(1).
    let found = compare(arguments).map_err(|failure| Failure::Usage(failure.line().to_owned()))?;
    let mut report = if arguments.json {
        Report::json(&found.summary.to_json())
    } else {
        Report::text(found.summary.to_text() + &found.table)
    };
    report.exit = found.verdict.exit();
    report.unwritten = EXIT_UNKNOWN;
    Ok(report)
}

fn compare(arguments: &DiffArguments) -> Result<Found, Failure> {
    let away = if arguments.fetch { Away::Fetch } else { Away::Refuse };
    let (a, b) = (&*arguments.a, &*arguments.b);
    let mut found = match (Kind::of(a)?, Kind::of(b)?) {
        (Kind::File, Kind::File) => pages::compare(a, b, away)?,
        (Kind::Sequence, Kind::Sequence) => sequences::compare(a, b, away)?,
        (Kind::Model, Kind::Model) => models::compare(a, b, away)?,
        (first, second) => {
            let (first, second) = (first.name(), second.name());
            let why = format!("is {second}, {} is {first}: name two of one kind", shown(a));
            return Err(explain(b, why));
        }
    };
    let mut summary = Summary::default();
    summary.add_path("a", a);
    summary.add_path("b", b);
    summary.add("result", found.verdict.name());
    summary.append(found.summary);
    found.summary = summary;
    Ok(found)
}

fn explain(path: &Path, why: impl Display) -> Failure {
    Failure::Failed(format!("{}: {why}", shown(path)))
}

/// Adds a number for each of two.
fn add_both(summary: &mut Summary, name: &'static str, both: [Value; 2]) {
    let [a, b] = both.each_ref().map(|value| match value {
        Value::Null => "not known".to_owned(),
        Value::String(text) => text.clone(),
        value => value.to_string(),
    });
    let text = if a == b { a } else { format!("{a} and {b}") };
    summary.add_with_text(name, Value::Array(both.into()), text);
}

#[cfg(test)]
mod tests;
