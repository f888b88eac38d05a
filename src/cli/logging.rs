//! The log of a mount.
//!
//! The daemon's standard error is its log file, so what a panic says lands there too. What is logged can change while
//! it runs, and its file be opened anew once somebody has moved it away. Each line has the mark of the store, which is in the
//! name of the file as well: several mounts may have one journal, or one file.

use std::ffi::OsString;
use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError, RwLock, RwLockReadGuard};

use nix::unistd::{User, geteuid};

use super::output::complain;
use super::service;
use crate::page::printable;

/// What is worth keeping for months: of fuser, which mounts and shakes hands, errors alone.
pub(crate) const DEFAULT_FILTER: &str = "info,fuser=error";

/// Digits of the path's hash in the name of a log: two stores of a machine do not share 32 bits.
const HASH_DIGITS: usize = 8;

/// The log of this process.
static LOG: OnceLock<Log> = OnceLock::new();

/// Where lines go.
#[derive(Debug)]
pub(crate) enum Target {
    /// Standard error, wherever that is.
    Standard,
    /// Standard error, which is this file.
    StandardIn(PathBuf),
    /// A file.
    File(PathBuf, File),
}

impl Target {
    /// A file, opened.
    pub(crate) fn file(path: PathBuf) -> Result<Target, String> {
        let file = open(&path)?;
        Ok(Target::File(path, file))
    }

    /// Whether it is a file that can be opened anew.
    fn path(&self) -> Option<&Path> {
        match self {
            Target::Standard => None,
            Target::StandardIn(path) | Target::File(path, _) => Some(path),
        }
    }
}

struct Log {
    /// Of the store, at the beginning of each line.
    mark: String,
    logger: RwLock<env_logger::Logger>,
    setup: Mutex<Setup>,
}

struct Setup {
    filter: String,
    target: Target,
}

impl Setup {
    fn logger(&self) -> env_logger::Logger {
        let mut builder = env_logger::Builder::new();
        builder.parse_filters(&self.filter);
        builder.format_timestamp_millis();
        if matches!(self.target, Target::Standard) && service::is_journal() {
            builder.format(|line, record| {
                let priority = service::priority(record.level());
                writeln!(line, "<{priority}>{}: {}", record.target(), record.args())
            });
        }
        if let Target::File(path, file) = &self.target {
            match file.try_clone() {
                Ok(file) => drop(builder.target(env_logger::Target::Pipe(Box::new(file)))),
                Err(error) => complain("kvfs", &format!("log {}: {error}", path.display())),
            }
        }
        builder.build()
    }
}

impl Log {
    fn setup(&self) -> MutexGuard<'_, Setup> {
        self.setup.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn logger(&self) -> RwLockReadGuard<'_, env_logger::Logger> {
        self.logger.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Logs as the setup says from now on.
    fn rebuild(&self, setup: &Setup) {
        let logger = setup.logger();
        let level = logger.filter();
        *self.logger.write().unwrap_or_else(PoisonError::into_inner) = logger;
        log::set_max_level(level);
    }
}

impl log::Log for Log {
    fn enabled(&self, metadata: &log::Metadata<'_>) -> bool {
        self.logger().enabled(metadata)
    }

    /// One line, whatever names of files and words of others are in it.
    fn log(&self, record: &log::Record<'_>) {
        let logger = self.logger();
        if logger.matches(record) {
            let line = printable(record.args().to_string().chars());
            let mut same = log::Record::builder();
            same.metadata(record.metadata().clone()).module_path(record.module_path());
            logger.log(&same.args(format_args!("{}: {line}", self.mark)).build());
        }
    }

    fn flush(&self) {
        self.logger().flush();
    }
}

/// Starts logging for the mount of a store.
pub(crate) fn start(filter: Option<&str>, target: Target, store: &Path) {
    let setup = Setup { filter: filter.unwrap_or(DEFAULT_FILTER).to_owned(), target };
    let logger = setup.logger();
    let level = logger.filter();
    let mark = printable(mark(store).to_string_lossy().chars());
    let made = Log { mark, logger: RwLock::new(logger), setup: Mutex::new(setup) };
    if LOG.set(made).is_err() {
        log::debug!("the log was set up before");
        return;
    }
    if let Some(log) = LOG.get()
        && log::set_logger(log).is_ok()
    {
        log::set_max_level(level);
    }
}

/// Changes what is logged.
pub(crate) fn set_filter(filter: Option<&str>) {
    if let Some(log) = LOG.get() {
        let mut setup = log.setup();
        filter.unwrap_or(DEFAULT_FILTER).clone_into(&mut setup.filter);
        log.rebuild(&setup);
    }
}

