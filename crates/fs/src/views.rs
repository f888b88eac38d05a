//! `.kvfs/`: text made when it is opened, of which only `settings` can be written (`dialogue`), and `batch`, which
//! answers questions of everybody. It
//! answers lookups by name and is not listed (as ZFS does with `.zfs`), so `du`, `cp -r` and `rsync`
//! of the mount see nothing virtual.

use std::fmt::Write as _;
use std::sync::Arc;

use super::attributes::{Attributes, Caller, Place};
use super::health::Refusal;
use super::hits::saved_seconds;
use super::list::Listed;
use super::opened::Opened;
use super::prefixes::is_prefix_name;
use super::{FileSystem, FsError, IoMode, Transport};
use super::{batch, dialogue, hottest, live};
use crate::core::Core;
use crate::core::handle::{Handle, Served};
use crate::core::state::State;
use kvfs_storage::store::Store;
use kvfs_storage::store::packs::Packed;
use kvfs_storage::store::quarantine;
use kvfs_storage::store::record::{InodeId, Time};
use kvfs_storage::tier::counters::Tier;

/// Numbers below 2^32 are never given to stored inodes, except the three roots.
const DIRECTORY: InodeId = InodeId(16);
const VIEWS: [(InodeId, &str); 9] = [
    (InodeId(17), "status"),
    (InodeId(18), "metrics"),
    (InodeId(19), "config"),
    (InodeId(20), "errors"),
    (EVENTS, "events"),
    (SETTINGS, "settings"),
    (HOTTEST, "hottest"),
    (InodeId(24), "page"),
    (USES, "uses"),
];
/// Made while it is read, so its size is told as 0.
const EVENTS: InodeId = InodeId(21);
/// Takes requests to change settings.
pub(super) const SETTINGS: InodeId = InodeId(22);

/// Tells the last opens. Its size is told as 0, since it costs more to make than others.
const HOTTEST: InodeId = InodeId(23);

/// Tells the uses of a sample of all files, up to 5 MiB. Its size is told as 0.
const USES: InodeId = InodeId(25);

/// Whether an inode is virtual.
pub(super) fn is_view(id: InodeId) -> bool {
    (DIRECTORY.0..=DIRECTORY.0 + VIEWS.len() as u64).contains(&id.0) || batch::is_batch(id)
}

/// Refuses to tell others than the daemon's user and root of what is in the directory, as one does that they may not
/// enter. They may, for `batch` alone.
pub(super) fn check_lookup(place: &Place, caller: Caller) -> Result<(), FsError> {
    let is_for_all = place.parent != DIRECTORY || place.name == batch::NAME.as_bytes();
    if is_for_all { Ok(()) } else { dialogue::check_caller(caller).or(Err(FsError::NoAccess)) }
}

/// Whether the kernel may remember what a virtual name stands for, whoever asks: not what is in the directory.
pub(super) fn name_is_stable(id: InodeId) -> bool {
    id == DIRECTORY
}

/// Whether it tells the settings, and changes them.
pub(super) fn is_settings(id: InodeId) -> bool {
    id == SETTINGS
}

/// Whether making its text takes milliseconds.
pub(super) fn takes_long(id: InodeId) -> bool {
    id == USES
}

impl FileSystem {
    /// Finds a virtual name.
    pub(super) fn lookup_view(
        &self, parent: InodeId, name: &[u8],
    ) -> Result<Option<Attributes>, FsError> {
        let found = match parent {
            InodeId::ROOT if name == b".kvfs" => Some(DIRECTORY),
            DIRECTORY if name == batch::NAME.as_bytes() => Some(batch::inode_of(0)),
            DIRECTORY => {
                let view = VIEWS.iter().find(|(_, view)| view.as_bytes() == name);
                Some(view.ok_or(FsError::NotFound)?.0)
            }
            parent if is_view(parent) => return Err(FsError::NotDirectory),
            _ => None,
        };
        Ok(found.map(|id| self.view_attributes(id)))
    }

    /// Whether a name is virtual: it cannot be removed or moved.
    pub(super) fn is_virtual_name(&self, place: &Place) -> Result<bool, FsError> {
        // The kernel looks a directory up again that another daemon has given its number.
        self.prefixes.check_known(place.parent)?;
        let is_view = self.lookup_view(place.parent, &place.name)?.is_some();
        Ok(is_view || is_prefix_name(&self.core, place))
    }

