//! The configuration of a mount: many sources, one validated result.
//!
//! A setting is taken from the first source that has it: the command line, `-o`, a `KVFS_*`
//! variable, the TOML file, the default. Flags for the kernel are collected from all of them; of
//! two opposites the one from the earlier source counts.

use std::ffi::OsString;
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use super::options::{self, is_effective, kernel_flag, push_kernel_flag, refusal};
use super::output::{Failure, bytes};
use super::remote_key::KeySource;
use super::settings::{self, Layer, Origin, Sources, Value};
use super::size::Size;
use crate::fs::rebuild::RebuildFrom;
use crate::fuse::{MountOptions, Passthrough, RemoteOptions, default_threads};
use crate::store::packs::{DEFAULT_PACKED_BYTES_MAX, PACKED_BYTES_MAX};
use crate::tier::encoding::ColdEncoding;

/// Threads that answer the kernel: with passthrough they only open and close files.
/// More than this never helped, and each has a buffer of 1 MiB.
const THREADS_MAX: usize = 64;
/// Less keeps no page, and is a number without its unit.
const RAM_BYTES_MIN: u64 = 64 << 10;
/// A budget below a few pages would make every open fetch what the last one pushed out.
const SSD_BYTES_MIN: u64 = 16 << 20;
/// Less a day would be used up by the first page.
const SSD_WRITES_BYTES_MIN: u64 = 1 << 20;
/// What a crash may lose by default.
const DEFAULT_COMMIT_INTERVAL: Duration = Duration::from_secs(1);
/// A durable commit takes about a millisecond; more often than this the disk does nothing else.
const COMMIT_INTERVAL_MIN: Duration = Duration::from_millis(10);
/// An hour of work is lost by mistake, not by choice.
const COMMIT_INTERVAL_MAX: Duration = Duration::from_secs(3600);

/// Stores publish their names every ten seconds at most.
const DEFAULT_REMOTE_INDEX: Duration = Duration::from_secs(10);
/// A look costs a few listings.
const REMOTE_INDEX_MIN: Duration = Duration::from_millis(100);
/// Who looks but once a day may as well not look.
const REMOTE_INDEX_MAX: Duration = Duration::from_secs(86_400);

/// A mount as it will be made.
#[derive(Debug, Clone)]
pub(crate) struct MountConfig {
    /// For the filesystem.
    pub options: MountOptions,
    /// Where the keys of the remote come from.
    pub remote_key: Option<KeySource>,
    /// Stay, instead of becoming a daemon.
    pub foreground: bool,
    /// A keeper has another daemon go on if this one dies.
    pub keep_mounted: bool,
    /// The mountpoint may hold files.
    pub nonempty: bool,
    /// The log file where one was named.
    pub log_file: Option<PathBuf>,
    /// The log filter where one was given.
    pub log_level: Option<String>,
    /// Who said so.
    pub sources: Sources,
}

/// What the caller names: the parts that no other source can give.
#[derive(Debug, Default)]
pub(crate) struct Named {
    /// The store.
    pub store: PathBuf,
    /// The mountpoint.
    pub mountpoint: PathBuf,
    /// Stay in the foreground.
    pub foreground: bool,
    /// `--config`.
    pub config: Option<PathBuf>,
    /// Settings given as arguments.
    pub layer: Layer,
}

/// Merges and validates all sources. `environment` looks a variable up. Reads no keys.
pub(crate) fn resolve(
    named: Named, dash_o: options::Parsed, environment: &dyn Fn(&str) -> Option<OsString>,
) -> Result<MountConfig, Failure> {
    if dash_o.is_remount {
        return Err(Failure::Usage(
            "remount is for mount(8): kvfs config set KEY=VALUE MOUNTPOINT changes a mount"
                .to_owned(),
        ));
    }
    if let Some(unknown) = dash_o.unknown {
        return Err(Failure::Usage(format!(
            "unknown mount option {unknown:?}: see kvfs mount --help"
        )));
    }
    let given = match dash_o.layer.get(settings::CONFIG) {
        Some(Value::Path(path)) => Some(path.clone()),
        _ => None,
    };
    let path = named.config.or(given);
    let variable = || environment("KVFS_CONFIG").filter(|path| !path.is_empty());
    let path = path.or_else(|| variable().map(Into::into));
    let from_environment = settings::from_environment(environment).map_err(Failure::Usage)?;
    let mut layers = vec![
        (Origin::Option, named.layer),
        (Origin::Option, dash_o.layer),
        (Origin::Variable, from_environment),
    ];
    if let Some(path) = path {
        let layer = read_file(&path)?;
        layers.push((Origin::File(path), layer));
    }
    let store = std::path::absolute(&named.store)
        .map_err(|error| Failure::Usage(format!("store {}: {error}", named.store.display())))?;
    let place = Place { store, mountpoint: named.mountpoint, foreground: named.foreground };
    validate(&Sources(layers), place).map_err(Failure::Usage)
}

