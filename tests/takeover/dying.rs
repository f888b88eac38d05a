//! Daemons die while programs use a mount in every way. What was acknowledged as durable is there, and nothing fails but what
//! relied on the rest.

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::clients::{Done, is_over};
use crate::common::sys::{close, errno, rename, sync_directory, write_and_close};
use crate::common::{Mode, Mount};
use crate::deaths::die;
use crate::steps::check_store;

/// The longest that a call may take.
const PAUSE_MAX: Duration = Duration::from_secs(2);

/// Deaths that a keeper makes good one after the other.
const DEATHS: u32 = 3;

fn content(round: u64, bytes: usize) -> Vec<u8> {
    vec![u8::try_from(round % 251).unwrap(); bytes]
}

/// What a call may end with when a daemon died: success, or one of these errors.
#[track_caller]
fn well_or<T>(allowed: &[i32], outcome: io::Result<T>) -> Option<T> {
    assert!(outcome.is_ok() || allowed.contains(&errno(&outcome)), "{:?}", outcome.err());
    outcome.ok()
}

/// Writes files under another name, syncs and renames them, and reads all that were made durable so.
fn keep(directory: &Path, bytes: usize, over: &AtomicBool) -> Done {
    std::fs::create_dir(directory).unwrap();
    sync_directory(directory.parent().unwrap()).unwrap();
    let (mut done, mut durable) = (Done::default(), Vec::new());
    for round in 0.. {
        if is_over(over) {
            break;
        }
        let (temporary, path) = (directory.join(".tmp"), directory.join(round.to_string()));
        // What was synced may have lost its name since; what is not synced may be lost whole.
        let made = (|| -> Option<()> {
            let mut file = done.timed(|| File::create(&temporary)).unwrap();
            well_or(&[libc::EIO], done.timed(|| file.write_all(&content(round, bytes))))?;
            well_or(&[libc::EIO], done.timed(|| file.sync_all()))?;
            well_or(&[libc::EIO], done.timed(|| close(file)))?;
            well_or(&[libc::ENOENT], done.timed(|| rename(&temporary, &path)))?;
            well_or(&[libc::EIO], done.timed(|| sync_directory(directory)))
        })();
        if made.is_some() {
            durable.push(round);
        }
        for old in durable.iter().rev().step_by(7).take(4) {
            let read = done.timed(|| std::fs::read(directory.join(old.to_string()))).unwrap();
            assert!(read == content(*old, bytes), "{old}");
        }
    }
    for old in &durable {
        assert!(std::fs::read(directory.join(old.to_string())).unwrap() == content(*old, bytes));
    }
    assert!(durable.len() > 10, "only {} files were made durable", durable.len());
    done
}

/// Makes directories, links and attributes of which it syncs none.
fn name(directory: &Path, over: &AtomicBool) -> Done {
    std::fs::create_dir(directory).unwrap();
    sync_directory(directory.parent().unwrap()).unwrap();
    let (mut done, gone) = (Done::default(), [libc::ENOENT]);
    for round in 0.. {
        if is_over(over) {
            break;
        }
        let path = |what: &str| directory.join(format!("{what}-{round}"));
        // Nobody had these names before, whatever was done twice.
        done.timed(|| std::fs::create_dir(path("made"))).unwrap();
        done.timed(|| std::os::unix::fs::symlink("target", path("link"))).unwrap();
        well_or(&gone, done.timed(|| rename(path("made"), path("renamed"))));
        well_or(&gone, done.timed(|| std::fs::hard_link(path("link"), path("other"))));
        well_or(&gone, done.timed(|| std::fs::remove_file(path("link"))));
        well_or(&gone, done.timed(|| std::fs::remove_file(path("other"))));
        well_or(&gone, done.timed(|| std::fs::remove_dir(path("renamed"))));
        well_or(&gone, done.timed(|| std::fs::remove_dir(path("made"))));
    }
    done
}

