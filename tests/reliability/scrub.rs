//! `kvfs scrub` finds what the disk has lost before anybody opens it, and mends it from where there is
//! another copy.

use std::os::unix::fs::FileExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use crate::common::forks::output;
use crate::common::sys::{
    Thread, assert_errno, getxattr, open, sync_directory, threads_of, write_and_close,
};
use crate::common::{Mode, Model, Mount, eventually, fill};

const BYTES: usize = 1 << 20;

in_both_modes!(
    damage_is_found_and_kept_aside,
    an_encoded_copy_mends_the_raw_file,
    the_remote_mends_what_it_has,
    memory_mends_the_disk,
    a_path_and_a_rate,
    whoever_does_not_wait_is_told_that_it_goes_on,
    only_what_reads_makes_way_for_everybody,
);

fn scrub(words: &[&str], path: &Path) -> Output {
    output(Command::new(env!("CARGO_BIN_EXE_kvfs")).arg("scrub").args(words).arg(path))
}

#[track_caller]
fn assert_scrubbed(path: &Path, exit: i32, expected: &str) {
    let ended = scrub(&[], path);
    let text = String::from_utf8_lossy(&ended.stdout).into_owned();
    let complaint = String::from_utf8_lossy(&ended.stderr);
    assert_eq!(ended.status.code(), Some(exit), "{text}{complaint}");
    assert!(text.contains(expected), "{text}");
}

fn write(mount: &Mount, count: u64) -> Vec<(PathBuf, Vec<u8>)> {
    let files = (0..count).map(|number| {
        // Compresses to less than half.
        let mut bytes = fill(number, BYTES);
        bytes[BYTES / 4..].fill(7);
        let path = mount.files(format!("f{number}"));
        write_and_close(&path, &bytes).unwrap();
        (path, bytes)
    });
    let files = files.collect();
    sync_directory(mount.path()).unwrap();
    files
}

/// The raw file that holds these bytes.
fn raw_file(mount: &Mount, bytes: &[u8]) -> PathBuf {
    let mut objects = mount.objects().into_iter();
    objects.find(|object| std::fs::read(object).unwrap() == bytes).unwrap()
}

fn damage(object: &Path) {
    open(object, libc::O_RDWR).unwrap().write_all_at(b"damage", 8192).unwrap();
}

fn damage_is_found_and_kept_aside(mode: Mode) {
    let mount = Mount::with_own_files(mode, &[]);
    let model = Model::small();
    model.install(&mount);
    let pages = [0, 32].map(|start| model.page_path(&mount, "chat", 0, start));
    for (page, start) in pages.iter().zip([0, 32]) {
        write_and_close(page, &model.page(0, start, 5)).unwrap();
    }
    let files = write(&mount, 3);
    assert_scrubbed(mount.path(), 0, "6 files");
    let page = raw_file(&mount, &model.page(0, 32, 5));
    open(&page, libc::O_RDWR).unwrap().write_all_at(b"x", 5000).unwrap();
    damage(&raw_file(&mount, &files[1].1));
    std::fs::remove_file(raw_file(&mount, &files[2].1)).unwrap();
    assert_scrubbed(mount.path(), 3, "3 damaged, 0 of them mended");
    let errors = mount.errors().join("\n");
    for name in ["0000032.safetensors", "files/f1", "files/f2"] {
        assert!(errors.contains(name), "{name}: {errors}");
    }
    // The damaged bytes and why; a file that is missing has none.
    assert_eq!(mount.quarantined().len(), 2);
    let reason = mount.quarantined()[0].with_extension("reason");
    assert!(std::fs::read_to_string(reason).unwrap().contains("checksum mismatch"));
    assert_errno(open(&files[1].0, libc::O_RDONLY), libc::EIO);
    assert_errno(open(&pages[1], libc::O_RDONLY), libc::EIO);
    assert!(std::fs::read(&files[0].0).unwrap() == files[0].1);
    assert_eq!(mount.status("scrub"), "done");
    assert_eq!(mount.status("scrub_damaged_files"), "3");
}

fn an_encoded_copy_mends_the_raw_file(mode: Mode) {
    let options = ["--ssd", "16M", "--cold", "zstd:1", "--commit-interval", "0.05"];
    let mount = Mount::with_options(mode, &options);
    let files = write(&mount, 24);
    eventually("files to be encoded", || {
        (mount.status_number("ssd_only_encoded_objects") > 4).then_some(())
    });
    let encoded = |mount: &Mount| {
        let mut objects = mount.objects();
        objects.retain(|path| path.extension().is_some());
        objects
    };
    // Opened, they have both copies.
    for (path, bytes) in &files {
        assert!(std::fs::read(path).unwrap() == *bytes);
    }
    // Until there is room again and a pass has nothing more to do, the next raw file to go might be the
    // one that is chosen.
    eventually("room on the disk, and nothing that moves", || {
        let before = mount.objects();
        std::thread::sleep(Duration::from_millis(500));
        let is_idle = mount.objects() == before;
        (is_idle && mount.status_number("ssd_used_bytes") <= 16 << 20).then_some(())
    });
    let both = encoded(&mount).into_iter().find(|copy| copy.with_extension("").exists()).unwrap();
    damage(&both.with_extension(""));
    let alone = encoded(&mount).into_iter().filter(|copy| *copy != both);
    let other = alone.clone().find(|copy| copy.with_extension("").exists());
    if let Some(other) = &other {
        open(other, libc::O_RDWR).unwrap().write_all_at(b"damage", 4096).unwrap();
    }
    let damaged = 1 + usize::from(other.is_some());
    assert_scrubbed(mount.path(), 0, &format!("{damaged} damaged, {damaged} of them mended"));
    assert_scrubbed(mount.path(), 0, "no damage");
    for (path, bytes) in &files {
        assert!(std::fs::read(path).unwrap() == *bytes, "{}", path.display());
    }
    assert_eq!(mount.quarantined().len(), damaged);
}

