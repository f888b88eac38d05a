//! An answer is read from the descriptor that its question was written to: from 0 on, or from where the last write
//! ended, as by a program that writes and then reads on.
//!
//! A descriptor has one position for both, so the next question begins behind the answer that was read, and its
//! length says nothing about where it ends.

use serde::{Deserialize, Serialize};

use super::transfer::copy_text;

/// The answer to what was written to a descriptor, once it was asked for.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Reply {
    /// Where the last write ended, as the descriptor counts.
    end: u64,
    given: Option<Given>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Given {
    text: Vec<u8>,
    /// Where it begins.
    offset: u64,
}

impl Reply {
    /// Takes the answer back, since there is more to answer now. Returns whether there was one.
    pub(crate) fn withdraw(&mut self) -> bool {
        self.given.take().is_some()
    }

    /// Bytes of a question were written, so many from `offset` on.
    pub(crate) fn note_question(&mut self, offset: u64, length: usize) {
        self.end = offset.saturating_add(length as u64);
    }

    pub(crate) fn is_given(&self) -> bool {
        self.given.is_some()
    }

    /// Answers somebody who reads from `offset` on.
    pub(crate) fn give(&mut self, text: String, offset: u64) {
        let offset = if offset == self.end { offset } else { 0 };
        self.given = Some(Given { text: text.into_bytes(), offset });
    }

    /// Copies what lies at `offset`, as the descriptor counts. Returns how much.
    pub(crate) fn copy(&self, offset: u64, buffer: &mut [u8]) -> usize {
        let Some(Given { text, offset: start }) = &self.given else { return 0 };
        copy_text(text, offset.saturating_sub(*start), buffer)
    }
}
