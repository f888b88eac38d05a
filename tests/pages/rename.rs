//! A file becomes a page by being renamed onto a page's name.

use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, chown};
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use crate::common::sys::{
    assert_errno, errno, getxattr, listxattr, map, map_mut, open, rename, set_modified, setxattr,
    sync_directory, write_and_close,
};
use crate::common::{Mode, Model, Mount};

in_both_modes!(
    every_staging_name_publishes,
    attributes_come_along,
    a_page_refuses_writers,
    readers_keep_their_bytes,
    an_identical_page_is_dropped,
    another_page_replaces,
    a_writer_that_stays_cannot_change_the_page,
    another_link_keeps_its_bytes,
);

/// A mount with a model and the page of layer 0 that starts at token 0, not yet made.
fn prepared(mode: Mode) -> (Mount, Model, PathBuf) {
    let mount = Mount::new(mode);
    let model = Model::small();
    model.install(&mount);
    let path = model.page_path(&mount, "chat", 0, 0);
    (mount, model, path)
}

fn every_staging_name_publishes(mode: Mode) {
    let (mount, model, path) = prepared(mode);
    let directory = path.parent().unwrap();
    let check = |from: PathBuf, start: u64| {
        let page = model.page(0, start, start);
        std::fs::create_dir_all(from.parent().unwrap()).unwrap();
        write_and_close(&from, &page).unwrap();
        let before = std::fs::metadata(&from).unwrap();
        let to = model.page_path(&mount, "chat", 0, start);
        rename(&from, &to).unwrap();
        let sealed = std::fs::metadata(&to).unwrap();
        assert_errno(std::fs::metadata(&from), libc::ENOENT);
        assert_ne!(before.ino(), sealed.ino(), "{}", from.display());
        assert_eq!(sealed.len(), page.len() as u64);
        assert_eq!(sealed.nlink(), 1);
        assert!(sealed.blocks() > 0);
        assert_eq!(std::fs::read(&to).unwrap(), page);
    };
    check(directory.join(".0000000.safetensors.x7"), 0);
    check(directory.join("0000032.safetensors.tmp"), 32);
    check(directory.join(".~tmp~/0000064.safetensors"), 64);
    check(directory.join("part"), 96);
    check(mount.files("part"), 128);
    check(model.directory(&mount).join("part"), 160);
    check(mount.join("models/.part"), 192);
    assert_eq!(mount.status("pages"), "7");
    assert_eq!(mount.errors(), [] as [String; 0]);
}

fn attributes_come_along(mode: Mode) {
    let (mount, model, path) = prepared(mode);
    let temporary = mount.files("page");
    let page = model.page(0, 0, 1);
    write_and_close(&temporary, &page).unwrap();
    std::fs::set_permissions(&temporary, PermissionsExt::from_mode(0o640)).unwrap();
    if nix::unistd::geteuid().is_root() {
        chown(&temporary, Some(1000), Some(2000)).unwrap();
    }
    setxattr(&temporary, "user.note", b"kept").unwrap();
    let then = SystemTime::UNIX_EPOCH + Duration::new(1_600_000_000, 123_456_789);
    set_modified(&temporary, then).unwrap();
    let before = std::fs::metadata(&temporary).unwrap();
    rename(&temporary, &path).unwrap();

    let check = |mount: &Mount| {
        let path = model.page_path(mount, "chat", 0, 0);
        let after = std::fs::metadata(&path).unwrap();
        assert_eq!(after.mode(), before.mode());
        assert_eq!((after.uid(), after.gid()), (before.uid(), before.gid()));
        assert_eq!(after.modified().unwrap(), then);
        assert_eq!(getxattr(&path, "user.note").unwrap(), "kept");
        assert_eq!(listxattr(&path).unwrap(), ["user.note"]);
        let checksum = getxattr(&path, "user.kvfs.checksum").unwrap();
        assert_eq!(checksum, model.checksum(0, 0, &page));
        assert_eq!(getxattr(&path, "user.kvfs.encoding").unwrap(), "raw");
        let stored = getxattr(&path, "user.kvfs.stored_bytes").unwrap();
        assert_eq!(stored, page.len().to_string());
        assert_errno(getxattr(&path, "user.kvfs.other"), libc::ENODATA);
    };
    check(&mount);
    let mut mount = mount;
    mount.remount();
    check(&mount);
}

