//! The file system: what each operation means, without any type of the FUSE library.
//!
//! [`FileSystem`] is the mount's single entry point; `kvfs-daemon` decodes a request, makes one
//! call here and replies. The operations lie in one file per concept:
//!
//! | file | operations |
//! |---|---|
//! | `lookup` | lookup, forget, getattr, the permissions' neighbours |
//! | `create` | create, mkdir, mknod, symlink |
//! | `open` | open, and the check that bytes are what was sealed |
//! | `transfer` | read, write, fallocate, seek, copy for handles that the daemon serves |
//! | `append`, `full_tails`, `torn_rows` | rows of tails and token files |
//! | `core` | names, inodes, objects and handles; what all others stand on |
//! | `close` | flush, release, fsync |
//! | `publish`, `insert` | pages and manifests appear |
//! | `rename`, `link`, `remove` | names |
//! | `setattr`, `extended` | attributes |
//! | `retention` | limits of directories, and what goes beyond them |
//! | `list` | readdir |
//! | `commit`, `durable`, `synchronous` | the group commit, whose turn it is, `O_SYNC` |
//! | `held_back` | new pages that memory and the remote keep, to spare the disk |
//! | `encoded`, `decode` | cold objects in fewer bytes on the disk, and back |
//! | `lossy` | cold pages in fewer bits, as new versions |
//! | `residency`, `flights` | fetching what only the remote has, once for all who ask |
//! | `keep_resident` | operations whose bytes must be here and stay |
//! | `verify` | how often opens compare bytes with their checksum |
//! | `damage`, `on_corrupt` | a local copy that is not what was written, and if there is no other |
//! | `scrub` | comparing everything before somebody needs it |
//! | `prefetch` | bringing nearer what will be opened next |
//! | `movement`, `pin` | moving and keeping a file on request |
//! | `errands` | the same, and hints, for everything below a directory |
//! | `demotion`, `upload`, `leave`, `manifest_of_names` | moving towards the remote |
//! | `growing` | copies of tails and token files for that manifest |
//! | `rebuild` | a new store takes over the names that another published |
//! | `collection` | garbage |
//! | `tiers`, `survey` | what those share, and what of it is on record |
//! | `backlog`, `pacing` | changes that wait for a commit, and their pace |
//! | `whereabouts`, `placement` | where the bytes of an object are, and of all pages of a layer |
//! | `health` | how well the mount is, and why |
//! | `takeover` | the mount goes on with another daemon |
//! | `subject` | what a request is about, for the log |
//! | `views`, `status`, `metrics`, `history`, `hottest`, `seen` | `.kvfs/`, what happened, what is used |
//! | `batch` | many names of a directory in one question |
//! | `prefixes` | finding pages by the tokens that they are about |
//! | `foreign` | the same in other stores of the remote |

#![forbid(unsafe_code)]

mod append;
pub(crate) mod attributes;
mod backlog;
mod batch;
mod close;
mod collection;
mod commit;
pub mod core;
mod create;
mod damage;
mod decode;
mod demotion;
mod descriptors;
mod dialogue;
mod discarded;
mod durable;
mod encoded;
mod errands;
mod error;
mod extended;
mod flights;
mod foreign;
mod full_tails;
pub mod glance;
mod growing;
mod health;
mod held_back;
mod history;
mod hits;
mod hottest;
mod insert;
mod keep_resident;
mod leave;
mod link;
mod list;
mod live;
mod lookup;
mod lossy;
mod manifest_of_names;
mod metrics;
mod movement;
mod on_corrupt;
mod open;
mod opened;
mod pacing;
mod pin;
mod placement;
mod postponed;
mod prefetch;
mod prefixes;
mod publish;
pub mod rebuild;
mod remote_memory;
mod remove;
mod rename;
mod reply;
mod residency;
mod retention;
mod scrub;
mod seen;
mod setattr;
mod share;
mod sight;
mod status;
mod subject;
mod survey;
mod sweep;
mod synchronous;
pub mod takeover;
mod tiers;
mod torn_rows;
mod transfer;
mod tree;
mod upload;
mod verify;
mod views;
mod whereabouts;

use std::sync::{Arc, OnceLock};

