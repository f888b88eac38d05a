//! Writing `slots/NAME.bin`: what an engine saves becomes the sequence `NAME`, in pages.
//!
//! Until `close()` it lies in a file without a name. Then it takes the place of a sequence that had the name,
//! in one step. What cannot become one is refused by `write()` as soon as enough is there to tell: engines
//! look at what writing answers, and not all of them at what closing does.

use std::fs::File;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

use super::Prefixes;
use super::shares::Share;
use super::slot::{Kind, SlotKey};
use crate::attributes::{Caller, Place};
use crate::core::Core;
use crate::core::handle::{Handle, Served};
use crate::core::stale::{mark_stale, tell_stale_at_once};
use crate::opened::Opened;
use crate::tree::Tree;
use crate::{FileSystem, FsError, classify, descriptors};
use kvfs_formats::slot::{Caches, Slot};
use kvfs_formats::{Rows, SequenceFile, copy_checkpoints, sequence_files};
use kvfs_page::{Manifest, PageError, TokenStart, names};
use kvfs_storage::ingest::seal::SealError;
use kvfs_storage::store::disk::DiskFile;
use kvfs_storage::store::record::{self, DirectoryClass, InodeId};

/// Once so much is there it is looked at for the first time, and then whenever it has doubled: the ids and
/// positions of a conversation are read a few times, not at each write.
const FIRST_LOOK_BYTES: u64 = 4096;

/// A slot that is being written.
#[derive(Debug)]
pub(crate) struct SlotDraft {
    model: InodeId,
    /// Of the file in `slots/`, and of the sequence.
    name: String,
    sequence: Vec<u8>,
    kind: Kind,
    mode: u16,
    /// Whose the sequence will be.
    owner: Caller,
    /// Who writes it, and may do no more than in `sequences/` itself.
    caller: Caller,
    file: Box<dyn DiskFile>,
    progress: Mutex<Progress>,
    /// Counted: each takes a descriptor of the daemon and room on the disk.
    _open: Share,
}

#[derive(Debug, Default)]
struct Progress {
    length: u64,
    next_look: u64,
    /// What became a sequence: `close()` comes once more for each copy of the descriptor.
    imported: u64,
    /// It was said why.
    is_refused: bool,
}

impl Progress {
    fn is_look_due(&self) -> bool {
        self.length >= self.next_look.max(FIRST_LOOK_BYTES)
    }
}

impl SlotDraft {
    fn progress(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds to a slot, only at its end.
    pub(crate) fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), FsError> {
        // Whoever closed a copy of the descriptor holds it until there is a sequence, which takes a while.
        let mut progress = match self.progress.try_lock() {
            Err(TryLockError::WouldBlock) => return Err(FsError::TryAgain),
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Ok(progress) => progress,
        };
        if progress.is_refused {
            return Err(FsError::Refused);
        }
        if offset != progress.length {
            return Err(FsError::NotPermitted);
        }
        self.file.write_all_at(bytes, offset)?;
        progress.length += bytes.len() as u64;
        Ok(())
    }

    fn file(&self) -> Result<File, String> {
        let descriptor = self.file.descriptor().ok_or("this store keeps no files")?;
        let owned = descriptor.try_clone_to_owned().map_err(|error| error.to_string())?;
        Ok(File::from(owned))
    }
}

/// Makes sequences of slots that are written.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SlotSaving<'a> {
    core: &'a Core,
    prefixes: &'a Prefixes,
    tree: &'a dyn Tree,
}

/// Removes what a crash left of slots that were being saved.
pub fn remove_unfinished_saves(fs: &FileSystem) -> Result<(), FsError> {
    SlotSaving::of(fs).remove_all_unfinished()
}

