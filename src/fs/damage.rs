//! A copy on this machine that is not what was written, while the remote has one that is.

use super::{FileSystem, FsError};
use crate::store::disk::FileStat;
use crate::store::quarantine::{self, Take};
use crate::store::record::{InodeId, ObjectId, RemoteState, Role};
use crate::tier::remote::RemoteError;

impl FileSystem {
    /// The copy that had this `stat` is damaged: it makes room for the remote's, and is kept in
    /// quarantine. False if the remote has none.
    pub(super) fn replace_damaged(
        &self, (id, role): (InodeId, Role), object: ObjectId, damaged: &FileStat,
    ) -> Result<bool, FsError> {
        let Some(tiers) = &self.tiers else {
            return Ok(false);
        };
        if self.state().metadata.remote_copy(object)?.is_none() {
            return Ok(false);
        }
        let work = || {
            let outcome = self.remove_damaged(id, object, damaged);
            outcome.map_err(|error| RemoteError::local(std::io::Error::other(error)))
        };
        tiers.flights.share(object, work).map_err(FsError::Remote)?;
        self.fetch((id, role), object)
    }

    fn remove_damaged(
        &self, id: InodeId, object: ObjectId, damaged: &FileStat,
    ) -> Result<(), FsError> {
        // Somebody else may have found it as well, and replaced it by now.
        match self.store.stat_object(object) {
            Ok(stat) if stat.is_same_content(damaged) => {}
            _ => return Ok(()),
        }
        let why =
            format!("object {object}: the local copy is damaged, the remote's takes its place");
        log::warn!("{why}");
        if let Err(error) = quarantine::put(&self.store, object, Take::Copy, &why) {
            log::warn!("object {object}: the damaged copy could not be kept: {error}");
        }
        let mut state = self.state_to_change()?;
        let copy = state.metadata.remote_copy(object)?;
        let Some(copy) = copy.filter(|_| !state.unsettled.contains_key(&id)) else {
            return Ok(());
        };
        self.store.remove_object(object)?;
        if let Some(tiers) = &self.tiers
            && copy.state == RemoteState::Named
        {
            state.metadata.set_remote_state(object, copy, RemoteState::Only);
            let length = state.metadata.object(object)?.map_or(0, |record| record.length);
            tiers.ssd.has_left(object, length);
        }
        Ok(())
    }
}
