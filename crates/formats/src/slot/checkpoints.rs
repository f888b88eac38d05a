//! Checkpoints of a server behind the state of a slot.
//!
//! A window and a state are those of the last token alone, so the server keeps some of earlier ones to go back to, and
//! writes them behind the slots of such models. Servers before that write nothing there, and read what they know. As the
//! server of the `xllamacpp` wheel 2026.10.11549 writes them (llama.cpp's pull request 26004 describes it):
//!
//! ```text
//! "SCKP", u32 version (1), u32 checkpoints
//! per checkpoint: i64 tokens, i32 first and i32 last position,
//!                 three times: u64 bytes, the bytes (states of the model and of what drafts for it)
//! ```
//!
//! What is in such a state only the engine knows: it is kept as it is.

use super::read::{Fault, Reader};

/// "SCKP" as a number.
const MAGIC: u32 = 0x504b_4353;
const VERSION: u32 = 1;
/// The server reads no more.
const COUNT_MAX: u32 = 1024;
const STATES: usize = 3;

/// Where they are in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Checkpoints {
    pub(super) offset: u64,
    pub(super) bytes: u64,
}

impl Checkpoints {
    /// Those of a slot with so many tokens; nothing at the end of the file.
    pub(super) fn read(reader: &mut Reader, tokens: u32) -> Result<Option<Self>, Fault> {
        if reader.is_at_end() {
            return Ok(None);
        }
        let offset = reader.offset();
        if reader.u32()? != MAGIC {
            return Err("has more than the caches of the manifest's layers".to_owned().into());
        }
        let (version, count) = (reader.u32()?, reader.u32()?);
        if version != VERSION || count > COUNT_MAX {
            return Err(format!("has {count} checkpoints in the form {version}: 1 is known").into());
        }
        for _ in 0..count {
            let after = reader.u64()?.cast_signed();
            let _positions = (reader.i32()?, reader.i32()?);
            if !(0..=i64::from(tokens)).contains(&after) {
                let line = format!("has a checkpoint after {after} tokens, and rows of {tokens}");
                return Err(line.into());
            }
            for _ in 0..STATES {
                let bytes = reader.u64()?;
                reader.skip(bytes)?;
            }
        }
        Ok(Some(Self { offset, bytes: reader.offset() - offset }))
    }
}

/// Compares checkpoints that were kept with a slot of so many tokens.
///
/// # Errors
/// What is wrong with them.
pub fn check_checkpoints(file: std::fs::File, tokens: u32) -> Result<(), String> {
    let length = file.metadata().map_err(|error| error.to_string())?.len();
    let mut reader = Reader::new(file, length);
    let found = Checkpoints::read(&mut reader, tokens).map_err(Fault::into_line)?;
    let is_whole = found.is_some_and(|found| found.bytes == length);
    if is_whole { Ok(()) } else { Err("are no checkpoints of a server".to_owned()) }
}
