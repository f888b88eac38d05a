//! The arguments of every subcommand. The comments here are the help texts.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use kvfs_formats::slot::Version;

use super::bench::BenchArguments;
use super::config::{self, Layer, MountConfig, Named};
use super::consent::Consent;
use super::create::CreateArguments;
use super::doctor::DoctorArguments;
use super::duration::Seconds;
use super::explain::ExplainArguments;
use super::fsck::FsckArguments;
use super::history::LogArguments;
use super::manual::{CompletionsArguments, ManArguments};
use super::options;
use super::output::Failure;
use super::probe::ProbeArguments;
use super::quota::QuotaArguments;
use super::remote::RemoteCommand;
use super::scrub::ScrubArguments;
use super::seq::SeqArguments;
use super::size::Size;
use super::slots::SlotsCommand;

/// A filesystem whose files are the KV cache of language models.
#[derive(Debug, Parser)]
#[command(name = "kvfs", version, arg_required_else_help = true)]
pub(crate) struct Arguments {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Mount a store, which is made if the directory is missing or empty
    Mount(MountArguments),
    /// Make everything durable and unmount
    #[command(alias = "unmount")]
    Umount(UmountArguments),
    /// Make the directory and the manifest of a model's cache
    Create(CreateArguments),
    /// Show what a mount is doing
    Status(StatusArguments),
    /// Show what was deleted, refused, damaged or moved, and why
    Log(LogArguments),
    /// Say where a file or directory is and why, or why it is gone
    Explain(ExplainArguments),
    /// Make everything in a mount durable
    Sync(SyncArguments),
    /// Bring files nearer: into memory where there is a RAM tier, else to the disk
    Promote(PromoteArguments),
    /// Move files away: to the remote, or out of memory
    Evict(EvictArguments),
    /// Explain a page, manifest, tail, tokens file, or the directory of a sequence or model
    Inspect(InspectArguments),
    /// Say which sequence of a model has the longest beginning of a prompt
    Match(MatchArguments),
    /// Tell where a page lies in a file that an engine lays out itself, or ask for it
    #[command(subcommand)]
    Block(BlockCommand),
    /// Make a sequence of a file: a slot of llama.cpp, or tensors of Hugging Face's shape
    Import(ImportArguments),
    /// Make such a file of a sequence
    Export(ExportArguments),
    /// Keep conversations of a running llama.cpp server as sequences, and bring them back
    #[command(subcommand)]
    Slots(SlotsCommand),
    /// Remove, copy, move or save tokens of a sequence, as llama.cpp does with its cache
    Seq(SeqArguments),
    /// Limit what a directory may hold, and for how long
    Quota(QuotaArguments),
    /// Delete what nobody refers to from the remote and from the store
    Gc(GcArguments),
    /// Look into a remote, or make a key that seals one
    #[command(subcommand)]
    Remote(RemoteCommand),
    /// Compare everything that a mount stores with its checksums, and mend what can be mended
    Scrub(ScrubArguments),
    /// Say whether an engine can keep its KV cache in a mount, and what mends it if not
    Doctor(DoctorArguments),
    /// Check a store that is not mounted
    Fsck(FsckArguments),
    /// Measure
    Bench(BenchArguments),
    /// Print what makes a shell complete the names and arguments of commands
    Completions(CompletionsArguments),
    /// Write a man page for each command
    Man(ManArguments),
    /// Print the version
    Version,
    /// Ask a mount something that may hang (used by the other commands)
    #[command(hide = true)]
    Probe(ProbeArguments),
}

const MOUNT_HELP: &str = "\
Without --foreground the command returns 0 once the mount answers, and a daemon serves it. The
daemon ends when it is unmounted or gets SIGTERM, SIGINT (or, in the foreground, SIGHUP): it
unmounts, waits up to 10 seconds for programs that use the mount, then makes everything durable.
A second signal ends the waiting.

