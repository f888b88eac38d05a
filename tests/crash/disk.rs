//! A disk in memory that writes down what is done to it, and fails on request.

use std::collections::HashMap;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvfs::store::disk::{
    Access, Allocation, Disk, DiskDirectory, DiskFile, DiskPath, FileStat, Seek, Space,
};
use kvfs::store::record::Time;
use memmap2::Mmap;

use crate::content::Content;
use crate::cut::Image;
use crate::fault::{Fault, Request, Verdict};
use crate::lie::Lie;
use crate::log::{Change, Name, NameChange, NodeId, Step};

/// Far more than any workload writes.
pub(crate) const DISK_BYTES: u64 = 1 << 40;

/// The disk. Clones are the same disk.
#[derive(Clone, Debug)]
pub(crate) struct SimulatedDisk(Arc<Mutex<Live>>);

#[derive(Debug)]
struct Live {
    nodes: HashMap<NodeId, Node>,
    names: HashMap<Name, NodeId>,
    next_node: u64,
    log: Vec<Step>,
    fault: Option<Fault>,
    lie: Option<Lie>,
    meanwhile: Option<Meanwhile>,
    available_bytes: u64,
    /// How often it was asked to sync all files at once: it does so every other time.
    asked_for_all: u64,
}

/// What others do while a file is synced.
struct Meanwhile(Box<dyn FnOnce() + Send>);

impl std::fmt::Debug for Meanwhile {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("Meanwhile")
    }
}

#[derive(Debug)]
struct Node {
    content: Content,
    modified: Time,
    opens: u32,
    writers: u32,
    /// Whether it was changed since it was last synced.
    is_dirty: bool,
}

#[derive(Debug)]
struct SimulatedFile {
    disk: SimulatedDisk,
    node: NodeId,
    access: Access,
}

#[derive(Debug)]
struct SimulatedDatabase(SimulatedFile);

impl SimulatedDisk {
    /// What a machine finds when the power is back.
    pub(crate) fn holding(image: &Image) -> SimulatedDisk {
        let mut live = Live {
            nodes: HashMap::new(),
            names: HashMap::new(),
            next_node: 0,
            log: Vec::new(),
            fault: None,
            lie: None,
            meanwhile: None,
            available_bytes: DISK_BYTES,
            asked_for_all: 0,
        };
        for (name, content) in &image.files {
            let node = live.new_node(content.clone());
            live.names.insert(name.clone(), node);
        }
        SimulatedDisk(Arc::new(Mutex::new(live)))
    }

    fn live(&self) -> MutexGuard<'_, Live> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Says that it has so much room, whatever is on it.
    pub(crate) fn set_available_bytes(&self, bytes: u64) {
        self.live().available_bytes = bytes;
    }

    /// What was done since the last call.
    pub(crate) fn take_log(&self) -> Vec<Step> {
        std::mem::take(&mut self.live().log)
    }

    /// Writes something down that is not done to the disk.
    pub(crate) fn note(&self, step: Step) {
        self.live().log.push(step);
    }

    /// From now on this goes wrong.
    pub(crate) fn fail(&self, fault: Option<Fault>) {
        self.live().fault = fault;
    }

    /// Whether the fault has happened.
    pub(crate) fn has_failed(&self) -> bool {
        self.live().fault.as_ref().is_some_and(Fault::has_happened)
    }

    /// From now on the disk says that it did something, and did not.
    pub(crate) fn lie(&self, lie: Lie) {
        self.live().lie = Some(lie);
    }

    /// The next time a file is synced, this happens first.
    pub(crate) fn at_next_sync(&self, act: impl FnOnce() + Send + 'static) {
        self.live().meanwhile = Some(Meanwhile(Box::new(act)));
    }

    /// What is there now, synced or not.
    pub(crate) fn image(&self) -> Image {
        let live = self.live();
        let mut names: Vec<(&Name, &NodeId)> = live.names.iter().collect();
        names.sort_unstable_by_key(|(_, node)| **node);
        let content = |node: &NodeId| live.nodes[node].content.clone();
        let files = names.iter().map(|(name, node)| ((*name).clone(), content(node))).collect();
        Image { files, ..Image::default() }
    }

