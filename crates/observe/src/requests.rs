//! Requests of the kernel: how many, how long, and how long they held the thread that others wait for.
//!
//! An operation has series from its first request on: most mounts never see half of them.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use prometheus::{
    GaugeVec, Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, Opts, Registry,
};

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

/// The shortest time that has a bucket of its own: a request that waits for nothing takes some 5 us.
const BUCKET_SECONDS_MIN: f64 = 8e-6;
/// Each bucket ends at twice the one before it, so that a quantile is off by a factor of two at most; the
/// last ends at 8.4 s. Each is one series per operation.
const BUCKETS: usize = 21;

const VALID: &str = "names and labels are constants";

/// What is known of one operation.
#[derive(Default)]
struct Known {
    /// Made by the first request, so that counting the next costs no lookup.
    counted: OnceLock<Counted>,
    /// Longest time on the thread that takes requests, in nanoseconds.
    held: AtomicU64,
}

struct Counted {
    ok: IntCounter,
    failed: IntCounter,
    duration: Histogram,
}

pub(super) struct Requests {
    counts: IntCounterVec,
    durations: HistogramVec,
    held_seconds: GaugeVec,
    /// By [`Operation`].
    known: Vec<Known>,
}

impl Requests {
    pub(super) fn new(registry: &Registry) -> Requests {
        let counts = Opts::new("kvfs_fuse_requests_total", "Requests of the kernel");
        let counts = IntCounterVec::new(counts, &["op", "result"]).expect(VALID);
        let buckets = prometheus::exponential_buckets(BUCKET_SECONDS_MIN, 2.0, BUCKETS);
        let durations =
            HistogramOpts::new("kvfs_fuse_request_duration_seconds", "Time from request to answer");
        let durations = durations.buckets(buckets.expect(VALID));
        let durations = HistogramVec::new(durations, &["op"]).expect(VALID);
        let held_seconds = Opts::new(
            "kvfs_request_thread_held_seconds_max",
            "Longest time for which a request held the thread that others wait for",
        );
        let held_seconds = GaugeVec::new(held_seconds, &["op"]).expect(VALID);
        registry.register(Box::new(counts.clone())).expect(VALID);
        registry.register(Box::new(durations.clone())).expect(VALID);
        registry.register(Box::new(held_seconds.clone())).expect(VALID);
        let known = OPERATIONS.iter().map(|_| Known::default()).collect();
        Requests { counts, durations, held_seconds, known }
    }

    pub(super) fn count(&self, operation: Operation, ok: bool, duration: Duration) {
        let known = &self.known[operation as usize];
        let counted = known.counted.get_or_init(|| {
            let name = operation.name();
            Counted {
                ok: self.counts.with_label_values(&[name, "ok"]),
                failed: self.counts.with_label_values(&[name, "error"]),
                duration: self.durations.with_label_values(&[name]),
            }
        });
        if ok {
            counted.ok.inc();
        } else {
            counted.failed.inc();
        }
        counted.duration.observe(duration.as_secs_f64());
    }

    pub(super) fn held(&self, operation: Operation, duration: Duration) {
        let nanoseconds = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        self.known[operation as usize].held.fetch_max(nanoseconds, Ordering::Relaxed);
    }

    /// The request that held its thread longest, if there was one.
    pub(super) fn longest_held(&self) -> Option<(Operation, Duration)> {
        self.all_held().max_by_key(|(_, held)| *held)
    }

    /// Brings the gauges up to date.
    pub(super) fn show_held(&self) {
        for (operation, held) in self.all_held() {
            self.held_seconds.with_label_values(&[operation.name()]).set(held.as_secs_f64());
        }
    }

    /// The operations that held their thread at all, and for how long.
    fn all_held(&self) -> impl Iterator<Item = (Operation, Duration)> {
        let held = |known: &Known| Duration::from_nanos(known.held.load(Ordering::Relaxed));
        let all = OPERATIONS.iter().copied().zip(self.known.iter().map(held));
        all.filter(|(_, held)| !held.is_zero())
    }
}
