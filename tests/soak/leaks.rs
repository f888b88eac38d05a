//! What the daemon holds: at the end it must be what it was at the beginning.

use crate::common::{Mount, eventually};

/// Memory that may be kept: the database's cache (16 MiB), that of the allocator's arenas, and lists that
/// do not shrink.
const MEMORY_KEPT_MAX: u64 = 96 << 20;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Held {
    descriptors: usize,
    resident_bytes: u64,
}

impl Held {
    pub(crate) fn now(mount: &Mount) -> Held {
        let process = format!("/proc/{}", mount.pid());
        let descriptors = std::fs::read_dir(format!("{process}/fd")).unwrap().count();
        let status = std::fs::read_to_string(format!("{process}/status")).unwrap();
        let mut lines = status.lines();
        let line = lines.find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        let kib: u64 = line.trim().trim_end_matches(" kB").parse().unwrap();
        Held { descriptors, resident_bytes: kib << 10 }
    }
}

/// All files are removed: waits until what they took is free, and compares.
pub(crate) fn assert_nothing_left(mount: &Mount, before: &Held) {
    // The kernel keeps inodes and backing files of what was removed until it needs the room.
    std::fs::write("/proc/sys/vm/drop_caches", "2").unwrap();
    for key in ["ram_used_bytes", "ram_objects", "open_files", "uncommitted_changes", "pages"] {
        let zero = || (mount.status_number(key) == 0).then_some(());
        eventually(&format!("{key} to be 0"), zero);
    }
    // The manifest of the model, and its directories.
    eventually("the objects to go", || (mount.objects().len() == 1).then_some(()));
    assert!(mount.staging().is_empty(), "{:?}", mount.staging());
    let mut after = Held::now(mount);
    // Pools of threads end, spare files are made again.
    eventually("descriptors to be closed", || {
        after = Held::now(mount);
        (after.descriptors <= before.descriptors + 8).then_some(())
    });
    println!("soak: before {before:?}, after {after:?}");
    assert!(after.resident_bytes < before.resident_bytes + MEMORY_KEPT_MAX, "memory was kept");
}
