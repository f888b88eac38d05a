//! `kvfs status`: what a mount says about itself in `.kvfs/status`, or all mounts of the machine.
//!
//! People get sections (`sections`), programs the daemon's own lines as JSON.

mod machine;
mod sections;
mod uses;

use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use kvfs_os::mountinfo;
use serde_json::{Map, Value};

use super::duration;
use super::interrupt::{Ended, Interrupts};
use super::output::{Failure, Outcome, Report, note};
use super::plan;
use super::probe::{ANSWER_DEADLINE, Answer, Question, ask};
use super::style::Style;

/// Looking more often would show the looking.
const INTERVAL_MIN: Duration = Duration::from_millis(200);
const HOUR: Duration = Duration::from_secs(3600);

const STATUS_HELP: &str = "\
Colours appear on a terminal alone, and not where NO_COLOR is set. Programs read --json, or MOUNTPOINT/.kvfs/status.
A mount that does not answer is waited for beside the others, and makes the exit code 1.

Example: kvfs status --watch=1 /mnt/kv";

/// `kvfs status`.
#[derive(Debug, Args)]
#[command(after_help = STATUS_HELP)]
pub(crate) struct StatusArguments {
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// Print it again and again, each INTERVAL (2s, 500ms) [default: 2s], until Ctrl-C or the end of the mount
    #[arg(long, value_name = "INTERVAL", num_args = 0..=1, require_equals = true,
        default_missing_value = "2s", value_parser = interval, conflicts_with_all = ["json", "plan"])]
    pub watch: Option<Duration>,
    /// Say where the files at or below a path would come from, and how long reading them takes
    #[arg(long, value_name = "PATH", conflicts_with = "mountpoint")]
    pub plan: Option<PathBuf>,
    /// Where the cache is mounted [default: all mounts of this machine]
    pub mountpoint: Option<PathBuf>,
}

pub(super) fn interval(text: &str) -> Result<Duration, String> {
    let parsed = duration::parse(text)?;
    if (INTERVAL_MIN..=HOUR).contains(&parsed) {
        Ok(parsed)
    } else {
        Err("write 200ms to 1h".to_owned())
    }
}

/// Prints the status, for people or as JSON.
pub(crate) fn run(arguments: &StatusArguments) -> Outcome {
    if let Some(path) = &arguments.plan {
        return plan::run(path, arguments.json);
    }
    let style = Style::of_output();
    let Some(mountpoint) = &arguments.mountpoint else {
        return match arguments.watch {
            Some(interval) => watch(interval, style, || Ok(Some(machine::look(style)?.text))),
            None if arguments.json => machine::look_as_json(),
            None => machine::look(style),
        };
    };
    let (mount, _) = mountinfo::kvfs_at(mountpoint).map_err(Failure::Failed)?;
    if let Some(interval) = arguments.watch {
        return watch(interval, style, || described_if_mounted(&mount.mountpoint, style));
    }
    let text = read(&mount.mountpoint)?;
    Ok(if arguments.json {
        Report::json(&to_json(&text))
    } else {
        Report::text(sections::describe(&text, style))
    })
}

/// `None` once nothing of kvfs is mounted there any more.
fn described_if_mounted(mountpoint: &Path, style: Style) -> Result<Option<String>, Failure> {
    match read(mountpoint) {
        Ok(text) => Ok(Some(sections::describe(&text, style))),
        Err(_) if !is_mounted(mountpoint) => {
            note(&format!("kvfs: {} was unmounted", super::history::shown(mountpoint)));
            Ok(None)
        }
        Err(failure) => Err(failure),
    }
}

/// Whether something of kvfs is mounted there, without touching it.
pub(super) fn is_mounted(mountpoint: &Path) -> bool {
    let mounts = mountinfo::read().unwrap_or_default();
    mountinfo::top_at(&mounts, mountpoint).is_some_and(mountinfo::Mount::is_kvfs)
}

/// Prints what `look` tells, again and again.
fn watch(
    interval: Duration, style: Style, look: impl Fn() -> Result<Option<String>, Failure>,
) -> Outcome {
    let interrupts = Interrupts::hold().map_err(Failure::failed)?;
    let mut is_first = true;
    while let Some(text) = look()? {
        let text = frame(&text, style, is_first);
        is_first = false;
        let mut stdout = io::stdout().lock();
        match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
            Ok(()) => {}
            // Nobody reads any more.
            Err(error) if error.kind() == ErrorKind::BrokenPipe => break,
            Err(error) => {
                return Err(Failure::Failed(format!("standard output cannot be written: {error}")));
            }
        }
        drop(stdout);
        if interrupts.wait(interval, &io::stdout()).map_err(Failure::failed)? == Ended::Stopped {
            break;
        }
    }
    Ok(Report::default())
}

