//! The kernel's list of mounts, `/proc/self/mountinfo`.
//!
//! It answers "is a kvfs mounted there?" without touching the mount, which matters when the
//! daemon behind it is dead or stuck.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::path::{Component, Path, PathBuf};

/// The filesystem type that the kernel shows for our mounts.
pub const KIND: &str = "fuse.kvfs";

/// One mount.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mount {
    /// Device number, `major:minor`; all mounts of one session share it.
    pub device: String,
    /// The directory of the filesystem that is mounted: not its root where a directory is bound elsewhere.
    pub root: PathBuf,
    /// Where it is mounted.
    pub mountpoint: PathBuf,
    /// Filesystem type.
    pub kind: String,
    /// The store, for our mounts.
    pub source: PathBuf,
}

impl Mount {
    /// Whether this is one of ours.
    pub fn is_kvfs(&self) -> bool {
        self.kind == KIND
    }
}

/// All mounts of this mount namespace, in the order in which they were made.
pub fn read() -> io::Result<Vec<Mount>> {
    Ok(parse(&std::fs::read("/proc/self/mountinfo")?))
}

/// A process of another mount namespace that has mounts of this device, if there is one: a container gets a copy of all mounts
/// that there are when it starts.
pub fn other_namespace_with(device: &str) -> Option<u32> {
    let namespace = |process: &Path| std::fs::read_link(process.join("ns/mnt")).ok();
    let mut known = BTreeSet::from([namespace(Path::new("/proc/self"))?]);
    std::fs::read_dir("/proc").ok()?.flatten().find_map(|entry| {
        let pid = entry.file_name().to_str()?.parse().ok()?;
        if !known.insert(namespace(&entry.path())?) {
            return None;
        }
        let mounts = parse(&std::fs::read(entry.path().join("mountinfo")).ok()?);
        mounts.iter().any(|mount| mount.device == device).then_some(pid)
    })
}

/// The mount that a path leads to: of several at one mountpoint, the last hides the others.
pub fn top_at<'a>(mounts: &'a [Mount], mountpoint: &Path) -> Option<&'a Mount> {
    mounts.iter().rev().find(|mount| mount.mountpoint == mountpoint)
}

/// Whether files with this device number in `stat(2)` are those of a kvfs that has this store, wherever it is mounted.
pub fn is_mount_of(mounts: &[Mount], device: u64, store: &Path) -> bool {
    let number = |mount: &Mount| {
        let (major, minor) = mount.device.split_once(':')?;
        Some(nix::sys::stat::makedev(major.parse().ok()?, minor.parse().ok()?))
    };
    let mut own = mounts.iter().filter(|mount| mount.is_kvfs() && mount.source == store);
    own.any(|mount| number(mount) == Some(device))
}

/// `path` as mountinfo spells it: absolute, without symbolic links. A mountpoint itself is not
/// touched, because that would hang or fail where its daemon does not answer.
pub fn canonical(path: &Path, mounts: &[Mount]) -> io::Result<PathBuf> {
    let absolute = std::path::absolute(path)?;
    if let (Some(parent), Some(name)) = (absolute.parent(), absolute.file_name()) {
        // Checked first as it stands: even its parent may lie behind a stuck mount.
        if top_at(mounts, &absolute).is_some() {
            return Ok(absolute);
        }
        let candidate = parent.canonicalize()?.join(name);
        if top_at(mounts, &candidate).is_some() {
            return Ok(candidate);
        }
    }
    absolute.canonicalize()
}

/// The kvfs mount at `path`, or the line that says what is there instead.
pub fn kvfs_at(path: &Path) -> Result<(Mount, Vec<Mount>), String> {
    let mounts = read().map_err(|error| format!("/proc/self/mountinfo: {error}"))?;
    let mountpoint =
        canonical(path, &mounts).map_err(|error| format!("{}: {error}", path.display()))?;
    match top_at(&mounts, &mountpoint) {
        Some(mount) if mount.is_kvfs() => Ok((mount.clone(), mounts)),
        Some(mount) => {
            Err(format!("{} is a mount of type {}, not of kvfs", mountpoint.display(), mount.kind))
        }
        None => Err(format!("{} is not a mountpoint of kvfs", mountpoint.display())),
    }
}

