//! What happened to a file without its user asking for it, and the rings in which that is remembered.
//!
//! A ring has so many slots; the event that finds it full takes the place of the oldest. Losses, refusals and
//! moves have rings of their own, so that neither an engine that writes broken pages all night nor a scan that moves
//! every page pushes out why something was deleted.

use serde::{Deserialize, Deserializer, Serialize};

use super::record::{InodeId, Time};

/// Bytes of a path or a reason that an event keeps: with all rings full of such events they take 200 MB, with
/// those of an ordinary store some 15.
pub const TEXT_BYTES_MAX: usize = 1024;

/// What happened. A new kind is added at the end: stores have the numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum What {
    /// A limit took its name.
    Deleted,
    /// Its bytes were not what was written.
    Damaged,
    /// What was written is no page, manifest or row, and is not there.
    Refused,
    /// A copy of bytes that are wrong was put aside.
    Quarantined,
    /// Its copy in memory went.
    Evicted,
    /// The disk's copy went, the remote has it.
    Demoted,
    /// The disk has it in fewer bytes.
    Encoded,
    /// It came nearer on this machine.
    Promoted,
    /// It came from the remote.
    Fetched,
    /// So many events were not kept.
    Lost,
    /// It could not be moved, fetched, encoded or made durable.
    Failed,
}

impl What {
    /// The word for it.
    pub fn name(self) -> &'static str {
        match self {
            What::Deleted => "deleted",
            What::Damaged => "damaged",
            What::Refused => "refused",
            What::Quarantined => "quarantined",
            What::Evicted => "evicted",
            What::Demoted => "demoted",
            What::Encoded => "encoded",
            What::Promoted => "promoted",
            What::Fetched => "fetched",
            What::Lost => "events lost",
            What::Failed => "failed",
        }
    }

    /// Where it is remembered.
    pub fn ring(self) -> Ring {
        match self {
            What::Deleted | What::Damaged | What::Lost => Ring::Losses,
            What::Refused | What::Quarantined | What::Failed => Ring::Refusals,
            What::Evicted | What::Demoted | What::Encoded | What::Promoted | What::Fetched => {
                Ring::Moves
            }
        }
    }
}

/// One of the rings; its number is part of the store's format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ring {
    /// What cannot be read any more.
    Losses = 0,
    /// What was never there, and what could not be done.
    Refusals = 1,
    /// What is elsewhere.
    Moves = 2,
}

impl Ring {
    /// All of them.
    pub const ALL: [Ring; 3] = [Ring::Losses, Ring::Refusals, Ring::Moves];

    /// Events that it remembers: together some 100,000, which is a day of a busy mount and 15 MB on the disk.
    pub fn slots(self) -> u64 {
        match self {
            Ring::Losses => 1 << 15,
            Ring::Refusals => 1 << 13,
            Ring::Moves => 1 << 16,
        }
    }
}

/// Something that happened. What is not known is absent. A new field is added at the end and may be
/// missing: stores have records without it, and a version before passes over what it does not know.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// Counts all events of a store, which a clock that jumps does not.
    pub number: u64,
    /// When, by the wall clock.
    pub time: Time,
    /// What.
    pub what: What,
    /// Why, for people.
    pub reason: String,
    /// The path then, for people: below the mountpoint, escaped, and shortened at its beginning if it is long.
    pub path: Option<String>,
    /// The file, or the directory of a sequence.
    pub inode: Option<InodeId>,
    /// The directory in which it was last found.
    pub directory: Option<InodeId>,
    /// How many files, or events that were lost; 0 of what is about no file.
    pub files: u64,
    /// Their bytes.
    pub bytes: Option<u64>,
    /// When it was last used.
    pub used: Option<Time>,
    /// The first token that went, where it is the end of a sequence.
    pub from_token: Option<u64>,
    /// How often the policy of the tier had seen it used, its coming there included.
    #[serde(deserialize_with = "appended")]
    pub uses: Option<u64>,
}

