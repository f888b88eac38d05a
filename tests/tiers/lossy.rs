//! Pages that go cold with fewer bits, of models that ask for it.

use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use half::f16;
use kvfs::page::{Dtype, pack_page};
use serde_json::{Value, json};

use crate::common::mount::scratch_directory;
use crate::common::sys::{
    assert_errno, getxattr, listxattr, map, open, removexattr, rename, setxattr, sync_directory,
    write_and_close,
};
use crate::common::{Mode, Model, Mount, eventually};
use crate::place::{kvfs, printed, tier};
use crate::rounding::{PAGE_TOKENS, eight_bits, is_rounded, model, page, rounded, rows};

in_both_modes!(
    cold_pages_become_new_versions,
    four_bits_do_as_well,
    whoever_reads_keeps_the_bytes_that_were_opened,
    what_the_kernel_kept_of_the_old_version_is_not_shown,
    all_names_of_a_page_change_at_once,
    a_page_with_an_ordinary_name_keeps_its_values,
    what_cannot_be_rounded_is_encoded_without_loss,
    models_must_agree,
    a_pinned_page_keeps_its_values,
    a_crash_at_any_time_leaves_one_version,
    the_remote_gets_the_blocks_and_gives_them_back,
    a_model_may_ask_later,
);

/// As small as a budget may be: 15 pages fit.
// Files of the store are looked at: the manifest has one of its own, too.
const OPTIONS: [&str; 8] =
    ["--ssd", "16M", "--cold", "zstd:1", "--commit-interval", "0.05", "--pack", "0"];
const BUDGET_BYTES: u64 = 16 << 20;
const PAGES: u64 = 24;
const LOSSY: &str = "user.kvfs.lossy";

type Pages = Vec<(PathBuf, Vec<u8>)>;

fn write_pages(mount: &Mount, model: &Model, sequence: &str, numbers: Range<u64>) -> Pages {
    let write = |number| {
        let start = number * u64::from(PAGE_TOKENS);
        let (path, bytes) = (model.page_path(mount, sequence, 0, start), page(model, start));
        write_and_close(&path, &bytes).unwrap();
        (path, bytes)
    };
    numbers.map(write).collect()
}

fn wait_until_it_fits(mount: &Mount) {
    sync_directory(mount.path()).unwrap();
    eventually("the disk to have room", || {
        (mount.status_number("ssd_used_bytes") <= BUDGET_BYTES).then_some(())
    });
}

fn lossy(path: &Path) -> Option<String> {
    getxattr(path, LOSSY).ok()
}

fn is_encoded(path: &Path) -> bool {
    getxattr(path, "user.kvfs.encoding").unwrap() != "raw"
}

/// Every page is one of its two versions, and says which; how many were rounded.
#[track_caller]
fn assert_versions(pages: &Pages, encoding: &str) -> usize {
    let mut count = 0;
    for (path, original) in pages {
        // It may change between two looks, but not while it is read.
        let before = lossy(path);
        let found = std::fs::read(path).unwrap();
        let said = [before, lossy(path)];
        assert!(said.iter().flatten().all(|said| said == encoding));
        let is_said = |said: &Option<String>| match said {
            Some(_) => is_rounded(&found, original, encoding),
            None => found == *original,
        };
        assert!(said.iter().any(is_said), "{}", path.display());
        count += usize::from(said[0].is_some());
    }
    count
}

fn assert_sound(mount: &mut Mount) {
    assert_eq!(mount.status("errors"), "0", "{:?}", mount.errors());
    assert!(mount.unmount().success());
    printed(&kvfs(&["fsck"], &[mount.store()]));
}

/// A mount with pages some of which went cold.
fn with_pages(mode: Mode, model: &Model) -> (Mount, Pages) {
    let mount = Mount::with_options(mode, &OPTIONS);
    model.install(&mount);
    let pages = write_pages(&mount, model, "a", 0..PAGES);
    wait_until_it_fits(&mount);
    (mount, pages)
}

