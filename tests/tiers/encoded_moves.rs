//! What is only encoded on the disk moves like everything else.

use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::common::mount::scratch_directory;
use crate::common::sys::{
    assert_errno, getxattr, open, removexattr, rename, setxattr, sync_directory, write_and_close,
};
use crate::common::{Mode, Model, Mount, eventually};
use crate::place::{assert_same, kvfs, printed, tier};

in_both_modes!(
    what_is_promoted_is_decoded,
    what_is_evicted_leaves_from_its_encoded_copy,
    a_pinned_file_stays_raw,
    pages_are_decoded_ahead_of_a_scan,
    a_damaged_copy_is_replaced_from_the_remote,
    a_remote_that_comes_later_gets_what_was_encoded_before,
    copies_without_a_record_are_garbage,
    a_hung_or_hidden_remote_keeps_nobody_from_decoding,
    a_page_that_was_encoded_can_be_renamed_linked_and_replaced,
);

/// As small as a budget may be: 15 pages fit, or six times as many encoded.
// Files of the store are looked at: the manifest has one of its own, too.
const OPTIONS: [&str; 8] =
    ["--ssd", "16M", "--cold", "zstd:1", "--commit-interval", "0.05", "--pack", "0"];
const BUDGET_BYTES: u64 = 16 << 20;
/// Pages of 1 MiB and 4 KiB.
const PAGE_TOKENS: u32 = 1024;

fn model() -> Model {
    Model::with(|fields| {
        fields.page_tokens = PAGE_TOKENS;
        fields.head_dim = 128;
    })
}

/// A page of which zstd leaves a sixth.
fn page(model: &Model, layer: u32, start: u64) -> Vec<u8> {
    let mut rows = model.rows(start + u64::from(layer), PAGE_TOKENS);
    for byte in &mut rows {
        *byte &= 0x01;
    }
    kvfs::page::pack_page(&model.place(layer, start), &rows, PAGE_TOKENS).unwrap()
}

