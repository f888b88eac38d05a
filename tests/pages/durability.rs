//! What survives when the daemon is killed: everything that was synced, nothing by halves.

use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::time::{Duration, SystemTime};

use crate::common::forks::no_forks;
use crate::common::sys::{
    assert_errno, close, errno, getxattr, map, open, rename, set_modified, setxattr,
    sync_directory, write, write_and_close,
};
use crate::common::{Mode, Model, Mount, eventually, fill};

in_both_modes!(
    a_synced_page_survives,
    rows_and_tokens_survive,
    a_tail_that_a_crash_left_full_becomes_a_page,
    a_synced_row_that_fills_a_page_survives,
    a_commit_comes_without_asking,
    an_unfinished_file_leaves_nothing,
    truncating_open_is_all_or_nothing,
    unlink_and_rename_survive,
    open_files_outlive_the_daemon,
    a_clean_unmount_keeps_everything,
    a_crash_loop_keeps_what_was_synced,
);

/// Commits only when asked.
fn prepared(mode: Mode) -> (Mount, Model) {
    let mount = Mount::with_own_files(mode, &["--commit-interval", "3600"]);
    let model = Model::small();
    model.install(&mount);
    model.page_path(&mount, "chat", 0, 0);
    sync_directory(mount.path()).unwrap();
    (mount, model)
}

fn sync_file(path: &Path) {
    File::open(path).unwrap().sync_all().unwrap();
}

fn a_synced_page_survives(mode: Mode) {
    let check = |by_rename: bool, sync: &dyn Fn(&Mount, &Path)| {
        let (mut mount, model) = prepared(mode);
        let path = model.page_path(&mount, "chat", 0, 0);
        let page = model.page(0, 0, 1);
        let then = SystemTime::UNIX_EPOCH + Duration::new(1_600_000_000, 42);
        if by_rename {
            write_and_close(path.with_file_name(".x"), &page).unwrap();
            setxattr(path.with_file_name(".x"), "user.note", b"kept").unwrap();
            rename(path.with_file_name(".x"), &path).unwrap();
        } else {
            write_and_close(&path, &page).unwrap();
            setxattr(&path, "user.note", b"kept").unwrap();
        }
        set_modified(&path, then).unwrap();
        sync(&mount, &path);
        mount.crash();
        assert!(std::fs::read(&path).unwrap() == page);
        let stat = std::fs::metadata(&path).unwrap();
        assert_eq!(stat.modified().unwrap(), then);
        assert_eq!(stat.nlink(), 1);
        assert_eq!(getxattr(&path, "user.note").unwrap(), "kept");
        let checksum = getxattr(&path, "user.kvfs.checksum").unwrap();
        assert_eq!(checksum, model.checksum(0, 0, &page));
        assert_errno(open(&path, libc::O_WRONLY), libc::EPERM);
        assert_errno(std::fs::metadata(path.with_file_name(".x")), libc::ENOENT);
        assert_eq!(mount.status("pages"), "1");
        assert_eq!(mount.staging().len(), 0);
    };
    for by_rename in [true, false] {
        check(by_rename, &|_, path| sync_file(path));
        check(by_rename, &|_, path| {
            sync_directory(path.parent().unwrap()).unwrap();
        });
        check(by_rename, &|mount, _| sync_directory(mount.path()).unwrap());
    }
}

