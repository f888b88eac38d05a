//! A daemon that may have few files open, and a store of many packs.

use std::fs::{self, File};
use std::path::PathBuf;
use std::process::Command;

use crate::common::mount::{files_below, limited};
use crate::common::{Mode, Mount, fill};
use crate::{check, commit, packed, packing};

in_both_modes!(packs_leave_descriptors_to_clients, too_few_descriptors_are_told_of);

/// Fewer than are put together to one.
const PACKS: u32 = 14;
/// As few as there may be.
const OPEN_FILES_MAX: u32 = 64;

fn make(mount: &Mount, name: &str, size: usize) -> (PathBuf, Vec<u8>) {
    let (path, bytes) = (mount.files(name), fill(size as u64, size));
    fs::write(&path, &bytes).unwrap();
    (path, bytes)
}

fn packs_leave_descriptors_to_clients(mode: Mode) {
    let mut mount = packing(mode);
    let large: Vec<_> = (0..16).map(|number| make(&mount, &format!("l{number}"), 70_000)).collect();
    let small: Vec<_> = (0..PACKS)
        .map(|number| {
            let file = make(&mount, &format!("s{number}"), 9000);
            mount.remount();
            file
        })
        .collect();
    assert!(mount.unmount().success());
    let packs = files_below(&mount.store().join("packs"));
    assert!(packs.len() >= PACKS as usize, "{packs:?}");
    mount.set_open_files_max(OPEN_FILES_MAX);
    mount.mount();
    let opened: Vec<File> = large.iter().map(|(path, _)| File::open(path).unwrap()).collect();
    // Nor do those that clients have open in packs take any.
    let (changed, kept) = small.split_first().unwrap();
    let readers: Vec<File> = kept.iter().map(|(path, _)| File::open(path).unwrap()).collect();
    check(&small);
    check(&large);
    let descriptors = fs::read_dir(format!("/proc/{}/fd", mount.pid())).unwrap();
    let targets = descriptors.filter_map(|entry| fs::read_link(entry.unwrap().path()).ok());
    let packs = targets.filter(|target| target.starts_with(mount.store().join("packs"))).count();
    // One may be written to, too.
    assert!(packs <= OPEN_FILES_MAX as usize / 16 + 1, "{packs} packs are open");
    // What is changed is copied out of its pack first.
    fs::write(&changed.0, b"anew").unwrap();
    commit(&mount);
    assert_eq!(packed(&mount), u64::from(PACKS));
    assert_eq!(fs::read(&changed.0).unwrap(), b"anew");
    for (reader, (_, bytes)) in readers.iter().zip(kept) {
        let mut read = Vec::new();
        std::io::Read::read_to_end(&mut &*reader, &mut read).unwrap();
        assert!(read == *bytes);
    }
    drop((opened, readers));
    assert_eq!((mount.status("state"), mount.status("errors")), ("ok".to_owned(), "0".to_owned()));
}

fn too_few_descriptors_are_told_of(mode: Mode) {
    let mut mount = packing(mode);
    assert!(mount.unmount().success());
    for max in [10, 36, OPEN_FILES_MAX - 1] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvfs"));
        command.arg("mount").arg(mount.store()).arg(mount.path());
        let ended = crate::common::forks::output(&mut limited(&command, max));
        let said = String::from_utf8(ended.stderr).unwrap();
        let expected = format!("a process may have {max} files open here (ulimit -Hn)");
        assert!(!ended.status.success() && said.contains(&expected), "{said}");
        assert_eq!(said.lines().count(), 1, "{said}");
    }
    mount.mount();
}