/// A field that records of older versions end before.
#[expect(clippy::unnecessary_wraps, reason = "serde calls it")]
fn appended<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u64>, D::Error> {
    Ok(Option::deserialize(deserializer).unwrap_or(None))
}

impl Event {
    /// Something that happened to a file now.
    pub fn new(what: What, reason: impl Into<String>) -> Event {
        Event {
            number: 0,
            time: Time::now(),
            what,
            reason: shortened(reason.into()),
            path: None,
            inode: None,
            directory: None,
            files: 1,
            bytes: None,
            used: None,
            from_token: None,
            uses: None,
        }
    }

    /// The same to this file.
    #[must_use]
    pub fn of(self, inode: InodeId) -> Event {
        Event { inode: Some(inode), ..self }
    }

    /// The same under this path.
    #[must_use]
    pub fn at(self, path: impl Into<Option<String>>) -> Event {
        Event { path: path.into().map(shortened), ..self }
    }

    /// The same to what is in this directory.
    #[must_use]
    pub fn in_directory(self, directory: InodeId) -> Event {
        Event { directory: Some(directory), ..self }
    }

    /// The same to so many bytes.
    #[must_use]
    pub fn with_bytes(self, bytes: u64) -> Event {
        Event { bytes: Some(bytes), ..self }
    }
}

/// What there is of all events: the record from which a mount goes on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EventHeads {
    /// Events that were numbered.
    pub numbered: u64,
    /// Events that each ring was ever given.
    pub given: [u64; 3],
}

impl EventHeads {
    /// How many events a ring was given, and which of them it still has.
    pub fn kept(&self, ring: Ring) -> std::ops::Range<u64> {
        let given = self.given[ring as usize];
        given.saturating_sub(ring.slots())..given
    }
}

/// What stands for the beginning of a text that was longer. No path in a mount begins so.
const MARK: &str = "...";

/// A text within its bound, with its end if it is longer: of paths, that tells more.
fn shortened(text: String) -> String {
    if text.len() <= TEXT_BYTES_MAX {
        return text;
    }
    let from = text.len() - (TEXT_BYTES_MAX - MARK.len());
    let from = (from..=text.len()).find(|at| text.is_char_boundary(*at)).unwrap_or(text.len());
    format!("{MARK}{}", &text[from..])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::database::{decode, encode};

    /// As versions wrote it that knew of no uses.
    #[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
    struct Older {
        number: u64,
        time: Time,
        what: What,
        reason: String,
        path: Option<String>,
        inode: Option<InodeId>,
        directory: Option<InodeId>,
        files: u64,
        bytes: Option<u64>,
        used: Option<Time>,
        from_token: Option<u64>,
    }

    #[test]
    fn versions_read_each_others_records() {
        let time = Time { seconds: 7, nanoseconds: 8 };
        let event =
            Event { time, used: Some(time), uses: Some(3), ..Event::new(What::Evicted, "r") };
        let event = event.of(InodeId(9)).with_bytes(5).at("a/b".to_owned());
        assert_eq!(decode::<Event>(&encode(&event)).unwrap(), event);
        let older: Older = decode(&encode(&event)).unwrap();
        assert_eq!((older.path.as_deref(), older.bytes), (Some("a/b"), Some(5)));
        let read: Event = decode(&encode(&older)).unwrap();
        assert_eq!(read, Event { uses: None, ..event });
    }

    #[test]
    fn texts_are_bounded_wherever_a_letter_ends() {
        for letter in ["a", "ü", "日"] {
            let event = Event::new(What::Deleted, letter.repeat(5000)).at(letter.repeat(300));
            assert!(event.reason.len() <= TEXT_BYTES_MAX);
            assert!(event.reason.len() > TEXT_BYTES_MAX - 4);
            assert!(event.reason.starts_with("...") && event.reason.ends_with(letter));
            assert_eq!(event.path, Some(letter.repeat(300)));
            let path = event.at(letter.repeat(1025)).path.unwrap();
            assert!(path.len() <= TEXT_BYTES_MAX && path.starts_with(MARK), "{path}");
        }
    }
}
