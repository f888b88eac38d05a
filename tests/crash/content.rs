//! The bytes of a simulated file. A copy shares its blocks, so a state of the whole disk costs little.

use std::collections::BTreeMap;
use std::sync::Arc;

const BLOCK: usize = 4096;

/// Length and blocks; a block that is missing is zeros.
#[derive(Clone, Debug, Default)]
pub(crate) struct Content {
    length: u64,
    blocks: BTreeMap<u64, Arc<[u8; BLOCK]>>,
}

impl Content {
    pub(crate) fn length(&self) -> u64 {
        self.length
    }

    /// Bytes that are allocated.
    pub(crate) fn allocated(&self) -> u64 {
        (self.blocks.len() * BLOCK) as u64
    }

    /// Reads what lies before the end; how many bytes.
    pub(crate) fn read(&self, offset: u64, buffer: &mut [u8]) -> usize {
        let left = usize::try_from(self.length.saturating_sub(offset)).unwrap_or(usize::MAX);
        let count = buffer.len().min(left);
        for (number, within, range) in pieces(offset, count) {
            let piece = &mut buffer[range];
            match self.blocks.get(&number) {
                Some(block) => piece.copy_from_slice(&block[within..within + piece.len()]),
                None => piece.fill(0),
            }
        }
        count
    }

    pub(crate) fn write(&mut self, offset: u64, bytes: &[u8]) {
        for (number, within, range) in pieces(offset, bytes.len()) {
            let block = self.blocks.entry(number).or_insert_with(|| Arc::new([0; BLOCK]));
            let count = range.len();
            Arc::make_mut(block)[within..within + count].copy_from_slice(&bytes[range]);
        }
        self.length = self.length.max(offset + bytes.len() as u64);
    }

    /// What is cut off reads as zeros when the file grows again.
    pub(crate) fn set_length(&mut self, length: u64) {
        if length < self.length {
            let last = length / BLOCK as u64;
            self.blocks.split_off(&(last + 1));
            let kept = usize::try_from(length % BLOCK as u64).unwrap_or(0);
            if let Some(block) = self.blocks.get_mut(&last) {
                Arc::make_mut(block)[kept..].fill(0);
            }
        }
        self.length = length;
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; usize::try_from(self.length).unwrap()];
        self.read(0, &mut bytes);
        bytes
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
        let within = usize::try_from(at % BLOCK as u64).unwrap();
        let count = (BLOCK - within).min(length - done);
        let range = done..done + count;
        done += count;
        Some((at / BLOCK as u64, within, range))
    })
}

#[test]
fn a_copy_keeps_its_bytes_and_what_is_cut_off_is_gone() {
    let mut content = Content::default();
    content.write(4000, &[7; 200]);
    let before = content.clone();
    content.write(4090, &[1; 20]);
    content.set_length(4095);
    content.set_length(4100);
    assert_eq!(content.bytes()[4085..], [7, 7, 7, 7, 7, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0]);
    assert_eq!(before.bytes()[4085..4100], [7; 15]);
    assert_eq!((before.length(), before.bytes()[3999]), (4200, 0));
}
