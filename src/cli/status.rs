//! `kvfs status`: what a mount says about itself in `.kvfs/status`.

use std::io::ErrorKind;
use std::path::Path;

use kvfs_os::mountinfo;
use serde_json::{Map, Value};

use super::arguments::StatusArguments;
use super::output::{Failure, Outcome, Report};
use super::plan;
use super::probe::{ANSWER_DEADLINE, Answer, Question, ask};

/// Prints the status, as it stands or as JSON.
pub(crate) fn run(arguments: &StatusArguments) -> Outcome {
    if let Some(path) = &arguments.plan {
        return plan::run(path, arguments.json);
    }
    let mountpoint = arguments.mountpoint.clone().unwrap_or_default();
    let (mount, _) = mountinfo::kvfs_at(&mountpoint).map_err(Failure::Failed)?;
    let text = read(&mount.mountpoint)?;
    Ok(if arguments.json { Report::json(&to_json(&text)) } else { Report::text(text) })
}

/// The text of `.kvfs/status`.
pub(crate) fn read(mountpoint: &Path) -> Result<String, Failure> {
    let place = mountpoint.display();
    let answer = ask(mountpoint, Question::Status, ANSWER_DEADLINE);
    match answer.map_err(|error| Failure::failed(format!("{place}: {error}")))? {
        Answer::Alive(text) => Ok(text),
        Answer::Dead => Err(Failure::Failed(format!(
            "the daemon of {place} is gone: mount the store again, which clears it"
        ))),
        Answer::Stuck => Err(Failure::Failed(format!(
            "{place} does not answer within {} seconds",
            ANSWER_DEADLINE.as_secs()
        ))),
        Answer::Refused(error) if error.kind() == ErrorKind::PermissionDenied => {
            Err(Failure::Failed(format!("{place}: only root and whoever mounted it may ask")))
        }
        Answer::Refused(error) => Err(Failure::Failed(format!("{place}: {error}"))),
    }
}

/// One field per `key: value` line; whole numbers become numbers.
fn to_json(text: &str) -> Value {
    let fields = text.lines().filter_map(|line| line.split_once(": "));
    let fields = fields.map(|(key, value)| {
        let value = value.parse::<u64>().map_or_else(|_| Value::from(value), Value::from);
        (key.to_owned(), value)
    });
    Value::Object(fields.collect::<Map<_, _>>())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn lines_become_fields() {
        let text = "version: 0.1.0\npid: 12\npassthrough: no: needs root\nstore: /a: b\n\nodd\n";
        let expected = json!({
            "version": "0.1.0", "pid": 12, "passthrough": "no: needs root", "store": "/a: b"
        });
        assert_eq!(to_json(text), expected);
    }
}
