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
}
