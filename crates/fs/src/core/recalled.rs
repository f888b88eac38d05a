//! Handles that another daemon of the mount has given, which has died, and changes that were lost with it.
//!
//! The kernel keeps the number of a handle, and nothing else of it. So the number says which daemon gave it and whether
//! it was opened for writing. Who reads goes on with the bytes that the last commit has. Who writes cannot: what he wrote
//! may be gone, and he hears of it when he syncs or closes.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use crate::FsError;
use crate::attributes::Place;
use crate::core::Core;
use crate::core::handle::{Handle, Served};
use crate::core::state::State;
use crate::status::add_line;
use kvfs_os::SharedWords;
use kvfs_storage::store::disk::{Access, DiskFile};
use kvfs_storage::store::metadata::at_risk::{Lost, Touched};
use kvfs_storage::store::record::{Inode, InodeId, ObjectId};
use kvfs_storage::store::{Store, keys};

/// In the number of a handle: how many daemons of the mount had died.
const LIFE_SHIFT: u32 = 48;
/// The same: it was opened for writing.
const WRITES: u64 = 1 << 47;

/// How long a program may take from looking a path up to asking for what it found.
const MISLED_FOR: Duration = Duration::from_secs(1);

/// The number of the next handle.
pub(crate) fn number_of(next: u64, writes: bool) -> u64 {
    if writes { next | WRITES } else { next }
}

/// Whether daemons of this mount have died before the one that gives this number next.
pub(crate) fn has_predecessors(next: u64) -> bool {
    next >> LIFE_SHIFT > 0
}

/// Notes what is at risk beyond a commit: files that are being made, or made anew, whose writers may just have closed them.
/// So is what somebody writes to a copy in memory.
pub(crate) fn note_unfinished(store: &Store, state: &mut State) {
    let State { metadata, nodes, unsettled, fresh, pending, .. } = state;
    if !metadata.touched.is_told() {
        return;
    }
    let made = fresh.values().chain(pending.keys()).map(|place| place.parent);
    let is_in_memory = |id: &InodeId| {
        let object = unsettled.get(*id).zip(store.ram.as_ref());
        object.is_some_and(|(object, ram)| ram.holds(*object))
    };
    let is_made_anew = |id: &InodeId| nodes.get(id).is_some_and(|node| node.replacement.is_some());
    let is_at_risk = |id: &InodeId| is_made_anew(id) || is_in_memory(id);
    for id in made.chain(unsettled.keys().copied().filter(is_at_risk)) {
        metadata.touched.note_at_risk(id);
    }
}

/// Notes that bytes of a file were changed, or will be, that only memory has.
pub(crate) fn note_in_memory(store: &Store, state: &mut State, id: InodeId, object: ObjectId) {
    if state.metadata.touched.is_told() && store.ram.as_ref().is_some_and(|ram| ram.holds(object)) {
        state.metadata.touched.note_at_risk(id);
    }
}

/// What a daemon knows of those before it.
#[derive(Debug, Default)]
pub struct Before {
    /// Those of this mount that have died.
    deaths: AtomicU64,
    lost: Mutex<Lost>,
    misled: OnceLock<Misled>,
    /// Whether another daemon goes on if this one dies, if anybody wants that.
    keeper: OnceLock<Result<CheckKeeper, String>>,
}

/// Says why no other daemon would go on now, if so.
pub struct CheckKeeper(pub Box<dyn Fn() -> Result<(), &'static str> + Send + Sync>);

impl std::fmt::Debug for CheckKeeper {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("CheckKeeper")
    }
}

/// Where names led that are lost. The kernel may have followed one before it heard of that.
#[derive(Debug)]
struct Misled {
    ids: BTreeSet<InodeId>,
    /// A directory is among them, or too many are: anything may have been found below it.
    is_all: bool,
    since: Instant,
    /// Those that the kernel has looked up since, and given back: it may have meant lookups of before.
    given: Mutex<BTreeSet<InodeId>>,
    /// It cannot be any more.
    is_over: AtomicBool,
}

impl Before {
    /// How many daemons of this mount have died.
    pub fn deaths(&self) -> u64 {
        self.deaths.load(Ordering::Relaxed)
    }

    /// Whether another daemon goes on if this one dies, or why not.
    pub fn note_keeper(&self, outcome: Result<CheckKeeper, String>) {
        let _ = self.keeper.set(outcome);
    }

    /// Whether another daemon goes on if this one dies.
    pub(crate) fn is_kept(&self) -> bool {
        matches!(self.keeper.get(), Some(Ok(_)))
    }

    /// Whether the kernel may still ask for what it has found in a tree that is lost.
    pub(crate) fn misleads(&self) -> bool {
        self.misled.get().is_some_and(|misled| misled.since.elapsed() <= MISLED_FOR)
    }

