//! A temporary directory with a store, a remote and a mount, and the commands that work on them. However the
//! demonstration ends, nothing of it stays: no mount, no daemon, no file.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{SigSet, Signal, kill};
use nix::sys::statvfs::statvfs;
use nix::unistd::Pid;
use tempfile::TempDir;

use crate::cli::output::{bytes, complain};
use crate::cli::process::Process;
use crate::cli::unmount::{How, unmount};
use crate::cli::{preflight, stale};

/// Where the store is mounted, in the directory.
pub(super) const MOUNT: &str = "mnt";
const STORE: &str = "store";
const REMOTE: &str = "remote";
const LOG: &str = "kvfs.log";

/// What store and remote take, and the reserve of the store.
const DISK_BYTES: u64 = 64 << 20;
/// Longest wait for the end of a killed daemon.
const END_WAIT_MAX: Duration = Duration::from_secs(10);
const LOOK_INTERVAL: Duration = Duration::from_millis(1);

/// Who runs a command or takes everything away has it. A signal keeps it to the end, so that nothing is begun anew,
/// and whoever finds the mount gone stops here instead of calling that a failure.
static TURN: Mutex<()> = Mutex::new(());

pub(super) fn turn() -> MutexGuard<'static, ()> {
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The directory. Dropping it unmounts and removes everything.
#[derive(Debug)]
pub(super) struct Sandbox {
    program: PathBuf,
    directory: TempDir,
}

impl Sandbox {
    /// Checks that there is what it takes, and makes the directory for this user alone.
    pub(super) fn new() -> Result<Sandbox, String> {
        preflight::device()?;
        let signals = hold_signals()?;
        let program = std::env::current_exe().map_err(|error| format!("this program: {error}"))?;
        let parent = std::env::temp_dir();
        let elsewhere = |what: String| format!("{}: {what}: set TMPDIR", parent.display());
        let disk = statvfs(&parent).map_err(|error| elsewhere(error.to_string()))?;
        let free = disk.blocks_available() * disk.fragment_size();
        if free < DISK_BYTES {
            let (free, needed) = (bytes(free), bytes(DISK_BYTES));
            return Err(elsewhere(format!("{free} are free, and this takes {needed}")));
        }
        let directory = tempfile::Builder::new().prefix("kvfs-demo-").tempdir_in(&parent);
        let directory = directory.map_err(|error| elsewhere(error.to_string()))?;
        for name in [MOUNT, REMOTE] {
            let path = directory.path().join(name);
            fs::create_dir(&path).map_err(|error| elsewhere(error.to_string()))?;
        }
        let sandbox = Sandbox { program, directory };
        sandbox.watch(signals)?;
        Ok(sandbox)
    }

    /// Where everything is.
    pub(super) fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// A path in the directory.
    pub(super) fn path(&self, path: impl AsRef<Path>) -> PathBuf {
        self.directory.path().join(path)
    }

    /// The arguments that mount it.
    pub(super) fn mount_line() -> String {
        format!("mount --remote {REMOTE} {STORE} {MOUNT}")
    }

    /// Runs this program in the directory; gives what it printed, or the line that says why it failed.
    pub(super) fn kvfs(&self, line: &str) -> Result<String, String> {
        let _turn = turn();
        output(kvfs(&self.program, self.directory.path()).args(line.split(' ')))
    }

    /// Runs another program there.
    pub(super) fn run(&self, line: &str) -> Result<String, String> {
        let _turn = turn();
        let mut words = line.split(' ');
        let mut command = Command::new(words.next().unwrap_or_default());
        output(command.args(words).current_dir(self.directory.path()))
    }

    /// Kills the daemon and waits for its end; gives its number.
    pub(super) fn kill_daemon(&self) -> Result<i32, String> {
        let _turn = turn();
        let path = self.path(MOUNT).join(".kvfs/status");
        let status = fs::read_to_string(&path).map_err(|error| error.to_string())?;
        let pid = status.lines().find_map(|line| line.strip_prefix("pid: ")?.parse().ok());
        let daemon = pid.and_then(Process::find).ok_or("the status tells no daemon")?;
        kill(Pid::from_raw(daemon.pid()), Signal::SIGKILL).map_err(|error| error.to_string())?;
        if daemon.wait_for_exit(END_WAIT_MAX) {
            return Ok(daemon.pid());
        }
        Err(format!("the daemon (pid {}) survived SIGKILL", daemon.pid()))
    }

    /// Ends everything at a signal.
    fn watch(&self, signals: SigSet) -> Result<(), String> {
        let (program, directory) = (self.program.clone(), self.directory.path().to_owned());
        let wait = move || {
            let Ok(signal) = signals.wait() else { return };
            // A second one does not wait for what follows.
            let _ = signals.thread_unblock();
            let _turn = turn();
            take_away(&program, &directory);
            let _ = fs::remove_dir_all(&directory);
            complain("kvfs", "interrupted: the mount and everything in it are removed");
            std::process::exit(128 + signal as i32);
        };
        let thread = thread::Builder::new().name("kvfs-signals".to_owned());
        thread.spawn(wait).map(drop).map_err(|error| format!("a thread: {error}"))
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        let _turn = turn();
        take_away(&self.program, self.directory.path());
    }
}

/// Before any other thread starts: they all inherit that signals are held back.
fn hold_signals() -> Result<SigSet, String> {
    let signals = [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP];
    let signals: SigSet = signals.into_iter().collect();
    signals.thread_block().map_err(|error| format!("signals: {error}"))?;
    Ok(signals)
}

/// This program, with no setting from outside: a variable must not lead it to the remote of somebody. The kernel's
/// parameter for rings stays as it is.
fn kvfs(program: &Path, directory: &Path) -> Command {
    let mut command = Command::new(program);
    for (name, _) in std::env::vars_os() {
        if name.as_encoded_bytes().starts_with(b"KVFS_") {
            command.env_remove(name);
        }
    }
    command.env("KVFS_LOG_FILE", directory.join(LOG)).env("KVFS_IO_URING", "no");
    command.current_dir(directory);
    command
}

fn output(command: &mut Command) -> Result<String, String> {
    let name = Path::new(command.get_program()).file_name().unwrap_or_default();
    let name = name.to_string_lossy().into_owned();
    let ended = command.stdin(Stdio::null()).output();
    let ended = ended.map_err(|error| format!("{name}: {error}"))?;
    if ended.status.success() {
        return Ok(String::from_utf8_lossy(&ended.stdout).into_owned());
    }
    let said = String::from_utf8_lossy(&ended.stderr);
    match said.trim().lines().next_back() {
        Some(line) => Err(line.strip_prefix("kvfs: ").unwrap_or(line).to_owned()),
        None => Err(format!("{name} ended with {}", ended.status)),
    }
}

/// Ends the mount, whoever uses it, and waits until its daemon has let go of the store.
fn take_away(program: &Path, directory: &Path) {
    let _ = output(kvfs(program, directory).args(["umount", "--force", MOUNT]));
    let mountpoint = directory.canonicalize().unwrap_or_else(|_| directory.to_owned()).join(MOUNT);
    // Where that has failed; mostly there is nothing left to unmount.
    let _ = unmount(&mountpoint, How::Abort);
    let end = Instant::now() + END_WAIT_MAX;
    while stale::is_locked(&directory.join(STORE)) && Instant::now() < end {
        thread::sleep(LOOK_INTERVAL);
    }
}
