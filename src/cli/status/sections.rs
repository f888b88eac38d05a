//! What a mount says about itself, for people: sections with headings and units.
//!
//! The daemon's lines are for programs and stay as they are. A line that nobody here knows is shown as it
//! came, so a newer daemon hides nothing.

use std::fmt::Write;

use super::{DIRECTORY, MODEL, QUOTA, split, uses};
use crate::cli::duration::age;
use crate::cli::output::{bytes, grouped};
use crate::cli::style::{Paint, Style};
use crate::cli::sync;
use crate::page::printable;

/// Labels are that wide, so that values stand below each other.
const LABEL_CHARS: usize = 22;

/// What a value is.
#[derive(Clone, Copy)]
enum Kind {
    Text,
    Count,
    Bytes,
    Seconds,
    Rate,
    /// Of so many bytes, which another line has.
    BytesOf(&'static str),
}

/// A line of a section: the daemon's key, what people call it, what it is.
type Row = (&'static str, &'static str, Kind);

/// In the order in which they are shown. A section of which no line is there is not.
const SECTIONS: [(&str, &[Row]); 8] = [
    (
        "Mount",
        &[
            ("store", "store", Kind::Text),
            ("version", "version", Kind::Text),
            ("pid", "process", Kind::Text),
            ("uptime_seconds", "up for", Kind::Seconds),
            ("passthrough", "passthrough", Kind::Text),
            ("io_uring", "io_uring", Kind::Text),
            ("kept_mounted", "kept mounted", Kind::Text),
            ("daemon_deaths", "daemons died", Kind::Count),
            ("metrics_address", "metrics at", Kind::Text),
            ("open_files", "open files", Kind::Count),
            ("inodes_held", "inodes in use", Kind::Count),
            ("registered_blocks", "registered blocks", Kind::Count),
        ],
    ),
    (
        "Content",
        &[
            ("pages", "pages", Kind::Count),
            ("objects", "objects", Kind::Count),
            ("stored_bytes", "size", Kind::Bytes),
            ("uncommitted_changes", "changes not on disk", Kind::Count),
            ("damaged_files", "damaged files", Kind::Count),
            ("quarantined_objects", "in quarantine", Kind::Count),
            ("errors", "errors since mount", Kind::Count),
        ],
    ),
    (
        "Use",
        &[
            ("asked_tokens", "tokens of prompts", Kind::Count),
            ("answered_tokens", "of them, found", Kind::Count),
            ("opened_tokens_ram", "opened in memory", Kind::Count),
            ("opened_tokens_ssd", "opened on disk", Kind::Count),
            ("opened_tokens_remote", "opened, remote", Kind::Count),
            ("restored_tokens", "tokens restored", Kind::Count),
            ("saved_seconds", "computing saved, s", Kind::Text),
        ],
    ),
    (
        "Memory",
        &[
            ("ram_used_bytes", "used", Kind::BytesOf("ram_budget_bytes")),
            ("ram_objects", "objects", Kind::Count),
            ("ram_dirty_bytes", "not on disk yet", Kind::Bytes),
            ("ram_pinned_bytes", "in use or pinned", Kind::Bytes),
            ("ram_tier", "kept in", Kind::Text),
        ],
    ),
    (
        "Disk",
        &[
            ("ssd_used_bytes", "used", Kind::BytesOf("ssd_budget_bytes")),
            ("free_bytes", "free", Kind::Bytes),
            ("ssd_writes_left_bytes", "may be written now", Kind::BytesOf("ssd_writes_day_bytes")),
            ("ssd_written_bytes", "written", Kind::Bytes),
            ("ssd_spared_files", "pages spared", Kind::Count),
            ("ssd_spared_bytes", "pages spared, size", Kind::Bytes),
            ("ssd_encoded_objects", "compressed objects", Kind::Count),
            ("ssd_encoded_bytes", "compressed size", Kind::Bytes),
            ("ssd_only_encoded_objects", "only compressed", Kind::Count),
            ("ssd_only_encoded_bytes", "only compressed size", Kind::Bytes),
            ("packed_files", "small files in packs", Kind::Count),
            ("pack_files", "packs", Kind::Count),
            ("pack_bytes", "packs, size", Kind::Bytes),
            ("pack_live_bytes", "packs, in use", Kind::Bytes),
            ("small_files_in_memory_bytes", "small files, memory", Kind::Bytes),
            ("lossy_demotions", "rounded pages", Kind::Count),
            ("decoding_bytes_per_second", "decompresses", Kind::Rate),
        ],
    ),
    (
        "Remote",
        &[
            ("remote", "place", Kind::Text),
            ("remote_missing", "place", Kind::Text),
            ("remote_state", "state", Kind::Text),
            ("remote_slow", "slow", Kind::Text),
            ("remote_sealed", "sealed", Kind::Text),
            ("remote_names", "names", Kind::Text),
            ("remote_objects", "objects", Kind::Count),
            ("remote_stored_bytes", "size", Kind::Bytes),
            ("remote_only_objects", "only there", Kind::Count),
            ("remote_only_bytes", "only there, size", Kind::Bytes),
            ("remote_only_stored_bytes", "only there, stored", Kind::Bytes),
            ("remote_asked_files", "asked to leave", Kind::Count),
            ("remote_bytes_per_second", "fetches", Kind::Rate),
            ("remote_stores", "other stores", Kind::Count),
            ("remote_prefixes", "their prefixes", Kind::Count),
        ],
    ),
    (
        "Limits",
        &[
            ("retention_directories", "limited directories", Kind::Count),
            ("retention_removed_files", "deleted files", Kind::Count),
            ("retention_removed_bytes", "deleted size", Kind::Bytes),
            ("retention_clock", "clock", Kind::Text),
        ],
    ),
    (
        "Scrub",
        &[
            ("scrub", "state", Kind::Text),
            ("scrub_seconds", "took", Kind::Seconds),
            ("scrub_files", "files", Kind::Count),
            ("scrub_files_done", "looked at", Kind::Count),
            ("scrub_files_skipped", "skipped", Kind::Count),
            ("scrub_bytes_read", "read", Kind::Bytes),
            ("scrub_damaged_files", "damaged", Kind::Count),
            ("scrub_repaired_files", "repaired", Kind::Count),
            ("last_scrub", "last scrub", Kind::Text),
        ],
    ),
];

/// Lines that are shown elsewhere, in other words, or that only commands look at.
const ELSEWHERE: [&str; 16] = [
    "last_event",
    "mountpoint",
    "state",
    "state_reason",
    "ram_budget_bytes",
    "ssd_budget_bytes",
    "ssd_writes_day_bytes",
    "remote_waiting_files",
    "remote_waiting_bytes",
    "remote_waiting_seconds",
    "remote_given_up_files",
    "remote_given_up_bytes",
    "remote_given_up_reason",
    "remote_looks",
    "remote_names_changes",
    "remote_names_published",
];

/// The lines of a status.
struct Lines<'a>(Vec<(&'a str, &'a str)>);

impl<'a> Lines<'a> {
    fn of(status: &'a str) -> Lines<'a> {
        Lines(status.lines().filter_map(split).collect())
    }

    fn value(&self, key: &str) -> Option<&'a str> {
        self.0.iter().find(|(found, _)| *found == key).map(|(_, value)| *value)
    }

