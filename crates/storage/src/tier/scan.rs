//! Which page a reader will open next: scans are recognised from the pages that are opened.
//!
//! A sequence is read layer by layer (all pages of a layer, then the same of the next layer), or
//! token range by token range (one page of every layer, then the next one of each). Whoever reads
//! only the first pages of a layer reads as many of the next one.
//!
//! How far ahead a scan is worth fetching follows from how long it has lasted, so that what was
//! fetched in vain when it ends is at most a fifth of what was read. This module only knows names
//! of pages; what is fetched, and when, is decided above (`kvfs-fs`).

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::store::record::InodeId;

/// Pages opened for each page ahead.
const OPENED_PER_AHEAD: u64 = 5;
/// Most pages ahead: at some 10 ms each that hides 100 ms of latency.
pub const AHEAD_PAGES_MAX: usize = 16;
/// Most bytes ahead, where pages are large.
pub const AHEAD_BYTES_MAX: u64 = 64 << 20;
/// Scans that are followed; each is some 300 bytes and is looked at when a page is opened.
const SCANS_MAX: usize = 64;
/// A reader that opened nothing for this long has stopped, or what it does in between takes so
/// long that nothing need be ahead of it.
pub const STOPPED_AFTER: Duration = Duration::from_secs(2);

/// Where a page stands in its sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Position {
    /// Layer.
    pub layer: u32,
    /// First token.
    pub start: u64,
}

/// In which order the pages of a sequence are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    /// All token ranges of a layer, then the next layer.
    Tokens,
    /// All layers of a token range, then the next range.
    Layers,
}

/// One reader of a sequence.
#[derive(Debug)]
pub struct Scan {
    sequence: InodeId,
    first: Position,
    at: Position,
    /// Tokens of a page.
    tokens: u64,
    order: Order,
    /// Pages opened.
    opened: u64,
    /// The last page of a layer that the reader wanted, known from the layer before.
    last_start: Option<u64>,
    /// The pages that come next, as far as they were looked for.
    ahead: VecDeque<Position>,
    seen: Instant,
}

/// The scans that are going on, the latest last.
#[derive(Debug, Default)]
pub struct Scans(VecDeque<Scan>);

impl Scans {
    /// A page of `tokens` and `bytes` is opened. Looks for the pages that should be fetched ahead
    /// and were not before: `find` says what is at a position, or that no page is there.
    pub fn opened<T>(
        &mut self, sequence: InodeId, (at, tokens): (Position, u64), bytes: u64,
        find: impl FnMut(Position) -> Option<T>,
    ) -> Vec<T> {
        let now = Instant::now();
        self.0.retain(|scan| now.duration_since(scan.seen) < STOPPED_AFTER);
        let scans = self.0.iter_mut().enumerate().rev();
        let mut same = scans.filter(|(_, scan)| scan.sequence == sequence);
        let known = same.find_map(|(index, scan)| scan.advance(at).then_some(index));
        let mut scan = match known.and_then(|index| self.0.remove(index)) {
            Some(scan) => scan,
            None => Scan::new(sequence, at, tokens),
        };
        scan.seen = now;
        let found = scan.look_ahead(bytes, find);
        if self.0.len() >= SCANS_MAX {
            self.0.pop_front();
        }
        self.0.push_back(scan);
        found
    }

    /// Whether a scan still has this page before it.
    pub fn expects(&self, sequence: InodeId, at: Position) -> bool {
        let mut scans = self.0.iter().filter(|scan| scan.sequence == sequence);
        scans.any(|scan| scan.seen.elapsed() < STOPPED_AFTER && scan.ahead.contains(&at))
    }
}

impl Scan {
    fn new(sequence: InodeId, at: Position, tokens: u64) -> Scan {
        Scan {
            sequence,
            first: at,
            at,
            tokens,
            order: Order::Tokens,
            opened: 1,
            last_start: None,
            ahead: VecDeque::new(),
            seen: Instant::now(),
        }
    }

    /// Whether the page that is opened belongs to this scan, which then is there.
    fn advance(&mut self, at: Position) -> bool {
        if at == self.at {
            return true;
        }
        let next_layer = at.layer == self.at.layer + 1;
        if let Some(index) = self.ahead.iter().position(|ahead| *ahead == at) {
            self.ahead.drain(..=index);
        } else if self.opened == 1 && next_layer && at.start == self.at.start {
            self.order = Order::Layers;
            self.ahead.clear();
        } else if self.order == Order::Tokens && next_layer && at.start == self.first.start {
            self.last_start = Some(self.at.start);
            self.ahead.clear();
        } else if self.ahead.is_empty() && self.successors(self.at).contains(&at) {
            // It was not looked for, or not there, when the page before it was opened.
        } else {
            return false;
        }
        self.at = at;
        self.opened += 1;
        true
    }

    /// Where the page after another is, the likelier first.
    fn successors(&self, Position { layer, start }: Position) -> [Position; 2] {
        let next_layer = |start| Position { layer: layer.saturating_add(1), start };
        let next_range = |layer| Position { layer, start: start.saturating_add(self.tokens) };
        match self.order {
            Order::Tokens if self.last_start == Some(start) => [next_layer(self.first.start); 2],
            Order::Tokens => [next_range(layer), next_layer(self.first.start)],
            Order::Layers => [next_layer(start), next_range(self.first.layer)],
        }
    }