fn cold_pages_become_new_versions(mode: Mode) {
    let model = eight_bits();
    let mount = Mount::with_options(mode, &OPTIONS);
    model.install(&mount);
    let mut pages = Pages::new();
    let mut written = Vec::new();
    for number in 0..PAGES {
        let page = write_pages(&mount, &model, "a", number..number + 1).remove(0);
        written.push(page.0.metadata().unwrap());
        pages.push(page);
    }
    wait_until_it_fits(&mount);
    let mut count = 0;
    for ((path, original), before) in pages.iter().zip(&written) {
        let after = path.metadata().unwrap();
        assert_eq!((after.len(), after.ino()), (before.len(), before.ino()));
        let Some(said) = lossy(path) else {
            continue;
        };
        count += 1;
        eventually("a time that a backup notices", || {
            (modified(path) > before.modified().unwrap()).then_some(())
        });
        let encoding = getxattr(path, "user.kvfs.encoding").unwrap();
        assert_eq!((said.as_str(), encoding.as_str()), ("q8_0", "q8_0"));
        let stored: usize = getxattr(path, "user.kvfs.stored_bytes").unwrap().parse().unwrap();
        assert!(stored < original.len() * 55 / 100, "{stored}");
        let bytes = rounded(original, "q8_0");
        let start = path.file_name().unwrap().to_str().unwrap()[..7].parse().unwrap();
        let checksum = getxattr(path, "user.kvfs.checksum").unwrap();
        assert_eq!(checksum, model.checksum(0, start, &bytes));
        assert_errno(setxattr(path, LOSSY, b"no"), libc::EOPNOTSUPP);
        assert_errno(removexattr(path, LOSSY), libc::EOPNOTSUPP);
        assert!(listxattr(path).unwrap().is_empty());
    }
    assert!(count >= 9, "{count} of {PAGES}");
    eventually("the counters to tell what the pages say", || {
        let told = mount.status_number("lossy_demotions");
        let metric = mount.metric("kvfs_lossy_demotions_total{encoding=\"q8_0\"}");
        let found = pages.iter().filter(|(path, _)| lossy(path).is_some()).count() as u64;
        (told == found && metric == found).then_some(())
    });
    eventually("the store to take what the status says", || {
        let files = mount.objects();
        let bytes: u64 = files.iter().map(|path| path.metadata().unwrap().len()).sum();
        (bytes == mount.status_number("ssd_used_bytes")).then_some(())
    });
    assert!(assert_versions(&pages, "q8_0") as u64 >= count);
    let first = pages.iter().find(|(path, _)| lossy(path).is_some()).unwrap();
    let said: Value =
        serde_json::from_str(&printed(&kvfs(&["inspect", "--json"], &[&first.0]))).unwrap();
    assert_eq!(said["attributes"][LOSSY], json!("q8_0"));
    assert_eq!(said["refused"], Value::Null);
    let mut mount = mount;
    mount.remount();
    assert!(assert_versions(&pages, "q8_0") as u64 >= count);
    mount.crash();
    assert!(assert_versions(&pages, "q8_0") as u64 >= count);
    assert_sound(&mut mount);
}

fn four_bits_do_as_well(mode: Mode) {
    let (mut mount, pages) = with_pages(mode, &model(Dtype::F16, Some("q4_0")));
    assert!(assert_versions(&pages, "q4_0") > 5);
    wait_until_it_fits(&mount);
    assert_sound(&mut mount);
}

fn whoever_reads_keeps_the_bytes_that_were_opened(mode: Mode) {
    let model = model(Dtype::F16, Some("q4_0"));
    let mount = Mount::with_options(mode, &OPTIONS);
    model.install(&mount);
    let (path, bytes) = write_pages(&mount, &model, "a", 0..1).remove(0);
    let reader = open(&path, libc::O_RDONLY).unwrap();
    let mapped = map(&reader);
    drop(reader);
    let mut pages = write_pages(&mount, &model, "a", 1..PAGES);
    wait_until_it_fits(&mount);
    assert!(pages.iter().any(|(path, _)| lossy(path).is_some()));
    assert_eq!(lossy(&path), None);
    assert!(mapped[..] == bytes[..]);
    drop(mapped);
    for number in PAGES..PAGES + 12 {
        pages.extend(write_pages(&mount, &model, "a", number..number + 1));
        wait_until_it_fits(&mount);
    }
    eventually("the page to go like any other", || lossy(&path));
    assert!(is_rounded(&std::fs::read(&path).unwrap(), &bytes, "q4_0"));
    assert_versions(&pages, "q4_0");
}

