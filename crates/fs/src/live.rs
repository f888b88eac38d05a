//! What of a mount may change while it is used.
//!
//! The program knows settings by name and where each comes from ([`Steering`]); here is what they mean. Whoever changes
//! several gets all of them or none: what can fail comes first.

use std::num::NonZeroU64;
use std::sync::atomic::{AtomicU8, Ordering};

use super::{FileSystem, FsError, OnCorrupt, Verify};
use crate::extended::PIN;
use kvfs_storage::store::record::{Inode, InodeId, RemoteState};
use kvfs_storage::tier::encoding::ColdEncoding;
use kvfs_storage::tier::exchange::Exchange;

/// Who knows the settings of a mount by name.
pub trait Steering: std::fmt::Debug + Send + Sync {
    /// A configuration file that gives the same mount.
    fn configuration(&self) -> String;

    /// Each setting, its value and where that comes from, as JSON.
    fn settings(&self) -> String;

    /// What was changed since the mount was made, `KEY=VALUE` on a line each.
    fn changed(&self) -> String;

    /// Changes settings, `KEY=VALUE` on a line each: all of them, or none.
    ///
    /// # Errors
    /// A line that says what is wrong and what to do.
    fn change(&self, file_system: &FileSystem, request: &str) -> Result<(), String>;
}

/// What of the settings was changed since the mount was made, `KEY=VALUE` on a line each.
pub fn settings_changed(file_system: &FileSystem) -> String {
    file_system.steering.get().map(|steering| steering.changed()).unwrap_or_default()
}

/// All settings of the mount, as `.kvfs/config` tells them.
pub fn configuration(file_system: &FileSystem) -> String {
    file_system.steering.get().map(|steering| steering.configuration()).unwrap_or_default()
}

/// What opens do with the bytes that they find.
#[derive(Debug, Default)]
pub struct Choices {
    verify: AtomicU8,
    on_corrupt: AtomicU8,
}

impl Choices {
    /// How often opens compare bytes with their checksum.
    pub fn verify(&self) -> Verify {
        match self.verify.load(Ordering::Relaxed) {
            0 => Verify::First,
            1 => Verify::Always,
            _ => Verify::Never,
        }
    }

    /// What becomes of files whose bytes cannot be had.
    pub fn on_corrupt(&self) -> OnCorrupt {
        match self.on_corrupt.load(Ordering::Relaxed) {
            0 => OnCorrupt::Eio,
            _ => OnCorrupt::Miss,
        }
    }

    /// Chooses, before the mount answers; later that is for [`Changes`].
    pub fn set(&self, verify: Verify, on_corrupt: OnCorrupt) {
        self.verify.store(verify as u8, Ordering::Relaxed);
        self.on_corrupt.store(on_corrupt as u8, Ordering::Relaxed);
    }
}

/// What a mount is told while it is used; what is `None` stays as it is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Changes {
    /// Budget of the RAM tier.
    pub ram_bytes: Option<u64>,
    /// Files of up to so many bytes are put into packs from now on.
    pub packed_bytes_max: Option<u64>,
    /// Budget of the disk, or none.
    pub ssd_bytes: Option<Option<u64>>,
    /// Bytes that may be written to the disk in a day, or no limit.
    pub ssd_writes: Option<Option<u64>>,
    /// How cold objects are encoded from now on.
    pub cold: Option<ColdEncoding>,
    /// Bytes per second to and from the remote, or no limit.
    pub bandwidth: Option<Option<NonZeroU64>>,
    /// How often opens compare bytes with their checksum.
    pub verify: Option<Verify>,
    /// What becomes of files whose bytes cannot be had.
    pub on_corrupt: Option<OnCorrupt>,
}

