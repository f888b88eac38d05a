//! `kvfs doctor`: whether this machine can mount, a store be kept in a directory, a remote be used, an engine
//! keep its KV cache in a mount; and if not, what mends it. One line each.
//!
//! Nothing is mounted, and nothing of an engine is run. What only a mount can prove, its status says.

mod engine;
mod machine;
mod place;

use std::path::PathBuf;

use clap::Args;
use serde_json::json;

use super::output::{EXIT_FAILED, EXIT_OK, Outcome, Report};

/// `kvfs doctor`.
#[derive(Debug, Args)]
#[command(after_help = "Example: kvfs doctor --store /var/lib/kvfs --remote s3://bucket/kv")]
pub(crate) struct DoctorArguments {
    /// A program (llama-server), the number of a running one, or the directory of an engine's libraries [default:
    /// look at this machine]
    engine: Option<PathBuf>,
    /// Look at a directory in which a store is, or is to be made, as well
    #[arg(long, value_name = "DIR", conflicts_with = "engine")]
    store: Option<PathBuf>,
    /// Look at a remote as well: whether it answers, and takes what is put there
    #[arg(long, value_name = "DIR|s3://...", conflicts_with = "engine")]
    remote: Option<String>,
    /// The keys of a remote that is sealed
    #[arg(long, value_name = "FILE", env = "KVFS_REMOTE_KEY", requires = "remote")]
    remote_key: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// How much something matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Level {
    /// As it should be.
    Good,
    /// It works, and could be better.
    Note,
    /// It does not work.
    Bad,
}

impl Level {
    fn word(self) -> &'static str {
        match self {
            Level::Good => "good",
            Level::Note => "note",
            Level::Bad => "bad",
        }
    }
}

/// One thing that was looked at.
#[derive(Debug)]
struct Finding {
    level: Level,
    what: String,
    /// The command or change that makes it good.
    mend: Option<String>,
}

/// What was found, in the order in which it is to be mended.
#[derive(Debug, Default)]
struct Findings(Vec<Finding>);

impl Findings {
    fn good(&mut self, what: &str) {
        self.0.push(Finding { level: Level::Good, what: what.to_owned(), mend: None });
    }

    fn note(&mut self, what: &str, mend: &str) {
        self.add(Level::Note, what, mend);
    }

    fn bad(&mut self, what: &str, mend: &str) {
        self.add(Level::Bad, what, mend);
    }

    fn add(&mut self, level: Level, what: &str, mend: &str) {
        let mend = Some(mend).filter(|mend| !mend.is_empty()).map(str::to_owned);
        self.0.push(Finding { level, what: what.to_owned(), mend });
    }

    fn is_ill(&self) -> bool {
        self.0.iter().any(|finding| finding.level == Level::Bad)
    }

    fn text(&self) -> String {
        let line = |Finding { level, what, mend }: &Finding| {
            let mend = mend.as_ref().map_or_else(String::new, |mend| format!(": {mend}"));
            format!("{:<6}{what}{mend}\n", format!("{}:", level.word()))
        };
        self.0.iter().map(line).collect()
    }

    fn report(&self, as_json: bool) -> Report {
        let mut report = if as_json {
            let finding = |Finding { level, what, mend }: &Finding| json!({ "level": level.word(), "what": what, "mend": mend });
            Report::json(&json!({ "findings": self.0.iter().map(finding).collect::<Vec<_>>() }))
        } else {
            Report::text(self.text())
        };
        report.exit = if self.is_ill() { EXIT_FAILED } else { EXIT_OK };
        report
    }
}

/// Looks, and says what is good and what is not.
pub(crate) fn run(arguments: &DoctorArguments) -> Outcome {
    let mut findings = Findings::default();
    match &arguments.engine {
        Some(engine) => engine::look(&mut findings, engine)?,
        None => machine::look(&mut findings),
    }
    if let Some(store) = &arguments.store {
        place::look_at_store(&mut findings, store);
    }
    if let Some(remote) = &arguments.remote {
        place::look_at_remote(&mut findings, remote, arguments.remote_key.as_deref())?;
    }
    Ok(findings.report(arguments.json))
}