fn what_the_kernel_kept_of_the_old_version_is_not_shown(mode: Mode) {
    let model = eight_bits();
    let mut mount = Mount::with_options(mode, &OPTIONS);
    model.install(&mount);
    let mut pages = Pages::new();
    for number in 0..PAGES {
        pages.extend(write_pages(&mount, &model, "a", number..number + 1));
        // Read it all into whatever caches there are, while it may be changing.
        assert_versions(&pages, "q8_0");
    }
    wait_until_it_fits(&mount);
    for _ in 0..3 {
        assert!(assert_versions(&pages, "q8_0") > 0);
    }
    assert_sound(&mut mount);
}

fn all_names_of_a_page_change_at_once(mode: Mode) {
    let model = eight_bits();
    let mut mount = Mount::with_options(mode, &OPTIONS);
    model.install(&mount);
    let pages = write_pages(&mount, &model, "a", 0..4);
    let copies: Pages = pages
        .iter()
        .map(|(path, bytes)| {
            let start = path.file_name().unwrap().to_str().unwrap()[..7].parse().unwrap();
            let copy = model.page_path(&mount, "b", 0, start);
            std::fs::hard_link(path, &copy).unwrap();
            (copy, bytes.clone())
        })
        .collect();
    let others = write_pages(&mount, &model, "c", 4..PAGES);
    wait_until_it_fits(&mount);
    assert_eq!(assert_versions(&pages, "q8_0"), 4, "the oldest go first");
    assert_eq!(assert_versions(&copies, "q8_0"), 4);
    for ((path, _), (copy, _)) in pages.iter().zip(&copies) {
        let [one, other] = [path, copy].map(|path| path.metadata().unwrap());
        assert_eq!((one.ino(), one.nlink()), (other.ino(), 2));
    }
    assert_versions(&others, "q8_0");
    assert_sound(&mut mount);
}

fn a_page_with_an_ordinary_name_keeps_its_values(mode: Mode) {
    let model = eight_bits();
    let mut mount = Mount::with_options(mode, &OPTIONS);
    model.install(&mount);
    let mut kept = write_pages(&mount, &model, "a", 0..2);
    std::fs::hard_link(&kept[0].0, mount.files("linked")).unwrap();
    rename(&kept[1].0, mount.files("moved")).unwrap();
    kept[1].0 = mount.files("moved");
    let plain = mount.files("plain");
    write_and_close(&plain, &kept[0].1).unwrap();
    let pages = write_pages(&mount, &model, "a", 2..PAGES);
    wait_until_it_fits(&mount);
    assert!(assert_versions(&pages, "q8_0") > 0);
    for (path, bytes) in &kept {
        assert_eq!(lossy(path), None);
        assert!(std::fs::read(path).unwrap() == *bytes);
    }
    assert!(std::fs::read(&plain).unwrap() == kept[0].1);
    assert_eq!(lossy(&plain), None);
    assert_sound(&mut mount);
}

fn what_cannot_be_rounded_is_encoded_without_loss(mode: Mode) {
    let model = eight_bits();
    let mut mount = Mount::with_options(mode, &OPTIONS);
    model.install(&mount);
    let mut odd = Pages::new();
    for number in 0..4 {
        let start = number * u64::from(PAGE_TOKENS);
        let mut rows = rows(&model, start);
        for value in rows.chunks_exact_mut(2) {
            value[0] = 0;
        }
        rows[5000..5002].copy_from_slice(&f16::NAN.to_le_bytes());
        let bytes = pack_page(&model.place(0, start), &rows, PAGE_TOKENS).unwrap();
        let path = model.page_path(&mount, "a", 0, start);
        write_and_close(&path, &bytes).unwrap();
        odd.push((path, bytes));
    }
    // What a commit is reading when its turn comes stays as it is.
    sync_directory(mount.path()).unwrap();
    let wide = model_of_f32(&mount);
    let pages = write_pages(&mount, &model, "a", 4..PAGES);
    wait_until_it_fits(&mount);
    assert!(odd.iter().all(|(path, _)| is_encoded(path) && lossy(path).is_none()));
    assert!(wide.iter().all(|(path, _)| lossy(path).is_none()));
    for (path, bytes) in odd.iter().chain(&wide) {
        assert!(std::fs::read(path).unwrap() == *bytes);
    }
    assert!(assert_versions(&pages, "q8_0") > 0);
    assert_sound(&mut mount);
}

