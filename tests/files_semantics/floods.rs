//! Too much of something: attributes, handles, requests. Memory stays bounded, errors are clear, and
//! afterwards all is as before.

use std::fs::File;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::common::forks::succeed;
use crate::common::sys::{
    assert_errno, errno, getxattr, listxattr, open, rename, setxattr, sync_directory, write,
};
use crate::common::{Mode, Model, Mount, eventually};

in_both_modes!(
    attributes_of_one_file_are_bounded,
    attributes_of_many_files_do_not_wait_in_memory,
    changes_of_many_names_do_not_wait_in_memory,
    who_makes_files_waits_for_no_commit,
    a_file_that_is_rewritten_again_and_again_leaves_little,
    many_handles_cost_little,
    a_daemon_without_descriptors_goes_on,
    files_that_grow_leave_descriptors,
    slots_that_are_written_leave_descriptors,
    a_crowd_is_answered,
);

/// Kilobytes from the daemon's `/proc/PID/status`.
fn kilobytes(mount: &Mount, key: &str) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", mount.pid())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(key)).unwrap();
    line.trim_start_matches(':').trim().trim_end_matches(" kB").parse().unwrap()
}

fn attributes_of_one_file_are_bounded(mode: Mode) {
    let mut mount = Mount::new(mode);
    let file = mount.files("file");
    std::fs::write(&file, "x").unwrap();
    let value = vec![7; 60_000];
    let set = |number: usize, value: &[u8]| setxattr(&file, &format!("user.x{number}"), value);
    let fit = (0..100).find(|number| errno(&set(*number, &value)) != 0).unwrap();
    assert_eq!(fit, 17, "a MiB in all");
    assert_errno(set(99, &value), libc::ENOSPC);
    // Replacing and removing go on, and other files have room of their own.
    set(3, &value).unwrap();
    crate::common::sys::removexattr(&file, "user.x4").unwrap();
    set(99, &value).unwrap();
    std::fs::write(mount.files("other"), "x").unwrap();
    setxattr(mount.files("other"), "user.x", &value).unwrap();
    mount.remount();
    assert_eq!(listxattr(mount.files("file")).unwrap().len(), fit);
    assert_eq!(mount.status("errors"), "0");
}

fn attributes_of_many_files_do_not_wait_in_memory(mode: Mode) {
    const FILES: usize = 800;
    const EACH: usize = 4;
    let mount = Mount::with_options(mode, &["--commit-interval", "60"]);
    for number in 0..FILES {
        std::fs::write(mount.files(number.to_string()), "x").unwrap();
    }
    sync_directory(mount.path()).unwrap();
    let before = kilobytes(&mount, "VmHWM");
    let value = "v".repeat(60_000);
    for number in 0..FILES {
        for name in 0..EACH {
            let file = mount.files(number.to_string());
            setxattr(file, &format!("user.x{name}"), value.as_bytes()).unwrap();
        }
    }
    // 190 MB were set; a commit that waits and one that is written may be in memory.
    let grown = kilobytes(&mount, "VmHWM") - before;
    assert!(grown < 140 << 10, "{grown} kB");
    assert_eq!(getxattr(mount.files("77"), "user.x3").unwrap(), value);
}

/// Without any commit: nothing on the disk has ever named the versions before the last one.
fn a_file_that_is_rewritten_again_and_again_leaves_little(mode: Mode) {
    let mount = Mount::with_options(mode, &["--commit-interval", "600"]);
    // Too large for a pack.
    let bytes = vec![7; 100_000];
    let mut most = 0;
    for _ in 0..2000 {
        std::fs::write(mount.files("file"), &bytes).unwrap();
        most = most.max(std::fs::read_dir(mount.store().join("staging")).unwrap().count());
    }
    // Those that are made ahead, and as many as slow their writer down.
    assert!(most < 300, "{most} files");
    sync_directory(mount.path()).unwrap();
    assert_eq!(std::fs::read(mount.files("file")).unwrap(), bytes);
}

/// One process may have 20,000 here; what a handle costs is the same for a million.
fn changes_of_many_names_do_not_wait_in_memory(mode: Mode) {
    const NAMES: usize = 60_000;
    let mount = Mount::with_options(mode, &["--commit-interval", "600"]);
    let path = |number: usize| mount.files(format!("n{number}"));
    std::fs::write(path(0), "x").unwrap();
    let each = |what: &str, act: &dyn Fn(usize)| {
        sync_directory(mount.path()).unwrap();
        (1..NAMES).for_each(act);
        let waiting = mount.status_number("uncommitted_changes");
        assert!((1..=50_100).contains(&waiting), "{what}: {waiting} changes wait");
    };
    each("made", &|number| std::fs::hard_link(path(0), path(number)).unwrap());
    each("renamed", &|number| rename(path(number), mount.files(format!("r{number}"))).unwrap());
    each("removed", &|number| std::fs::remove_file(mount.files(format!("r{number}"))).unwrap());
    assert_eq!(std::fs::read_dir(mount.files("")).unwrap().count(), 1);
    assert_eq!(mount.status("errors"), "0");
}

