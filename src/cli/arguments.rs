//! The arguments of every subcommand. The comments here are the help texts.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use kvfs_formats::slot::Version;

use super::bench::BenchArguments;
use super::config_command::ConfigCommand;
use super::consent::Consent;
use super::create::CreateArguments;
use super::diff::DiffArguments;
use super::doctor::DoctorArguments;
use super::duration::Seconds;
use super::explain::ExplainArguments;
use super::fsck::FsckArguments;
use super::hint::HintArguments;
use super::history::LogArguments;
use super::inspect::HeatArguments;
use super::manual::{CompletionsArguments, ManArguments};
use super::map::MapArguments;
use super::model::ModelCommand;
use super::mount_arguments::MountArguments;
use super::probe::ProbeArguments;
use super::quota::QuotaArguments;
use super::remote::RemoteCommand;
use super::scrub::ScrubArguments;
use super::seq::SeqArguments;
use super::slots::{SLOTS_EXAMPLE, SlotsCommand};
use super::status::StatusArguments;
use super::take_over::TakeOverArguments;
use super::top::{SampleArguments, TopArguments};
use super::upgrade::UpgradeArguments;
use super::what_if::WhatIfArguments;
use crate::tier::remote::StoreId;

/// Longer lines are hard to read, however wide the terminal is.
const HELP_COLUMNS_MAX: usize = 100;

/// A filesystem whose files are the KV cache of language models.
#[derive(Debug, Parser)]
#[command(name = "kvfs", version, arg_required_else_help = true, max_term_width = HELP_COLUMNS_MAX)]
#[command(after_help = "Example: kvfs mount /var/lib/kvfs /mnt/kv")]
pub(crate) struct Arguments {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Show on a temporary mount what kvfs is good for; it takes seconds and leaves nothing behind
    #[command(after_help = "Example: kvfs demo")]
    Demo,
    /// Mount a store, which is made if the directory is missing or empty
    Mount(Box<MountArguments>),
    /// Make everything durable and unmount
    #[command(alias = "unmount")]
    Umount(UmountArguments),
    /// Make the directory and the manifest of a model's cache
    Create(CreateArguments),
    /// Show how a mount is and what it holds; without one, all mounts of this machine
    Status(StatusArguments),
    /// Show while a mount is used what it does: tiers, rates, hits, slow requests, moves, events
    Top(TopArguments),
    /// Draw where the pages of a sequence or a model are, without opening one
    Map(MapArguments),
    /// Show what was deleted, refused, damaged or moved, and why
    Log(LogArguments),
    /// Say where a file or directory is and why, or why it is gone
    Explain(ExplainArguments),
    /// Say what memory or the disk would have found with another budget, from the uses that a mount has seen
    WhatIf(WhatIfArguments),
    /// Show the settings of a mount and change them, check a configuration file, print one
    #[command(subcommand, after_help = "Example: kvfs config show --origin /mnt/kv")]
    Config(ConfigCommand),
    /// Make everything in a mount durable
    Sync(SyncArguments),
    /// Exchange the daemon of a mount for another kvfs while the mount is used
    Upgrade(UpgradeArguments),
    /// Bring files nearer: into memory where there is a RAM tier, else to the disk
    Promote(PromoteArguments),
    /// Move files away: to the remote, or out of memory
    Evict(EvictArguments),
    /// Say that nobody will go on with a sequence, so that its pages leave memory first, or that somebody will
    Hint(HintArguments),
    /// Explain a page, manifest, tail, tokens file, or the directory of a sequence or model
    Inspect(InspectArguments),
    /// Compare two pages, tails, sequences or models: exits with 0 if they are equal, 1 if not, 2 if that cannot be told
    Diff(DiffArguments),
    /// Say which sequence of a model has the longest prefix of a prompt
    Match(MatchArguments),
    /// Tell where a page lies in a file that an engine lays out itself, or ask for it
    #[command(subcommand, after_help = "Example: kvfs block show /mnt/kv/models/llama $HASH.000")]
    Block(BlockCommand),
    /// Make a sequence of a file: a slot of llama.cpp, or tensors of Hugging Face's shape
    Import(ImportArguments),
    /// Make such a file of a sequence
    Export(ExportArguments),
    /// Keep conversations of a running llama.cpp server as sequences, and bring them back
    #[command(subcommand, after_help = SLOTS_EXAMPLE)]
    Slots(SlotsCommand),
    /// Remove, copy, move or save tokens of a sequence, as llama.cpp does with its cache
    Seq(SeqArguments),
    /// Change what a model is
    #[command(
        subcommand,
        after_help = "Example: kvfs model bump --dry-run /mnt/kv/models/llama 2026-11"
    )]
    Model(ModelCommand),
    /// Limit what a directory may hold, and for how long
    Quota(QuotaArguments),
    /// Delete unreferenced objects from the remote and from the store
    Gc(GcArguments),
    /// Look into a remote, or make a key that seals one
    #[command(subcommand, after_help = "Example: kvfs remote ls s3://bucket/kv")]
    Remote(RemoteCommand),
    /// Compare everything that a mount stores with its checksums, and mend what can be mended
    Scrub(ScrubArguments),
    /// Say what machine, store and remote lack for a mount, or an engine to keep its KV cache in one, and what mends it
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
    #[command(after_help = "Example: kvfs version")]
    Version,
    /// Ask a mount something that may hang (used by the other commands)
    #[command(hide = true)]
    Probe(ProbeArguments),
    /// Ask a mount again and again what it says of itself (used by `kvfs top`)
    #[command(hide = true)]
    Sample(SampleArguments),
    /// Go on with a mount that another daemon leaves (used by `kvfs upgrade`)
    #[command(hide = true)]
    TakeOver(TakeOverArguments),
}

