//! What documents, dashboards and alerts say of metrics is what a mount exports.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::time::Duration;

use kvfs::observe::{Gauges, Observer, Operation, RetentionCounters};
use kvfs::page::batch::Status;
use kvfs::page::reader_report::Counts;
use kvfs::reader::longest_prefix;
use kvfs::tier::counters::{Counters, Tier};
use kvfs::tier::stay::Stay;

use crate::common::{Mode, Model, sys::setxattr, sys::write_and_close};
use crate::exported::{self, Family};
use crate::place::{Place, kvfs, printed};
use crate::writer::Sequence;

/// Labels that Prometheus makes.
const MADE: [&str; 4] = ["mount", "le", "instance", "job"];

fn read(path: &str) -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(path)).unwrap()
}

/// A mount with all tiers where much has happened, and what happens rarely, counted as the daemon does.
fn all() -> BTreeMap<String, Family> {
    let place = Place::with_budget(
        Mode::Served,
        &["--ram", "8M", "--cold", "zstd", "--ssd-writes", "1T/day"],
    );
    let (mount, model) = (&place.mount, Model::small());
    model.install(mount);
    let mut sequence = Sequence::new(&model, "chat");
    sequence.append(mount, &model, &(0..70).collect::<Vec<_>>());
    longest_prefix(&model.directory(mount), &(0..40).collect::<Vec<_>>()).unwrap();
    write_and_close(model.page_path(mount, "chat", 0, 96), b"no page").unwrap_err();
    setxattr(model.directory(mount), "user.kvfs.prefill_rate", b"100").unwrap();
    fs::read(model.page_path(mount, "chat", 0, 0)).unwrap();
    let files = place.write("f", 2);
    printed(&kvfs(&["sync", "--remote"], &[mount.path()]));
    printed(&kvfs(&["evict"], &[&files[0].0]));
    fs::read(&files[0].0).unwrap();
    printed(&kvfs(&["scrub"], &[mount.path()]));
    let mut families = exported::of(mount);
    assert_eq!(mount.metric("kvfs_match_asked_tokens_total"), 40);
    let answered = ["ram", "ssd"].map(|tier| {
        mount.metric(&format!("kvfs_match_answered_tokens_total{{store=\"own\",tier=\"{tier}\"}}"))
    });
    assert_eq!(answered.iter().sum::<u64>(), 40);
    assert_eq!(mount.metric("kvfs_scrub_running"), 0);
    assert!(mount.metric("kvfs_scrub_files_done") > 2);

    let observer = Observer::new();
    let (counters, limits) = (Counters::default(), RetentionCounters::default());
    counters.register(observer.registry()).unwrap();
    limits.register(observer.registry()).unwrap();
    observer.held(Operation::Open, Duration::from_millis(1));
    observer.corrupt(Tier::Ssd, "for the test");
    observer.attended(&Counts::default());
    observer.batched([Status::Here].into_iter());
    observer.open_failed(Tier::Remote, "timeout");
    observer.opened_page(Tier::Ram, 128);
    counters.failed(Tier::Ssd, Tier::Remote, "full");
    counters.evicted_for_room(Tier::Ram, &Stay::begin());
    counters.opened_after_leaving(Tier::Ram);
    counters.skipped(Tier::Ram, "in_use");
    counters.prefetched("used");
    counters.read_ahead("used");
    counters.rounded("q8_0");
    limits.removed("size", 1, 1);
    limits.kept("pinned");
    for (name, family) in exported::parse(&observer.metrics(Gauges::default())) {
        families.entry(name).or_insert(family);
    }
    families
}

fn labels(family: &Family) -> BTreeSet<String> {
    let labels = family.series.iter().flat_map(|series| series.labels.keys());
    labels.filter(|label| !MADE.contains(&label.as_str())).cloned().collect()
}

fn words(list: &str) -> BTreeSet<String> {
    list.split(',').map(|word| word.trim().to_owned()).filter(|word| !word.is_empty()).collect()
}

