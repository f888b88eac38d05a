//! A store on a disk that is full: writers hear of it, readers do not, and nothing is lost.

use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::common::disk::SmallDisk;
use crate::common::sys::{
    assert_errno, close, errno, open, rename, sync_directory, write, write_and_close,
};
use crate::common::{Model, Mount, eventually, fill};

macro_rules! on_a_small_disk {
    ($($scenario:ident),+ $(,)?) => {
        $(mod $scenario {
            use crate::common::{Mode, Mount};

            fn run(mode: Mode) {
                crate::require!(fuse, root, r#loop);
                let disk = super::SmallDisk::new();
                let mount = Mount::of_store(mode, &disk.mountpoint.join("store"));
                super::$scenario(&disk, &mut { mount });
            }

            #[test]
            fn passthrough() {
                run(Mode::Passthrough);
            }

            #[test]
            fn served() {
                run(Mode::Served);
            }
        })+
    };
}

on_a_small_disk!(
    nothing_by_halves,
    room_comes_back_in_portions,
    synced_data_survives,
    appends_are_whole,
    the_row_that_fills_a_page_comes_with_it,
    a_full_tail_becomes_a_page_once_there_is_room,
);

/// Whether the writer of a page heard that it could not be written; if it did not, the page is
/// there.
fn write_or_enospc(path: &Path, page: &[u8]) -> bool {
    let outcome = write_and_close(path, page);
    let code = errno(&outcome);
    assert!([0, libc::ENOSPC].contains(&code), "{outcome:?}");
    code == libc::ENOSPC
}

fn large_model() -> Model {
    // A page file is 1 MiB + 4 KiB.
    Model::with(|fields| {
        fields.head_dim = 128;
        fields.num_kv_heads = 8;
        fields.page_tokens = 256;
    })
}

fn nothing_by_halves(_disk: &SmallDisk, mount: &mut Mount) {
    let model = large_model();
    model.install(mount);
    let path = |number: u64| model.page_path(mount, "chat", 0, number * 256);
    let page = |number: u64| model.page(0, number * 256, number);
    let kept = path(0);
    write_and_close(&kept, &page(0)).unwrap();
    sync_directory(mount.path()).unwrap();

    // In place, until the disk is full.
    let mut stored = 1;
    while !write_or_enospc(&path(stored), &page(stored)) {
        assert!(std::fs::read(path(stored)).unwrap() == page(stored));
        stored += 1;
        assert!(stored < 60, "the disk never got full");
    }
    assert!(stored > 10);
    assert_errno(std::fs::metadata(path(stored)), libc::ENOENT);
    // By a temporary name.
    let temporary = kept.with_file_name(".next");
    let file = open(&temporary, libc::O_WRONLY | libc::O_CREAT).unwrap();
    let outcome = file.write_all_at(&page(99), 0);
    assert_errno(outcome, libc::ENOSPC);
    drop(file);
    assert_errno(rename(&temporary, path(99)), libc::EINVAL);
    assert_errno(std::fs::metadata(path(99)), libc::ENOENT);
    std::fs::remove_file(&temporary).unwrap();
    // Reading goes on, and so does listing.
    for number in 0..stored {
        assert!(std::fs::read(path(number)).unwrap() == page(number));
    }
    let listed = std::fs::read_dir(kept.parent().unwrap()).unwrap().count();
    assert_eq!(listed as u64, stored);

    // Space comes back when pages go, however long the kernel remembers them: such a descriptor keeps a name, but no bytes.
    let remembered: Vec<_> =
        (1..stored).map(|number| open(path(number), libc::O_PATH).unwrap()).collect();
    for number in 1..stored {
        std::fs::remove_file(path(number)).unwrap();
    }
    sync_directory(mount.path()).unwrap();
    for number in 1..10 {
        write_and_close(path(number), &page(number)).unwrap();
        assert!(std::fs::read(path(number)).unwrap() == page(number));
    }
    sync_directory(mount.path()).unwrap();
    assert_eq!(mount.status("state"), "ok");
    drop(remembered);
    let paths: Vec<_> = (0..10).map(path).collect();
    mount.crash();
    for (number, path) in paths.iter().enumerate() {
        assert!(std::fs::read(path).unwrap() == page(number as u64));
    }
}

/// The first of them make so much room that the disk is not nearly full any more.
fn room_comes_back_in_portions(_disk: &SmallDisk, mount: &mut Mount) {
    let model = large_model();
    model.install(mount);
    let path = |number: u64| model.page_path(mount, "chat", 0, number * 256);
    let page = |number: u64| model.page(0, number * 256, number);
    let mut stored = 0;
    while !write_or_enospc(&path(stored), &page(stored)) {
        stored += 1;
    }
    sync_directory(mount.path()).unwrap();
    let remembered: Vec<_> =
        (0..stored).map(|number| open(path(number), libc::O_PATH).unwrap()).collect();
    for portion in [0..stored / 4, stored / 4..stored] {
        for number in portion {
            std::fs::remove_file(path(number)).unwrap();
        }
        sync_directory(mount.path()).unwrap();
    }
    for number in 0..stored {
        write_and_close(path(number), &page(number)).unwrap();
    }
    drop(remembered);
}

fn synced_data_survives(disk: &SmallDisk, mount: &mut Mount) {
    let model = large_model();
    model.install(mount);
    let page_path = model.page_path(mount, "chat", 0, 0);
    let page = model.page(0, 0, 1);
    write_and_close(&page_path, &page).unwrap();
    let plain = mount.files("plain");
    write_and_close(&plain, &fill(1, 100_000)).unwrap();
    sync_directory(mount.path()).unwrap();
    let ballast = disk.fill_up();

    // What fsync promises it keeps, or says that it cannot.
    let mut promised = Vec::new();
    for number in 0..20 {
        let path = mount.files(number.to_string());
        let Ok(file) = open(&path, libc::O_WRONLY | libc::O_CREAT) else {
            continue;
        };
        let bytes = fill(number, 50_000);
        if file.write_all_at(&bytes, 0).is_ok() && file.sync_all().is_ok() {
            promised.push((path, bytes));
        }
    }
    assert!(promised.len() < 20, "the disk was not full");
    assert!(std::fs::read(&page_path).unwrap() == page);
    mount.kill();
    std::fs::remove_file(ballast).unwrap();
    mount.mount();
    assert!(std::fs::read(&page_path).unwrap() == page);
    assert!(std::fs::read(&plain).unwrap() == fill(1, 100_000));
    for (path, bytes) in promised {
        assert!(std::fs::read(&path).unwrap() == bytes, "{}", path.display());
    }
    write_and_close(mount.files("after"), b"works").unwrap();
    sync_directory(mount.path()).unwrap();
    assert_eq!(mount.status("state"), "ok");
}

fn appends_are_whole(disk: &SmallDisk, mount: &mut Mount) {
    let model = large_model();
    model.install(mount);
    let path = model.tail_path(mount, "chat", 0, 0);
    let row = model.row_bytes();
    let rows = model.rows(1, 200);
    let tail = open(&path, libc::O_WRONLY | libc::O_CREAT | libc::O_APPEND).unwrap();
    write(&tail, &rows[..10 * row]).unwrap();
    tail.sync_all().unwrap();
    let ballast = disk.fill_up();
    let mut written = 10 * row;
    let outcome = loop {
        match write(&tail, &rows[written..written + 3 * row]) {
            Ok(count) => written += count,
            outcome => break outcome,
        }
    };
    assert_errno(outcome, libc::ENOSPC);
    assert!(std::fs::read(&path).unwrap() == rows[..written]);
    std::fs::remove_file(ballast).unwrap();
    sync_directory(&disk.mountpoint).unwrap();
    // A program that another test starts holds a copy of the ballast's descriptor until it runs.
    eventually("room", || write(&tail, &rows[written..written + row]).ok());
    assert!(std::fs::read(&path).unwrap() == rows[..written + row]);
    close(tail).unwrap();
    assert_eq!(mount.status("state"), "ok");
}

/// Leaves some room: for rows, but for no page.
fn fill_up_but(disk: &SmallDisk, bytes: u64) -> std::path::PathBuf {
    let ballast = disk.fill_up();
    let file = open(&ballast, libc::O_WRONLY).unwrap();
    file.set_len(file.metadata().unwrap().len() - bytes).unwrap();
    file.sync_all().unwrap();
    ballast
}

fn the_row_that_fills_a_page_comes_with_it(disk: &SmallDisk, mount: &mut Mount) {
    let model = large_model();
    model.install(mount);
    let (row, rows) = (model.row_bytes(), model.rows(1, 256));
    let path = model.tail_path(mount, "chat", 0, 0);
    let tail = open(&path, libc::O_WRONLY | libc::O_CREAT | libc::O_APPEND).unwrap();
    write(&tail, &rows[..255 * row]).unwrap();
    tail.sync_all().unwrap();
    let ballast = fill_up_but(disk, 256 << 10);
    for _ in 0..2 {
        assert_errno(write(&tail, &rows[255 * row..]), libc::ENOSPC);
        assert!(std::fs::read(&path).unwrap() == rows[..255 * row]);
    }
    std::fs::remove_file(ballast).unwrap();
    write(&tail, &rows[255 * row..]).unwrap();
    close(tail).unwrap();
    assert!(std::fs::read(model.page_path(mount, "chat", 0, 0)).unwrap() == model.page(0, 0, 1));
    assert_eq!(std::fs::metadata(model.tail_path(mount, "chat", 0, 256)).unwrap().len(), 0);
    assert_eq!(mount.status("state"), "ok");
}

/// What a crash left is sealed by the mount, or, if it finds no room, by a later commit.
fn a_full_tail_becomes_a_page_once_there_is_room(disk: &SmallDisk, mount: &mut Mount) {
    let model = large_model();
    model.install(mount);
    let (row, rows) = (model.row_bytes(), model.rows(1, 256));
    let path = model.tail_path(mount, "chat", 0, 0);
    write_and_close(&path, &rows[..255 * row]).unwrap();
    sync_directory(mount.path()).unwrap();
    mount.kill();
    let is_tail = |path: &std::path::PathBuf| path.metadata().unwrap().len() == 255 * row as u64;
    let object = mount.objects().into_iter().find(is_tail).unwrap();
    open(object, libc::O_WRONLY | libc::O_APPEND)
        .unwrap()
        .write_all_at(&rows[255 * row..], 0)
        .unwrap();
    let ballast = fill_up_but(disk, 256 << 10);
    mount.mount();
    let page = model.page_path(mount, "chat", 0, 0);
    assert_eq!(std::fs::metadata(&path).unwrap().len(), rows.len() as u64);
    assert!(!page.exists());
    std::fs::remove_file(ballast).unwrap();
    sync_directory(mount.path()).unwrap();
    assert!(std::fs::read(&page).unwrap() == model.page(0, 0, 1));
    assert!(!path.exists());
}

/// Memory is given out by the page, so that a write can end in the middle.
#[test]
fn a_row_of_which_only_a_part_found_room_is_taken_back() {
    crate::require!(fuse, root);
    let directory = crate::common::mount::scratch_directory();
    let disk = directory.path().join("memory");
    std::fs::create_dir(&disk).unwrap();
    let mut mount_memory = std::process::Command::new("mount");
    mount_memory.args(["-t", "tmpfs", "-o", "size=32m,huge=never", "kvfs-test"]).arg(&disk);
    crate::common::forks::succeed(&mut mount_memory);
    {
        let mount = Mount::of_store(crate::common::Mode::Served, &disk.join("store"));
        parts_are_taken_back(&mount, &disk);
    }
    crate::common::forks::succeed(std::process::Command::new("umount").arg(&disk));
}

fn parts_are_taken_back(mount: &Mount, disk: &Path) {
    let model = Model::with(|fields| (fields.num_kv_heads, fields.head_dim) = (32, 256));
    model.install(mount);
    let (row, rows) = (model.row_bytes(), model.rows(1, 10));
    let path = model.tail_path(mount, "chat", 0, 0);
    let tail = open(&path, libc::O_WRONLY | libc::O_CREAT | libc::O_APPEND).unwrap();
    write(&tail, &rows[..2 * row]).unwrap();
    tail.sync_all().unwrap();
    let ballast = disk.join("ballast");
    let file = std::fs::File::create(&ballast).unwrap();
    let mut length = 0;
    while file.write_all_at(&[1; 4096], length).is_ok() {
        length += 4096;
    }
    file.set_len(length - 5 * 4096).unwrap();
    drop(file);
    assert_errno(write(&tail, &rows[2 * row..3 * row]), libc::ENOSPC);
    assert!(std::fs::read(&path).unwrap() == rows[..2 * row]);
    std::fs::remove_file(ballast).unwrap();
    write(&tail, &rows[2 * row..]).unwrap();
    close(tail).unwrap();
    assert!(std::fs::read(&path).unwrap() == rows);
}
