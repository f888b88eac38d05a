//! What users do with ordinary names, and what they hear.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, PermissionsExt, lchown, symlink};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use nix::fcntl::{AT_FDCWD, AtFlags, OFlag, RenameFlags, renameat2};
use nix::sys::stat::Mode;

use crate::common::random::Random;
use crate::common::sys::{attribute, errno, listxattr, removexattr, setxattr};
use crate::tree::describe;
use crate::user::TEAM;

/// Descriptors that are kept open: the same places for all users.
pub(crate) const HELD: usize = 4;
const MODES: [u32; 18] = [
    0o700, 0o707, 0o770, 0o755, 0o777, 0o1777, 0o2775, 0o711, 0o604, 0o640, 0o600, 0o644, 0o666,
    0o000, 0o070, 0o4755, 0o2755, 0o6777,
];
const OWNERS: [u32; 4] = [0, 1001, 1002, 1003];
const GROUPS: [u32; 5] = [0, 1001, 1002, 1003, TEAM];
const ATTRIBUTES: [&str; 2] = ["user.note", "user.other"];
const LENGTH_MAX: usize = 40;

/// A mode, told as one.
#[derive(Clone, Copy)]
pub(crate) struct Octal(u32);

impl std::fmt::Debug for Octal {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(to, "{:o}", self.0)
    }
}

fn any_mode(random: &mut Random) -> Octal {
    Octal(*random.pick(&MODES))
}

