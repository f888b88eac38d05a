//! `kvfs bench`: what a mount costs, measured against the same work on the filesystem below it.
//!
//! Each figure alternates between the mount and plain files on the same disk (kvfs, native, kvfs,
//! native, ...), so that a slow moment of the machine hits both. `value` and `baseline` are
//! medians, `target` is what `value` must reach, computed from the baseline where it is relative.
//!
//! A run in which a read or a write of a passed-through file reached the daemon measured
//! something else, so it fails instead of printing numbers.

mod attention;
mod build;
mod daemon;
mod engines;
mod figure;
mod flat;
mod integrity;
mod interrupt;
mod listing;
mod machine;
mod measure;
mod scale;
mod small;
mod tiers;
mod trace;
mod transfer;
mod unsynced;
mod workplace;

use std::io::Write;
use std::path::PathBuf;

use figure::Figure;
pub use trace::TraceArguments;
use workplace::Workplace;

const BENCH_EXAMPLES: &str = "\
Example:
  kvfs bench tiers --dir /var/tmp
  kvfs bench trace chat.jsonl.gz";

/// Arguments of `kvfs bench`.
#[derive(Debug, clap::Args)]
#[command(after_help = BENCH_EXAMPLES)]
#[allow(clippy::struct_excessive_bools, reason = "each is an option of the command line")]
pub struct BenchArguments {
    /// What to measure
    #[arg(value_enum, default_value = "fs")]
    pub what: What,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// Measure on the filesystem of this directory; some GB are written and removed again
    /// [default: $TMPDIR or /var/tmp]
    #[arg(long, value_name = "DIR")]
    pub dir: Option<PathBuf>,
    /// Few and small files: shows that everything works, not how fast it is
    #[arg(long)]
    pub quick: bool,
    /// With `attention`: on the GPU alone; without one, why, and what needs none
    #[arg(long)]
    pub cuda: bool,
    /// With `--cuda`: pages are files of a plain directory, as where nothing can be mounted
    #[arg(long, requires = "cuda")]
    pub plain: bool,
    /// Write the table to this file too, in Markdown
    #[arg(long, value_name = "FILE")]
    pub markdown: Option<PathBuf>,
    /// Go on without passthrough
    #[arg(long)]
    pub allow_served: bool,
    /// What is replayed.
    #[command(flatten)]
    pub trace: TraceArguments,
}

/// What can be measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum What {
    /// Files: throughput, opening, publishing, listing, memory, mounting, verification
    Fs,
    /// Attention over pages: throughput, accuracy, contexts beyond memory
    Attention,
    /// Tiers: memory, flushing, cold copies, the remote
    Tiers,
    /// What engines do to a cache directory: blocks, lookups, slots, prefixes, following a writer
    Engines,
    /// One flat directory of a million files
    Names,
    /// Small files made as fast as possible, and what others wait for meanwhile; ten minutes
    Small,
    /// What stays in memory or on the disk, replayed on traces of requests, beside other policies
    Trace,
    /// Everything but the last three
    All,
}

/// How much of everything.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    /// Rounds of every figure.
    rounds: usize,
    /// Pages of 4 MiB.
    large_pages: u64,
    /// Pages of 1 MiB.
    medium_pages: u64,
    /// Pages in the directory that is listed.
    listed_pages: u64,
    /// Pages whose names the kernel holds.
    held_pages: u64,
    /// Pages published per round.
    published_pages: u64,
}

const FULL: Sizes = Sizes {
    rounds: 9,
    large_pages: 32,
    medium_pages: 128,
    listed_pages: 10_000,
    held_pages: 100_000,
    published_pages: 16,
};

const QUICK: Sizes = Sizes {
    rounds: 7,
    large_pages: 4,
    medium_pages: 16,
    listed_pages: 500,
    held_pages: 2_000,
    published_pages: 2,
};