impl MountConfig {
    /// The same with the keys of its remote, which are read or asked for.
    pub(crate) fn with_keys(mut self) -> Result<MountConfig, Failure> {
        if let (Some(remote), Some(key)) = (&mut self.options.remote, &self.remote_key) {
            remote.keys = Some(Arc::new(key.load().map_err(Failure::Usage)?));
        }
        Ok(self)
    }
}

/// What no setting says of a mount.
#[derive(Clone, Debug, Default)]
pub(crate) struct Place {
    /// The store.
    pub store: PathBuf,
    /// The mountpoint.
    pub mountpoint: PathBuf,
    /// Stay in the foreground.
    pub foreground: bool,
}

/// The mount that sources describe. Reads no keys; the error begins with the name of a setting.
pub(crate) fn validate(first: &Sources, place: Place) -> Result<MountConfig, String> {
    for (name, value) in first.0.iter().flat_map(|(_, layer)| layer.iter()) {
        value.check_printable(name)?;
    }
    let commit_interval = commit_interval(first)?;
    let passthrough = match first.switch("passthrough") {
        Some(false) => Passthrough::Off,
        _ => Passthrough::Auto,
    };
    let threads = first.count("threads").unwrap_or_else(|| default_threads(passthrough));
    if !(1..=THREADS_MAX).contains(&threads) {
        return Err(format!("threads is {threads}: must be from 1 to {THREADS_MAX}"));
    }
    let log_file = first.path("log_file");
    if let Some(path) = log_file.as_ref().filter(|path| !path.is_absolute()) {
        return Err(format!("log_file {} must be an absolute path", path.display()));
    }
    let log_level = first.text("log_level").map(str::to_owned);
    super::logging::check_filter(log_level.as_deref())?;
    let offline = first.switch("offline").unwrap_or(false);
    let remote_key = KeySource::of(
        first.path("remote_key"),
        first.text("remote_key_command").map(str::to_owned),
    )?;
    // What is said of the remote must make sense, although this mount leaves it alone.
    let remote = remote_options(first, remote_key.as_ref())?.filter(|_| !offline);
    let cold = cold_encoding(first)?;
    let metrics_address = first.text("metrics_addr").map(str::parse).transpose();
    let metrics_address = metrics_address.map_err(|error| format!("metrics_addr: {error}"))?;
    let metrics_hosts = metrics_hosts(first, metrics_address.is_some())?;
    let keep_mounted = keep_mounted(first)?;
    let has_a_way_out = offline || remote.is_some() || cold != ColdEncoding::None;
    Ok(MountConfig {
        options: MountOptions {
            store: place.store,
            mountpoint: place.mountpoint,
            allow_other: first.switch("allow_other").unwrap_or(false),
            read_only: first.switch("read_only").unwrap_or(false),
            passthrough,
            io_uring: first.switch("io_uring").unwrap_or(true),
            kernel_options: kernel_options(first)?,
            commit_interval,
            ram_bytes: first.bytes("ram").unwrap_or(0),
            packed_bytes_max: packed_bytes_max(first)?,
            ssd_bytes: ssd_bytes(first, has_a_way_out)?,
            ssd_writes_day_bytes: ssd_writes(first, offline || remote.is_some())?,
            cold,
            remote,
            offline,
            on_corrupt: word(first, "on_corrupt")?,
            verify: word(first, "verify")?,
            threads,
            metrics_address,
            metrics_hosts,
            page: None,
            steering: None,
            launch: None,
            ending: Arc::default(),
            keeper: None,
        },
        keep_mounted,
        remote_key,
        foreground: place.foreground,
        nonempty: first.switch("nonempty").unwrap_or(false),
        log_file,
        log_level,
        sources: first.clone(),
    })
}

/// Whether the mount is to go on when its daemon dies.
fn keep_mounted(first: &Sources) -> Result<bool, String> {
    let wanted = first.switch("keep_mounted").unwrap_or(false);
    // A page that only memory has, and the remote without a name for it, would be lost with every daemon that dies.
    if wanted && first.text("ssd_writes").is_some() {
        return Err(
            "keep_mounted does not go with ssd_writes: pages that wait in memory for the remote are lost with the daemon"
                .to_owned(),
        );
    }
    if wanted && first.switch("read_only").unwrap_or(false) {
        return Err(
            "keep_mounted does not go with read_only: mount it again if its daemon dies".to_owned()
        );
    }
    Ok(wanted)
}

