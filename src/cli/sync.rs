//! `kvfs sync`: makes everything in a mount durable, on its disk and if asked to in its remote. sync(2)
//! and syncfs(2) cannot do it, because the kernel does not pass them on to the daemon.

use std::fs::File;
use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use indicatif::ProgressBar;
use kvfs_os::mountinfo;
use serde_json::{Value, json};

use super::arguments::SyncArguments;
use super::output::{EXIT_FAILED, EXIT_OK, Failure, Outcome, Report, bytes};
use super::probe::{self, Answer, Question, status_value};
use super::progress::{self, Scale};
use super::status;

/// How often the mount is asked what its remote lacks.
const LOOK_INTERVAL: Duration = Duration::from_millis(200);

/// Syncs without a deadline unless there is a timeout: like sync(1), it takes as long as it takes, once the mount answers.
pub(crate) fn run(arguments: &SyncArguments) -> Outcome {
    let (mount, _) = mountinfo::kvfs_at(&arguments.mountpoint).map_err(Failure::Failed)?;
    let begin = Instant::now();
    let timeout = arguments.timeout.map(|seconds| Duration::from_secs(seconds.0));
    let synced = match timeout {
        Some(timeout) => sync_within(&mount.mountpoint, timeout),
        None => File::open(&mount.mountpoint).and_then(|root| root.sync_all()),
    };
    match synced {
        Ok(()) if arguments.remote => {
            let bar = progress::bar("uploading", Scale::Bytes(0));
            let waited = wait_for_remote(&mount.mountpoint, (begin, timeout), &bar);
            bar.finish_and_clear();
            waited.map(|waited| waited.report(&mount.mountpoint, arguments.json))
        }
        Ok(()) => {
            let value = to_json(&mount.mountpoint, &Value::Null);
            Ok(Report::answer(arguments.json, &value, String::new()))
        }
        Err(error) => {
            let place = mount.mountpoint.display();
            Err(Failure::Failed(match of_a_death(&mount.mountpoint, &error) {
                Some(told) => {
                    format!(
                        "{place}: {told}: look whether all is there that you wrote, and sync again"
                    )
                }
                None => format!("{place}: {error}"),
            }))
        }
    }
}

/// What a sync tells that failed only for this, which it does once.
pub(super) fn of_a_death(mountpoint: &Path, error: &io::Error) -> Option<&'static str> {
    let status = std::fs::read_to_string(mountpoint.join(".kvfs/status")).ok()?;
    let is_that = error.raw_os_error() == Some(libc::EIO)
        && status_value(&status, "daemon_deaths").is_some()
        && status_value(&status, "state") == Some("ok");
    is_that.then_some(
        "a daemon of this mount has died, and what was changed shortly before may be lost",
    )
}

/// Makes everything durable on the disk; a child asks, which is left behind if the mount does not answer.
fn sync_within(mountpoint: &Path, timeout: Duration) -> io::Result<()> {
    match probe::ask(mountpoint, Question::Sync, timeout)? {
        Answer::Alive(_) => Ok(()),
        Answer::Dead => Err(io::Error::from_raw_os_error(libc::ENOTCONN)),
        Answer::Stuck => {
            let seconds = timeout.as_secs();
            Err(io::Error::other(format!("the mount has not answered within {seconds} s")))
        }
        Answer::Refused(error) => Err(error),
    }
}

fn to_json(mountpoint: &Path, remote: &Value) -> Value {
    json!({ "mountpoint": mountpoint.display().to_string(), "durable": true, "remote": remote })
}

/// What the mount said when the wait for its remote ended.
struct Waited {
    status: String,
    /// What is to be said of it; nothing where the remote has everything.
    told: String,
}

impl Waited {
    fn report(&self, mountpoint: &Path, is_json: bool) -> Report {
        let number =
            |key| status_value(&self.status, key).and_then(|text| text.parse::<u64>().ok());
        let remote = json!({
            "complete": self.told.is_empty(),
            "state": status_value(&self.status, "remote_state"),
            "waiting_files": number("remote_waiting_files"),
            "waiting_bytes": number("remote_waiting_bytes"),
            "given_up_files": number("remote_given_up_files"),
            "given_up_bytes": number("remote_given_up_bytes"),
        });
        let exit = if self.told.is_empty() { EXIT_OK } else { EXIT_FAILED };
        let value = to_json(mountpoint, &remote);
        Report { exit, ..Report::answer(is_json, &value, self.told.clone()) }
    }
}