    /// Bytes of objects, raw and encoded.
    pub(crate) fn used_bytes(&self) -> u64 {
        let live = self.live();
        let is_object = |name: &Name| {
            matches!(
                name,
                Name::File(DiskPath::Object(_) | DiskPath::Encoded(_) | DiskPath::Pack(_))
            )
        };
        let objects = live.names.iter().filter(|(name, _)| is_object(name));
        objects.map(|(_, node)| live.nodes[node].content.length()).sum()
    }

    fn open_node(&self, live: &mut Live, node: NodeId, access: Access) -> SimulatedFile {
        if let Some(open) = live.nodes.get_mut(&node) {
            open.opens += 1;
            open.writers += u32::from(access == Access::ReadWrite);
        }
        SimulatedFile { disk: self.clone(), node, access }
    }
}

fn not_found() -> io::Error {
    io::Error::from_raw_os_error(libc::ENOENT)
}

impl Live {
    fn new_node(&mut self, content: Content) -> NodeId {
        self.next_node += 1;
        let node = NodeId(self.next_node);
        let modified = Time::now();
        self.nodes.insert(node, Node { content, modified, opens: 0, writers: 0, is_dirty: false });
        node
    }

    fn find(&self, name: &Name) -> io::Result<NodeId> {
        self.names.get(name).copied().ok_or_else(not_found)
    }

    /// Asks the fault before something is done.
    fn attempt(&mut self, request: Request) -> io::Result<()> {
        match self.fault.as_mut().map_or(Verdict::Pass, |fault| fault.ask(request)) {
            Verdict::Pass => Ok(()),
            Verdict::Fail(error) | Verdict::Short(error) => Err(error),
        }
    }

    fn is_lie(&self, about: &Step) -> bool {
        self.lie.as_ref().is_some_and(|lie| lie.is_about(about, self.log.as_slice()))
    }

    fn change(&mut self, node: NodeId, change: Change) {
        let file = self.nodes.get_mut(&node).expect("an open file has its node");
        match &change {
            Change::Write { offset, bytes } => file.content.write(*offset, bytes),
            Change::SetLength(length) => file.content.set_length(*length),
        }
        file.modified = Time::now();
        file.is_dirty = true;
        self.log.push(Step::Change { node, change });
    }

    fn create(&mut self, name: Name) -> io::Result<NodeId> {
        self.attempt(Request::Grow)?;
        if self.names.contains_key(&name) {
            return Err(io::Error::from_raw_os_error(libc::EEXIST));
        }
        let parent = name.parent();
        if parent != DiskDirectory::Store {
            self.find(&Name::Directory(parent))?;
        }
        let node = self.new_node(Content::default());
        self.names.insert(name.clone(), node);
        self.log.push(Step::Name(NameChange::Add { name, node }));
        Ok(node)
    }

    fn sync(&mut self, node: NodeId) -> io::Result<()> {
        if let Err(error) = self.attempt(Request::Sync) {
            self.log.push(Step::FailedSync(Some(node)));
            return Err(error);
        }
        self.synced(node);
        Ok(())
    }

    fn synced(&mut self, node: NodeId) {
        if let Some(file) = self.nodes.get_mut(&node) {
            file.is_dirty = false;
        }
        let step = Step::Sync(node);
        if !self.is_lie(&step) {
            self.log.push(step);
        }
    }
}

impl Disk for SimulatedDisk {
    /// A disk that is to fail is asked file by file: a failure is told of each.
    fn sync_all_files(&self, instead_of: usize) -> io::Result<bool> {
        if instead_of < 2 {
            return Ok(false);
        }
        let mut live = self.live();
        live.asked_for_all += 1;
        if live.fault.is_some() || live.asked_for_all.is_multiple_of(2) {
            return Ok(false);
        }
        let dirty = live.nodes.iter().filter(|(_, file)| file.is_dirty);
        let mut dirty: Vec<NodeId> = dirty.map(|(node, _)| *node).collect();
        dirty.sort_unstable();
        for node in dirty {
            live.synced(node);
        }
        Ok(true)
    }

