//! The names that mean something in a model directory.
//!
//! Names are bytes, as the kernel hands them over, and each number has exactly one spelling:
//! `0001024.safetensors` is a page, `1024.safetensors` and `00001024.safetensors` are ordinary
//! files. Otherwise one page could have two names.

use super::{Layer, PrefixHash, TokenStart};

/// The file that gives a cache its identity.
pub const MANIFEST: &str = "manifest.json";
/// The token ids of a sequence, u32 little endian.
pub const TOKENS: &str = "tokens";
/// Where the rows of a sequence stand, if not where they were written.
pub const POSITIONS: &str = "positions.json";
/// The directory of sequences.
pub const SEQUENCES: &str = "sequences";
/// The directory that answers lookups by prefix hash.
pub const PREFIXES: &str = "prefixes";
/// The directory where engines tell of blocks in files that they lay out themselves.
pub const BLOCKS: &str = "blocks";
/// The directory of engine slot files synthesised from pages.
pub const SLOTS: &str = "slots";
/// What a slot of version 3 is called, behind the name of the sequence.
pub const SLOT_SUFFIX: &str = ".bin";
/// The same of version 4.
pub const SLOT_4_SUFFIX: &str = ".bin4";
/// The same two with references in the place of pages.
pub const REFERENCES_SUFFIX: &str = ".ref";
/// Of version 4.
pub const REFERENCES_4_SUFFIX: &str = ".ref4";

/// Ends the name of what an operation makes or removes beside a sequence; no sequence is called so.
pub const WORK_SUFFIX: &str = "~";
/// The same of what a slot that is saved becomes. Operations take what is called `NAME~` for a rest of a crash, and
/// never come to this name: it would be that of a sequence `NAME~`.
pub const SAVING_SUFFIX: &str = "~~";

const PAGE_SUFFIX: &str = ".safetensors";
const TAIL_SUFFIX: &str = ".tail";
const STATE_PREFIX: &str = "state-";
const WINDOW_PREFIX: &str = "window-";
const CHECKPOINTS_PREFIX: &str = "checkpoints-";
const CHECKPOINTS_SUFFIX: &str = ".llama";
const ROWS_SUFFIX: &str = ".rows";
const STAGING_SUFFIX: &[u8] = b".tmp";

/// `ab/HASH/007.safetensors` below [`PREFIXES`].
pub fn format_page_of_prefix(prefix: PrefixHash, layer: Layer) -> String {
    let hash = prefix.to_string();
    format!("{}/{hash}/{}{PAGE_SUFFIX}", &hash[..2], format_layer(layer))
}

/// 1000 layers sort as text.
const LAYER_DIGITS: usize = 3;
/// 10 million tokens sort as text.
const TOKEN_DIGITS: usize = 7;

/// What a name in a layer directory means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LayerEntry {
    /// A sealed page.
    Page(TokenStart),
    /// The open, append-only rest of the layer.
    Tail(TokenStart),
    /// A snapshot of a recurrent layer after that many tokens.
    State(TokenStart),
    /// An ordinary file until it is renamed.
    Staging,
    /// An ordinary file.
    Other,
}

/// What `name` means in a layer directory.
pub fn layer_entry(name: &[u8]) -> LayerEntry {
    if is_staging(name) {
        LayerEntry::Staging
    } else if let Some(start) = parse_page(name) {
        LayerEntry::Page(start)
    } else if let Some(start) = parse_tail(name) {
        LayerEntry::Tail(start)
    } else if let Some(tokens) = parse_state(name) {
        LayerEntry::State(tokens)
    } else {
        LayerEntry::Other
    }
}

/// Whether `name` is staging: an ordinary file or directory until it is renamed.
pub fn is_staging(name: &[u8]) -> bool {
    name.starts_with(b".") || name.ends_with(STAGING_SUFFIX)
}

/// Whether `name` is one of something that is not complete, or goes: staging, or a directory that an operation works on.
pub fn is_unfinished(name: &[u8]) -> bool {
    is_staging(name) || name.ends_with(WORK_SUFFIX.as_bytes())
}

