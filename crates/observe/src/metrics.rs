//! Counters in Prometheus' text format. The names are part of what operators rely on.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use prometheus::{
    Encoder, Gauge, GaugeVec, Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec,
    IntGauge, IntGaugeVec, Opts, Registry, TextEncoder,
};

use kvfs_storage::store::record::Totals;
use kvfs_storage::tier::ram::RamUse;

macro_rules! operations {
    ($($variant:ident = $name:literal),* $(,)?) => {
        /// The FUSE requests that are counted.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Operation { $(#[doc = concat!("`", $name, "`")] $variant),* }
        const OPERATIONS: &[Operation] = &[$(Operation::$variant),*];
        impl Operation {
            /// As metrics and the log have it.
            pub fn name(self) -> &'static str {
                match self { $(Operation::$variant => $name),* }
            }
        }
    };
}
operations! {
    Lookup = "lookup", GetAttr = "getattr", SetAttr = "setattr", ReadLink = "readlink",
    Make = "make", Create = "create", Open = "open", Read = "read", Write = "write",
    Flush = "flush", Release = "release", Fsync = "fsync", Unlink = "unlink", Rmdir = "rmdir",
    Rename = "rename", Link = "link", List = "list", StatFs = "statfs",
    GetXattr = "getxattr", SetXattr = "setxattr", ListXattr = "listxattr",
    RemoveXattr = "removexattr", Fallocate = "fallocate", Seek = "seek", CopyRange = "copy_range",
    Forget = "forget",
}

/// Values that are read when the metrics are.
#[derive(Clone, Copy, Debug, Default)]
pub struct Gauges {
    /// What the store holds.
    pub totals: Totals,
    /// Size of the store's filesystem.
    pub capacity_bytes: u64,
    /// Free there.
    pub free_bytes: u64,
    /// Objects in quarantine.
    pub quarantined_objects: usize,
    /// The mount is not as well as it should be.
    pub is_degraded: bool,
    /// Files of which no good copy was found.
    pub damaged_files: usize,
    /// Budget in bytes and use of the RAM tier.
    pub ram: Option<(u64, RamUse)>,
}

struct Request {
    ok: IntCounter,
    failed: IntCounter,
    duration: Histogram,
    /// Longest time, in nanoseconds.
    held: AtomicU64,
    held_seconds: Gauge,
}

pub(super) struct Metrics {
    registry: Registry,
    /// By [`Operation`].
    requests: Vec<Request>,
    opens: IntCounter,
    opened_bytes: IntCounter,
    sealed: IntCounter,
    sealed_bytes: IntCounter,
    refused: IntCounterVec,
    corrupt: IntCounterVec,
    passthrough: IntGauge,
    used_bytes: IntGaugeVec,
    capacity_bytes: IntGaugeVec,
    free_bytes: IntGaugeVec,
    pages: IntGaugeVec,
    quarantined: IntGauge,
    degraded: IntGauge,
    damaged_files: IntGauge,
    pinned_bytes: IntGaugeVec,
    dirty_bytes: IntGauge,
}

const VALID: &str = "names and labels are constants";

impl Metrics {
    pub(super) fn new() -> Metrics {
        let registry = Registry::new();
        let by_tier = |name, help| gauge_vec(&registry, name, help, &["tier"]);
        let pinned_bytes =
            by_tier("kvfs_tier_pinned_bytes", "Bytes in use when room was last needed");
        let (used_bytes, capacity_bytes, free_bytes, pages) = (
            by_tier("kvfs_tier_used_bytes", "Bytes of objects in the tier"),
            by_tier("kvfs_tier_capacity_bytes", "Size of the tier"),
            by_tier("kvfs_tier_free_bytes", "Bytes that can still be written to the tier"),
            by_tier("kvfs_tier_pages", "Sealed pages in the tier"),
        );
        let build = gauge_vec(&registry, "kvfs_build_info", "Version", &["version"]);
        build.with_label_values(&[env!("CARGO_PKG_VERSION")]).set(1);
        gauge(&registry, "kvfs_mount_ready", "The mount answers").set(1);
        Metrics {
            requests: requests(&registry),
            opens: counter(&registry, "kvfs_opens_total", "Files opened"),
            opened_bytes: counter(&registry, "kvfs_opened_bytes_total", "Bytes of opened files"),
            sealed: counter(&registry, "kvfs_sealed_total", "Pages and manifests sealed"),
            sealed_bytes: counter(&registry, "kvfs_sealed_bytes_total", "Bytes sealed"),
            refused: counter_vec(
                &registry,
                "kvfs_pages_refused_total",
                "Pages and manifests refused",
                &["reason"],
            ),
            corrupt: counter_vec(
                &registry,
                "kvfs_checksum_errors_total",
                "Objects whose bytes are not what was written",
                &["tier"],
            ),
            passthrough: gauge(
                &registry,
                "kvfs_passthrough_enabled",
                "The kernel reads and writes files itself",
            ),
            used_bytes,
            capacity_bytes,
            free_bytes,
            pages,
            quarantined: gauge(&registry, "kvfs_quarantined_objects", "Objects in quarantine"),
            degraded: gauge(&registry, "kvfs_degraded", "The state in .kvfs/status is not ok"),
            damaged_files: gauge(
                &registry,
                "kvfs_damaged_files",
                "Files of which the last look found no good copy",
            ),
            pinned_bytes,
            dirty_bytes: gauge(&registry, "kvfs_dirty_bytes", "Bytes that only memory has"),
            registry,
        }
    }

