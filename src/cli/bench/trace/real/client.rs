//! A client of the replay: looks for what it can load, loads it, compares every byte, and makes the rest.

use std::fs::{self, File};
use std::io::Read;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::gate::{Gate, Stopped};
use super::pages::Pages;
use super::simulate::{Event, TIERS, Tier};
use crate::cli::bench::transfer::write_pages;
use crate::page::{Layer, names};

/// Pages that are made between two calls of fsync(2): an engine that lost more would not like it, and memory that is
/// not on the disk yet cannot leave.
const SYNCED_PAGES: usize = 32;
/// Between two looks whether the replay ends.
const WAIT: Duration = Duration::from_millis(50);

/// What clients have in common.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) pages: Pages,
    pub(super) gate: Gate,
    /// When each request comes.
    arrivals: Vec<Duration>,
    begun: Instant,
    /// The next request that nobody has taken.
    next: AtomicUsize,
    events: Mutex<Vec<Event>>,
    /// Pages of which a client knows that they are durable.
    durable: Vec<AtomicBool>,
}

/// What a client did.
#[derive(Clone, Debug, Default)]
pub(super) struct Served {
    /// Milliseconds in which what was found of a prompt was loaded.
    pub(super) loads: Vec<f64>,
    /// Pages by the tier that had them.
    pub(super) loaded: [u64; 3],
    /// Pages that were not there, and were made.
    pub(super) made: u64,
    pub(super) wrong_bytes: u64,
    /// Pages that were durable, and absent later.
    pub(super) lost: u64,
    /// Requests that were made again, since the daemon was killed.
    pub(super) repeated: u64,
}

/// Why a request ended early.
#[derive(Debug)]
enum Trouble {
    Stopped(Stopped),
    Failed(String),
}

impl From<Stopped> for Trouble {
    fn from(stopped: Stopped) -> Trouble {
        Trouble::Stopped(stopped)
    }
}

impl From<String> for Trouble {
    fn from(error: String) -> Trouble {
        Trouble::Failed(error)
    }
}

impl Shared {
    /// Time begins now.
    pub(super) fn new(pages: Pages, arrivals: Vec<Duration>) -> Shared {
        let durable = (0..pages.count()).map(|_| AtomicBool::new(false)).collect();
        Shared {
            pages,
            gate: Gate::default(),
            arrivals,
            begun: Instant::now(),
            next: AtomicUsize::new(0),
            events: Mutex::default(),
            durable,
        }
    }

    fn events(&self) -> MutexGuard<'_, Vec<Event>> {
        self.events.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes down what happened.
    pub(super) fn note(&self, event: Event) {
        self.events().push(event);
    }

    /// Everything that happened.
    pub(super) fn take_events(&self) -> Vec<Event> {
        std::mem::take(&mut *self.events())
    }

    /// Requests that were taken.
    pub(super) fn taken(&self) -> usize {
        self.next.load(Ordering::Relaxed).min(self.arrivals.len())
    }

    /// Pages of which somebody was told that they are durable.
    pub(super) fn durable(&self) -> Vec<u32> {
        let durable = (0..).zip(&self.durable).filter(|(_, is)| is.load(Ordering::Acquire));
        durable.map(|(page, _)| page).collect()
    }

    /// Takes requests by turns until there is none: however slow the disk is, there are as many at once as clients.
    pub(super) fn serve(&self) -> Result<Served, String> {
        let mut served = Served::default();
        let outcome = self.serve_all(&mut served);
        if outcome.is_err() {
            self.gate.end();
        }
        outcome.map(|()| served)
    }

    fn serve_all(&self, served: &mut Served) -> Result<(), String> {
        loop {
            let request = self.next.fetch_add(1, Ordering::Relaxed);
            let Some(arrival) = self.arrivals.get(request) else { return Ok(()) };
            for attempt in 0.. {
                match self.attempt((request, attempt), *arrival, served) {
                    Ok(()) => break,
                    Err(Trouble::Stopped(Stopped::Killed)) => served.repeated += 1,
                    Err(Trouble::Stopped(Stopped::Over)) => return Ok(()),
                    Err(Trouble::Failed(error)) => return Err(error),
                }
            }
        }
    }

    fn attempt(
        &self, (request, attempt): (usize, u32), arrival: Duration, served: &mut Served,
    ) -> Result<(), Trouble> {
        let mut generation = self.gate.enter()?;
        while let Some(wait) = arrival.checked_sub(self.begun.elapsed()) {
            std::thread::sleep(wait.min(WAIT));
            generation = self.gate.enter()?;
        }
        self.gate.wait_for_room(generation)?;
        let pages = self.pages.of(request);
        let outcome = self.find(pages, generation, served).and_then(|found| {
            self.load(&pages[..found], served)?;
            self.make(&format!("{request}-{attempt}"), (pages, found), generation, served)
        });
        match outcome {
            Err(Trouble::Failed(_)) if self.gate.was_killed(generation) => {
                Err(Stopped::Killed.into())
            }
            outcome => outcome,
        }
    }

