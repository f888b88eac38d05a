//! The settings of a mount that is used: what it tells of them, and how some of them change.
//!
//! A change goes through the same checks as a mount: the settings of now with those of the request above them must make
//! a mount that would be accepted. What is set so lasts until the daemon ends.

use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde_json::json;

use super::{Layer, Origin, Setting, Sources, Value, find, live_names, of_a_file, unknown};
use crate::cli::config::{self, MountConfig, Place};
use crate::cli::logging;
use crate::cli::options::is_effective;
use crate::fs::{Changes, FileSystem, Steering};
use crate::page::printable;

/// How a setting is shown that has no value.
const NOTHING: &str = "none";

/// The settings of a mount.
#[derive(Debug)]
pub(crate) struct Steerer {
    /// Held by whoever changes something, which may wait for the disk: who comes second finds what the first has set.
    turn: Mutex<()>,
    /// Held for a look.
    now: Mutex<Now>,
}

#[derive(Clone, Debug)]
struct Now {
    /// As the mount was made.
    sources: Sources,
    /// What was set since.
    live: Layer,
    config: MountConfig,
    /// Where the log goes if nobody has said so.
    log_file: Option<PathBuf>,
}

impl Steerer {
    /// Of a mount that is about to be made.
    pub(crate) fn new(config: &MountConfig, log_file: Option<PathBuf>) -> Steerer {
        let sources = config.sources.clone();
        let now = Now { sources, live: Layer::default(), config: config.clone(), log_file };
        Steerer { turn: Mutex::default(), now: Mutex::new(now) }
    }

    fn now(&self) -> MutexGuard<'_, Now> {
        self.now.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Steering for Steerer {
    fn configuration(&self) -> String {
        self.now().configuration()
    }

    fn settings(&self) -> String {
        let now = self.now();
        let all = now.all();
        let shown = of_a_file().map(|setting| {
            let value = now.shown(&all, setting);
            json!({
                "name": setting.name,
                "value": value.as_ref().map(Value::to_json),
                "text": value.as_ref().map_or_else(|| NOTHING.to_owned(), Value::to_string),
                "origin": all.origin(setting.name).to_string(),
                "can_change": setting.is_live,
            })
        });
        let shown: Vec<serde_json::Value> = shown.collect();
        format!("{:#}\n", serde_json::Value::from(shown))
    }

    fn changed(&self) -> String {
        let now = self.now();
        let all = now.all();
        // Also what was changed before another daemon went on with the mount.
        let live = of_a_file().filter(|setting| all.origin(setting.name) == Origin::Live);
        let lines = live
            .filter_map(|setting| Some(format!("{}={}\n", setting.name, all.get(setting.name)?)));
        lines.collect()
    }

    fn change(&self, file_system: &FileSystem, request: &str) -> Result<(), String> {
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let now = self.now().clone();
        let wanted = now.wanted(request)?;
        let mut live = now.live.clone();
        for (name, value) in wanted.iter() {
            if let Some(setting) = find(name) {
                live.set(setting, value.clone());
            }
        }
        let sources = now.sources.under(Origin::Live, &live);
        let config = config::validate(&sources, now.place())?;
        let changes = changes(&now.config, &config);
        if let Some(bytes) = changes.ram_bytes {
            config::check_memory(bytes)?;
        }
        changes.apply(file_system)?;
        if now.config.log_level != config.log_level {
            logging::set_filter(config.log_level.as_deref());
        }
        let before = now.all();
        for (name, value) in wanted.iter() {
            let old = find(name).and_then(|setting| now.value(&before, setting));
            let old = old.map_or_else(|| NOTHING.to_owned(), |old| old.to_string());
            let told = format!("{name} is {value} from now on, it was {old}");
            log::info!("{}", printable(told.chars()));
        }
        *self.now() = Now { live, config, ..now };
        Ok(())
    }
}

impl Now {
    fn all(&self) -> Sources {
        self.sources.under(Origin::Live, &self.live)
    }

    fn place(&self) -> Place {
        let (options, foreground) = (&self.config.options, self.config.foreground);
        Place { store: options.store.clone(), mountpoint: options.mountpoint.clone(), foreground }
    }