/// `kvfs umount`.
#[derive(Debug, Default, Args)]
#[command(after_help = "Example: kvfs umount /mnt/kv")]
pub(crate) struct UmountArguments {
    /// Detach now, even if programs still use the mount; it is served until they end
    #[arg(long, short = 'l')]
    pub lazy: bool,
    /// Cut off programs that use the mount and a daemon that does not answer
    #[arg(long, short = 'f')]
    pub force: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// Where the cache is mounted
    pub mountpoint: PathBuf,
}

/// `kvfs sync`.
#[derive(Debug, Args)]
#[command(after_help = "Example: kvfs sync --remote --timeout 15m /mnt/kv")]
pub(crate) struct SyncArguments {
    /// Wait until the remote has, verified and named, everything that nobody writes any more and that may leave the disk
    #[arg(long)]
    pub remote: bool,
    /// How long to wait for the remote, such as 15m: then say what it lacks, and exit with 1
    #[arg(long, value_name = "DURATION", requires = "remote")]
    pub timeout: Option<Seconds>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// Where the cache is mounted
    pub mountpoint: PathBuf,
}

/// What `kvfs promote` and `kvfs evict` have in common.
#[derive(Debug, Args)]
pub(crate) struct MovementArguments {
    /// Only say which files and bytes would move, from where to where, and how long that takes
    #[arg(long)]
    pub dry_run: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// Files, or directories with all that is below them
    #[arg(required = true)]
    pub paths: Vec<PathBuf>,
}

const PROMOTE_HELP: &str = "\
--dry-run asks for nothing. Whether memory has room is found out by asking: what finds none there comes to the disk.

Example: kvfs promote --dry-run /mnt/kv/models/llama/sequences/chat-42";

/// `kvfs promote`.
#[derive(Debug, Args)]
#[command(after_help = PROMOTE_HELP)]
pub(crate) struct PromoteArguments {
    #[command(flatten)]
    pub movement: MovementArguments,
}

