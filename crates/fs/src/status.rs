//! `.kvfs/status`: what is true of the mount now, one `key: value` line each.

use std::fmt::Write as _;
use std::sync::atomic::Ordering;

use super::health::{Refusal, health};
use super::hits::saved_seconds;
use super::remote_memory::RemoteMemory;
use super::residency::ssd_used_bytes;
use super::tiers::lacking_in_remote;
use super::{FileSystem, IoMode, Transport, held_back, hits};
use crate::core::Core;
use crate::core::state::State;
use kvfs_storage::store::Store;
use kvfs_storage::store::packs::Packed;
use kvfs_storage::store::quarantine;
use kvfs_storage::tier::counters::Tier;
use kvfs_storage::tier::exchange::Exchange;
use kvfs_storage::tier::remote::{BlobStore, Remote, State as RemoteHealth};

/// One `key: value` line each.
pub(super) fn status(fs: &FileSystem) -> String {
    let (totals, held, handles, uncommitted) = {
        let state = fs.core.state();
        let uncommitted = uncommitted(&state);
        let totals = held_back::totals(&state);
        (totals, state.nodes.len(), state.handles.len(), uncommitted)
    };
    let held = held + fs.prefixes.numbers().held();
    let passthrough = match fs.core.io_mode.get() {
        Some(IoMode::Passthrough) => "yes".to_owned(),
        Some(IoMode::Served(reason)) => format!("no: {reason}"),
        None => "not tried yet".to_owned(),
    };
    let io_uring = match fs.transport.get() {
        Some(Transport::Rings(_)) => "yes".to_owned(),
        Some(Transport::Device(reason)) => format!("no: {reason}"),
        None => "not tried yet".to_owned(),
    };
    let free = fs.core.store.disk.space().map_or(0, |space| space.available_bytes);
    let health = health(fs);
    let mut text = String::new();
    let mut line = |key: &str, value: &dyn std::fmt::Display| {
        add_line(&mut text, key, value);
    };
    line("version", &env!("CARGO_PKG_VERSION"));
    line("pid", &std::process::id());
    line("store", &fs.core.store.path().display());
    line("mountpoint", &fs.core.observer.mountpoint().display());
    line("state", &health.word());
    if !health.reasons.is_empty() {
        line("state_reason", &health.reasons.join("; "));
    }
    line("damaged_files", &health.damaged_files);
    if let Some(address) = fs.core.observer.metrics_address() {
        line("metrics_address", &address);
    }
    line("passthrough", &passthrough);
    line("io_uring", &io_uring);
    line("uptime_seconds", &fs.core.observer.uptime().as_secs());
    line("objects", &totals.objects);
    line("pages", &totals.pages);
    line("stored_bytes", &totals.bytes);
    line("free_bytes", &free);
    if let Some(ram) = &fs.core.store.ram {
        let usage = ram.usage();
        line("ram_tier", ram.place());
        line("ram_budget_bytes", &ram.budget_bytes());
        line("ram_used_bytes", &usage.used_bytes);
        line("ram_dirty_bytes", &usage.dirty_bytes);
        line("ram_pinned_bytes", &usage.pinned_bytes);
        line("ram_objects", &usage.objects);
    }
    pack_status(&fs.core.store, &mut text);
    use_status(&fs.core, &mut text);
    hits::add_lines(&fs.core, &mut text);
    tier_status(fs, &mut text);
    fs.retention.status(&fs.core, &mut text);
    fs.scrubs.tell(&fs.core, &mut text);
    fs.core.before.tell(&mut text);
    let mut line = |key: &str, value: &dyn std::fmt::Display| {
        add_line(&mut text, key, value);
    };
    line("registered_blocks", &fs.blocks.count());
    line("inodes_held", &held);
    line("open_files", &handles);
    line("uncommitted_changes", &uncommitted);
    line("last_event", &fs.core.store.events.last_number());
    line("quarantined_objects", &quarantine::count(&fs.core.store).unwrap_or(0));
    line("errors", &fs.core.observer.error_count());
    text
}

/// Changes that a crash would lose.
fn uncommitted(state: &State) -> usize {
    if state.refusal == Some(Refusal::ReadOnlyMedia) {
        // Only what recovery found out, which is true again at the next mount.
        return 0;
    }
    state.metadata.not_durable() + state.unsettled.len() + state.metadata.held_back.len()
}

/// What was found since the mount began, in tokens.
fn use_status(core: &Core, text: &mut String) {
    let observer = &core.observer;
    let (asked, answered) = observer.matched_tokens();
    add_line(text, "asked_tokens", &asked);
    add_line(text, "answered_tokens", &answered);
    for tier in [Tier::Ram, Tier::Ssd, Tier::Remote] {
        add_line(text, &format!("opened_tokens_{tier}"), &observer.opened_tokens(tier));
    }
    add_line(text, "restored_tokens", &observer.restored_tokens());
    if let Some(saved) = saved_seconds(core) {
        add_line(text, "saved_seconds", &format!("{saved:.1}"));
    }
}

