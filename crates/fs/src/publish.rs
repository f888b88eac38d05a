//! Pages, states and manifests appear: whole and verified, or not at all.
//!
//! A page appears by rename from a temporary name ([`Publishing::rename`]) or after the
//! last close when it was written under its own name ([`Publishing::publish`]). Either
//! way the bytes are at rest before they are checked: nobody has them open or mapped for writing.
//! A renamed file whose writer is still there is sealed from a copy. The sealed file is a new
//! inode, so nothing that a client still holds of the old one can reach its bytes.

use std::time::{Duration, Instant};

use super::attributes::Place;
use super::classify::FileClass;
use super::pin::Pins;
use super::residency::Residency;
use super::retention::Retention;
use super::verify::Verify;
use super::{FileSystem, FsError};
use crate::core::Core;
use crate::core::refuse::report_of;
use crate::core::settle::RELEASE_WAIT_MAX;
use crate::core::state::State;
use kvfs_page::names;
use kvfs_storage::ingest::seal::{self, SealError};
use kvfs_storage::store::disk::Access;
use kvfs_storage::store::quarantine::Take;
use kvfs_storage::store::record::{Inode, InodeId, ObjectId};

/// What gives verified bytes their names.
#[derive(Clone, Copy)]
pub(super) struct Publishing<'a> {
    pub(super) core: &'a Core,
    pub(super) residency: Residency<'a>,
    pub(super) retention: &'a Retention,
    pub(super) pins: Pins<'a>,
    /// How bytes are compared before they are taken over.
    pub(super) verify: Verify,
}

impl FileSystem {
    pub(super) fn publishing(&self) -> Publishing<'_> {
        Publishing {
            core: &self.core,
            residency: self.residency(),
            retention: &self.retention,
            pins: self.pins(),
            verify: self.choices.verify(),
        }
    }
}

