//! Metrics in Prometheus' text format, read back: what `.kvfs/metrics` says, by name and labels.

use std::collections::BTreeMap;

/// The mountpoint, which every series of a mount has alike.
const MOUNT_LABEL: &str = "mount";

/// One line.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Series {
    labels: Vec<(String, String)>,
    pub(super) value: f64,
}

/// All series of a mount, by name.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Metrics(BTreeMap<String, Vec<Series>>);

impl Series {
    /// The value of a label; empty where it has none.
    pub(super) fn label(&self, name: &str) -> &str {
        let mut labels = self.labels.iter();
        labels.find(|(found, _)| found == name).map_or("", |(_, value)| value)
    }

    fn has(&self, labels: &[(&str, &str)]) -> bool {
        labels.iter().all(|(name, value)| self.label(name) == *value)
    }
}

impl Metrics {
    /// Lines that are none, as of a later version, are passed over.
    pub(super) fn parse(text: &str) -> Metrics {
        let mut found = Metrics::default();
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            if let Some((name, series)) = series(line) {
                match found.0.get_mut(name) {
                    Some(all) => all.push(series),
                    None => drop(found.0.insert(name.to_owned(), vec![series])),
                }
            }
        }
        found
    }

    /// The series of a name.
    pub(super) fn all(&self, name: &str) -> &[Series] {
        self.0.get(name).map_or(&[], Vec::as_slice)
    }

    /// The sum of those that have these labels, 0 if none has; `None` where the name is not told.
    pub(super) fn sum(&self, name: &str, labels: &[(&str, &str)]) -> Option<f64> {
        let all = self.0.get(name)?;
        Some(all.iter().filter(|series| series.has(labels)).map(|series| series.value).sum())
    }

    /// The value of the one with these labels.
    pub(super) fn value(&self, name: &str, labels: &[(&str, &str)]) -> Option<f64> {
        self.all(name).iter().find(|series| series.has(labels)).map(|series| series.value)
    }

    /// The same as a whole number.
    pub(super) fn number(&self, name: &str, labels: &[(&str, &str)]) -> Option<u64> {
        self.value(name, labels).map(whole)
    }
}

/// A count, of which Prometheus makes a fraction.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "it saturates")]
pub(super) fn whole(count: f64) -> u64 {
    count as u64
}

/// `NAME VALUE` or `NAME{LABEL="TEXT",...} VALUE`.
fn series(line: &str) -> Option<(&str, Series)> {
    let (named, value) = line.rsplit_once(' ')?;
    let value = value.parse().ok()?;
    let Some((name, rest)) = named.split_once('{') else {
        return Some((named, Series { labels: Vec::new(), value }));
    };
    let mut labels = Vec::new();
    let mut rest = rest.strip_suffix('}')?;
    while let Some((label, behind)) = rest.split_once("=\"") {
        let (text, behind) = quoted(behind)?;
        if label != MOUNT_LABEL {
            labels.push((label.to_owned(), text));
        }
        rest = behind.strip_prefix(',').unwrap_or(behind);
    }
    rest.is_empty().then_some((name, Series { labels, value }))
}

/// The text before the quote that ends it, and what is behind that.
fn quoted(text: &str) -> Option<(String, &str)> {
    let mut found = String::new();
    let mut characters = text.char_indices();
    while let Some((at, character)) = characters.next() {
        match character {
            '"' => return Some((found, &text[at + 1..])),
            '\\' => match characters.next()?.1 {
                'n' => found.push('\n'),
                escaped => found.push(escaped),
            },
            _ => found.push(character),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn series_by_name_and_labels() {
        let metrics = Metrics::parse(
            "# TYPE a counter\na{op=\"read\",result=\"ok\",mount=\"/m\"} 5\n\
             a{op=\"read\",result=\"error\",mount=\"/m\"} 2\na{op=\"readlink\",result=\"ok\"} 100\nb 1.5\n",
        );
        assert_eq!(metrics.sum("a", &[("op", "read")]), Some(7.0));
        assert_eq!(metrics.sum("a", &[("op", "open")]), Some(0.0));
        assert_eq!(metrics.sum("c", &[]), None);
        assert_eq!(metrics.value("b", &[]), Some(1.5));
        assert_eq!(metrics.number("b", &[]), Some(1));
        assert_eq!(metrics.value("a", &[("op", "open")]), None);
        assert_eq!(metrics.all("a")[1].label("result"), "error");
        assert_eq!(metrics.all("a")[1].label("mount"), "");
    }

    #[test]
    fn a_label_forges_no_other() {
        let metrics = Metrics::parse("a{x=\"1\\\",op=\\\"b\\\\\\n \",op=\"c\"} 1\n");
        assert_eq!(metrics.all("a")[0].label("op"), "c");
        assert_eq!(metrics.all("a")[0].label("x"), "1\",op=\"b\\\n ");
    }

    #[test]
    fn what_is_no_series_is_passed_over() {
        for line in
            ["", "a", "a b", "a{ 1", "a{b} 1", "a{b=\"} 1", "a{b=\"\\\"} 1", "a{b=\"c\"d} 1"]
        {
            assert_eq!(Metrics::parse(line), Metrics::default(), "{line}");
        }
    }
}
