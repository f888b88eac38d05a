//! System calls of a running daemon fail, or end it (`strace --inject`).

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use super::{Mount, eventually, forks};

/// strace, attached to a daemon.
pub(crate) struct Injection {
    strace: Child,
    log: PathBuf,
}

impl Injection {
    /// From now on, `what` (such as `error=EIO:when=3+`) happens to these system calls.
    pub(crate) fn into(mount: &Mount, calls: &str, what: &str) -> Injection {
        let log = mount.beside("strace.log");
        let mut command = Command::new("strace");
        command.args(["-f", "-qq", "-o"]).arg(&log);
        command.args(["-e", &format!("trace={calls}"), "-e", &format!("inject={calls}:{what}")]);
        command.args(["-p", &mount.pid().to_string()]);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let strace = forks::spawn(&mut command).unwrap();
        eventually("strace to be attached", || is_traced(mount.pid()).then_some(()));
        Injection { strace, log }
    }

    /// Ends it after its daemon was killed: strace itself would wait for the end of its delays.
    pub(crate) fn kill(mut self) {
        self.strace.kill().unwrap();
        self.strace.wait().unwrap();
    }

    /// Ends it; how often something was injected. A call that is on its way then may end with ENOSYS: strace has
    /// made it one that does not exist, and is gone before it puts the error in (7 of 20 times for a busy process).
    pub(crate) fn end(mut self) -> usize {
        // SIGTERM lets it detach.
        let pid = nix::unistd::Pid::from_raw(i32::try_from(self.strace.id()).unwrap());
        let _ = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM);
        self.strace.wait().unwrap();
        self.count()
    }

    /// How often something was injected so far.
    pub(crate) fn count(&self) -> usize {
        let log = std::fs::read(&self.log).unwrap_or_default();
        String::from_utf8_lossy(&log).matches("(INJECTED)").count()
    }
}

/// Whether all threads of a process are traced, or it has ended because of that.
fn is_traced(pid: u32) -> bool {
    let tasks = PathBuf::from(format!("/proc/{pid}/task"));
    let is_traced = |task: &Path| {
        let status = std::fs::read_to_string(task.join("status")).unwrap_or_default();
        let field = |name| status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
        let has_ended = field("State:").is_none_or(|state| state.starts_with('Z'));
        has_ended || field("TracerPid:").is_some_and(|tracer| tracer != "0")
    };
    let Ok(tasks) = std::fs::read_dir(tasks) else { return false };
    tasks.flatten().all(|task| is_traced(&task.path()))
}
