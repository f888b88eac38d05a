//! A mount that does not answer is told of, instead of being waited for with whatever it was to do.
//!
//! What a command writes to a stuck daemon cannot be taken back: it would be carried out whenever the daemon goes on,
//! long after whoever asked has given up. So each mount that an argument leads to is asked first, in a child that can
//! be left behind.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use clap::ArgMatches;
use kvfs_os::mountinfo::{self, Mount};

use super::arguments::Command;
use super::output::Failure;
use super::probe::{ANSWER_DEADLINE, Answer, Question, ask};
use super::slots::SlotsCommand;

/// Refuses a command that would wait for a mount that does not answer. Any other answer is for the command.
pub(super) fn check(command: &Command, arguments: &ArgMatches) -> Result<(), Failure> {
    if has_own_deadline(command) {
        return Ok(());
    }
    for mountpoint in mountpoints(arguments) {
        if let Ok(Answer::Stuck) = ask(&mountpoint, Question::Status, ANSWER_DEADLINE) {
            let (place, seconds) = (mountpoint.display(), ANSWER_DEADLINE.as_secs());
            let line = format!(
                "{place} does not answer within {seconds} seconds, so the command was not begun: wait, or cut it off \
                 with kvfs umount --force {place}"
            );
            return Err(match command {
                // That they differ is what its other code says.
                Command::Diff(_) => Failure::Usage(line),
                _ => Failure::Failed(line),
            });
        }
    }
    Ok(())
}

/// Commands that ask with a deadline themselves, and those that mount something.
fn has_own_deadline(command: &Command) -> bool {
    match command {
        Command::Sync(arguments) => arguments.timeout.is_some(),
        Command::Mount(_)
        | Command::Umount(_)
        | Command::Status(_)
        | Command::Top(_)
        | Command::Config(_)
        | Command::Upgrade(_)
        | Command::Probe(_)
        | Command::Sample(_)
        | Command::TakeOver(_)
        // It complains, and goes on once the mount answers.
        | Command::Slots(SlotsCommand::Watch(_)) => true,
        _ => false,
    }
}

/// The first mount of kvfs on the way to each path among the arguments; of a part that is mounted elsewhere, the whole.
fn mountpoints(arguments: &ArgMatches) -> BTreeSet<PathBuf> {
    // The command itself fails with the reason.
    let mounts = mountinfo::read().unwrap_or_default();
    if !mounts.iter().any(Mount::is_kvfs) {
        return BTreeSet::new();
    }
    let paths = paths(arguments);
    let found = paths.iter().filter_map(|path| mountinfo::kvfs_on_the_way(path, &mounts));
    let whole = |part: &Mount| {
        let is_whole = |mount: &&Mount| mount.device == part.device && mount.root == Path::new("/");
        mounts.iter().find(is_whole).unwrap_or(part).mountpoint.clone()
    };
    found.map(whole).collect()
}

/// All arguments that are paths, of the command and those below it.
fn paths(arguments: &ArgMatches) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for id in arguments.ids() {
        // Others are of another type.
        if let Ok(Some(paths)) = arguments.try_get_many::<PathBuf>(id.as_str()) {
            found.extend(paths.cloned());
        }
    }
    if let Some((_, below)) = arguments.subcommand() {
        found.extend(self::paths(below));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::arguments::Arguments;
    use clap::CommandFactory;

    #[test]
    fn paths_are_found_among_arguments() {
        let of = |line: &str| {
            let words = line.split(' ').map(str::to_owned);
            paths(&Arguments::command().try_get_matches_from(words).unwrap())
        };
        assert_eq!(of("kvfs seq show model a"), [Path::new("model")]);
        assert_eq!(of("kvfs diff a --json b"), [Path::new("a"), Path::new("b")]);
        assert_eq!(of("kvfs evict a b"), [Path::new("a"), Path::new("b")]);
        assert_eq!(of("kvfs version"), [""; 0].map(Path::new));
        let mut both = of("kvfs match --tokens=ids model");
        both.sort();
        assert_eq!(both, [Path::new("ids"), Path::new("model")]);
    }
}