    pub(super) fn registry(&self) -> &Registry {
        &self.registry
    }

    pub(super) fn request(&self, operation: Operation, ok: bool, duration: Duration) {
        let request = &self.requests[operation as usize];
        if ok {
            request.ok.inc();
        } else {
            request.failed.inc();
        }
        request.duration.observe(duration.as_secs_f64());
    }

    pub(super) fn held(&self, operation: Operation, duration: Duration) {
        let nanoseconds = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        self.requests[operation as usize].held.fetch_max(nanoseconds, Ordering::Relaxed);
    }

    /// The request that held its thread longest, if there was one.
    pub(super) fn longest_held(&self) -> Option<(Operation, Duration)> {
        let held = |request: &Request| Duration::from_nanos(request.held.load(Ordering::Relaxed));
        let all = OPERATIONS.iter().copied().zip(self.requests.iter().map(held));
        all.max_by_key(|(_, held)| *held).filter(|(_, held)| !held.is_zero())
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

    pub(super) fn corrupt(&self) {
        self.corrupt.with_label_values(&["ssd"]).inc();
    }

    pub(super) fn set_passthrough(&self, enabled: bool) {
        self.passthrough.set(i64::from(enabled));
    }

    pub(super) fn text(&self, gauges: &Gauges) -> String {
        for request in &self.requests {
            let held = Duration::from_nanos(request.held.load(Ordering::Relaxed));
            request.held_seconds.set(held.as_secs_f64());
        }
        let signed = |value: u64| i64::try_from(value).unwrap_or(i64::MAX);
        let ssd = &["ssd"];
        self.used_bytes.with_label_values(ssd).set(signed(gauges.totals.bytes));
        self.capacity_bytes.with_label_values(ssd).set(signed(gauges.capacity_bytes));
        self.free_bytes.with_label_values(ssd).set(signed(gauges.free_bytes));
        self.pages.with_label_values(ssd).set(signed(gauges.totals.pages));
        self.quarantined.set(signed(gauges.quarantined_objects as u64));
        self.degraded.set(i64::from(gauges.is_degraded));
        self.damaged_files.set(signed(gauges.damaged_files as u64));
        if let Some((budget_bytes, usage)) = gauges.ram {
            let ram = &["ram"];
            self.used_bytes.with_label_values(ram).set(signed(usage.used_bytes));
            self.capacity_bytes.with_label_values(ram).set(signed(budget_bytes));
            self.free_bytes
                .with_label_values(ram)
                .set(signed(budget_bytes.saturating_sub(usage.used_bytes)));
            self.pinned_bytes.with_label_values(ram).set(signed(usage.pinned_bytes));
            self.dirty_bytes.set(signed(usage.dirty_bytes));
        }
        let mut text = Vec::new();
        if let Err(error) = TextEncoder::new().encode(&self.registry.gather(), &mut text) {
            log::error!("metrics: {error}");
        }
        String::from_utf8_lossy(&text).into_owned()
    }
}

impl std::fmt::Debug for Metrics {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Metrics").finish_non_exhaustive()
    }
}

/// One set of counters per operation, resolved once: counting a request costs no lookup.
fn requests(registry: &Registry) -> Vec<Request> {
    let counts = counter_vec(
        registry,
        "kvfs_fuse_requests_total",
        "Requests of the kernel",
        &["op", "result"],
    );
    // 10 us to 10 s: a request that waits for nothing takes some 5 us.
    let buckets = prometheus::exponential_buckets(1e-5, 10.0, 7).expect(VALID);
    let options =
        HistogramOpts::new("kvfs_fuse_request_duration_seconds", "Time from request to answer");
    let durations = HistogramVec::new(options.buckets(buckets), &["op"]).expect(VALID);
    registry.register(Box::new(durations.clone())).expect(VALID);
    let held_options = Opts::new(
        "kvfs_request_thread_held_seconds_max",
        "Longest time for which a request held the thread that others wait for",
    );
    let held = GaugeVec::new(held_options, &["op"]).expect(VALID);
    registry.register(Box::new(held.clone())).expect(VALID);
    let request = |operation: &Operation| {
        let name = operation.name();
        Request {
            ok: counts.with_label_values(&[name, "ok"]),
            failed: counts.with_label_values(&[name, "error"]),
            duration: durations.with_label_values(&[name]),
            held: AtomicU64::new(0),
            held_seconds: held.with_label_values(&[name]),
        }
    };
    OPERATIONS.iter().map(request).collect()
}

fn counter(registry: &Registry, name: &str, help: &str) -> IntCounter {
    let counter = IntCounter::new(name, help).expect(VALID);
    registry.register(Box::new(counter.clone())).expect(VALID);
    counter
}

fn counter_vec(registry: &Registry, name: &str, help: &str, labels: &[&str]) -> IntCounterVec {
    let counter = IntCounterVec::new(Opts::new(name, help), labels).expect(VALID);
    registry.register(Box::new(counter.clone())).expect(VALID);
    counter
}

fn gauge(registry: &Registry, name: &str, help: &str) -> IntGauge {
    let gauge = IntGauge::new(name, help).expect(VALID);
    registry.register(Box::new(gauge.clone())).expect(VALID);
    gauge
}

fn gauge_vec(registry: &Registry, name: &str, help: &str, labels: &[&str]) -> IntGaugeVec {
    let gauge = IntGaugeVec::new(Opts::new(name, help), labels).expect(VALID);
    registry.register(Box::new(gauge.clone())).expect(VALID);
    gauge
}
