//! A slot file of llama.cpp: written in pieces over its name, read as a whole.

use std::fs::File;
use std::io::{BufReader, Read, Write};
use std::path::Path;

use super::Sizes;
use crate::cli::bench::figure::{Better, Figure, Target};
use crate::cli::bench::measure::{at, interleave, timed};
use crate::cli::bench::note;
use crate::cli::bench::workplace::Workplace;

/// What the engine writes at a time: the rows of one tensor.
const WRITE_BYTES: usize = 24 << 10;
/// What it reads at a time: all rows of a layer's K or V.
const READ_BYTES: usize = 1 << 20;
/// What comes before the rows.
const HEAD_BYTES: usize = 4 << 10;

pub(super) fn figures(workplace: &Workplace, sizes: &Sizes) -> Result<Vec<Figure>, String> {
    note("restoring a slot");
    let kvfs = workplace.mount().join("files/slot.bin");
    let native = workplace.native().join("slot.bin");
    for path in [&kvfs, &native] {
        save(path, sizes.slot_bytes).map_err(at(path))?;
        File::open(path).and_then(|file| file.sync_all()).map_err(at(path))?;
        restore(path)?;
    }
    let rounds = interleave(2 * sizes.rounds, |_| restore(&kvfs), |_| restore(&native))?;
    Ok(vec![Figure {
        name: "slot_restore",
        unit: "ms",
        better: Better::Lower,
        target: Target::TimesBaseline(1.15),
        values: rounds.kvfs,
        baselines: rounds.native,
    }])
}

fn save(path: &Path, bytes: usize) -> std::io::Result<()> {
    let mut file = File::create(path)?;
    let piece: Vec<u8> = (0..=u8::MAX).cycle().take(WRITE_BYTES).collect();
    let mut left = bytes;
    while left > 0 {
        let count = left.min(piece.len());
        file.write_all(&piece[..count])?;
        left -= count;
    }
    Ok(nix::unistd::close(file)?)
}

/// Milliseconds of reading it through the buffer of a C library.
fn restore(path: &Path) -> Result<f64, String> {
    let mut buffer = vec![0; READ_BYTES];
    let duration = timed(|| {
        let mut file = BufReader::with_capacity(HEAD_BYTES, File::open(path).map_err(at(path))?);
        file.read_exact(&mut buffer[..HEAD_BYTES]).map_err(at(path))?;
        loop {
            match file.read(&mut buffer).map_err(at(path))? {
                0 => return Ok(()),
                count => std::hint::black_box(&buffer[..count]),
            };
        }
    })?;
    Ok(duration.as_secs_f64() * 1e3)
}
