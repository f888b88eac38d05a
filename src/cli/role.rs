//! Who calls: a person, mount(8) or umount(8).

use std::ffi::{OsStr, OsString};
use std::path::Path;

/// The role that the program's name and first argument ask for.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// `kvfs SUBCOMMAND ...`.
    Command,
    /// `mount.kvfs STORE MOUNTPOINT ...`: the arguments after the program's name.
    MountHelper(Vec<OsString>),
    /// `umount.fuse.kvfs MOUNTPOINT ...`: the arguments after the program's name.
    UmountHelper(Vec<OsString>),
}

/// The role for these arguments, the program's name first.
///
/// For a filesystem type of `fuse.kvfs`, `mount.fuse3` runs `kvfs STORE MOUNTPOINT -o ...`
/// without a subcommand, so an absolute first argument is a store.
pub(crate) fn of(arguments: &[OsString]) -> Role {
    let program = arguments.first().map(Path::new).and_then(Path::file_name);
    let rest = || arguments.iter().skip(1).cloned().collect();
    match program.and_then(OsStr::to_str) {
        Some("mount.kvfs" | "mount.fuse.kvfs") => Role::MountHelper(rest()),
        Some("umount.kvfs" | "umount.fuse.kvfs") => Role::UmountHelper(rest()),
        _ if arguments.get(1).is_some_and(|first| Path::new(first).is_absolute()) => {
            Role::MountHelper(rest())
        }
        _ => Role::Command,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn roles() {
        fn check(arguments: &[&str], expected: &str) {
            let arguments: Vec<OsString> = arguments.iter().map(OsString::from).collect();
            let found = match of(&arguments) {
                Role::Command => "command".to_owned(),
                Role::MountHelper(rest) => format!("mount {}", rest.len()),
                Role::UmountHelper(rest) => format!("umount {}", rest.len()),
            };
            assert_eq!(found, expected, "{arguments:?}");
        }
        check(&[], "command");
        check(&["kvfs"], "command");
        check(&["/usr/local/bin/kvfs", "mount", "/store", "/mnt"], "command");
        check(&["/sbin/mount.kvfs", "/store", "/mnt", "-o", "rw"], "mount 4");
        check(&["mount.fuse.kvfs", "store", "/mnt"], "mount 2");
        check(&["kvfs", "/store", "/mnt", "-o", "rw,dev,suid"], "mount 4");
        check(&["/sbin/umount.fuse.kvfs", "/mnt", "-l"], "umount 2");
        check(&["umount.kvfs", "/mnt"], "umount 1");
        check(&["kvfs", "store", "/mnt"], "command");
    }
}
