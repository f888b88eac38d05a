//! A cache of four times the memory that the engine may have, against the disk.

use std::fs::File;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::time::Instant;

use crate::common::Mount;
use crate::common::memory_group::MemoryGroup;
use crate::engine::{command, ran_in};
use crate::figure::{ENGINE, Rounds, is_wanted, milliseconds};
use crate::gguf::Model;
use crate::slot_file;

const MEMORY_BYTES: u64 = 192 << 20;
/// With 32 KiB for each token this is four times the memory.
const TOKENS: usize = 24576;
const STEPS: usize = 12;

/// How fast a step reads all of the cache, as a share of how fast the disk gives one large file. The
/// disk is measured before and after each run of the engine.
pub(crate) fn measure(mount: &Mount, directory: &Path, rounds: usize) {
    let name = "cache of 4 times the memory";
    if !is_wanted(name) {
        return;
    }
    require!(root, cgroup);
    let [path, slot] = ["model.gguf", "slot"].map(|name| directory.join(name));
    let model = Model { heads: 8, kv_heads: 8, head_dim: 256, ..Model::tiny() };
    model.write_random(7, &path);
    slot_file::write(&slot, &model, TOKENS);
    // What is not written out yet would be written while the disk is measured.
    File::open(&slot).unwrap().sync_all().unwrap();
    let context = TOKENS + 256;
    let arguments =
        format!("{ENGINE} --context {context} --predict {STEPS} --load {}", slot.display());
    let bytes = slot.metadata().unwrap().len() as f64;
    let mut values = Rounds::default();
    for _ in 0..rounds {
        let before = disk_rate(&slot);
        let group = MemoryGroup::new(MEMORY_BYTES).unwrap();
        let run = ran_in(Some(&group), &path, &arguments, Some(mount.path()));
        run.assert_attention_was_ours();
        assert!(run.read_ahead > Some(0), "everything was in memory");
        let ours = bytes / milliseconds(&run.decode) / 1e6;
        values.push(ours, f64::midpoint(before, disk_rate(&slot)));
    }
    values.print(name, "GB/s", ">=0.80", |ours, disk| ours / disk);
    let group = MemoryGroup::new(MEMORY_BYTES).unwrap();
    let stock = group.bound(&command(&path, &arguments, None)).output().unwrap();
    let signal = stock.status.signal();
    assert_eq!(signal, Some(libc::SIGKILL), "stock fits into the memory");
    println!("    stock with the same memory: killed");
}

/// GB/s of one large file, read past the page cache by threads with buffers of huge pages, as many as
/// are fastest.
fn disk_rate(path: &Path) -> f64 {
    const PIECE_BYTES: usize = 2 << 20;
    let file = File::options().read(true).custom_flags(libc::O_DIRECT).open(path).unwrap();
    let pieces = usize::try_from(file.metadata().unwrap().len()).unwrap() / PIECE_BYTES;
    let rate = |threads: usize| {
        let start = Instant::now();
        std::thread::scope(|scope| {
            for first in 0..threads {
                let file = &file;
                scope.spawn(move || {
                    let mut buffer = memmap2::MmapMut::map_anon(PIECE_BYTES).unwrap();
                    let _ = buffer.advise(memmap2::Advice::HugePage);
                    for piece in (first..pieces).step_by(threads) {
                        file.read_exact_at(&mut buffer, (piece * PIECE_BYTES) as u64).unwrap();
                    }
                });
            }
        });
        (pieces * PIECE_BYTES) as f64 / start.elapsed().as_secs_f64() / 1e9
    };
    [1, 4, 8].map(rate).into_iter().fold(0.0, f64::max)
}
