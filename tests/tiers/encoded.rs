//! Cold objects in fewer bytes on the disk.

use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::common::sys::{getxattr, map, open, sync_directory, write_and_close};
use crate::common::{Mode, Mount, eventually, fill};

in_both_modes!(
    what_does_not_fit_is_encoded_and_comes_back,
    what_does_not_get_smaller_stays_raw,
    encoded_copies_are_read_by_any_mount,
    a_changed_file_is_not_its_encoded_copy,
    a_deleted_file_leaves_nothing,
    a_mapped_file_stays_raw,
    a_damaged_copy_fails_the_open_and_fsck_finds_it,
    a_damaged_raw_file_is_replaced_by_its_encoded_copy,
    a_crash_at_any_time_loses_nothing,
    without_records_encoded_copies_are_found_again,
    names_of_what_was_written_in_memory_are_found_again,
    objects_are_encoded_before_they_leave_for_the_remote,
    what_the_disk_has_no_room_for_is_decoded_into_memory,
);

const FILE_BYTES: usize = 4 << 20;
/// Four raw files fit, or eight encoded ones.
const BUDGET: &str = "20M";
const BUDGET_BYTES: u64 = 20 << 20;
const OPTIONS: [&str; 6] = ["--ssd", BUDGET, "--cold", "zstd:1", "--commit-interval", "0.05"];

/// Bytes of which zstd saves about half.
fn compressible(seed: u64) -> Vec<u8> {
    fill(seed, FILE_BYTES).into_iter().map(|byte| byte & 0x0f).collect()
}

fn write(mount: &Mount, name: &str, count: u64) -> Vec<(PathBuf, Vec<u8>)> {
    let write = |number| {
        let path = mount.files(format!("{name}{number}"));
        let bytes = compressible(number + name.len() as u64 * 1000);
        write_and_close(&path, &bytes).unwrap();
        (path, bytes)
    };
    (0..count).map(write).collect()
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

fn assert_same(files: &[(PathBuf, Vec<u8>)]) {
    for (path, bytes) in files {
        assert!(std::fs::read(path).unwrap() == *bytes, "{}", path.display());
    }
}

fn bytes_in_objects(mount: &Mount) -> u64 {
    mount.objects().iter().map(|path| path.metadata().unwrap().len()).sum()
}

/// The encoded copies in the store.
fn copies(store: &Path) -> Vec<PathBuf> {
    let shards = std::fs::read_dir(store.join("objects")).unwrap();
    let files = shards.flat_map(|shard| std::fs::read_dir(shard.unwrap().path()).unwrap());
    let files = files.map(|file| file.unwrap().path());
    files.filter(|path| path.extension().is_some_and(|extension| extension == "z")).collect()
}

/// What `kvfs fsck` says, and whether the store is sound.
fn fsck(store: &Path, further: &[&str]) -> (bool, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvfs"));
    let output = command.arg("fsck").args(further).arg(store).output().unwrap();
    let text = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8_lossy(&text).into_owned())
}

fn what_does_not_fit_is_encoded_and_comes_back(mode: Mode) {
    let mut mount = Mount::with_options(mode, &OPTIONS);
    let files = write(&mount, "f", 8);
    wait_until_it_fits(&mount);
    let encoded: Vec<_> = files.iter().filter(|(path, _)| is_encoded(path)).collect();
    assert!((4..=8).contains(&encoded.len()), "{} of 8 files", encoded.len());
    for (path, _) in &encoded {
        assert_eq!(getxattr(path, "user.kvfs.tier").unwrap(), "ssd");
        let stored: usize = getxattr(path, "user.kvfs.stored_bytes").unwrap().parse().unwrap();
        assert!(stored > FILE_BYTES / 4 && stored < FILE_BYTES / 10 * 9, "{stored}");
        assert_eq!(path.metadata().unwrap().len(), FILE_BYTES as u64);
    }
    let copies = mount.status_number("ssd_only_encoded_objects");
    assert_eq!(copies, encoded.len() as u64);
    eventually("the store to take what the status says", || {
        (bytes_in_objects(&mount) == mount.status_number("ssd_used_bytes")).then_some(())
    });
    for file in &files {
        assert_same(std::slice::from_ref(file));
    }
    wait_until_it_fits(&mount);
    mount.remount();
    assert_same(&files);
    wait_until_it_fits(&mount);
    mount.crash();
    assert_same(&files);
    eventually("the store to take what the status says", || {
        (bytes_in_objects(&mount) == mount.status_number("ssd_used_bytes")).then_some(())
    });
    assert_eq!(mount.status("errors"), "0");
    assert!(mount.unmount().success());
    let (is_sound, text) = fsck(mount.store(), &[]);
    assert!(is_sound, "{text}");
}