fn a_page_refuses_writers(mode: Mode) {
    let (_mount, model, path) = prepared(mode);
    let page = model.page(0, 0, 1);
    write_and_close(&path, &page).unwrap();
    for flags in [
        libc::O_WRONLY,
        libc::O_RDWR,
        libc::O_WRONLY | libc::O_APPEND,
        libc::O_WRONLY | libc::O_TRUNC,
        libc::O_RDWR | libc::O_CREAT,
        libc::O_RDONLY | libc::O_TRUNC,
    ] {
        assert_errno(open(&path, flags), libc::EPERM);
    }
    let exclusive = libc::O_WRONLY | libc::O_CREAT | libc::O_EXCL;
    assert_errno(open(&path, exclusive), libc::EEXIST);
    for length in [0, 10, page.len(), page.len() + 1] {
        let length = i64::try_from(length).unwrap();
        let truncated = nix::unistd::truncate(&path, length);
        assert_errno(truncated.map_err(Into::into), libc::EPERM);
    }
    assert_eq!(std::fs::read(&path).unwrap(), page);

    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).unwrap();
    let then = SystemTime::UNIX_EPOCH + Duration::from_secs(1_500_000_000);
    set_modified(&path, then).unwrap();
    let stat = std::fs::metadata(&path).unwrap();
    assert_eq!(stat.mode() & 0o7777, 0o600);
    assert_eq!(stat.modified().unwrap(), then);
    std::fs::remove_file(&path).unwrap();
    assert_errno(std::fs::metadata(&path), libc::ENOENT);
}

fn readers_keep_their_bytes(mode: Mode) {
    let (mount, model, path) = prepared(mode);
    let pages = [1, 2, 3].map(|seed| model.page(0, 0, seed));
    write_and_close(&path, &pages[0]).unwrap();
    let first = open(&path, libc::O_RDONLY).unwrap();
    let first_map = map(&first);
    let temporary = mount.files("next");
    write_and_close(&temporary, &pages[1]).unwrap();
    rename(&temporary, &path).unwrap();
    let second = open(&path, libc::O_RDONLY).unwrap();
    let second_map = map(&second);
    std::fs::remove_file(&path).unwrap();
    write_and_close(&path, &pages[2]).unwrap();

    // Now and after everything is on the disk and the old objects could go.
    for _ in 0..2 {
        let mut buffer = vec![0; pages[0].len()];
        first.read_exact_at(&mut buffer, 0).unwrap();
        assert!(buffer == pages[0]);
        assert!(first_map[..] == pages[0][..]);
        second.read_exact_at(&mut buffer, 0).unwrap();
        assert!(buffer == pages[1]);
        assert!(second_map[..] == pages[1][..]);
        assert!(std::fs::read(&path).unwrap() == pages[2]);
        sync_directory(mount.path()).unwrap();
    }
}

fn an_identical_page_is_dropped(mode: Mode) {
    let (mount, model, path) = prepared(mode);
    let page = model.page(0, 0, 1);
    write_and_close(&path, &page).unwrap();
    let before = std::fs::metadata(&path).unwrap();
    let temporary = mount.files("again");
    write_and_close(&temporary, &page).unwrap();
    std::fs::set_permissions(&temporary, PermissionsExt::from_mode(0o600)).unwrap();
    let then = SystemTime::UNIX_EPOCH + Duration::from_secs(1_400_000_000);
    set_modified(&temporary, then).unwrap();
    rename(&temporary, &path).unwrap();
    assert_errno(std::fs::metadata(&temporary), libc::ENOENT);
    let after = std::fs::metadata(&path).unwrap();
    assert_eq!(after.ino(), before.ino());
    assert_eq!(after.modified().unwrap(), then);
    assert_eq!(after.mode() & 0o7777, 0o600);
    assert_eq!(mount.status("pages"), "1");
    assert_eq!(std::fs::read(&path).unwrap(), page);

    // The same rows under another header are another file.
    let mut metadata = model.place(0, 0).declared().to_metadata();
    metadata.insert("note".to_owned(), "other".to_owned());
    let rows = model.rows(1, 32);
    let other = kvfs::page::pack_rows(model.manifest.geometry(), &rows, 32, &metadata).unwrap();
    assert_eq!(model.checksum(0, 0, &other), model.checksum(0, 0, &page));
    write_and_close(&temporary, &other).unwrap();
    rename(&temporary, &path).unwrap();
    assert!(std::fs::read(&path).unwrap() == other);
}

