//! What is said of a file is so: where its bytes are, what an open would find, what a move did.

use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::common::sys::{assert_errno, getxattr, open, write_and_close};
use crate::common::{Mode, Model, Mount, eventually};
use crate::place::{Place, complaint, kvfs, printed, tier};

in_both_modes!(
    without_its_remote_nothing_is_promised,
    where_nothing_can_move_nothing_is_said_to_have_moved,
    what_moved_and_what_was_there_is_counted,
    damage_is_told_until_it_is_gone,
    memory_that_is_not_used_says_why,
    a_remote_that_is_away_shows_in_the_state,
    a_page_that_is_away_is_inspected_where_it_is,
);

/// Tokens of a page of the small model.
const PAGE_TOKENS: u64 = 32;

/// A sequence of two layers with so many pages each, layer by layer.
pub(crate) fn write_sequence(mount: &Mount, model: &Model, pages: u64) -> Vec<PathBuf> {
    let ids: Vec<u8> = (0..pages * PAGE_TOKENS).flat_map(|id| (id as u32).to_le_bytes()).collect();
    let mut paths = Vec::new();
    for layer in 0..2 {
        for page in 0..pages {
            let start = page * PAGE_TOKENS;
            let path = model.page_path(mount, "a", layer, start);
            write_and_close(&path, &model.page(layer, start, start + 1)).unwrap();
            paths.push(path);
        }
    }
    std::fs::write(model.tokens_path(mount, "a"), ids).unwrap();
    paths
}

/// Tokens that `kvfs match` promises of a prompt that begins like the sequence.
fn promised(mount: &Mount, model: &Model, tokens: u64) -> u64 {
    let prompt: Vec<u32> = (0..tokens as u32).collect();
    kvfs::reader::longest_prefix(&model.directory(mount), &prompt).unwrap().tokens
}

/// The same store without its remote, which a mount may have to be told.
fn without_remote(place: &mut Place, mode: Mode) -> Mount {
    assert!(place.mount.unmount().success());
    let help = printed(&kvfs(&["mount", "--help"], &[]));
    let offline: &[&str] = if help.contains("--offline") { &["--offline"] } else { &[] };
    Mount::of_store_with(mode, offline, place.mount.store())
}

/// The same file in another mount of the store.
fn there(mount: &Mount, place: &Place, path: &Path) -> PathBuf {
    mount.join(path.strip_prefix(place.mount.path()).unwrap())
}

fn plan(path: &Path) -> (String, Value) {
    let text = printed(&kvfs(&["status", "--plan"], &[path]));
    let json = printed(&kvfs(&["status", "--json", "--plan"], &[path]));
    (text, serde_json::from_str(&json).unwrap())
}

fn without_its_remote_nothing_is_promised(mode: Mode) {
    let mut place = Place::new(mode, &[]);
    let model = Model::small();
    model.install(&place.mount);
    let pages = write_sequence(&place.mount, &model, 3);
    // The second page of the first layer stays.
    let away: Vec<&Path> =
        pages.iter().enumerate().filter(|(n, _)| *n != 1).map(|(_, path)| path.as_path()).collect();
    assert_eq!(printed(&kvfs(&["evict"], &away)), "evicted 5 files\n");
    assert_eq!(promised(&place.mount, &model, 96), 96, "with the remote, all of it can be had");

    let mount = without_remote(&mut place, mode);
    let pages: Vec<PathBuf> = pages.iter().map(|path| there(&mount, &place, path)).collect();
    for (number, path) in pages.iter().enumerate() {
        let expected = if number == 1 { "ssd" } else { "remote" };
        assert_eq!(tier(path), expected, "{}", path.display());
    }
    assert_eq!(mount.status("state"), "degraded");
    assert!(mount.status("state_reason").contains("the mount has none"));
    let (text, json) = plan(&model.sequence(&mount, "a"));
    assert!(text.contains("now: 5 files cannot be read (EIO)"), "{text}");
    assert!(!text.contains("everything can be read"), "{text}");
    assert_eq!(json["unreadable"]["files"], 5);
    assert_eq!(promised(&mount, &model, 96), 0);
    let output = kvfs(&["promote"], &[&pages[0], &pages[1]]);
    let said = complaint(&output);
    assert!(said.contains("only a remote has it, and the mount has none"), "{said}");
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(said, "promoted 0 files, 1 were there already, 1 did not move\n");
    let said = printed(&kvfs(&["scrub"], &[mount.path()]));
    assert!(said.contains("5 not compared: no damage in the others"), "{said}");
    assert_eq!(mount.status("damaged_files"), "0", "what is elsewhere is not damaged");
}

fn where_nothing_can_move_nothing_is_said_to_have_moved(mode: Mode) {
    let mount = Mount::new(mode);
    let path = mount.files("f");
    write_and_close(&path, b"bytes").unwrap();
    let said = complaint(&kvfs(&["evict"], &[&path]));
    assert!(said.contains("neither a remote nor a RAM tier"), "{said}");
    let said = complaint(&kvfs(&["promote"], &[&path]));
    assert!(said.contains("one tier"), "{said}");
}