/// The layer of a directory name such as `007`.
pub fn parse_layer(name: &[u8]) -> Option<Layer> {
    let number = parse_number(name, LAYER_DIGITS)?;
    u32::try_from(number).ok().map(Layer)
}

/// The directory name of a layer: `007`.
pub fn format_layer(layer: Layer) -> String {
    format!("{:0LAYER_DIGITS$}", layer.0)
}

/// The first token of a page name such as `0001024.safetensors`.
pub fn parse_page(name: &[u8]) -> Option<TokenStart> {
    let digits = name.strip_suffix(PAGE_SUFFIX.as_bytes())?;
    parse_number(digits, TOKEN_DIGITS).map(TokenStart)
}

/// The file name of a page: `0001024.safetensors`.
pub fn format_page(start: TokenStart) -> String {
    format!("{:0TOKEN_DIGITS$}{PAGE_SUFFIX}", start.0)
}

/// The first token of a tail name such as `0002048.tail`.
pub fn parse_tail(name: &[u8]) -> Option<TokenStart> {
    let digits = name.strip_suffix(TAIL_SUFFIX.as_bytes())?;
    parse_number(digits, TOKEN_DIGITS).map(TokenStart)
}

/// The file name of a tail: `0002048.tail`.
pub fn format_tail(start: TokenStart) -> String {
    format!("{:0TOKEN_DIGITS$}{TAIL_SUFFIX}", start.0)
}

/// The tokens seen by a recurrent snapshot such as `state-0004096.safetensors`.
pub fn parse_state(name: &[u8]) -> Option<TokenStart> {
    let rest = name.strip_prefix(STATE_PREFIX.as_bytes())?;
    let digits = rest.strip_suffix(PAGE_SUFFIX.as_bytes())?;
    parse_number(digits, TOKEN_DIGITS).map(TokenStart)
}

/// The file name of a recurrent snapshot: `state-0004096.safetensors`.
pub fn format_state(tokens: TokenStart) -> String {
    format!("{STATE_PREFIX}{:0TOKEN_DIGITS$}{PAGE_SUFFIX}", tokens.0)
}

/// The file name of the rows of a layer with a window that begin at a token and fill no page, since the window has
/// passed those before them: `window-0000173.rows`. An ordinary file: rows as in a tail, up to the end of their page or
/// of the sequence.
pub fn format_window_rows(first: TokenStart) -> String {
    format!("{WINDOW_PREFIX}{:0TOKEN_DIGITS$}{ROWS_SUFFIX}", first.0)
}

/// The first token of such a name.
pub fn parse_window_rows(name: &[u8]) -> Option<TokenStart> {
    let rest = name.strip_prefix(WINDOW_PREFIX.as_bytes())?;
    let digits = rest.strip_suffix(ROWS_SUFFIX.as_bytes())?;
    parse_number(digits, TOKEN_DIGITS).map(TokenStart)
}

/// The file, in a sequence's directory, of what an engine keeps to go back from a row to earlier ones:
/// `checkpoints-0000307.llama`. An ordinary file.
pub fn format_checkpoints(tokens: TokenStart) -> String {
    format!("{CHECKPOINTS_PREFIX}{:0TOKEN_DIGITS$}{CHECKPOINTS_SUFFIX}", tokens.0)
}

/// The number of tokens of such a name.
pub fn parse_checkpoints(name: &[u8]) -> Option<TokenStart> {
    let rest = name.strip_prefix(CHECKPOINTS_PREFIX.as_bytes())?;
    let digits = rest.strip_suffix(CHECKPOINTS_SUFFIX.as_bytes())?;
    parse_number(digits, TOKEN_DIGITS).map(TokenStart)
}

