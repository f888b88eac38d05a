//! What is said of a file is so: where its bytes are, what an open would find, what a move did.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::Value;

use crate::common::disk::SmallDisk;
use crate::common::sys::{assert_errno, getxattr, open, rename, write_and_close};
use crate::common::{Mode, Model, Mount, eventually, fill, forks};
use crate::place::{Place, complaint, kvfs, printed, tier};

in_both_modes!(
    without_its_remote_nothing_is_promised,
    where_nothing_can_move_nothing_is_said_to_have_moved,
    what_moved_and_what_was_there_is_counted,
    damage_is_told_until_it_is_gone,
    memory_that_is_not_used_says_why,
    a_remote_that_is_away_shows_in_the_state,
    a_page_that_is_away_is_inspected_where_it_is,
    what_the_remote_lacks_is_told,
    what_the_remote_does_not_take_is_told,
    attributes_that_change_all_the_time_hold_up_nothing,
    another_user_is_told_whose_mount_it_is,
    signals_without_a_meaning_end_nothing,
    a_header_that_is_spelled_otherwise_is_another_file,
    metadata_that_cannot_be_read_is_one_line,
);

/// Tokens of a page of the small model.
const PAGE_TOKENS: u64 = 32;

/// A sequence of two layers with so many pages each, layer by layer.
pub(crate) fn write_sequence(mount: &Mount, model: &Model, pages: u64) -> Vec<PathBuf> {
    let ids: Vec<u8> =
        (0..pages * PAGE_TOKENS).flat_map(|id| u32::try_from(id).unwrap().to_le_bytes()).collect();
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
    let prompt: Vec<u32> = (0..u32::try_from(tokens).unwrap()).collect();
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
    let mut mount = Mount::with_own_files(mode, &[]);
    let model = Model::small();
    model.install(&mount);
    let pages = write_sequence(&mount, &model, 3);
    assert!(mount.unmount().success());
    // The second page of the second layer.
    damage(&mount, &model.page(1, 32, 33));
    mount.mount();
    assert_eq!(promised(&mount, &model, 96), 96);
    let status = std::fs::read_to_string(mount.join(".kvfs/status")).unwrap();
    assert_eq!(mount.status("state"), "ok", "{status}");
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
    crate::require!(fuse, root, loop);
    // More than half of what is free there, and less than any machine has of memory.
    let disk = SmallDisk::new();
    let store = disk.mountpoint.join("store");
    let mount = Mount::of_store_with(mode, &["--ram", "64M"], &store);
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
    rename(&place.remote, &hidden).unwrap();
    place.mount.mount();
    let why = eventually("the remote to be missed", || {
        let is_degraded = place.mount.status("state") == "degraded";
        is_degraded.then(|| place.mount.status("state_reason"))
    });
    assert!(why.contains("the remote is down"), "{why}");
    rename(&hidden, &place.remote).unwrap();
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

fn what_the_remote_lacks_is_told(mode: Mode) {
    let place = Place::new(mode, &["--remote-bandwidth", "64K"]);
    printed(&kvfs(&["sync", "--remote", "--timeout", "60"], &[place.mount.path()]));
    let files = place.write("f", 2);
    let output = kvfs(&["sync", "--remote", "--timeout", "1"], &[place.mount.path()]);
    assert_eq!(output.status.code(), Some(1));
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(said.contains("does not have yet: 2 files, 8.0 MiB"), "{said}");
    let status = |key| place.mount.status_number(key);
    assert_eq!((status("remote_waiting_files"), status("remote_waiting_bytes")), (2, 8 << 20));
    assert!((1..60).contains(&status("remote_waiting_seconds")));
    // One that goes is not waited for.
    std::fs::remove_file(&files[1].0).unwrap();
    eventually("it to be forgotten", || {
        (place.mount.status_number("remote_waiting_bytes") == 4 << 20).then_some(())
    });
    let said = kvfs(&["umount"], &[place.mount.path()]);
    let said = String::from_utf8_lossy(&said.stderr).into_owned();
    assert!(said.contains("not yet in the remote: 1 files, 4.0 MiB"), "{said}");
    let mount = Mount::of_store_with(
        mode,
        &["--remote", place.remote.to_str().unwrap()],
        place.mount.store(),
    );
    printed(&kvfs(&["sync", "--remote"], &[mount.path()]));
    assert_eq!(mount.status("remote_waiting_files"), "0");
    let path = there(&mount, &place, &files[0].0);
    assert!(std::fs::read(path).unwrap() == files[0].1);
    let output = kvfs(&["umount"], &[mount.path()]);
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
}

/// Trying again does not help where something lies in the place of the copies.
fn what_the_remote_does_not_take_is_told(mode: Mode) {
    let place = Place::new(mode, &[]);
    printed(&kvfs(&["sync", "--remote", "--timeout", "60"], &[place.mount.path()]));
    let blobs = place.remote.join("blobs");
    std::fs::create_dir_all(&blobs).unwrap();
    let in_the_way: Vec<PathBuf> =
        (0..=255_u8).map(|shard| blobs.join(format!("{shard:02x}"))).collect();
    for path in &in_the_way {
        std::fs::write(path, b"").unwrap();
    }
    let files = place.write("f", 2);
    let sync = |mount: &Mount| {
        let output = kvfs(&["sync", "--remote", "--timeout", "60"], &[mount.path()]);
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        (output.status.code(), said)
    };
    let (exit, said) = sync(&place.mount);
    assert_eq!(exit, Some(1), "{said}");
    assert!(said.contains("will not have: 2 files, 8.0 MiB: "), "{said}");
    assert!(said.contains("Not a directory") && said.lines().count() == 1, "{said}");
    let mount = &place.mount;
    assert_eq!(
        (mount.status("remote_waiting_files"), mount.status("state")),
        told("0", "degraded")
    );
    assert!(mount.status("state_reason").contains("2 files cannot be brought into the remote"));
    // One that goes is not missed.
    std::fs::remove_file(&files[1].0).unwrap();
    assert_eq!(mount.status("remote_given_up_files"), "1");
    let said = kvfs(&["umount"], &[mount.path()]);
    let said = String::from_utf8_lossy(&said.stderr).into_owned();
    assert!(said.contains("never in the remote: 1 files, 4.0 MiB: "), "{said}");
    // A mount tries anew; so does a file that changes.
    let options = ["--remote", place.remote.to_str().unwrap()];
    let mount = Mount::of_store_with(mode, &options, mount.store());
    assert_eq!(sync(&mount).0, Some(1));
    for path in &in_the_way {
        std::fs::remove_file(path).unwrap();
    }
    std::fs::write(mount.files("f0"), b"other bytes").unwrap();
    assert_eq!(sync(&mount), (Some(0), String::new()));
    assert_eq!((mount.status("remote_given_up_files"), mount.status("state")), told("0", "ok"));
}

/// Neither a file on its way to the remote, nor one that is damaged, begins anew for its permissions.
fn attributes_that_change_all_the_time_hold_up_nothing(mode: Mode) {
    let mut mount = Mount::with_own_files(mode, &[]);
    let bytes = |number| fill(number, 4 << 20);
    for (number, name) in (0..).zip(["damaged", "good"]) {
        write_and_close(mount.files(name), &bytes(number)).unwrap();
    }
    assert!(mount.unmount().success());
    damage(&mount, &bytes(0));
    let remote = tempfile::tempdir().unwrap();
    let options = ["--pack", "0", "--remote", remote.path().to_str().unwrap()];
    let mount = Mount::of_store_with(mode, &options, mount.store());
    let paths = [mount.files("damaged"), mount.files("good")];
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for number in 0.. {
                if is_over.load(Ordering::Relaxed) {
                    break;
                }
                for path in &paths {
                    let mode = std::fs::Permissions::from_mode(0o600 + number % 2);
                    std::fs::set_permissions(path, mode).unwrap();
                }
            }
        });
        let synced = kvfs(&["sync", "--remote", "--timeout", "60"], &[mount.path()]);
        let evicted = kvfs(&["evict"], &[&paths[1]]);
        is_over.store(true, Ordering::Relaxed);
        let said = String::from_utf8_lossy(&synced.stdout).into_owned();
        assert!(said.contains("will not have: 1 files, 4.0 MiB: "), "{said}");
        assert_eq!(printed(&evicted), "evicted 1 file\n");
    });
    assert_eq!((tier(&paths[0]), tier(&paths[1])), ("ssd".to_owned(), "remote".to_owned()));
    assert!(std::fs::read(&paths[1]).unwrap() == bytes(1));
    assert_eq!(mount.log().matches("was not uploaded").count(), 1, "{}", mount.log());
}

