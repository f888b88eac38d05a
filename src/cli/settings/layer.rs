//! What the sources of settings say, and which of them counts.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use super::{Kind, SETTINGS, Setting, Value, find};
use crate::cli::options::push_kernel_flag;

/// What one source says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Layer(BTreeMap<&'static str, Value>);

/// Where a value comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    /// `kvfs config set`, or a remount.
    Live,
    /// An argument, or `-o`.
    Option,
    /// A variable of the environment.
    Variable,
    /// The configuration file.
    File(PathBuf),
    /// Nobody gave one.
    Default,
}

/// The sources, the one that counts first.
#[derive(Clone, Debug, Default)]
pub(crate) struct Sources(pub(crate) Vec<(Origin, Layer)>);

impl Layer {
    /// The same with a value, if there is one.
    pub(crate) fn with(mut self, name: &'static str, value: Option<Value>) -> Layer {
        debug_assert!(find(name).is_some(), "{name}");
        if let Some(value) = value {
            self.0.insert(name, value);
        }
        self
    }

    /// Gives a setting a value.
    pub(crate) fn set(&mut self, setting: &'static Setting, value: Value) {
        self.0.insert(setting.name, value);
    }

    /// Forgets a value.
    pub(crate) fn remove(&mut self, name: &str) {
        self.0.remove(name);
    }

    /// The value of a setting.
    pub(crate) fn get(&self, name: &str) -> Option<&Value> {
        debug_assert!(find(name).is_some(), "{name}");
        self.0.get(name)
    }

    /// Adds a flag for the kernel, replacing its opposite or itself.
    pub(crate) fn add_flag(&mut self, flag: &str) {
        let mut flags = match self.0.remove("options") {
            Some(Value::Flags(flags)) => flags,
            _ => Vec::new(),
        };
        push_kernel_flag(&mut flags, flag);
        self.0.insert("options", Value::Flags(flags));
    }

    /// All that it says.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&'static str, &Value)> {
        self.0.iter().map(|(name, value)| (*name, value))
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Origin::Live => formatter.write_str("set live"),
            Origin::Option => formatter.write_str("option"),
            Origin::Variable => formatter.write_str("variable"),
            Origin::File(path) => write!(formatter, "file {}", path.display()),
            Origin::Default => formatter.write_str("default"),
        }
    }
}

impl Sources {
    /// The value that counts.
    pub(crate) fn get(&self, name: &str) -> Option<&Value> {
        self.0.iter().find_map(|(_, layer)| layer.get(name))
    }

    /// Where it comes from.
    pub(crate) fn origin(&self, name: &str) -> Origin {
        let said = self.0.iter().find(|(_, layer)| layer.get(name).is_some());
        said.map_or(Origin::Default, |(origin, _)| origin.clone())
    }

    /// The same with another layer that counts before all of them.
    pub(crate) fn under(&self, origin: Origin, layer: &Layer) -> Sources {
        let mut sources = vec![(origin, layer.clone())];
        sources.extend(self.0.iter().cloned());
        Sources(sources)
    }

    /// A switch.
    pub(crate) fn switch(&self, name: &str) -> Option<bool> {
        match self.get(name) {
            Some(Value::Switch(is_on)) => Some(*is_on),
            _ => None,
        }
    }

    /// A number of bytes; no limit is none.
    pub(crate) fn bytes(&self, name: &str) -> Option<u64> {
        match self.get(name) {
            Some(Value::Size(bytes) | Value::Limit(Some(bytes))) => Some(*bytes),
            _ => None,
        }
    }

    /// A time.
    pub(crate) fn time(&self, name: &str) -> Option<Duration> {
        match self.get(name) {
            Some(Value::Duration(time)) => Some(*time),
            _ => None,
        }
    }

    /// A number.
    pub(crate) fn count(&self, name: &str) -> Option<usize> {
        match self.get(name) {
            Some(Value::Count(number)) => Some(*number),
            _ => None,
        }
    }

    /// Words or a place.
    pub(crate) fn text(&self, name: &str) -> Option<&str> {
        match self.get(name) {
            Some(Value::Text(text)) => Some(text),
            _ => None,
        }
    }

    /// A file.
    pub(crate) fn path(&self, name: &str) -> Option<PathBuf> {
        match self.get(name) {
            Some(Value::Path(path)) => Some(path.clone()),
            _ => None,
        }
    }
}

/// What variables say. One that is empty says nothing.
pub(crate) fn from_environment(
    environment: &dyn Fn(&str) -> Option<OsString>,
) -> Result<Layer, String> {
    let mut layer = Layer::default();
    for setting in &SETTINGS {
        for name in setting.variables {
            let Some(value) = environment(name).filter(|value| !value.is_empty()) else { continue };
            let value = if setting.kind == Kind::Path {
                Value::Path(value.into())
            } else {
                let text = value.into_string().map_err(|_| format!("{name} is not UTF-8"))?;
                Value::parse(setting.kind, name, &text)?
            };
            layer.set(setting, value);
            break;
        }
    }
    Ok(layer)
}