fn pack_status(store: &Store, text: &mut String) {
    let Packed { packs, objects, bytes, live_bytes } = store.packs.packed();
    add_line(text, "packed_files", &objects);
    add_line(text, "pack_files", &packs);
    add_line(text, "pack_bytes", &bytes);
    add_line(text, "pack_live_bytes", &live_bytes);
    add_line(text, "small_files_in_memory_bytes", &store.buffer.used_bytes());
}

/// A line of a status: whatever its value contains, such as the path of a store, it stays one line.
pub(crate) fn add_line(text: &mut String, key: &str, value: &dyn std::fmt::Display) {
    let value = kvfs_page::printable(value.to_string().chars());
    // Writing to a String cannot fail.
    let _ = writeln!(text, "{key}: {value}");
}

/// Lines of `.kvfs/status` about the tiers below.
fn tier_status(fs: &FileSystem, text: &mut String) {
    let Some(tiers) = &fs.tiers else {
        return;
    };
    let waiting = lacking_in_remote(&fs.core, Some(tiers));
    let names_changed = fs.core.state().metadata.names_changed;
    let encoded = tiers.copies.encoded().usage();
    let usage = tiers.copies.disk().remote_use();
    let mut line = |key: &str, value: &dyn std::fmt::Display| {
        add_line(text, key, value);
    };
    if let Some(budget) = tiers.copies.disk().budget_bytes() {
        line("ssd_budget_bytes", &budget);
    }
    line("ssd_used_bytes", &ssd_used_bytes(&fs.core, Some(tiers)));
    if let Some(day_bytes) = tiers.writes.day_bytes() {
        let (files, bytes) = held_back::held(fs);
        line("ssd_writes_day_bytes", &day_bytes);
        line("ssd_writes_left_bytes", &tiers.writes.left_bytes());
        line("ssd_written_bytes", &tiers.writes.written_bytes());
        line("ssd_spared_files", &files);
        line("ssd_spared_bytes", &bytes);
    }
    line("ssd_encoded_objects", &encoded.objects);
    line("ssd_encoded_bytes", &encoded.stored_bytes);
    line("ssd_only_encoded_objects", &encoded.only_objects);
    line("ssd_only_encoded_bytes", &encoded.only_bytes);
    line("lossy_demotions", &tiers.counters.rounded_pages());
    // 0 as long as hardly anything was decoded.
    line("decoding_bytes_per_second", &tiers.decoding.bytes_per_second().unwrap_or(0));
    let Some(remote) = tiers.exchange.as_ref().map(Exchange::remote) else {
        return RemoteMemory::of(&fs.core).tell_offline(text);
    };
    line("remote", &BlobStore::place(remote.as_ref()));
    line("remote_sealed", &if remote.is_sealed() { "yes" } else { "no" });
    tell_health(remote, &mut line);
    tiers.look_asked.store(true, Ordering::Release);
    line("remote_looks", &tiers.looks.load(Ordering::Acquire));
    line("remote_objects", &usage.objects);
    line("remote_stored_bytes", &usage.stored_bytes);
    line("remote_only_objects", &usage.only_objects);
    line("remote_only_bytes", &usage.only_bytes);
    line("remote_waiting_files", &waiting.files);
    line("remote_waiting_bytes", &waiting.bytes);
    line("remote_waiting_seconds", &waiting.seconds);
    {
        let state = fs.core.state();
        let given_up = state.metadata.arrivals.given_up();
        line("remote_given_up_files", &given_up.len());
        line("remote_given_up_bytes", &given_up.bytes());
        if let Some(why) = given_up.why() {
            line("remote_given_up_reason", &why);
        }
    }
    line("remote_asked_files", &tiers.wishes.count());
    let names_published = tiers.names_published.load(Ordering::Acquire);
    let is_published = names_published == names_changed;
    line("remote_names", &if is_published { "published" } else { "changed" });
    line("remote_names_changes", &names_changed);
    line("remote_names_published", &names_published);
    let (prefixes, stores) = fs.foreign.count();
    line("remote_stores", &stores);
    line("remote_prefixes", &prefixes);
    // 0 as long as hardly anything was fetched.
    let rate = tiers.fetching.bytes_per_second();
    line("remote_bytes_per_second", &rate.unwrap_or(0));
}

/// Whether the remote answers, and gives bytes at a rate.
fn tell_health(remote: &Remote, line: &mut dyn FnMut(&str, &dyn std::fmt::Display)) {
    match remote.state() {
        RemoteHealth::Connecting => line("remote_state", &"connecting"),
        RemoteHealth::Up { .. } => line("remote_state", &"up"),
        RemoteHealth::Down { error, .. } => line("remote_state", &format!("down: {error}")),
    }
    if let Some(slow) = remote.slow() {
        line("remote_slow", &slow);
    }
}
