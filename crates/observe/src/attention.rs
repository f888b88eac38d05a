//! What runtimes that attend to pages report; the daemon does not see those bytes move.

use prometheus::{Counter, IntCounter, IntCounterVec, Opts, Registry};

use kvfs_page::reader_report::Counts;

/// Counters of readers.
#[derive(Debug)]
pub(super) struct AttentionMetrics {
    resident_bytes: IntCounter,
    streamed_bytes: IntCounter,
    prefetched_bytes: IntCounter,
    stalled_bytes: IntCounter,
    stall_seconds: Counter,
}

const VALID: &str = "names and labels are constants";

impl AttentionMetrics {
    pub(super) fn new(registry: &Registry) -> Self {
        let by_link = |name: &str, help: &str| {
            let counters = IntCounterVec::new(Opts::new(name, help), &["link"]).expect(VALID);
            registry.register(Box::new(counters.clone())).expect(VALID);
            counters
        };
        let bytes = by_link(
            "kvfs_attention_bytes_total",
            "Bytes of pages attended to: where they are in memory, or read from the mount",
        );
        let opened = |name: &str, help: &str| by_link(name, help).with_label_values(&["mount"]);
        let stall_seconds = prometheus::CounterVec::new(
            Opts::new("kvfs_attention_stall_seconds_total", "Time that attention waited for pages"),
            &["link"],
        );
        let stall_seconds = stall_seconds.expect(VALID);
        registry.register(Box::new(stall_seconds.clone())).expect(VALID);
        Self {
            resident_bytes: bytes.with_label_values(&["memory"]),
            streamed_bytes: bytes.with_label_values(&["mount"]),
            prefetched_bytes: opened(
                "kvfs_attention_prefetched_bytes_total",
                "Bytes of opened pages that were there when attention wanted them",
            ),
            stalled_bytes: opened(
                "kvfs_attention_stalled_bytes_total",
                "Bytes of opened pages that attention waited for",
            ),
            stall_seconds: stall_seconds.with_label_values(&["mount"]),
        }
    }

    pub(super) fn add(&self, counts: &Counts) {
        self.resident_bytes.inc_by(counts.resident_bytes);
        self.streamed_bytes.inc_by(counts.streamed_bytes);
        self.prefetched_bytes.inc_by(counts.prefetched_bytes);
        self.stalled_bytes.inc_by(counts.stalled_bytes);
        self.stall_seconds.inc_by(counts.stalled.as_secs_f64());
    }
}
