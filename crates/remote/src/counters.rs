//! What is asked of a remote and what moves, counted where it happens.

use std::time::Duration;

use prometheus::{HistogramOpts, HistogramVec, IntCounter, IntCounterVec, Opts, Registry};

use super::error::{RemoteError, Result};

/// Operations, as they are labelled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// `put`
    Put,
    /// `get`
    Get,
    /// `head`
    Head,
    /// `refresh`
    Refresh,
    /// `delete`
    Delete,
    /// `list`
    List,
    /// `sweep`
    Sweep,
}

impl Operation {
    fn label(self) -> &'static str {
        match self {
            Operation::Put => "put",
            Operation::Get => "get",
            Operation::Head => "head",
            Operation::Refresh => "refresh",
            Operation::Delete => "delete",
            Operation::List => "list",
            Operation::Sweep => "sweep",
        }
    }
}

/// Direction of bytes, seen from this machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the remote.
    In,
    /// To the remote.
    Out,
}

impl Direction {
    fn label(self) -> &'static str {
        match self {
            Direction::In => "in",
            Direction::Out => "out",
        }
    }
}

/// Handles to the counters of one remote; clones count into the same.
#[derive(Clone, Debug)]
pub struct Counters {
    requests: IntCounterVec,
    durations: HistogramVec,
    retries: IntCounter,
    bytes: IntCounterVec,
}

/// What a local directory takes.
const BUCKET_SECONDS_MIN: f64 = 1e-4;
/// Each bucket ends at twice the one before it; the last at 105 s, which is longer than any deadline. Each is
/// one series per operation.
const BUCKETS: usize = 21;

const VALID: &str = "names and labels are constants";

impl Default for Counters {
    fn default() -> Counters {
        let buckets = prometheus::exponential_buckets(BUCKET_SECONDS_MIN, 2.0, BUCKETS);
        let durations = HistogramOpts::new(
            "kvfs_remote_request_duration_seconds",
            "Time of a request to the remote tier, waiting for a thread included",
        );
        let requests = Opts::new("kvfs_remote_requests_total", "Requests to the remote tier");
        let bytes = Opts::new("kvfs_remote_bytes_total", "Bytes from (in) and to (out) the remote");
        let retries = "Attempts that were repeated, within requests to the remote tier";
        Counters {
            requests: IntCounterVec::new(requests, &["op", "result"]).expect(VALID),
            durations: HistogramVec::new(durations.buckets(buckets.expect(VALID)), &["op"])
                .expect(VALID),
            retries: IntCounter::new("kvfs_remote_retries_total", retries).expect(VALID),
            bytes: IntCounterVec::new(bytes, &["direction"]).expect(VALID),
        }
    }
}

impl Counters {
    /// Shows them with the other metrics of a mount.
    pub fn register(&self, registry: &Registry) -> prometheus::Result<()> {
        registry.register(Box::new(self.requests.clone()))?;
        registry.register(Box::new(self.durations.clone()))?;
        registry.register(Box::new(self.retries.clone()))?;
        registry.register(Box::new(self.bytes.clone()))
    }

    /// Requests so far of an operation with a result: `ok` or [`super::RemoteError::label`].
    pub fn requests(&self, operation: Operation, result: &str) -> u64 {
        self.requests.with_label_values(&[operation.label(), result]).get()
    }

    /// Attempts that were repeated.
    pub fn retries(&self) -> u64 {
        self.retries.get()
    }

    /// Bytes that moved.
    pub fn bytes(&self, direction: Direction) -> u64 {
        self.bytes.with_label_values(&[direction.label()]).get()
    }

    pub(super) fn request<T>(&self, operation: Operation, outcome: &Result<T>, took: Duration) {
        let result = outcome.as_ref().map_or_else(RemoteError::label, |_| "ok");
        self.requests.with_label_values(&[operation.label(), result]).inc();
        self.durations.with_label_values(&[operation.label()]).observe(took.as_secs_f64());
    }

    pub(super) fn moved(&self, direction: Direction) -> IntCounter {
        self.bytes.with_label_values(&[direction.label()])
    }

    pub(super) fn retried(&self) -> IntCounter {
        self.retries.clone()
    }
}