pub use self::core::Core;
pub use self::core::happened::take_waiting_events;
pub use self::core::releases::{Release, Releases};
pub use self::core::waits::{Awaited, Waits};
pub use attributes::{Attributes, Caller, Found, Place};
pub use backlog::KeptLow;
pub use close::sync_directory;
pub use collection::{CollectionRequest, collect_garbage};
pub use core::recalled;
pub use create::{Created, NewNode};
pub use demotion::{Mover, move_objects};
pub use discarded::{remove_discarded, remove_through};
pub use encoded::has_other_copies;
pub use errands::Errands;
pub use error::FsError;
pub use extended::{extended_attribute_for, set_extended_attribute_for};
pub use foreign::refresh_foreign;
pub use held_back::make_all_durable;
pub use list::{Listed, Listing};
pub use live::{Changes, Choices, Steering, configuration, settings_changed};
pub use lookup::Lookup;
pub use metrics::exposition;
pub use on_corrupt::OnCorrupt;
pub use opened::{Caching, Opened, OpenedBy};
pub use pacing::{Pace, Pacing};
pub use prefetch::{Ahead, QUEUE_MAX as PREFETCH_QUEUE_MAX, THREADS as PREFETCH_THREADS};
pub use prefixes::{
    Answers, Indexer, VirtualDirectories, look_at_beginning, look_is_due, read_answers,
    remove_unfinished_saves,
};
pub use remote_memory::RemoteMemory;
pub use retention::{Retainer, Retention, check_limit, record_uses, retain};
pub use scrub::{ScrubRequest, look_at_known_damage, scrub};
pub use setattr::{NewTime, SetAttributes};
pub use sight::own_manifests;
pub use subject::{Subject, shown};
pub use survey::survey;
pub use sweep::{check_records, sweep_after_crash};
pub use synchronous::is_synchronous;
pub use tiers::Tiers;
pub use transfer::WriteOutcome;
pub use verify::Verify;

use kvfs_observe::Observer;
use kvfs_page::classify;
use kvfs_storage::store::directories;
use kvfs_storage::store::record::{DirectoryClass, Entry, Inode, InodeId, Kind, Time};
use kvfs_storage::store::recovery::{self, Recovered, Unswept};
use kvfs_storage::store::{Store, StoreError, metadata::Life, metadata::Metadata};
// `flights` is compiled once more, with other locks under this name, by `tests/models`.
use crate::core::state::State;
use kvfs_storage::sync;
use sweep::LeftByCrash;

/// Longest name, as on every Linux filesystem.
pub const NAME_BYTES_MAX: usize = 255;

/// How file bytes reach the clients.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum IoMode {
    /// The kernel reads and writes the backing files itself.
    Passthrough,
    /// The daemon serves every byte; the reason says why.
    Served(String),
}

/// How requests reach the daemon.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Transport {
    /// Through so many rings of `io_uring`.
    Rings(usize),
    /// Through the device; the reason says why.
    Device(String),
}

/// How the requests of a mount come, once that is known.
pub fn transport(fs: &FileSystem) -> Option<&Transport> {
    fs.transport.get()
}

/// Something that the kernel caches and must forget.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Invalidation {
    /// The names of an inode, and its attributes.
    Names(InodeId),
    /// Attributes of an inode, and the listing if it is a directory.
    Inode(InodeId),
}

/// Makes the kernel ask anew for the attributes of a directory, and so for its listing.
pub struct AskAnew(pub Box<dyn Fn(InodeId) + Send + Sync>);

impl std::fmt::Debug for AskAnew {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("AskAnew")
    }
}

/// A mounted store.
#[derive(Debug)]
pub struct FileSystem {
    /// Names, inodes, objects and handles.
    pub core: Core,
    durable: durable::Durable,
    backlog: backlog::Backlog,
    remover: discarded::Remover,
    postponed: postponed::Postponed,
    left_by_crash: LeftByCrash,
    transport: OnceLock<Transport>,
    /// The tiers below the raw files, and what moves between them.
    tiers: Option<Tiers>,
    /// Pages that are brought nearer before they are opened.
    pub prefetch: prefetch::Prefetch,
    /// The collection of garbage.
    pub collection: collection::Collection,
    prefixes: prefixes::Prefixes,
    blocks: prefixes::Blocks,
    batches: batch::Batches,
    foreign: foreign::Foreign,
    /// What directories may hold.
    pub retention: Retention,
    /// What opens do with the bytes that they find.
    pub choices: Choices,
    steering: OnceLock<Arc<dyn Steering>>,
    /// What was asked of everything below directories.
    pub errands: Errands,
    /// The scrub.
    pub scrubs: scrub::Scrub,
    /// Exchanges of the daemon.
    pub upgrades: takeover::Upgrades,
}

impl FileSystem {
    /// Opens the metadata of a store and recovers what a crash left.
    pub fn open(
        store: Store, observer: Arc<Observer>,
        invalidations: crossbeam_channel::Sender<Invalidation>,
    ) -> Result<(FileSystem, Recovered), StoreError> {
        recovery::empty_staging(&store)?;
        if !store.is_read_only()
            && let Err(error) = store.packs.recover()
        {
            log::warn!("the packs are looked through again at the next mount: {error}");
        }
        if let Err(error) = store.fill_reserve() {
            log::warn!("the disk has no room to keep for the metadata: {error}");
        }
        let mut metadata = Metadata::open(store.metadata()?)?;
        directories::complete(&store, &metadata)?;
        let left_by_crash = LeftByCrash::new(Unswept::find(&store, &mut metadata)?);
        let recovered = recovery::recover(&store, &mut metadata)?;
        make_roots(&mut metadata)?;
        let believed = metadata.clock()?;
        store.events.begin(&metadata)?;
        if let Some(ram) = &store.ram {
            ram.tell(Arc::clone(&store.events));
        }
        let mut state = State::new(metadata);
        state.unsettled.extend(recovered.still_changing.iter().copied());
        state.full_tails.extend(recovered.tails.iter().copied());
        damage::known::put_into(&mut state)?;
        let file_system = assemble(store, state, (observer, invalidations), left_by_crash);
        file_system.retention.begin(believed);
        if !file_system.core.store.is_read_only() {
            torn_rows::cut_after_crash(&file_system.core);
            full_tails::seal_after_crash(&file_system);
        }
        Ok((file_system, recovered))
    }

