//! A mount goes on with another daemon: what that must know, and how it goes on.
//!
//! The daemon that ends has answered every request that it took, and has committed. What is left is what only its memory
//! has: which inodes the kernel knows, what is open, names that a crash must forget. [`hand_over`] makes a [`Live`] of
//! that while nothing changes any more, and [`open`] makes a file system of it. A descriptor that the daemon served is opened
//! anew, by its object; of what the kernel serves by itself the number is enough.

mod format;
mod launch;
mod upgrades;

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

pub use format::{FORMAT, FormatError, Handover, Secret};
pub use launch::{Death, Descriptors, Launch, LeftOpen, LiveBacking, LiveRings, LiveSlot};
pub use upgrades::{Progress, Upgrades};

use crate::attributes::Place;
use crate::backlog::KeptLow;
use crate::core::handle::{Handle, Served};
use crate::core::happened;
use crate::core::node::Node;
use crate::core::recalled;
use crate::core::spare;
use crate::core::state::State;
use crate::core::unsettled::Unsettled;
use crate::dialogue::{Dialogue, Turn};
use crate::discarded::remove_present;
use crate::history::{History, SoFar};
use crate::on_corrupt::Damaged;
use crate::postponed::remove_all;
use crate::prefixes::LiveBlocks;
use crate::sweep::LeftByCrash;
use crate::{FileSystem, FsError, Invalidation, IoMode, Tiers, assemble, held_back, views};
use kvfs_observe::Observer;
use kvfs_storage::store::disk::{Access, DiskFile, is_of_file};
use kvfs_storage::store::metadata::Metadata;
use kvfs_storage::store::metadata::at_risk::Lost;
use kvfs_storage::store::metadata::live::{self, Unwritten};
use kvfs_storage::store::packs::end_quietly;
use kvfs_storage::store::record::{Inode, InodeId, ObjectId};
use kvfs_storage::store::{Store, StoreError};

/// The file through which an exchange is asked for: the kernel knows it while one is under way.
pub const ASKED_THROUGH: InodeId = views::SETTINGS;

/// In numbers of virtual inodes: how many daemons of the mount had died.
const VIRTUAL_NUMBERS_SHIFT: u32 = 44;

/// What only the memory of a daemon has.
#[derive(Debug, Serialize, Deserialize)]
pub struct Live {
    unwritten: Unwritten,
    nodes: BTreeMap<InodeId, Node>,
    handles: Vec<(u64, LiveHandle)>,
    next_handle: u64,
    fresh: BTreeMap<InodeId, Place>,
    pending: Vec<(Place, Vec<InodeId>)>,
    orphans: Vec<InodeId>,
    unsettled: Unsettled,
    full_tails: Vec<InodeId>,
    damaged: Vec<(InodeId, ObjectId)>,
    known_damage: Vec<(InodeId, ObjectId)>,
    /// Of virtual inodes, the last one that was given.
    last_virtual: u64,
    serving: Serving,
    blocks: LiveBlocks,
    /// No mount before has left files without a record.
    is_swept: bool,
    /// What daemons have lost that died, and nobody was told of; `None` if it may be everything.
    lost: Option<Vec<InodeId>>,
}

/// Who moves the bytes of files.
#[derive(Debug, Serialize, Deserialize)]
enum Serving {
    /// Nobody has opened one yet.
    Undecided,
    Kernel,
    /// And why.
    Daemon(String),
}

#[derive(Debug, Serialize, Deserialize)]
struct LiveHandle {
    inode: InodeId,
    writes: bool,
    flushed: bool,
    executes: bool,
    served: LiveServed,
}

/// [`Served`], as far as another daemon can go on with it.
#[derive(Debug, Serialize, Deserialize)]
enum LiveServed {
    Passthrough,
    File(ObjectId),
    Append(ObjectId),
    Text(Vec<u8>),
    Settings(Turn),
    History(SoFar),
    Before(Option<ObjectId>),
}

/// Why a mount cannot be handed over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Unable {
    /// Not now: it may be possible in a moment.
    Yet(String),
    /// Not as long as this is so.
    AsItIs(String),
}

impl Live {
    /// How many inodes the kernel knows, and how many handles are open.
    pub fn size(&self) -> (usize, usize) {
        (self.nodes.len(), self.handles.len())
    }
}

/// What keeps a mount from ever being handed over, as it was mounted.
pub fn obstacle(fs: &FileSystem) -> Option<String> {
    if fs.core.store.is_read_only() {
        return Some("the store lies on read-only media".to_owned());
    }
    None
}

/// Notes of an open of `.kvfs/settings` whether it may have the daemon exchanged. Other files are none of this.
pub fn allow(fs: &FileSystem, (id, handle): (InodeId, u64), is_trusted: impl FnOnce() -> bool) {
    if views::is_settings(id)
        && let Ok((_, _, Served::Settings(dialogue))) = fs.core.served(handle)
        && is_trusted()
    {
        dialogue.allow_exchange();
    }
}

