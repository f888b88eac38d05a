//! What two samples say about the time between them.
//!
//! Counters begin at 0 with each mount: of one that went back, or was not told by another mount, nothing is known.

use super::sample::Sample;
use crate::cli::series::Metrics;

/// The time between two samples of one mount.
#[derive(Clone, Copy, Debug)]
pub(super) struct Change<'a> {
    before: &'a Metrics,
    after: &'a Metrics,
    seconds: f64,
}

/// How long requests took, from a histogram.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Durations {
    /// Bounds in ascending order, and how many took no longer.
    within: Vec<(f64, f64)>,
}

impl<'a> Change<'a> {
    /// `None` where they have nothing to do with each other.
    pub(super) fn between(before: &'a Sample, after: &'a Sample) -> Option<Change<'a>> {
        let seconds = after.at.saturating_duration_since(before.at).as_secs_f64();
        let is_known = seconds > 0.0 && !before.is_of_another_mount(after);
        is_known.then_some(Change { before: &before.metrics, after: &after.metrics, seconds })
    }

    pub(super) fn seconds(&self) -> f64 {
        self.seconds
    }

    /// By how much a counter grew. One that was not there yet began at 0.
    pub(super) fn growth(&self, name: &str, labels: &[(&str, &str)]) -> Option<f64> {
        let after = self.after.sum(name, labels)?;
        let before = self.before.sum(name, labels).unwrap_or(0.0);
        (after >= before).then_some(after - before)
    }

    /// The same in a second.
    pub(super) fn per_second(&self, name: &str, labels: &[(&str, &str)]) -> Option<f64> {
        self.growth(name, labels).map(|growth| growth / self.seconds)
    }

    /// How long the requests took that were answered meanwhile.
    pub(super) fn durations(&self, name: &str, operation: &str) -> Option<Durations> {
        let before = Durations::of(self.before, name, operation);
        Durations::of(self.after, name, operation).since(&before)
    }
}

impl Durations {
    /// Of all requests of an operation, from the name of the histogram.
    pub(super) fn of(metrics: &Metrics, name: &str, operation: &str) -> Durations {
        let buckets = metrics.all(&format!("{name}_bucket")).iter();
        let buckets = buckets.filter(|bucket| bucket.label("op") == operation);
        let within = buckets.filter_map(|bucket| {
            let bound = match bucket.label("le") {
                "+Inf" => f64::INFINITY,
                bound => bound.parse().ok()?,
            };
            Some((bound, bucket.value))
        });
        let mut within: Vec<(f64, f64)> = within.collect();
        within.sort_by(|left, right| left.0.total_cmp(&right.0));
        Durations { within }
    }

    fn since(mut self, before: &Durations) -> Option<Durations> {
        for (bound, count) in &mut self.within {
            let known = before.within.iter().find(|(found, _)| found.total_cmp(bound).is_eq());
            *count -= known.map_or(0.0, |(_, count)| *count);
            if *count < 0.0 {
                return None;
            }
        }
        Some(self)
    }

    fn count(&self) -> f64 {
        self.within.last().map_or(0.0, |(_, count)| *count)
    }

    /// The shortest bound that this share of the requests kept, infinite if none did; `None` without a request.
    pub(super) fn quantile(&self, share: f64) -> Option<f64> {
        let wanted = self.count() * share;
        let mut kept = self.within.iter().filter(|(_, count)| *count >= wanted);
        (self.count() > 0.0).then(|| kept.next().map_or(f64::INFINITY, |(bound, _)| *bound))
    }

    /// How many took longer than the bound that is nearest above so many seconds.
    pub(super) fn longer_than(&self, seconds: f64) -> f64 {
        let bound = self.within.iter().find(|(bound, _)| *bound >= seconds);
        bound.map_or(0.0, |(_, count)| self.count() - count)
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::super::sampler::Told;
    use super::*;

    fn sample(at: Instant, uptime: u64, metrics: &str) -> Sample {
        let status = format!("pid: 7\nuptime_seconds: {uptime}\n");
        Sample::of(Told { status, metrics: metrics.to_owned(), ..Told::default() }, at)
    }

    #[test]
    fn counters_become_rates() {
        let begin = Instant::now();
        let before = sample(begin, 5, "a{x=\"1\"} 10\nb 7\n");
        let after =
            sample(begin + Duration::from_secs(2), 7, "a{x=\"1\"} 30\na{x=\"2\"} 4\nb 6\nc 8\n");
        let change = Change::between(&before, &after).unwrap();
        assert_eq!(change.per_second("a", &[]), Some(12.0));
        assert_eq!(change.per_second("a", &[("x", "1")]), Some(10.0));
        assert_eq!(change.per_second("b", &[]), None, "it went back");
        assert_eq!(change.per_second("c", &[]), Some(4.0), "it is new");
        assert_eq!(change.per_second("d", &[]), None, "nobody tells it");
    }

    #[test]
    fn two_mounts_have_no_rate() {
        let begin = Instant::now();
        let later = begin + Duration::from_secs(1);
        let [old, new] = [sample(begin, 900, "a 5\n"), sample(later, 1, "a 9\n")];
        assert!(Change::between(&old, &new).is_none());
        let other = Told { status: "pid: 8\nuptime_seconds: 901\n".to_owned(), ..Told::default() };
        assert!(Change::between(&old, &Sample::of(other, later)).is_none());
        assert!(Change::between(&old, &old).is_none(), "no time has passed");
    }

    #[test]
    fn durations_of_what_was_answered_meanwhile() {
        let begin = Instant::now();
        let text = |counts: [u32; 3]| {
            let bounds = ["0.001", "0.1", "+Inf"].into_iter().zip(counts);
            bounds
                .map(|(le, n)| format!("d_bucket{{op=\"read\",le=\"{le}\"}} {n}\n"))
                .collect::<Vec<String>>()
                .concat()
        };
        let samples = |before: [u32; 3], after: [u32; 3]| {
            let [before, after]: [String; 2] = [text(before), text(after)];
            [sample(begin, 1, &before), sample(begin + Duration::from_secs(1), 2, &after)]
        };
        let [before, after] = samples([100, 100, 100], [150, 198, 200]);
        let durations = Change::between(&before, &after).unwrap().durations("d", "read").unwrap();
        assert_eq!(durations.quantile(0.5), Some(0.001));
        assert_eq!(durations.quantile(0.98), Some(0.1));
        assert_eq!(durations.quantile(0.99), Some(f64::INFINITY));
        assert!((durations.longer_than(0.05) - 2.0).abs() < 1e-9);
        let [before, after] = samples([5, 5, 5], [5, 5, 5]);
        let change = Change::between(&before, &after).unwrap();
        assert_eq!(change.durations("d", "read").unwrap().quantile(0.5), None);
        assert_eq!(change.durations("d", "write").unwrap().quantile(0.5), None);
        let [before, after] = samples([5, 5, 5], [1, 1, 1]);
        assert_eq!(Change::between(&before, &after).unwrap().durations("d", "read"), None);
    }
}
