//! New pages are written to memory first: within the budget, and never only there for longer than a
//! commit.

use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crate::common::sys::{getxattr, map, open, rename, sync_directory, write, write_and_close};
use crate::common::{Mode, Model, Mount, eventually, fill};

in_both_modes!(
    a_new_page_is_in_memory_and_then_on_the_disk_too,
    the_budget_holds_under_many_writers,
    what_is_used_stays_and_what_is_not_leaves,
    a_temporary_file_may_change_after_it_was_flushed,
    a_file_may_shrink_while_it_is_flushed,
    rows_are_never_kept_in_memory,
    a_refused_page_goes_to_quarantine,
    a_page_that_is_larger_than_the_budget_goes_to_the_disk,
);

/// A page file is 256 KiB + 4 KiB.
fn model() -> Model {
    Model::with(|fields| {
        fields.head_dim = 64;
        fields.num_kv_heads = 8;
        fields.page_tokens = 128;
    })
}

const PAGE_BYTES: u64 = (256 << 10) + 4096;

/// Commits only when asked.
fn prepared(mode: Mode, budget: &str) -> (Mount, Model) {
    let mount = Mount::with_options(mode, &["--ram", budget, "--commit-interval", "3600"]);
    let model = model();
    model.install(&mount);
    sync_directory(mount.path()).unwrap();
    (mount, model)
}

fn publish(path: &Path, page: &[u8]) {
    let temporary = path.with_extension("tmp");
    write_and_close(&temporary, page).unwrap();
    rename(&temporary, path).unwrap();
}

fn tier(path: &Path) -> String {
    getxattr(path, "user.kvfs.tier").unwrap()
}

