//! What a store remembers of its remote, with and without it.

use std::fmt::Write;
use std::time::SystemTime;

use super::FsError;
use crate::core::Core;
use kvfs_storage::store::record::{RemoteIdentity, RemotePlace};
use kvfs_storage::tier::remote::{Remote, RemoteId, Sequence, StoreId};

/// What a store remembers of its remote.
#[derive(Debug)]
pub struct RemoteMemory<'a> {
    core: &'a Core,
}

impl<'a> RemoteMemory<'a> {
    /// That of a store.
    pub fn of(core: &'a Core) -> RemoteMemory<'a> {
        RemoteMemory { core }
    }

    /// What the store and its remote know each other by; the store's name is made the first time. On
    /// read-only media it is this mount's alone. Only before the mount answers.
    pub fn identity(&self) -> Result<(StoreId, Option<RemoteId>), FsError> {
        let mut state = self.core.state();
        let identity = if let Some(identity) = state.metadata.single::<RemoteIdentity>()? {
            identity
        } else {
            let identity = RemoteIdentity { store: StoreId::random()?.0, remote: None };
            state.metadata.put_single(&identity);
            identity
        };
        Ok((StoreId(identity.store), identity.remote.map(RemoteId)))
    }

    /// Remembers which remote the store uses, and where: another one in its place is refused from now
    /// on, and a mount without it knows what is missing.
    pub(super) fn remember(&self, remote: RemoteId, place: &str) -> Result<(), FsError> {
        let mut state = self.core.state_to_change()?;
        if state.metadata.single::<RemotePlace>()?.is_none_or(|known| known.place != place) {
            let since_seconds = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default().as_secs();
            let place = RemotePlace { place: place.to_owned(), since_seconds };
            state.metadata.put_single(&place);
        }
        if let Some(identity) = state.metadata.single::<RemoteIdentity>()?
            && identity.remote.is_none()
        {
            let known = RemoteIdentity { remote: Some(remote.0), ..identity };
            state.metadata.put_single(&known);
        }
        Ok(())
    }

    /// What was seen of the manifests in a remote that is sealed, or in one that is not, by this mount and those before
    /// it.
    pub fn manifests_seen(&self, sealed: bool) -> Result<Vec<(StoreId, Sequence)>, FsError> {
        let seen = self.core.state().metadata.manifests_seen(sealed)?;
        Ok(seen.into_iter().map(|(store, number)| (StoreId(store), Sequence(number))).collect())
    }

    /// Notes what was seen since the last time, as part of the next commit.
    pub(super) fn note_manifests_seen(&self, remote: &Remote) -> Result<(), FsError> {
        let mut state = self.core.state_to_change()?;
        for (store, sequence) in remote.take_numbers() {
            state.metadata.set_manifest_seen(store.0, Some(sequence.0), remote.is_sealed());
        }
        Ok(())
    }

    /// Lines of `.kvfs/status` about what cannot be had without the remote.
    pub(super) fn tell_offline(&self, text: &mut String) {
        let (only_remote, place) = {
            let metadata = &self.core.state().metadata;
            (metadata.only_remote, metadata.single::<RemotePlace>().ok().flatten())
        };
        if only_remote.objects == 0 && place.is_none() {
            return;
        }
        let place = place.map_or_else(|| "unknown".to_owned(), |place| place.place);
        let _ = writeln!(text, "remote_missing: {place}");
        let _ = writeln!(text, "remote_state: offline");
        let _ = writeln!(text, "remote_only_objects: {}", only_remote.objects);
        let _ = writeln!(text, "remote_only_stored_bytes: {}", only_remote.stored_bytes);
    }
}
