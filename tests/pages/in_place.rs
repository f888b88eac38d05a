//! A page written under its own name appears after the last close.

use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::PathBuf;
use std::process::{Command, Stdio};

use crate::common::forks::{no_forks, spawn_with};
use crate::common::sys::{
    assert_errno, close, duplicate, errno, map_mut, open, rename, sync_directory, write_and_close,
};
use crate::common::{Mode, Model, Mount, eventually};

in_both_modes!(
    it_appears_at_close,
    it_is_listed_without_a_lookup,
    a_refused_page_fails_close_and_is_kept,
    other_descriptors_neither_publish_nor_destroy,
    a_child_that_inherits_neither_publishes_nor_destroys,
    a_mapping_keeps_it_back,
    writers_of_one_name_do_not_mix,
    unlinking_and_renaming_what_is_being_written,
    a_directory_that_goes_takes_along_what_is_being_written,
    a_directory_that_is_replaced_does_too,
);

fn prepared(mode: Mode) -> (Mount, Model) {
    let mount = Mount::new(mode);
    let model = Model::small();
    model.install(&mount);
    (mount, model)
}

const NEW: i32 = libc::O_RDWR | libc::O_CREAT | libc::O_EXCL;

fn it_appears_at_close(mode: Mode) {
    let (mount, model) = prepared(mode);
    let _quiet = no_forks();
    for round in 0..200 {
        let start = round * 32;
        let path = model.page_path(&mount, "chat", 0, start);
        let page = model.page(0, start, round);
        let file = open(&path, NEW).unwrap();
        file.write_all_at(&page, 0).unwrap();
        assert_errno(std::fs::metadata(&path), libc::ENOENT);
        assert_errno(open(&path, libc::O_RDONLY), libc::ENOENT);
        assert_eq!(file.metadata().unwrap().len(), page.len() as u64);
        close(file).unwrap();
        if round % 2 == 0 {
            let found = std::fs::metadata(&path).unwrap();
            assert_eq!(found.len(), page.len() as u64, "round {round}");
        }
        assert_eq!(std::fs::read(&path).unwrap(), page, "round {round}");
    }
    assert_eq!(mount.status("pages"), "200");
    assert_eq!(mount.errors(), [] as [String; 0]);
}

fn it_is_listed_without_a_lookup(mode: Mode) {
    let (mount, model) = prepared(mode);
    let _quiet = no_forks();
    for round in 0..50 {
        let path = model.page_path(&mount, &round.to_string(), 0, 0);
        write_and_close(&path, &model.page(0, 0, round)).unwrap();
        let listed: Vec<_> = std::fs::read_dir(path.parent().unwrap())
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .collect();
        assert_eq!(listed, [path]);
    }
}

fn a_refused_page_fails_close_and_is_kept(mode: Mode) {
    let (mount, model) = prepared(mode);
    let path = model.page_path(&mount, "chat", 0, 0);
    let mut page = model.page(0, 0, 1);
    page.truncate(8000);
    assert_errno(write_and_close(&path, &page), libc::EINVAL);
    assert_errno(std::fs::metadata(&path), libc::ENOENT);
    let kept = eventually("the bytes in quarantine", || mount.quarantined().pop());
    assert!(std::fs::read(&kept).unwrap() == page);
    let reason = std::fs::read_to_string(kept.with_extension("reason")).unwrap();
    let name = "models/small/sequences/chat/000/0000000.safetensors";
    assert!(reason.contains(name), "{reason}");
    let errors = mount.errors();
    assert_eq!(errors.len(), 1, "{errors:?}");
    assert!(errors[0].contains(name) && errors[0].contains("8000 bytes"), "{errors:?}");
    let refused = mount.metric("kvfs_pages_refused_total{reason=\"size\"}");
    assert_eq!(refused, 1);
    assert_eq!(mount.status("quarantined_objects"), "1");

    // The name is free for a better one.
    let page = model.page(0, 0, 1);
    write_and_close(&path, &page).unwrap();
    assert!(std::fs::read(&path).unwrap() == page);
}