fn what_moved_and_what_was_there_is_counted(mode: Mode) {
    let place = Place::new(mode, &["--ram", "12M"]);
    let files = place.write("f", 3);
    let paths: Vec<&Path> = files.iter().map(|(path, _)| path.as_path()).collect();
    assert_eq!(printed(&kvfs(&["promote"], &paths[..1])), "promoted 1 file\n");
    let said = printed(&kvfs(&["promote"], &paths[..2]));
    assert_eq!(said, "promoted 1 file, 1 were there already\n");
    let said = printed(&kvfs(&["evict", "--to", "ssd"], &paths));
    assert_eq!(said, "evicted 2 files, 1 were there already\n");
    assert_eq!(printed(&kvfs(&["evict"], &paths[..1])), "evicted 1 file\n");
    let said = printed(&kvfs(&["evict"], &paths));
    assert_eq!(said, "evicted 2 files, 1 were there already\n");
}

/// Changes a byte of the only object of that size on the disk.
fn damage(mount: &Mount, bytes: &[u8]) {
    use std::os::unix::fs::FileExt;
    let is_it = |path: &&PathBuf| std::fs::read(path).is_ok_and(|found| found == bytes);
    let object = mount.objects().iter().find(is_it).unwrap().clone();
    let file = open(&object, libc::O_RDWR).unwrap();
    file.write_all_at(&[bytes[5000] ^ 1], 5000).unwrap();
}

fn damage_is_told_until_it_is_gone(mode: Mode) {
    let mut mount = Mount::new(mode);
    let model = Model::small();
    model.install(&mount);
    let pages = write_sequence(&mount, &model, 3);
    assert!(mount.unmount().success());
    // The second page of the second layer.
    damage(&mount, &model.page(1, 32, 33));
    mount.mount();
    assert_eq!((promised(&mount, &model, 96), mount.status("state")), (96, "ok".to_owned()));
    let output = kvfs(&["scrub"], &[mount.path()]);
    assert_eq!(output.status.code(), Some(3));
    assert_eq!(promised(&mount, &model, 96), 32, "up to the last good page");
    assert_eq!(promised(&mount, &model, 20), 20);
    assert_eq!((mount.status("state"), mount.status("damaged_files")), {
        ("degraded".to_owned(), "1".to_owned())
    });
    assert!(mount.status("state_reason").contains("1 files are damaged"));
    assert_eq!((mount.metric("kvfs_degraded"), mount.metric("kvfs_damaged_files")), (1, 1));
    assert_eq!(getxattr(&pages[4], "user.kvfs.damaged").unwrap(), "yes");
    assert_errno(getxattr(&pages[3], "user.kvfs.damaged"), libc::ENODATA);
    let (text, json) = plan(&model.sequence(&mount, "a"));
    assert!(text.contains("now: 1 files cannot be read (EIO), the first is 001/0000032"), "{text}");
    assert_eq!(json["unreadable"]["files"], 1);
    // Written anew, it is promised again.
    std::fs::remove_file(&pages[4]).unwrap();
    write_and_close(&pages[4], &model.page(1, 32, 33)).unwrap();
    assert_eq!((promised(&mount, &model, 96), mount.status("state")), (96, "ok".to_owned()));
    assert_eq!((mount.metric("kvfs_degraded"), mount.metric("kvfs_damaged_files")), (0, 0));
}

fn memory_that_is_not_used_says_why(mode: Mode) {
    // More than half of what any disk of a test machine has free.
    let mount = Mount::with_options(mode, &["--ram", "40T"]);
    assert_eq!(mount.status("state"), "degraded");
    let why = mount.status("state_reason");
    assert!(why.contains("the RAM tier is idle: the disk has"), "{why}");
    drop(mount);
    let mount = Mount::with_options(mode, &["--ram", "4M"]);
    assert_eq!(mount.status("state"), "ok");
}

fn a_remote_that_is_away_shows_in_the_state(mode: Mode) {
    let mut place = Place::new(mode, &[]);
    place.write("f", 1);
    place.wait_until_uploaded();
    assert_eq!(place.mount.status("state"), "ok");
    assert!(place.mount.unmount().success());
    let hidden = place.remote.with_extension("hidden");
    std::fs::rename(&place.remote, &hidden).unwrap();
    place.mount.mount();
    let why = eventually("the remote to be missed", || {
        let is_degraded = place.mount.status("state") == "degraded";
        is_degraded.then(|| place.mount.status("state_reason"))
    });
    assert!(why.contains("the remote is down"), "{why}");
    std::fs::rename(&hidden, &place.remote).unwrap();
    eventually("the remote to be back", || (place.mount.status("state") == "ok").then_some(()));
}

fn a_page_that_is_away_is_inspected_where_it_is(mode: Mode) {
    let place = Place::new(mode, &[]);
    let model = Model::small();
    model.install(&place.mount);
    let pages = write_sequence(&place.mount, &model, 1);
    printed(&kvfs(&["evict"], &[&pages[0]]));
    let said = inspected(&pages[0]);
    assert!(said.contains("kind: page") && said.contains("user.kvfs.tier: remote"), "{said}");
    assert!(said.contains("its bytes are not here"), "{said}");
    assert_eq!(tier(&pages[0]), "remote", "it was not fetched");
    assert_eq!(place.mount.metric("kvfs_moves_total{from=\"remote\",to=\"ssd\"}"), 0);
    let said = inspected(&pages[1]);
    assert!(said.contains("verified: ") && said.contains("user.kvfs.tier: ssd"), "{said}");
}

fn inspected(path: &Path) -> String {
    printed(&kvfs(&["inspect"], &[path]))
}
