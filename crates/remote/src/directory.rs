//! A directory that machines share: of NFS, `CephFS`, Lustre, 3FS, `JuiceFS`, or a plain one.
//!
//! An object is written to a temporary file beside its place, synced, and given its name by
//! `link(2)`, which fails if the name exists: the only exclusive publication that NFS has too. A
//! filesystem without hard links gets `renameat2(RENAME_NOREPLACE)`. Then the directory is synced.
//!
//! Rights follow the root of the remote, whatever the umask of a daemon: a root of mode 0770 gives
//! files of 0660 and directories of 0770, with the set-group-id bit if the root has it, so whoever
//! may use the directory may use what the others put there. Give it to a group alone: a cache
//! holds prompts.
//!
//! Pages of the kernel's cache are dropped after a sync and after a read, so that reading a copy
//! back asks the server, and the bytes are not cached twice on this machine.

mod entry;

use std::collections::{BTreeSet, BinaryHeap};
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use kvfs_os::mountinfo;
use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::sys::stat::{Mode, UtimensatFlags};
use nix::sys::time::TimeSpec;

use self::entry::{
    CONDEMNED, Open, begin_writeback, delete_if_older, drop_cached, give_back, publish, read_ahead,
    remove, stat, sync_directory,
};
use super::error::{RemoteError, Result};
use super::name::{RemoteName, RemotePrefix, StoreId, random};
use super::transfer::{Extent, Sink, Source};
use super::{BlobStore, LISTING_MAX, Listed, Listing, Put, PutMode, Stat};

/// Unit of reading and writing: what NFS clients negotiate at most.
const BUFFER_BYTES: usize = 1 << 20;
/// Synced after so many bytes, so that no single fsync takes longer than a deadline: 64 MiB take
/// 6 s at 10 MB/s.
const SYNC_BYTES: u64 = 64 << 20;
/// What temporary files begin with; random digits follow.
const TEMPORARY: &str = ".tmp-";
/// May lie in a place that is otherwise vacant: of a fresh filesystem, of filers.
const TOLERATED: [&str; 2] = ["lost+found", ".snapshot"];

const DIRECTORY: OFlag = OFlag::O_RDONLY.union(OFlag::O_DIRECTORY);

/// A shared directory.
#[derive(Debug)]
pub struct Directory {
    root: OwnedFd,
    path: PathBuf,
    place: String,
    mode_of_files: Mode,
    mode_of_directories: Mode,
}

impl Directory {
    /// Opens an existing directory.
    pub fn open(path: &Path) -> Result<Directory> {
        let place = path.display().to_string();
        let failed = |error: io::Error| match error.raw_os_error() {
            Some(libc::ENOENT) => RemoteError::Unreachable(format!(
                "remote {place}: there is no such directory, mount or create it"
            )),
            Some(libc::ENOTDIR) => RemoteError::Foreign(format!("remote {place}: not a directory")),
            _ => RemoteError::from_errno("open", &place, &error),
        };
        let root = nix::fcntl::open(path, DIRECTORY | OFlag::O_CLOEXEC, Mode::empty())
            .map_err(|errno| failed(errno.into()))?;
        let path = path.to_owned();
        let mode = nix::sys::stat::fstat(&root).map_err(|errno| failed(errno.into()))?.st_mode;
        let mode_of_files = Mode::from_bits_truncate(mode & 0o666);
        let mode_of_directories = Mode::from_bits_truncate(mode & 0o2777);
        Ok(Directory { root, path, place, mode_of_files, mode_of_directories })
    }

    fn failed(&self, what: &str, name: impl std::fmt::Display, error: &io::Error) -> RemoteError {
        RemoteError::from_errno(&format!("{what} {name}"), &self.place, error)
    }

    /// Whether the path still leads to the directory that was opened: it may have been renamed, or something mounted
    /// over it, and what is put there from then on nobody else would find.
    fn check_path(&self) -> Result<()> {
        let failed = |errno: Errno| self.failed("look at", ".", &errno.into());
        let opened = nix::sys::stat::fstat(&self.root).map_err(failed)?;
        match nix::sys::stat::stat(&self.path) {
            Ok(found) if (found.st_dev, found.st_ino) == (opened.st_dev, opened.st_ino) => Ok(()),
            Ok(_) | Err(Errno::ENOENT | Errno::ENOTDIR) => {
                let place = &self.place;
                Err(RemoteError::Foreign(format!(
                    "remote {place}: is not the directory any more that it was: was it moved away, or is \
                     something else mounted there?"
                )))
            }
            Err(errno) => Err(failed(errno)),
        }
    }