fn other_descriptors_neither_publish_nor_destroy(mode: Mode) {
    let (mount, model) = prepared(mode);
    let _quiet = no_forks();
    let path = model.page_path(&mount, "chat", 0, 0);
    let page = model.page(0, 0, 1);
    let file = open(&path, NEW).unwrap();
    file.write_all_at(&page[..4096], 0).unwrap();
    // What there is so far is no page, and close() says so, but the writer goes on.
    assert_errno(close(duplicate(&file)), libc::EINVAL);
    assert_errno(std::fs::metadata(&path), libc::ENOENT);
    file.write_all_at(&page[4096..], 4096).unwrap();
    close(duplicate(&file)).unwrap();
    assert_errno(std::fs::metadata(&path), libc::ENOENT);
    let last = duplicate(&file);
    close(file).unwrap();
    assert_errno(std::fs::metadata(&path), libc::ENOENT);
    close(last).unwrap();
    assert!(std::fs::read(&path).unwrap() == page);
    assert_eq!(mount.quarantined(), [] as [PathBuf; 0]);
}

fn a_child_that_inherits_neither_publishes_nor_destroys(mode: Mode) {
    let (mount, model) = prepared(mode);
    let path = model.page_path(&mount, "chat", 0, 0);
    let page = model.page(0, 0, 1);
    let file = open(&path, NEW).unwrap();
    file.write_all_at(&page, 0).unwrap();
    // A child has a copy of the descriptor, and closes it by ending.
    let mut short = spawn_with(&mut Command::new("true"), &file).unwrap();
    assert!(short.wait().unwrap().success());
    assert_errno(std::fs::metadata(&path), libc::ENOENT);
    // This one outlives our descriptor.
    let mut command = Command::new("cat");
    let mut long = spawn_with(command.stdin(Stdio::piped()), &file).unwrap();
    let _quiet = no_forks();
    close(file).unwrap();
    assert_errno(std::fs::metadata(&path), libc::ENOENT);
    drop(long.stdin.take());
    assert!(long.wait().unwrap().success());
    assert!(std::fs::read(&path).unwrap() == page);
}

fn a_mapping_keeps_it_back(mode: Mode) {
    let (mount, model) = prepared(mode);
    let _quiet = no_forks();
    let path = model.page_path(&mount, "chat", 0, 0);
    let page = model.page(0, 0, 1);
    let file = open(&path, NEW).unwrap();
    file.set_len(page.len() as u64).unwrap();
    let mut mapped = map_mut(&file);
    mapped.copy_from_slice(&page);
    close(file).unwrap();
    if mode == Mode::Passthrough {
        // The mapping can still change the bytes.
        assert_errno(std::fs::metadata(&path), libc::ENOENT);
        sync_directory(path.parent().unwrap()).unwrap();
        assert_errno(std::fs::metadata(&path), libc::ENOENT);
    }
    mapped.flush().unwrap();
    drop(mapped);
    assert!(std::fs::read(&path).unwrap() == page);
    let stat = std::fs::metadata(&path).unwrap();
    sync_directory(path.parent().unwrap()).unwrap();
    assert_eq!(std::fs::metadata(&path).unwrap().ino(), stat.ino());
    assert!(std::fs::read(&path).unwrap() == page);
}

fn writers_of_one_name_do_not_mix(mode: Mode) {
    let (mount, model) = prepared(mode);
    let _quiet = no_forks();
    let path = model.page_path(&mount, "chat", 0, 0);
    let pages = [1, 2].map(|seed| model.page(0, 0, seed));
    let first = open(&path, NEW).unwrap();
    first.write_all_at(&pages[0], 0).unwrap();
    // The name is not there yet, so another writer may make it as well.
    let second = open(&path, NEW).unwrap();
    second.write_all_at(&pages[1], 0).unwrap();
    close(first).unwrap();
    assert!(std::fs::read(&path).unwrap() == pages[0]);
    close(second).unwrap();
    // The kernel had the name in its cache and is told that it has changed.
    eventually("the second writer's page", || {
        (std::fs::read(&path).unwrap() == pages[1]).then_some(())
    });
    assert_eq!(mount.status("pages"), "1");
}

