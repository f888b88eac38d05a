//! The RAM tier: reading from it, writing into it, and what it takes.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use nix::mount::{MntFlags, MsFlags};

use super::super::build::{Model, Pages};
use super::super::daemon::Daemon;
use super::super::figure::{Better, Figure, Target};
use super::super::measure::{Rounds, at, interleave, throughput, timed};
use super::super::transfer::{Files, gigabytes, remove_pages, settle_memory, write_pages};
use super::super::workplace::{self, Workplace};
use super::super::{BenchArguments, note};
use super::{MIB, Sizes, alone, make_layer, mebibytes, mount, tier};

/// Writers at a time.
const WRITERS: u64 = 16;
/// Budget while they write: far less than they write.
const WRITERS_BUDGET_BYTES: u64 = 64 * MIB;
const WRITERS_BUDGET: &str = "64M";
/// Pages that each of them writes.
const WRITER_PAGES: usize = 4;

pub(super) fn figures(
    workplace: &Workplace, sizes: &Sizes, arguments: &BenchArguments, figures: &mut Vec<Figure>,
) -> Result<String, String> {
    let pages = Pages::new(Model::Large)?.first(sizes.pages)?;
    let (mut daemon, passthrough) = mount(workplace, &["--ram", "1G"], arguments)?;
    let layer = make_layer(workplace, "s")?;
    figures.extend(copying(workplace, &layer, &pages, sizes)?);
    figures.extend(burst(workplace, &pages, sizes)?);
    daemon.stop()?;
    figures.push(budget(workplace, &pages, sizes)?);
    Ok(passthrough)
}

/// Copying out of mapped pages, against a tmpfs with huge pages.
fn copying(
    workplace: &Workplace, layer: &Path, pages: &[(String, Vec<u8>)], sizes: &Sizes,
) -> Result<Vec<Figure>, String> {
    note("reading from memory");
    let pages = &pages[..pages.len().min(32)];
    write_pages(layer, pages, |_| Ok(()))?;
    for (name, _) in pages {
        let path = layer.join(name);
        let tier = tier(&path)?;
        if tier != "ram" {
            return Err(format!("{} is in {tier}, not in memory", path.display()));
        }
    }
    let Some(tmpfs) = Tmpfs::mount(workplace)? else {
        note("only root may mount a tmpfs to compare with: no figure of reading from memory");
        return Ok(Vec::new());
    };
    for (name, bytes) in pages {
        let path = tmpfs.path.join(name);
        let written = File::create_new(&path).and_then(|mut file| {
            // Only what lies within the size of a file gets huge pages.
            file.set_len(bytes.len() as u64)?;
            file.write_all(bytes)
        });
        written.map_err(at(&path))?;
    }
    let (kvfs, native) = (Files::of(layer)?, Files::of(&tmpfs.path)?);
    let rounds = interleave(sizes.rounds, |_| kvfs.copy(), |_| native.copy())?;
    drop((kvfs, native));
    remove_pages(layer, pages)?;
    Ok(vec![gigabytes("mmap_copy_4mib_ram", 0.95, rounds)])
}

/// A tmpfs with huge pages.
struct Tmpfs {
    path: PathBuf,
}

impl Tmpfs {
    /// `None` without the right to mount.
    fn mount(workplace: &Workplace) -> Result<Option<Tmpfs>, String> {
        let path = workplace::tmpfs(workplace.path());
        fs::create_dir_all(&path).map_err(at(&path))?;
        let options = Some("huge=within_size,mode=0700");
        match nix::mount::mount(Some("tmpfs"), &path, Some("tmpfs"), MsFlags::empty(), options) {
            Ok(()) => Ok(Some(Tmpfs { path })),
            Err(nix::errno::Errno::EPERM) => Ok(None),
            Err(error) => Err(at(&path)(error)),
        }
    }
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        let _ = nix::mount::umount2(&self.path, MntFlags::MNT_DETACH);
    }
}

/// Publishing as many pages as fit, against plain files on the disk: as engines write them, and
/// with an fsync of each. What the memory itself allows is shown beside it: plain files on a tmpfs,
/// which nobody verifies.
fn burst(
    workplace: &Workplace, pages: &[(String, Vec<u8>)], sizes: &Sizes,
) -> Result<Vec<Figure>, String> {
    note("writing bursts of pages");
    let layer = make_layer(workplace, "burst")?;
    let native = workplace.native();
    let synced = |file: &File| file.sync_data();
    let tmpfs = Tmpfs::mount(workplace)?;
    let mut rounds = Rounds::default();
    let (mut durable, mut memory) = (Vec::new(), Vec::new());
    // The first round is warm-up.
    for round in 0..=sizes.rounds {
        let kvfs = write(&layer, pages, |_| Ok(()))?;
        let plain = write(&native, pages, |_| Ok(()))?;
        let slow = write(&native, pages, synced)?;
        let fast = tmpfs.as_ref().map(|tmpfs| write(&tmpfs.path, pages, |_| Ok(()))).transpose()?;
        if round > 0 {
            memory.extend(fast);
            rounds.kvfs.push(kvfs);
            rounds.native.push(plain);
            durable.push(slow);
        }
    }
    let against = |name, baselines| Figure {
        name,
        unit: "GB/s",
        better: Better::Higher,
        target: Target::None,
        values: rounds.kvfs.clone(),
        baselines,
    };
    let against_durable = against("burst_of_pages_against_fsync", durable);
    let against_memory = against("burst_of_pages_against_tmpfs", memory);
    Ok(vec![gigabytes("burst_of_pages", 2.0, rounds), against_durable, against_memory])
}