impl Changes {
    /// Changes all of it, or nothing.
    ///
    /// # Errors
    /// A line that says which setting cannot be changed, why, and what to do.
    pub fn apply(&self, file_system: &FileSystem) -> Result<(), String> {
        self.check_memory(file_system)?;
        self.check_disk(file_system)?;
        let exchange = file_system.tiers().and_then(|tiers| tiers.exchange.as_ref());
        if self.bandwidth.is_some() && exchange.is_none() {
            return Err("remote_bandwidth: this mount has no remote".to_owned());
        }
        let has_memory = file_system.core.store.ram.is_some();
        if matches!(self.ssd_writes, Some(Some(_))) && (exchange.is_none() || !has_memory) {
            return Err(
                "ssd_writes: this mount has no memory tier or no remote, which keep what the disk is spared: mount it \
                 again with both"
                    .to_owned(),
            );
        }
        if let (Some(bytes), Some(ram)) = (self.ram_bytes, &file_system.core.store.ram) {
            ram.set_budget(bytes).map_err(|error| format!("ram: {error}"))?;
        }
        // Nothing below can fail.
        if let Some(bytes) = self.packed_bytes_max {
            file_system.core.store.packs.set_packed_bytes_max(bytes);
        }
        if let Some(tiers) = file_system.tiers() {
            if let Some(bytes) = self.ssd_bytes {
                tiers.copies.set_budget(bytes);
            }
            if let Some(day_bytes) = self.ssd_writes {
                tiers.writes.set_day_bytes(day_bytes);
            }
            if let Some(cold) = self.cold {
                tiers.copies.set_cold(cold);
                exchange.inspect(|exchange| exchange.set_cold(cold));
            }
        }
        if let (Some(rate), Some(remote)) = (self.bandwidth, exchange.map(Exchange::remote)) {
            remote.bandwidth().set_rate(rate);
        }
        self.choose(file_system);
        Ok(())
    }

    fn choose(&self, file_system: &FileSystem) {
        let choices = &file_system.choices;
        let before = choices.verify();
        choices.set(
            self.verify.unwrap_or(before),
            self.on_corrupt.unwrap_or_else(|| choices.on_corrupt()),
        );
        if before == Verify::Never && choices.verify() != Verify::Never {
            // What was opened without a look at its bytes is not known to be right.
            for node in file_system.core.state().nodes.values_mut() {
                node.verified = None;
            }
        }
    }

    fn check_memory(&self, file_system: &FileSystem) -> Result<(), String> {
        let Some(bytes) = self.ram_bytes else { return Ok(()) };
        let Some(ram) = &file_system.core.store.ram else {
            return Err(
                "ram: this mount has no memory tier to change: mount it again with ram=SIZE, and not read-only"
                    .to_owned(),
            );
        };
        let pinned = ram.kept_bytes();
        if bytes < pinned {
            return Err(format!(
                "ram is {bytes}: pinned files have {pinned} bytes of memory, which stay: take pins away, or give as much"
            ));
        }
        Ok(())
    }

    fn check_disk(&self, file_system: &FileSystem) -> Result<(), String> {
        if file_system.tiers().is_none() {
            let what = match (self.ssd_bytes, self.cold) {
                (Some(Some(_)), _) => "ssd",
                (_, Some(cold)) if cold != ColdEncoding::None => "cold",
                _ => return Ok(()),
            };
            return Err(format!(
                "{what}: this mount was made with neither remote nor cold, so nothing in it moves: mount it again with \
                 cold=zstd"
            ));
        }
        let Some(Some(bytes)) = self.ssd_bytes else { return Ok(()) };
        let pinned = pinned_bytes(file_system).map_err(|error| format!("ssd: {error}"))?;
        if bytes < pinned {
            return Err(format!(
                "ssd is {bytes}: pinned files have {pinned} bytes, which stay on the disk: take pins away, or give as \
                 much"
            ));
        }
        Ok(())
    }
}

/// Bytes of all pinned files that the disk has.
fn pinned_bytes(file_system: &FileSystem) -> Result<u64, FsError> {
    // Records alone tell, so what changed since the last commit must be among them.
    if !file_system.core.store.is_read_only() {
        file_system.commit()?;
    }
    let snapshot = file_system.core.state().metadata.snapshot()?;
    let mut pinned = std::collections::BTreeSet::new();
    snapshot.for_each_named(b'X', |inode, name| {
        if name == PIN {
            pinned.insert(InodeId(inode));
        }
    })?;
    let mut bytes = 0;
    for id in pinned {
        // Others have the lock in between: there may be many.
        let state = file_system.core.state();
        let inode = state.metadata.inode(id)?;
        let Some(file) = inode.as_ref().and_then(Inode::file) else { continue };
        let copy = file.object.map(|object| state.metadata.remote_copy(object)).transpose()?;
        let is_away = copy.flatten().is_some_and(|copy| copy.state == RemoteState::Only);
        bytes += if is_away { 0 } else { file.size };
    }
    Ok(bytes)
}
