//! A mount as whoever reaches its address may know it: what its metrics tell, which have no names.
//!
//! The status is for its owner, since it names the store, the remote, limited directories and what an error said. Of it stay
//! words that are one of a few, and what the metrics tell takes the place of the rest.

use std::fmt::Write;

use crate::cli::series::Metrics;
use crate::cli::top::Sample;

/// Lines of the status that name nothing but the mountpoint, as the metrics do.
const KEPT: [&str; 4] = ["version", "mountpoint", "state", "uptime_seconds"];

/// The same sample without names.
pub(super) fn of(sample: &Sample) -> Sample {
    let mut status = String::new();
    let mut add = |key: &str, value: &str| {
        // Writing to a String cannot fail.
        let _ = writeln!(status, "{key}: {value}");
    };
    for key in KEPT {
        if let Some(value) = sample.status(key) {
            add(key, value);
        }
    }
    let metrics = &sample.metrics;
    let number = |name: &str| metrics.number(name, &[]);
    if sample.status("state") != Some("ok") {
        add("state_reason", &reasons(metrics).join("; "));
    }
    if let Some(up) = number("kvfs_remote_up") {
        add("remote_state", if up > 0 { "up" } else { "down" });
    }
    for (key, name) in [
        ("remote_waiting_files", "kvfs_remote_waiting_files"),
        ("damaged_files", "kvfs_damaged_files"),
        ("quarantined_objects", "kvfs_quarantined_objects"),
        ("remote_given_up_files", "kvfs_remote_given_up_files"),
    ] {
        if let Some(count) = number(name) {
            add(key, &count.to_string());
        }
    }
    sample.with_status(status)
}

/// Why a mount is not ok, as far as numbers tell.
fn reasons(metrics: &Metrics) -> Vec<String> {
    let number = |name: &str| metrics.number(name, &[]);
    let mut reasons = Vec::new();
    let damaged = number("kvfs_damaged_files").unwrap_or(0);
    if damaged > 0 {
        reasons.push(format!("damaged files: {damaged}"));
    }
    if number("kvfs_remote_up") == Some(0) {
        reasons.push("the remote does not answer".to_owned());
    }
    if number("kvfs_disk_free_bytes") == Some(0) {
        reasons.push("the disk is full".to_owned());
    }
    if reasons.is_empty() {
        reasons.push("its owner is told why: kvfs status".to_owned());
    }
    reasons
}
