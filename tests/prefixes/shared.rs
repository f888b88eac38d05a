//! Pages of equal bytes are stored once, unless somebody could tell.

use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::time::{Duration, SystemTime};

use crate::common::sys::{getxattr, open, rename, set_modified, setxattr, write_and_close};
use crate::common::{Mode, Model, Mount};
use crate::writer::Sequence;

in_both_modes!(
    the_same_page_of_two_sequences_is_one_file,
    a_page_that_somebody_could_tell_apart_stays_apart,
    sharing_ends_with_a_name,
    rows_that_fill_a_page_share_it_too,
    sharing_outlives_the_daemon,
);

fn inode(path: impl AsRef<std::path::Path>) -> u64 {
    path.as_ref().metadata().unwrap().ino()
}

/// Writes a page under a temporary name and renames it.
fn publish(mount: &Mount, model: &Model, sequence: &str, seed: u64) -> std::path::PathBuf {
    let path = model.page_path(mount, sequence, 0, 0);
    let temporary = path.with_extension("tmp");
    write_and_close(&temporary, &model.page(0, 0, seed)).unwrap();
    rename(temporary, &path).unwrap();
    path
}

fn prepared(mode: Mode) -> (Mount, Model) {
    let (mount, model) = (Mount::new(mode), Model::small());
    model.install(&mount);
    (mount, model)
}

fn synced_objects(mount: &Mount) -> usize {
    crate::common::sys::sync_directory(mount.path()).unwrap();
    mount.objects().len()
}

fn the_same_page_of_two_sequences_is_one_file(mode: Mode) {
    let (mount, model) = prepared(mode);
    let one = publish(&mount, &model, "one", 1);
    let before = synced_objects(&mount);
    let time = one.metadata().unwrap().modified().unwrap();
    let two = publish(&mount, &model, "two", 1);
    assert_eq!(inode(&one), inode(&two));
    assert_eq!(one.metadata().unwrap().nlink(), 2);
    assert_eq!(two.metadata().unwrap().modified().unwrap(), time);
    assert_eq!(synced_objects(&mount), before);
    assert_eq!(mount.status("pages"), "1");
    assert!(std::fs::read(&two).unwrap() == model.page(0, 0, 1));
    // Another layer, another start and other bytes are another page.
    let other = publish(&mount, &model, "three", 2);
    assert_ne!(inode(&other), inode(&one));
    let elsewhere = model.page_path(&mount, "two", 0, 32);
    write_and_close(&elsewhere, &model.page(0, 32, 1)).unwrap();
    assert_ne!(inode(&elsewhere), inode(&one));
    // Written in place it is shared as well.
    let third = model.page_path(&mount, "four", 0, 0);
    write_and_close(&third, &model.page(0, 0, 1)).unwrap();
    assert_eq!(inode(&third), inode(&one));
    assert_eq!(one.metadata().unwrap().nlink(), 3);
}

fn a_page_that_somebody_could_tell_apart_stays_apart(mode: Mode) {
    let (mount, model) = prepared(mode);
    let one = publish(&mount, &model, "one", 1);
    let publish_changed = |sequence: &str, change: &dyn Fn(&std::path::Path)| {
        let path = model.page_path(&mount, sequence, 0, 0);
        let temporary = path.with_extension("tmp");
        write_and_close(&temporary, &model.page(0, 0, 1)).unwrap();
        change(&temporary);
        rename(temporary, &path).unwrap();
        path
    };
    let then = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000_000);
    let dated = publish_changed("dated", &|path| set_modified(path, then).unwrap());
    assert_ne!(inode(&dated), inode(&one));
    assert_eq!(dated.metadata().unwrap().modified().unwrap(), then);
    // A backup of shared pages gives both the same time: they share again.
    let dated_alike = publish_changed("alike", &|path| set_modified(path, then).unwrap());
    assert_eq!(inode(&dated_alike), inode(&dated));
    let private = publish_changed("private", &|path| {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).unwrap();
    });
    assert_ne!(inode(&private), inode(&one));
    let labelled =
        publish_changed("labelled", &|path| setxattr(path, "user.label", b"mine").unwrap());
    assert_ne!(inode(&labelled), inode(&one));
    assert_eq!(getxattr(&labelled, "user.label").unwrap(), "mine");
    let salted = Model::with(|fields| fields.salt = Some("pepper".to_owned())).named("salted");
    salted.install(&mount);
    assert_ne!(inode(publish(&mount, &salted, "one", 1)), inode(&one));
}

fn sharing_ends_with_a_name(mode: Mode) {
    let (mount, model) = prepared(mode);
    let one = publish(&mount, &model, "one", 1);
    let two = publish(&mount, &model, "two", 1);
    assert_eq!(inode(&one), inode(&two));
    let reader = open(&one, libc::O_RDONLY).unwrap();
    std::fs::remove_file(&one).unwrap();
    assert!(std::fs::read(&two).unwrap() == model.page(0, 0, 1));
    assert_eq!(two.metadata().unwrap().nlink(), 1);
    // Replacing one name leaves the other what it was.
    let again = publish(&mount, &model, "one", 1);
    assert_eq!(inode(&again), inode(&two));
    publish(&mount, &model, "one", 2);
    assert!(std::fs::read(&two).unwrap() == model.page(0, 0, 1));
    assert!(std::fs::read(&again).unwrap() == model.page(0, 0, 2));
    std::fs::remove_file(&two).unwrap();
    drop(reader);
    // The last name takes the entry along: nobody finds what is gone.
    let fresh = publish(&mount, &model, "two", 1);
    assert_eq!(fresh.metadata().unwrap().nlink(), 1);
    assert!(std::fs::read(&fresh).unwrap() == model.page(0, 0, 1));
}

fn rows_that_fill_a_page_share_it_too(mode: Mode) {
    let (mount, model) = prepared(mode);
    let tokens: Vec<u32> = (0..40).collect();
    let [one, two] = ["one", "two"].map(|name| {
        let mut sequence = Sequence::new(&model, name);
        sequence.append(&mount, &model, &tokens);
        sequence
    });
    for layer in 0..2 {
        let [one, two] = [&one, &two].map(|it| it.page(&mount, &model, layer, 0));
        assert_eq!(inode(&one), inode(&two));
        assert_eq!(one.metadata().unwrap().nlink(), 2);
    }
}

fn sharing_outlives_the_daemon(mode: Mode) {
    let (mut mount, model) = prepared(mode);
    let one = publish(&mount, &model, "one", 1);
    let two = publish(&mount, &model, "two", 1);
    synced_objects(&mount);
    mount.crash();
    assert_eq!(inode(&one), inode(&two));
    let three = publish(&mount, &model, "three", 1);
    assert_eq!(inode(&one), inode(&three));
    mount.unmount();
    let mut fsck = std::process::Command::new(env!("CARGO_BIN_EXE_kvfs"));
    let outcome = fsck.arg("fsck").arg(mount.store()).output().unwrap();
    assert!(outcome.status.success(), "{}", String::from_utf8_lossy(&outcome.stdout));
}
