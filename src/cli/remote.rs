//! `kvfs remote`: what concerns a remote and no mount.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use clap::Subcommand;

use super::output::{Failure, Outcome, Report};
use super::progress;
use super::remote_key::{self, KeySource};
use crate::tier::remote::counters::Counters;
use crate::tier::remote::names::published;
use crate::tier::remote::seal::{KeyRing, Seal, Sealed};
use crate::tier::remote::{BlobStore, Connector, Numbers, RemoteError, RemoteSpec, identify};

/// `kvfs remote`.
#[derive(Debug, Subcommand)]
pub(crate) enum RemoteCommand {
    /// List the stores that have published names there, which `kvfs mount --rebuild-from` takes
    #[command(after_help = "Example: kvfs remote ls s3://bucket/kv")]
    Ls {
        /// Print JSON
        #[arg(long)]
        json: bool,
        /// The keys of a remote that is sealed
        #[arg(long, value_name = "FILE", env = "KVFS_REMOTE_KEY")]
        remote_key: Option<PathBuf>,
        /// A shared directory, or `s3://BUCKET/PREFIX` with the `AWS_*` variables
        #[arg(value_name = "DIR|s3://...")]
        place: String,
    },
    /// Make a key that seals a remote (kvfs mount --remote-key). Whoever loses it loses what is
    /// sealed with it
    #[command(after_help = "Example: kvfs remote keygen /etc/kvfs.key")]
    Keygen {
        /// The file to make, for its owner alone; it must not be there yet
        file: PathBuf,
    },
}

/// Does it.
pub(crate) fn run(command: &RemoteCommand) -> Outcome {
    match command {
        RemoteCommand::Ls { json, remote_key, place } => {
            let keys = remote_key.clone().map(|path| KeySource::File(path).load()).transpose();
            list(place, keys.map_err(Failure::Failed)?, *json)
        }
        RemoteCommand::Keygen { file } => remote_key::keygen(file),
    }
}

/// The place that somebody means, and how it is reached.
pub(super) fn connector(place: &str) -> Result<(RemoteSpec, Arc<dyn Connector>), Failure> {
    let place = super::mount_arguments::absolute(place.to_owned())?;
    let place: RemoteSpec =
        place.parse().map_err(|error| Failure::Usage(format!("remote: {error}")))?;
    let text = |(name, value): (OsString, OsString)| {
        Some((name.into_string().ok()?, value.into_string().ok()?))
    };
    let connector = place.connector(std::env::vars_os().filter_map(text));
    Ok((place, connector))
}

/// How long somebody in front of a terminal waits for a remote that does not answer. A mount gives a call as long.
const PATIENCE: Duration = Duration::from_secs(30);

/// How long it may take to list the stores there, of which each costs a request or two: some thousands.
const LISTING_PATIENCE: Duration = Duration::from_secs(300);

/// Asks a remote something in a thread of its own, which is left behind if the remote hangs: this process ends.
pub(super) fn ask<T: Send + 'static>(
    spec: &RemoteSpec, question: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Failure> {
    ask_within(PATIENCE, spec, question)
}

fn ask_within<T: Send + 'static>(
    patience: Duration, spec: &RemoteSpec, question: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Failure> {
    wait_for(patience, spec, question)?.ok_or_else(|| {
        let seconds = patience.as_secs();
        Failure::Failed(format!("remote {spec} does not answer within {seconds} s"))
    })
}

/// The answer, if it comes in time.
fn wait_for<T: Send + 'static>(
    patience: Duration, spec: &RemoteSpec, question: impl FnOnce() -> T + Send + 'static,
) -> Result<Option<T>, Failure> {
    let (sender, receiver) = channel();
    let started = std::thread::Builder::new().spawn(move || {
        // Nobody listens any more if that took too long.
        let _ = sender.send(question());
    });
    started.map_err(Failure::failed)?;
    match receiver.recv_timeout(patience) {
        Ok(answer) => Ok(Some(answer)),
        Err(RecvTimeoutError::Timeout) => Ok(None),
        Err(RecvTimeoutError::Disconnected) => {
            Err(Failure::Failed(format!("remote {spec}: gave no answer")))
        }
    }
}

fn failed(error: &RemoteError) -> Failure {
    Failure::Failed(error.told_once())
}

/// Looks, and changes nothing.
fn list(place: &str, keys: Option<KeyRing>, json: bool) -> Outcome {
    let (spec, connector) = connector(place)?;
    let (remote, id, keys) = ask(&spec, move || {
        let remote = connector.connect(&Counters::default())?;
        let id = identify(remote.as_ref(), keys.as_ref())?;
        Ok::<_, RemoteError>((remote, id, keys))
    })?
    .map_err(|error| failed(&error))?;
    let remote: Arc<dyn BlobStore> = match keys {
        Some(keys) => {
            let seal = Seal { keys: Arc::new(keys), numbers: Arc::new(Numbers::default()) };
            Arc::new(Sealed::new(remote, id, &seal))
        }
        None => remote,
    };
    let wheel = progress::spinner("listing the stores there");
    let stores = wait_for(LISTING_PATIENCE, &spec, move || published::stores(remote.as_ref()));
    wheel.finish_and_clear();
    let late = || {
        let seconds = LISTING_PATIENCE.as_secs();
        format!(
            "remote {spec} answers, but has not told of all its stores within {seconds} s: check \
             the network and the server"
        )
    };
    let stores = stores?.ok_or_else(|| Failure::Failed(late()))?.map_err(|error| failed(&error))?;
    Ok(if json {
        Report::json(&published::to_json(&stores))
    } else {
        Report::text(published::table(&stores))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_that_is_not_there_is_not_said_to_be_tried_again() {
        let directory = tempfile::tempdir().unwrap();
        let place = directory.path().join("nope");
        let failure = list(place.to_str().unwrap(), None, false).unwrap_err();
        let line = failure.line();
        assert!(line.contains("nope") && !line.contains("again by itself"), "{line}");
    }

    #[test]
    fn a_remote_that_hangs_is_left() {
        let spec: RemoteSpec = "/shared/kv".parse().unwrap();
        let (_never, silence) = channel::<()>();
        let failure = ask_within(Duration::ZERO, &spec, move || silence.recv()).unwrap_err();
        assert_eq!(failure.line(), "remote /shared/kv does not answer within 0 s");
        assert_eq!(ask(&spec, || 7).unwrap(), 7);
    }
}