/// Names of metrics in an expression, each with the labels that are asked of it by a selector. What stands
/// in `by (...)` is asked of all of them.
fn used(expression: &str) -> Vec<(String, BTreeSet<String>)> {
    let mut grouped = BTreeSet::new();
    for part in expression.split("by (").skip(1) {
        grouped.extend(words(part.split(')').next().unwrap()));
    }
    let is_name = |character: char| character.is_ascii_alphanumeric() || character == '_';
    let mut found = Vec::new();
    for (at, _) in expression.match_indices("kvfs_") {
        let rest = &expression[at..];
        let end = rest.find(|character| !is_name(character)).unwrap_or(rest.len());
        let (name, rest) = rest.split_at(end);
        let selector = rest.strip_prefix('{').and_then(|rest| rest.split('}').next());
        let pairs = selector.unwrap_or_default().split(',').filter(|pair| !pair.is_empty());
        let asked = pairs.map(|pair| pair.split(['=', '!']).next().unwrap().to_owned());
        found.push((name.to_owned(), asked.chain(grouped.iter().cloned()).collect()));
    }
    assert!(!found.is_empty(), "{expression} uses no metric");
    found
}

#[track_caller]
fn check(expression: &str, families: &BTreeMap<String, Family>) {
    for (name, asked) in used(expression) {
        let endings = ["_bucket", "_sum", "_count"];
        let whole = endings.into_iter().find_map(|ending| name.strip_suffix(ending));
        let family = families
            .get(&name)
            .or_else(|| families.get(whole?).filter(|family| family.kind == "histogram"));
        let family = family.unwrap_or_else(|| panic!("{expression}: nothing exports {name}"));
        let known = labels(family);
        let unknown =
            asked.iter().find(|label| !known.contains(*label) && !MADE.contains(&label.as_str()));
        assert_eq!(unknown, None, "{expression}: {name} has {known:?}");
    }
}

/// All values of a key, wherever they stand.
fn values<'a>(json: &'a serde_json::Value, key: &str, found: &mut Vec<&'a str>) {
    match json {
        serde_json::Value::Object(fields) => {
            found.extend(fields.get(key).and_then(|value| value.as_str()));
            fields.values().for_each(|value| values(value, key, found));
        }
        serde_json::Value::Array(items) => items.iter().for_each(|item| values(item, key, found)),
        _ => {}
    }
}

#[test]
fn documents_dashboards_and_alerts_name_what_is_exported() {
    require!(fuse);
    let families = all();
    every_series_is_documented(&families);

    let dashboard = serde_json::from_str(&read("dashboards/kvfs.json")).unwrap();
    let mut expressions = Vec::new();
    values(&dashboard, "expr", &mut expressions);
    assert!(expressions.len() >= 18, "{expressions:#?}");
    for expression in expressions {
        check(expression, &families);
        assert!(expression.contains("mount=~\"$mount\""), "{expression} is of every mount");
    }
    let mut legends = Vec::new();
    values(&dashboard, "legendFormat", &mut legends);
    assert!(legends.iter().any(|legend| legend.contains("{{tier}}")), "{legends:?}");

    let alerts = read("dashboards/alerts.yml");
    let of = |key: &str| -> Vec<String> {
        let lines = alerts.lines().filter_map(|line| line.trim_start().strip_prefix(key));
        lines.map(str::to_owned).collect()
    };
    let (names, expressions, summaries) = (of("- alert: "), of("expr: "), of("summary: "));
    assert!(names.len() >= 9, "{names:?}");
    assert_eq!((expressions.len(), summaries.len()), (names.len(), names.len()));
    for (expression, summary) in expressions.iter().zip(&summaries) {
        check(expression, &families);
        for asked in summary.split("$labels.").skip(1) {
            let label = asked.split(' ').next().unwrap();
            let by = format!("{expression} by ({label})");
            check(&by, &families);
        }
    }
}

fn every_series_is_documented(families: &BTreeMap<String, Family>) {
    let document = read("docs/metrics.md");
    let rows = document.lines().filter(|line| line.starts_with("| `kvfs_"));
    let mut documented = BTreeMap::new();
    for row in rows {
        let cells: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).collect();
        let [name, kind, unit, labels, meaning] = cells[..] else { panic!("{row}") };
        let name = name.trim_matches('`');
        assert!(!unit.is_empty() && !meaning.is_empty(), "{row}");
        let is_new = documented.insert(name.to_owned(), (kind.to_owned(), words(labels)));
        assert_eq!(is_new, None, "{name} stands twice");
    }
    let exported: BTreeMap<String, (String, BTreeSet<String>)> = families
        .iter()
        .map(|(name, family)| (name.clone(), (family.kind.clone(), labels(family))))
        .collect();
    for (name, told) in &documented {
        assert_eq!(exported.get(name), Some(told), "{name}");
    }
    for (name, family) in families {
        assert!(documented.contains_key(name), "docs/metrics.md lacks {name}");
        assert!(!family.help.is_empty(), "{name}");
    }
}
