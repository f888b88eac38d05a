//! Small files that share packs: they are what files of their own are, in every way that a client can tell.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../common/mod.rs"]
#[macro_use]
mod common;

mod changes;
mod descriptors;
mod lost;
mod memory;
mod room;

use std::collections::BTreeSet;
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use common::sys::sync_directory;
use common::{Mode, Model, Mount, fill};

/// Files up to this size share packs here.
const PACK: &str = "64K";

/// A mount that packs, and commits only when asked.
fn packing(mode: Mode) -> Mount {
    Mount::with_options(mode, &["--pack", PACK, "--commit-interval", "3600"])
}

fn commit(mount: &Mount) {
    sync_directory(mount.path()).unwrap();
}

/// So many files of different sizes, and what is in them.
fn make(mount: &Mount, count: u32) -> Vec<(PathBuf, Vec<u8>)> {
    let sizes = [0, 1, 4095, 4096, 20_000, 65_536];
    let make = |number: u32| {
        let size = sizes[number as usize % sizes.len()];
        let (path, bytes) = (mount.files(format!("f{number}")), fill(u64::from(number), size));
        std::fs::write(&path, &bytes).unwrap();
        (path, bytes)
    };
    (0..count).map(make).collect()
}

#[track_caller]
fn check(files: &[(PathBuf, Vec<u8>)]) {
    for (path, bytes) in files {
        assert!(std::fs::read(path).unwrap() == *bytes, "{}", path.display());
        assert_eq!(std::fs::metadata(path).unwrap().len(), bytes.len() as u64);
    }
}

fn packed(mount: &Mount) -> u64 {
    mount.status_number("packed_files")
}

#[track_caller]
fn fsck(store: &Path, repair: bool) {
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_kvfs"));
    command.arg("fsck").args(repair.then_some("--repair")).arg(store);
    let ended = common::forks::output(&mut command);
    assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stdout));
}

in_both_modes!(
    small_files_share_packs_through_remounts_and_crashes,
    pages_share_packs_and_have_twins,
    names_are_found_again_without_metadata,
    notes_are_found_again_before_bytes_that_were_moved,
    a_larger_file_stays_alone_and_the_bound_can_change,
);

fn small_files_share_packs_through_remounts_and_crashes(mode: Mode) {
    let mut mount = packing(mode);
    let large = (mount.files("large"), fill(7, 65_537));
    std::fs::write(&large.0, &large.1).unwrap();
    let files = make(&mount, 60);
    assert_eq!(packed(&mount), 0, "nothing before its commit");
    commit(&mount);
    assert_eq!((packed(&mount), mount.objects().len(), mount.staging().len()), (60, 1, 0));
    check(&files);
    mount.remount();
    assert_eq!(packed(&mount), 60);
    check(&files);
    let another = make(&mount, 61).split_off(60);
    commit(&mount);
    mount.crash();
    assert_eq!(packed(&mount), 61);
    check(&[files, another, vec![large]].concat());
    mount.unmount();
    fsck(mount.store(), false);
}

fn pages_share_packs_and_have_twins(mode: Mode) {
    let mount = packing(mode);
    let model = Model::small();
    model.install(&mount);
    let (first, second) = (model.page_path(&mount, "a", 0, 0), model.page_path(&mount, "b", 0, 0));
    std::fs::write(&first, model.page(0, 0, 1)).unwrap();
    commit(&mount);
    let before = packed(&mount);
    assert!(before > 0);
    std::fs::write(&second, model.page(0, 0, 1)).unwrap();
    commit(&mount);
    let inode =
        |path: &Path| std::os::unix::fs::MetadataExt::ino(&std::fs::metadata(path).unwrap());
    assert_eq!((inode(&first), packed(&mount)), (inode(&second), before), "stored once");
    assert!(std::fs::read(&second).unwrap() == model.page(0, 0, 1));
}

fn names_are_found_again_without_metadata(mode: Mode) {
    let mut mount = packing(mode);
    let files = make(&mount, 12);
    commit(&mount);
    // Notes follow names, and bytes that change.
    common::sys::rename(&files[3].0, mount.files("renamed")).unwrap();
    std::fs::write(&files[4].0, b"a new version").unwrap();
    std::fs::remove_file(&files[5].0).unwrap();
    commit(&mount);
    rebuild(&mut mount);
    check(&[&files[..3], &files[6..]].concat());
    assert!(std::fs::read(mount.files("renamed")).unwrap() == files[3].1);
    assert_eq!(std::fs::read(&files[4].0).unwrap(), b"a new version");
    assert_eq!(std::fs::read_dir(mount.files("")).unwrap().count(), 11);
}

/// The metadata is lost, and made anew from what the packs say.
fn rebuild(mount: &mut Mount) {
    assert!(mount.unmount().success());
    std::fs::remove_file(mount.store().join("meta.redb")).unwrap();
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_kvfs"));
    let ended = common::forks::output(command.args(["fsck", "--rebuild"]).arg(mount.store()));
    assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
    mount.mount();
}

/// The bytes are copied out of their pack behind what was noted of them since.
fn notes_are_found_again_before_bytes_that_were_moved(mode: Mode) {
    let mut mount = packing(mode);
    let kept = make(&mount, 4);
    let gone: Vec<_> = (0..60).map(|number| mount.files(format!("gone{number}"))).collect();
    for path in &gone {
        std::fs::write(path, fill(9, 3000)).unwrap();
    }
    commit(&mount);
    mount.remount();
    let renamed = (mount.files("renamed"), kept[1].1.clone());
    common::sys::rename(&kept[1].0, &renamed.0).unwrap();
    std::fs::set_permissions(&kept[2].0, Permissions::from_mode(0o640)).unwrap();
    let linked = (mount.files("linked"), kept[3].1.clone());
    std::fs::hard_link(&kept[3].0, &linked.0).unwrap();
    commit(&mount);
    let before: BTreeSet<_> =
        common::mount::files_below(&mount.store().join("packs")).into_iter().collect();
    for path in &gone {
        std::fs::remove_file(path).unwrap();
    }
    common::eventually("the first pack to go", || {
        commit(&mount);
        let now = common::mount::files_below(&mount.store().join("packs"));
        (!now.contains(before.first()?)).then_some(())
    });
    rebuild(&mut mount);
    check(&[kept[0].clone(), renamed, kept[2].clone(), kept[3].clone(), linked]);
    let mode = std::fs::metadata(&kept[2].0).unwrap().permissions().mode();
    assert_eq!(mode & 0o7777, 0o640);
    assert_eq!(std::fs::read_dir(mount.files("")).unwrap().count(), 5);
}

fn a_larger_file_stays_alone_and_the_bound_can_change(mode: Mode) {
    let mount = packing(mode);
    let set = |value: &str| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_kvfs"));
        command.args(["config", "set", &format!("pack={value}")]).arg(mount.path());
        common::forks::output(&mut command)
    };
    let told = String::from_utf8(set("2M").stderr).unwrap();
    assert!(told.contains("pack is 2M: must be from 0 to 1M"), "{told}");
    assert!(set("1M").status.success());
    std::fs::write(mount.files("a"), fill(1, 1 << 20)).unwrap();
    commit(&mount);
    assert_eq!(packed(&mount), 1);
    assert!(set("0").status.success());
    std::fs::write(mount.files("b"), b"alone").unwrap();
    commit(&mount);
    assert_eq!((packed(&mount), mount.objects().len()), (1, 1));
    assert!(std::fs::read(mount.files("a")).unwrap() == fill(1, 1 << 20));
}