/// Two pages of a model that asks for eight bits of its 32.
fn model_of_f32(mount: &Mount) -> Pages {
    let model = model(Dtype::F32, Some("q8_0")).named("wide");
    model.install(mount);
    write_pages(mount, &model, "a", 0..2)
}

fn models_must_agree(mode: Mode) {
    let model = eight_bits();
    let mut mount = Mount::with_options(mode, &OPTIONS);
    model.install(&mount);
    self::model(Dtype::F16, None).named("same").install(&mount);
    let pages = write_pages(&mount, &model, "a", 0..4);
    let files = write_compressible(&mount, 20);
    wait_until_it_fits(&mount);
    assert_eq!(assert_versions(&pages, "q8_0"), 0);
    assert!(files.iter().any(|path| is_encoded(path)));
    assert_sound(&mut mount);
}

/// Files of 1 MiB of which zstd leaves little.
fn write_compressible(mount: &Mount, count: u64) -> Vec<PathBuf> {
    let write = |number| {
        let path = mount.files(format!("c{number}"));
        let bytes: Vec<u8> =
            crate::common::fill(number, 1 << 20).into_iter().map(|byte| byte & 1).collect();
        write_and_close(&path, &bytes).unwrap();
        path
    };
    (0..count).map(write).collect()
}

fn a_pinned_page_keeps_its_values(mode: Mode) {
    let model = eight_bits();
    let mut mount = Mount::with_options(mode, &OPTIONS);
    model.install(&mount);
    let pinned = write_pages(&mount, &model, "a", 0..1);
    setxattr(&pinned[0].0, "user.kvfs.pin", b"1").unwrap();
    let pages = write_pages(&mount, &model, "a", 1..PAGES);
    wait_until_it_fits(&mount);
    assert_eq!(assert_versions(&pinned, "q8_0"), 0);
    assert!(assert_versions(&pages, "q8_0") > 0);
    assert_sound(&mut mount);
}

fn a_crash_at_any_time_leaves_one_version(mode: Mode) {
    let model = eight_bits();
    let mut mount = Mount::with_options(mode, &OPTIONS);
    model.install(&mount);
    let mut pages = Pages::new();
    for round in 0..8 {
        pages.extend(write_pages(&mount, &model, "a", round * 3..round * 3 + 3));
        sync_directory(mount.path()).unwrap();
        // Demotion begins with the sixteenth page: from then on each moment is hit by some round.
        std::thread::sleep(std::time::Duration::from_millis(round * 23 % 60));
        mount.crash();
        assert_versions(&pages[pages.len() - 2..].to_vec(), "q8_0");
    }
    wait_until_it_fits(&mount);
    assert!(assert_versions(&pages, "q8_0") > 0);
    mount.crash();
    assert_versions(&pages, "q8_0");
    wait_until_it_fits(&mount);
    eventually("the store to take what the status says", || {
        let files = mount.objects();
        let bytes: u64 = files.iter().map(|path| path.metadata().unwrap().len()).sum();
        (bytes == mount.status_number("ssd_used_bytes")).then_some(())
    });
    assert_sound(&mut mount);
}

