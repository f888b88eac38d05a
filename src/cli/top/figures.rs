//! What is shown of a mount: numbers from a sample, and from the one before it where they tell what changes.

use serde::Serialize;

use super::rates::{Change, Durations};
use super::sample::Sample;
use crate::cli::series::whole;

/// A request that takes longer is slow: the bound of a bucket, 0.13 s.
const SLOW_SECONDS: f64 = 0.13;
const PROMPTS: &str = "prompts";
const PREFIXES: &str = "prefixes";
const NAMES: &str = "kvfs_file_lookups_total";
const IN_MEMORY: &str = "kvfs_opened_tokens_total";
const REQUESTS: &str = "kvfs_fuse_request_duration_seconds";
const REMOTE_REQUESTS: &str = "kvfs_remote_request_duration_seconds";

/// All of it. What is not known is absent.
#[derive(Debug, Default, Serialize)]
pub(in crate::cli) struct Figures {
    pub(in crate::cli) mountpoint: String,
    pub(in crate::cli) version: String,
    pub(in crate::cli) state: String,
    pub(in crate::cli) state_reasons: Vec<String>,
    pub(in crate::cli) uptime_seconds: Option<u64>,
    /// Between the two samples.
    pub(in crate::cli) seconds: Option<f64>,
    pub(in crate::cli) pages: Option<u64>,
    pub(in crate::cli) open_files: Option<u64>,
    pub(in crate::cli) tiers: Vec<TierFigures>,
    pub(in crate::cli) flows: Vec<Flow>,
    pub(in crate::cli) hits: Vec<Hits>,
    pub(in crate::cli) requests: Vec<Requests>,
    /// Since the mount began, only where something did.
    pub(in crate::cli) troubles: Vec<Trouble>,
    pub(in crate::cli) last_opens: Vec<LastOpens>,
}

/// A tier.
#[derive(Debug, Serialize)]
pub(in crate::cli) struct TierFigures {
    pub(in crate::cli) name: &'static str,
    pub(in crate::cli) used_bytes: u64,
    pub(in crate::cli) capacity_bytes: Option<u64>,
    pub(in crate::cli) objects: u64,
    pub(in crate::cli) dirty_bytes: Option<u64>,
    pub(in crate::cli) free_bytes: Option<u64>,
    /// Of a remote: whether it answers, and what it does not have yet.
    pub(in crate::cli) state: Option<String>,
    pub(in crate::cli) waiting_files: Option<u64>,
}

/// Something that goes on.
#[derive(Debug, Serialize)]
pub(in crate::cli) struct Flow {
    pub(in crate::cli) name: String,
    pub(in crate::cli) per_second: Option<f64>,
    pub(in crate::cli) bytes_per_second: Option<f64>,
    pub(in crate::cli) total: u64,
}

/// How often something was where it was hoped to be.
#[derive(Debug, Serialize)]
pub(in crate::cli) struct Hits {
    pub(in crate::cli) name: &'static str,
    /// Between the samples, if it was tried.
    pub(in crate::cli) share: Option<f64>,
    pub(in crate::cli) share_since_mount: f64,
}

/// Requests of one operation.
#[derive(Debug, Serialize)]
pub(in crate::cli) struct Requests {
    pub(in crate::cli) operation: String,
    pub(in crate::cli) per_second: Option<f64>,
    /// Bounds that half of those between the samples kept, and 99 %.
    pub(in crate::cli) half_seconds: Option<f64>,
    pub(in crate::cli) most_seconds: Option<f64>,
    /// Since the mount began.
    pub(in crate::cli) slow: u64,
}

/// Something that went wrong.
#[derive(Debug, Serialize)]
pub(in crate::cli) struct Trouble {
    pub(in crate::cli) name: String,
    pub(in crate::cli) count: u64,
}

/// Where some of the last opens went.
#[derive(Debug, Serialize)]
pub(in crate::cli) struct LastOpens {
    pub(in crate::cli) path: String,
    pub(in crate::cli) opens: u64,
}

