//! Operations of several durable steps: the daemon is killed at one of them, or one fails. What is there
//! afterwards is what was there before or what was asked for, and the operation can be completed.
//!
//! Each round has a name of its own and one fault, at the so many-th call of a kind that the operation comes to.

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use kvfs::page::{Layer, TokenStart, names};

use crate::common::injection::Injection;
use crate::common::mount::{files_below, scratch_directory};
use crate::common::sys::{getxattr, open, rename, sync_directory, write_and_close};
use crate::common::{Mode, Model, Mount, eventually, fill, forks};
use crate::kills::assert_sound;
use crate::rounding::{eight_bits, is_rounded, page};
use crate::setting;
use crate::writer::Sequence;

/// Calls that change a disk, or decide that they will.
const CALLS: [&str; 9] = [
    "openat2",
    "openat",
    "pwrite64",
    "renameat",
    "linkat",
    "unlinkat",
    "fsync",
    "fdatasync",
    "copy_file_range",
];
/// What happens at a call.
const FAULTS: [&str; 3] = ["signal=KILL", "error=EIO", "error=ENOSPC"];
/// At which calls of a kind the daemon is killed, unless `KVFS_HALVES` says otherwise.
const KILLS: u64 = 3;
/// The same for what fails, which the daemon tries again after seconds.
const FAILURES: u64 = 1;
/// How long the daemon's work in the background is waited for: it tries again after five seconds, and a fault is met
/// by each of its threads.
const PATIENCE: Duration = Duration::from_secs(18);
const READ_ONLY: &str = "read-only after a disk error";

/// A mount on which an operation is tried again and again.
struct Stage {
    mount: Mount,
    model: Model,
    /// The remote, of those that have one.
    remote: tempfile::TempDir,
    /// Keeps what it is open to as it is.
    reader: Option<File>,
}

/// What is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Seen {
    Before,
    Done,
}

/// An operation under a name.
struct Operation {
    /// What there is before.
    prepare: fn(&mut Stage, &str),
    act: fn(&mut Stage, &str) -> io::Result<()>,
    /// Anything in between is a panic.
    look: fn(&mut Stage, &str) -> Seen,
    /// It succeeds whether or not there is room for all of it.
    is_best_effort: bool,
}

/// Runs a round; whether the fault happened.
fn round(
    stage: &mut Stage, operation: &Operation, (call, fault): (&str, &str), name: &str,
) -> bool {
    (operation.prepare)(stage, name);
    // The release of a file that was just closed may be on its way.
    eventually("what was prepared to be durable", || {
        sync_directory(stage.mount.path()).unwrap();
        (stage.mount.status("uncommitted_changes") == "0").then_some(())
    });
    let injection = Injection::into(&stage.mount, call, fault);
    let mut outcome = (operation.act)(stage, name);
    let (was_killed, was_met) = if fault.starts_with("signal") {
        let has_ended = has_ended_soon(&mut stage.mount, &outcome);
        // To detach from a daemon that is about to end, strace would wait for ever.
        injection.kill();
        (has_ended, has_ended)
    } else {
        (false, injection.end() > 0)
    };
    let was_killed = was_killed || stage.mount.has_ended();
    // After some failures the store takes no change until it is mounted again.
    let must_mount = was_killed || stage.mount.status("state") == READ_ONLY;
    if must_mount {
        stage.mount.crash();
    }
    let is_done = (operation.look)(stage, name) == Seen::Done;
    assert!(
        is_done || outcome.is_err() || operation.is_best_effort,
        "{call}, {fault}: acknowledged, and not there"
    );
    if !is_done || outcome.is_err() {
        outcome = (operation.act)(stage, name);
        if outcome.is_err() && !must_mount {
            stage.mount.crash();
            outcome = (operation.act)(stage, name);
        }
    }
    assert!(outcome.is_ok(), "{call}, {fault}: {outcome:?}");
    assert_eq!((operation.look)(stage, name), Seen::Done, "{call}, {fault}");
    was_met
}

/// A daemon that was killed answers no more a moment later.
fn has_ended_soon(mount: &mut Mount, outcome: &io::Result<()>) -> bool {
    let deadline = Instant::now() + Duration::from_millis(if outcome.is_err() { 1000 } else { 50 });
    while !mount.has_ended() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(2));
    }
    mount.has_ended()
}

/// Tries an operation with each fault at each kind of call.
fn try_all(stage: &mut Stage, what: &str, operation: &Operation) {
    let mut met = 0;
    for call in CALLS {
        for fault in FAULTS {
            let default = if fault.starts_with("signal") { KILLS } else { FAILURES };
            for when in 1..=setting("KVFS_HALVES", default) {
                let name = format!("{call}-{}-{when}", &fault[fault.len() - 3..]).to_lowercase();
                if !round(stage, operation, (call, &format!("{fault}:when={when}")), &name) {
                    break;
                }
                met += 1;
            }
        }
    }
    println!("{what}: {met} faults met");
    assert!(met >= 9, "{what}: only {met} faults were met");
    assert!(stage.mount.unmount().success(), "{}", stage.mount.log());
    assert_sound(stage.mount.store());
}

