//! A mount with a daemon of its own.

use std::fs::File;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use super::{eventually, forks};

/// Longest time for which a request may work on the thread that took it; `KVFS_REQUEST_LIMIT_MS` is
/// another one, for a slower machine.
const WORKED_MAX_MS: u64 = 20;
/// Longest time for which it may hold that thread, waiting included: whoever has the lock that it waits for
/// may be one of many threads that these tests let run on two cores with one disk.
const HELD_MAX_MS: u64 = 1000;

/// How long a daemon that was killed may take to end: the kernel takes its rings and its memory down.
const KILLED_ENDS_WITHIN: Duration = Duration::from_secs(30);

/// Who moves the bytes of ordinary files and pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// The kernel.
    Passthrough,
    /// The daemon.
    Served,
}

/// A mounted store. Dropping it unmounts; the directory goes as well.
#[derive(Debug)]
pub(crate) struct Mount {
    mode: Mode,
    options: Vec<String>,
    environment: Vec<(String, String)>,
    /// How many files the daemon may have open.
    open_files_max: Option<u32>,
    /// Why requests may hold their thread for long.
    slow_because: Option<&'static str>,
    daemon: Option<Child>,
    store: PathBuf,
    mountpoint: PathBuf,
    directory: tempfile::TempDir,
}

/// How the daemon is started; it stays in the foreground.
fn daemon_command(mode: Mode, options: &[String], store: &Path, mountpoint: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvfs"));
    command.args(["mount", "--foreground"]);
    if nix::unistd::geteuid().is_root() {
        command.arg("--allow-other");
    }
    if mode == Mode::Served {
        command.arg("--no-passthrough");
    }
    command.args(options).arg(store).arg(mountpoint);
    command
}

/// The same command, which may have so many files open and cannot give itself more.
pub(crate) fn limited(command: &Command, open_files_max: u32) -> Command {
    let mut limited = Command::new("setpriv");
    limited.args(["--bounding-set", "-sys_resource", "prlimit"]);
    limited.arg(format!("--nofile={open_files_max}:{open_files_max}"));
    limited.arg(command.get_program()).args(command.get_args());
    limited
}

/// The parent of a process.
fn parent(pid: &str) -> Option<String> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    status.lines().find_map(|line| line.strip_prefix("PPid:")).map(|pid| pid.trim().to_owned())
}

/// An empty directory on a real disk filesystem.
pub(crate) fn scratch_directory() -> tempfile::TempDir {
    let base = std::env::var_os("KVFS_TEST_DIR")
        .map_or_else(|| PathBuf::from(env!("CARGO_TARGET_TMPDIR")), PathBuf::from);
    std::fs::create_dir_all(&base).unwrap();
    tempfile::Builder::new().prefix("kvfs-").tempdir_in(base).unwrap()
}

/// Mounts an overlay whose layers lie in a directory, and returns where; the error is mount(8)'s.
pub(crate) fn mount_overlay(base: &Path) -> Result<PathBuf, String> {
    for name in ["lower", "upper", "work", "merged"] {
        std::fs::create_dir(base.join(name)).unwrap();
    }
    let at = |name: &str| base.join(name).display().to_string();
    let options =
        format!("lowerdir={},upperdir={},workdir={}", at("lower"), at("upper"), at("work"));
    let mut command = Command::new("mount");
    command.args(["-t", "overlay", "overlay", "-o", &options, &at("merged")]);
    let mounted = forks::output(&mut command);
    if mounted.status.success() {
        Ok(base.join("merged"))
    } else {
        Err(String::from_utf8_lossy(&mounted.stderr).into_owned())
    }
}

impl Mount {
    /// Mounts a new, empty store.
    pub(crate) fn new(mode: Mode) -> Mount {
        Mount::with_options(mode, &[])
    }

    /// Mounts a new, empty store with further options of `kvfs mount`.
    pub(crate) fn with_options(mode: Mode, options: &[&str]) -> Mount {
        let directory = scratch_directory();
        let store = directory.path().join("store");
        Mount::at(mode, options, store, directory)
    }

    /// The same, and each object has a file of its own: for who looks into the store.
    pub(crate) fn with_own_files(mode: Mode, options: &[&str]) -> Mount {
        Mount::with_options(mode, &[options, &["--pack", "0"]].concat())
    }

