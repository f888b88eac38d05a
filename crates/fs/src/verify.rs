//! How often the bytes of a file are compared with their checksum when it is opened. What comes back
//! from an encoded copy or from the remote is compared in any case, and so is what a change in place
//! makes the only copy.

use super::FileSystem;

/// When an open reads the whole file and compares it with its checksum.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Verify {
    /// The first time after the mount, and again whenever the store's file is another one.
    #[default]
    First,
    /// Each time.
    Always,
    /// Not at all: only the length is compared.
    Never,
}

impl std::str::FromStr for Verify {
    type Err = String;

    fn from_str(text: &str) -> Result<Verify, String> {
        match text {
            "first" => Ok(Verify::First),
            "always" => Ok(Verify::Always),
            "never" => Ok(Verify::Never),
            _ => Err(format!("{text:?} is neither first, always nor never")),
        }
    }
}

impl std::fmt::Display for Verify {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(match self {
            Verify::First => "first",
            Verify::Always => "always",
            Verify::Never => "never",
        })
    }
}

/// What is compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Depth {
    /// Length and checksum.
    Bytes,
    /// The length alone.
    Length,
}

impl FileSystem {
    /// What an open compares.
    pub(super) fn depth_at_open(&self) -> Depth {
        if self.choices.verify() == Verify::Never { Depth::Length } else { Depth::Bytes }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_words() {
        fn check(text: &str, expected: Option<Verify>) {
            assert_eq!(text.parse().ok(), expected, "{text}");
            assert!(expected.is_none_or(|verify| verify.to_string() == text));
        }
        check("first", Some(Verify::First));
        check("always", Some(Verify::Always));
        check("never", Some(Verify::Never));
        check("sometimes", None);
        check("", None);
    }
}
