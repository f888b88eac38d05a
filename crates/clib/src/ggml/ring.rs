//! Rows of a cache that are read from its files ahead of attention, into buffers used again and again.
//!
//! The loads of a graph are known when it starts, in the order in which they are wanted: layer after
//! layer. Threads read them past the page cache, as far ahead as there are buffers.

use std::collections::HashMap;
use std::io;
use std::mem;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, JoinHandle};

use memmap2::{Advice, MmapMut};

use super::files::{CacheFile, Piece};

/// A disk gives all it has to so many reads of [`HALF_BYTES`] at once.
const THREADS: usize = 8;
/// A huge page, so that the disk is told of all of it at once, and not of each 4 KiB.
const BUFFER_BYTES: usize = 2 << 20;
/// Of a buffer: K has the first half, V the second.
pub(super) const HALF_BYTES: usize = BUFFER_BYTES / 2;
/// Buffers where memory allows it: what is being read, and as much that waits to be attended to.
const BUFFERS_MAX: usize = 2 * THREADS;
/// Of the memory that the process may have, buffers are at most one part in so many.
const MEMORY_SHARE: u64 = 8;

/// K and V of some cells of a layer.
#[derive(Debug)]
pub(super) struct Load {
    pub(super) k: (Arc<CacheFile>, Piece),
    pub(super) v: (Arc<CacheFile>, Piece),
    /// How often it is taken.
    pub(super) uses: usize,
}

#[derive(Debug, Default)]
struct State {
    /// Of the graph that is being computed.
    loads: Vec<Arc<Load>>,
    /// The first one that nobody reads.
    next: usize,
    reading: usize,
    /// Loads that were read, by number.
    ready: HashMap<usize, Ready>,
    idle: Vec<MmapMut>,
    /// Nobody waits for the loads of this graph any more.
    is_abandoned: bool,
    has_ended: bool,
}

#[derive(Debug)]
struct Ready {
    load: Arc<Load>,
    memory: Arc<MmapMut>,
    is_read: bool,
    uses_left: usize,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    /// There is something to read, and a buffer for it.
    room: Condvar,
    /// Something was read.
    read: Condvar,
}

impl State {
    /// The next load and a buffer for it, if there are both.
    fn start(&mut self) -> Option<(usize, Arc<Load>, MmapMut)> {
        let index = self.next;
        let load = Arc::clone(self.loads.get(index)?);
        let memory = self.idle.pop()?;
        self.next += 1;
        self.reading += 1;
        Some((index, load, memory))
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The threads and their buffers. They go when it is dropped.
#[derive(Debug)]
pub(super) struct Ring {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

impl Ring {
    /// For a process that may have `limit_bytes` of memory.
    ///
    /// # Errors
    /// Those of making threads and memory.
    pub(super) fn new(limit_bytes: u64) -> io::Result<Self> {
        let share = usize::try_from(limit_bytes / MEMORY_SHARE).unwrap_or(usize::MAX);
        let buffers = (share / BUFFER_BYTES).clamp(2, BUFFERS_MAX);
        let mut state = State::default();
        for _ in 0..buffers {
            let memory = MmapMut::map_anon(BUFFER_BYTES)?;
            // A kernel without huge pages refuses; then the memory has small ones.
            let _ = memory.advise(Advice::HugePage);
            state.idle.push(memory);
        }
        let shared = Arc::new(Shared { state: Mutex::new(state), ..Shared::default() });
        let mut ring = Self { shared, threads: Vec::new() };
        for index in 0..THREADS.min(buffers) {
            let shared = Arc::clone(&ring.shared);
            let thread = Builder::new().name(format!("kvfs-read-{index}"));
            ring.threads.push(thread.spawn(move || work(&shared))?);
        }
        Ok(ring)
    }

    /// Starts to read what a graph wants, in this order. One graph at a time.
    pub(super) fn begin(&self, loads: Vec<Load>) -> Pass<'_> {
        let mut state = self.shared.lock();
        state.loads = loads.into_iter().map(Arc::new).collect();
        state.next = 0;
        state.is_abandoned = false;
        drop(state);
        self.shared.room.notify_all();
        Pass(&self.shared)
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        self.shared.lock().has_ended = true;
        self.shared.room.notify_all();
        for thread in self.threads.drain(..) {
            // It has nothing more to say.
            let _ = thread.join();
        }
    }
}

/// The loads of one graph. What nobody took is forgotten when it is dropped.
#[derive(Debug)]
pub(super) struct Pass<'r>(&'r Shared);

impl Pass<'_> {
    /// Waits for a load. Whoever takes them in order waits only for the disk: buffers come back from
    /// those before.
    pub(super) fn take(&self, index: usize) -> Taken<'_> {
        let mut state = self.0.lock();
        loop {
            if let Some(ready) = state.ready.get(&index) {
                let memory = ready.is_read.then(|| Arc::clone(&ready.memory));
                return Taken { shared: self.0, index, load: Arc::clone(&ready.load), memory };
            }
            if state.is_abandoned {
                let load = Arc::clone(&state.loads[index]);
                return Taken { shared: self.0, index, load, memory: None };
            }
            state = self.0.read.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// After a failure: loads that are not taken any more must not keep others waiting.
    pub(super) fn abandon(&self) {
        let mut state = self.0.lock();
        state.next = state.loads.len();
        state.is_abandoned = true;
        drop(state);
        self.0.read.notify_all();
    }
}

impl Drop for Pass<'_> {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.next = state.loads.len();
        while state.reading > 0 {
            state = self.0.read.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.loads.clear();
        let left = mem::take(&mut state.ready);
        state.idle.extend(left.into_values().filter_map(|ready| Arc::into_inner(ready.memory)));
    }
}