impl Figures {
    pub(in crate::cli) fn of(before: Option<&Sample>, now: &Sample) -> Figures {
        let change = before.and_then(|before| Change::between(before, now));
        let text = |key: &str| now.status(key).unwrap_or("?").to_owned();
        let reasons = now.status("state_reason").into_iter().flat_map(|why| why.split("; "));
        let opens =
            now.hottest.iter().map(|(opens, path)| LastOpens { path: path.clone(), opens: *opens });
        Figures {
            mountpoint: text("mountpoint"),
            version: text("version"),
            state: text("state"),
            state_reasons: reasons.map(str::to_owned).collect(),
            uptime_seconds: now.number("uptime_seconds"),
            seconds: change.map(|change| change.seconds()),
            pages: now.metrics.number("kvfs_pages", &[]),
            open_files: now.metrics.number("kvfs_open_files", &[]),
            tiers: tiers(now),
            flows: flows(change, now),
            hits: hits(change, now),
            requests: requests(change, now),
            troubles: troubles(now),
            last_opens: opens.collect(),
        }
    }
}

/// The word for a tier of the metrics.
fn tier_name(tier: &str) -> &'static str {
    match tier {
        "ram" => "memory",
        "ssd" => "disk",
        "remote" => "remote",
        _ => "other",
    }
}

fn tiers(now: &Sample) -> Vec<TierFigures> {
    let tiers = ["ram", "ssd", "remote"].into_iter().filter_map(|tier| {
        let number = |name: &str| now.metrics.number(name, &[("tier", tier)]);
        let is_remote = tier == "remote";
        let of_remote = |key: &str| if is_remote { now.number(key) } else { None };
        let state = now.status("remote_state").filter(|_| is_remote);
        Some(TierFigures {
            name: tier_name(tier),
            used_bytes: number("kvfs_tier_used_bytes")?,
            capacity_bytes: number("kvfs_tier_capacity_bytes"),
            objects: number("kvfs_tier_objects").unwrap_or(0),
            dirty_bytes: number("kvfs_tier_dirty_bytes"),
            free_bytes: number("kvfs_tier_free_bytes"),
            state: state.map(str::to_owned),
            waiting_files: of_remote("remote_waiting_files"),
        })
    });
    tiers.collect()
}

fn flow(
    change: Option<Change<'_>>, now: &Sample, name: String, counter: &str, bytes: &str,
    labels: &[(&str, &str)],
) -> Option<Flow> {
    Some(Flow {
        name,
        total: whole(now.metrics.sum(counter, labels)?),
        per_second: change.and_then(|change| change.per_second(counter, labels)),
        bytes_per_second: change.and_then(|change| change.per_second(bytes, labels)),
    })
}

/// What is opened and sealed, and what moves between tiers.
fn flows(change: Option<Change<'_>>, now: &Sample) -> Vec<Flow> {
    let mut flows = Vec::new();
    for (name, counter, bytes) in [
        ("opened", "kvfs_opens_total", "kvfs_opened_bytes_total"),
        ("sealed", "kvfs_sealed_total", "kvfs_sealed_bytes_total"),
        ("requests", "kvfs_fuse_requests_total", ""),
    ] {
        flows.extend(flow(change, now, name.to_owned(), counter, bytes, &[]));
    }
    for series in now.metrics.all("kvfs_moves_total") {
        let (from, to) = (series.label("from"), series.label("to"));
        let name = format!("{} to {}", tier_name(from), tier_name(to));
        let labels = [("from", from), ("to", to)];
        let bytes = "kvfs_move_bytes_total";
        flows.extend(flow(change, now, name, "kvfs_moves_total", bytes, &labels));
    }
    for tier in ["ram", "ssd"] {
        let left = flow(
            change,
            now,
            format!("left {}", tier_name(tier)),
            "kvfs_evictions_total",
            "",
            &[("tier", tier)],
        );
        flows.extend(left.filter(|flow| flow.total > 0));
    }
    let removed = ("kvfs_retention_removed_files_total", "kvfs_retention_removed_bytes_total");
    let removed = flow(change, now, "deleted (limits)".to_owned(), removed.0, removed.1, &[]);
    flows.extend(removed.filter(|flow| flow.total > 0));
    flows
}

