//! The check of a store that nobody has mounted: do the records agree with each other and with
//! the bytes, and what can be done where they do not.
//!
//! | file | what it compares |
//! |---|---|
//! | `image` | every record can be decoded; holds them all, and the changes a repair will make |
//! | `names` | names lead to inodes, directories hang together |
//! | `places` | pages and manifests stand where they mean what they were sealed as |
//! | `objects` | the bytes are there, as long and as they were written |
//! | `encoded` | encoded copies are there, and decode to those bytes |
//! | `links` | reference counts; what lost its name comes to `files/lost+found` |
//! | `rest` | extended attributes, marks, totals, files without a record |
//! | `rebuild` | the records are lost: they are made again from the objects |
//! | `salvage` | what can still be read of records that are damaged |
//! | `tree` | the names that a rebuild makes |
//!
//! What the next mount does by itself (files left in `staging/`, sizes of files that were being
//! written, objects of a mount that ended in a crash) is counted and is no finding.
//!
//! A repair puts bytes that are not what was sealed into `quarantine/` as it finds them, then one
//! durable write changes all records, then files that nothing refers to go. Ended at any moment, it
//! can be run again. What cannot be moved or removed is told, and keeps its records; everything else
//! is repaired. Without `repair` not a bit of the store changes.

mod encoded;
mod image;
mod links;
mod names;
mod objects;
mod places;
mod rebuild;
mod rest;
mod salvage;
mod tree;

use super::directories;
use super::disk::{DiskDirectory, DiskPath};
use super::overlay::Overlay;
use super::records::Records;
use super::{Store, StoreError};
use image::Image;
pub use rebuild::Rebuilt;

/// What to check and what to do about it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FsckOptions {
    /// Repair what can be repaired.
    pub repair: bool,
    /// K and N of `K/N`: read the bytes only of every N-th object, beginning with the K-th.
    /// Everything else is checked for all objects.
    pub subset: Option<(u32, u32)>,
}

impl FsckOptions {
    fn reads(&self, number: u64) -> bool {
        self.subset.is_none_or(|(part, parts)| {
            number % u64::from(parts.max(1)) == u64::from(part.saturating_sub(1))
        })
    }
}

/// Something that is wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// One line: what, and where.
    pub what: String,
    /// It is right again.
    pub repaired: bool,
}

/// What the next mount would have done by itself; a repair does it as well.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Leftovers {
    /// Files in `staging/`: no name refers to them.
    pub staged: u64,
    /// Files whose size and time are to be read from their bytes.
    pub unsettled: u64,
    /// Objects that nothing refers to, after a mount that ended in a crash.
    pub unreferenced: u64,
}

/// What was found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Everything that is wrong.
    pub findings: Vec<Finding>,
    /// What is not wrong, but waits for the next mount.
    pub leftovers: Leftovers,
    /// Inodes looked at.
    pub inodes: u64,
    /// Objects looked at.
    pub objects: u64,
    /// Of them, those that only the remote has, which was not asked.
    pub only_remote: u64,
    /// Bytes of objects read.
    pub bytes_read: u64,
}

/// Checks an open, unmounted store. `progress` is told how many bytes of how many are read.
pub fn run(
    store: &Store, options: &FsckOptions, progress: &dyn Fn(u64, u64),
) -> Result<Report, StoreError> {
    let missing = directories::missing(store)?;
    if options.repair {
        store.check_writable()?;
        directories::make(store, &missing)?;
        store.packs.recover()?;
    }
    let (records, sound) = match open(store, options) {
        Ok(opened) => opened,
        Err(error) if is_lost(&error) => return Ok(unreadable(&error)),
        Err(error) => return Err(error),
    };
    let mut image = Image::load(store, options, &records)?;
    for shard in missing {
        let directory = DiskDirectory::ObjectShard(shard).relative();
        image.find(&format!("{}: the directory is missing, made", directory.display()), true);
    }
    if !sound {
        let what = "meta.redb: its checksums do not match, changes since its last sound commit \
                    are lost";
        image.find(what, true);
    }
    if !image.is_empty() {
        names::check(&mut image);
        places::check(&mut image)?;
        objects::check(&mut image, progress)?;
        links::check(&mut image);
    }
    rest::check(&mut image)?;
    if options.repair {
        repair(&mut image, &records)?;
        store.packs.end()?;
    }
    Ok(image.report)
}

/// Makes records again where there are none that can be read, and checks and repairs the store.
///
/// # Errors
/// [`StoreError::MetadataSound`] where there are.
pub fn rebuild(
    store: &Store, progress: &dyn Fn(u64, u64),
) -> Result<(Rebuilt, Report), StoreError> {
    store.check_writable()?;
    directories::make(store, &directories::missing(store)?)?;
    match open(store, &FsckOptions::default()) {
        Err(error) if is_lost(&error) => {}
        Err(error) => return Err(error),
        Ok(_) => return Err(StoreError::MetadataSound(store.path().to_owned())),
    }
    let rebuilt = rebuild::rebuild(store)?;
    let options = FsckOptions { repair: true, subset: None };
    Ok((rebuilt, run(store, &options, progress)?))
}

fn open(store: &Store, options: &FsckOptions) -> Result<(Records, bool), StoreError> {
    if options.repair {
        return Records::open(store.metadata()?);
    }
    let storage: Box<dyn redb::StorageBackend> = if store.has_metadata()? {
        store.disk.database(&DiskPath::Metadata)?
    } else if store.has_objects()? {
        return Err(StoreError::MetadataMissing(store.path().to_owned()));
    } else {
        // The store was made and never mounted.
        Box::new(redb::backends::InMemoryBackend::new())
    };
    Records::open(store.database(Box::new(Overlay::new(storage)?)))
}

/// Whether nothing can be told from the database.
fn is_lost(error: &StoreError) -> bool {
    matches!(error, StoreError::Corrupt(_) | StoreError::MetadataMissing(_))
}

fn unreadable(error: &StoreError) -> Report {
    let why = match error {
        StoreError::Corrupt(what) => format!("is damaged ({what})"),
        _ => "is missing".to_owned(),
    };
    let what = format!(
        "meta.redb: {why}: restore it from a backup, or make it anew from what is in objects/ with \
         kvfs fsck --rebuild"
    );
    let finding = Finding { what, repaired: false };
    Report { findings: vec![finding], ..Report::default() }
}

/// All records, once the bytes are where they are kept, so that these are never lost between two steps; then garbage.
fn repair(image: &mut Image<'_>, records: &Records) -> Result<(), StoreError> {
    if !image.changes.is_empty() {
        records.write(&image.changes)?;
    }
    for path in std::mem::take(&mut image.garbage) {
        if let Err(error) = image.store.disk.remove(&path) {
            let path = path.relative();
            let what = format!("{}: cannot be removed ({error}), {AGAIN}", path.display());
            image.find(&what, false);
        }
    }
    Ok(())
}

/// What to do about a file that a repair could not move or remove.
const AGAIN: &str = "see to that and run kvfs fsck --repair again";

#[cfg(test)]
mod tests;