fn unlinking_and_renaming_what_is_being_written(mode: Mode) {
    let (mount, model) = prepared(mode);
    let _quiet = no_forks();
    let path = model.page_path(&mount, "chat", 0, 0);
    let page = model.page(0, 0, 1);
    let file = open(&path, NEW).unwrap();
    file.write_all_at(&page, 0).unwrap();
    assert_errno(std::fs::remove_file(&path), libc::ENOENT);
    assert_errno(rename(&path, mount.files("x")), libc::ENOENT);
    let descriptor = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
    assert_eq!(std::fs::metadata(descriptor).unwrap().len(), 8192);
    // A file of an ordinary name becomes the page meanwhile.
    let other = model.page(0, 0, 2);
    write_and_close(mount.files("other"), &other).unwrap();
    rename(mount.files("other"), &path).unwrap();
    assert!(std::fs::read(&path).unwrap() == other);
    close(file).unwrap();
    // The kernel had the name in its cache and is told that it has changed.
    eventually("the page that was written in place", || {
        (std::fs::read(&path).unwrap() == page).then_some(())
    });
    std::fs::remove_file(&path).unwrap();
    assert_errno(std::fs::metadata(&path), libc::ENOENT);
}

fn a_directory_that_goes_takes_along_what_is_being_written(mode: Mode) {
    let (mount, model) = prepared(mode);
    let _quiet = no_forks();
    let path = model.page_path(&mount, "chat", 0, 0);
    let file = open(&path, NEW).unwrap();
    file.write_all_at(&model.page(0, 0, 1), 0).unwrap();
    std::fs::remove_dir(path.parent().unwrap()).unwrap();
    assert_errno(open(&path, NEW), libc::ENOENT);
    let outcome = close(file);
    assert!(matches!(errno(&outcome), 0 | libc::ENOENT), "{outcome:?}");
    eventually("the file to go", || {
        sync_directory(mount.path()).unwrap();
        (mount.staging().is_empty() && mount.status("uncommitted_changes") == "0").then_some(())
    });
}

fn a_directory_that_is_replaced_does_too(mode: Mode) {
    let (mount, model) = prepared(mode);
    let held = mount.status_number("inodes_held");
    for round in 0..20 {
        let path = model.page_path(&mount, "replaced", 0, 0);
        let other = model.layer(&mount, "other", 0);
        let file = open(&path, NEW).unwrap();
        file.write_all_at(&model.page(0, 0, round), 0).unwrap();
        rename(&other, path.parent().unwrap()).unwrap();
        drop(file);
        assert_errno(std::fs::metadata(&path), libc::ENOENT);
        std::fs::remove_dir_all(model.sequence(&mount, "replaced")).unwrap();
    }
    std::fs::remove_dir_all(model.sequence(&mount, "other")).unwrap();
    sync_directory(mount.path()).unwrap();
    eventually("the bytes to go", || mount.staging().is_empty().then_some(()));
    // Some are those of directories that the kernel has not forgotten yet.
    let left = mount.status_number("inodes_held") - held;
    assert!(left < 20, "{left} inodes are held");
    // A page whose writer is done is a name, whoever has seen it.
    let path = model.page_path(&mount, "replaced", 0, 0);
    let other = model.layer(&mount, "other", 0);
    write_and_close(&path, &model.page(0, 0, 1)).unwrap();
    assert_errno(rename(&other, path.parent().unwrap()), libc::ENOTEMPTY);
    assert_eq!(std::fs::read(&path).unwrap(), model.page(0, 0, 1));
}
