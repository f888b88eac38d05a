//! `kvfs log --follow` keeps nobody from unmounting, and ends when there is nothing more to show.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};

use crate::common::{Mode, Mount, eventually, forks};
use crate::{limit, wait_until_gone, write_files};

in_served_mode!(
    a_mount_is_unmounted_while_somebody_follows,
    a_follower_is_told_that_the_daemon_died,
    a_follower_ends_when_nobody_reads_it,
);

/// A mount with one event, and whoever follows it and has shown that.
struct Followed {
    mount: Mount,
    follower: Child,
    lines: BufReader<std::process::ChildStdout>,
}

impl Followed {
    fn new(mode: Mode) -> Followed {
        let mount = with_event(mode);
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvfs"));
        command.args(["log", "--follow"]).arg(mount.path());
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        // Where the tests run does not matter.
        command.current_dir(mount.path());
        let mut follower = forks::spawn(&mut command).unwrap();
        let mut lines = BufReader::new(follower.stdout.take().unwrap());
        let mut line = String::new();
        lines.read_line(&mut line).unwrap();
        assert!(line.contains("files/cache/block-000.bin"), "{line}");
        Followed { mount, follower, lines }
    }

    /// Waits for its end: its exit code, what else it has shown and what it complained of.
    fn end(&mut self) -> (Option<i32>, String, String) {
        let status = eventually("the follower to end", || self.follower.try_wait().unwrap());
        let (mut text, mut errors) = (String::new(), String::new());
        self.lines.read_to_string(&mut text).unwrap();
        self.follower.stderr.take().unwrap().read_to_string(&mut errors).unwrap();
        (status.code(), text, errors)
    }
}

fn with_event(mode: Mode) -> Mount {
    let mount = Mount::new(mode);
    let directory = mount.files("cache");
    fs::create_dir(&directory).unwrap();
    let files = write_files(&mount, &directory, 1);
    limit(&directory, "quota", 10);
    wait_until_gone(&files[0]);
    mount
}

fn a_mount_is_unmounted_while_somebody_follows(mode: Mode) {
    let mut followed = Followed::new(mode);
    assert!(followed.mount.unmount().success());
    let told = format!("kvfs: {} was unmounted\n", followed.mount.path().display());
    assert_eq!(followed.end(), (Some(0), String::new(), told));
}

fn a_follower_is_told_that_the_daemon_died(mode: Mode) {
    let mut followed = Followed::new(mode);
    followed.mount.kill();
    let (code, text, told) = followed.end();
    assert_eq!((code, text.as_str()), (Some(1), ""));
    let expected = format!("the daemon of {} is gone", followed.mount.path().display());
    assert!(told.contains(&expected), "{told}");
}

fn a_follower_ends_when_nobody_reads_it(mode: Mode) {
    let mount = with_event(mode);
    let script =
        format!("'{}' log -f '{}' | head -n 1", env!("CARGO_BIN_EXE_kvfs"), mount.path().display());
    let mut shell = Command::new("sh");
    shell.args(["-c", &script]).stdout(Stdio::piped());
    let mut shell = forks::spawn(&mut shell).unwrap();
    let status = eventually("the pipeline to end", || shell.try_wait().unwrap());
    assert!(status.success());
    let mut line = String::new();
    shell.stdout.take().unwrap().read_to_string(&mut line).unwrap();
    assert!(line.ends_with('\n') && line.contains("block-000.bin"), "{line}");
}
