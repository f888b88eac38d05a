//! What the threads do until it is over.

use std::collections::VecDeque;
use std::fmt;
use std::fs::File;
use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use kvfs::reader::ReadError;

use crate::Soak;
use crate::common::random::Random;
use crate::common::sys::{close, open, rename, setxattr, sync_directory, try_map, write_and_close};
use crate::ledger::{Ledger, Slot};

/// What a worker has begun and has open still, at most.
const GIVEN_UP_MAX: usize = 4;

/// A thread's own things.
pub(crate) struct Worker {
    pub(crate) soak: Arc<Soak>,
    pub(crate) root: PathBuf,
    pub(crate) random: Random,
}

/// How often each thing was done, errors of a dead daemon apart.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    written: AtomicU64,
    synced: AtomicU64,
    pub(crate) removed: AtomicU64,
    read: AtomicU64,
    mapped: AtomicU64,
    moved: AtomicU64,
    collected: AtomicU64,
    pub(crate) appended: AtomicU64,
    pub(crate) rows_synced: AtomicU64,
    pub(crate) sealed: AtomicU64,
    pub(crate) limited: AtomicU64,
    pub(crate) saved: AtomicU64,
    pub(crate) restored: AtomicU64,
    pub(crate) slots_renamed: AtomicU64,
    pub(crate) slots_removed: AtomicU64,
    pub(crate) edited: AtomicU64,
    pub(crate) asked: AtomicU64,
    begun: AtomicU64,
    given_up: AtomicU64,
    pub(crate) registered: AtomicU64,
    pub(crate) looked_for: AtomicU64,
    pub(crate) blocks_read: AtomicU64,
    pub(crate) withdrawn: AtomicU64,
    pub(crate) closed_late: AtomicU64,
    pub(crate) pools_replaced: AtomicU64,
    pub(crate) by_hash: AtomicU64,
    failed: AtomicU64,
}

impl Counts {
    fn all(&self) -> [(&'static str, &AtomicU64); 27] {
        [
            ("written", &self.written),
            ("synced", &self.synced),
            ("removed", &self.removed),
            ("read", &self.read),
            ("mapped", &self.mapped),
            ("moved", &self.moved),
            ("collected", &self.collected),
            ("appended", &self.appended),
            ("synced rows", &self.rows_synced),
            ("sealed by rows", &self.sealed),
            ("written below a limit", &self.limited),
            ("saved as slots", &self.saved),
            ("restored from slots", &self.restored),
            ("renamed slots", &self.slots_renamed),
            ("removed slots", &self.slots_removed),
            ("edited", &self.edited),
            ("asked for", &self.asked),
            ("begun", &self.begun),
            ("given up", &self.given_up),
            ("registered blocks", &self.registered),
            ("looked for in blocks", &self.looked_for),
            ("read in blocks", &self.blocks_read),
            ("withdrawn blocks", &self.withdrawn),
            ("closed late", &self.closed_late),
            ("replaced pools", &self.pools_replaced),
            ("stored by hash", &self.by_hash),
            ("failed", &self.failed),
        ]
    }

    pub(crate) fn assert_something_of_everything(&self) {
        for (what, count) in &self.all()[..26] {
            assert!(count.load(Ordering::Relaxed) > 0, "nothing was {what}");
        }
    }
}

impl fmt::Display for Counts {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown =
            self.all().map(|(what, count)| format!("{} {what}", count.load(Ordering::Relaxed)));
        formatter.write_str(&shown.join(", "))
    }
}

pub(crate) fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

impl Worker {
    pub(crate) fn is_over(&self) -> bool {
        self.soak.is_over.load(Ordering::Relaxed)
    }

    /// Only a dead daemon, a disk without room or a copy that is elsewhere may be the reason.
    pub(crate) fn note(&self, what: &str, outcome: io::Result<()>, counter: &AtomicU64) {
        match outcome {
            Ok(()) => count(counter),
            Err(error) => {
                let errno = error.raw_os_error().unwrap_or(0);
                let dead = [
                    libc::ENOTCONN,
                    libc::ECONNABORTED,
                    libc::ECANCELED,
                    libc::EIO,
                    libc::ENODEV,
                    libc::EINTR,
                ];
                let busy = [
                    libc::EBUSY,
                    libc::ENOENT,
                    libc::ENOSPC,
                    libc::ESTALE,
                    libc::EAGAIN,
                    libc::EFBIG,
                ];
                assert!(dead.contains(&errno) || busy.contains(&errno), "{what}: {error}");
                count(&self.soak.counts.failed);
            }
        }
    }