/// Names between commas or spaces.
fn metrics_hosts(first: &Sources, has_address: bool) -> Result<Vec<String>, String> {
    let text = first.text("metrics_host").unwrap_or_default();
    let names = text.split([',', ' ']).filter(|name| !name.is_empty());
    let names: Vec<String> = names.map(str::to_owned).collect();
    let is_in_names = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
    if let Some(wrong) = names.iter().find(|name| !name.bytes().all(is_in_names)) {
        return Err(format!(
            "metrics_host: {wrong:?} is no name of a machine: write it without http:// and port"
        ));
    }
    if !names.is_empty() && !has_address {
        return Err("metrics_host is set, but no metrics_addr (127.0.0.1:PORT)".to_owned());
    }
    Ok(names)
}

/// Memory that is not there is promised to nobody: the kernel would end the daemon without a word of its own.
pub(super) fn check_memory(ram_bytes: u64) -> Result<(), String> {
    let ram = Size(ram_bytes);
    if ram_bytes > 0 && ram_bytes < RAM_BYTES_MIN {
        return Err(format!(
            "ram is {ram}: give {} at least (a number alone is bytes: 16G), or 0 for none",
            Size(RAM_BYTES_MIN)
        ));
    }
    let is_less = |there: &u64| *there < ram_bytes;
    if let Some(there) = kvfs_os::memory_bytes("MemTotal").filter(is_less) {
        let there = bytes(there);
        return Err(format!("ram is {ram}: this machine has {there} of memory, give less"));
    }
    match kvfs_os::group_memory_bytes().filter(is_less) {
        Some(there) => Err(format!(
            "ram is {ram}: the control group of this process may have {} of memory, give less or \
             raise its limit",
            bytes(there)
        )),
        None => Ok(()),
    }
}

fn packed_bytes_max(first: &Sources) -> Result<u64, String> {
    let bytes = first.bytes("pack").unwrap_or(DEFAULT_PACKED_BYTES_MAX);
    if bytes <= PACKED_BYTES_MAX {
        return Ok(bytes);
    }
    Err(format!(
        "pack is {}: must be from 0 to {}, larger files are better off alone",
        Size(bytes),
        Size(PACKED_BYTES_MAX)
    ))
}

fn commit_interval(first: &Sources) -> Result<Duration, String> {
    let interval = first.time("commit_interval").unwrap_or(DEFAULT_COMMIT_INTERVAL);
    if (COMMIT_INTERVAL_MIN..=COMMIT_INTERVAL_MAX).contains(&interval) {
        return Ok(interval);
    }
    Err(format!(
        "commit_interval is {}: must be from {} to {} seconds",
        interval.as_secs_f64(),
        COMMIT_INTERVAL_MIN.as_secs_f64(),
        COMMIT_INTERVAL_MAX.as_secs_f64()
    ))
}

/// A setting that is one of a few words.
fn word<T: Default + std::str::FromStr<Err = String>>(
    first: &Sources, name: &str,
) -> Result<T, String> {
    let parsed = first.text(name).map_or(Ok(T::default()), str::parse);
    parsed.map_err(|error| format!("{name}: {error}"))
}

fn remote_options(
    first: &Sources, key: Option<&KeySource>,
) -> Result<Option<RemoteOptions>, String> {
    let bandwidth = first.bytes("remote_bandwidth");
    let rebuild_from = first.text("rebuild_from");
    let index_interval = first.time("remote_index");
    let Some(place) = first.text("remote").filter(|place| !place.is_empty()) else {
        let alone = [
            ("remote_key", key.is_some()),
            ("remote_bandwidth", bandwidth.is_some()),
            ("rebuild_from", rebuild_from.is_some()),
            ("remote_index", index_interval.is_some()),
        ];
        return match alone.into_iter().find(|(_, given)| *given) {
            Some((name, _)) => Err(format!("{name} is set, but no remote (remote=...)")),
            None => Ok(None),
        };
    };
    let bandwidth = match bandwidth {
        Some(0) => return Err("remote_bandwidth is 0: nothing would ever move".to_owned()),
        bandwidth => bandwidth.and_then(NonZeroU64::new),
    };
    let place = place.parse().map_err(|error| format!("remote: {error}"))?;
    let rebuild_from = rebuild_from.map(rebuild_source).transpose()?.unwrap_or_default();
    let index_interval = checked_index_interval(index_interval)?;
    Ok(Some(RemoteOptions { place, keys: None, bandwidth, rebuild_from, index_interval }))
}

