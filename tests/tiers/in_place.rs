//! Files change while the remote has a copy of them: whatever happens then, what was promised once
//! is still there.

use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use crate::common::sys::{getxattr, open, rename, write_and_close};
use crate::common::{Mode, Model, Mount, eventually, fill};
use crate::place::{FILE_BYTES, Place, assert_same, tier};

in_both_modes!(
    a_change_in_place_of_what_memory_and_the_remote_have_survives_a_crash,
    truncation_by_open_needs_no_bytes,
    a_damaged_copy_is_not_what_a_writer_changes,
    rows_that_were_a_file_in_the_remote_stay_on_the_disk,
    what_was_verified_and_not_named_before_the_end_is_named_after_it,
    a_file_that_became_a_page_can_leave,
    blocks_follow_what_the_disk_holds,
);

/// A file that only the remote has.
fn gone(files: &[(PathBuf, Vec<u8>)]) -> &(PathBuf, Vec<u8>) {
    files.iter().find(|(path, _)| tier(path) == "remote").expect("one has left")
}

/// The file of the store that holds these bytes.
fn object_file(mount: &Mount, bytes: &[u8]) -> PathBuf {
    let mut objects = mount.objects();
    objects.retain(|path| std::fs::read(path).unwrap() == bytes);
    assert_eq!(objects.len(), 1, "one object holds these bytes");
    objects.remove(0)
}

fn change_byte(path: &Path, offset: u64, byte: u8) -> std::io::Result<std::fs::File> {
    let file = open(path, libc::O_RDWR)?;
    file.write_all_at(&[byte], offset)?;
    Ok(file)
}

fn a_change_in_place_of_what_memory_and_the_remote_have_survives_a_crash(mode: Mode) {
    let mut place = Place::with_budget(mode, &["--ram", "16M"]);
    let files = place.write("f", 8);
    place.wait_until_it_fits();
    place.fill_up();
    let (path, bytes) = gone(&files);
    assert!(std::fs::read(path).unwrap() == *bytes);
    assert_eq!(tier(path), "ram", "there was no room on the disk");
    let file = change_byte(path, 7, !bytes[7]).unwrap();
    place.mount.crash();
    drop(file);
    let mut found = std::fs::read(path).unwrap();
    assert!(found[7] == bytes[7] || found[7] == !bytes[7]);
    found[7] = bytes[7];
    assert!(found == *bytes, "the file is what it was, or what it became");
    assert_eq!(place.mount.status("errors"), "0");
}

fn truncation_by_open_needs_no_bytes(mode: Mode) {
    let mut place = Place::with_budget(mode, &[]);
    let files = place.write("f", 8);
    place.wait_until_it_fits();
    let (path, _) = gone(&files);
    let hidden = place.remote.with_extension("hidden");
    rename(&place.remote, &hidden).unwrap();
    place.mount.remount();
    std::fs::write(path, b"another version").unwrap();
    assert_eq!(std::fs::read(path).unwrap(), b"another version");
    rename(&hidden, &place.remote).unwrap();
    place.mount.remount();
    assert_eq!(std::fs::read(path).unwrap(), b"another version");
}

fn a_damaged_copy_is_not_what_a_writer_changes(mode: Mode) {
    let mut place = Place::with_budget(mode, &[]);
    let files = place.write("f", 1);
    place.wait_until_it_fits();
    let (path, bytes) = &files[0];
    eventually("the copy to be named", || place.mount.log().contains("published").then_some(()));
    assert!(place.mount.unmount().success());
    let object = object_file(&place.mount, bytes);
    let file = std::fs::File::options().write(true).open(object).unwrap();
    file.write_all_at(&[!bytes[100]], 100).unwrap();
    drop(file);
    place.mount.mount();
    drop(change_byte(path, 7, !bytes[7]).unwrap());
    let mut expected = bytes.clone();
    expected[7] = !bytes[7];
    assert!(std::fs::read(path).unwrap() == expected);
    assert_eq!(place.mount.quarantined().len(), 1, "the damaged copy is kept");
}

