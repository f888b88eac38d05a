//! `kvfs sync`: makes everything in a mount durable. sync(2) and syncfs(2) cannot do it, because
//! the kernel does not pass them on to the daemon.

use std::fs::File;

use super::arguments::SyncArguments;
use super::mountinfo;
use super::output::{Failure, Outcome, Report};

/// Asks without a deadline: like sync(1), it takes as long as it takes.
pub(crate) fn run(arguments: &SyncArguments) -> Outcome {
    let (mount, _) = mountinfo::kvfs_at(&arguments.mountpoint).map_err(Failure::Failed)?;
    let synced = File::open(&mount.mountpoint).and_then(|root| root.sync_all());
    match synced {
        Ok(()) => Ok(Report::default()),
        Err(error) => Err(Failure::Failed(format!("{}: {error}", mount.mountpoint.display()))),
    }
}
