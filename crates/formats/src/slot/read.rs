//! Finding the parts of a slot file, and of a session, which has the same behind another head.

use std::fs::File;
use std::io::{self, BufReader, Read, Seek, SeekFrom};

use super::format::ToldRotation;
use super::tensor::{Order, Tensor};
use super::{CELL_BYTES, MAGIC, SESSION_MAGIC, Slot, Version};

/// No token (`LLAMA_TOKEN_NULL`): what the server kept of a prompt follows, in a form of its own.
pub(super) const PROMPT: u32 = u32::MAX;
/// Version of that form.
const PROMPT_VERSION: u32 = 1;
/// `LLAMA_MAX_SEQ`
const STREAMS_MAX: u32 = 256;
/// No model has more layers; what says so is no slot file.
const LAYERS_MAX: u32 = 1 << 16;

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

    fn u32(&mut self) -> Result<u32, Fault> {
        self.bytes().map(u32::from_le_bytes)
    }

    fn i32(&mut self) -> Result<i32, Fault> {
        self.bytes().map(i32::from_le_bytes)
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
            Order::Rows { bytes: self.bytes().map(u64::from_le_bytes)? }
        };
        let tensor = Tensor { kind, order, offset: self.offset };
        to.push(tensor);
        let bytes = u64::from(cells).checked_mul(tensor.row_bytes());
        let end = bytes.and_then(|bytes| tensor.offset.checked_add(bytes));
        let end = end.filter(|end| *end <= self.length);
        self.skip_to(end.ok_or_else(|| self.ends())?)
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

    fn streams(&mut self) -> Result<Streams, Fault> {
        let count = self.u32()?;
        if !(1..=STREAMS_MAX).contains(&count) {
            return Err(format!("says that it has {count} streams").into());
        }
        for behind in (0..count).rev() {
            let cells = self.cells()?;
            if cells.count > 0 {
                return Ok(Streams { count, cells, behind });
            }
        }
        Ok(Streams { count, cells: Cells::default(), behind: 0 })
    }

    /// Cells that have the positions 0, 1, 2, ..., each once and of one sequence.
    fn cells(&mut self) -> Result<Cells, Fault> {
        let count = self.count("cells", CELL_BYTES)?;
        let refuse = |cell: usize, position: i64| {
            format!(
                "cell {cell} is at position {position}: a sequence with holes or shifts, or with \
                 positions of several dimensions, is no sequence of pages"
            )
        };
        let mut first = None;
        let mut positions = Vec::new();
        for cell in 0..count as usize {
            let (position, sequences, sequence) = (self.i32()?, self.u32()?, self.i32()?);
            if *first.get_or_insert(sequence) != sequence {
                return Err("has cells of several sequences".to_owned().into());
            }
            match u32::try_from(position) {
                Ok(position) if position < count && sequences == 1 => positions.push(position),
                _ => return Err(refuse(cell, position.into()).into()),
            }
        }
        if positions.iter().copied().eq(0..count) {
            return Ok(Cells { count, of_positions: Vec::new() });
        }
        let mut of_positions = vec![u32::MAX; positions.len()];
        for (cell, position) in (0..count).zip(positions) {
            let place = &mut of_positions[position as usize];
            if *place != u32::MAX {
                return Err(refuse(cell as usize, position.into()).into());
            }
            *place = cell;
        }
        Ok(Cells { count, of_positions })
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
            reader.skip_name()?;
        }
        let Streams { count, cells: Cells { count: cells, of_positions }, behind } =
            reader.streams()?;
        self.streams = count;
        if cells == 0 {
            return Ok(());
        }
        (self.cells, self.cells_of_positions) = (cells, of_positions);
        let (is_transposed, layers) = (reader.u32()?, reader.u32()?);
        if is_transposed > 1 {
            return Err("has V in another order than those that are known".to_owned().into());
        }
        if layers > LAYERS_MAX {
            return Err(format!("says that it has {layers} layers").into());
        }
        self.layers = Some(layers);
        self.rotation = Some(match version {
            Version::Three => ToldRotation::Untold,
            Version::Four => ToldRotation::Elements([reader.u32()?, reader.u32()?]),
        });
        (0..layers).try_for_each(|_| reader.tensor(cells, false, &mut self.k))?;
        (0..layers).try_for_each(|_| reader.tensor(cells, is_transposed != 0, &mut self.v))?;
        for _ in 0..behind {
            if reader.u32()? != 0 {
                return Err("has cells in several streams, not one sequence".to_owned().into());
            }
        }
        if reader.offset != reader.length {
            return Err("has more than the cache of one kind of layer".to_owned().into());
        }
        Ok(())
    }
}