/// More changes than may wait for a commit, each with bytes that it syncs: such a commit takes seconds.
fn who_makes_files_waits_for_no_commit(mode: Mode) {
    const FILES: usize = 14_000;
    /// Of one file, on a machine that does other things as well.
    const LONGEST: Duration = Duration::from_secs(1);
    let mount = Mount::with_options(mode, &["--commit-interval", "60"]);
    let mut longest = Duration::ZERO;
    for directory in 0..FILES / 1000 {
        let directory = mount.files(directory.to_string());
        std::fs::create_dir(&directory).unwrap();
        for number in 0..1000 {
            let begun = Instant::now();
            let temporary = directory.join(".tmp");
            std::fs::write(&temporary, [7; 4096]).unwrap();
            rename(&temporary, directory.join(number.to_string())).unwrap();
            longest = longest.max(begun.elapsed());
        }
    }
    assert!(longest < LONGEST, "{longest:?}");
}

fn many_handles_cost_little(mode: Mode) {
    const HANDLES: usize = 8_000;
    crate::require!(descriptors);
    let mount = Mount::new(mode);
    let paths: Vec<_> = (0..50).map(|number| mount.files(format!("f{number}"))).collect();
    for path in &paths {
        std::fs::write(path, "some bytes").unwrap();
    }
    sync_directory(mount.path()).unwrap();
    let (_, most) =
        nix::sys::resource::getrlimit(nix::sys::resource::Resource::RLIMIT_NOFILE).unwrap();
    nix::sys::resource::setrlimit(nix::sys::resource::Resource::RLIMIT_NOFILE, most, most).unwrap();
    let before = kilobytes(&mount, "VmRSS");
    let handles: Vec<File> =
        paths.iter().cycle().take(HANDLES).map(|path| File::open(path).unwrap()).collect();
    assert_eq!(mount.status_number("open_files"), HANDLES as u64);
    let each = kilobytes(&mount, "VmRSS").saturating_sub(before) * 1024 / HANDLES as u64;
    assert!(each < 2048, "{each} bytes for each handle");
    drop(handles);
    eventually("handles to be closed", || (mount.status_number("open_files") == 0).then_some(()));
    assert_eq!(mount.status("errors"), "0");
}

/// Where the daemon moves the bytes, each open file is a descriptor of its. Clients may not take the
/// last ones: what is open can be synced, names can be looked up, and the store takes changes.
fn a_daemon_without_descriptors_goes_on(mode: Mode) {
    const FILES: usize = 600;
    let mut mount = Mount::with_own_files(mode, &[]);
    let paths: Vec<_> = (0..FILES).map(|number| mount.files(format!("f{number}"))).collect();
    for path in &paths {
        std::fs::write(path, "some bytes").unwrap();
    }
    sync_directory(mount.path()).unwrap();
    let changed = File::options().append(true).open(&paths[0]).unwrap();
    let pid = mount.pid().to_string();
    succeed(Command::new("prlimit").args(["--pid", &pid, "--nofile=400:400"]));
    let outcomes = paths.iter().map(|path| open(path, libc::O_RDONLY));
    let (opened, refused): (Vec<_>, Vec<_>) = outcomes.partition(Result::is_ok);
    match mode {
        Mode::Passthrough => assert_eq!(opened.len(), FILES),
        Mode::Served => assert!((200..=300).contains(&opened.len()), "{}", opened.len()),
    }
    assert!(refused.iter().all(|outcome| errno(outcome) == libc::ENFILE));
    let new = File::create(mount.files("new"));
    assert_eq!(errno(&new), if mode == Mode::Served { libc::ENFILE } else { 0 });
    write(&changed, b" and more").unwrap();
    changed.sync_all().unwrap();
    std::fs::create_dir(mount.files("directory")).unwrap();
    sync_directory(mount.path()).unwrap();
    assert!(std::fs::read_dir(mount.files("")).unwrap().count() > FILES);
    assert_eq!((mount.status("state"), mount.status("errors")), ("ok".to_owned(), "0".to_owned()));
    drop((opened, refused, new, changed));
    eventually("descriptors to be free again", || std::fs::write(mount.files("new"), "x").ok());
    mount.remount();
    assert_eq!(std::fs::read_to_string(mount.files("f0")).unwrap(), "some bytes and more");
    assert_eq!(std::fs::read_to_string(mount.files("new")).unwrap(), "x");
    assert_eq!(mount.status("errors"), "0");
}

