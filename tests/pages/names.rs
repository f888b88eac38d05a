//! Names that only certain files may have, or none.

use std::os::unix::fs::symlink;
use std::path::Path;

use crate::common::sys::{assert_errno, open, rename, write_and_close};
use crate::common::{Mode, Model, Mount};

in_both_modes!(reserved_names);

fn reserved_names(mode: Mode) {
    let mount = Mount::new(mode);
    let model = Model::small();
    model.install(&mount);
    for name in ["x", ".x", "x.tmp", "models", "manifest.json"] {
        let expected = if name == "models" { libc::EEXIST } else { libc::EPERM };
        let path = mount.join(name);
        assert_errno(open(&path, libc::O_WRONLY | libc::O_CREAT | libc::O_EXCL), expected);
        assert_errno(std::fs::create_dir(&path), expected);
        assert_errno(symlink("x", &path), expected);
    }
    write_and_close(mount.files("x"), b"x").unwrap();
    let path = mount.join("x");
    assert_errno(rename(mount.files("x"), &path), libc::EPERM);
    assert_errno(std::fs::hard_link(mount.files("x"), &path), libc::EPERM);
    // They are there, and made while they are read.
    for derived in ["prefixes", "slots"] {
        let path = mount.join("models/small").join(derived);
        assert_errno(rename(mount.files("x"), &path), libc::EISDIR);
        assert_errno(std::fs::hard_link(mount.files("x"), &path), libc::EEXIST);
        assert_errno(std::fs::create_dir(&path), libc::EEXIST);
    }
    // Pages, tails and tokens are files, and neither links nor devices.
    for path in [
        model.page_path(&mount, "chat", 0, 0),
        model.tail_path(&mount, "chat", 0, 0),
        model.tokens_path(&mount, "chat"),
    ] {
        assert_errno(std::fs::create_dir(&path), libc::EPERM);
        assert_errno(symlink("x", &path), libc::EPERM);
        let fifo = nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU);
        assert_errno(fifo.map_err(Into::into), libc::EPERM);
    }
    no_pipe_under_the_name_of_positions(&mount, &model);
    for root in ["models", "files"] {
        assert_errno(std::fs::remove_dir(mount.join(root)), libc::EPERM);
        let moved = mount.join(if root == "models" { "files/m" } else { "models/f" });
        assert_errno(rename(mount.join(root), moved), libc::EPERM);
    }
}

/// Whoever looks into a sequence reads its positions, and would wait for the writer of a FIFO.
fn no_pipe_under_the_name_of_positions(mount: &Mount, model: &Model) {
    let sequence = model.sequence(mount, "chat");
    let (path, aside) = (sequence.join("positions.json"), sequence.join("aside"));
    let fifo = |path: &Path| -> std::io::Result<()> {
        nix::unistd::mkfifo(path, nix::sys::stat::Mode::S_IRWXU).map_err(Into::into)
    };
    assert_errno(fifo(&path), libc::EPERM);
    assert_errno(symlink("x", &path), libc::EPERM);
    fifo(&aside).unwrap();
    assert_errno(rename(&aside, &path), libc::EPERM);
    assert_errno(std::fs::hard_link(&aside, &path), libc::EPERM);
    write_and_close(&path, b"{}").unwrap();
    assert_errno(rename(&aside, &path), libc::EPERM);
    std::fs::remove_file(path).unwrap();
    std::fs::remove_file(aside).unwrap();
}
