//! Pages and manifests appear: whole and verified, or not at all.
//!
//! A page appears by rename from a temporary name ([`FileSystem::publish_renamed`]) or after the
//! last close when it was written under its own name ([`FileSystem::publish_pending`]). Either
//! way the bytes are at rest before they are checked: nobody has them open or mapped for writing.
//! A renamed file whose writer is still there is sealed from a copy. The sealed file is a new
//! inode, so nothing that a client still holds of the old one can reach its bytes.

use std::sync::{Arc, MutexGuard};

use super::attributes::Place;
use super::classify::{self, FileClass};
use super::insert::Verified;
use super::state::State;
use super::{FileSystem, FsError};
use kvfs_page::{Manifest, PageError, names};
use kvfs_storage::ingest::model::{MANIFEST_BYTES_MAX, ManifestError, Model};
use kvfs_storage::ingest::seal::{self, SealError};
use kvfs_storage::store::disk::{Access, read_all};
use kvfs_storage::store::quarantine::{self, Take};
use kvfs_storage::store::record::{
    DEPTH_MAX, DirectoryClass, Inode, InodeId, Kind, ObjectId, PageRecord, Role,
};

impl FileSystem {
    /// The model above a directory of its tree.
    pub(super) fn model_of(
        &self, state: &mut State, directory: InodeId,
    ) -> Result<Arc<Model>, SealError> {
        let id = model_directory(state, directory)?;
        if let Some(model) = state.models.get(&id) {
            return Ok(Arc::clone(model));
        }
        let missing = || {
            SealError::Refused(PageError::Manifest(
                "the model has no manifest.json: create it before the pages (kvfs create)".into(),
            ))
        };
        let entry = state.entry(id, names::MANIFEST.as_bytes())?;
        let inode = state.inode(entry.ok_or_else(missing)?.inode)?;
        let object = inode.file().and_then(|file| file.object).ok_or_else(missing)?;
        let model = Arc::new(Model::load(&self.store, object).map_err(|error| match error {
            ManifestError::Io(error) => SealError::Io(error),
            ManifestError::Refused(error) => SealError::Refused(error),
        })?);
        state.models.insert(id, Arc::clone(&model));
        Ok(model)
    }

    /// Answers FLUSH for a page or manifest that is being written under its own name.
    pub(super) fn check_pending(
        &self, id: InodeId, place: &Place, object: ObjectId,
    ) -> Result<(), FsError> {
        if place.name != names::MANIFEST.as_bytes() {
            self.publish_manifest_above(place.parent)?;
        }
        let outcome = match self.class_of(place)? {
            (FileClass::Page(start), layer) => self
                .page_place(place.parent, layer, start)
                .and_then(|page| seal::check_header(&self.store, object, &page)),
            (FileClass::Manifest, _) => self.read_manifest(object).map(|_| ()),
            _ => Ok(()),
        };
        outcome.map_err(|error| self.report_once(id, place, error))
    }

    /// Seals the manifest above a directory, if it was written in place a moment ago and nobody
    /// has looked at it since: what comes next relies on it.
    pub(super) fn publish_manifest_above(&self, directory: InodeId) -> Result<(), FsError> {
        match self.pending_manifest_above(directory) {
            Some(place) => self.publish_pending(&place).map(drop),
            None => Ok(()),
        }
    }

    /// The manifest above a directory, if it is being written in place.
    pub(super) fn pending_manifest_above(&self, directory: InodeId) -> Option<Place> {
        let state = self.state();
        if state.pending.is_empty() {
            return None;
        }
        let parent = model_directory(&state, directory).ok()?;
        let place = Place { parent, name: names::MANIFEST.as_bytes().to_vec() };
        state.pending.contains_key(&place).then_some(place)
    }

    /// Seals what a new name depends on, if it was written in place a moment ago: the manifest,
    /// and the page that a tail would be.
    pub(super) fn publish_before(&self, place: &Place) -> Result<(), FsError> {
        self.publish_manifest_above(place.parent)?;
        if let Some(page) = page_beside_tail(place) {
            self.publish_pending(&page)?;
        }
        Ok(())
    }

    /// Seals what was written in place in a directory, or everywhere, and whose writers are done.
    /// The last release cannot always do it: it may arrive before the kernel has let go of the
    /// backing file, and a mapping goes away without notice.
    pub(super) fn publish_all_pending(&self, directory: Option<InodeId>) {
        let places: Vec<Place> = {
            let state = self.state();
            let here = |place: &&Place| directory.is_none_or(|parent| place.parent == parent);
            state.pending.keys().filter(here).cloned().collect()
        };
        for place in places {
            if let Err(error) = self.publish_pending(&place) {
                log::warn!("{}: {error}", self.state().path(place.parent, &place.name));
            }
        }
    }

