//! `kvfs slots watch` as a process of its own.

use std::fs::File;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::common::mount::scratch_directory;
use crate::common::{eventually, forks, within};

/// What the command promises, and what a busy machine adds to it.
const ENDS_WITHIN: Duration = Duration::from_millis(2000 + 1500);

/// A running one.
pub(crate) struct Watch {
    process: Child,
    directory: tempfile::TempDir,
}

impl Watch {
    /// Looks five times a second.
    pub(crate) fn start(address: &str, slots: &Path, model: &Path) -> Watch {
        let directory = scratch_directory();
        let output = |name: &str| File::create(directory.path().join(name)).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvfs"));
        command.args(["slots", "watch", "--interval", "200ms", "--server", address]);
        command.arg("--directory").arg(slots).arg(model).stdin(Stdio::null());
        command.stdout(output("stdout")).stderr(output("stderr"));
        Watch { process: forks::spawn(&mut command).unwrap(), directory }
    }

    fn read(&self, name: &str) -> String {
        std::fs::read_to_string(self.directory.path().join(name)).unwrap()
    }

    /// What it did.
    pub(crate) fn said(&self) -> String {
        self.read("stdout")
    }

    /// What was wrong.
    pub(crate) fn complained(&self) -> String {
        self.read("stderr")
    }

    /// Waits until it has said something so many times.
    #[track_caller]
    pub(crate) fn wait_for(&self, text: &str, times: usize) {
        eventually(&format!("{times} times {text:?} of {}", self.said()), || {
            (self.said().matches(text).count() >= times).then_some(())
        });
    }

    /// Waits until it has complained of something.
    #[track_caller]
    pub(crate) fn wait_for_complaint(&self, text: &str) {
        let found = within(Duration::from_secs(30), "a complaint", || {
            let complained = self.complained();
            complained.contains(text).then_some(complained)
        });
        // Each thing once, although it is found again at each look.
        std::thread::sleep(Duration::from_millis(600));
        assert_eq!(found.matches(text).count(), 1, "{found}");
        assert_eq!(self.complained().matches(text).count(), 1, "{}", self.complained());
    }

    /// Tells it to end, and waits for that.
    #[track_caller]
    pub(crate) fn end(mut self) -> (String, String) {
        let pid = Pid::from_raw(self.process.id().try_into().unwrap());
        kill(pid, Signal::SIGTERM).unwrap();
        let ended = within(ENDS_WITHIN, "the watch to end", || self.process.try_wait().unwrap());
        assert!(ended.success(), "{ended}: {}", self.complained());
        (self.said(), self.complained())
    }

    /// Ends it as a crash would.
    pub(crate) fn kill(mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }

    /// Waits until it ends by itself.
    pub(crate) fn ended(mut self) -> (ExitStatus, String) {
        let ended = eventually("the watch to end", || self.process.try_wait().unwrap());
        (ended, self.complained())
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("the watch said:\n{}{}", self.said(), self.complained());
        }
        // It has ended where a test came to its end.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// A port that nobody has.
pub(crate) fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// The sequences of a model.
pub(crate) fn sequences(model: &Path) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir(model.join("sequences")) else { return Vec::new() };
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.collect();
    names.sort();
    names
}

/// Files in a directory.
pub(crate) fn files(directory: &Path) -> Vec<PathBuf> {
    std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()).collect()
}
