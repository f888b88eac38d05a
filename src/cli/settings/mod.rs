//! The settings of a mount: one table that says what each is called, how it is read, what it is without anybody
//! saying so, and whether it can change while the mount is used.
//!
//! Every source (arguments, `-o`, variables, configuration files, `kvfs config set`) reads values by this table, and
//! everything that lists settings goes through it.

mod file;
mod layer;
mod live;
mod template;
mod value;

pub(crate) use file::{Found, open_regular, read as read_file, text_of};
pub(crate) use layer::{Layer, Origin, Sources, from_environment};
pub(crate) use live::Steerer;
pub(crate) use template::template;
pub(crate) use value::{Kind, Value};

/// One setting.
#[derive(Debug)]
pub(crate) struct Setting {
    /// In `-o`, in a configuration file and in `kvfs config set`.
    pub(crate) name: &'static str,
    /// Variables that set it; the first that is set counts.
    pub(crate) variables: &'static [&'static str],
    /// How its values are written.
    pub(crate) kind: Kind,
    /// Its value where nobody gives one; `None` if there is none, or if it depends on the machine.
    pub(crate) default: Option<&'static str>,
    /// Such a value, where there is no default that could be shown.
    pub(crate) example: &'static str,
    /// Whether it can change while the mount is used.
    pub(crate) is_live: bool,
    /// What it does, for `kvfs config init`.
    pub(crate) about: &'static str,
}

const fn setting(
    name: &'static str, variables: &'static [&'static str], kind: Kind,
    default: Option<&'static str>, about: &'static str,
) -> Setting {
    Setting { name, variables, kind, default, example: "", is_live: false, about }
}

impl Setting {
    const fn live(self) -> Setting {
        Setting { is_live: true, ..self }
    }

    const fn such_as(self, example: &'static str) -> Setting {
        Setting { example, ..self }
    }
}

/// All settings, in the order in which they are shown.
pub(crate) static SETTINGS: [Setting; 28] = [
    setting(
        "ram", &["KVFS_RAM"], Kind::Size, Some("0"),
        "Memory for pages: new ones are written there first, then to the store.",
    )
    .live(),
    setting(
        "pack", &["KVFS_PACK"], Kind::Size, Some("64K"),
        "Files of up to so many bytes (1M at most, 0 for none) share pack files instead of each having its own.",
    )
    .live(),
    setting(
        "ssd", &["KVFS_SSD"], Kind::Limit, Some("none"),
        "Disk space for objects: beyond it, they are encoded and leave. Needs remote or cold.",
    )
    .live(),
    setting(
        "ssd_writes", &["KVFS_SSD_WRITES"], Kind::Text, Some("none"),
        "Bytes that may be written to the disk in a day (SIZE/day): beyond them, pages that nobody asked for twice stay \
         in memory and in the remote. Needs ram and remote.",
    )
    .such_as("200G/day")
    .live(),
    setting(
        "cold", &["KVFS_COLD"], Kind::Text, Some("none"),
        "How cold objects are encoded: none, zstd, zstd:LEVEL.",
    )
    .live(),
    setting(
        "remote", &["KVFS_REMOTE"], Kind::Text, None,
        "Where objects go in the background: a shared directory, or s3://BUCKET/PREFIX with the AWS_* variables.",
    )
    .such_as("/mnt/nas/kv"),
    setting(
        "remote_bandwidth", &["KVFS_REMOTE_BANDWIDTH"], Kind::Limit, Some("none"),
        "Bytes per second to and from the remote together.",
    )
    .live(),
    setting(
        "remote_index", &["KVFS_REMOTE_INDEX"], Kind::Duration, Some("10"),
        "How often the prefixes that other stores have published to the remote are read; 0 for never.",
    ),
    setting(
        "remote_key", &["KVFS_REMOTE_KEY"], Kind::Path, None,
        "File with the keys that seal what goes to the remote (kvfs remote keygen).",
    )
    .such_as("/etc/kvfs/key"),
    setting(
        "remote_key_command", &["KVFS_REMOTE_KEY_COMMAND"], Kind::Text, None,
        "The same with the keys that a command prints, run by sh. Give one of the two.",
    )
    .such_as("vault kv get -field=key secret/kvfs"),
    setting(
        "rebuild_from", &["KVFS_REBUILD_FROM"], Kind::Text, None,
        "Whose names a new store takes over from the remote: a store's id, or none. Otherwise those of the only \
         store that has published there.",
    )
    .such_as("none"),
    setting(
        "offline", &["KVFS_OFFLINE"], Kind::Switch, Some("no"),
        "Mount without the remote, also if only that has the bytes of some files.",
    ),
    setting(
        "verify", &["KVFS_VERIFY"], Kind::Text, Some("first"),
        "When opening a file compares its bytes with their checksum: first (time after the mount), always, never.",
    )
    .live(),
    setting(
        "on_corrupt", &["KVFS_ON_CORRUPT"], Kind::Text, Some("eio"),
        "What a file is whose bytes are damaged or cannot be fetched: an error (eio), or not there (miss).",
    )
    .live(),
    setting(
        "commit_interval", &["KVFS_COMMIT_INTERVAL"], Kind::Duration, Some("1"),
        "Longest time for which a change may be lost in a crash.",
    ),
    setting(
        "read_only", &["KVFS_READ_ONLY"], Kind::Switch, Some("no"),
        "Refuse every change (a store on read-only media is mounted only so).",
    ),
    setting(
        "allow_other", &["KVFS_ALLOW_OTHER"], Kind::Switch, Some("no"),
        "Let other users into the mount; permissions are checked.",
    ),
    setting(
        "nonempty", &["KVFS_NONEMPTY"], Kind::Switch, Some("no"),
        "The mountpoint may hold files, which the mount hides.",
    ),
    setting(
        "passthrough", &["KVFS_PASSTHROUGH"], Kind::Switch, Some("yes"),
        "The kernel may read and write the files of the store itself.",
    ),
    setting(
        "io_uring", &["KVFS_IO_URING"], Kind::Switch, Some("yes"),
        "Requests may come through io_uring.",
    ),
    setting(
        "keep_mounted", &["KVFS_KEEP_MOUNTED"], Kind::Switch, Some("no"),
        "A daemon that dies is replaced, and the mount goes on (Linux 6.16, requests not through io_uring).",
    ),
    setting(
        "threads", &["KVFS_THREADS"], Kind::Count, None,
        "Threads that answer the kernel; otherwise half the cores, 1 to 4.",
    )
    .such_as("2"),
    setting(
        "options", &["KVFS_OPTIONS"], Kind::Flags, Some(""),
        "Flags for the kernel: noatime, noexec.",
    ),
    setting(
        "metrics_addr", &["KVFS_METRICS_ADDR"], Kind::Text, None,
        "Serve metrics for Prometheus and a page for browsers there: 127.0.0.1:PORT, or unix:PATH for this user alone.",
    )
    .such_as("127.0.0.1:9400"),
    setting(
        "metrics_host", &["KVFS_METRICS_HOST"], Kind::Text, None,
        "Names by which that address may be asked, with spaces between; numbers and localhost always may.",
    )
    .such_as("node1.example"),
    setting(
        "log_file", &["KVFS_LOG_FILE"], Kind::Path, None,
        "Where the log goes; otherwise a file of the store's own in /var/log/kvfs or the user's state directory.",
    )
    .such_as("/var/log/kvfs/pool.log"),
    setting(
        "log_level", &["KVFS_LOG", "RUST_LOG"], Kind::Text, Some(super::logging::DEFAULT_FILTER),
        "What is logged: off, error, warn, info, debug, trace, or MODULE=LEVEL, in a list.",
    )
    .live(),
    setting(
        "config", &["KVFS_CONFIG"], Kind::Path, None,
        "A configuration file; cannot stand in one.",
    )
    .such_as("/etc/kvfs/pool.toml"),
];

/// What names the configuration file itself.
pub(crate) const CONFIG: &str = "config";

/// The setting of that name.
pub(crate) fn find(name: &str) -> Option<&'static Setting> {
    SETTINGS.iter().find(|setting| setting.name == name)
}