fn another_page_replaces(mode: Mode) {
    let (mount, model, path) = prepared(mode);
    let pages = [1, 2].map(|seed| model.page(0, 0, seed));
    write_and_close(&path, &pages[0]).unwrap();
    // Whoever looks finds one of the two, whole, at any time.
    let done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(std::sync::atomic::Ordering::Relaxed) {
                let found = std::fs::read(&path).unwrap();
                assert!(pages.contains(&found));
            }
        });
        for round in 1..=100 {
            let temporary = mount.files(round.to_string());
            write_and_close(&temporary, &pages[round % 2]).unwrap();
            let outcome = rename(&temporary, &path);
            if errno(&outcome) != 0 {
                done.store(true, std::sync::atomic::Ordering::Relaxed);
            }
            outcome.unwrap();
        }
        done.store(true, std::sync::atomic::Ordering::Relaxed);
    });
    assert!(std::fs::read(&path).unwrap() == pages[0]);
    assert_eq!(mount.status("pages"), "1");
}

fn a_writer_that_stays_cannot_change_the_page(mode: Mode) {
    let (mount, model, path) = prepared(mode);
    let page = model.page(0, 0, 1);

    // With a descriptor.
    let temporary = mount.files("held");
    let file = open(&temporary, libc::O_RDWR | libc::O_CREAT).unwrap();
    file.write_all_at(&page, 0).unwrap();
    rename(&temporary, &path).unwrap();
    file.write_all_at(&[0xff; 4096], 4096).unwrap();
    assert!(std::fs::read(&path).unwrap() == page);
    let mut changed = vec![0; page.len()];
    file.read_exact_at(&mut changed, 0).unwrap();
    assert_eq!(changed[..4096], page[..4096]);
    assert_eq!(changed[4096..], [0xff; 4096]);
    drop(file);
    assert!(std::fs::read(&path).unwrap() == page);

    // With a mapping that outlives its descriptor.
    let path = model.page_path(&mount, "chat", 0, 32);
    let page = model.page(0, 32, 2);
    let temporary = mount.files("mapped");
    let file = open(&temporary, libc::O_RDWR | libc::O_CREAT).unwrap();
    file.write_all_at(&page, 0).unwrap();
    let mut mapped = map_mut(&file);
    drop(file);
    rename(&temporary, &path).unwrap();
    mapped[4096..].fill(0xff);
    assert!(std::fs::read(&path).unwrap() == page);
    mapped.flush().unwrap();
    drop(mapped);
    assert!(std::fs::read(&path).unwrap() == page);
    let mut mount = mount;
    mount.remount();
    assert!(std::fs::read(&path).unwrap() == page);
    assert_eq!(mount.errors(), [] as [String; 0]);
}

/// Of two names of a file one becomes a page, a tail or ids; the other one stays what it was, and is not what the new
/// name leads to.
fn another_link_keeps_its_bytes(mode: Mode) {
    let (mount, model, page) = prepared(mode);
    let layer = page.parent().unwrap();
    let row = vec![7; usize::try_from(model.manifest.geometry().row_bytes()).unwrap()];
    let sequence = layer.parent().unwrap();
    let renamed = [
        (page.clone(), model.page(0, 0, 1)),
        (layer.join("0000032.tail"), row),
        (sequence.join("tokens"), vec![1, 0, 0, 0]),
    ];
    for (number, (to, bytes)) in renamed.iter().enumerate() {
        let directory = to.parent().unwrap();
        let (other, link) = (mount.files(format!("other-{number}")), directory.join(".new"));
        write_and_close(&other, bytes).unwrap();
        std::fs::hard_link(&other, &link).unwrap();
        rename(&link, to).unwrap();
        assert_eq!(&std::fs::read(to).unwrap(), bytes, "{}", to.display());
        assert_eq!(&std::fs::read(&other).unwrap(), bytes, "{}", other.display());
        assert_eq!(std::fs::metadata(&other).unwrap().nlink(), 1);
        let written = open(&other, libc::O_WRONLY).unwrap();
        written.write_all_at(b"changed", 0).unwrap();
        assert_eq!(&std::fs::read(to).unwrap(), bytes, "{}", to.display());
        // The kernel keeps names of `files/`: there the new name would lead to the file itself.
        let second = mount.files(format!("second-{number}"));
        std::fs::hard_link(&other, &second).unwrap();
        assert_errno(rename(&second, to), libc::EXDEV);
        assert_eq!(&std::fs::read(to).unwrap(), bytes, "{}", to.display());
    }
}