/// Slows down those who make changes until this is dropped, so that a commit has few of them.
pub fn slow_changes_down(fs: &FileSystem) -> KeptLow<'_> {
    fs.backlog.keep_low()
}

/// Makes durable what is to be, so that little is left for [`hand_over`]. Called before as well as while requests wait.
///
/// # Errors
/// The disk fails, or has no room.
pub fn prepare(fs: &FileSystem) -> Result<(), String> {
    fs.core.drop_spares();
    happened::take_events(&fs.core);
    held_back::make_all_durable(fs).map_err(|error| format!("the last commit failed: {error}"))?;
    remove_present(fs);
    remove_all(fs);
    Ok(())
}

/// Files that are to leave the disk as somebody asked, and the objects that they had then.
pub fn wishes(fs: &FileSystem) -> Vec<(InodeId, ObjectId)> {
    fs.tiers.as_ref().map(Tiers::wishes_so_far).unwrap_or_default()
}

/// Goes on with what was on its way between tiers, once they are attached. What the daemon before has uploaded from memory,
/// and not yet named, is written to the disk: whether the remote will keep it, only that one knew.
///
/// # Errors
/// The store's disk fails.
pub fn go_on_moving(fs: &FileSystem, wishes: Vec<(InodeId, ObjectId)>) -> Result<(), FsError> {
    let Some(tiers) = &fs.tiers else { return Ok(()) };
    tiers.go_on_with(wishes);
    let dirty = fs.core.store.ram.as_ref().map(|ram| ram.dirty()).unwrap_or_default();
    let mut state = fs.core.state();
    for (object, inode) in dirty {
        if let Some(id) = inode
            && state.metadata.is_only_remote(object)?
        {
            tiers.forget_upload(&mut state, (id, object))?;
        }
    }
    Ok(())
}

/// Begins after so many daemons of the mount have died, the last of which has lost this. To be called before the mount answers.
pub fn begin_after(fs: &FileSystem, deaths: u64, lost: Lost) {
    recalled::begin_after(&fs.core, deaths, lost);
    // None of them has given so many.
    fs.prefixes.numbers().begin_behind(deaths << VIRTUAL_NUMBERS_SHIFT);
}

/// How long the store's disk takes to make a new file durable, as busy as it is.
///
/// # Errors
/// Those of the disk.
pub fn time_sync(fs: &FileSystem) -> io::Result<Duration> {
    let object = fs.core.state().metadata.new_object();
    let made = fs.core.store.create_object(object);
    let outcome = made.and_then(|file| {
        let begin = Instant::now();
        file.sync()?;
        Ok(begin.elapsed())
    });
    spare::discard(&fs.core, object);
    outcome
}

/// Calls `go` with all that is in memory only, while nobody can change it. No request may be in hand. If `go` comes back
/// this daemon goes on.
///
/// # Errors
/// Something that another daemon could not go on with.
pub fn hand_over<T>(fs: &FileSystem, go: impl FnOnce(&Live) -> T) -> Result<T, Unable> {
    // No commit runs meanwhile.
    let _turn = fs.durable.hold();
    // Nor is a file removed, which another daemon would not know of.
    let (_none_is_removed, _nor_later) = (fs.remover.hold(), fs.postponed.hold());
    if fs.postponed.amount().files > 0 {
        return Err(Unable::Yet("files are being removed".to_owned()));
    }
    // Whoever opens the store next looks through the directories of objects otherwise.
    match end_quietly(&fs.core.store.packs) {
        Ok(true) => {}
        Ok(false) => return Err(Unable::Yet("packs are being rewritten".to_owned())),
        Err(error) => return Err(Unable::AsItIs(format!("the packs: {error}"))),
    }
    let Some(_none_is_made) = spare::do_without(&fs.core) else {
        return Err(Unable::Yet("files are being made ahead".to_owned()));
    };
    let mut state = fs.core.state();
    check(fs, &state)?;
    let Some(unwritten) = live::unwritten(&state.metadata) else {
        return Err(Unable::Yet("changes wait for a commit".to_owned()));
    };
    let handles = live_handles(fs, &state)?;
    let blocks = fs.blocks.live().map_err(|buffers| {
        Unable::AsItIs(format!("{buffers} buffers of blocks are registered, too many to be told"))
    })?;
    let written_out = fs.core.store.buffer.put_all_on_disk();
    written_out.map_err(|error| Unable::AsItIs(format!("small files: {error}")))?;
    let serving = match fs.core.io_mode.get() {
        None => Serving::Undecided,
        Some(IoMode::Passthrough) => Serving::Kernel,
        Some(IoMode::Served(why)) => Serving::Daemon(why.clone()),
    };
    let pending = &state.pending;
    let live = Live {
        unwritten,
        handles,
        next_handle: state.next_handle,
        fresh: state.fresh.clone(),
        pending: pending.iter().map(|(place, ids)| (place.clone(), ids.clone())).collect(),
        orphans: state.orphans.keys().copied().collect(),
        unsettled: state.unsettled.clone(),
        full_tails: state.full_tails.iter().copied().collect(),
        damaged: pairs(&state.damaged),
        known_damage: pairs(&state.known_damage),
        last_virtual: fs.prefixes.numbers().last(),
        serving,
        blocks,
        is_swept: fs.left_by_crash.is_swept() && fs.tiers.is_none(),
        lost: fs.core.before.lost_ids(),
        nodes: BTreeMap::new(),
    };
    let mut lent = Lent { nodes: &mut state.nodes, live };
    lent.swap();
    Ok(go(&lent.live))
}

