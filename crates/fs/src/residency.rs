//! Making bytes resident that only the remote has, and saying which those are.
//!
//! Whether the disk has an object is decided by its file alone. Where the file is missing, an encoded
//! copy beside it ([`super::decode`]) or a verified remote copy on record takes its place: it is
//! fetched, compared and installed before the open answers. Who comes meanwhile waits for the same
//! transfer.

use std::io;
use std::sync::Arc;

use super::foreign::{Foreign, Provenance};
use super::tiers::Tiers;
use super::whereabouts::Whereabouts;
use super::{FileSystem, FsError};
use crate::core::Core;
use crate::core::failures::note_failure;
use crate::core::happened;
use crate::core::state::State;
use kvfs_page::{Checksum, PageIdentity};
use kvfs_storage::store::disk::{Access, DiskFile, DiskPath};
use kvfs_storage::store::event::{Event, What};
use kvfs_storage::store::record::{InodeId, ObjectId, RemoteCopy, RemoteState, Role};
use kvfs_storage::tier::counters::Tier;
use kvfs_storage::tier::encoding::Subject;
use kvfs_storage::tier::exchange::{Exchange, Item};
use kvfs_storage::tier::remote::RemoteError;
use kvfs_storage::tier::what_if::Happened;

/// Times that somebody else may have been doing something with the object.
const ATTEMPTS_MAX: usize = 3;

/// The file that came, open: what is open does not leave before whoever waited for it has it. `None`
/// if what was done brought none.
pub(super) type Landed = Option<Arc<dyn DiskFile>>;

/// What came of fetching an object.
#[derive(Debug)]
pub(super) enum Fetched {
    /// It is here; it may leave again once the file is closed.
    Here(Arc<dyn DiskFile>),
    /// Something else was done with it meanwhile: it may be here.
    LookAgain,
    /// Nobody else has it.
    NoCopy,
}

/// Where the bytes of an object go.
pub(super) enum Target {
    Disk(Arc<dyn DiskFile>),
    Memory(Arc<dyn DiskFile>),
}

/// What brings bytes here, and knows where they are.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Residency<'a> {
    pub(super) core: &'a Core,
    pub(super) tiers: Option<&'a Tiers>,
    pub(super) foreign: &'a Foreign,
}

impl FileSystem {
    pub(crate) fn residency(&self) -> Residency<'_> {
        Residency { core: &self.core, tiers: self.tiers.as_ref(), foreign: &self.foreign }
    }

    /// Whether opening a file will wait for the remote.
    pub fn waits_for_remote(&self, id: InodeId) -> bool {
        self.residency().comes_from(id) == Some(Tier::Remote)
    }
}

