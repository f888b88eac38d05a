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
