//! A database that is only looked at: what redb writes while it opens stays in memory.
//!
//! Opening a database after a crash repairs it, and even a clean one is marked as in use. A check
//! that was not asked to repair must not change a bit.

use std::collections::HashMap;
use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};

use redb::StorageBackend;

/// Granularity of what is kept in memory.
const BLOCK: usize = 4096;

/// Reads through to a backend, keeps writes.
#[derive(Debug)]
pub(super) struct Overlay {
    below: Box<dyn StorageBackend>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    blocks: HashMap<u64, Box<[u8; BLOCK]>>,
    length: u64,
    /// Bytes of the backend that still count: less than its length after a truncation.
    below_length: u64,
}

impl Overlay {
    /// Nothing written yet.
    pub(super) fn new(below: Box<dyn StorageBackend>) -> io::Result<Overlay> {
        let length = below.len()?;
        let state = State { blocks: HashMap::new(), length, below_length: length };
        Ok(Overlay { below, state: Mutex::new(state) })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One block as it is seen now.
    fn block(&self, state: &State, number: u64) -> io::Result<Box<[u8; BLOCK]>> {
        if let Some(block) = state.blocks.get(&number) {
            return Ok(block.clone());
        }
        let mut block = Box::new([0; BLOCK]);
        let start = number * BLOCK as u64;
        let left = state.below_length.saturating_sub(start);
        let count = usize::try_from(left).unwrap_or(BLOCK).min(BLOCK);
        if count > 0 {
            self.below.read(start, &mut block[..count])?;
        }
        Ok(block)
    }
}

/// The blocks that a range touches: number, offset within, and the range of the buffer.
fn pieces(
    offset: u64, length: usize,
) -> impl Iterator<Item = (u64, usize, std::ops::Range<usize>)> {
    let mut done = 0;
    std::iter::from_fn(move || {
        if done == length {
            return None;
        }
        let at = offset + done as u64;
        let within = usize::try_from(at % BLOCK as u64).unwrap_or(0);
        let count = (BLOCK - within).min(length - done);
        let range = done..done + count;
        done += count;
        Some((at / BLOCK as u64, within, range))
    })
}

impl StorageBackend for Overlay {
    fn len(&self) -> io::Result<u64> {
        Ok(self.state().length)
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let state = self.state();
        if state.blocks.is_empty() && offset + out.len() as u64 <= state.below_length {
            return self.below.read(offset, out);
        }
        for (number, within, range) in pieces(offset, out.len()) {
            let count = range.len();
            out[range].copy_from_slice(&self.block(&state, number)?[within..within + count]);
        }
        Ok(())
    }

    fn set_len(&self, length: u64) -> io::Result<()> {
        let mut state = self.state();
        if length < state.length {
            // What is cut off reads as zeros when the file grows again.
            state.below_length = state.below_length.min(length);
            let last = length / BLOCK as u64;
            state.blocks.retain(|number, _| *number <= last);
            let kept = usize::try_from(length % BLOCK as u64).unwrap_or(0);
            if let Some(block) = state.blocks.get_mut(&last) {
                block[kept..].fill(0);
            }
        }
        state.length = length;
        Ok(())
    }

    fn sync_data(&self) -> io::Result<()> {
        Ok(())
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let mut state = self.state();
        for (number, within, range) in pieces(offset, data.len()) {
            let mut block = self.block(&state, number)?;
            block[within..within + range.len()].copy_from_slice(&data[range]);
            state.blocks.insert(number, block);
        }
        state.length = state.length.max(offset + data.len() as u64);
        Ok(())
    }

    fn close(&self) -> io::Result<()> {
        self.below.close()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use redb::backends::InMemoryBackend;

    #[test]
    fn writes_are_seen_and_do_not_reach_what_lies_below() {
        let below = InMemoryBackend::new();
        below.set_len(10_000).unwrap();
        below.write(0, &[7; 10_000]).unwrap();
        let overlay = Overlay::new(Box::new(below)).unwrap();
        overlay.write(4090, &[1; 20]).unwrap();
        let mut seen = [0; 40];
        overlay.read(4080, &mut seen).unwrap();
        assert_eq!(seen[..10], [7; 10]);
        assert_eq!(seen[10..30], [1; 20]);
        assert_eq!(seen[30..], [7; 10]);
        overlay.below.read(4080, &mut seen).unwrap();
        assert_eq!(seen, [7; 40]);
        overlay.set_len(4095).unwrap();
        overlay.set_len(9000).unwrap();
        overlay.read(4085, &mut seen).unwrap();
        assert_eq!(seen[..5], [7; 5]);
        assert_eq!(seen[5..10], [1; 5]);
        assert_eq!(seen[10..], [0; 30]);
        assert_eq!(overlay.len().unwrap(), 9000);
    }

    /// Counts up, so that no two bytes within reach are the same.
    fn pattern(length: usize) -> Vec<u8> {
        (0..=250).cycle().take(length).collect()
    }

    #[test]
    fn any_range_is_read_and_written_as_in_a_file() {
        let whole = pattern(3 * BLOCK + 100);
        let ranges = [
            (0, 10),
            (BLOCK - 5, 10),
            (BLOCK, BLOCK),
            (BLOCK - 1, 2 * BLOCK + 2),
            (3 * BLOCK, 100),
        ];
        for (start, length) in ranges {
            let below = InMemoryBackend::new();
            below.set_len(whole.len() as u64).unwrap();
            below.write(0, &whole).unwrap();
            let overlay = Overlay::new(Box::new(below)).unwrap();
            let mut expected = whole.clone();
            let read_all = |overlay: &Overlay, length: usize| {
                let mut found = vec![0; length];
                overlay.read(0, &mut found).unwrap();
                found
            };
            assert!(read_all(&overlay, whole.len()) == whole);
            overlay.write(start as u64, &vec![255; length]).unwrap();
            expected[start..start + length].fill(255);
            assert!(read_all(&overlay, whole.len()) == expected, "{start} {length}");
            let mut part = vec![0; length];
            overlay.read(start as u64, &mut part).unwrap();
            assert!(part == vec![255; length]);
            // Behind the end it grows.
            overlay.write(whole.len() as u64 + 50, &[9; 7]).unwrap();
            expected.resize(whole.len() + 50, 0);
            expected.extend([9; 7]);
            assert_eq!(overlay.len().unwrap(), expected.len() as u64);
            assert!(read_all(&overlay, expected.len()) == expected, "{start} {length}");
        }
    }

    #[test]
    fn what_was_cut_off_is_gone() {
        for cut in [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK] {
            for is_written in [false, true] {
                let below = InMemoryBackend::new();
                let whole = pattern(2 * BLOCK);
                below.set_len(whole.len() as u64).unwrap();
                below.write(0, &whole).unwrap();
                let overlay = Overlay::new(Box::new(below)).unwrap();
                if is_written {
                    overlay.write(0, &whole).unwrap();
                }
                overlay.set_len(cut as u64).unwrap();
                assert_eq!(overlay.len().unwrap(), cut as u64);
                overlay.set_len(3 * BLOCK as u64).unwrap();
                let mut expected = whole[..cut].to_vec();
                expected.resize(3 * BLOCK, 0);
                let mut found = vec![1; 3 * BLOCK];
                overlay.read(0, &mut found).unwrap();
                assert!(found == expected, "{cut} {is_written}");
                overlay.sync_data().unwrap();
            }
        }
    }
}
