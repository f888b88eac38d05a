//! Counters in Prometheus' text format. The names are part of what operators rely on: docs/metrics.md has
//! all of them.

use std::path::Path;
use std::time::Duration;

use prometheus::{IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry};

use super::gauges::{self, Gauges};
use super::hits::Hits;
use super::requests::{Operation, Requests};
use kvfs_storage::tier::counters::Tier;

pub(super) struct Metrics {
    registry: Registry,
    pub(super) requests: Requests,
    pub(super) hits: Hits,
    opens: IntCounter,
    opened_bytes: IntCounter,
    sealed: IntCounter,
    sealed_bytes: IntCounter,
    refused: IntCounterVec,
    corrupt: IntCounterVec,
    passthrough: IntGauge,
}

pub(super) const VALID: &str = "names and labels are constants";

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
            hits: Hits::new(&registry),
            opens: counter(&registry, "kvfs_opens_total", "Files opened"),
            opened_bytes: counter(&registry, "kvfs_opened_bytes_total", "Bytes of opened files"),
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

pub(super) fn counter(registry: &Registry, name: &str, help: &str) -> IntCounter {
    let counter = IntCounter::new(name, help).expect(VALID);
    registry.register(Box::new(counter.clone())).expect(VALID);
    counter
}

pub(super) fn counter_vec(
    registry: &Registry, name: &str, help: &str, label: &str,
) -> IntCounterVec {
    counter_vec_of(registry, name, help, &[label])
}

pub(super) fn counter_vec_of(
    registry: &Registry, name: &str, help: &str, labels: &[&str],
) -> IntCounterVec {
    let counter = IntCounterVec::new(Opts::new(name, help), labels).expect(VALID);
    registry.register(Box::new(counter.clone())).expect(VALID);
    counter
}

fn gauge(registry: &Registry, name: &str, help: &str) -> IntGauge {
    let gauge = IntGauge::new(name, help).expect(VALID);
    registry.register(Box::new(gauge.clone())).expect(VALID);
    gauge
}
