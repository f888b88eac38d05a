//! Words that nobody can guess.

use std::fs::File;
use std::io::{self, Read};

/// 128 random bits, as hexadecimal digits.
pub(super) struct Token(String);

impl std::fmt::Debug for Token {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("Token")
    }
}

impl Token {
    pub(super) fn new() -> io::Result<Token> {
        let mut bytes = [0; 16];
        File::open("/dev/urandom")?.read_exact(&mut bytes)?;
        Ok(Token(format!("{:032x}", u128::from_be_bytes(bytes))))
    }

    pub(super) fn text(&self) -> &str {
        &self.0
    }

    /// Whether somebody knows it. How long the answer takes does not tell how much of it is right.
    pub(super) fn is(&self, given: &[u8]) -> bool {
        let differing = self.0.bytes().zip(given).fold(0, |all, (own, given)| all | own ^ given);
        given.len() == self.0.len() && std::hint::black_box(differing) == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_all_of_it_is_it() {
        let (token, other) = (Token::new().unwrap(), Token::new().unwrap());
        assert_eq!(token.text().len(), 32);
        assert!(token.is(token.text().as_bytes()));
        assert!(!format!("{token:?}").contains(token.text()));
        for wrong in ["", "0", other.text(), &token.text()[1..], &format!("{}0", token.text())] {
            assert!(!token.is(wrong.as_bytes()), "{wrong}");
        }
    }
}
