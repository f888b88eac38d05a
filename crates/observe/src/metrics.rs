//! Counters in Prometheus' text format. The names are part of what operators rely on: docs/metrics.md has
//! all of them.

use std::path::Path;
use std::sync::OnceLock;
use std::time::Duration;

use prometheus::core::Collector;
use prometheus::proto::MetricFamily;
use prometheus::{IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry};

use super::gauges::{self, Gauges};
use super::requests::{Operation, Requests};
use kvfs_page::batch::Status;
use kvfs_storage::tier::counters::Tier;

pub(super) struct Metrics {
    registry: Registry,
    pub(super) requests: Requests,
    opens: IntCounter,
    opened_bytes: IntCounter,
    opened_pages: OpenedPages,
    sealed: IntCounter,
    sealed_bytes: IntCounter,
    refused: IntCounterVec,
    corrupt: IntCounterVec,
    passthrough: IntGauge,
    asked_tokens: IntCounter,
    answered_tokens: IntCounterVec,
    batched_names: IntCounterVec,
}

const VALID: &str = "names and labels are constants";

impl Metrics {
    pub(super) fn new() -> Metrics {
        let registry = Registry::new();
        let build = Opts::new("kvfs_build_info", "Version of the program");
        let build = IntGaugeVec::new(build, &["version"]).expect(VALID);
        build.with_label_values(&[env!("CARGO_PKG_VERSION")]).set(1);
        registry.register(Box::new(build)).expect(VALID);
        gauge(&registry, "kvfs_mount_ready", "The mount answers").set(1);
        Metrics {
            requests: Requests::new(&registry),
            opens: counter(&registry, "kvfs_opens_total", "Files opened"),
            opened_bytes: counter(&registry, "kvfs_opened_bytes_total", "Bytes of opened files"),
            opened_pages: OpenedPages::new(&registry),
            sealed: counter(&registry, "kvfs_sealed_total", "Pages and manifests sealed"),
            sealed_bytes: counter(&registry, "kvfs_sealed_bytes_total", "Bytes sealed"),
            refused: counter_vec(
                &registry,
                "kvfs_pages_refused_total",
                "Pages and manifests refused",
                "reason",
            ),
            corrupt: counter_vec(
                &registry,
                "kvfs_checksum_errors_total",
                "Copies of objects that are not what was written, or are missing",
                "tier",
            ),
            passthrough: gauge(
                &registry,
                "kvfs_passthrough_enabled",
                "The kernel reads and writes files itself (0 until the first open)",
            ),
            asked_tokens: counter(
                &registry,
                "kvfs_match_asked_tokens_total",
                "Tokens of prompts that were asked through prefixes/match",
            ),
            answered_tokens: counter_vec(
                &registry,
                "kvfs_match_answered_tokens_total",
                "Of them, those that the sequence in the answer has",
                "store",
            ),
            batched_names: counter_vec(
                &registry,
                "kvfs_batch_names_total",
                "Names that were asked about through .kvfs/batch",
                "answer",
            ),
            registry,
        }
    }

    pub(super) fn registry(&self) -> &Registry {
        &self.registry
    }

    pub(super) fn request(&self, operation: Operation, ok: bool, duration: Duration) {
        self.requests.count(operation, ok, duration);
    }

    pub(super) fn opened(&self, bytes: u64) {
        self.opens.inc();
        self.opened_bytes.inc_by(bytes);
    }

    pub(super) fn opened_page(&self, tier: Tier, tokens: u32) {
        self.opened_pages.add(tier, tokens);
    }

    pub(super) fn opened_tokens(&self, tier: Tier) -> u64 {
        self.opened_pages.tokens(tier)
    }

    pub(super) fn matched_tokens(&self) -> (u64, u64) {
        let families = self.answered_tokens.collect();
        let answered = families.iter().flat_map(MetricFamily::get_metric).map(whole).sum();
        (self.asked_tokens.get(), answered)
    }

    pub(super) fn sealed(&self, bytes: u64) {
        self.sealed.inc();
        self.sealed_bytes.inc_by(bytes);
    }

    pub(super) fn refused(&self, reason: &str) {
        self.refused.with_label_values(&[reason]).inc();
    }

    pub(super) fn corrupt(&self, tier: Tier) {
        self.corrupt.with_label_values(&[tier.name()]).inc();
    }

    pub(super) fn matched(&self, asked: u64, answered: u64, is_own: bool) {
        self.asked_tokens.inc_by(asked);
        if answered > 0 {
            let store = if is_own { "own" } else { "other" };
            self.answered_tokens.with_label_values(&[store]).inc_by(answered);
        }
    }

    pub(super) fn batched(&self, statuses: impl Iterator<Item = Status>) {
        let (mut here, mut absent, mut other) = (0, 0, 0);
        for status in statuses {
            match status {
                Status::Here => here += 1,
                Status::Absent => absent += 1,
                _ => other += 1,
            }
        }
        for (answer, count) in [("here", here), ("absent", absent), ("other", other)] {
            self.batched_names.with_label_values(&[answer]).inc_by(count);
        }
    }

    pub(super) fn set_passthrough(&self, enabled: bool) {
        self.passthrough.set(i64::from(enabled));
    }

    pub(super) fn text(&self, gauges: Gauges, mountpoint: Option<&Path>) -> String {
        self.requests.show_held();
        gauges::text(self.registry.gather(), gauges, mountpoint)
    }
}

impl std::fmt::Debug for Metrics {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Metrics").finish_non_exhaustive()
    }
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "counters of tokens are whole"
)]
fn whole(metric: &prometheus::proto::Metric) -> u64 {
    metric.get_counter().get_value() as u64
}

fn counter(registry: &Registry, name: &str, help: &str) -> IntCounter {
    let counter = IntCounter::new(name, help).expect(VALID);
    registry.register(Box::new(counter.clone())).expect(VALID);
    counter
}

/// Opened pages and their tokens, by the tier that had them; a tier has series from its first page on.
struct OpenedPages {
    pages: IntCounterVec,
    tokens: IntCounterVec,
    /// By [`Tier`]: looking a label up takes longer than counting, at each open.
    known: [OnceLock<[IntCounter; 2]>; 3],
}

impl OpenedPages {
    fn new(registry: &Registry) -> OpenedPages {
        let by_tier = |name: &str, help: &str| counter_vec(registry, name, help, "tier");
        OpenedPages {
            pages: by_tier("kvfs_opened_pages_total", "Pages opened, by the tier that had them"),
            tokens: by_tier(
                "kvfs_opened_tokens_total",
                "Tokens of opened pages, by the tier that had them",
            ),
            known: Default::default(),
        }
    }

    fn add(&self, tier: Tier, count: u32) {
        let [pages, tokens] = self.known[tier as usize].get_or_init(|| {
            [&self.pages, &self.tokens].map(|all| all.with_label_values(&[tier.name()]))
        });
        pages.inc();
        tokens.inc_by(count.into());
    }

    fn tokens(&self, tier: Tier) -> u64 {
        self.known[tier as usize].get().map_or(0, |[_, tokens]| tokens.get())
    }
}

fn counter_vec(registry: &Registry, name: &str, help: &str, label: &str) -> IntCounterVec {
    let counter = IntCounterVec::new(Opts::new(name, help), &[label]).expect(VALID);
    registry.register(Box::new(counter.clone())).expect(VALID);
    counter
}

fn gauge(registry: &Registry, name: &str, help: &str) -> IntGauge {
    let gauge = IntGauge::new(name, help).expect(VALID);
    registry.register(Box::new(gauge.clone())).expect(VALID);
    gauge
}
