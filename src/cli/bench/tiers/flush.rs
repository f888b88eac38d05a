//! Flushing the RAM tier to the disk, against the disk's own sequential writing.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use super::super::build::{Model, Pages};
use super::super::daemon::Daemon;
use super::super::figure::{Figure, median};
use super::super::measure::{Rounds, at, throughput, timed};
use super::super::note;
use super::super::transfer::{gigabytes, remove_pages, settle_memory, write_pages};
use super::super::workplace::Workplace;
use super::{MIB, Sizes, make_layer};

/// Bytes per write of the large file.
const WRITE_BYTES: usize = 4 << 20;
/// What direct writing demands of buffers and lengths at most.
const ALIGNMENT: usize = 4096;

pub(super) fn figures(workplace: &Workplace, sizes: &Sizes) -> Result<Vec<Figure>, String> {
    note("flushing");
    let pages = Pages::new(Model::Large)?.first(sizes.pages)?;
    let bytes = sizes.pages * 4 * MIB;
    // Nothing is flushed before it is asked for.
    let options = ["--ram", "1G", "--commit-interval", "3600"];
    let mut daemon = Daemon::start_with(workplace, &options)?;
    let layer = make_layer(workplace, "s")?;
    let (mut kvfs, mut direct, mut buffered) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..=sizes.rounds {
        settle_memory(&pages);
        write_pages(&layer, &pages, |_| Ok(()))?;
        let flush = timed(|| File::open(&layer).and_then(|d| d.sync_all()).map_err(at(&layer)))?;
        let length: usize = pages.iter().map(|(_, bytes)| bytes.len()).sum();
        remove_pages(&layer, &pages)?;
        File::open(&layer).and_then(|d| d.sync_all()).map_err(at(&layer))?;
        settle_memory(&pages);
        let large = workplace.native().join("large");
        let cached = write_large(&large, bytes, 0)?;
        let uncached = write_large(&large, bytes, libc::O_DIRECT);
        // The first round is warm-up.
        if round > 0 {
            kvfs.push(throughput(length as u64, flush));
            buffered.push(cached);
            direct.extend(uncached.ok());
        }
    }
    daemon.stop()?;
    let native = if median(&direct) > median(&buffered) { direct } else { buffered };
    Ok(vec![gigabytes("flush_to_disk", 0.8, Rounds { kvfs, native })])
}

/// GB/s of writing one file and syncing it.
fn write_large(path: &Path, bytes: u64, flags: i32) -> Result<f64, String> {
    let buffer = vec![0x5a_u8; WRITE_BYTES + ALIGNMENT];
    let start = buffer.as_ptr().align_offset(ALIGNMENT);
    let buffer = &buffer[start..start + WRITE_BYTES];
    let duration = timed(|| {
        let mut file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .custom_flags(flags)
            .open(path)
            .map_err(at(path))?;
        for _ in 0..bytes / WRITE_BYTES as u64 {
            file.write_all(buffer).map_err(at(path))?;
        }
        file.sync_data().map_err(at(path))
    });
    fs::remove_file(path).map_err(at(path))?;
    Ok(throughput(bytes, duration?))
}
