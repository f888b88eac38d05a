//! Trees that are as deep as a client likes.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use nix::fcntl::{OFlag, openat};
use nix::sys::stat::{Mode as Permissions, mkdirat};

use crate::common::forks::succeed;
use crate::common::{Mode, Model, Mount, eventually};
use crate::limit;

in_both_modes!(a_deep_tree_goes_like_any_other);

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
