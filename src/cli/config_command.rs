//! `kvfs config`: the settings of a mount, and files with settings.

use std::fmt::Write as _;
use std::fs::File;
use std::io::{self, Write as _};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use kvfs_os::mountinfo;
use serde_json::json;

use super::config::{self, Place};
use super::output::{EXIT_FAILED, EXIT_OK, Failure, Outcome, Report};
use super::probe::{ANSWER_DEADLINE, Answer, Question, ask};
use super::settings::{self, Found, Layer, Origin, Sources};
use crate::page::printable;

/// All settings are a few kilobytes.
const ANSWER_BYTES_MAX: usize = 32 << 10;

/// `kvfs config`.
#[derive(Debug, Subcommand)]
pub(crate) enum ConfigCommand {
    /// Show the settings that a mount uses
    Show(ShowArguments),
    /// Say everything that is wrong in a configuration file
    Check(CheckArguments),
    /// Print a configuration file with all settings at their defaults, commented out
    #[command(after_help = "Example: kvfs config init > /etc/kvfs.toml")]
    Init,
    /// Change settings of a mount while it is used, all of them or none
    Set(SetArguments),
}

/// `kvfs config show`.
#[derive(Debug, Args)]
#[command(after_help = "Example: kvfs config show --origin /mnt/kv")]
pub(crate) struct ShowArguments {
    /// Say where each value comes from
    #[arg(long)]
    origin: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Where the cache is mounted
    mountpoint: PathBuf,
}

/// `kvfs config check`.
#[derive(Debug, Args)]
#[command(after_help = "Example: kvfs config check /etc/kvfs.toml")]
pub(crate) struct CheckArguments {
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// The file
    file: PathBuf,
}

const SET_HELP: &str = "\
Only root and the user of the daemon may. A smaller budget holds at once for what is new; what is there too \
much leaves in the background. What is set lasts until the mount ends: write it into the configuration file \
to keep it. mount -o remount,KEY=VALUE MOUNTPOINT does the same.

Example: kvfs config set ram=32G ssd=500G /mnt/kv";

const SETTINGS_HELP: &str = "\
ram=SIZE, pack=SIZE, ssd=SIZE|none, ssd_writes=SIZE/day|none, cold=none|zstd|zstd:LEVEL, remote_bandwidth=SIZE|none, \
verify=first|always|never, on_corrupt=eio|miss, log_level=LEVEL";

/// `kvfs config set`.
#[derive(Debug, Args)]
#[command(after_help = SET_HELP)]
pub(crate) struct SetArguments {
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// What to change.
    #[arg(required = true, value_name = "KEY=VALUE", help = SETTINGS_HELP)]
    settings: Vec<String>,
    /// Where the cache is mounted
    mountpoint: PathBuf,
}

/// Does what it is asked.
pub(crate) fn run(command: &ConfigCommand) -> Outcome {
    match command {
        ConfigCommand::Show(arguments) => show(arguments),
        ConfigCommand::Check(arguments) => check(&arguments.file, arguments.json),
        ConfigCommand::Init => Ok(Report::text(settings::template())),
        ConfigCommand::Set(arguments) => {
            if let Some(word) = arguments.settings.iter().find(|word| !word.contains('=')) {
                return Err(Failure::Usage(format!("{word:?} is no setting: write KEY=VALUE")));
            }
            set(&arguments.mountpoint, &arguments.settings)?;
            let changed = arguments.settings.iter().filter_map(|word| word.split_once('='));
            let changed: serde_json::Map<String, serde_json::Value> =
                changed.map(|(name, value)| (name.to_owned(), value.into())).collect();
            let place = arguments.mountpoint.display().to_string();
            let value = json!({ "mountpoint": place, "set": changed });
            Ok(Report::answer(arguments.json, &value, String::new()))
        }
    }
}

/// Changes a mount as `-o remount,...` says. What is said of other settings must be so already.
pub(super) fn remount(mountpoint: &Path, wanted: &Layer) -> Result<(), Failure> {
    let wanted = wanted.iter().filter(|(name, _)| *name != settings::CONFIG);
    let lines: Vec<String> = wanted.map(|(name, value)| format!("{name}={value}")).collect();
    set(mountpoint, &lines)
}