    fn number(&self, key: &str) -> Option<u64> {
        self.value(key)?.parse().ok()
    }
}

/// The status of a mount for people.
pub(super) fn describe(status: &str, style: Style) -> String {
    let lines = Lines::of(status);
    let mut text = head(lines.value("mountpoint").unwrap_or("?"), style);
    add_state(&lines, style, &mut text);
    for (heading, rows) in SECTIONS {
        let mut section: Vec<(&str, String)> = rows
            .iter()
            .filter_map(|(key, label, kind)| Some((*label, shown(&lines, key, *kind)?)))
            .collect();
        if heading == "Remote" && lines.value("remote").is_some() {
            section.insert(2.min(section.len()), ("not there yet", waiting(status)));
            section.extend(sync::given_up(status).map(|what| ("refuses for good", what)));
        }
        add_section(heading, &section, style, &mut text);
    }
    let known = |key: &str| {
        ELSEWHERE.contains(&key) || SECTIONS.iter().any(|(_, rows)| rows.iter().any(|r| r.0 == key))
    };
    let of = |prefix: &'static str| {
        lines.0.iter().filter_map(move |(key, value)| Some((key.strip_prefix(prefix)?, *value)))
    };
    let models: Vec<_> = of(MODEL).map(|(path, value)| (path, uses::of_model(value))).collect();
    add_section("Models", &models, style, &mut text);
    let directories = of(DIRECTORY).map(|(path, value)| (path, uses::of_directory(value)));
    add_section("Directories", &directories.collect::<Vec<_>>(), style, &mut text);
    let quotas: Vec<_> = of(QUOTA).map(|(path, value)| (path, value.to_owned())).collect();
    add_section("Limited directories", &quotas, style, &mut text);
    let is_of_path = |key: &str| [QUOTA, MODEL, DIRECTORY].iter().any(|of| key.starts_with(of));
    let others = lines.0.iter().filter(|(key, _)| !known(key) && !is_of_path(key));
    let others: Vec<_> = others.map(|(key, value)| (*key, (*value).to_owned())).collect();
    add_section("Other", &others, style, &mut text);
    text
}

/// The first line of what is said of a mount.
pub(super) fn head(mountpoint: &str, style: Style) -> String {
    format!("{}\n", style.paint(Paint::Heading, &printable(mountpoint.chars())))
}