fn rows_and_tokens_survive(mode: Mode) {
    let (mut mount, model) = prepared(mode);
    let row = model.row_bytes();
    let append = libc::O_WRONLY | libc::O_CREAT | libc::O_APPEND;
    let (rows, ids) = (model.rows(1, 40), fill(2, 160));
    let tail_path = model.tail_path(&mount, "chat", 0, 0);
    let tokens_path = model.tokens_path(&mount, "chat");
    let mut tail = open(&tail_path, append).unwrap();
    let mut tokens = open(&tokens_path, append).unwrap();
    write(&tail, &rows[..5 * row]).unwrap();
    write(&tokens, &ids[..20]).unwrap();
    tail.sync_all().unwrap();
    tokens.sync_data().unwrap();
    drop((tail, tokens));
    mount.crash();
    assert!(std::fs::read(&tail_path).unwrap() == rows[..5 * row]);
    assert!(std::fs::read(&tokens_path).unwrap() == ids[..20]);

    // Over the border: the page and the next tail.
    tail = open(&tail_path, append).unwrap();
    tokens = open(&tokens_path, append).unwrap();
    write(&tail, &rows[5 * row..32 * row]).unwrap();
    let next_path = model.tail_path(&mount, "chat", 0, 32);
    let next = open(&next_path, append).unwrap();
    write(&next, &rows[32 * row..]).unwrap();
    write(&tokens, &ids[20..]).unwrap();
    next.sync_all().unwrap();
    tokens.sync_all().unwrap();
    drop((tail, tokens, next));
    mount.crash();
    let page = std::fs::read(model.page_path(&mount, "chat", 0, 0)).unwrap();
    assert!(page == model.page(0, 0, 1));
    assert_errno(std::fs::metadata(&tail_path), libc::ENOENT);
    assert!(std::fs::read(&next_path).unwrap() == rows[32 * row..]);
    assert!(std::fs::read(&tokens_path).unwrap() == ids);
    // And on it goes.
    let tail = open(&next_path, append).unwrap();
    write(&tail, &rows[..row]).unwrap();
    assert_eq!(tail.metadata().unwrap().len(), 9 * row as u64);
}

/// The daemon dies between the row that completes a page and the commit that has the page.
fn a_tail_that_a_crash_left_full_becomes_a_page(mode: Mode) {
    let (mut mount, model) = prepared(mode);
    let (rows, row) = (model.rows(1, 33), model.row_bytes());
    let append = libc::O_WRONLY | libc::O_CREAT | libc::O_APPEND;
    let tail_path = model.tail_path(&mount, "chat", 0, 0);
    let tail = open(&tail_path, append).unwrap();
    write(&tail, &rows[..31 * row]).unwrap();
    tail.sync_all().unwrap();
    write(&tail, &rows[31 * row..32 * row]).unwrap();
    drop(tail);
    mount.crash();
    assert_errno(std::fs::metadata(&tail_path), libc::ENOENT);
    let page = std::fs::read(model.page_path(&mount, "chat", 0, 0)).unwrap();
    assert!(page == model.page(0, 0, 1));
    let next =
        open(model.tail_path(&mount, "chat", 0, 32), libc::O_WRONLY | libc::O_APPEND).unwrap();
    assert_eq!(write(&next, &rows[32 * row..]).unwrap(), row);
    drop(next);
    assert!(mount.unmount().success());
    let mut fsck = std::process::Command::new(env!("CARGO_BIN_EXE_kvfs"));
    crate::common::forks::succeed(fsck.arg("fsck").arg(mount.store()));
}

/// fsync of the tail that the last row was appended to, which is a page by then.
fn a_synced_row_that_fills_a_page_survives(mode: Mode) {
    let (mut mount, model) = prepared(mode);
    let append = libc::O_WRONLY | libc::O_CREAT | libc::O_APPEND;
    let tail = open(model.tail_path(&mount, "chat", 0, 0), append).unwrap();
    write(&tail, &model.rows(1, 32)).unwrap();
    tail.sync_all().unwrap();
    drop(tail);
    mount.crash();
    let page = std::fs::read(model.page_path(&mount, "chat", 0, 0)).unwrap();
    assert!(page == model.page(0, 0, 1));
}

fn a_commit_comes_without_asking(mode: Mode) {
    let mut mount = Mount::with_own_files(mode, &["--commit-interval", "1"]);
    let model = Model::small();
    model.install(&mount);
    let path = model.page_path(&mount, "chat", 0, 0);
    let page = model.page(0, 0, 1);
    write_and_close(&path, &page).unwrap();
    eventually("a commit", || {
        (mount.objects().len() == 2 && mount.status("uncommitted_changes") == "0").then_some(())
    });
    mount.crash();
    assert!(std::fs::read(&path).unwrap() == page);
}

