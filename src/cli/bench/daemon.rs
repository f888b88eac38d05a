//! The daemon that is measured: this program, mounting the store of the workplace.

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use super::workplace::Workplace;
use super::{interrupt, machine};
use crate::cli::series::{Metrics, whole};

/// Longer than this no mount takes that will ever answer.
const START_WAIT_MAX: Duration = Duration::from_secs(60);
/// Between two looks whether the mount answers.
const LOOK_INTERVAL: Duration = Duration::from_micros(500);
/// Between two looks at the status.
const STATUS_INTERVAL: Duration = Duration::from_millis(20);
/// The metrics are some 10 KB; one read gets all of it.
const METRICS_BYTES_MAX: usize = 1 << 20;

/// A mounted store. Unmounted when dropped.
#[derive(Debug)]
pub(super) struct Daemon {
    child: Option<Child>,
    mountpoint: PathBuf,
    /// From the start of the process until the mount answered.
    pub(super) answered_after: Duration,
}

/// The count of reads and writes at some moment.
#[derive(Clone, Copy, Debug)]
pub(super) struct Watch {
    before: u64,
}

impl Watch {
    /// Reads and writes since then.
    pub(super) fn transfers(self, daemon: &Daemon) -> Result<u64, String> {
        let now = count_transfers(&daemon.view("metrics")?);
        Ok(now.saturating_sub(self.before))
    }
}

/// How the daemon is started.
fn command(store: &Path, mountpoint: &Path, options: &[&str]) -> Result<Command, String> {
    let program = std::env::current_exe().map_err(|error| format!("this program: {error}"))?;
    let mut command = Command::new(program);
    command.args(["mount", "--foreground"]).args(options).arg(store).arg(mountpoint);
    command.env("KVFS_LOG", "warn");
    Ok(command)
}

impl Daemon {
    /// Mounts and waits until the mount answers.
    pub(super) fn start(workplace: &Workplace) -> Result<Daemon, String> {
        Daemon::start_with(workplace, &[])
    }

    /// The same with options of `kvfs mount`.
    pub(super) fn start_with(workplace: &Workplace, options: &[&str]) -> Result<Daemon, String> {
        let mountpoint = workplace.mount();
        let start = Instant::now();
        let mut command = command(&workplace.store(), &mountpoint, options)?;
        let child = interrupt::start_daemon(command.stdin(Stdio::null()).stdout(Stdio::null()))
            .map_err(|error| format!("the daemon could not be started: {error}"))?;
        let mut daemon = Daemon { child: Some(child), mountpoint, answered_after: Duration::ZERO };
        let status = daemon.mountpoint.join(".kvfs/status");
        while !status.exists() {
            let child = daemon.child.as_mut().expect("it was started above");
            let ended = child.try_wait().map_err(|error| error.to_string())?;
            if let Some(status) = ended {
                return Err(format!("the daemon ended at its start: {status}"));
            }
            if start.elapsed() > START_WAIT_MAX {
                return Err("the mount does not answer".to_owned());
            }
            thread::sleep(LOOK_INTERVAL);
        }
        daemon.answered_after = start.elapsed();
        Ok(daemon)
    }

    fn view(&self, name: &str) -> Result<String, String> {
        let path = self.mountpoint.join(".kvfs").join(name);
        let mut bytes = vec![0; METRICS_BYTES_MAX];
        let count = File::open(&path)
            .and_then(|mut file| file.read(&mut bytes))
            .map_err(|error| format!("{}: {error}", path.display()))?;
        Ok(String::from_utf8_lossy(&bytes[..count]).into_owned())
    }

