//! `kvfs take-over`: what a daemon calls that gives its mount to this program.

mod check;

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::{Args, Parser};

use crate::cli::arguments::{Arguments, Command};
use crate::cli::config::{self, MountConfig, Place};
use crate::cli::output::{Failure, Outcome, Report};
use crate::cli::role::{self, Role};
use crate::cli::settings::{Layer, Origin, Value, find};
use crate::cli::{helper, mount};
use crate::fs::takeover::{FORMAT, Handover, Launch, Secret};

/// `kvfs take-over`.
#[derive(Debug, Args)]
pub(crate) struct TakeOverArguments {
    /// Only say whether this program could go on with what comes on standard input
    #[arg(long)]
    check: bool,
    /// The descriptor of what the daemon has left
    #[arg(required_unless_present = "check")]
    descriptor: Option<i32>,
    /// The store and the mountpoint, which `ps` shows
    told: Vec<PathBuf>,
}

/// Goes on with a mount until it ends.
pub(crate) fn run(arguments: &TakeOverArguments) -> Outcome {
    let bytes = match arguments.descriptor {
        Some(number) => left_in(number),
        None => all_of(&mut io::stdin()),
    };
    let bytes = bytes.map_err(|error| Failure::failed(format!("what was left: {error}")))?;
    let mut left = Handover::from_bytes(&bytes)
        .map_err(|error| Failure::failed(format!("what was left: {error}")))?;
    drop(bytes);
    let mut config = configuration(&left.launch)?;
    if arguments.check {
        check::check(&config, &left.launch)?;
        return Ok(Report::text(format!("kvfs take-over {FORMAT}\n")));
    }
    if config.remote_key.is_some() {
        let Some((remote, Secret(keys))) = config.options.remote.as_mut().zip(left.keys.take())
        else {
            return Err(Failure::failed("what was left: the keys of the remote are missing"));
        };
        let keys = keys
            .parse()
            .map_err(|why| Failure::failed(format!("the keys that were left: {why}")))?;
        remote.keys = Some(Arc::new(keys));
    }
    mount::go_on(config, left)?;
    Ok(Report::default())
}

fn left_in(number: i32) -> io::Result<Vec<u8>> {
    let mut file = File::from(kvfs_os::inherited(number)?);
    file.seek(SeekFrom::Start(0))?;
    all_of(&mut file)
}

fn all_of(from: &mut dyn Read) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    from.read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// The mount as it was made, from the same arguments, variables and files, and what was changed since.
fn configuration(launch: &Launch) -> Result<MountConfig, Failure> {
    let directory = &launch.directory;
    std::env::set_current_dir(directory).map_err(|error| {
        let place = directory.display();
        Failure::failed(format!("{place}, where this mount was made, is gone: {error}"))
    })?;
    let config = match role::of(&launch.arguments) {
        Role::MountHelper(rest) => helper::mount_config(&rest)?,
        Role::UmountHelper(_) => return Err(not_a_mount()),
        Role::Command => match Arguments::try_parse_from(&launch.arguments) {
            Ok(Arguments { command: Command::Mount(arguments) }) => arguments.config()?,
            Ok(_) => return Err(not_a_mount()),
            Err(error) => {
                let line = error.to_string().lines().next().unwrap_or_default().to_owned();
                return Err(Failure::Usage(line));
            }
        },
    };
    let foreground = config.foreground;
    if !foreground {
        // Where a daemon is.
        let root = std::env::set_current_dir(Path::new("/"));
        root.map_err(|error| Failure::failed(format!("/: {error}")))?;
    }
    let (store, mountpoint) = (launch.store.clone(), launch.mountpoint.clone());
    let live = changed(&launch.settings)?;
    let sources = config.sources.under(Origin::Live, &live);
    let place = Place { store, mountpoint, foreground };
    config::validate(&sources, place).map_err(Failure::Usage)
}

fn not_a_mount() -> Failure {
    Failure::Failed("the daemon was not made by kvfs mount".to_owned())
}

/// Settings that were changed while the mount was used.
fn changed(lines: &str) -> Result<Layer, Failure> {
    let mut live = Layer::default();
    for line in lines.lines() {
        let unknown = || Failure::Usage(format!("{line:?} is no setting of this kvfs"));
        let (name, text) = line.split_once('=').ok_or_else(unknown)?;
        let setting = find(name).ok_or_else(unknown)?;
        let value = Value::parse(setting.kind, name, text).map_err(Failure::Usage)?;
        live.set(setting, value);
    }
    Ok(live)
}
