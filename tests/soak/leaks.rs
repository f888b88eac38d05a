//! What the daemon holds: at the end it must be what it was at the beginning.

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::time::Duration;

use kvfs::page::block_map::format_block;
use kvfs::page::{Layer, PrefixHash, names};

use crate::common::sys::open;
use crate::common::{Model, Mount, eventually};

/// Memory that may be kept: the database's cache (16 MiB), that of the allocator's arenas, and lists that
/// do not shrink.
const MEMORY_KEPT_MAX: u64 = 96 << 20;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Held {
    descriptors: usize,
    inodes: u64,
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
        Held { descriptors, inodes: mount.status_number("inodes_held"), resident_bytes: kib << 10 }
    }
}

/// All files are removed: waits until what they took is free, and compares.
pub(crate) fn assert_nothing_left(mount: &Mount, model: &Model, before: &Held, room: &Room) {
    let sequences = model.directory(mount).join(names::SEQUENCES);
    eventually("nothing to be left of slots", || no_work_is_left(&sequences));
    // The kernel keeps inodes and backing files of what was removed until it needs the room, and needs some
    // rounds: one for each level of directories.
    eventually("names to be forgotten", || {
        std::fs::write("/proc/sys/vm/drop_caches", "2").unwrap();
        std::thread::sleep(Duration::from_millis(100));
        (mount.status_number("inodes_held") <= before.inodes).then_some(())
    });
    let keys = [
        "ram_used_bytes",
        "ram_objects",
        "open_files",
        "registered_blocks",
        "uncommitted_changes",
        "pages",
    ];
    for key in keys {
        let zero = || (mount.status_number(key) == 0).then_some(());
        eventually(&format!("{key} to be 0"), zero);
    }
    // The manifest of the model, and its directories.
    eventually("the objects to go", || (mount.status_number("objects") == 1).then_some(()));
    assert!(mount.staging().is_empty(), "{:?}", mount.staging());
    let mut after = Held::now(mount);
    // Pools of threads end; eight spare files, which may not have been there yet, are made again, and a pack is
    // written to.
    eventually("descriptors to be closed", || {
        after = Held::now(mount);
        (after.descriptors <= before.descriptors + 12).then_some(())
    });
    println!("soak: before {before:?}, after {after:?}");
    assert!(after.resident_bytes < before.resident_bytes + MEMORY_KEPT_MAX, "memory was kept");
    assert_eq!(Room::now(mount, model), *room, "what was given up still counts");
}

/// What a user may hold of the daemon until he closes it: questions and slots, and bytes of descriptions of
/// blocks. What somebody gave up and still counts is missing in it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Room {
    questions: usize,
    description_bytes: usize,
}

impl Room {
    /// Takes all that there is, and gives it back.
    pub(crate) fn now(mount: &Mount, model: &Model) -> Room {
        let model = model.directory(mount);
        let ask = || open(model.join(names::PREFIXES).join("match"), libc::O_RDWR).ok();
        let questions: Vec<File> = std::iter::from_fn(ask).collect();
        let blocks = model.join(names::BLOCKS);
        let descriptions: Vec<_> = (0..).map_while(|number| describe(&blocks, number)).collect();
        let description_bytes = descriptions.iter().map(|(_, bytes)| bytes).sum();
        let room = Room { questions: questions.len(), description_bytes };
        // What was described is refused, which nobody asks.
        drop(descriptions);
        room
    }
}

/// Begins to describe a block, with as much as it takes; nothing if there is no room to begin.
fn describe(blocks: &Path, number: u8) -> Option<(File, usize)> {
    let path = blocks.join(format_block(&PrefixHash([number; 32]), Layer(0)));
    let mut file = open(path, libc::O_WRONLY | libc::O_CREAT | libc::O_TRUNC).ok()?;
    let mut written = 0;
    for piece_bytes in [1 << 20, 1 << 16, 1 << 12, 1 << 8] {
        let spaces = vec![b' '; piece_bytes];
        while file.write_all(&spaces).is_ok() {
            written += piece_bytes;
        }
    }
    Some((file, written))
}

/// Only the directories of the ledger stay: what was saved halfway, or replaced, goes as well.
fn no_work_is_left(sequences: &Path) -> Option<()> {
    let entries = std::fs::read_dir(sequences).unwrap();
    let mut names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.all(|name| name == "one" || name == "two").then_some(())
}
