//! Lists of processors, as `/sys/devices/system/cpu` has them.

use std::collections::BTreeSet;
use std::io;

/// How many processors there may ever be: the kernel has a queue for each of them.
pub(super) fn possible_count() -> io::Result<u16> {
    let processors = read("possible")?;
    u16::try_from(processors.len()).map_err(io::Error::other)
}

/// Those that programs run on now.
pub(super) fn online() -> io::Result<BTreeSet<u16>> {
    read("online")
}

fn read(list: &str) -> io::Result<BTreeSet<u16>> {
    let place = format!("/sys/devices/system/cpu/{list}");
    let text = std::fs::read_to_string(&place)?;
    parse(&text).ok_or_else(|| io::Error::other(format!("{place}: {text:?}")))
}

/// `0-7`, or `0,2-3`.
fn parse(text: &str) -> Option<BTreeSet<u16>> {
    let mut processors = BTreeSet::new();
    for range in text.trim().split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last) = (first.parse::<u16>().ok()?, last.parse::<u16>().ok()?);
        if first > last {
            return None;
        }
        processors.extend(first..=last);
    }
    Some(processors)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_read() {
        for (list, count) in [("0\n", 1), ("0-1\n", 2), ("0-127", 128), ("0,2-3,8", 4)] {
            assert_eq!(parse(list).expect(list).len(), count, "{list}");
        }
        assert!(parse("0,2-3").unwrap().contains(&2));
        for list in ["", "a", "3-1", "0-", "0-70000"] {
            assert!(parse(list).is_none(), "{list}");
        }
    }
}