    /// The kernel gives back all lookups of an inode that this daemon has given, and maybe those of the one before.
    pub(crate) fn note_given_back(&self, id: InodeId) {
        if self.misleads()
            && let Some(misled) = self.misled.get().filter(|misled| misled.ids.contains(&id))
        {
            misled.given.lock().unwrap_or_else(PoisonError::into_inner).insert(id);
        }
    }

    /// Lines for the status.
    pub(crate) fn tell(&self, text: &mut String) {
        match self.keeper.get() {
            Some(Ok(CheckKeeper(check))) => match check() {
                Ok(()) => add_line(text, "kept_mounted", &"yes"),
                Err(why) => add_line(text, "kept_mounted", &format_args!("no: {why}")),
            },
            Some(Err(why)) => add_line(text, "kept_mounted", &format_args!("no: {why}")),
            None => {}
        }
        if self.deaths() > 0 {
            add_line(text, "daemon_deaths", &self.deaths());
        }
    }

    /// Goes on as a daemon that has given handles up to this one, and knows what those before it have lost.
    pub(crate) fn go_on(&self, next_handle: u64, lost: Lost) {
        *self.lost() = lost;
        self.deaths.store(next_handle >> LIFE_SHIFT, Ordering::Relaxed);
    }

    fn lost(&self) -> MutexGuard<'_, Lost> {
        self.lost.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Files and directories whose changes a daemon has lost that died, of which nobody was told yet; `None` if there were
    /// too many to be known.
    pub fn lost_ids(&self) -> Option<Vec<InodeId>> {
        self.lost().ids().map(|ids| ids.iter().copied().collect())
    }

    /// Whether there are requests that may be for something else than they were meant for.
    pub fn has_misled(&self) -> bool {
        self.misled.get().is_some()
    }

    /// Whether a request for one of these may be meant for something else, which has waited since before this daemon.
    pub fn was_misled(&self, ids: &[InodeId]) -> bool {
        let misled = self.misled.get();
        misled.is_some_and(|misled| misled.is_all || ids.iter().any(|id| misled.ids.contains(id)))
    }
}

/// Begins as the daemon after so many that have died, the last of which has lost this. To be called before the mount
/// answers.
pub(crate) fn begin_after(core: &Core, deaths: u64, mut lost: Lost) {
    let mut state = core.state();
    let named = lost.named().map(|named| {
        let there = named.iter().filter_map(|id| Some((*id, state.inode(*id).ok()?)));
        there.map(|(id, inode)| (id, inode.is_directory())).collect::<Vec<_>>()
    });
    let is_all = named.as_ref().is_none_or(|named| named.iter().any(|(_, is)| *is));
    let ids: BTreeSet<InodeId> = named.into_iter().flatten().map(|(id, _)| id).collect();
    if is_all || !ids.is_empty() {
        let since = Instant::now();
        let (given, is_over) = (Mutex::default(), AtomicBool::new(false));
        let _ = core.before.misled.set(Misled { ids, is_all, since, given, is_over });
    }
    publish_rows(&mut state);
    lost.retain(|id| state.inode(id).is_ok());
    state.next_handle = deaths << LIFE_SHIFT | 1;
    drop(state);
    *core.before.lost() = lost;
    core.before.deaths.store(deaths, Ordering::Relaxed);
}

/// Rows and tokens that were appended are there, but a power cut may still take them: the next commit syncs them.
fn publish_rows(state: &mut State) {
    let mut unsettled = Vec::new();
    let scanned = state.metadata.scan_table::<()>(b'U', |key, ()| {
        unsettled.extend(keys::number(key).map(InodeId));
    });
    if let Err(error) = scanned {
        log::error!("rows that were appended are not looked for: {error}");
    }
    for id in unsettled {
        let inode = state.inode(id);
        let rows = inode.as_ref().ok().and_then(|inode| inode.file());
        let rows = rows.filter(|file| file.role.is_append_only());
        if let Some(object) = rows.and_then(|file| file.object) {
            state.metadata.publish(object);
        }
    }
}

/// Files and directories that are not what the kernel knows, and whether each is a directory: those whose changes were lost, of
/// which nobody was told yet. If they were too many to be known, all directories, and no files: paths lead through none.
pub fn changed_below_the_kernel(core: &Core) -> Vec<(InodeId, bool)> {
    let state = core.state();
    if let Some(ids) = core.before.lost_ids() {
        let is_directory = |id| state.inode(id).is_ok_and(|inode| inode.is_directory());
        return ids.into_iter().map(|id| (id, is_directory(id))).collect();
    }
    let mut directories = Vec::new();
    let scanned = state.metadata.scan_table::<Inode>(b'I', |key, inode| {
        directories.extend(keys::number(key).filter(|_| inode.is_directory()));
    });
    if let Err(error) = scanned {
        log::error!("directories whose listings may have changed are not looked for: {error}");
    }
    directories.into_iter().map(|number| (InodeId(number), true)).collect()
}

