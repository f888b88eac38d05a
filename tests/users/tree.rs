//! All of a tree as root sees it, as lines that can be compared.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use crate::common::sys::{attribute, listxattr};

/// What `stat` tells that does not depend on the filesystem.
pub(crate) fn describe(metadata: &fs::Metadata) -> String {
    let (mode, uid, gid) = (metadata.mode(), metadata.uid(), metadata.gid());
    let rest = if metadata.is_dir() {
        String::new()
    } else {
        format!(" {} links {} bytes", metadata.nlink(), metadata.len())
    };
    format!("{mode:o} {uid}:{gid}{rest}")
}

/// A line for each name below a directory.
pub(crate) fn lines(root: &Path) -> Vec<String> {
    let mut lines = vec![format!(". {}", describe(&fs::metadata(root).unwrap()))];
    let mut directories = vec![String::new()];
    while let Some(directory) = directories.pop() {
        for entry in fs::read_dir(root.join(&directory)).unwrap() {
            let name = entry.unwrap().file_name().into_string().unwrap();
            let path = if directory.is_empty() { name } else { format!("{directory}/{name}") };
            let metadata = fs::symlink_metadata(root.join(&path)).unwrap();
            lines.push(format!(
                "{path} {} {}",
                describe(&metadata),
                inside(root, &path, &metadata)
            ));
            if metadata.is_dir() {
                directories.push(path);
            }
        }
    }
    lines.sort();
    lines
}

fn inside(root: &Path, path: &str, metadata: &fs::Metadata) -> String {
    let at = root.join(path);
    if metadata.is_symlink() {
        return format!("-> {}", fs::read_link(at).unwrap().display());
    }
    let mut names = listxattr(&at).unwrap();
    names.sort();
    let attributes: Vec<_> =
        names.iter().map(|name| (name, attribute(&at, name).unwrap())).collect();
    let bytes = if metadata.is_file() { fs::read(&at).unwrap() } else { Vec::new() };
    format!("{attributes:?} {:?}", String::from_utf8_lossy(&bytes))
}