    /// The same with variables in the daemon's environment.
    pub(crate) fn with_environment(
        mode: Mode, options: &[&str], environment: Vec<(String, String)>,
    ) -> Mount {
        let directory = scratch_directory();
        let store = directory.path().join("store");
        let mut mount = Mount::stopped(mode, options, store, directory);
        mount.environment = environment;
        mount.start();
        mount
    }

    /// Mounts a store that lies elsewhere.
    pub(crate) fn of_store(mode: Mode, store: &Path) -> Mount {
        Mount::at(mode, &[], store.to_owned(), scratch_directory())
    }

    /// The same with further options.
    pub(crate) fn of_store_with(mode: Mode, options: &[&str], store: &Path) -> Mount {
        Mount::at(mode, options, store.to_owned(), scratch_directory())
    }

    fn at(mode: Mode, options: &[&str], store: PathBuf, directory: tempfile::TempDir) -> Mount {
        let mut mount = Mount::stopped(mode, options, store, directory);
        mount.start();
        mount
    }

    fn stopped(
        mode: Mode, options: &[&str], store: PathBuf, directory: tempfile::TempDir,
    ) -> Mount {
        let mountpoint = directory.path().join("mnt");
        std::fs::create_dir(&mountpoint).unwrap();
        Mount {
            mode,
            options: options.iter().map(|&option| option.to_owned()).collect(),
            environment: Vec::new(),
            open_files_max: None,
            slow_because: None,
            daemon: None,
            store,
            mountpoint,
            directory,
        }
    }

    /// Starts the daemon and waits until the mount answers.
    fn start(&mut self) {
        let log = self.directory.path().join("daemon.log");
        let log = File::options().create(true).append(true).open(log).unwrap();
        let mut command = daemon_command(self.mode, &self.options, &self.store, &self.mountpoint);
        if let Some(max) = self.open_files_max {
            command = limited(&command, max);
        }
        command.stdin(Stdio::null()).stderr(log);
        command.stdout(Stdio::null());
        command.envs(self.environment.iter().cloned());
        if std::env::var_os("RUST_LOG").is_none() {
            command.env("RUST_LOG", "kvfs=info,kvfs_daemon::held=debug");
        }
        let mut daemon = forks::spawn(&mut command).unwrap();
        let pid = daemon.id().to_string();
        let is_kept = self.options.iter().any(|option| option == "--keep-mounted");
        eventually("the mount to answer", || {
            if let Some(status) = daemon.try_wait().unwrap() {
                panic!("the daemon gave up ({status}):\n{}", self.log());
            }
            let answers = self.try_status("pid")?;
            (answers == pid || is_kept && parent(&answers).as_ref() == Some(&pid)).then_some(())
        });
        self.daemon = Some(daemon);
        if self.mode == Mode::Passthrough {
            assert_eq!(self.status("passthrough"), "yes");
        } else {
            assert!(self.status("passthrough").starts_with("no: "));
        }
    }

    /// The mountpoint.
    pub(crate) fn path(&self) -> &Path {
        &self.mountpoint
    }

    /// A path in the mount.
    pub(crate) fn join(&self, path: impl AsRef<Path>) -> PathBuf {
        self.mountpoint.join(path)
    }

    /// A path in `files/`.
    pub(crate) fn files(&self, path: impl AsRef<Path>) -> PathBuf {
        self.mountpoint.join("files").join(path)
    }

    /// The store's directory.
    pub(crate) fn store(&self) -> &Path {
        &self.store
    }

