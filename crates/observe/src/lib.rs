//! What a running mount tells about itself: counters for Prometheus, recent errors, the log.
//!
//! Every number is counted where the bytes move. With passthrough the kernel moves them, so there
//! is no counter of bytes read: what is opened is counted instead.

#![forbid(unsafe_code)]

mod attention;
mod errors;
mod gauges;
mod hits;
mod metrics;
mod queues;
mod requests;
mod retention;

use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

pub use gauges::Gauges;
pub use requests::Operation;
pub use retention::RetentionCounters;

use attention::AttentionMetrics;
use errors::RecentErrors;
use kvfs_page::batch::Status;
use kvfs_page::reader_report::Counts;
use kvfs_storage::tier::counters::Tier;
use metrics::Metrics;
use queues::Queues;

/// Counters and errors of one mount.
#[derive(Debug)]
pub struct Observer {
    started: Instant,
    errors: RecentErrors,
    metrics: Metrics,
    /// Made by the first reader that reports.
    attention: OnceLock<AttentionMetrics>,
    mountpoint: OnceLock<PathBuf>,
    metrics_address: OnceLock<String>,
    page_address: OnceLock<String>,
    queues: Queues,
}

impl Observer {
    /// Nothing has happened yet.
    pub fn new() -> Observer {
        Observer {
            started: Instant::now(),
            errors: RecentErrors::default(),
            metrics: Metrics::new(),
            attention: OnceLock::new(),
            mountpoint: OnceLock::new(),
            metrics_address: OnceLock::new(),
            page_address: OnceLock::new(),
            queues: Queues::default(),
        }
    }

    /// Says where the mount is.
    pub fn describe(&self, mountpoint: &Path) {
        let _ = self.mountpoint.set(mountpoint.to_owned());
    }

    /// Where the mount is.
    pub fn mountpoint(&self) -> &Path {
        self.mountpoint.get().map_or(Path::new(""), PathBuf::as_path)
    }

    /// Says where metrics are served, beside `.kvfs/metrics`.
    pub fn serves_metrics_at(&self, address: String) {
        let _ = self.metrics_address.set(address);
    }

    /// Where metrics are served, if anywhere.
    pub fn metrics_address(&self) -> Option<&str> {
        self.metrics_address.get().map(String::as_str)
    }

    /// Says where a browser is shown everything, in a line; who has read it is let in.
    pub fn shows_a_page_at(&self, line: String) {
        let _ = self.page_address.set(line);
    }

    /// Where a browser is shown everything; empty if nowhere.
    pub fn page_address(&self) -> &str {
        self.page_address.get().map_or("", String::as_str)
    }

    /// Time since the mount started.
    pub fn uptime(&self) -> Duration {
        self.started.elapsed()
    }

    /// A page or manifest was refused.
    pub fn refused(&self, path: &str, reason: &str, text: &str) {
        self.metrics.refused(reason);
        self.errors.add(&format!("{path}: {text}"));
        log::warn!("refused {path}: {text}");
    }

    /// The bytes that a tier stored are not what they should be.
    pub fn corrupt(&self, tier: Tier, text: &str) {
        self.metrics.corrupt(tier);
        self.errors.add(text);
        log::error!("{text}");
    }

    /// The mount cannot go on as before.
    pub fn failed(&self, text: &str) {
        self.errors.add(text);
        log::error!("{text}");
    }

    /// A file of this size was opened.
    pub fn opened(&self, bytes: u64) {
        self.metrics.opened(bytes);
    }

    /// A page of so many tokens was opened, which this tier had.
    pub fn opened_page(&self, tier: Tier, tokens: u32) {
        self.metrics.hits.opened_page(tier, tokens);
    }

    /// A file that is no page was opened to be read, which this tier had.
    pub fn opened_file(&self, tier: Tier) {
        self.metrics.hits.opened_file(tier);
    }

    /// A file could not be opened to be read.
    pub fn open_failed(&self, tier: Tier, error: &str) {
        self.metrics.hits.open_failed(tier, error);
    }

    /// A page was opened, which took so long, and has so many tokens that no other layer's page has counted.
    pub fn restored(&self, tokens: u64, took: Duration) {
        self.metrics.hits.restored(tokens, took);
    }

    /// All of those tokens.
    pub fn restored_tokens(&self) -> u64 {
        self.metrics.hits.restored_tokens()
    }

    /// Tokens of opened pages that this tier had.
    pub fn opened_tokens(&self, tier: Tier) -> u64 {
        self.metrics.hits.opened_tokens(tier)
    }

    /// Tokens of prompts that were asked, and of the sequences in the answers.
    pub fn matched_tokens(&self) -> (u64, u64) {
        self.metrics.hits.matched_tokens()
    }

    /// A page or manifest of this size was sealed.
    pub fn sealed(&self, bytes: u64) {
        self.metrics.sealed(bytes);
    }

    /// Whether the kernel reads and writes the files itself.
    pub fn set_passthrough(&self, enabled: bool) {
        self.metrics.set_passthrough(enabled);
    }

    /// A prompt was asked, of so many tokens; a sequence of this store, or of another, has so many of them in each tier.
    pub fn matched(&self, asked: u64, in_tiers: [u64; 3], is_own: bool) {
        self.metrics.hits.matched(asked, in_tiers, is_own);
    }

    /// A prefix was looked up by its hash, of which the last page has so many tokens.
    pub fn looked_for_prefix(&self, tokens: u64, is_there: bool) {
        self.metrics.hits.looked_for_prefix(tokens, is_there);
    }

    /// A name was looked up in `files/`.
    pub fn looked_up(&self, is_there: bool) {
        self.metrics.hits.looked_up(is_there);
    }

    /// A question about many names was answered, so for each. Returns how many are here and absent.
    pub fn batched(&self, statuses: impl Iterator<Item = Status>) -> [u64; 2] {
        self.metrics.hits.batched(statuses)
    }

    /// A FUSE request was answered.
    pub fn request(&self, operation: Operation, ok: bool, duration: Duration) {
        self.metrics.request(operation, ok, duration);
    }

    /// A request held the thread that took it for so long.
    pub fn held(&self, operation: Operation, duration: Duration) {
        self.metrics.requests.held(operation, duration);
    }

    /// The request that held the thread that took it longest, if there was one.
    pub fn longest_held(&self) -> Option<(Operation, Duration)> {
        self.metrics.requests.longest_held()
    }

    /// Somebody who reads sequences has reported.
    pub fn attended(&self, counts: &Counts) {
        let registry = self.metrics.registry();
        self.attention.get_or_init(|| AttentionMetrics::new(registry)).add(counts);
    }

    /// Requests of a kind wait in a queue whose length is asked for each time somebody reads the metrics.
    pub fn watch_queue(
        &self, kind: &'static str, length: impl Fn() -> usize + Send + Sync + 'static,
    ) {
        self.queues.add(kind, Box::new(length));
    }

    /// Where others add counters of their own.
    pub fn registry(&self) -> &prometheus::Registry {
        self.metrics.registry()
    }

    /// Recent errors, one line each, oldest first.
    pub fn errors(&self) -> String {
        self.errors.text()
    }

    /// Errors since the mount started.
    pub fn error_count(&self) -> u64 {
        self.errors.count()
    }

    /// The counters and these values in Prometheus' text format.
    pub fn metrics(&self, mut gauges: Gauges) -> String {
        self.queues.add_lengths(&mut gauges);
        self.metrics.text(gauges, self.mountpoint.get().map(PathBuf::as_path))
    }
}

impl Default for Observer {
    fn default() -> Observer {
        Observer::new()
    }
}
