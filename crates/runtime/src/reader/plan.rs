//! What a scan will read from where, and how long that takes, before it is done.

use std::fmt;
use std::ops::Range;
use std::time::Duration;

use super::listing::{ListedPage, layer_directory};
use super::page::{Home, Tier};
use super::{ReadError, Sequence};
use crate::attention::InstructionSet;
use crate::attention::cost::Bandwidths;
use crate::page::{Layer, names};

/// Who attends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Backend {
    /// This processor, in place.
    Cpu {
        /// Vector instructions.
        instructions: InstructionSet,
        /// Threads.
        threads: usize,
        /// Why not the GPU, if one was asked for.
        why: Option<String>,
    },
    /// An NVIDIA GPU, to which pages are copied.
    Cuda {
        /// Its name.
        device: String,
        /// Most of its memory that pages stay in between scans.
        hot_bytes: u64,
    },
}

/// What moves bytes, in bytes per second.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rates {
    /// Reading memory, with all threads together.
    pub memory: f64,
    /// The local disk.
    pub ssd: f64,
    /// The remote tier.
    pub remote: f64,
    /// From memory to a GPU.
    pub pcie: f64,
}

impl Default for Rates {
    /// Those of two channels of memory, a disk on three or four lanes, a network of ten gigabits, and
    /// sixteen lanes of `PCIe` 3. Who knows better says so.
    fn default() -> Self {
        Self { memory: 40e9, ssd: 3e9, remote: 1e9, pcie: 12e9 }
    }
}

/// Bytes of pages by the tier that holds them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TierBytes {
    /// In the mount's memory.
    pub ram: u64,
    /// On the local disk, or in a directory outside of a mount.
    pub ssd: u64,
    /// Elsewhere.
    pub remote: u64,
}

/// What a scan will do.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    /// Tokens of each layer.
    pub tokens: u64,
    /// Layers.
    pub layers: usize,
    /// Pages of all layers.
    pub pages: usize,
    /// Where they are.
    pub tiers: TierBytes,
    /// Attended to in the mount's memory.
    pub mapped_bytes: u64,
    /// Read once, and kept in memory of this process.
    pub kept_bytes: u64,
    /// Read at each scan.
    pub streamed_bytes: u64,
    /// Rows behind the pages, which the daemon serves.
    pub tail_bytes: u64,
    /// Who attends.
    pub backend: Backend,
    /// The first scan, which also reads what is kept.
    pub first: Duration,
    /// Each scan after it.
    pub each: Duration,
}

impl Sequence {
    /// Plans a scan of all layers. Asks the mount about each page (10 us).
    ///
    /// # Errors
    /// As [`stream`](Self::stream), [`ReadError::Io`] and [`ReadError::Disconnected`].
    pub fn plan(
        &self, tokens: Range<u64>, backend: Backend, rates: &Rates,
    ) -> Result<Plan, ReadError> {
        let stream = self.stream(tokens.clone())?;
        let mut planner = Planner::new(self);
        let (mut layers, mut tail_bytes) = (0, 0);
        for scan in stream.scans() {
            layers += 1;
            let geometry = self.manifest().layer_geometry(scan.layer());
            tail_bytes += scan.tail_tokens() * geometry.row_bytes();
            let end = self.layers[scan.layer().0 as usize].end;
            for page in scan.pages() {
                let held = u32::try_from(end - page.start.0).unwrap_or(u32::MAX);
                planner.add(
                    scan.layer(),
                    page,
                    geometry.file_bytes(held.min(geometry.page_tokens())),
                )?;
            }
        }
        let Planner { pages, tiers, mapped, kept, streamed, streamed_remote, .. } = planner;
        let page_bytes = mapped + kept + streamed;
        let hot_bytes = backend.hot_bytes().min(page_bytes);
        let attending = |bytes: u64| backend.seconds(bytes + tail_bytes, rates);
        // Both disks and memory work at the same time.
        let slowest = |attending: f64, ssd: u64, remote: u64| {
            let seconds = attending.max(time(ssd, rates.ssd)).max(time(remote, rates.remote));
            Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
        };
        let first = slowest(attending(page_bytes), (kept + streamed).min(tiers.ssd), tiers.remote);
        let each =
            slowest(attending(page_bytes - hot_bytes), streamed - streamed_remote, streamed_remote);
        Ok(Plan {
            tokens: tokens.end.saturating_sub(tokens.start),
            layers,
            pages,
            tiers,
            mapped_bytes: mapped,
            kept_bytes: kept,
            streamed_bytes: streamed,
            tail_bytes,
            backend,
            first,
            each,
        })
    }
}

impl Backend {
    /// Most bytes of pages that stay where they are attended to.
    fn hot_bytes(&self) -> u64 {
        match self {
            // It reads memory each time.
            Self::Cpu { .. } => 0,
            Self::Cuda { hot_bytes, .. } => *hot_bytes,
        }
    }