const EVICT_HELP: &str = "\
--dry-run asks for nothing. Whether a file is in use, and stays, is found out by asking. What the remote has already is not \
sent again, so it may take less time than is said.

Example: kvfs evict --to remote /mnt/kv/models/llama/sequences/chat-42";

/// `kvfs evict`.
#[derive(Debug, Args)]
#[command(after_help = EVICT_HELP)]
pub(crate) struct EvictArguments {
    /// Where to [default: remote, or ssd in a mount without a remote]
    #[arg(long, value_enum)]
    pub to: Option<EvictTo>,
    #[command(flatten)]
    pub movement: MovementArguments,
}

/// Where files leave for.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum EvictTo {
    /// Out of memory, to the disk.
    Ssd,
    /// Off this machine.
    Remote,
}

const INSPECT_HELP: &str = "\
Nothing is fetched or decoded. Of a directory in a mount the files and bytes of each tier are told, as kvfs map names them; \
shared are those that another name has too, and each name counts. A picture of --heat has a field for each head: rows are tokens, columns channels, the \
brighter the larger the value without its sign; red marks above it are outlier channels, whose mean is more than six \
times the median of the head's channels; bars beside it are the norms of the tokens. The errors are those of a lossy \
cold copy: the norm of what it changes, in parts of the norm of what is there.

Example: kvfs inspect --heat page.png /mnt/kv/models/llama/sequences/chat-42/003/0001024.safetensors";

/// `kvfs inspect`.
#[derive(Debug, Args)]
#[command(after_help = INSPECT_HELP)]
pub(crate) struct InspectArguments {
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub heat: HeatArguments,
    /// A file or directory in a mount, or a copy of one
    pub path: PathBuf,
}

/// `kvfs match`.
#[derive(Debug, Args)]
#[command(after_help = "Example: kvfs match --tokens prompt.u32 /mnt/kv/models/llama")]
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
    #[command(
        after_help = "Example: kvfs block register /mnt/kv/models/llama $HASH.000 block.json"
    )]
    Register {
        /// Which block
        #[command(flatten)]
        name: BlockName,
        /// {"file", "layer", "shape": [layers, 2, buffers], "sizes": [K, V], "offsets": [...]};
        /// - reads standard input
        map: PathBuf,
    },
    /// Print where a block is
    #[command(after_help = "Example: kvfs block show /mnt/kv/models/llama $HASH.000")]
    Show {
        /// Which block
        #[command(flatten)]
        name: BlockName,
    },
    /// Withdraw a block
    #[command(after_help = "Example: kvfs block unregister /mnt/kv/models/llama $HASH.000")]
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
#[command(after_help = "Example: kvfs import chat.bin /mnt/kv/models/llama/sequences/chat-42")]
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
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

impl ImportArguments {
    pub(crate) fn of_slot(file: PathBuf, sequence: PathBuf) -> Self {
        Self { file, sequence, tokens: None, num_tokens: None, row: None, json: false }
    }
}

/// `kvfs export`.
#[derive(Debug, Args)]
#[command(
    after_help = "Example: kvfs export /mnt/kv/models/llama/sequences/chat-42 chat.safetensors"
)]
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
    /// Print JSON
    #[arg(long)]
    pub json: bool,
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
#[command(after_help = "Example: kvfs gc --dry-run /mnt/kv")]
pub(crate) struct GcArguments {
    #[command(flatten)]
    pub consent: Consent,
    /// A store that is gone for good, and whose names were removed from the remote: what only they named is deleted
    #[arg(long, value_name = "ID", value_parser = store_id)]
    pub forget_store: Vec<String>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// Where the cache is mounted
    pub mountpoint: PathBuf,
}

fn store_id(text: &str) -> Result<String, String> {
    let id: Result<StoreId, _> = text.parse();
    id.map(|id| id.to_string()).map_err(|_| "an id has 32 hexadecimal digits".to_owned())
}

#[cfg(test)]
mod documented;
#[cfg(test)]
mod tests;
