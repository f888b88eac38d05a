//! `.kvfs/`: text made when it is opened, of which only `settings` can be written (`dialogue`), and `batch`, which
//! answers questions of everybody. It
//! answers lookups by name and is not listed (as ZFS does with `.zfs`), so `du`, `cp -r` and `rsync`
//! of the mount see nothing virtual.

use std::sync::Arc;

use super::attributes::{Attributes, Caller, Place};
use super::list::Listed;
use super::metrics::exposition;
use super::opened::Opened;
use super::prefixes::is_prefix_name;
use super::{FileSystem, FsError, batch, dialogue, hottest, live, status};
use crate::core::handle::{Handle, Served};
use kvfs_storage::store::record::{InodeId, Time};

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

/// Finds a virtual name.
pub(super) fn lookup(
    fs: &FileSystem, parent: InodeId, name: &[u8],
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
    Ok(found.map(|id| attributes(fs, id)))
}

/// Whether a name is virtual: it cannot be removed or moved.
pub(super) fn is_virtual_name(fs: &FileSystem, place: &Place) -> Result<bool, FsError> {
    // The kernel looks a directory up again that another daemon has given its number.
    fs.prefixes.check_known(place.parent)?;
    let is_view = lookup(fs, place.parent, &place.name)?.is_some();
    Ok(is_view || is_prefix_name(&fs.core, place))
}

/// What `stat` shows of a virtual inode.
pub(super) fn attributes(fs: &FileSystem, id: InodeId) -> Attributes {
    let now = Time::now();
    let directory = id == DIRECTORY;
    let size = if directory { 0 } else { render(fs, id).len() as u64 };
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

pub(super) fn open(fs: &FileSystem, id: InodeId, flags: i32) -> Result<Opened, FsError> {
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
        Served::Text(Arc::from(hottest::text(fs).into_bytes()))
    } else if id == USES {
        Served::Text(Arc::from(fs.core.sample.to_bytes()))
    } else {
        Served::Text(Arc::from(render(fs, id).into_bytes()))
    };
    let handle = fs.core.state().add_handle(Handle::new(id, converses, served));
    Ok(Opened::uncached(handle, true))
}

fn render(fs: &FileSystem, id: InodeId) -> String {
    let steering = fs.steering.get();
    match VIEWS.iter().find(|(view, _)| *view == id).map(|(_, name)| *name) {
        Some("status") => status::status(fs),
        Some("metrics") => exposition(fs),
        Some("config") => live::configuration(fs),
        Some("settings") => steering.map(|steering| steering.settings()).unwrap_or_default(),
        Some("errors") => fs.core.observer.errors(),
        Some("page") => fs.core.observer.page_address().to_owned(),
        _ => String::new(),
    }
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
