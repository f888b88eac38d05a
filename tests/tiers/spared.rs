//! A budget for what is written to the disk: what becomes of new pages when it is used up.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::common::sys::{
    close, getxattr, open, rename, setxattr, sync_directory, write_and_close,
};
use crate::common::{Mode, Model, eventually, fill, forks};
use crate::kills::random;
use crate::place::{Place, kvfs, printed, tier};

in_both_modes!(
    new_pages_go_to_the_remote_and_not_to_the_disk,
    what_is_asked_for_twice_is_written,
    whoever_syncs_has_it_on_the_disk,
    without_the_remote_the_disk_takes_everything,
    pages_that_wait_can_be_changed_like_others,
    pages_that_were_synced_survive_kills,
    what_is_asked_to_be_on_the_disk_is_there,
    what_is_left_outlives_the_mount,
);

/// A day's worth is used up by the first file.
const SPARING: [&str; 4] = ["--ram", "64M", "--ssd-writes", "1M/day"];
const SPENT_BYTES: usize = 3 << 20;
const PAGES: u64 = 12;

/// Pages of some 256 KiB.
fn model() -> Model {
    Model::with(|fields| (fields.page_tokens, fields.head_dim) = (256, 128))
}

/// A mount whose budget is used up, with a model.
fn spent(mode: Mode, further: &[&str]) -> (Place, Model) {
    let place = Place::new(mode, &[&SPARING, further].concat());
    write_and_close(place.mount.files("spent"), &fill(1, SPENT_BYTES)).unwrap();
    let model = model();
    model.install(&place.mount);
    // Until it answers, the disk takes everything.
    eventually("the remote to answer", || {
        (place.mount.status("remote_state") == "up").then_some(())
    });
    sync_directory(place.mount.path()).unwrap();
    assert_eq!(place.mount.status_number("ssd_writes_left_bytes"), 0);
    (place, model)
}

type Page = (PathBuf, Vec<u8>);

/// A page from this number on that the disk is spared: it takes one of which a commit came before the name.
fn write_spared(place: &Place, model: &Model, first: u64) -> Page {
    let spared = || place.mount.status_number("ssd_spared_files");
    let before = spared();
    let mut pages = (first..first + PAGES).map(|number| write_page(place, model, number));
    pages.find(|_| spared() > before).expect("the disk takes every page")
}

fn write_page(place: &Place, model: &Model, number: u64) -> Page {
    let start = number * u64::from(model.page_tokens());
    let path = model.page_path(&place.mount, "chat", 0, start);
    let bytes = model.page(0, start, number);
    // In place: a commit between the last byte and a rename would have given another file to the disk.
    write_and_close(&path, &bytes).unwrap();
    (path, bytes)
}

fn write_pages(place: &Place, model: &Model) -> Vec<Page> {
    let pages: Vec<Page> = (0..PAGES).map(|number| write_page(place, model, number)).collect();
    assert_there(&pages);
    pages
}

fn assert_there(pages: &[Page]) {
    for (path, bytes) in pages {
        assert!(fs::read(path).unwrap() == *bytes, "{}", path.display());
    }
}

/// Bytes of objects that the disk has.
fn on_disk(place: &Place) -> u64 {
    fn below(directory: &Path) -> u64 {
        let entries = fs::read_dir(directory).unwrap().map(Result::unwrap);
        entries
            .map(|entry| match entry.metadata().unwrap() {
                about if about.is_dir() => below(&entry.path()),
                about => about.len(),
            })
            .sum()
    }
    below(&place.mount.store().join("objects"))
}

fn wait_until_named(place: &Place) {
    place.wait_until_uploaded();
    eventually("pages to be where they belong", || {
        let is_named = place.mount.status("remote_names") == "published";
        (is_named && place.mount.status_number("ssd_spared_files") == 0).then_some(())
    });
}