    /// How bytes reach the clients; `trial` decides on the first call.
    pub fn io_mode(&self, trial: impl FnOnce() -> IoMode) -> &IoMode {
        self.core.io_mode.get_or_init(|| {
            let mode = trial();
            self.core.observer.set_passthrough(mode == IoMode::Passthrough);
            mode
        })
    }

    /// Says how requests come, for the status.
    pub fn set_transport(&self, transport: Transport) {
        match &transport {
            Transport::Rings(count) => log::info!("requests come through {count} ring(s)"),
            Transport::Device(reason) => log::debug!("requests come through the device: {reason}"),
        }
        let _ = self.transport.set(transport);
    }

    /// Who knows the settings by name, if anybody does. Only before the mount answers.
    pub fn steer_by(&self, steering: Option<&Arc<dyn Steering>>) {
        if let Some(steering) = steering {
            let _ = self.steering.set(Arc::clone(steering));
        }
    }

    /// The store below.
    pub fn store(&self) -> &Store {
        &self.core.store
    }

    /// Counters and recent errors.
    pub fn observer(&self) -> &Observer {
        &self.core.observer
    }
}

/// A file system of a state, as it is before anybody uses it.
fn assemble(
    store: Store, state: State,
    (observer, invalidations): (Arc<Observer>, crossbeam_channel::Sender<Invalidation>),
    left_by_crash: LeftByCrash,
) -> FileSystem {
    let backlog = backlog::Backlog::default();
    backlog.look_for_room(&store);
    let core = Core::new(store, state, observer, invalidations);
    let retention = Retention::new(Arc::clone(&core.uses));
    FileSystem {
        core,
        durable: durable::Durable::default(),
        backlog,
        remover: discarded::Remover::default(),
        postponed: postponed::Postponed::default(),
        left_by_crash,
        transport: OnceLock::new(),
        tiers: None,
        prefetch: prefetch::Prefetch::default(),
        collection: collection::Collection::default(),
        prefixes: prefixes::Prefixes::default(),
        blocks: prefixes::Blocks::default(),
        batches: batch::Batches::default(),
        foreign: foreign::Foreign::default(),
        retention,
        choices: Choices::default(),
        steering: OnceLock::new(),
        errands: Errands::default(),
        scrubs: scrub::Scrub::default(),
        upgrades: takeover::Upgrades::default(),
    }
}

/// Checks a name that is to be made.
fn check_new(place: &Place) -> Result<(), FsError> {
    if is_virtual(place.parent) {
        return Err(FsError::NotPermitted);
    }
    check_name(&place.name)
}

/// Whether an inode is nowhere in the store.
fn is_virtual(id: InodeId) -> bool {
    views::is_view(id) || prefixes::is_virtual(id)
}

/// Checks the length of a name.
fn check_name(name: &[u8]) -> Result<(), FsError> {
    if name.len() > NAME_BYTES_MAX { Err(FsError::NameTooLong) } else { Ok(()) }
}

/// The directories that every mount has.
fn make_roots(metadata: &mut Metadata) -> Result<(), StoreError> {
    const MODELS: InodeId = InodeId(2);
    const FILES: InodeId = InodeId(3);
    if metadata.inode(InodeId::ROOT)?.is_some() {
        return Ok(());
    }
    let now = Time::now();
    let directory = |class, name: &[u8], links| Inode {
        kind: Kind::Directory { class, parent: InodeId::ROOT, name: name.to_vec() },
        mode: 0o755,
        uid: nix::unistd::geteuid().as_raw(),
        gid: nix::unistd::getegid().as_raw(),
        links,
        atime: now,
        mtime: now,
        ctime: now,
    };
    let root = directory(DirectoryClass::Root, b"", 4);
    metadata.put_inode(Life::Durable, InodeId::ROOT, &root);
    for (id, class, name) in
        [(MODELS, DirectoryClass::Models, "models"), (FILES, DirectoryClass::Plain, "files")]
    {
        let inode = directory(class, name.as_bytes(), 2);
        metadata.put_inode(Life::Durable, id, &inode);
        let entry = Entry { inode: id, file_type: libc::S_IFDIR };
        metadata.put_entry(Life::Durable, InodeId::ROOT, name.as_bytes(), entry);
    }
    Ok(())
}

#[cfg(test)]
mod unmounted;