/// On a terminal each look takes the place of the last one; elsewhere it follows, behind an empty line.
fn frame(text: &str, style: Style, is_first: bool) -> String {
    match (style.is_coloured, is_first) {
        // What is written over is erased line by line, which does not flicker.
        (true, false) => format!("\u{1b}[H{}\u{1b}[J", text.replace('\n', "\u{1b}[K\n")),
        (true, true) => format!("\u{1b}[2J\u{1b}[H{text}"),
        (false, false) => format!("\n{text}"),
        (false, true) => text.to_owned(),
    }
}

/// A status for people, without colours.
pub(super) fn described(text: &str) -> String {
    sections::describe(text, Style { is_coloured: false })
}

/// The text of `.kvfs/status`.
pub(crate) fn read(mountpoint: &Path) -> Result<String, Failure> {
    read_within(mountpoint, ANSWER_DEADLINE)
}

/// The same, or a failure after so long.
fn read_within(mountpoint: &Path, deadline: Duration) -> Result<String, Failure> {
    let place = mountpoint.display();
    let answer = ask(mountpoint, Question::Status, deadline);
    told(
        answer.map_err(|error| Failure::failed(format!("{place}: {error}")))?,
        mountpoint,
        deadline,
    )
}

/// The text of an answer, or a failure that says why there is none.
pub(super) fn told(
    answer: Answer, mountpoint: &Path, deadline: Duration,
) -> Result<String, Failure> {
    let place = mountpoint.display();
    match answer {
        Answer::Alive(text) => Ok(text),
        Answer::Dead => Err(Failure::Failed(format!(
            "the daemon of {place} is gone: mount the store again, which clears it"
        ))),
        Answer::Stuck => Err(Failure::Failed(format!(
            "{place} does not answer within {} seconds",
            deadline.as_secs()
        ))),
        Answer::Refused(error) if error.kind() == ErrorKind::PermissionDenied => {
            Err(Failure::Failed(format!("{place}: only root and whoever mounted it may ask")))
        }
        Answer::Refused(error) => Err(Failure::Failed(format!("{place}: {error}"))),
    }
}

/// One field per `key: value` line; whole numbers become numbers, and seconds.
pub(super) fn to_json(text: &str) -> Value {
    let fields = text.lines().filter_map(split).map(|(key, value)| {
        let seconds = || key.ends_with("_seconds").then(|| value.parse::<f64>().ok()).flatten();
        let number = value.parse::<u64>().map(Value::from).ok();
        let told = number.or_else(|| seconds().map(Value::from));
        (key.to_owned(), told.unwrap_or_else(|| Value::from(value)))
    });
    Value::Object(fields.collect::<Map<_, _>>())
}

/// What the lines of a limited directory, of a model, and of what was asked for in a directory begin with.
const QUOTA: &str = "quota ";
const MODEL: &str = "model ";
const DIRECTORY: &str = "directory ";

/// The key of a line, and its value. A path in a key may have what ends one.
fn split(line: &str) -> Option<(&str, &str)> {
    let has_path = [QUOTA, MODEL, DIRECTORY].iter().any(|of| line.starts_with(of));
    if has_path { line.rsplit_once(": ") } else { line.split_once(": ") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn lines_become_fields() {
        let text = "version: 0.1.0\npid: 12\npassthrough: no: needs root\nstore: /a: b\n\nodd\n\
                    saved_seconds: 2.5\ndirectory files/a: names=9: names=4 opens=1\n";
        let expected = json!({
            "version": "0.1.0", "pid": 12, "passthrough": "no: needs root", "store": "/a: b",
            "saved_seconds": 2.5, "directory files/a: names=9": "names=4 opens=1"
        });
        assert_eq!(to_json(text), expected);
    }

    #[test]
    fn a_look_takes_the_place_of_the_last_one_on_a_terminal_alone() {
        let [coloured, plain] = [true, false].map(|is_coloured| Style { is_coloured });
        assert_eq!(frame("a\nb\n", coloured, false), "\u{1b}[Ha\u{1b}[K\nb\u{1b}[K\n\u{1b}[J");
        assert_eq!(frame("a\n", plain, true) + &frame("b\n", plain, false), "a\n\nb\n");
    }

    #[test]
    fn intervals_have_bounds() {
        assert_eq!(interval("500ms"), Ok(Duration::from_millis(500)));
        for wrong in ["0", "100ms", "2h", "x", ""] {
            assert!(interval(wrong).is_err(), "{wrong}");
        }
    }
}
