//! The tiers below the local files of a mount: what they share, and what is told of them.

use std::fmt::Write;
use std::sync::atomic::{AtomicBool, Ordering};

use super::residency::Flights;
use super::{FileSystem, FsError};
use crate::store::disk::DiskPath;
use crate::store::record::{
    FileRecord, Inode, InodeId, ObjectId, RemoteCopy, RemoteIdentity, RemoteState, Role,
};
use crate::tier::counters::Counters;
use crate::tier::exchange::Exchange;
use crate::tier::ram::LetGo;
use crate::tier::remote::{RemoteId, State as RemoteHealth, StoreId};
use crate::tier::ssd::SsdTier;

/// What a mount with a remote has beside its store.
#[derive(Debug)]
pub struct Tiers {
    pub(super) exchange: Exchange,
    pub(super) ssd: SsdTier,
    pub(super) counters: Counters,
    pub(super) flights: Flights,
    /// The mount ends: nothing more moves.
    pub(super) closing: AtomicBool,
    /// All records were looked at since the mount began.
    pub(super) is_surveyed: AtomicBool,
}

impl Tiers {
    /// A remote behind an SSD tier.
    pub fn new(exchange: Exchange, ssd: SsdTier, counters: Counters) -> Tiers {
        Tiers {
            exchange,
            ssd,
            counters,
            flights: Flights::default(),
            closing: AtomicBool::new(false),
            is_surveyed: AtomicBool::new(false),
        }
    }

    pub(super) fn is_closing(&self) -> bool {
        self.closing.load(Ordering::Acquire)
    }
}

impl FileSystem {
    /// What the store and its remote know each other by; the store's name is made the first time.
    pub fn remote_identity(&self) -> Result<(StoreId, Option<RemoteId>), FsError> {
        let mut state = self.state_to_change()?;
        let identity = if let Some(identity) = state.metadata.remote_identity()? {
            identity
        } else {
            let identity = RemoteIdentity { store: StoreId::random()?.0, remote: None };
            state.metadata.put_remote_identity(&identity);
            identity
        };
        Ok((StoreId(identity.store), identity.remote.map(RemoteId)))
    }

    /// Remembers which remote the store uses: another one in its place is refused from now on.
    pub(super) fn remember_remote(&self, remote: RemoteId) -> Result<(), FsError> {
        let mut state = self.state_to_change()?;
        if let Some(identity) = state.metadata.remote_identity()?
            && identity.remote.is_none()
        {
            let known = RemoteIdentity { remote: Some(remote.0), ..identity };
            state.metadata.put_remote_identity(&known);
        }
        Ok(())
    }

    /// Attaches a remote. Only before the mount answers.
    pub fn attach(&mut self, tiers: Tiers) {
        self.state().metadata.has_remote = true;
        self.tiers = Some(tiers);
    }

    /// How the kernel is made to forget a backing file.
    pub fn on_leaving(&self, let_go: LetGo) {
        let _ = self.let_go.set(let_go);
    }

    /// The tiers below.
    pub fn tiers(&self) -> Option<&Tiers> {
        self.tiers.as_ref()
    }

    /// Reads all records, beside the mount: which files the remote does not have, and which the
    /// disk does not.
    pub fn survey(&self) -> Result<(), FsError> {
        let Some(tiers) = &self.tiers else {
            return Ok(());
        };
        let snapshot = self.state().metadata.snapshot()?;
        let mut copies = std::collections::HashMap::new();
        snapshot.for_each::<RemoteCopy>(b'R', |object, copy| {
            copies.insert(ObjectId(object), copy);
        })?;
        let mut arrivals = Vec::new();
        snapshot.for_each::<Inode>(b'I', |id, inode| {
            let file = inode.file().filter(|file| FileRecord::is_settled(file));
            if let Some((object, file)) = file.and_then(|file| Some((file.object?, file))) {
                match copies.get(&object) {
                    Some(copy) if copy.state != RemoteState::Held => {
                        note_copy(tiers, (InodeId(id), object), file, copy);
                    }
                    _ => arrivals.push(InodeId(id)),
                }
            }
        })?;
        self.state().metadata.arrivals.extend(arrivals);
        for (object, copy) in copies {
            if copy.state == RemoteState::Only {
                self.finish_leaving(object)?;
            }
        }
        tiers.is_surveyed.store(true, Ordering::Release);
        Ok(())
    }

    /// Removes a file that does not count any more and that a crash has left.
    fn finish_leaving(&self, object: ObjectId) -> Result<(), FsError> {
        let path = DiskPath::Object(object);
        if self.store.disk.stat(&path).is_err() {
            return Ok(());
        }
        let state = self.state();
        let copy = state.metadata.remote_copy(object)?;
        if copy.is_some_and(|copy| copy.state == RemoteState::Only) {
            self.store.disk.remove(&path)?;
        }
        Ok(())
    }

    /// Lines of `.kvfs/status` about the remote.
    pub(super) fn remote_status(&self, text: &mut String) {
        let Some(tiers) = &self.tiers else {
            return;
        };
        let waiting = self.state().metadata.arrivals.len();
        let remote = tiers.exchange.remote();
        let usage = tiers.ssd.remote_use();
        let mut line = |key: &str, value: &dyn std::fmt::Display| {
            let _ = writeln!(text, "{key}: {value}");
        };
        if let Some(budget) = tiers.ssd.budget_bytes() {
            line("ssd_budget_bytes", &budget);
        }
        line("ssd_used_bytes", &self.ssd_used_bytes());
        line("remote", &crate::tier::remote::BlobStore::place(remote.as_ref()));
        match remote.state() {
            RemoteHealth::Connecting => line("remote_state", &"connecting"),
            RemoteHealth::Up { .. } => line("remote_state", &"up"),
            RemoteHealth::Down { error, .. } => {
                line("remote_state", &format!("down: {error}"));
            }
        }
        line("remote_objects", &usage.objects);
        line("remote_stored_bytes", &usage.stored_bytes);
        line("remote_only_objects", &usage.only_objects);
        line("remote_only_bytes", &usage.only_bytes);
        line("remote_waiting_files", &waiting);
    }
}

fn note_copy(
    tiers: &Tiers, (id, object): (InodeId, ObjectId), file: &FileRecord, copy: &RemoteCopy,
) {
    tiers.ssd.has_remote_copy(object, copy);
    if copy.state == RemoteState::Only {
        tiers.ssd.has_left(object, file.size);
    } else if !matches!(file.role, Role::Manifest) {
        tiers.ssd.may_leave(object, id, file.size);
    }
}