fn checked_index_interval(given: Option<Duration>) -> Result<Option<Duration>, String> {
    let interval = given.unwrap_or(DEFAULT_REMOTE_INDEX);
    if !interval.is_zero() && !(REMOTE_INDEX_MIN..=REMOTE_INDEX_MAX).contains(&interval) {
        return Err(format!(
            "remote_index is {}: must be 0 (never) or from {} to {} seconds",
            interval.as_secs_f64(),
            REMOTE_INDEX_MIN.as_secs_f64(),
            REMOTE_INDEX_MAX.as_secs_f64()
        ));
    }
    Ok((!interval.is_zero()).then_some(interval))
}

fn cold_encoding(first: &Sources) -> Result<ColdEncoding, String> {
    let Some(text) = first.text("cold") else {
        return Ok(ColdEncoding::None);
    };
    match text.parse() {
        Ok(ColdEncoding::Quantised(_)) => Err(format!(
            "cold is {text}: lossy encodings are a model's choice, set cold_encoding in its \
                 manifest.json"
        )),
        Ok(cold) => Ok(cold),
        Err(error) => Err(format!("cold: {error}")),
    }
}

/// The budget of the disk. What exceeds it must be able to get smaller or to leave.
fn ssd_bytes(first: &Sources, has_a_way_out: bool) -> Result<Option<u64>, String> {
    let Some(bytes) = first.bytes("ssd") else {
        return Ok(None);
    };
    if !has_a_way_out {
        return Err(
            "ssd is set, but neither remote nor cold: objects could neither leave nor get \
                    smaller (remote=..., cold=zstd)"
                .to_owned(),
        );
    }
    if bytes < SSD_BYTES_MIN {
        return Err(format!("ssd is {bytes}: must be at least {SSD_BYTES_MIN} bytes"));
    }
    Ok(Some(bytes))
}

/// What may be written to the disk in a day. What it is spared must be somewhere else.
fn ssd_writes(first: &Sources, has_remote: bool) -> Result<Option<u64>, String> {
    let Some(text) = first.text("ssd_writes").filter(|text| *text != "none") else {
        return Ok(None);
    };
    let size = text.strip_suffix("/day").unwrap_or(text).parse::<Size>();
    let Ok(Size(bytes)) = size else {
        return Err(format!("ssd_writes: {text:?} is no size for a day: write 200G/day, or none"));
    };
    if bytes < SSD_WRITES_BYTES_MIN {
        return Err(format!(
            "ssd_writes is {text}: must be at least {SSD_WRITES_BYTES_MIN} bytes a day"
        ));
    }
    if !has_remote || first.bytes("ram").unwrap_or(0) == 0 {
        return Err(
            "ssd_writes is set, but not both of ram and remote, which keep what the disk is spared \
             (ram=..., remote=...)"
                .to_owned(),
        );
    }
    Ok(Some(bytes))
}

fn rebuild_source(text: &str) -> Result<RebuildFrom, String> {
    if text == "none" {
        return Ok(RebuildFrom::Nothing);
    }
    text.parse().map(RebuildFrom::Store).map_err(|_| {
        format!(
            "rebuild_from is {text:?}: must be none or the id of a store, 32 hexadecimal digits"
        )
    })
}

/// Flags for the kernel are collected from all sources, those that count most last.
fn kernel_options(first: &Sources) -> Result<Vec<String>, String> {
    let mut flags = Vec::new();
    let given = first.0.iter().rev().filter_map(|(_, layer)| layer.get("options"));
    for value in given {
        let Value::Flags(words) = value else { continue };
        for word in words {
            if let Some(why) = refusal(word) {
                return Err(format!("options: {why}"));
            }
            let flag = kernel_flag(word)
                .ok_or_else(|| format!("options has {word:?}: not a flag such as noatime"))?;
            push_kernel_flag(&mut flags, flag);
        }
    }
    flags.retain(|flag| is_effective(flag));
    Ok(flags)
}

fn read_file(path: &Path) -> Result<Layer, Failure> {
    let text = settings::text_of(path)
        .map_err(|error| Failure::failed(format!("config {}: {error}", path.display())))?;
    let found = settings::read_file(&text);
    match found.errors.first() {
        None => Ok(found.layer),
        Some((line, error)) => {
            Err(Failure::Usage(format!("config {} line {line}: {error}", path.display())))
        }
    }
}

#[cfg(test)]
mod tests;