/// Measures and prints. The error is one line.
pub fn run(arguments: &BenchArguments) -> Result<(), String> {
    if arguments.cuda && arguments.what != What::Attention {
        return Err("--cuda is for `kvfs bench attention`".to_owned());
    }
    if arguments.what == What::Trace {
        return trace::run(arguments);
    }
    if !arguments.trace.files.is_empty() {
        return Err("files are for `kvfs bench trace`".to_owned());
    }
    interrupt::watch()?;
    let mut figures = Vec::new();
    let mut passthrough = None;
    let mut gpu = None;
    let is_wanted = |what| arguments.what == what || arguments.what == What::All;
    if is_wanted(What::Fs) {
        passthrough = Some(files(arguments, &mut figures)?);
    }
    if is_wanted(What::Attention) {
        let (measured, passed) = if arguments.cuda {
            let workplace = Workplace::make_anywhere(arguments.dir.as_deref())?;
            let outcome = attention::cuda::run(&workplace, arguments.quick, arguments.plain)?;
            gpu = Some((outcome.gpu, outcome.pages));
            (outcome.figures, outcome.passthrough)
        } else {
            let workplace = Workplace::make(arguments.dir.as_deref())?;
            attention::run(&workplace, arguments.quick)?
        };
        figures.extend(measured);
        passthrough = Some(passed);
    }
    if is_wanted(What::Tiers) {
        passthrough = Some(tiers::run(arguments, &mut figures)?);
    }
    if is_wanted(What::Engines) {
        passthrough = Some(engines::run(arguments, &mut figures)?);
    }
    if arguments.what == What::Names {
        passthrough = Some(flat::run(arguments, &mut figures)?);
    }
    if arguments.what == What::Small {
        passthrough = Some(small::run(arguments, &mut figures)?);
    }
    let workplace = Workplace::make_anywhere(arguments.dir.as_deref())?;
    let mut machine = machine::describe(workplace.path(), &passthrough.unwrap_or_default());
    if let Some((gpu, pages)) = gpu {
        machine["gpu"] = gpu.into();
        machine["pages"] = pages.into();
    }
    if let Some(path) = &arguments.markdown {
        std::fs::write(path, figure::markdown(&machine, &figures)).map_err(measure::at(path))?;
    }
    print(arguments.json, &machine, &figures)
}

/// Fails unless the kernel passes files through or the user does not mind.
fn require_passthrough(
    arguments: &BenchArguments, daemon: &daemon::Daemon,
) -> Result<String, String> {
    let passthrough = daemon.passthrough()?;
    if passthrough != "yes" && !arguments.allow_served {
        return Err(format!(
            "the mount has no passthrough ({passthrough}): use --allow-served to measure anyway"
        ));
    }
    Ok(passthrough)
}

/// Whoever asks all mounts of the machine for their status reads in this one meanwhile, with a request or two each time.
/// A file of the benchmark that is not passed through takes some thirty for each pass over it.
const TRANSFERS_OF_OTHERS_MAX: u64 = 100;

/// Figures of files; returns whether the mount had passthrough.
fn files(arguments: &BenchArguments, figures: &mut Vec<Figure>) -> Result<String, String> {
    let sizes = if arguments.quick { QUICK } else { FULL };
    let workplace = Workplace::make(arguments.dir.as_deref())?;
    note("building the store");
    build::build(&workplace, &sizes)?;
    figures.extend(scale::mounting(&workplace, &sizes)?);
    figures.extend(integrity::integrity(&workplace, &sizes)?);
    let mut daemon = daemon::Daemon::start(&workplace)?;
    let passthrough = require_passthrough(arguments, &daemon)?;
    let watch = daemon.watch()?;
    figures.extend(transfer::reading(&workplace, &sizes)?);
    figures.extend(transfer::publishing(&workplace, &sizes)?);
    let transfers = watch.transfers(&daemon)?;
    if passthrough == "yes" && transfers > TRANSFERS_OF_OTHERS_MAX {
        return Err(format!(
            "{transfers} reads and writes reached the daemon: the kernel was to pass them through"
        ));
    }
    figures.extend(listing::listing(&workplace, &sizes)?);
    figures.extend(scale::memory(&workplace, &daemon)?);
    daemon.stop()?;
    Ok(passthrough)
}

fn print(json: bool, machine: &serde_json::Value, figures: &[Figure]) -> Result<(), String> {
    let text = if json {
        let figures: Vec<_> = figures.iter().map(Figure::to_json).collect();
        let document = serde_json::json!({ "machine": machine, "figures": figures });
        format!("{document:#}\n")
    } else {
        figure::table(machine, figures)
    };
    let mut output = std::io::stdout().lock();
    match output.write_all(text.as_bytes()).and_then(|()| output.flush()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
            Err(format!("standard output cannot be written: {error}"))
        }
        _ => Ok(()),
    }
}

/// One line about what is going on, beside the result.
fn note(line: &str) {
    // Nothing is lost if nobody reads it.
    let _ = writeln!(std::io::stderr().lock(), "kvfs bench: {line}");
}