    /// Pages that are worth being fetched before they are opened. One that begins somewhere in the
    /// middle must go on first.
    fn pages_ahead(&self, bytes: u64) -> usize {
        if self.opened == 1 && self.at.start > 0 {
            return 0;
        }
        let fit = AHEAD_BYTES_MAX / bytes.max(1);
        let pages = (self.opened / OPENED_PER_AHEAD).min(fit).max(1);
        usize::try_from(pages).unwrap_or(AHEAD_PAGES_MAX).min(AHEAD_PAGES_MAX)
    }

    fn look_ahead<T>(&mut self, bytes: u64, mut find: impl FnMut(Position) -> Option<T>) -> Vec<T> {
        let mut found = Vec::new();
        while self.ahead.len() < self.pages_ahead(bytes) {
            let last = self.ahead.back().copied().unwrap_or(self.at);
            let mut successors = self.successors(last).into_iter();
            let next = successors.find_map(|next| find(next).map(|page| (next, page)));
            let Some((next, page)) = next else {
                break;
            };
            self.ahead.push_back(next);
            found.push(page);
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SEQUENCE: InodeId = InodeId(9);
    const TOKENS: u64 = 32;
    const BYTES: u64 = 4 << 20;

    /// Opens pages of a sequence of that many layers and ranges; what is fetched ahead.
    fn scan(
        (layers, ranges): (u32, u64), pages: impl IntoIterator<Item = (u32, u64)>,
    ) -> Vec<(u32, u64)> {
        let mut scans = Scans::default();
        let mut fetched = Vec::new();
        for (layer, range) in pages {
            let at = Position { layer, start: range * TOKENS };
            fetched.extend(scans.opened(SEQUENCE, (at, TOKENS), BYTES, |at| {
                let range = at.start / TOKENS;
                (at.layer < layers && range < ranges).then_some((at.layer, range))
            }));
        }
        fetched
    }

    fn by_layer(layers: u32, ranges: u64) -> Vec<(u32, u64)> {
        (0..layers).flat_map(|layer| (0..ranges).map(move |range| (layer, range))).collect()
    }

    fn by_range(layers: u32, ranges: u64) -> Vec<(u32, u64)> {
        (0..ranges).flat_map(|range| (0..layers).map(move |layer| (layer, range))).collect()
    }

    #[test]
    fn a_full_scan_fetches_every_page_once_and_no_other() {
        for pages in [by_layer(4, 30), by_layer(30, 4), by_layer(5, 1)] {
            let size = pages.last().map(|(layer, range)| (layer + 1, range + 1)).unwrap();
            let fetched = scan(size, pages.clone());
            assert_eq!(fetched, pages[1..], "{size:?}");
        }
        let pages = by_range(30, 4);
        let mut fetched = scan((30, 4), pages.clone());
        // Before the order was known, the next range of the first layer was taken for the next.
        assert_eq!(fetched.remove(0), (0, 1));
        assert_eq!(fetched, pages[2..]);
    }

    #[test]
    fn a_scan_of_a_part_fetches_a_fifth_more_at_most() {
        for ranges in [10, 16, 27, 100] {
            let pages = by_layer(1, ranges);
            let fetched = scan((8, 1000), pages);
            let beyond = fetched.iter().filter(|(_, range)| *range >= ranges).count() as u64;
            assert!(beyond * 5 <= ranges, "{beyond} beyond {ranges}");
        }
        // In the next layers as many are expected as in the first.
        let fetched = scan((3, 1000), by_layer(3, 10));
        assert_eq!(fetched.iter().filter(|(_, range)| *range >= 10).count(), 2);
    }

    #[test]
    fn opens_without_an_order_fetch_nothing() {
        let pages = [17, 3, 90, 41, 7, 55, 23].map(|range| (0, range));
        assert_eq!(scan((2, 100), pages), []);
        assert_eq!(scan((2, 100), [(0, 0), (0, 0), (0, 0)]), [(0, 1)]);
        // The same range two layers on, or another one in the next layer, is no step.
        assert_eq!(scan((9, 100), [(0, 5), (2, 5)]), []);
        assert_eq!(scan((9, 100), [(0, 5), (1, 9)]), []);
        // Neither is the middle of the next layer.
        let pages = [(0, 0), (0, 1), (0, 2), (1, 7)];
        assert_eq!(scan((9, 100), pages), [(0, 1), (0, 2), (0, 3)]);
    }

    #[test]
    fn two_readers_of_a_sequence_do_not_disturb_each_other() {
        let first = by_layer(1, 20);
        let second = (40..60).map(|range| (0, range));
        let both: Vec<_> = first.into_iter().zip(second).flat_map(|(a, b)| [a, b]).collect();
        let fetched = scan((1, 100), both);
        let of_first: Vec<_> = fetched.iter().filter(|(_, range)| *range < 30).collect();
        assert_eq!(of_first.len(), 19 + 4);
        assert_eq!(fetched.len() - of_first.len(), 18 + 4);
    }

    #[test]
    fn the_bytes_ahead_are_bounded() {
        let mut scans = Scans::default();
        let mut beyond = 0;
        for range in 0..200 {
            let at = Position { layer: 0, start: range * TOKENS };
            let found = scans.opened(SEQUENCE, (at, TOKENS), 20 << 20, |at| Some(at.start));
            beyond = found.last().map_or(beyond, |start| start / TOKENS - range);
        }
        assert_eq!(beyond, 3);
        let next = Position { layer: 0, start: 200 * TOKENS };
        assert!(scans.expects(SEQUENCE, next));
        assert!(!scans.expects(InodeId(1), next));
        assert!(!scans.expects(SEQUENCE, Position { layer: 1, start: 0 }));
    }
}