/// The kvfs mount that a path lies in, and the path without symbolic links above it.
pub fn kvfs_above(path: &Path) -> Result<(Mount, PathBuf), String> {
    let explain = |error: io::Error| format!("{}: {error}", path.display());
    let mounts = read().map_err(|error| format!("/proc/self/mountinfo: {error}"))?;
    let absolute = std::path::absolute(path).map_err(explain)?;
    let resolved = match (absolute.parent(), absolute.file_name()) {
        (Some(parent), Some(name)) => parent.canonicalize().map_err(explain)?.join(name),
        _ => absolute,
    };
    let above = |path: &Path| {
        let mount = path.ancestors().find_map(|ancestor| top_at(&mounts, ancestor));
        mount.filter(|mount| mount.is_kvfs()).cloned()
    };
    if let Some(mount) = above(&resolved) {
        return Ok((mount, resolved));
    }
    // A link that leads there.
    let led_to = resolved.canonicalize().unwrap_or(resolved);
    match above(&led_to) {
        Some(mount) => Ok((mount, led_to)),
        None => Err(format!("{} is not in a mount of kvfs", path.display())),
    }
}

/// As the kernel does, a path leads through so many symbolic links at most.
const LINKS_MAX: u32 = 40;

/// The kvfs that a path leads to or through, found without asking it anything: its daemon may not answer. Whatever lies
/// before it is looked at.
pub fn kvfs_on_the_way<'a>(path: &Path, mounts: &'a [Mount]) -> Option<&'a Mount> {
    let mut path = std::path::absolute(path).ok()?;
    for _ in 0..=LINKS_MAX {
        match walk(&path, mounts)? {
            Step::Reached(mount) => return Some(mount),
            Step::Link(target) => path = target,
        }
    }
    None
}

enum Step<'a> {
    Reached(&'a Mount),
    /// Where the path leads behind its first link.
    Link(PathBuf),
}

fn walk<'a>(path: &Path, mounts: &'a [Mount]) -> Option<Step<'a>> {
    let mut at = PathBuf::from("/");
    let mut components = path.components();
    while let Some(component) = components.next() {
        match component {
            Component::Normal(name) => at.push(name),
            Component::ParentDir => drop(at.pop()),
            Component::RootDir | Component::CurDir | Component::Prefix(_) => continue,
        }
        if let Some(mount) = top_at(mounts, &at).filter(|mount| mount.is_kvfs()) {
            return Some(Step::Reached(mount));
        }
        if at.symlink_metadata().ok()?.is_symlink() {
            let target = at.read_link().ok()?;
            at.pop();
            return Some(Step::Link(at.join(target).join(components.as_path())));
        }
    }
    None
}

fn parse(bytes: &[u8]) -> Vec<Mount> {
    bytes.split(|byte| *byte == b'\n').filter_map(parse_line).collect()
}

/// `36 35 98:0 / /mnt rw,noatime shared:1 - fuse.kvfs /store rw,user_id=0`; any number of
/// optional fields stand before the lone dash.
fn parse_line(line: &[u8]) -> Option<Mount> {
    let fields: Vec<&[u8]> = line.split(|byte| *byte == b' ').collect();
    let dash = fields.iter().skip(6).position(|field| *field == b"-")? + 6;
    Some(Mount {
        device: String::from_utf8_lossy(fields[2]).into_owned(),
        root: unescape(fields[3]),
        mountpoint: unescape(fields[4]),
        kind: unescape(fields.get(dash + 1)?).to_string_lossy().into_owned(),
        source: unescape(fields.get(dash + 2)?),
    })
}