/// Small new files are in memory, where the daemon needs no descriptor for them, until they grow longer or are synced.
fn files_that_grow_leave_descriptors(mode: Mode) {
    const FILES: usize = 600;
    let mut mount = Mount::new(mode);
    std::fs::write(mount.files("before"), "some bytes").unwrap();
    sync_directory(mount.path()).unwrap();
    let pid = mount.pid().to_string();
    succeed(Command::new("prlimit").args(["--pid", &pid, "--nofile=400:400"]));
    let names = (0..FILES).map(|number| mount.files(format!("f{number}")));
    let opened: Vec<_> = names.map(File::create).collect();
    let (opened, refused): (Vec<_>, Vec<_>) = opened.into_iter().partition(Result::is_ok);
    match mode {
        Mode::Passthrough => assert_eq!(opened.len(), FILES),
        Mode::Served => assert!(opened.len() >= 50, "{}", opened.len()),
    }
    assert!(refused.iter().all(|outcome| errno(outcome) == libc::ENFILE));
    let opened: Vec<File> = opened.into_iter().map(Result::unwrap).collect();
    let large = vec![7; 100_000];
    let half = opened.len() / 2;
    // Another program for a moment has all of them, and closes them.
    succeed(&mut Command::new("true"));
    sync_directory(mount.path()).unwrap();
    for file in &opened[..half] {
        write(file, &large).unwrap();
        file.sync_all().unwrap();
    }
    // The daemon itself goes on.
    sync_directory(mount.path()).unwrap();
    if mode == Mode::Passthrough {
        assert_eq!(std::fs::read_to_string(mount.files("before")).unwrap(), "some bytes");
    }
    std::fs::create_dir(mount.files("directory")).unwrap();
    sync_directory(mount.path()).unwrap();
    assert_eq!((mount.status("state"), mount.status("errors")), ("ok".to_owned(), "0".to_owned()));
    let opened_count = opened.len();
    drop(opened);
    eventually("descriptors to be free again", || std::fs::write(mount.files("new"), &large).ok());
    mount.remount();
    assert_eq!(std::fs::read(mount.files("new")).unwrap(), large);
    for number in 0..opened_count {
        let length = std::fs::metadata(mount.files(format!("f{number}"))).unwrap().len();
        assert_eq!(length, if number < half { 100_000 } else { 0 });
    }
}

/// What is written to `slots/` is a descriptor of the daemon's in either mode.
fn slots_that_are_written_leave_descriptors(mode: Mode) {
    let (mount, model) = (Mount::new(mode), Model::small());
    model.install(&mount);
    let pid = mount.pid().to_string();
    succeed(Command::new("prlimit").args(["--pid", &pid, "--nofile=400:400"]));
    let slots = model.directory(&mount).join("slots");
    let outcomes = (0..600).map(|number| File::create(slots.join(format!("s{number}.bin"))));
    let (opened, refused): (Vec<_>, Vec<_>) = outcomes.partition(Result::is_ok);
    // All that there are at a time.
    assert_eq!(opened.len(), 64, "{:?}", refused.first());
    let others: Vec<_> = refused.iter().filter(|outcome| errno(outcome) != libc::EAGAIN).collect();
    assert!(others.is_empty(), "{others:?}");
    std::fs::create_dir(mount.files("directory")).unwrap();
    sync_directory(mount.path()).unwrap();
    drop(opened);
    eventually("descriptors to be free again", || std::fs::write(mount.files("new"), "x").ok());
    assert_eq!((mount.status("state"), mount.status("errors")), ("ok".to_owned(), "0".to_owned()));
}

/// A few hundred threads that all ask at once; whoever lists a directory meanwhile gets an answer.
fn a_crowd_is_answered(mode: Mode) {
    const THREADS: usize = 300;
    const TURNS: usize = 8;
    let mount = Mount::new(mode);
    std::fs::write(mount.files("shared"), "some bytes").unwrap();
    let before = kilobytes(&mount, "VmHWM");
    let slowest = std::thread::scope(|scope| {
        let (mount, work) = (&mount, |number: usize| take_turns(&mount.files(""), number, TURNS));
        let crowd: Vec<_> = (0..THREADS).map(|number| scope.spawn(move || work(number))).collect();
        let mut slowest = Duration::ZERO;
        while crowd.iter().any(|thread| !thread.is_finished()) {
            let asked = Instant::now();
            assert!(std::fs::read_dir(mount.files("")).unwrap().count() > 0);
            slowest = slowest.max(asked.elapsed());
        }
        slowest
    });
    assert!(slowest < Duration::from_secs(5), "{slowest:?}");
    let grown = kilobytes(&mount, "VmHWM") - before;
    assert!(grown < 64 << 10, "{grown} kB for {THREADS} threads");
    let left = std::fs::read_dir(mount.files("")).unwrap().count();
    assert_eq!(left, THREADS + 1);
    assert_eq!((mount.status("state"), mount.status("errors")), ("ok".to_owned(), "0".to_owned()));
}

/// Makes, reads, renames, synchronises and removes files; one is left.
fn take_turns(files: &Path, number: usize, turns: usize) {
    let (first, second) = (files.join(format!("a{number}")), files.join(format!("b{number}")));
    for turn in 0..turns {
        std::fs::write(&first, number.to_string()).unwrap();
        assert_eq!(std::fs::read_to_string(&first).unwrap(), number.to_string());
        rename(&first, &second).unwrap();
        assert_eq!(std::fs::read_to_string(files.join("shared")).unwrap(), "some bytes");
        assert!(std::fs::metadata(&first).is_err());
        if turn % 4 == number % 4 {
            File::open(&second).unwrap().sync_all().unwrap();
        }
        if turn + 1 < turns {
            std::fs::remove_file(&second).unwrap();
        }
    }
}
