//! Backing files registered with the kernel.
//!
//! The kernel allows one backing file per inode while any open of the inode lives (a second one,
//! or a cached open beside it, gives EIO), so opens of an inode share an id until the last closes.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nix::sys::stat::fstat;

use super::told_backings::{Slot, Told, ToldBackings};
use kvfs_fs::IoMode;
use kvfs_fs::takeover::{LeftOpen, LiveBacking};
use kvfs_storage::store::Store;
use kvfs_storage::store::disk::{Access, DiskFile, DiskPath};
use kvfs_storage::store::record::InodeId;

/// Backing files of sealed files that stay registered after the last close: a page that is opened
/// again costs one round trip and one `stat`. Only those: a writer would get the file that is registered,
/// even where another one has taken its place meanwhile (moved to memory, mended, published). Each keeps a file open in the kernel, some 300 bytes.
const HELD_MAX: usize = 1024;

/// A file that the kernel reads and writes by itself, until this is dropped.
#[derive(Debug)]
pub(super) struct Backing {
    id: u32,
    device: Arc<OwnedFd>,
    /// Device and number of the file.
    file: (u64, u64),
}

impl Backing {
    /// Registers a file with the mount that `device` is the connection of.
    pub(super) fn register(device: &Arc<OwnedFd>, file: BorrowedFd<'_>) -> io::Result<Backing> {
        let found = fstat(file)?;
        let id = fuser::BackingId::create_raw(device, file)?;
        Ok(Backing { id, device: Arc::clone(device), file: (found.st_dev, found.st_ino) })
    }

    /// The kernel's number for it.
    pub(super) fn id(&self) -> u32 {
        self.id
    }
}

impl Drop for Backing {
    fn drop(&mut self) {
        if let Err(error) = kvfs_os::close_backing(&self.device, self.id) {
            log::debug!("a backing file was not closed: {error}");
        }
    }
}

/// The files in use.
#[derive(Debug, Default)]
pub(super) struct Backings(Mutex<Registered<Arc<Backing>>>);

#[derive(Debug)]
struct Registered<Id> {
    by_inode: BTreeMap<InodeId, Opens<Id>>,
    /// Sealed files without an open, by when they were closed.
    idle: BTreeMap<u64, InodeId>,
    /// Counts closes.
    closes: u64,
    /// Where they are told for the daemon after this one.
    told: Option<ToldBackings>,
    /// Opens of a daemon that died, and what is registered for them.
    left: BTreeMap<InodeId, Left<Id>>,
}

#[derive(Debug)]
struct Left<Id> {
    open: LeftOpen,
    /// Closed in the kernel when they have ended.
    id: Id,
    /// Where it is told that they are lost.
    slot: Slot,
}

#[derive(Debug)]
struct Opens<Id> {
    id: Id,
    count: u32,
    is_sealed: bool,
    /// Its key in `idle`.
    idle_since: Option<u64>,
    /// Where it is told.
    slot: Slot,
}

impl<Id> Default for Registered<Id> {
    fn default() -> Self {
        Registered {
            by_inode: BTreeMap::new(),
            idle: BTreeMap::new(),
            closes: 0,
            told: None,
            left: BTreeMap::new(),
        }
    }
}