/// Those that a configuration file may have, and that a mount shows.
pub(crate) fn of_a_file() -> impl Iterator<Item = &'static Setting> {
    SETTINGS.iter().filter(|setting| setting.name != CONFIG)
}

/// Names of settings that can change while a mount is used.
pub(crate) fn live_names() -> String {
    let live = SETTINGS.iter().filter(|setting| setting.is_live);
    live.map(|setting| setting.name).collect::<Vec<_>>().join(", ")
}

/// What is said of a name that no setting has.
pub(crate) fn unknown(name: &str) -> String {
    let alike = of_a_file()
        .map(|setting| {
            (distance(&name.to_ascii_lowercase().replace('-', "_"), setting.name), setting)
        })
        .min_by_key(|(distance, _)| *distance)
        .filter(|(distance, _)| *distance <= 3 && 2 * *distance <= name.len() + 1);
    match alike {
        Some((_, setting)) => format!("unknown setting {name:?}: did you mean {}?", setting.name),
        None => format!("unknown setting {name:?}: kvfs config init lists them all"),
    }
}

/// How many letters must be added, taken away or replaced to make one word of another.
fn distance(from: &str, to: &str) -> usize {
    let mut row: Vec<usize> = (0..=to.len()).collect();
    for (line, letter) in from.bytes().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], line + 1);
        for (column, other) in to.bytes().enumerate() {
            let replaced = diagonal + usize::from(letter != other);
            diagonal = row[column + 1];
            row[column + 1] = replaced.min(row[column] + 1).min(diagonal + 1);
        }
    }
    row[to.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_consistent() {
        for setting in &SETTINGS {
            let name = setting.name;
            let same = SETTINGS.iter().filter(|other| other.name == name);
            assert_eq!(same.count(), 1, "{name}");
            assert!(!setting.variables.is_empty(), "{name}");
            let shown = setting.default.unwrap_or(setting.example);
            let value = Value::parse(setting.kind, name, shown).unwrap();
            assert_eq!(Value::parse(setting.kind, name, &value.to_string()), Ok(value), "{name}");
        }
    }

    #[test]
    fn a_name_that_is_nearly_right_is_told() {
        fn check(name: &str, expected: &str) {
            assert!(unknown(name).ends_with(expected), "{}", unknown(name));
        }
        check("rma", "did you mean ram?");
        check("RAM", "did you mean ram?");
        check("remote-bandwith", "did you mean remote_bandwidth?");
        check("log_lvl", "did you mean log_level?");
        check("nvme", "lists them all");
        check("quota_of_everything", "lists them all");
    }
}
