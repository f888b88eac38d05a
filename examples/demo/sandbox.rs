//! A temporary directory with a store and a mount, and the programs that work on them.

use std::ffi::OsStr;
use std::fs::{self, OpenOptions};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use kvfs::attention::Shape;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tempfile::TempDir;

use crate::Result;
use crate::printer::Printer;

pub(crate) const STORE: &str = "store";
pub(crate) const MOUNT: &str = "mnt";
pub(crate) const MODEL: &str = "mnt/models/tiny-llama";
const LOG: &str = "kvfs.log";

const SETUP: &str = "install it with mount-scripts/setup.sh";

/// Longest wait for the end of a killed daemon.
const KILL_WAIT_MAX: Duration = Duration::from_secs(10);

/// The directory. Dropping it unmounts and removes everything.
#[derive(Debug)]
pub(crate) struct Sandbox {
    kvfs: PathBuf,
    directory: TempDir,
}

impl Sandbox {
    /// Checks that everything needed is there and makes the directory.
    pub(crate) fn new() -> Result<Self> {
        let fuse = OpenOptions::new().read(true).write(true).open("/dev/fuse");
        fuse.map_err(|error| format!("/dev/fuse cannot be used ({error}): {SETUP}"))?;
        if !is_in_path("rsync") {
            return Err(format!("rsync is missing: {SETUP}").into());
        }
        let sandbox = Self {
            kvfs: find_kvfs()?,
            directory: tempfile::Builder::new().prefix("kvfs-demo-").tempdir()?,
        };
        fs::create_dir(sandbox.path(MOUNT))?;
        Ok(sandbox)
    }

    /// A path in the directory.
    pub(crate) fn path(&self, path: impl AsRef<Path>) -> PathBuf {
        self.directory.path().join(path)
    }

    /// Ends the mount and removes the directory, whatever still uses them.
    pub(crate) fn give_up(&self) -> impl Fn() + Send + use<> {
        let (kvfs, directory) = (self.kvfs.clone(), self.directory.path().to_owned());
        move || {
            detach(&kvfs, &directory);
            let _ = fs::remove_dir_all(&directory);
        }
    }

    /// Prints a command line of kvfs and runs it; returns what it printed.
    pub(crate) fn kvfs(&self, printer: &mut Printer, line: &KvfsLine<'_>) -> Result<String> {
        printer.tell(format_args!("$ kvfs {}", line.shown()))?;
        let mut command = Command::new(&self.kvfs);
        command.args(line.arguments());
        self.output(&mut command)
    }

    /// Prints a command line and runs it; returns what it printed.
    pub(crate) fn run(&self, printer: &mut Printer, line: &str) -> Result<String> {
        printer.tell(format_args!("$ {line}"))?;
        let mut words = line.split(' ');
        let mut command = Command::new(words.next().unwrap_or_default());
        command.args(words);
        self.output(&mut command)
    }

    /// Runs a program in the directory.
    fn output(&self, command: &mut Command) -> Result<String> {
        command.current_dir(self.directory.path());
        command.stdin(Stdio::null());
        let name = Path::new(command.get_program()).file_name();
        let name = name.unwrap_or_default().to_string_lossy().into_owned();
        let output = command.output().map_err(|error| format!("{name}: {error}"))?;
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr);
            return Err(format!("{name} ended with {}: {}", output.status, said.trim()).into());
        }
        Ok(String::from_utf8(output.stdout)?)
    }

    /// Kills the daemon with SIGKILL and waits until the mount is dead. Returns its process id.
    pub(crate) fn kill_daemon(&self) -> Result<i32> {
        let status = self.path(MOUNT).join(".kvfs/status");
        let text = fs::read_to_string(&status)?;
        let pid = text.lines().find_map(|line| line.strip_prefix("pid: "));
        let pid: i32 = pid.ok_or("the status has no pid")?.parse()?;
        kill(Pid::from_raw(pid), Signal::SIGKILL)?;
        let deadline = Instant::now() + KILL_WAIT_MAX;
        while is_alive(pid) || fs::read(&status).is_ok() {
            if Instant::now() > deadline {
                return Err(format!("the daemon (pid {pid}) survived SIGKILL").into());
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(pid)
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        let mut command = Command::new(&self.kvfs);
        command.args(KvfsLine::Umount.arguments());
        if is_mounted(self.directory.path()) && self.output(&mut command).is_err() {
            detach(&self.kvfs, self.directory.path());
        }
    }
}

/// The command lines of kvfs that the demo uses.
#[derive(Debug)]
pub(crate) enum KvfsLine<'a> {
    Mount,
    Umount,
    Create { shape: Shape, layers: usize, page_tokens: usize },
    Inspect(&'a str),
}

impl KvfsLine<'_> {
    /// As a person types it.
    fn shown(&self) -> String {
        match self {
            Self::Mount => format!("mount {STORE} {MOUNT}"),
            Self::Umount => format!("umount {MOUNT}"),
            Self::Create { shape, layers, page_tokens } => format!(
                "create {MODEL} --layers {layers} --kv-heads {} --head-dim {} --page-tokens {page_tokens}",
                shape.num_kv_heads(),
                shape.head_dim()
            ),
            Self::Inspect(path) => format!("inspect {path}"),
        }
    }

    fn arguments(&self) -> Vec<String> {
        let mut words: Vec<String> = self.shown().split(' ').map(str::to_owned).collect();
        if let Self::Mount = self {
            // Otherwise the log would outlive the demo.
            words.extend(["--log".to_owned(), LOG.to_owned()]);
        }
        words
    }
}

/// Takes the mount away, whoever uses it.
fn detach(kvfs: &Path, directory: &Path) {
    let mountpoint = directory.join(MOUNT);
    let lines: [(&OsStr, &[&str]); 3] = [
        (kvfs.as_os_str(), &["umount", "--lazy"]),
        ("fusermount3".as_ref(), &["-u", "-z"]),
        ("umount".as_ref(), &["-l"]),
    ];
    for (program, arguments) in lines {
        if !is_mounted(directory) {
            return;
        }
        let mut command = Command::new(program);
        command.args(arguments).arg(&mountpoint);
        // Another one follows.
        let _ = command.stdin(Stdio::null()).output();
    }
}

/// Whether a process still has anything open; a zombie has not.
fn is_alive(pid: i32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat.rsplit_once(") ").map_or("", |(_, state)| state);
    !state.is_empty() && !state.starts_with(['Z', 'X'])
}

/// Whether something is mounted there, dead or alive. The mount itself is not asked.
fn is_mounted(directory: &Path) -> bool {
    let mountpoint = directory.join(MOUNT);
    let mountpoint = fs::canonicalize(directory).map_or(mountpoint, |path| path.join(MOUNT));
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    mounts.lines().any(|line| line.split(' ').nth(4).map(Path::new) == Some(&mountpoint))
}

/// The program beside this example: `target/release/kvfs` for `target/release/examples/demo`.
fn find_kvfs() -> Result<PathBuf> {
    if let Some(path) = std::env::var_os("CARGO_BIN_EXE_kvfs") {
        return Ok(path.into());
    }
    let own = std::env::current_exe()?;
    let profile = own.ancestors().nth(2).ok_or("not in a target directory")?;
    let path = profile.join("kvfs");
    if path.is_file() {
        return Ok(path);
    }
    let path = path.display();
    Err(format!("{path} does not exist: run cargo build with the same profile first").into())
}

fn is_in_path(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|directory| directory.join(program).is_file())
}