/// Reads through descriptors that stay open, and opens others beside them.
fn read(files: &[(PathBuf, Vec<u8>)], over: &AtomicBool) -> Done {
    let opened: Vec<File> = files.iter().map(|(path, _)| File::open(path).unwrap()).collect();
    let mut done = Done::default();
    while !is_over(over) {
        for ((path, bytes), file) in files.iter().zip(&opened) {
            let mut read = vec![0; bytes.len()];
            done.timed(|| file.read_exact_at(&mut read, 0)).unwrap();
            assert!(read == *bytes, "{}", path.display());
            assert!(done.timed(|| std::fs::read(path)).unwrap() == *bytes, "{}", path.display());
            let found = done.timed(|| std::fs::metadata(path)).unwrap();
            assert_eq!(found.len(), bytes.len() as u64);
        }
    }
    done
}

/// Replaces a file again and again, which others find at any moment.
fn replace(directory: &Path, over: &AtomicBool) -> Done {
    let path = |name: &str| directory.join(name);
    std::fs::create_dir(directory).unwrap();
    write_and_close(path("always"), b"0").unwrap();
    sync_directory(directory).unwrap();
    let finding = || {
        let mut done = Done::default();
        while !is_over(over) {
            done.timed(|| File::open(path("always"))).unwrap();
            done.timed(|| std::fs::metadata(path("always"))).unwrap();
        }
        done
    };
    std::thread::scope(|scope| {
        let others = [scope.spawn(finding), scope.spawn(finding)];
        let mut done = Done::default();
        while !is_over(over) {
            let written = done.timed(|| {
                let mut file = File::create(path("next"))?;
                file.write_all(b"n")?;
                close(file)
            });
            if well_or(&[libc::EIO], written).is_some() {
                well_or(&[libc::ENOENT], done.timed(|| rename(path("next"), path("always"))));
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        others.into_iter().fold(done, |done, other| done.and(other.join().unwrap()))
    })
}

fn run(mode: Mode) {
    let mut mount = crate::deaths::kept(mode, &[]);
    mount.may_be_slow("clients use both cores");
    let files = [("small", 1000), ("large", 1 << 20)]
        .map(|(name, bytes)| (mount.files(name), content(7, bytes)));
    for (path, bytes) in &files {
        write_and_close(path, bytes).unwrap();
    }
    sync_directory(mount.path()).unwrap();
    let over = AtomicBool::new(false);
    let done = std::thread::scope(|scope| {
        let clients = [
            scope.spawn(|| keep(&mount.files("kept-small"), 1000, &over)),
            scope.spawn(|| keep(&mount.files("kept-large"), 200_000, &over)),
            scope.spawn(|| name(&mount.files("names"), &over)),
            scope.spawn(|| read(&files, &over)),
            scope.spawn(|| replace(&mount.files("replaced"), &over)),
        ];
        let died = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| kill_all(&mount)));
        over.store(true, Ordering::Relaxed);
        let done = clients.map(|client| client.join().unwrap());
        died.unwrap();
        done.into_iter().fold(Done::default(), Done::and)
    });
    println!(
        "{mode:?}: {} calls beside {DEATHS} deaths, the longest took {:.0?}",
        done.calls, done.longest
    );
    assert!(done.longest <= PAUSE_MAX, "{:?}", done.longest);
    assert_eq!(mount.status_number("daemon_deaths"), u64::from(DEATHS));
    assert!(mount.unmount().success());
    check_store(&mount);
}

fn kill_all(mount: &Mount) {
    for death in 0..DEATHS {
        std::thread::sleep(Duration::from_millis(700 + 37 * u64::from(death)));
        die(mount);
    }
    std::thread::sleep(Duration::from_millis(700));
}

#[test]
fn what_is_durable_is_there_and_nothing_else_fails_where_the_kernel_reads_files() {
    crate::require!(fuse, root);
    run(Mode::Passthrough);
}

#[test]
fn what_is_durable_is_there_and_nothing_else_fails_where_the_daemon_reads_files() {
    crate::require!(fuse);
    run(Mode::Served);
}
