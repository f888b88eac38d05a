//! Metrics of a mount: what was counted since it began, and the values of now.
//!
//! Whoever asks pays: values are read when the metrics are, under locks that requests take too, each held
//! for a few fields. Nothing here goes through names or inodes.

use kvfs_observe::Gauges;
use kvfs_storage::store::quarantine;
use kvfs_storage::tier::counters::Tier;
use kvfs_storage::tier::exchange::Exchange;
use kvfs_storage::tier::remote::State as RemoteHealth;
use kvfs_storage::tier::ssd::SsdTier;

use super::FileSystem;
use super::health::health;
use super::hits::saved_seconds;
use super::residency::ssd_used_bytes;
use super::scrub::add_scrub;
use super::tiers::{Tiers, lacking_in_remote};

/// Names that more than one tier has, with their help.
const USED: (&str, &str) =
    ("kvfs_tier_used_bytes", "Bytes of objects in the tier, as stored there");
const OBJECTS: (&str, &str) = ("kvfs_tier_objects", "Objects that the tier has a copy of");
const CAPACITY: (&str, &str) =
    ("kvfs_tier_capacity_bytes", "Budget of the tier; the size of the disk where it has none");
const FREE: (&str, &str) =
    ("kvfs_tier_free_bytes", "Bytes that can be written to the tier before something has to leave");

/// All of them in Prometheus' text format.
pub fn exposition(fs: &FileSystem) -> String {
    let mut gauges = Gauges::default();
    add_mount(fs, &mut gauges);
    if let Some(seconds) = saved_seconds(&fs.core) {
        let help =
            "Seconds of computing that opened pages have saved, less the time of their opens";
        gauges.add_seconds("kvfs_saved_seconds", help, seconds);
    }
    add_memory(fs, &mut gauges);
    add_disk(fs, &mut gauges);
    add_scrub(fs, &mut gauges);
    if let Some(tiers) = &fs.tiers {
        add_remote(fs, tiers, &mut gauges);
    }
    fs.core.observer.metrics(gauges)
}

fn add_mount(fs: &FileSystem, gauges: &mut Gauges) {
    let health = health(fs);
    let (totals, handles) = {
        let state = fs.core.state();
        (super::held_back::totals(&state), state.handles.len())
    };
    let quarantined = quarantine::count(&fs.core.store).unwrap_or(0);
    gauges.add("kvfs_degraded", "The state in .kvfs/status is not ok", u64::from(!health.is_ok()));
    gauges.add(
        "kvfs_damaged_files",
        "Files of which the last look found no good copy",
        health.damaged_files as u64,
    );
    gauges.add("kvfs_quarantined_objects", "Objects in quarantine", quarantined as u64);
    gauges.add("kvfs_objects", "Objects of the store, wherever their bytes are", totals.objects);
    gauges.add("kvfs_pages", "Sealed pages of the store, wherever their bytes are", totals.pages);
    gauges.add("kvfs_bytes", "Bytes of the store's objects, before any encoding", totals.bytes);
    gauges.add("kvfs_open_files", "Files that clients have open", handles as u64);
    let uptime = fs.core.observer.uptime().as_secs();
    gauges.add("kvfs_uptime_seconds", "Time since the mount began", uptime);
}

fn add_memory(fs: &FileSystem, gauges: &mut Gauges) {
    let Some(ram) = &fs.core.store.ram else { return };
    let (budget, usage) = (ram.budget_bytes(), ram.usage());
    let mut add = |(name, help), value| gauges.add_of(Tier::Ram, name, help, value);
    add(USED, usage.used_bytes);
    add(OBJECTS, usage.objects);
    add(CAPACITY, budget);
    add(FREE, budget.saturating_sub(usage.used_bytes));
    add(
        ("kvfs_tier_pinned_bytes", "Bytes that were in use when room was last needed"),
        usage.pinned_bytes,
    );
    add(("kvfs_tier_dirty_bytes", "Bytes that only this tier has yet"), usage.dirty_bytes);
}

