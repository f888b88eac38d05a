//! `kvfs remote`: what concerns a remote and no mount.

use std::path::PathBuf;

use clap::Subcommand;

use super::output::Outcome;
use super::remote_key;

/// What to do.
#[derive(Debug, Subcommand)]
pub(crate) enum RemoteCommand {
    /// Make a key that seals a remote (kvfs mount --remote-key). Whoever loses it loses what is
    /// sealed with it
    Keygen {
        /// The file to make, for its owner alone; it must not be there yet
        file: PathBuf,
    },
}

/// Does it.
pub(crate) fn run(command: &RemoteCommand) -> Outcome {
    match command {
        RemoteCommand::Keygen { file } => remote_key::keygen(file),
    }
}