Settings come from, in this order: arguments, -o, variables, the file named by --config.

  argument             -o and TOML key     variable               default
  --allow-other        allow_other         KVFS_ALLOW_OTHER       no
  --read-only          read_only (ro, rw)  KVFS_READ_ONLY         no
  --no-passthrough     passthrough         KVFS_PASSTHROUGH       yes
  --no-io-uring        io_uring            KVFS_IO_URING          yes
  --commit-interval    commit_interval     KVFS_COMMIT_INTERVAL   1 (seconds)
  --ram                ram                 KVFS_RAM               0 (none)
  --remote             remote              KVFS_REMOTE            none
  --offline            offline             KVFS_OFFLINE           no
  --remote-key         remote_key          KVFS_REMOTE_KEY        none (not sealed)
  --remote-key-command remote_key_command  KVFS_REMOTE_KEY_COMMAND
  --ssd                ssd                 KVFS_SSD               no limit
  --remote-bandwidth   remote_bandwidth    KVFS_REMOTE_BANDWIDTH  no limit (bytes per second)
  --remote-index       remote_index        KVFS_REMOTE_INDEX      10 (seconds, 0 for never)
  --cold               cold                KVFS_COLD              none
  --on-corrupt         on_corrupt          KVFS_ON_CORRUPT        eio
  --verify             verify              KVFS_VERIFY            first
  --rebuild-from       rebuild_from        KVFS_REBUILD_FROM      the only store there is
  --metrics-addr       metrics_addr        KVFS_METRICS_ADDR      none
  --log                log_file            KVFS_LOG_FILE          see below
                       log_level           KVFS_LOG, RUST_LOG     info
                       threads             KVFS_THREADS           half the cores, 1 to 4
                       nonempty            KVFS_NONEMPTY          no
  --config             config (only -o)    KVFS_CONFIG            none

Switches are yes or no. -o also takes noexec, noatime and their opposites (as a
TOML list: options, as a variable: KVFS_OPTIONS), and ignores what is meant for mount(8) and
systemd (x-*, _netdev, nofail, noauto, user, defaults) or always the case (nosuid, nodev).
Anything else is an error.

