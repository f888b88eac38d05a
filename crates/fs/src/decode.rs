//! Bringing back what the disk has only encoded.
//!
//! As with a remote copy ([`super::residency`]): decoded and compared before the open answers, once
//! whoever asks. Decoded bytes go to memory where it has room, else to the disk.

use std::io;
use std::sync::Arc;

use super::FsError;
use super::residency::{Fetched, Landed, Residency, Target, item};
use super::tiers::Tiers;
use crate::core::failures::note_failure;
use crate::core::happened;
use kvfs_storage::store::event::{Event, What};
use kvfs_storage::store::quarantine::Take;
use kvfs_storage::store::record::{EncodedCopy, InodeId, ObjectId, RemoteState, Role};
use kvfs_storage::tier::counters::Tier;
use kvfs_storage::tier::encoded::unpack;
use kvfs_storage::tier::exchange::Item;
use kvfs_storage::tier::remote::RemoteError;

impl Residency<'_> {
    /// Brings back an object that the disk has encoded. There is [no copy](Fetched::NoCopy) also where
    /// it is damaged while the remote has another.
    pub(super) fn unpack(
        &self, tiers: &Tiers, (id, role): (InodeId, Role), object: ObjectId,
    ) -> Result<Fetched, FsError> {
        let (copy, item) = {
            let state = self.core.state();
            match (state.metadata.encoded_copy(object)?, item(&state, role, object)?) {
                (Some(copy), Some(item)) => (copy, item),
                _ => return Ok(Fetched::NoCopy),
            }
        };
        let work = || {
            let work = || self.unpack_now(tiers, id, &item, &copy);
            tiers.decoding.measure(item.length, work).map_err(RemoteError::local)
        };
        let error = match tiers.share(object, work) {
            Ok(landed) => return Ok(landed.into()),
            Err(error) => error,
        };
        tiers.counters.failed(Tier::Ssd, Tier::Ssd, error.label());
        match &error {
            RemoteError::Local(cause)
                if matches!(cause.kind(), io::ErrorKind::InvalidData | io::ErrorKind::NotFound) =>
            {
                self.give_up_encoded(tiers, id, object, &error)?;
                Ok(Fetched::NoCopy)
            }
            _ => {
                let why = format!("was not decoded: {error}");
                note_failure(self.core, ("decode", error.label()), (id, Some(item.length)), why);
                Err(FsError::Remote(error))
            }
        }
    }

    /// An encoded copy is damaged or missing: the remote's takes its place, if there is one.
    fn give_up_encoded(
        &self, tiers: &Tiers, id: InodeId, object: ObjectId, error: &RemoteError,
    ) -> Result<(), FsError> {
        let why = format!("its encoded copy: {error}");
        let mut state = self.core.state();
        if state.metadata.encoded_copy(object)?.is_none() {
            // It left for the remote meanwhile.
            return Ok(());
        }
        let remote = state.metadata.remote_copy(object)?;
        let Some(remote) = remote.filter(|copy| copy.state != RemoteState::Held) else {
            drop(state);
            let error = self.corrupt(id, object, Tier::Ssd, &why);
            // Whoever looks here has not found it raw.
            self.note_damage(id, object, true);
            return Err(error);
        };
        happened::keep_damaged(self.core, id, object, Take::Encoded, &why);
        state.metadata.forget_encoded_copy(object)?;
        state.metadata.set_remote_state(object, remote, RemoteState::Only);
        let length = state.metadata.object(object)?.map_or(0, |record| record.length);
        tiers.copies.discard_encoded(object);
        tiers.copies.note_left(object, length);
        drop(state);
        self.corrupt(id, object, Tier::Ssd, &format!("{why}; the remote's copy takes its place"));
        Ok(())
    }

    fn unpack_now(
        &self, tiers: &Tiers, id: InodeId, item: &Item, copy: &EncodedCopy,
    ) -> io::Result<Landed> {
        let object = item.object;
        // Somebody else may just have done the same.
        if let Some(file) = self.open_if_here(object)? {
            return Ok(Some(file));
        }
        let target = self.decoded_target(item)?;
        let tier = target.tier();
        unpack(&self.core.store, item, copy, target.file().as_ref())
            .inspect_err(|_| self.abandon(object, &target))?;
        let landed = self.land(tiers, (id, object, item.length), target)?;
        tiers.counters.moved(Tier::Ssd, tier, item.length);
        if landed.is_some() {
            let event = Event::new(What::Promoted, "decoded: the disk had it encoded");
            happened::note_move(self.core, id, event);
        }
        Ok(landed)
    }

    /// Memory while it has room, since the encoded copy outlives a restart; else the disk.
    fn decoded_target(&self, item: &Item) -> io::Result<Target> {
        if let Some(ram) = &self.core.store.ram
            && let Some(file) = ram.receive(item.object, item.length)?
        {
            return Ok(Target::Memory(Arc::from(file)));
        }
        Ok(Target::Disk(Arc::from(self.incoming(item.object)?)))
    }
}
