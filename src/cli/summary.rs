//! Facts about something, in order, printed as `name: value` lines or as JSON.

use std::fmt::Write;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use serde_json::{Map, Value};

use crate::page::{escaped, escaped_bytes, printable};

/// The facts.
#[derive(Debug, Default)]
pub(crate) struct Summary {
    facts: Vec<Fact>,
}

#[derive(Debug)]
struct Fact {
    name: &'static str,
    value: Value,
    /// The text form, where it is not that of the value.
    text: Option<String>,
}

impl Summary {
    /// Facts about a path.
    pub(crate) fn new(path: &Path) -> Summary {
        let mut summary = Summary::default();
        summary.add_path("path", path);
        summary
    }

    /// Adds a path.
    pub(crate) fn add_path(&mut self, name: &'static str, path: &Path) {
        let text = escaped_bytes(path.as_os_str().as_bytes());
        self.add_with_text(name, path.display().to_string().into(), text);
    }

    /// Adds a fact.
    pub(crate) fn add(&mut self, name: &'static str, value: impl Into<Value>) {
        self.facts.push(Fact { name, value: value.into(), text: None });
    }

    /// Adds a fact that people read in another form.
    pub(crate) fn add_with_text(&mut self, name: &'static str, value: Value, text: String) {
        self.facts.push(Fact { name, value, text: Some(text) });
    }

    /// Adds the facts of another one behind its own.
    pub(crate) fn append(&mut self, mut other: Summary) {
        self.facts.append(&mut other.facts);
    }

    /// The facts as lines.
    pub(crate) fn to_text(&self) -> String {
        let mut lines = String::new();
        for Fact { name, value, text } in &self.facts {
            // A time is told to people by how long ago it was.
            let label = text.as_ref().and_then(|_| name.strip_suffix("_unix_seconds"));
            let label = label.unwrap_or(name);
            // Writing to a String cannot fail.
            let _ = match (value, text) {
                (_, Some(text)) | (Value::String(text), None) => {
                    writeln!(lines, "{label}: {}", printable(text.chars()))
                }
                (Value::Object(entries), None) => entries
                    .iter()
                    .try_for_each(|(key, value)| writeln!(lines, "{key}: {}", plain(value))),
                (value, None) => writeln!(lines, "{name}: {value}"),
            };
        }
        lines
    }

    /// The facts as one object.
    pub(crate) fn to_json(&self) -> Value {
        let facts = self.facts.iter().map(|fact| (fact.name.to_owned(), fact.value.clone()));
        Value::Object(facts.collect::<Map<_, _>>())
    }
}

fn plain(value: &Value) -> String {
    match value {
        Value::String(text) => escaped(text.chars()),
        value => value.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn both_forms() {
        let mut summary = Summary::new(Path::new("/a"));
        summary.add("count", 3);
        summary.add("shape", json!([8, 4]));
        summary.add("inner", json!({ "x": "1\n2", "y": 2 }));
        summary.add_with_text("bytes", json!(2048), "2048 (2.0 KiB)".to_owned());
        let text = "path: /a\ncount: 3\nshape: [8,4]\nx: 1\\n2\ny: 2\nbytes: 2048 (2.0 KiB)\n";
        assert_eq!(summary.to_text(), text);
        let expected = json!({
            "path": "/a", "count": 3, "shape": [8, 4], "inner": { "x": "1\n2", "y": 2 },
            "bytes": 2048
        });
        assert_eq!(summary.to_json(), expected);
    }
}
