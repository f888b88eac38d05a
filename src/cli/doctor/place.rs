//! Whether a directory can hold a store, and whether a remote answers and takes what is put there.
//!
//! Both are tried: a file is made in the directory and removed again, an object put, read back and deleted.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvfs_os::set_extended_attribute;
use nix::sys::statfs::{FsType, OVERLAYFS_SUPER_MAGIC, TMPFS_MAGIC, statfs};

use super::Findings;
use crate::cli::output::{Failure, bytes};
use crate::cli::remote::{ask, connector};
use crate::cli::remote_key::KeySource;
use crate::tier::content::ContentHash;
use crate::tier::remote::counters::Counters;
use crate::tier::remote::seal::KeyRing;
use crate::tier::remote::{
    BlobStore, Connector, Extent, MemorySink, Put, PutMode, RemoteError, RemoteName, Source,
    StoreId, identify,
};

/// Of syncs that are timed the middle one counts.
const SYNCS: usize = 5;
/// A disk that takes longer to sync 4 KiB makes every commit slow.
const SYNC_SLOW: Duration = Duration::from_millis(20);
/// Less is not worth a cache.
const ROOM_ENOUGH_BYTES: u64 = 1 << 30;
/// Bytes that are written, and put, to see whether that works.
const TRIED_BYTES: usize = 4096;

/// Looks at a directory that holds a store, or is to.
pub(super) fn look_at_store(findings: &mut Findings, store: &Path) {
    let place = store.display();
    let directory = match fs::read_dir(store) {
        Ok(mut entries) => {
            if store.join("FORMAT").exists() {
                findings.good(&format!("{place} holds a store"));
            } else if entries.next().is_none() {
                findings.good(&format!("{place} is empty: a mount makes a store of it"));
            } else {
                let mend = "name an empty directory, or one that is not there yet";
                findings.bad(&format!("{place} is neither a store nor empty"), mend);
            }
            store
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            findings.good(&format!("{place} is not there yet: a mount makes it"));
            match store.parent() {
                Some(parent) if parent.as_os_str().is_empty() => Path::new("."),
                Some(parent) => parent,
                None => store,
            }
        }
        Err(error) => return findings.bad(&format!("{place}: {error}"), mend_of(&error)),
    };
    look_at_filesystem(findings, directory);
    if let Err(error) = try_disk(findings, directory) {
        let mend = "let this user write there, or make room";
        findings.bad(&format!("{}: {error}", directory.display()), mend);
    }
}

fn look_at_filesystem(findings: &mut Findings, directory: &Path) {
    let stat = match statfs(directory) {
        Ok(stat) => stat,
        Err(errno) => {
            let what = format!("{}: {errno}", directory.display());
            return findings.bad(&what, mend_of(&errno.into()));
        }
    };
    match stat.filesystem_type() {
        TMPFS_MAGIC => findings.note(
            "it is in memory (tmpfs): what it holds ends with the machine",
            "name a directory of a disk; --ram keeps pages in memory",
        ),
        OVERLAYFS_SUPER_MAGIC => findings.note(
            "it is on an overlay, as inside a container: the kernel may refuse passthrough",
            "mount a volume, and put the store there",
        ),
        FsType(_) => {}
    }
    let room =
        stat.blocks_available().saturating_mul(u64::try_from(stat.block_size()).unwrap_or(0));
    let what = format!("{} are free there", bytes(room));
    if room < ROOM_ENOUGH_BYTES {
        findings.note(&what, "make room, or name another directory");
    } else {
        findings.good(&what);
    }
}

/// What somebody can do about a directory that cannot be looked at.
fn mend_of(error: &io::Error) -> &'static str {
    use io::ErrorKind::{NotADirectory, NotFound, PermissionDenied};
    match error.kind() {
        PermissionDenied => "run this as its owner or as root, or name another directory",
        NotADirectory => "name a directory",
        NotFound => "make the directory above it (mkdir -p), or name another one",
        _ => "see what the kernel says of its disk (dmesg), or name another directory",
    }
}