The daemon appends to its log: --log, otherwise /var/log/kvfs/NAME-HASH.log (of the store's path) for
root and $XDG_STATE_HOME/kvfs/NAME-HASH.log (~/.local/state) for others. It does not rotate the log
and does not keep more than it is told to (log_level): logrotate needs copytruncate. In the
foreground the log goes to standard error unless --log names a file.";

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
    /// Refuse every change (a store on read-only media is mounted only so)
    #[arg(long)]
    read_only: bool,
    /// Serve all reads and writes from the daemon
    #[arg(long)]
    no_passthrough: bool,
    /// Take requests from /dev/fuse alone
    #[arg(long)]
    no_io_uring: bool,
    /// Where the log goes
    #[arg(long, value_name = "FILE")]
    log: Option<PathBuf>,
    /// TOML file with settings
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Longest time for which a change may be lost in a crash
    #[arg(long, value_name = "SECONDS")]
    commit_interval: Option<f64>,
    /// Memory for pages: new ones are written there first, then to the store [default: 0]
    #[arg(long, value_name = "SIZE")]
    ram: Option<Size>,
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
    #[arg(long, value_name = "SIZE")]
    ssd: Option<Size>,
    /// Bytes per second to and from the remote [default: no limit]
    #[arg(long, value_name = "SIZE")]
    remote_bandwidth: Option<Size>,
    /// How often the prefixes that other stores have published to the remote are read, so that
    /// their pages are found here; 0 for never [default: 10]
    #[arg(long, value_name = "SECONDS")]
    remote_index: Option<f64>,
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
    /// Serve metrics for Prometheus there too, as GET /metrics: 127.0.0.1:PORT for every user of this
    /// machine, or unix:PATH for this user alone
    #[arg(long, value_name = "ADDRESS:PORT|unix:PATH")]
    metrics_addr: Option<String>,
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
        let dash_o = options::parse(&self.options).map_err(Failure::Usage)?;
        // A file named on the command line is relative to where the user is.
        let log_file = self.log.map(std::path::absolute).transpose();
        let log_file = log_file.map_err(|error| Failure::Usage(format!("--log: {error}")))?;
        let remote_key = self.remote_key.map(std::path::absolute).transpose();
        let named = Named {
            store: self.store,
            mountpoint: self.mountpoint,
            foreground: self.foreground,
            config: self.config,
            layer: Layer {
                allow_other: self.allow_other.then_some(true),
                read_only: self.read_only.then_some(true),
                passthrough: self.no_passthrough.then_some(false),
                io_uring: self.no_io_uring.then_some(false),
                commit_interval: self.commit_interval,
                ram: self.ram,
                ssd: self.ssd,
                remote: self.remote.map(absolute).transpose()?,
                offline: self.offline.then_some(true),
                remote_key: remote_key
                    .map_err(|error| Failure::Usage(format!("--remote-key: {error}")))?,
                remote_key_command: self.remote_key_command,
                remote_bandwidth: self.remote_bandwidth,
                remote_index: self.remote_index,
                cold: self.cold,
                on_corrupt: self.on_corrupt,
                verify: self.verify,
                rebuild_from: self.rebuild_from,
                metrics_addr: self.metrics_addr.map(super::metrics::absolute).transpose()?,
                log_file,
                ..Layer::default()
            },
        };
        config::resolve(named, dash_o, &|name| std::env::var_os(name))
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

/// `kvfs umount`.
#[derive(Debug, Default, Args)]
pub(crate) struct UmountArguments {
    /// Detach now, even if programs still use the mount; it is served until they end
    #[arg(long, short = 'l')]
    pub lazy: bool,
    /// Cut off programs that use the mount and a daemon that does not answer
    #[arg(long, short = 'f')]
    pub force: bool,
    /// Where the cache is mounted
    pub mountpoint: PathBuf,
}

/// `kvfs status`.
#[derive(Debug, Args)]
pub(crate) struct StatusArguments {
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// Say where the files at or below a path would come from, and how long reading them takes
    #[arg(long, value_name = "PATH", conflicts_with = "mountpoint")]
    pub plan: Option<PathBuf>,
    /// Where the cache is mounted
    #[arg(required_unless_present = "plan")]
    pub mountpoint: Option<PathBuf>,
}

/// `kvfs sync`.
#[derive(Debug, Args)]
pub(crate) struct SyncArguments {
    /// Wait until the remote has, verified and named, everything that is at rest and may leave the disk
    #[arg(long)]
    pub remote: bool,
    /// How long to wait for the remote, such as 15m: then say what it lacks, and exit with 1
    #[arg(long, value_name = "DURATION", requires = "remote")]
    pub timeout: Option<Seconds>,
    /// Where the cache is mounted
    pub mountpoint: PathBuf,
}

/// `kvfs promote`.
#[derive(Debug, Args)]
pub(crate) struct PromoteArguments {
    /// Files, or directories with all that is below them
    #[arg(required = true)]
    pub paths: Vec<PathBuf>,
}

/// `kvfs evict`.
#[derive(Debug, Args)]
pub(crate) struct EvictArguments {
    /// Where to [default: remote, or ssd in a mount without a remote]
    #[arg(long, value_enum)]
    pub to: Option<EvictTo>,
    /// Files, or directories with all that is below them
    #[arg(required = true)]
    pub paths: Vec<PathBuf>,
}

/// Where files leave for.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum EvictTo {
    /// Out of memory, to the disk.
    Ssd,
    /// Off this machine.
    Remote,
}

/// `kvfs inspect`.
#[derive(Debug, Args)]
pub(crate) struct InspectArguments {
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// A file or directory in a mount, or a copy of one
    pub path: PathBuf,
}

/// `kvfs match`.
#[derive(Debug, Args)]
pub(crate) struct MatchArguments {
    /// The prompt's token ids, u32 little endian as in a file `tokens`; - reads standard input
    #[arg(long, value_name = "FILE")]
    pub tokens: PathBuf,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// The model's directory, `MOUNT/models/NAME`
    pub model: PathBuf,
}