/// Of what was tried, the share that was a hit, from counters; `None` where nothing was tried.
fn share(kind: &str, count: impl Fn(&str, &[(&str, &str)]) -> Option<f64>) -> Option<f64> {
    let (hits, all) = match kind {
        PROMPTS => (
            count("kvfs_match_answered_tokens_total", &[]).unwrap_or(0.0),
            count("kvfs_match_asked_tokens_total", &[])?,
        ),
        PREFIXES => (
            count("kvfs_prefix_answered_tokens_total", &[]).unwrap_or(0.0),
            count("kvfs_prefix_asked_tokens_total", &[])?,
        ),
        NAMES => (count(kind, &[("answer", "here")]).unwrap_or(0.0), count(kind, &[])?),
        IN_MEMORY => (count(kind, &[("tier", "ram")])?, count(kind, &[])?),
        counter => {
            let [used, late, unused] = ["used", "late", "unused"]
                .map(|outcome| count(counter, &[("outcome", outcome)]).unwrap_or(0.0));
            (used + late, used + late + unused)
        }
    };
    (all > 0.0).then(|| hits / all)
}

fn hits(change: Option<Change<'_>>, now: &Sample) -> Vec<Hits> {
    let all = [
        ("prompt tokens found", PROMPTS),
        ("fetched ahead, used", "kvfs_prefetch_pages_total"),
        ("prefixes found", PREFIXES),
        ("names in files/ found", NAMES),
        ("tokens opened in memory", IN_MEMORY),
        ("read ahead, used", "kvfs_readahead_pages_total"),
    ];
    let hits = all.into_iter().filter_map(|(name, kind)| {
        let share_since_mount = share(kind, |name, labels| now.metrics.sum(name, labels))?;
        let meanwhile =
            |change: Change<'_>| share(kind, |name, labels| change.growth(name, labels));
        Some(Hits { name, share: change.and_then(meanwhile), share_since_mount })
    });
    hits.collect()
}

/// Operations that are asked for, or were slow, the busiest first.
fn requests(change: Option<Change<'_>>, now: &Sample) -> Vec<Requests> {
    let mut all = Vec::new();
    for (histogram, prefix) in [(REQUESTS, ""), (REMOTE_REQUESTS, "remote ")] {
        let count = format!("{histogram}_count");
        for series in now.metrics.all(&count) {
            let operation = series.label("op");
            let meanwhile = change.and_then(|change| change.durations(histogram, operation));
            let quantile = |share| meanwhile.as_ref().and_then(|known| known.quantile(share));
            let per_second =
                change.and_then(|change| change.per_second(&count, &[("op", operation)]));
            let slow = Durations::of(&now.metrics, histogram, operation).longer_than(SLOW_SECONDS);
            all.push(Requests {
                operation: format!("{prefix}{operation}"),
                per_second,
                half_seconds: quantile(0.5),
                most_seconds: quantile(0.99),
                slow: whole(slow),
            });
        }
    }
    all.retain(|requests| requests.slow > 0 || requests.per_second.is_none_or(|rate| rate > 0.0));
    let rate = |requests: &Requests| requests.per_second.unwrap_or(0.0);
    all.sort_by(|left, right| {
        rate(right).total_cmp(&rate(left)).then_with(|| right.slow.cmp(&left.slow))
    });
    all
}

fn troubles(now: &Sample) -> Vec<Trouble> {
    let mut troubles = Vec::new();
    let mut add = |name: String, count: u64| {
        if count > 0 {
            troubles.push(Trouble { name, count });
        }
    };
    for series in now.metrics.all("kvfs_move_failures_total") {
        let [from, to] = ["from", "to"].map(|label| tier_name(series.label(label)));
        let name = format!("not moved from {from} to {to}: {}", series.label("error"));
        add(name, whole(series.value));
    }
    for series in now.metrics.all("kvfs_open_failures_total") {
        let (tier, error) = (tier_name(series.label("tier")), series.label("error"));
        add(format!("not opened from {tier}: {error}"), whole(series.value));
    }
    for series in now.metrics.all("kvfs_pages_refused_total") {
        add(format!("refused: {}", series.label("reason")), whole(series.value));
    }
    for series in now.metrics.all("kvfs_checksum_errors_total") {
        add(format!("damaged on {}", tier_name(series.label("tier"))), whole(series.value));
    }
    for (name, key) in [
        ("damaged files", "damaged_files"),
        ("in quarantine", "quarantined_objects"),
        ("refused by the remote for good", "remote_given_up_files"),
        ("errors", "errors"),
    ] {
        add(name.to_owned(), now.number(key).unwrap_or(0));
    }
    troubles
}
