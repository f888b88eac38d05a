//! How an operation changes a sequence: in one step, and only the sequence that it has read.

use std::thread;
use std::time::Duration;

use super::opened::Turn;
use super::rebuild::Rebuild;
use super::source::{Listed, attempt};
use super::work::{Made, Work, work_name};
use super::{SequenceError, Sequences, files};
use crate::page::{Layer, PageError, Positions, names};
use crate::reader::listing::{self, ListedPage};
use crate::reader::page::Home;

/// Nobody has written to a sequence for so long when it changes its directory.
const QUIET: Duration = Duration::from_millis(20);

/// Positions of the new sequence, and how many rows stay.
type Edited = (Positions, u64);

impl Sequences {
    pub(super) fn change(
        &self, name: &str, edit: impl Fn(&mut Positions, u64) -> Result<(), PageError>,
    ) -> Result<(), SequenceError> {
        let edited = |listed: &Listed<'_>| {
            let mut new = listed.listing.positions.clone();
            edit(&mut new, listed.rows).map_err(SequenceError::Positions)?;
            let end = new.end_row(listed.rows);
            Ok((new, end))
        };
        self.fetch(name, edited);
        let turn = self.begin(name)?;
        attempt(&self.path(name), || {
            let listed = turn.list_settled(name)?;
            let old = &listed.listing.positions;
            let (mut new, end) = edited(&listed)?;
            if new.within(0..listed.rows).eq(old.within(0..listed.rows)) {
                // An operation that was ended between its two steps may have left some.
                return turn.remove_pages_without_tokens(&listed, old);
            }
            if end == listed.rows {
                return turn.edit_in_place(&listed, &new);
            }
            new.truncate(end);
            let rebuild = Rebuild { from: &listed, positions: &new, end, keeps_layers: true };
            turn.replace(&rebuild, name, |now| {
                let (mut new, end) = edited(now)?;
                new.truncate(end);
                Ok((new, end))
            })
        })
    }

    /// Brings back the pages that an operation will divide, so that none has to come from a remote during its
    /// turn. What fails here is told when it is read.
    pub(super) fn fetch(
        &self, name: &str, edited: impl FnOnce(&Listed<'_>) -> Result<Edited, SequenceError>,
    ) {
        let _ = self.with_listed(name, |listed| {
            let (positions, end) = edited(&listed)?;
            Rebuild { from: &listed, positions: &positions, end, keeps_layers: true }.fetch(self);
            Ok(())
        });
    }

    /// Removes a sequence, if it is there: at once, then its files.
    ///
    /// # Errors
    /// [`SequenceError::Io`].
    pub fn remove(&self, name: &str) -> Result<(), SequenceError> {
        let (turn, work) = (self.begin(name)?, work_name(name));
        let Some(there) = turn.directory.open_inside(name)? else { return Ok(()) };
        there.check_may_change()?;
        turn.directory.rename(name, &work)?;
        turn.directory.sync()?;
        turn.directory.remove_tree(&work)
    }

    /// Whether each file must be made durable: in a mount one sync at the end is enough.
    pub(super) fn durable(&self) -> bool {
        self.home == Home::Directory
    }
}

