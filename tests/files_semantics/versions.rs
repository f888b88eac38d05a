//! Which bytes a reader sees while another writes, truncates, renames or unlinks.

use std::fs;
use std::os::unix::fs::{FileExt, MetadataExt};

use crate::common::sys::{close, map, open, rename};
use crate::common::{Mode, Mount, eventually, fill};

in_both_modes!(
    a_change_in_place_shows_through_every_link,
    a_file_truncated_while_open_is_cut_in_place,
    a_file_truncated_at_rest_gets_a_new_version,
    an_unfinished_new_version_is_gone_after_a_crash,
    an_unlinked_file_lives_until_the_last_close,
    a_rename_over_an_open_file_leaves_it_to_its_reader,
    a_name_truncated_by_path_keeps_its_length,
    size_is_seen_while_another_descriptor_writes,
    a_file_that_was_never_synced_survives_an_unmount,
    a_running_program_is_not_truncated,
);

/// Waits until everything so far is durable, so that the file is one at rest.
fn settle(mount: &Mount) {
    crate::common::sys::sync_directory(mount.files("")).unwrap();
}

fn a_change_in_place_shows_through_every_link(mode: Mode) {
    let mut mount = Mount::new(mode);
    let (one, two) = (mount.files("one"), mount.files("two"));
    fs::write(&one, b"0123456789").unwrap();
    fs::hard_link(&one, &two).unwrap();
    settle(&mount);
    let writer = open(&two, libc::O_WRONLY).unwrap();
    writer.write_all_at(b"xx", 4).unwrap();
    assert_eq!(fs::read(&one).unwrap(), b"0123xx6789");
    close(writer).unwrap();
    let (first, second) = (fs::metadata(&one).unwrap(), fs::metadata(&two).unwrap());
    assert_eq!((first.ino(), first.nlink()), (second.ino(), 2));
    mount.remount();
    assert_eq!(fs::read(&one).unwrap(), b"0123xx6789");
    assert_eq!(fs::metadata(&one).unwrap().ino(), first.ino());
}

fn a_file_truncated_while_open_is_cut_in_place(mode: Mode) {
    let mut mount = Mount::new(mode);
    let path = mount.files("file");
    fs::write(&path, b"the old content").unwrap();
    settle(&mount);
    let reader = open(&path, libc::O_RDONLY).unwrap();
    let writer = open(&path, libc::O_WRONLY | libc::O_TRUNC).unwrap();
    assert_eq!(reader.metadata().unwrap().len(), 0);
    writer.write_all_at(b"new", 0).unwrap();
    let mut buffer = [0; 20];
    assert_eq!(reader.read_at(&mut buffer, 0).unwrap(), 3);
    close(writer).unwrap();
    close(reader).unwrap();
    assert_eq!(fs::metadata(&path).unwrap().len(), 3);
    assert_eq!(fs::read(&path).unwrap(), b"new");
    mount.remount();
    assert_eq!(fs::read(&path).unwrap(), b"new");
    assert_eq!(mount.errors(), Vec::<String>::new());
}

fn a_file_truncated_at_rest_gets_a_new_version(mode: Mode) {
    let mut mount = Mount::with_own_files(mode, &[]);
    let path = mount.files("file");
    let old = fill(1, 8192);
    fs::write(&path, &old).unwrap();
    settle(&mount);
    let inode = fs::metadata(&path).unwrap().ino();
    let mapped = map(&open(&path, libc::O_RDONLY).unwrap());
    assert_eq!(mapped[..], old);
    // In the served mode a mapping keeps its file open: the cut is in place there.
    let writer = open(&path, libc::O_RDWR | libc::O_TRUNC).unwrap();
    if mode == Mode::Passthrough {
        assert_eq!(mapped[..], old, "a mapping keeps the old bytes");
    }
    writer.write_all_at(b"new", 0).unwrap();
    close(writer).unwrap();
    drop(mapped);
    assert_eq!(fs::read(&path).unwrap(), b"new");
    assert_eq!(fs::metadata(&path).unwrap().ino(), inode);
    settle(&mount);
    eventually("the old version to go", || (mount.objects().len() == 1).then_some(()));
    mount.remount();
    assert_eq!(fs::read(&path).unwrap(), b"new");
}

fn an_unfinished_new_version_is_gone_after_a_crash(mode: Mode) {
    let mut mount = Mount::with_own_files(mode, &[]);
    let path = mount.files("file");
    fs::write(&path, b"old").unwrap();
    settle(&mount);
    let writer = open(&path, libc::O_WRONLY | libc::O_TRUNC).unwrap();
    writer.write_all_at(b"half of the new", 0).unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"half of the new");
    settle(&mount);
    mount.crash();
    assert_eq!(fs::read(&path).unwrap(), b"old");
    assert_eq!((mount.objects().len(), mount.staging().len()), (1, 0));
}

