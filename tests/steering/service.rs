//! A mount that a service manager keeps: it says when it answers, and logs as the journal wants it.

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixDatagram;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use crate::common::mount::scratch_directory;
use crate::common::{eventually, forks};

/// A mount in the foreground, its log in a file.
struct Service {
    child: Child,
    mountpoint: PathBuf,
    log: PathBuf,
    directory: tempfile::TempDir,
}

impl Service {
    /// `is_journal`: the log is told to be the journal.
    fn start(socket: Option<&str>, is_journal: bool) -> Service {
        let directory = scratch_directory();
        let [store, mountpoint, log] =
            ["store", "mnt", "log"].map(|name| directory.path().join(name));
        std::fs::create_dir(&mountpoint).unwrap();
        let file = File::create(&log).unwrap();
        let metadata = file.metadata().unwrap();
        let stream = if is_journal {
            format!("{}:{}", metadata.dev(), metadata.ino())
        } else {
            // Inherited from a manager whose journal it was.
            "9:9".to_owned()
        };
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvfs"));
        command.args(["mount", "--foreground"]).args([&store, &mountpoint]);
        command.env("JOURNAL_STREAM", stream).stdin(Stdio::null()).stderr(file);
        match socket {
            Some(socket) => command.env("NOTIFY_SOCKET", socket),
            None => command.env_remove("NOTIFY_SOCKET"),
        };
        let child = forks::spawn(&mut command).unwrap();
        Service { child, mountpoint, log, directory }
    }

    fn answers(&self) -> bool {
        self.mountpoint.join(".kvfs/status").exists()
    }

    /// Unmounts; what was logged.
    fn end(mut self) -> String {
        forks::succeed(Command::new("umount").arg(&self.mountpoint));
        let ended = eventually("the daemon to end", || self.child.try_wait().unwrap());
        assert!(ended.success());
        let log = std::fs::read_to_string(&self.log).unwrap();
        drop(self.directory);
        log
    }
}

#[test]
fn the_manager_is_told_when_the_mount_answers() {
    crate::require!(fuse, root);
    let directory = scratch_directory();
    let path = directory.path().join("notify");
    let socket = UnixDatagram::bind(&path).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let service = Service::start(path.to_str(), true);
    let mut message = [0; 512];
    let length = socket.recv(&mut message).unwrap();
    assert!(service.answers(), "it was told too early");
    let expected = format!("READY=1\nSTATUS={} is ready", service.mountpoint.display());
    assert_eq!(String::from_utf8_lossy(&message[..length]), expected);
    let log = service.end();
    assert!(!log.is_empty() && log.lines().all(|line| line.starts_with("<6>kvfs")), "{log}");
    assert!(log.contains("is ready"), "{log}");
}

#[test]
fn a_manager_that_is_gone_or_silent_keeps_nobody_from_the_mount() {
    crate::require!(fuse, root);
    let service = Service::start(Some("/no/such/socket"), false);
    eventually("the mount", || service.answers().then_some(()));
    let log = eventually("the warning", || {
        let log = std::fs::read_to_string(&service.log).unwrap();
        log.contains("the service manager was not told").then_some(log)
    });
    assert!(log.starts_with('['), "lines have times where nobody adds them: {log}");
    service.end();
    let service = Service::start(None, false);
    eventually("the mount", || service.answers().then_some(()));
    assert!(!service.end().contains("service manager"));
}
