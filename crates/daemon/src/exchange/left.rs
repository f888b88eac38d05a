//! What another daemon has left, on the side of the one that goes on.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crossbeam_channel::Sender;

use crate::connection::Connection;
use crate::dispatch::Operations;
use crate::mount::{MountError, MountOptions};
use crate::shared::Shared;
use kvfs_fs::takeover::{self, Descriptors, Handover, Live};
use kvfs_fs::{FileSystem, Invalidation};
use kvfs_observe::Observer;
use kvfs_storage::store::Store;
use kvfs_storage::tier::counters::Counters;
use kvfs_storage::tier::ram::RamTier;

/// See the module.
#[derive(Debug)]
pub(crate) struct Left {
    handover: Handover,
    descriptors: Descriptors,
    size: (usize, usize),
}

impl Left {
    pub(crate) fn new(mut handover: Handover) -> Result<Left, MountError> {
        let descriptors = handover.descriptors.take().ok_or(MountError::Left("descriptors"))?;
        Ok(Left { handover, descriptors, size: (0, 0) })
    }

    /// The store, whose lock was never let go.
    pub(crate) fn open_store(&self, path: &Path) -> Result<Store, MountError> {
        let lock = kvfs_os::inherited(self.descriptors.lock).map_err(MountError::Mount)?;
        Ok(Store::open_locked(path, lock)?)
    }

    /// The memory tier, if the mount has one.
    pub(crate) fn open_ram(
        &mut self, budget_bytes: u64, counters: &Counters,
    ) -> Option<Result<RamTier, MountError>> {
        let live = self.handover.ram.take()?;
        let ram = RamTier::go_on(live, budget_bytes, counters.clone());
        Some(ram.map_err(MountError::Memory))
    }

    /// Goes on with what was on its way between tiers.
    pub(crate) fn go_on_moving(&mut self, fs: &FileSystem) -> Result<(), MountError> {
        let wishes = std::mem::take(&mut self.handover.wishes);
        takeover::go_on_moving(fs, wishes).map_err(MountError::Flush)
    }

    pub(crate) fn open(
        &mut self, store: Store, observer: Arc<Observer>, invalidations: Sender<Invalidation>,
    ) -> Result<FileSystem, MountError> {
        let live = self.handover.live.take().ok_or(MountError::Left("names and handles"))?;
        self.size = Live::size(&live);
        Ok(takeover::open(store, observer, invalidations, live)?)
    }

    pub(crate) fn connect(
        &self, options: &MountOptions, shared: &Shared, operations: Operations,
    ) -> Result<Connection, MountError> {
        let connection = Connection::take_over(options, shared, operations, &self.descriptors)?;
        let device = connection.source().device;
        shared.backings.take_over(&device, &self.handover.backings);
        Ok(connection)
    }

    /// How many daemons the mount had before.
    pub(crate) fn exchanges(&self) -> u64 {
        self.handover.exchanges
    }

    /// Says that the mount goes on.
    pub(crate) fn tell(&self) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let waited = now.saturating_sub(Duration::from_nanos(self.handover.since));
        let (inodes, handles) = self.size;
        let backings = self.handover.backings.len();
        log::info!(
            "this daemon goes on with the mount: {inodes} inodes, {handles} handles and {backings} backing files; \
             requests waited for {waited:.0?}"
        );
    }
}
