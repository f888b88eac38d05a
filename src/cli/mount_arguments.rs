//! `kvfs mount`: its arguments and help.

use std::path::PathBuf;

use clap::Args;

use super::config::{self, MountConfig, Named};
use super::options;
use super::output::Failure;
use super::settings::{Layer, Value, find, unknown};

const MOUNT_HELP: &str = "\
Without --foreground the command returns 0 once the mount answers, and a daemon serves it. The \
daemon ends when it is unmounted or gets SIGTERM, SIGINT (or, in the foreground without a log file, \
SIGHUP): it unmounts, waits up to 10 seconds for programs that use the mount, then makes everything \
durable. A second signal ends the waiting.

Settings come from, in this order: arguments, -o, variables, the file named by --config.

  argument             -o and TOML key     variable               default
  --allow-other        allow_other         KVFS_ALLOW_OTHER       no
  --read-only          read_only (ro, rw)  KVFS_READ_ONLY         no
  --no-passthrough     passthrough         KVFS_PASSTHROUGH       yes
  --no-io-uring        io_uring            KVFS_IO_URING          yes
  --keep-mounted       keep_mounted        KVFS_KEEP_MOUNTED      no
  --commit-interval    commit_interval     KVFS_COMMIT_INTERVAL   1 (seconds)
  --ram                ram                 KVFS_RAM               0 (none)
  --pack               pack                KVFS_PACK              64K (0: none shares another)
  --remote             remote              KVFS_REMOTE            none
  --offline            offline             KVFS_OFFLINE           no
  --remote-key         remote_key          KVFS_REMOTE_KEY        none (not sealed)
  --remote-key-command remote_key_command  KVFS_REMOTE_KEY_COMMAND
  --ssd                ssd                 KVFS_SSD               no limit
  --ssd-writes         ssd_writes          KVFS_SSD_WRITES        no limit (SIZE/day)
  --remote-bandwidth   remote_bandwidth    KVFS_REMOTE_BANDWIDTH  no limit (bytes per second)
  --remote-index       remote_index        KVFS_REMOTE_INDEX      10 (seconds, 0 for never)
  --cold               cold                KVFS_COLD              none
  --on-corrupt         on_corrupt          KVFS_ON_CORRUPT        eio
  --verify             verify              KVFS_VERIFY            first
  --rebuild-from       rebuild_from        KVFS_REBUILD_FROM      the only store there is
  --metrics-addr       metrics_addr        KVFS_METRICS_ADDR      none
  --metrics-host       metrics_host        KVFS_METRICS_HOST      localhost and numbers
  --log                log_file            KVFS_LOG_FILE          see below
                       log_level           KVFS_LOG, RUST_LOG     info
                       threads             KVFS_THREADS           half the cores, 1 to 4
                       nonempty            KVFS_NONEMPTY          no
  --config             config (only -o)    KVFS_CONFIG            none

Switches are yes or no, times seconds or a number with ms, s, m, h, d or w. -o also takes noexec, \
noatime and their opposites (as a TOML list: options, as a variable: KVFS_OPTIONS), and ignores what \
is meant for mount(8) and systemd (x-*, _netdev, nofail, noauto, user, defaults) or always the case \
(nosuid, nodev). \
Anything else is an error. A comma in a value is written \\, or \\054, or the value in double quotes.

What can change while the mount is used (kvfs config set, mount -o remount): ram, pack, ssd, ssd_writes, \
cold, remote_bandwidth, verify, on_corrupt, log_level.

