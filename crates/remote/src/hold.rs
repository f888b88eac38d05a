//! How a store comes to rely on an object of a remote that others clean up.
//!
//! [`super::gc`] has the rules and why they suffice; this is the part of the store that relies.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use super::error::{RemoteError, Result};
use super::name::RemoteName;
use super::transfer::Source;
use super::{BlobStore, Put, PutMode};

/// How old an object must be before it may be deleted, and the parts of that time that the
/// participants may use up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grace(pub Duration);

impl Default for Grace {
    /// A day: a store that is down over night loses nothing but work, and clocks of a cluster
    /// agree to far less than a quarter of it.
    fn default() -> Grace {
        Grace(Duration::from_secs(24 * 3600))
    }
}

impl Grace {
    /// An object that is found and older than this is refreshed.
    pub fn refresh_after(self) -> Duration {
        self.0 / 4
    }

    /// A manifest must follow within this time after the object was put or found.
    pub fn publish_within(self) -> Duration {
        self.0 / 4
    }

    /// Garbage is deleted within this time after the manifests were listed.
    pub fn collect_within(self) -> Duration {
        self.0 / 4
    }
}

/// A moment, to tell later how much time has passed.
#[derive(Clone, Copy, Debug)]
pub struct Stamp {
    monotonic: Instant,
    wall: SystemTime,
}

impl Stamp {
    /// Now.
    pub fn now() -> Stamp {
        Stamp { monotonic: Instant::now(), wall: SystemTime::now() }
    }

    /// Time since then: at least, since one clock stands still while the machine sleeps and the
    /// other may be set.
    pub fn age(&self) -> Duration {
        self.monotonic.elapsed().max(self.wall.elapsed().unwrap_or_default())
    }

    /// The earlier of two.
    #[must_use]
    pub fn or_earlier(self, other: Stamp) -> Stamp {
        if other.monotonic < self.monotonic { other } else { self }
    }
}

/// The time by the remote's clock: the marker is refreshed and looked at.
pub fn remote_now(store: &dyn BlobStore) -> Result<SystemTime> {
    store.refresh(RemoteName::Marker)?;
    let stat = store.head(RemoteName::Marker)?;
    stat.map(|stat| stat.modified).ok_or_else(|| {
        RemoteError::Unreachable(format!("remote {}: KVFS-REMOTE is gone", store.place()))
    })
}

/// An object that is there and young.
#[derive(Clone, Copy, Debug)]
pub struct Held {
    /// From before it was asked for: [`Grace::publish_within`] counts from here.
    pub since: Stamp,
    /// Whether it was there already; then its bytes are somebody else's until they are verified.
    pub put: Put,
    /// When reading it back proves that it stays, see [`BlobStore::settling`].
    pub verify_after: Duration,
}

/// Times the remote's clock is asked: it may drift from ours by seconds in an hour.
const CLOCK_MAX: Duration = Duration::from_secs(3600);
/// An object may vanish between two looks, hardly ever twice.
const ATTEMPTS_MAX: usize = 3;

/// Puts objects, or finds them and makes sure that they are young.
#[derive(Debug)]
pub struct Holder {
    store: Arc<dyn BlobStore>,
    grace: Grace,
    /// The remote's time when last asked.
    clock: Mutex<Option<(Stamp, SystemTime)>>,
}

impl Holder {
    /// For one remote.
    pub fn new(store: Arc<dyn BlobStore>, grace: Grace) -> Holder {
        Holder { store, grace, clock: Mutex::default() }
    }

    /// The grace period that the stores of the remote agreed on.
    pub fn grace(&self) -> Grace {
        self.grace
    }

    /// Stores an object if it is absent, else makes it young.
    ///
    /// Before the local copy goes, the caller reads the object back ([`Held::verify_after`]),
    /// compares the hash of the decoded bytes, puts it anew with [`PutMode::Replace`] if that is
    /// wrong, and publishes a manifest that names it.
    pub fn hold(&self, name: RemoteName, source: &Source) -> Result<Held> {
        for _ in 0..ATTEMPTS_MAX {
            let since = Stamp::now();
            let put = self.store.put(name, source.clone(), PutMode::IfAbsent)?;
            if put == Put::Stored || self.rejuvenate(name)? {
                return Ok(Held { since, put, verify_after: self.store.settling() });
            }
        }
        let place = self.store.place();
        Err(RemoteError::Unreachable(format!("remote {place}: {name} vanishes again and again")))
    }

    /// False if the object is gone.
    fn rejuvenate(&self, name: RemoteName) -> Result<bool> {
        let Some(stat) = self.store.head(name)? else {
            return Ok(false);
        };
        let age = self.remote_time()?.duration_since(stat.modified).unwrap_or_default();
        if age < self.grace.refresh_after() {
            return Ok(true);
        }
        match self.store.refresh(name) {
            Ok(()) => Ok(true),
            Err(RemoteError::Missing(_)) => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn remote_time(&self) -> Result<SystemTime> {
        let known = *self.clock.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((stamp, time)) = known
            && stamp.age() < CLOCK_MAX
        {
            return Ok(time + stamp.age());
        }
        let stamp = Stamp::now();
        let time = remote_now(self.store.as_ref())?;
        *self.clock.lock().unwrap_or_else(PoisonError::into_inner) = Some((stamp, time));
        Ok(time)
    }
}
