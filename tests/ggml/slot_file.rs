//! Slot files of conversations that nobody computed.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use half::f16;

use crate::common::fill;
use crate::common::require::llama_directory;
use crate::gguf::Model;

/// Values repeat after so many, which no power of two divides.
const PERIOD: usize = 1_000_003;

/// What the engine writes, 2 or 3, which differ in models with several positions for each token alone.
fn version() -> usize {
    let header = std::fs::read_to_string(llama_directory().join("include/llama.h")).unwrap();
    let mut lines = header.lines();
    let version = lines.find_map(|line| line.strip_prefix("#define LLAMA_STATE_SEQ_VERSION"));
    let version = version.unwrap().trim().parse().unwrap();
    assert!((2..=3).contains(&version), "version {version} of slot files has another form");
    version
}

/// A slot of `tokens` tokens, in f16, with rows that differ so much that few are attended to: that
/// they are the right ones matters.
pub(crate) fn write(path: &Path, model: &Model, tokens: usize) {
    let values = fill(11, PERIOD)
        .into_iter()
        .map(|byte| f16::from_f32(f32::from(byte.cast_signed()) / 32.0));
    let values: Vec<u8> = values.flat_map(f16::to_le_bytes).collect();
    let mut file = BufWriter::new(File::create(path).unwrap());
    let mut numbers = |numbers: &[usize]| {
        for number in numbers {
            file.write_all(&u32::try_from(*number).unwrap().to_le_bytes()).unwrap();
        }
    };
    // One token more than there are rows: the one that comes next.
    numbers(&[0x6767_7371, version(), tokens + 1]);
    (0..=tokens).for_each(|token| numbers(&[token % model.vocabulary]));
    numbers(&[1, tokens]);
    (0..tokens).for_each(|position| numbers(&[position, 1, 0]));
    numbers(&[0, model.layers]);
    let row_bytes = model.kv_heads * model.head_dim * 2;
    for tensor in 0..2 * model.layers {
        file.write_all(&1_i32.to_le_bytes()).unwrap();
        file.write_all(&(row_bytes as u64).to_le_bytes()).unwrap();
        let mut left = tokens * row_bytes;
        let mut from = tensor * 4098;
        while left > 0 {
            let count = left.min(values.len() - from);
            file.write_all(&values[from..from + count]).unwrap();
            (left, from) = (left - count, 0);
        }
    }
    file.flush().unwrap();
}
