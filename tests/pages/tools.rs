//! The tools that people use on directories: rsync, cp, mv, tar, du, find, ls.

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::common::forks::shell;
use crate::common::sys::{open, set_modified, setxattr, write, write_and_close};
use crate::common::{Mode, Model, Mount, fill};

in_both_modes!(
    rsync_out_and_back,
    rsync_keeps_the_users_attributes,
    rsync_updates_a_growing_sequence,
    cp_copies,
    cp_shares_links,
    mv_moves_sequences,
    nothing_virtual_shows,
    tar_there_and_back,
);

/// A model with two sequences: three pages in each of two layers, a tail, tokens, and files that
/// are none of these.
fn populated(mode: Mode) -> (Mount, Model) {
    let mount = Mount::new(mode);
    let model = Model::small();
    model.install(&mount);
    for (seed, sequence) in [(1, "a"), (2, "b c")] {
        for layer in 0..2 {
            for start in [0, 32, 64] {
                let path = model.page_path(&mount, sequence, layer, start);
                let page = model.page(layer, start, seed * 1000 + start);
                write_and_close(&path, &page).unwrap();
                let seconds = 1_600_000_000 + start;
                let time = std::time::UNIX_EPOCH + std::time::Duration::new(seconds, 123_456_789);
                set_modified(&path, time).unwrap();
            }
            let tail = model.tail_path(&mount, sequence, layer, 96);
            write_and_close(&tail, &model.rows(seed, 5)).unwrap();
        }
        write_and_close(model.tokens_path(&mount, sequence), &fill(seed, 404)).unwrap();
    }
    write_and_close(model.directory(&mount).join("notes.txt"), b"notes").unwrap();
    write_and_close(mount.files("slot.bin"), &fill(9, 10_000)).unwrap();
    (mount, model)
}

/// Content, size, mode and time of every file below a directory, by path.
type Tree = BTreeMap<PathBuf, (Vec<u8>, u32, i64, i64)>;

fn tree(root: &Path) -> Tree {
    let mut found = Tree::new();
    let mut directories = vec![root.to_owned()];
    while let Some(directory) = directories.pop() {
        for entry in std::fs::read_dir(&directory).unwrap() {
            let path = entry.unwrap().path();
            let stat = std::fs::symlink_metadata(&path).unwrap();
            if stat.is_dir() {
                directories.push(path);
                continue;
            }
            let bytes = std::fs::read(&path).unwrap();
            assert_eq!(bytes.len() as u64, stat.len());
            let name = path.strip_prefix(root).unwrap().to_owned();
            found.insert(name, (bytes, stat.mode(), stat.mtime(), stat.mtime_nsec()));
        }
    }
    found
}

#[track_caller]
fn assert_same_tree(left: &Tree, right: &Tree) {
    let names = |tree: &Tree| tree.keys().cloned().collect::<Vec<_>>();
    assert_eq!(names(left), names(right));
    for (name, (bytes, mode, seconds, nanoseconds)) in left {
        let other = &right[name];
        assert!(*bytes == other.0, "{} has other bytes", name.display());
        assert_eq!(
            (*mode, *seconds, *nanoseconds),
            (other.1, other.2, other.3),
            "{}",
            name.display()
        );
    }
}

fn rsync_out_and_back(mode: Mode) {
    require!(rsync);
    let (mount, _) = populated(mode);
    let backup = mount.beside("backup");
    let (from, to) = (mount.path().display(), backup.display());
    shell(Path::new("/"), &format!("rsync -a '{from}/' '{to}/'"));
    let original = tree(mount.path());
    assert_eq!(original.len(), 21);
    assert_same_tree(&original, &tree(&backup));
    // A second time there is nothing to do, in either direction.
    for (from, to) in [(mount.path(), backup.as_path()), (&backup, mount.path())] {
        let (from, to) = (from.display(), to.display());
        for options in ["-ai", "-aci", "-aHi"] {
            let moved = shell(Path::new("/"), &format!("rsync {options} '{from}/' '{to}/'"));
            assert_eq!(moved, "", "{from} to {to}");
        }
    }
    // Into an empty mount, and into one that was wiped.
    let mut empty = Mount::new(mode);
    let restored = empty.path().display().to_string();
    shell(Path::new("/"), &format!("rsync -a '{to}/' '{restored}/'"));
    assert_same_tree(&original, &tree(empty.path()));
    assert_eq!(empty.status("pages"), "12");
    assert_eq!(empty.errors(), [] as [String; 0]);
    let again = shell(Path::new("/"), &format!("rsync -ai '{to}/' '{restored}/'"));
    assert_eq!(again, "");
    empty.remount();
    assert_same_tree(&original, &tree(empty.path()));
    shell(mount.path(), "rm -r models/* files/*");
    shell(Path::new("/"), &format!("rsync -a --inplace '{to}/' '{from}/'"));
    assert_same_tree(&original, &tree(mount.path()));
    assert_eq!(mount.errors(), [] as [String; 0]);
    // What came back is what it was: pages are sealed, tails grow.
    let model = Model::small();
    let page = model.page_path(&empty, "a", 0, 0);
    crate::common::sys::assert_errno(open(&page, libc::O_WRONLY), libc::EPERM);
    let tail = model.tail_path(&empty, "a", 0, 96);
    let tail = open(tail, libc::O_WRONLY | libc::O_APPEND).unwrap();
    write(&tail, &model.rows(7, 27)).unwrap();
    assert!(model.page_path(&empty, "a", 0, 96).exists());
}