fn an_unlinked_file_lives_until_the_last_close(mode: Mode) {
    let mut mount = Mount::with_own_files(mode, &[]);
    let path = mount.files("file");
    let file = open(&path, libc::O_RDWR | libc::O_CREAT).unwrap();
    fs::remove_file(&path).unwrap();
    file.set_len(8192).unwrap();
    file.write_all_at(b"bytes", 4096).unwrap();
    assert_eq!(file.metadata().unwrap().nlink(), 0);
    settle(&mount);
    let mut buffer = [0; 5];
    file.read_exact_at(&mut buffer, 4096).unwrap();
    assert_eq!(&buffer, b"bytes");
    file.sync_all().unwrap();
    close(file).unwrap();
    eventually("its bytes to go", || {
        settle(&mount);
        (mount.staging().is_empty() && mount.objects().is_empty()).then_some(())
    });

    // One that a commit knows and a crash takes the daemon from.
    fs::write(&path, b"durable").unwrap();
    settle(&mount);
    let reader = open(&path, libc::O_RDONLY).unwrap();
    fs::remove_file(&path).unwrap();
    settle(&mount);
    mount.crash();
    drop(reader);
    eventually("the bytes of a nameless file to go", || mount.objects().is_empty().then_some(()));
    assert_eq!(mount.status_number("objects"), 0);
}

fn a_rename_over_an_open_file_leaves_it_to_its_reader(mode: Mode) {
    let mut mount = Mount::with_own_files(mode, &[]);
    let path = mount.files("file");
    fs::write(&path, b"old").unwrap();
    settle(&mount);
    let reader = open(&path, libc::O_RDONLY).unwrap();
    fs::create_dir(mount.files("elsewhere")).unwrap();
    let temporary = mount.files("elsewhere/file.tmp");
    fs::write(&temporary, b"the new").unwrap();
    rename(&temporary, &path).unwrap();
    let mut buffer = [0; 20];
    assert_eq!(reader.read_at(&mut buffer, 0).unwrap(), 3);
    assert_eq!(&buffer[..3], b"old");
    assert_eq!(reader.metadata().unwrap().nlink(), 0);
    assert_eq!(fs::read(&path).unwrap(), b"the new");
    assert!(!temporary.exists());
    drop(reader);
    mount.remount();
    assert_eq!(fs::read(&path).unwrap(), b"the new");
    assert_eq!(mount.objects().len(), 1);
}

fn a_name_truncated_by_path_keeps_its_length(mode: Mode) {
    let mut mount = Mount::new(mode);
    let path = mount.files("file");
    fs::write(&path, b"hello").unwrap();
    for (length, expected) in [(2, &b"he"[..]), (4, b"he\0\0"), (0, b"")] {
        settle(&mount);
        nix::unistd::truncate(&path, length).unwrap();
        assert_eq!(fs::read(&path).unwrap(), expected);
        mount.remount();
        assert_eq!(fs::read(&path).unwrap(), expected);
    }
    assert_eq!(mount.errors(), Vec::<String>::new());
}

fn size_is_seen_while_another_descriptor_writes(mode: Mode) {
    let mount = Mount::new(mode);
    let path = mount.files("file");
    fs::write(&path, b"").unwrap();
    settle(&mount);
    assert_eq!(fs::metadata(&path).unwrap().len(), 0);
    let writer = open(&path, libc::O_WRONLY).unwrap();
    let mut before = fs::metadata(&path).unwrap();
    for step in 1..=50 {
        writer.write_all_at(&[7; 100], (step - 1) * 100).unwrap();
        let now = fs::metadata(&path).unwrap();
        assert_eq!(now.len(), step * 100);
        assert!((now.mtime(), now.mtime_nsec()) >= (before.mtime(), before.mtime_nsec()));
        before = now;
    }
}

fn a_running_program_is_not_truncated(mode: Mode) {
    use crate::common::forks::{spawn, succeed};
    use std::process::Command;
    let mount = Mount::new(mode);
    let path = mount.files("program");
    succeed(
        Command::new("sh")
            .args(["-c", "cp \"$(command -v sleep)\" program"])
            .current_dir(mount.files("")),
    );
    settle(&mount);
    let length = fs::metadata(&path).unwrap().len();
    let mut program = spawn(Command::new(&path).arg("100")).unwrap();
    for flags in [libc::O_WRONLY, libc::O_RDWR | libc::O_TRUNC, libc::O_RDONLY | libc::O_TRUNC] {
        crate::common::sys::assert_errno(open(&path, flags), libc::ETXTBSY);
        assert_eq!(fs::metadata(&path).unwrap().len(), length);
    }
    program.kill().unwrap();
    let status = program.wait().unwrap();
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), Some(libc::SIGKILL));
    eventually("the program to be let go", || {
        open(&path, libc::O_RDONLY | libc::O_TRUNC).ok().map(drop)
    });
    assert_eq!(fs::metadata(&path).unwrap().len(), 0);
}

fn a_file_that_was_never_synced_survives_an_unmount(mode: Mode) {
    let mut mount = Mount::with_options(mode, &["--commit-interval", "3600"]);
    let path = mount.files("file");
    fs::write(&path, b"bytes").unwrap();
    mount.remount();
    assert_eq!(fs::read(&path).unwrap(), b"bytes");
}
