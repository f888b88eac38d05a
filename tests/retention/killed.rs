//! The daemon is killed in the middle of removals: whoever waits for it is told, and nothing hangs.
//!
//! Where the daemon waited in the kernel for the lock of a directory, whose holder waited for the daemon, it
//! never ended: the connection ends with its last descriptor, and the thread that waited had one. So it waits for no
//! lock, and the kernel may keep a name that is gone.

use std::fs;
use std::path::Path;

use crate::common::sys::{assert_errno, open, rename};
use crate::common::{Mode, Mount, eventually};
use crate::{FILE_BYTES, limit, wait_until_gone, write_files};

in_both_modes!(
    a_daemon_that_removes_names_can_be_killed,
    a_name_that_the_kernel_keeps_is_gone_all_the_same,
);

const ROUNDS: u64 = 4;
const FILES: u64 = 400;
const CLIENTS: u64 = 6;

fn a_daemon_that_removes_names_can_be_killed(mode: Mode) {
    let mut mount = Mount::new(mode);
    for round in 0..ROUNDS {
        let directory = mount.files(format!("cache-{round}"));
        fs::create_dir(&directory).unwrap();
        let names = |number: u64| directory.join(format!("block-{number:04}"));
        for number in 0..FILES {
            fs::write(names(number), number.to_le_bytes()).unwrap();
        }
        std::thread::scope(|scope| {
            for client in 0..CLIENTS {
                let directory = &directory;
                scope.spawn(move || hold_the_lock_of(directory, client));
            }
            limit(&directory, "quota", 8);
            eventually("a file to go", || (!names(0).exists()).then_some(()));
            mount.kill();
        });
        mount.mount();
    }
}

/// Makes and removes names in a directory until the daemon is gone: each takes the lock of the directory.
fn hold_the_lock_of(directory: &Path, client: u64) {
    let name = directory.join(format!("client-{client}"));
    while fs::create_dir(&name).is_ok() && fs::remove_dir(&name).is_ok() {}
}

fn a_name_that_the_kernel_keeps_is_gone_all_the_same(mode: Mode) {
    let mount = Mount::new(mode);
    let directory = mount.files("cache");
    fs::create_dir(&directory).unwrap();
    let files = write_files(&mount, &directory, 4);
    let [gone, other] = [&files[0], &files[1]];
    // Neither has it open, and both keep the kernel from forgetting the name.
    let kept = open(gone, libc::O_PATH).unwrap();
    let _other = open(other, libc::O_PATH).unwrap();
    limit(&directory, "quota", 2 * FILE_BYTES as u64);
    wait_until_gone(gone);
    wait_until_gone(other);
    assert_errno(open(other, libc::O_RDONLY).map(drop), libc::ENOENT);
    assert_errno(open(other, libc::O_RDWR).map(drop), libc::ENOENT);
    let mode_bits = std::os::unix::fs::PermissionsExt::from_mode(0o600);
    assert_errno(fs::set_permissions(other, mode_bits), libc::ENOENT);
    assert_errno(rename(other, directory.join("moved")), libc::ENOENT);
    assert_errno(fs::hard_link(other, directory.join("linked")), libc::ENOENT);
    assert_errno(fs::remove_file(other), libc::ENOENT);
    assert_errno(kept.metadata().map(drop), libc::ESTALE);
    eventually("the bytes to go", || {
        let objects = mount.objects();
        let lengths = objects.iter().filter_map(|path| path.metadata().ok());
        let bytes: u64 = lengths.map(|metadata| metadata.len()).sum();
        (bytes <= 2 * FILE_BYTES as u64).then_some(())
    });
    fs::write(gone, b"new").unwrap();
    assert_eq!(fs::read(gone).unwrap(), b"new");
}