fn add_disk(fs: &FileSystem, gauges: &mut Gauges) {
    let space = fs.core.store.disk.space().unwrap_or_default();
    let used = ssd_used_bytes(&fs.core, fs.tiers.as_ref());
    let disk = fs.tiers.as_ref().map(|tiers| tiers.copies.disk());
    let budget = disk.and_then(SsdTier::budget_bytes);
    let away = disk.map_or(0, |disk| disk.remote_use().only_objects);
    let objects = fs.core.state().metadata.totals.objects;
    let below_budget = budget.map_or(u64::MAX, |budget| budget.saturating_sub(used));
    gauges.add_of(Tier::Ssd, USED.0, USED.1, used);
    gauges.add_of(Tier::Ssd, OBJECTS.0, OBJECTS.1, objects.saturating_sub(away));
    gauges.add_of(Tier::Ssd, CAPACITY.0, CAPACITY.1, budget.unwrap_or(space.total_bytes));
    gauges.add_of(Tier::Ssd, FREE.0, FREE.1, below_budget.min(space.available_bytes));
    gauges.add("kvfs_disk_size_bytes", "Size of the filesystem of the store", space.total_bytes);
    gauges.add(
        "kvfs_disk_free_bytes",
        "Free on the filesystem of the store",
        space.available_bytes,
    );
}

fn add_remote(fs: &FileSystem, tiers: &Tiers, gauges: &mut Gauges) {
    let encoded = tiers.copies.encoded().usage();
    gauges.add("kvfs_encoded_objects", "Objects that the disk has encoded", encoded.objects);
    gauges.add("kvfs_encoded_bytes", "Bytes of those on the disk", encoded.stored_bytes);
    if let Some(day_bytes) = tiers.writes.day_bytes() {
        let (files, bytes) = super::held_back::held(fs);
        let left = tiers.writes.left_bytes();
        let written = tiers.writes.written_bytes();
        gauges.add(
            "kvfs_ssd_writes_day_bytes",
            "Bytes a day that the disk may be written",
            day_bytes,
        );
        gauges.add("kvfs_ssd_writes_left_bytes", "Bytes of those that are left now", left);
        gauges.add("kvfs_ssd_written_bytes", "Bytes written to the disk since the mount", written);
        gauges.add(
            "kvfs_ssd_spared_files",
            "Pages that wait for the remote in memory",
            files as u64,
        );
        gauges.add("kvfs_ssd_spared_bytes", "Their bytes", bytes);
    }
    let Some(remote) = tiers.exchange.as_ref().map(Exchange::remote) else { return };
    let usage = tiers.copies.disk().remote_use();
    let lacking = lacking_in_remote(&fs.core, fs.tiers.as_ref());
    let (given_up_files, given_up_bytes) = {
        let state = fs.core.state();
        let given_up = state.metadata.arrivals.given_up();
        (given_up.len() as u64, given_up.bytes())
    };
    let is_up = matches!(remote.state(), RemoteHealth::Up { .. });
    gauges.add_of(Tier::Remote, USED.0, USED.1, usage.stored_bytes);
    gauges.add_of(Tier::Remote, OBJECTS.0, OBJECTS.1, usage.objects);
    let mut add = |name, help, value| gauges.add(name, help, value);
    add("kvfs_remote_up", "The remote answers", u64::from(is_up));
    add("kvfs_remote_only_objects", "Objects that only the remote has", usage.only_objects);
    add(
        "kvfs_remote_waiting_files",
        "Files that the remote does not have yet",
        lacking.files as u64,
    );
    add("kvfs_remote_waiting_bytes", "Their bytes", lacking.bytes);
    add("kvfs_remote_waiting_seconds", "Since when the oldest of them waits", lacking.seconds);
    add("kvfs_remote_given_up_files", "Files that the remote refuses", given_up_files);
    add("kvfs_remote_given_up_bytes", "Their bytes", given_up_bytes);
}
