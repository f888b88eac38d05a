//! `kvfs seq`: operations on sequences, for people and scripts.

use std::fmt::Write as _;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use serde_json::json;

use super::consent::{Consent, size_below};
use super::new_file::{NewFile, explain_taken};
use super::output::{EXIT_FAILED, EXIT_OK, Failure, Outcome, Report, bytes, complain};
use crate::page::printable;
use crate::sequence::{SequenceError, Sequences};

/// `kvfs seq`.
#[derive(Debug, Args)]
#[command(after_help = "Example: kvfs seq show /mnt/kv/models/llama")]
pub(crate) struct SeqArguments {
    #[command(subcommand)]
    operation: Operation,
}

/// MODEL is a directory `MOUNT/models/NAME`, SEQ the name of a sequence of it. POSITIONS are written
/// `4..1024`, `1024..`, `..4` or `..`; the one behind the dots is not among them.
#[derive(Debug, Subcommand)]
enum Operation {
    /// Show where the tokens of a sequence stand, or which sequences there are
    #[command(after_help = "Example: kvfs seq show /mnt/kv/models/llama chat-42")]
    Show {
        #[command(flatten)]
        model: ModelArgument,
        /// The sequence
        seq: Option<String>,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Remove the tokens at some positions
    #[command(after_help = "Example: kvfs seq rm /mnt/kv/models/llama chat-42 4..1024")]
    Rm {
        #[command(flatten)]
        of: SequenceArguments,
        /// Such as 4..1024
        #[arg(value_parser = positions)]
        positions: Range<u64>,
    },
    /// Make a sequence that shares the pages of another one
    #[command(after_help = "Example: kvfs seq cp /mnt/kv/models/llama chat-42 chat-43 ..1024")]
    Cp {
        #[command(flatten)]
        of: SequenceArguments,
        /// The new sequence
        to: String,
        /// Such as ..1024
        #[arg(value_parser = positions, default_value = "..")]
        positions: Range<u64>,
    },
    /// Remove all other sequences of the model
    #[command(
        alias = "keep",
        after_help = "Example: kvfs seq remove-others --dry-run /mnt/kv/models/llama chat-42"
    )]
    RemoveOthers {
        #[command(flatten)]
        of: SequenceArguments,
        #[command(flatten)]
        consent: Consent,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Move the tokens at some positions
    #[command(after_help = "Example: kvfs seq add /mnt/kv/models/llama chat-42 1024.. -1020")]
    Add {
        #[command(flatten)]
        of: SequenceArguments,
        /// Such as 1024..
        #[arg(value_parser = positions)]
        positions: Range<u64>,
        /// By so many positions
        #[arg(allow_negative_numbers = true)]
        delta: i64,
    },
    /// Remove tokens and move those behind them up, and keep the sequence as it was
    #[command(
        after_help = "Example: kvfs seq shift /mnt/kv/models/llama chat-42 4..1024 chat-42-before"
    )]
    Shift {
        #[command(flatten)]
        of: SequenceArguments,
        /// Such as 4..1024
        #[arg(value_parser = positions)]
        positions: Range<u64>,
        /// The sequence as it was
        snapshot: String,
    },
    /// Divide the positions of some tokens
    #[command(after_help = "Example: kvfs seq div /mnt/kv/models/llama chat-42 ..1024 2")]
    Div {
        #[command(flatten)]
        of: SequenceArguments,
        /// Such as ..1024
        #[arg(value_parser = positions)]
        positions: Range<u64>,
        /// By this number
        divisor: u64,
    },
    /// Remove all tokens of a sequence, or all sequences
    #[command(after_help = "Example: kvfs seq clear --yes /mnt/kv/models/llama chat-42")]
    Clear {
        #[command(flatten)]
        model: ModelArgument,
        /// The sequence
        #[arg(required_unless_present = "all")]
        seq: Option<String>,
        /// All sequences of the model
        #[arg(long, conflicts_with = "seq")]
        all: bool,
        #[command(flatten)]
        consent: Consent,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Remove pages of layers with a sliding window that no later token looks at
    #[command(after_help = "Example: kvfs seq window /mnt/kv/models/llama chat-42")]
    Window {
        #[command(flatten)]
        of: SequenceArguments,
    },
    /// Write the state of a sequence, a tar archive
    #[command(after_help = "Example: kvfs seq save /mnt/kv/models/llama chat-42 chat-42.tar")]
    Save {
        #[command(flatten)]
        of: SequenceArguments,
        /// Where to, - for standard output
        file: PathBuf,
    },
    /// Make a sequence of a state
    #[command(after_help = "Example: kvfs seq load /mnt/kv/models/llama chat-43 chat-42.tar")]
    Load {
        #[command(flatten)]
        of: SequenceArguments,
        /// Where from, - for standard input
        file: PathBuf,
    },
}

