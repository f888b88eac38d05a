//! Bytes that are not what their name says: who is told, and what is kept of them.

use crate::FsError;
use crate::attributes::Place;
use crate::core::Core;
use crate::core::guard::StateGuard;
use kvfs_page::PageError;
use kvfs_storage::ingest::model::MANIFEST_BYTES_MAX;
use kvfs_storage::ingest::seal::SealError;
use kvfs_storage::store::event::{Event, What};
use kvfs_storage::store::quarantine::{self, Take};
use kvfs_storage::store::record::{DirectoryClass, InodeId, ObjectId};

impl Core {
    /// Tells why something was refused: in `.kvfs/errors`, in the log, and by errno.
    pub(crate) fn report(&self, place: &Place, error: SealError) -> FsError {
        match error {
            SealError::Io(error) => FsError::Io(error),
            SealError::Refused(error) => {
                let path = self.state().path(place.parent, &place.name);
                tell_refused(self, place.parent, (path, None), &error)
            }
        }
    }

    /// [`Core::report`] for a file that is looked at more than once, at each `close()` and
    /// when it would be sealed.
    pub(crate) fn report_once(&self, id: InodeId, place: &Place, error: SealError) -> FsError {
        if let (SealError::Refused(error), Some(node)) = (&error, self.state().nodes.get_mut(&id)) {
            let text = Some(error.to_string());
            if node.refusal == text {
                return FsError::Refused;
            }
            node.refusal = text;
        }
        report_of(self, id, place, error)
    }

    /// Keeps the bytes of an object that was refused.
    pub(crate) fn quarantine(
        &self, place: &Place, object: ObjectId, take: Take, error: &SealError,
    ) {
        let SealError::Refused(error) = error else {
            return;
        };
        let path = self.state().path(place.parent, &place.name);
        let reason = format!("{path}: {error}");
        match quarantine::put(&self.store, object, take, &reason) {
            Ok(bytes) => {
                let event = Event::new(What::Quarantined, error.to_string()).with_bytes(bytes);
                self.store.events.note(event.in_directory(place.parent).at(path));
            }
            Err(error) => {
                log::warn!("{path}: its bytes could not be kept in quarantine: {error}");
            }
        }
    }

    /// Bytes that are kept of a file that was refused under a name: as many as one that is right has.
    pub(crate) fn kept_bytes(&self, place: &Place) -> u64 {
        self.kept_bytes_of(self.state(), place)
    }

    pub(crate) fn kept_bytes_of(&self, mut state: StateGuard<'_>, place: &Place) -> u64 {
        let layer = match state.directory(place.parent) {
            Ok((_, DirectoryClass::Layer(layer))) => layer,
            _ => 0,
        };
        let model = self.model_of(&mut state, place.parent);
        model.map_or(MANIFEST_BYTES_MAX, |model| model.file_bytes_max(layer))
    }
}

/// [`Core::report`] for a file that may have another name than the one for which it was refused, or none.
pub(crate) fn report_of(core: &Core, id: InodeId, place: &Place, error: SealError) -> FsError {
    let SealError::Refused(error) = error else {
        return core.report(place, error);
    };
    let (path, bytes) = {
        let state = core.state();
        let shown = state.attributes(&core.store, id).ok();
        (state.path(place.parent, &place.name), shown.map(|shown| shown.size))
    };
    tell_refused(core, place.parent, (path, bytes), &error)
}