    /// Time to attend to bytes in host memory.
    fn seconds(&self, bytes: u64, rates: &Rates) -> f64 {
        let dram = rates.memory;
        match self {
            Self::Cpu { threads, .. } => {
                let cores = u32::try_from(*threads).unwrap_or(u32::MAX);
                Bandwidths { pcie: 0.0, dram, cores }.seconds(bytes, 0.0)
            }
            Self::Cuda { .. } => {
                Bandwidths { pcie: rates.pcie, dram, cores: 0 }.seconds(bytes, 1.0)
            }
        }
    }
}

impl fmt::Display for Backend {
    /// One line.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu { instructions, threads, why } => {
                let instructions = format!("{instructions:?}").to_lowercase();
                write!(f, "cpu ({instructions}, {threads} threads)")?;
                why.as_ref().map_or(Ok(()), |why| write!(f, ", no GPU: {why}"))
            }
            Self::Cuda { device, hot_bytes: 0 } => write!(f, "cuda ({device}), pages are streamed"),
            Self::Cuda { device, hot_bytes } => {
                write!(f, "cuda ({device}), up to {} stay there", amount(*hot_bytes))
            }
        }
    }
}

#[allow(clippy::cast_precision_loss, reason = "bytes are far below 2^53")]
fn time(bytes: u64, rate: f64) -> f64 {
    if bytes == 0 { 0.0 } else { bytes as f64 / rate }
}

/// Goes through the pages as a scan will.
struct Planner<'s> {
    sequence: &'s Sequence,
    pages_left: usize,
    kept_bytes_left: u64,
    pages: usize,
    tiers: TierBytes,
    mapped: u64,
    kept: u64,
    streamed: u64,
    streamed_remote: u64,
}

impl<'s> Planner<'s> {
    fn new(sequence: &'s Sequence) -> Self {
        let residents = &sequence.source.residents;
        let limits = residents.limits();
        Self {
            sequence,
            pages_left: limits.pages.saturating_sub(residents.pages()),
            kept_bytes_left: limits.kept_bytes.saturating_sub(residents.kept_bytes()),
            pages: 0,
            tiers: TierBytes::default(),
            mapped: 0,
            kept: 0,
            streamed: 0,
            streamed_remote: 0,
        }
    }

    fn add(&mut self, layer: Layer, page: &ListedPage, bytes: u64) -> Result<(), ReadError> {
        let source = &self.sequence.source;
        let path = layer_directory(&source.path, layer).join(names::format_page(page.start));
        let tier = Tier::of(&path)?;
        let of_tier = match tier {
            Some(Tier::Ram) => &mut self.tiers.ram,
            Some(Tier::Ssd) | None => &mut self.tiers.ssd,
            Some(Tier::Remote) => &mut self.tiers.remote,
        };
        *of_tier += bytes;
        self.pages += 1;
        let resident = source.residents.get(&source.key(layer, page));
        let mappable = source.home == Home::PassedThrough && tier == Some(Tier::Ram);
        if resident.as_ref().map_or(mappable, |page| page.is_mapped()) {
            // Without room it is mapped for the moment.
            self.mapped += bytes;
            self.pages_left = self.pages_left.saturating_sub(usize::from(resident.is_none()));
        } else if resident.is_some() {
            self.kept += bytes;
        } else if self.pages_left > 0 && self.kept_bytes_left >= bytes {
            self.kept += bytes;
            self.pages_left -= 1;
            self.kept_bytes_left -= bytes;
        } else {
            self.streamed += bytes;
            self.streamed_remote += if tier == Some(Tier::Remote) { bytes } else { 0 };
        }
        Ok(())
    }
}

impl fmt::Display for Plan {
    /// Some lines for people, without a line feed at the end.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let TierBytes { ram, ssd, remote } = self.tiers;
        let pages = self.pages;
        writeln!(f, "{} tokens x {} layers in {pages} pages", self.tokens, self.layers)?;
        let (ram, ssd, remote) = (amount(ram), amount(ssd), amount(remote));
        writeln!(f, "held in: {ram} of RAM, {ssd} of SSD, {remote} remote")?;
        let (mapped, kept) = (amount(self.mapped_bytes), amount(self.kept_bytes));
        let streamed = amount(self.streamed_bytes + self.tail_bytes);
        writeln!(f, "read: {mapped} mapped, {kept} kept, {streamed} at each step")?;
        writeln!(f, "backend: {}", self.backend)?;
        let (first, each) = (self.first.as_secs_f64(), self.each.as_secs_f64());
        write!(
            f,
            "expected: {:.3} ms for the first step, {:.3} ms for the next",
            first * 1e3,
            each * 1e3
        )
    }
}

#[allow(clippy::cast_precision_loss, reason = "for people")]
fn amount(bytes: u64) -> String {
    let (unit, name) = if bytes < 1_000_000_000 { (1e6, "MB") } else { (1e9, "GB") };
    format!("{:.1} {name}", bytes as f64 / unit)
}
