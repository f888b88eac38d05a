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

use serde::Deserialize;

use super::options::{
    self, is_effective, kernel_flag, number, push_kernel_flag, refusal, size, yes_or_no,
};
use super::output::Failure;
use super::remote_key::KeySource;
use super::size::Size;
use crate::fs::rebuild::RebuildFrom;
use crate::fs::{OnCorrupt, Verify};
use crate::fuse::{MountOptions, Passthrough, RemoteOptions, default_threads};
use crate::tier::encoding::ColdEncoding;

/// Threads that answer the kernel: with passthrough they only open and close files.
/// More than this never helped, and each has a buffer of 16 MiB.
const THREADS_MAX: usize = 64;
/// A budget below a few pages would make every open fetch what the last one pushed out.
const SSD_BYTES_MIN: u64 = 16 << 20;
/// What a crash may lose by default.
const DEFAULT_COMMIT_INTERVAL_SECONDS: f64 = 1.0;
/// A durable commit takes about a millisecond; more often than this the disk does nothing else.
const COMMIT_INTERVAL_SECONDS_MIN: f64 = 0.01;
/// An hour of work is lost by mistake, not by choice.
const COMMIT_INTERVAL_SECONDS_MAX: f64 = 3600.0;

/// Stores publish their names every ten seconds at most.
const DEFAULT_REMOTE_INDEX_SECONDS: f64 = 10.0;
/// A look costs a few listings.
const REMOTE_INDEX_SECONDS_MIN: f64 = 0.1;
/// Who looks but once a day may as well not look.
const REMOTE_INDEX_SECONDS_MAX: f64 = 86_400.0;

/// What one source says about a mount; also the form of the TOML file.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Layer {
    /// Other users may look into the mount.
    pub allow_other: Option<bool>,
    /// Nothing may change.
    pub read_only: Option<bool>,
    /// The kernel may read and write the files of the store directly.
    pub passthrough: Option<bool>,
    /// Requests may come through `io_uring`.
    pub io_uring: Option<bool>,
    /// The mountpoint may hold files, which the mount then hides.
    pub nonempty: Option<bool>,
    /// In seconds.
    pub commit_interval: Option<f64>,
    /// Bytes of pages that are kept in memory.
    pub ram: Option<Size>,
    /// Bytes of objects that stay on the store's disk.
    pub ssd: Option<Size>,
    /// A directory that machines share, or `s3://bucket/prefix`.
    pub remote: Option<String>,
    /// Mount also without a remote that the store needs.
    pub offline: Option<bool>,
    /// A file with the keys that seal the remote.
    pub remote_key: Option<PathBuf>,
    /// A command that prints them.
    pub remote_key_command: Option<String>,
    /// Bytes per second to and from the remote.
    pub remote_bandwidth: Option<Size>,
    /// Seconds between two looks at the prefixes of other stores; 0 for never.
    pub remote_index: Option<f64>,
    /// `none`, `zstd` or `zstd:LEVEL`.
    pub cold: Option<String>,
    /// `miss` or `eio`.
    pub on_corrupt: Option<String>,
    /// `first`, `always` or `never`.
    pub verify: Option<String>,
    /// Whose names a new store takes over: the id of a store, or `none`.
    pub rebuild_from: Option<String>,
    /// Threads that answer the kernel.
    pub threads: Option<usize>,
    /// `127.0.0.1:PORT` or `unix:PATH`.
    pub metrics_addr: Option<String>,
    /// Where the log goes.
    pub log_file: Option<PathBuf>,
    /// `info`, or a filter such as `info,kvfs::store=debug`.
    pub log_level: Option<String>,
    /// Flags for the kernel such as `noatime`.
    pub options: Option<Vec<String>>,
}

/// A mount as it will be made.
#[derive(Debug, Clone)]
pub(crate) struct MountConfig {
    /// For the filesystem.
    pub options: MountOptions,
    /// Where the keys of the remote come from.
    pub remote_key: Option<KeySource>,
    /// Stay, instead of becoming a daemon.
    pub foreground: bool,
    /// The mountpoint may hold files.
    pub nonempty: bool,
    /// The log file where one was named.
    pub log_file: Option<PathBuf>,
    /// The log filter where one was given.
    pub log_level: Option<String>,
}