impl Turn<'_> {
    /// The rows stay where they are, but pages without any go.
    fn edit_in_place(
        &self, listed: &Listed<'_>, positions: &Positions,
    ) -> Result<(), SequenceError> {
        let json = positions.to_json().unwrap_or_default();
        let directory = listed.held();
        let models = files::models_of_positions(&directory);
        let (name, durable) = (names::POSITIONS, self.all.durable());
        let staged = files::stage(&directory, name, &models, json.as_bytes(), durable)?;
        // The last step before the rename: what somebody appended by now was rotated for where it stood before.
        if let Err(changed) = listed.check_same(&self.all.manifest) {
            files::discard(staged);
            return Err(changed);
        }
        files::put(&directory, name, staged)?;
        if let Err(changed) = listed.check_rows(&self.all.manifest) {
            // These rows, too, were there before.
            let json = listed.listing.positions.to_json().unwrap_or_default();
            files::publish(&directory, name, &models, json.as_bytes())?;
            return Err(changed);
        }
        self.remove_pages_without_tokens(listed, positions)
    }

    fn remove_pages_without_tokens(
        &self, listed: &Listed<'_>, positions: &Positions,
    ) -> Result<(), SequenceError> {
        let mut removed = Vec::new();
        let manifest = &self.all.manifest;
        let page_tokens = u64::from(manifest.geometry().page_tokens());
        for (index, layer) in (0..).zip(&listed.listing.layers) {
            if listing::is_cross(manifest, Layer(index)) {
                continue;
            }
            let has_none =
                |page: &&ListedPage| !positions.has_any(page.start.0..page.start.0 + page_tokens);
            let empty = layer.pages.iter().filter(has_none);
            let gone: Vec<_> = empty.map(|page| names::format_page(page.start)).collect();
            if !gone.is_empty() {
                removed.push((Layer(index), gone));
            }
        }
        files::remove_all(listed, &removed, self.all.home)
    }

    /// Puts what is made of a sequence in its place. What was appended meanwhile is taken for appended before, where
    /// `edited` says that the same comes of it; else the operation must begin again.
    pub(super) fn replace(
        &self, rebuild: &Rebuild<'_>, name: &str,
        edited: impl Fn(&Listed<'_>) -> Result<Edited, SequenceError>,
    ) -> Result<(), SequenceError> {
        let manifest = &self.all.manifest;
        rebuild.from.directory().check_may_change()?;
        let made = rebuild.run(self, name);
        // What went wrong may have come of two states of it.
        let same = rebuild.from.check_grown(manifest, rebuild.end);
        let outcome = same.and(made).and_then(|made| {
            let made = made.open_up(self.all.durable())?;
            let now = self.list_settled(name)?;
            if let Err(changed) = rebuild.from.check_equal(&now) {
                let grown = rebuild.from.check_grown(manifest, rebuild.end)?;
                let (positions, end) = edited(&grown)?;
                if end != rebuild.end || positions != *rebuild.positions {
                    return Err(changed);
                }
            }
            self.exchange_checked(&now, &made, name)
        });
        let removed = self.directory.remove_tree(work_name(name));
        outcome.and(removed)
    }

    /// Two directories change names; they do so again if somebody wrote to the old one meanwhile.
    fn exchange_checked(
        &self, old: &Listed<'_>, made: &Made<'_>, name: &str,
    ) -> Result<(), SequenceError> {
        let manifest = &self.all.manifest;
        // Who appends without rest is found before anything is touched: an append between two exchanges would be torn.
        thread::sleep(QUIET);
        old.check_same(manifest)?;
        made.exchange(name)?;
        let check = || old.check_same_as(&work_name(name), manifest);
        let outcome = check().and_then(|()| {
            self.directory.sync()?;
            // Who had a file of it open has written by now.
            check()
        });
        // Nobody else gave the name to another one since.
        let has_name = || self.directory.find(name).ok().flatten().is_some_and(|it| made.is(&it));
        if outcome.is_err() && has_name() {
            made.exchange_back(name)?;
            self.directory.sync()?;
        }
        outcome
    }

    /// Makes a directory beside another sequence, gives it the name, and removes what had it. Of the source more rows
    /// may have come meanwhile.
    pub(super) fn copy(
        &self, rebuild: &Rebuild<'_>, name: &str, is_there: bool,
    ) -> Result<(), SequenceError> {
        let made = rebuild.run(self, name);
        let same = rebuild.from.check_grown(&self.all.manifest, rebuild.end);
        self.take_over(same.and(made), name, is_there)
    }

    /// Gives what an operation has made the name of the sequence, and removes what is left over.
    pub(super) fn take_over(
        &self, made: Result<Work<'_>, SequenceError>, name: &str, is_there: bool,
    ) -> Result<(), SequenceError> {
        let outcome = made.and_then(|made| {
            let made = made.open_up(self.all.durable())?;
            if is_there { made.exchange(name) } else { made.take_name(name) }?;
            self.directory.sync()
        });
        let removed = self.directory.remove_tree(work_name(name));
        outcome.and(removed)
    }
}