/// A sequence of one layer.
fn write_pages(mount: &Mount, model: &Model, numbers: Range<u64>) -> Vec<(PathBuf, Vec<u8>)> {
    let write = |number| {
        let start = number * u64::from(PAGE_TOKENS);
        let (path, bytes) = (model.page_path(mount, "a", 0, start), page(model, 0, start));
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

fn is_encoded(path: &Path) -> bool {
    getxattr(path, "user.kvfs.encoding").unwrap() != "raw"
}

/// A mount with 24 pages, some of which are only encoded: those first.
fn with_pages(mode: Mode, further: &[&str]) -> (Mount, Model, Vec<(PathBuf, Vec<u8>)>) {
    let mount = Mount::with_options(mode, &[&OPTIONS, further].concat());
    let model = model();
    model.install(&mount);
    let mut pages = write_pages(&mount, &model, 0..24);
    wait_until_it_fits(&mount);
    eventually("pages to be encoded", || {
        (mount.status_number("ssd_only_encoded_objects") > 0).then_some(())
    });
    pages.sort_by_cached_key(|(path, _)| (!is_encoded(path), path.clone()));
    (mount, model, pages)
}

fn assert_sound(mount: &mut Mount) {
    assert!(mount.unmount().success());
    let said = printed(&kvfs(&["fsck"], &[mount.store()]));
    assert!(!said.contains("encoded"), "{said}");
}

fn bytes_in_objects(mount: &Mount) -> u64 {
    mount.objects().iter().map(|path| path.metadata().unwrap().len()).sum()
}

fn encoded_copies(mount: &Mount) -> Vec<PathBuf> {
    let mut files = mount.objects();
    files.retain(|path| path.extension().is_some_and(|extension| extension == "z"));
    files
}

fn what_is_promoted_is_decoded(mode: Mode) {
    let (mut mount, model, pages) = with_pages(mode, &[]);
    let (path, _) = &pages[0];
    assert_eq!((tier(path), is_encoded(path)), ("ssd".to_owned(), true));
    let plan = printed(&kvfs(&["status", "--json", "--plan"], &[&model.sequence(&mount, "a")]));
    let plan: Value = serde_json::from_str(&plan).unwrap();
    assert_eq!(plan["links"][2]["from"], json!("ssd_encoded"));
    assert!(plan["links"][2]["files"].as_u64().unwrap() > 0);
    assert_eq!(plan["links"][2]["measured"], json!(false));
    // The disk is full: the page may be encoded again before it is looked at.
    eventually("the page to be decoded", || {
        assert_eq!(printed(&kvfs(&["promote"], &[path])), "promoted 1 file\n");
        assert_eq!(tier(path), "ssd");
        (!is_encoded(path)).then_some(())
    });
    assert_eq!(mount.metric("kvfs_moves_total{from=\"remote\",to=\"ssd\"}"), 0);
    assert_same(&pages);
    assert!(mount.status_number("decoding_bytes_per_second") > 0);
    assert_sound(&mut mount);

    let (mut mount, _, pages) = with_pages(mode, &["--ram", "8M"]);
    let (path, _) = pages.iter().find(|(path, _)| is_encoded(path)).unwrap();
    printed(&kvfs(&["promote"], &[path]));
    assert_eq!(tier(path), "ram");
    printed(&kvfs(&["evict", "--to", "ssd"], &[path]));
    assert_eq!((tier(path), is_encoded(path)), ("ssd".to_owned(), true));
    assert_same(&pages);
    let usage = mount.status_number("ram_used_bytes");
    assert!(usage <= 8 << 20, "{usage}");
    assert_sound(&mut mount);
}

fn what_is_evicted_leaves_from_its_encoded_copy(mode: Mode) {
    let directory = scratch_directory();
    let remote = directory.path().to_str().unwrap();
    let (mut mount, _, pages) = with_pages(mode, &["--remote", remote]);
    let (path, _) = &pages[0];
    assert_errno(getxattr(path, "user.kvfs.moving"), libc::ENODATA);
    assert_eq!(printed(&kvfs(&["evict", "--to", "remote"], &[path])), "evicted 1 file\n");
    assert_eq!(tier(path), "remote");
    eventually("the disk to hold what the status says", || {
        (bytes_in_objects(&mount) == mount.status_number("ssd_used_bytes")).then_some(())
    });
    mount.crash();
    assert_eq!(tier(path), "remote");
    setxattr(path, "user.kvfs.tier", b"ssd").unwrap();
    assert_eq!((tier(path), is_encoded(path)), ("ssd".to_owned(), false));
    assert_same(&pages);
    assert_eq!(mount.status("errors"), "0");
    assert_sound(&mut mount);
}

fn a_pinned_file_stays_raw(mode: Mode) {
    let mount = Mount::with_options(mode, &OPTIONS);
    let model = model();
    model.install(&mount);
    let pinned = write_pages(&mount, &model, 0..1).remove(0).0;
    setxattr(&pinned, "user.kvfs.pin", b"1").unwrap();
    let pages = write_pages(&mount, &model, 1..24);
    wait_until_it_fits(&mount);
    assert!(!is_encoded(&pinned) && pages.iter().any(|(path, _)| is_encoded(path)));
    removexattr(&pinned, "user.kvfs.pin").unwrap();
    write_pages(&mount, &model, 24..60);
    wait_until_it_fits(&mount);
    eventually("the page to go like any other", || is_encoded(&pinned).then_some(()));
}

fn pages_are_decoded_ahead_of_a_scan(mode: Mode) {
    let (mount, _, mut pages) = with_pages(mode, &["--ram", "64M"]);
    pages.sort();
    let memory: Vec<_> = pages.iter().map(|(path, _)| path.as_path()).collect();
    printed(&kvfs(&["evict", "--to", "ssd"], &memory));
    for page in &pages {
        assert_same(std::slice::from_ref(page));
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    let outcome =
        |outcome| mount.metric(&format!("kvfs_prefetch_pages_total{{outcome=\"{outcome}\"}}"));
    let [used, late, vain] = ["used", "late", "unused"].map(outcome);
    assert!(used + late > 0 && vain == 0, "{used} used, {late} late, {vain} in vain");
    let decoded = mount.metric("kvfs_moves_total{from=\"ssd\",to=\"ram\"}");
    assert!(decoded >= used + late, "{decoded} decoded");
}

fn a_damaged_copy_is_replaced_from_the_remote(mode: Mode) {
    let directory = scratch_directory();
    let remote = directory.path().to_str().unwrap();
    let (mut mount, _, pages) = with_pages(mode, &["--remote", remote]);
    assert!(mount.unmount().success());
    let copies = encoded_copies(&mount);
    for path in &copies {
        let file = std::fs::File::options().write(true).open(path).unwrap();
        file.write_all_at(b"damage", file.metadata().unwrap().len() / 2).unwrap();
    }
    mount.mount();
    assert_same(&pages);
    let quarantined = mount.quarantined().len();
    assert!(quarantined > 0 && quarantined <= copies.len(), "{quarantined}");
    assert!(mount.errors().iter().any(|line| line.contains("the remote's copy takes its place")));
    assert!(mount.unmount().success());
    // Nobody met a damaged copy whose raw file had not gone yet: that is for fsck to find.
    let checked = kvfs(&["fsck"], &[mount.store()]);
    let said = String::from_utf8_lossy(&checked.stdout);
    assert!(said.contains("inodes") && !said.contains("no record"), "{said}");
}

fn a_remote_that_comes_later_gets_what_was_encoded_before(mode: Mode) {
    let (mut mount, _, pages) = with_pages(mode, &[]);
    assert!(mount.unmount().success());
    let directory = scratch_directory();
    let remote = directory.path().to_str().unwrap();
    let mut other =
        Mount::of_store_with(mode, &[&OPTIONS[..], &["--remote", remote]].concat(), mount.store());
    eventually("the remote to have everything", || {
        (other.status_number("remote_waiting_files") == 0
            && other.status_number("remote_objects") >= pages.len() as u64)
            .then_some(())
    });
    let path = other.join(pages[0].0.strip_prefix(mount.path()).unwrap());
    printed(&kvfs(&["evict", "--to", "remote"], &[&path]));
    assert_eq!(tier(&path), "remote");
    assert!(std::fs::read(&path).unwrap() == pages[0].1);
    assert_eq!(other.status("errors"), "0");
    assert_sound(&mut other);
}

fn copies_without_a_record_are_garbage(mode: Mode) {
    let (mut mount, _, pages) = with_pages(mode, &[]);
    let copy = encoded_copies(&mount).remove(0);
    let orphan = copy.with_file_name("0000000000000001.z");
    std::fs::copy(&copy, &orphan).unwrap();
    let said = printed(&kvfs(&["gc", "--dry-run"], &[mount.path()]));
    assert_eq!(said, "store: 1 objects would be deleted\n");
    assert_eq!(printed(&kvfs(&["gc", "--yes"], &[mount.path()])), "store: 1 objects deleted\n");
    assert!(!orphan.exists() && copy.exists());
    std::fs::copy(&copy, &orphan).unwrap();
    mount.crash();
    eventually("the sweep", || (!orphan.exists()).then_some(()));
    assert_same(&pages);
}

fn a_hung_or_hidden_remote_keeps_nobody_from_decoding(mode: Mode) {
    let directory = scratch_directory();
    let remote = directory.path().join("remote");
    std::fs::create_dir(&remote).unwrap();
    let (mut mount, _, pages) = with_pages(mode, &["--remote", remote.to_str().unwrap()]);
    let local: Vec<_> = pages.into_iter().filter(|(path, _)| tier(path) == "ssd").collect();
    assert!(local.iter().any(|(path, _)| is_encoded(path)));
    assert!(mount.unmount().success());
    rename(&remote, directory.path().join("hidden")).unwrap();
    mount.mount();
    assert_same(&local);
}

fn a_page_that_was_encoded_can_be_renamed_linked_and_replaced(mode: Mode) {
    let (mut mount, model, mut pages) = with_pages(mode, &[]);
    let (path, bytes) = pages.remove(0);
    let copy = mount.files("linked");
    std::fs::hard_link(&path, &copy).unwrap();
    assert!(is_encoded(&copy));
    let start = path.file_name().unwrap().to_str().unwrap()[..7].parse().unwrap();
    let elsewhere = model.page_path(&mount, "b", 0, start);
    rename(&copy, &elsewhere).unwrap();
    assert!(std::fs::read(&elsewhere).unwrap() == bytes);
    let (second, second_bytes) = pages.remove(0);
    let aside = mount.files("aside");
    rename(&second, &aside).unwrap();
    assert!(std::fs::read(&aside).unwrap() == second_bytes);
    rename(&aside, &second).unwrap();
    assert!(std::fs::read(&second).unwrap() == second_bytes);
    let (third, _) = pages.remove(0);
    let reader = open(&third, libc::O_RDONLY);
    write_and_close(third.with_extension("tmp"), &page(&model, 0, 0)).unwrap();
    assert!(rename(third.with_extension("tmp"), &third).is_err(), "another page's bytes");
    drop(reader);
    std::fs::remove_file(&third).unwrap();
    sync_directory(mount.path()).unwrap();
    mount.crash();
    assert!(std::fs::read(&elsewhere).unwrap() == bytes && !third.exists());
    assert_same(&pages);
    assert_sound(&mut mount);
}