    /// Refuses a directory in a mount of the store whose bytes it is to keep: they would be kept in themselves.
    pub(super) fn check_outside(&self, store: &Path) -> Result<()> {
        let failed = |error: io::Error| self.failed("look at", "/proc/self/mountinfo", &error);
        let device = nix::sys::stat::fstat(&self.root).map_err(|errno| failed(errno.into()))?;
        let mounts = mountinfo::read().map_err(failed)?;
        if !mountinfo::is_mount_of(&mounts, device.st_dev, store) {
            return Ok(());
        }
        Err(RemoteError::Foreign(format!(
            "remote {}: lies in the mount of the store whose bytes it is to keep: mount with one that is elsewhere",
            self.place
        )))
    }

    fn corrupt(&self, name: RemoteName, why: &str) -> RemoteError {
        RemoteError::Corrupt(format!("remote {}: {name} {why}", self.place))
    }

    fn beneath(&self, path: &Path, flags: OFlag) -> io::Result<File> {
        kvfs_os::open_beneath(&self.root, path, flags, Mode::empty())
    }

    /// Opens the directory that an object lies in.
    fn parent(&self, name: RemoteName) -> io::Result<Open> {
        let path = PathBuf::from(name.to_string());
        let leaf = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let directory = self.beneath(parent_of(&path), DIRECTORY)?;
        Ok(Open { directory, leaf })
    }

