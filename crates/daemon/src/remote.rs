//! The remote of a mount: whether it is the one that the store needs, and how it is attached.
//!
//! A store remembers its remote. What only that one has would be lost to whoever mounts the store
//! without it, one forgotten option away, so such a mount is refused unless it is asked for.

use std::sync::Arc;
use std::time::Duration;

use super::mount::{MountError, MountOptions, RemoteOptions};
use kvfs_fs::rebuild::{self, RebuildError, RebuildFrom, Rebuilt};
use kvfs_fs::{FileSystem, FsError, Mover, RemoteMemory, Tiers, has_other_copies};
use kvfs_observe::Observer;
use kvfs_storage::store::Store;
use kvfs_storage::store::record::OnlyRemote;
use kvfs_storage::store::standing::{self, Standing};
use kvfs_storage::tier::counters::Counters;
use kvfs_storage::tier::encoded::EncodedCopies;
use kvfs_storage::tier::encoding::ColdEncoding;
use kvfs_storage::tier::exchange::Exchange;
use kvfs_storage::tier::remote::hold::Grace;
use kvfs_storage::tier::remote::names::Publisher;
use kvfs_storage::tier::remote::{
    BlobStore, Numbers, Options as RemoteReached, Remote, RemoteError, RemoteId, State,
};
use kvfs_storage::tier::ssd::SsdTier;

/// How long a mount waits for a remote that is not where the store's was, to hear which one it is.
const ANSWER_MAX: Duration = Duration::from_secs(30);

/// How long a mount waits to hear that its keys fit. A remote that is down says so later, in the
/// status: the mount does not depend on it.
const KEY_PATIENCE: Duration = Duration::from_secs(3);

/// Why a store is not mounted with what it was given for a remote.
#[derive(Debug)]
pub enum NeedError {
    /// None was given.
    Missing {
        /// What only it has.
        only_remote: OnlyRemote,
        /// Where it was; unknown to a store of an older kvfs.
        place: Option<String>,
    },
    /// What was given is another one, or does not answer.
    Other {
        /// What only the needed one has.
        only_remote: OnlyRemote,
        /// Where that one was.
        place: String,
        /// What is wrong with the one that was given.
        why: String,
    },
}

impl std::fmt::Display for NeedError {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (NeedError::Missing { only_remote, .. } | NeedError::Other { only_remote, .. }) = self;
        let what = match only_remote.objects {
            1 => "the bytes of 1 file".to_owned(),
            count => format!("the bytes of {count} files"),
        };
        match self {
            NeedError::Missing { place: Some(place), .. } => write!(
                formatter,
                "{what} are only in the remote {place}: mount with --remote {place}, or without \
                 them with --offline"
            ),
            NeedError::Missing { place: None, .. } => write!(
                formatter,
                "{what} are only in a remote: mount with --remote and its URL, or without them \
                 with --offline"
            ),
            NeedError::Other { place, why, .. } => write!(
                formatter,
                "{what} are only in the remote that was at {place}, and the one given cannot take \
                 its place ({why}): mount with --remote {place}, or without them with --offline"
            ),
        }
    }
}

impl std::error::Error for NeedError {}

/// Refuses a remote that is not the one the store needs; a new store takes over the names that the
/// remote has for it.
pub(super) fn prepare(
    options: &MountOptions, store: &Store, numbers: &Arc<Numbers>, observer: &Observer,
) -> Result<(), MountError> {
    let standing = standing::read(store.metadata()?)?;
    let given = options.remote.as_ref();
    if !options.offline && standing.only_remote.objects > 0 {
        check_need(options, &standing, numbers).map_err(|error| match error {
            Problem::Need(error) => MountError::Need(error),
            Problem::Thread(error) => MountError::Thread(error),
        })?;
    }
    match given {
        Some(wanted) => rebuild_if_new(options, wanted, (store, &standing), numbers, observer),
        None => Ok(()),
    }
}

enum Problem {
    Need(NeedError),
    Thread(std::io::Error),
}

fn check_need(
    options: &MountOptions, standing: &Standing, numbers: &Arc<Numbers>,
) -> Result<(), Problem> {
    let only_remote = standing.only_remote;
    let place = standing.place.as_ref().map(|known| known.place.clone());
    let Some(given) = options.remote.as_ref() else {
        return Err(Problem::Need(NeedError::Missing { only_remote, place }));
    };
    // What does not answer there is waited for in the background; an older kvfs noted no place.
    let Some(place) = place.filter(|place| *place != given.place.to_string()) else {
        return Ok(());
    };
    let expected = standing.identity.and_then(|identity| identity.remote).map(RemoteId);
    let remote = Remote::open(&given.place, given.options(&options.store, expected, numbers));
    let remote = remote.map_err(Problem::Thread)?;
    let why = match remote.wait_for_answer(ANSWER_MAX) {
        State::Up { .. } => return Ok(()),
        State::Down { error, .. } => error.to_string(),
        State::Connecting => format!("remote {}: no answer", given.place),
    };
    Err(Problem::Need(NeedError::Other { only_remote, place, why }))
}

