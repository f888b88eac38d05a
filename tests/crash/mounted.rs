//! A store on a simulated disk, served without a kernel: what a client asks for, by path.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::Receiver;
use kvfs::fs::{
    Attributes, Caller, FileSystem, FsError, IoMode, Listing, Lookup, Mover, NewNode, Place,
    RemoteMemory, Tiers, remove_discarded, remove_through,
};
use kvfs::observe::Observer;
use kvfs::store::Store;
use kvfs::store::record::InodeId;
use kvfs::tier::counters::Counters;
use kvfs::tier::encoded::EncodedCopies;
use kvfs::tier::encoding::ColdEncoding;
use kvfs::tier::exchange::Exchange;
use kvfs::tier::ram::RamTier;
use kvfs::tier::remote::hold::Grace;
use kvfs::tier::remote::names::Publisher;
use kvfs::tier::remote::{self, BlobStore, Remote};
use kvfs::tier::ssd::SsdTier;

use crate::disk::{DISK_BYTES, SimulatedDisk};
use crate::model::{Named, Seen, What};
use crate::remote::{Blobs, MemoryRemote};

const CALLER: Caller = Caller { uid: 0, gid: 0 };
const FILE_MODE: u16 = 0o644;
const DIRECTORY_MODE: u16 = 0o755;

/// How a store is mounted.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Setup {
    pub(crate) has_remote: bool,
    pub(crate) cold: ColdEncoding,
    /// Beyond that, objects leave the disk.
    pub(crate) budget_bytes: Option<u64>,
    pub(crate) ram_bytes: Option<u64>,
    /// Nothing may be written to the disk that need not be.
    pub(crate) spares_disk: bool,
    /// Files of up to so many bytes are put into packs.
    pub(crate) packed_bytes_max: u64,
    /// Room that the disk says it has.
    pub(crate) available_bytes: u64,
}

impl Setup {
    pub(crate) const PLAIN: Setup = Setup {
        has_remote: false,
        cold: ColdEncoding::None,
        budget_bytes: None,
        ram_bytes: None,
        spares_disk: false,
        packed_bytes_max: 0,
        available_bytes: DISK_BYTES,
    };

    fn has_tiers(self) -> bool {
        self.has_remote || self.budget_bytes.is_some()
    }
}

/// Where the lock of a store is; everything else is on the simulated disk.
#[derive(Debug)]
pub(crate) struct Berth(tempfile::TempDir);

impl Berth {
    pub(crate) fn new() -> Berth {
        let memory = Path::new("/dev/shm");
        let directory =
            if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() };
        let berth = Berth(directory.unwrap());
        drop(Store::open_or_create(berth.0.path()).unwrap());
        berth
    }

    pub(crate) fn store(&self, disk: &SimulatedDisk) -> Store {
        let mut store = Store::open(self.0.path()).unwrap();
        store.set_disk(Arc::new(disk.clone())).unwrap();
        store
    }
}

/// A mount.
#[derive(Debug)]
pub(crate) struct Mounted {
    pub(crate) fs: FileSystem,
    mover: Mover,
    remote: Option<MemoryRemote>,
    /// Files may be removed after their commit, until the mount ends.
    removals: Option<Receiver<()>>,
}

impl Mounted {
    pub(crate) fn open(
        berth: &Berth, disk: &SimulatedDisk, blobs: &Arc<Blobs>, setup: Setup,
    ) -> Result<Mounted, FsError> {
        let mut store = berth.store(disk);
        store.packs.set_packed_bytes_max(setup.packed_bytes_max);
        store.ram = setup
            .ram_bytes
            .map(|bytes| Arc::new(RamTier::open(bytes, Counters::default()).unwrap()));
        let (invalidations, _) = crossbeam_channel::bounded(1);
        let opened = FileSystem::open(store, Arc::new(Observer::new()), invalidations);
        let (mut fs, _) = opened.map_err(FsError::Store)?;
        fs.io_mode(|| IoMode::Served("no kernel".to_owned()));
        let (wanted, removals) = crossbeam_channel::bounded(1);
        remove_through(&fs, wanted);
        let remote = setup.has_remote.then(|| MemoryRemote::holding(blobs, disk));
        let mut publisher = None;
        if setup.has_tiers() {
            let mut exchange = None;
            if let Some(remote) = &remote {
                let (id, expected) = RemoteMemory::of(&fs.core).identity()?;
                let options = remote::Options { expected, ..remote::Options::default() };
                let connected = Remote::with_connector(Arc::new(remote.clone()), options);
                let connected = Arc::new(connected.unwrap());
                connected.wait_for_answer(Duration::from_secs(10));
                let store = Arc::clone(&connected) as Arc<dyn BlobStore>;
                publisher = Some(Publisher::new(store, id, Grace::default()).unwrap());
                exchange = Some(Exchange::new(connected, Grace::default(), setup.cold));
            }
            let encoded = EncodedCopies::new(setup.cold, setup.budget_bytes);
            let ssd = SsdTier::new(setup.budget_bytes);
            let tiers = Tiers::new(exchange, ssd, encoded, Counters::default());
            if setup.spares_disk {
                tiers.writes.set_day_bytes(Some(1));
            }
            fs.attach(tiers);
            fs.tiers().inspect(|tiers| tiers.writes.note(1));
        }
        Ok(Mounted { fs, mover: Mover::new(publisher), remote, removals: Some(removals) })
    }