/// Tells what is not durable in memory that outlives this process.
pub fn tell_of_changes(core: &Core, words: &Arc<SharedWords>) {
    core.before.lost().keep_in(words);
    let mut state = core.state();
    state.metadata.touched = Touched::new(Arc::clone(words));
    // Of a mount that goes on with another program.
    note_unfinished(&core.store, &mut state);
}

/// Somebody wants a file or directory to be durable.
///
/// # Errors
/// Changes of it were lost with a daemon that died. It is told once.
pub(crate) fn tell_loss(core: &Core, id: InodeId) -> Result<(), FsError> {
    if core.before.deaths() == 0 {
        return Ok(());
    }
    let (is_older, is_there) = {
        let state = core.state();
        (state.metadata.is_older(id), state.metadata.inode(id)?.is_some())
    };
    // What is open from before may be lost itself: that is told each time.
    let is_lost = is_older && !is_there || core.before.lost().take(id, is_older);
    if is_lost { Err(FsError::Lost) } else { Ok(()) }
}

/// Whether there is such a name.
pub fn has_name(core: &Core, place: &Place) -> bool {
    matches!(core.state().entry(place.parent, &place.name), Ok(Some(_)))
}

/// Opens a handle that stands for opens of an inode which another daemon has left that died, if the inode is there.
/// `is_same` says whether the file that has its bytes is the one that the kernel has.
pub fn hold_left(
    core: &Core, id: InodeId, is_same: impl FnOnce(&dyn DiskFile) -> bool,
) -> Option<u64> {
    let file = core.open_current(id, Access::Read).ok()?;
    if !is_same(file.as_ref()) {
        return None;
    }
    let mut state = core.state();
    let handle = state.add_handle(Handle::new(id, false, Served::Passthrough));
    if let Some(node) = state.nodes.get_mut(&id) {
        node.is_left_open = true;
    }
    Some(handle)
}

/// These opens have ended.
pub fn note_left_closed(core: &Core, id: InodeId) {
    if let Some(node) = core.state().nodes.get_mut(&id) {
        node.is_left_open = false;
    }
}

/// Whether the daemon must serve opens of a file by itself: it may have served some that a daemon has left which died, and the
/// kernel refuses to have both kinds. A sealed file was always of one kind, but in memory.
pub(crate) fn must_serve(core: &Core, state: &State, id: InodeId, is_sealed: bool) -> bool {
    if core.before.deaths() == 0 || !state.metadata.is_older(id) {
        return false;
    }
    let is_in_memory = || {
        let object = state.inode(id).ok().and_then(|inode| inode.file()?.object);
        object.zip(core.store.ram.as_ref()).is_some_and(|(object, ram)| ram.holds(object))
    };
    let is_left_open = state.nodes.get(&id).is_some_and(|node| node.is_left_open);
    !is_left_open && (!is_sealed || is_in_memory())
}

/// Whether a handle was opened for writing with a daemon that has died.
pub fn is_dead_writer(core: &Core, number: u64) -> bool {
    number >> LIFE_SHIFT != core.before.deaths() && number & WRITES != 0
}

/// A write was refused to a handle of a daemon that died: what the kernel has cached of the file is not to be believed.
pub(crate) fn note_refused_write(core: &Core, id: InodeId) {
    core.state().nodes.entry(id).or_default().has_refused_writes = true;
}

/// Whether a request that comes now for one of these may be meant for something else: somebody may have looked a path up
/// before this daemon, and ask only now.
pub fn is_misled(core: &Core, ids: &[InodeId]) -> bool {
    let Some(misled) = core.before.misled.get() else { return false };
    if !core.before.misleads() {
        if !misled.is_over.swap(true, Ordering::Relaxed) {
            core.before.lost().forget_named();
        }
        return false;
    }
    let state = core.state();
    let given = misled.given.lock().unwrap_or_else(PoisonError::into_inner);
    // Nobody has looked it up since.
    let is_not_given = |id: &InodeId| {
        !given.contains(id) && state.nodes.get(id).is_none_or(|node| node.lookups == 0)
    };
    ids.iter().any(|id| misled.ids.contains(id) && is_not_given(id))
}