fn new_pages_go_to_the_remote_and_not_to_the_disk(mode: Mode) {
    let (mut place, model) = spent(mode, &[]);
    let (before, written) = (on_disk(&place), place.mount.status_number("ssd_written_bytes"));
    let pages = write_pages(&place, &model);
    wait_until_named(&place);
    assert_there(&pages);
    assert!(pages.iter().all(|(path, _)| tier(path) == "ram"));
    assert_eq!(on_disk(&place), before);
    assert_eq!(place.mount.status_number("ssd_written_bytes"), written);
    assert_eq!(place.mount.status_number("remote_only_objects"), PAGES);
    let only_bytes: u64 = pages.iter().map(|(_, bytes)| bytes.len() as u64).sum();
    assert_eq!(place.mount.status_number("remote_only_bytes"), only_bytes);
    place.mount.crash();
    assert!(pages.iter().all(|(path, _)| tier(path) == "remote"));
    assert_there(&pages);
    assert_eq!(place.mount.status("errors"), "0");
    place.mount.remount();
    assert_there(&pages);
}

fn what_is_asked_for_twice_is_written(mode: Mode) {
    let (mut place, model) = spent(mode, &[]);
    let pages = write_pages(&place, &model);
    wait_until_named(&place);
    place.mount.remount();
    let before = on_disk(&place);
    // One alone, or what comes next would be fetched ahead.
    let (once, asked) = pages.split_at(pages.len() - 1);
    assert_there(&pages);
    assert_eq!(on_disk(&place), before, "nobody had asked for them");
    for (path, _) in &pages {
        printed(&kvfs(&["evict", "--to", "remote"], &[path]));
    }
    eventually("memory to let go", || {
        pages.iter().all(|(path, _)| tier(path) == "remote").then_some(())
    });
    assert_there(asked);
    assert_eq!(tier(&asked[0].0), "ssd");
    assert!(once.iter().all(|(path, _)| tier(path) == "remote"));
    assert_eq!(on_disk(&place), before + asked[0].1.len() as u64);
}

fn whoever_syncs_has_it_on_the_disk(mode: Mode) {
    // So slow that nothing arrives.
    let (mut place, model) = spent(mode, &["--remote-bandwidth", "1K"]);
    let pages = write_pages(&place, &model);
    assert_eq!(place.mount.status_number("ssd_spared_files"), PAGES);
    open(&pages[3].0, libc::O_RDONLY).unwrap().sync_all().unwrap();
    assert_eq!(place.mount.status_number("ssd_spared_files"), 0);
    place.mount.crash();
    assert_there(&pages);
    assert!(pages.iter().all(|(path, _)| tier(path) == "ssd"));
    // So does whoever unmounts. A remote that has not answered yet is not relied upon.
    eventually("the remote", || (place.mount.status("remote_state") == "up").then_some(()));
    let another = write_spared(&place, &model, PAGES);
    place.mount.remount();
    assert_there(&[another]);
    let late = write_spared(&place, &model, 2 * PAGES);
    place.mount.crash();
    assert!(!late.0.exists(), "nobody synced it, and the remote does not have it");
    assert_eq!(place.mount.status("errors"), "0");
}

fn without_the_remote_the_disk_takes_everything(mode: Mode) {
    let (mut place, model) = spent(mode, &[]);
    let hidden = place.remote.with_extension("hidden");
    rename(&place.remote, &hidden).unwrap();
    eventually("the remote to be missed", || {
        place.mount.status("remote_state").starts_with("down").then_some(())
    });
    let pages = write_pages(&place, &model);
    eventually("the disk to have them", || {
        let waiting = place.mount.status_number("uncommitted_changes");
        (waiting == 0 && place.mount.status_number("ssd_spared_files") == 0).then_some(())
    });
    place.mount.crash();
    assert_there(&pages);
    assert!(pages.iter().all(|(path, _)| tier(path) == "ssd"));
}

