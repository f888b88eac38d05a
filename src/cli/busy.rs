//! Who uses a mount: the answer to EBUSY that `fuser -m` would give, without touching the mount.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};

use kvfs_os::mountinfo;

/// More names than this help nobody.
const USERS_MAX: usize = 5;

/// One line that names programs using a mount, or says that none was found.
pub(crate) fn describe(mountpoint: &Path) -> String {
    let found = users(mountpoint);
    if found.is_empty()
        && let Some(inside) = mount_inside(mountpoint)
    {
        return format!("in use: another mount lies in it, at {}", inside.display());
    }
    let list = found.iter().take(USERS_MAX).cloned().collect::<Vec<_>>().join(", ");
    match found.len() {
        0 => "in use by a process that cannot be seen from here".to_owned(),
        count if count > USERS_MAX => format!("in use by {list} and others"),
        _ => format!("in use by {list}"),
    }
}

/// Whether somebody can be seen that uses a mount. Whoever cannot be may be gone in a moment: the kernel closes what a
/// program had open behind its end.
pub(crate) fn is_used(mountpoint: &Path) -> bool {
    !users(mountpoint).is_empty() || mount_inside(mountpoint).is_some()
}

fn mount_inside(mountpoint: &Path) -> Option<PathBuf> {
    let mounts = mountinfo::read().unwrap_or_default();
    let inside = |place: &PathBuf| place.starts_with(mountpoint) && place != mountpoint;
    mounts.into_iter().map(|mount| mount.mountpoint).find(inside)
}

/// Up to one more than [`USERS_MAX`], so that "and others" can be said.
fn users(mountpoint: &Path) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir("/proc") else {
        return Vec::new();
    };
    let processes = entries.flatten().map(|entry| entry.path()).filter(|path| {
        let name = path.file_name().and_then(|name| name.to_str());
        name.is_some_and(|name| name.bytes().all(|byte| byte.is_ascii_digit()))
    });
    processes.filter_map(|process| user(&process, mountpoint)).take(USERS_MAX + 1).collect()
}

/// `python (pid 4711, working directory)` if the process at `/proc/4711` uses the mount.
fn user(process: &Path, mountpoint: &Path) -> Option<String> {
    let how = uses(process, mountpoint)?;
    let name = std::fs::read_to_string(process.join("comm")).unwrap_or_default();
    let pid = process.file_name()?.to_string_lossy();
    Some(format!("{} (pid {pid}, {how})", name.trim_end()))
}

/// How a process uses the mount.
fn uses(process: &Path, mountpoint: &Path) -> Option<String> {
    // These links are read without following them, so the mount is not asked.
    let inside = |link: PathBuf| {
        std::fs::read_link(link).ok().filter(|target| target.starts_with(mountpoint))
    };
    for (link, how) in
        [("cwd", "working directory"), ("root", "root directory"), ("exe", "program")]
    {
        if inside(process.join(link)).is_some() {
            return Some(how.to_owned());
        }
    }
    let descriptors = std::fs::read_dir(process.join("fd")).ok().into_iter().flatten().flatten();
    if let Some(path) = descriptors.map(|entry| entry.path()).find_map(inside) {
        return Some(format!("open file {}", path.display()));
    }
    let maps = std::fs::File::open(process.join("maps")).ok()?;
    let mut lines = BufReader::new(maps).lines().map_while(Result::ok);
    let path = lines.find_map(|line| {
        let path = PathBuf::from(&line[line.find('/')?..]);
        path.starts_with(mountpoint).then_some(path)
    })?;
    Some(format!("mapped file {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::process::{Command, Stdio};

    #[test]
    fn an_open_file_and_a_working_directory_are_named() {
        fn check(path: &Path, child: &mut Command, expected: &str) {
            let mut child = child.arg("60").spawn().unwrap();
            let line = describe(path);
            child.kill().unwrap();
            child.wait().unwrap();
            let expected = format!("sleep (pid {}, {expected})", child.id());
            assert!(line.contains(&expected), "{line}");
        }
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().canonicalize().unwrap();
        assert_eq!(users(&path), Vec::<String>::new());
        check(&path, Command::new("sleep").current_dir(&path), "working directory");
        let file = path.join("page");
        let stdin = Stdio::from(File::create(&file).unwrap());
        check(&path, Command::new("sleep").stdin(stdin), &format!("open file {}", file.display()));
    }
}
