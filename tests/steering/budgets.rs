//! Budgets change while files are written and read.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::common::sys::{rename, setxattr, sync_directory, write_and_close};
use crate::common::{Mode, Model, Mount, eventually, fill};
use crate::{assert_refused, set, setting};

in_both_modes!(
    a_smaller_memory_budget_is_carried_out_beside_the_requests,
    a_smaller_disk_budget_is_carried_out_in_the_background,
    a_budget_below_what_is_pinned_is_refused,
    two_change_it_at_the_same_moment_while_commits_run,
);

/// A page file is 256 KiB + 4 KiB.
const PAGE_BYTES: u64 = (256 << 10) + 4096;

fn model(mount: &Mount) -> Model {
    let model = Model::with(|fields| {
        fields.head_dim = 64;
        fields.num_kv_heads = 8;
        fields.page_tokens = 128;
    });
    model.install(mount);
    model
}

fn publish(mount: &Mount, model: &Model, sequence: &str, number: u64) -> (PathBuf, Vec<u8>) {
    let path = model.page_path(mount, sequence, 0, number * 128);
    let page = model.page(0, number * 128, number);
    let temporary = path.with_extension("tmp");
    write_and_close(&temporary, &page).unwrap();
    rename(&temporary, &path).unwrap();
    (path, page)
}

fn a_smaller_memory_budget_is_carried_out_beside_the_requests(mode: Mode) {
    let mount = Mount::with_options(mode, &["--ram", "64M", "--commit-interval", "3600"]);
    let model = model(&mount);
    let pages: Vec<_> = (0..100).map(|number| publish(&mount, &model, "a", number)).collect();
    assert_eq!(setting(&mount, "ram"), ("64M".to_owned(), "option".to_owned()));
    assert_eq!(mount.status_number("ram_used_bytes"), 100 * PAGE_BYTES);
    // All of it is dirty, and no commit is due: it leaves all the same.
    set(&mount, &["ram=4M"]);
    assert_eq!(mount.status_number("ram_budget_bytes"), 4 << 20);
    assert_eq!(mount.metric("kvfs_tier_capacity_bytes{tier=\"ram\"}"), 4 << 20);
    assert_eq!(setting(&mount, "ram"), ("4M".to_owned(), "set live".to_owned()));
    let configuration = std::fs::read_to_string(mount.join(".kvfs/config")).unwrap();
    assert!(configuration.contains("ram = 4194304\n"), "{configuration}");
    // Requests go on meanwhile; the mount's end checks that none was held up.
    for (path, page) in &pages {
        assert!(std::fs::read(path).unwrap() == *page);
    }
    let (late, page) = publish(&mount, &model, "b", 0);
    assert!(std::fs::read(late).unwrap() == page);
    eventually("memory to hold what it may", || {
        (mount.status_number("ram_used_bytes") <= 4 << 20).then_some(())
    });
    for (path, page) in &pages {
        assert!(std::fs::read(path).unwrap() == *page);
    }
    // More again: new pages come in until it is full.
    set(&mount, &["ram=32M"]);
    // Others than those before: of identical ones there is one copy.
    for number in 100..140 {
        publish(&mount, &model, "c", number);
    }
    assert!(mount.status_number("ram_used_bytes") > 40 * PAGE_BYTES);
    set(&mount, &["ram=0"]);
    eventually("memory to be empty", || (mount.status_number("ram_used_bytes") == 0).then_some(()));
}

fn a_smaller_disk_budget_is_carried_out_in_the_background(mode: Mode) {
    let mount = Mount::with_options(mode, &["--cold", "zstd", "--commit-interval", "0.1"]);
    let files: Vec<_> = (0..40)
        .map(|number| {
            let mut bytes = fill(number, 1 << 20);
            bytes[1 << 17..].fill(7);
            let path = mount.files(format!("f{number}"));
            write_and_close(&path, &bytes).unwrap();
            (path, bytes)
        })
        .collect();
    sync_directory(mount.path()).unwrap();
    assert_eq!(setting(&mount, "ssd"), ("none".to_owned(), "default".to_owned()));
    assert!(mount.try_status("ssd_budget_bytes").is_none());
    set(&mount, &["ssd=24M"]);
    assert_eq!(mount.status_number("ssd_budget_bytes"), 24 << 20);
    eventually("the disk to hold what it may", || {
        (mount.status_number("ssd_used_bytes") <= 24 << 20).then_some(())
    });
    assert!(mount.status_number("ssd_only_encoded_objects") > 0);
    for (path, bytes) in &files {
        assert!(std::fs::read(path).unwrap() == *bytes);
    }
    set(&mount, &["ssd=none"]);
    assert!(mount.try_status("ssd_budget_bytes").is_none());
}

fn a_budget_below_what_is_pinned_is_refused(mode: Mode) {
    let options = ["--ram", "64M", "--cold", "zstd", "--ssd", "1G", "--commit-interval", "3600"];
    let mount = Mount::with_options(mode, &options);
    let model = model(&mount);
    let pages: Vec<_> = (0..80).map(|number| publish(&mount, &model, "a", number).0).collect();
    for page in &pages {
        setxattr(page, "user.kvfs.pin", b"1").unwrap();
    }
    let pinned = 80 * PAGE_BYTES;
    let expected = format!("ram is 4194304: pinned files have {pinned} bytes of memory");
    assert_refused(&mount, &["ram=4M"], &expected);
    let expected = format!("ssd is 16777216: pinned files have {pinned} bytes, which stay");
    assert_refused(&mount, &["ssd=16M"], &expected);
    // Neither of two, if one of them cannot be.
    assert_refused(&mount, &["ram=32M", "ssd=16M"], &expected);
    assert_eq!(mount.status_number("ram_budget_bytes"), 64 << 20);
    for page in &pages {
        setxattr(page, "user.kvfs.pin", b"0").unwrap();
    }
    set(&mount, &["ram=4M", "ssd=16M"]);
    assert_eq!(mount.status_number("ram_budget_bytes"), 4 << 20);
}

fn two_change_it_at_the_same_moment_while_commits_run(mode: Mode) {
    let mount = Mount::with_options(mode, &["--ram", "64M", "--cold", "zstd", "--ssd", "1G"]);
    let model = model(&mount);
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for number in (0..).take_while(|_| !done.load(Ordering::Relaxed)) {
                publish(&mount, &model, "a", number);
                sync_directory(mount.path()).unwrap();
            }
        });
        let setters = [["ram=8M", "ssd=512M"], ["ram=16M", "ssd=256M"]].map(|both| {
            let mount = &mount;
            scope.spawn(move || {
                for _ in 0..10 {
                    set(mount, &both);
                }
            })
        });
        for setter in setters {
            setter.join().unwrap();
        }
        done.store(true, Ordering::Relaxed);
    });
    let found = (setting(&mount, "ram").0, setting(&mount, "ssd").0);
    let expected = [("8M", "512M"), ("16M", "256M")];
    assert!(expected.contains(&(found.0.as_str(), found.1.as_str())), "{found:?}");
    let budgets =
        (mount.status_number("ram_budget_bytes"), mount.status_number("ssd_budget_bytes"));
    assert!([(8 << 20, 512 << 20), (16 << 20, 256 << 20)].contains(&budgets), "{budgets:?}");
    assert_eq!(found.0 == "8M", budgets.0 == 8 << 20);
}
