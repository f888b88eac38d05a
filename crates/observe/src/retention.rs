//! What was deleted because a directory held too much, or for too long.

use prometheus::{IntCounterVec, Opts, Registry};

/// The reasons to remove something.
const REASONS: [&str; 3] = ["size", "age", "ttl"];

/// Counters of retention.
#[derive(Clone, Debug)]
pub struct RetentionCounters {
    removed_files: IntCounterVec,
    removed_bytes: IntCounterVec,
    kept: IntCounterVec,
}

const VALID: &str = "names and labels are constants";

impl Default for RetentionCounters {
    fn default() -> Self {
        let vec = |name: &str, help: &str| IntCounterVec::new(Opts::new(name, help), &["reason"]);
        Self {
            removed_files: vec(
                "kvfs_retention_removed_files_total",
                "Files that went beyond a limit of their directory",
            )
            .expect(VALID),
            removed_bytes: vec("kvfs_retention_removed_bytes_total", "Their bytes").expect(VALID),
            kept: vec(
                "kvfs_retention_kept_total",
                "Times that a file or sequence that should have gone stayed",
            )
            .expect(VALID),
        }
    }
}

impl RetentionCounters {
    /// Adds the counters to a registry.
    pub fn register(&self, registry: &Registry) -> Result<(), prometheus::Error> {
        for counters in [&self.removed_files, &self.removed_bytes, &self.kept] {
            registry.register(Box::new(counters.clone()))?;
        }
        Ok(())
    }

    /// Files that a limit removed, for a reason, and their bytes.
    pub fn removed(&self, reason: &str, files: u64, bytes: u64) {
        self.removed_files.with_label_values(&[reason]).inc_by(files);
        self.removed_bytes.with_label_values(&[reason]).inc_by(bytes);
    }

    /// A file that a limit would have removed, had something not kept it.
    pub fn kept(&self, why: &str) {
        self.kept.with_label_values(&[why]).inc();
    }

    /// Files removed since the mount began.
    pub fn removed_files(&self) -> u64 {
        REASONS.map(|reason| self.removed_files.with_label_values(&[reason]).get()).iter().sum()
    }

    /// Bytes removed since the mount began.
    pub fn removed_bytes(&self) -> u64 {
        REASONS.map(|reason| self.removed_bytes.with_label_values(&[reason]).get()).iter().sum()
    }
}