fn the_remote_gets_the_blocks_and_gives_them_back(mode: Mode) {
    let model = eight_bits();
    let directory = scratch_directory();
    let remote = directory.path().to_str().unwrap();
    // Without --cold: the model asks, not the mount.
    let options = ["--ssd", "16M", "--remote", remote, "--commit-interval", "0.05"];
    let mut mount = Mount::with_options(mode, &options);
    model.install(&mount);
    let pages = write_pages(&mount, &model, "a", 0..PAGES);
    eventually("everything to be where it belongs", || {
        (mount.status_number("remote_waiting_files") == 0
            && mount.status_number("lossy_demotions") > 0
            && mount.status_number("ssd_used_bytes") <= BUDGET_BYTES)
            .then_some(())
    });
    printed(&kvfs(&["evict", "--to", "remote"], &[&model.sequence(&mount, "a")]));
    assert!(pages.iter().all(|(path, _)| tier(path) == "remote"));
    let encodings: Vec<_> =
        pages.iter().map(|(path, _)| getxattr(path, "user.kvfs.encoding").unwrap()).collect();
    for ((path, _), encoding) in pages.iter().zip(&encodings) {
        assert_eq!(encoding == "q8_0", lossy(path).is_some(), "{encoding}");
    }
    let count = encodings.iter().filter(|encoding| *encoding == "q8_0").count();
    assert!(count > 0);
    let times: Vec<_> = pages.iter().map(|(path, _)| modified(path)).collect();
    eventually("the names to be published", || {
        (mount.status("remote_names") == "published").then_some(())
    });
    assert_eq!(mount.status("errors"), "0");
    assert!(mount.unmount().success());

    let store = directory.path().join("rebuilt");
    let mut mount = Mount::of_store_with(mode, &options, &store);
    let rebuilt: Pages = pages
        .iter()
        .map(|(path, bytes)| {
            let name = path.file_name().unwrap();
            (model.sequence(&mount, "a").join("000").join(name), bytes.clone())
        })
        .collect();
    assert!(assert_versions(&rebuilt, "q8_0") >= count);
    eventually("the disk to have room", || {
        (mount.status_number("ssd_used_bytes") <= BUDGET_BYTES).then_some(())
    });
    assert_versions(&rebuilt, "q8_0");
    // What was rounded before is not rounded again: it would be the same, and not a new version.
    for (((path, _), before), encoding) in rebuilt.iter().zip(&times).zip(&encodings) {
        assert!(encoding != "q8_0" || modified(path) == *before);
    }
    assert_sound(&mut mount);
}

fn modified(path: &Path) -> std::time::SystemTime {
    path.metadata().unwrap().modified().unwrap()
}

fn a_model_may_ask_later(mode: Mode) {
    let before = model(Dtype::F16, None);
    let directory = scratch_directory();
    let remote = directory.path().to_str().unwrap();
    let options = ["--ssd", "64M", "--remote", remote, "--commit-interval", "0.05"];
    let mut mount = Mount::with_options(mode, &options);
    before.install(&mount);
    let pages = write_pages(&mount, &before, "a", 0..PAGES);
    eventually("everything to be uploaded", || {
        (mount.status_number("remote_waiting_files") == 0).then_some(())
    });
    assert_eq!(assert_versions(&pages, "q8_0"), 0);
    let manifest = before.directory(&mount).join("manifest.json");
    let staged = before.directory(&mount).join("manifest.json.tmp");
    write_and_close(&staged, eight_bits().manifest.to_json().as_bytes()).unwrap();
    rename(&staged, &manifest).unwrap();
    assert!(mount.unmount().success());
    let options = ["--ssd", "16M", "--remote", remote, "--commit-interval", "0.05"];
    let mut later = Mount::of_store_with(mode, &options, mount.store());
    let pages: Pages = pages
        .into_iter()
        .map(|(path, bytes)| {
            let name = path.file_name().unwrap().to_owned();
            (before.sequence(&later, "a").join("000").join(name), bytes)
        })
        .collect();
    eventually("pages to go cold", || {
        (later.status_number("lossy_demotions") > 0
            && later.status_number("ssd_used_bytes") <= BUDGET_BYTES)
            .then_some(())
    });
    assert!(assert_versions(&pages, "q8_0") > 0);
    assert_sound(&mut later);
}