    /// A line of the status.
    pub(super) fn status(&self, key: &str) -> Result<String, String> {
        let text = self.view("status")?;
        let line = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(": "));
        line.map(str::to_owned).ok_or_else(|| format!("the status does not tell {key}"))
    }

    /// A line of the status that is a number.
    pub(super) fn status_number(&self, key: &str) -> Result<u64, String> {
        let text = self.status(key)?;
        text.parse().map_err(|_| format!("the status tells {key}: {text}"))
    }

    /// Waits until the status is as wanted.
    pub(super) fn wait_until(
        &self, what: &str, mut is_so: impl FnMut(&Daemon) -> Result<bool, String>,
    ) -> Result<(), String> {
        let start = Instant::now();
        while !is_so(self)? {
            if start.elapsed() > START_WAIT_MAX {
                return Err(format!("waited in vain for {what}"));
            }
            thread::sleep(STATUS_INTERVAL);
        }
        Ok(())
    }

    /// The sum of a metric's values with a label; `None` if it is not told.
    pub(super) fn metric(&self, name: &str, label: (&str, &str)) -> Result<Option<u64>, String> {
        let sum = self.metrics()?.sum(name, &[label]);
        Ok(sum.map(whole))
    }

    /// Number of the process.
    pub(super) fn pid(&self) -> u32 {
        self.child.as_ref().map_or(0, Child::id)
    }

    /// `yes`, or why not. The first open of a file decides.
    pub(super) fn passthrough(&self) -> Result<String, String> {
        let path = self.mountpoint.join("files/passthrough");
        let made = File::create_new(&path).and_then(|_| std::fs::remove_file(&path));
        made.map_err(|error| format!("{}: {error}", path.display()))?;
        self.status("passthrough")
    }

    /// Counts the reads and writes that reach the daemon from now on.
    pub(super) fn watch(&self) -> Result<Watch, String> {
        // The daemon serves its metrics itself: what looking costs is taken off.
        let first = count_transfers(&self.view("metrics")?);
        let before = count_transfers(&self.view("metrics")?);
        Ok(Watch { before: before + before.saturating_sub(first) })
    }

    /// Bytes of memory that the daemon has.
    pub(super) fn resident_bytes(&self) -> Result<u64, String> {
        self.memory("VmRSS")
    }

    /// A line of the daemon's memory in `/proc/PID/status`, in bytes.
    pub(super) fn memory(&self, name: &str) -> Result<u64, String> {
        let line = machine::field(&format!("/proc/{}/status", self.pid()), name);
        let kibibytes = line.and_then(|line| line.split(' ').next()?.parse::<u64>().ok());
        Ok(kibibytes.ok_or("the daemon's memory cannot be read")? * 1024)
    }

    /// Ends the mount in good order.
    pub(super) fn stop(&mut self) -> Result<(), String> {
        unmount(&self.mountpoint, false)?;
        self.wait()
    }

    /// Ends the daemon as a crash would.
    pub(super) fn kill(&mut self) -> Result<(), String> {
        if let Some(child) = &mut self.child {
            child.kill().map_err(|error| error.to_string())?;
        }
        self.wait()?;
        unmount(&self.mountpoint, true)
    }

    /// The same while clients use the mount, whose requests end with errors. The connection goes first: a
    /// thread of the daemon that waits in the kernel for one of them would keep it from ending.
    pub(super) fn kill_in_use(&mut self) -> Result<(), String> {
        if let Some(child) = &mut self.child {
            child.kill().map_err(|error| error.to_string())?;
        }
        let flags = nix::mount::MntFlags::MNT_FORCE | nix::mount::MntFlags::MNT_DETACH;
        if nix::mount::umount2(&self.mountpoint, flags).is_err() {
            unmount(&self.mountpoint, true)?;
        }
        self.wait()
    }

    /// All metrics as of now.
    pub(super) fn metrics(&self) -> Result<Metrics, String> {
        Ok(Metrics::parse(&self.view("metrics")?))
    }

    fn wait(&mut self) -> Result<(), String> {
        if let Some(mut child) = self.child.take() {
            interrupt::daemon_ends(child.id());
            child.wait().map_err(|error| error.to_string())?;
        }
        Ok(())
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = unmount(&self.mountpoint, true);
            let _ = child.kill();
            interrupt::daemon_ends(child.id());
            let _ = child.wait();
        }
    }
}

pub(super) fn unmount(mountpoint: &Path, lazily: bool) -> Result<(), String> {
    let flags =
        if lazily { nix::mount::MntFlags::MNT_DETACH } else { nix::mount::MntFlags::empty() };
    match nix::mount::umount2(mountpoint, flags) {
        Err(nix::errno::Errno::EPERM) => {}
        outcome => return outcome.map_err(|error| format!("{}: {error}", mountpoint.display())),
    }
    let mut helper = Command::new("fusermount3");
    helper.arg(if lazily { "-uz" } else { "-u" }).arg(mountpoint);
    match helper.status() {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("fusermount3: {status}")),
        Err(error) => Err(format!("fusermount3: {error}")),
    }
}

fn count_transfers(metrics: &str) -> u64 {
    let metrics = Metrics::parse(metrics);
    let count = |operation| metrics.sum("kvfs_fuse_requests_total", &[("op", operation)]);
    ["read", "write"].into_iter().filter_map(count).map(whole).sum()
}

/// Drops dentries and inodes that the kernel caches; false where that is not allowed.
pub(super) fn drop_caches() -> bool {
    nix::unistd::sync();
    fs::write("/proc/sys/vm/drop_caches", "2").is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_and_writes_are_counted_and_nothing_else() {
        let metrics = "# TYPE kvfs_fuse_requests_total counter\n\
                       kvfs_fuse_requests_total{op=\"read\",result=\"ok\"} 5\n\
                       kvfs_fuse_requests_total{op=\"read\",result=\"error\"} 2\n\
                       kvfs_fuse_requests_total{op=\"readlink\",result=\"ok\"} 100\n\
                       kvfs_fuse_requests_total{op=\"write\",result=\"ok\"} 1\n\
                       kvfs_opens_total 7\n";
        assert_eq!(count_transfers(metrics), 8);
    }
}
