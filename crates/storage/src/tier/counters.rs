//! What moved between the tiers, and what did not: metrics that the tiers share.

use prometheus::{HistogramOpts, HistogramVec, IntCounterVec, Opts, Registry};

use super::encoding::{Encoding, Quantisation};
use super::stay::Stay;

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
    evicted_unused: IntCounterVec,
    evicted_age: HistogramVec,
    evicted_idle: HistogramVec,
    evicted_opens: IntCounterVec,
    skipped: IntCounterVec,
    moves: IntCounterVec,
    moved_bytes: IntCounterVec,
    failures: IntCounterVec,
    prefetched: IntCounterVec,
    read_ahead: IntCounterVec,
    rounded: IntCounterVec,
}

/// Seconds that copies stay: doubled from one second to twelve days.
const STAY_BUCKETS: usize = 21;

const VALID: &str = "names and labels are constants";

impl Default for Counters {
    fn default() -> Counters {
        let counters = |name: &str, help: &str, labels: &[&str]| {
            IntCounterVec::new(Opts::new(name, help), labels).expect(VALID)
        };
        let stays = |name: &str, help: &str| {
            let buckets = prometheus::exponential_buckets(1.0, 2.0, STAY_BUCKETS).expect(VALID);
            let options = HistogramOpts::new(name, help).buckets(buckets);
            HistogramVec::new(options, &["tier"]).expect(VALID)
        };
        let from_to = &["from", "to"];
        Counters {
            evictions: counters(
                "kvfs_evictions_total",
                "Copies that left to make room",
                &["tier", "reason"],
            ),
            evicted_unused: counters(
                "kvfs_evicted_unused_total",
                "Of the copies that left for room, those that nobody had opened since they came",
                &["tier"],
            ),
            evicted_age: stays(
                "kvfs_evicted_age_seconds",
                "Of the copies that left for room, the time since they came",
            ),
            evicted_idle: stays(
                "kvfs_evicted_idle_seconds",
                "Of the copies that left for room, the time since they were last opened, or came",
            ),
            evicted_opens: counters(
                "kvfs_evicted_opens_total",
                "Opens of files whose copy had left the tier",
                &["tier"],
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
        let Counters { evicted_unused, evicted_opens, evicted_age, evicted_idle, .. } = self;
        let moving = [evictions, skipped, moves, moved_bytes, failures];
        let left = [evicted_unused, evicted_opens];
        for counters in moving.into_iter().chain([prefetched, read_ahead, rounded]).chain(left) {
            registry.register(Box::new(counters.clone()))?;
        }
        for histograms in [evicted_age, evicted_idle] {
            registry.register(Box::new(histograms.clone()))?;
        }
        Ok(())
    }

    /// What is shown of those that are not zero, a line for each; of times only how many there are.
    #[cfg(test)]
    pub(super) fn told(&self) -> Vec<String> {
        let registry = Registry::new();
        self.register(&registry).unwrap();
        let text = prometheus::TextEncoder::new().encode_to_string(&registry.gather()).unwrap();
        let is_told =
            |line: &&str| !["#", "_bucket{", "_sum{"].iter().any(|part| line.contains(part));
        text.lines().filter(is_told).map(str::to_owned).collect()
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

    /// A copy left so that others have room.
    pub fn evicted_for_room(&self, tier: Tier, stay: &Stay) {
        let labels = &[tier.name()];
        self.evicted(tier, "room");
        self.evicted_age.with_label_values(labels).observe(stay.age().as_secs_f64());
        self.evicted_idle.with_label_values(labels).observe(stay.idle().as_secs_f64());
        if !stay.is_used() {
            self.evicted_unused.with_label_values(labels).inc();
        }
    }

    /// A file is opened whose copy had left.
    pub fn opened_after_leaving(&self, tier: Tier) {
        self.evicted_opens.with_label_values(&[tier.name()]).inc();
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_moves_and_what_stays_is_counted_each_under_its_name() {
        let counters = Counters::default();
        assert_eq!(counters.told(), [""; 0]);
        counters.moved(Tier::Ram, Tier::Ssd, 70);
        counters.moved(Tier::Ram, Tier::Ssd, 7);
        counters.failed(Tier::Ssd, Tier::Remote, "full");
        counters.prefetched("late");
        counters.read_ahead("used");
        counters.rounded(Quantisation::Q4_0.encoding().extension());
        counters.rounded(Quantisation::Q8_0.encoding().extension());
        counters.evicted_for_room(Tier::Ram, &Stay::begin());
        let mut used = Stay::begin();
        used.note_use();
        counters.evicted_for_room(Tier::Ram, &used);
        counters.opened_after_leaving(Tier::Ssd);
        counters.skipped(Tier::Ram, "kept");
        let expected = [
            r#"kvfs_evicted_age_seconds_count{tier="ram"} 2"#,
            r#"kvfs_evicted_idle_seconds_count{tier="ram"} 2"#,
            r#"kvfs_evicted_opens_total{tier="ssd"} 1"#,
            r#"kvfs_evicted_unused_total{tier="ram"} 1"#,
            r#"kvfs_eviction_skipped_total{reason="kept",tier="ram"} 1"#,
            r#"kvfs_evictions_total{reason="room",tier="ram"} 2"#,
            r#"kvfs_lossy_demotions_total{encoding="q4_0"} 1"#,
            r#"kvfs_lossy_demotions_total{encoding="q8_0"} 1"#,
            r#"kvfs_move_bytes_total{from="ram",to="ssd"} 77"#,
            r#"kvfs_move_failures_total{error="full",from="ssd",to="remote"} 1"#,
            r#"kvfs_moves_total{from="ram",to="ssd"} 2"#,
            r#"kvfs_prefetch_pages_total{outcome="late"} 1"#,
            r#"kvfs_readahead_pages_total{outcome="used"} 1"#,
        ];
        assert_eq!(counters.told(), expected);
        assert_eq!(counters.rounded_pages(), 2);
    }
}
