//! Where the numbers come from.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

/// The machine, the filesystem below, and whether the kernel passes files through.
pub(super) fn describe(path: &Path, passthrough: &str) -> Value {
    let cpu = field("/proc/cpuinfo", "model name").unwrap_or_else(|| std::env::consts::ARCH.into());
    let kernel = nix::sys::utsname::uname()
        .map(|name| name.release().to_string_lossy().into_owned())
        .unwrap_or_default();
    json!({
        "cpu": cpu,
        "cores": std::thread::available_parallelism().map_or(1, usize::from),
        "memory": kvfs_os::memory_bytes("MemTotal").unwrap_or(0),
        "kernel": kernel,
        "filesystem": filesystem(path).unwrap_or_else(|| "unknown".to_owned()),
        "passthrough": passthrough,
        "fuse_enable_uring": crate::fuse::rings_are_enabled(),
    })
}

/// A `name: value` line of a file in `/proc`.
pub(super) fn field(path: &str, name: &str) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    let line = text.lines().find(|line| {
        line.strip_prefix(name).is_some_and(|rest| rest.trim_start().starts_with(':'))
    })?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

/// Type of the filesystem that holds a path.
fn filesystem(path: &Path) -> Option<String> {
    let mounts = fs::read_to_string("/proc/self/mounts").ok()?;
    let mut found: Option<(usize, String)> = None;
    for line in mounts.lines() {
        let mut words = line.split(' ').skip(1);
        let (Some(mountpoint), Some(kind)) = (words.next(), words.next()) else {
            continue;
        };
        // Later lines cover earlier ones of the same length.
        if path.starts_with(mountpoint)
            && found.as_ref().is_none_or(|(length, _)| *length <= mountpoint.len())
        {
            found = Some((mountpoint.len(), kind.to_owned()));
        }
    }
    found.map(|(_, kind)| kind)
}