/// A number of at least `width` decimal digits, with leading zeros only up to that width.
fn parse_number(digits: &[u8], width: usize) -> Option<u64> {
    let padded = digits.len() > width && digits.starts_with(b"0");
    if digits.len() < width || padded {
        return None;
    }
    digits.iter().try_fold(0u64, |number, digit| {
        let value = digit.is_ascii_digit().then(|| u64::from(digit - b'0'))?;
        number.checked_mul(10)?.checked_add(value)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn layers() {
        fn check(name: &[u8], expected: Option<u32>) {
            assert_eq!(parse_layer(name).map(|layer| layer.0), expected, "{name:?}");
            if let Some(layer) = parse_layer(name) {
                assert_eq!(format_layer(layer).as_bytes(), name);
            }
        }
        check(b"000", Some(0));
        check(b"007", Some(7));
        check(b"999", Some(999));
        check(b"1000", Some(1000));
        check(b"4294967295", Some(u32::MAX));
        check(b"4294967296", None);
        check(b"0007", None);
        check(b"0000", None);
        check(b"07", None);
        check(b"7", None);
        check(b"", None);
        check(b"+07", None);
        check(b"-01", None);
        check(b" 07", None);
        check(b"007\n", None);
        check(b"00\0", None);
        check("٠٠٧".as_bytes(), None);
        check(b"\xff\xfe\xfd", None);
    }

    #[test]
    fn layer_entries() {
        fn check(name: &[u8], expected: LayerEntry) {
            assert_eq!(layer_entry(name), expected, "{name:?}");
        }
        use LayerEntry::{Other, Page, Staging, State, Tail};
        check(b"0000000.safetensors", Page(TokenStart(0)));
        check(b"0001024.safetensors", Page(TokenStart(1024)));
        check(b"10000000.safetensors", Page(TokenStart(10_000_000)));
        check(b"18446744073709551615.safetensors", Page(TokenStart(u64::MAX)));
        check(b"18446744073709551616.safetensors", Other);
        check(b"00001024.safetensors", Other);
        check(b"1024.safetensors", Other);
        check(b"0001024.SAFETENSORS", Other);
        check(b"0001024.safetensors ", Other);
        check(b"0001024safetensors", Other);
        check(b"0001024", Other);
        check(b".safetensors", Staging);
        check(b"safetensors", Other);
        check(b"0001 24.safetensors", Other);
        check(b"0002048.tail", Tail(TokenStart(2048)));
        check(b"02048.tail", Other);
        check(b"00002048.tail", Other);
        check(b"0002048.tail.safetensors", Other);
        check(b"state-0004096.safetensors", State(TokenStart(4096)));
        check(b"state-4096.safetensors", Other);
        check(b"window-0000173.rows", Other);
        check(b"state-.safetensors", Other);
        check(b"0001024.safetensors.tmp", Staging);
        check(b".0001024.safetensors", Staging);
        check(b".~tmp~", Staging);
        check(b".", Staging);
        check(b".tmp", Staging);
        check(b"tmp", Other);
        check(b"a.tmp.b", Other);
        check(b"a.TMP", Other);
        check(b"", Other);
        check(b"\xff", Other);
        check(b"\xff.tmp", Staging);
    }

    proptest! {
        #[test]
        fn formatted_names_parse(start in any::<u64>(), layer in any::<u32>()) {
            let start = TokenStart(start);
            prop_assert_eq!(layer_entry(format_page(start).as_bytes()), LayerEntry::Page(start));
            prop_assert_eq!(layer_entry(format_tail(start).as_bytes()), LayerEntry::Tail(start));
            prop_assert_eq!(layer_entry(format_state(start).as_bytes()), LayerEntry::State(start));
            prop_assert_eq!(parse_window_rows(format_window_rows(start).as_bytes()), Some(start));
            prop_assert_eq!(parse_checkpoints(format_checkpoints(start).as_bytes()), Some(start));
            prop_assert_eq!(parse_layer(format_layer(Layer(layer)).as_bytes()), Some(Layer(layer)));
        }

        #[test]
        fn a_number_has_one_name(digits in "[0-9]{0,22}", suffix in "\\.safetensors|\\.tail|") {
            let name = format!("{digits}{suffix}");
            match layer_entry(name.as_bytes()) {
                LayerEntry::Page(start) => prop_assert_eq!(format_page(start), name),
                LayerEntry::Tail(start) => prop_assert_eq!(format_tail(start), name),
                _ => {}
            }
        }
    }
}
