//! Questions about many names of one directory, as they are written to `.kvfs/batch`, and their answers.
//!
//! One write and one read take the place of a system call for each name. All numbers are little endian.
//!
//! ```text
//! question: kind u32, names u32, bytes u32, id u32; the directory and a NUL; each name and a NUL
//! answer:   id u32, names u32, bytes u64; for each name status u32, 0 u32, size u64; contents, one after the other
//! ```
//!
//! A question says how long it is, so nobody takes half of one, or two in a row, for one. `id` is whatever who asks
//! chooses, and comes back: two who share a descriptor see whose answer they have. A NUL ends a name, since a newline
//! may be in one. Records have one size, so that C reads them as an array of structures.

use std::fmt;

/// Bytes before the directory of a question.
pub const QUESTION_HEAD_BYTES: usize = 16;
/// Bytes before the records of an answer.
pub const ANSWER_HEAD_BYTES: usize = 16;
/// Bytes of the record of a name.
pub const RECORD_BYTES: usize = 16;
/// Longest question, its head included. The names of a question take 64 bytes each on average.
pub const QUESTION_BYTES_MAX: usize = 4 << 20;
/// Most names of a question.
pub const NAMES_MAX: usize = 1 << 16;
/// Largest file whose bytes are in an answer. Of a larger one the bytes take longer than opening it: who does that has them
/// from the kernel, and here the daemon copies them twice (measured: 256 KiB took as long either way).
pub const FILE_BYTES_MAX: u64 = 256 << 10;
/// Most bytes of files in an answer.
pub const CONTENT_BYTES_MAX: u64 = 8 << 20;
/// Longest name of a file.
const NAME_BYTES_MAX: usize = 255;
/// Longest directory, as of any path.
const DIRECTORY_BYTES_MAX: usize = 4095;

/// What is asked about each name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Ask {
    /// Whether it is there, and how large.
    Have,
    /// Its bytes.
    Get,
}

/// What an answer says of a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Status {
    /// Nothing has this name.
    Absent = 0,
    /// A file has it; if its bytes were asked for they are in the answer.
    Here = 1,
    /// The file is larger than what an answer has: open it.
    Large = 2,
    /// Its bytes are only encoded, or in the remote: open it.
    Away = 3,
    /// Its bytes are not what was written: open it, which mends or reports it.
    Damaged = 4,
    /// It takes an ordinary system call to tell: no file, one that is being written, rights that depend on a group.
    Other = 5,
    /// The file may not be read by who asks.
    Denied = 6,
    /// There was no room or no time left: ask again.
    Again = 7,
}

const STATUSES: [Status; 8] = [
    Status::Absent,
    Status::Here,
    Status::Large,
    Status::Away,
    Status::Damaged,
    Status::Other,
    Status::Denied,
    Status::Again,
];

/// A question.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Question<'a> {
    /// What is asked.
    pub ask: Ask,
    /// Comes back in the answer.
    pub id: u32,
    /// From the mountpoint: in `files` or `models`.
    pub directory: &'a [u8],
    /// What is asked about.
    pub names: Vec<&'a [u8]>,
}

/// What is said of a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// Whether it is there.
    pub status: Status,
    /// Bytes of the file, where they are known.
    pub size: u64,
}

/// How an answer begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AnswerHead {
    /// Of the question.
    pub id: u32,
    /// As many as in the question, and as many records.
    pub names: u32,
    /// Of all contents behind the records.
    pub bytes: u64,
}

/// Why bytes are no question.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QuestionError {
    /// It is longer than a question may be, or has more names.
    TooLarge,
    /// Anything else; the text says what.
    Invalid(&'static str),
}

impl fmt::Display for QuestionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooLarge => {
                write!(f, "a question has {QUESTION_BYTES_MAX} bytes and {NAMES_MAX} names at most")
            }
            Self::Invalid(why) => f.write_str(why),
        }
    }
}

impl std::error::Error for QuestionError {}

fn number(bytes: &[u8], at: usize) -> Option<u32> {
    let bytes = bytes.get(at..at.checked_add(4)?)?;
    Some(u32::from_le_bytes(bytes.try_into().ok()?))
}

fn long_number(bytes: &[u8], at: usize) -> Option<u64> {
    let bytes = bytes.get(at..at.checked_add(8)?)?;
    Some(u64::from_le_bytes(bytes.try_into().ok()?))
}

