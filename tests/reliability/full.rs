//! A small disk that is full, or turns read-only, under every kind of write: the program hears of it,
//! reading goes on, and nothing is there by halves.

use std::io;
use std::os::unix::fs::{FileExt, symlink};
use std::path::{Path, PathBuf};

use kvfs::page::{TokenStart, names};

use crate::common::disk::SmallDisk;
use crate::common::sys::{
    errno, getxattr, open, rename, setxattr, sync_directory, write, write_and_close,
};
use crate::common::{Mode, Model, Mount, fill};

const LARGE: usize = 300_000;

/// A kind of write and what became of it.
pub(crate) type Attempt = (&'static str, io::Result<()>);

/// What a program can ask for that needs space, each under names of its own.
pub(crate) fn every_kind_of_write(mount: &Mount, model: &Model, tag: &str) -> Vec<Attempt> {
    let mut attempts = writes_of_files(mount, tag);
    attempts.extend(writes_of_models(mount, model, tag));
    attempts.extend(writes_of_names(mount, tag));
    attempts
}

const NEW: i32 = libc::O_WRONLY | libc::O_CREAT;

fn synced(mount: &Mount, outcome: io::Result<()>) -> io::Result<()> {
    outcome.and_then(|()| sync_directory(mount.path()))
}

fn renamed(target: &Path, bytes: &[u8]) -> io::Result<()> {
    let temporary = target.with_file_name(".next.tmp");
    let _ = std::fs::remove_file(&temporary);
    write_and_close(&temporary, bytes)?;
    rename(&temporary, target)
}

fn writes_of_files(mount: &Mount, tag: &str) -> Vec<Attempt> {
    let files = |name: &str| mount.files(format!("{tag}-{name}"));
    let overwritten = || -> io::Result<()> {
        let file = open(mount.files("in place"), libc::O_RDWR)?;
        let times = if tag == "full" { 2 } else { 1 };
        file.write_all_at(&fill(9, LARGE), LARGE as u64 * times)?;
        file.sync_all()
    };
    let longer = || -> io::Result<()> {
        let file = open(files("new"), libc::O_RDWR | libc::O_CREAT)?;
        file.set_len(1 << 20)?;
        file.sync_all()
    };
    let allocated = || -> io::Result<()> {
        let file = open(files("allocated"), NEW)?;
        nix::fcntl::posix_fallocate(&file, 0, 1 << 20)?;
        file.sync_all()
    };
    let copied = || -> io::Result<()> {
        let (from, to) = (open(mount.files("kept"), libc::O_RDONLY)?, open(files("copied"), NEW)?);
        let mut left = LARGE;
        while left > 0 {
            left -= nix::fcntl::copy_file_range(&from, None, &to, None, left)?;
        }
        to.sync_all()
    };
    let mapped = || -> io::Result<()> {
        // Space is taken before: a store through a mapping cannot be told of a full disk.
        let file = open(files("mapped"), libc::O_RDWR | libc::O_CREAT)?;
        nix::fcntl::posix_fallocate(&file, 0, 65536)?;
        crate::common::sys::map_mut(&file)[..5].copy_from_slice(b"bytes");
        file.sync_all()
    };
    vec![
        ("a file", synced(mount, write_and_close(files("new"), &fill(1, LARGE)))),
        ("a file over another", synced(mount, renamed(&files("renamed"), &fill(2, LARGE)))),
        ("a file changed in place", overwritten()),
        ("a file made longer", longer()),
        ("space asked for", allocated()),
        ("a copied range", copied()),
        ("a mapping", mapped()),
    ]
}

fn writes_of_models(mount: &Mount, model: &Model, tag: &str) -> Vec<Attempt> {
    let start = u64::from(tag == "full") * 3200;
    let layer = |sequence| model.layer(mount, sequence, 0);
    let page = |sequence| layer(sequence).join(names::format_page(TokenStart(start)));
    let appended = |path: PathBuf, bytes: &[u8]| -> io::Result<()> {
        let file = open(path, NEW | libc::O_APPEND)?;
        write(&file, bytes)?;
        file.sync_all()
    };
    let tail = layer("rows").join(names::format_tail(TokenStart(start)));
    let tokens = model.sequence(mount, "rows").join(names::TOKENS);
    let in_place = write_and_close(page("b"), &model.page(0, start, 2));
    vec![
        ("a page by rename", synced(mount, renamed(&page("a"), &model.page(0, start, 1)))),
        ("a page in place", synced(mount, in_place)),
        ("rows", appended(tail, &model.rows(3, 3))),
        ("tokens", appended(tokens, &[1, 0, 0, 0])),
    ]
}

fn writes_of_names(mount: &Mount, tag: &str) -> Vec<Attempt> {
    let files = |name: &str| mount.files(format!("{tag}-{name}"));
    let long = mount.files(format!("{tag}-{}", "n".repeat(200)));
    let kept = mount.files("kept");
    let attribute = setxattr(&kept, &format!("user.{tag}"), &fill(4, 9000));
    vec![
        ("a directory", synced(mount, std::fs::create_dir(files("directory")))),
        ("a symbolic link", synced(mount, symlink("target", files("symlink")))),
        ("a hard link", synced(mount, std::fs::hard_link(&kept, files("link")))),
        ("a long name", synced(mount, write_and_close(long, b""))),
        ("an attribute", synced(mount, attribute)),
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

/// What a dead mount was writing fills the disk to the last byte: it goes before anything else needs room.
#[test]
fn a_disk_that_is_full_of_what_nobody_finished() {
    crate::require!(fuse, root, r#loop);
    let disk = SmallDisk::new();
    let store = disk.mountpoint.join("store");
    let mut mount = Mount::of_store_with(Mode::Passthrough, &["--commit-interval", "60"], &store);
    write_and_close(mount.files("kept"), &fill(1, LARGE)).unwrap();
    sync_directory(mount.path()).unwrap();
    let unfinished = open(mount.files("unfinished"), NEW).unwrap();
    let mut bytes = 1 << 20;
    let mut end = 0;
    while bytes > 0 {
        match unfinished.write_all_at(&fill(2, bytes), end) {
            Ok(()) => end += bytes as u64,
            Err(_) => bytes /= 2,
        }
    }
    mount.kill();
    drop(unfinished);
    crate::common::forks::output(std::process::Command::new("umount").arg("-l").arg(mount.path()));
    mount.mount();
    assert_eq!(std::fs::read(mount.files("kept")).unwrap(), fill(1, LARGE));
    write_and_close(mount.files("new"), &fill(3, LARGE)).unwrap();
    sync_directory(mount.path()).unwrap();
    assert!(mount.unmount().success());
    crate::kills::assert_sound(&store);
}

/// Somebody took what the store keeps for the database, and the disk is full. Thousands of names can be removed all the
/// same: few of them wait for one commit.
#[test]
fn much_is_removed_where_nothing_is_kept_for_it() {
    crate::require!(fuse, root, r#loop);
    let disk = SmallDisk::new();
    let store = disk.mountpoint.join("store");
    let mut mount = Mount::of_store_with(Mode::Passthrough, &["--commit-interval", "0.05"], &store);
    write_and_close(mount.files("kept"), &fill(1, LARGE)).unwrap();
    let made = 16_000;
    let name = |number: usize| {
        mount.files(format!("{:040}", number % 50)).join(format!("{:0200}", number * 7919 % made))
    };
    for number in 0..made {
        std::fs::create_dir_all(name(number)).unwrap();
    }
    sync_directory(mount.path()).unwrap();
    let others = fill_without_reserve(&disk);
    for number in 0..made {
        std::fs::remove_dir(name(number)).unwrap();
    }
    sync_directory(mount.path()).unwrap();
    std::fs::remove_file(others).unwrap();
    mount.kill();
    mount.mount();
    assert!(std::fs::read(mount.files("kept")).unwrap() == fill(1, LARGE));
    assert_eq!(std::fs::read_dir(mount.files("")).unwrap().count(), 51);
    assert_eq!(std::fs::read_dir(mount.files(format!("{:040}", 7))).unwrap().count(), 0);
    assert!(mount.unmount().success());
    crate::kills::assert_sound(&store);
}

/// The database finds no room in the middle of a commit. It goes on as soon as there is some, and files can be read
/// until then.
#[test]
fn a_commit_that_finds_no_room_is_no_end() {
    crate::require!(fuse, root, r#loop);
    let disk = SmallDisk::new();
    let store = disk.mountpoint.join("store");
    let mut mount = Mount::of_store_with(Mode::Passthrough, &["--commit-interval", "60"], &store);
    for name in ["kept", "large", "unseen"] {
        write_and_close(mount.files(name), &fill(1, LARGE)).unwrap();
    }
    assert!(mount.unmount().success());
    mount.mount();
    write_and_close(mount.files("removed"), &fill(2, LARGE)).unwrap();
    sync_directory(mount.path()).unwrap();
    let others = fill_without_reserve(&disk);
    let values = ["a", "b", "c"].map(|letter| letter.repeat(60_000));
    for (number, value) in values.iter().enumerate() {
        setxattr(mount.files("kept"), &format!("user.large{number}"), value.as_bytes()).unwrap();
    }
    std::fs::remove_file(mount.files("removed")).unwrap();
    for _ in 0..3 {
        assert_eq!(errno(&sync_directory(mount.path())), libc::ENOSPC);
        assert_eq!(mount.status("state"), "degraded", "{}", mount.status("state_reason"));
    }
    assert_eq!(errno(&std::fs::create_dir(mount.files("more"))), libc::ENOSPC);
    assert!(std::fs::read(mount.files("unseen")).unwrap() == fill(1, LARGE));
    std::fs::remove_file(others).unwrap();
    sync_directory(mount.path()).unwrap();
    assert_eq!(mount.status("state"), "ok", "{}", mount.status("state_reason"));
    write_and_close(mount.files("new"), &fill(3, LARGE)).unwrap();
    sync_directory(mount.path()).unwrap();
    mount.kill();
    mount.mount();
    assert!(std::fs::read(mount.files("new")).unwrap() == fill(3, LARGE));
    for (number, value) in values.iter().enumerate() {
        assert!(getxattr(mount.files("kept"), &format!("user.large{number}")).unwrap() == *value);
    }
    assert!(!mount.files("removed").exists());
    assert!(mount.unmount().success());
    crate::kills::assert_sound(&store);
}

/// Takes all room of the disk, and what the store keeps of it for the database.
fn fill_without_reserve(disk: &SmallDisk) -> std::path::PathBuf {
    let reserve = disk.mountpoint.join("store/meta.reserve");
    std::fs::OpenOptions::new().write(true).open(reserve).unwrap().set_len(0).unwrap();
    disk.fill_up()
}

/// The database needs room while the disk is full, again and again: what is removed then makes room.
#[test]
fn a_full_disk_is_left_by_removing_files() {
    crate::require!(fuse, root, r#loop);
    let disk = SmallDisk::new();
    let store = disk.mountpoint.join("store");
    let mut mount = Mount::of_store_with(Mode::Passthrough, &["--commit-interval", "0.05"], &store);
    write_and_close(mount.files("kept"), &fill(1, LARGE)).unwrap();
    write_and_close(mount.files("large"), &fill(2, 4 << 20)).unwrap();
    sync_directory(mount.path()).unwrap();
    let others = disk.fill_up();
    let mut refused = 0;
    for number in 0..20_000 {
        let made = std::fs::create_dir(mount.files(format!("{number:0200}")));
        let code = errno(&made);
        assert!([0, libc::ENOSPC].contains(&code), "directory {number}: {made:?}");
        refused += usize::from(code != 0);
        if refused == 100 {
            break;
        }
    }
    assert_eq!(refused, 100, "the database has found room all the time");
    std::fs::remove_file(mount.files("large")).unwrap();
    let until = std::time::Instant::now() + std::time::Duration::from_secs(20);
    while sync_directory(mount.path()).is_err() {
        assert!(std::time::Instant::now() < until, "{}", mount.status("state_reason"));
        std::thread::sleep(std::time::Duration::from_millis(100));
    }
    assert_eq!(mount.status("state"), "ok");
    std::fs::remove_file(others).unwrap();
    write_and_close(mount.files("new"), &fill(3, LARGE)).unwrap();
    assert!(std::fs::read(mount.files("kept")).unwrap() == fill(1, LARGE));
    assert!(mount.unmount().success());
    crate::kills::assert_sound(&store);
}