fn what_does_not_get_smaller_stays_raw(mode: Mode) {
    let mount = Mount::with_options(mode, &OPTIONS);
    let files: Vec<_> = (0..8)
        .map(|number| {
            let (path, bytes) = (mount.files(format!("r{number}")), fill(number, FILE_BYTES));
            write_and_close(&path, &bytes).unwrap();
            (path, bytes)
        })
        .collect();
    let last = write(&mount, "c", 1);
    sync_directory(mount.path()).unwrap();
    eventually("the one that gets smaller", || is_encoded(&last[0].0).then_some(()));
    assert!(files.iter().all(|(path, _)| !is_encoded(path)));
    assert_eq!(copies(mount.store()).len(), 1);
    assert_same(&files);
    assert_same(&last);
}

fn encoded_copies_are_read_by_any_mount(mode: Mode) {
    let mut mount = Mount::with_options(mode, &OPTIONS);
    let files = write(&mount, "f", 8);
    wait_until_it_fits(&mount);
    assert!(mount.unmount().success());
    let other = Mount::of_store(mode, mount.store());
    for (path, bytes) in &files {
        let path = other.files(path.file_name().unwrap());
        assert!(std::fs::read(&path).unwrap() == *bytes);
    }
    assert_eq!(other.status("errors"), "0");
}

fn a_changed_file_is_not_its_encoded_copy(mode: Mode) {
    let mut mount = Mount::with_options(mode, &OPTIONS);
    let files = write(&mount, "f", 7);
    wait_until_it_fits(&mount);
    let (path, bytes) = files.iter().find(|(path, _)| is_encoded(path)).unwrap();
    let mut bytes = bytes.clone();
    bytes[7] ^= 1;
    let file = std::fs::File::options().write(true).open(path).unwrap();
    file.write_all_at(&bytes[7..8], 7).unwrap();
    file.sync_all().unwrap();
    drop(file);
    assert!(!is_encoded(path));
    mount.crash();
    assert!(std::fs::read(path).unwrap() == bytes);
    // After the crash it has no checksum, so it stays raw.
    write(&mount, "more", 1);
    wait_until_it_fits(&mount);
    assert!(std::fs::read(path).unwrap() == bytes);
    mount.remount();
    assert!(std::fs::read(path).unwrap() == bytes);
}

fn a_deleted_file_leaves_nothing(mode: Mode) {
    let mount = Mount::with_options(mode, &OPTIONS);
    let files = write(&mount, "f", 8);
    wait_until_it_fits(&mount);
    // One of them has both copies.
    assert_same(&files[..1]);
    for (path, _) in &files {
        std::fs::remove_file(path).unwrap();
    }
    sync_directory(mount.path()).unwrap();
    eventually("the objects to be gone", || mount.objects().is_empty().then_some(()));
    for key in ["ssd_used_bytes", "ssd_encoded_bytes", "ssd_only_encoded_bytes"] {
        eventually(key, || (mount.status_number(key) == 0).then_some(()));
    }
}

