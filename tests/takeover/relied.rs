//! What programs had open when the daemon died: nothing that they did is taken for durable, and nobody else suffers for it.

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::process::Command;

use crate::common::model::Model;
use crate::common::sys::{
    assert_errno, close, open, rename, setxattr, sync_directory, write, write_and_close,
};
use crate::common::{Mode, Mount, eventually, forks};
use crate::deaths::{die, kept, wait_until_kept};
use crate::steps::check_store;
use crate::{any_mode, upgrade};

#[test]
fn fsync_of_what_is_lost_itself_fails() {
    crate::require!(fuse);
    let mount = kept(any_mode(), &[]);
    std::fs::create_dir(mount.files("directory")).unwrap();
    write_and_close(mount.files("file"), b"lost").unwrap();
    let directory = File::open(mount.files("directory")).unwrap();
    let file = File::open(mount.files("file")).unwrap();
    die(&mount);
    for _ in 0..2 {
        assert_errno(directory.sync_all(), libc::EIO);
        assert_errno(file.sync_all(), libc::EIO);
    }
}

/// A mount in which `file` is durable, and is being made anew by who has it open.
fn made_anew(mode: Mode, durable: &[u8], new: &[u8]) -> (Mount, File) {
    let mount = kept(mode, &[]);
    write_and_close(mount.files("file"), durable).unwrap();
    sync_directory(mount.path()).unwrap();
    let writing = open(mount.files("file"), libc::O_WRONLY | libc::O_TRUNC).unwrap();
    write(&writing, new).unwrap();
    (mount, writing)
}

/// A writer that knows nothing of the death does not cut the version that is durable.
#[test]
fn a_dead_writer_changes_nothing() {
    crate::require!(fuse);
    let (mount, writing) = made_anew(any_mode(), b"durable", b"new");
    die(&mount);
    assert_errno(writing.set_len(1), libc::EIO);
    assert_errno(close(writing), libc::EIO);
    // As soon as the kernel has forgotten the version that is lost.
    let found = || std::fs::read(mount.files("file")).ok();
    assert_eq!(eventually("the file to be there again", found), b"durable");
}

fn a_file_can_be_written_beside_a_reader_from_before(mode: Mode) {
    let mut mount = kept(mode, &[]);
    let sizes = [("small", 100), ("large", 200_000)];
    for (name, bytes) in sizes {
        for number in 0..3 {
            write_and_close(mount.files(format!("{name}-{number}")), &vec![7; bytes]).unwrap();
        }
    }
    assert!(mount.unmount().success());
    mount.mount();
    wait_until_kept(&mount);
    let path = |name: &str, number: usize| mount.files(format!("{name}-{number}"));
    let open_all = |name: &str| [0, 1, 2].map(|number| File::open(path(name, number)).unwrap());
    let mut readers = sizes.map(|(name, bytes)| (open_all(name), bytes));
    for (files, _) in &readers {
        files[0].read_exact_at(&mut [0; 10], 0).unwrap();
    }
    die(&mount);
    for (name, bytes) in sizes {
        // In place, cut, and replaced.
        let changed = OpenOptions::new().read(true).write(true).open(path(name, 0)).unwrap();
        changed.write_all_at(b"changed", 0).unwrap();
        let mut anew = OpenOptions::new().write(true).truncate(true).open(path(name, 1)).unwrap();
        anew.write_all(b"anew").unwrap();
        close(anew).unwrap();
        write_and_close(mount.files("tmp"), b"another").unwrap();
        rename(mount.files("tmp"), path(name, 2)).unwrap();
        let mut read = vec![0; bytes];
        changed.read_exact_at(&mut read, 0).unwrap();
        assert!(read[..7] == *b"changed" && read[7..].iter().all(|byte| *byte == 7));
        close(changed).unwrap();
        assert_eq!(std::fs::read(path(name, 1)).unwrap(), b"anew");
        assert_eq!(std::fs::read(path(name, 2)).unwrap(), b"another");
    }
    for (files, bytes) in &mut readers {
        // The one that was replaced is what it was.
        let mut read = Vec::new();
        files[2].read_to_end(&mut read).unwrap();
        assert!(read == vec![7; *bytes]);
    }
    drop(readers);
    let _ = sync_directory(mount.path());
    sync_directory(mount.path()).unwrap();
    die(&mount);
    assert_eq!(std::fs::read(path("small", 0)).unwrap()[..9], *b"changed\x07\x07");
    assert_eq!(std::fs::read(path("large", 1)).unwrap(), b"anew");
    assert!(mount.unmount().success());
    check_store(&mount);
}