/// `kvfs block`.
#[derive(Debug, Subcommand)]
pub(crate) enum BlockCommand {
    /// Register a block: FILE says where its buffers are, in JSON
    Register {
        /// Which block
        #[command(flatten)]
        name: BlockName,
        /// {"file", "layer", "shape": [layers, 2, buffers], "sizes": [K, V], "offsets": [...]};
        /// - reads standard input
        map: PathBuf,
    },
    /// Print where a block is
    Show {
        /// Which block
        #[command(flatten)]
        name: BlockName,
    },
    /// Withdraw a block
    Unregister {
        /// Which block
        #[command(flatten)]
        name: BlockName,
    },
}

/// Which block.
#[derive(Debug, Args)]
pub(crate) struct BlockName {
    /// The model's directory, `MOUNT/models/NAME`
    pub model: PathBuf,
    /// `HASH.LAYER`: the prefix that the page ends, and the first layer of the block
    pub block: String,
}

/// `kvfs import`.
#[derive(Debug, Args)]
pub(crate) struct ImportArguments {
    /// What llama.cpp saved of one sequence (a slot, or a session with nothing else in it), or a
    /// safetensors file with K and V of each layer, [batch, heads, tokens, elements], named like
    /// layers.0.keys, `key_cache.0`, `past_key_values.0.key` or, as MLX-LM does, 0.0 and 0.1
    pub file: PathBuf,
    /// MOUNTPOINT/models/NAME/sequences/SEQUENCE, which must not be there yet; with `kvfs create
    /// --layout nhd` its pages are slices of a slot
    pub sequence: PathBuf,
    /// The token ids, u32 little endian, of a safetensors file that has no `input_ids`; - reads
    /// standard input
    #[arg(long, value_name = "FILE")]
    pub tokens: Option<PathBuf>,
    /// Tokens that a safetensors file has where its tensors have room for more
    #[arg(long, value_name = "N")]
    pub num_tokens: Option<usize>,
    /// Which sequence of a batch in a safetensors file, from 0
    #[arg(long, value_name = "N")]
    pub row: Option<usize>,
}

impl ImportArguments {
    pub(crate) fn of_slot(file: PathBuf, sequence: PathBuf) -> Self {
        Self { file, sequence, tokens: None, num_tokens: None, row: None }
    }
}

/// `kvfs export`.
#[derive(Debug, Args)]
pub(crate) struct ExportArguments {
    /// MOUNTPOINT/models/NAME/sequences/SEQUENCE
    pub sequence: PathBuf,
    /// The file to make, or to replace: called *.safetensors, tensors [1, heads, tokens,
    /// elements] named layers.N.keys and layers.N.values, and `input_ids`; else a slot of llama.cpp
    pub file: PathBuf,
    /// `LLAMA_STATE_SEQ_VERSION` of the engine: 3 with ggml 0.25, 4 later [default: 3]
    #[arg(long, value_name = "3|4", value_parser = slot_version)]
    slot_version: Option<Version>,
    /// With V transposed, as an engine without flash attention keeps it
    #[arg(long)]
    pub transposed_v: bool,
    /// A session of a context (`llama_state_save_file`, `llama-cli --prompt-cache`), of a model of
    /// this architecture
    #[arg(long, value_name = "ARCHITECTURE", conflicts_with = "slot_version")]
    session: Option<String>,
}

impl ExportArguments {
    pub(crate) fn session(&self) -> Option<&str> {
        self.session.as_deref()
    }

    pub(crate) fn slot_version(&self) -> Version {
        self.slot_version.unwrap_or(Version::Three)
    }

    /// Whether something was said that only llama.cpp's files have.
    pub(crate) fn is_for_llama(&self) -> bool {
        self.slot_version.is_some() || self.transposed_v || self.session.is_some()
    }
}

fn slot_version(text: &str) -> Result<Version, String> {
    let version = text.parse().ok().and_then(Version::of_number);
    version.ok_or_else(|| "3 and 4 are known".to_owned())
}

/// `kvfs gc`.
#[derive(Debug, Args)]
pub(crate) struct GcArguments {
    #[command(flatten)]
    pub consent: Consent,
    /// Where the cache is mounted
    pub mountpoint: PathBuf,
}

#[cfg(test)]
mod tests;