/// Takes up a handle of a daemon that has died, if this is one.
pub fn recall(core: &Core, number: u64, id: InodeId) {
    if number >> LIFE_SHIFT == core.before.deaths() {
        return;
    }
    let mut state = core.state();
    if state.handles.contains_key(&number) {
        return;
    }
    let writes = number & WRITES != 0;
    let object = state.inode(id).ok().and_then(|inode| {
        let file = inode.file().filter(|_| !writes)?;
        state.current_object(id, file)
    });
    let file = object.and_then(|object| core.store.open_object(object, Access::Read).ok());
    let file: Option<Arc<dyn DiskFile>> = file.map(Arc::from);
    state.put_handle(number, Handle::new(id, writes, Served::Before(file)));
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;
    use crate::unmounted::{FILES, Unmounted, place};
    use crate::{SetAttributes, make_all_durable};

    /// What the next daemon would find to be lost.
    fn lost(words: &SharedWords) -> Lost {
        Lost::read(words.as_fd().try_clone_to_owned().unwrap()).unwrap()
    }

    fn at_risk(words: &SharedWords) -> Vec<InodeId> {
        lost(words).ids().unwrap().iter().copied().collect()
    }

    #[test]
    fn a_file_that_is_being_made_is_at_risk_however_many_commits_there_are() {
        let unmounted = Unmounted::new();
        let (fs, words) = (&unmounted.fs, Touched::memory().unwrap());
        let old = unmounted.write(FILES, "old", b"bytes");
        make_all_durable(fs).unwrap();
        tell_of_changes(&fs.core, &words);
        let (_, new) = unmounted.open_new("new");
        let flags = libc::O_WRONLY | libc::O_TRUNC;
        let anew = fs.open_for(old, flags, crate::Caller::DAEMON).unwrap().handle;
        for handle in [new, anew] {
            fs.write(handle, 0, b"bytes", false).unwrap();
        }
        for _ in 0..3 {
            make_all_durable(fs).unwrap();
            assert_eq!(at_risk(&words), [InodeId::ROOT, FILES, old]);
        }
        for handle in [new, anew] {
            fs.flush(handle).unwrap();
            fs.release(handle).unwrap();
        }
        make_all_durable(fs).unwrap();
        assert_eq!(at_risk(&words), []);
    }

    #[test]
    fn what_a_commit_has_is_at_no_risk_and_what_users_do_not_see_never_is() {
        let unmounted = Unmounted::new();
        let (fs, words) = (&unmounted.fs, Touched::memory().unwrap());
        make_all_durable(fs).unwrap();
        tell_of_changes(&fs.core, &words);
        let small = unmounted.write(FILES, "small", b"bytes");
        let large = unmounted.write(FILES, "large", &vec![7; 70_000]);
        assert_eq!(at_risk(&words), [InodeId::ROOT, FILES]);
        for _ in 0..3 {
            make_all_durable(fs).unwrap();
            assert_eq!(at_risk(&words), []);
        }
        fs.retention.note_use(&fs.core, small, libc::O_RDONLY);
        crate::record_uses(fs).unwrap();
        assert_eq!(at_risk(&words), [], "when it was used");
        let opened = fs.open_for(large, libc::O_RDWR, crate::Caller::DAEMON).unwrap();
        fs.write(opened.handle, 0, b"changed in place", false).unwrap();
        fs.sync_file(opened.handle).unwrap();
        fs.flush(opened.handle).unwrap();
        fs.release(opened.handle).unwrap();
        assert_eq!(at_risk(&words), [], "what its bytes tell");
        let set = SetAttributes { mode: Some(0o600), ..SetAttributes::default() };
        fs.set_attributes(small, &set).unwrap();
        assert_eq!(at_risk(&words), [InodeId::ROOT, small]);
        fs.unlink(&place(FILES, "large")).unwrap();
        assert_eq!(at_risk(&words), [InodeId::ROOT, FILES, small, large], "removed by now");
        make_all_durable(fs).unwrap();
        assert_eq!(at_risk(&words), []);
    }

    /// The kernel gives lookups back that the daemon before has given, after it has asked this one.
    #[test]
    fn who_has_looked_a_name_up_since_is_not_misled_whatever_is_forgotten() {
        let unmounted = Unmounted::new();
        let (fs, words) = (&unmounted.fs, Touched::memory().unwrap());
        let old = unmounted.write(FILES, "old", b"bytes");
        make_all_durable(fs).unwrap();
        tell_of_changes(&fs.core, &words);
        fs.rename(&place(FILES, "old"), &place(FILES, "new"), 0).unwrap();
        fs.forget(old, 1000);
        begin_after(&fs.core, 1, lost(&words));
        assert!(is_misled(&fs.core, &[old]));
        fs.lookup(FILES, b"new").unwrap();
        assert!(!is_misled(&fs.core, &[old]));
        fs.forget(old, 1000);
        assert!(!is_misled(&fs.core, &[old]));
    }
}
