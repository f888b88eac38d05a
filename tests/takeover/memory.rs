//! The memory tier goes on as it was, and so does a remote whose keys nobody can read any more.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::common::mount::scratch_directory;
use crate::common::sys::{getxattr, map, rename, setxattr, sync_directory, write_and_close};
use crate::common::{Mode, Model, Mount, eventually, forks};
use crate::{mounted, upgrade};

/// A page file is 256 KiB + 4 KiB.
const PAGE_BYTES: u64 = (256 << 10) + 4096;

struct Pages {
    mount: Mount,
    model: Model,
}

impl Pages {
    fn of(mount: Mount) -> Pages {
        let model = Model::with(|fields| {
            fields.head_dim = 64;
            fields.num_kv_heads = 8;
            fields.page_tokens = 128;
        });
        model.install(&mount);
        Pages { mount, model }
    }

    fn path(&self, number: u64) -> PathBuf {
        self.model.page_path(&self.mount, "chat", 0, number * 128)
    }

    fn bytes(&self, number: u64) -> Vec<u8> {
        self.model.page(0, number * 128, number)
    }

    fn write(&self, number: u64) {
        let path = self.path(number);
        write_and_close(path.with_extension("tmp"), &self.bytes(number)).unwrap();
        rename(path.with_extension("tmp"), path).unwrap();
    }

    fn is_whole(&self, number: u64) -> bool {
        std::fs::read(self.path(number)).unwrap() == self.bytes(number)
    }

    fn used_bytes(&self) -> u64 {
        self.mount.status_number("ram_used_bytes")
    }
}

#[test]
fn what_lies_in_memory_stays_there() {
    crate::require!(fuse, root);
    let mut pages = Pages::of(mounted(Mode::Passthrough, &["--ram", "8M"]));
    (0..8).for_each(|number| pages.write(number));
    let reader = File::open(pages.path(0)).unwrap();
    let mapped = map(&reader);
    // One that is being written in place: it is whole when it is closed.
    let half = pages.bytes(8);
    let open = File::create(pages.path(8)).unwrap();
    open.write_all_at(&half[..100_000], 0).unwrap();
    sync_directory(pages.mount.path()).unwrap();
    let before = pages.used_bytes();
    assert!(before >= 8 * PAGE_BYTES, "{before}");
    for _ in 0..3 {
        upgrade(&pages.mount);
        assert_eq!(pages.used_bytes(), before);
    }
    assert!((0..8).all(|number| pages.is_whole(number)));
    open.write_all_at(&half[100_000..], 100_000).unwrap();
    drop(open);
    assert!(pages.is_whole(8));
    // What is there too much leaves, as before, and comes back; what is mapped stays.
    (9..60).for_each(|number| pages.write(number));
    sync_directory(pages.mount.path()).unwrap();
    assert!(pages.used_bytes() <= 8 << 20);
    assert!(*mapped == *pages.bytes(0));
    assert!((0..60).all(|number| pages.is_whole(number)));
    drop((mapped, reader));
    let mut set = Command::new(env!("CARGO_BIN_EXE_kvfs"));
    let set = forks::output(set.args(["config", "set", "ram=2M"]).arg(pages.mount.path()));
    assert!(set.status.success());
    upgrade(&pages.mount);
    assert_eq!(pages.mount.status_number("ram_budget_bytes"), 2 << 20);
    eventually("memory to become smaller", || (pages.used_bytes() <= 2 << 20).then_some(()));
    // With no budget what cannot leave stays, and goes on.
    let half = pages.bytes(60);
    let open = File::create(pages.path(60)).unwrap();
    open.write_all_at(&half[..100_000], 0).unwrap();
    let mut set = Command::new(env!("CARGO_BIN_EXE_kvfs"));
    let set = forks::output(set.args(["config", "set", "ram=0"]).arg(pages.mount.path()));
    assert!(set.status.success());
    upgrade(&pages.mount);
    open.write_all_at(&half[100_000..], 100_000).unwrap();
    drop(open);
    assert!(pages.is_whole(60));
    pages.mount.remount();
    assert!((0..61).all(|number| pages.is_whole(number)));
}

#[test]
fn pages_come_into_memory_and_leave_it_beside_exchanges() {
    crate::require!(fuse, root);
    let mut pages = Pages::of(mounted(Mode::Passthrough, &["--ram", "4M"]));
    pages.mount.may_be_slow("pages are written and hashed all the time");
    pages.write(0);
    let over = AtomicBool::new(false);
    let written = std::thread::scope(|scope| {
        let writing = scope.spawn(|| {
            let mut count = 1;
            while !crate::clients::is_over(&over) {
                pages.write(count);
                assert!(pages.is_whole(count / 2) && pages.is_whole(count));
                count += 1;
            }
            count
        });
        for _ in 0..6 {
            std::thread::sleep(Duration::from_millis(300));
            upgrade(&pages.mount);
        }
        over.store(true, Ordering::Relaxed);
        writing.join().unwrap()
    });
    assert!(pages.used_bytes() <= 4 << 20);
    pages.mount.remount();
    assert!((0..written).all(|number| pages.is_whole(number)));
}