    /// What a setting is, said by somebody or not.
    fn value(&self, all: &Sources, setting: &Setting) -> Option<Value> {
        let options = &self.config.options;
        match setting.name {
            "threads" => return Some(Value::Count(options.threads)),
            "options" => return Some(Value::Flags(options.kernel_options.clone())),
            _ => {}
        }
        let default = || {
            let text = setting.default?;
            Value::parse(setting.kind, setting.name, text).ok()
        };
        all.get(setting.name).cloned().or_else(default)
    }

    /// The same as it is shown.
    fn shown(&self, all: &Sources, setting: &Setting) -> Option<Value> {
        let is_log = setting.name == "log_file";
        let log_file = || self.log_file.clone().filter(|_| is_log).map(Value::Path);
        self.value(all, setting).or_else(log_file)
    }

    fn configuration(&self) -> String {
        let options = &self.config.options;
        let path = |path: &std::path::Path| Value::Path(path.to_owned()).to_toml();
        let (store, mountpoint) = (path(&options.store), path(&options.mountpoint));
        let all = self.all();
        let lines = of_a_file().filter_map(|setting| {
            let value = self.value(&all, setting)?;
            // Without a remote nothing may be said of it.
            if all.origin(setting.name) == Origin::Default && setting.name.starts_with("remote") {
                return None;
            }
            Some(format!("{} = {}\n", setting.name, value.to_toml()))
        });
        format!("# store = {store}\n# mountpoint = {mountpoint}\n{}", lines.collect::<String>())
    }

    /// What a request asks for that is not so already.
    fn wanted(&self, request: &str) -> Result<Layer, String> {
        let all = self.all();
        let (mut asked, mut wanted) = (Layer::default(), Layer::default());
        for line in request.lines().filter(|line| !line.is_empty()) {
            let (name, text) = line
                .split_once('=')
                .ok_or_else(|| format!("{line:?} is no setting: write KEY=VALUE"))?;
            let setting = find(name).filter(|setting| setting.name != super::CONFIG);
            let setting = setting.ok_or_else(|| unknown(name))?;
            let value = normalised(Value::parse(setting.kind, name, text)?);
            if asked.get(name).is_some() {
                return Err(format!("{name} is given twice"));
            }
            asked.set(setting, value.clone());
            let is_so = match self.shown(&all, setting) {
                Some(is) => normalised(is) == value,
                None => text == NOTHING,
            };
            if !is_so && !setting.is_live {
                return Err(format!(
                    "{name} cannot change while the mount is used: unmount, and mount with {line}. \
                     What can change: {}",
                    live_names()
                ));
            }
            // What is said anew outlives nothing, but is told as set.
            if setting.is_live {
                wanted.set(setting, value);
            }
        }
        Ok(wanted)
    }
}

/// Flags that are the default say nothing, and the kernel tells them in an order of its own.
fn normalised(value: Value) -> Value {
    match value {
        Value::Flags(mut flags) => {
            flags.retain(|flag| is_effective(flag));
            flags.sort();
            flags.dedup();
            Value::Flags(flags)
        }
        value => value,
    }
}

/// What must be done so that a mount is as another configuration says.
fn changes(from: &MountConfig, to: &MountConfig) -> Changes {
    let (from, to) = (&from.options, &to.options);
    let rate = |options: &crate::fuse::MountOptions| {
        options.remote.as_ref().and_then(|remote| remote.bandwidth)
    };
    Changes {
        ram_bytes: (from.ram_bytes != to.ram_bytes).then_some(to.ram_bytes),
        packed_bytes_max: (from.packed_bytes_max != to.packed_bytes_max)
            .then_some(to.packed_bytes_max),
        ssd_bytes: (from.ssd_bytes != to.ssd_bytes).then_some(to.ssd_bytes),
        ssd_writes: (from.ssd_writes_day_bytes != to.ssd_writes_day_bytes)
            .then_some(to.ssd_writes_day_bytes),
        cold: (from.cold != to.cold).then_some(to.cold),
        bandwidth: (rate(from) != rate(to)).then(|| rate(to)),
        verify: (from.verify != to.verify).then_some(to.verify),
        on_corrupt: (from.on_corrupt != to.on_corrupt).then_some(to.on_corrupt),
    }
}