fn set(mountpoint: &Path, lines: &[String]) -> Result<(), Failure> {
    if let Some(line) = lines.iter().find(|line| line.contains('\n')) {
        return Err(Failure::Usage(format!("{line:?}: no setting has several lines")));
    }
    let (mount, _) = mountinfo::kvfs_at(mountpoint).map_err(Failure::Failed)?;
    // Whether it answers; what follows has no deadline.
    read(&mount.mountpoint)?;
    let answer = converse(&mount.mountpoint, &lines.join("\n"));
    match answer.map_err(|error| refused(&mount.mountpoint, &error))?.split_once(": ") {
        Some(("error", line)) => Err(Failure::Failed(line.trim_end().to_owned())),
        _ => Ok(()),
    }
}

/// Asks the mount, and hears what came of it.
pub(super) fn converse(mountpoint: &Path, request: &str) -> io::Result<String> {
    let path = mountpoint.join(".kvfs/settings");
    let mut file = File::options().read(true).write(true).open(path)?;
    file.write_all(request.as_bytes())?;
    let mut answer = vec![0; ANSWER_BYTES_MAX];
    let length = file.read_at(&mut answer, 0)?;
    answer.truncate(length);
    Ok(String::from_utf8_lossy(&answer).into_owned())
}

fn refused(mountpoint: &Path, error: &io::Error) -> Failure {
    let place = mountpoint.display();
    Failure::Failed(match error.raw_os_error() {
        Some(libc::EACCES | libc::EPERM) => {
            format!("{place}: only root and the user of its daemon may see and change its settings")
        }
        Some(libc::ENOENT) => {
            format!("{place}: its daemon is of an older version, which has no such settings")
        }
        _ => format!("{place}: {error}"),
    })
}

/// The settings of a mount, as its daemon tells them.
fn read(mountpoint: &Path) -> Result<Vec<serde_json::Value>, Failure> {
    let place = mountpoint.display();
    let answer = ask(mountpoint, Question::Settings, ANSWER_DEADLINE);
    let text = match answer.map_err(|error| Failure::failed(format!("{place}: {error}")))? {
        Answer::Alive(text) => text,
        Answer::Refused(error) => return Err(refused(mountpoint, &error)),
        Answer::Dead => {
            return Err(Failure::Failed(format!(
                "the daemon of {place} is gone: mount the store again, which clears it"
            )));
        }
        Answer::Stuck => {
            return Err(Failure::Failed(format!(
                "{place} does not answer within {} seconds",
                ANSWER_DEADLINE.as_secs()
            )));
        }
    };
    serde_json::from_str(&text)
        .map_err(|error| Failure::Failed(format!("{place}: its settings: {error}")))
}

fn show(arguments: &ShowArguments) -> Outcome {
    let (mount, _) = mountinfo::kvfs_at(&arguments.mountpoint).map_err(Failure::Failed)?;
    let settings = read(&mount.mountpoint)?;
    if arguments.json {
        return Ok(Report::json(&settings.into()));
    }
    let field = |setting: &serde_json::Value, name: &str| {
        let text = setting.get(name).and_then(serde_json::Value::as_str).unwrap_or_default();
        // The daemon may be another user's.
        printable(text.chars())
    };
    let rows: Vec<[String; 3]> = settings
        .iter()
        .map(|setting| ["name", "text", "origin"].map(|name| field(setting, name)))
        .collect();
    let width = |column: usize| rows.iter().map(|row| row[column].len()).max().unwrap_or(0);
    let (names, values) = (width(0), width(1));
    let mut text = String::new();
    for [name, value, origin] in &rows {
        let _ = if arguments.origin {
            writeln!(text, "{name:names$}  {value:values$}  {origin}")
        } else {
            writeln!(text, "{name:names$}  {value}")
        };
    }
    Ok(Report::text(text))
}

/// Says everything that is wrong in a file.
fn check(path: &Path, is_json: bool) -> Outcome {
    let place = path.display();
    let text = settings::text_of(path)
        .map_err(|error| Failure::Failed(format!("config {place}: {error}")))?;
    let Found { layer, mut errors, lines } = settings::read_file(&text);
    for error in contradictions(path, layer) {
        let name = error.split([' ', ':']).next().unwrap_or_default();
        errors.push((lines.get(name).copied().unwrap_or(1), error));
    }
    errors.sort();
    let told = errors
        .iter()
        .map(|(line, error)| printable(format!("{place} line {line}: {error}").chars()) + "\n");
    let wrong = errors.iter().map(|(line, what)| json!({ "line": line, "what": what }));
    let value = json!({ "file": place.to_string(), "errors": wrong.collect::<Vec<_>>() });
    let exit = if errors.is_empty() { EXIT_OK } else { EXIT_FAILED };
    Ok(Report { exit, ..Report::answer(is_json, &value, told.collect()) })
}

