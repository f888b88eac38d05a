//! After a death each file and directory that is not what it was is told to whoever syncs it: whatever was done before, in
//! whatever order, and however much of it a commit had.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::fs::{File, OpenOptions, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::common::model::Model;
use crate::common::random::Random;
use crate::common::sys::{attribute, close, errno, rename, setxattr, sync_directory};
use crate::common::{Mount, eventually};
use crate::deaths::{die, wait_until_kept};
use crate::steps::check_store;
use crate::{any_mode, mounted};

/// What may be lost of a file or directory.
#[derive(Debug, PartialEq, Eq)]
enum State {
    Directory {
        mode: u32,
        attribute: Vec<u8>,
        names: BTreeSet<(OsString, u64)>,
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
            let name = |path: &PathBuf| path.file_name().unwrap().to_owned();
            let names = entries.iter().map(|path| (name(path), number(path))).collect();
            waiting.extend(entries);
            State::Directory { mode, attribute, names }
        } else {
            State::File { mode, attribute, bytes: std::fs::read(&path).ok() }
        };
        found.insert(about.ino(), (path, state));
    }
    found
}

/// What is done at random, one step after the other.
trait Work {
    /// Does something, which may have no sense at that moment.
    fn step(&mut self) -> io::Result<()>;

    fn random(&mut self) -> &mut Random;
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
}

impl Work for Names<'_> {
    fn random(&mut self) -> &mut Random {
        &mut self.random
    }

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

/// Pages and rows of two sequences.
struct Pages<'a> {
    mount: &'a Mount,
    model: Model,
    random: Random,
}

impl Pages<'_> {
    fn sequence(&mut self) -> &'static str {
        if self.random.is_true() { "x" } else { "y" }
    }

    fn append(&mut self, path: &Path, bytes: &[u8]) -> io::Result<()> {
        let mut file = OpenOptions::new().append(true).create(true).open(path)?;
        file.write_all(bytes)?;
        if self.random.one_in(20) {
            file.sync_all()?;
        }
        close(file)
    }
}

impl Work for Pages<'_> {
    fn random(&mut self) -> &mut Random {
        &mut self.random
    }

    fn step(&mut self) -> io::Result<()> {
        let (sequence, layer) = (self.sequence(), u32::from(self.random.is_true()));
        let start = 32 * self.random.below(3) as u64;
        let directory = self.model.layer(self.mount, sequence, layer);
        let page = self.model.page_path(self.mount, sequence, layer, start);
        let tail = self.model.tail_path(self.mount, sequence, layer, start);
        match self.random.below(12) {
            number @ 0..=3 => {
                let bytes = self.model.page(layer, start, self.random.next());
                let path = if number == 0 { page.clone() } else { directory.join("page.tmp") };
                let mut file = File::create(&path)?;
                file.write_all(&bytes)?;
                close(file)?;
                if number > 0 { rename(path, page) } else { Ok(()) }
            }
            4..=6 => {
                let tokens = 1 + u32::try_from(self.random.below(20)).unwrap();
                let rows = self.model.rows(self.random.next(), tokens);
                self.append(&tail, &rows)
            }
            7 => {
                let path = self.model.tokens_path(self.mount, sequence);
                let tokens = vec![7; 4 * self.random.below(40)];
                self.append(&path, &tokens)
            }
            8 => std::fs::remove_file(page),
            9 => std::fs::remove_file(tail),
            10 if self.random.one_in(3) => {
                rename(directory.parent().unwrap(), self.model.sequence(self.mount, "z"))
            }
            _ if self.random.one_in(4) => File::open(page)?.sync_all(),
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

/// A mount of which a commit comes now and then half of the time, whatever is being done.
fn begin(seed: u64, options: &[&str]) -> Mount {
    let interval = if seed.is_multiple_of(2) { "60" } else { "0.02" };
    let always = ["--keep-mounted", "--commit-interval", interval];
    let mount = mounted(any_mode(), &[&always, options].concat());
    wait_until_kept(&mount);
    mount
}

/// Works, kills the daemon, and compares.
fn work_and_die(mount: &Mount, root: &Path, work: &mut impl Work) -> (usize, usize) {
    sync_directory(root).unwrap();
    let steps = 10 + work.random().below(150);
    for _ in 0..steps {
        let _ = work.step();
        if work.random().one_in(40) {
            std::thread::sleep(Duration::from_millis(25));
        }
    }
    let before = tree(root);
    let open =
        |(number, (path, _)): (&u64, &(PathBuf, State))| (*number, File::open(path).unwrap());
    let opened: Vec<(u64, File)> = before.iter().map(open).collect();
    die(mount);
    let found = compare(&opened, &before, root);
    drop(opened);
    let has_bytes =
        |(_, state): &(PathBuf, State)| !matches!(state, State::File { bytes: None, .. });
    eventually("all to have bytes", || tree(root).values().all(has_bytes).then_some(()));
    found
}

/// Runs rounds, of each of which it is known how many were told of, and how many of those are what they were.
fn run(round: impl Fn(u64) -> (usize, usize)) {
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

#[test]
fn whatever_is_not_what_it_was_is_told() {
    crate::require!(fuse);
    run(|seed| {
        let mut mount = begin(seed, &[]);
        let root = mount.files("");
        std::fs::create_dir_all(root.join("0/inner")).unwrap();
        std::fs::create_dir(root.join("1")).unwrap();
        let mut names = Names { root: &root, random: Random::of(seed) };
        let found = work_and_die(&mount, &root, &mut names);
        assert!(mount.unmount().success());
        check_store(&mount);
        found
    });
}

#[test]
fn pages_that_are_not_what_they_were_are_told() {
    crate::require!(fuse, root);
    run(|seed| {
        let in_memory = ["--ram", "16M"];
        let mut mount = begin(seed, if seed % 3 == 0 { &in_memory } else { &[] });
        let model = Model::small();
        model.install(&mount);
        let root = model.layer(&mount, "x", 0).ancestors().nth(2).unwrap().to_owned();
        let mut pages = Pages { mount: &mount, model, random: Random::of(seed) };
        let found = work_and_die(&mount, &root, &mut pages);
        assert!(mount.unmount().success());
        check_store(&mount);
        found
    });
}
