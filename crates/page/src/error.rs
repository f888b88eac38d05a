//! Why a page or manifest was refused, in one line that a person can act on.

use std::fmt;

use super::checksum::Checksum;

/// Why a page or manifest was refused. One variant per decision of a caller; the text of each is
/// one line that goes verbatim to the log and to `.kvfs/errors`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PageError {
    /// The file is no safetensors file with the payload at byte 4096.
    Header(String),
    /// The tensors do not lie one behind the other as `k`, `v`, `_pad`.
    Offsets(String),
    /// The tensors are not those that the manifest's geometry asks for.
    Shape(String),
    /// The element type is not the manifest's.
    Dtype(String),
    /// The file is shorter or longer than its header says: an unfinished copy, most often.
    Size(String),
    /// The page says that it belongs elsewhere, or no page may lie here.
    Place(String),
    /// The bytes are not those that the writer declared.
    Checksum {
        /// What `kvfs.checksum` in the header says.
        declared: Checksum,
        /// What the bytes at this place give.
        computed: Checksum,
    },
    /// The manifest contradicts itself, exceeds a limit, or is no manifest.
    Manifest(String),
    /// The manifest was written by a newer kvfs: upgrade instead of repairing.
    Newer {
        /// The `schema_version` found.
        found: u64,
        /// The newest one that this program reads.
        supported: u64,
    },
    /// `positions.json` contradicts itself or exceeds a limit, or a change would make it.
    Positions(String),
    /// A caller passed rows that do not fill the page it asked for.
    Rows(String),
}

impl PageError {
    /// A short fixed label, for a metric.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Header(_) => "header",
            Self::Offsets(_) => "offsets",
            Self::Shape(_) => "shape",
            Self::Dtype(_) => "dtype",
            Self::Size(_) => "size",
            Self::Place(_) => "place",
            Self::Checksum { .. } => "checksum",
            Self::Manifest(_) => "manifest",
            Self::Newer { .. } => "version",
            Self::Positions(_) => "positions",
            Self::Rows(_) => "rows",
        }
    }
}

impl fmt::Display for PageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Header(text)
            | Self::Offsets(text)
            | Self::Shape(text)
            | Self::Dtype(text)
            | Self::Size(text)
            | Self::Place(text)
            | Self::Manifest(text)
            | Self::Positions(text)
            | Self::Rows(text) => f.write_str(text),
            Self::Checksum { declared, computed } => write!(
                f,
                "header declares kvfs.checksum {declared}, the bytes at this place give \
                 {computed}: damaged, or another page's bytes"
            ),
            Self::Newer { found, supported } => write!(
                f,
                "manifest has schema_version {found}, this program reads up to {supported}: \
                 written by a newer kvfs, upgrade to use it"
            ),
        }
    }
}

impl std::error::Error for PageError {}

/// Characters of foreign text that an error line repeats: enough to recognise it.
const QUOTED_CHARS_MAX: usize = 64;

/// Foreign text in quotes for an error line: escaped, so that it stays one line, and cut.
pub(super) fn quoted(text: &str) -> String {
    let mut cut: String = text.chars().take(QUOTED_CHARS_MAX).collect();
    if cut.len() < text.len() {
        cut.push('…');
    }
    format!("{cut:?}")
}

/// A library's message as part of an error line: control characters are escaped, the rest is cut.
pub(super) fn one_line(message: &dyn fmt::Display) -> String {
    const CHARS_MAX: usize = 240;
    printable(message.to_string().chars().take(CHARS_MAX))
}

/// Foreign text such as a name, for people: it cannot fake lines, control a terminal or show its end before its
/// beginning, and two texts that differ are shown differently.
pub fn escaped(characters: impl Iterator<Item = char>) -> String {
    escape(characters, |character| character == '\\' || is_control(character))
}

/// The same of a name as the kernel has it: bytes that are no UTF-8 are shown as `\xff`.
pub fn escaped_bytes(bytes: &[u8]) -> String {
    let mut line = String::new();
    for chunk in bytes.utf8_chunks() {
        line.push_str(&escaped(chunk.valid().chars()));
        line.extend(chunk.invalid().iter().flat_map(|byte| byte.escape_ascii().map(char::from)));
    }
    line
}

/// A line whose foreign parts are escaped already, or should be.
pub fn printable(characters: impl Iterator<Item = char>) -> String {
    escape(characters, is_control)
}

fn escape(characters: impl Iterator<Item = char>, is_escaped: impl Fn(char) -> bool) -> String {
    let mut line = String::new();
    for character in characters {
        if is_escaped(character) {
            line.extend(character.escape_default());
        } else {
            line.push(character);
        }
    }
    line
}

/// Whether a character changes how others are shown: those that control a terminal, end a line, or turn the
/// direction of what follows.
fn is_control(character: char) -> bool {
    character.is_control()
        || matches!(character,
            '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn foreign_text_stays_one_short_line() {
        fn check(input: &str, expected: &str) {
            assert_eq!(quoted(input), expected);
        }
        check("k", "\"k\"");
        check("a\nb\u{1b}[31m", "\"a\\nb\\u{1b}[31m\"");
        check(&"x".repeat(65), &format!("\"{}…\"", "x".repeat(64)));
        assert_eq!(one_line(&"a\nb\u{0}"), "a\\nb\\u{0}");
        assert_eq!(one_line(&"y".repeat(1000)).len(), 240);
    }

    #[test]
    fn names_are_shown_as_what_they_are_and_no_two_alike() {
        fn check(name: &[u8], expected: &str) {
            assert_eq!(escaped_bytes(name), expected);
            // Whoever shows it once more changes nothing.
            assert_eq!(printable(expected.chars()), expected);
        }
        check(b"a b\"'\xc3\xa9", "a b\"'\u{e9}");
        check(b"a\nb\t\x1b[31m\x7f", "a\\nb\\t\\u{1b}[31m\\u{7f}");
        check(b"a\\nb\\", "a\\\\nb\\\\");
        check("\u{fffd}\u{85}".as_bytes(), "\u{fffd}\\u{85}");
        check(b"\xff\xc3", "\\xff\\xc3");
        for turns in ['\u{61c}', '\u{200e}', '\u{200f}', '\u{2028}', '\u{2029}', '\u{2069}'] {
            check(turns.to_string().as_bytes(), &turns.escape_unicode().to_string());
        }
        for turns in ('\u{202a}'..='\u{202e}').chain('\u{2066}'..='\u{2069}') {
            check(turns.to_string().as_bytes(), &turns.escape_unicode().to_string());
        }
    }
}