impl Residency<'_> {
    /// Opens an object's file for reading, fetching it first if only the remote has it. Which tier had it.
    pub(super) fn open_resident(
        &self, (id, role): (InodeId, Role), object: ObjectId,
    ) -> Result<(Arc<dyn DiskFile>, Tier), FsError> {
        let mut came_from = None;
        for _ in 0..ATTEMPTS_MAX {
            if let Some(file) = self.open_if_here(object)? {
                return Ok((file, came_from.unwrap_or_else(|| tier_here(self.core, object))));
            }
            let is_encoded = self.core.state().metadata.encoded_copy(object)?.is_some();
            let from = if is_encoded { Tier::Ssd } else { Tier::Remote };
            let from = *came_from.get_or_insert(from);
            match self.fetch((id, role), object)? {
                Fetched::Here(file) => return Ok((file, from)),
                Fetched::LookAgain => {}
                Fetched::NoCopy => return Ok((self.open_last_copy(id, object)?, from)),
            }
        }
        // It came and went each time; nothing is wrong with it.
        Err(FsError::Stale)
    }

    /// Opens an object that nobody else has.
    fn open_last_copy(&self, id: InodeId, object: ObjectId) -> Result<Arc<dyn DiskFile>, FsError> {
        // Somebody may have brought it here, and dropped the copy that it came from, in between.
        if let Some(file) = self.open_if_here(object)? {
            return Ok(file);
        }
        if self.core.state().metadata.object(object)?.is_none() {
            // Its last name went while it was on its way.
            return Err(FsError::Stale);
        }
        let is_lost = self.whereabouts(&self.core.state(), object)? == Whereabouts::Nowhere;
        let error = self.corrupt(id, object, Tier::Ssd, "its file is missing from the store");
        if is_lost {
            self.note_damage(id, object, true);
        }
        Err(error)
    }

    /// Opens an object's file for reading if this machine has it.
    pub(super) fn open_if_here(&self, object: ObjectId) -> io::Result<Landed> {
        match self.core.store.open_object(object, Access::Read) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            outcome => Ok(Some(Arc::from(outcome?))),
        }
    }

    /// The tier that a file's bytes must come back from before it can be opened: the remote, or the
    /// disk that has them encoded.
    pub(super) fn comes_from(&self, id: InodeId) -> Option<Tier> {
        self.tiers?;
        let (object, tier) = {
            let state = self.core.state();
            let inode = state.metadata.inode(id).ok().flatten()?;
            let object = state.current_object(id, inode.file()?)?;
            let is_encoded = state.metadata.encoded_copy(object).ok().flatten().is_some();
            if !is_encoded {
                state.metadata.remote_copy(object).ok().flatten()?;
            }
            (object, if is_encoded { Tier::Ssd } else { Tier::Remote })
        };
        self.core.store.stat_object(object).is_err().then_some(tier)
    }

    /// Brings an object back from its encoded copy or the remote.
    pub(super) fn fetch(
        &self, (id, role): (InodeId, Role), object: ObjectId,
    ) -> Result<Fetched, FsError> {
        let Some(tiers) = self.tiers else {
            return Ok(Fetched::NoCopy);
        };
        if let fetched @ (Fetched::Here(_) | Fetched::LookAgain) =
            self.unpack(tiers, (id, role), object)?
        {
            return Ok(fetched);
        }
        let Some(exchange) = &tiers.exchange else {
            return self.without_remote(object);
        };
        let (copy, item, origin) = {
            let state = self.core.state();
            let copy = state.metadata.remote_copy(object)?;
            match (copy, item(&state, role, object)?) {
                (Some(copy), Some(item)) => (copy, item, state.origin_of(id)?),
                _ => return Ok(Fetched::NoCopy),
            }
        };
        let transfer = || match origin {
            Some(from) => self.receive((tiers, exchange), ((id, role), from), &item, &copy),
            None => self.transfer((tiers, exchange), id, &item, &copy),
        };
        let outcome = tiers.share(object, || tiers.fetching.measure(copy.stored_bytes, transfer));
        let landed = outcome.map_err(|error| {
            if let Some(from) = origin {
                self.did_not_arrive(from, &error);
            } else if let RemoteError::Corrupt(why) | RemoteError::Missing(why) = &error {
                self.corrupt(id, object, Tier::Remote, why);
                self.note_damage(id, object, true);
            }
            FsError::Remote(error)
        })?;
        Ok(landed.into())
    }

    /// What the remote has is not lost because the mount has no remote.
    fn without_remote(&self, object: ObjectId) -> Result<Fetched, FsError> {
        if self.core.state().metadata.remote_copy(object)?.is_none() {
            return Ok(Fetched::NoCopy);
        }
        let why = format!("object {object}: only the remote has it, and the mount is offline");
        Err(FsError::Remote(RemoteError::Unreachable(why)))
    }

    /// Brings an object here and notes that it is.
    fn transfer(
        &self, (tiers, exchange): (&Tiers, &Exchange), id: InodeId, item: &Item, copy: &RemoteCopy,
    ) -> Result<Landed, RemoteError> {
        let object = item.object;
        // Somebody else's transfer may just have ended.
        if let Some(file) = self.open_if_here(object).map_err(RemoteError::local)? {
            return Ok(Some(file));
        }
        let target = self.target(tiers, item).map_err(RemoteError::local)?;
        let tier = target.tier();
        let outcome = exchange.download(&self.core.store, item, copy, target.file());
        let landed = match outcome {
            Ok(()) => {
                tiers.counters.moved(Tier::Remote, tier, item.length);
                self.land(tiers, (id, object, item.length), target).map_err(RemoteError::local)
            }
            Err(error) => {
                self.abandon(object, &target);
                Err(error)
            }
        };
        match &landed {
            Ok(Some(_)) => {
                self.core.sample.note(object, Happened::Fetched, item.length);
                let event = Event::new(What::Fetched, "only the remote had it");
                happened::note_move(self.core, id, event);
            }
            Ok(None) => {}
            Err(error) => self.not_fetched(tiers, tier, (id, item), error),
        }
        landed
    }

    /// The bytes of a file did not come from the remote to this tier.
    fn not_fetched(
        &self, tiers: &Tiers, tier: Tier, (id, item): (InodeId, &Item), error: &RemoteError,
    ) {
        tiers.counters.failed(Tier::Remote, tier, error.label());
        let why = format!("was not fetched: {error}");
        note_failure(self.core, ("fetch", error.label()), (id, Some(item.length)), why);
    }

    /// Lets complete and compared bytes be seen.
    pub(super) fn land(
        &self, tiers: &Tiers, (id, object, length): (InodeId, ObjectId, u64), target: Target,
    ) -> io::Result<Landed> {
        // What is still open for writing is not at rest.
        match target {
            Target::Disk(file) => {
                drop(file);
                self.install(tiers, (id, object, length))
            }
            Target::Memory(file) => {
                drop(file);
                let Some(ram) = &self.core.store.ram else {
                    return Ok(None);
                };
                let landed = ram.arrived(object, id);
                if matches!(landed, Ok(Some(_))) {
                    self.core.sample.note(object, Happened::Landed, length);
                } else {
                    ram.give_up(object);
                }
                Ok(landed?.map(Arc::from))
            }
        }
    }

    /// The bytes of an object did not arrive.
    pub(super) fn abandon(&self, object: ObjectId, target: &Target) {
        match target {
            Target::Disk(_) => {
                let _ = self.core.store.disk.remove(&DiskPath::Incoming(object));
            }
            Target::Memory(_) => {
                if let Some(ram) = &self.core.store.ram {
                    ram.give_up(object);
                }
            }
        }
    }

    /// Brings a page here that another store has written.
    fn receive(
        &self, (tiers, exchange): (&Tiers, &Exchange),
        ((id, role), from): ((InodeId, Role), Provenance), item: &Item, copy: &RemoteCopy,
    ) -> Result<Landed, RemoteError> {
        let object = item.object;
        if let Some(file) = self.open_if_here(object).map_err(RemoteError::local)? {
            return Ok(Some(file));
        }
        let file: Arc<dyn DiskFile> = self.incoming(object).map_err(RemoteError::local)?.into();
        let outcome = exchange.download(&self.core.store, item, copy, &file);
        let outcome = outcome.and_then(|()| self.check_arrived(from, role, &file));
        let outcome = outcome.and_then(|()| {
            self.install_arrived(tiers, (id, object), &file).map_err(RemoteError::local)
        });
        match &outcome {
            Ok(_) => {
                tiers.counters.moved(Tier::Remote, Tier::Ssd, item.length);
                self.core.sample.note(object, Happened::Fetched, item.length);
                let event = Event::new(What::Fetched, "another machine had written it");
                happened::note_move(self.core, id, event);
                self.core.invalidate(super::Invalidation::Inode(id));
            }
            Err(error) => {
                self.not_fetched(tiers, Tier::Ssd, (id, item), error);
                let _ = self.core.store.disk.remove(&DiskPath::Incoming(object));
            }
        }
        outcome
    }

    /// The disk while it has room, since its copy outlives a restart; else memory; else the disk,
    /// from which others leave then.
    fn target(&self, tiers: &Tiers, item: &Item) -> io::Result<Target> {
        let used_bytes = ssd_used_bytes(self.core, Some(tiers));
        // What nobody has asked for before is not worth a write where writes are counted.
        let is_spared = tiers.writes.is_used_up() && !tiers.writes.note_asked(item.object);
        let has_room = !self.core.store.is_read_only()
            && !is_spared
            && tiers.copies.disk().has_room(used_bytes, item.length);
        if !has_room
            && let Some(ram) = &self.core.store.ram
            && let Some(file) = ram.receive(item.object, item.length)?
        {
            return Ok(Target::Memory(Arc::from(file)));
        }
        Ok(Target::Disk(Arc::from(self.incoming(item.object)?)))
    }

    /// An empty file for an object that arrives.
    pub(super) fn incoming(&self, object: ObjectId) -> io::Result<Box<dyn DiskFile>> {
        let path = DiskPath::Incoming(object);
        match self.core.store.disk.remove(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        self.core.store.disk.create(&path)
    }

    /// Gives complete and compared bytes their place on the disk, unless they were deleted
    /// meanwhile. A crash may leave a file without all of its bytes: then the check at its first
    /// open finds it, and the copy that they came from takes its place again.
    pub(super) fn install(
        &self, tiers: &Tiers, (id, object, length): (InodeId, ObjectId, u64),
    ) -> io::Result<Landed> {
        let mut state = self.core.state();
        let remote = state.metadata.remote_copy(object).map_err(io::Error::other)?;
        let encoded = state.metadata.encoded_copy(object).map_err(io::Error::other)?;
        let incoming = DiskPath::Incoming(object);
        if remote.is_none() && encoded.is_none() {
            self.core.store.disk.remove(&incoming)?;
            return Ok(None);
        }
        let path = DiskPath::Object(object);
        self.core.store.disk.rename(&incoming, &path)?;
        tiers.writes.note(length);
        let file = Arc::from(self.core.store.disk.open(&path, Access::Read)?);
        if encoded.is_some() {
            tiers.copies.note_raw_back(object, id);
        }
        if let Some(copy) = remote.filter(|copy| copy.state == RemoteState::Only) {
            state.metadata.set_remote_state(object, copy, RemoteState::Named);
            tiers.copies.allow_leaving(object, id, length);
            drop(state);
            self.core.invalidate(super::Invalidation::Inode(id));
        }
        Ok(Some(file))
    }
}