/// A new store takes over the names that the remote has for it.
fn rebuild_if_new(
    options: &MountOptions, wanted: &RemoteOptions, (store, standing): (&Store, &Standing),
    numbers: &Arc<Numbers>, observer: &Observer,
) -> Result<(), MountError> {
    if options.read_only || wanted.rebuild_from == RebuildFrom::Nothing {
        return Ok(());
    }
    if standing.is_in_use {
        return match wanted.rebuild_from {
            // The option may stay where it was written down when the store was made.
            RebuildFrom::Store(id) if standing.rebuilt_from != Some(id.0) => {
                Err(MountError::Rebuild(RebuildError::NotNew(id)))
            }
            _ => Ok(()),
        };
    }
    let limits = rebuild::limits(wanted.rebuild_from);
    let reached = RemoteReached { limits, ..wanted.options(&options.store, None, numbers) };
    let remote = Remote::open(&wanted.place, reached).map_err(MountError::Thread)?;
    let outcome = rebuild::rebuild(store, &Arc::new(remote), wanted.rebuild_from);
    let outcome = outcome.map_err(MountError::Rebuild)?;
    if let Rebuilt::From { store, files, left_out, passed_over } = outcome {
        log::info!("rebuilt from the names of store {store}: {files} files");
        for why in passed_over {
            observer.failed(&format!(
                "the files are those of an older publication, since a newer one is damaged: {why}"
            ));
        }
        if left_out > 0 {
            observer.failed(&format!(
                "{left_out} files were left out: the remote does not have their bytes"
            ));
        }
    }
    Ok(())
}

/// Attaches the tiers below the raw files, if there are any, and returns what will move objects. A
/// store with copies elsewhere has tiers also without a remote: what changes takes them off the
/// record.
pub(super) fn attach_tiers(
    options: &MountOptions, file_system: &mut FileSystem, counters: &Counters,
    numbers: &Arc<Numbers>, goes_on: bool,
) -> Result<Option<Mover>, MountError> {
    let has_copies = has_other_copies(file_system).map_err(MountError::Flush)?;
    if options.remote.is_none() && options.cold == ColdEncoding::None && !has_copies {
        return Ok(None);
    }
    let remote = options.remote.as_ref();
    let remote = remote.map(|wanted| connect(wanted, options, file_system, numbers, goes_on));
    let remote = remote.transpose()?;
    let (exchange, publisher) = remote.unzip();
    let ssd = SsdTier::new(options.ssd_bytes);
    let encoded = EncodedCopies::new(options.cold, options.ssd_bytes);
    let tiers = Tiers::new(exchange, ssd, encoded, counters.clone());
    tiers.writes.set_day_bytes(options.ssd_writes_day_bytes);
    file_system.attach(tiers);
    Ok((!options.read_only).then(|| Mover::new(publisher)))
}

/// Connects to the remote, in the background. Whether keys fit is waited for, but not while programs wait for a mount that
/// goes on with what it had.
fn connect(
    wanted: &RemoteOptions, options: &MountOptions, file_system: &FileSystem,
    numbers: &Arc<Numbers>, goes_on: bool,
) -> Result<(Exchange, Publisher), MountError> {
    let (id, expected) =
        RemoteMemory::of(&file_system.core).identity().map_err(MountError::Flush)?;
    let seen = |sealed| {
        RemoteMemory::of(&file_system.core).manifests_seen(sealed).map_err(MountError::Flush)
    };
    if wanted.keys.is_none() && !seen(true)?.is_empty() {
        // Whatever its marker says by now: nothing goes there in clear.
        return Err(MountError::Key(RemoteError::Key(format!(
            "remote {}: this store seals what it keeps there: give the file with the key \
             (--remote-key FILE)",
            wanted.place
        ))));
    }
    numbers.know(seen(wanted.keys.is_some())?);
    let remote = Remote::open(&wanted.place, wanted.options(&options.store, expected, numbers));
    let remote = Arc::new(remote.map_err(MountError::Thread)?);
    if !goes_on
        && (expected.is_none() || wanted.keys.is_some())
        && let State::Down { error: error @ RemoteError::Key(_), .. } =
            remote.wait_for_answer(KEY_PATIENCE)
    {
        return Err(MountError::Key(error));
    }
    if let Err(error) = remote.counters().register(file_system.observer().registry()) {
        log::error!("metrics of the remote: {error}");
    }
    let store = Arc::clone(&remote) as Arc<dyn BlobStore>;
    let grace = Grace::default();
    let publisher = Publisher::new(store, id, grace);
    let publisher = publisher.map_err(|error| MountError::Flush(FsError::Remote(error)))?;
    let own = kvfs_fs::own_manifests(file_system).map_err(MountError::Flush)?;
    let publisher = own.into_iter().fold(publisher, Publisher::knowing);
    Ok((Exchange::new(remote, grace, options.cold), publisher))
}
