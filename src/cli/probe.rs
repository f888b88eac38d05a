//! Questions to a mount that may never be answered.
//!
//! A request to a stuck FUSE daemon cannot be interrupted, not even by SIGKILL once the daemon
//! has read it, and a program with one such thread cannot exit. So a child process asks, and is
//! left behind when the deadline passes. Silence means "stuck"; only ENOTCONN means "dead".

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};

use super::output::{EXIT_FAILED, Outcome, Report};
use crate::sys;

/// Time for an answer that needs no disk; a busy machine takes a second.
pub(crate) const ANSWER_DEADLINE: Duration = Duration::from_secs(10);
/// How often a child is looked at: an answer takes about a millisecond.
const POLL_INTERVAL: Duration = Duration::from_millis(2);
/// A status is about a kilobyte; it must fit into a pipe, which is read after the child's end.
const ANSWER_BYTES_MAX: u64 = 32 << 10;

/// What to ask.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum Question {
    /// The text of `.kvfs/status`.
    Status,
    /// The text of `.kvfs/settings`.
    Settings,
    /// To make everything durable.
    Sync,
}

/// `kvfs probe`, which asks in the child.
#[derive(Debug, Args)]
pub(crate) struct ProbeArguments {
    /// What to ask
    question: Question,
    /// The mountpoint
    mountpoint: PathBuf,
}

/// What came back.
#[derive(Debug)]
pub(crate) enum Answer {
    /// The mount answers; the text that was asked for.
    Alive(String),
    /// Its daemon is gone (ENOTCONN).
    Dead,
    /// Nothing came back before the deadline.
    Stuck,
    /// It answers with an error, such as EACCES for somebody else's mount.
    Refused(io::Error),
}

impl Answer {
    /// What an errno, or 0 and a text, mean.
    pub(crate) fn of(errno: i32, text: String) -> Answer {
        match errno {
            0 => Answer::Alive(text),
            errno if sys::is_daemon_gone(errno) => Answer::Dead,
            errno => Answer::Refused(io::Error::from_raw_os_error(errno)),
        }
    }
}

/// Asks in a child process.
pub(crate) fn ask(mountpoint: &Path, question: Question, deadline: Duration) -> io::Result<Answer> {
    let name = question.to_possible_value();
    let mut child = Command::new("/proc/self/exe")
        .arg("probe")
        .arg(name.as_ref().map_or("status", |value| value.get_name()))
        .arg("--")
        .arg(mountpoint)
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()?;
    let Some(code) = wait(&mut child, Instant::now() + deadline)? else {
        // It may be past killing; then it ends when the daemon does.
        let _ = child.kill();
        return Ok(Answer::Stuck);
    };
    let mut text = String::new();
    if let Some(stdout) = child.stdout.take() {
        stdout.take(ANSWER_BYTES_MAX).read_to_string(&mut text)?;
    }
    Ok(Answer::of(code, text))
}

/// The child's exit code, or None at the deadline.
pub(crate) fn wait(child: &mut Child, deadline: Instant) -> io::Result<Option<i32>> {
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status.code().unwrap_or(libc::EINTR)));
        }
        if Instant::now() >= deadline {
            return Ok(None);
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// Asks, in the child: the exit code is 0 or the errno, all of which are below 256 on Linux.
#[expect(clippy::unnecessary_wraps, reason = "it has the form of every command")]
pub(crate) fn answer(arguments: &ProbeArguments) -> Outcome {
    let answer = match arguments.question {
        Question::Status => read_view(&arguments.mountpoint, "status"),
        Question::Settings => read_view(&arguments.mountpoint, "settings"),
        Question::Sync => sync_root(&arguments.mountpoint).map(|()| String::new()),
    };
    Ok(match answer {
        Ok(text) => Report::text(text),
        Err(error) => {
            let errno = error.raw_os_error().and_then(|errno| u8::try_from(errno).ok());
            Report::ending(String::new(), errno.unwrap_or(EXIT_FAILED))
        }
    })
}

fn read_view(mountpoint: &Path, name: &str) -> io::Result<String> {
    let mut text = Vec::new();
    let file = File::open(mountpoint.join(".kvfs").join(name))?;
    file.take(ANSWER_BYTES_MAX).read_to_end(&mut text)?;
    Ok(String::from_utf8_lossy(&text).into_owned())
}

/// Makes everything in a mount durable: FSYNCDIR on its root commits all of it.
fn sync_root(mountpoint: &Path) -> io::Result<()> {
    File::open(mountpoint)?.sync_all()
}

/// The value of a `key: value` line of a status.
pub(crate) fn status_value<'a>(status: &'a str, key: &str) -> Option<&'a str> {
    status.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(": "))
}

/// The daemon's process id and its store, from a status.
pub(crate) fn daemon(status: &str) -> (Option<i32>, &Path) {
    let pid = status_value(status, "pid").and_then(|pid| pid.parse().ok());
    let store = status_value(status, "store").unwrap_or("?");
    (pid, Path::new(OsStr::from_bytes(store.as_bytes())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_of_a_status() {
        let status = "version: 1\npid: 17\nstore: /srv/a: b\nstored_bytes: 5\n";
        assert_eq!(status_value(status, "version"), Some("1"));
        assert_eq!(status_value(status, "store"), Some("/srv/a: b"));
        assert_eq!(status_value(status, "stored"), None);
        assert_eq!(daemon(status), (Some(17), Path::new("/srv/a: b")));
        assert_eq!(daemon(""), (None, Path::new("?")));
    }
}
