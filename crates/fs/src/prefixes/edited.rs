//! Sequences whose tokens were removed or moved: how far a prefix of theirs is what its tokens say.
//!
//! Commits and questions read `positions.json`, so it never leaves the disk. One that is not there
//! (it left under another name, or with a kvfs that let it go) is unknown until it was fetched, which
//! happens beside them: nothing here waits for the remote.

use std::sync::PoisonError;

use super::access::{Files, Readers};
use super::find::Positioned;
use super::index::Indexer;
use super::slot::size_and_time;
use crate::{FileSystem, FsError};
use kvfs_page::{MAX_POSITIONS_BYTES, Positions, names};
use kvfs_storage::store::metadata::TokensChange;
use kvfs_storage::store::record::InodeId;

impl Positioned for FileSystem {
    fn positions_of(&self, sequence: InodeId) -> Result<Option<Positions>, FsError> {
        if size_and_time(&self.core, sequence, names::POSITIONS)?.0 > MAX_POSITIONS_BYTES as u64
            || self.indexer().note_away(sequence)?
        {
            return Ok(None);
        }
        match self.whole_file((sequence, names::POSITIONS), Readers::NOBODY) {
            Ok(None) => Ok(Some(Positions::default())),
            Ok(Some(json)) => Ok(Positions::parse(&json).ok()),
            Err(error) => {
                log::warn!("{} of a sequence cannot be read: {error}", names::POSITIONS);
                Ok(None)
            }
        }
    }
}

impl Indexer<'_> {
    /// Notes that the `positions.json` of a sequence must be fetched, if only the remote has it.
    /// Whether it must.
    pub(crate) fn note_away(&self, sequence: InodeId) -> Result<bool, FsError> {
        let entry = self.finder.core().state().entry(sequence, names::POSITIONS.as_bytes())?;
        let is_away = entry.is_some_and(|entry| self.finder.waits_for_remote(entry.inode));
        if is_away {
            let mut away = self.prefixes.away.lock().unwrap_or_else(PoisonError::into_inner);
            away.insert(sequence);
        }
        Ok(is_away)
    }
}

/// Fetches what was noted. What the remote does not give now stays noted.
pub(crate) fn fetch_positions(fs: &FileSystem) -> Result<(), FsError> {
    loop {
        let next = {
            let away = fs.prefixes.away.lock().unwrap_or_else(PoisonError::into_inner);
            away.first().copied()
        };
        let Some(sequence) = next else { return Ok(()) };
        let entry = fs.core.state().entry(sequence, names::POSITIONS.as_bytes())?;
        let fetched = match entry {
            Some(entry) => fs.open_file(entry.inode, libc::O_RDONLY).map(Some),
            None => Ok(None),
        };
        match fetched {
            Ok(opened) => {
                opened.map(|opened| fs.release(opened.handle)).transpose()?;
                fs.core.state().metadata.tokens_changed(sequence, TokensChange::Grown);
            }
            Err(FsError::Remote(error)) if error.is_outage() => {
                return Err(FsError::Remote(error));
            }
            // Whoever needs it asks again.
            Err(error) => log::warn!("{} of a sequence: {error}", names::POSITIONS),
        }
        fs.prefixes.away.lock().unwrap_or_else(PoisonError::into_inner).remove(&sequence);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::unmounted::Unmounted;

    #[test]
    fn rows_stand_where_they_were_written_unless_it_is_said_where() {
        let unmounted = Unmounted::new();
        let (fs, model) = (&unmounted.fs, unmounted.make_model(1));
        let sequence = model.make_sequence("s", &[0], 1);
        assert_eq!(fs.positions_of(sequence).unwrap(), Some(Positions::default()));
        let json =
            br#"{"schema_version":1,"edited_at":80,"runs":[[0,10,0,0],[20,60,20,0]],"next":[80,80]}"#;
        let id = unmounted.write(sequence, names::POSITIONS, json);
        let expected = Positions::parse(json).unwrap();
        assert_ne!(expected, Positions::default());
        assert_eq!(fs.positions_of(sequence).unwrap(), Some(expected));
        unmounted.write(sequence, "broken", b"{");
        let [from, to] =
            ["broken", names::POSITIONS].map(|name| crate::unmounted::place(sequence, name));
        fs.rename(&from, &to, 0).unwrap();
        assert_eq!(fs.positions_of(sequence).unwrap(), None, "nothing of it can be told");
        assert!(!fs.indexer().note_away(sequence).unwrap());
        assert_ne!(unmounted.id_of(sequence, names::POSITIONS), Some(id));
    }

    #[test]
    fn what_was_away_and_is_here_is_not_asked_for_again() {
        let unmounted = Unmounted::new();
        let (fs, model) = (&unmounted.fs, unmounted.make_model(1));
        let sequence = model.make_sequence("s", &[0], 1);
        unmounted.write(sequence, names::POSITIONS, b"{}");
        fs.prefixes.away.lock().unwrap().extend([sequence, model.sequences]);
        fetch_positions(fs).unwrap();
        assert!(fs.prefixes.away.lock().unwrap().is_empty());
        assert!(fs.core.state().handles.is_empty());
    }
}
