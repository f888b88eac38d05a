//! What is understood, and what is refused.

use super::super::fsck::parse_subset;
use super::*;
use clap::CommandFactory;

#[test]
fn the_definition_is_consistent() {
    Arguments::command().debug_assert();
}

#[test]
fn subsets() {
    fn check(text: &str, expected: Option<(u32, u32)>) {
        assert_eq!(parse_subset(text).ok(), expected, "{text}");
    }
    check("1/1", Some((1, 1)));
    check("3/10", Some((3, 10)));
    check("0/10", None);
    check("11/10", None);
    check("1/0", None);
    check("1", None);
    check("-1/2", None);
    check("1/2/3", None);
}

#[test]
fn options_of_what_does_not_exist_are_refused() {
    fn check(line: &str) {
        let outcome = Arguments::try_parse_from(line.split(' '));
        assert!(outcome.is_err(), "{line}");
    }
    check("kvfs mount --ram lots /s /m");
    check("kvfs mount --ssd lots /s /m");
    check("kvfs promote");
    check("kvfs gc");
    check("kvfs match /m/models/x");
    check("kvfs status --watch=1ms /m");
    check("kvfs status --watch --json /m");
    check("kvfs evict --to ram /m/x");
    check("kvfs scrub --stop --rate 1M /m");
    check("kvfs scrub");
    check("kvfs mount /s");
    check("kvfs umount --now /m");
}

/// Calls `check` with each command that the help shows, and the words that lead to it.
fn each_command(
    command: &clap::Command, words: &[&str], check: &mut dyn FnMut(&clap::Command, &[&str]),
) {
    for below in command.get_subcommands().filter(|below| !below.is_hide_set()) {
        let words = [words, &[below.get_name()]].concat();
        check(below, &words);
        each_command(below, &words, check);
    }
}

/// The calls of this program among the examples of a help, which they end.
fn examples(help: &str) -> Vec<Vec<String>> {
    let Some((_, examples)) = help.rsplit_once("Example:") else { return Vec::new() };
    let calls = examples.lines().flat_map(|line| line.split("&&")).map(str::trim);
    let calls = calls.filter(|call| call.starts_with("kvfs "));
    // What a shell would do with the output is none of its arguments.
    let words =
        |call: &str| call.split(' ').take_while(|word| *word != ">").map(str::to_owned).collect();
    calls.map(words).collect()
}

/// The commands in what was parsed, one below the other.
fn parsed_words(mut found: &clap::ArgMatches) -> Vec<&str> {
    let mut words = Vec::new();
    while let Some((name, below)) = found.subcommand() {
        words.push(name);
        found = below;
    }
    words
}

#[test]
fn every_command_has_examples_that_it_takes() {
    let mut count = 0;
    each_command(&Arguments::command(), &[], &mut |command, words| {
        let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
        let examples = examples(&help);
        assert!((1..=2).contains(&examples.len()), "{words:?} has no example: {help:?}");
        for example in examples {
            let found = Arguments::command().try_get_matches_from(&example);
            let found = found.unwrap_or_else(|error| panic!("{example:?}: {error}"));
            let parsed = parsed_words(&found);
            // That of some commands together is one of theirs.
            let is_group = command.has_subcommands();
            let is_of_it = parsed.starts_with(words) && (is_group || parsed == words);
            assert!(is_of_it, "{example:?} is no example of {words:?}");
            count += 1;
        }
    });
    assert!(count > 50, "only {count} examples were found");
}

#[test]
fn help_fits_its_width() {
    let check = |command: &clap::Command, words: &[&str]| {
        let help = command.clone().render_help().to_string();
        let is_too_wide = |line: &&str| line.chars().count() > HELP_COLUMNS_MAX;
        // What has no spaces cannot be broken.
        let wide: Vec<_> =
            help.lines().filter(is_too_wide).filter(|line| line.trim().contains(' ')).collect();
        assert!(wide.is_empty(), "{words:?}: {wide:#?}");
    };
    let mut all = Arguments::command();
    all.build();
    each_command(&all, &[], &mut |command, words| check(command, words));
}
