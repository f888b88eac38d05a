//! A copy on the disk that is damaged while nobody looks, with a named copy in the remote.

use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::Command;

use crate::common::{Mode, Mount, eventually, forks};
use crate::place::{Place, assert_same, tier};

in_both_modes!(
    a_damaged_file_is_whole_again_when_it_is_opened,
    fsck_leaves_a_damaged_file_to_the_remote,
    fsck_finds_nothing_wrong_with_files_that_are_only_remote,
);

fn fsck(mount: &Mount, options: &[&str]) -> (Option<i32>, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvfs"));
    let done = forks::output(command.arg("fsck").args(options).arg(mount.store()));
    (done.status.code(), String::from_utf8_lossy(&done.stdout).into_owned())
}

/// A file with a named copy in the remote, whose bytes on the disk are damaged; not mounted.
fn damaged(mode: Mode) -> (Place, Vec<(PathBuf, Vec<u8>)>) {
    let mut place = Place::with_budget(mode, &["--cold", "zstd"]);
    let files = place.write("f", 2);
    eventually("the copies to be named", || {
        let is_done = place.mount.status("remote_waiting_files") == "0";
        (is_done && place.mount.status("remote_objects") == "2").then_some(())
    });
    assert!(place.mount.unmount().success());
    let objects = place.mount.objects();
    let object = objects.iter().find(|path| std::fs::read(path).unwrap() == files[0].1).unwrap();
    let file = std::fs::File::options().write(true).open(object).unwrap();
    file.write_all_at(&[!files[0].1[4096]], 4096).unwrap();
    (place, files)
}

fn a_damaged_file_is_whole_again_when_it_is_opened(mode: Mode) {
    let (mut place, files) = damaged(mode);
    place.mount.mount();
    assert_same(&files);
    assert_eq!(tier(&files[0].0), "ssd");
    assert_eq!(place.mount.quarantined().len(), 1, "the damaged bytes are kept");
    assert!(place.mount.unmount().success());
    assert_eq!(fsck(&place.mount, &[]).0, Some(0));
    place.mount.mount();
}

fn fsck_leaves_a_damaged_file_to_the_remote(mode: Mode) {
    let (mut place, files) = damaged(mode);
    let (code, said) = fsck(&place.mount, &[]);
    assert_eq!(code, Some(3), "{said}");
    assert!(said.contains("the remote's copy takes its place"), "{said}");
    fsck(&place.mount, &["--repair"]);
    let (code, said) = fsck(&place.mount, &[]);
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains("1 objects are only in the remote"), "{said}");
    place.mount.mount();
    assert_eq!(tier(&files[0].0), "remote");
    assert_same(&files);
    assert_eq!(place.mount.status("errors"), "0");
}

fn fsck_finds_nothing_wrong_with_files_that_are_only_remote(mode: Mode) {
    let mut place = Place::with_budget(mode, &[]);
    let files = place.write("f", 8);
    place.wait_until_it_fits();
    assert!(place.mount.unmount().success());
    let (code, said) = fsck(&place.mount, &[]);
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains("objects are only in the remote"), "{said}");
    assert_eq!(fsck(&place.mount, &["--repair"]).0, Some(0));
    place.mount.mount();
    assert_same(&files);
}
