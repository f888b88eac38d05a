//! `kvfs remote`: what is in a remote, without a mount.

use std::ffi::OsString;

use clap::Subcommand;

use super::output::{Failure, Outcome, Report};
use crate::tier::remote::counters::Counters;
use crate::tier::remote::names::published;
use crate::tier::remote::{RemoteName, RemoteSpec};

/// `kvfs remote`.
#[derive(Debug, Subcommand)]
pub(crate) enum RemoteCommand {
    /// List the stores that have published names there, which `kvfs mount --rebuild-from` takes
    Ls {
        /// Print JSON
        #[arg(long)]
        json: bool,
        /// A shared directory, or `s3://BUCKET/PREFIX` with the `AWS_*` variables
        #[arg(value_name = "DIR|s3://...")]
        place: String,
    },
}

/// Looks, and changes nothing.
pub(crate) fn run(command: &RemoteCommand) -> Outcome {
    let RemoteCommand::Ls { json, place } = command;
    let place = super::arguments::absolute(place.clone())?;
    let place: RemoteSpec =
        place.parse().map_err(|error| Failure::Usage(format!("remote: {error}")))?;
    let text = |(name, value): (OsString, OsString)| {
        Some((name.into_string().ok()?, value.into_string().ok()?))
    };
    let connector = place.connector(std::env::vars_os().filter_map(text));
    let remote = connector.connect(&Counters::default()).map_err(Failure::failed)?;
    if remote.head(RemoteName::Marker).map_err(Failure::failed)?.is_none() {
        return Err(Failure::Failed(format!(
            "{place} is no remote of kvfs: it has no KVFS-REMOTE"
        )));
    }
    let stores = published::stores(remote.as_ref()).map_err(Failure::failed)?;
    Ok(if *json {
        Report::json(&published::to_json(&stores))
    } else {
        Report::text(published::table(&stores))
    })
}