    /// How many pages are there, up to the first that is not.
    fn find(&self, pages: &[u32], generation: u32, served: &mut Served) -> Result<usize, Trouble> {
        for (found, page) in pages.iter().enumerate() {
            let path = self.pages.path(*page);
            if path.try_exists().map_err(at(&path))? {
                continue;
            }
            // Without a mount everything is absent.
            if self.gate.was_killed(generation) {
                return Err(Stopped::Killed.into());
            }
            served.lost += u64::from(self.durable[*page as usize].load(Ordering::Acquire));
            return Ok(found);
        }
        Ok(pages.len())
    }

    fn load(&self, found: &[u32], served: &mut Served) -> Result<(), Trouble> {
        let (mut spent, mut bytes) = (Duration::ZERO, Vec::new());
        for page in found {
            let path = self.pages.path(*page);
            let tier = tier(&path)?;
            // Written down before the next client does the same: what the policy hears has an order.
            self.note(Event::Found(*page, tier));
            let begun = Instant::now();
            read(&path, &mut bytes)?;
            spent += begun.elapsed();
            if tier == Tier::Remote {
                self.note(Event::Landed(*page, self::tier(&path)?));
            }
            served.wrong_bytes += self.pages.wrong_bytes(*page, &bytes)?;
            served.loaded[tier as usize] += 1;
        }
        if !found.is_empty() {
            served.loads.push(spent.as_secs_f64() * 1e3);
        }
        Ok(())
    }

    /// Makes the pages that are not there, in a sequence of the request's own: its tokens tell what they follow.
    fn make(
        &self, name: &str, (pages, found): (&[u32], usize), generation: u32, served: &mut Served,
    ) -> Result<(), Trouble> {
        if pages.len() == found {
            return Ok(());
        }
        let sequence = self.pages.model().join(names::SEQUENCES).join(name);
        let layer = sequence.join(names::format_layer(Layer(0)));
        for directory in [&sequence, &layer] {
            // Not those above: where nothing is mounted, they would lie in the mountpoint.
            fs::create_dir(directory).map_err(at(directory))?;
        }
        let tokens = sequence.join(names::TOKENS);
        fs::write(&tokens, self.pages.tokens(pages)).map_err(at(&tokens))?;
        for new in pages[found..].chunks(SYNCED_PAGES) {
            self.gate.wait_for_room(generation)?;
            for page in new {
                let named = (self.pages.name(*page), self.pages.bytes(*page)?);
                write_pages(&layer, &[named], |_| Ok(()))?;
                self.note(Event::Made(*page));
                served.made += 1;
            }
            File::open(&layer).and_then(|directory| directory.sync_all()).map_err(at(&layer))?;
            for page in new {
                self.durable[*page as usize].store(true, Ordering::Release);
            }
            self.note(Event::Durable(new.to_vec()));
        }
        Ok(())
    }

    /// What a daemon that was killed has left to the next, for which so many pages wait for the remote.
    pub(super) fn what_is_left(&self, waiting: usize) -> Result<Event, String> {
        let (mut on_disk, mut in_remote) = (Vec::new(), Vec::new());
        for page in (0..).take(self.pages.count()) {
            let path = self.pages.path(page);
            if !path.try_exists().map_err(at(&path))? {
                continue;
            }
            match tier(&path)? {
                Tier::Remote => in_remote.push(page),
                Tier::Ram | Tier::Ssd => on_disk.push(page),
            }
        }
        Ok(Event::Killed { on_disk, waiting, in_remote })
    }

    /// After the end: which of the durable pages are absent, and the bytes of some of the others.
    pub(super) fn look_back(&self, read_most: usize, served: &mut Served) -> Result<(), String> {
        let durable = self.durable();
        let every = durable.len().div_ceil(read_most).max(1);
        let mut bytes = Vec::new();
        for (number, page) in durable.iter().enumerate() {
            let path = self.pages.path(*page);
            if !path.try_exists().map_err(at(&path))? {
                served.lost += 1;
            } else if number % every == 0 {
                read(&path, &mut bytes)?;
                served.wrong_bytes += self.pages.wrong_bytes(*page, &bytes)?;
            }
        }
        Ok(())
    }
}

impl Served {
    /// Adds what another client did.
    pub(super) fn add(&mut self, other: Served) {
        self.loads.extend(other.loads);
        for (sum, count) in self.loaded.iter_mut().zip(other.loaded) {
            *sum += count;
        }
        self.made += other.made;
        self.wrong_bytes += other.wrong_bytes;
        self.lost += other.lost;
        self.repeated += other.repeated;
    }
}

fn read(path: &Path, bytes: &mut Vec<u8>) -> Result<(), String> {
    bytes.clear();
    File::open(path).and_then(|mut file| file.read_to_end(bytes)).map(drop).map_err(at(path))
}

/// Where a page is.
fn tier(path: &Path) -> Result<Tier, String> {
    let value = crate::sys::extended_attribute(path, c"user.kvfs.tier").map_err(at(path))?;
    let value = value.unwrap_or_default();
    let tier = TIERS.iter().find(|(_, name)| name.as_bytes() == value);
    let told = || format!("{}: is in tier {:?}", path.display(), String::from_utf8_lossy(&value));
    tier.map(|(tier, _)| *tier).ok_or_else(told)
}

fn at(path: &Path) -> impl Fn(std::io::Error) -> String + '_ {
    crate::cli::bench::measure::at(path)
}