impl MountConfig {
    /// The configuration as a file that gives the same mount, for `.kvfs/config`.
    pub(crate) fn to_toml(&self) -> String {
        let options = &self.options;
        // Every JSON string is a TOML string.
        let text = |path: &Path| serde_json::Value::from(path.to_string_lossy()).to_string();
        let log_file = self.log_file.as_ref().map(|path| format!("log_file = {}\n", text(path)));
        let log_level = self.log_level.as_deref().map(Path::new);
        let log_level = log_level.map(|level| format!("log_level = {}\n", text(level)));
        let metrics_addr = options.metrics_address.as_ref().map(ToString::to_string);
        let metrics_addr = metrics_addr
            .map(|address| format!("metrics_addr = {}\n", serde_json::Value::from(address)));
        let cold = match options.cold {
            ColdEncoding::None => String::new(),
            cold => format!("cold = \"{cold}\"\n"),
        };
        let on_corrupt = match options.on_corrupt {
            OnCorrupt::Eio => "",
            OnCorrupt::Miss => "on_corrupt = \"miss\"\n",
        };
        let verify = match options.verify {
            Verify::First => String::new(),
            verify => format!("verify = \"{verify}\"\n"),
        };
        format!(
            "# store = {}\n# mountpoint = {}\nallow_other = {}\nread_only = {}\npassthrough = {}\n\
             io_uring = {}\nnonempty = {}\ncommit_interval = {:?}\nram = {}\nthreads = {}\noptions = {:?}\n\
             {}{}{}{}{}{}{}{}{}{}",
            text(&options.store),
            text(&options.mountpoint),
            options.allow_other,
            options.read_only,
            options.passthrough == Passthrough::Auto,
            options.io_uring,
            self.nonempty,
            options.commit_interval.as_secs_f64(),
            options.ram_bytes,
            options.threads,
            options.kernel_options,
            options.ssd_bytes.map(|bytes| format!("ssd = {bytes}\n")).unwrap_or_default(),
            cold,
            on_corrupt,
            verify,
            if options.offline { "offline = true\n" } else { "" },
            options.remote.as_ref().map(remote_toml).unwrap_or_default(),
            self.remote_key.as_ref().map(KeySource::to_toml).unwrap_or_default(),
            metrics_addr.unwrap_or_default(),
            log_file.unwrap_or_default(),
            log_level.unwrap_or_default(),
        )
    }
}