fn the_remote_mends_what_it_has(mode: Mode) {
    let directory = crate::common::mount::scratch_directory();
    let remote = directory.path().to_str().unwrap();
    let mount = Mount::with_options(mode, &["--remote", remote, "--commit-interval", "0.05"]);
    let files = write(&mount, 3);
    eventually("the remote to have everything", || {
        let waiting = mount.status_number("remote_waiting_files");
        (waiting == 0 && mount.status("remote_names") == "published").then_some(())
    });
    damage(&raw_file(&mount, &files[0].1));
    std::fs::remove_file(raw_file(&mount, &files[1].1)).unwrap();
    assert_scrubbed(mount.path(), 0, "1 damaged, 1 of them mended");
    for (path, bytes) in &files {
        assert!(std::fs::read(path).unwrap() == *bytes, "{}", path.display());
    }
}

fn memory_mends_the_disk(mode: Mode) {
    let mut mount = Mount::with_own_files(mode, &["--ram", "8M"]);
    let model = Model::small();
    model.install(&mount);
    let path = model.page_path(&mount, "chat", 0, 0);
    write_and_close(&path, &model.page(0, 0, 5)).unwrap();
    sync_directory(mount.path()).unwrap();
    let page = raw_file(&mount, &model.page(0, 0, 5));
    open(&page, libc::O_RDWR).unwrap().write_all_at(b"x", 5000).unwrap();
    assert_scrubbed(mount.path(), 0, "1 damaged, 1 of them mended");
    assert!(std::fs::read(&page).unwrap() == model.page(0, 0, 5));
    mount.crash();
    assert!(std::fs::read(&path).unwrap() == model.page(0, 0, 5));
}

/// Beside an engine that keeps all processors busy a thread at idle priority may not run for seconds: with the state
/// locked, nobody would open a file meanwhile.
fn only_what_reads_makes_way_for_everybody(mode: Mode) {
    let mount = Mount::new(mode);
    write(&mount, 4);
    let begun = scrub(&["--background", "--rate", "64K"], mount.path());
    assert!(begun.status.success(), "{begun:?}");
    eventually("threads that read", || {
        let mut threads = threads_of(mount.pid());
        threads.retain(|thread| thread.policy == libc::SCHED_IDLE);
        let reads = |thread: &Thread| thread.name == "kvfs-scrub-read";
        assert!(threads.iter().all(reads), "{threads:?}");
        (!threads.is_empty()).then_some(())
    });
}

fn a_path_and_a_rate(mode: Mode) {
    let mount = Mount::with_own_files(mode, &[]);
    let files = write(&mount, 3);
    std::fs::create_dir(mount.files("d")).unwrap();
    std::fs::hard_link(&files[0].0, mount.files("d/l")).unwrap();
    sync_directory(mount.path()).unwrap();
    damage(&raw_file(&mount, &files[1].1));
    assert_scrubbed(&mount.files("d"), 0, "1 files");
    assert_scrubbed(&files[0].0, 0, "1 files");
    assert_scrubbed(&files[1].0, 3, "1 damaged");
    let start = Instant::now();
    let ended = scrub(&["--rate", "8M"], mount.path());
    assert_eq!(ended.status.code(), Some(3));
    assert!(start.elapsed().as_millis() > 250, "{:?}", start.elapsed());
    // In the background, one at a time, until it is stopped.
    assert!(scrub(&["--background", "--rate", "64K"], mount.path()).status.success());
    assert_eq!(mount.status("scrub"), "running");
    let refused = scrub(&[], mount.path());
    assert!(String::from_utf8_lossy(&refused.stderr).contains("running already"));
    assert!(scrub(&["--stop"], mount.path()).status.success());
    eventually("the scrub to stop", || (mount.status("scrub") == "stopped").then_some(()));
}

fn whoever_does_not_wait_is_told_that_it_goes_on(mode: Mode) {
    let mount = Mount::with_own_files(mode, &[]);
    write(&mount, 4);
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvfs"));
    command.args(["scrub", "--rate", "64K"]).arg(mount.path());
    let child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let state = || getxattr(mount.path(), "user.kvfs.scrub").unwrap();
    eventually("the scrub", || state().starts_with("scrub: running").then_some(()));
    // It looks at the signal from the moment on that it waits for the end.
    eventually("the command to wait", || {
        let held = std::fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap();
        let holds = |line: &str| line.starts_with("SigBlk:") && line.ends_with("4003");
        held.lines().any(holds).then_some(())
    });
    let id = child.id().to_string();
    Command::new("kill").args(["-s", "INT", &id]).status().unwrap();
    let ended = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&ended.stderr);
    assert_eq!(ended.status.signal(), Some(libc::SIGINT), "{said}");
    let place = mount.path().display();
    assert!(
        said.contains("the scrub goes on") && said.contains(&format!("--stop {place}")),
        "{said}"
    );
    assert!(state().starts_with("scrub: running"), "{}", state());
    assert!(scrub(&["--stop"], mount.path()).status.success());
}