/// How long a question is, by its first bytes. `None` while too few of them are there to tell.
///
/// # Errors
/// A question that is too long, or of a kind that nobody knows.
pub fn question_bytes(bytes: &[u8]) -> Result<Option<usize>, QuestionError> {
    let numbers = (number(bytes, 0), number(bytes, 4), number(bytes, 8));
    let (Some(kind), Some(names), Some(length)) = numbers else { return Ok(None) };
    if !(1..=2).contains(&kind) {
        return Err(QuestionError::Invalid("its kind is neither 1 (have) nor 2 (get)"));
    }
    let whole =
        usize::try_from(length).ok().and_then(|length| length.checked_add(QUESTION_HEAD_BYTES));
    match whole {
        Some(whole) if whole <= QUESTION_BYTES_MAX && names as usize <= NAMES_MAX => {
            Ok(Some(whole))
        }
        _ => Err(QuestionError::TooLarge),
    }
}

impl<'a> Question<'a> {
    /// Reads a whole question.
    ///
    /// # Errors
    /// Bytes that are none.
    pub fn parse(bytes: &'a [u8]) -> Result<Question<'a>, QuestionError> {
        let whole = question_bytes(bytes)?;
        if whole != Some(bytes.len()) {
            return Err(QuestionError::Invalid("it is not as long as it says"));
        }
        let invalid = QuestionError::Invalid;
        let ask = if number(bytes, 0) == Some(1) { Ask::Have } else { Ask::Get };
        let count = number(bytes, 4).ok_or(invalid("it has no number of names"))? as usize;
        let id = number(bytes, 12).ok_or(invalid("it has no id"))?;
        let body = bytes.get(QUESTION_HEAD_BYTES..).unwrap_or_default();
        let body =
            body.strip_suffix(b"\0").ok_or(invalid("its last name does not end with a NUL"))?;
        let mut parts = body.split(|byte| *byte == 0);
        let directory = parts.next().unwrap_or_default();
        check_directory(directory)?;
        let mut names = Vec::with_capacity(count.min(body.len()));
        for name in parts {
            if names.len() == count {
                return Err(invalid("it has more names than it says"));
            }
            check_name(name)?;
            names.push(name);
        }
        if names.len() < count {
            return Err(invalid("it has fewer names than it says"));
        }
        Ok(Question { ask, id, directory, names })
    }

    /// Writes a question; `None` if nobody would take it.
    #[must_use]
    pub fn to_bytes(&self) -> Option<Vec<u8>> {
        let body = self.names.iter().map(|name| name.len() + 1).sum::<usize>();
        let body = body + self.directory.len() + 1;
        let fits =
            body + QUESTION_HEAD_BYTES <= QUESTION_BYTES_MAX && self.names.len() <= NAMES_MAX;
        if !fits || check_directory(self.directory).is_err() {
            return None;
        }
        let kind = if self.ask == Ask::Have { 1 } else { 2 };
        let mut bytes = Vec::with_capacity(QUESTION_HEAD_BYTES + body);
        for number in
            [kind, u32::try_from(self.names.len()).ok()?, u32::try_from(body).ok()?, self.id]
        {
            bytes.extend_from_slice(&number.to_le_bytes());
        }
        for part in std::iter::once(&self.directory).chain(&self.names) {
            bytes.extend_from_slice(part);
            bytes.push(0);
        }
        self.names.iter().all(|name| check_name(name).is_ok()).then_some(bytes)
    }
}

/// Below `files` or `models`, and nowhere else: what is virtual has no directory that could be asked about.
fn check_directory(path: &[u8]) -> Result<(), QuestionError> {
    let invalid = QuestionError::Invalid;
    if path.len() > DIRECTORY_BYTES_MAX {
        return Err(invalid("its directory is too long for a path"));
    }
    let mut parts = path.split(|byte| *byte == b'/');
    if !matches!(parts.next(), Some(b"files" | b"models")) {
        return Err(invalid("its directory is neither in files nor in models"));
    }
    parts.try_for_each(check_name)
}

/// A name stands in its directory, and leads nowhere else.
fn check_name(name: &[u8]) -> Result<(), QuestionError> {
    let is_name = !name.is_empty()
        && name.len() <= NAME_BYTES_MAX
        && name != b"."
        && name != b".."
        && !name.contains(&b'/')
        && !name.contains(&0);
    if is_name { Ok(()) } else { Err(QuestionError::Invalid("a name in it is no name of a file")) }
}

impl Record {
    /// Writes it.
    #[must_use]
    pub fn to_bytes(self) -> [u8; RECORD_BYTES] {
        let mut bytes = [0; RECORD_BYTES];
        bytes[..4].copy_from_slice(&(self.status as u32).to_le_bytes());
        bytes[8..].copy_from_slice(&self.size.to_le_bytes());
        bytes
    }