fn rsync_keeps_the_users_attributes(mode: Mode) {
    require!(rsync);
    let (mount, model) = populated(mode);
    let path = model.page_path(&mount, "a", 1, 32);
    setxattr(&path, "user.note", b"kept").unwrap();
    setxattr(model.tokens_path(&mount, "a"), "user.note", b"ids").unwrap();
    let backup = mount.beside("backup");
    let (from, to) = (mount.path().display(), backup.display());
    shell(Path::new("/"), &format!("rsync -aX '{from}/' '{to}/'"));
    let empty = Mount::new(mode);
    let restored = empty.path().display();
    shell(Path::new("/"), &format!("rsync -aX '{to}/' '{restored}/'"));
    assert_same_tree(&tree(mount.path()), &tree(empty.path()));
    let note = |path| crate::common::sys::getxattr(path, "user.note").unwrap();
    assert_eq!(note(model.page_path(&empty, "a", 1, 32)), "kept");
    assert_eq!(note(model.tokens_path(&empty, "a")), "ids");
    let again = shell(Path::new("/"), &format!("rsync -aXi '{to}/' '{restored}/'"));
    assert_eq!(again, "");
}

fn rsync_updates_a_growing_sequence(mode: Mode) {
    require!(rsync);
    let (mount, model) = populated(mode);
    let replica = Mount::new(mode);
    let (from, to) = (mount.path().display(), replica.path().display());
    let sync = || shell(Path::new("/"), &format!("rsync -a --delete '{from}/' '{to}/'"));
    sync();
    let append = libc::O_WRONLY | libc::O_APPEND;
    let tail = open(model.tail_path(&mount, "a", 0, 96), append).unwrap();
    write(&tail, &model.rows(3, 5)).unwrap();
    let tokens = open(model.tokens_path(&mount, "a"), append).unwrap();
    write(&tokens, &fill(3, 20)).unwrap();
    sync();
    assert_same_tree(&tree(mount.path()), &tree(replica.path()));
    // The tail becomes a page and the replica's tail goes.
    write(&tail, &model.rows(4, 22)).unwrap();
    sync();
    assert_same_tree(&tree(mount.path()), &tree(replica.path()));
    assert!(model.page_path(&replica, "a", 0, 96).exists());
    assert_eq!(replica.errors(), [] as [String; 0]);
}

fn cp_copies(mode: Mode) {
    let (mount, model) = populated(mode);
    shell(&model.sequence(&mount, ""), "cp -a a copy");
    let (from, to) = (model.sequence(&mount, "a"), model.sequence(&mount, "copy"));
    assert_same_tree(&tree(&from), &tree(&to));
    let out = mount.beside("out");
    shell(&model.sequence(&mount, ""), &format!("cp -a a '{}'", out.display()));
    assert_same_tree(&tree(&from), &tree(&out));
    shell(&out, &format!("cp -r . '{}'", model.sequence(&mount, "in").display()));
    let copied = tree(&model.sequence(&mount, "in"));
    let names: Vec<_> = copied.keys().cloned().collect();
    assert_eq!(names, tree(&out).keys().cloned().collect::<Vec<_>>());
    assert!(copied.iter().all(|(name, file)| tree(&out)[name].0 == file.0));
    assert_eq!(mount.errors(), [] as [String; 0]);
}

