//! Finding the parts of a slot file, and of a session, which has the same behind another head.

use std::fs::File;
use std::io::{self, BufReader, Read, Seek, SeekFrom};

use super::caches::RowsCache;
use super::checkpoints::Checkpoints;
use super::format::ToldRotation;
use super::recurrent::Recurrent;
use super::tensor::{Order, Tensor};
use super::{CELL_BYTES, MAGIC, RowsPart, SESSION_MAGIC, Slot, Version};
use crate::Rows;

/// No token (`LLAMA_TOKEN_NULL`): what the server kept of a prompt follows, in a form of its own.
pub(super) const PROMPT: u32 = u32::MAX;
/// Version of that form.
const PROMPT_VERSION: u32 = 1;
/// `LLAMA_MAX_SEQ`
const STREAMS_MAX: u32 = 256;

type IsSession = bool;

/// Why a file is no slot.
pub(super) enum Fault {
    /// The bytes end before its parts do.
    Ends(String),
    Other(String),
}

impl Fault {
    pub(super) fn into_line(self) -> String {
        let (Self::Ends(line) | Self::Other(line)) = self;
        line
    }
}

impl From<String> for Fault {
    fn from(line: String) -> Self {
        Self::Other(line)
    }
}

/// Cells of a sequence.
#[derive(Default)]
struct Cells {
    /// The position of the first.
    first: u32,
    count: u32,
    /// The cell of each position, unless they stand in that order.
    of_positions: Vec<u32>,
}

/// Streams of a cache. A sequence is in one of them.
struct Streams {
    count: u32,
    /// Of the first that has any.
    cells: Cells,
    /// Streams that follow it.
    behind: u32,
}

/// Reads numbers and knows where it is.
pub(super) struct Reader {
    file: BufReader<File>,
    offset: u64,
    length: u64,
}