impl Publishing<'_> {
    /// Answers FLUSH for a page or manifest that is being written under its own name.
    pub(super) fn check(
        &self, id: InodeId, place: &Place, object: ObjectId,
    ) -> Result<(), FsError> {
        if place.name != names::MANIFEST.as_bytes() {
            self.publish_manifest_above(place.parent)?;
        }
        let outcome = match self.core.class_of(place)? {
            (class @ (FileClass::Page(_) | FileClass::State(_)), layer) => self
                .core
                .sealed_place(place.parent, layer, class)
                .and_then(|stands| seal::check_header(&self.core.store, object, &stands)),
            (FileClass::Manifest, _) => self.core.read_manifest(object).map(|_| ()),
            _ => Ok(()),
        };
        outcome.map_err(|error| self.core.report_once(id, place, error))
    }

    /// Seals the manifest above a directory, if it was written in place a moment ago and nobody
    /// has looked at it since: what comes next relies on it.
    pub(super) fn publish_manifest_above(&self, directory: InodeId) -> Result<(), FsError> {
        match self.core.pending_manifest_above(directory) {
            Some(place) => self.publish(&place).map(drop),
            None => Ok(()),
        }
    }

    /// Seals what a new name depends on, if it was written in place a moment ago: the manifest,
    /// and the page that a tail would be.
    pub(super) fn publish_before(&self, place: &Place) -> Result<(), FsError> {
        self.publish_manifest_above(place.parent)?;
        if let Some(page) = page_beside_tail(place) {
            self.publish(&page)?;
        }
        Ok(())
    }

    /// Seals what was written in place in a directory, or everywhere, and whose writers are done.
    /// The last release cannot always do it: it may arrive before the kernel has let go of the
    /// backing file, and a mapping goes away without notice.
    pub(super) fn publish_all(&self, directory: Option<InodeId>) {
        let places: Vec<Place> = {
            let state = self.core.state();
            let here = |place: &&Place| directory.is_none_or(|parent| place.parent == parent);
            state.pending.keys().filter(here).cloned().collect()
        };
        // Descriptors of theirs may be left in another program: they are waited for together.
        let begun = Instant::now();
        for place in places {
            let longest = RELEASE_WAIT_MAX.saturating_sub(begun.elapsed());
            if let Err(error) = self.publish_within(&place, longest) {
                log::warn!("{}: {error}", self.core.state().path(place.parent, &place.name));
            }
        }
    }

    /// Seals what was written under this name, if its writers are done. Returns whether the name
    /// may be there now.
    pub(super) fn publish(&self, place: &Place) -> Result<bool, FsError> {
        self.publish_within(place, RELEASE_WAIT_MAX)
    }

    /// The same, waiting so long for writers that have closed a descriptor each.
    fn publish_within(&self, place: &Place, longest: Duration) -> Result<bool, FsError> {
        if !self.core.class_of(place).is_ok_and(|(class, _)| class.is_sealed()) {
            return Ok(false);
        }
        if place.name != names::MANIFEST.as_bytes() {
            self.publish_manifest_above(place.parent)?;
        }
        // One thread seals, another that looks the name up waits for it.
        let _turn = self.core.sealing_turns.take(place);
        let waiting = self.core.state().pending.get(place).cloned().unwrap_or_default();
        for id in waiting {
            let Some(object) = claim_pending(self.core, id, longest)? else {
                continue;
            };
            let outcome = self.seal(place, id, object);
            if let Err(error) = outcome {
                // The writer heard of a refusal at close(); a lookup only finds nothing.
                let level = if error.is_internal() { log::Level::Warn } else { log::Level::Debug };
                log::log!(level, "{}: {error}", self.core.state().path(place.parent, &place.name));
            }
            self.core.state().drop_node_if_idle(id)?;
        }
        Ok(true)
    }

    /// Seals or refuses a file that [`claim_pending`] took over. If the disk fails, it
    /// waits for the next attempt.
    fn seal(&self, place: &Place, id: InodeId, object: ObjectId) -> Result<(), FsError> {
        let outcome = self.core.verify_as(object, place);
        let mut state = self.core.state();
        state.sealing.remove(&id);
        if let Err(SealError::Io(error)) = outcome {
            if state.waits_as(place, id) {
                state.unsettled.insert(id, object);
                state.nodes.entry(id).or_default().pending = Some(Box::new(place.clone()));
            }
            return Err(error.into());
        }
        // Not earlier: a lookup that finds it waiting waits for it.
        if !state.forget_pending(place, id) {
            // Its directory went meanwhile, and the file with it.
            return Ok(());
        }
        if state.refusal.is_some() {
            return Err(FsError::ReadOnly);
        }
        let source = state.inode(id)?;
        let mut emptied = source.clone();
        if let Some(file) = emptied.file_mut() {
            file.object = None;
        }
        if let Some(node) = state.nodes.get_mut(&id) {
            node.stale = true;
        }
        let origin = state.origin(id, source)?;
        state.drop_link(id, &mut emptied)?;
        match outcome {
            Ok(verified) => {
                self.insert_sealed(&mut state, &origin, place, (object, &verified))?;
                self.core.announce(place);
                Ok(())
            }
            Err(error) => {
                state.metadata.staged.remove(&object);
                drop(state);
                self.core.quarantine(place, object, Take::Move, &error);
                Err(self.core.report_once(id, place, error))
            }
        }
    }

    /// Seals a file by renaming it onto the name of a page or manifest.
    pub(super) fn rename(&self, id: InodeId, from: &Place, to: &Place) -> Result<(), FsError> {
        let _turn = self.core.sealing_turns.take(to);
        check_length(self.core, id, to)?;
        let (source, object, taken) = self.take_over(id)?;
        let outcome = self.core.verify_as(object, to);
        let mut state = self.core.state_to_change()?;
        state.sealing.remove(&id);
        let verified = match outcome {
            Ok(verified) => verified,
            Err(error) => {
                match error {
                    _ if taken => {}
                    SealError::Io(_) => state.metadata.remove_object(object),
                    SealError::Refused(_) => drop(state.metadata.staged.remove(&object)),
                }
                drop(state);
                let take =
                    if taken { Take::Beginning(self.core.kept_bytes(to)) } else { Take::Move };
                self.core.quarantine(to, object, take, &error);
                return Err(report_of(self.core, id, to, error));
            }
        };
        let origin = state.origin(id, source)?;
        state.remove_source(id, from, taken)?;
        self.insert_sealed(&mut state, &origin, to, (object, &verified))
    }

    /// The bytes of a file for another inode: the object itself if nobody else can reach it, else
    /// a copy. Returns the file's record, the object, and whether it was taken from the file.
    pub(super) fn take_over(&self, id: InodeId) -> Result<(Inode, ObjectId, bool), FsError> {
        self.residency.with_resident(self.verify, id, || take_over_resident(self.core, id))
    }
}