fn told(number: &str, state: &str) -> (String, String) {
    (number.to_owned(), state.to_owned())
}

/// Runs `kvfs umount` as another user.
fn another_user_is_told_whose_mount_it_is(mode: Mode) {
    use std::os::unix::process::CommandExt;
    crate::require!(root, fusermount3);
    let mount = Mount::new(mode);
    // The program lies where only root may look.
    let program = tempfile::Builder::new().prefix("kvfs-").tempdir_in("/tmp").unwrap();
    let copy = program.path().join("kvfs");
    std::fs::copy(env!("CARGO_BIN_EXE_kvfs"), &copy).unwrap();
    let open_to_all = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(program.path(), open_to_all).unwrap();
    let mut command = Command::new(&copy);
    command.arg("umount").arg(mount.path()).uid(65534).gid(65534).current_dir("/");
    let output = forks::output(&mut command);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(!said.contains("somebody else"), "{said}");
    assert_eq!(mount.status("state"), "ok", "it is still there");
}

fn signals_without_a_meaning_end_nothing(mode: Mode) {
    let mut mount = Mount::new(mode);
    let pid = nix::unistd::Pid::from_raw(i32::try_from(mount.pid()).unwrap());
    for signal in [nix::sys::signal::SIGUSR1, nix::sys::signal::SIGUSR2] {
        nix::sys::signal::kill(pid, signal).unwrap();
    }
    std::thread::sleep(std::time::Duration::from_millis(100));
    assert_eq!(mount.status("state"), "ok");
    assert!(!mount.has_ended() && mount.unmount().success());
}