fn cp_shares_links(mode: Mode) {
    let (mount, model) = populated(mode);
    shell(&model.sequence(&mount, ""), "cp -al a fork");
    let (from, to) = (model.sequence(&mount, "a"), model.sequence(&mount, "fork"));
    assert_same_tree(&tree(&from), &tree(&to));
    let inode = |path: PathBuf| {
        let stat = std::fs::metadata(path).unwrap();
        (stat.ino(), stat.nlink())
    };
    for layer in 0..2 {
        for start in [0, 32, 64] {
            let one = inode(model.page_path(&mount, "a", layer, start));
            assert_eq!(one, inode(model.page_path(&mount, "fork", layer, start)));
            assert_eq!(one.1, 2);
        }
        // What grows is a copy of its own.
        let (one, other) =
            (model.tail_path(&mount, "a", layer, 96), model.tail_path(&mount, "fork", layer, 96));
        assert_ne!(inode(one.clone()), inode(other.clone()));
        let tail = open(&other, libc::O_WRONLY | libc::O_APPEND).unwrap();
        write(&tail, &model.rows(8, 1)).unwrap();
        assert!(std::fs::read(&one).unwrap() == model.rows(1, 5));
        let grown = [model.rows(1, 5), model.rows(8, 1)].concat();
        assert!(std::fs::read(&other).unwrap() == grown);
    }
    let tokens = model.tokens_path(&mount, "a");
    let tokens = open(tokens, libc::O_WRONLY | libc::O_APPEND).unwrap();
    write(&tokens, b"abcd").unwrap();
    let other = std::fs::read(model.tokens_path(&mount, "fork")).unwrap();
    assert!(other == fill(1, 404));
    assert_eq!(mount.status("pages"), "12");
    // The fork lives on alone.
    shell(&model.sequence(&mount, ""), "rm -r a");
    assert_eq!(inode(model.page_path(&mount, "fork", 0, 0)).1, 1);
    let page = std::fs::read(model.page_path(&mount, "fork", 0, 0)).unwrap();
    assert!(page == model.page(0, 0, 1000));
}

fn mv_moves_sequences(mode: Mode) {
    let (mount, model) = populated(mode);
    let inode = |path: PathBuf| std::fs::metadata(path).unwrap().ino();
    let before = inode(model.page_path(&mount, "a", 0, 0));
    let content = tree(&model.sequence(&mount, "a"));
    shell(&model.sequence(&mount, ""), "mv a moved");
    assert_eq!(before, inode(model.page_path(&mount, "moved", 0, 0)));
    assert_same_tree(&content, &tree(&model.sequence(&mount, "moved")));
    // Another model of the same cache: mv copies, and every page is checked.
    let other = Model::small().named("other");
    other.install(&mount);
    shell(&mount.join("models"), "mv small/sequences/moved other/sequences/");
    assert_same_tree(&content, &tree(&other.sequence(&mount, "moved")));
    assert!(!model.sequence(&mount, "moved").exists());
    // Out of the models and back.
    shell(mount.path(), "mv models/other files/");
    assert_same_tree(&content, &tree(&mount.files("other/sequences/moved")));
    shell(mount.path(), "mv files/other models/back");
    assert_same_tree(&content, &tree(&mount.join("models/back/sequences/moved")));
    assert_eq!(mount.errors(), [] as [String; 0]);
}

fn nothing_virtual_shows(mode: Mode) {
    let (mount, _) = populated(mode);
    let listed = shell(mount.path(), "find . | sort; ls -laR");
    for word in [".kvfs", "prefixes", "slots", "status"] {
        assert!(!listed.contains(word), "{word} in {listed}");
    }
    assert_eq!(shell(mount.path(), "ls -A"), "files\nmodels\n");
    assert_eq!(shell(mount.path(), "find . -type f | wc -l").trim(), "21");
    let bytes: u64 = tree(mount.path()).values().map(|file| file.0.len() as u64).sum();
    let apparent = "find . -type f -print0 | du -b --files0-from=- -c | tail -n1 | cut -f1";
    assert_eq!(shell(mount.path(), apparent).trim(), bytes.to_string());
    let blocks: u64 = shell(mount.path(), "du -sk . | cut -f1").trim().parse().unwrap();
    assert!(blocks * 1024 >= bytes, "{blocks} KiB for {bytes} bytes");
    assert!(shell(mount.path(), "stat -c %s .kvfs/status").trim().parse::<u64>().unwrap() > 0);
    assert_eq!(shell(mount.path(), "find . -type f -empty | wc -l").trim(), "0");
}

fn tar_there_and_back(mode: Mode) {
    let (mount, _) = populated(mode);
    let archive = mount.beside("archive.tar");
    shell(mount.path(), &format!("tar -cSf '{}' models files", archive.display()));
    let empty = Mount::new(mode);
    shell(empty.path(), &format!("tar -xSf '{}' --delay-directory-restore", archive.display()));
    let (left, right) = (tree(mount.path()), tree(empty.path()));
    assert_eq!(left.len(), right.len());
    for (name, file) in &left {
        assert!(file.0 == right[name].0, "{}", name.display());
        assert_eq!(file.2, right[name].2, "{}", name.display());
    }
    assert_eq!(empty.status("pages"), "12");
    assert_eq!(empty.errors(), [] as [String; 0]);
}
