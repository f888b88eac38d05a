//! What one layer keeps, and what of it must be there so that a prefix can be continued.

use std::fmt;

use serde::de::value::{MapAccessDeserializer, StrDeserializer};
use serde::de::{self, Deserializer, MapAccess, Visitor};
use serde::ser::Serializer;
use serde::{Deserialize, Serialize};

use super::dtype::Dtype;
use super::limits::{
    FILE_ALIGNMENT, MAX_FILE_BYTES, MAX_SIDE_ROW_BYTES, MAX_STATE_DIMS, MAX_STATE_NAME_BYTES,
    MAX_STATE_TENSORS, PAYLOAD_OFFSET,
};

/// What one layer keeps.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum LayerKind {
    /// `"attention"`: K and V of every token.
    Attention,
    /// `{"attention": {"side": {...}}}`: the same, and of every token a row beside them that an engine
    /// must find again with it, such as the index key of sparse attention.
    WithSide(SideRows),
    /// `{"sliding": {"window": N}}`: only the last `window` tokens are looked at.
    Sliding {
        /// In tokens, at least 1.
        window: u32,
    },
    /// `"recurrent"`: snapshots of a state instead of pages; what is in them only the engine knows.
    Recurrent,
    /// `{"recurrent": {"state": [...]}}`: the same, and it is known what they consist of, so they are
    /// verified as pages are.
    State(StateShape),
    /// `"cross"`: K and V of what an encoder made of its input, however many rows that has. They do
    /// not grow with the tokens of the sequence.
    Cross,
}

/// What of a layer must be there so that an engine can go on after a prefix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Needed {
    /// The rows of all tokens.
    All,
    /// Those of so many tokens at the end.
    End {
        /// In tokens.
        window: u32,
    },
    /// The state after exactly the last token.
    State,
    /// Nobody can tell: what the layer has depends on more than the tokens, or is not known.
    Untold,
}

impl LayerKind {
    /// What of such a layer must be there so that a prefix can be continued.
    pub fn needed(&self) -> Needed {
        match self {
            Self::Attention | Self::WithSide(_) => Needed::All,
            Self::Sliding { window } => Needed::End { window: *window },
            Self::State(_) => Needed::State,
            Self::Recurrent | Self::Cross => Needed::Untold,
        }
    }

    /// Whether it keeps snapshots of a state instead of pages.
    pub fn is_recurrent(&self) -> bool {
        matches!(self, Self::Recurrent | Self::State(_))
    }

    /// Whether it keeps pages with a row for each token of the sequence.
    pub fn has_rows_of_tokens(&self) -> bool {
        matches!(self, Self::Attention | Self::WithSide(_) | Self::Sliding { .. })
    }

    /// Why no layer can be so, if none can.
    pub(super) fn contradiction(&self) -> Option<String> {
        match self {
            Self::Sliding { window: 0 } => Some("has a window of 0 tokens: at least 1".to_owned()),
            Self::State(shape) => shape.contradiction(),
            Self::WithSide(rows) => rows.contradiction(),
            _ => None,
        }
    }
}

/// What a layer keeps of each token beside K and V, in the same pages and tails.
///
/// ```json
/// {"attention": {"side": {"name": "index_k", "row_bytes": 256}}}
/// ```
///
/// What is in a row only the engine knows. The name says it: whoever puts the same number of bytes in another
/// order takes another name, and shares nothing with this one.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SideRows {
    /// Letters, digits, `_`, `.` and `-`.
    pub name: String,
    /// Of one token.
    pub row_bytes: u32,
}

impl SideRows {
    fn contradiction(&self) -> Option<String> {
        if !is_plain_name(&self.name) {
            return Some(format!(
                "has side rows that are called {}: 1 to {MAX_STATE_NAME_BYTES} letters, digits, '_', '.' and \
                 '-'",
                super::error::quoted(&self.name)
            ));
        }
        let bytes = self.row_bytes;
        (bytes == 0 || bytes > MAX_SIDE_ROW_BYTES)
            .then(|| format!("has side rows of {bytes} bytes: 1 to {MAX_SIDE_ROW_BYTES}"))
    }
}

fn is_plain_name(name: &str) -> bool {
    let is_known = |byte: u8| byte.is_ascii_alphanumeric() || b"_.-".contains(&byte);
    !name.is_empty() && name.len() <= MAX_STATE_NAME_BYTES && name.bytes().all(is_known)
}

/// What the state of a recurrent layer consists of, in the order of the file.
///
/// ```json
/// {"recurrent": {"state": [{"name": "conv", "dtype": "f32", "shape": [8192, 3]}]}}
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StateShape {
    /// One behind the other, without holes.
    pub state: Vec<StateTensor>,
}

/// One tensor of a state.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StateTensor {
    /// Its name in the file: letters, digits, `_`, `.` and `-`.
    pub name: String,
    /// How its elements are stored; not in blocks.
    pub dtype: Dtype,
    /// Its dimensions, each at least 1.
    pub shape: Vec<u32>,
}