/// Makes a file, gives it an attribute, syncs it, and removes it.
fn try_disk(findings: &mut Findings, directory: &Path) -> io::Result<()> {
    let file = tempfile::NamedTempFile::new_in(directory)?;
    if let Err(error) = set_extended_attribute(file.path(), c"user.kvfs", b"doctor") {
        let what = format!("files there take no extended attributes ({error})");
        findings
            .note(&what, "use ext4, XFS or Btrfs: names of large files stand there a second time");
    }
    let mut times = Vec::new();
    for _ in 0..SYNCS {
        let mut opened = File::options().append(true).open(file.path())?;
        opened.write_all(&[0; TRIED_BYTES])?;
        let begin = Instant::now();
        opened.sync_all()?;
        times.push(begin.elapsed());
    }
    times.sort_unstable();
    let time = times[SYNCS / 2];
    let what = format!("its disk syncs 4 KiB in {:.1} ms", time.as_secs_f64() * 1000.0);
    if time > SYNC_SLOW {
        findings.note(&what, "every fsync of a client waits for that: a faster disk");
    } else {
        findings.good(&what);
    }
    Ok(())
}

/// Looks at a remote.
///
/// # Errors
/// The place or the key file cannot be read.
pub(super) fn look_at_remote(
    findings: &mut Findings, place: &str, key: Option<&Path>,
) -> Result<(), Failure> {
    let (spec, connector) = connector(place)?;
    let keys = key.map(|path| KeySource::File(path.to_owned()).load());
    let keys = keys.transpose().map_err(Failure::Failed)?;
    match ask(&spec, move || try_remote(connector.as_ref(), keys.as_ref())) {
        Ok(Ok(Remote::Empty)) => {
            findings.good(&format!("remote {spec} is empty: the first mount makes it a remote"));
        }
        Ok(Ok(Remote::Takes(time))) => {
            let time = time.as_secs_f64() * 1000.0;
            findings.good(&format!(
                "remote {spec} answers: 4 KiB put, read back and deleted in {time:.1} ms"
            ));
        }
        Ok(Err(error)) => findings.bad(&error.told_once(), mend_of_remote(&error)),
        Err(silence) => {
            findings.bad(silence.line(), "check the network and the server");
        }
    }
    Ok(())
}

/// What somebody can do about a remote that gives an error.
fn mend_of_remote(error: &RemoteError) -> &'static str {
    match error {
        RemoteError::Unreachable(_) => {
            "start its server or mount the share, and see that its address is right"
        }
        RemoteError::Timeout(_) | RemoteError::Slow(_) => {
            "see what the network and the server are busy with"
        }
        RemoteError::Full(_) => "make room there, or raise its quota",
        RemoteError::Denied(_) => {
            "let this user read and write there, of an object store with other AWS_* variables"
        }
        RemoteError::Missing(_) => "make the directory or bucket, or name another one",
        RemoteError::Foreign(_) => {
            "name an empty place, or the remote of this version that is meant"
        }
        RemoteError::Key(_) => {
            "give the key that seals it (--remote-key), or none where it is not sealed"
        }
        RemoteError::Corrupt(_) => {
            "run kvfs scrub on a mount of it, which mends what another copy is left of"
        }
        RemoteError::Other(_) => {
            "see what its server says (its log), or the kernel of its disk (dmesg)"
        }
        RemoteError::Local(_) => {
            "see that this machine has memory and descriptors left (ulimit -n)"
        }
    }
}

/// What a remote is good for.
enum Remote {
    /// Nothing is there, and nothing was put there.
    Empty,
    /// An object went there and back.
    Takes(Duration),
}

fn try_remote(connector: &dyn Connector, keys: Option<&KeyRing>) -> Result<Remote, RemoteError> {
    let store: Arc<dyn BlobStore> = connector.connect(&Counters::default())?;
    if store.head(RemoteName::Marker)?.is_none() && store.is_vacant()? {
        return Ok(Remote::Empty);
    }
    identify(store.as_ref(), keys)?;
    // Nobody looks for what has such a name, and the garbage collector knows what it is.
    let random = StoreId::random().map_err(RemoteError::local)?;
    let tried = random.0.to_le_bytes().repeat(TRIED_BYTES / size_of::<u128>());
    let name = RemoteName::Chunk(ContentHash::of(&tried));
    let begin = Instant::now();
    let put = store.put(name, Source::of(tried.clone()), PutMode::IfAbsent)?;
    let sink = MemorySink::new(TRIED_BYTES);
    let read = store.get(name, Extent::Whole { bytes: None }, sink.clone());
    store.delete(name)?;
    read?;
    if put != Put::Stored || sink.take() != tried {
        let place = store.place();
        return Err(RemoteError::Other(format!(
            "remote {place}: gives back other bytes than it took"
        )));
    }
    Ok(Remote::Takes(begin.elapsed()))
}