/// Whether the log is a file, which can be [opened anew](reopen).
pub(crate) fn is_file() -> bool {
    LOG.get().is_some_and(|log| log.setup().target.path().is_some())
}

/// Opens the file of the log anew: somebody has moved away what had its name. If that fails, the old one stays.
pub(crate) fn reopen() {
    let Some(log) = LOG.get() else { return };
    let mut setup = log.setup();
    let Some(path) = setup.target.path().map(Path::to_owned) else { return };
    let reopened = open(&path).and_then(|file| match &mut setup.target {
        Target::File(_, old) => {
            *old = file;
            Ok(())
        }
        _ => nix::unistd::dup2_stderr(&file)
            .map_err(|error| format!("log {}: {error}", path.display())),
    });
    log.rebuild(&setup);
    drop(setup);
    match reopened {
        Ok(()) => log::info!("the log goes on here"),
        Err(error) => log::error!("the log stays where it was: {error}"),
    }
}

/// Refuses a filter that `env_logger` would silently ignore.
pub(crate) fn check_filter(filter: Option<&str>) -> Result<(), String> {
    let Some(filter) = filter else { return Ok(()) };
    // The form is "level" or "module=level", in a list; "/pattern" may follow.
    let (directives, pattern) = filter.split_once('/').unwrap_or((filter, ""));
    if pattern.contains('/') {
        return Err(format!("log_level {filter:?}: what follows the first / may have no other /"));
    }
    if directives.split(',').all(str::is_empty) {
        return Err(format!(
            "log_level {filter:?}: says no level: off, error, warn, info, debug or trace"
        ));
    }
    for directive in directives.split(',').filter(|directive| !directive.is_empty()) {
        // A word that is no level would be taken for a module, and nothing else be logged.
        let is_level = directive.parse::<log::LevelFilter>().is_ok();
        if !directive.contains('=') && !is_level && !directive.starts_with("kvfs") {
            return Err(format!(
                "log_level {directive:?}: must be off, error, warn, info, debug or trace, or \
                 MODULE=LEVEL"
            ));
        }
        if let Some((_, level)) = directive.split_once('=')
            && level.parse::<log::LevelFilter>().is_err()
        {
            return Err(format!(
                "log_level {directive:?}: must be off, error, warn, info, debug or trace"
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
    // A FIFO that nobody reads is refused, and one that nobody reads fast enough loses lines.
    let mut options = OpenOptions::new();
    options.append(true).create(true).mode(0o600).custom_flags(libc::O_NONBLOCK);
    options.open(path).map_err(explain)
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

fn file_name(store: &Path) -> PathBuf {
    let mut name = mark(store);
    name.push(".log");
    PathBuf::from(name)
}

/// Stores are told apart by their whole path: many are called `store`.
fn mark(store: &Path) -> OsString {
    let mut name = store.file_name().unwrap_or("root".as_ref()).to_owned();
    let hash = blake3::hash(store.as_os_str().as_bytes()).to_hex();
    name.push(format!("-{}", &hash.as_str()[..HASH_DIGITS]));
    name
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
        check("debug", true);
        check("info,fuser=warn", true);
        check("kvfs::store=trace,off/pattern=x", true);
        check("kvfs", true);
        check("loud", false);
        check("warning", false);
        check("kvfs=loud", false);
        check("", false);
        check(",,", false);
        check("/pattern", false);
        check("info/a/b", false);
        check("info//", false);
        check("info,kvfs=", false);
    }

    #[test]
    fn what_is_logged_is_one_line() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("log");
        let target = Target::File(path.clone(), open(&path).unwrap());
        let setup = Setup { filter: "info".to_owned(), target };
        let mark = "kv-0123abcd".to_owned();
        let log = Log { mark, logger: RwLock::new(setup.logger()), setup: Mutex::new(setup) };
        let say = |level, line: &str| {
            let mut record = log::Record::builder();
            log::Log::log(&log, &record.level(level).args(format_args!("{line}")).build());
        };
        say(log::Level::Info, "a file named \"a\\b\nERROR: all is lost\u{1b}[2J\" was removed");
        say(log::Level::Debug, "nobody asked for this");
        let written = std::fs::read_to_string(&path).unwrap();
        let told =
            "] kv-0123abcd: a file named \"a\\b\\nERROR: all is lost\\u{1b}[2J\" was removed\n";
        assert!(written.ends_with(told) && written.lines().count() == 1, "{written}");
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
