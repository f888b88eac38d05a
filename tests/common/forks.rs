//! Tests run as threads of one process, and a program that one of them starts holds, between fork
//! and exec, a copy of every descriptor. For a file system that counts writers that is a writer
//! more. So programs are started by [`spawn`] only, and never while somebody holds [`no_forks`].

use std::cell::Cell;
use std::fs::File;
use std::io;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::sync::{PoisonError, RwLock, RwLockReadGuard};

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
    command.spawn()
}

/// Starts a program that inherits a copy of a descriptor, and nobody else does.
pub(crate) fn spawn_with(command: &mut Command, file: &File) -> io::Result<Child> {
    assert_eq!(DEPTH.get(), 0, "forks are forbidden here");
    let _alone = FORKS.write().unwrap_or_else(PoisonError::into_inner);
    // std marks its descriptors to be closed by exec.
    let copy = nix::fcntl::fcntl(file, nix::fcntl::FcntlArg::F_DUPFD(3))?;
    let child = command.spawn();
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