    /// The same, and makes it where it is missing.
    fn parent_made(&self, name: RemoteName) -> io::Result<Open> {
        match self.parent(name) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            other => return other,
        }
        let path = PathBuf::from(name.to_string());
        let mut above = self.beneath(Path::new("."), DIRECTORY)?;
        let mut made = PathBuf::new();
        for part in parent_of(&path) {
            match nix::sys::stat::mkdirat(&above, part, self.mode_of_directories) {
                Ok(()) => {
                    // The umask may have taken bits. Where rights cannot be set (SMB), those of
                    // the mount hold.
                    let follow = nix::sys::stat::FchmodatFlags::FollowSymlink;
                    let _ =
                        nix::sys::stat::fchmodat(&above, part, self.mode_of_directories, follow);
                    sync_directory(&above)?;
                }
                Err(Errno::EEXIST) => {}
                Err(errno) => return Err(errno.into()),
            }
            made.push(part);
            above = self.beneath(&made, DIRECTORY)?;
        }
        self.parent(name)
    }

    /// Writes, syncs and publishes. The temporary file is removed by the caller.
    fn store(&self, open: &Open, temporary: &str, source: &Source, mode: PutMode) -> Result<Put> {
        let failed = |error: &io::Error| self.failed("put", &open.leaf, error);
        let flags = OFlag::O_RDWR | OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_NOFOLLOW;
        let flags = flags | OFlag::O_CLOEXEC;
        let file = nix::fcntl::openat(&open.directory, temporary, flags, self.mode_of_files)
            .map_err(|errno| failed(&errno.into()))?;
        let file = File::from(file);
        // As for directories.
        let _ = nix::sys::stat::fchmod(&file, self.mode_of_files);
        self.write(&file, source, &open.leaf)?;
        publish(open, temporary, &file, mode).map_err(|error| failed(&error))
    }

    fn write(&self, file: &File, source: &Source, leaf: &str) -> Result<()> {
        let failed = |error: io::Error| self.failed("write", leaf, &error);
        let mut buffer = vec![0; next_bytes(source.length())];
        let (mut offset, mut synced) = (0, 0);
        while offset < source.length() {
            let part = &mut buffer[..next_bytes(source.length() - offset)];
            source.read_exact_at(part, offset).map_err(RemoteError::local)?;
            file.write_all_at(part, offset).map_err(failed)?;
            offset += part.len() as u64;
            if offset < source.length() {
                // The disk writes it while the source reads, encodes or seals what follows.
                begin_writeback(file, offset - part.len() as u64, part.len() as u64);
            }
            if offset - synced >= SYNC_BYTES {
                file.sync_data().map_err(failed)?;
                synced = offset;
            }
        }
        file.sync_all().map_err(failed)?;
        let length = file.metadata().map_err(failed)?.len();
        if length != source.length() {
            let error = io::Error::from_raw_os_error(libc::EIO);
            return Err(self.failed(&format!("{length} bytes after the sync of"), leaf, &error));
        }
        drop_cached(file);
        Ok(())
    }

    fn copy_out(&self, file: &File, name: RemoteName, extent: Extent, sink: &Sink) -> Result<u64> {
        let failed = |error: &io::Error| self.failed("get", name, error);
        let metadata = file.metadata().map_err(|error| failed(&error))?;
        if !metadata.is_file() {
            return Err(self.corrupt(name, "is no file"));
        }
        let range = extent.within(metadata.len()).map_err(|why| self.corrupt(name, &why))?;
        let (start, length) = range;
        let mut buffer = vec![0; next_bytes(length)];
        let mut done = 0;
        while done < length {
            let part = &mut buffer[..next_bytes(length - done)];
            match file.read_exact_at(part, start + done) {
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                    return Err(self.corrupt(name, "ended early"));
                }
                outcome => outcome.map_err(|error| failed(&error))?,
            }
            let end = done + part.len() as u64;
            // The disk or the server goes on while the sink opens, decodes or writes what is here.
            read_ahead(file, start + end, next_bytes(length - end));
            sink.write_all_at(part, done).map_err(RemoteError::local)?;
            done = end;
        }
        drop_cached(file);
        Ok(length)
    }

    /// Names in one directory; an absent directory has none.
    fn names(&self, path: &Path, mut visit: impl FnMut(&str)) -> io::Result<Option<File>> {
        let directory = match self.beneath(path, DIRECTORY) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            other => other?,
        };
        for entry in nix::dir::Dir::from_fd(OwnedFd::from(directory.try_clone()?))?.iter() {
            if let Ok(name) = entry?.file_name().to_str() {
                visit(name);
            }
        }
        Ok(Some(directory))
    }

    /// The directories that hold objects of a prefix, in order.
    fn directories(&self, prefix: RemotePrefix) -> io::Result<BTreeSet<PathBuf>> {
        let top = PathBuf::from(prefix.to_string());
        let mut found = BTreeSet::new();
        if let RemotePrefix::ManifestsOf(_) = prefix {
            found.insert(top);
        } else {
            // What is called otherwise is somebody else's.
            let is_ours = |name: &str| match prefix {
                RemotePrefix::Manifests => name.parse::<StoreId>().is_ok(),
                _ => name.len() == 2 && name.bytes().all(|byte| byte.is_ascii_hexdigit()),
            };
            self.names(&top, |name| {
                if is_ours(name) {
                    found.insert(top.join(name));
                }
            })?;
        }
        Ok(found)
    }

    /// Appends the next objects of one directory, in order; whether it has no more.
    fn list_one(
        &self, path: &Path, after: Option<&str>, listed: &mut Vec<Listed>,
    ) -> io::Result<bool> {
        let room = LISTING_MAX - listed.len();
        // The smallest names, the largest of them on top.
        let mut heap: BinaryHeap<String> = BinaryHeap::new();
        let mut is_last = true;
        let directory = self.names(path, |leaf| {
            let full = path.join(leaf);
            let ours = full.to_str().is_some_and(|text| text.parse::<RemoteName>().is_ok());
            if !ours || after.is_some_and(|after| leaf <= after) {
                return;
            }
            heap.push(leaf.to_owned());
            if heap.len() > room {
                heap.pop();
                is_last = false;
            }
        })?;
        let Some(directory) = directory else {
            return Ok(true);
        };
        for leaf in heap.into_sorted_vec() {
            let name = path.join(&leaf).to_str().and_then(|text| text.parse().ok());
            // Whoever vanished meanwhile needs no mention.
            let stat = match (name, stat(&directory, &leaf)) {
                // It is no object, and whoever needs that one finds that out. A manifest may name what others rely on.
                (Some(RemoteName::Blob(_) | RemoteName::Chunk(_)), Err(error))
                    if error.raw_os_error().is_none() =>
                {
                    log::warn!("remote {}: {}/{leaf}: {error}", self.place, path.display());
                    continue;
                }
                (_, Err(error)) if error.raw_os_error().is_none() => {
                    return Err(io::Error::other(format!("{leaf}: {error}")));
                }
                (_, outcome) => outcome?,
            };
            if let (Some(name), Some(stat)) = (name, stat) {
                listed.push(Listed { name, stat });
            }
        }
        Ok(is_last)
    }
}

impl BlobStore for Directory {
    fn place(&self) -> &str {
        &self.place
    }

    fn put(&self, name: RemoteName, source: Source, mode: PutMode) -> Result<Put> {
        let failed = |error: &io::Error| match self.failed("put", name, error) {
            // Only the root can be missing here.
            RemoteError::Missing(text) => RemoteError::Unreachable(text),
            error => error,
        };
        let open = self.parent_made(name).map_err(|error| failed(&error))?;
        if mode == PutMode::IfAbsent {
            let there = stat(&open.directory, &open.leaf).map_err(|error| failed(&error))?;
            if there.is_some() {
                return Ok(Put::AlreadyThere);
            }
        }
        let temporary = format!("{TEMPORARY}{:032x}", random().map_err(RemoteError::local)?);
        let outcome = self.store(&open, &temporary, &source, mode);
        // Already gone where it was renamed; a sweep finds it if this fails.
        let _ = remove(&open.directory, &temporary);
        let outcome = outcome?;
        sync_directory(&open.directory).map_err(|error| failed(&error))?;
        Ok(outcome)
    }

