//! How a mount did in the last hour: a point each ten seconds, so 360, of some numbers each.

use std::collections::VecDeque;

use serde::Serialize;

use crate::cli::top::Sample;

const INTERVAL_SECONDS: u64 = 10;
const POINTS_MAX: usize = 360;

/// Points, the oldest first.
#[derive(Debug, Default, Serialize)]
#[serde(transparent)]
pub(super) struct Past(VecDeque<Point>);

/// One; short names, since there are many.
#[derive(Debug, Serialize)]
struct Point {
    /// Seconds since 1970.
    at: u64,
    /// Bytes that tiers use, of what they may use; absent where there is no such tier.
    memory: Option<[u64; 2]>,
    disk: Option<[u64; 2]>,
    remote: Option<[u64; 2]>,
    /// Files that were opened since the mount began.
    opened: u64,
}

impl Past {
    /// Keeps what a sample tells, if the last one is old enough.
    pub(super) fn note(&mut self, sample: &Sample, now_seconds: u64) {
        // A clock that goes back is believed, too.
        let is_due = |last: &Point| now_seconds.abs_diff(last.at) >= INTERVAL_SECONDS;
        if !self.0.back().is_none_or(is_due) {
            return;
        }
        if self.0.len() == POINTS_MAX {
            self.0.pop_front();
        }
        let tier = |tier: &str| {
            let number = |name: &str| sample.metrics.number(name, &[("tier", tier)]);
            let used = number("kvfs_tier_used_bytes")?;
            Some([used, number("kvfs_tier_capacity_bytes").unwrap_or(0)])
        };
        self.0.push_back(Point {
            at: now_seconds,
            memory: tier("ram"),
            disk: tier("ssd"),
            remote: tier("remote"),
            opened: sample.metrics.number("kvfs_opens_total", &[]).unwrap_or(0),
        });
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;
    use crate::cli::top::Told;

    #[test]
    fn an_hour_is_kept() {
        let metrics = "kvfs_tier_used_bytes{tier=\"ram\"} 5\nkvfs_tier_capacity_bytes{tier=\"ram\"} 9\n\
            kvfs_tier_used_bytes{tier=\"remote\"} 7\nkvfs_opens_total 3\n";
        let told = Told { metrics: metrics.to_owned(), ..Told::default() };
        let sample = Sample::of(told, Instant::now());
        let mut past = Past::default();
        for second in 1..5000 {
            past.note(&sample, second);
        }
        assert_eq!(past.0.len(), POINTS_MAX);
        let times = (past.0[0].at, past.0[1].at, past.0[POINTS_MAX - 1].at);
        assert_eq!(times, (1401, 1411, 4991));
        let point = &past.0[0];
        assert_eq!((point.memory, point.disk, point.remote), (Some([5, 9]), None, Some([7, 0])));
        // The clock was set back.
        past.note(&sample, 100);
        assert_eq!(past.0.back().map(|point| point.at), Some(100));
    }
}