impl StateTensor {
    /// Its bytes; `None` if it has more than any file may.
    pub fn bytes(&self) -> Option<u64> {
        let element_bytes = u64::from(self.dtype.block_bytes());
        let bytes = self
            .shape
            .iter()
            .try_fold(element_bytes, |bytes, dimension| bytes.checked_mul(u64::from(*dimension)))?;
        (bytes <= MAX_FILE_BYTES).then_some(bytes)
    }

    fn contradiction(&self) -> Option<String> {
        let name = self.name.as_str();
        if !is_plain_name(name) {
            return Some(format!(
                "has a state tensor that is called {}: 1 to {MAX_STATE_NAME_BYTES} letters, \
                 digits, '_', '.' and '-'",
                super::error::quoted(name)
            ));
        }
        if name.starts_with('_') {
            return Some(format!("has a state tensor {name}: names with '_' first are taken"));
        }
        if self.dtype.block_elements() != 1 {
            return Some(format!("has a state tensor {name} of {}: no blocks here", self.dtype));
        }
        let dimensions = self.shape.len();
        if dimensions == 0 || dimensions > MAX_STATE_DIMS || self.shape.contains(&0) {
            return Some(format!(
                "has a state tensor {name} of shape {:?}: 1 to {MAX_STATE_DIMS} dimensions, none 0",
                self.shape.get(..MAX_STATE_DIMS).unwrap_or(&self.shape)
            ));
        }
        None
    }
}

impl StateShape {
    /// Bytes of the tensors of one state.
    pub fn payload_bytes(&self) -> u64 {
        self.state.iter().filter_map(StateTensor::bytes).sum()
    }

    /// Length of the file of one state.
    pub fn file_bytes(&self) -> u64 {
        (PAYLOAD_OFFSET + self.payload_bytes()).next_multiple_of(FILE_ALIGNMENT)
    }

    fn contradiction(&self) -> Option<String> {
        let count = self.state.len();
        if count == 0 || count > MAX_STATE_TENSORS {
            return Some(format!("has a state of {count} tensors: 1 to {MAX_STATE_TENSORS}"));
        }
        for (index, tensor) in self.state.iter().enumerate() {
            if let Some(contradiction) = tensor.contradiction() {
                return Some(contradiction);
            }
            if self.state[..index].iter().any(|other| other.name == tensor.name) {
                return Some(format!("has two state tensors {}", tensor.name));
            }
        }
        let is_too_large = self.state.iter().any(|tensor| tensor.bytes().is_none());
        (is_too_large || self.file_bytes() > MAX_FILE_BYTES).then(|| {
            format!("has a state of more bytes than a file may have: the limit is {MAX_FILE_BYTES}")
        })
    }
}

/// A kind that is only a word.
#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum Word {
    Attention,
    Recurrent,
    Cross,
}

/// A kind with what it consists of; the words as well, with `null` for nothing.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
enum Described {
    Attention(Option<Beside>),
    Sliding { window: u32 },
    Recurrent(Option<StateShape>),
    Cross,
}

/// What an attention layer keeps beside K and V.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Beside {
    side: SideRows,
}

impl From<Described> for LayerKind {
    fn from(described: Described) -> Self {
        match described {
            Described::Attention(None) => Self::Attention,
            Described::Attention(Some(beside)) => Self::WithSide(beside.side),
            Described::Sliding { window } => Self::Sliding { window },
            Described::Recurrent(None) => Self::Recurrent,
            Described::Recurrent(Some(shape)) => Self::State(shape),
            Described::Cross => Self::Cross,
        }
    }
}

impl Serialize for LayerKind {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Attention => serializer.serialize_str("attention"),
            Self::Recurrent => serializer.serialize_str("recurrent"),
            Self::Cross => serializer.serialize_str("cross"),
            Self::Sliding { window } => {
                Described::Sliding { window: *window }.serialize(serializer)
            }
            Self::State(shape) => Described::Recurrent(Some(shape.clone())).serialize(serializer),
            Self::WithSide(rows) => {
                Described::Attention(Some(Beside { side: rows.clone() })).serialize(serializer)
            }
        }
    }
}

impl<'de> Deserialize<'de> for LayerKind {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(KindVisitor)
    }
}

struct KindVisitor;

impl<'de> Visitor<'de> for KindVisitor {
    type Value = LayerKind;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("what a layer keeps: a word, or an object with one")
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<LayerKind, E> {
        Ok(match Word::deserialize(StrDeserializer::new(text))? {
            Word::Attention => LayerKind::Attention,
            Word::Recurrent => LayerKind::Recurrent,
            Word::Cross => LayerKind::Cross,
        })
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<LayerKind, A::Error> {
        Described::deserialize(MapAccessDeserializer::new(map)).map(Into::into)
    }
}