fn a_new_page_is_in_memory_and_then_on_the_disk_too(mode: Mode) {
    let (mut mount, model) = prepared(mode, "64M");
    let pages: Vec<_> = (0..4).map(|number| model.page(0, number * 128, number)).collect();
    let paths: Vec<PathBuf> =
        (0..4).map(|number| model.page_path(&mount, "chat", 0, number * 128)).collect();
    for (path, page) in paths.iter().zip(&pages) {
        publish(path, page);
        assert_eq!(tier(path), "ram");
        assert!(std::fs::read(path).unwrap() == *page);
    }
    assert_eq!(mount.status_number("ram_dirty_bytes"), 4 * PAGE_BYTES);
    assert_eq!(mount.status_number("ram_used_bytes"), 4 * PAGE_BYTES);
    let before = mount.objects().len();
    sync_directory(mount.path()).unwrap();
    assert_eq!(mount.objects().len(), before + 4);
    assert_eq!(mount.status_number("ram_dirty_bytes"), 0);
    assert_eq!(mount.metric(r#"kvfs_moves_total{from="ram",to="ssd"}"#), 4);
    assert_eq!(tier(&paths[0]), "ram");
    // Memory forgets; the disk does not.
    mount.crash();
    for (path, page) in paths.iter().zip(&pages) {
        assert_eq!(tier(path), "ssd");
        assert!(std::fs::read(path).unwrap() == *page);
    }
    // What nobody synced is lost as a whole.
    let late = model.page_path(&mount, "chat", 0, 4 * 128);
    publish(&late, &model.page(0, 4 * 128, 4));
    mount.crash();
    assert!(!late.exists());
    // A clean unmount keeps it.
    publish(&late, &model.page(0, 4 * 128, 4));
    mount.remount();
    assert!(std::fs::read(&late).unwrap() == model.page(0, 4 * 128, 4));
}

fn the_budget_holds_under_many_writers(mode: Mode) {
    let budget = 4 << 20;
    let (mut mount, model) = prepared(mode, "4M");
    let page = |writer: u64, number: u64| model.page(1, number * 128, writer << 32 | number);
    let path = |writer: u64, number: u64| {
        model.page_path(&mount, &format!("writer-{writer}"), 1, number * 128)
    };
    std::thread::scope(|scope| {
        for writer in 0..16 {
            let (page, path) = (&page, &path);
            scope.spawn(move || {
                for number in 0..8 {
                    publish(&path(writer, number), &page(writer, number));
                }
            });
        }
        for _ in 0..40 {
            assert!(mount.status_number("ram_used_bytes") <= budget);
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
    });
    let used = mount.status_number("ram_used_bytes");
    // Nothing was flushed yet, so whatever fitted is still there.
    assert!(used <= budget && used > budget - PAGE_BYTES, "{used}");
    let check = |mount: &Mount| {
        for (writer, number) in (0..16).flat_map(|writer| (0..8).map(move |n| (writer, n))) {
            let name = format!("writer-{writer}");
            let path = model.page_path(mount, &name, 1, number * 128);
            assert!(std::fs::read(path).unwrap() == page(writer, number));
        }
    };
    check(&mount);
    mount.remount();
    check(&mount);
}

fn what_is_used_stays_and_what_is_not_leaves(mode: Mode) {
    let (mount, model) = prepared(mode, "4M");
    let path = |number: u64| model.page_path(&mount, "chat", 0, number * 128);
    let page = |number: u64| model.page(0, number * 128, number);
    let held = 15;
    for number in 0..held {
        publish(&path(number), &page(number));
        assert_eq!(tier(&path(number)), "ram");
    }
    sync_directory(mount.path()).unwrap();
    let files: Vec<_> =
        (0..held).map(|number| open(path(number), libc::O_RDONLY).unwrap()).collect();
    let maps: Vec<_> = files.iter().map(map).collect();
    // Everything is in use: a new page finds no room, and nobody loses a byte.
    publish(&path(held), &page(held));
    assert_eq!(tier(&path(held)), "ssd");
    assert!(mount.status_number("ram_pinned_bytes") > 0);
    drop(files);
    if mode == Mode::Passthrough {
        // A mapping is enough; without passthrough the kernel has the bytes itself.
        publish(&path(held + 1), &page(held + 1));
        assert_eq!(tier(&path(held + 1)), "ssd");
    }
    for (number, map) in maps.iter().enumerate() {
        assert!(map[..] == page(number as u64)[..]);
    }
    drop(maps);
    let new = held + 2;
    eventually("room in memory", || {
        let _ = std::fs::remove_file(path(new));
        publish(&path(new), &page(new));
        (tier(&path(new)) == "ram").then_some(())
    });
    assert!(mount.metric(r#"kvfs_evictions_total{reason="room",tier="ram"}"#) > 0);
    assert!(mount.status_number("ram_used_bytes") <= 4 << 20);
    let left = (0..held).filter(|number| tier(&path(*number)) == "ssd").count();
    assert!(left > 0, "nothing was evicted");
    for number in 0..=held {
        assert!(std::fs::read(path(number)).unwrap() == page(number), "{number}");
    }
}

fn a_temporary_file_may_change_after_it_was_flushed(mode: Mode) {
    let (mut mount, model) = prepared(mode, "64M");
    let path = model.page_path(&mount, "chat", 0, 0);
    let page = model.page(0, 0, 1);
    let temporary = path.with_extension("tmp");
    let mut content = fill(1, 100_000);
    write_and_close(&temporary, &content).unwrap();
    sync_directory(mount.path()).unwrap();
    for (offset, byte) in [(5, b'a'), (99_999, b'b')] {
        let file = open(&temporary, libc::O_RDWR).unwrap();
        file.write_all_at(&[byte], offset).unwrap();
        content[usize::try_from(offset).unwrap()] = byte;
        file.sync_all().unwrap();
    }
    mount.crash();
    assert!(std::fs::read(&temporary).unwrap() == content);
    // And it may still become a page.
    let file = open(&temporary, libc::O_WRONLY | libc::O_TRUNC).unwrap();
    file.write_all_at(&page, 0).unwrap();
    drop(file);
    rename(&temporary, &path).unwrap();
    sync_directory(mount.path()).unwrap();
    mount.crash();
    assert!(std::fs::read(&path).unwrap() == page);
}

fn a_file_may_shrink_while_it_is_flushed(mode: Mode) {
    let (mount, model) = prepared(mode, "64M");
    let temporary = model.page_path(&mount, "chat", 0, 0).with_extension("tmp");
    let file = open(&temporary, libc::O_RDWR | libc::O_CREAT).unwrap();
    let content = fill(1, usize::try_from(PAGE_BYTES).unwrap());
    let done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(std::sync::atomic::Ordering::Relaxed) {
                file.write_all_at(&content, 0).unwrap();
                file.set_len(0).unwrap();
            }
        });
        for _ in 0..300 {
            file.sync_all().unwrap();
        }
        done.store(true, std::sync::atomic::Ordering::Relaxed);
    });
    file.write_all_at(&content, 0).unwrap();
    file.sync_all().unwrap();
    assert!(std::fs::read(&temporary).unwrap() == content);
    assert_eq!(mount.status("state"), "ok");
    let moves = mount.metric(r#"kvfs_moves_total{from="ram",to="ssd"}"#);
    assert!(moves > 100, "{moves} flushes only");
}

fn rows_are_never_kept_in_memory(mode: Mode) {
    let (mut mount, model) = prepared(mode, "64M");
    let tail = model.tail_path(&mount, "chat", 0, 0);
    let rows = model.rows(1, 20);
    let (first, rest) = rows.split_at(10 * model.row_bytes());
    let other = model.tail_path(&mount, "other", 0, 0);
    write_and_close(&other, first).unwrap();
    assert_eq!(tier(&other), "ssd");
    // As a restore does it.
    let temporary = tail.with_file_name(".0000000.tail.Xyz");
    write_and_close(&temporary, first).unwrap();
    rename(&temporary, &tail).unwrap();
    assert_eq!(tier(&tail), "ssd");
    sync_directory(mount.path()).unwrap();
    let file = open(&tail, libc::O_WRONLY | libc::O_APPEND).unwrap();
    write(&file, rest).unwrap();
    file.sync_all().unwrap();
    drop(file);
    mount.crash();
    assert!(std::fs::read(&tail).unwrap() == rows);
}

fn a_refused_page_goes_to_quarantine(mode: Mode) {
    let (mount, model) = prepared(mode, "64M");
    let path = model.page_path(&mount, "chat", 0, 0);
    let temporary = path.with_extension("tmp");
    let mut page = model.page(0, 0, 1);
    page.truncate(page.len() - 4096);
    write_and_close(&temporary, &page).unwrap();
    assert!(rename(&temporary, &path).is_err());
    let kept = mount.quarantined();
    assert_eq!(kept.len(), 1);
    assert!(std::fs::read(&kept[0]).unwrap() == page);
    std::fs::remove_file(&temporary).unwrap();
    // The kernel forgets the file a little later.
    eventually("the memory to be free", || {
        sync_directory(mount.path()).unwrap();
        (mount.status_number("ram_used_bytes") == 0).then_some(())
    });
}

fn a_page_that_is_larger_than_the_budget_goes_to_the_disk(mode: Mode) {
    let (mount, model) = prepared(mode, "128K");
    let path = model.page_path(&mount, "chat", 0, 0);
    publish(&path, &model.page(0, 0, 1));
    assert_eq!(tier(&path), "ssd");
    assert_eq!(mount.status_number("ram_used_bytes"), 0);
    assert!(std::fs::read(&path).unwrap() == model.page(0, 0, 1));
}