/// What was read. Its buffer goes back after the last use.
#[derive(Debug)]
pub(super) struct Taken<'p> {
    shared: &'p Shared,
    index: usize,
    load: Arc<Load>,
    memory: Option<Arc<MmapMut>>,
}

impl Taken<'_> {
    /// Rows of K and of V; nothing, if the disk refused.
    pub(super) fn rows(&self) -> Option<(&[u8], &[u8])> {
        let (k, v) = self.memory.as_ref()?.split_at(HALF_BYTES);
        Some((self.load.k.1.rows(k), self.load.v.1.rows(v)))
    }
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        self.memory = None;
        let mut state = self.shared.lock();
        let Some(ready) = state.ready.get_mut(&self.index) else { return };
        ready.uses_left = ready.uses_left.saturating_sub(1);
        if ready.uses_left > 0 {
            return;
        }
        let memory = state.ready.remove(&self.index).and_then(|it| Arc::into_inner(it.memory));
        state.idle.extend(memory);
        drop(state);
        self.shared.room.notify_one();
    }
}

/// One thread: reads the next load into the next buffer.
fn work(shared: &Shared) {
    let mut state = shared.lock();
    while !state.has_ended {
        let Some((index, load, mut memory)) = state.start() else {
            state = shared.room.wait(state).unwrap_or_else(PoisonError::into_inner);
            continue;
        };
        drop(state);
        let (k, v) = memory.split_at_mut(HALF_BYTES);
        let read = |(file, piece): &(Arc<CacheFile>, Piece), to| file.read(piece, to);
        let is_read = read(&load.k, k).and_then(|()| read(&load.v, v)).is_ok();
        state = shared.lock();
        let uses_left = load.uses;
        let ready = Ready { load, memory: Arc::new(memory), is_read, uses_left };
        state.ready.insert(index, ready);
        state.reading -= 1;
        shared.read.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    /// The byte at a place of the file.
    fn byte(offset: usize) -> u8 {
        (offset / 7 % 251) as u8
    }

    fn ring(file_bytes: usize) -> (Ring, Arc<CacheFile>, tempfile::TempDir) {
        // Beside the program: not every filesystem for temporary files has O_DIRECT.
        let program = std::env::current_exe().unwrap();
        let directory = tempfile::tempdir_in(program.parent().unwrap()).unwrap();
        let path = directory.path().join("cache");
        std::fs::write(&path, (0..file_bytes).map(byte).collect::<Vec<_>>()).unwrap();
        let file = Arc::new(CacheFile::open(&path).unwrap());
        // Two buffers: far fewer than loads.
        (Ring::new(0).unwrap(), file, directory)
    }

    fn load(file: &Arc<CacheFile>, offset: usize, length: usize, uses: usize) -> Load {
        let part = |offset| (Arc::clone(file), Piece { offset, length });
        Load { k: part(offset), v: part(offset + 100), uses }
    }

    fn assert_rows(rows: &[u8], offset: usize, length: usize) {
        assert_eq!(rows.len(), length);
        assert!((offset..).zip(rows).all(|(offset, found)| *found == byte(offset)), "{offset}");
    }

    #[test]
    fn every_load_comes_in_order_to_each_who_takes_it() {
        const LENGTH: usize = 70_000;
        let (ring, file, _directory) = ring(4 << 20);
        for _graph in 0..3 {
            let offsets: Vec<usize> = (0..40).map(|index| index * 90_001 + 13).collect();
            let pass =
                ring.begin(offsets.iter().map(|offset| load(&file, *offset, LENGTH, 2)).collect());
            let take_all = || {
                for (index, offset) in offsets.iter().enumerate() {
                    let taken = pass.take(index);
                    let (k, v) = taken.rows().unwrap();
                    assert_rows(k, *offset, LENGTH);
                    assert_rows(v, offset + 100, LENGTH);
                }
            };
            thread::scope(|scope| {
                scope.spawn(take_all);
                take_all();
            });
        }
        // A graph that ends early leaves nothing behind.
        drop(ring.begin((0..40).map(|_| load(&file, 0, LENGTH, 1)).collect()));
        assert_eq!(ring.shared.lock().idle.len(), 2);
    }

    #[test]
    fn a_failure_keeps_nobody_waiting() {
        let (ring, file, _directory) = ring(1 << 20);
        let behind_the_end = load(&file, 2 << 20, 4096, 1);
        let mut loads = vec![behind_the_end];
        loads.extend((0..8).map(|_| load(&file, 0, 4096, 1)));
        let pass = ring.begin(loads);
        assert!(pass.take(0).rows().is_none());
        assert!(pass.take(1).rows().is_some());
        pass.abandon();
        for index in 2..9 {
            drop(pass.take(index));
        }
        drop(pass);
        let pass = ring.begin(vec![load(&file, 5, 4096, 1)]);
        assert_rows(pass.take(0).rows().unwrap().0, 5, 4096);
    }
}