    /// Seals what was written under this name, if its writers are done. Returns whether the name
    /// may be there now.
    pub(super) fn publish_pending(&self, place: &Place) -> Result<bool, FsError> {
        if !self.class_of(place).is_ok_and(|(class, _)| class.is_sealed()) {
            return Ok(false);
        }
        if place.name != names::MANIFEST.as_bytes() {
            self.publish_manifest_above(place.parent)?;
        }
        // One thread seals, another that looks the name up waits for it.
        let _turn = self.sealing_turns.take(place);
        let waiting = self.state().pending.get(place).cloned().unwrap_or_default();
        for id in waiting {
            let Some(object) = self.claim_pending(id)? else {
                continue;
            };
            let outcome = self.seal_pending(place, id, object);
            if let Err(error) = outcome {
                // The writer heard of a refusal at close(); a lookup only finds nothing.
                let level = if error.is_internal() { log::Level::Warn } else { log::Level::Debug };
                log::log!(level, "{}: {error}", self.state().path(place.parent, &place.name));
            }
            self.state().drop_node_if_idle(id)?;
        }
        Ok(true)
    }

    /// Takes a pending file over for sealing if its bytes are at rest.
    fn claim_pending(&self, id: InodeId) -> Result<Option<ObjectId>, FsError> {
        let mut state = self.wait_for_release(self.state(), id);
        let Some(&object) = state.unsettled.get(id) else {
            return Ok(None);
        };
        if self.has_writers(&state, id) || !seal::is_at_rest(&self.store, object)? {
            return Ok(None);
        }
        state.unsettled.remove(id);
        // A descriptor for reading leads to the file as well, and could be opened for writing.
        state.sealing.insert(id);
        if let Some(ram) = &self.store.ram {
            ram.note_at_rest(object);
        }
        if let Some(node) = state.nodes.get_mut(&id) {
            node.pending = None;
        }
        Ok(Some(object))
    }