fn a_mapped_file_stays_raw(mode: Mode) {
    let mount = Mount::with_options(mode, &OPTIONS);
    let first = write(&mount, "first", 1);
    let (path, bytes) = &first[0];
    let mapped = map(&open(path, libc::O_RDONLY).unwrap());
    write(&mount, "f", 7);
    wait_until_it_fits(&mount);
    // Without passthrough the kernel has the bytes in its own cache.
    if mode == Mode::Passthrough {
        assert!(!is_encoded(path));
    }
    assert!(mapped[..] == bytes[..]);
    drop(mapped);
}

/// Changes a byte of every encoded copy.
fn damage(store: &Path) {
    for path in copies(store) {
        let file = std::fs::File::options().read(true).write(true).open(path).unwrap();
        let at = file.metadata().unwrap().len() / 2;
        let mut byte = [0];
        file.read_exact_at(&mut byte, at).unwrap();
        file.write_all_at(&[byte[0] ^ 1], at).unwrap();
    }
}

fn a_damaged_copy_fails_the_open_and_fsck_finds_it(mode: Mode) {
    let mut mount = Mount::with_options(mode, &OPTIONS);
    let files = write(&mount, "f", 8);
    wait_until_it_fits(&mount);
    let encoded: Vec<_> = files.iter().filter(|(path, _)| is_encoded(path)).cloned().collect();
    mount.remount();
    damage(mount.store());
    for (path, _) in &encoded {
        let error = open(path, libc::O_RDONLY).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EIO), "{error}");
        assert_eq!(getxattr(path, "user.kvfs.damaged").unwrap(), "yes");
    }
    assert_eq!(mount.status("state"), "degraded");
    assert_eq!(mount.status_number("damaged_files"), encoded.len() as u64);
    assert!(mount.errors().iter().any(|line| line.contains("encoded copy")));
    assert!(mount.unmount().success());
    let (is_sound, text) = fsck(mount.store(), &[]);
    assert!(!is_sound && text.contains("its encoded copy"), "{text}");
    fsck(mount.store(), &["--repair"]);
    let (is_sound, text) = fsck(mount.store(), &[]);
    assert!(is_sound, "{text}");
    mount.mount();
    for (path, bytes) in &files {
        let is_lost = encoded.iter().any(|(lost, _)| lost == path);
        match std::fs::read(path) {
            Ok(found) => assert!(!is_lost && found == *bytes),
            Err(error) => assert!(is_lost && error.kind() == std::io::ErrorKind::NotFound),
        }
    }
}

fn a_damaged_raw_file_is_replaced_by_its_encoded_copy(mode: Mode) {
    let mut mount = Mount::with_options(mode, &OPTIONS);
    let files = write(&mount, "f", 8);
    wait_until_it_fits(&mount);
    let file = files.iter().find(|(path, _)| is_encoded(path)).unwrap();
    assert_same(std::slice::from_ref(file));
    assert!(mount.unmount().success());
    let mut damaged = 0;
    for copy in copies(mount.store()) {
        let raw = copy.with_extension("");
        if raw.exists() {
            let raw = std::fs::File::options().write(true).open(raw).unwrap();
            raw.write_all_at(b"damage", 4096).unwrap();
            damaged += 1;
        }
    }
    assert!(damaged > 0);
    mount.mount();
    assert_same(&files);
}

fn a_crash_at_any_time_loses_nothing(mode: Mode) {
    let mut mount = Mount::with_options(mode, &OPTIONS);
    let mut files = Vec::new();
    for round in 0..6 {
        files.extend(write(&mount, &"n".repeat(round + 1), 3));
        sync_directory(mount.path()).unwrap();
        std::thread::sleep(std::time::Duration::from_millis(37 * round as u64));
        mount.crash();
        let read = files.len() / 2;
        assert_same(&files[..read]);
    }
    assert_same(&files);
    assert!(mount.unmount().success());
    let (is_sound, text) = fsck(mount.store(), &[]);
    assert!(is_sound, "{text}");
}

