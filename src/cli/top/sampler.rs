//! Asking a mount again and again what it says of itself, while nothing here ever waits for it.
//!
//! A request to a stuck daemon cannot be interrupted, so a child asks, as in `probe`. It stays, since starting one each
//! second would cost more than the asking: it answers a line on its standard input with a line of JSON. Each time it
//! opens the files anew, so the mount can be unmounted meanwhile.

use std::fs::File;
use std::io::{self, BufRead, ErrorKind, Read, Seek, SeekFrom, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use clap::Args;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use serde::{Deserialize, Serialize};

use crate::cli::history::{AFTER, EVENTS};
use crate::cli::output::{Failure, Outcome, Report};
use crate::cli::probe::{ANSWER_DEADLINE, status_value};

/// The longest of the files is that of the metrics, some 100 kB.
const FILE_BYTES_MAX: usize = 1 << 20;
/// Events that are asked for at most: more than anybody sees at once.
pub(in crate::cli) const EVENTS_MAX: u8 = 50;

/// `kvfs sample`, which asks in the child.
#[derive(Debug, Args)]
pub(crate) struct SampleArguments {
    /// The mountpoint
    mountpoint: PathBuf,
}

/// What a mount says at one time.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(in crate::cli) struct Told {
    /// Why there is nothing else; 0 where there is.
    pub(in crate::cli) errno: i32,
    pub(in crate::cli) status: String,
    pub(in crate::cli) metrics: String,
    /// Those with higher numbers than was asked for.
    pub(in crate::cli) events: String,
    pub(in crate::cli) hottest: String,
}

/// Answers, in the child, until nobody asks any more.
pub(crate) fn answer(arguments: &SampleArguments) -> Outcome {
    let mut questions = io::stdin().lock();
    let mut answers = io::stdout().lock();
    let mut question = String::new();
    loop {
        question.clear();
        if questions.read_line(&mut question).map_err(Failure::failed)? == 0 {
            return Ok(Report::default());
        }
        let after = question.trim().parse().unwrap_or(0);
        let told = look(&arguments.mountpoint, after)
            .unwrap_or_else(|errno| Told { errno, ..Told::default() });
        let mut line = serde_json::to_vec(&told).map_err(Failure::failed)?;
        line.push(b'\n');
        answers.write_all(&line).and_then(|()| answers.flush()).map_err(Failure::failed)?;
    }
}

/// Reads everything once. What a daemon of another version does not have is empty.
fn look(mountpoint: &Path, after: u64) -> Result<Told, i32> {
    let read = |name: &str| read_from(&mountpoint.join(name), 0);
    let status = read(".kvfs/status")
        .map_err(|error| error.raw_os_error().filter(|errno| *errno > 0).unwrap_or(libc::EIO))?;
    let last = status_value(&status, "last_event").and_then(|number| number.parse().ok());
    let after = last.unwrap_or(0_u64).saturating_sub(EVENTS_MAX.into()).max(after);
    let events = if last > Some(after) {
        read_from(&mountpoint.join(EVENTS), AFTER + after).unwrap_or_default()
    } else {
        String::new()
    };
    let [metrics, hottest] =
        [".kvfs/metrics", ".kvfs/hottest"].map(|name| read(name).unwrap_or_default());
    Ok(Told { errno: 0, status, metrics, events, hottest })
}

/// Reads without asking for the size first: the daemon makes the text for that, too.
fn read_from(path: &Path, offset: u64) -> io::Result<String> {
    let mut file = File::open(path)?;
    if offset > 0 {
        file.seek(SeekFrom::Start(offset))?;
    }
    let mut bytes = vec![0; FILE_BYTES_MAX];
    let mut filled = 0;
    while filled < bytes.len() {
        match file.read(&mut bytes[filled..]) {
            Ok(0) => break,
            Ok(count) => filled += count,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(String::from_utf8_lossy(&bytes[..filled]).into_owned())
}

/// The child, and what it has answered so far.
#[derive(Debug)]
pub(super) struct Sampler {
    child: Child,
    questions: ChildStdin,
    answers: ChildStdout,
    received: Vec<u8>,
    asked: Option<Instant>,
}

impl Sampler {
    pub(super) fn start(mountpoint: &Path) -> io::Result<Sampler> {
        let mut child = Command::new("/proc/self/exe")
            .args(["sample", "--"])
            .arg(mountpoint)
            .current_dir("/")
            // Ctrl-C is for whoever shows the answers.
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()?;
        let (Some(questions), Some(answers)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(ErrorKind::BrokenPipe.into());
        };
        fcntl(&answers, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
        Ok(Sampler { child, questions, answers, received: Vec::new(), asked: None })
    }

    /// For how long it has not answered; `None` if nothing was asked.
    pub(super) fn silence(&self) -> Option<Duration> {
        self.asked.map(|asked| asked.elapsed())
    }

    /// Asks for a sample with the events after this number, if nothing is asked yet.
    pub(super) fn ask(&mut self, after_event: u64) -> io::Result<()> {
        if self.asked.is_none() {
            self.questions.write_all(format!("{after_event}\n").as_bytes())?;
            self.asked = Some(Instant::now());
        }
        Ok(())
    }

    /// Where an answer comes.
    pub(super) fn descriptor(&self) -> BorrowedFd<'_> {
        self.answers.as_fd()
    }

    /// The answer, if all of it is here. It fails where the child has ended.
    pub(super) fn receive(&mut self) -> io::Result<Option<Told>> {
        let mut part = [0; 1 << 13];
        loop {
            match self.answers.read(&mut part) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(count) => self.received.extend_from_slice(&part[..count]),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) => return Err(error),
            }
            if self.received.ends_with(b"\n") {
                self.asked = None;
                let line = std::mem::take(&mut self.received);
                return Ok(Some(serde_json::from_slice(&line)?));
            }
        }
        Ok(None)
    }

    /// Asks and waits for the answer; `None` if it does not come in time.
    pub(super) fn ask_and_wait(&mut self, after_event: u64) -> io::Result<Option<Told>> {
        self.ask(after_event)?;
        while let Some(left) = self.silence().and_then(|time| ANSWER_DEADLINE.checked_sub(time)) {
            let mut descriptors = [PollFd::new(self.descriptor(), PollFlags::POLLIN)];
            let left = PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
            match poll(&mut descriptors, left) {
                Ok(0) => break,
                Ok(_) => {}
                Err(nix::errno::Errno::EINTR) => continue,
                Err(errno) => return Err(errno.into()),
            }
            if let Some(told) = self.receive()? {
                return Ok(Some(told));
            }
        }
        Ok(None)
    }

    /// Ends the child, unless it is past killing; then it ends when the daemon does.
    pub(super) fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.try_wait();
    }
}

impl Drop for Sampler {
    fn drop(&mut self) {
        self.kill();
    }
}