    /// Seals or refuses a file that [`FileSystem::claim_pending`] took over. If the disk fails, it
    /// waits for the next attempt.
    fn seal_pending(&self, place: &Place, id: InodeId, object: ObjectId) -> Result<(), FsError> {
        let outcome = self.verify_as(object, place);
        let mut state = self.state();
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
            node.superseded = true;
        }
        let origin = state.origin(id, source)?;
        state.drop_link(id, &mut emptied)?;
        match outcome {
            Ok(verified) => {
                self.insert_sealed(&mut state, &origin, place, (object, &verified))?;
                self.announce(place);
                Ok(())
            }
            Err(error) => {
                state.metadata.staged.remove(&object);
                drop(state);
                self.quarantine(place, object, Take::Move, &error);
                Err(self.report_once(id, place, error))
            }
        }
    }

    /// Seals a file by renaming it onto the name of a page or manifest.
    pub(super) fn publish_renamed(
        &self, id: InodeId, from: &Place, to: &Place,
    ) -> Result<(), FsError> {
        let _turn = self.sealing_turns.take(to);
        self.check_length(id, to)?;
        let (source, object, taken) = self.take_over(id)?;
        let outcome = self.verify_as(object, to);
        let mut state = self.state_to_change()?;
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
                let take = if taken { Take::Beginning(self.kept_bytes(to)) } else { Take::Move };
                self.quarantine(to, object, take, &error);
                return Err(self.report(to, error));
            }
        };
        let origin = state.origin(id, source)?;
        state.remove_source(id, from, taken)?;
        self.insert_sealed(&mut state, &origin, to, (object, &verified))
    }

    /// Refuses a file that is longer than what a name stands for before any of it is copied or hashed.
    fn check_length(&self, id: InodeId, to: &Place) -> Result<(), FsError> {
        let object = {
            let state = self.state();
            let inode = state.inode(id)?;
            let size = state.attributes_of(&self.store, id, &inode)?.size;
            let object = inode.file().and_then(|file| state.current_object(id, file));
            (size > self.kept_bytes_of(state, to)).then_some(object).flatten()
        };
        let Some(object) = object else { return Ok(()) };
        let outcome = match self.class_of(to)? {
            (FileClass::Page(start), layer) => self
                .page_place(to.parent, layer, start)
                .and_then(|page| seal::check_header(&self.store, object, &page)),
            _ => self.read_manifest(object).map(drop),
        };
        match outcome {
            Ok(()) => Ok(()),
            // The remote has it.
            Err(SealError::Io(error)) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
            Err(error) => {
                self.quarantine(to, object, Take::Beginning(self.kept_bytes(to)), &error);
                Err(self.report(to, error))
            }
        }
    }

    /// The bytes of a file for another inode: the object itself if nobody else can reach it, else
    /// a copy. Returns the file's record, the object, and whether it was taken from the file.
    pub(super) fn take_over(&self, id: InodeId) -> Result<(Inode, ObjectId, bool), FsError> {
        self.with_resident(id, || self.take_over_resident(id))
    }

    fn take_over_resident(&self, id: InodeId) -> Result<(Inode, ObjectId, bool), FsError> {
        let mut state = self.wait_for_release(self.state_to_change()?, id);
        let mut source = state.inode(id)?;
        let replaced = state.adopt(id, &mut source)?;
        if let Some(old) = replaced {
            state.put_inode(id, &source);
            state.drop_object(old)?;
        }
        let object = source.file().and_then(|file| file.object).ok_or(FsError::Stale)?;
        let file = self.store.open_object(object, Access::Read)?;
        if state.unsettled.contains_key(id) {
            source.mtime = file.stat()?.mtime;
        }
        let alone = source.links == 1 && !self.has_writers(&state, id);
        if alone && file.is_at_rest()? {
            state.sealing.insert(id);
            return Ok((source, object, true));
        }
        drop(state);
        Ok((source, self.copy_object(object)?, false))
    }

    /// Copies an object's bytes to a new object on the disk.
    pub(super) fn copy_object(&self, object: ObjectId) -> Result<ObjectId, FsError> {
        let copy = self.state().metadata.new_object();
        seal::copy(&self.store, object, copy).inspect_err(|_| {
            self.state().metadata.remove_object(copy);
        })?;
        Ok(copy)
    }

    /// A name appeared that the kernel did not make itself, as it does when it renames. Where pages,
    /// manifests and sequences are, it looks every absent name up again, so it need not be told of the name;
    /// that would wait for the lock of the directory, which somebody may hold who waits for the
    /// daemon. A daemon that is killed meanwhile would never end.
    pub(super) fn announce(&self, place: &Place) {
        // Whoever wrote the row or byte that made the name may list the directory next.
        if let Some(super::AskAnew(ask_anew)) = self.ask_anew.get() {
            ask_anew(place.parent);
        }
    }

    /// Checks the bytes of an object as what a name says they are.
    fn verify_as(&self, object: ObjectId, place: &Place) -> Result<Verified, SealError> {
        match self.class_of(place)? {
            (FileClass::Page(start), layer) => {
                let page = self.page_place(place.parent, layer, start)?;
                let verified = seal::verify_page(&self.store, object, &page)?;
                let tokens = verified.header.tokens;
                let role = page_role(&page, tokens, verified.digest.page.0);
                let length = page.geometry().file_bytes(tokens);
                let checksum = verified.digest.object.0;
                let twin = self.find_twin(object, role, checksum)?;
                Ok(Verified { role, checksum, length, twin })
            }
            (FileClass::Manifest, _) => self.verify_manifest(object, place),
            _ => Err(FsError::Invalid.into()),
        }
    }

    /// Checks a manifest, also against the one that it would replace: it is written once.
    fn verify_manifest(&self, object: ObjectId, place: &Place) -> Result<Verified, SealError> {
        let (manifest, bytes) = self.read_manifest(object)?;
        let mut state = self.state();
        let existing = state.entry(place.parent, &place.name)?;
        if existing.is_some() {
            let model = self.model_of(&mut state, place.parent)?;
            let used = state.entry(place.parent, names::SEQUENCES.as_bytes())?;
            let mut has_sequences = false;
            if let Some(sequences) = used {
                let found = state.metadata.entries(sequences.inode, 0, |_, _, _| {
                    has_sequences = true;
                    false
                });
                found.map_err(FsError::from)?;
            }
            if has_sequences && !model.manifest.same_cache(&manifest) {
                return Err(SealError::Refused(PageError::Manifest(
                    "the model has sequences of another geometry or identity: a manifest is \
                     written once, make a new model directory"
                        .into(),
                )));
            }
        }
        let checksum = kvfs_page::content_checksum(&bytes).0;
        let length = bytes.len() as u64;
        Ok(Verified { role: Role::Manifest, checksum, length, twin: None })
    }

    fn read_manifest(&self, object: ObjectId) -> Result<(Manifest, Vec<u8>), SealError> {
        let file = self.store.open_object(object, Access::Read).map_err(SealError::Io)?;
        let bytes = read_all(file.as_ref(), MANIFEST_BYTES_MAX)
            .map_err(|error| SealError::Refused(PageError::Manifest(error.to_string())))?;
        let manifest = Manifest::parse(&bytes).map_err(SealError::Refused)?;
        Ok((manifest, bytes))
    }

    /// Where a page stands.
    pub(super) fn page_place(
        &self, directory: InodeId, layer: u32, start: u64,
    ) -> Result<kvfs_page::PagePlace, SealError> {
        let model = self.model_of(&mut self.state(), directory)?;
        model.place(layer, start).map_err(SealError::Refused)
    }

    /// What a name means, and the layer of its directory.
    pub(super) fn class_of(&self, place: &Place) -> Result<(FileClass, u32), FsError> {
        let (_, directory) = self.state().directory(place.parent)?;
        let layer = if let DirectoryClass::Layer(layer) = directory { layer } else { 0 };
        Ok((classify::file(directory, &place.name), layer))
    }

    /// The layer of a directory; 0 where it is none.
    pub(super) fn layer_of(&self, directory: InodeId) -> Result<u32, FsError> {
        let (_, class) = self.state().directory(directory)?;
        Ok(if let DirectoryClass::Layer(layer) = class { layer } else { 0 })
    }

    /// Tells why something was refused: in `.kvfs/errors`, in the log, and by errno.
    pub(super) fn report(&self, place: &Place, error: SealError) -> FsError {
        match error {
            SealError::Io(error) => FsError::Io(error),
            SealError::Refused(error) => {
                let path = self.state().path(place.parent, &place.name);
                self.observer.refused(&path, error.reason(), &error.to_string());
                FsError::Refused
            }
        }
    }

    /// [`FileSystem::report`] for a file that is looked at more than once, at each `close()` and
    /// when it would be sealed.
    fn report_once(&self, id: InodeId, place: &Place, error: SealError) -> FsError {
        if let (SealError::Refused(error), Some(node)) = (&error, self.state().nodes.get_mut(&id)) {
            let text = Some(error.to_string());
            if node.refusal == text {
                return FsError::Refused;
            }
            node.refusal = text;
        }
        self.report(place, error)
    }

    fn quarantine(&self, place: &Place, object: ObjectId, take: Take, error: &SealError) {
        let SealError::Refused(error) = error else {
            return;
        };
        let path = self.state().path(place.parent, &place.name);
        let reason = format!("{path}: {error}");
        if let Err(error) = quarantine::put(&self.store, object, take, &reason) {
            log::warn!("{path}: its bytes could not be kept in quarantine: {error}");
        }
    }

    /// Bytes that are kept of a file that was refused under a name: as many as one that is right has.
    fn kept_bytes(&self, place: &Place) -> u64 {
        self.kept_bytes_of(self.state(), place)
    }

    fn kept_bytes_of(&self, mut state: MutexGuard<'_, State>, place: &Place) -> u64 {
        let model = self.model_of(&mut state, place.parent);
        model.map_or(MANIFEST_BYTES_MAX, |model| {
            let geometry = model.manifest.geometry();
            geometry.file_bytes(geometry.page_tokens())
        })
    }
}