impl Reader {
    fn bytes<const N: usize>(&mut self) -> Result<[u8; N], Fault> {
        let mut bytes = [0; N];
        self.file.read_exact(&mut bytes).map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => self.ends(),
            _ => Fault::Other(error.to_string()),
        })?;
        self.offset += N as u64;
        Ok(bytes)
    }

    pub(super) fn new(file: File, length: u64) -> Self {
        Self { file: BufReader::new(file), offset: 0, length }
    }

    fn ends(&self) -> Fault {
        Fault::Ends(format!("ends at byte {}", self.length))
    }

    pub(super) fn u32(&mut self) -> Result<u32, Fault> {
        self.bytes().map(u32::from_le_bytes)
    }

    pub(super) fn i32(&mut self) -> Result<i32, Fault> {
        self.bytes().map(i32::from_le_bytes)
    }

    pub(super) fn u64(&mut self) -> Result<u64, Fault> {
        self.bytes().map(u64::from_le_bytes)
    }

    pub(super) fn offset(&self) -> u64 {
        self.offset
    }

    pub(super) fn is_at_end(&self) -> bool {
        self.offset == self.length
    }

    /// Goes behind bytes that are there.
    pub(super) fn skip(&mut self, bytes: u64) -> Result<(), Fault> {
        let end = self.offset.checked_add(bytes).filter(|end| *end <= self.length);
        self.skip_to(end.ok_or_else(|| self.ends())?)
    }

    /// Refuses counts that the file is too short for, before anything is as large as they say.
    fn count(&mut self, what: &str, bytes_each: u64) -> Result<u32, Fault> {
        let count = self.u32()?;
        if u64::from(count) * bytes_each > self.length - self.offset {
            let line = format!("says that it has {count} {what}, and is too short for them");
            return Err(Fault::Ends(line));
        }
        Ok(count)
    }

    /// Adds a tensor as soon as its head is there.
    fn tensor(
        &mut self, cells: u32, is_transposed: bool, to: &mut Vec<Tensor>,
    ) -> Result<(), Fault> {
        let kind = self.i32()?;
        let order = if is_transposed {
            Order::Columns { element_bytes: self.u32()?, elements: self.u32()? }
        } else {
            Order::Rows { bytes: self.u64()? }
        };
        let tensor = Tensor { kind, order, offset: self.offset };
        to.push(tensor);
        let bytes = u64::from(cells).checked_mul(tensor.row_bytes());
        self.skip(bytes.ok_or_else(|| self.ends())?)
    }

    fn skip_to(&mut self, offset: u64) -> Result<(), Fault> {
        self.offset = offset;
        self.file.seek(SeekFrom::Start(offset)).map_err(|error| error.to_string())?;
        Ok(())
    }

    /// What kind of file it is. A session has the state of all of a context.
    fn version(&mut self) -> Result<(Version, IsSession), Fault> {
        let (magic, number) = (self.u32()?, self.u32()?);
        let version = match magic {
            MAGIC => Version::of_number(number).map(|version| (version, false)),
            SESSION_MAGIC => Version::of_session(number).map(|version| (version, true)),
            _ => None,
        };
        let known = || "is no slot file of llama.cpp of version 3 or 4".to_owned();
        Ok(version.ok_or_else(known)?)
    }

    /// The name of the model's architecture.
    fn skip_name(&mut self) -> Result<(), Fault> {
        let length = self.count("bytes of a name", 1)?;
        self.skip_to(self.offset + u64::from(length))
    }

    fn tokens(&mut self) -> Result<Vec<u32>, Fault> {
        let count = self.count("tokens", 4)?;
        let mut words = (0..count).map(|_| self.u32()).collect::<Result<Vec<_>, _>>()?;
        let [PROMPT, rest @ ..] = words.as_slice() else { return Ok(words) };
        let is_text = match rest {
            [PROMPT_VERSION, tokens, words @ .., pictures] => {
                *tokens as usize == words.len() && *pictures == 0
            }
            _ => false,
        };
        if !is_text {
            return Err("has a prompt of more than tokens, or of another kind".to_owned().into());
        }
        words.drain(..3);
        words.pop();
        Ok(words)
    }

    fn streams(&mut self, has_window: bool) -> Result<Streams, Fault> {
        let count = self.u32()?;
        if !(1..=STREAMS_MAX).contains(&count) {
            return Err(format!("says that it has {count} streams").into());
        }
        for behind in (0..count).rev() {
            let cells = self.cells(has_window)?;
            if cells.count > 0 {
                return Ok(Streams { count, cells, behind });
            }
        }
        Ok(Streams { count, cells: Cells::default(), behind: 0 })
    }

    /// Cells that have the positions 0, 1, 2, ..., each once and of one sequence; of a cache with a window those
    /// from some position on.
    fn cells(&mut self, has_window: bool) -> Result<Cells, Fault> {
        let count = self.count("cells", CELL_BYTES)?;
        let refuse = |cell: usize, position: i64| {
            format!(
                "cell {cell} is at position {position}: a sequence with holes or shifts, or with \
                 positions of several dimensions, is no sequence of pages"
            )
        };
        let mut of_sequence = None;
        let mut positions = Vec::new();
        for cell in 0..count as usize {
            let (position, sequences, sequence) = (self.i32()?, self.u32()?, self.i32()?);
            if *of_sequence.get_or_insert(sequence) != sequence {
                return Err("has cells of several sequences".to_owned().into());
            }
            match u32::try_from(position) {
                Ok(found) if sequences == 1 && (has_window || found < count) => {
                    positions.push(found);
                }
                _ => return Err(refuse(cell, position.into()).into()),
            }
        }
        let first = if has_window { positions.iter().min().copied().unwrap_or(0) } else { 0 };
        if positions.iter().map(|position| position - first).eq(0..count) {
            return Ok(Cells { first, count, of_positions: Vec::new() });
        }
        let mut of_positions = vec![u32::MAX; positions.len()];
        for (cell, position) in (0..count).zip(positions) {
            match of_positions.get_mut((position - first) as usize) {
                Some(place) if *place == u32::MAX => *place = cell,
                _ => return Err(refuse(cell as usize, position.into()).into()),
            }
        }
        Ok(Cells { first, count, of_positions })
    }
}