fn remote_toml(remote: &RemoteOptions) -> String {
    let mut text = format!("remote = {}\n", serde_json::Value::from(remote.place.to_string()));
    text.extend(match remote.rebuild_from {
        RebuildFrom::OnlyStore => None,
        RebuildFrom::Nothing => Some("rebuild_from = \"none\"\n".to_owned()),
        RebuildFrom::Store(id) => Some(format!("rebuild_from = \"{id}\"\n")),
    });
    text.extend(remote.bandwidth.map(|bytes| format!("remote_bandwidth = {bytes}\n")));
    let seconds = remote.index_interval.map_or(0.0, |interval| interval.as_secs_f64());
    text + &format!("remote_index = {seconds:?}\n")
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

/// Merges and validates all sources. `environment` looks a variable up.
pub(crate) fn resolve(
    named: Named, dash_o: options::Parsed, environment: &dyn Fn(&str) -> Option<OsString>,
) -> Result<MountConfig, Failure> {
    if let Some(unknown) = dash_o.unknown {
        return Err(Failure::Usage(format!(
            "unknown mount option {unknown:?}: see kvfs mount --help"
        )));
    }
    let file = match named.config.or(dash_o.config).or(environment("KVFS_CONFIG").map(Into::into)) {
        Some(path) => read_file(&path)?,
        None => Layer::default(),
    };
    let from_environment = environment_layer(environment).map_err(Failure::Usage)?;
    let layers = [named.layer, dash_o.layer, from_environment, file];
    let store = std::path::absolute(&named.store)
        .map_err(|error| Failure::Usage(format!("store {}: {error}", named.store.display())))?;
    validate(&layers, store, named.mountpoint, named.foreground).map_err(Failure::Usage)
}

fn validate(
    layers: &[Layer; 4], store: PathBuf, mountpoint: PathBuf, foreground: bool,
) -> Result<MountConfig, String> {
    let first = Layers(layers);
    let seconds = first.get(|l| l.commit_interval).unwrap_or(DEFAULT_COMMIT_INTERVAL_SECONDS);
    if !(COMMIT_INTERVAL_SECONDS_MIN..=COMMIT_INTERVAL_SECONDS_MAX).contains(&seconds) {
        return Err(format!(
            "commit_interval is {seconds}: must be from {COMMIT_INTERVAL_SECONDS_MIN} to \
             {COMMIT_INTERVAL_SECONDS_MAX} seconds"
        ));
    }
    let passthrough = match first.get(|l| l.passthrough) {
        Some(false) => Passthrough::Off,
        _ => Passthrough::Auto,
    };
    let threads = first.get(|l| l.threads).unwrap_or_else(|| default_threads(passthrough));
    if !(1..=THREADS_MAX).contains(&threads) {
        return Err(format!("threads is {threads}: must be from 1 to {THREADS_MAX}"));
    }
    let log_file = first.get(|l| l.log_file.clone());
    if let Some(path) = log_file.as_ref().filter(|path| !path.is_absolute()) {
        return Err(format!("log file {} must be an absolute path", path.display()));
    }
    let log_level = first.get(|l| l.log_level.clone());
    super::logging::check_filter(log_level.as_deref())?;
    let offline = first.get(|l| l.offline).unwrap_or(false);
    let remote_key = KeySource::of(
        first.get(|l| l.remote_key.clone()),
        first.get(|l| l.remote_key_command.clone()),
    )?;
    // What is said of the remote must make sense, although this mount leaves it alone.
    let remote = remote_options(&first, remote_key.as_ref())?.filter(|_| !offline);
    let cold = cold_encoding(&first)?;
    let on_corrupt: OnCorrupt = word("on_corrupt", first.get(|l| l.on_corrupt.clone()))?;
    let metrics_address = first.get(|l| l.metrics_addr.clone()).map(|text| text.parse());
    let metrics_address =
        metrics_address.transpose().map_err(|error| format!("metrics_addr: {error}"))?;
    let verify: Verify = word("verify", first.get(|l| l.verify.clone()))?;
    let has_a_way_out = offline || remote.is_some() || cold != ColdEncoding::None;
    let ssd_bytes = ssd_bytes(&first, has_a_way_out)?;
    Ok(MountConfig {
        options: MountOptions {
            store,
            mountpoint,
            allow_other: first.get(|l| l.allow_other).unwrap_or(false),
            read_only: first.get(|l| l.read_only).unwrap_or(false),
            passthrough,
            io_uring: first.get(|l| l.io_uring).unwrap_or(true),
            kernel_options: kernel_options(layers)?,
            commit_interval: Duration::from_secs_f64(seconds),
            ram_bytes: first.get(|l| l.ram).map_or(0, |size| size.0),
            ssd_bytes,
            cold,
            remote,
            offline,
            on_corrupt,
            verify,
            threads,
            metrics_address,
            config_text: String::new(),
        },
        remote_key,
        foreground,
        nonempty: first.get(|l| l.nonempty).unwrap_or(false),
        log_file,
        log_level,
    })
}

/// A setting that is one of a few words.
fn word<T: Default + std::str::FromStr<Err = String>>(
    name: &str, text: Option<String>,
) -> Result<T, String> {
    let parsed = text.map_or(Ok(T::default()), |text| text.parse());
    parsed.map_err(|error| format!("{name}: {error}"))
}

fn remote_options(
    first: &Layers<'_>, key: Option<&KeySource>,
) -> Result<Option<RemoteOptions>, String> {
    let bandwidth = first.get(|l| l.remote_bandwidth);
    let rebuild_from = first.get(|l| l.rebuild_from.clone());
    let index_seconds = first.get(|l| l.remote_index);
    let Some(place) = first.get(|l| l.remote.clone()).filter(|place| !place.is_empty()) else {
        let alone = [
            ("remote_key", key.is_some()),
            ("remote_bandwidth", bandwidth.is_some()),
            ("rebuild_from", rebuild_from.is_some()),
            ("remote_index", index_seconds.is_some()),
        ];
        return match alone.into_iter().find(|(_, given)| *given) {
            Some((name, _)) => Err(format!("{name} is set, but no remote (remote=...)")),
            None => Ok(None),
        };
    };
    let bandwidth = match bandwidth.map(|size| size.0) {
        Some(0) => return Err("remote_bandwidth is 0: nothing would ever move".to_owned()),
        bandwidth => bandwidth.and_then(NonZeroU64::new),
    };
    let place = place.parse().map_err(|error| format!("remote: {error}"))?;
    let rebuild_from = rebuild_from.as_deref().map(rebuild_source).transpose()?;
    let rebuild_from = rebuild_from.unwrap_or_default();
    let index_interval = index_interval(index_seconds)?;
    let keys = key.map(KeySource::load).transpose()?.map(Arc::new);
    Ok(Some(RemoteOptions { place, keys, bandwidth, rebuild_from, index_interval }))
}

fn index_interval(seconds: Option<f64>) -> Result<Option<Duration>, String> {
    let seconds = seconds.unwrap_or(DEFAULT_REMOTE_INDEX_SECONDS);
    let allowed = REMOTE_INDEX_SECONDS_MIN..=REMOTE_INDEX_SECONDS_MAX;
    if seconds != 0.0 && !allowed.contains(&seconds) {
        return Err(format!(
            "remote_index is {seconds}: must be 0 (never) or from {REMOTE_INDEX_SECONDS_MIN} to \
             {REMOTE_INDEX_SECONDS_MAX} seconds"
        ));
    }
    Ok((seconds > 0.0).then(|| Duration::from_secs_f64(seconds)))
}

fn cold_encoding(first: &Layers<'_>) -> Result<ColdEncoding, String> {
    let Some(text) = first.get(|l| l.cold.clone()) else {
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
fn ssd_bytes(first: &Layers<'_>, has_a_way_out: bool) -> Result<Option<u64>, String> {
    let Some(bytes) = first.get(|l| l.ssd).map(|size| size.0) else {
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

/// The sources in their order.
struct Layers<'a>(&'a [Layer; 4]);

impl Layers<'_> {
    fn get<T>(&self, field: impl Fn(&Layer) -> Option<T>) -> Option<T> {
        self.0.iter().find_map(field)
    }
}

fn kernel_options(layers: &[Layer; 4]) -> Result<Vec<String>, String> {
    let mut flags = Vec::new();
    for option in layers.iter().rev().filter_map(|layer| layer.options.as_ref()).flatten() {
        if let Some(why) = refusal(option) {
            return Err(why);
        }
        match kernel_flag(option) {
            Some(flag) => push_kernel_flag(&mut flags, flag),
            None => {
                return Err(format!("options has {option:?}: not a flag such as noatime"));
            }
        }
    }
    flags.retain(|flag| is_effective(flag));
    Ok(flags)
}

fn read_file(path: &Path) -> Result<Layer, Failure> {
    let text = std::fs::read_to_string(path)
        .map_err(|error| Failure::failed(format!("config {}: {error}", path.display())))?;
    toml::from_str(&text).map_err(|error| {
        let line = error.span().map_or(1, |span| {
            text.bytes().take(span.start).filter(|byte| *byte == b'\n').count() + 1
        });
        let message = error.message().replace('\n', " ");
        Failure::Usage(format!("config {} line {line}: {message}", path.display()))
    })
}

fn environment_layer(environment: &dyn Fn(&str) -> Option<OsString>) -> Result<Layer, String> {
    let text = |name: &str| match environment(name).map(OsString::into_string) {
        None => Ok(None),
        Some(Ok(value)) if value.is_empty() => Ok(None),
        Some(Ok(value)) => Ok(Some(value)),
        Some(Err(_)) => Err(format!("{name} is not UTF-8")),
    };
    let switch = |name: &str| text(name)?.map(|value| yes_or_no(name, Some(&value))).transpose();
    Ok(Layer {
        allow_other: switch("KVFS_ALLOW_OTHER")?,
        read_only: switch("KVFS_READ_ONLY")?,
        passthrough: switch("KVFS_PASSTHROUGH")?,
        io_uring: switch("KVFS_IO_URING")?,
        nonempty: switch("KVFS_NONEMPTY")?,
        offline: switch("KVFS_OFFLINE")?,
        commit_interval: text("KVFS_COMMIT_INTERVAL")?
            .map(|value| number("KVFS_COMMIT_INTERVAL", &value))
            .transpose()?,
        ram: text("KVFS_RAM")?.map(|value| size("KVFS_RAM", &value)).transpose()?,
        ssd: text("KVFS_SSD")?.map(|value| size("KVFS_SSD", &value)).transpose()?,
        remote: text("KVFS_REMOTE")?,
        remote_key: text("KVFS_REMOTE_KEY")?.map(PathBuf::from),
        remote_key_command: text("KVFS_REMOTE_KEY_COMMAND")?,
        remote_bandwidth: text("KVFS_REMOTE_BANDWIDTH")?
            .map(|value| size("KVFS_REMOTE_BANDWIDTH", &value))
            .transpose()?,
        remote_index: text("KVFS_REMOTE_INDEX")?
            .map(|value| number("KVFS_REMOTE_INDEX", &value))
            .transpose()?,
        cold: text("KVFS_COLD")?,
        on_corrupt: text("KVFS_ON_CORRUPT")?,
        verify: text("KVFS_VERIFY")?,
        rebuild_from: text("KVFS_REBUILD_FROM")?,
        threads: text("KVFS_THREADS")?.map(|value| number("KVFS_THREADS", &value)).transpose()?,
        metrics_addr: text("KVFS_METRICS_ADDR")?,
        log_file: environment("KVFS_LOG_FILE").map(PathBuf::from),
        log_level: match text("KVFS_LOG")? {
            Some(filter) => Some(filter),
            None => text("RUST_LOG")?,
        },
        options: text("KVFS_OPTIONS")?.map(|value| value.split(',').map(str::to_owned).collect()),
    })
}

#[cfg(test)]
mod tests;
