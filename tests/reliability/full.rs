//! A small disk that is full, or turns read-only, under every kind of write: the program hears of it,
//! reading goes on, and nothing is there by halves.

use std::io;
use std::os::unix::fs::{FileExt, symlink};
use std::path::PathBuf;

use crate::common::disk::SmallDisk;
use crate::common::sys::{errno, open, rename, setxattr, sync_directory, write, write_and_close};
use crate::common::{Mode, Model, Mount, fill};

const LARGE: usize = 300_000;

/// What a program can ask for that needs space, each under names of its own.
fn every_kind_of_write(
    mount: &Mount, model: &Model, tag: &str,
) -> Vec<(&'static str, io::Result<()>)> {
    let files = |name: &str| mount.files(format!("{tag}-{name}"));
    let page = |sequence: &str, start| {
        let layer = model.layer(mount, sequence, 0);
        layer.join(kvfs::page::names::format_page(kvfs::page::TokenStart(start)))
    };
    let staged = |target: &PathBuf, bytes: &[u8]| -> io::Result<()> {
        let temporary = target.with_file_name(format!(".{tag}.tmp"));
        let _ = std::fs::remove_file(&temporary);
        write_and_close(&temporary, bytes)?;
        rename(&temporary, target)
    };
    let new = libc::O_WRONLY | libc::O_CREAT;
    let synced = |outcome: io::Result<()>| outcome.and_then(|()| sync_directory(mount.path()));
    let start = u64::from(tag == "full") * 3200;
    let appended = |path: PathBuf, bytes: &[u8]| -> io::Result<()> {
        let file = open(path, new | libc::O_APPEND)?;
        write(&file, bytes)?;
        file.sync_all()
    };
    let allocated = || -> io::Result<()> {
        let file = open(files("allocated"), new)?;
        nix::fcntl::posix_fallocate(&file, 0, 1 << 20)?;
        file.sync_all()
    };
    let copied = || -> io::Result<()> {
        let (from, to) = (open(mount.files("kept"), libc::O_RDONLY)?, open(files("copied"), new)?);
        let mut left = LARGE;
        while left > 0 {
            let count = nix::fcntl::copy_file_range(&from, None, &to, None, left)?;
            left -= count;
        }
        to.sync_all()
    };
    let overwritten = || -> io::Result<()> {
        let file = open(mount.files("in place"), libc::O_RDWR)?;
        file.write_all_at(&fill(9, LARGE), LARGE as u64 * if tag == "full" { 2 } else { 1 })?;
        file.sync_all()
    };
    let mapped = || -> io::Result<()> {
        // Space is taken before: a store through a mapping cannot be told of a full disk.
        let file = open(files("mapped"), libc::O_RDWR | libc::O_CREAT)?;
        nix::fcntl::posix_fallocate(&file, 0, 65536)?;
        crate::common::sys::map_mut(&file)[..5].copy_from_slice(b"bytes");
        file.sync_all()
    };
    let named = mount.files(format!("{tag}-{}", "n".repeat(200)));
    vec![
        ("a file", synced(write_and_close(files("new"), &fill(1, LARGE)))),
        ("a file over another", synced(staged(&files("renamed"), &fill(2, LARGE)))),
        ("a file changed in place", overwritten()),
        (
            "a file made longer",
            open(files("new"), libc::O_RDWR | libc::O_CREAT).and_then(|file| {
                file.set_len(1 << 20)?;
                file.sync_all()
            }),
        ),
        ("space asked for", allocated()),
        ("a copied range", copied()),
        ("a mapping", mapped()),
        ("a page by rename", synced(staged(&page("a", start), &model.page(0, start, 1)))),
        ("a page in place", synced(write_and_close(page("b", start), &model.page(0, start, 2)))),
        (
            "rows",
            appended(
                model
                    .layer(mount, "rows", 0)
                    .join(kvfs::page::names::format_tail(kvfs::page::TokenStart(start))),
                &model.rows(3, 3),
            ),
        ),
        ("tokens", appended(model.sequence(mount, "rows").join("tokens"), &[1, 0, 0, 0])),
        ("a directory", synced(std::fs::create_dir(files("directory")))),
        ("a symbolic link", synced(symlink("target", files("symlink")))),
        ("a hard link", synced(std::fs::hard_link(mount.files("kept"), files("link")))),
        ("a long name", synced(write_and_close(named, b""))),
        (
            "an attribute",
            synced(setxattr(mount.files("kept"), &format!("user.{tag}"), &fill(4, 9000))),
        ),
    ]
}