/// The page that begins where a tail of this name does, if it is the name of one.
pub(super) fn page_beside_tail(place: &Place) -> Option<Place> {
    let start = names::parse_tail(&place.name)?;
    Some(Place { parent: place.parent, name: names::format_page(start).into_bytes() })
}

/// The role of a sealed page.
pub(super) fn page_role(page: &kvfs_page::PagePlace, tokens: u32, checksum: [u8; 16]) -> Role {
    let identity = page.identity(tokens);
    Role::Page(PageRecord {
        model: identity.model.0,
        layer: identity.layer.0,
        start: identity.start.0,
        tokens,
        dtype: identity.dtype,
        checksum,
    })
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

impl From<FsError> for SealError {
    fn from(error: FsError) -> SealError {
        SealError::Io(std::io::Error::from_raw_os_error(error.errno()))
    }
}

/// The model directory above (or at) a directory of its tree.
pub(super) fn model_directory(state: &State, directory: InodeId) -> Result<InodeId, FsError> {
    let mut at = directory;
    for _ in 0..DEPTH_MAX {
        match state.inode(at)?.kind {
            Kind::Directory { class: DirectoryClass::Model, .. } => return Ok(at),
            Kind::Directory { parent, .. } if parent != at => at = parent,
            _ => break,
        }
    }
    Err(FsError::Invalid)
}