fn rows_that_were_a_file_in_the_remote_stay_on_the_disk(mode: Mode) {
    let mut place = Place::with_budget(mode, &[]);
    let model = Model::small();
    model.install(&place.mount);
    let tokens = model.tokens_path(&place.mount, "s");
    let staged = tokens.with_file_name(".tokens");
    let bytes = fill(7, FILE_BYTES);
    write_and_close(&staged, &bytes).unwrap();
    let others = place.write("f", 8);
    let in_use: Vec<_> =
        others.iter().map(|(path, _)| open(path, libc::O_RDONLY).unwrap()).collect();
    eventually("the only file that can leave", || (tier(&staged) == "remote").then_some(()));
    drop(in_use);
    rename(&staged, &tokens).unwrap();
    let file = std::fs::File::options().append(true).open(&tokens).unwrap();
    crate::common::sys::write(&file, &[1, 2, 3, 4]).unwrap();
    drop(file);
    place.mount.remount();
    place.wait_until_it_fits();
    let expected = [&bytes[..], &[1, 2, 3, 4]].concat();
    assert!(std::fs::read(&tokens).unwrap() == expected);
    place.mount.remount();
    assert!(std::fs::read(&tokens).unwrap() == expected);
}

fn what_was_verified_and_not_named_before_the_end_is_named_after_it(mode: Mode) {
    let mut place = Place::with_budget(mode, &[]);
    eventually("the remote", || (place.mount.status("remote_state") == "up").then_some(()));
    let names = place.remote.join("names");
    let aside = place.remote.with_extension("names");
    if names.exists() {
        rename(&names, &aside).unwrap();
    }
    // No manifest can be put below a file.
    std::fs::write(&names, "in the way").unwrap();
    let files = place.write("f", 8);
    eventually("all copies to be verified", || {
        (place.mount.status_number("remote_objects") == 8).then_some(())
    });
    eventually("a publication to fail", || (place.mount.status("errors") != "0").then_some(()));
    assert_eq!(place.mount.status("remote_only_objects"), "0", "nothing leaves without a name");
    assert!(place.mount.unmount().success());
    std::fs::remove_file(&names).unwrap();
    if aside.exists() {
        rename(&aside, &names).unwrap();
    }
    place.mount.mount();
    place.wait_until_it_fits();
    assert_same(&files);
}

fn a_file_that_became_a_page_can_leave(mode: Mode) {
    let place = Place::with_budget(mode, &[]);
    // 4 KV heads x 128 in f16, 1024 tokens: 2 MiB and a header.
    let model = Model::with(|fields| {
        (fields.page_tokens, fields.num_kv_heads, fields.head_dim) = (1024, 4, 128);
    });
    model.install(&place.mount);
    let path = model.page_path(&place.mount, "s", 0, 0);
    let page = model.page(0, 0, 7);
    let staged = path.with_file_name(".page.tmp");
    write_and_close(&staged, &page).unwrap();
    place.wait_until_it_fits();
    eventually("the copy to be named", || place.mount.log().contains("published").then_some(()));
    rename(&staged, &path).unwrap();
    place.write("f", 8);
    place.wait_until_it_fits();
    assert_eq!(getxattr(&path, "user.kvfs.tier").unwrap(), "remote");
    assert!(std::fs::read(&path).unwrap() == page);
}

fn blocks_follow_what_the_disk_holds(mode: Mode) {
    let place = Place::with_budget(mode, &[]);
    let files = place.write("f", 8);
    place.wait_until_it_fits();
    for (path, bytes) in &files {
        let metadata = path.metadata().unwrap();
        assert_eq!(metadata.len(), bytes.len() as u64);
        match tier(path).as_str() {
            "remote" => assert_eq!(metadata.blocks(), 1),
            _ => assert!(metadata.blocks() >= FILE_BYTES as u64 / 512),
        }
    }
    let (path, bytes) = gone(&files);
    assert!(std::fs::read(path).unwrap() == *bytes);
    eventually("the kernel to hear of it", || {
        (path.metadata().unwrap().blocks() >= FILE_BYTES as u64 / 512).then_some(())
    });
}
