//! Questions as a program writes them that has no library of kvfs.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use kvfs::page::batch::{
    ANSWER_HEAD_BYTES, AnswerHead, Ask, Question, RECORD_BYTES, Record, Status,
};

use crate::common::sys::open;

/// What is said of a name, and its bytes if they were asked for and are there.
pub(crate) type Told = (Status, u64, Vec<u8>);

/// Opens the file that takes questions.
pub(crate) fn open_batch(mountpoint: &Path, flags: i32) -> io::Result<File> {
    open(mountpoint.join(".kvfs/batch"), libc::O_RDWR | flags)
}

/// The bytes of a question.
pub(crate) fn question(ask: Ask, id: u32, directory: &str, names: &[&[u8]]) -> Vec<u8> {
    let directory = directory.as_bytes();
    Question { ask, id, directory, names: names.to_vec() }.to_bytes().unwrap()
}

/// The whole answer to the question of a descriptor, and its id.
pub(crate) fn answer(file: &File) -> io::Result<(u32, Vec<Told>)> {
    let mut bytes = vec![0; 16 << 20];
    let mut length = 0;
    loop {
        match file.read_at(&mut bytes[length..], length as u64)? {
            0 => break,
            count => length += count,
        }
    }
    bytes.truncate(length);
    Ok(parse(&bytes))
}

/// The id of an answer, and what it tells.
pub(crate) fn parse(bytes: &[u8]) -> (u32, Vec<Told>) {
    let head = AnswerHead::parse(bytes).unwrap();
    let records_end = ANSWER_HEAD_BYTES + head.names as usize * RECORD_BYTES;
    let mut contents = &bytes[records_end..];
    assert_eq!(contents.len() as u64, head.bytes);
    let mut told = Vec::new();
    for record in bytes[ANSWER_HEAD_BYTES..records_end].chunks(RECORD_BYTES) {
        let Record { status, size } = Record::parse(record).unwrap();
        let length = if head.bytes > 0 && status == Status::Here { size } else { 0 };
        let (value, rest) = contents.split_at(usize::try_from(length).unwrap());
        contents = rest;
        told.push((status, size, value.to_vec()));
    }
    assert!(contents.is_empty(), "{} bytes belong to nobody", contents.len());
    (head.id, told)
}

/// Asks once.
pub(crate) fn ask(
    mountpoint: &Path, ask: Ask, directory: &str, names: &[&[u8]],
) -> io::Result<Vec<Told>> {
    let file = open_batch(mountpoint, 0)?;
    file.write_all_at(&question(ask, 5, directory, names), 0)?;
    let (id, told) = answer(&file)?;
    assert_eq!((id, told.len()), (5, names.len()));
    Ok(told)
}
