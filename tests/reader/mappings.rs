//! Pages of the mount's RAM tier are mapped, as many as may be, and the others are read.

use std::io::Write;

use kvfs::reader::Limits;

use crate::common::Mode;
use crate::common::sys::open;
use crate::prepared::{EVERYTHING, NOTHING, Prepared, mapped_files, tail_name};

in_both_modes!(
    pages_in_memory_are_mapped_if_the_kernel_passes_them_through,
    mappings_stay_within_their_bound,
    a_decode_loop_sees_every_row_that_it_appends,
    eighty_layers_stay_within_the_mappings_of_a_process,
);

/// Two layers of pages of 8 KiB.
const SMALL: [u32; 4] = [2, 2, 16, 32];

fn pages_in_memory_are_mapped_if_the_kernel_passes_them_through(mode: Mode) {
    // What shares a pack is served by the daemon.
    let mut prepared = Prepared::new(mode, &["--ram", "64M", "--pack", "0"], SMALL);
    prepared.fill(12, 9);
    let tokens = 12 * 32 + 9;
    let sequence = prepared.open(EVERYTHING, 1 << 20);
    assert_eq!(sequence.valid_tokens().unwrap(), tokens);
    prepared.check(&sequence, tokens);
    prepared.check(&sequence, tokens);
    let pages = 24;
    let mapped = if mode == Mode::Passthrough { pages } else { 0 };
    assert_eq!(mapped_files(&prepared.mount), mapped);
    let bytes = pages as u64 * prepared.page_bytes();
    let counts = sequence.counts();
    assert_eq!(counts.resident_bytes + counts.streamed_bytes, 2 * bytes);
    assert_eq!(counts.streamed_bytes, if mode == Mode::Passthrough { 0 } else { bytes });
    drop(sequence);
    assert_eq!(mapped_files(&prepared.mount), 0);
    // On the disk alone nothing is mapped, and nothing comes from anywhere but the disk.
    prepared.mount.remount();
    let sequence = prepared.open(EVERYTHING, 1 << 20);
    prepared.check(&sequence, tokens);
    assert_eq!(mapped_files(&prepared.mount), 0);
    assert_eq!(sequence.counts().streamed_bytes, bytes);
    if mode == Mode::Passthrough {
        // The tails, which the daemon serves, are read once for each layer and scan.
        let reads = prepared.mount.metric(r#"kvfs_fuse_requests_total{op="read",result="ok"}"#);
        assert!(reads < 10, "{reads} reads reached the daemon");
    }
}

fn mappings_stay_within_their_bound(mode: Mode) {
    let prepared = Prepared::new(mode, &["--ram", "64M"], SMALL);
    prepared.fill(100, 0);
    let bound = 16;
    let stream_bytes = 12 * prepared.page_bytes();
    for limits in [Limits { pages: bound, ..EVERYTHING }, NOTHING] {
        let sequence = prepared.open(limits, stream_bytes);
        for _ in 0..2 {
            let mut stream = sequence.stream(0..3200).unwrap();
            while stream.layer().is_some() {
                while let Some(run) = stream.next_run().unwrap() {
                    // A run, and what is on its way behind it.
                    let mapped = mapped_files(&prepared.mount);
                    assert!(mapped <= limits.pages + 12, "{mapped} mappings");
                    assert!(run.bytes() <= (limits.pages + 4) as u64 * prepared.page_bytes());
                }
            }
        }
        let kept = if mode == Mode::Passthrough { limits.pages } else { 0 };
        assert_eq!(mapped_files(&prepared.mount), kept);
        prepared.check(&sequence, 3200);
    }
}

fn a_decode_loop_sees_every_row_that_it_appends(mode: Mode) {
    let prepared = Prepared::new(mode, &["--ram", "64M"], SMALL);
    prepared.fill(2, 0);
    let mut sequence = prepared.open(EVERYTHING, 1 << 20);
    for token in 64..100_u64 {
        for layer in 0..2 {
            let path = prepared.model.tail_path(&prepared.mount, "chat", layer, token / 32 * 32);
            let flags = libc::O_WRONLY | libc::O_CREAT | libc::O_APPEND;
            let mut tail = open(path, flags).unwrap();
            tail.write_all(&prepared.rows(layer, token, 1, 0)).unwrap();
        }
        if token % 32 == 31 || token % 32 == 0 {
            // A page was sealed, or a tail was opened.
            sequence.refresh().unwrap();
        }
        prepared.check(&sequence, token + 1);
    }
    let path = prepared.sequence().join("000").join(tail_name(96));
    assert_eq!(path.metadata().unwrap().len(), 4 * prepared.model.row_bytes() as u64);
}

/// With `KVFS_TEST_MILLION` set it is a million tokens x 80 layers, 78,160 pages, under the default
/// limits and the kernel's (minutes, and 1 GB of memory); else a hundredth of that, under a hundredth
/// of the limits.
fn eighty_layers_stay_within_the_mappings_of_a_process(mode: Mode) {
    let is_whole = std::env::var_os("KVFS_TEST_MILLION").is_some() && mode == Mode::Passthrough;
    let (pages, limits) = if is_whole {
        (977, Limits { kept_bytes: 0, ..Limits::default() })
    } else {
        (10, Limits { pages: 490, kept_bytes: 0 })
    };
    assert!(limits.pages < 80 * pages, "the limit of pages is to be felt");
    let kernel = std::fs::read_to_string("/proc/sys/vm/max_map_count").unwrap();
    let kernel: usize = kernel.trim().parse().unwrap();
    let bound = if is_whole { kernel } else { limits.pages + 1000 };
    // One KV head of one element: 8 KiB.
    let prepared = Prepared::new(mode, &["--ram", "1G"], [80, 1, 1, 1024]);
    prepared.fill(pages as u64, 0);
    let sequence = prepared.open(limits, 1 << 20);
    let mut most = 0;
    for _ in 0..2 {
        let mut stream = sequence.stream(0..pages as u64 * 1024).unwrap();
        while let Some(layer) = stream.layer() {
            let mut seen = 0;
            while let Some(run) = stream.next_run().unwrap() {
                for block in run.blocks() {
                    let row = prepared.rows(layer.0, block.first_position, 1, 0);
                    assert_eq!(block.k.bytes[..2], row[..2]);
                    seen += 1;
                }
                if seen == pages || seen % 256 < 16 {
                    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
                    most = most.max(maps.lines().count());
                }
            }
            assert_eq!(seen, pages);
        }
    }
    let kept = if mode == Mode::Passthrough { limits.pages } else { 0 };
    assert_eq!(mapped_files(&prepared.mount), kept);
    eprintln!("{most} mappings of {} pages, of {bound} that may be", 80 * pages);
    assert!(most < bound, "{most} mappings");
}
