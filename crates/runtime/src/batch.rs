//! Many names of a directory of a mount in one request: which are there, and what small files hold.
//!
//! A mount answers through `.kvfs/batch` ([`crate::page::batch`]). What it leaves to ordinary system calls is done by
//! those here, and so is everything in a directory that is in no mount, or in one of a kvfs that has no `.kvfs/batch`: the
//! answer is the same, and only the time is another.
//!
//! The file is opened anew for each call. Whoever forks has no question of the other process in his answer then, and
//! with less than `NAMES_LEAST` names nobody opens it.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use crate::page::batch::{
    ANSWER_HEAD_BYTES, AnswerHead, Ask, CONTENT_BYTES_MAX, NAMES_MAX, Question, RECORD_BYTES,
    Record, Status,
};

/// Names that are worth a question: opening, asking and closing takes as long as looking so many up.
const NAMES_LEAST: usize = 8;
/// Names in one question: their records are read with the first piece of the answer.
const NAMES_AT_ONCE: usize = 1 << 13;
const _: () = assert!(NAMES_AT_ONCE <= NAMES_MAX);
/// Bytes of names in one question, which is no longer than 4 MiB.
const NAME_BYTES_AT_ONCE: usize = 2 << 20;
/// The inode of a mount's root.
const ROOT_INODE: u64 = 1;

/// The sizes of the files that have these names in `directory`; `None` for a name that nothing has. What is no file
/// is there too. Symbolic links in the directory are followed, as by stat(2).
///
/// # Errors
/// The directory cannot be entered or the mount is gone, as stat(2) says it.
pub fn have_many<Name: AsRef<[u8]>>(
    directory: &Path, names: &[Name],
) -> io::Result<Vec<Option<u64>>> {
    check_all(names)?;
    let mut found = Vec::with_capacity(names.len());
    let asking = Asking::of(directory, names.len());
    for names in pieces(names) {
        let mut left = names;
        while !left.is_empty() {
            let answer = asking.as_ref().map_or(Ok(None), |asking| asking.ask(Ask::Have, left))?;
            let Some(answer) = answer else {
                for name in left {
                    found.push(stat(&place(directory, name.as_ref()))?);
                }
                break;
            };
            let told = answer.told();
            for (name, record) in left.iter().zip(&answer.records[..told]) {
                found.push(match record.status {
                    Status::Absent => None,
                    Status::Here => Some(record.size),
                    _ => stat(&place(directory, name.as_ref()))?,
                });
            }
            left = &left[told..];
        }
    }
    Ok(found)
}

/// What the files hold that have these names in `directory`, each as a whole; `None` for a name that nothing has. What is
/// wrong with one of them is told in its place.
///
/// # Errors
/// The mount is gone, or a name is none.
pub fn read_many<Name: AsRef<[u8]>>(
    directory: &Path, names: &[Name],
) -> io::Result<Vec<io::Result<Option<Vec<u8>>>>> {
    let mut values = Vec::with_capacity(names.len());
    read_each(directory, names, |value| values.push(value.map(|bytes| bytes.map(<[u8]>::to_vec))))?;
    Ok(values)
}

/// The same for who has memory for them: `each` gets one value after the other, in the order of the names.
///
/// # Errors
/// The mount is gone, or a name is none.
pub fn read_each<Name: AsRef<[u8]>>(
    directory: &Path, names: &[Name], mut each: impl FnMut(io::Result<Option<&[u8]>>),
) -> io::Result<()> {
    check_all(names)?;
    let asking = Asking::of(directory, names.len());
    for names in pieces(names) {
        let mut left = names;
        while !left.is_empty() {
            let answer = asking.as_ref().map_or(Ok(None), |asking| asking.ask(Ask::Get, left))?;
            let Some(answer) = answer else {
                for name in left {
                    read_one(directory, name.as_ref(), &mut each);
                }
                break;
            };
            let told = answer.told();
            let mut contents = answer.contents.as_slice();
            for (name, record) in left.iter().zip(&answer.records[..told]) {
                match record.status {
                    Status::Absent => each(Ok(None)),
                    Status::Denied => each(Err(io::Error::from_raw_os_error(libc::EACCES))),
                    Status::Here => {
                        let size = usize::try_from(record.size).unwrap_or(usize::MAX);
                        let (bytes, rest) = contents.split_at_checked(size).ok_or_else(another)?;
                        contents = rest;
                        each(Ok(Some(bytes)));
                    }
                    _ => read_one(directory, name.as_ref(), &mut each),
                }
            }
            left = &left[told..];
        }
    }
    Ok(())
}