/// A process that is not root's has a directory of everybody's, which goes with the mount and not with the program.
#[test]
fn who_may_not_mount_goes_on_with_its_directory_in_memory() {
    crate::require!(fuse, root, setpriv, fusermount3, unshare);
    let place = tempfile::tempdir_in("/tmp").unwrap();
    std::os::unix::fs::chown(place.path(), Some(65_534), Some(65_534)).unwrap();
    std::fs::copy(env!("CARGO_BIN_EXE_kvfs"), place.path().join("kvfs")).unwrap();
    let user = "set -e
        mkdir mnt
        ./kvfs mount --ram 8M --log log store mnt
        where() { sed -n 's!^ram_tier: \\(/dev/shm/[^:]*\\):.*!\\1!p' mnt/.kvfs/status; }
        directory=$(where)
        test -d \"$directory\"
        echo bytes >mnt/files/one
        ./kvfs upgrade mnt
        test \"$directory\" = \"$(where)\"
        test -d \"$directory\"
        cat mnt/files/one
        ./kvfs umount mnt
        test ! -e \"$directory\"
        echo gone";
    std::fs::write(place.path().join("user.sh"), user).unwrap();
    let root = "set -e
        mknod fuse c 10 229
        chmod 666 fuse
        mount --bind fuse /dev/fuse
        exec setpriv --reuid=65534 --regid=65534 --clear-groups sh user.sh";
    let mut command = Command::new("unshare");
    command.args(["-m", "sh", "-c", root]).current_dir(place.path()).env("HOME", place.path());
    assert_eq!(forks::succeed(&mut command), "bytes\ngone\n");
}

/// What somebody has asked to leave leaves after an exchange as well, once nobody has it open.
#[test]
fn what_was_asked_to_leave_leaves() {
    crate::require!(fuse, root);
    let remote = scratch_directory();
    let options = ["--ram", "8M", "--remote", remote.path().to_str().unwrap(), "--ssd", "1G"];
    let pages = Pages::of(mounted(Mode::Passthrough, &options));
    pages.write(1);
    sync_directory(pages.mount.path()).unwrap();
    let open = File::open(pages.path(1)).unwrap();
    setxattr(pages.path(1), "user.kvfs.tier", b"remote").unwrap();
    assert_eq!(pages.mount.status("remote_asked_files"), "1");
    upgrade(&pages.mount);
    assert_eq!(pages.mount.status("remote_asked_files"), "1");
    drop(open);
    eventually("the page to leave", || {
        (getxattr(pages.path(1), "user.kvfs.tier").unwrap() == "remote").then_some(())
    });
    assert!(pages.is_whole(1));
}

#[test]
fn a_sealed_remote_needs_no_key_file_any_more() {
    crate::require!(fuse, root);
    let scratch = scratch_directory();
    let key = scratch.path().join("key");
    let mut keygen = Command::new(env!("CARGO_BIN_EXE_kvfs"));
    forks::succeed(keygen.args(["remote", "keygen"]).arg(&key));
    let remote = scratch_directory();
    let places = [remote.path().to_str().unwrap(), key.to_str().unwrap()];
    let options = ["--remote", places[0], "--remote-key", places[1], "--ssd", "1G"];
    let mut pages = Pages::of(mounted(Mode::Passthrough, &options));
    let evict = |pages: &Pages, number: u64| {
        let mut evict = Command::new(env!("CARGO_BIN_EXE_kvfs"));
        forks::succeed(evict.arg("evict").arg(pages.path(number)));
    };
    pages.write(1);
    evict(&pages, 1);
    let text = std::fs::read_to_string(&key).unwrap();
    std::fs::remove_file(&key).unwrap();
    upgrade(&pages.mount);
    assert!(pages.is_whole(1), "the keys came along");
    pages.write(2);
    evict(&pages, 2);
    let secret = text.split_whitespace().last().unwrap();
    assert!(!pages.mount.log().contains(secret), "no log has it");
    assert!(pages.mount.unmount().success());
    std::fs::write(&key, text).unwrap();
    std::fs::set_permissions(&key, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    pages.mount.mount();
    assert!(pages.is_whole(1) && pages.is_whole(2));
}