    /// A directory beside the mount, on the same disk, that goes with it.
    pub(crate) fn beside(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// How bytes move.
    pub(crate) fn mode(&self) -> Mode {
        self.mode
    }

    /// The daemon's process id.
    pub(crate) fn pid(&self) -> u32 {
        self.daemon.as_ref().unwrap().id()
    }

    /// What the daemon has logged.
    pub(crate) fn log(&self) -> String {
        std::fs::read_to_string(self.directory.path().join("daemon.log")).unwrap_or_default()
    }

    /// One value of `.kvfs/status`.
    #[track_caller]
    pub(crate) fn status(&self, key: &str) -> String {
        let value = self.try_status(key);
        value.unwrap_or_else(|| panic!(".kvfs/status has no {key}"))
    }

    /// [`Mount::status`] as a number.
    #[track_caller]
    pub(crate) fn status_number(&self, key: &str) -> u64 {
        self.status(key).parse().unwrap()
    }

    /// [`Mount::status`] of what is not always told.
    pub(crate) fn try_status(&self, key: &str) -> Option<String> {
        let text = std::fs::read_to_string(self.join(".kvfs/status")).ok()?;
        let mut pairs = text.lines().filter_map(|line| line.split_once(": "));
        pairs.find(|(name, _)| *name == key).map(|(_, value)| value.to_owned())
    }

    /// One value of `.kvfs/metrics`, named as there, labels but for the mount's included:
    /// `kvfs_pages_refused_total{reason="shape"}`. Absent is 0; only counters and gauges.
    pub(crate) fn metric(&self, name: &str) -> u64 {
        let text = std::fs::read_to_string(self.join(".kvfs/metrics")).unwrap();
        let label = format!("mount=\"{}\"}} ", self.mountpoint.display());
        let text = text.replace(&format!(",{label}"), "} ").replace(&format!("{{{label}"), " ");
        let mut lines = text.lines().filter_map(|line| line.rsplit_once(' '));
        lines.find(|(found, _)| *found == name).map_or(0, |(_, value)| value.parse().unwrap())
    }

    /// The lines of `.kvfs/errors`.
    pub(crate) fn errors(&self) -> Vec<String> {
        let text = std::fs::read_to_string(self.join(".kvfs/errors")).unwrap();
        text.lines().map(str::to_owned).collect()
    }

    /// Files in `STORE/quarantine`, without the reasons beside them.
    pub(crate) fn quarantined(&self) -> Vec<PathBuf> {
        let mut paths = files_below(&self.store.join("quarantine"));
        paths.retain(|path| path.extension().is_none());
        paths
    }

    /// Files in `STORE/objects`.
    pub(crate) fn objects(&self) -> Vec<PathBuf> {
        files_below(&self.store.join("objects"))
    }

    /// Files in `STORE/staging` that hold something.
    pub(crate) fn staging(&self) -> Vec<PathBuf> {
        let mut files = files_below(&self.store.join("staging"));
        files.retain(|path| path.metadata().is_ok_and(|metadata| metadata.len() > 0));
        files
    }

    /// Whether the daemon has ended by itself.
    pub(crate) fn has_ended(&mut self) -> bool {
        self.daemon.as_mut().unwrap().try_wait().unwrap().is_some()
    }

    /// Ends the daemon at once, as a crash would. The dead mount stays.
    pub(crate) fn kill(&mut self) {
        let mut daemon = self.daemon.take().unwrap();
        daemon.kill().unwrap();
        let deadline = Instant::now() + KILLED_ENDS_WITHIN;
        let ended = loop {
            match daemon.try_wait().unwrap() {
                None if Instant::now() > deadline => {
                    // Or whoever waits for it hangs for ever.
                    let forced = nix::mount::MntFlags::MNT_FORCE;
                    let _ = nix::mount::umount2(&self.mountpoint, forced);
                    panic!("the killed daemon does not end: a thread of it waits in the kernel");
                }
                None => std::thread::sleep(Duration::from_millis(1)),
                Some(ended) => break ended,
            }
        };
        assert_eq!(ended.signal(), Some(libc::SIGKILL));
        // The kernel takes rings down a moment after their process.
        eventually("the connection to end", || {
            let answer = std::fs::File::open(self.mountpoint.join(".kvfs/status"));
            let errno = answer.err().and_then(|error| error.raw_os_error());
            (!matches!(errno, Some(libc::ECONNABORTED | libc::ECANCELED))).then_some(())
        });
    }

    /// Unmounts, waits until the daemon has flushed and ended, and returns how.
    pub(crate) fn unmount(&mut self) -> ExitStatus {
        // A program that another test starts holds copies of descriptors until it runs.
        eventually("the mount not to be busy", || {
            let ended = forks::output(&mut unmount_command(&self.mountpoint, false));
            let text = String::from_utf8_lossy(&ended.stderr).into_owned();
            assert!(ended.status.success() || text.contains("busy"), "{text}");
            ended.status.success().then_some(())
        });
        self.wait_until_it_ends()
    }

    /// Waits until the daemon has ended by itself, and returns how.
    pub(crate) fn wait_until_it_ends(&mut self) -> ExitStatus {
        let daemon = self.daemon.as_mut().unwrap();
        let ended = eventually("the daemon to end", || daemon.try_wait().unwrap());
        self.daemon = None;
        ended
    }

    /// Mounts again, after [`Mount::kill`] or [`Mount::unmount`].
    pub(crate) fn mount(&mut self) {
        assert!(self.daemon.is_none(), "it is mounted");
        detach(&self.mountpoint);
        self.start();
    }

    /// The next daemon may have so many files open.
    pub(crate) fn set_open_files_max(&mut self, max: u32) {
        self.open_files_max = Some(max);
    }

    /// Changes a variable of the next daemon's environment.
    pub(crate) fn set_environment(&mut self, name: &str, value: &str) {
        self.environment.retain(|(known, _)| known != name);
        self.environment.push((name.to_owned(), value.to_owned()));
    }

    /// Lets requests hold the thread that took them for longer than a mount may.
    pub(crate) fn may_be_slow(&mut self, because: &'static str) {
        self.slow_because = Some(because);
    }

    /// Fails if a request held the thread that took it, for which everybody else waits.
    fn check_held(&self) {
        if self.slow_because.is_some() {
            return;
        }
        let limit = std::env::var("KVFS_REQUEST_LIMIT_MS");
        let worked_max = limit.map_or(WORKED_MAX_MS, |text| text.parse().unwrap());
        let log = self.log();
        let is_long = |line: &&str| {
            held(line).is_some_and(|[held, worked]| worked > worked_max || held > HELD_MAX_MS)
        };
        let offenders: Vec<&str> = log.lines().filter(is_long).collect();
        assert!(offenders.is_empty(), "others waited for requests: {offenders:#?}");
    }

    /// Unmounts and mounts again.
    pub(crate) fn remount(&mut self) {
        assert!(self.unmount().success(), "{}", self.log());
        self.mount();
    }

    /// Kills the daemon and mounts again.
    pub(crate) fn crash(&mut self) {
        self.kill();
        self.mount();
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("log of the daemon:\n{}", self.log());
        }
        if let Some(mut daemon) = self.daemon.take() {
            let unmounted = forks::output(&mut unmount_command(&self.mountpoint, false));
            if !unmounted.status.success() {
                detach(&self.mountpoint);
                let _ = daemon.kill();
            }
            let _ = daemon.wait();
        }
        detach(&self.mountpoint);
        if !std::thread::panicking() {
            self.check_held();
        }
    }
}

