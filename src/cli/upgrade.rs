//! `kvfs upgrade`: the daemon of a mount is exchanged for another program while the mount is used.

use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use clap::Args;
use kvfs_os::mountinfo;
use serde_json::json;

use super::config_command::converse;
use super::output::{EXIT_FAILED, EXIT_OK, Failure, Outcome, Report};
use super::probe::{ANSWER_DEADLINE, Answer, Question, ask, status_value, wait};
use super::status;

/// How often the mount is asked what came of it.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);
/// The daemon gives up earlier.
const DEADLINE: Duration = Duration::from_secs(90);

const UPGRADE_HELP: &str = "\
Programs that use the mount notice nothing but a pause of some tenths of a second: files stay open and mapped, and \
what they ask for meanwhile is answered by the new daemon. The process keeps its number. Before anything else the program \
must say that it can go on with this mount and would give it the same settings; if it cannot, or anything fails before the \
exchange, the old daemon goes on.

Refused, among others: a mount that is read-only, or whose requests come through io_uring while its daemon has no thread on \
some processor; a scrub or gc that runs; open files in blocks/ and slots/, and open questions. \
There: kvfs umount and kvfs mount. Metrics count anew. Only a process may that could run the program as the daemon does: of \
root or the daemon's user, with its capabilities and in its namespaces.

Example:
  install -m 755 kvfs.new /usr/bin/kvfs && kvfs upgrade /mnt/kv";

/// `kvfs upgrade`.
#[derive(Debug, Args)]
#[command(after_help = UPGRADE_HELP)]
pub(crate) struct UpgradeArguments {
    /// The program that goes on; without it, what is now where the daemon's program was
    #[arg(long, value_name = "FILE")]
    program: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Where the cache is mounted
    mountpoint: PathBuf,
    /// This is the child that asks
    #[arg(long, hide = true)]
    asks: bool,
}

/// Exchanges the daemon. A child asks for it, which can be left behind where no daemon answers any more.
pub(crate) fn run(arguments: &UpgradeArguments) -> Outcome {
    if arguments.asks {
        return exchange(arguments);
    }
    let failed = |error: io::Error| Failure::failed(format!("kvfs upgrade: {error}"));
    let mut child = Command::new("/proc/self/exe");
    child.arg("upgrade").arg("--asks").stdin(Stdio::null());
    if let Some(program) = &arguments.program {
        child.arg("--program").arg(program);
    }
    let mut child = child.arg("--").arg(&arguments.mountpoint).spawn().map_err(failed)?;
    if let Some(code) = wait(&mut child, Instant::now() + DEADLINE).map_err(failed)? {
        let exit = u8::try_from(code).unwrap_or(EXIT_FAILED);
        if exit != EXIT_OK || !arguments.json {
            return Ok(Report::ending(String::new(), exit));
        }
        let (mount, _) = mountinfo::kvfs_at(&arguments.mountpoint).map_err(Failure::Failed)?;
        let status = status::read(&mount.mountpoint)?;
        let number = |key| status_value(&status, key).and_then(|text| text.parse::<u64>().ok());
        let value = json!({
            "mountpoint": mount.mountpoint.display().to_string(),
            "pid": number("pid"),
            "version": status_value(&status, "version"),
        });
        return Ok(Report::json(&value));
    }
    // It may be past killing; then it ends when the daemon does.
    let _ = child.kill();
    let (place, seconds) = (arguments.mountpoint.display(), DEADLINE.as_secs());
    Err(Failure::Failed(format!(
        "{place}: its daemon has not said within {seconds} seconds what came of it: see its log"
    )))
}

fn exchange(arguments: &UpgradeArguments) -> Outcome {
    let (mount, _) = mountinfo::kvfs_at(&arguments.mountpoint).map_err(Failure::Failed)?;
    let program = arguments.program.as_ref().map(std::path::absolute).transpose();
    let program = program.map_err(|error| Failure::failed(format!("--program: {error}")))?;
    let program = match program.as_deref().map(Path::to_str) {
        Some(None) => return Err(Failure::Usage("--program is not UTF-8".to_owned())),
        Some(Some(program)) => program.to_owned(),
        None => String::new(),
    };
    let place = &mount.mountpoint;
    is_answering(place)?;
    let told = |error: io::Error| told(place, &error);
    let begun = converse(place, &format!("upgrade\n{program}")).map_err(told)?;
    if begun.starts_with("error: ") && begun.contains("no setting") {
        return Err(Failure::Failed(format!(
            "{}: its daemon is of an older version, which cannot be exchanged: unmount, and mount again",
            place.display()
        )));
    }
    check(place, &begun)?;
    loop {
        std::thread::sleep(LOOK_INTERVAL);
        let outcome = converse(place, "upgrade?\n").map_err(told)?;
        check(place, &outcome)?;
        if outcome.starts_with("ok ") {
            return Ok(Report::default());
        }
        if outcome.starts_with("none") {
            return Err(Failure::Failed(format!(
                "{}: not exchanged: the daemon has died, and another one goes on: try again",
                place.display()
            )));
        }
    }
}

fn is_answering(mountpoint: &Path) -> Result<(), Failure> {
    let place = mountpoint.display();
    let answer = ask(mountpoint, Question::Settings, ANSWER_DEADLINE);
    match answer.map_err(|error| Failure::failed(format!("{place}: {error}")))? {
        Answer::Alive(_) => Ok(()),
        Answer::Refused(error) => Err(told(mountpoint, &error)),
        Answer::Dead => Err(Failure::Failed(format!(
            "the daemon of {place} is gone: mount the store again, which clears it"
        ))),
        Answer::Stuck => Err(Failure::Failed(format!(
            "{place} does not answer within {} seconds",
            ANSWER_DEADLINE.as_secs()
        ))),
    }
}

fn check(mountpoint: &Path, answer: &str) -> Result<(), Failure> {
    match answer.strip_prefix("error: ") {
        Some(why) => {
            Err(Failure::Failed(format!("{}: not exchanged: {}", mountpoint.display(), why.trim())))
        }
        None => Ok(()),
    }
}

fn told(mountpoint: &Path, error: &io::Error) -> Failure {
    let place = mountpoint.display();
    Failure::Failed(match error.raw_os_error() {
        Some(libc::EACCES | libc::EPERM) => {
            format!("{place}: only root and the user of its daemon may exchange it")
        }
        Some(libc::ENOENT) => format!(
            "{place}: .kvfs/settings is not there: the mount has ended, or only a part of it lies here"
        ),
        _ => format!("{place}: {error}"),
    })
}