    /// What the remote holds now.
    pub(crate) fn blobs(&self) -> Arc<Blobs> {
        self.remote.as_ref().map(MemoryRemote::blobs).unwrap_or_default()
    }

    /// One round of moving. Whether there was nothing to do.
    pub(crate) fn move_objects(&mut self) -> bool {
        let pause = kvfs::fs::move_objects(&self.fs, &mut self.mover);
        self.compact();
        pause > Duration::ZERO
    }

    /// The mount ends in good order.
    pub(crate) fn commit_and_close(&mut self) -> Result<(), FsError> {
        self.removals = None;
        self.fs.commit_and_close()
    }

    /// What a daemon does after a commit: it removes files, and takes room back from packs. A disk that fails may fail here.
    pub(crate) fn compact(&self) {
        remove_discarded(&self.fs);
        while self.fs.store().packs.compact().unwrap_or(false) {}
    }

    /// Name and directory of a path.
    fn place(&self, path: &str) -> Result<Place, FsError> {
        let (above, name) = path.rsplit_once('/').unwrap_or(("", path));
        let mut parent = InodeId::ROOT;
        for part in above.split('/').filter(|part| !part.is_empty()) {
            let place = Place { parent, name: part.as_bytes().to_vec() };
            parent = self.find(&place)?.inode;
        }
        Ok(Place { parent, name: name.as_bytes().to_vec() })
    }

    fn find(&self, place: &Place) -> Result<Attributes, FsError> {
        match self.fs.lookup(place.parent, &place.name)? {
            Lookup::Found(found) => {
                self.fs.forget(found.attributes.inode, 1);
                Ok(found.attributes)
            }
            Lookup::Absent { .. } => Err(FsError::NotFound),
        }
    }

    pub(crate) fn inode(&self, path: &str) -> Result<InodeId, FsError> {
        Ok(self.find(&self.place(path)?)?.inode)
    }

    pub(crate) fn make_directory(&self, path: &str) -> Result<(), FsError> {
        self.make(path, &NewNode::Directory)
    }

    pub(crate) fn make(&self, path: &str, node: &NewNode) -> Result<(), FsError> {
        let mode = if *node == NewNode::Directory { DIRECTORY_MODE } else { FILE_MODE };
        let found = self.fs.make(&self.place(path)?, node, mode, CALLER)?;
        self.fs.forget(found.attributes.inode, 1);
        Ok(())
    }

    /// Opens for writing, empty.
    pub(crate) fn create(&self, path: &str) -> Result<u64, FsError> {
        let place = self.place(path)?;
        match self.find(&place) {
            Ok(found) => Ok(self.fs.open_file(found.inode, libc::O_WRONLY | libc::O_TRUNC)?.handle),
            Err(FsError::NotFound) => {
                let created = self.fs.create(&place, FILE_MODE, CALLER, true)?;
                self.fs.forget(created.found.attributes.inode, 1);
                Ok(created.opened.handle)
            }
            Err(error) => Err(error),
        }
    }

    /// `close()` of the only descriptor.
    pub(crate) fn close(&self, handle: u64) -> Result<(), FsError> {
        let flushed = self.fs.flush(handle);
        self.fs.release(handle)?;
        flushed
    }