/// Tells of a refusal of what has so many bytes, if that is known; the writer hears of it by the errno.
pub(super) fn tell_refused(
    core: &Core, directory: InodeId, (path, bytes): (String, Option<u64>), error: &PageError,
) -> FsError {
    core.observer.refused(&path, error.reason(), &error.to_string());
    let event = Event::new(What::Refused, error.to_string()).in_directory(directory);
    core.store.events.note(Event { bytes, ..event.at(path) });
    FsError::Refused
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Caller;
    use crate::unmounted::{FILES, MODELS, Unmounted, place};
    use kvfs_page::{Dtype, LayerKind, StateShape, StateTensor};

    fn refused(reason: &str) -> SealError {
        SealError::Refused(PageError::Manifest(reason.to_owned()))
    }

    #[test]
    fn a_refusal_is_told_once_for_each_reason() {
        let unmounted = Unmounted::new();
        let core = &unmounted.fs.core;
        let file = place(FILES, "page");
        let id = unmounted.write(FILES, "page", b"bytes");
        let opened = unmounted.fs.open_file(id, libc::O_RDONLY).unwrap();
        for reason in ["one", "one", "other", "other"] {
            assert!(matches!(core.report_once(id, &file, refused(reason)), FsError::Refused));
        }
        let told: Vec<_> = unmounted.events().into_iter().map(|event| event.reason).collect();
        assert_eq!(
            told,
            ["one", "other"].map(|reason| PageError::Manifest(reason.into()).to_string())
        );
        let event = unmounted.events().pop().unwrap();
        assert_eq!((event.what, event.directory), (What::Refused, Some(FILES)));
        assert_eq!(event.bytes, Some(5));
        assert_eq!(event.path.as_deref(), Some("files/page"));
        // What the disk says is no refusal.
        let failed = || SealError::Io(std::io::Error::from_raw_os_error(libc::EIO));
        assert_eq!(core.report_once(id, &file, failed()).errno(), libc::EIO);
        assert_eq!(unmounted.events().len(), 2);
        unmounted.fs.release(opened.handle).unwrap();
    }

    #[test]
    fn as_many_bytes_are_kept_as_one_that_is_right_has() {
        let unmounted = Unmounted::new();
        let core = &unmounted.fs.core;
        assert_eq!(core.kept_bytes(&place(MODELS, "manifest.json")), MANIFEST_BYTES_MAX);
        let model = unmounted.make_model(1);
        let sequence = model.make_sequence("s", &[0], 1);
        let layer = unmounted.id_of(sequence, "000").unwrap();
        let page = model.page(0, 0).len() as u64;
        assert_eq!(core.kept_bytes(&place(layer, "0000000.safetensors")), page);
    }

    #[test]
    fn of_a_layer_of_states_as_many_bytes_are_kept_as_a_state_has() {
        let unmounted = Unmounted::new();
        let tensor = StateTensor { name: "ssm".to_owned(), dtype: Dtype::F32, shape: vec![4, 512] };
        let shape = StateShape { state: vec![tensor] };
        let layers = vec![LayerKind::Attention, LayerKind::State(shape.clone())];
        let model = unmounted.make_model_of(2, |fields| fields.layers = Some(layers));
        let layer = model.make_layer(model.make_sequence("s", &[], 0), 1);
        let kept = unmounted.fs.core.kept_bytes(&place(layer, "state-0000016.safetensors"));
        assert_eq!(kept, shape.file_bytes());
        assert_ne!(kept, model.page(0, 0).len() as u64);
    }

    #[test]
    fn what_was_refused_is_put_aside_and_told() {
        let unmounted = Unmounted::new();
        let core = &unmounted.fs.core;
        let created =
            unmounted.fs.create(&place(FILES, "page"), 0o644, Caller::DAEMON, true).unwrap();
        let id = created.found.attributes.inode;
        let object = core.state().inode(id).unwrap().file().unwrap().object.unwrap();
        let failed = SealError::Io(std::io::Error::from_raw_os_error(libc::EIO));
        core.quarantine(&place(FILES, "page"), object, Take::Copy, &failed);
        assert!(unmounted.events().is_empty());
        core.quarantine(&place(FILES, "page"), object, Take::Copy, &refused("no page"));
        let event = unmounted.events().pop().unwrap();
        assert_eq!((event.what, event.directory), (What::Quarantined, Some(FILES)));
    }
}
