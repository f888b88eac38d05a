//! Who holds a lock, by the kernel's list of them, `/proc/locks`.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// The process that has a file locked (flock(2)), if it is one that this machine shows us.
pub(crate) fn holder(path: &Path) -> io::Result<Option<i32>> {
    let metadata = std::fs::metadata(path)?;
    let (major, minor) = (libc::major(metadata.dev()), libc::minor(metadata.dev()));
    let file = format!("{major:02x}:{minor:02x}:{}", metadata.ino());
    Ok(find(&std::fs::read_to_string("/proc/locks")?, &file))
}

/// Lines are `1: FLOCK ADVISORY WRITE PID MAJOR:MINOR:INODE START END`; one that waits has `->` behind
/// its number (`proc_locks(5)`).
fn find(locks: &str, file: &str) -> Option<i32> {
    locks.lines().find_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        match fields[..] {
            [_, "FLOCK", _, _, pid, locked, ..] if locked == file => pid.parse().ok(),
            _ => None,
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_holder_is_found_and_who_waits_is_not() {
        let locks = "1: POSIX  ADVISORY  WRITE 11 fd:00:77 0 EOF\n\
                     2: FLOCK  ADVISORY  WRITE 12 fd:00:777 0 EOF\n\
                     2: -> FLOCK  ADVISORY  WRITE 13 fd:00:77 0 EOF\n\
                     3: FLOCK  ADVISORY  WRITE 14 fd:00:77 0 EOF\n";
        assert_eq!(find(locks, "fd:00:77"), Some(14));
        assert_eq!(find(locks, "fd:00:7"), None);
    }

    #[test]
    fn our_own_lock_is_ours() {
        let file = tempfile::NamedTempFile::new().unwrap();
        assert_eq!(holder(file.path()).unwrap(), None);
        file.as_file().lock().unwrap();
        assert_eq!(holder(file.path()).unwrap(), Some(std::process::id().cast_signed()));
    }
}
