//! What a page may say about itself: the `kvfs.*` strings in its header.
//!
//! All of them are optional, since the path and the manifest already say the same; but what is
//! said must be true, and a page that says where it belongs can be put back without its path.

use std::collections::BTreeMap;
use std::str::FromStr;

use super::checksum::Checksum;
use super::error::{PageError, quoted};
use super::identity::ModelIdentity;
use super::{Layer, TokenStart};

/// The `__metadata__` of a safetensors header: text by name, sorted.
pub type Metadata = BTreeMap<String, String>;

pub(super) const CHECKSUM: &str = "kvfs.checksum";
pub(super) const MODEL: &str = "kvfs.model";
pub(super) const LAYER: &str = "kvfs.layer";
/// Of a state: tokens before it, decimal.
pub(super) const ROW: &str = "kvfs.row";
/// Of a state: the hash of these tokens, 64 hexadecimal digits.
pub(super) const PREFIX: &str = "kvfs.prefix";
const START: &str = "kvfs.start";
const SEQUENCE: &str = "kvfs.sequence";

/// The `kvfs.*` metadata of a page, each absent if the writer left it out.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Declared {
    /// `kvfs.checksum`: the page's public checksum, 32 hexadecimal digits.
    pub checksum: Option<Checksum>,
    /// `kvfs.model`: identity of the cache, 32 hexadecimal digits.
    pub model: Option<ModelIdentity>,
    /// `kvfs.layer`: the layer, decimal.
    pub layer: Option<Layer>,
    /// `kvfs.start`: position of the first token, decimal.
    pub start: Option<TokenStart>,
    /// `kvfs.sequence`: name of a sequence the page was written for; a note, never compared,
    /// since sequences share pages.
    pub sequence: Option<String>,
}

impl Declared {
    /// Reads the `kvfs.*` entries that this version knows; others are left alone.
    ///
    /// # Errors
    /// [`PageError::Header`] for a value that is not in the form given above.
    pub fn from_metadata(metadata: &Metadata) -> Result<Self, PageError> {
        Ok(Self {
            checksum: parsed(metadata, CHECKSUM, "32 lower-case hexadecimal digits")?,
            model: parsed(metadata, MODEL, "32 lower-case hexadecimal digits")?,
            layer: parsed(metadata, LAYER, "a decimal number")?.map(Layer),
            start: parsed(metadata, START, "a decimal number")?.map(TokenStart),
            sequence: metadata.get(SEQUENCE).cloned(),
        })
    }

    /// The metadata entries that say this.
    pub fn to_metadata(&self) -> Metadata {
        let entries = [
            (CHECKSUM, self.checksum.map(|value| value.to_string())),
            (MODEL, self.model.map(|value| value.to_string())),
            (LAYER, self.layer.map(|value| value.to_string())),
            (START, self.start.map(|value| value.to_string())),
            (SEQUENCE, self.sequence.clone()),
        ];
        entries.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?))).collect()
    }
}

/// An entry that is there, in the form that its name asks for.
pub(super) fn parsed<T: FromStr>(
    metadata: &Metadata, name: &str, form: &str,
) -> Result<Option<T>, PageError> {
    let Some(text) = metadata.get(name) else {
        return Ok(None);
    };
    text.parse().map(Some).map_err(|_| {
        PageError::Header(format!("header metadata {name} is {}: must be {form}", quoted(text)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_trip() {
        fn check(declared: &Declared) {
            let metadata = declared.to_metadata();
            assert_eq!(Declared::from_metadata(&metadata).as_ref(), Ok(declared));
        }
        check(&Declared::default());
        check(&Declared {
            checksum: Some(Checksum([1; 16])),
            model: Some(ModelIdentity([2; 16])),
            layer: Some(Layer(3)),
            start: Some(TokenStart(1024)),
            sequence: Some("chat-42".to_owned()),
        });
    }

    #[test]
    fn malformed() {
        fn check(name: &str, value: &str, expected: &str) {
            let metadata = Metadata::from([(name.to_owned(), value.to_owned())]);
            let found = Declared::from_metadata(&metadata);
            assert_eq!(found, Err(PageError::Header(expected.to_owned())));
        }
        check(
            "kvfs.checksum",
            "abc",
            "header metadata kvfs.checksum is \"abc\": must be 32 lower-case hexadecimal digits",
        );
        check(
            "kvfs.model",
            "",
            "header metadata kvfs.model is \"\": must be 32 lower-case hexadecimal digits",
        );
        check("kvfs.layer", "-1", "header metadata kvfs.layer is \"-1\": must be a decimal number");
        check(
            "kvfs.start",
            "18446744073709551616",
            "header metadata kvfs.start is \"18446744073709551616\": must be a decimal number",
        );
    }
}
