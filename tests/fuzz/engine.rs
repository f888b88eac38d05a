//! Makes inputs, runs a target with them, and keeps those that made it do something new.
//!
//! New is a behaviour that the target reports (which refusal, which shape of success), and, in an
//! instrumented build, an edge of the code that was not taken before ([`super::coverage`]).

use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::{corpus, coverage, memory, mutate};
use crate::common::random::Random;
use crate::common::sys::be_idle;

/// Longest time for one input: everything takes milliseconds, but the machine may have others to do.
const HANG: Duration = Duration::from_secs(120);
/// Inputs kept in memory. The oldest goes, so a target without end cannot fill it.
const KEPT_MAX: usize = 4096;

/// What a target made of an input.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Outcome {
    accepted: bool,
    behaviour: u64,
}

impl Outcome {
    /// It was taken, in a way that `how` tells apart.
    pub(crate) fn accepted(how: impl Hash) -> Outcome {
        Outcome { accepted: true, behaviour: hash((true, how)) }
    }

    /// It was refused. Numbers and quotations in the reason come from the input and say nothing new.
    pub(crate) fn refused(why: &impl std::fmt::Display) -> Outcome {
        let text = why.to_string();
        assert!(!text.contains('\n'), "a reason is one line: {text}");
        assert!(text.len() < 4096, "a reason has {} bytes", text.len());
        let fixed: String = text.split('"').step_by(2).collect();
        let words = fixed.split(|letter: char| !letter.is_ascii_alphabetic());
        let known: Vec<&str> = words.filter(|word| word.len() > 1).take(6).collect();
        Outcome { accepted: false, behaviour: hash((false, known)) }
    }
}

fn hash(value: impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

/// Something that reads bytes.
pub(crate) struct Target {
    /// Of the corpus and in what is printed.
    pub(crate) name: &'static str,
    /// Longer inputs are cut.
    pub(crate) length_max: usize,
    /// Inputs to begin with; those of the corpus are added.
    pub(crate) seeds: Vec<Vec<u8>>,
    /// Words that mean something to the target.
    pub(crate) words: &'static [&'static [u8]],
    /// Bytes that one allocation may have, whatever the input says.
    pub(crate) allocation_max: usize,
    pub(crate) run: Run,
}

/// Looks at one input; keeps what is dear to make anew.
pub(crate) type Run = Box<dyn FnMut(&[u8]) -> Outcome>;

/// What was tried.
#[derive(Default)]
struct Tally {
    executions: u64,
    accepted: u64,
    behaviours: HashSet<u64>,
}

/// Runs a target for `KVFS_FUZZ_SECONDS`, or on the input that `KVFS_FUZZ_INPUT` names alone.
pub(crate) fn fuzz(mut target: Target) {
    if let Some(path) = std::env::var_os("KVFS_FUZZ_INPUT") {
        let input = std::fs::read(path).unwrap();
        println!("{:?}", (target.run)(&input));
        return;
    }
    be_idle();
    let seconds = std::env::var("KVFS_FUZZ_SECONDS").map_or(2.0, |text| text.parse().unwrap());
    let seed = std::env::var("KVFS_SEED").map_or(1, |text| text.parse().unwrap());
    let mut random = Random::of(seed);
    let mut seeds = std::mem::take(&mut target.seeds);
    seeds.extend(corpus::read(target.name));
    let mut session = Session::new(target);
    for input in &seeds {
        session.try_input(input);
    }
    if session.kept.is_empty() {
        session.kept.push(Vec::new());
    }
    let start = Instant::now();
    let deadline = start + Duration::from_secs_f64(seconds);
    while Instant::now() < deadline {
        let mut input = random.pick(&session.kept).clone();
        let other = random.pick(&session.kept).clone();
        mutate::mutate(&mut input, &other, session.target.words, &mut random);
        input.truncate(session.target.length_max);
        session.try_input(&input);
    }
    session.report(start.elapsed(), seed);
}

struct Session {
    target: Target,
    coverage: coverage::Coverage,
    kept: Vec<Vec<u8>>,
    tally: Tally,
    watch: Watch,
}

impl Session {
    fn new(target: Target) -> Session {
        let watch = Watch::start(target.name);
        let (coverage, tally) = (coverage::Coverage::new(), Tally::default());
        Session { target, coverage, kept: Vec::new(), tally, watch }
    }

