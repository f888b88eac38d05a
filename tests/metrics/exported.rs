//! Metrics as text, taken apart.

use std::collections::BTreeMap;

use crate::common::Mount;

/// What a mount exports of one name.
#[derive(Debug, Default)]
pub(crate) struct Family {
    /// `counter`, `gauge` or `histogram`.
    pub(crate) kind: String,
    /// What it says of itself.
    pub(crate) help: String,
    /// One set of labels with its value for each line, those of histograms under their own names.
    pub(crate) series: Vec<Series>,
}

/// One line.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Series {
    pub(crate) name: String,
    pub(crate) labels: BTreeMap<String, String>,
    pub(crate) value: f64,
}

/// All families of a mount.
pub(crate) fn of(mount: &Mount) -> BTreeMap<String, Family> {
    parse(&std::fs::read_to_string(mount.join(".kvfs/metrics")).unwrap())
}

/// Every line must be one of the format's.
pub(crate) fn parse(text: &str) -> BTreeMap<String, Family> {
    let mut families = BTreeMap::<String, Family>::new();
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            let (name, help) = rest.split_once(' ').unwrap();
            help.clone_into(&mut families.entry(name.to_owned()).or_default().help);
        } else if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').unwrap();
            kind.clone_into(&mut families.entry(name.to_owned()).or_default().kind);
        } else {
            let series = parse_series(line);
            let name = &series.name;
            let endings = ["_bucket", "_sum", "_count"].into_iter();
            let whole = endings.filter_map(|ending| name.strip_suffix(ending));
            let family = whole.into_iter().find(|name| families.contains_key(*name));
            let family = family.unwrap_or(name).to_owned();
            families.get_mut(&family).expect(line).series.push(series);
        }
    }
    families
}

fn parse_series(line: &str) -> Series {
    let (named, value) = line.rsplit_once(' ').expect(line);
    let (name, labels) = match named.split_once('{') {
        Some((name, labels)) => (name, labels.strip_suffix('}').expect(line)),
        None => (named, ""),
    };
    let pairs = labels.split("\",").filter(|pair| !pair.is_empty()).map(|pair| {
        let (label, value) = pair.split_once("=\"").expect(line);
        (label.to_owned(), value.trim_end_matches('"').to_owned())
    });
    Series { name: name.to_owned(), labels: pairs.collect(), value: value.parse().expect(line) }
}