fn pairs(damaged: &Damaged) -> Vec<(InodeId, ObjectId)> {
    damaged.iter().map(|(id, object)| (*id, *object)).collect()
}

/// Lends the nodes, of which there may be a million, and gives them back.
struct Lent<'a> {
    nodes: &'a mut BTreeMap<InodeId, Node>,
    live: Live,
}

impl Lent<'_> {
    fn swap(&mut self) {
        std::mem::swap(self.nodes, &mut self.live.nodes);
    }
}

impl Drop for Lent<'_> {
    fn drop(&mut self) {
        self.swap();
    }
}

fn check(fs: &FileSystem, state: &State) -> Result<(), Unable> {
    if state.refusal.is_some() {
        return Err(Unable::AsItIs("the store takes no changes: see kvfs status".to_owned()));
    }
    if let Some(what) = at_work(fs) {
        return Err(Unable::AsItIs(format!("{what}: wait until it is over")));
    }
    if fs.core.before.misleads() {
        return Err(Unable::Yet("another daemon has died a moment ago".to_owned()));
    }
    // Whoever waits to tell the kernel what to forget ends with this daemon.
    if !fs.core.invalidations.is_empty() {
        return Err(Unable::Yet("the kernel is still told what to forget".to_owned()));
    }
    let is_in_hand = !state.sealing.is_empty()
        || state.waiting_for_release > 0
        || state.nodes.values().any(|node| node.pins > 0);
    if is_in_hand {
        return Err(Unable::Yet("files are being worked on".to_owned()));
    }
    Ok(())
}

/// What somebody has asked for that only this daemon would finish.
fn at_work(fs: &FileSystem) -> Option<&'static str> {
    if fs.scrubs.is_running() {
        return Some("a scrub is running");
    }
    if fs.collection.is_running() {
        return Some("kvfs gc is collecting the remote");
    }
    (!fs.errands.are_done()).then_some("files below a directory are being moved or pinned")
}

fn live_handles(fs: &FileSystem, state: &State) -> Result<Vec<(u64, LiveHandle)>, Unable> {
    let live = |(number, handle): (&u64, &Handle)| {
        let served = live_served(fs, state, handle)?;
        let Handle { inode, writes, flushed, executes, .. } = *handle;
        Ok((*number, LiveHandle { inode, writes, flushed, executes, served }))
    };
    state.handles.iter().map(live).collect()
}

fn live_served(fs: &FileSystem, state: &State, handle: &Handle) -> Result<LiveServed, Unable> {
    let object = || {
        let inode = state.inode(handle.inode).ok();
        let file = inode.as_ref().and_then(Inode::file);
        let object = file.and_then(|file| state.current_object(handle.inode, file));
        let told = || format!("the bytes of open inode {} cannot be found", handle.inode.0);
        let lost = || Unable::AsItIs(told());
        let object = object.ok_or_else(lost)?;
        match fs.core.store.open_object(object, Access::Read) {
            Err(error) if is_of_file(&error) => Err(lost()),
            Err(error) => Err(Unable::Yet(format!("{}: {error}", told()))),
            Ok(_) => Ok(object),
        }
    };
    // Most of these are open for a moment only.
    let is_open = |what: &str| Unable::Yet(what.to_owned());
    Ok(match &handle.served {
        Served::Passthrough => LiveServed::Passthrough,
        Served::File(_) => LiveServed::File(object()?),
        Served::Append(_) => LiveServed::Append(object()?),
        Served::Text(text) => LiveServed::Text(text.to_vec()),
        Served::Settings(dialogue) => {
            let busy = || Unable::Yet("settings are being changed".to_owned());
            LiveServed::Settings(dialogue.so_far().ok_or_else(busy)?)
        }
        Served::History(history) => {
            let busy = || Unable::Yet("events are being read".to_owned());
            LiveServed::History(history.so_far().ok_or_else(busy)?)
        }
        Served::Before(file) => LiveServed::Before(file.is_some().then(object).transpose()?),
        Served::Query(_) | Served::Batch(_) => return Err(is_open("a question is open")),
        Served::Draft(_) => return Err(is_open("a block is being registered")),
        Served::Slot(_) | Served::SlotDraft(_) => return Err(is_open("a file in slots/ is open")),
    })
}