/// Opens a file, and reads it.
fn read_one(directory: &Path, name: &[u8], each: &mut impl FnMut(io::Result<Option<&[u8]>>)) {
    match fs::read(place(directory, name)) {
        Ok(bytes) => each(Ok(Some(&bytes))),
        Err(error) if error.kind() == io::ErrorKind::NotFound => each(Ok(None)),
        Err(error) => each(Err(error)),
    }
}

/// A name is no path: it could lead out of the directory.
fn check_all<Name: AsRef<[u8]>>(names: &[Name]) -> io::Result<()> {
    for name in names {
        let name = name.as_ref();
        if name.is_empty()
            || name == b"."
            || name == b".."
            || name.contains(&b'/')
            || name.contains(&0)
        {
            let why = format!("{:?} is no name of a file", String::from_utf8_lossy(name));
            return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
        }
    }
    Ok(())
}

fn place(directory: &Path, name: &[u8]) -> PathBuf {
    directory.join(OsStr::from_bytes(name))
}

/// What stat(2) says of a name.
fn stat(path: &Path) -> io::Result<Option<u64>> {
    match fs::metadata(path) {
        Ok(metadata) => Ok(Some(metadata.len())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Names in pieces that a question has room for.
fn pieces<Name: AsRef<[u8]>>(names: &[Name]) -> impl Iterator<Item = &[Name]> {
    let mut left = names;
    std::iter::from_fn(move || {
        let (mut count, mut bytes) = (0, 0);
        for name in left.iter().take(NAMES_AT_ONCE) {
            bytes += name.as_ref().len() + 1;
            if count > 0 && bytes > NAME_BYTES_AT_ONCE {
                break;
            }
            count += 1;
        }
        let (piece, rest) = left.split_at(count);
        left = rest;
        (count > 0).then_some(piece)
    })
}

/// An open `.kvfs/batch`, and what it is to be asked about.
struct Asking {
    file: File,
    /// From the mountpoint.
    directory: Vec<u8>,
}

impl Asking {
    /// Of the mount that a directory is in, if it is in one that answers, and if so many names are worth it.
    fn of(directory: &Path, names: usize) -> Option<Asking> {
        if names < NAMES_LEAST {
            return None;
        }
        let whole = fs::canonicalize(directory).ok()?;
        let device = fs::metadata(&whole).ok()?.dev();
        let is_root = |root: &Path| {
            // Anybody may make a directory of that name below it, and put into it what he likes.
            fs::metadata(root).is_ok_and(|root| root.dev() == device && root.ino() == ROOT_INODE)
        };
        let root = whole
            .ancestors()
            .find(|at| is_tree(at) && at.parent().is_some_and(is_root))?
            .parent()?;
        let file = File::options().read(true).write(true).open(root.join(".kvfs/batch")).ok()?;
        let directory = whole.strip_prefix(root).ok()?.as_os_str().as_bytes().to_vec();
        Some(Asking { file, directory })
    }

    /// Asks. `None` if the mount does not answer such a question, and ordinary system calls will tell why.
    fn ask<Name: AsRef<[u8]>>(&self, ask: Ask, names: &[Name]) -> io::Result<Option<Answer>> {
        let names: Vec<&[u8]> = names.iter().map(AsRef::as_ref).collect();
        let count = names.len();
        let question = Question { ask, id: 0, directory: &self.directory, names };
        let Some(question) = question.to_bytes() else { return Ok(None) };
        match self.file.write_all_at(&question, 0).and_then(|()| Answer::read(&self.file, count)) {
            Ok(answer) => Ok(Some(answer)),
            Err(error) if error.raw_os_error().is_some_and(crate::sys::is_daemon_gone) => {
                Err(error)
            }
            // No room at the moment, another directory by now, a name that is too long.
            Err(_) => Ok(None),
        }
    }
}

fn is_tree(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name == "files" || name == "models")
}

/// What a mount said.
struct Answer {
    records: Vec<Record>,
    contents: Vec<u8>,
}

impl Answer {
    /// Reads all of it.
    fn read(file: &File, names: usize) -> io::Result<Answer> {
        let mut start = vec![0; ANSWER_HEAD_BYTES + names * RECORD_BYTES];
        file.read_exact_at(&mut start, 0)?;
        let (head, records) = start.split_at(ANSWER_HEAD_BYTES);
        let head = AnswerHead::parse(head).filter(|head| {
            head.id == 0 && head.names as usize == names && head.bytes <= CONTENT_BYTES_MAX
        });
        let head = head.ok_or_else(another)?;
        let records: Vec<_> = records.chunks(RECORD_BYTES).filter_map(Record::parse).collect();
        let mut contents = vec![0; usize::try_from(head.bytes).map_err(io::Error::other)?];
        file.read_exact_at(&mut contents, start.len() as u64)?;
        let answer = Answer { records, contents };
        if answer.told() == 0 { Err(another()) } else { Ok(answer) }
    }

    /// How many names it tells of, from the first one on.
    fn told(&self) -> usize {
        let again = |record: &Record| record.status == Status::Again;
        self.records.iter().position(again).unwrap_or(self.records.len())
    }
}

fn another() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "the answer is not one to this question")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_go_into_questions_in_their_order() {
        let long = vec![b'x'; NAME_BYTES_AT_ONCE + 1];
        let mut names: Vec<Vec<u8>> =
            (0..3 * NAMES_AT_ONCE).map(|number| number.to_string().into_bytes()).collect();
        names.splice(5..5, [long.clone(), long]);
        let told: Vec<&[Vec<u8>]> = pieces(&names).collect();
        assert!(told.concat() == names);
        // One that is too long for any question has one for itself: ordinary system calls refuse it.
        assert_eq!(told.iter().map(|piece| piece.len()).take(3).collect::<Vec<_>>(), [5, 1, 1]);
        assert!(told.iter().all(|piece| !piece.is_empty() && piece.len() <= NAMES_AT_ONCE));
        assert_eq!(pieces(&Vec::<Vec<u8>>::new()).count(), 0);
    }

    #[test]
    fn what_leads_elsewhere_is_no_name() {
        let directory = tempfile::tempdir().unwrap();
        for name in ["", ".", "..", "a/b", "../a", "a\0b"] {
            let error = have_many(directory.path(), &["good", name]).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{name:?}");
            assert!(read_many(directory.path(), &[name]).is_err(), "{name:?}");
        }
    }

    #[test]
    fn a_directory_in_no_mount_is_asked_by_system_calls() {
        let directory = tempfile::tempdir().unwrap();
        let names: Vec<String> = (0..2 * NAMES_LEAST).map(|number| number.to_string()).collect();
        fs::write(directory.path().join("3"), b"three").unwrap();
        fs::create_dir(directory.path().join("5")).unwrap();
        let sizes = have_many(directory.path(), &names).unwrap();
        assert_eq!(sizes.iter().filter(|size| size.is_some()).count(), 2);
        assert_eq!(sizes[3], Some(5));
        let values = read_many(directory.path(), &names).unwrap();
        assert_eq!(values[3].as_ref().unwrap().as_deref(), Some(&b"three"[..]));
        assert_eq!(values[5].as_ref().unwrap_err().kind(), io::ErrorKind::IsADirectory);
        assert!(values.iter().enumerate().all(|(at, value)| match value {
            Ok(None) => at != 3 && at != 5,
            _ => at == 3 || at == 5,
        }));
    }

    /// A file that holds an answer.
    fn answer(head: AnswerHead, records: &[Record], contents: &[u8]) -> File {
        let records = records.iter().flat_map(|record| record.to_bytes());
        let bytes: Vec<u8> = head.to_bytes().into_iter().chain(records).collect();
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(&[&bytes, contents].concat(), 0).unwrap();
        file
    }

    #[test]
    fn what_is_no_answer_to_the_question_is_not_believed() {
        let record = |status, size| Record { status, size };
        let here = [record(Status::Here, 3), record(Status::Again, 0)];
        let again = [record(Status::Again, 0), record(Status::Here, 3)];
        let head = AnswerHead { id: 0, names: 2, bytes: 3 };
        let read = Answer::read(&answer(head, &here, b"abc"), 2).unwrap();
        assert_eq!((read.told(), read.contents.as_slice()), (1, &b"abc"[..]));
        let large = CONTENT_BYTES_MAX + 1;
        for (head, records, contents) in [
            (AnswerHead { id: 1, ..head }, &here, &b"abc"[..]),
            (AnswerHead { names: 3, ..head }, &here, b"abc"),
            (AnswerHead { bytes: large, ..head }, &here, b"abc"),
            (head, &here, b"ab"),
            (head, &again, b"abc"),
        ] {
            assert!(Answer::read(&answer(head, records, contents), 2).is_err(), "{head:?}");
        }
    }
}
