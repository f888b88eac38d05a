//! What is left when the power goes: follows a log, and says at any step what the disk may hold.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use kvfs::store::disk::DiskDirectory;

use crate::common::random::Random;
use crate::content::Content;
use crate::log::{Change, Name, NameChange, NodeId, Step};
use crate::remote::Blobs;

/// Disks write so many bytes at once or not at all.
const SECTOR_BYTES: usize = 512;

/// What happens to what was not synced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// It is gone.
    Drop,
    /// It is there.
    Keep,
    /// Each change is there or not, in no order.
    Subset,
    /// Like that, and of each write some sectors are there, or only the length that it gave.
    Torn,
}

/// What a disk, and the remote behind it, hold.
#[derive(Clone, Debug, Default)]
pub(crate) struct Image {
    /// In an order that depends on the log alone.
    pub(crate) files: Vec<(Name, Content)>,
    pub(crate) remote: Arc<Blobs>,
}

/// The disk as of some step.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tracker {
    nodes: HashMap<NodeId, Tracked>,
    durable_names: HashMap<Name, NodeId>,
    pending_names: Vec<NameChange>,
    remote: Arc<Blobs>,
    /// Newest version of the model that was begun.
    pub(crate) begun: usize,
    /// Newest version of which the program knows that it is durable.
    pub(crate) acknowledged: usize,
}

#[derive(Clone, Debug, Default)]
struct Tracked {
    durable: Content,
    volatile: Content,
    pending: Vec<Change>,
}

impl Tracker {
    /// A disk that holds this, durably.
    pub(crate) fn of(image: &Image) -> Tracker {
        let mut tracker = Tracker { remote: Arc::clone(&image.remote), ..Tracker::default() };
        // The same numbers as a disk gives that begins with the image.
        for (number, (name, content)) in (1..).zip(&image.files) {
            let node = NodeId(number);
            let (durable, volatile) = (content.clone(), content.clone());
            tracker.nodes.insert(node, Tracked { durable, volatile, pending: Vec::new() });
            tracker.durable_names.insert(name.clone(), node);
        }
        tracker
    }

    pub(crate) fn apply(&mut self, step: &Step) {
        match step {
            Step::Change { node, change } => {
                let node = self.nodes.entry(*node).or_default();
                make(&mut node.volatile, change);
                node.pending.push(change.clone());
            }
            Step::Name(change) => self.pending_names.push(change.clone()),
            Step::Sync(node) => {
                let node = self.nodes.entry(*node).or_default();
                for change in std::mem::take(&mut node.pending) {
                    make(&mut node.durable, &change);
                }
            }
            Step::FailedSync(Some(node)) => self.nodes.entry(*node).or_default().pending.clear(),
            Step::FailedSync(None) => {}
            Step::SyncDirectory(directory) => self.sync_directory(*directory),
            Step::Remote(blobs) => self.remote = Arc::clone(blobs),
            Step::Begin(version) => self.begun = *version,
            Step::Acknowledge(version) => self.acknowledged = *version,
        }
    }

    /// A rename whose new name is durable may still have its old one.
    fn sync_directory(&mut self, directory: DiskDirectory) {
        let mut left = Vec::new();
        for change in std::mem::take(&mut self.pending_names) {
            match &change {
                NameChange::Add { name, .. } | NameChange::Remove { name, .. }
                    if name.parent() == directory =>
                {
                    rename(&mut self.durable_names, &change);
                }
                NameChange::Rename { from, to, node } if to.parent() == directory => {
                    let (name, node) = (to.clone(), *node);
                    rename(&mut self.durable_names, &NameChange::Add { name, node });
                    left.push(NameChange::Remove { name: from.clone(), node });
                }
                NameChange::Rename { from, .. } if from.parent() == directory => {
                    rename(&mut self.durable_names, &change);
                }
                _ => left.push(change),
            }
        }
        // Old names in the directory itself.
        left.retain(|change| match change {
            NameChange::Remove { name, .. } if name.parent() == directory => {
                rename(&mut self.durable_names, change);
                false
            }
            _ => true,
        });
        self.pending_names = left;
    }