    /// What `stat` shows of a virtual inode.
    pub(super) fn view_attributes(&self, id: InodeId) -> Attributes {
        let now = Time::now();
        let directory = id == DIRECTORY;
        let size = if directory { 0 } else { self.render(id).len() as u64 };
        Attributes {
            inode: id,
            size,
            blocks: size.div_ceil(512),
            atime: now,
            mtime: now,
            ctime: now,
            file_type: if directory { libc::S_IFDIR } else { libc::S_IFREG },
            mode: match id {
                DIRECTORY => 0o511,
                id if batch::is_batch(id) => 0o666,
                SETTINGS => 0o600,
                _ => 0o400,
            },
            links: if directory { 2 } else { 1 },
            uid: nix::unistd::geteuid().as_raw(),
            gid: nix::unistd::getegid().as_raw(),
            device: 0,
            is_at_rest: false,
        }
    }

    pub(super) fn open_view(&self, id: InodeId, flags: i32) -> Result<Opened, FsError> {
        if id == DIRECTORY {
            return Err(FsError::IsDirectory);
        }
        let access = flags & libc::O_ACCMODE;
        let converses = id == SETTINGS && access == libc::O_RDWR;
        if !converses && access != libc::O_RDONLY || flags & libc::O_TRUNC != 0 {
            return Err(FsError::NotPermitted);
        }
        let served = if converses {
            Served::Settings(Arc::default())
        } else if id == EVENTS {
            Served::History(Arc::default())
        } else if id == HOTTEST {
            Served::Text(Arc::from(hottest::text(self).into_bytes()))
        } else if id == USES {
            Served::Text(Arc::from(self.core.sample.to_bytes()))
        } else {
            Served::Text(Arc::from(self.render(id).into_bytes()))
        };
        let handle = self.core.state().add_handle(Handle::new(id, converses, served));
        Ok(Opened::uncached(handle, true))
    }

    fn render(&self, id: InodeId) -> String {
        let steering = self.steering.get();
        match VIEWS.iter().find(|(view, _)| *view == id).map(|(_, name)| *name) {
            Some("status") => self.status(),
            Some("metrics") => self.metrics(),
            Some("config") => live::configuration(self),
            Some("settings") => steering.map(|steering| steering.settings()).unwrap_or_default(),
            Some("errors") => self.core.observer.errors(),
            Some("page") => self.core.observer.page_address().to_owned(),
            _ => String::new(),
        }
    }

    /// One `key: value` line each.
    pub(super) fn status(&self) -> String {
        let (totals, held, handles, uncommitted) = {
            let state = self.core.state();
            let uncommitted = uncommitted(&state);
            let totals = super::held_back::totals(&state);
            (totals, state.nodes.len(), state.handles.len(), uncommitted)
        };
        let held = held + self.prefixes.numbers().held();
        let passthrough = match self.core.io_mode.get() {
            Some(IoMode::Passthrough) => "yes".to_owned(),
            Some(IoMode::Served(reason)) => format!("no: {reason}"),
            None => "not tried yet".to_owned(),
        };
        let io_uring = match self.transport.get() {
            Some(Transport::Rings(_)) => "yes".to_owned(),
            Some(Transport::Device(reason)) => format!("no: {reason}"),
            None => "not tried yet".to_owned(),
        };
        let free = self.core.store.disk.space().map_or(0, |space| space.available_bytes);
        let health = self.health();
        let mut text = String::new();
        let mut line = |key: &str, value: &dyn std::fmt::Display| {
            add_line(&mut text, key, value);
        };
        line("version", &env!("CARGO_PKG_VERSION"));
        line("pid", &std::process::id());
        line("store", &self.core.store.path().display());
        line("mountpoint", &self.core.observer.mountpoint().display());
        line("state", &health.word());
        if !health.reasons.is_empty() {
            line("state_reason", &health.reasons.join("; "));
        }
        line("damaged_files", &health.damaged_files);
        if let Some(address) = self.core.observer.metrics_address() {
            line("metrics_address", &address);
        }
        line("passthrough", &passthrough);
        line("io_uring", &io_uring);
        line("uptime_seconds", &self.core.observer.uptime().as_secs());
        line("objects", &totals.objects);
        line("pages", &totals.pages);
        line("stored_bytes", &totals.bytes);
        line("free_bytes", &free);
        if let Some(ram) = &self.core.store.ram {
            let usage = ram.usage();
            line("ram_tier", ram.place());
            line("ram_budget_bytes", &ram.budget_bytes());
            line("ram_used_bytes", &usage.used_bytes);
            line("ram_dirty_bytes", &usage.dirty_bytes);
            line("ram_pinned_bytes", &usage.pinned_bytes);
            line("ram_objects", &usage.objects);
        }
        pack_status(&self.core.store, &mut text);
        use_status(&self.core, &mut text);
        super::hits::add_lines(&self.core, &mut text);
        self.tier_status(&mut text);
        self.retention.status(&self.core, &mut text);
        self.scrubs.tell(&self.core, &mut text);
        self.core.before.tell(&mut text);
        let mut line = |key: &str, value: &dyn std::fmt::Display| {
            add_line(&mut text, key, value);
        };
        line("registered_blocks", &self.blocks.count());
        line("inodes_held", &held);
        line("open_files", &handles);
        line("uncommitted_changes", &uncommitted);
        line("last_event", &self.core.store.events.last_number());
        line("quarantined_objects", &quarantine::count(&self.core.store).unwrap_or(0));
        line("errors", &self.core.observer.error_count());
        text
    }
}