    /// The whole file, in two writes.
    pub(crate) fn write(&self, path: &str, bytes: &[u8]) -> Result<(), FsError> {
        let handle = self.create(path)?;
        let (first, second) = bytes.split_at(bytes.len() / 2);
        let written = self
            .fs
            .write(handle, 0, first, false)
            .and_then(|()| self.fs.write(handle, first.len() as u64, second, false));
        self.close(handle).and(written)
    }

    pub(crate) fn overwrite(&self, path: &str, offset: u64, bytes: &[u8]) -> Result<(), FsError> {
        let handle = self.fs.open_file(self.inode(path)?, libc::O_RDWR)?.handle;
        let written = self.fs.write(handle, offset, bytes, false);
        self.close(handle).and(written)
    }

    pub(crate) fn append(&self, path: &str, bytes: &[u8]) -> Result<(), FsError> {
        let place = self.place(path)?;
        let handle = match self.find(&place) {
            Ok(found) => self.fs.open_file(found.inode, libc::O_WRONLY)?.handle,
            Err(_) => self.create(path)?,
        };
        let written = self.fs.write(handle, 0, bytes, true);
        self.close(handle).and(written)
    }

    pub(crate) fn rename(&self, from: &str, to: &str) -> Result<(), FsError> {
        self.fs.rename(&self.place(from)?, &self.place(to)?, 0).map(drop)
    }

    pub(crate) fn link(&self, from: &str, to: &str) -> Result<(), FsError> {
        let found = self.fs.link(self.inode(from)?, &self.place(to)?)?;
        self.fs.forget(found.attributes.inode, 1);
        Ok(())
    }

    pub(crate) fn unlink(&self, path: &str) -> Result<(), FsError> {
        self.fs.unlink(&self.place(path)?)
    }

    pub(crate) fn remove_directory(&self, path: &str) -> Result<(), FsError> {
        self.fs.remove_directory(&self.place(path)?)
    }

    pub(crate) fn read(&self, path: &str) -> Result<Vec<u8>, FsError> {
        let found = self.find(&self.place(path)?)?;
        self.read_inode(&found)
    }

    fn read_inode(&self, found: &Attributes) -> Result<Vec<u8>, FsError> {
        let handle = self.fs.open_file(found.inode, libc::O_RDONLY)?.handle;
        let mut bytes = vec![0; usize::try_from(found.size).unwrap() + 1];
        let count = self.fs.read(handle, 0, &mut bytes);
        self.fs.release(handle)?;
        bytes.truncate(count?);
        Ok(bytes)
    }

    /// Everything that can be seen; an error names the path.
    pub(crate) fn walk(&self) -> Result<Seen, String> {
        let mut seen = Seen::new();
        let mut directories = vec![(String::new(), InodeId::ROOT)];
        while let Some((above, directory)) = directories.pop() {
            let failed = |error: FsError| format!("{above}/: {error}");
            let mut names = Vec::new();
            let listed = self.fs.list(directory, 0, Listing::Names, |line| {
                names.push(String::from_utf8_lossy(line.name).into_owned());
                true
            });
            listed.map_err(failed)?;
            names.retain(|name| name != "." && name != "..");
            for name in names {
                let path = format!("{above}{name}");
                let place = Place { parent: directory, name: name.clone().into_bytes() };
                let looked = self.look(&place).map_err(|error| format!("{path}: {error}"))?;
                if looked.what == What::Directory {
                    let inode = self.find(&place).map_err(failed)?.inode;
                    directories.push((format!("{path}/"), inode));
                }
                seen.insert(path, looked);
            }
        }
        Ok(seen)
    }

    fn look(&self, place: &Place) -> Result<Named<Vec<u8>>, FsError> {
        let found = self.find(place)?;
        let inode = found.inode;
        let what = match found.file_type {
            libc::S_IFDIR => What::Directory,
            libc::S_IFLNK => {
                let target = self.fs.read_link(inode)?;
                What::Symlink(String::from_utf8_lossy(&target).into_owned())
            }
            _ => What::File(self.read_inode(&found)?),
        };
        let mut attributes = BTreeMap::new();
        let names = self.fs.list_extended_attributes(inode, CALLER)?;
        for name in names.split(|byte| *byte == 0).filter(|name| !name.is_empty()) {
            attributes.insert(name.to_vec(), self.fs.extended_attribute(inode, name)?);
        }
        Ok(Named { what, mode: found.mode, attributes })
    }
}
