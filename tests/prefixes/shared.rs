//! Pages of equal bytes are stored once, unless somebody could tell.

use std::fs::Permissions;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use crate::common::sys::{getxattr, open, rename, set_modified, setxattr, write_and_close};
use crate::common::{Mode, Model, Mount};
use crate::writer::Sequence;

in_both_modes!(
    the_same_page_of_two_sequences_is_one_file,
    a_page_that_somebody_could_tell_apart_stays_apart,
    a_page_of_another_owner_or_group_stays_apart,
    a_page_with_a_time_of_its_own_stays_apart,
    sharing_ends_with_a_name,
    rows_that_fill_a_page_share_it_too,
    sharing_outlives_the_daemon,
);

fn inode(path: impl AsRef<Path>) -> u64 {
    path.as_ref().metadata().unwrap().ino()
}

/// Writes a page under a temporary name and renames it.
fn publish(mount: &Mount, model: &Model, sequence: &str, seed: u64) -> PathBuf {
    publish_changed(mount, model, sequence, seed, |_| {})
}

/// The same, with a change to the file before it is renamed.
fn publish_changed(
    mount: &Mount, model: &Model, sequence: &str, seed: u64, change: impl Fn(&Path),
) -> PathBuf {
    let path = model.page_path(mount, sequence, 0, 0);
    let temporary = path.with_extension("tmp");
    write_and_close(&temporary, &model.page(0, 0, seed)).unwrap();
    change(&temporary);
    rename(temporary, &path).unwrap();
    path
}

fn prepared(mode: Mode) -> (Mount, Model) {
    let (mount, model) = (Mount::with_own_files(mode, &[]), Model::small());
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

/// What somebody may do to a page before it gets its name, and how everybody can see it then.
struct Peculiarity {
    name: &'static str,
    give: fn(&Path),
    is_there: fn(&Path) -> bool,
}

/// Each with bytes of its own: a page is compared with the last one that was noted for its bytes.
fn stays_apart(mount: &Mount, model: &Model, seed: u64, peculiarity: &Peculiarity) {
    let Peculiarity { name, give, is_there } = peculiarity;
    let plain = publish(mount, model, &format!("plain-{name}"), seed);
    let equal = publish(mount, model, &format!("equal-{name}"), seed);
    assert_eq!(inode(&equal), inode(&plain), "{name}: pages of these bytes are shared");
    let peculiar = publish_changed(mount, model, &format!("peculiar-{name}"), seed, give);
    assert_ne!(inode(&peculiar), inode(&plain), "{name}");
    assert!(is_there(&peculiar) && !is_there(&plain), "{name}");
    assert_eq!(peculiar.metadata().unwrap().nlink(), 1, "{name}");
    // The other way round: now the page that is found by its bytes is the peculiar one.
    let late = publish(mount, model, &format!("late-{name}"), seed);
    assert_ne!(inode(&late), inode(&peculiar), "{name}, the plain one later");
    assert!(is_there(&peculiar) && !is_there(&late), "{name}, the plain one later");
    assert!(std::fs::read(&peculiar).unwrap() == model.page(0, 0, seed));
}

fn a_page_that_somebody_could_tell_apart_stays_apart(mode: Mode) {
    let (mount, model) = prepared(mode);
    let is_private = |path: &Path| path.metadata().unwrap().mode() & 0o7777 == 0o600;
    let private = Peculiarity {
        name: "private",
        give: |path| std::fs::set_permissions(path, Permissions::from_mode(0o600)).unwrap(),
        is_there: is_private,
    };
    stays_apart(&mount, &model, 1, &private);
    let labelled = Peculiarity {
        name: "labelled",
        give: |path| setxattr(path, "user.label", b"mine").unwrap(),
        is_there: |path| getxattr(path, "user.label").is_ok_and(|label| label == "mine"),
    };
    stays_apart(&mount, &model, 2, &labelled);
    // Where both are private, nobody can tell.
    let alike = publish_changed(&mount, &model, "private", 3, private.give);
    let another = publish_changed(&mount, &model, "another", 3, private.give);
    assert_eq!(inode(&alike), inode(&another));
    assert!(is_private(&another));
    let salted = Model::with(|fields| fields.salt = Some("pepper".to_owned())).named("salted");
    salted.install(&mount);
    let one = publish(&mount, &model, "one", 4);
    assert_ne!(inode(publish(&mount, &salted, "one", 4)), inode(&one));
}

fn a_page_of_another_owner_or_group_stays_apart(mode: Mode) {
    crate::require!(root);
    let (mount, model) = prepared(mode);
    let owned = Peculiarity {
        name: "owned",
        give: |path| chown(path, Some(1001), None).unwrap(),
        is_there: |path| path.metadata().unwrap().uid() == 1001,
    };
    stays_apart(&mount, &model, 1, &owned);
    let grouped = Peculiarity {
        name: "grouped",
        give: |path| chown(path, None, Some(1001)).unwrap(),
        is_there: |path| path.metadata().unwrap().gid() == 1001,
    };
    stays_apart(&mount, &model, 2, &grouped);
}

fn a_page_with_a_time_of_its_own_stays_apart(mode: Mode) {
    let (mount, model) = prepared(mode);
    let one = publish(&mount, &model, "one", 1);
    let then = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000_000);
    let date = |path: &Path| set_modified(path, then).unwrap();
    let dated = publish_changed(&mount, &model, "dated", 1, date);
    assert_ne!(inode(&dated), inode(&one));
    assert_eq!(dated.metadata().unwrap().modified().unwrap(), then);
    // A backup of shared pages gives both the same time: they share again.
    let alike = publish_changed(&mount, &model, "alike", 1, date);
    assert_eq!(inode(&alike), inode(&dated));
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
