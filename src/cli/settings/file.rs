//! A configuration file: TOML, a setting on each line. Everything that is wrong with one is found in one go.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{File, OpenOptions};
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::{CONFIG, Kind, Layer, Setting, Value, find, unknown};

/// What a file says.
#[derive(Debug, Default)]
pub(crate) struct Found {
    /// Its settings, without those that are wrong.
    pub(crate) layer: Layer,
    /// What is wrong, by line.
    pub(crate) errors: Vec<(usize, String)>,
    /// On which line a setting stands.
    pub(crate) lines: BTreeMap<&'static str, usize>,
}

/// All settings with comments are a few kilobytes.
const TEXT_BYTES_MAX: u64 = 1 << 20;

/// A file, opened without waiting for the writer of a FIFO; nothing that has no end, or no bytes of its own.
pub(crate) fn open_regular(path: &Path) -> Result<File, String> {
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path);
    let file = file.map_err(|error| error.to_string())?;
    if !file.metadata().map_err(|error| error.to_string())?.is_file() {
        return Err("is no regular file".to_owned());
    }
    Ok(file)
}

/// The text of a file, without waiting for the writer of a FIFO or reading something else to its end.
pub(crate) fn text_of(path: &Path) -> Result<String, String> {
    let file = open_regular(path)?;
    let mut text = String::new();
    match file.take(TEXT_BYTES_MAX + 1).read_to_string(&mut text) {
        Ok(count) if count as u64 > TEXT_BYTES_MAX => {
            Err(format!("is no configuration file: it has more than {TEXT_BYTES_MAX} bytes"))
        }
        Ok(_) => Ok(text),
        Err(error) => Err(error.to_string()),
    }
}

/// Reads the text of a file.
pub(crate) fn read(text: &str) -> Found {
    let ends: Vec<usize> = text.match_indices('\n').map(|(offset, _)| offset).collect();
    let line_of = |offset: usize| ends.partition_point(|end| *end < offset) + 1;
    let mut found = Found::default();
    let (table, errors) = DeTable::parse_recoverable(text);
    for error in errors {
        let line = error.span().map_or(1, |span| line_of(span.start));
        let message = error.message().replace('\n', " ");
        // One mistake makes the parser stumble several times.
        if found.errors.last().is_none_or(|(last, _)| *last != line) {
            found.errors.push((line, format!("{message}: write KEY = VALUE, text in quotes")));
        }
    }
    let wrong_lines: BTreeSet<usize> = found.errors.iter().map(|(line, _)| *line).collect();
    for (key, value) in table.get_ref() {
        let line = line_of(key.span().start);
        if wrong_lines.contains(&line) {
            continue;
        }
        let name = key.get_ref().as_ref();
        let Some(setting) = find(name).filter(|setting| setting.name != CONFIG) else {
            found.errors.push((line, unknown(name)));
            continue;
        };
        match take(setting, value) {
            Ok(value) => {
                found.layer.set(setting, value);
                found.lines.insert(setting.name, line);
            }
            Err(error) => found.errors.push((line, error)),
        }
    }
    found.errors.sort();
    found
}

fn take(setting: &Setting, value: &Spanned<DeValue<'_>>) -> Result<Value, String> {
    let Setting { name, kind, .. } = *setting;
    let wrong = |what: &str| {
        let kind = match kind {
            Kind::Switch => "true or false",
            Kind::Size => "bytes, or text such as \"4G\"",
            Kind::Limit => "bytes, text such as \"4G\", or \"none\"",
            Kind::Duration => "seconds, or text such as \"15m\"",
            Kind::Count => "a number",
            Kind::Text | Kind::Path => "text in quotes",
            Kind::Flags => "a list of texts such as [\"noatime\"]",
        };
        Err(format!("{name} is {what}: must be {kind}"))
    };
    let text: Cow<'_, str> = match (value.get_ref(), kind) {
        (DeValue::String(text), _) => text.clone(),
        (DeValue::Boolean(is_on), Kind::Switch) => is_on.to_string().into(),
        (DeValue::Integer(number), Kind::Size | Kind::Limit | Kind::Duration | Kind::Count) => {
            let digits = number.as_str().trim_start_matches('+');
            match i128::from_str_radix(digits, number.radix()) {
                Ok(number) => number.to_string().into(),
                Err(_) => return wrong(&format!("{digits:?}")),
            }
        }
        (DeValue::Float(number), Kind::Duration) => number.as_str().to_owned().into(),
        (DeValue::Array(items), Kind::Flags) => {
            let words = items.iter().map(|item| item.get_ref().as_str());
            match words.collect::<Option<Vec<&str>>>() {
                Some(words) => words.join(",").into(),
                None => return wrong("a list of something else"),
            }
        }
        (other, _) => return wrong(&format!("of type {}", other.type_str())),
    };
    Value::parse(kind, name, &text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_configuration_is_refused_in_one_line() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("kvfs.toml");
        assert!(text_of(&path).unwrap_err().contains("No such file"));
        assert_eq!(text_of(directory.path()).unwrap_err(), "is no regular file");
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert_eq!(text_of(&path).unwrap_err(), "is no regular file");
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, " ".repeat(1 << 20)).unwrap();
        assert_eq!(text_of(&path).unwrap().len(), 1 << 20);
        std::fs::write(&path, " ".repeat((1 << 20) + 1)).unwrap();
        assert!(text_of(&path).unwrap_err().contains("more than 1048576 bytes"));
        std::fs::write(&path, b"\xff").unwrap();
        assert!(text_of(&path).unwrap_err().contains("UTF-8"));
    }

    #[test]
    fn every_form_of_a_value() {
        let found = read(
            "ram = \"4G\" # as text\nssd = 1_000_000\ncommit_interval = 0.5\nremote_index = \"2m\"\n\
             offline = true\noptions = [\"noatime\"]\nthreads = 2\nlog_file = '/l'\n",
        );
        assert_eq!(found.errors, []);
        let text = |name: &str| found.layer.get(name).unwrap().to_string();
        assert_eq!(text("ram"), "4G");
        assert_eq!(text("ssd"), "1000000");
        assert_eq!(text("commit_interval"), "0.5");
        assert_eq!(text("remote_index"), "120");
        assert_eq!(text("offline"), "yes");
        assert_eq!(text("options"), "noatime");
        assert_eq!(found.lines["log_file"], 8);
    }

    #[test]
    fn every_mistake_is_told_with_its_line() {
        let found = read(
            "# comment\nrma = 1\nram = true\nssd = -5\n\nthreads = \"many\"\nconfig = \"/c\"\nram = = 4\n\
             offline = 1\noptions = [1]\n[table]\nx = 1\n",
        );
        let told: Vec<String> =
            found.errors.iter().map(|(line, what)| format!("{line}: {what}")).collect();
        let expected = [
            "2: unknown setting \"rma\": did you mean ram?",
            "3: ram is of type boolean: must be bytes",
            "4: ssd: \"-5\" is no size",
            "6: threads is \"many\": must be a number",
            "7: unknown setting \"config\"",
            "8: ",
            "9: offline is of type integer: must be true or false",
            "10: options is a list of something else",
            "11: unknown setting \"table\"",
        ];
        assert_eq!(told.len(), expected.len(), "{told:#?}");
        for (told, expected) in told.iter().zip(expected) {
            assert!(told.starts_with(expected), "{told}");
        }
    }
}