fn stage(mode: Mode, options: &[&str], model: Model) -> Stage {
    let remote = scratch_directory();
    let place = remote.path().to_str().unwrap().to_owned();
    let options: Vec<&str> =
        options.iter().map(|option| if *option == "REMOTE" { &place } else { *option }).collect();
    let mount = Mount::with_options(mode, &options);
    model.install(&mount);
    Stage { mount, model, remote, reader: None }
}

/// What is waited for in the background; an error where it does not come.
fn wait_for(mut done: impl FnMut() -> io::Result<bool>) -> io::Result<()> {
    let deadline = Instant::now() + PATIENCE;
    while !done()? {
        if Instant::now() > deadline {
            return Err(io::ErrorKind::TimedOut.into());
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

/// Where the first page of a sequence stands, without asking whether its directory is there.
fn page_path(stage: &Stage, name: &str) -> PathBuf {
    let layer = names::format_layer(Layer(0));
    let page = names::format_page(TokenStart(0));
    stage.model.sequence(&stage.mount, name).join(layer).join(page)
}

fn slot_path(stage: &Stage, name: &str) -> PathBuf {
    stage.model.directory(&stage.mount).join(format!("slots/{name}.bin"))
}

fn write_sequence(stage: &Stage, name: &str, first: u32) {
    let mut sequence = Sequence::new(&stage.model, name);
    sequence.append(&stage.mount, &stage.model, &(first..first + 40).collect::<Vec<_>>());
}

/// Writes the slot of another sequence.
fn save_slot(stage: &mut Stage, name: &str) -> io::Result<()> {
    let bytes = std::fs::read(slot_path(stage, "source"))?;
    let mut file = open(slot_path(stage, name), libc::O_WRONLY | libc::O_CREAT | libc::O_TRUNC)?;
    file.write_all(&bytes)?;
    crate::common::sys::close(file)?;
    sync_directory(stage.mount.path())
}

fn look_at_slot(stage: &Stage, name: &str, before: Option<&str>) -> Seen {
    let sequences = stage.model.sequence(&stage.mount, "");
    eventually("nothing to be left of a save", || {
        let names = std::fs::read_dir(&sequences).unwrap().map(|entry| entry.unwrap().file_name());
        names.into_iter().all(|name| !name.to_string_lossy().ends_with('~')).then_some(())
    });
    let read = |name| std::fs::read(slot_path(stage, name)).ok();
    let found = read(name);
    if found == read("source") {
        return Seen::Done;
    }
    assert!(found == before.and_then(read), "{name} is neither what it was nor what was written");
    Seen::Before
}

#[test]
fn a_slot_becomes_a_sequence() {
    crate::require!(fuse, strace);
    let mut stage = stage(Mode::Served, &["--commit-interval", "3600"], Model::small());
    write_sequence(&stage, "source", 0);
    let operation = Operation {
        prepare: |_, _| {},
        act: save_slot,
        look: |stage, name| look_at_slot(stage, name, None),
        is_best_effort: false,
    };
    try_all(&mut stage, "a slot becomes a sequence", &operation);
}

#[test]
fn a_slot_takes_the_place_of_a_sequence() {
    crate::require!(fuse, strace);
    let mut stage = stage(Mode::Served, &["--commit-interval", "3600"], Model::small());
    write_sequence(&stage, "source", 0);
    write_sequence(&stage, "old", 1000);
    let operation = Operation {
        prepare: |stage, name| write_sequence(stage, name, 1000),
        act: save_slot,
        look: |stage, name| look_at_slot(stage, name, Some("old")),
        is_best_effort: false,
    };
    try_all(&mut stage, "a slot takes the place of a sequence", &operation);
}

/// A page that nobody has open any more goes cold with fewer bits.
#[test]
fn a_page_is_rounded() {
    const LOSSY: &str = "user.kvfs.lossy";
    crate::require!(fuse, root, strace);
    let options = ["--ssd", "16M", "--cold", "zstd:1", "--commit-interval", "0.05"];
    let mut stage = stage(Mode::Passthrough, &options, eight_bits());
    for number in 0..4_u64 {
        let bytes = fill(number, 4 << 20);
        write_and_close(stage.mount.files(number.to_string()), &bytes).unwrap();
    }
    let operation = Operation {
        prepare: |stage, name| {
            let path = stage.model.page_path(&stage.mount, name, 0, 0);
            let staged = path.with_extension("tmp");
            write_and_close(&staged, &page(&stage.model, 0)).unwrap();
            // Else it would share the bytes of the rounds before.
            crate::common::sys::setxattr(&staged, "user.round", name.as_bytes()).unwrap();
            rename(staged, &path).unwrap();
            stage.reader = Some(open(path, libc::O_RDONLY).unwrap());
        },
        act: |stage, name| {
            stage.reader = None;
            let path = page_path(stage, name);
            wait_for(|| match getxattr(&path, LOSSY) {
                Err(error) if error.raw_os_error() == Some(libc::ENODATA) => Ok(false),
                outcome => outcome.map(|_| true),
            })?;
            sync_directory(stage.mount.path())
        },
        look: |stage, name| {
            let original = page(&stage.model, 0);
            let path = page_path(stage, name);
            // Nobody rounds it while it is open.
            let mut file = open(&path, libc::O_RDONLY).unwrap();
            let mut found = Vec::new();
            io::Read::read_to_end(&mut file, &mut found).unwrap();
            if getxattr(&path, LOSSY).is_err() {
                assert!(found == original, "{name}: neither the old nor the new version");
                return Seen::Before;
            }
            assert!(is_rounded(&found, &original, "q8_0"), "{name}: not the new version");
            Seen::Done
        },
        is_best_effort: false,
    };
    try_all(&mut stage, "a page is rounded", &operation);
}

/// Where a page lies before it gets its name.
fn staged(stage: &Stage, name: &str) -> PathBuf {
    page_path(stage, name).with_extension("tmp")
}

/// The bytes behind a reason that names a sequence.
fn kept(stage: &Stage, name: &str) -> Option<Vec<u8>> {
    let files = files_below(&stage.mount.store().join("quarantine"));
    let mut reasons =
        files.iter().filter(|path| path.extension().is_some_and(|end| end == "reason"));
    let is_meant = |path: &&PathBuf| {
        let text = std::fs::read_to_string(path).unwrap();
        text.contains(&format!("/{name}/")) && text.ends_with('\n')
    };
    let reason = reasons.find(is_meant)?;
    std::fs::read(reason.with_extension("")).ok()
}

/// A page that is refused: a copy of it and the reason.
#[test]
fn a_refused_page_goes_to_quarantine() {
    crate::require!(fuse, strace);
    let mut stage = stage(Mode::Served, &["--commit-interval", "3600"], Model::small());
    let operation = Operation {
        prepare: |stage, name| {
            stage.model.layer(&stage.mount, name, 0);
            write_and_close(staged(stage, name), name.as_bytes()).unwrap();
        },
        act: |stage, name| {
            let path = page_path(stage, name);
            match rename(staged(stage, name), path) {
                Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Ok(()),
                outcome => outcome.and(Err(io::Error::other("it was not refused"))),
            }
        },
        look: |stage, name| {
            assert!(!page_path(stage, name).exists(), "{name}");
            assert_eq!(std::fs::read(staged(stage, name)).unwrap(), name.as_bytes());
            match kept(stage, name) {
                Some(bytes) if bytes == name.as_bytes() => Seen::Done,
                _ => Seen::Before,
            }
        },
        is_best_effort: true,
    };
    try_all(&mut stage, "a refused page goes to quarantine", &operation);
}

fn sync_with_remote(mountpoint: &Path) -> io::Result<()> {
    let patience = PATIENCE.as_secs().to_string();
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvfs"));
    let output =
        forks::output(command.args(["sync", "--remote", "--timeout", &patience]).arg(mountpoint));
    let said =
        || String::from_utf8_lossy(&[&output.stdout[..], &output.stderr].concat()).into_owned();
    if output.status.success() { Ok(()) } else { Err(io::Error::other(said())) }
}

/// A name, and bytes for it, come into the remote.
#[test]
fn names_are_published() {
    crate::require!(fuse, strace);
    let options = ["--remote", "REMOTE", "--commit-interval", "0.05"];
    let mut stage = stage(Mode::Served, &options, Model::small());
    sync_with_remote(stage.mount.path()).unwrap();
    let operation = Operation {
        prepare: |stage, name| write_and_close(stage.mount.files(name), name.as_bytes()).unwrap(),
        act: |stage, _| sync_with_remote(stage.mount.path()),
        look: |stage, name| {
            assert_eq!(std::fs::read(stage.mount.files(name)).unwrap(), name.as_bytes());
            // It goes on by itself, unless the store takes no change.
            let status = |key| stage.mount.status(key);
            let is_done = || {
                let is_named = status("remote_names_changes") == status("remote_names_published");
                is_named && status("remote_waiting_files") == "0"
            };
            let outcome = wait_for(|| Ok(is_done()));
            if outcome.is_ok() { Seen::Done } else { Seen::Before }
        },
        is_best_effort: false,
    };
    try_all(&mut stage, "names are published", &operation);
    // What the remote has now makes the store anew.
    let options = ["--remote", stage.remote.path().to_str().unwrap()];
    let again = Mount::with_options(Mode::Served, &options);
    for entry in std::fs::read_dir(again.files("")).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        assert_eq!(std::fs::read_to_string(again.files(&name)).unwrap(), name);
    }
    assert!(std::fs::read_dir(again.files("")).unwrap().count() >= 9);
}
