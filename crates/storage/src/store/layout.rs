//! What the files and directories of a store are. What else lies in the place of one is told before anything is opened:
//! opening a FIFO waits for somebody at its other end, perhaps for ever.

use std::fs::FileType;
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

use super::{StoreError, format};

/// Directories that are needed to open a store, or may be there.
const DIRECTORIES: [&str; 3] = ["objects", "staging", "packs"];

/// Checks what is there. What is missing is somebody else's question.
pub(super) fn check(path: &Path) -> Result<(), StoreError> {
    if kind(&format::lock_file(path))?.is_some_and(|kind| !kind.is_file()) {
        return Err(format::not_a_store(path));
    }
    let database = path.join("meta.redb");
    if let Some(found) = kind(&database)?.filter(|kind| !kind.is_file()) {
        return Err(misplaced(&database, found, "file"));
    }
    for directory in DIRECTORIES.map(|name| path.join(name)) {
        if let Some(found) = kind(&directory)?.filter(|kind| !kind.is_dir()) {
            return Err(misplaced(&directory, found, "directory"));
        }
    }
    let objects = match path.join("objects").read_dir() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        outcome => outcome?,
    };
    for entry in objects {
        let entry = entry?;
        let is_shard = entry.file_name().to_str().is_some_and(is_shard);
        let found = entry.file_type()?;
        if is_shard && !found.is_dir() {
            return Err(misplaced(&entry.path(), found, "directory"));
        }
    }
    Ok(())
}

fn is_shard(name: &str) -> bool {
    name.len() == 2 && name.bytes().all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f'))
}

/// What is there, a symbolic link for itself.
fn kind(path: &Path) -> io::Result<Option<FileType>> {
    match path.symlink_metadata() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        outcome => Ok(Some(outcome?.file_type())),
    }
}

fn misplaced(path: &Path, found: FileType, expected: &str) -> StoreError {
    let found = if found.is_symlink() {
        "a symbolic link"
    } else if found.is_dir() {
        "a directory"
    } else if found.is_file() {
        "a file"
    } else if found.is_fifo() {
        "a FIFO"
    } else {
        "a device or socket"
    };
    StoreError::Incomplete(format!(
        "{} is {found}, and a store has a {expected} there: put that back, or move what is there away and run kvfs fsck",
        path.display()
    ))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use nix::fcntl::AT_FDCWD;
    use nix::sys::stat::Mode;

    use super::*;
    use crate::store::Store;

    /// What opening the store says, if it is said within a few seconds.
    fn told(path: &Path) -> Option<String> {
        let (sender, receiver) = channel();
        let path = path.to_owned();
        let open = move || sender.send(Store::open(&path).map(drop).map_err(|e| e.to_string()));
        std::thread::Builder::new().spawn(open).unwrap();
        receiver.recv_timeout(Duration::from_secs(20)).expect("it waits").err()
    }

    #[test]
    fn what_lies_in_the_place_of_a_part_is_told() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("store");
        drop(Store::open_or_create(&path).unwrap().metadata().unwrap());
        std::fs::create_dir(path.join("packs")).unwrap();
        assert_eq!(told(&path), None);
        let elsewhere = directory.path().join("elsewhere");
        for (name, is_directory) in [
            ("FORMAT", false),
            ("meta.redb", false),
            ("objects", true),
            ("objects/07", true),
            ("staging", true),
            ("packs", true),
        ] {
            let place = path.join(name);
            nix::fcntl::renameat(AT_FDCWD, &place, AT_FDCWD, &elsewhere).unwrap();
            for kind in
                ["a FIFO", "a symbolic link", if is_directory { "a file" } else { "a directory" }]
            {
                match kind {
                    "a FIFO" => nix::unistd::mkfifo(&place, Mode::S_IRWXU).unwrap(),
                    "a symbolic link" => symlink(&elsewhere, &place).unwrap(),
                    "a file" => std::fs::write(&place, b"").unwrap(),
                    _ => std::fs::create_dir(&place).unwrap(),
                }
                let line = told(&path).unwrap_or_else(|| panic!("{name}: {kind} is taken for it"));
                let expected = match name {
                    "FORMAT" => "FORMAT is damaged or missing".to_owned(),
                    _ => format!("{name} is {kind}, and a store has a "),
                };
                assert!(line.contains(&expected), "{line}");
                if kind == "a directory" {
                    std::fs::remove_dir(&place).unwrap();
                } else {
                    std::fs::remove_file(&place).unwrap();
                }
            }
            nix::fcntl::renameat(AT_FDCWD, &elsewhere, AT_FDCWD, &place).unwrap();
        }
        for name in ["notes", "+f", "AB"] {
            std::fs::write(path.join("objects").join(name), b"").unwrap();
            assert_eq!(told(&path), None, "{name} is no part of a store");
        }
    }
}
