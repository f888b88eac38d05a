//! How well a mount is: the worst of what is known about it, and why.
//!
//! Everything here is looked up when somebody asks, so that a reason goes when its cause does.

use super::FileSystem;
use super::tiers::Tiers;
use crate::core::Core;
use kvfs_storage::store::disk::Space;
use kvfs_storage::tier::exchange::Exchange;
use kvfs_storage::tier::remote::State as RemoteHealth;

/// A disk with less than that left is called full: not even a page of a small model fits.
const FULL_BYTES: u64 = 1 << 20;
/// The same of inodes: files are made ahead, and a commit may take some.
const FULL_INODES: u64 = 16;

/// Why a store takes no changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// The disk failed in a way that makes further changes unsafe.
    DiskFailed,
    /// Records were lost or changed on the disk: what is removed now may be what nobody knows of any more.
    DamagedMetadata,
    /// Nothing can be written where the store lies.
    ReadOnlyMedia,
}

/// How well a mount is.
#[derive(Debug)]
pub(super) struct Health {
    /// Why the store takes no changes, if so.
    refusal: Option<Refusal>,
    /// What is not as it should be.
    pub(super) reasons: Vec<String>,
    /// Files of which no good copy was found.
    pub(super) damaged_files: usize,
}

impl Health {
    pub(super) fn is_ok(&self) -> bool {
        let refuses = matches!(self.refusal, Some(Refusal::DiskFailed | Refusal::DamagedMetadata));
        self.reasons.is_empty() && !refuses
    }

    /// The word for it in `.kvfs/status`.
    pub(super) fn word(&self) -> &'static str {
        match (self.refusal, self.is_ok()) {
            (Some(Refusal::DiskFailed), _) => "read-only after a disk error",
            (Some(Refusal::DamagedMetadata), _) => "read-only after damage to meta.redb",
            (_, false) => "degraded",
            (Some(Refusal::ReadOnlyMedia), true) => "read-only media",
            (None, true) => "ok",
        }
    }
}

/// How well the mount is now.
pub(super) fn health(fs: &FileSystem) -> Health {
    let (refusal, commit_failure, damaged_files, lacks_remote, given_up) = {
        let mut state = fs.core.state();
        let damaged_files = state.count_known_damage();
        let lacks_remote = fs.residency().lacks_remote(&state);
        let given_up = state.metadata.arrivals.given_up();
        let given_up = given_up.why().map(|why| (given_up.len(), why.to_owned()));
        let commit_failure = state.commit_failure.clone();
        (state.refusal, commit_failure, damaged_files, lacks_remote, given_up)
    };
    let mut reasons = Vec::new();
    if let Some(why) = commit_failure {
        reasons.push(format!("the last commit failed: {}", why.why));
    }
    if refusal == Some(Refusal::DamagedMetadata) {
        let why = "records are missing or not as they were written: unmount, and run kvfs fsck";
        reasons.push(why.to_owned());
    }
    if damaged_files > 0 {
        reasons.push(format!("{damaged_files} files are damaged: see .kvfs/errors"));
    }
    reasons.extend(fs.tiers.as_ref().and_then(remote_trouble));
    reasons.extend(
        given_up
            .map(|(count, why)| format!("{count} files cannot be brought into the remote: {why}")),
    );
    if lacks_remote {
        let why = "the store has copies in a remote and the mount has none: what only the \
                   remote has cannot be read";
        reasons.push(why.to_owned());
    }
    match fs.core.store.disk.space() {
        Ok(_) if fs.core.store.is_read_only() => {}
        Ok(space) => reasons.extend(lack_of_space(&fs.core, &space)),
        Err(error) => reasons.push(format!("the disk does not tell its free space: {error}")),
    }
    Health { refusal, reasons, damaged_files }
}

fn remote_trouble(tiers: &Tiers) -> Option<String> {
    let remote = tiers.exchange.as_ref().map(Exchange::remote)?;
    match remote.state() {
        RemoteHealth::Connecting => None,
        RemoteHealth::Up { .. } => {
            let trouble = tiers.trouble();
            let trouble = trouble.map(|why| format!("objects do not reach the remote: {why}"));
            trouble.or_else(|| Some(format!("the remote is slow: {}", remote.slow()?)))
        }
        RemoteHealth::Down { since, error } => {
            let seconds = since.elapsed().unwrap_or_default().as_secs();
            Some(format!("the remote is down for {seconds} s: {error}"))
        }
    }
}

fn lack_of_space(core: &Core, space: &Space) -> Vec<String> {
    let mut reasons = what_is_used_up(space);
    let waiting = core.state().metadata.unindexed.len();
    if waiting > 0 && space.is_nearly_full() {
        reasons.push(format!(
            "the disk has {} bytes free, and the index of prefixes leaves {} to others: {waiting} sequences are not in it as they are",
            space.available_bytes,
            space.nearly_full_bytes()
        ));
    }
    if let Some(ram) = &core.store.ram
        && !space.can_take(ram.budget_bytes())
    {
        reasons.push(format!(
            "the RAM tier is idle: the disk has {} bytes free, less than twice its budget of {}",
            space.available_bytes,
            ram.budget_bytes()
        ));
    }
    reasons
}

/// Of what a disk has none left. One that counts no inodes tells of none at all.
fn what_is_used_up(space: &Space) -> Vec<String> {
    let mut reasons = Vec::new();
    if space.available_bytes < FULL_BYTES {
        reasons.push(format!("the disk is full: {} bytes are free", space.available_bytes));
    }
    if space.inodes_total > 0 && space.inodes_free < FULL_INODES {
        reasons.push(format!("the disk is full: {} inodes are free", space.inodes_free));
    }
    reasons
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_is_full_without_room_or_without_inodes() {
        let told = |available_bytes, inodes_total, inodes_free| {
            let space = Space { available_bytes, inodes_total, inodes_free, ..Space::default() };
            what_is_used_up(&space)
        };
        assert_eq!(told(FULL_BYTES, 700, FULL_INODES), [""; 0]);
        assert_eq!(told(5, 700, FULL_INODES), ["the disk is full: 5 bytes are free"]);
        assert_eq!(told(1 << 30, 700, 0), ["the disk is full: 0 inodes are free"]);
        assert_eq!(told(1 << 30, 700, FULL_INODES - 1).len(), 1);
        assert_eq!(told(5, 700, 0).len(), 2);
        // btrfs, and tmpfs with nr_inodes=0.
        assert_eq!(told(1 << 30, 0, 0), [""; 0]);
    }
}