    fn try_input(&mut self, input: &[u8]) {
        self.watch.begin(input);
        self.coverage.reset();
        memory::reset();
        let outcome = catch_unwind(AssertUnwindSafe(|| (self.target.run)(input)));
        let largest = memory::largest();
        self.watch.end();
        let Ok(outcome) = outcome else {
            panic!("{}", complaint(self.target.name, "it panicked", input));
        };
        if largest > self.target.allocation_max {
            let what = format!("it asked for {largest} bytes of memory");
            panic!("{}", complaint(self.target.name, &what, input));
        }
        self.tally.executions += 1;
        self.tally.accepted += u64::from(outcome.accepted);
        let is_new = self.tally.behaviours.insert(outcome.behaviour);
        if self.coverage.is_new() | is_new {
            if self.kept.len() == KEPT_MAX {
                self.kept.remove(0);
            }
            self.kept.push(input.to_vec());
        }
    }

    fn report(mut self, elapsed: Duration, seed: u64) {
        let Tally { executions, accepted, behaviours } = std::mem::take(&mut self.tally);
        let name = self.target.name;
        println!(
            "fuzz {name}: {executions} executions in {:.1} s, {accepted} accepted, {} behaviours, \
             {} edges, {} inputs kept, seed {seed}",
            elapsed.as_secs_f64(),
            behaviours.len(),
            self.coverage.edges(),
            self.kept.len(),
        );
        assert!(accepted > 0, "{name}: no input was accepted: it proves nothing");
        assert!(accepted < executions, "{name}: no input was refused: it proves nothing");
        if std::env::var_os("KVFS_FUZZ_KEEP").is_some() {
            corpus::write(name, self.smallest_that_show_all());
        }
    }

    /// Of the inputs kept, short ones first, those that show something which those before do not.
    fn smallest_that_show_all(&mut self) -> Vec<Vec<u8>> {
        let mut inputs = std::mem::take(&mut self.kept);
        inputs.sort_by_key(Vec::len);
        self.coverage = coverage::Coverage::new();
        self.tally = Tally::default();
        for input in &inputs {
            self.try_input(input);
        }
        std::mem::take(&mut self.kept)
    }
}

/// What went wrong, and where the input is that shows it.
fn complaint(name: &str, what: &str, input: &[u8]) -> String {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("fuzz-{name}.input"));
    std::fs::write(&path, input).unwrap();
    let place = path.display();
    format!("fuzz {name}: {what}: KVFS_FUZZ_INPUT={place} repeats it: {}", input.escape_ascii())
}

/// Ends the process when an input takes too long.
struct Watch {
    current: Arc<Mutex<Current>>,
}

/// The input that is being looked at, and since when.
type Current = Option<(Instant, Vec<u8>)>;

impl Watch {
    fn start(name: &'static str) -> Watch {
        let current = Arc::new(Mutex::new(Current::None));
        let watched = Arc::downgrade(&current);
        let watch = move || {
            while let Some(current) = watched.upgrade() {
                let slow = current.lock().unwrap_or_else(PoisonError::into_inner).clone();
                if let Some((since, input)) = slow
                    && since.elapsed() > HANG
                {
                    eprintln!("{}", complaint(name, "it hangs", &input));
                    std::process::abort();
                }
                drop(current);
                std::thread::sleep(Duration::from_secs(1));
            }
        };
        std::thread::Builder::new().name("fuzz-watch".to_owned()).spawn(watch).unwrap();
        Watch { current }
    }

    fn begin(&self, input: &[u8]) {
        let begun = Some((Instant::now(), input.to_vec()));
        *self.current.lock().unwrap_or_else(PoisonError::into_inner) = begun;
    }

    fn end(&self) {
        *self.current.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

/// A directory in memory, for targets that need a store: thousands are made in a minute.
pub(crate) fn directory_in_memory() -> tempfile::TempDir {
    let shared = PathBuf::from("/dev/shm");
    let base = if shared.is_dir() { shared } else { std::env::temp_dir() };
    tempfile::Builder::new().prefix("kvfs-fuzz-").tempdir_in(base).unwrap()
}