fn pages_that_wait_can_be_changed_like_others(mode: Mode) {
    let (mut place, model) = spent(mode, &["--remote-bandwidth", "1K"]);
    let mut pages = write_pages(&place, &model);
    assert_eq!(place.mount.status_number("ssd_spared_files"), PAGES);
    let chat = model.sequence(&place.mount, "chat");
    // Removed, replaced, linked, moved, given attributes and other permissions, copied.
    let (removed, _) = pages.remove(0);
    fs::remove_file(&removed).unwrap();
    let start = 2 * u64::from(model.page_tokens());
    let other = model.page(0, start, 99);
    let staged = pages[1].0.with_extension("tmp");
    write_and_close(&staged, &other).unwrap();
    rename(&staged, &pages[1].0).unwrap();
    pages[1].1 = other;
    fs::hard_link(&pages[2].0, place.mount.files("linked")).unwrap();
    rename(&pages[3].0, place.mount.files("moved")).unwrap();
    let (_, moved) = pages.remove(3);
    setxattr(&pages[4].0, "user.colour", b"blue").unwrap();
    setxattr(&pages[5].0, "user.kvfs.pin", b"1").unwrap();
    fs::set_permissions(&pages[6].0, std::os::unix::fs::PermissionsExt::from_mode(0o440)).unwrap();
    let copied = Command::new("cp").arg("-al").arg(&chat).arg(chat.with_file_name("copy")).status();
    assert!(copied.unwrap().success());
    let again = write_page(&place, &model, 0);
    fs::remove_file(&again.0).unwrap();
    rename(&chat, chat.with_file_name("renamed")).unwrap();
    sync_directory(place.mount.path()).unwrap();
    let below = |path: &Path, sequence: &str| {
        let end: PathBuf = path.strip_prefix(&chat).unwrap().to_owned();
        chat.with_file_name(sequence).join(end)
    };
    for _ in 0..2 {
        for (path, bytes) in &pages {
            assert!(fs::read(below(path, "renamed")).unwrap() == *bytes);
            assert!(fs::read(below(path, "copy")).unwrap() == *bytes);
        }
        assert!(!below(&removed, "renamed").exists() && !chat.exists());
        assert!(fs::read(place.mount.files("linked")).unwrap() == pages[2].1);
        assert!(fs::read(place.mount.files("moved")).unwrap() == moved);
        assert_eq!(getxattr(below(&pages[4].0, "renamed"), "user.colour").unwrap(), "blue");
        assert_eq!(getxattr(below(&pages[5].0, "renamed"), "user.kvfs.pin").unwrap(), "1");
        let rights = fs::metadata(below(&pages[6].0, "renamed")).unwrap().permissions();
        assert_eq!(std::os::unix::fs::PermissionsExt::mode(&rights) & 0o777, 0o440);
        assert_eq!(place.mount.status("errors"), "0");
        place.mount.crash();
    }
}

fn pages_that_were_synced_survive_kills(mode: Mode) {
    let (mut place, model) = spent(mode, &[]);
    let mut synced: Vec<Page> = Vec::new();
    for seed in 0..10 {
        let some: Vec<Page> =
            (0..4).map(|page| write_page(&place, &model, seed * 4 + page)).collect();
        // Whoever looks for a page that was closed waits until it has its name.
        assert_there(&some);
        std::thread::sleep(std::time::Duration::from_millis(random(seed, 150)));
        if seed % 3 == 0 {
            sync_directory(place.mount.path()).unwrap();
        } else {
            wait_until_named(&place);
        }
        synced.extend(some);
        // These may be there or not, but whole.
        let late: Vec<Page> =
            (0..4).map(|page| write_page(&place, &model, 1000 + seed * 4 + page)).collect();
        std::thread::sleep(std::time::Duration::from_millis(random(seed + 50, 150)));
        place.mount.crash();
        assert_there(&synced);
        for (path, bytes) in late {
            if let Ok(found) = fs::read(&path) {
                assert!(found == bytes, "seed {seed}: {}", path.display());
                synced.push((path, bytes));
            }
        }
        assert_eq!(place.mount.status("errors"), "0", "seed {seed}");
    }
    place.mount.kill();
    let mut fsck = Command::new(env!("CARGO_BIN_EXE_kvfs"));
    let fsck = fsck.arg("fsck").arg(place.mount.store()).output().unwrap();
    assert!(fsck.status.success(), "{}", String::from_utf8_lossy(&fsck.stdout));
    let _ = forks::output(Command::new("umount").arg("-l").arg(place.mount.path()));
    place.mount.mount();
}