fn an_unfinished_file_leaves_nothing(mode: Mode) {
    let (mut mount, model) = prepared(mode);
    let page = model.page(0, 0, 1);
    let path = model.page_path(&mount, "chat", 0, 0);
    let new = libc::O_WRONLY | libc::O_CREAT | libc::O_EXCL;
    let mut held = Vec::new();
    for target in [path.clone(), path.with_file_name(".x"), mount.files("plain")] {
        let file = open(&target, new).unwrap();
        file.write_all_at(&page[..4096], 0).unwrap();
        held.push(file);
    }
    // What others sync does not make half of a file appear.
    sync_directory(mount.path()).unwrap();
    assert_eq!(mount.staging().len(), 3);
    mount.kill();
    drop(held);
    mount.mount();
    assert_errno(std::fs::metadata(&path), libc::ENOENT);
    assert_errno(std::fs::metadata(path.with_file_name(".x")), libc::ENOENT);
    assert_errno(std::fs::metadata(mount.files("plain")), libc::ENOENT);
    assert_eq!(mount.staging().len(), 0);
    assert_eq!(std::fs::read_dir(path.parent().unwrap()).unwrap().count(), 0);
    write_and_close(&path, &page).unwrap();
    assert!(std::fs::read(&path).unwrap() == page);
}

fn truncating_open_is_all_or_nothing(mode: Mode) {
    let (mut mount, _) = prepared(mode);
    let path = mount.files("slot");
    let (old, new) = (fill(1, 100_000), fill(2, 60_000));
    write_and_close(&path, &old).unwrap();
    sync_directory(mount.path()).unwrap();
    let file = open(&path, libc::O_WRONLY | libc::O_TRUNC).unwrap();
    file.write_all_at(&new[..30_000], 0).unwrap();
    assert_eq!(std::fs::metadata(&path).unwrap().len(), 30_000);
    sync_directory(mount.path()).unwrap();
    mount.kill();
    drop(file);
    mount.mount();
    assert!(std::fs::read(&path).unwrap() == old);

    let file = open(&path, libc::O_WRONLY | libc::O_TRUNC).unwrap();
    file.write_all_at(&new, 0).unwrap();
    close(file).unwrap();
    sync_file(&path);
    mount.crash();
    assert!(std::fs::read(&path).unwrap() == new);

    // Synced before it is closed: a part, because the writer asked for it.
    let file = open(&path, libc::O_WRONLY | libc::O_TRUNC).unwrap();
    file.write_all_at(&old[..30_000], 0).unwrap();
    file.sync_all().unwrap();
    mount.kill();
    drop(file);
    mount.mount();
    assert!(std::fs::read(&path).unwrap() == old[..30_000]);
    assert_eq!(mount.staging().len(), 0);
}

fn unlink_and_rename_survive(mode: Mode) {
    let (mut mount, model) = prepared(mode);
    let path = |start| model.page_path(&mount, "chat", 0, start);
    for start in [0, 32, 64] {
        write_and_close(path(start), &model.page(0, start, 1)).unwrap();
    }
    sync_directory(mount.path()).unwrap();
    let paths = [0, 32, 64].map(path);
    std::fs::remove_file(&paths[0]).unwrap();
    write_and_close(mount.files("next"), &model.page(0, 32, 2)).unwrap();
    rename(mount.files("next"), &paths[1]).unwrap();
    rename(&paths[2], mount.files("aside")).unwrap();
    sync_directory(mount.path()).unwrap();
    mount.crash();
    assert_errno(std::fs::metadata(&paths[0]), libc::ENOENT);
    assert!(std::fs::read(&paths[1]).unwrap() == model.page(0, 32, 2));
    assert_errno(std::fs::metadata(&paths[2]), libc::ENOENT);
    assert!(std::fs::read(mount.files("aside")).unwrap() == model.page(0, 64, 1));
    // The manifest and two pages; what nothing refers to is swept.
    eventually("the sweep", || (mount.objects().len() == 3).then_some(()));
    assert_eq!(mount.status("objects"), "3");

    // Without a sync, the old state or the new one, never a mixture.
    let mut mount = mount;
    write_and_close(mount.files("next"), &model.page(0, 32, 3)).unwrap();
    rename(mount.files("next"), &paths[1]).unwrap();
    mount.crash();
    assert!(std::fs::read(&paths[1]).unwrap() == model.page(0, 32, 2));
}

