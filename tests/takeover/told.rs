//! After a death each file and directory that is not what it was is told to whoever syncs it: whatever was done before, in
//! whatever order, and however much of it a commit had.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{File, OpenOptions, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::common::eventually;
use crate::common::random::Random;
use crate::common::sys::{attribute, close, errno, rename, setxattr, sync_directory};
use crate::deaths::die;
use crate::steps::check_store;
use crate::{any_mode, mounted};

/// What may be lost of a file or directory.
#[derive(Debug, PartialEq, Eq)]
enum State {
    Directory {
        mode: u32,
        attribute: Vec<u8>,
        names: BTreeSet<(PathBuf, u64)>,
    },
    /// What was replaced, and is there again, has no bytes while somebody has it open.
    File {
        mode: u32,
        attribute: Vec<u8>,
        bytes: Option<Vec<u8>>,
    },
}

/// Everything below a directory that can be synced, by the number of its inode.
fn tree(root: &Path) -> BTreeMap<u64, (PathBuf, State)> {
    let (mut found, mut waiting) = (BTreeMap::new(), vec![root.to_owned()]);
    while let Some(path) = waiting.pop() {
        let about = path.symlink_metadata().unwrap();
        if about.is_symlink() {
            continue;
        }
        let (mode, attribute) = (about.mode(), attribute(&path, "user.told").unwrap_or_default());
        let state = if about.is_dir() {
            let entries = std::fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path());
            let entries: Vec<PathBuf> = entries.collect();
            let number = |path: &PathBuf| match path.symlink_metadata() {
                Ok(about) => about.ino(),
                Err(error) => panic!("{} is listed and not found: {error}", path.display()),
            };
            let names = entries.iter().map(|path| (path.clone(), number(path))).collect();
            waiting.extend(entries);
            State::Directory { mode, attribute, names }
        } else {
            State::File { mode, attribute, bytes: std::fs::read(&path).ok() }
        };
        found.insert(about.ino(), (path, state));
    }
    found
}

/// Few names, so that they meet.
struct Names<'a> {
    root: &'a Path,
    random: Random,
}

impl Names<'_> {
    fn directory(&mut self) -> PathBuf {
        match self.random.below(5) {
            0 => self.root.to_owned(),
            1 => self.root.join("0/inner"),
            number => self.root.join((number % 2).to_string()),
        }
    }

    fn any(&mut self) -> PathBuf {
        let name = *self.random.pick(&["a", "b", "c", "inner", "link"]);
        self.directory().join(name)
    }

    fn bytes(&mut self) -> Vec<u8> {
        let length = *self.random.pick(&[0, 1, 100, 5000, 300_000]);
        vec![u8::try_from(self.random.below(251)).unwrap(); length]
    }

    /// Does something, which may have no sense at that moment.
    fn step(&mut self) -> io::Result<()> {
        let path = self.any();
        match self.random.below(16) {
            0..=2 => {
                let mut file = File::create(path)?;
                file.write_all(&self.bytes())?;
                close(file)
            }
            3 | 4 => {
                let file = OpenOptions::new().write(true).open(path)?;
                file.write_all_at(&self.bytes(), self.random.below(6000) as u64)?;
                close(file)
            }
            5 => {
                let file = OpenOptions::new().write(true).open(path)?;
                file.set_len(self.random.below(6000) as u64)?;
                close(file)
            }
            6 | 7 => rename(path, self.any()),
            8 => std::fs::hard_link(path, self.any()),
            9 => std::fs::remove_file(path),
            10 => std::fs::create_dir(path),
            11 => std::fs::remove_dir(path),
            12 => std::os::unix::fs::symlink("a", path),
            13 => {
                let mode = *self.random.pick(&[0o600, 0o644, 0o755]);
                let bits = if path.symlink_metadata()?.is_dir() { 0o100 } else { 0 };
                std::fs::set_permissions(path, Permissions::from_mode(mode | bits))
            }
            14 => {
                setxattr(path, "user.told", &[b'a' + u8::try_from(self.random.below(9)).unwrap()])
            }
            // Where somebody syncs all the time, little is lost.
            _ if self.random.one_in(3) => File::open(path)?.sync_all(),
            _ => Ok(()),
        }
    }
}

/// How many files and directories were told of, and how many of those are what they were.
fn compare(
    opened: &[(u64, File)], before: &BTreeMap<u64, (PathBuf, State)>, root: &Path,
) -> (usize, usize) {
    let after = tree(root);
    let (mut told, mut needless) = (0, 0);
    for (number, file) in opened {
        let (path, was) = &before[number];
        let is = after.get(number).map(|(_, state)| state);
        let outcome = file.sync_all();
        assert!(outcome.is_ok() || errno(&outcome) == libc::EIO, "{}: {outcome:?}", path.display());
        let is_told = outcome.is_err();
        assert!(is_told || is == Some(was), "{} was {was:?}, is {is:?}", path.display());
        told += usize::from(is_told);
        needless += usize::from(is_told && is == Some(was));
    }
    (told, needless)
}

fn round(seed: u64) -> (usize, usize) {
    // Half of the time a commit comes now and then, whatever is being done.
    let interval = if seed.is_multiple_of(2) { "60" } else { "0.02" };
    let mut mount = mounted(any_mode(), &["--keep-mounted", "--commit-interval", interval]);
    let root = mount.files("");
    std::fs::create_dir_all(root.join("0/inner")).unwrap();
    std::fs::create_dir(root.join("1")).unwrap();
    sync_directory(&root).unwrap();
    let mut names = Names { root: &root, random: Random::of(seed) };
    let steps = 10 + names.random.below(150);
    for _ in 0..steps {
        let _ = names.step();
        if names.random.one_in(40) {
            std::thread::sleep(Duration::from_millis(25));
        }
    }
    let before = tree(&root);
    let open =
        |(number, (path, _)): (&u64, &(PathBuf, State))| (*number, File::open(path).unwrap());
    let opened: Vec<(u64, File)> = before.iter().map(open).collect();
    die(&mount);
    let found = compare(&opened, &before, &root);
    drop(opened);
    let has_bytes =
        |(_, state): &(PathBuf, State)| !matches!(state, State::File { bytes: None, .. });
    eventually("all to have bytes", || tree(&root).values().all(has_bytes).then_some(()));
    assert!(mount.unmount().success());
    check_store(&mount);
    found
}

#[test]
fn whatever_is_not_what_it_was_is_told() {
    crate::require!(fuse);
    let variable = |name: &str, otherwise| {
        std::env::var(name).map_or(otherwise, |value| value.parse::<u64>().unwrap())
    };
    let (first, rounds) = (variable("KVFS_TOLD_SEED", 1), variable("KVFS_TOLD_ROUNDS", 10));
    let (mut told, mut needless) = (0, 0);
    for seed in first..first + rounds {
        println!("KVFS_TOLD_SEED={seed}");
        let found = round(seed);
        (told, needless) = (told + found.0, needless + found.1);
    }
    println!("{told} were told of, {needless} of them are what they were");
    assert!(told > 0, "nothing was lost");
}