impl Backings {
    fn registered(&self) -> MutexGuard<'_, Registered<Arc<Backing>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Nothing is registered or let go until this is dropped.
    pub(super) fn freeze(&self) -> Frozen<'_> {
        Frozen(self.registered())
    }

    /// Goes on with what another daemon has registered. A second id for one of these inodes would be refused.
    pub(super) fn take_over(&self, device: &Arc<OwnedFd>, live: &[LiveBacking]) {
        let mut registered = self.registered();
        for LiveBacking { inode, id, count, is_sealed, idle_since, file, left } in
            live.iter().copied()
        {
            let id = Arc::new(Backing { id, device: Arc::clone(device), file });
            if let Some(left) = left {
                let open = left;
                registered.left.insert(inode, Left { open, id: Arc::clone(&id), slot: None });
                if open == LeftOpen::Lost {
                    continue;
                }
            }
            let opens = Opens { id, count, is_sealed, idle_since, slot: None };
            registered.by_inode.insert(inode, opens);
            if let Some(since) = idle_since {
                registered.idle.insert(since, inode);
                registered.closes = registered.closes.max(since);
            }
        }
    }

    /// The id for one more open of an inode; `register` makes one if this is the first.
    pub(super) fn attach(
        &self, inode: InodeId, is_sealed: bool, register: impl FnOnce() -> io::Result<Backing>,
    ) -> io::Result<Arc<Backing>> {
        let mut registered = self.registered();
        if let Some(id) = registered.open_again(inode) {
            return Ok(id);
        }
        if registered.left.contains_key(&inode) {
            return Err(io::Error::other(
                "it is open with bytes that were lost when a daemon of this mount died",
            ));
        }
        let id = Arc::new(register()?);
        registered.open_first(inode, Arc::clone(&id), is_sealed);
        registered.tell(inode);
        Ok(id)
    }

    /// The id for one more open of a sealed inode whose backing file is still registered.
    pub(super) fn attach_held(&self, inode: InodeId) -> Option<Arc<Backing>> {
        let mut registered = self.registered();
        let is_sealed = registered.by_inode.get(&inode).is_some_and(|backing| backing.is_sealed);
        is_sealed.then(|| registered.open_again(inode))?
    }

    /// Whether the backing file of an inode is registered: it was opened not long ago.
    pub(super) fn is_held(&self, inode: InodeId) -> bool {
        self.registered().by_inode.contains_key(&inode)
    }

    /// From now on it is told what is registered.
    pub(super) fn tell(&self, told: ToldBackings) {
        let mut registered = self.registered();
        registered.told = Some(told);
        let inodes: Vec<InodeId> = registered.by_inode.keys().copied().collect();
        for inode in inodes {
            registered.tell(inode);
        }
        registered.tell_of_lost();
    }

    /// The kernel has forgotten an inode of which a daemon that died has left opens: the handle that stood for them.
    pub(super) fn forget_left(&self, inode: InodeId) -> Option<u64> {
        let mut registered = self.registered();
        if registered.left.is_empty() {
            return None;
        }
        let Left { open, id, slot } = registered.left.remove(&inode)?;
        let (handle, closed) = match open {
            LeftOpen::Held(handle) => (Some(handle), registered.close(inode)),
            LeftOpen::Lost => {
                registered.told.iter_mut().for_each(|told| told.remove(slot));
                (None, None)
            }
        };
        drop(registered);
        drop((closed, id));
        handle
    }

    /// Goes on with what a daemon had registered that died; `hold` opens a handle for the opens that it has left, if the
    /// file is that of their inode.
    pub(super) fn recover(
        &self, device: &Arc<OwnedFd>, told: &[Told], hold: impl Fn(&Told) -> Option<u64>,
    ) {
        let (mut live, mut closed) = (Vec::new(), Vec::new());
        for told in told {
            let Told { inode, file, id, is_sealed, is_open } = *told;
            if !is_open {
                closed.push(Backing { id, device: Arc::clone(device), file });
                continue;
            }
            let left = Some(hold(told).map_or(LeftOpen::Lost, LeftOpen::Held));
            let idle_since = None;
            live.push(LiveBacking { inode, id, count: 1, is_sealed, idle_since, file, left });
        }
        self.take_over(device, &live);
    }

    /// An open of an inode is gone; it may have been one without passthrough.
    pub(super) fn detach(&self, inode: InodeId) {
        // Dropped after the lock: other opens do not wait while the kernel closes the file.
        let _dropped = self.registered().close(inode);
    }

    /// The file of an inode is not to be opened again from what is registered now. Whether nothing
    /// of it is registered any more.
    pub(super) fn let_go(&self, inode: InodeId) -> bool {
        let mut registered = self.registered();
        let dropped = registered.take_idle(inode);
        let gone = !registered.by_inode.contains_key(&inode);
        drop(registered);
        drop(dropped);
        gone
    }
}

/// See [`Backings::freeze`].
pub(super) struct Frozen<'a>(MutexGuard<'a, Registered<Arc<Backing>>>);

impl Frozen<'_> {
    /// What is registered, for the daemon that goes on with it.
    pub(super) fn live(&self) -> Vec<LiveBacking> {
        let left = |inode: &InodeId| self.0.left.get(inode).map(|left| left.open);
        let live = |(inode, opens): (&InodeId, &Opens<Arc<Backing>>)| LiveBacking {
            inode: *inode,
            id: opens.id.id,
            count: opens.count,
            is_sealed: opens.is_sealed,
            idle_since: opens.idle_since,
            file: opens.id.file,
            left: left(inode),
        };
        let lost = self.0.lost().map(|(inode, id)| LiveBacking {
            inode,
            id: id.id,
            count: 1,
            is_sealed: false,
            idle_since: None,
            file: id.file,
            left: Some(LeftOpen::Lost),
        });
        self.0.by_inode.iter().map(live).chain(lost).collect()
    }
}

impl Registered<Arc<Backing>> {
    /// Tells of what was registered for an inode.
    fn tell(&mut self, inode: InodeId) {
        let (Some(told), Some(opens)) = (&mut self.told, self.by_inode.get_mut(&inode)) else {
            return;
        };
        let Backing { id, file, .. } = *opens.id;
        let (is_sealed, is_open) = (opens.is_sealed, opens.idle_since.is_none());
        opens.slot = told.put(Told { inode, file, id, is_sealed, is_open });
    }

    /// What is registered for opens whose file is none of their inode.
    fn lost(&self) -> impl Iterator<Item = (InodeId, &Arc<Backing>)> {
        let all = self.left.iter();
        all.filter(|(_, left)| left.open == LeftOpen::Lost).map(|(inode, left)| (*inode, &left.id))
    }