The daemon appends to its log: --log, otherwise /var/log/kvfs/NAME-HASH.log (of the store's path) for \
root and $XDG_STATE_HOME/kvfs/NAME-HASH.log (~/.local/state) for others. It does not rotate the log \
and does not keep more than it is told to (log_level); upon SIGHUP it opens the file anew. In the \
foreground the log goes to standard error unless --log names a file: as the journal wants it, if that is \
the journal ($JOURNAL_STREAM). A manager at $NOTIFY_SOCKET (systemd, Type=notify) hears when the mount answers.

Example: kvfs mount --ram 16G --ssd 200G --remote /nas/kv /var/lib/kvfs /mnt/kv";

/// `kvfs mount`.
#[derive(Debug, Args)]
#[command(after_help = MOUNT_HELP)]
#[expect(clippy::struct_excessive_bools, reason = "each is a switch on the command line")]
pub(crate) struct MountArguments {
    /// Let other users into the mount; permissions are checked
    #[arg(long)]
    allow_other: bool,
    /// Stay in the foreground and log to standard error
    #[arg(long, short = 'f')]
    foreground: bool,
    /// Print JSON once the mount answers: what was mounted where
    #[arg(long, conflicts_with = "foreground")]
    pub json: bool,
    /// Refuse every change (a store on read-only media is mounted only so)
    #[arg(long)]
    read_only: bool,
    /// Serve all reads and writes from the daemon
    #[arg(long)]
    no_passthrough: bool,
    /// Take requests from /dev/fuse alone
    #[arg(long)]
    no_io_uring: bool,
    /// Have a daemon that dies replaced, so that the mount goes on: Linux 6.16, and no requests through `io_uring`
    #[arg(long)]
    keep_mounted: bool,
    /// Where the log goes
    #[arg(long, value_name = "FILE")]
    log: Option<PathBuf>,
    /// TOML file with settings
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Longest time for which a change may be lost in a crash
    #[arg(long, value_name = "DURATION", value_parser = of("commit_interval"))]
    commit_interval: Option<Value>,
    /// Memory for pages: new ones are written there first, then to the store [default: 0]
    #[arg(long, value_name = "SIZE", value_parser = of("ram"))]
    ram: Option<Value>,
    /// Files of up to so many bytes (1M at most, 0 for none) share pack files instead of each having its own
    /// [default: 64K]
    #[arg(long, value_name = "SIZE", value_parser = of("pack"))]
    pack: Option<Value>,
    /// Where objects go in the background: a shared directory, or `s3://BUCKET/PREFIX` with
    /// the `AWS_*` variables
    #[arg(long, value_name = "DIR|s3://...")]
    remote: Option<String>,
    /// Mount without the remote, also if only that has the bytes of some files: these cannot be
    /// opened, and keep their names
    #[arg(long)]
    offline: bool,
    /// Seal what goes to the remote with the keys in this file (kvfs remote keygen); a remote is
    /// sealed from its first use on, or never
    #[arg(long, value_name = "FILE")]
    remote_key: Option<PathBuf>,
    /// The same with the keys that a command prints within a minute, run by sh; .kvfs/config shows
    /// the command
    #[arg(long, value_name = "COMMAND", conflicts_with = "remote_key")]
    remote_key_command: Option<String>,
    /// Disk space for objects: beyond it, they are encoded and leave [default: no limit]
    #[arg(long, value_name = "SIZE|none", value_parser = of("ssd"))]
    ssd: Option<Value>,
    /// Bytes that may be written to the disk in a day: beyond them, pages that nobody asked for twice stay in
    /// memory and in the remote; needs --ram and --remote [default: no limit]
    #[arg(long, value_name = "SIZE/day|none")]
    ssd_writes: Option<String>,
    /// Bytes per second to and from the remote [default: no limit]
    #[arg(long, value_name = "SIZE|none", value_parser = of("remote_bandwidth"))]
    remote_bandwidth: Option<Value>,
    /// How often the prefixes that other stores have published to the remote are read, so that
    /// their pages are found here; 0 for never [default: 10]
    #[arg(long, value_name = "DURATION", value_parser = of("remote_index"))]
    remote_index: Option<Value>,
    /// How cold objects are encoded: none, zstd, zstd:LEVEL [default: none]
    #[arg(long, value_name = "ENCODING")]
    cold: Option<String>,
    /// What a file is whose bytes are damaged or cannot be fetched: an error (eio), or a file that
    /// is not there (miss) [default: eio]
    #[arg(long, value_name = "miss|eio")]
    on_corrupt: Option<String>,
    /// When opening a file compares its bytes with their checksum: the first time after the mount,
    /// always, or never [default: first]
    #[arg(long, value_name = "first|always|never")]
    verify: Option<String>,
    /// Whose names a new store takes over from the remote: a store's id, or none [default: those
    /// of the only store that has published there]
    #[arg(long, value_name = "STORE-ID|none")]
    rebuild_from: Option<String>,
    /// Serve metrics for Prometheus (GET /metrics) and a page for browsers there: 127.0.0.1:PORT, sums for
    /// every user of this machine and the rest by the address in .kvfs/page, or unix:PATH for this user alone
    #[arg(long, value_name = "ADDRESS:PORT|unix:PATH")]
    metrics_addr: Option<String>,
    /// Names by which that address may be asked beside numbers and localhost, with spaces between
    #[arg(long, value_name = "NAMES")]
    metrics_host: Option<String>,
    /// Mount options as in fstab
    #[arg(short = 'o', value_name = "OPTIONS")]
    options: Vec<String>,
    /// Directory of the store
    store: PathBuf,
    /// Empty directory where the cache appears
    mountpoint: PathBuf,
}

impl MountArguments {
    /// The validated configuration, from all sources.
    pub(crate) fn config(self) -> Result<MountConfig, Failure> {
        let dash_o =
            options::parse(&self.options, options::Writer::Caller).map_err(Failure::Usage)?;
        // A file named on the command line is relative to where the user is.
        let log_file = self.log.map(std::path::absolute).transpose();
        let log_file = log_file.map_err(|error| Failure::Usage(format!("--log: {error}")))?;
        let remote_key = self.remote_key.map(std::path::absolute).transpose();
        let switch = |given: bool, is_on| given.then_some(Value::Switch(is_on));
        let text = |given: Option<String>| given.map(Value::Text);
        let remote_key =
            remote_key.map_err(|error| Failure::Usage(format!("--remote-key: {error}")))?;
        let metrics_addr = self.metrics_addr.map(super::metrics::absolute).transpose()?;
        let layer = Layer::default()
            .with("allow_other", switch(self.allow_other, true))
            .with("read_only", switch(self.read_only, true))
            .with("passthrough", switch(self.no_passthrough, false))
            .with("io_uring", switch(self.no_io_uring, false))
            .with("keep_mounted", switch(self.keep_mounted, true))
            .with("offline", switch(self.offline, true))
            .with("commit_interval", self.commit_interval)
            .with("ram", self.ram)
            .with("pack", self.pack)
            .with("ssd", self.ssd)
            .with("ssd_writes", text(self.ssd_writes))
            .with("remote", text(self.remote.map(absolute).transpose()?))
            .with("remote_key", remote_key.map(Value::Path))
            .with("remote_key_command", text(self.remote_key_command))
            .with("remote_bandwidth", self.remote_bandwidth)
            .with("remote_index", self.remote_index)
            .with("cold", text(self.cold))
            .with("on_corrupt", text(self.on_corrupt))
            .with("verify", text(self.verify))
            .with("rebuild_from", text(self.rebuild_from))
            .with("metrics_addr", text(metrics_addr))
            .with("metrics_host", text(self.metrics_host))
            .with("log_file", log_file.map(Value::Path));
        let named = Named {
            store: self.store,
            mountpoint: self.mountpoint,
            foreground: self.foreground,
            config: self.config,
            layer,
        };
        config::resolve(named, dash_o, &|name| std::env::var_os(name))
    }
}

/// Reads the value of a setting.
fn of(name: &'static str) -> impl Fn(&str) -> Result<Value, String> + Clone {
    move |text| {
        let setting = find(name).ok_or_else(|| unknown(name))?;
        let value = Value::parse(setting.kind, "", text);
        value.map_err(|error| error.trim_start_matches(": ").to_owned())
    }
}

/// A directory named on the command line is relative to where the user is.
pub(super) fn absolute(remote: String) -> Result<String, Failure> {
    if remote.contains("://") || remote.is_empty() {
        return Ok(remote);
    }
    let path = std::path::absolute(&remote);
    let path = path.map_err(|error| Failure::Usage(format!("--remote {remote}: {error}")))?;
    path.into_os_string()
        .into_string()
        .map_err(|_| Failure::Usage(format!("--remote {remote}: the path is not UTF-8")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::settings::{SETTINGS, live_names};

    #[test]
    fn the_help_has_every_setting() {
        for setting in &SETTINGS {
            let (name, variables) = (setting.name, setting.variables);
            let line = MOUNT_HELP.lines().find(|line| {
                line.split_whitespace().any(|word| word == name || name == "options")
                    && line.contains(variables[0])
            });
            assert!(line.is_some(), "{name}");
        }
        let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(words(MOUNT_HELP).contains(&words(&live_names())));
    }
}
