//! The disk of a store is lost: a new store on the same remote has everything again.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::common::forks;
use crate::common::mount::scratch_directory;
use crate::common::sys::{getxattr, rename, set_modified, setxattr, write, write_and_close};
use crate::common::{Mode, Model, Mount, eventually, fill};
use crate::place::{complaint, kvfs, printed};

in_both_modes!(
    a_new_store_takes_over_the_names_of_the_only_one,
    among_several_stores_one_is_chosen,
    without_the_remote_a_new_store_is_not_mounted_unless_it_is_to_be_empty,
    files_whose_bytes_are_gone_are_left_out,
);

/// A remote, and mounts that share it.
struct Shared {
    remote: PathBuf,
    directory: tempfile::TempDir,
}

impl Shared {
    fn new() -> Shared {
        let directory = scratch_directory();
        let remote = directory.path().join("remote");
        std::fs::create_dir(&remote).unwrap();
        Shared { remote, directory }
    }

    fn mount(&self, mode: Mode, further: &[&str]) -> Mount {
        let options = ["--remote", self.remote.to_str().unwrap(), "--commit-interval", "0.05"];
        Mount::with_options(mode, &[&options, further].concat())
    }

    fn copy(&self, mount: &Mount) -> PathBuf {
        let copy = self.directory.path().join("copy");
        forks::succeed(Command::new("rsync").arg("-aHX").arg(slashed(mount.path())).arg(&copy));
        copy
    }
}

fn slashed(path: &Path) -> String {
    format!("{}/", path.display())
}

/// Waits until the remote has all files, and names them as they are now.
fn wait_until_published(mount: &Mount) {
    eventually("the names to be published", || {
        let is_done = mount.status("remote_waiting_files") == "0"
            && mount.status("remote_names") == "published";
        is_done.then_some(())
    });
}

/// The daemon ends, and everything that it has stored is gone.
fn lose_the_disk(mount: &mut Mount) {
    assert!(mount.unmount().success());
    std::fs::remove_dir_all(mount.store()).unwrap();
}

fn assert_same_tree(expected: &Path, mount: &Mount) {
    let compared = forks::output(
        Command::new("rsync")
            .arg("-naHXic")
            .arg("--delete")
            .arg(slashed(expected))
            .arg(slashed(mount.path())),
    );
    let (said, failed) = (&compared.stdout, &compared.stderr);
    assert!(compared.status.success(), "{}", String::from_utf8_lossy(failed));
    assert!(said.is_empty(), "differs:\n{}", String::from_utf8_lossy(said));
}

/// A sequence that is being written, and plain files of every kind.
fn populate(mount: &Mount) -> Model {
    let model = Model::small();
    model.install(mount);
    let tokens = model.tokens_path(mount, "s");
    for layer in 0..2 {
        for start in [0, 32] {
            let path = model.page_path(mount, "s", layer, start);
            let staged = path.with_file_name(".page.tmp");
            let page = model.page(layer, start, start + u64::from(layer));
            write_and_close(&staged, &page).unwrap();
            rename(&staged, &path).unwrap();
        }
        let tail = model.tail_path(mount, "s", layer, 64);
        append(&tail, &model.rows(7, 5));
    }
    append(&tokens, &fill(3, 69 * 4));
    let files = mount.files("");
    std::fs::create_dir_all(files.join("a/b")).unwrap();
    write_and_close(files.join("large"), &fill(1, 5 << 20)).unwrap();
    write_and_close(files.join("a/small"), b"small").unwrap();
    write_and_close(files.join("a/empty"), b"").unwrap();
    std::fs::hard_link(files.join("a/small"), files.join("a/b/linked")).unwrap();
    std::os::unix::fs::symlink("../a/small", files.join("a/symlink")).unwrap();
    setxattr(files.join("large"), "user.colour", b"blue").unwrap();
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o751);
    std::fs::set_permissions(files.join("a"), mode).unwrap();
    let time = std::time::UNIX_EPOCH + std::time::Duration::new(1_700_000_000, 123_456_789);
    set_modified(files.join("large"), time).unwrap();
    model
}

fn append(path: &Path, bytes: &[u8]) {
    let file = std::fs::File::options().append(true).create(true).open(path).unwrap();
    write(&file, bytes).unwrap();
}

fn a_new_store_takes_over_the_names_of_the_only_one(mode: Mode) {
    crate::require!(rsync);
    let shared = Shared::new();
    let mut mount = shared.mount(mode, &["--cold", "zstd"]);
    let model = populate(&mount);
    wait_until_published(&mount);
    let copy = shared.copy(&mount);
    lose_the_disk(&mut mount);
    mount.mount();
    assert!(mount.log().contains("rebuilt from the names of store"));
    assert_eq!(getxattr(mount.files("large"), "user.kvfs.tier").unwrap(), "remote");
    assert_same_tree(&copy, &mount);

    // It goes on where the other one was.
    let tail = model.tail_path(&mount, "s", 0, 64);
    let rows = model.rows(7, 32);
    append(&tail, &rows[model.row_bytes() * 5..]);
    let page = model.page_path(&mount, "s", 0, 64);
    assert!(std::fs::read(page).unwrap() == model.page(0, 64, 7));
    write_and_close(mount.files("new"), b"new").unwrap();
    assert_eq!(mount.status("errors"), "0");
    let fsck = |mount: &mut Mount| {
        assert!(mount.unmount().success());
        let checked =
            forks::output(Command::new(env!("CARGO_BIN_EXE_kvfs")).arg("fsck").arg(mount.store()));
        assert!(checked.status.success(), "{}", String::from_utf8_lossy(&checked.stdout));
    };
    fsck(&mut mount);
    mount.mount();
    assert_eq!(std::fs::read(mount.files("new")).unwrap(), b"new");
    fsck(&mut mount);
}