impl<'a> SlotSaving<'a> {
    pub(crate) fn of(fs: &'a FileSystem) -> SlotSaving<'a> {
        SlotSaving { core: &fs.core, prefixes: &fs.prefixes, tree: fs }
    }

    /// Opens a slot to put another one in its place, which will be its owner's.
    pub(super) fn open_replacing(
        &self, id: InodeId, key: SlotKey, caller: Caller,
    ) -> Result<Opened, FsError> {
        let sequence = self.core.state().inode(key.sequence)?;
        let record::Kind::Directory { name, .. } = &sequence.kind else {
            return Err(FsError::Stale);
        };
        if name.ends_with(names::WORK_SUFFIX.as_bytes()) {
            // Another one has taken its place since it was looked up.
            return Err(FsError::Stale);
        }
        let name = String::from_utf8_lossy(name).into_owned() + key.kind.suffix();
        let owner = Caller { uid: sequence.uid, gid: sequence.gid };
        self.open_draft(id, (key.model, &name), sequence.mode & 0o666, (owner, caller))
    }

    /// Opens what is written to become the sequence of a name.
    pub(super) fn open_draft(
        &self, id: InodeId, (model, name): (InodeId, &str), mode: u16,
        (owner, caller): (Caller, Caller),
    ) -> Result<Opened, FsError> {
        let (sequence, kind) = Kind::of_name(name).ok_or(FsError::NotPermitted)?;
        let sequence = sequence.as_bytes().to_vec();
        let class = classify::directory(DirectoryClass::Sequences, &sequence);
        let is_sequence = class == Some(DirectoryClass::Sequence) && !sequence.is_empty();
        let rules =
            self.core.model_of(&mut self.core.state(), model).map_err(|_| FsError::NotPermitted)?;
        let is_work = sequence.ends_with(names::WORK_SUFFIX.as_bytes());
        if !is_sequence || is_work || Caches::of(&rules.manifest).is_err() {
            return Err(FsError::NotPermitted);
        }
        check_may_save(self.core, caller, model, &sequence)?;
        let open = self.prefixes.queries.take(caller.uid, 1).ok_or(FsError::TryAgain)?;
        self.tree.make_room_for_changes()?;
        descriptors::check(self.core)?;
        let draft = SlotDraft {
            model,
            name: name.to_owned(),
            sequence,
            kind,
            mode,
            owner,
            caller,
            file: self.core.store.scratch()?,
            progress: Mutex::default(),
            _open: open,
        };
        let served = Served::SlotDraft(Arc::new(draft));
        let handle = self.core.state().add_handle(Handle::new(id, true, served));
        Ok(Opened::uncached(handle, false))
    }

    /// `close()` of a slot makes the sequence.
    pub(crate) fn import(&self, draft: &SlotDraft) -> Result<(), FsError> {
        let mut progress = draft.progress();
        if progress.is_refused {
            return Err(FsError::Refused);
        }
        if progress.length == progress.imported {
            return Ok(());
        }
        let rules =
            self.core.model_of(&mut self.core.state(), draft.model).map_err(|_| FsError::Stale)?;
        let refuse = |why: String| refuse(self.core, draft, &why);
        let slot = draft.file().and_then(|file| Slot::of(file, &rules.manifest)).map_err(refuse)?;
        slot.check_form(draft.kind.version).map_err(refuse)?;
        slot.check(&rules.manifest).map_err(refuse)?;

        let turn = &self.prefixes.importing;
        let _turn = turn.lock().unwrap_or_else(PoisonError::into_inner);
        // Since it was opened, somebody may have made a sequence that is not this user's to remove.
        check_may_save(self.core, draft.caller, draft.model, &draft.sequence)?;
        let sequences = self.directory(draft, draft.model, names::SEQUENCES.as_bytes())?;
        let unfinished = Place { parent: sequences, name: unfinished_name(&draft.sequence) };
        self.remove_unfinished(&unfinished)?;
        let outcome = self.fill_sequence(draft, &unfinished, &rules.manifest, &slot);
        let outcome = outcome.and_then(|()| {
            let place = Place { parent: sequences, name: draft.sequence.clone() };
            self.take_name(&unfinished, &place)?;
            self.core.announce(&place);
            Ok(())
        });
        // What was there before, or what has failed. An operation that still changes it may keep it from
        // going; the next save removes it then.
        if let Err(error) = self.remove_unfinished(&unfinished) {
            log::warn!("slots/{}: what it has replaced stays for now: {error}", draft.name);
        }
        outcome?;
        progress.imported = progress.length;
        Ok(())
    }

    fn remove_all_unfinished(&self) -> Result<(), FsError> {
        if self.core.state().metadata.was_clean {
            return Ok(());
        }
        let snapshot = self.core.state().metadata.snapshot()?;
        let mut left = Vec::new();
        snapshot.for_each_named(b'E', |parent, offset_and_name| {
            let name = offset_and_name.get(8..).unwrap_or_default();
            if name.ends_with(names::SAVING_SUFFIX.as_bytes()) {
                left.push(Place { parent: InodeId(parent), name: name.to_vec() });
            }
        })?;
        // Whoever saves has the turn, so what is there is nobody's.
        let turn = &self.prefixes.importing;
        let _turn = turn.lock().unwrap_or_else(PoisonError::into_inner);
        left.retain(|place| {
            let parent = self.core.state().inode(place.parent);
            parent.is_ok_and(|parent| {
                let sequences = DirectoryClass::Sequences;
                matches!(parent.kind, record::Kind::Directory { class, .. } if class == sequences)
            })
        });
        left.iter().try_for_each(|place| self.remove_unfinished(place))
    }

    /// Gives a directory the name of a sequence, which an operation may remove or make meanwhile.
    fn take_name(&self, from: &Place, to: &Place) -> Result<(), FsError> {
        loop {
            match self.tree.move_to(from, to, libc::RENAME_EXCHANGE) {
                Err(FsError::NotFound) => {}
                outcome => return outcome.and_then(|()| mark_replaced(self.core, from)),
            }
            match self.tree.move_to(from, to, libc::RENAME_NOREPLACE) {
                Err(FsError::Exists) => {}
                outcome => return outcome,
            }
        }
    }

    /// Pages first: the ids say that they are there.
    fn fill_sequence(
        &self, draft: &SlotDraft, place: &Place, manifest: &Manifest, slot: &Slot,
    ) -> Result<(), FsError> {
        let sequence = self.directory(draft, place.parent, &place.name)?;
        for file in sequence_files(slot, manifest) {
            let SequenceFile { layer, name, is_sealed, bytes } = file?;
            let layer = names::format_layer(layer);
            let parent = self.directory(draft, sequence, layer.as_bytes())?;
            let place = Place { parent, name: name.into_bytes() };
            if is_sealed {
                let staging = [&place.name[..], b".tmp"].concat();
                let staging = Place { parent, name: staging };
                self.write_new(draft, &staging, &bytes)?;
                self.tree.move_to(&staging, &place, 0)?;
            } else {
                self.write_new(draft, &place, &bytes)?;
            }
        }
        if slot.checkpoints_bytes() > 0 {
            let name = names::format_checkpoints(TokenStart(slot.num_tokens().into()));
            let place = Place { parent: sequence, name: name.into_bytes() };
            self.tree.make_file(&place, draft.mode, draft.owner, &mut |write| {
                copy_checkpoints(slot, write)
            })?;
        }
        let ids: Vec<u8> = slot.token_ids().iter().flat_map(|id| id.to_le_bytes()).collect();
        let tokens = Place { parent: sequence, name: names::TOKENS.as_bytes().to_vec() };
        self.write_new(draft, &tokens, &ids)
    }

    /// A directory of whoever writes the slot, who may enter what may be read.
    fn directory(
        &self, draft: &SlotDraft, parent: InodeId, name: &[u8],
    ) -> Result<InodeId, FsError> {
        if let Some(entry) = self.core.state().entry(parent, name)? {
            let is_directory = entry.file_type == libc::S_IFDIR;
            return if is_directory { Ok(entry.inode) } else { Err(FsError::NotDirectory) };
        }
        let place = Place { parent, name: name.to_vec() };
        let mode = draft.mode | (draft.mode & 0o444) >> 2;
        self.tree.make_directory(&place, mode, draft.owner)
    }

    fn write_new(&self, draft: &SlotDraft, place: &Place, bytes: &[u8]) -> Result<(), FsError> {
        self.tree.make_file(place, draft.mode, draft.owner, &mut |write| write(0, bytes))
    }

    fn remove_unfinished(&self, place: &Place) -> Result<(), FsError> {
        let entry = self.core.state().entry(place.parent, &place.name)?;
        entry.map_or(Ok(()), |entry| self.tree.remove_with_contents(place, entry))
    }
}

/// Whether so much of a slot was written that it is time to look at its beginning.
pub fn look_is_due(core: &Core, handle: u64) -> bool {
    let served = core.state().handles.get(&handle).map(|open| open.served.clone());
    let Some(Served::SlotDraft(draft)) = served else { return false };
    draft.progress.try_lock().is_ok_and(|progress| progress.is_look_due())
}

/// Looks at the beginning of a slot that is being written: what cannot become a sequence is refused.
pub fn look_at_beginning(core: &Core, handle: u64) -> Result<(), FsError> {
    let served = core.state().handles.get(&handle).map(|open| open.served.clone());
    let Some(Served::SlotDraft(draft)) = served else { return Err(FsError::BadHandle) };
    {
        let mut progress = draft.progress();
        if !progress.is_look_due() {
            return Ok(());
        }
        progress.next_look = 2 * progress.length;
    }
    let rules = core.model_of(&mut core.state(), draft.model).map_err(|_| FsError::Stale)?;
    let (file, version) = (draft.file(), draft.kind.version);
    let outcome = file.and_then(|file| Slot::check_beginning(file, version, &rules.manifest));
    if outcome.is_err() {
        draft.progress().is_refused = true;
    }
    outcome.map_err(|why| refuse(core, &draft, &why))
}

/// Whether a user may make a sequence of that name, or put another in its place, as by mkdir(2), rename(2)
/// and unlink(2).
fn check_may_save(
    core: &Core, caller: Caller, model: InodeId, sequence: &[u8],
) -> Result<(), FsError> {
    let state = core.state();
    let may = match state.entry(model, names::SEQUENCES.as_bytes())? {
        // What has the name under which the sequence is filled goes as well.
        Some(sequences) => {
            state.may_replace(caller, sequences.inode, sequence)?
                && state.may_replace(caller, sequences.inode, &unfinished_name(sequence))?
        }
        None => state.may_replace(caller, model, names::SEQUENCES.as_bytes())?,
    };
    if may { Ok(()) } else { Err(FsError::NotPermitted) }
}

/// The kernel knows the sequence that was replaced by the name that is another's now. A client that renamed that
/// name meanwhile moved the new one, and the kernel the old one.
fn mark_replaced(core: &Core, place: &Place) -> Result<(), FsError> {
    let mut state = core.state();
    let Some(replaced) = state.entry(place.parent, &place.name)? else {
        return Ok(());
    };
    mark_stale(&mut state, replaced.inode);
    drop(state);
    tell_stale_at_once(core, place.parent, replaced.inode);
    Ok(())
}

fn refuse(core: &Core, draft: &SlotDraft, why: &str) -> FsError {
    let name = format!("{}/{}", names::SLOTS, draft.name).into_bytes();
    let place = Place { parent: draft.model, name };
    core.report(&place, SealError::Refused(PageError::Place(why.to_owned())))
}

/// Of a sequence while it is filled, and of the one that it takes the place of afterwards.
fn unfinished_name(sequence: &[u8]) -> Vec<u8> {
    [sequence, names::SAVING_SUFFIX.as_bytes()].concat()
}
