//! When a scrub of the whole store ended last: kept with the root, since a store that nobody has scrubbed for months is worth
//! an alert whether or not it was mounted anew meanwhile.

use crate::FsError;
use crate::core::Core;
use crate::history::written;
use kvfs_storage::store::record::{InodeId, Time};

/// Kept as an attribute of the root, which is not listed.
pub(crate) const SCRUBBED: &[u8] = b"user.kvfs.scrubbed";

/// A scrub of everything that came to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LastScrub {
    /// When, in seconds since 1970.
    pub(super) ended: i64,
    pub(super) files: u64,
    /// Of them, those that were not compared: only the remote has them, or they have no checksum yet.
    pub(super) skipped: u64,
    pub(super) damaged: u64,
    pub(super) repaired: u64,
}

impl LastScrub {
    /// What is on record; `None` if there never was one.
    pub(super) fn of(core: &Core) -> Option<LastScrub> {
        let value = core.state().metadata.attribute(InodeId::ROOT, SCRUBBED).ok()??;
        LastScrub::parse(std::str::from_utf8(&value).ok()?)
    }

    fn parse(text: &str) -> Option<LastScrub> {
        let (ended, counts) = text.split_once(' ')?;
        let counts: Vec<u64> = counts.split(' ').map(str::parse).collect::<Result<_, _>>().ok()?;
        let (files, damaged, repaired, skipped) = match counts[..] {
            [files, damaged, repaired] => (files, damaged, repaired, 0),
            [files, damaged, repaired, skipped] => (files, damaged, repaired, skipped),
            _ => return None,
        };
        Some(LastScrub { ended: ended.parse().ok()?, files, skipped, damaged, repaired })
    }

    fn to_text(self) -> String {
        let LastScrub { ended, files, skipped, damaged, repaired } = self;
        format!("{ended} {files} {damaged} {repaired} {skipped}")
    }

    /// Puts it on record, durable with the next commit.
    pub(super) fn record(self, core: &Core) -> Result<(), FsError> {
        let mut state = core.state_to_change()?;
        let life = state.metadata.life(InodeId::ROOT);
        state.metadata.put_attribute(life, InodeId::ROOT, SCRUBBED, self.to_text().as_bytes());
        Ok(())
    }

    /// In seconds; 0 if the clock was set back.
    pub(super) fn age_seconds(self, now: Time) -> u64 {
        u64::try_from(now.seconds.saturating_sub(self.ended)).unwrap_or(0)
    }

    /// A line of `.kvfs/status`.
    pub(super) fn line(self) -> String {
        let LastScrub { files, skipped, damaged, repaired, .. } = self;
        let ended = written(Time { seconds: self.ended, nanoseconds: 0 });
        format!(
            "last_scrub: {ended} files={files} skipped={skipped} damaged={damaged} repaired={repaired}\n"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::unmounted::{FILES, Unmounted};

    const LAST: LastScrub =
        LastScrub { ended: 1_700_000_000, files: 9, skipped: 4, damaged: 2, repaired: 1 };

    #[test]
    fn it_outlives_the_mount() {
        let unmounted = Unmounted::new();
        assert_eq!(LastScrub::of(&unmounted.fs.core), None);
        unmounted.write(FILES, "file", b"bytes");
        LAST.record(&unmounted.fs.core).unwrap();
        let again = unmounted.again();
        assert_eq!(LastScrub::of(&again.fs.core), Some(LAST));
        let listed = again.fs.list_extended_attributes(InodeId::ROOT, crate::Caller::DAEMON);
        assert_eq!(listed.unwrap(), b"");
    }

    #[test]
    fn what_is_on_record_is_read_or_left() {
        assert_eq!(LastScrub::parse(&LAST.to_text()), Some(LAST));
        for text in ["", "1", "1 2 3", "1 2 3 4 5 6", "x 2 3 4", "1 2 3 -4"] {
            assert_eq!(LastScrub::parse(text), None, "{text}");
        }
        // As a kvfs wrote it that did not count them.
        let before = LastScrub::parse("1700000000 9 2 1");
        assert_eq!(before, Some(LastScrub { skipped: 0, ..LAST }));
        let expected =
            "last_scrub: 2023-11-14T22:13:20.000Z files=9 skipped=4 damaged=2 repaired=1\n";
        assert_eq!(LAST.line(), expected);
        assert_eq!(LAST.age_seconds(Time { seconds: 5, nanoseconds: 0 }), 0);
    }
}