/// Opens the metadata of a store whose mount goes on. Nothing is recovered: there was no crash.
///
/// # Errors
/// What was open cannot be opened again, and those of [`FileSystem::open`].
pub fn open(
    store: Store, observer: Arc<Observer>, invalidations: crossbeam_channel::Sender<Invalidation>,
    live: Live,
) -> Result<FileSystem, StoreError> {
    if let Err(error) = store.packs.recover() {
        log::warn!("the packs are looked through again at the next mount: {error}");
    }
    if let Err(error) = store.fill_reserve() {
        log::warn!("the disk has no room to keep for the metadata: {error}");
    }
    let mut metadata = Metadata::open(store.metadata()?)?;
    live::go_on_with(&mut metadata, live.unwritten);
    let believed = metadata.clock()?;
    store.events.begin(&metadata)?;
    let mut state = State::new(metadata);
    for (number, handle) in live.handles {
        let handle = open_again(&store, handle)?;
        state.handles.insert(number, handle);
    }
    state.next_handle = live.next_handle;
    state.nodes = live.nodes;
    state.fresh = live.fresh;
    state.pending = live.pending.into_iter().collect();
    // Their records are gone, which told of their bytes.
    state.orphans = live.orphans.into_iter().map(|id| (id, 0)).collect();
    state.unsettled = live.unsettled;
    state.full_tails = live.full_tails.into_iter().collect();
    state.damaged = live.damaged.into_iter().collect();
    state.known_damage = live.known_damage.into_iter().collect();
    let left_by_crash = LeftByCrash::of_mount_before(live.is_swept);
    let fs = assemble(store, state, (observer, invalidations), left_by_crash);
    fs.core.before.go_on(live.next_handle, Lost::new(live.lost));
    fs.retention.begin(believed);
    fs.prefixes.numbers().begin_behind(live.last_virtual);
    fs.blocks.go_on(live.blocks);
    match live.serving {
        Serving::Undecided => {}
        Serving::Kernel => _ = fs.io_mode(|| IoMode::Passthrough),
        Serving::Daemon(why) => _ = fs.io_mode(|| IoMode::Served(why)),
    }
    Ok(fs)
}

fn open_again(store: &Store, handle: LiveHandle) -> Result<Handle, StoreError> {
    let access = if handle.writes { Access::ReadWrite } else { Access::Read };
    let file = |object| -> Result<Arc<dyn DiskFile>, StoreError> {
        Ok(Arc::from(store.open_object(object, access)?))
    };
    let served = match handle.served {
        LiveServed::Passthrough => Served::Passthrough,
        LiveServed::File(object) => Served::File(file(object)?),
        LiveServed::Append(object) => Served::Append(file(object)?),
        LiveServed::Text(text) => Served::Text(Arc::from(text)),
        LiveServed::Settings(turn) => Served::Settings(Arc::new(Dialogue::from(turn))),
        LiveServed::History(read) => Served::History(Arc::new(History::from(read))),
        LiveServed::Before(object) => Served::Before(object.map(file).transpose()?),
    };
    let LiveHandle { inode, writes, flushed, executes, .. } = handle;
    Ok(Handle { inode, writes, flushed, executes, served })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::discarded::remove_discarded;
    use crate::unmounted::{FILES, Unmounted};

    #[test]
    fn nothing_is_handed_over_while_a_file_is_removed_or_is_to_be() {
        let unmounted = Unmounted::new();
        let fs = &unmounted.fs;
        unmounted.write(FILES, "file", b"bytes");
        prepare(fs).unwrap();
        {
            let mut state = fs.core.state();
            let object = state.metadata.new_object();
            state.metadata.remove_object(object);
        }
        assert!(matches!(hand_over(fs, |_| ()), Err(Unable::Yet(_))));
        remove_discarded(fs);
        let (told, heard) = crossbeam_channel::bounded(1);
        std::thread::scope(|scope| {
            let removing = fs.remover.hold();
            scope.spawn(move || told.send(hand_over(fs, |_| ()).is_ok()).unwrap());
            assert!(heard.recv_timeout(Duration::from_millis(50)).is_err());
            drop(removing);
            assert_eq!(heard.recv_timeout(Duration::from_secs(20)), Ok(true));
        });
    }
}