    /// Tells of them, which the next daemon finds to be lost as well.
    fn tell_of_lost(&mut self) {
        let Some(told) = &mut self.told else { return };
        for (inode, left) in &mut self.left {
            if left.open == LeftOpen::Lost {
                let Backing { id, file, .. } = *left.id;
                let (inode, is_sealed, is_open) = (*inode, false, true);
                left.slot = told.put(Told { inode, file, id, is_sealed, is_open });
            }
        }
    }
}

impl<Id: Clone> Registered<Id> {
    fn open_first(&mut self, inode: InodeId, id: Id, is_sealed: bool) {
        let backing = Opens { id, count: 1, is_sealed, idle_since: None, slot: None };
        self.by_inode.insert(inode, backing);
    }

    fn open_again(&mut self, inode: InodeId) -> Option<Id> {
        let backing = self.by_inode.get_mut(&inode)?;
        backing.count += 1;
        if let Some(since) = backing.idle_since.take() {
            self.idle.remove(&since);
            if let Some(told) = &mut self.told {
                told.set_open(backing.slot, true);
            }
        }
        Some(backing.id.clone())
    }

    /// Returns what is not registered any more: this one, or the sealed one closed longest ago.
    fn close(&mut self, inode: InodeId) -> Option<Opens<Id>> {
        let backing = self.by_inode.get_mut(&inode)?;
        backing.count -= 1;
        if backing.count > 0 {
            return None;
        }
        if !backing.is_sealed {
            return self.remove(inode);
        }
        self.closes += 1;
        backing.idle_since = Some(self.closes);
        if let Some(told) = &mut self.told {
            told.set_open(backing.slot, false);
        }
        self.idle.insert(self.closes, inode);
        let oldest = (self.idle.len() > HELD_MAX).then(|| self.idle.pop_first())??;
        self.remove(oldest.1)
    }

    fn remove(&mut self, inode: InodeId) -> Option<Opens<Id>> {
        let removed = self.by_inode.remove(&inode)?;
        if let Some(told) = &mut self.told {
            told.remove(removed.slot);
        }
        Some(removed)
    }

    fn take_idle(&mut self, inode: InodeId) -> Option<Opens<Id>> {
        let since = self.by_inode.get(&inode)?.idle_since?;
        self.idle.remove(&since);
        self.remove(inode)
    }
}

/// Tries once whether this kernel takes backing files from this store.
pub(super) fn trial(
    store: &Store, register: impl FnOnce(&dyn DiskFile) -> io::Result<Backing>,
) -> IoMode {
    let file = store.disk.open(&DiskPath::Format, Access::Read);
    let outcome = file.and_then(|file| register(file.as_ref()).map(drop));
    match outcome {
        Ok(()) => IoMode::Passthrough,
        Err(error) => IoMode::Served(match error.raw_os_error() {
            Some(libc::EPERM) => "the daemon lacks CAP_SYS_ADMIN".to_owned(),
            Some(libc::ELOOP) => "the store's filesystem is stacked too deep".to_owned(),
            Some(libc::EOPNOTSUPP | libc::ENOTTY | libc::EINVAL) => {
                "the kernel has no FUSE passthrough (Linux 6.9 has)".to_owned()
            }
            _ => error.to_string(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_closed_longest_ago_is_let_go() {
        let mut registered = Registered::default();
        let count = HELD_MAX as u64;
        for number in 0..count {
            registered.open_first(InodeId(number), number, true);
            assert!(registered.close(InodeId(number)).is_none());
        }
        // One that is opened again and again stays, however often that is.
        for _ in 0..2 * count {
            assert_eq!(registered.open_again(InodeId(0)), Some(0));
            assert!(registered.close(InodeId(0)).is_none());
        }
        assert_eq!(registered.idle.len(), HELD_MAX);
        registered.open_first(InodeId(count), count, true);
        let dropped = registered.close(InodeId(count)).expect("there are too many");
        assert_eq!(dropped.id, 1);
        assert_eq!(registered.open_again(InodeId(1)), None);
        assert_eq!(registered.open_again(InodeId(0)), Some(0));
        // Open ones are not idle.
        assert!(registered.take_idle(InodeId(0)).is_none());
        assert!(registered.close(InodeId(0)).is_none());
        assert_eq!(registered.take_idle(InodeId(0)).map(|backing| backing.id), Some(0));
        assert_eq!(
            (registered.idle.len(), registered.by_inode.len()),
            (HELD_MAX - 1, HELD_MAX - 1)
        );
    }

    #[test]
    fn a_file_that_may_change_is_let_go_at_once() {
        let mut registered = Registered::default();
        registered.open_first(InodeId(7), 7, false);
        assert_eq!(registered.open_again(InodeId(7)), Some(7));
        assert!(registered.close(InodeId(7)).is_none());
        assert_eq!(registered.close(InodeId(7)).map(|backing| backing.id), Some(7));
        assert!(registered.by_inode.is_empty() && registered.idle.is_empty());
    }
}