#[derive(Debug, Args)]
struct ModelArgument {
    /// A directory MOUNT/models/NAME
    model: PathBuf,
}

#[derive(Debug, Args)]
struct SequenceArguments {
    /// A directory MOUNT/models/NAME
    model: PathBuf,
    /// The name of a sequence
    seq: String,
}

impl SequenceArguments {
    fn on(&self, operation: impl FnOnce(&Sequences, &str) -> Result<(), SequenceError>) -> Outcome {
        let sequences = Sequences::open(&self.model).map_err(Failure::failed)?;
        operation(&sequences, &self.seq).map_err(Failure::failed)?;
        Ok(Report::default())
    }
}

/// Does one operation. Those that change something print nothing, those that delete whole sequences how
/// much that was.
pub(crate) fn run(arguments: &SeqArguments) -> Outcome {
    match &arguments.operation {
        Operation::Show { model, seq, json } => show(&model.model, seq.as_deref(), *json),
        Operation::Rm { of, positions } => of.on(|all, seq| all.seq_rm(seq, positions.clone())),
        Operation::Cp { of, to, positions } => {
            of.on(|all, seq| all.seq_cp(seq, to, positions.clone()))
        }
        Operation::RemoveOthers { of, consent, json } => remove_others(of, *consent, *json),
        Operation::Add { of, positions, delta } => {
            of.on(|all, seq| all.seq_add(seq, positions.clone(), *delta))
        }
        Operation::Shift { of, positions, snapshot } => {
            of.on(|all, seq| all.context_shift(seq, positions.clone(), snapshot))
        }
        Operation::Div { of, positions, divisor } => {
            of.on(|all, seq| all.seq_div(seq, positions.clone(), *divisor))
        }
        Operation::Clear { model, seq, consent, json, .. } => {
            clear(model, seq.as_deref(), *consent, *json)
        }
        Operation::Window { of } => of.on(|all, seq| all.drop_outside_window(seq).map(drop)),
        Operation::Save { of, file } => save(of, file),
        Operation::Load { of, file } => load(of, file),
    }
}

fn remove_others(of: &SequenceArguments, consent: Consent, is_json: bool) -> Outcome {
    let all = Sequences::open(&of.model).map_err(Failure::failed)?;
    all.positions(&of.seq).map_err(Failure::failed)?;
    let mut others = all.names().map_err(Failure::failed)?;
    others.retain(|name| *name != of.seq);
    with_consent(&all, &others, (consent, is_json), || all.seq_keep(&of.seq))
}

fn clear(model: &ModelArgument, seq: Option<&str>, consent: Consent, is_json: bool) -> Outcome {
    let all = Sequences::open(&model.model).map_err(Failure::failed)?;
    let names = match seq {
        Some(seq) => {
            all.positions(seq).map_err(Failure::failed)?;
            vec![seq.to_owned()]
        }
        None => all.names().map_err(Failure::failed)?,
    };
    let clear = || seq.map_or_else(|| all.clear_all(), |seq| all.clear(seq));
    with_consent(&all, &names, (consent, is_json), clear)
}

/// Removes sequences, or their tokens, after it was said how much that is.
pub(super) fn with_consent(
    all: &Sequences, names: &[String], (consent, is_json): (Consent, bool),
    remove: impl FnOnce() -> Result<(), SequenceError>,
) -> Outcome {
    let (mut files, mut size) = (0, 0);
    for name in names {
        let below = size_below(&all.path(name)).map_err(Failure::failed)?;
        (files, size) = (files + below.0, size + below.1);
    }
    let what = format!("{} sequences, {files} files, {}", names.len(), bytes(size));
    let is_given = consent.is_given(&format!("this deletes {what}"))?;
    if is_given {
        remove().map_err(Failure::failed)?;
    }
    let value = json!({
        "dry_run": !is_given,
        "deleted_sequences": names.len(),
        "deleted_files": files,
        "deleted_bytes": size,
    });
    let word = if is_given { "deleted" } else { "would be deleted" };
    Ok(Report::answer(is_json, &value, format!("{word}: {what}\n")))
}

