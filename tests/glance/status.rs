//! `kvfs status`: sections for people, fields for programs, all mounts at a time, and again and again.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use crate::common::{Mode, Model, Mount, eventually, forks, sys};
use crate::{complaint, kvfs, printed};

in_served_mode!(
    people_see_sections_and_programs_fields,
    one_that_hangs_does_not_hide_the_others,
    watching_ends_at_a_signal,
    watching_ends_with_the_mount,
);

/// The daemon goes on whatever becomes of the test.
pub(crate) struct Stopped(Pid);

impl Stopped {
    pub(crate) fn new(mount: &Mount) -> Stopped {
        let pid = Pid::from_raw(i32::try_from(mount.pid()).unwrap());
        kill(pid, Signal::SIGSTOP).unwrap();
        Stopped(pid)
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        let _ = kill(self.0, Signal::SIGCONT);
    }
}

fn people_see_sections_and_programs_fields(mode: Mode) {
    let mount = Mount::with_options(mode, &["--ram", "64M"]);
    let model = Model::small();
    model.install(&mount);
    let page = model.page_path(&mount, "a", 0, 0);
    sys::write_and_close(&page, &model.page(0, 0, 1)).unwrap();
    let text = printed(&kvfs(&["status"], &[mount.path()]));
    let beginning = format!("{}\nstate: ok\nMount\n", mount.path().display());
    assert!(text.starts_with(&beginning), "{text}");
    assert!(text.contains("\nContent\n  pages                 1\n"), "{text}");
    assert!(text.contains(" of 64.0 MiB (0 %)\n"), "{text}");
    assert!(!text.contains('\u{1b}'), "no colour in a pipe");
    let fields: Value =
        serde_json::from_str(&printed(&kvfs(&["status", "--json"], &[mount.path()]))).unwrap();
    assert_eq!((&fields["state"], &fields["pages"]), (&"ok".into(), &1.into()));
    // Programs find each line of the daemon.
    let lines = std::fs::read_to_string(mount.join(".kvfs/status")).unwrap();
    for (key, _) in lines.lines().filter_map(|line| line.split_once(": ")) {
        assert!(fields.get(key).is_some(), "{key}");
    }
}

fn one_that_hangs_does_not_hide_the_others(mode: Mode) {
    let [stuck, healthy] = [Mount::new(mode), Mount::new(mode)];
    let stopped = Stopped::new(&stuck);
    let [text, json] = [kvfs(&["status"], &[]), kvfs(&["status", "--json"], &[])];
    drop(stopped);
    let place = stuck.path().display();
    assert_eq!(text.status.code(), Some(1), "one does not answer");
    let text = String::from_utf8(text.stdout).unwrap();
    assert!(text.contains(&format!("{}\nstate: ok\n", healthy.path().display())), "{text}");
    let line = format!("{place}\nstate: {place} does not answer within 3 seconds\n");
    assert!(text.contains(&line), "{text}");
    let told: Value = serde_json::from_slice(&json.stdout).unwrap();
    let of = |mount: &Mount| {
        let path = mount.path().to_str().unwrap();
        let mut mounts = told["mounts"].as_array().unwrap().iter();
        mounts.find(|told| told["mountpoint"] == path).unwrap().clone()
    };
    assert_eq!(of(&healthy)["state"], "ok");
    assert!(of(&stuck)["error"].as_str().unwrap().contains("does not answer"));
}

fn watching(mount: &Mount) -> (Child, BufReader<std::process::ChildStdout>) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvfs"));
    command.args(["status", "--watch=200ms"]).arg(mount.path());
    let mut child = forks::spawn(command.stdout(Stdio::piped()).stderr(Stdio::piped())).unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap());
    (child, lines)
}

fn read_looks(lines: &mut impl BufRead, count: usize) {
    let mut seen = 0;
    while seen < count {
        let mut line = String::new();
        assert!(lines.read_line(&mut line).unwrap() > 0, "it ended after {seen} looks");
        seen += usize::from(line == "state: ok\n");
    }
}

fn watching_ends_at_a_signal(mode: Mode) {
    let mount = Mount::new(mode);
    let (mut child, mut lines) = watching(&mount);
    read_looks(&mut lines, 3);
    kill(Pid::from_raw(i32::try_from(child.id()).unwrap()), Signal::SIGINT).unwrap();
    let status = eventually("the command to end", || child.try_wait().unwrap());
    assert_eq!(status.code(), Some(0));
}

fn watching_ends_with_the_mount(mode: Mode) {
    let mut mount = Mount::new(mode);
    let (child, mut lines) = watching(&mount);
    read_looks(&mut lines, 1);
    mount.unmount();
    std::io::copy(&mut lines, &mut std::io::sink()).unwrap();
    let ended = child.wait_with_output().unwrap();
    assert_eq!(complaint(&ended), format!("kvfs: {} was unmounted\n", mount.path().display()));
    assert_eq!(ended.status.code(), Some(0));
}