    /// Reads one. What a newer mount says that is not known here takes a system call.
    #[must_use]
    pub fn parse(bytes: &[u8]) -> Option<Record> {
        let (status, size) = (number(bytes, 0)?, long_number(bytes, 8)?);
        let status = STATUSES.iter().find(|known| **known as u32 == status);
        Some(Record { status: status.copied().unwrap_or(Status::Other), size })
    }
}

impl AnswerHead {
    /// Writes it.
    #[must_use]
    pub fn to_bytes(self) -> [u8; ANSWER_HEAD_BYTES] {
        let mut bytes = [0; ANSWER_HEAD_BYTES];
        bytes[..4].copy_from_slice(&self.id.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.names.to_le_bytes());
        bytes[8..].copy_from_slice(&self.bytes.to_le_bytes());
        bytes
    }

    /// Reads one.
    #[must_use]
    pub fn parse(bytes: &[u8]) -> Option<AnswerHead> {
        let (id, names) = (number(bytes, 0)?, number(bytes, 4)?);
        Some(AnswerHead { id, names, bytes: long_number(bytes, 8)? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(directory: &[u8], names: &[&[u8]]) -> Vec<u8> {
        let mut body = directory.to_vec();
        body.push(0);
        for name in names {
            body.extend_from_slice(name);
            body.push(0);
        }
        let head = [1, u32::try_from(names.len()).unwrap(), u32::try_from(body.len()).unwrap(), 9];
        head.iter().flat_map(|number| number.to_le_bytes()).chain(body).collect()
    }

    #[test]
    fn questions_are_read_as_they_are_written() {
        let names: Vec<&[u8]> = vec![b"a", b"line\nbreak", b"\xff", b"..."];
        for ask in [Ask::Have, Ask::Get] {
            let question =
                Question { ask, id: 7, directory: b"files/some/where", names: names.clone() };
            let written = question.to_bytes().unwrap();
            assert_eq!(question_bytes(&written[..12]), Ok(Some(written.len())));
            assert_eq!(question_bytes(&written[..11]), Ok(None));
            assert_eq!(Question::parse(&written), Ok(question));
        }
        let none = Question { ask: Ask::Have, id: 0, directory: b"models", names: Vec::new() };
        assert_eq!(Question::parse(&none.to_bytes().unwrap()), Ok(none));
    }

    #[test]
    fn what_leads_elsewhere_is_no_question() {
        assert!(Question::parse(&bytes(b"files", &[b"name"])).is_ok());
        let long = [b'x'; 256];
        for name in [&b""[..], b".", b"..", b"a/b", b"/", b"a\0b", &long] {
            assert!(Question::parse(&bytes(b"files", &[name])).is_err(), "{name:?}");
            let question =
                Question { ask: Ask::Get, id: 0, directory: b"files", names: vec![name] };
            assert_eq!(question.to_bytes(), None, "{name:?}");
        }
        let deep = [b"files".to_vec(), b"/directory".repeat(410)].concat();
        for directory in [
            &b""[..],
            b"/files",
            b".kvfs",
            b"files/",
            b"files//a",
            b"files/../models",
            b"file",
            &deep,
        ] {
            assert!(Question::parse(&bytes(directory, &[b"a"])).is_err(), "{directory:?}");
        }
    }

    #[test]
    fn lengths_are_what_they_say() {
        let whole = bytes(b"files", &[b"a", b"b"]);
        for length in 0..whole.len() {
            assert!(Question::parse(&whole[..length]).is_err(), "{length} bytes");
        }
        assert!(Question::parse(&[&whole[..], b"c\0"].concat()).is_err());
        for (at, number, expected) in [
            (4, 1, QuestionError::Invalid("it has more names than it says")),
            (4, 3, QuestionError::Invalid("it has fewer names than it says")),
            (4, u32::MAX, QuestionError::TooLarge),
            (8, u32::MAX, QuestionError::TooLarge),
            (0, 3, QuestionError::Invalid("its kind is neither 1 (have) nor 2 (get)")),
        ] {
            let mut forged = whole.clone();
            forged[at..at + 4].copy_from_slice(&u32::to_le_bytes(number));
            assert_eq!(Question::parse(&forged), Err(expected), "{number} at {at}");
        }
    }

    #[test]
    fn records_are_read_as_they_are_written() {
        for status in STATUSES {
            let record = Record { status, size: 1 << 40 };
            assert_eq!(Record::parse(&record.to_bytes()), Some(record));
        }
        let mut newer = Record { status: Status::Here, size: 3 }.to_bytes();
        newer[0] = 99;
        assert_eq!(Record::parse(&newer), Some(Record { status: Status::Other, size: 3 }));
        assert_eq!(Record::parse(&newer[..15]), None);
        let head = AnswerHead { id: 1, names: 2, bytes: 3 };
        assert_eq!(AnswerHead::parse(&head.to_bytes()), Some(head));
        assert_eq!(AnswerHead::parse(&[0; 15]), None);
    }
}
