//! Questions about many names, as anybody may write them to `.kvfs/batch`.

use kvfs::page::batch::{Ask, NAMES_MAX, Question, Record, question_bytes};

use super::engine::{Outcome, Target};

fn question(directory: &[u8], names: &[&[u8]]) -> Vec<u8> {
    let (ask, names) = (if names.len() > 1 { Ask::Get } else { Ask::Have }, names.to_vec());
    Question { ask, id: 7, directory, names }.to_bytes().unwrap_or_default()
}

pub(crate) fn target() -> Target {
    Target {
        name: "batch",
        length_max: 4096,
        seeds: vec![
            question(b"files", &[]),
            question(b"files/values", &[b"a"]),
            question(b"models/tiny/sequences", &[b"a", b"line\nbreak", b"\xff"]),
            question(b"files", &[&b"x"[..]; 60]),
        ],
        words: &[
            b"files",
            b"models",
            b"/",
            b"..",
            b".",
            b"\0",
            b"\0\0",
            b"\n",
            b"\xff\xff\xff\xff",
        ],
        allocation_max: 64 << 10,
        run: Box::new(|input| {
            // Answers are read by programs that do not know who made them.
            if let Some(record) = Record::parse(input) {
                assert_eq!(Record::parse(&record.to_bytes()), Some(record));
            }
            let whole = question_bytes(input);
            match Question::parse(input) {
                Ok(question) => {
                    assert_eq!(whole, Ok(Some(input.len())));
                    assert!(question.names.len() <= NAMES_MAX);
                    for name in &question.names {
                        let is_name = !name.is_empty() && *name != b"." && *name != b"..";
                        assert!(is_name && !name.iter().any(|byte| [b'/', 0].contains(byte)));
                    }
                    let mut parts = question.directory.split(|byte| *byte == b'/');
                    assert!(matches!(parts.next(), Some(b"files" | b"models")));
                    assert!(parts.all(|part| !matches!(part, b"" | b"." | b"..")));
                    // Who writes it anew writes the same.
                    assert_eq!(question.to_bytes().as_deref(), Some(input));
                    Outcome::accepted((question.ask, question.names.len().min(3)))
                }
                Err(why) => Outcome::refused(&why),
            }
        }),
    }
}
