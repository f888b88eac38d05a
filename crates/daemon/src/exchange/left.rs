//! What another daemon has left, on the side of the one that goes on.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crossbeam_channel::Sender;
use nix::errno::Errno;
use nix::sys::stat::fstat;

use crate::connection::Connection;
use crate::dispatch::Operations;
use crate::keeper::Kept;
use crate::mount::{MountError, MountOptions};
use crate::notify::Notifier;
use crate::shared::Shared;
use crate::told_backings::{self, Told};
use kvfs_fs::takeover::{self, Death, Descriptors, Handover, Live, Progress};
use kvfs_fs::{FileSystem, Invalidation, recalled};
use kvfs_observe::Observer;
use kvfs_storage::store::Store;
use kvfs_storage::store::disk::DiskFile;
use kvfs_storage::store::metadata::at_risk::Lost;
use kvfs_storage::tier::counters::Counters;
use kvfs_storage::tier::ram::RamTier;

/// Goes on with the backing files that the kernel has.
fn recover_backings(shared: &Shared, device: &Arc<OwnedFd>, told: &[Told]) {
    let core = &shared.fs.core;
    shared.backings.recover(device, told, |told| {
        // What is sealed has the same bytes wherever it lies.
        let is_same = |file: &dyn DiskFile| {
            let found = file.descriptor().and_then(|file| fstat(file).ok());
            told.is_sealed || found.is_some_and(|found| (found.st_dev, found.st_ino) == told.file)
        };
        recalled::hold_left(core, told.inode, is_same)
    });
}

/// Has the kernel forget what was lost, and send again what the daemon before has not answered.
fn have_requests_sent_again(shared: &Shared, notifier: &Notifier) {
    let told = |outcome: nix::Result<()>| match outcome {
        // The mount has ended meanwhile, or the kernel does not know the inode.
        Ok(()) | Err(Errno::ENODEV | Errno::ENOTCONN | Errno::ENOENT) => {}
        Err(error) => log::error!("the kernel was not told that a daemon has died: {error}"),
    };
    told(notifier.forget_all_names());
    for (inode, is_directory) in recalled::changed_below_the_kernel(&shared.fs.core) {
        told(if is_directory {
            notifier.forget_listing(inode)
        } else {
            notifier.forget_attributes(inode)
        });
    }
    told(notifier.resend());
}

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

    /// The keeper of the mount, if it has one.
    pub(crate) fn keeper(&self) -> Result<Option<Arc<Kept>>, MountError> {
        let keeper = self.descriptors.keeper.map(Kept::inherited).transpose();
        Ok(keeper.map_err(MountError::Mount)?.map(Arc::new))
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
        if let Some(death) = self.handover.death {
            return Self::open_after(death, store, &observer, invalidations);
        }
        let live = self.handover.live.take().ok_or(MountError::Left("names and handles"))?;
        self.size = Live::size(&live);
        Ok(takeover::open(store, observer, invalidations, live)?)
    }

    /// Opens the store as after any death of a daemon, and notes what was lost.
    fn open_after(
        death: Death, store: Store, observer: &Arc<Observer>, invalidations: Sender<Invalidation>,
    ) -> Result<FileSystem, MountError> {
        let touched = kvfs_os::inherited(death.touched).and_then(Lost::read);
        let lost = touched.map_err(MountError::Mount)?;
        let (fs, recovered) = FileSystem::open(store, Arc::clone(observer), invalidations)?;
        log::info!("opened the store {}: {recovered}", fs.store().path().display());
        if !lost.is_empty() {
            observer
                .failed("a daemon of this mount has died: changes that were not durable are lost");
        }
        takeover::begin_after(&fs, death.deaths, lost);
        Ok(fs)
    }

    pub(crate) fn connect(
        &self, options: &MountOptions, shared: &Shared, operations: Operations,
    ) -> Result<Connection, MountError> {
        let connection = Connection::take_over(options, shared, operations, &self.descriptors)?;
        let device = connection.source().device;
        match self.handover.death {
            None => {
                shared.backings.take_over(&device, &self.handover.backings);
                // Whoever asked for it may be the first who is answered.
                shared.fs.upgrades.note(Progress::Done(self.handover.exchanges));
            }
            Some(death) => {
                let told = kvfs_os::inherited(death.backings).and_then(told_backings::read);
                recover_backings(shared, &device, &told.map_err(MountError::Mount)?);
                have_requests_sent_again(shared, &connection.notifier());
            }
        }
        Ok(connection)
    }

    /// How many daemons the mount had before.
    pub(crate) fn exchanges(&self) -> u64 {
        self.handover.exchanges
    }

    /// Says that the mount goes on.
    pub(crate) fn tell(&self) {
        if let Some(death) = self.handover.death {
            return log::warn!(
                "this daemon goes on with the mount after {} that died",
                death.deaths
            );
        }
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