/// By a sync before it had its name, by a pin, by its tier, by a name among ordinary files.
fn what_is_asked_to_be_on_the_disk_is_there(mode: Mode) {
    let (mut place, model) = spent(mode, &["--remote-bandwidth", "1K"]);
    let synced = model.page_path(&place.mount, "chat", 0, 0);
    let file = File::create(&synced).unwrap();
    file.write_all_at(&model.page(0, 0, 7), 0).unwrap();
    file.sync_all().unwrap();
    close(file).unwrap();
    assert!(fs::read(&synced).unwrap() == model.page(0, 0, 7));
    let pages: Vec<Page> = (1..5).map(|number| write_page(&place, &model, number)).collect();
    assert_there(&pages);
    assert_eq!(place.mount.status_number("ssd_spared_files"), 4);
    assert!(place.mount.status_number("pages") >= 5);
    setxattr(&pages[0].0, "user.kvfs.pin", b"1").unwrap();
    let moved = place.mount.files("moved");
    rename(&pages[1].0, &moved).unwrap();
    assert_eq!(place.mount.status_number("ssd_spared_files"), 2, "the others were not asked for");
    eventually("those two to be durable", || {
        (place.mount.status_number("uncommitted_changes") == 2).then_some(())
    });
    place.mount.crash();
    assert!(fs::read(&synced).unwrap() == model.page(0, 0, 7));
    assert!(fs::read(&pages[0].0).unwrap() == pages[0].1);
    assert!(fs::read(&moved).unwrap() == pages[1].1);
    assert!(!pages[2].0.exists() && !pages[3].0.exists());

    // What memory and the remote have.
    let (mut place, model) = spent(mode, &[]);
    let pages = write_pages(&place, &model);
    wait_until_named(&place);
    setxattr(&pages[0].0, "user.kvfs.pin", b"1").unwrap();
    setxattr(&pages[1].0, "user.kvfs.tier", b"ssd").unwrap();
    assert_eq!(tier(&pages[1].0), "ssd");
    sync_directory(place.mount.path()).unwrap();
    let hidden = place.remote.with_extension("hidden");
    rename(&place.remote, &hidden).unwrap();
    place.mount.crash();
    assert_there(&pages[..2]);
    assert!(open(&pages[2].0, libc::O_RDONLY).is_err());
}

fn what_is_left_outlives_the_mount(mode: Mode) {
    let (mut place, model) = spent(mode, &[]);
    place.mount.remount();
    assert_eq!(place.mount.status_number("ssd_writes_left_bytes"), 0);
    place.mount.crash();
    assert_eq!(place.mount.status_number("ssd_writes_left_bytes"), 0);
    // More a day, while it is used.
    let mountpoint = place.mount.path().to_owned();
    printed(&kvfs(&["config", "set", "ssd_writes=1G/day"], &[&mountpoint]));
    assert!(place.mount.status_number("ssd_writes_left_bytes") > 1 << 29);
    write_pages(&place, &model);
    sync_directory(place.mount.path()).unwrap();
    assert_eq!(place.mount.status_number("ssd_spared_files"), 0);
    // Taking the limit away for a moment brings nothing in.
    write_and_close(place.mount.files("more"), &fill(2, 8 << 20)).unwrap();
    sync_directory(place.mount.path()).unwrap();
    let left = place.mount.status_number("ssd_writes_left_bytes");
    for value in ["ssd_writes=none", "ssd_writes=1G/day"] {
        printed(&kvfs(&["config", "set", value], &[&mountpoint]));
    }
    let now = place.mount.status_number("ssd_writes_left_bytes");
    assert!((left..left + (1 << 20)).contains(&now), "{left} {now}");
    let status = printed(&kvfs(&["status"], &[&mountpoint]));
    assert!(status.contains("may be written now") && status.contains("of 1.0 GiB"), "{status}");
    printed(&kvfs(&["config", "set", "ssd_writes=none"], &[&mountpoint]));
    assert!(place.mount.try_status("ssd_writes_left_bytes").is_none());
}
