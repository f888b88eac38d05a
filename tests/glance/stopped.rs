//! Commands against a mount whose daemon was stopped: they say so and end, and nothing is done later.

use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::common::forks;
use crate::common::model::Model;
use crate::common::sys::write_and_close;
use crate::common::{Mode, Mount};
use crate::status::Stopped;

in_both_modes!(commands_do_not_wait_for_a_mount_that_stands_still);

/// Ten seconds are waited for an answer, beside all the others.
const LONGEST: Duration = Duration::from_secs(50);

fn begin(directory: &Path, words: &[&str]) -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvfs"));
    command.args(words).current_dir(directory).stdin(Stdio::null());
    forks::spawn(command.stdout(Stdio::piped()).stderr(Stdio::piped())).unwrap()
}

fn commands_do_not_wait_for_a_mount_that_stands_still(mode: Mode) {
    let mut mount = Mount::with_options(mode, &["--ram", "64M"]);
    mount.may_be_slow("its daemon is stopped");
    let model = Model::small();
    model.install(&mount);
    let page = model.page_path(&mount, "a", 0, 0);
    write_and_close(&page, &model.page(0, 0, 1)).unwrap();
    let outside = tempfile::tempdir().unwrap();
    let link = outside.path().join("link");
    symlink(page.parent().unwrap(), &link).unwrap();
    std::fs::write(outside.path().join("ids"), "1 2 3").unwrap();
    let [place, page_name, link_name] =
        [mount.path(), &page, &link].map(|path| path.to_str().unwrap());
    let directory = model.directory(&mount);
    let named = directory.to_str().unwrap();
    let sequence = directory.join("sequences/a");
    let sequence = sequence.to_str().unwrap();
    let commands: &[&[&str]] = &[
        &["sync", place],
        &["scrub", place],
        &["gc", "--yes", place],
        &["quota", place],
        &["explain", page_name],
        &["seq", "show", named],
        &["seq", "clear", "--yes", named, "a"],
        &["match", named, "--tokens", "ids"],
        &["promote", page_name],
        &["evict", link_name],
        &["hint", page_name, "finished"],
        &["inspect", page_name],
        &["diff", page_name, "ids"],
        &["create", &format!("{place}/models/other"), "--layers=1", "--kv-heads=1", "--head-dim=8"],
        &["model", "bump", "--yes", named, "2"],
        &["export", sequence, "out.bin"],
        &["log", place],
        &["map", named],
        &["top", "--once", place],
        &["doctor", place],
    ];
    let before = std::fs::read(directory.join("manifest.json")).unwrap();
    let stopped = Stopped::new(&mount);
    let started = Instant::now();
    let children: Vec<Child> = commands.iter().map(|words| begin(outside.path(), words)).collect();
    let end = started + LONGEST;
    let mut children: Vec<_> = children.into_iter().zip(commands).collect();
    for (child, words) in &mut children {
        while child.try_wait().unwrap().is_none() {
            if Instant::now() > end {
                drop(stopped);
                panic!("{words:?} waits");
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
    drop(stopped);
    for (child, words) in children {
        let ended = child.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&ended.stderr).into_owned()
            + &String::from_utf8_lossy(&ended.stdout);
        assert!(!ended.status.success() && said.contains("does not answer"), "{words:?}: {said}");
    }
    assert_eq!(std::fs::read(directory.join("manifest.json")).unwrap(), before, "not bumped");
    assert_eq!(std::fs::read(&page).unwrap(), model.page(0, 0, 1));
    assert_eq!(mount.status("state"), "ok");
}