fn save(of: &SequenceArguments, path: &Path) -> Outcome {
    if path == Path::new("-") {
        return of.on(|all, seq| all.state_write(seq, io::stdout().lock()));
    }
    let explain = |error: io::Error| explain_taken(path, &error, "remove it, or name another file");
    let made = NewFile::absent(path).map_err(explain)?;
    let report = of.on(|all, seq| all.state_write_file(seq, made.file(), path))?;
    made.publish().map_err(explain)?;
    Ok(report)
}

fn load(of: &SequenceArguments, path: &Path) -> Outcome {
    if path == Path::new("-") {
        return of.on(|all, seq| all.state_read(seq, io::stdin().lock()));
    }
    let explain = |error: io::Error| Failure::Failed(format!("{}: {error}", path.display()));
    let file = File::open(path).map_err(explain)?;
    of.on(|all, seq| all.state_read(seq, io::BufReader::new(file)))
}

fn show(model: &Path, seq: Option<&str>, is_json: bool) -> Outcome {
    let sequences = Sequences::open(model).map_err(Failure::failed)?;
    let names = match seq {
        Some(seq) => vec![seq.to_owned()],
        None => sequences.names().map_err(Failure::failed)?,
    };
    let (mut text, mut shown, mut exit) = (String::new(), Vec::new(), EXIT_OK);
    for name in names {
        let found = sequences.positions(&name).and_then(|found| {
            let ends = sequences.seq_pos(&name)?;
            Ok((found, ends))
        });
        let ((stands, rows), ends) = match found {
            Ok(found) => found,
            // Those of somebody else are no reason to show none.
            Err(error) if seq.is_none() => {
                complain("kvfs seq show", &error.to_string());
                exit = EXIT_FAILED;
                continue;
            }
            Err(error) => return Err(Failure::failed(error)),
        };
        let runs: Vec<_> = stands.within(0..rows).collect();
        let tokens: u64 = runs.iter().map(|run| run.tokens).sum();
        let prefix = stands.prefix_rows().min(rows);
        let (first, last) = (ends.map(|ends| ends.0), ends.map(|ends| ends.1));
        shown.push(json!({
            "sequence": name, "tokens": tokens, "rows": rows, "pos_min": first, "pos_max": last,
            "prefix_rows": prefix, "runs": runs,
        }));
        let ends = ends.map_or("none".to_owned(), |(first, last)| format!("{first} to {last}"));
        let name = printable(name.chars());
        let _ = writeln!(text, "{name}: {tokens} tokens in {rows} rows, positions {ends}");
        // Whoever asks for one wants to know; a divided one has many.
        if seq.is_some() && !stands.is_plain() {
            let _ = writeln!(text, "  first {prefix} rows can be found by their prefix");
            for run in runs {
                let (rows, stands) = (run.rows(), run.positions());
                let _ = writeln!(text, "  rows {rows:?} at {stands:?}, moved by {}", run.shift);
            }
        }
    }
    let report = if is_json { Report::json(&json!(shown)) } else { Report::text(text) };
    Ok(Report { exit, ..report })
}

/// Positions as Rust writes them: `4..1024`, `1024..`, `..4`, `..`.
fn positions(text: &str) -> Result<Range<u64>, String> {
    let expected = || format!("{text:?}: write positions as 4..1024, 1024.., ..4 or ..");
    let (start, end) = text.split_once("..").ok_or_else(expected)?;
    let number = |text: &str, absent: u64| match text {
        "" => Ok(absent),
        text => text.parse().map_err(|_| expected()),
    };
    let (start, end) = (number(start, 0)?, number(end, u64::MAX)?);
    if start > end {
        Err(format!("{text:?}: the end is before the beginning"))
    } else {
        Ok(start..end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_are_ranges() {
        fn check(text: &str, expected: impl Into<Option<Range<u64>>>) {
            assert_eq!(positions(text).ok(), expected.into(), "{text}");
        }
        check("4..1024", 4..1024);
        check("4..", 4..u64::MAX);
        check("..4", 0..4);
        check("..", 0..u64::MAX);
        check("4..4", 4..4);
        check("5..4", None);
        check("4", None);
        check("-1..4", None);
        check("4...5", None);
        check("a..", None);
    }
}
