//! One page as a map knows it, read from a line of `user.kvfs.pages`.

use crate::page::names::{LayerEntry, layer_entry};

/// Where the bytes of a page are, the worst last: of a cell with as many of each, that is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::cli) enum Place {
    Memory,
    Disk,
    /// On the disk or in memory, with rounded values.
    Lossy,
    Compressed,
    Remote,
    /// Whoever asks may not read it.
    Hidden,
    Damaged,
}

impl Place {
    pub(in crate::cli) const ALL: [Place; 7] = [
        Place::Memory,
        Place::Disk,
        Place::Lossy,
        Place::Compressed,
        Place::Remote,
        Place::Hidden,
        Place::Damaged,
    ];

    /// As JSON has it.
    pub(in crate::cli) fn name(self) -> &'static str {
        match self {
            Place::Memory => "ram",
            Place::Disk => "ssd",
            Place::Lossy => "lossy",
            Place::Compressed => "ssd_encoded",
            Place::Remote => "remote",
            Place::Hidden => "hidden",
            Place::Damaged => "damaged",
        }
    }

    /// For people.
    pub(in crate::cli) fn in_words(self) -> &'static str {
        match self {
            Place::Memory => "memory",
            Place::Disk => "disk",
            Place::Lossy => "rounded",
            Place::Compressed => "compressed on disk",
            Place::Remote => "only in the remote",
            Place::Hidden => "may not be read",
            Place::Damaged => "damaged",
        }
    }

    /// In a map of characters.
    pub(in crate::cli) fn letter(self) -> char {
        match self {
            Place::Memory => 'm',
            Place::Disk => 'd',
            Place::Lossy => 'l',
            Place::Compressed => 'c',
            Place::Remote => 'r',
            Place::Hidden => '?',
            Place::Damaged => 'x',
        }
    }
}

/// What a name in a layer's directory is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::cli) enum Kind {
    Page,
    Tail,
    /// What a recurrent layer is after so many tokens.
    State,
}

/// One page, tail or state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::cli) struct Page {
    pub(in crate::cli) kind: Kind,
    /// Its first token; of a state, the tokens before it.
    pub(in crate::cli) start: u64,
    pub(in crate::cli) place: Place,
    pub(in crate::cli) encoding: String,
    pub(in crate::cli) bytes: u64,
    /// Seconds since 1970.
    pub(in crate::cli) used_seconds: u64,
    pub(in crate::cli) links: u64,
    pub(in crate::cli) is_pinned: bool,
    pub(in crate::cli) is_lossy: bool,
}

impl Page {
    /// Of a line; nothing of one that is about something else.
    pub(in crate::cli) fn parse(line: &str) -> Option<Page> {
        let mut words = line.split(' ');
        let (kind, start) = match layer_entry(words.next()?.as_bytes()) {
            LayerEntry::Page(start) => (Kind::Page, start.0),
            LayerEntry::Tail(start) => (Kind::Tail, start.0),
            LayerEntry::State(tokens) => (Kind::State, tokens.0),
            LayerEntry::Staging | LayerEntry::Other => return None,
        };
        let (tier, encoding) = (words.next()?, words.next()?);
        let mut number = || words.next()?.parse::<i64>().ok();
        let (bytes, used, links) = (number()?, number()?, number()?);
        let flags: Vec<&str> = words.next().unwrap_or_default().split(',').collect();
        let [is_pinned, is_lossy, is_damaged] =
            ["pinned", "lossy", "damaged"].map(|flag| flags.contains(&flag));
        let place = match (tier, encoding) {
            _ if is_damaged => Place::Damaged,
            ("none", _) => Place::Damaged,
            ("hidden", _) => Place::Hidden,
            ("remote", _) => Place::Remote,
            ("ssd", encoding) if encoding != "raw" => Place::Compressed,
            _ if is_lossy => Place::Lossy,
            ("ram", _) => Place::Memory,
            _ => Place::Disk,
        };
        Some(Page {
            kind,
            start,
            place,
            encoding: encoding.to_owned(),
            bytes: unsigned(bytes),
            used_seconds: unsigned(used),
            links: unsigned(links),
            is_pinned,
            is_lossy,
        })
    }

    /// Whether other sequences have it too.
    pub(in crate::cli) fn is_shared(&self) -> bool {
        self.links > 1
    }
}

fn unsigned(number: i64) -> u64 {
    u64::try_from(number).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places() {
        fn check(line: &str, expected: Place) {
            let line = format!("0000032.safetensors {line}");
            assert_eq!(Page::parse(&line).unwrap().place, expected, "{line}");
        }
        check("ram raw 1 2 1 -", Place::Memory);
        check("ssd raw 1 2 1 -", Place::Disk);
        check("ssd zst 1 2 1 pinned", Place::Compressed);
        check("remote zst 1 2 1 lossy", Place::Remote);
        check("ssd raw 1 2 1 lossy", Place::Lossy);
        check("ssd raw 1 2 1 pinned,damaged", Place::Damaged);
        check("none raw 1 2 1 -", Place::Damaged);
        check("hidden hidden 1 2 1 -", Place::Hidden);
    }

    #[test]
    fn lines() {
        let page =
            Page::parse("0000032.safetensors ssd raw 8192 1700000000 3 pinned,later").unwrap();
        let expected = (Kind::Page, 32, 8192, 1_700_000_000, true, true);
        let found = (page.kind, page.start, page.bytes, page.used_seconds, page.is_pinned);
        assert_eq!((found.0, found.1, found.2, found.3, found.4, page.is_shared()), expected);
        assert_eq!(Page::parse("0000064.tail ssd raw 0 -5 1 -").unwrap().used_seconds, 0);
        assert_eq!(
            Page::parse("state-0000064.safetensors ssd raw 9 5 1").unwrap().kind,
            Kind::State
        );
        for wrong in ["", "x ssd raw 1 2 1 -", "0000064.tail ssd raw", "0000064.tail a b c d e f"] {
            assert_eq!(Page::parse(wrong), None, "{wrong}");
        }
    }
}