    fn get(&self, name: RemoteName, extent: Extent, sink: Sink) -> Result<u64> {
        let path = name.to_string();
        // Without waiting for the writer of a FIFO that somebody put there.
        let file = self
            .beneath(Path::new(&path), OFlag::O_RDONLY | OFlag::O_NONBLOCK)
            .map_err(|error| self.failed("get", name, &error))?;
        self.copy_out(&file, name, extent, &sink)
    }

    fn head(&self, name: RemoteName) -> Result<Option<Stat>> {
        if name == RemoteName::Marker {
            self.check_path()?;
        }
        let open = match self.parent(name) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            other => other.map_err(|error| self.failed("stat", name, &error))?,
        };
        stat(&open.directory, &open.leaf).map_err(|error| self.failed("stat", name, &error))
    }

    fn refresh(&self, name: RemoteName) -> Result<()> {
        let failed = |error: &io::Error| self.failed("touch", name, error);
        let open = self.parent(name).map_err(|error| failed(&error))?;
        // UTIME_NOW and not our time: NFS servers then use their own clock.
        let now = TimeSpec::UTIME_NOW;
        let flag = UtimensatFlags::NoFollowSymlink;
        nix::sys::stat::utimensat(&open.directory, open.leaf.as_str(), &now, &now, flag)
            .map_err(|errno| failed(&errno.into()))
    }

    fn delete(&self, name: RemoteName) -> Result<()> {
        let outcome = self.parent(name).and_then(|open| remove(&open.directory, &open.leaf));
        match outcome {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            other => other.map_err(|error| self.failed("delete", name, &error)),
        }
    }

    fn delete_if_older(&self, name: RemoteName, than: SystemTime) -> Result<bool> {
        let failed = |error: &io::Error| self.failed("delete", name, error);
        match self.parent(name).and_then(|open| delete_if_older(&open, than)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            other => other.map_err(|error| failed(&error)),
        }
    }

    fn settling(&self) -> Duration {
        Duration::ZERO
    }

    fn list(&self, prefix: RemotePrefix, after: Option<RemoteName>) -> Result<Listing> {
        let failed = |error: io::Error| self.failed("list", prefix, &error);
        let after = after.map(|name| PathBuf::from(name.to_string()));
        let first = after.as_deref().map(parent_of);
        let mut objects = Vec::new();
        for directory in self.directories(prefix).map_err(failed)? {
            if first.is_some_and(|first| directory.as_path() < first) {
                continue;
            }
            let here = after.as_deref().filter(|_| first == Some(&directory));
            let after = here.and_then(Path::file_name).and_then(|leaf| leaf.to_str());
            let failed = |error: io::Error| self.failed("list", directory.display(), &error);
            if !self.list_one(&directory, after, &mut objects).map_err(failed)? {
                return Ok(Listing { objects, is_last: false });
            }
        }
        Ok(Listing { objects, is_last: true })
    }

    fn sweep(&self, older_than: SystemTime) -> Result<u64> {
        let failed = |error: io::Error| self.failed("sweep", "temporary files", &error);
        let mut directories = BTreeSet::from([PathBuf::from(".")]);
        for prefix in [RemotePrefix::Blobs, RemotePrefix::Chunks, RemotePrefix::Manifests] {
            directories.append(&mut self.directories(prefix).map_err(failed)?);
        }
        let mut swept = 0;
        for path in directories {
            let mut leftovers = Vec::new();
            let directory = self.names(&path, |name| {
                if name.starts_with(TEMPORARY) && leftovers.len() < LISTING_MAX {
                    leftovers.push(name.to_owned());
                }
            });
            let Some(directory) = directory.map_err(failed)? else {
                continue;
            };
            for leaf in leftovers {
                let stat = stat(&directory, &leaf).map_err(failed)?;
                let Some(stat) = stat else {
                    continue;
                };
                if stat.modified < older_than {
                    remove(&directory, &leaf).map_err(failed)?;
                    swept += 1;
                } else if let Some(name) = leaf.strip_prefix(CONDEMNED) {
                    // A deletion was cut off after somebody refreshed the object.
                    give_back(&directory, &leaf, name).map_err(failed)?;
                }
            }
        }
        Ok(swept)
    }

    fn is_vacant(&self) -> Result<bool> {
        let mut is_vacant = true;
        self.names(Path::new("."), |name| {
            let own = name == "." || name == ".." || name.starts_with(TEMPORARY);
            is_vacant &= own || name.starts_with(".nfs") || TOLERATED.contains(&name);
        })
        .map_err(|error| self.failed("list", ".", &error))?;
        Ok(is_vacant)
    }
}

fn parent_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    }
}

/// How much of the rest one buffer takes.
fn next_bytes(rest: u64) -> usize {
    usize::try_from(rest).unwrap_or(usize::MAX).min(BUFFER_BYTES)
}
