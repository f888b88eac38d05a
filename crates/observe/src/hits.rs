//! Counters of what was asked for, what of it was there, and where it came from.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use prometheus::{Counter, IntCounter, IntCounterVec, Registry};

use super::metrics::{VALID, counter, counter_vec, counter_vec_of};
use kvfs_page::batch::Status;
use kvfs_storage::tier::counters::Tier;

/// [`Tier`]'s order.
const TIERS: [Tier; 3] = [Tier::Ram, Tier::Ssd, Tier::Remote];

/// What was asked for and found.
pub(super) struct Hits {
    asked_tokens: IntCounter,
    answered_tokens: IntCounterVec,
    /// Of all its series.
    answered_in_all: AtomicU64,
    prefix_asked_tokens: IntCounter,
    prefix_answered_tokens: IntCounter,
    /// Names in `files/`: those that are there, and absent ones.
    names: Labelled<2>,
    batched_names: IntCounterVec,
    opened_pages: Labelled<3>,
    opened_tokens: Labelled<3>,
    opened_files: Labelled<3>,
    failures: IntCounterVec,
    restored_tokens: IntCounter,
    page_open_seconds: Counter,
}

impl Hits {
    pub(super) fn new(registry: &Registry) -> Hits {
        let counted = |name: &str, help: &str| counter(registry, name, help);
        let by = |name: &str, help: &str, label: &str| counter_vec(registry, name, help, label);
        let by_tier =
            |name: &str, help: &str| Labelled::new(by(name, help, "tier"), TIERS.map(Tier::name));
        let names = by("kvfs_file_lookups_total", "Names that were looked up in files/", "answer");
        let seconds = Counter::new("kvfs_page_open_seconds_total", "Time that opens of pages took");
        let page_open_seconds = seconds.expect(VALID);
        registry.register(Box::new(page_open_seconds.clone())).expect(VALID);
        Hits {
            asked_tokens: counted(
                "kvfs_match_asked_tokens_total",
                "Tokens of prompts that were asked through prefixes/match",
            ),
            answered_tokens: counter_vec_of(
                registry,
                "kvfs_match_answered_tokens_total",
                "Of them, those that the sequence in the answer has",
                &["store", "tier"],
            ),
            answered_in_all: AtomicU64::new(0),
            prefix_asked_tokens: counted(
                "kvfs_prefix_asked_tokens_total",
                "Tokens of the last page of each prefix that was looked up by its hash",
            ),
            prefix_answered_tokens: counted(
                "kvfs_prefix_answered_tokens_total",
                "Of them, those of prefixes that are there",
            ),
            names: Labelled::new(names, ["here", "absent"]),
            batched_names: by(
                "kvfs_batch_names_total",
                "Names that were asked about through .kvfs/batch",
                "answer",
            ),
            opened_pages: by_tier(
                "kvfs_opened_pages_total",
                "Pages opened, by the tier that had them",
            ),
            opened_tokens: by_tier(
                "kvfs_opened_tokens_total",
                "Tokens of opened pages, by the tier that had them",
            ),
            opened_files: by_tier(
                "kvfs_opened_files_total",
                "Files that are no pages, opened to be read, by the tier that had them",
            ),
            failures: counter_vec_of(
                registry,
                "kvfs_open_failures_total",
                "Opens to read that failed",
                &["tier", "error"],
            ),
            restored_tokens: counted(
                "kvfs_restored_tokens_total",
                "Tokens of opened pages, counted once for all layers",
            ),
            page_open_seconds,
        }
    }

    pub(super) fn opened_page(&self, tier: Tier, tokens: u32) {
        self.opened_pages.add(tier as usize, 1);
        self.opened_tokens.add(tier as usize, tokens.into());
    }

    pub(super) fn opened_file(&self, tier: Tier) {
        self.opened_files.add(tier as usize, 1);
    }

    pub(super) fn opened_tokens(&self, tier: Tier) -> u64 {
        self.opened_tokens.count(tier as usize)
    }

    pub(super) fn open_failed(&self, tier: Tier, error: &str) {
        self.failures.with_label_values(&[tier.name(), error]).inc();
    }

    pub(super) fn restored(&self, tokens: u64, took: Duration) {
        self.restored_tokens.inc_by(tokens);
        self.page_open_seconds.inc_by(took.as_secs_f64());
    }

    pub(super) fn restored_tokens(&self) -> u64 {
        self.restored_tokens.get()
    }

    pub(super) fn matched(&self, asked: u64, in_tiers: [u64; 3], is_own: bool) {
        self.asked_tokens.inc_by(asked);
        self.answered_in_all.fetch_add(in_tiers.iter().sum(), Ordering::Relaxed);
        let store = if is_own { "own" } else { "other" };
        for (tier, tokens) in TIERS.into_iter().zip(in_tiers).filter(|(_, tokens)| *tokens > 0) {
            self.answered_tokens.with_label_values(&[store, tier.name()]).inc_by(tokens);
        }
    }

    /// Tokens that were asked, and those that the answers have.
    pub(super) fn matched_tokens(&self) -> (u64, u64) {
        (self.asked_tokens.get(), self.answered_in_all.load(Ordering::Relaxed))
    }

    pub(super) fn looked_up(&self, is_there: bool) {
        self.names.add(usize::from(!is_there), 1);
    }

    pub(super) fn looked_for_prefix(&self, tokens: u64, is_there: bool) {
        self.prefix_asked_tokens.inc_by(tokens);
        if is_there {
            self.prefix_answered_tokens.inc_by(tokens);
        }
    }

    /// Returns how many are here and absent.
    pub(super) fn batched(&self, statuses: impl Iterator<Item = Status>) -> [u64; 2] {
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
        [here, absent]
    }
}

/// A counter for each value of a label, which has a series from its first count on.
///
/// Looking a label up takes longer than counting, at each open: what was found is kept.
struct Labelled<const N: usize> {
    all: IntCounterVec,
    values: [&'static str; N],
    known: [OnceLock<IntCounter>; N],
}

impl<const N: usize> Labelled<N> {
    fn new(all: IntCounterVec, values: [&'static str; N]) -> Labelled<N> {
        Labelled { all, values, known: std::array::from_fn(|_| OnceLock::new()) }
    }

    fn add(&self, at: usize, count: u64) {
        let find = || self.all.with_label_values(&[self.values[at]]);
        self.known[at].get_or_init(find).inc_by(count);
    }

    fn count(&self, at: usize) -> u64 {
        self.known[at].get().map_or(0, IntCounter::get)
    }
}