fn write(
    directory: &Path, pages: &[(String, Vec<u8>)],
    before_close: impl Fn(&File) -> std::io::Result<()>,
) -> Result<f64, String> {
    settle_memory(pages);
    let duration = timed(|| write_pages(directory, pages, before_close))?;
    let bytes: usize = pages.iter().map(|(_, bytes)| bytes.len()).sum();
    remove_pages(directory, pages)?;
    // What was removed must not be written in the next round.
    File::open(directory).and_then(|file| file.sync_all()).map_err(at(directory))?;
    Ok(throughput(bytes as u64, duration))
}

/// How far the tier goes beyond its budget while many write more than fits.
fn budget(
    workplace: &Workplace, pages: &[(String, Vec<u8>)], sizes: &Sizes,
) -> Result<Figure, String> {
    note("many writers");
    let pages = &pages[..pages.len().min(WRITER_PAGES)];
    let object = pages.first().map_or(0, |(_, bytes)| bytes.len() as u64);
    let mut beyond = Vec::new();
    for round in 0..sizes.long_rounds {
        let mut daemon = Daemon::start_with(workplace, &["--ram", WRITERS_BUDGET])?;
        let most = highest_use(&daemon, || write_from_many(workplace, round, pages))?;
        beyond.push(mebibytes(most.saturating_sub(WRITERS_BUDGET_BYTES)));
        daemon.stop()?;
    }
    let target = Target::Absolute(mebibytes(WRITERS * object));
    Ok(alone("ram_beyond_budget_16_writers", "MiB", target, beyond))
}

fn write_from_many(
    workplace: &Workplace, round: usize, pages: &[(String, Vec<u8>)],
) -> Result<(), String> {
    let layers = (0..WRITERS).map(|writer| make_layer(workplace, &format!("w{round}-{writer}")));
    let layers = layers.collect::<Result<Vec<_>, _>>()?;
    thread::scope(|scope| {
        let spawn = |layer| scope.spawn(move || write_pages(layer, pages, |_| Ok(())));
        let writers: Vec<_> = layers.iter().map(PathBuf::as_path).map(spawn).collect();
        let join = |writer: thread::ScopedJoinHandle<'_, Result<(), String>>| {
            writer.join().map_err(|_| "a writer panicked".to_owned())?
        };
        writers.into_iter().try_for_each(join)
    })
}

/// The most that the RAM tier takes while something is done.
pub(super) fn highest_use(
    daemon: &Daemon, act: impl FnOnce() -> Result<(), String>,
) -> Result<u64, String> {
    let (done, most) = (AtomicBool::new(false), AtomicU64::new(0));
    thread::scope(|scope| {
        let watcher = scope.spawn(|| {
            while !done.load(Ordering::Acquire) {
                let used = match tmpfs_bytes(daemon.pid()) {
                    Some(bytes) => bytes,
                    None => daemon.status_number("ram_used_bytes")?,
                };
                most.fetch_max(used, Ordering::Relaxed);
                thread::sleep(Duration::from_millis(1));
            }
            Ok::<(), String>(())
        });
        let outcome = act();
        done.store(true, Ordering::Release);
        watcher.join().map_err(|_| "watching panicked".to_owned())??;
        outcome
    })?;
    Ok(most.into_inner())
}

/// What the kernel says that the daemon's own tmpfs holds. It is mounted nowhere; the daemon's
/// descriptors lead to it.
fn tmpfs_bytes(pid: u32) -> Option<u64> {
    let descriptors = fs::read_dir(format!("/proc/{pid}/fd")).ok()?;
    descriptors.flatten().find_map(|descriptor| {
        let path = descriptor.path();
        // The root of a filesystem that is mounted nowhere.
        let is_root = fs::read_link(&path).is_ok_and(|target| target == Path::new("/"));
        let stat = nix::sys::statfs::statfs(&path).ok().filter(|_| is_root)?;
        let is_tmpfs = stat.filesystem_type() == nix::sys::statfs::TMPFS_MAGIC;
        let block = u64::try_from(stat.block_size()).ok()?;
        is_tmpfs.then(|| (stat.blocks() - stat.blocks_free()) * block)
    })
}