/// A page with one more space in its header, and one less behind it.
fn spelled_otherwise(page: &[u8]) -> Vec<u8> {
    let mut other = page.to_vec();
    let length = usize::try_from(u64::from_le_bytes(page[..8].try_into().unwrap())).unwrap();
    let json = &page[8..8 + length];
    let colon = json.iter().position(|byte| *byte == b':').unwrap();
    assert_eq!(json.last(), Some(&b' '), "there is room for a space");
    other[8 + colon + 1] = b' ';
    other[8 + colon + 2..8 + length].copy_from_slice(&json[colon + 1..length - 1]);
    other
}

fn a_header_that_is_spelled_otherwise_is_another_file(mode: Mode) {
    use std::os::unix::fs::MetadataExt;
    let mount = Mount::new(mode);
    let model = Model::small();
    model.install(&mount);
    let page = model.page(0, 0, 1);
    let other = spelled_otherwise(&page);
    assert!(page != other && page[4096..] == other[4096..]);
    let paths = ["a", "b", "c"].map(|name| model.page_path(&mount, name, 0, 0));
    for (path, bytes) in paths.iter().zip([&page, &other, &page]) {
        // By rename, as engines do.
        let staged = path.with_file_name("p.tmp");
        write_and_close(&staged, bytes).unwrap();
        rename(&staged, path).unwrap();
    }
    for (path, bytes) in paths.iter().zip([&page, &other, &page]) {
        assert!(std::fs::read(path).unwrap() == *bytes, "readers get what was written");
    }
    let links = paths.each_ref().map(|path| path.metadata().unwrap().nlink());
    assert_eq!(links, [2, 1, 2], "the same bytes are stored once");
    let checksum = |path| getxattr(path, "user.kvfs.checksum").unwrap();
    assert_eq!(checksum(&paths[0]), checksum(&paths[1]), "they are the same page by identity");
}

fn metadata_that_cannot_be_read_is_one_line(mode: Mode) {
    let mut mount = Mount::new(mode);
    write_and_close(mount.files("f"), b"bytes").unwrap();
    assert!(mount.unmount().success());
    let path = mount.store().join("meta.redb");
    let whole = std::fs::read(&path).unwrap();
    for (what, keep, fill) in [("filled", whole.len(), 0x5a), ("cut", whole.len() / 2, 0)] {
        let mut bytes = whole[..keep].to_vec();
        if fill != 0 {
            bytes[4096..].fill(fill);
        }
        std::fs::write(&path, bytes).unwrap();
        let output = kvfs(&["fsck"], &[mount.store()]);
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert_eq!(output.status.code(), Some(3), "{what}: {said}");
        assert!(said.contains("meta.redb: "), "{what}: {said}");
        assert_eq!(String::from_utf8_lossy(&output.stderr), "", "{what}: no panic is shown");
    }
}

fn inspected(path: &Path) -> String {
    printed(&kvfs(&["inspect"], &[path]))
}