    fn create(&self, path: &DiskPath) -> io::Result<Box<dyn DiskFile>> {
        let mut live = self.live();
        let node = live.create(Name::File(path.clone()))?;
        Ok(Box::new(self.open_node(&mut live, node, Access::ReadWrite)))
    }

    fn open(&self, path: &DiskPath, access: Access) -> io::Result<Box<dyn DiskFile>> {
        let mut live = self.live();
        let node = live.find(&Name::File(path.clone()))?;
        Ok(Box::new(self.open_node(&mut live, node, access)))
    }

    fn stat(&self, path: &DiskPath) -> io::Result<FileStat> {
        let live = self.live();
        let node = live.find(&Name::File(path.clone()))?;
        Ok(stat(node, &live.nodes[&node]))
    }

    fn rename(&self, from: &DiskPath, to: &DiskPath) -> io::Result<()> {
        let mut live = self.live();
        let (from, to) = (Name::File(from.clone()), Name::File(to.clone()));
        let node = live.find(&from)?;
        live.attempt(Request::Grow)?;
        live.names.remove(&from);
        live.names.insert(to.clone(), node);
        live.log.push(Step::Name(NameChange::Rename { from, to, node }));
        Ok(())
    }

    fn remove(&self, path: &DiskPath) -> io::Result<()> {
        let mut live = self.live();
        let name = Name::File(path.clone());
        let node = live.find(&name)?;
        live.attempt(Request::Other)?;
        live.names.remove(&name);
        live.log.push(Step::Name(NameChange::Remove { name, node }));
        Ok(())
    }

    fn create_directory(&self, directory: DiskDirectory) -> io::Result<()> {
        match self.live().create(Name::Directory(directory)) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            outcome => outcome.map(drop),
        }
    }

    fn sync_directory(&self, directory: DiskDirectory) -> io::Result<()> {
        let mut live = self.live();
        if let Err(error) = live.attempt(Request::Sync) {
            live.log.push(Step::FailedSync(None));
            return Err(error);
        }
        let step = Step::SyncDirectory(directory);
        if !live.is_lie(&step) {
            live.log.push(step);
        }
        Ok(())
    }

    fn list(&self, directory: DiskDirectory) -> io::Result<Vec<String>> {
        let live = self.live();
        let here = live.names.keys().filter(|name| name.parent() == directory);
        let mut names: Vec<String> = here
            .filter_map(|name| match name {
                Name::File(path) => Some(path.relative().file_name()?.to_str()?.to_owned()),
                Name::Directory(path) => Some(path.relative().file_name()?.to_str()?.to_owned()),
            })
            .collect();
        names.sort_unstable();
        Ok(names)
    }

    fn space(&self) -> io::Result<Space> {
        let (total_bytes, inodes_total) = (DISK_BYTES, DISK_BYTES);
        let (free_bytes, inodes_free) = (DISK_BYTES, DISK_BYTES);
        let available_bytes = self.live().available_bytes;
        Ok(Space { total_bytes, free_bytes, available_bytes, inodes_total, inodes_free })
    }

    fn stack_depth(&self) -> io::Result<u32> {
        Ok(0)
    }

    fn database(&self, path: &DiskPath) -> io::Result<Box<dyn redb::StorageBackend>> {
        let mut live = self.live();
        let name = Name::File(path.clone());
        let node = match live.find(&name) {
            Ok(node) => node,
            Err(_) => live.create(name)?,
        };
        Ok(Box::new(SimulatedDatabase(self.open_node(&mut live, node, Access::ReadWrite))))
    }
}

fn stat(NodeId(inode): NodeId, node: &Node) -> FileStat {
    let blocks = node.content.allocated() / 512;
    FileStat { length: node.content.length(), blocks, mtime: node.modified, inode }
}

impl Drop for SimulatedFile {
    fn drop(&mut self) {
        let mut live = self.disk.live();
        if let Some(node) = live.nodes.get_mut(&self.node) {
            node.opens -= 1;
            node.writers -= u32::from(self.access == Access::ReadWrite);
        }
    }
}

