//! A real mount against an ordinary directory: the same system calls on both must give the same
//! results, and the trees must be equal, also after the mount was made anew.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use nix::fcntl::FallocateFlags;

use crate::common::random::{Random, seeds};
use crate::common::{Mode, Mount, sys};
use crate::in_both_modes;

const OPERATIONS: usize = 1200;
const FILE_BYTES_MAX: usize = 40_000;
const NAMES: [&str; 8] = ["a", "b", "c", "d/a", "d/b", "d/e/a", "d/e/b", ".tmp"];
const DIRECTORIES: [&str; 4] = ["d", "d/e", "x", "d/x"];

/// One side: a directory and the files open in it.
struct Side {
    root: PathBuf,
    open: Vec<File>,
    maps: Vec<memmap2::MmapMut>,
}

in_both_modes!(twins);

fn twins(mode: Mode) {
    for seed in seeds(3) {
        eprintln!("seed {seed}");
        let mut mount = Mount::new(mode);
        let twin = mount.beside("twin");
        std::fs::create_dir(&twin).unwrap();
        let mut random = Random::of(seed);
        for round in 0..3 {
            let mut sides = [&mount.files(""), &twin].map(|root| Side {
                root: root.clone(),
                open: Vec::new(),
                maps: Vec::new(),
            });
            for _ in 0..OPERATIONS / 3 {
                let choice = random.next();
                let [ours, theirs] = sides.each_mut().map(|side| {
                    let mut random = Random::of(choice);
                    side.step(&mut random).map_err(|error| error.raw_os_error())
                });
                assert_eq!(ours, theirs, "seed {seed}, round {round}");
            }
            compare(&sides[0].root, &sides[1].root);
            drop(sides);
            compare(&mount.files(""), &twin);
            mount.remount();
            compare(&mount.files(""), &twin);
        }
        assert_eq!(mount.errors(), Vec::<String>::new());
    }
}

#[track_caller]
fn compare(ours: &Path, theirs: &Path) {
    let (ours, theirs) = (walk(ours), walk(theirs));
    let paths: BTreeSet<_> = ours.keys().chain(theirs.keys()).collect();
    for path in paths {
        assert_eq!(ours.get(path), theirs.get(path), "{}", path.display());
    }
}

/// Type and mode, links, and a digest of the content, by path.
fn walk(root: &Path) -> BTreeMap<PathBuf, (u32, u64, String)> {
    let mut found = BTreeMap::new();
    let mut directories = vec![root.to_owned()];
    while let Some(directory) = directories.pop() {
        for entry in std::fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            let metadata = std::fs::symlink_metadata(&path).unwrap();
            let content = if metadata.is_dir() {
                directories.push(path.clone());
                String::new()
            } else if metadata.is_symlink() {
                std::fs::read_link(&path).unwrap().display().to_string()
            } else {
                let bytes = std::fs::read(&path).unwrap();
                assert_eq!(bytes.len() as u64, metadata.len());
                let sum = kvfs::page::content_checksum(&bytes);
                format!("{} bytes {sum}", bytes.len())
            };
            let relative = path.strip_prefix(root).unwrap().to_owned();
            found.insert(relative, (metadata.mode(), metadata.nlink(), content));
        }
    }
    found
}

impl Side {
    /// Does one thing and tells what came of it.
    fn step(&mut self, random: &mut Random) -> io::Result<u64> {
        let choice = random.below(30);
        let name = self.root.join(random.pick(&NAMES));
        let other = self.root.join(random.pick(&NAMES));
        let directory = self.root.join(random.pick(&DIRECTORIES));
        match choice {
            0..8 => self.open(random, &name),
            8..12 if !self.open.is_empty() => {
                let index = random.below(self.open.len());
                sys::close(self.open.swap_remove(index))?;
                Ok(0)
            }
            8..20 if !self.open.is_empty() => self.use_file(random),
            20 => sys::rename(&name, &other).map(|()| 0),
            21 => sys::rename(self.root.join(random.pick(&DIRECTORIES)), &directory).map(|()| 0),
            22 => std::fs::hard_link(&name, &other).map(|()| 0),
            23 => std::fs::remove_file(&name).map(|()| 0),
            24 => std::fs::create_dir(&directory).map(|()| 0),
            25 => std::fs::remove_dir(&directory).map(|()| 0),
            26 => std::os::unix::fs::symlink("a", &name).map(|()| 0),
            27 => {
                let mode = u32::try_from(random.below(0o1000)).unwrap_or(0) | 0o600;
                std::fs::set_permissions(&name, std::fs::Permissions::from_mode(mode)).map(|()| 0)
            }
            28 => {
                let length = i64::try_from(random.below(FILE_BYTES_MAX)).unwrap_or(0);
                nix::unistd::truncate(&name, length)?;
                Ok(0)
            }
            _ => std::fs::metadata(&name).map(|metadata| metadata.len() * metadata.nlink()),
        }
    }

    fn open(&mut self, random: &mut Random, path: &Path) -> io::Result<u64> {
        if self.open.len() > 5 {
            self.open.remove(0);
        }
        let access = *random.pick(&[libc::O_RDONLY, libc::O_RDWR, libc::O_RDWR, libc::O_RDWR]);
        let more = *random.pick(&[
            0,
            libc::O_CREAT,
            libc::O_CREAT | libc::O_TRUNC,
            libc::O_CREAT | libc::O_EXCL,
            libc::O_TRUNC,
            libc::O_APPEND | libc::O_CREAT,
        ]);
        self.open.push(sys::open(path, access | more)?);
        Ok(0)
    }

    /// Bytes of an open file, which may have no name any more.
    fn use_file(&mut self, random: &mut Random) -> io::Result<u64> {
        let file = &self.open[random.below(self.open.len())];
        let offset = random.below(FILE_BYTES_MAX) as u64;
        let length = random.below(10_000) + 1;
        let signed = i64::try_from(length).unwrap();
        match random.below(12) {
            0..3 => Ok(file.write_at(&random.bytes(length), offset)? as u64),
            3..5 => {
                let mut buffer = vec![0; length];
                let count = file.read_at(&mut buffer, offset)?;
                let sum = kvfs::page::content_checksum(&buffer[..count]);
                Ok(u64::from_le_bytes(sum.0[..8].try_into().unwrap()))
            }
            5 => file.set_len(offset).map(|()| 0),
            6 => file.sync_all().map(|()| 0),
            7 => {
                let flags =
                    FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
                nix::fcntl::fallocate(file, flags, offset.cast_signed(), signed)?;
                Ok(0)
            }
            8 => {
                let flags = FallocateFlags::empty();
                nix::fcntl::fallocate(file, flags, offset.cast_signed(), signed)?;
                Ok(0)
            }
            9 => Ok(file.metadata()?.len()),
            10 => {
                // SAFETY: what is mapped is written to at once, and this thread alone cuts files.
                let mut map = unsafe { memmap2::MmapOptions::new().len(1).map_mut(file) }?;
                if file.metadata()?.len() > 0 {
                    map[0] = random.bytes(1)[0];
                    if self.maps.len() < 2 {
                        self.maps.push(map);
                    }
                }
                Ok(0)
            }
            _ => {
                let target = &self.open[random.below(self.open.len())];
                let (mut from, mut to) = (0, offset.cast_signed());
                let copied = nix::fcntl::copy_file_range(
                    file,
                    Some(&mut from),
                    target,
                    Some(&mut to),
                    length,
                )?;
                Ok(copied as u64)
            }
        }
    }
}
