//! A trace, read as a stream: what is kept is four bytes for each use of a block.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use flate2::read::MultiGzDecoder;
use serde::Deserialize;

use crate::cli::history::shown;
use crate::cli::settings::open_regular;
use crate::page::printable;

/// A line with a million ids has 10 MB.
const LINE_BYTES_MAX: u64 = 64 << 20;

/// Uses that are kept, 1 GiB of them; the policies' books come on top.
const USES_MAX: usize = 1 << 28;

/// The requests of a file.
#[derive(Debug)]
pub(super) struct Trace {
    /// Of the file, up to its first dot.
    pub(super) name: String,
    /// Different blocks.
    pub(super) distinct: usize,
    pub(super) requests: Vec<Request>,
    /// The blocks of all requests, numbered as they appear.
    blocks: Vec<u32>,
}

/// One of them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Request {
    first: usize,
    last: usize,
    pub(super) milliseconds: f64,
    pub(super) tokens: u64,
}

/// A line.
#[derive(Deserialize)]
struct Line {
    timestamp: f64,
    input_length: u64,
    hash_ids: Vec<u64>,
}

impl Trace {
    /// Reads a file, as many requests as are wanted. The error says in which line it is wrong.
    pub(super) fn read(path: &Path, requests_max: usize) -> Result<Trace, String> {
        let file = open_regular(path).map_err(|error| format!("{}: {error}", shown(path)))?;
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let name = printable(name.split('.').next().unwrap_or_default().chars());
        let outcome = if path.extension().is_some_and(|extension| extension == "gz") {
            let input = BufReader::new(MultiGzDecoder::new(BufReader::new(file)));
            Trace::parse(name, input, requests_max)
        } else {
            Trace::parse(name, BufReader::new(file), requests_max)
        };
        outcome.map_err(|(line, wrong)| format!("{}, line {line}: {wrong}", shown(path)))
    }

    /// The error is a line's number, from 1, and what is wrong there.
    fn parse(
        name: String, mut input: impl BufRead, requests_max: usize,
    ) -> Result<Trace, (u64, String)> {
        let mut trace = Trace { name, distinct: 0, requests: Vec::new(), blocks: Vec::new() };
        let (mut numbers, mut text, mut before) = (HashMap::new(), Vec::new(), 0.0);
        for line in 1.. {
            if trace.requests.len() == requests_max {
                break;
            }
            text.clear();
            let taken = input.by_ref().take(LINE_BYTES_MAX).read_until(b'\n', &mut text);
            match taken {
                Err(error) => return Err((line, format!("it cannot be read: {error}"))),
                Ok(0) if trace.blocks.is_empty() => {
                    return Err((line, "the trace is empty: no block was used".to_owned()));
                }
                Ok(0) => break,
                Ok(_) => {}
            }
            if text.len() as u64 >= LINE_BYTES_MAX {
                return Err((line, format!("it is longer than {LINE_BYTES_MAX} bytes")));
            }
            if text.trim_ascii().is_empty() {
                continue;
            }
            let parsed: Line =
                serde_json::from_slice(&text).map_err(|error| (line, describe(&error)))?;
            if parsed.timestamp < before {
                let after = parsed.timestamp;
                return Err((line, format!("time goes back, from {before} to {after} ms")));
            }
            before = parsed.timestamp;
            if trace.blocks.len() + parsed.hash_ids.len() > USES_MAX {
                return Err((
                    line,
                    format!("more than {USES_MAX} uses of blocks: split the trace"),
                ));
            }
            trace.add(&mut numbers, &parsed);
        }
        trace.distinct = numbers.len();
        Ok(trace)
    }

    fn add(&mut self, numbers: &mut HashMap<u64, u32>, line: &Line) {
        let first = self.blocks.len();
        for id in &line.hash_ids {
            let next = u32::try_from(numbers.len()).expect("fewer than the uses");
            self.blocks.push(*numbers.entry(*id).or_insert(next));
        }
        let last = self.blocks.len();
        let (milliseconds, tokens) = (line.timestamp, line.input_length);
        self.requests.push(Request { first, last, milliseconds, tokens });
    }

    /// All uses, in order.
    pub(super) fn blocks(&self) -> &[u32] {
        &self.blocks
    }

    /// What a request used, in order.
    pub(super) fn blocks_of(&self, request: Request) -> &[u32] {
        &self.blocks[request.first..request.last]
    }
}

/// What `serde_json` says, without its own line numbers: each line is a document.
fn describe(error: &serde_json::Error) -> String {
    let text = error.to_string();
    let wrong = text.split(" at line ").next().unwrap_or_default();
    match error.classify() {
        serde_json::error::Category::Data => format!("not a request: {wrong}"),
        _ => format!("no JSON: {wrong} at column {}", error.column()),
    }
}

#[cfg(test)]
pub(super) fn trace_of(requests: &[&[u64]]) -> Trace {
    let lines: Vec<String> = requests
        .iter()
        .map(|ids| {
            let tokens = 512 * ids.len();
            format!("{{\"timestamp\": 0, \"input_length\": {tokens}, \"hash_ids\": {ids:?}}}")
        })
        .collect();
    Trace::parse("test".to_owned(), lines.join("\n").as_bytes(), usize::MAX).expect("it is right")
}

/// One block at each of these times, in milliseconds.
#[cfg(test)]
pub(super) fn timed_trace(times: &[u64]) -> Trace {
    let line = |at| format!("{{\"timestamp\": {at}, \"input_length\": 9, \"hash_ids\": [{at}]}}\n");
    let text: String = times.iter().map(line).collect();
    Trace::parse("test".to_owned(), text.as_bytes(), usize::MAX).expect("it is right")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str, expected: (u64, &str)) {
        let (line, wrong) = Trace::parse(String::new(), text.as_bytes(), usize::MAX).unwrap_err();
        assert_eq!(line, expected.0, "{wrong}");
        assert!(wrong.contains(expected.1), "{wrong}");
    }

    #[test]
    fn blocks_are_numbered_as_they_appear() {
        let trace = trace_of(&[&[7, 900, 5], &[], &[7, 5, 1 << 60]]);
        assert_eq!(trace.blocks(), [0, 1, 2, 0, 2, 3]);
        assert_eq!((trace.distinct, trace.requests.len()), (4, 3));
        assert_eq!(trace.blocks_of(trace.requests[2]), [0, 2, 3]);
        assert_eq!(trace.requests[2].tokens, 1536);
    }

    #[test]
    fn what_is_wrong_is_told_with_its_line() {
        const GOOD: &str = "{\"timestamp\": 5, \"input_length\": 512, \"hash_ids\": [1]}\n";
        check("", (1, "empty"));
        check("\n\n", (3, "empty"));
        check(&format!("{GOOD}oops\n"), (2, "no JSON"));
        check(&format!("{GOOD}{}", &GOOD[..20]), (2, "no JSON"));
        check(&GOOD.replace("[1]", "[\"a\"]"), (1, "not a request: invalid type: string \"a\""));
        check(&GOOD.replace("[1]", "[-1]"), (1, "not a request"));
        check(&GOOD.replace("hash_ids", "hashes"), (1, "missing field `hash_ids`"));
        check(&format!("{GOOD}{GOOD}{}", GOOD.replace('5', "4")), (3, "time goes back, from 5"));
    }
}