/// The worst that is known, and each reason on a line of its own.
fn add_state(lines: &Lines<'_>, style: Style, text: &mut String) {
    let state = lines.value("state").unwrap_or("unknown");
    let paint = match state {
        "ok" | "read-only media" => Paint::Good,
        "degraded" => Paint::Warning,
        _ => Paint::Bad,
    };
    // Writing to a String cannot fail.
    let _ = writeln!(text, "state: {}", style.paint(paint, &printable(state.chars())));
    for reason in lines.value("state_reason").into_iter().flat_map(|why| why.split("; ")) {
        let _ = writeln!(text, "  {}", style.paint(paint, &printable(reason.chars())));
    }
}

fn add_section(heading: &str, rows: &[(&str, String)], style: Style, text: &mut String) {
    if rows.is_empty() {
        return;
    }
    let _ = writeln!(text, "{}", style.paint(Paint::Heading, heading));
    for (label, value) in rows {
        let (label, value) = (printable(label.chars()), printable(value.chars()));
        let _ = writeln!(
            text,
            "  {label:<LABEL_CHARS$}{}{value}",
            if label.len() < LABEL_CHARS { "" } else { "  " }
        );
    }
}

/// What the remote does not have, in words.
fn waiting(status: &str) -> String {
    let lines = Lines::of(status);
    match lines.number("remote_waiting_files") {
        None => "unknown".to_owned(),
        Some(0) => "nothing".to_owned(),
        Some(files) => format!(
            "{} in {files} files, the oldest waits for {}",
            bytes(lines.number("remote_waiting_bytes").unwrap_or(0)),
            age(lines.number("remote_waiting_seconds").unwrap_or(0)),
        ),
    }
}

/// A value with its unit; one that is no number is shown as it is.
fn shown(lines: &Lines<'_>, key: &str, kind: Kind) -> Option<String> {
    let value = lines.value(key)?;
    let Ok(number) = value.parse::<u64>() else { return Some(value.to_owned()) };
    Some(match kind {
        Kind::Text => value.to_owned(),
        Kind::Count => grouped(number),
        Kind::Bytes => bytes(number),
        Kind::Seconds => age(number),
        Kind::Rate if number == 0 => "not measured yet".to_owned(),
        Kind::Rate => format!("{}/s", bytes(number)),
        Kind::BytesOf(budget) => match lines.number(budget) {
            None => bytes(number),
            Some(budget) => {
                let percent = u128::from(number) * 100 / u128::from(budget.max(1));
                format!("{} of {} ({percent} %)", bytes(number), bytes(budget))
            }
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: Style = Style { is_coloured: false };

    #[test]
    fn sections_have_units() {
        let status = "pid: 12\nmountpoint: /mnt/kv\nstate: degraded\n\
            state_reason: the remote is down for 7 s: x; the disk is full: 5 bytes are free\n\
            uptime_seconds: 11040\npages: 1234567\nram_budget_bytes: 4294967296\n\
            ram_used_bytes: 1073741824\nremote: /nas\nremote_state: down: x\n\
            remote_waiting_files: 3\nremote_waiting_bytes: 3145728\nremote_waiting_seconds: 90\n\
            quota /files: size=1\nnew_line: 7\n\
            model models/m: questions=1 asked_tokens=4 answered_tokens=2 prefixes=0 prefixes_found=0 opens=2 \
            restored_tokens=64 opening_seconds=0.500\n\
            directory files/l: names=4 names_found=3 opens=2 opened_bytes=2048\n";
        let expected = "/mnt/kv\nstate: degraded\n  the remote is down for 7 s: x\n  \
            the disk is full: 5 bytes are free\n\
            Mount\n  process               12\n  up for                3 h 4 min\n\
            Content\n  pages                 1 234 567\n\
            Memory\n  used                  1.0 GiB of 4.0 GiB (25 %)\n\
            Remote\n  place                 /nas\n  state                 down: x\n  \
            not there yet         3.0 MiB in 3 files, the oldest waits for 1 min 30 s\n\
            Models\n  models/m              1 prompt asked, 2 of 4 tokens found (50 %); 64 tokens restored in 0.500 s\n\
            Directories\n  files/l               3 of 4 names found (75 %); 2 files opened, 2.0 KiB\n\
            Limited directories\n  /files                size=1\n\
            Other\n  new_line              7\n";
        assert_eq!(describe(status, PLAIN), expected);
    }

    #[test]
    fn nothing_controls_the_terminal() {
        let status = "mountpoint: /\u{1b}[2J\nstate: \u{9b}\nstore: a\u{202e}b\n";
        let text = describe(status, PLAIN);
        assert!(text.chars().all(|c| c == '\n' || !c.is_control() && c != '\u{202e}'), "{text:?}");
    }

    #[test]
    fn states_have_colours() {
        let coloured = Style { is_coloured: true };
        for (state, colour) in [("ok", "[32m"), ("degraded", "[33m"), ("read-only after", "[1;31m")]
        {
            let text = describe(&format!("state: {state}\n"), coloured);
            assert!(text.contains(&format!("\u{1b}{colour}{state}\u{1b}[0m")), "{text:?}");
        }
    }
}
