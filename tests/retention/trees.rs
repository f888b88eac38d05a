//! Trees that are as deep as a client likes.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use nix::fcntl::{OFlag, openat};
use nix::sys::stat::{Mode as Permissions, mkdirat};

use crate::common::forks::succeed;
use crate::common::sys::{sync_directory, write_and_close};
use crate::common::{Mode, Model, Mount, eventually};
use crate::limit;

in_both_modes!(
    a_deep_tree_goes_like_any_other,
    a_deep_tree_that_a_crash_left_goes_with_the_next_mount
);

/// Deeper than any stack of a thread has frames for.
const LEVELS: usize = 20_000;

/// Directories in each other, and a file at the bottom.
fn dig(top: &Path, levels: usize) {
    std::fs::create_dir(top).unwrap();
    let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY;
    let mut at = OwnedFd::from(File::open(top).unwrap());
    for _ in 0..levels {
        mkdirat(at.as_fd(), "d", Permissions::from_bits_truncate(0o755)).unwrap();
        at = openat(at.as_fd(), "d", flags, Permissions::empty()).unwrap();
    }
    let create = OFlag::O_WRONLY | OFlag::O_CREAT;
    let file = openat(at.as_fd(), "bottom", create, Permissions::from_bits_truncate(0o644));
    nix::unistd::write(file.unwrap(), b"bytes").unwrap();
}

fn a_deep_tree_goes_like_any_other(mode: Mode) {
    let (mut mount, model) = (Mount::new(mode), Model::small());
    model.install(&mount);
    let sequences = model.directory(&mount).join("sequences");
    limit(&sequences, "quota", 1 << 40);
    dig(&sequences.join("deep"), LEVELS);
    mount.remount();
    mount.crash();
    assert!(mount.unmount().success(), "{}", mount.log());
    let mut check = std::process::Command::new(env!("CARGO_BIN_EXE_kvfs"));
    succeed(check.arg("fsck").arg(mount.store()));
    mount.mount();
    // A sequence goes as a whole, whatever is in it.
    limit(&sequences, "quota", 1);
    eventually("the tree to go", || (!sequences.join("deep").exists()).then_some(()));
    assert_eq!(mount.status("state"), "ok");
    mount.remount();
}

/// What a save has replaced is on its way out when the daemon dies.
fn a_deep_tree_that_a_crash_left_goes_with_the_next_mount(mode: Mode) {
    let (mut mount, model) = (Mount::new(mode), Model::small());
    model.install(&mount);
    let sequences = model.directory(&mount).join("sequences");
    let left = sequences.join("x~~");
    dig(&sequences.join("x"), LEVELS);
    std::fs::create_dir(&left).unwrap();
    write_and_close(left.join("tokens"), &[1, 0, 0, 0]).unwrap();
    exchange(&sequences.join("x"), &left);
    sync_directory(mount.path()).unwrap();
    mount.crash();
    eventually("the tree to go", || (!left.exists()).then_some(()));
    assert_eq!(std::fs::read(sequences.join("x/tokens")).unwrap(), [1, 0, 0, 0]);
    assert_eq!(mount.status("state"), "ok");
    // Ended in the middle of that, it goes on with the next mount.
    dig(&left, LEVELS);
    sync_directory(mount.path()).unwrap();
    for _ in 0..3 {
        mount.crash();
    }
    eventually("the tree to go", || (!left.exists()).then_some(()));
    mount.remount();
    assert!(mount.unmount().success(), "{}", mount.log());
    let mut check = std::process::Command::new(env!("CARGO_BIN_EXE_kvfs"));
    let said = succeed(check.arg("fsck").arg(mount.store()));
    assert!(said.contains("no errors"), "{said}");
}

fn exchange(one: &Path, other: &Path) {
    let here = nix::fcntl::AT_FDCWD;
    let flags = nix::fcntl::RenameFlags::RENAME_EXCHANGE;
    nix::fcntl::renameat2(here, one, here, other, flags).unwrap();
}