/// Whether a mount says that its clients may change nothing.
pub(super) fn is_read_only(mountpoint: &Path) -> bool {
    let configuration = std::fs::read_to_string(mountpoint.join(".kvfs/config"));
    configuration.is_ok_and(|text| text.lines().any(|line| line == "read_only = true"))
}

/// Waits until the remote has what its last writer has closed before, and the names of now.
fn wait_for_remote(
    mountpoint: &Path, (begin, timeout): (Instant, Option<Duration>), bar: &ProgressBar,
) -> Result<Waited, Failure> {
    if is_read_only(mountpoint) {
        let place = mountpoint.display();
        return Err(Failure::Failed(format!(
            "{place} is mounted read-only: it sends nothing to its remote, and cannot tell what that lacks"
        )));
    }
    let mut wanted = None;
    loop {
        let status = status::read(mountpoint)?;
        let number = |key| status_value(&status, key).and_then(|text| text.parse::<u64>().ok());
        let Some(changes) = number("remote_names_changes") else {
            let place = mountpoint.display();
            return Err(Failure::Failed(format!("{place} has no remote: mount it with --remote")));
        };
        let looks = number("remote_looks").unwrap_or(0);
        let (wanted, looks_before) = *wanted.get_or_insert((changes, looks));
        let lacks_names = number("remote_names_published").unwrap_or(0) < wanted;
        let lacking = lacking(&status);
        // What it had once says nothing while it does not answer, or after its place was emptied.
        let is_up = status_value(&status, "remote_state") == Some("up") && looks > looks_before;
        if lacking.is_none() && !lacks_names && is_up {
            let told = given_up(&status);
            let told =
                told.map_or_else(String::new, |what| format!("the remote will not have: {what}\n"));
            return Ok(Waited { status, told });
        }
        let waiting = number("remote_waiting_bytes").unwrap_or(0);
        bar.set_length(bar.length().unwrap_or(0).max(waiting));
        bar.set_position(bar.length().unwrap_or(0) - waiting);
        if timeout.is_some_and(|timeout| begin.elapsed() >= timeout) {
            let what = match lacking {
                Some(what) => format!("does not have yet: {what}"),
                None if lacks_names => "does not have yet: the latest names".to_owned(),
                None => "cannot be asked whether it has everything".to_owned(),
            };
            let state = status_value(&status, "remote_state").unwrap_or("unknown");
            let told = format!("the remote ({state}) {what}\n");
            return Ok(Waited { status, told });
        }
        std::thread::sleep(LOOK_INTERVAL);
    }
}

/// What the remote of a mount does not have yet, in words; `None` if that is nothing.
pub(super) fn lacking(status: &str) -> Option<String> {
    let number = |key| status_value(status, key).and_then(|text| text.parse::<u64>().ok());
    let files = number("remote_waiting_files").filter(|files| *files > 0)?;
    let (size, seconds) = (number("remote_waiting_bytes"), number("remote_waiting_seconds"));
    let size = bytes(size.unwrap_or(0));
    Some(format!("{files} files, {size}, the oldest since {} s", seconds.unwrap_or(0)))
}

/// What the remote of a mount will not get as it is, in words, and why.
pub(super) fn given_up(status: &str) -> Option<String> {
    let number = |key| status_value(status, key).and_then(|text| text.parse::<u64>().ok());
    let files = number("remote_given_up_files").filter(|files| *files > 0)?;
    let size = bytes(number("remote_given_up_bytes").unwrap_or(0));
    let why = status_value(status, "remote_given_up_reason").unwrap_or("unknown");
    Some(format!("{files} files, {size}: {why}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_given_up_in_words() {
        let status = "remote_given_up_files: 1\nremote_given_up_bytes: 1024\n\
                      remote_given_up_reason: the remote: refused it\n";
        let expected = "1 files, 1.0 KiB: the remote: refused it";
        assert_eq!(given_up(status).as_deref(), Some(expected));
        assert_eq!(given_up("remote_given_up_files: 0\n"), None);
        assert_eq!(given_up("pid: 1\n"), None);
    }

    #[test]
    fn what_is_lacking_in_words() {
        let status =
            "remote_waiting_files: 2\nremote_waiting_bytes: 2048\nremote_waiting_seconds: 9\n";
        let expected = "2 files, 2.0 KiB, the oldest since 9 s";
        assert_eq!(lacking(status).as_deref(), Some(expected));
        assert_eq!(lacking("remote_waiting_files: 0\n"), None);
        assert_eq!(lacking("pid: 1\n"), None);
    }
}