fn open_files_outlive_the_daemon(mode: Mode) {
    let (mut mount, model) = prepared(mode);
    let path = model.page_path(&mount, "chat", 0, 0);
    let page = model.page(0, 0, 1);
    write_and_close(&path, &page).unwrap();
    let reader = open(&path, libc::O_RDONLY).unwrap();
    let mapped = map(&reader);
    let writer = open(mount.files("x"), libc::O_RDWR | libc::O_CREAT).unwrap();
    sync_file(&path);
    mount.kill();
    let mut found = vec![0; page.len()];
    if mode == Mode::Served {
        // The daemon moves the bytes: without it there are none, and whoever asks is told at once.
        assert_errno(writer.write_all_at(b"after", 0), libc::ENOTCONN);
        assert_errno(writer.sync_all(), libc::ENOTCONN);
        mount.mount();
        assert_errno(writer.write_all_at(b"after", 0), libc::ENOTCONN);
        assert_errno(writer.sync_all(), libc::ENOTCONN);
        assert!(std::fs::read(&path).unwrap() == page);
        return;
    }
    reader.read_exact_at(&mut found, 0).unwrap();
    assert!(found == page && mapped[..] == page[..]);
    writer.write_all_at(b"after", 0).unwrap();
    writer.read_exact_at(&mut found[..5], 0).unwrap();
    assert_eq!(&found[..5], b"after");
    assert_errno(open(&path, libc::O_RDONLY), libc::ENOTCONN);
    mount.mount();
    // Also while a new daemon serves the store.
    reader.read_exact_at(&mut found, 0).unwrap();
    assert!(found == page && mapped[..] == page[..]);
}

fn a_clean_unmount_keeps_everything(mode: Mode) {
    let (mut mount, model) = prepared(mode);
    let page_path = model.page_path(&mount, "chat", 0, 0);
    let tail_path = model.tail_path(&mount, "chat", 0, 32);
    let page = model.page(0, 0, 1);
    {
        let _quiet = no_forks();
        write_and_close(&page_path, &page).unwrap();
        write_and_close(&tail_path, &model.rows(2, 3)).unwrap();
        write_and_close(mount.files("plain"), b"plain").unwrap();
    }
    let before = [&page_path, &tail_path, &mount.files("plain")]
        .map(|path| (path.clone(), std::fs::metadata(path).unwrap()));
    mount.remount();
    for (path, old) in before {
        let new = std::fs::metadata(&path).unwrap();
        assert_eq!(new.ino(), old.ino());
        assert_eq!(new.modified().unwrap(), old.modified().unwrap());
        assert_eq!(new.len(), old.len());
    }
    assert!(std::fs::read(&page_path).unwrap() == page);
    assert!(std::fs::read(&tail_path).unwrap() == model.rows(2, 3));
    assert_eq!(std::fs::read(mount.files("plain")).unwrap(), b"plain");
    assert_eq!(mount.errors(), [] as [String; 0]);
}

fn a_crash_loop_keeps_what_was_synced(mode: Mode) {
    let (mut mount, model) = prepared(mode);
    for round in 0..6 {
        let start = round * 32;
        let path = model.page_path(&mount, "chat", 0, start);
        write_and_close(&path, &model.page(0, start, round)).unwrap();
        sync_file(&path);
        // These may or may not be there afterwards, but whole.
        let unsynced = model.page_path(&mount, "chat", 1, start);
        write_and_close(&unsynced, &model.page(1, start, round)).unwrap();
        mount.crash();
        for old in 0..=round {
            let start = old * 32;
            let path = model.page_path(&mount, "chat", 0, start);
            assert!(std::fs::read(path).unwrap() == model.page(0, start, old));
            let found = std::fs::read(model.page_path(&mount, "chat", 1, start));
            assert!([0, libc::ENOENT].contains(&errno(&found)));
            assert!(found.is_err() || found.unwrap() == model.page(1, start, old));
        }
    }
    assert_eq!(mount.errors(), [] as [String; 0]);
}