/// What is wrong with values that are written correctly: of each setting the first thing.
fn contradictions(path: &Path, mut layer: Layer) -> Vec<String> {
    let mut errors = Vec::new();
    loop {
        let sources = Sources(vec![(Origin::File(path.to_owned()), layer.clone())]);
        let Err(error) = config::validate(&sources, Place::default()) else { return errors };
        let name = error.split([' ', ':']).next().unwrap_or_default().to_owned();
        let is_known = layer.iter().any(|(known, _)| known == name);
        errors.push(error);
        if !is_known {
            return errors;
        }
        layer.remove(&name);
        // What needs the one that is wrong is not wrong itself.
        let dependent: &[&str] = match name.as_str() {
            "remote" => &[
                "ssd",
                "ssd_writes",
                "remote_key",
                "remote_key_command",
                "remote_bandwidth",
                "rebuild_from",
                "remote_index",
            ],
            "cold" => &["ssd"],
            "ram" => &["ssd_writes"],
            _ => &[],
        };
        for name in dependent {
            layer.remove(name);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::settings::live_names;

    #[test]
    fn everything_that_is_wrong_in_a_file() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let check_text = |text: &str| {
            std::fs::write(file.path(), text).unwrap();
            let report = check(file.path(), false).unwrap();
            let prefix = format!("{} line ", file.path().display());
            let lines = report.text.lines().map(|line| line.replace(&prefix, ""));
            (report.exit, lines.collect::<Vec<_>>())
        };
        assert_eq!(check_text("ram = \"1G\"\nremote = \"/r\"\nssd = \"1G\"\n"), (0, Vec::new()));
        let (exit, lines) = check_text(
            "rma = 1\nssd = \"1G\"\ncommit_interval = 9999\nremote_index = 1\nverify = \"twice\"\n\
             remote_key = \"key\"\noptions = [\"sync\"]\n",
        );
        assert_eq!(exit, EXIT_FAILED);
        let expected = [
            "1: unknown setting \"rma\": did you mean ram?",
            "2: ssd is set, but neither remote nor cold",
            "3: commit_interval is 9999: must be from",
            "4: remote_index is set, but no remote",
            "5: verify: \"twice\" is neither",
            "6: remote_key key must be an absolute path",
            "7: option",
        ];
        let report = check(file.path(), true).unwrap();
        let told: serde_json::Value = serde_json::from_str(&report.text).unwrap();
        assert_eq!((report.exit, &told["errors"][1]["line"]), (EXIT_FAILED, &json!(2)));
        assert_eq!(told["errors"].as_array().unwrap().len(), expected.len(), "{told}");
        assert_eq!(lines.len(), expected.len(), "{lines:#?}");
        for (line, expected) in lines.iter().zip(expected) {
            assert!(line.starts_with(expected), "{line}");
        }
        // Whatever the file has, lines stay lines.
        let (_, lines) =
            check_text("log_file = \"/x\\u001b[2J\"\n\"\\u001b\\n\" = 1\nlog_level = \"info/a/b\"");
        assert_eq!(lines.len(), 3, "{lines:#?}");
        assert!(
            lines[0].starts_with("1: log_file has control characters: /x\\u{1b}[2J"),
            "{lines:#?}"
        );
        assert!(!lines.concat().contains('\u{1b}'), "{lines:#?}");
        // What is said of a remote that is no place is not wrong.
        let (_, lines) = check_text("remote = \"share\"\nremote_bandwidth = 1\nssd = \"1G\"\n");
        assert_eq!(lines.len(), 1, "{lines:#?}");
    }

    #[test]
    fn what_can_change_is_told_in_the_help() {
        let all = live_names();
        let help = <SetArguments as Args>::augment_args(clap::Command::new("set"));
        let help = help.get_positionals().next().and_then(|argument| argument.get_help());
        let help = help.map(ToString::to_string).unwrap_or_default();
        for name in all.split(", ") {
            assert!(help.contains(&format!("{name}=")), "{name} in {help}");
        }
    }
}