/// For how many milliseconds a request held its thread, and worked there, if a line of the log says so
/// (`fuse::held`).
fn held(line: &str) -> Option<[u64; 2]> {
    let (_, told) = line.split_once(" held its thread for ")?;
    let (held, worked) = told.strip_suffix(" ms at work")?.split_once(" ms, ")?;
    Some([held.parse().unwrap(), worked.parse().unwrap()])
}

fn unmount_command(mountpoint: &Path, lazy: bool) -> Command {
    let mut command = if nix::unistd::geteuid().is_root() {
        Command::new("umount")
    } else {
        let mut command = Command::new("fusermount3");
        command.arg("-u");
        command
    };
    if lazy {
        command.arg(if nix::unistd::geteuid().is_root() { "-l" } else { "-z" });
    }
    command.arg(mountpoint);
    command
}

/// Takes the mountpoint out of the tree, whoever still uses it.
fn detach(mountpoint: &Path) {
    let _ = forks::output(&mut unmount_command(mountpoint, true));
}

/// Regular files below a directory, sorted.
pub(crate) fn files_below(directory: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    let mut directories = vec![directory.to_owned()];
    while let Some(directory) = directories.pop() {
        for entry in std::fs::read_dir(directory).unwrap() {
            let entry = entry.unwrap();
            if entry.file_type().unwrap().is_dir() {
                directories.push(entry.path());
            } else {
                files.push(entry.path());
            }
        }
    }
    files.sort();
    files
}
