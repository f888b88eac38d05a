//! Mounts without what passthrough needs.

use std::fs;
use std::process::Command;

use crate::common::forks::succeed;
use crate::common::mount::{mount_overlay, scratch_directory};
use crate::common::{Mode, Mount, fill};

/// A user without rights mounts through fusermount3 and is served by the daemon. Where `/dev/fuse`
/// is for root only, another node stands in for it, in a mount namespace of its own.
#[test]
fn an_ordinary_user_can_mount() {
    require!(fuse, root, setpriv, fusermount3, unshare);
    let directory = tempfile::Builder::new().tempdir_in("/tmp").unwrap();
    let nobody = Some(65534);
    std::os::unix::fs::chown(directory.path(), nobody, nobody).unwrap();
    fs::copy(env!("CARGO_BIN_EXE_kvfs"), directory.path().join("kvfs-copy")).unwrap();
    let user = "
        mkdir mnt
        ./kvfs-copy mount --foreground store mnt & daemon=$!
        until cat mnt/.kvfs/status 2> /dev/null; do kill -0 $daemon || exit 1; sleep 0.01; done
        cd mnt/files && echo bytes > a.tmp && mv a.tmp a && cat a && stat -c %u a && cd ../..
        fusermount3 -u mnt
        wait $daemon
        echo ended with $?";
    fs::write(directory.path().join("user.sh"), user).unwrap();
    let root = "
        set -e
        mknod fuse c 10 229
        chmod 666 fuse
        mount --bind fuse /dev/fuse
        exec setpriv --reuid=65534 --regid=65534 --clear-groups sh user.sh";
    let shown = succeed(
        Command::new("unshare")
            .args(["-m", "sh", "-c", root])
            .current_dir(directory.path())
            .env("HOME", directory.path()),
    );
    let status = "passthrough: no: the daemon lacks CAP_SYS_ADMIN\n";
    assert!(shown.contains(status), "{shown}");
    assert!(shown.ends_with("bytes\n65534\nended with 0\n"), "{shown}");
}

/// An overlay takes a stack level of its own.
#[test]
fn a_store_on_an_overlay_works() {
    require!(fuse, root, overlay);
    let base = scratch_directory();
    let merged = mount_overlay(base.path()).unwrap();
    let store = merged.join("store");
    let mut mount = Mount::of_store(Mode::Passthrough, &store);
    let bytes = fill(4, 100_000);
    fs::write(mount.files("file"), &bytes).unwrap();
    mount.remount();
    assert!(fs::read(mount.files("file")).unwrap() == bytes);
    drop(mount);
    succeed(Command::new("umount").arg(merged));
}

#[test]
fn the_status_says_why_the_daemon_serves() {
    require!(fuse);
    let mount = Mount::new(Mode::Served);
    assert_eq!(mount.status("passthrough"), "no: turned off by option");
}