fn without_records_encoded_copies_are_found_again(mode: Mode) {
    let mut mount = Mount::with_options(mode, &OPTIONS);
    let files = write(&mount, "f", 8);
    wait_until_it_fits(&mount);
    assert!(mount.unmount().success());
    let without_raw =
        copies(mount.store()).iter().filter(|copy| !copy.with_extension("").exists()).count();
    assert!(without_raw >= 4, "{without_raw}");
    std::fs::remove_file(mount.store().join("meta.redb")).unwrap();
    let (sound, text) = fsck(mount.store(), &[]);
    assert!(!sound && text.contains("kvfs fsck --rebuild"), "{text}");
    let (sound, text) = fsck(mount.store(), &["--rebuild"]);
    assert!(sound && text.contains("8 files are where they were, 0 in files/lost+found"), "{text}");
    let (sound, text) = fsck(mount.store(), &["--rebuild"]);
    assert!(!sound && text.contains("can be read"), "{text}");
    mount.mount();
    assert_same(&files);
    assert_eq!(mount.status("errors"), "0");
}

/// The copy in memory takes the place of the file that says where it belongs.
fn names_of_what_was_written_in_memory_are_found_again(mode: Mode) {
    let mut mount = Mount::with_options(mode, &["--ram", "64M", "--pack", "0"]);
    let path = mount.files("f");
    let mut bytes = fill(1, 200_000);
    write_and_close(&path, &bytes).unwrap();
    sync_directory(mount.path()).unwrap();
    crate::common::sys::setxattr(&path, "user.kvfs.tier", b"ram").unwrap();
    assert_eq!(getxattr(&path, "user.kvfs.tier").unwrap(), "ram");
    open(&path, libc::O_RDWR).unwrap().write_all_at(b"in place", 100).unwrap();
    bytes[100..108].copy_from_slice(b"in place");
    sync_directory(mount.path()).unwrap();
    assert!(mount.unmount().success());
    std::fs::remove_file(mount.store().join("meta.redb")).unwrap();
    let (sound, text) = fsck(mount.store(), &["--rebuild"]);
    assert!(sound, "{text}");
    mount.mount();
    assert_same(&[(path, bytes)]);
}

fn objects_are_encoded_before_they_leave_for_the_remote(mode: Mode) {
    let directory = crate::common::mount::scratch_directory();
    let remote = directory.path().to_str().unwrap();
    let mut mount = Mount::with_options(mode, &[&OPTIONS[..], &["--remote", remote]].concat());
    let files = write(&mount, "f", 16);
    eventually("everything to be where it belongs", || {
        let waiting = mount.status_number("remote_waiting_files");
        let used = mount.status_number("ssd_used_bytes");
        (waiting == 0 && used <= BUDGET_BYTES).then_some(())
    });
    let tier = |path: &Path| getxattr(path, "user.kvfs.tier").unwrap();
    let gone = files.iter().filter(|(path, _)| tier(path) == "remote").count();
    let local = files.len() - gone;
    // Eight encoded files would fit, and not even five raw ones.
    assert!(gone > 0 && local > 5, "{gone} left");
    assert_same(&files);
    mount.remount();
    assert_same(&files);
    assert_eq!(mount.status("errors"), "0");
}

fn what_the_disk_has_no_room_for_is_decoded_into_memory(mode: Mode) {
    let mut mount = Mount::with_options(mode, &[&OPTIONS[..], &["--ram", "64M"]].concat());
    let files = write(&mount, "f", 9);
    wait_until_it_fits(&mount);
    let used = mount.status_number("ssd_used_bytes");
    let (path, _) = files.iter().find(|(path, _)| is_encoded(path)).unwrap();
    assert_same(&files);
    assert_eq!(getxattr(path, "user.kvfs.tier").unwrap(), "ram");
    assert!(!is_encoded(path));
    assert_eq!(mount.status_number("ssd_used_bytes"), used);
    mount.crash();
    assert_same(&files);
    assert_eq!(mount.status("errors"), "0");
}