impl SimulatedFile {
    fn must_write(&self) -> io::Result<()> {
        match self.access {
            Access::ReadWrite => Ok(()),
            Access::Read => Err(io::Error::from_raw_os_error(libc::EBADF)),
        }
    }

    fn write(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.must_write()?;
        let mut live = self.disk.live();
        let grown = live.fault.as_mut().map_or(Verdict::Pass, |fault| fault.ask(Request::Grow));
        let (count, outcome) = match grown {
            Verdict::Pass => (bytes.len(), Ok(())),
            Verdict::Fail(error) => (0, Err(error)),
            Verdict::Short(error) => (bytes.len() / 2, Err(error)),
        };
        if count > 0 {
            let bytes = Arc::from(&bytes[..count]);
            live.change(self.node, Change::Write { offset, bytes });
        }
        outcome
    }

    fn cut(&self, length: u64) -> io::Result<()> {
        self.must_write()?;
        let mut live = self.disk.live();
        let grows = length > live.nodes[&self.node].content.length();
        live.attempt(if grows { Request::Grow } else { Request::Other })?;
        live.change(self.node, Change::SetLength(length));
        Ok(())
    }
}

impl DiskFile for SimulatedFile {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        Ok(self.disk.live().nodes[&self.node].content.read(offset, buffer))
    }
    fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.write(bytes, offset)
    }
    fn set_length(&self, length: u64) -> io::Result<()> {
        self.cut(length)
    }
    fn map_at_rest(&self) -> Option<Mmap> {
        None
    }
    fn allocate(&self, allocation: Allocation) -> io::Result<()> {
        let end = allocation.offset + allocation.length;
        let length = self.stat()?.length;
        match allocation.mode {
            0 if end > length => self.cut(end),
            0 | libc::FALLOC_FL_KEEP_SIZE => Ok(()),
            _ => {
                let end = end.min(length).max(allocation.offset);
                let zeros = vec![0; usize::try_from(end - allocation.offset).unwrap()];
                self.write(&zeros, allocation.offset)
            }
        }
    }
    fn seek(&self, _offset: i64, _seek: Seek) -> io::Result<u64> {
        Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP))
    }
    fn copy_to(
        &self, offset: u64, target: &dyn DiskFile, target_offset: u64, length: u64,
    ) -> io::Result<u64> {
        let mut bytes = vec![0; usize::try_from(length).unwrap().min(1 << 20)];
        let count = self.read_at(&mut bytes, offset)?;
        target.write_all_at(&bytes[..count], target_offset)?;
        Ok(count as u64)
    }
    fn sync(&self) -> io::Result<()> {
        let meanwhile = self.disk.live().meanwhile.take();
        if let Some(Meanwhile(act)) = meanwhile {
            act();
        }
        self.disk.live().sync(self.node)
    }
    fn stat(&self) -> io::Result<FileStat> {
        Ok(stat(self.node, &self.disk.live().nodes[&self.node]))
    }
    fn set_modified(&self, mtime: Time) -> io::Result<()> {
        let mut live = self.disk.live();
        live.attempt(Request::Other)?;
        if let Some(node) = live.nodes.get_mut(&self.node) {
            node.modified = mtime;
        }
        Ok(())
    }
    fn is_at_rest(&self) -> io::Result<bool> {
        let live = self.disk.live();
        Ok(live.nodes[&self.node].writers == 0)
    }
    fn is_unused(&self) -> io::Result<bool> {
        Ok(self.disk.live().nodes[&self.node].opens <= 1)
    }
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

impl redb::StorageBackend for SimulatedDatabase {
    fn len(&self) -> io::Result<u64> {
        Ok(self.0.stat()?.length)
    }
    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let count = self.0.read_at(out, offset)?;
        if count < out.len() { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(()) }
    }
    fn set_len(&self, length: u64) -> io::Result<()> {
        self.0.cut(length)
    }
    fn sync_data(&self) -> io::Result<()> {
        self.0.sync()
    }
    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.0.write(data, offset)
    }
}