/// What a user does. A path may be a file, a directory or whatever its name is by then.
#[derive(Clone, Debug)]
pub(crate) enum Operation {
    Mkdir(String, Octal),
    Open { path: String, flags: i32, mode: Octal, keep: Option<usize>, text: String },
    Truncate(String, u64),
    Read(String),
    List(String),
    Stat { path: String, follows: bool },
    Access(String, u32),
    Touch(String, Option<i64>),
    Chmod(String, Octal),
    Chown(String, Option<u32>, Option<u32>),
    Rename(String, String, u32),
    Link(String, String),
    Symlink(String, String),
    ReadLink(String),
    Unlink(String),
    Rmdir(String),
    Set(String, &'static str, String),
    Get(String, &'static str),
    Attributes(String),
    Remove(String, &'static str),
    ReadHeld(usize),
    WriteHeld(usize, String),
    ChmodHeld(usize, Octal),
    LinkHeld(usize, String),
    Reopen { held: usize, flags: i32, text: String },
    Release(usize),
}

/// A path of one to three names.
fn path(random: &mut Random) -> String {
    let names: Vec<&str> = (0..=random.below(3)).map(|_| *random.pick(&["a", "b", "c"])).collect();
    names.join("/")
}

fn flags(random: &mut Random) -> i32 {
    let access = *random.pick(&[libc::O_RDONLY, libc::O_WRONLY, libc::O_RDWR, libc::O_RDWR]);
    let more = [0, 0, libc::O_TRUNC, libc::O_APPEND, libc::O_NOATIME, libc::O_NOFOLLOW];
    access | random.pick(&more)
}

fn text(random: &mut Random) -> String {
    let letter = *random.pick(&["a", "b", "c", "d"]);
    letter.repeat(random.below(LENGTH_MAX))
}

fn open(random: &mut Random) -> Operation {
    let creation = [0, libc::O_CREAT, libc::O_CREAT, libc::O_CREAT | libc::O_EXCL];
    let keep = random.one_in(3).then(|| random.below(HELD));
    let flags = flags(random) | random.pick(&creation);
    let (mode, text) = (any_mode(random), text(random));
    Operation::Open { path: path(random), flags, mode, keep, text }
}

fn on_held(random: &mut Random) -> Operation {
    let held = random.below(HELD);
    match random.below(6) {
        0 => Operation::ReadHeld(held),
        1 => Operation::WriteHeld(held, text(random)),
        2 => Operation::ChmodHeld(held, any_mode(random)),
        3 => Operation::LinkHeld(held, path(random)),
        4 => Operation::Reopen { held, flags: flags(random), text: text(random) },
        _ => Operation::Release(held),
    }
}

fn on_attributes(random: &mut Random) -> Operation {
    let (path, name) = (path(random), *random.pick(&ATTRIBUTES));
    match random.below(4) {
        0 => Operation::Set(path, name, text(random)),
        1 => Operation::Get(path, name),
        2 => Operation::Attributes(path),
        _ => Operation::Remove(path, name),
    }
}

impl Operation {
    pub(crate) fn any(random: &mut Random) -> Operation {
        let path = |random: &mut Random| path(random);
        match random.below(32) {
            0..=4 => Operation::Mkdir(path(random), any_mode(random)),
            5..=9 => open(random),
            10 => Operation::Truncate(path(random), random.below(2 * LENGTH_MAX) as u64),
            11 | 12 => Operation::Read(path(random)),
            13 => Operation::List(path(random)),
            14 | 15 => Operation::Stat { path: path(random), follows: random.is_true() },
            16 => Operation::Access(path(random), u32::try_from(random.below(8)).unwrap()),
            17 => Operation::Touch(path(random), random.is_true().then_some(1_000_000)),
            18..=20 => Operation::Chmod(path(random), any_mode(random)),
            21 => Operation::Chown(
                path(random),
                random.is_true().then(|| *random.pick(&OWNERS)),
                random.is_true().then(|| *random.pick(&GROUPS)),
            ),
            22 | 23 => {
                let how = [0, 0, 0, libc::RENAME_NOREPLACE];
                Operation::Rename(path(random), path(random), *random.pick(&how))
            }
            24 => Operation::Link(path(random), path(random)),
            25 => Operation::Symlink(path(random), path(random)),
            26 => Operation::ReadLink(path(random)),
            27 => Operation::Unlink(path(random)),
            28 => Operation::Rmdir(path(random)),
            29 | 30 => on_held(random),
            _ => on_attributes(random),
        }
    }
}

/// A tree, and what is open in it.
#[derive(Clone, Debug)]
pub(crate) struct Tree {
    pub(crate) root: PathBuf,
    pub(crate) held: Arc<Mutex<[Option<File>; HELD]>>,
}

impl Tree {
    pub(crate) fn new(root: PathBuf) -> Tree {
        Tree { root, held: Arc::default() }
    }

    /// Does it, and tells what the caller learns, or errno.
    pub(crate) fn answer(&self, operation: &Operation) -> Result<String, i32> {
        let outcome = self.run(operation);
        outcome.map_err(|error| errno(&Err::<(), _>(error)))
    }

    fn at(&self, path: &str) -> PathBuf {
        self.root.join(path)
    }

    fn run(&self, operation: &Operation) -> io::Result<String> {
        let at = |path: &String| self.at(path);
        let done = |(): ()| String::new();
        match operation {
            Operation::Mkdir(path, mode) => Ok(done(nix::unistd::mkdir(&at(path), bits(mode.0))?)),
            Operation::Open { path, flags, mode, keep, text } => {
                let file = open_as_told(&at(path), *flags, mode.0)?;
                let read = use_file(&file, *flags, text)?;
                if let Some(place) = keep {
                    self.held.lock().unwrap()[*place] = Some(file);
                }
                Ok(read)
            }
            Operation::Truncate(path, length) => {
                Ok(done(nix::unistd::truncate(&at(path), i64::try_from(*length).unwrap())?))
            }
            Operation::Read(path) => {
                use_file(&open_as_told(&at(path), libc::O_RDONLY, 0)?, libc::O_RDONLY, "")
            }
            Operation::List(path) => list(&at(path)),
            Operation::Stat { path, follows: true } => Ok(describe(&fs::metadata(at(path))?)),
            Operation::Stat { path, .. } => Ok(describe(&fs::symlink_metadata(at(path))?)),
            Operation::Access(path, wanted) => {
                let wanted = i32::try_from(*wanted).unwrap();
                let wanted = nix::unistd::AccessFlags::from_bits_retain(wanted);
                Ok(done(nix::unistd::access(&at(path), wanted)?))
            }
            Operation::Touch(path, seconds) => touch(&at(path), *seconds).map(done),
            Operation::Chmod(path, mode) => {
                fs::set_permissions(at(path), fs::Permissions::from_mode(mode.0)).map(done)
            }
            Operation::Chown(path, uid, gid) => lchown(at(path), *uid, *gid).map(done),
            Operation::Rename(from, to, how) => {
                let how = RenameFlags::from_bits_retain(*how);
                Ok(done(renameat2(AT_FDCWD, &at(from), AT_FDCWD, &at(to), how)?))
            }
            Operation::Link(from, to) => fs::hard_link(at(from), at(to)).map(done),
            Operation::Symlink(target, path) => symlink(target, at(path)).map(done),
            Operation::ReadLink(path) => Ok(format!("{:?}", fs::read_link(at(path))?)),
            Operation::Unlink(path) => Ok(done(nix::unistd::unlink(&at(path))?)),
            Operation::Rmdir(path) => fs::remove_dir(at(path)).map(done),
            Operation::Set(path, name, value) => {
                setxattr(at(path), name, value.as_bytes()).map(done)
            }
            Operation::Get(path, name) => Ok(format!("{:?}", attribute(at(path), name)?)),
            Operation::Attributes(path) => {
                let mut names = listxattr(at(path))?;
                names.sort();
                Ok(format!("{names:?}"))
            }
            Operation::Remove(path, name) => removexattr(at(path), name).map(done),
            Operation::ReadHeld(held)
            | Operation::WriteHeld(held, _)
            | Operation::ChmodHeld(held, _)
            | Operation::LinkHeld(held, _)
            | Operation::Reopen { held, .. }
            | Operation::Release(held) => self.run_on_held(*held, operation),
        }
    }

    fn run_on_held(&self, place: usize, operation: &Operation) -> io::Result<String> {
        let mut held = self.held.lock().unwrap();
        let Some(file) = &held[place] else { return Ok("nothing is held".to_owned()) };
        let link = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
        match operation {
            Operation::ReadHeld(_) => {
                let mut bytes = vec![0; 4 * LENGTH_MAX];
                let count = file.read_at(&mut bytes, 0)?;
                Ok(String::from_utf8_lossy(&bytes[..count]).into_owned())
            }
            Operation::WriteHeld(_, text) => Ok(file.write_at(text.as_bytes(), 0)?.to_string()),
            Operation::ChmodHeld(_, mode) => {
                file.set_permissions(fs::Permissions::from_mode(mode.0))?;
                Ok(String::new())
            }
            Operation::LinkHeld(_, path) => {
                let follow = AtFlags::AT_SYMLINK_FOLLOW;
                nix::unistd::linkat(AT_FDCWD, &link, AT_FDCWD, &self.at(path), follow)?;
                Ok(String::new())
            }
            Operation::Reopen { flags, text, .. } => {
                use_file(&open_as_told(&link, *flags & !libc::O_NOFOLLOW, 0)?, *flags, text)
            }
            _ => {
                held[place] = None;
                Ok(String::new())
            }
        }
    }
}

fn bits(mode: u32) -> Mode {
    Mode::from_bits_retain(mode)
}

fn open_as_told(path: &Path, flags: i32, mode: u32) -> io::Result<File> {
    Ok(File::from(nix::fcntl::open(path, OFlag::from_bits_retain(flags), bits(mode))?))
}

/// Writes to a file that is open for it, and reads one that is not.
fn use_file(mut file: &File, flags: i32, text: &str) -> io::Result<String> {
    if flags & libc::O_ACCMODE != libc::O_RDONLY {
        return file.write_all(text.as_bytes()).map(|()| String::new());
    }
    let mut read = Vec::new();
    file.read_to_end(&mut read)?;
    Ok(String::from_utf8_lossy(&read).into_owned())
}

fn list(directory: &Path) -> io::Result<String> {
    let mut names = Vec::new();
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        names.push((entry.file_name(), entry.file_type()?.is_dir()));
    }
    names.sort();
    Ok(format!("{names:?}"))
}

/// Sets times, to now if none is given: that asks for other rights.
fn touch(path: &Path, seconds: Option<i64>) -> io::Result<()> {
    use nix::sys::stat::{UtimensatFlags, utimensat};
    use nix::sys::time::TimeSpec;
    let time = seconds.map_or(TimeSpec::UTIME_NOW, |seconds| TimeSpec::new(seconds, 0));
    Ok(utimensat(AT_FDCWD, path, &time, &time, UtimensatFlags::FollowSymlink)?)
}