#[test]
fn a_file_can_be_written_beside_a_reader_from_before_where_the_kernel_reads() {
    crate::require!(fuse, root);
    a_file_can_be_written_beside_a_reader_from_before(Mode::Passthrough);
}

#[test]
fn a_file_can_be_written_beside_a_reader_from_before_where_the_daemon_reads() {
    crate::require!(fuse);
    a_file_can_be_written_beside_a_reader_from_before(Mode::Served);
}

/// The directory has the time of the name from a commit, and the name from none.
#[test]
fn a_listing_shows_nothing_that_is_lost() {
    crate::require!(fuse);
    let mount = kept(any_mode(), &[]);
    let listed = || {
        // The kernel asks for the time of the last change, and keeps the listing with it.
        mount.files("").metadata().unwrap();
        std::fs::read_dir(mount.files("")).unwrap().count()
    };
    let writing = File::create(mount.files("lost")).unwrap();
    sync_directory(mount.path()).unwrap();
    // So the kernel keeps what it knows of it.
    let _directory = File::open(mount.files("")).unwrap();
    close(writing).unwrap();
    assert_eq!(listed(), 1);
    die(&mount);
    assert_eq!(listed(), 0);
    assert_errno(open(mount.files("lost"), libc::O_RDONLY), libc::ENOENT);
}

/// Bytes that only memory has go with the daemon.
#[test]
fn what_was_written_to_a_copy_in_memory_is_told() {
    crate::require!(fuse, root);
    let mut mount = kept(Mode::Passthrough, &["--ram", "16M"]);
    let model = Model::small();
    model.install(&mount);
    let path = model.page_path(&mount, "chat", 0, 0).with_file_name("notes");
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    write_and_close(&path, &vec![1; 100_000]).unwrap();
    sync_directory(mount.path()).unwrap();
    let changing = open(&path, libc::O_RDWR).unwrap();
    changing.write_all_at(&[2; 1000], 0).unwrap();
    close(changing).unwrap();
    die(&mount);
    let found = std::fs::read(&path).unwrap();
    let synced = File::open(&path).unwrap().sync_all();
    // Where the disk had it all the time nothing is lost.
    assert!(found[..1000] == [2; 1000] || synced.is_err(), "{synced:?}");
    assert!(mount.unmount().success() || mount.unmount().success());
    check_store(&mount);
}

#[test]
fn what_was_just_closed_is_told_though_the_daemon_was_exchanged_between() {
    crate::require!(fuse);
    let (mount, writing) = made_anew(any_mode(), b"durable", b"new");
    upgrade(&mount);
    die(&mount);
    assert_errno(close(writing), libc::EIO);
    assert_errno(File::open(mount.files("file")).unwrap().sync_all(), libc::EIO);
    assert_errno(sync_directory(mount.path()), libc::EIO);
}

#[test]
fn rows_that_were_appended_are_there_and_synced_by_the_next_daemon() {
    crate::require!(fuse);
    let mount = kept(any_mode(), &[]);
    let model = Model::small();
    model.install(&mount);
    let path = model.tokens_path(&mount, "chat");
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    let mut file = OpenOptions::new().append(true).create(true).open(&path).unwrap();
    sync_directory(mount.path()).unwrap();
    file.write_all(&[1; 400]).unwrap();
    die(&mount);
    assert_eq!(std::fs::read(&path).unwrap(), [1; 400]);
    let before = mount.status_number("uncommitted_changes");
    sync_directory(mount.path()).unwrap();
    assert!(mount.status_number("uncommitted_changes") < before, "{before}");
}

/// A file whose version is lost can be opened again when nobody has it open any more.
#[test]
fn a_file_is_free_when_its_last_reader_from_before_has_gone() {
    crate::require!(fuse, root);
    let (mount, writing) = made_anew(Mode::Passthrough, &vec![1; 200_000], &vec![2; 200_000]);
    die(&mount);
    let _ = close(writing);
    eventually("the file to be there again", || {
        std::fs::read(mount.files("file")).ok().filter(|bytes| *bytes == vec![1; 200_000])
    });
    setxattr(mount.files("file"), "user.mark", b"a").unwrap();
}

#[test]
fn a_mount_that_is_cut_off_is_not_kept() {
    crate::require!(fuse, root);
    let mut mount = kept(Mode::Passthrough, &[]);
    let hung = crate::deaths::daemon(&mount);
    nix::sys::signal::kill(hung, nix::sys::signal::Signal::SIGSTOP).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvfs"));
    let ended = forks::output(command.args(["umount", "--force"]).arg(mount.path()));
    assert!(ended.status.success(), "{ended:?}");
    mount.wait_until_it_ends();
    assert!(!mount.log().contains("another one goes on"), "{}", mount.log());
    mount.mount();
    wait_until_kept(&mount);
}