    /// Whether nothing is volatile, so that all modes are the same.
    pub(crate) fn is_settled(&self) -> bool {
        self.pending_names.is_empty() && self.nodes.values().all(|node| node.pending.is_empty())
    }

    /// What is found after a power cut now.
    pub(crate) fn image(&self, mode: Mode, random: &mut Random) -> Image {
        let mut names = self.durable_names.clone();
        for change in &self.pending_names {
            if mode == Mode::Keep || (mode != Mode::Drop && random.is_true()) {
                rename(&mut names, change);
            }
        }
        let mut nodes: Vec<(&Name, &NodeId)> = names.iter().collect();
        nodes.sort_unstable_by_key(|(_, node)| **node);
        let directories: BTreeSet<DiskDirectory> = names
            .keys()
            .filter_map(|name| match name {
                Name::Directory(directory) => Some(*directory),
                Name::File(_) => None,
            })
            .chain([DiskDirectory::Store])
            .collect();
        let mut files: Vec<(Name, Content)> = Vec::with_capacity(nodes.len());
        let mut last = None;
        for (name, node) in nodes {
            // A file with two names has the same bytes under both.
            let content = match (last, files.last()) {
                (Some(last), Some((_, content))) if last == *node => content.clone(),
                _ => self.content(*node, mode, random),
            };
            last = Some(*node);
            files.push((name.clone(), content));
        }
        files.retain(|(name, _)| directories.contains(&name.parent()));
        Image { files, remote: Arc::clone(&self.remote) }
    }

    fn content(&self, node: NodeId, mode: Mode, random: &mut Random) -> Content {
        let Some(node) = self.nodes.get(&node) else {
            return Content::default();
        };
        if mode == Mode::Keep {
            return node.volatile.clone();
        }
        let mut content = node.durable.clone();
        if mode == Mode::Drop {
            return content;
        }
        // What one writes at once tends to arrive at once.
        let all = random.below(4) == 0;
        for change in &node.pending {
            if !all && !random.is_true() {
                continue;
            }
            match change {
                Change::Write { offset, bytes } if mode == Mode::Torn && random.is_true() => {
                    tear(&mut content, *offset, bytes, random);
                }
                _ => make(&mut content, change),
            }
        }
        content
    }
}

fn tear(content: &mut Content, offset: u64, bytes: &[u8], random: &mut Random) {
    let end = offset + bytes.len() as u64;
    match random.below(3) {
        // Only the length.
        0 if end > content.length() => content.set_length(end),
        // The first sectors.
        0 | 1 => {
            let first = SECTOR_BYTES * random.below(bytes.len().div_ceil(SECTOR_BYTES));
            content.write(offset, &bytes[..first.min(bytes.len())]);
        }
        // Any sectors.
        _ => {
            for (number, sector) in bytes.chunks(SECTOR_BYTES).enumerate() {
                if random.is_true() {
                    content.write(offset + (number * SECTOR_BYTES) as u64, sector);
                }
            }
        }
    }
}

fn make(content: &mut Content, change: &Change) {
    match change {
        Change::Write { offset, bytes } => content.write(*offset, bytes),
        Change::SetLength(length) => content.set_length(*length),
    }
}

fn rename(names: &mut HashMap<Name, NodeId>, change: &NameChange) {
    let drop_name = |names: &mut HashMap<Name, NodeId>, name: &Name, node: NodeId| {
        if names.get(name) == Some(&node) {
            names.remove(name);
        }
    };
    match change {
        NameChange::Add { name, node } => {
            names.insert(name.clone(), *node);
        }
        NameChange::Remove { name, node } => drop_name(names, name, *node),
        NameChange::Rename { from, to, node } => {
            drop_name(names, from, *node);
            names.insert(to.clone(), *node);
        }
    }
}
