//! Tests run as threads of one process, and a program that one of them starts holds, between fork
//! and exec, a copy of every descriptor. For a file system that counts writers that is a writer
//! more. So programs are started by [`spawn`] only, and never while somebody holds [`no_forks`].

use std::cell::Cell;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::sync::{OnceLock, PoisonError, RwLock, RwLockReadGuard};

static FORKS: RwLock<()> = RwLock::new(());

thread_local! {
    static DEPTH: Cell<u32> = const { Cell::new(0) };
}

/// While it lives, no descriptor of this process is copied into another.
#[derive(Debug)]
pub(crate) struct NoForks {
    _outermost: Option<RwLockReadGuard<'static, ()>>,
}

/// Keeps the process from forking. May be nested.
pub(crate) fn no_forks() -> NoForks {
    let depth = DEPTH.get();
    DEPTH.set(depth + 1);
    let lock = || FORKS.read().unwrap_or_else(PoisonError::into_inner);
    NoForks { _outermost: (depth == 0).then(lock) }
}

impl Drop for NoForks {
    fn drop(&mut self) {
        DEPTH.set(DEPTH.get() - 1);
    }
}

/// A shell command of another user, to be started in a directory.
pub(crate) fn shell_as(directory: &Path, user: u32, script: &str) -> Command {
    let mut command = Command::new("setpriv");
    let ids = [format!("--reuid={user}"), format!("--regid={user}")];
    command.args(ids).args(["--clear-groups", "sh", "-c", script]);
    command.current_dir(directory).env("LC_ALL", "C");
    command
}

/// Starts a program.
pub(crate) fn spawn(command: &mut Command) -> io::Result<Child> {
    assert_eq!(DEPTH.get(), 0, "forks are forbidden here");
    let _alone = FORKS.write().unwrap_or_else(PoisonError::into_inner);
    spawn_alone(command)
}

/// Starts a program, and waits until it has closed its copies of our descriptors: this process goes on
/// when the program's memory is another (`posix_spawn`), which is before that.
fn spawn_alone(command: &mut Command) -> io::Result<Child> {
    /// A small number, kept for the descriptor that is the last one of a program to be let go: it closes
    /// them in ascending order, and the kernel works what was closed off backwards (`task_work_run`).
    static LAST: OnceLock<OwnedFd> = OnceLock::new();
    let nothing = File::open("/dev/null")?;
    let last = LAST.get_or_init(|| nothing.try_clone().unwrap().into());
    let (reader, writer) = io::pipe()?;
    place_at(&writer, last)?;
    drop(writer);
    let child = command.spawn();
    place_at(&nothing, last)?;
    let end = { reader }.read(&mut [0]);
    assert_eq!(end?, 0, "nobody writes to this pipe");
    child
}

/// dup3(2): the number of one descriptor leads to the file of another.
fn place_at(file: impl AsFd, number: &OwnedFd) -> io::Result<()> {
    // SAFETY: the number stays its owner's, whatever file it leads to.
    let number = unsafe { OwnedFd::from_raw_fd(number.as_raw_fd()) };
    let mut number = std::mem::ManuallyDrop::new(number);
    Ok(nix::unistd::dup3(file, &mut number, nix::fcntl::OFlag::O_CLOEXEC)?)
}

/// Starts a program that inherits a copy of a descriptor, and nobody else does.
pub(crate) fn spawn_with(command: &mut Command, file: &File) -> io::Result<Child> {
    assert_eq!(DEPTH.get(), 0, "forks are forbidden here");
    let _alone = FORKS.write().unwrap_or_else(PoisonError::into_inner);
    // std marks its descriptors to be closed by exec.
    let copy = nix::fcntl::fcntl(file, nix::fcntl::FcntlArg::F_DUPFD(3))?;
    let child = spawn_alone(command);
    nix::unistd::close(copy)?;
    child
}

/// Runs a program to its end.
pub(crate) fn output(command: &mut Command) -> Output {
    command.stdin(Stdio::null());
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    spawn(command).unwrap().wait_with_output().unwrap()
}

/// Runs a program that must succeed and returns what it printed.
#[track_caller]
pub(crate) fn succeed(command: &mut Command) -> String {
    let output = output(command);
    assert!(
        output.status.success(),
        "{command:?}: {}\n{}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Runs a shell script that must succeed in a directory and returns what it printed.
#[track_caller]
pub(crate) fn shell(directory: &std::path::Path, script: &str) -> String {
    succeed(Command::new("sh").args(["-euc", script]).current_dir(directory))
}