fn prepared(disk: &SmallDisk, mode: Mode) -> (Mount, Model) {
    let mount =
        Mount::of_store_with(mode, &["--commit-interval", "3600"], &disk.mountpoint.join("store"));
    let model = Model::small();
    model.install(&mount);
    for sequence in ["a", "b", "rows"] {
        model.layer(&mount, sequence, 0);
    }
    write_and_close(mount.files("kept"), &fill(8, LARGE)).unwrap();
    write_and_close(mount.files("in place"), &fill(9, LARGE)).unwrap();
    sync_directory(mount.path()).unwrap();
    (mount, model)
}

#[track_caller]
fn assert_kept(mount: &Mount) {
    assert!(std::fs::read(mount.files("kept")).unwrap() == fill(8, LARGE));
}

fn a_full_disk(mode: Mode) {
    let disk = SmallDisk::new();
    let (mut mount, model) = prepared(&disk, mode);
    for (what, outcome) in every_kind_of_write(&mount, &model, "before") {
        assert!(outcome.is_ok(), "{what}: {outcome:?}");
    }
    let ballast = disk.fill_up();
    let mut refused = 0;
    for (what, outcome) in every_kind_of_write(&mount, &model, "full") {
        let code = errno(&outcome);
        // Once the database has hit the full disk, the store takes no change until it is mounted anew.
        let allowed = [0, libc::ENOSPC, libc::EROFS];
        assert!(allowed.contains(&code), "{what}: {outcome:?}");
        refused += usize::from(code != 0);
        assert_kept(&mount);
    }
    assert!(refused >= 8, "only {refused} kinds of writes were refused");
    println!("{mode:?}: {refused} kinds of writes were refused");
    mount.kill();
    std::fs::remove_file(ballast).unwrap();
    mount.mount();
    assert_kept(&mount);
    for name in ["new", "renamed"] {
        let path = mount.files(format!("before-{name}"));
        assert!(path.exists(), "{}", path.display());
        // There by halves would be another length than 0, what was written, or absence.
        let found =
            std::fs::metadata(mount.files(format!("full-{name}"))).map_or(0, |stat| stat.len());
        assert!([0, LARGE as u64, 1 << 20].contains(&found), "{name}: {found} bytes");
    }
    for (what, outcome) in every_kind_of_write(&mount, &model, "after") {
        let code = errno(&outcome);
        assert!([0, libc::EEXIST].contains(&code), "{what}: {outcome:?}");
    }
    assert_eq!(mount.status("state"), "ok");
    assert!(mount.unmount().success());
    crate::kills::assert_sound(mount.store());
}

#[test]
fn a_full_disk_passthrough() {
    crate::require!(fuse, root, r#loop);
    a_full_disk(Mode::Passthrough);
}

#[test]
fn a_full_disk_served() {
    crate::require!(fuse, root, r#loop);
    a_full_disk(Mode::Served);
}

/// As after an error that makes ext4 give up: no write gets through any more.
#[test]
fn a_disk_that_turns_read_only() {
    crate::require!(fuse, root, r#loop);
    let disk = SmallDisk::new();
    let (mut mount, model) = prepared(&disk, Mode::Passthrough);
    disk.make_read_only();
    let mut refused = 0;
    for (what, outcome) in every_kind_of_write(&mount, &model, "before") {
        let code = errno(&outcome);
        assert!([0, libc::EROFS, libc::EIO].contains(&code), "{what}: {outcome:?}");
        refused += usize::from(code != 0);
        assert_kept(&mount);
    }
    assert!(refused >= 14, "only {refused} kinds of writes were refused");
    assert_eq!(mount.status("state"), "read-only after a disk error");
    mount.kill();
    crate::common::forks::output(std::process::Command::new("umount").arg("-l").arg(mount.path()));
    disk.restore_power();
    mount.mount();
    assert_kept(&mount);
    sync_directory(mount.path()).unwrap();
    assert_eq!(mount.status("state"), "ok");
}
