//! How values of settings are written and read: the one parser of each kind.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use serde_json::json;

use crate::cli::duration;
use crate::cli::output::json_text;
use crate::cli::size::Size;
use crate::page::printable;

/// Kinds of values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// yes or no.
    Switch,
    /// A number of bytes.
    Size,
    /// A number of bytes, or none.
    Limit,
    /// A time.
    Duration,
    /// A number.
    Count,
    /// Words and places.
    Text,
    /// A file.
    Path,
    /// Words for the kernel, in a list.
    Flags,
}

/// A value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Value {
    /// yes or no.
    Switch(bool),
    /// A number of bytes.
    Size(u64),
    /// A number of bytes, or no limit.
    Limit(Option<u64>),
    /// A time.
    Duration(Duration),
    /// A number.
    Count(usize),
    /// Words and places.
    Text(String),
    /// A file.
    Path(PathBuf),
    /// Words for the kernel.
    Flags(Vec<String>),
}

/// No limit.
const NONE: &str = "none";

impl Value {
    /// Reads a value; `label` is what the message calls it.
    pub(crate) fn parse(kind: Kind, label: &str, text: &str) -> Result<Value, String> {
        let explain = |error: String| format!("{label}: {error}");
        let bytes = |text: &str| text.parse::<Size>().map(|size| size.0);
        Ok(match kind {
            Kind::Switch => Value::Switch(yes_or_no(label, text)?),
            Kind::Size => Value::Size(bytes(text).map_err(explain)?),
            Kind::Limit if text == NONE => Value::Limit(None),
            Kind::Limit => Value::Limit(Some(
                bytes(text).map_err(|error| explain(format!("{error}, or none")))?,
            )),
            Kind::Duration => Value::Duration(duration::parse(text).map_err(explain)?),
            Kind::Count => {
                let number = text.parse();
                Value::Count(number.map_err(|_| format!("{label} is {text:?}: must be a number"))?)
            }
            Kind::Text => Value::Text(text.to_owned()),
            Kind::Path => Value::Path(PathBuf::from(text)),
            Kind::Flags => {
                let flags = text.split(',').filter(|flag| !flag.is_empty());
                Value::Flags(flags.map(str::to_owned).collect())
            }
        })
    }

    /// Refuses what would control the terminal, or fake lines in the log, of whoever looks at it.
    pub(crate) fn check_printable(&self, name: &str) -> Result<(), String> {
        let text = match self {
            Value::Text(_) | Value::Path(_) | Value::Flags(_) => self.to_string(),
            _ => return Ok(()),
        };
        let shown = printable(text.chars());
        if shown == text { Ok(()) } else { Err(format!("{name} has control characters: {shown}")) }
    }

    /// As a configuration file has it.
    pub(crate) fn to_toml(&self) -> String {
        // Every JSON string without control characters is a TOML string.
        let text = |text: String| json_text(&serde_json::Value::from(text).to_string());
        match self {
            Value::Switch(is_on) => is_on.to_string(),
            Value::Size(bytes) | Value::Limit(Some(bytes)) => bytes.to_string(),
            Value::Duration(time) => format!("{:?}", time.as_secs_f64()),
            Value::Count(number) => number.to_string(),
            Value::Flags(flags) => format!("{flags:?}"),
            Value::Limit(None) | Value::Text(_) | Value::Path(_) => text(self.to_string()),
        }
    }

    /// As a program reads it: bytes and seconds as numbers.
    pub(crate) fn to_json(&self) -> serde_json::Value {
        match self {
            Value::Switch(is_on) => json!(is_on),
            Value::Size(bytes) => json!(bytes),
            Value::Limit(bytes) => json!(bytes),
            Value::Duration(time) => json!(time.as_secs_f64()),
            Value::Count(number) => json!(number),
            Value::Flags(flags) => json!(flags),
            Value::Text(_) | Value::Path(_) => json!(self.to_string()),
        }
    }
}

/// As people write it.
impl fmt::Display for Value {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::Switch(is_on) => formatter.write_str(if *is_on { "yes" } else { "no" }),
            Value::Size(bytes) | Value::Limit(Some(bytes)) => write!(formatter, "{}", Size(*bytes)),
            Value::Limit(None) => formatter.write_str(NONE),
            Value::Duration(time) => write!(formatter, "{}", time.as_secs_f64()),
            Value::Count(number) => write!(formatter, "{number}"),
            Value::Text(text) => formatter.write_str(text),
            Value::Path(path) => write!(formatter, "{}", path.display()),
            Value::Flags(flags) => formatter.write_str(&flags.join(",")),
        }
    }
}

fn yes_or_no(label: &str, text: &str) -> Result<bool, String> {
    match text {
        "yes" | "true" | "1" => Ok(true),
        "no" | "false" | "0" => Ok(false),
        _ => Err(format!("{label} is {text:?}: must be yes or no")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_shown_is_read_as_the_same() {
        fn check(kind: Kind, text: &str, toml: &str) {
            let value = Value::parse(kind, "x", text).unwrap();
            assert_eq!(Value::parse(kind, "x", &value.to_string()), Ok(value.clone()), "{text}");
            assert_eq!(value.to_toml(), toml, "{text}");
        }
        check(Kind::Switch, "1", "true");
        check(Kind::Size, "4G", "4294967296");
        check(Kind::Limit, "none", "\"none\"");
        check(Kind::Limit, "1k", "1024");
        check(Kind::Duration, "1500ms", "1.5");
        check(Kind::Duration, "2m", "120.0");
        check(Kind::Count, "3", "3");
        check(Kind::Text, "a\"b", "\"a\\\"b\"");
        check(Kind::Flags, "noatime,noexec", "[\"noatime\", \"noexec\"]");
    }

    #[test]
    fn what_controls_a_terminal_is_no_value() {
        fn check(kind: Kind, text: &str, expected: Result<(), &str>) {
            let value = Value::parse(kind, "x", text).unwrap();
            let expected = expected.map_err(|shown| format!("x has control characters: {shown}"));
            assert_eq!(value.check_printable("x"), expected);
        }
        check(Kind::Text, "é \\ \"", Ok(()));
        check(Kind::Text, "a\u{1b}[2J", Err("a\\u{1b}[2J"));
        check(Kind::Path, "/a\nb", Err("/a\\nb"));
        check(Kind::Text, "\u{7f}\u{9b}", Err("\\u{7f}\\u{9b}"));
        check(Kind::Flags, "no\u{202e}atime", Err("no\\u{202e}atime"));
        assert_eq!(Value::Text("a\u{7f}".to_owned()).to_toml(), "\"a\\u007f\"");
    }

    #[test]
    fn refused() {
        fn check(kind: Kind, text: &str, expected: &str) {
            assert_eq!(Value::parse(kind, "x", text), Err(expected.to_owned()));
        }
        check(Kind::Switch, "maybe", "x is \"maybe\": must be yes or no");
        check(Kind::Size, "-1", "x: \"-1\" is no size: write bytes or a number with K, M, G or T");
        check(
            Kind::Limit,
            "1X",
            "x: \"1X\" is no size: write bytes or a number with K, M, G or T, or none",
        );
        check(Kind::Count, "-1", "x is \"-1\": must be a number");
    }
}
