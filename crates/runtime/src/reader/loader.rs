//! The threads that open pages before they are wanted.
//!
//! Opening a page is what tells the mount to promote or fetch it, and takes as long as that does:
//! 40 us where it is in memory, seconds where it is remote. Each thread has one page on its way.
//! With pages of 4 MiB, four threads got 0.83 of what a disk gives to one large file, six 0.92,
//! eight 0.96, twelve 0.98. An `io_uring` with 8 or 12 reads in flight, on the thread that opens the
//! files and takes what was read, got 0.83 and 0.86, and saved no time of the processor
//! ([`page`](super::page) has the figures). It would not wait for the opens in parallel either.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{Builder, JoinHandle};

use crossbeam_channel::{Receiver, Sender, bounded};

use super::ReadError;
use super::buffer::Buffers;
use super::listing::{ListedPage, layer_directory};
use super::page::{Home, LoadedPage, Mapping, Means, Tier};
use super::residents::{Key, Residents};
use crate::page::{Layer, Manifest, PagePlace, names};

const THREADS: usize = 8;

/// Pages that wait for a thread, of all streams of a sequence: four windows of the longest sort.
const JOBS_MAX: usize = 256;

/// What a sequence and its threads share.
#[derive(Debug)]
pub(super) struct Source {
    pub(super) path: std::path::PathBuf,
    pub(super) manifest: Manifest,
    pub(super) home: Home,
    pub(super) number: u64,
    pub(super) residents: Arc<Residents>,
    pub(super) buffers: Arc<Buffers>,
    pub(super) mapping: Mapping,
}

impl Source {
    pub(super) fn key(&self, layer: Layer, page: &ListedPage) -> Key {
        Key { sequence: self.number, layer, start: page.start }
    }

    fn load(&self, layer: Layer, page: &ListedPage) -> Result<Arc<LoadedPage>, ReadError> {
        let key = self.key(layer, page);
        if let Some(loaded) = self.residents.get(&key) {
            return Ok(loaded);
        }
        let path = layer_directory(&self.path, layer).join(names::format_page(page.start));
        let place = PagePlace::new(&self.manifest, layer, page.start)
            .map_err(|error| ReadError::Refused { path: path.clone(), error })?;
        let loaded = if self.is_mappable(&path)? {
            LoadedPage::map(&path, place, self.mapping)?
        } else {
            let means = if page.is_fresh { Means::PageCache } else { Means::Direct };
            LoadedPage::read(&path, place, &self.buffers, means)?
        };
        // Elsewhere (overlayfs) a directory may number files in another way.
        if self.home != Home::Directory && loaded.inode() != page.inode {
            return Err(ReadError::Changed(path));
        }
        Ok(self.residents.offer(key, loaded))
    }

    fn is_mappable(&self, path: &Path) -> Result<bool, ReadError> {
        if self.home != Home::PassedThrough {
            return Ok(false);
        }
        match Tier::of(path) {
            // Opening it says so better.
            Err(ReadError::Io { error, .. }) if error.kind() == io::ErrorKind::NotFound => {
                Ok(false)
            }
            tier => Ok(tier? == Some(Tier::Ram)),
        }
    }
}

/// A page that is wanted.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) layer: Layer,
    pub(super) page: ListedPage,
    pub(super) answer: Answer,
}

/// Tells the stream what became of a page, whatever becomes of the thread.
#[derive(Debug)]
pub(super) struct Answer {
    pub(super) number: u64,
    pub(super) to: Sender<Done>,
    pub(super) cancelled: Arc<AtomicBool>,
    pub(super) is_given: bool,
}

/// A page of a stream, by its number there.
pub(super) type Done = (u64, Result<Arc<LoadedPage>, ReadError>);

impl Answer {
    fn give(&mut self, outcome: Result<Arc<LoadedPage>, ReadError>) {
        self.is_given = true;
        // There is room for every page that is under way; a stream that is gone wants none.
        let _ = self.to.try_send((self.number, outcome));
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        if !self.is_given {
            let why = "a thread that reads pages has ended";
            self.give(Err(ReadError::Io { path: "".into(), error: io::Error::other(why) }));
        }
    }
}

/// The threads. They end when it is stopped or dropped.
#[derive(Debug)]
pub(super) struct Loader {
    jobs: Option<Sender<Job>>,
    threads: Vec<JoinHandle<()>>,
}

impl Loader {
    pub(super) fn start(source: &Arc<Source>) -> io::Result<Self> {
        let (sender, receiver) = bounded(JOBS_MAX);
        let mut loader = Self { jobs: Some(sender), threads: Vec::new() };
        for index in 0..THREADS {
            let (source, jobs) = (Arc::clone(source), receiver.clone());
            let thread = Builder::new().name(format!("kvfs-read-{index}"));
            loader.threads.push(thread.spawn(move || work(&source, &jobs))?);
        }
        Ok(loader)
    }

    /// Waits while too many pages are waiting.
    pub(super) fn submit(&self, job: Job) {
        if let Some(jobs) = &self.jobs {
            // Without threads the job is dropped, and its answer says so.
            let _ = jobs.send(job);
        }
    }

    /// Waits for an open that is under way; the mount has a deadline for those.
    pub(super) fn stop(&mut self) {
        self.jobs = None;
        for thread in self.threads.drain(..) {
            // What it had to say, its answer has said.
            let _ = thread.join();
        }
    }
}

impl Drop for Loader {
    fn drop(&mut self) {
        self.stop();
    }
}

fn work(source: &Source, jobs: &Receiver<Job>) {
    for mut job in jobs {
        if !job.answer.cancelled.load(Ordering::Relaxed) {
            let outcome = source.load(job.layer, &job.page);
            job.answer.give(outcome);
        }
    }
}
