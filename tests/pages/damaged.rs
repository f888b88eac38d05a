//! A store whose files somebody changed behind the daemon's back: EIO, never other bytes.

use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crate::common::sys::{assert_errno, getxattr, open, rename, sync_directory, write_and_close};
use crate::common::{Mode, Model, Mount};

in_both_modes!(
    swapped_while_unmounted,
    swapped_while_mounted,
    flipped_cut_and_missing,
    damage_counts_as_a_miss,
);

/// Two sealed and committed pages, and their object files.
fn prepared(mode: Mode) -> (Mount, [PathBuf; 2], [PathBuf; 2]) {
    prepared_with(mode, &[])
}

fn prepared_with(mode: Mode, options: &[&str]) -> (Mount, [PathBuf; 2], [PathBuf; 2]) {
    let mount = Mount::with_own_files(mode, options);
    let model = Model::small();
    model.install(&mount);
    let pages = [0, 32].map(|start| model.page(0, start, start));
    let paths = [0, 32].map(|start| model.page_path(&mount, "chat", 0, start));
    for (path, page) in paths.iter().zip(&pages) {
        write_and_close(path, page).unwrap();
        assert!(path.exists());
    }
    sync_directory(mount.path()).unwrap();
    let objects = pages.map(|page| {
        let mut objects = mount.objects().into_iter();
        let same = |object: &PathBuf| std::fs::read(object).unwrap() == page;
        objects.find(same).unwrap()
    });
    (mount, paths, objects)
}

fn swap(objects: &[PathBuf; 2], aside: &Path) {
    rename(&objects[0], aside).unwrap();
    rename(&objects[1], &objects[0]).unwrap();
    rename(aside, &objects[1]).unwrap();
}

#[track_caller]
fn both_are_refused(mount: &Mount, paths: &[PathBuf; 2], objects: &[PathBuf; 2]) {
    assert_eq!(mount.errors(), [] as [String; 0]);
    for (index, path) in paths.iter().enumerate() {
        assert_errno(open(path, libc::O_RDONLY), libc::EIO);
        let errors = mount.errors();
        assert_eq!(errors.len(), index + 1, "{errors:#?}");
        let line = errors.last().unwrap();
        let path = path.strip_prefix(mount.path()).unwrap().to_str().unwrap();
        let object = objects[index].file_name().unwrap().to_str().unwrap();
        assert!(line.contains(path), "{line}");
        assert!(line.contains(object), "{line}");
        assert!(line.contains("checksum"), "{line}");
    }
    assert_eq!(mount.metric("kvfs_checksum_errors_total{tier=\"ssd\"}"), 2);
    // What the names say is still known.
    assert_eq!(std::fs::metadata(&paths[0]).unwrap().len(), 8192);
    getxattr(&paths[0], "user.kvfs.checksum").unwrap();
}

fn swapped_while_unmounted(mode: Mode) {
    let (mut mount, paths, objects) = prepared(mode);
    assert!(mount.unmount().success());
    swap(&objects, &mount.beside("aside"));
    mount.mount();
    both_are_refused(&mount, &paths, &objects);
    // Put right, they are readable again.
    swap(&objects, &mount.beside("aside"));
    let model = Model::small();
    assert!(std::fs::read(&paths[0]).unwrap() == model.page(0, 0, 0));
}

fn swapped_while_mounted(mode: Mode) {
    let (mount, paths, objects) = prepared(mode);
    let model = Model::small();
    assert!(std::fs::read(&paths[0]).unwrap() == model.page(0, 0, 0));
    assert!(std::fs::read(&paths[1]).unwrap() == model.page(0, 32, 32));
    swap(&objects, &mount.beside("aside"));
    both_are_refused(&mount, &paths, &objects);
}

fn flipped_cut_and_missing(mode: Mode) {
    let (mut mount, paths, objects) = prepared(mode);
    assert!(mount.unmount().success());
    let object = open(&objects[0], libc::O_RDWR).unwrap();
    object.write_all_at(b"x", 8000).unwrap();
    drop(object);
    let object = open(&objects[1], libc::O_RDWR).unwrap();
    object.set_len(8000).unwrap();
    drop(object);
    mount.mount();
    assert_errno(open(&paths[0], libc::O_RDONLY), libc::EIO);
    assert_errno(open(&paths[1], libc::O_RDONLY), libc::EIO);
    let errors = mount.errors();
    assert_eq!(errors.len(), 2, "{errors:#?}");
    assert!(errors[0].contains("chat/000/0000000.safetensors"), "{errors:#?}");
    assert!(errors[1].contains("8000 bytes instead of 8192"), "{errors:#?}");
    std::fs::remove_file(&objects[0]).unwrap();
    assert_errno(open(&paths[0], libc::O_RDONLY), libc::EIO);
    assert!(mount.errors()[2].contains("missing"), "{:#?}", mount.errors());
    // A good copy can be put in its place.
    let model = Model::small();
    write_and_close(mount.files("copy"), &model.page(0, 0, 0)).unwrap();
    // A descriptor keeps what was removed, which is no file any more.
    let held = open(&paths[0], libc::O_PATH).unwrap();
    std::fs::remove_file(&paths[0]).unwrap();
    rename(mount.files("copy"), &paths[0]).unwrap();
    assert!(std::fs::read(&paths[0]).unwrap() == model.page(0, 0, 0));
    // The other one is still damaged.
    assert_eq!((mount.status("state"), mount.status("damaged_files")), two("degraded", "1"));
    std::fs::remove_file(&paths[1]).unwrap();
    assert_eq!((mount.status("state"), mount.status("damaged_files")), two("ok", "0"));
    drop(held);
}

fn two(one: &str, other: &str) -> (String, String) {
    (one.to_owned(), other.to_owned())
}

fn damage_counts_as_a_miss(mode: Mode) {
    let (mut mount, paths, objects) = prepared_with(mode, &["--on-corrupt", "miss"]);
    let other = mount.files("other name");
    std::fs::hard_link(&paths[1], &other).unwrap();
    let plain = mount.files("plain");
    write_and_close(&plain, b"what an engine wrote").unwrap();
    assert!(mount.unmount().success());
    open(&objects[0], libc::O_RDWR).unwrap().write_all_at(b"x", 8000).unwrap();
    std::fs::remove_file(&objects[1]).unwrap();
    mount.mount();
    // The names are there as long as nobody knows.
    assert!(paths.iter().all(|path| path.exists()));
    for path in [&paths[0], &paths[1], &other] {
        assert_errno(open(path, libc::O_RDONLY), libc::ENOENT);
        assert_errno(std::fs::metadata(path), libc::ENOENT);
    }
    assert_eq!(std::fs::read_dir(paths[0].parent().unwrap()).unwrap().count(), 0);
    assert_eq!(mount.errors().len(), 2, "{:#?}", mount.errors());
    assert_eq!(mount.quarantined().len(), 1);
    assert_eq!(std::fs::read(&plain).unwrap(), b"what an engine wrote");
    // An engine writes again what it missed, in either way.
    let model = Model::small();
    write_and_close(&paths[0], &model.page(0, 0, 0)).unwrap();
    write_and_close(mount.files("new"), &model.page(0, 32, 32)).unwrap();
    rename(mount.files("new"), &paths[1]).unwrap();
    for _ in 0..2 {
        for (path, start) in paths.iter().zip([0, 32]) {
            assert!(std::fs::read(path).unwrap() == model.page(0, start, start));
        }
        assert_errno(open(&other, libc::O_RDONLY), libc::ENOENT);
        sync_directory(mount.path()).unwrap();
        mount.crash();
    }
}
