//! Values that are read when the metrics are, and how all metrics become text.

use std::path::Path;

use prometheus::proto::{Gauge, LabelPair, Metric, MetricFamily, MetricType};
use prometheus::{Encoder, TextEncoder};

use kvfs_storage::tier::counters::Tier;

/// Values of now, by name. What a mount does not have (a tier, a remote) has no value rather than a zero.
#[derive(Debug, Default)]
pub struct Gauges(Vec<MetricFamily>);

impl Gauges {
    /// Adds a value.
    pub fn add(&mut self, name: &str, help: &str, value: u64) {
        self.push(name, help, Vec::new(), number(value));
    }

    /// Adds a value that need not be whole, nor positive.
    pub fn add_seconds(&mut self, name: &str, help: &str, value: f64) {
        self.push(name, help, Vec::new(), value);
    }

    /// Adds the value of a tier.
    pub fn add_of(&mut self, tier: Tier, name: &str, help: &str, value: u64) {
        self.add_labelled(("tier", tier.name()), name, help, value);
    }

    /// Adds one of several values, told apart by this label.
    pub(super) fn add_labelled(
        &mut self, (key, of): (&str, &str), name: &str, help: &str, value: u64,
    ) {
        self.push(name, help, vec![label(key, of)], number(value));
    }

    fn push(&mut self, name: &str, help: &str, labels: Vec<LabelPair>, value: f64) {
        let mut gauge = Gauge::default();
        gauge.set_value(value);
        let mut metric = Metric::from_gauge(gauge);
        metric.set_label(labels);
        if let Some(family) = self.0.iter_mut().find(|family| family.name() == name) {
            return family.mut_metric().push(metric);
        }
        let mut family = MetricFamily::default();
        family.set_name(name.to_owned());
        family.set_help(help.to_owned());
        family.set_field_type(MetricType::GAUGE);
        family.set_metric(vec![metric]);
        self.0.push(family);
    }
}

#[expect(clippy::cast_precision_loss, reason = "Prometheus has no other numbers")]
fn number(value: u64) -> f64 {
    value as f64
}

/// All metrics in Prometheus' text format, each labelled with the mount: whoever collects those of several
/// tells them apart. The label comes last, so that lines begin alike in every mount.
pub(super) fn text(
    mut families: Vec<MetricFamily>, gauges: Gauges, mountpoint: Option<&Path>,
) -> String {
    families.extend(gauges.0);
    families.sort_by(|left, right| left.name().cmp(right.name()));
    if let Some(mountpoint) = mountpoint {
        let mountpoint = mountpoint.to_string_lossy();
        for metric in families.iter_mut().flat_map(MetricFamily::mut_metric) {
            let mut labels = metric.take_label();
            labels.push(label("mount", &mountpoint));
            metric.set_label(labels);
        }
    }
    let mut text = Vec::new();
    if let Err(error) = TextEncoder::new().encode(&families, &mut text) {
        log::error!("metrics: {error}");
    }
    String::from_utf8_lossy(&text).into_owned()
}

fn label(name: &str, value: &str) -> LabelPair {
    let mut label = LabelPair::default();
    label.set_name(name.to_owned());
    label.set_value(value.to_owned());
    label
}
