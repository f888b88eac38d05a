//! The bytes of a page that another store has written come here, when it is opened.
//!
//! They are checked as if somebody had written them here, and then uploaded, found in the remote,
//! read back and named as any other page: until a manifest of this store names them, the remote may
//! lose them at any time. A page whose bytes do not come counts as absent.

use std::io;
use std::sync::Arc;

use super::adopt::Provenance;
use super::{FsError, ORIGIN};
use crate::core::state::State;
use crate::residency::{Landed, Residency};
use crate::tiers::Tiers;
use kvfs_storage::ingest::seal::{self, SealError};
use kvfs_storage::store::disk::{Access, DiskDirectory, DiskFile, DiskPath, shard};
use kvfs_storage::store::metadata::Life;
use kvfs_storage::store::record::{InodeId, ObjectId, PageRecord, RemoteState, Role};
use kvfs_storage::tier::remote::RemoteError;

impl State {
    /// Where the bytes of a page come from that have not come yet.
    pub(crate) fn origin_of(&self, id: InodeId) -> Result<Option<Provenance>, FsError> {
        if !self.metadata.has_tiers {
            return Ok(None);
        }
        Ok(self.metadata.attribute(id, ORIGIN)?.and_then(|value| Provenance::parse(&value)))
    }
}

impl Residency<'_> {
    /// Whether the bytes of a page are still those of another store.
    pub(crate) fn is_foreign(&self, id: InodeId) -> bool {
        matches!(self.core.state().origin_of(id), Ok(Some(_)))
    }

    /// Checks the bytes that have come for a page, as if they had been written here.
    pub(crate) fn check_arrived(
        &self, from: Provenance, role: Role, file: &Arc<dyn DiskFile>,
    ) -> Result<(), RemoteError> {
        let refused = |why: String| RemoteError::Corrupt(format!("store {}: {why}", from.store));
        let Role::Page(page) = role else { return Err(refused("it is no page".to_owned())) };
        match self.verify_arrived(from, &page, file.as_ref()) {
            Ok(true) => Ok(()),
            Ok(false) => Err(refused("its page has another checksum".to_owned())),
            Err(SealError::Refused(error)) => Err(refused(error.to_string())),
            Err(SealError::Io(error)) => Err(RemoteError::local(error)),
        }
    }

    fn verify_arrived(
        &self, from: Provenance, page: &PageRecord, file: &dyn DiskFile,
    ) -> Result<bool, SealError> {
        let rules = self.core.model_of(&mut self.core.state(), from.model)?;
        let place = rules.place(page.layer, page.start).map_err(SealError::Refused)?;
        let verified = seal::verify_file(file, &place)?;
        Ok(verified.digest.page.0 == page.checksum && verified.header.tokens == page.tokens)
    }

    /// Gives the bytes of a page their place on the disk, for good: this store relies on them
    /// from now on, and on the remote only when it has named them itself.
    pub(crate) fn install_arrived(
        &self, tiers: &Tiers, (id, object): (InodeId, ObjectId), file: &Arc<dyn DiskFile>,
    ) -> io::Result<Landed> {
        file.sync()?;
        let (incoming, path) = (DiskPath::Incoming(object), DiskPath::Object(object));
        {
            let state = self.core.state();
            if state.metadata.remote_copy(object).map_err(io::Error::other)?.is_none() {
                self.core.store.disk.remove(&incoming)?;
                return Ok(None);
            }
            self.core.store.disk.rename(&incoming, &path)?;
        }
        tiers.writes.note(file.stat()?.length);
        let landed = Arc::from(self.core.store.disk.open(&path, Access::Read)?);
        self.core.store.disk.sync_directory(DiskDirectory::ObjectShard(shard(object)))?;
        let mut state = self.core.state();
        let copy = state.metadata.remote_copy(object).map_err(io::Error::other)?;
        let record = state.metadata.object(object).map_err(io::Error::other)?;
        let (Some(copy), Some(record)) = (copy, record) else { return Ok(Some(landed)) };
        state.metadata.set_remote_state(object, copy, RemoteState::Held);
        state.metadata.remove_attribute(Life::Durable, id, ORIGIN);
        state.metadata.note_arrival(id).map_err(io::Error::other)?;
        if let Some(checksum) = record.checksum {
            state.metadata.note_page(&checksum, id);
        }
        tiers.copies.forget_remote_copy(object);
        Ok(Some(landed))
    }

    /// The bytes of a page are not to be had: its sequence is not looked for there again.
    pub(crate) fn did_not_arrive(&self, from: Provenance, error: &RemoteError) {
        log::info!("a page of store {} counts as absent: {error}", from.store);
        if !error.is_outage() {
            self.foreign.refute(from.store, from.sequence);
        }
    }
}