/// Changes that a crash would lose.
fn uncommitted(state: &State) -> usize {
    if state.refusal == Some(Refusal::ReadOnlyMedia) {
        // Only what recovery found out, which is true again at the next mount.
        return 0;
    }
    state.metadata.not_durable() + state.unsettled.len() + state.metadata.held_back.len()
}

/// What was found since the mount began, in tokens.
fn use_status(core: &Core, text: &mut String) {
    let observer = &core.observer;
    let (asked, answered) = observer.matched_tokens();
    add_line(text, "asked_tokens", &asked);
    add_line(text, "answered_tokens", &answered);
    for tier in [Tier::Ram, Tier::Ssd, Tier::Remote] {
        add_line(text, &format!("opened_tokens_{tier}"), &observer.opened_tokens(tier));
    }
    add_line(text, "restored_tokens", &observer.restored_tokens());
    if let Some(saved) = saved_seconds(core) {
        add_line(text, "saved_seconds", &format!("{saved:.1}"));
    }
}

fn pack_status(store: &Store, text: &mut String) {
    let Packed { packs, objects, bytes, live_bytes } = store.packs.packed();
    add_line(text, "packed_files", &objects);
    add_line(text, "pack_files", &packs);
    add_line(text, "pack_bytes", &bytes);
    add_line(text, "pack_live_bytes", &live_bytes);
    add_line(text, "small_files_in_memory_bytes", &store.buffer.used_bytes());
}

/// Lists the virtual directory.
pub(super) fn list_views(
    id: InodeId, offset: u64, mut emit: impl FnMut(&Listed<'_>) -> bool,
) -> Result<(), FsError> {
    if id != DIRECTORY {
        return Err(FsError::NotDirectory);
    }
    let dots = [(DIRECTORY, "."), (InodeId::ROOT, "..")];
    let views = VIEWS.into_iter().chain([(batch::inode_of(0), batch::NAME)]);
    for (index, (inode, name)) in dots.into_iter().chain(views).enumerate() {
        let line = Listed {
            next_offset: index as u64 + 1,
            name: name.as_bytes(),
            inode,
            file_type: if index < dots.len() { libc::S_IFDIR } else { libc::S_IFREG },
            attributes: None,
            name_is_stable: false,
        };
        if offset <= index as u64 && !emit(&line) {
            break;
        }
    }
    Ok(())
}

/// A line of a status: whatever its value contains, such as the path of a store, it stays one line.
pub(crate) fn add_line(text: &mut String, key: &str, value: &dyn std::fmt::Display) {
    let value = kvfs_page::printable(value.to_string().chars());
    // Writing to a String cannot fail.
    let _ = writeln!(text, "{key}: {value}");
}
