//! The log of a mount.
//!
//! The daemon's standard error is its log file, so what a panic says lands there too.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use nix::unistd::{User, geteuid};

/// What is worth keeping for months; fuser warns of requests that are meant to be unsupported, and tells of
/// each answer to an interrupt of a request that came through a ring: the kernel looks for that elsewhere.
const DEFAULT_FILTER: &str = "info,fuser=error,fuser::reply=off";

/// Digits of the path's hash in the name of a log: two stores of a machine do not share 32 bits.
const HASH_DIGITS: usize = 8;

/// Starts logging to a file, or else to standard error.
pub(crate) fn start(filter: Option<&str>, file: Option<File>) {
    let mut builder = env_logger::Builder::new();
    builder.parse_filters(filter.unwrap_or(DEFAULT_FILTER));
    builder.format_timestamp_millis();
    if let Some(file) = file {
        builder.target(env_logger::Target::Pipe(Box::new(file)));
    }
    if builder.try_init().is_err() {
        log::debug!("somebody else set up the log before");
    }
}

/// Refuses a filter that `env_logger` would silently ignore.
pub(crate) fn check_filter(filter: Option<&str>) -> Result<(), String> {
    let Some(filter) = filter else { return Ok(()) };
    // The form is "level" or "module=level", in a list; "/pattern" may follow.
    let directives = filter.split('/').next().unwrap_or("");
    for directive in directives.split(',').filter(|directive| !directive.is_empty()) {
        // A word that is no level would be taken for a module, and nothing else be logged.
        let is_level = directive.parse::<log::LevelFilter>().is_ok();
        if !directive.contains('=') && !is_level && !directive.starts_with("kvfs") {
            return Err(format!(
                "log level {directive:?}: must be off, error, warn, info, debug or trace, or \
                 MODULE=LEVEL"
            ));
        }
        if let Some((_, level)) = directive.split_once('=')
            && level.parse::<log::LevelFilter>().is_err()
        {
            return Err(format!(
                "log level {directive:?}: must be off, error, warn, info, debug or trace"
            ));
        }
    }
    Ok(())
}

/// Opens a log to append to. Its lines name files of users, so only the owner may read it.
pub(crate) fn open(path: &Path) -> Result<File, String> {
    let explain =
        |error: io::Error| format!("log {}: {error}: name another file with --log", path.display());
    if let Some(directory) = path.parent() {
        DirBuilder::new().recursive(true).mode(0o700).create(directory).map_err(explain)?;
    }
    OpenOptions::new().append(true).create(true).mode(0o600).open(path).map_err(explain)
}

/// The log file of a store's daemon where none was named.
pub(crate) fn default_path(store: &Path) -> Result<PathBuf, String> {
    let state = if geteuid().is_root() {
        PathBuf::from("/var/log")
    } else {
        state_home().ok_or("no home directory for the log: name a file with --log")?
    };
    Ok(state.join("kvfs").join(file_name(store)))
}

/// Stores are told apart by their whole path: many are called `store`.
fn file_name(store: &Path) -> PathBuf {
    let mut name = store.file_name().unwrap_or("root".as_ref()).to_owned();
    let hash = blake3::hash(store.as_os_str().as_bytes()).to_hex();
    name.push(format!("-{}.log", &hash.as_str()[..HASH_DIGITS]));
    PathBuf::from(name)
}

fn state_home() -> Option<PathBuf> {
    let absolute = |path: &PathBuf| path.is_absolute();
    let named = std::env::var_os("XDG_STATE_HOME").map(PathBuf::from).filter(absolute);
    named.or_else(|| {
        let home = std::env::var_os("HOME").map(PathBuf::from).filter(absolute);
        // Services have no HOME.
        let home = home.or_else(|| Some(User::from_uid(geteuid()).ok()??.dir))?;
        Some(home.join(".local/state"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filters() {
        fn check(filter: &str, good: bool) {
            assert_eq!(check_filter(Some(filter)).is_ok(), good, "{filter}");
        }
        check("", true);
        check("debug", true);
        check("info,fuser=warn", true);
        check("kvfs::store=trace,off/pattern=x", true);
        check("kvfs", true);
        check("loud", false);
        check("warning", false);
        check("kvfs=loud", false);
        check("info,kvfs=", false);
    }

    #[test]
    fn names() {
        let name = |store: &str| file_name(Path::new(store)).to_string_lossy().into_owned();
        assert!(name("/srv/kv").starts_with("kv-") && name("/srv/kv").ends_with("log"));
        assert!(name("/").starts_with("root-"));
        assert_eq!(name("/srv/kv"), name("/srv/kv"));
        assert_ne!(name("/srv/kv"), name("/mnt/kv"));
    }
}