    /// Begins to write what becomes nothing, and closes an older one of that kind.
    pub(crate) fn begin(
        &self, begun: io::Result<File>, half: &[u8], given_up: &mut VecDeque<File>,
    ) {
        let outcome = begun.and_then(|mut file| {
            let outcome = file.write_all(half);
            given_up.push_back(file);
            outcome
        });
        self.note("begin", outcome, &self.soak.counts.begun);
        if given_up.len() > GIVEN_UP_MAX {
            given_up.pop_front().into_iter().for_each(|file| self.give_up(file));
        }
    }

    /// Closes half a slot, or half a description of a block, which is refused, or a question.
    pub(crate) fn give_up(&self, file: File) {
        let outcome = match close(file) {
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Ok(()),
            outcome => outcome,
        };
        self.note("give up", outcome, &self.soak.counts.given_up);
    }

    /// Replaces and removes the files that are this writer's.
    pub(crate) fn write(mut self, writer: usize) {
        let soak = Arc::clone(&self.soak);
        let own: Vec<&Slot> =
            soak.ledger.slots.iter().skip(writer).step_by(crate::WRITERS).collect();
        while !self.is_over() {
            let _working = soak.pause.read().unwrap();
            let slot = *self.random.pick(&own);
            if self.random.one_in(12) {
                self.remove(slot);
            } else {
                self.replace(slot, writer);
            }
        }
    }

    fn replace(&mut self, slot: &Slot, writer: usize) {
        let version = {
            let mut known = slot.known.lock().unwrap();
            known.newest += 1;
            known.newest
        };
        let bytes = self.soak.ledger.bytes(slot, version);
        let temporary = Ledger::temporary(slot, writer);
        let publish = || {
            let _ = std::fs::remove_file(&temporary);
            write_and_close(&temporary, &bytes)?;
            rename(&temporary, &slot.path)
        };
        let outcome = publish();
        let is_there = outcome.is_ok();
        self.note("write", outcome, &self.soak.counts.written);
        if is_there && self.random.one_in(4) {
            let outcome = File::open(&slot.path).and_then(|file| file.sync_all());
            if outcome.is_ok() {
                slot.known.lock().unwrap().acknowledged = version;
            }
            self.note("sync", outcome, &self.soak.counts.synced);
        }
    }

    /// From before the name goes until it is synced the file may be there or not.
    fn remove(&mut self, slot: &Slot) {
        slot.known.lock().unwrap().acknowledged = 0;
        let outcome = std::fs::remove_file(&slot.path);
        self.note("remove", outcome, &self.soak.counts.removed);
    }

    /// Reads and maps what anybody wrote, while it is replaced, moved and encoded.
    pub(crate) fn read(mut self) {
        let soak = Arc::clone(&self.soak);
        while !self.is_over() {
            let _working = soak.pause.read().unwrap();
            let slot = self.random.pick(&soak.ledger.slots);
            // Whatever was removed or synced since may be seen too.
            let is_mapped = self.random.is_true();
            let outcome = open(&slot.path, libc::O_RDONLY).and_then(|file| {
                let bytes = if is_mapped { try_map(&file)?.to_vec() } else { read_all(&file)? };
                soak.ledger.check(slot, &bytes, 0);
                Ok(())
            });
            let counter = if is_mapped { &soak.counts.mapped } else { &soak.counts.read };
            self.note("read", outcome, counter);
        }
    }

    /// Asks for moves, pins, and collections of garbage.
    pub(crate) fn move_and_collect(mut self) {
        let soak = Arc::clone(&self.soak);
        while !self.is_over() {
            {
                let _working = soak.pause.read().unwrap();
                let slot = self.random.pick(&soak.ledger.slots);
                let tier: &[u8] =
                    self.random.pick::<&[u8]>(&[b"remote", b"remote", b"ssd", b"ram"]);
                self.note("move", setxattr(&slot.path, "user.kvfs.tier", tier), &soak.counts.moved);
                if self.random.one_in(50) {
                    let asked = setxattr(&self.root, "user.kvfs.gc", b"collect");
                    self.note("collect", asked, &soak.counts.collected);
                    let _ = sync_directory(&self.root);
                }
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

fn read_all(mut file: &File) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    io::Read::read_to_end(&mut file, &mut bytes)?;
    Ok(bytes)
}

/// A system call's error, of those that the reader library tells.
pub(crate) fn of_reader<T>(outcome: Result<T, ReadError>) -> io::Result<T> {
    outcome.map_err(|error| match error {
        ReadError::Io { error, .. } => error,
        ReadError::Disconnected(_) => io::Error::from_raw_os_error(libc::ENOTCONN),
        error => panic!("{error}"),
    })
}

/// Nothing where a name is not there, which is an answer.
pub(crate) fn or_absent<T>(outcome: io::Result<T>) -> io::Result<Option<T>> {
    match outcome {
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(None),
        outcome => outcome.map(Some),
    }
}
