//! What moved between the tiers, and what did not: metrics that the tiers share.

use prometheus::{IntCounterVec, Opts, Registry};

use super::encoding::{Encoding, Quantisation};

/// Where bytes are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tier {
    /// Memory.
    Ram,
    /// The local disk.
    Ssd,
    /// The shared directory or object store.
    Remote,
}

impl Tier {
    /// The word for it in metrics, attributes and options.
    pub fn name(self) -> &'static str {
        match self {
            Tier::Ram => "ram",
            Tier::Ssd => "ssd",
            Tier::Remote => "remote",
        }
    }
}

impl std::fmt::Display for Tier {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(self.name())
    }
}

/// Counters of movements.
#[derive(Clone, Debug)]
pub struct Counters {
    evictions: IntCounterVec,
    skipped: IntCounterVec,
    moves: IntCounterVec,
    moved_bytes: IntCounterVec,
    failures: IntCounterVec,
    prefetched: IntCounterVec,
    read_ahead: IntCounterVec,
    rounded: IntCounterVec,
}

const VALID: &str = "names and labels are constants";

impl Default for Counters {
    fn default() -> Counters {
        let counters = |name: &str, help: &str, labels: &[&str]| {
            IntCounterVec::new(Opts::new(name, help), labels).expect(VALID)
        };
        let from_to = &["from", "to"];
        Counters {
            evictions: counters(
                "kvfs_evictions_total",
                "Copies that left to make room",
                &["tier", "reason"],
            ),
            skipped: counters(
                "kvfs_eviction_skipped_total",
                "Copies that stayed when room was needed",
                &["tier", "reason"],
            ),
            moves: counters("kvfs_moves_total", "Objects copied between tiers", from_to),
            moved_bytes: counters("kvfs_move_bytes_total", "Bytes copied between tiers", from_to),
            failures: counters(
                "kvfs_move_failures_total",
                "Objects that could not be copied",
                &["from", "to", "error"],
            ),
            prefetched: counters(
                "kvfs_prefetch_pages_total",
                "Pages that were to be fetched or decoded before they were opened",
                &["outcome"],
            ),
            read_ahead: counters(
                "kvfs_readahead_pages_total",
                "Pages of the disk that were to be in the page cache before they were opened",
                &["outcome"],
            ),
            rounded: counters(
                "kvfs_lossy_demotions_total",
                "Pages that went cold as new versions with fewer bits",
                &["encoding"],
            ),
        }
    }
}

impl Counters {
    /// Shows them.
    pub fn register(&self, registry: &Registry) -> prometheus::Result<()> {
        let Counters { evictions, skipped, moves, moved_bytes, failures, .. } = self;
        let Counters { prefetched, read_ahead, rounded, .. } = self;
        let moving = [evictions, skipped, moves, moved_bytes, failures];
        for counters in moving.into_iter().chain([prefetched, read_ahead, rounded]) {
            registry.register(Box::new(counters.clone()))?;
        }
        Ok(())
    }

    /// An object was copied.
    pub fn moved(&self, from: Tier, to: Tier, bytes: u64) {
        let labels = &[from.name(), to.name()];
        self.moves.with_label_values(labels).inc();
        self.moved_bytes.with_label_values(labels).inc_by(bytes);
    }

    /// An object could not be copied; `error` is one word.
    pub fn failed(&self, from: Tier, to: Tier, error: &str) {
        self.failures.with_label_values(&[from.name(), to.name(), error]).inc();
    }

    /// What became of a page that was to be fetched or decoded before it is opened: `used`, `late`
    /// (opened while it came), `unused`, `dropped` (nothing was done), `failed`.
    pub fn prefetched(&self, outcome: &str) {
        self.prefetched.with_label_values(&[outcome]).inc();
    }

    /// The same of a page that the kernel was to read from the disk.
    pub fn read_ahead(&self, outcome: &str) {
        self.read_ahead.with_label_values(&[outcome]).inc();
    }

    /// A page's values were rounded when it went cold.
    pub fn rounded(&self, encoding: &str) {
        self.rounded.with_label_values(&[encoding]).inc();
    }

    /// Pages of which that is true.
    pub fn rounded_pages(&self) -> u64 {
        let encodings = [Quantisation::Q8_0, Quantisation::Q4_0].map(Quantisation::encoding);
        let counter = |encoding: Encoding| self.rounded.with_label_values(&[encoding.extension()]);
        encodings.map(|encoding| counter(encoding).get()).iter().sum()
    }

    /// A copy left.
    pub fn evicted(&self, tier: Tier, reason: &str) {
        self.evictions.with_label_values(&[tier.name(), reason]).inc();
    }

    /// A copy stayed.
    pub fn skipped(&self, tier: Tier, reason: &str) {
        self.skipped.with_label_values(&[tier.name(), reason]).inc();
    }
}