/// Bytes of objects on the disk.
pub(super) fn ssd_used_bytes(core: &Core, tiers: Option<&Tiers>) -> u64 {
    let stored = core.state().metadata.totals.bytes;
    let Some(tiers) = tiers else { return stored };
    let encoded = tiers.copies.encoded().usage();
    let left = tiers.copies.disk().remote_use().only_bytes + encoded.only_bytes;
    stored.saturating_sub(left) + encoded.stored_bytes
}

impl Target {
    /// The file that they are written to.
    pub(super) fn file(&self) -> &Arc<dyn DiskFile> {
        let (Target::Disk(file) | Target::Memory(file)) = self;
        file
    }

    /// The tier that it belongs to.
    pub(super) fn tier(&self) -> Tier {
        match self {
            Target::Disk(_) => Tier::Ssd,
            Target::Memory(_) => Tier::Ram,
        }
    }
}

impl Fetched {
    /// Whether another tier has, or had, the object.
    pub(super) fn has_other(&self) -> bool {
        !matches!(self, Fetched::NoCopy)
    }
}

impl From<Landed> for Fetched {
    fn from(landed: Landed) -> Fetched {
        landed.map_or(Fetched::LookAgain, Fetched::Here)
    }
}

/// Which tier of this machine an object is opened from.
pub(super) fn tier_here(core: &Core, object: ObjectId) -> Tier {
    let is_in_memory = core.store.ram.as_ref().is_some_and(|ram| ram.holds(object));
    if is_in_memory { Tier::Ram } else { Tier::Ssd }
}

/// What an object's bytes are known by; `None` as long as it has no checksum.
pub(super) fn item(state: &State, role: Role, object: ObjectId) -> Result<Option<Item>, FsError> {
    let Some(record) = state.metadata.object(object)? else {
        return Ok(None);
    };
    let subject = match role {
        Role::Page(page) => Subject::Page(PageIdentity::from(&page)),
        _ => Subject::File,
    };
    let encoded = state.metadata.encoded_copy(object)?;
    Ok(record.checksum.map(|checksum| Item {
        object,
        length: record.length,
        checksum: Checksum(checksum),
        subject,
        encoded,
    }))
}