fn among_several_stores_one_is_chosen(mode: Mode) {
    let shared = Shared::new();
    let first = shared.mount(mode, &[]);
    write_and_close(first.files("of_first"), b"first").unwrap();
    wait_until_published(&first);
    let second = shared.mount(mode, &["--rebuild-from", "none"]);
    assert!(!second.files("of_first").exists());
    write_and_close(second.files("of_second"), b"second").unwrap();
    wait_until_published(&second);

    let directory = scratch_directory();
    let [store, mountpoint] = ["store", "mnt"].map(|name| directory.path().join(name));
    std::fs::create_dir(&mountpoint).unwrap();
    let remote = shared.remote.to_str().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvfs"));
    command.args(["mount", "--foreground", "--remote", remote]).arg(&store).arg(&mountpoint);
    let refused = complaint(&forks::output(&mut command));
    let listed = printed(&kvfs(&["remote", "ls", remote], &[]));
    assert!(refused.contains("--rebuild-from ID") && refused.contains("none"), "{refused}");
    let json: serde_json::Value =
        serde_json::from_str(&printed(&kvfs(&["remote", "ls", "--json", remote], &[]))).unwrap();
    let stores = json["stores"].as_array().unwrap();
    assert_eq!(stores.len(), 2, "{json}");
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
    let (mut found, mut chosen) = (BTreeSet::new(), None);
    for store in stores {
        let id = store["store"].as_str().unwrap();
        for text in [&refused, &listed] {
            assert!(text.contains(id) && text.contains(host.trim()), "{text}");
        }
        assert_eq!(store["host"], host.trim());
        assert_eq!(store["files"], 1);
        let mount = shared.mount(mode, &["--rebuild-from", id]);
        for name in ["of_first", "of_second"] {
            if let Ok(bytes) = std::fs::read(mount.files(name)) {
                found.insert(bytes);
            }
        }
        chosen = Some((mount, id.to_owned()));
    }
    assert_eq!(found, BTreeSet::from([b"first".to_vec(), b"second".to_vec()]));
    // The option stays where it was written down; another id comes too late.
    let (mut mount, id) = chosen.unwrap();
    mount.remount();
    assert!(mount.unmount().success());
    let other = stores.iter().map(|store| store["store"].as_str().unwrap());
    let other = other.clone().find(|other| *other != id).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvfs"));
    command.args(["mount", "--foreground", "--remote", remote, "--rebuild-from", other]);
    let refused = complaint(&forks::output(command.arg(mount.store()).arg(&mountpoint)));
    assert!(refused.contains("has names of its own"), "{refused}");
}

fn without_the_remote_a_new_store_is_not_mounted_unless_it_is_to_be_empty(mode: Mode) {
    let shared = Shared::new();
    let missing = shared.directory.path().join("missing");
    let directory = scratch_directory();
    let (store, mountpoint) = (directory.path().join("store"), directory.path().join("mnt"));
    std::fs::create_dir(&mountpoint).unwrap();
    let refused = forks::output(
        Command::new(env!("CARGO_BIN_EXE_kvfs"))
            .args(["mount", "--foreground", "--remote"])
            .arg(&missing)
            .args([&store, &mountpoint]),
    );
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(1), "{said}");
    let line = said.lines().last().unwrap_or_default();
    assert!(line.contains("no such directory") && line.contains("rebuild_from=none"), "{said}");

    let options = ["--remote", missing.to_str().unwrap(), "--rebuild-from", "none"];
    let mount = Mount::with_options(mode, &options);
    write_and_close(mount.files("here"), b"here").unwrap();
    assert_eq!(std::fs::read(mount.files("here")).unwrap(), b"here");
}

fn files_whose_bytes_are_gone_are_left_out(mode: Mode) {
    let shared = Shared::new();
    let mut mount = shared.mount(mode, &[]);
    for (name, seed) in [("kept", 1), ("gone", 2)] {
        write_and_close(mount.files(name), &fill(seed, 100_000)).unwrap();
    }
    std::fs::hard_link(mount.files("gone"), mount.files("also_gone")).unwrap();
    wait_until_published(&mount);
    lose_the_disk(&mut mount);
    let mut blobs = vec![shared.remote.join("blobs")];
    while let Some(path) = blobs.pop() {
        if path.is_dir() {
            blobs.extend(path.read_dir().unwrap().map(|entry| entry.unwrap().path()));
        } else if std::fs::read(&path).unwrap() == fill(2, 100_000) {
            std::fs::remove_file(path).unwrap();
        }
    }
    mount.mount();
    assert!(mount.log().contains("1 files were left out"));
    assert!(std::fs::read(mount.files("kept")).unwrap() == fill(1, 100_000));
    assert_eq!(std::fs::read_dir(mount.files("")).unwrap().count(), 1);
}