/// Refuses a file that is longer than what a name stands for before any of it is copied or hashed.
fn check_length(core: &Core, id: InodeId, to: &Place) -> Result<(), FsError> {
    let object = {
        let state = core.state();
        let inode = state.inode(id)?;
        let size = state.attributes_of(&core.store, id, &inode)?.size;
        let object = inode.file().and_then(|file| state.current_object(id, file));
        (size > core.kept_bytes_of(state, to)).then_some(object).flatten()
    };
    let Some(object) = object else { return Ok(()) };
    let outcome = match core.class_of(to)? {
        (class @ (FileClass::Page(_) | FileClass::State(_)), layer) => core
            .sealed_place(to.parent, layer, class)
            .and_then(|stands| seal::check_header(&core.store, object, &stands)),
        _ => core.read_manifest(object).map(drop),
    };
    match outcome {
        Ok(()) => Ok(()),
        // The remote has it.
        Err(SealError::Io(error)) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Err(error) => {
            core.quarantine(to, object, Take::Beginning(core.kept_bytes(to)), &error);
            Err(report_of(core, id, to, error))
        }
    }
}

fn take_over_resident(core: &Core, id: InodeId) -> Result<(Inode, ObjectId, bool), FsError> {
    let mut state = core.wait_for_release(core.state_to_change()?, id);
    let mut source = state.inode(id)?;
    let replaced = state.adopt(id, &mut source)?;
    if let Some(old) = replaced {
        state.put_inode(id, &source);
        state.drop_object(old)?;
    }
    let object = source.file().and_then(|file| file.object).ok_or(FsError::Stale)?;
    let file = core.store.open_object(object, Access::Read)?;
    if state.unsettled.contains_key(id) {
        source.mtime = file.stat()?.mtime;
    }
    let alone = source.links == 1 && !core.has_writers(&state, id);
    if alone && file.is_at_rest()? {
        state.sealing.insert(id);
        return Ok((source, object, true));
    }
    drop(state);
    Ok((source, core.copy_object(object)?, false))
}

/// Takes a pending file over for sealing if its bytes are at rest.
fn claim_pending(core: &Core, id: InodeId, longest: Duration) -> Result<Option<ObjectId>, FsError> {
    let mut state = core.wait_so_long_for_release(core.state(), id, longest);
    let Some(&object) = state.unsettled.get(id) else {
        return Ok(None);
    };
    if core.has_writers(&state, id) || !seal::is_at_rest(&core.store, object)? {
        return Ok(None);
    }
    state.unsettled.remove(id);
    // A descriptor for reading leads to the file as well, and could be opened for writing.
    state.sealing.insert(id);
    if let Some(ram) = &core.store.ram {
        ram.note_at_rest(object);
    }
    if let Some(node) = state.nodes.get_mut(&id) {
        node.pending = None;
    }
    Ok(Some(object))
}

/// The page that begins where a tail of this name does, if it is the name of one.
pub(super) fn page_beside_tail(place: &Place) -> Option<Place> {
    let start = names::parse_tail(&place.name)?;
    Some(Place { parent: place.parent, name: names::format_page(start).into_bytes() })
}

impl State {
    /// Whether a file is being written under this name.
    fn waits_as(&self, place: &Place, id: InodeId) -> bool {
        self.pending.get(place).is_some_and(|waiting| waiting.contains(&id))
    }

    /// Takes a file off those that are being written under a name. Returns whether it was there.
    fn forget_pending(&mut self, place: &Place, id: InodeId) -> bool {
        let was_there = self.waits_as(place, id);
        if let Some(waiting) = self.pending.get_mut(place) {
            waiting.retain(|other| *other != id);
            if waiting.is_empty() {
                self.pending.remove(place);
            }
        }
        was_there
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Caller;
    use crate::unmounted::{PAGE_TOKENS, Unmounted, place};
    use kvfs_page::TokenStart;

    #[test]
    fn pages_whose_descriptors_another_program_has_are_waited_for_together() {
        const PAGES: u32 = 100;
        let unmounted = Unmounted::new();
        let (fs, model) = (&unmounted.fs, unmounted.make_model(1));
        let layer = model.make_layer(model.make_sequence("s", &[], 1), 0);
        for page in 0..PAGES {
            let name = names::format_page(TokenStart(u64::from(page * PAGE_TOKENS)));
            let created = fs.create(&place(layer, &name), 0o644, Caller::DAEMON, true).unwrap();
            fs.write(created.opened.handle, 0, b"a beginning", false).unwrap();
            fs.flush(created.opened.handle).unwrap_err();
        }
        assert_eq!(fs.core.state().pending.len(), PAGES as usize);
        let begun = Instant::now();
        fs.publishing().publish_all(None);
        // A third of what it took when each was waited for alone.
        assert!(begun.elapsed() < RELEASE_WAIT_MAX * PAGES / 3);
        assert_eq!(fs.core.state().pending.len(), PAGES as usize);
    }
}
