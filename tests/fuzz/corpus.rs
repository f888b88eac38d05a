//! The inputs that are worth keeping: one file for a target, one line for an input, in hexadecimal.

use std::fmt::Write;
use std::path::{Path, PathBuf};

/// Bytes of inputs that one target may keep: all corpora together stay below 200 KiB.
const BYTES_MAX: usize = 8 << 10;

fn path(name: &str) -> PathBuf {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fuzz/corpus");
    directory.join(format!("{name}.hex"))
}

/// The inputs of a target.
pub(crate) fn read(name: &str) -> Vec<Vec<u8>> {
    let text = std::fs::read_to_string(path(name)).unwrap_or_default();
    text.lines().map(|line| decode(line.trim())).collect()
}

fn decode(line: &str) -> Vec<u8> {
    let digits = |at| u8::from_str_radix(line.get(at..at + 2).unwrap(), 16).unwrap();
    (0..line.len()).step_by(2).map(digits).collect()
}

/// Replaces the inputs of a target by the first of these that fit.
pub(crate) fn write(name: &str, inputs: Vec<Vec<u8>>) {
    let mut text = String::new();
    let mut bytes = 0;
    for input in inputs.into_iter().filter(|input| !input.is_empty()) {
        bytes += input.len();
        if bytes > BYTES_MAX {
            break;
        }
        for byte in &input {
            write!(text, "{byte:02x}").unwrap();
        }
        text.push('\n');
    }
    let path = path(name);
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(path, text).unwrap();
}