impl RowsPart {
    /// Reads a cache that has rows, and notes it part by part.
    fn read(
        &mut self, reader: &mut Reader, cache: &RowsCache, version: Version,
    ) -> Result<(), Fault> {
        let Streams { count, cells, behind } = reader.streams(cache.window.is_some())?;
        self.streams = count;
        if cells.count == 0 {
            return Ok(());
        }
        (self.first, self.cells, self.cells_of_positions) =
            (cells.first, cells.count, cells.of_positions);
        let (is_transposed, layers) = (reader.u32()?, reader.u32()?);
        if is_transposed > 1 {
            return Err("has V in another order than those that are known".to_owned().into());
        }
        let expected = cache.layers.len();
        if layers as usize != expected {
            let which = if cache.window.is_some() { " with a window" } else { "" };
            return Err(format!("has {layers} layers{which}, the manifest {expected}").into());
        }
        self.rotation = Some(match version {
            Version::Three => ToldRotation::Untold,
            Version::Four => ToldRotation::Elements([reader.u32()?, reader.u32()?]),
        });
        let cells = cells.count;
        (0..layers).try_for_each(|_| reader.tensor(cells, false, &mut self.k))?;
        (0..layers).try_for_each(|_| reader.tensor(cells, is_transposed != 0, &mut self.v))?;
        for _ in 0..behind {
            if reader.u32()? != 0 {
                return Err("has cells in several streams, not one sequence".to_owned().into());
            }
        }
        Ok(())
    }
}

impl Slot {
    /// Reads what stands before and between rows, and notes it part by part.
    pub(super) fn read(&mut self, reader: &mut Reader) -> Result<(), Fault> {
        let (version, is_session) = reader.version()?;
        self.version = Some(version);
        self.tokens = reader.tokens()?;
        self.is_session = is_session;
        if is_session {
            if !self.caches.is_plain() {
                return Err("is a session of a model with a window or with states: save a slot"
                    .to_owned()
                    .into());
            }
            reader.skip_name()?;
        }
        for cache in &self.caches.rows {
            let mut part = RowsPart::default();
            let outcome = part.read(reader, cache, version);
            // What was found of it is looked at, whatever follows.
            self.parts.push(part);
            outcome?;
        }
        self.check_window()?;
        if !self.caches.states.is_empty() {
            let found = Recurrent::read_cell(reader)?;
            let seen = found.tokens;
            if let [rows, ..] = &self.parts[..]
                && rows.cells != seen
            {
                let rows = rows.cells;
                return Err(format!("has rows of {rows} tokens, and states after {seen}").into());
            }
            let layers = self.caches.states.len();
            self.states.insert(found).read_tensors(reader, layers)?;
        }
        if version == Version::Four && !self.caches.is_plain() {
            self.checkpoints = Checkpoints::read(reader, self.num_tokens())?;
        }
        if !reader.is_at_end() {
            return Err("has more than the caches of the manifest's layers".to_owned().into());
        }
        Ok(())
    }

    /// What a cache with a window has must be what the window of the last token covers.
    fn check_window(&self) -> Result<(), Fault> {
        let ([whole, windowed], Some(cache)) = (&self.parts[..], self.caches.rows.get(1)) else {
            return Ok(());
        };
        let (tokens, first) = (whole.cells, cache.first(whole.cells));
        let end = u64::from(windowed.first) + u64::from(windowed.cells);
        if windowed.first != first && tokens > 0 || end != u64::from(tokens) {
            let found = windowed.first;
            return Err(format!(
                "has rows of positions {found} to {end} of layers with a window, and by the \
                 manifest they are {first} to {tokens}"
            )
            .into());
        }
        Ok(())
    }
}