/// The kernel writes blanks, tabs, line feeds, `\` and `#` as three octal digits.
fn unescape(field: &[u8]) -> PathBuf {
    let mut path = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&first, after)) = rest.split_first() {
        let octal = after.get(..3).filter(|digits| digits.iter().all(|d| (b'0'..b'8').contains(d)));
        let value = octal.map(|digits| digits.iter().fold(0, |v, d| v * 8 + u32::from(d - b'0')));
        match value.map(u8::try_from) {
            Some(Ok(value)) if first == b'\\' => {
                path.push(value);
                rest = &after[3..];
            }
            _ => {
                path.push(first);
                rest = after;
            }
        }
    }
    PathBuf::from(OsString::from_vec(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escapes() {
        fn check(field: &str, expected: &str) {
            assert_eq!(unescape(field.as_bytes()), PathBuf::from(expected));
        }
        check("/mnt/kv", "/mnt/kv");
        check(r"/mnt/my\040cache", "/mnt/my cache");
        check(r"a\011b\012c\134d\043e", "a\tb\nc\\d#e");
        check(r"ends\04", r"ends\04");
        check(r"not\09octal", r"not\09octal");
        check(r"large\777", r"large\777");
        check(r"\134040", r"\040");
        check("\\", "\\");
    }

    #[test]
    fn lines() {
        let text = "22 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n\
            40 22 0:41 / /mnt/kv rw,nosuid shared:7 master:2 - fuse.kvfs /srv/my\\040store rw,user_id=0\n\
            41 22 0:42 / /mnt/kv rw - tmpfs none rw\n\
            half a line";
        let mounts = parse(text.as_bytes());
        assert_eq!(mounts.len(), 3);
        assert_eq!(mounts[1].source, Path::new("/srv/my store"));
        assert_eq!((mounts[1].device.as_str(), mounts[1].root.as_path()), ("0:41", Path::new("/")));
        assert!(mounts[1].is_kvfs() && !mounts[0].is_kvfs());
        assert_eq!(top_at(&mounts, Path::new("/mnt/kv")).unwrap().kind, "tmpfs");
        assert_eq!(top_at(&mounts, Path::new("/mnt")), None);
        let device = nix::sys::stat::makedev(0, 41);
        assert!(is_mount_of(&mounts, device, Path::new("/srv/my store")));
        assert!(!is_mount_of(&mounts, device, Path::new("/srv/other")));
        assert!(!is_mount_of(&mounts, device + 1, Path::new("/srv/my store")));
    }

    #[test]
    fn a_kvfs_on_the_way_is_found_without_going_there() {
        let directory = tempfile::tempdir().unwrap();
        let base = directory.path().canonicalize().unwrap();
        let told = |place: &str, kind: &str| {
            format!("40 22 0:41 / {} rw - {kind} /srv/store rw\n", base.join(place).display())
        };
        // Neither is a mount, and nothing is in them: they are only told to be.
        let text = told("kv", KIND) + &told("other", KIND) + &told("other", "tmpfs");
        let mounts = parse(text.as_bytes());
        for made in ["kv", "other", "beside/deep"] {
            std::fs::create_dir_all(base.join(made)).unwrap();
        }
        let link = |target: &str, name: &str| {
            std::os::unix::fs::symlink(target, base.join(name)).unwrap();
        };
        link("../kv/files", "beside/link");
        link(base.join("beside").to_str().unwrap(), "absolute");
        link("turning", "turning");
        let is_found = |path: &str| {
            let found = kvfs_on_the_way(&base.join(path), &mounts);
            found.is_some_and(|mount| mount.mountpoint == base.join("kv"))
        };
        for path in ["kv", "kv/a/b", "beside/../kv", "beside/link", "absolute/link/x", "./kv/.."] {
            assert!(is_found(path), "{path}");
        }
        for path in ["", "beside", "missing/../kv", "turning", "other/x", "absolute/deep", "kv2"] {
            assert!(!is_found(path), "{path}");
        }
        assert_eq!(kvfs_on_the_way(Path::new(""), &mounts), None);
    }

    #[test]
    fn a_path_is_spelled_as_the_kernel_does() {
        let directory = tempfile::tempdir().unwrap();
        let real = directory.path().canonicalize().unwrap().join("real");
        std::fs::create_dir(&real).unwrap();
        let link = directory.path().join("link");
        std::os::unix::fs::symlink(&real, &link).unwrap();
        assert_eq!(canonical(&link, &[]).unwrap(), real);
        assert_eq!(canonical(&real.join("."), &[]).unwrap(), real);
        assert!(canonical(&real.join("absent"), &[]).is_err());
    }
}
