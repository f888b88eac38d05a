//! What a mount said at one time, taken apart.

use std::time::Instant;

use super::sampler::Told;
use crate::cli::history::Event;
use crate::cli::probe::status_value;
use crate::cli::series::Metrics;

/// A sample.
#[derive(Clone, Debug)]
pub(in crate::cli) struct Sample {
    pub(super) at: Instant,
    status: String,
    pub(in crate::cli) metrics: Metrics,
    pub(in crate::cli) events: Vec<Event>,
    /// Of the last opens, how many went to which sequence or model.
    pub(super) hottest: Vec<(u64, String)>,
}

impl Sample {
    /// Lines that nobody understands, as of a later version, are left out.
    pub(in crate::cli) fn of(told: Told, at: Instant) -> Sample {
        let events = told.events.lines().filter_map(|line| serde_json::from_str(line).ok());
        let hottest = told.hottest.lines().filter_map(|line| line.split_once(' '));
        let hottest = hottest.filter_map(|(opens, path)| Some((opens.parse().ok()?, path.into())));
        Sample {
            at,
            metrics: Metrics::parse(&told.metrics),
            events: events.collect(),
            hottest: hottest.collect(),
            status: told.status,
        }
    }

    /// A line of the status.
    pub(in crate::cli) fn status(&self, key: &str) -> Option<&str> {
        status_value(&self.status, key)
    }

    /// All lines of the status.
    pub(in crate::cli) fn status_text(&self) -> &str {
        &self.status
    }

    /// The same metrics with another status, and nothing that has names.
    pub(in crate::cli) fn with_status(&self, status: String) -> Sample {
        let metrics = self.metrics.clone();
        Sample { at: self.at, status, metrics, events: Vec::new(), hottest: Vec::new() }
    }

    /// The same as a number.
    pub(in crate::cli) fn number(&self, key: &str) -> Option<u64> {
        self.status(key)?.parse().ok()
    }

    /// Whether another daemon, or the same one after another mount, has answered since.
    pub(super) fn is_of_another_mount(&self, later: &Sample) -> bool {
        let uptime = |sample: &Sample| sample.number("uptime_seconds").unwrap_or(0);
        self.status("pid") != later.status("pid") || uptime(later) < uptime(self)
    }
}
