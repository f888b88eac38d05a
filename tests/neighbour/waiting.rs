//! How long a program waits for its answers, and which part of that for a processor: its own turn, and those
//! of the daemon's threads that take requests.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Between two reads: an honest program has other things to do.
const PAUSE: Duration = Duration::from_micros(500);
/// What one read asks for.
pub(crate) const READ_BYTES: usize = 64 << 10;
/// What the daemon's threads that take requests are called, with rings and without.
const TAKES_REQUESTS: [&str; 2] = ["kvfs-ring-", "kvfs-device-"];

/// One open and read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Sample {
    took: Duration,
    /// The program was ready to run and had no processor.
    program: Duration,
    /// Threads of the daemon were and had none, all of them together.
    daemon: Duration,
}

/// Reads again and again.
pub(crate) struct Reader {
    path: PathBuf,
    /// Statistics of the daemon's threads that take requests.
    threads: Vec<PathBuf>,
}

/// Reads, by how long they took.
pub(crate) struct Latencies(Vec<Sample>);

impl Reader {
    /// Of a file; a plain one has no daemon.
    pub(crate) fn new(path: PathBuf, daemon: Option<u32>) -> Reader {
        Reader { path, threads: daemon.map(threads).unwrap_or_default() }
    }

    /// Opens and reads until it is over or the time is.
    pub(crate) fn read(&self, longest: Duration, mut is_over: impl FnMut() -> bool) -> Latencies {
        let begun = Instant::now();
        let mut found = Vec::new();
        let mut bytes = vec![0; READ_BYTES];
        let own = Path::new("/proc/thread-self/schedstat");
        let daemon = || self.threads.iter().map(|thread| waited(thread)).sum::<Duration>();
        while begun.elapsed() < longest && !is_over() {
            let before = (waited(own), daemon());
            let asked = Instant::now();
            File::open(&self.path).unwrap().read_exact(&mut bytes).unwrap();
            let took = asked.elapsed();
            let program = waited(own).saturating_sub(before.0);
            let daemon = daemon().saturating_sub(before.1);
            found.push(Sample { took, program, daemon });
            std::thread::sleep(PAUSE);
        }
        assert!(found.len() > 20, "{} reads in {:?}", found.len(), begun.elapsed());
        found.sort();
        Latencies(found)
    }
}

impl Latencies {
    /// The time that so many of a thousand do not exceed.
    pub(crate) fn percentile(&self, of_thousand: usize) -> Duration {
        self.0[self.place(of_thousand)].took
    }

    fn place(&self, of_thousand: usize) -> usize {
        (self.0.len() * of_thousand / 1000).min(self.0.len() - 1)
    }
}

impl std::fmt::Display for Latencies {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [half, most] = [500, 999].map(|of_thousand| self.percentile(of_thousand));
        let count = self.0.len();
        let slowest = self.0[count - 1].took;
        // The slowest hundredth: what the tail is made of.
        let tail = &self.0[self.place(990)..];
        let mean = |part: fn(&Sample) -> Duration| {
            tail.iter().map(part).sum::<Duration>() / u32::try_from(tail.len()).unwrap()
        };
        write!(
            formatter,
            "p50 {half:.1?} p99.9 {most:.1?} slowest {slowest:.1?} of {count} (the slowest hundredth: \
             {:.1?}, of which waiting for a processor {:.1?} and the daemon's threads {:.1?})",
            mean(|sample| sample.took),
            mean(|sample| sample.program),
            mean(|sample| sample.daemon),
        )
    }
}

/// `schedstat` of the threads that take requests.
fn threads(daemon: u32) -> Vec<PathBuf> {
    let tasks = std::fs::read_dir(format!("/proc/{daemon}/task")).unwrap();
    let takes_requests = |task: &PathBuf| {
        let name = std::fs::read_to_string(task.join("comm")).unwrap_or_default();
        TAKES_REQUESTS.iter().any(|prefix| name.starts_with(prefix))
    };
    let tasks = tasks.map(|task| task.unwrap().path()).filter(takes_requests);
    tasks.map(|task| task.join("schedstat")).collect()
}

/// How long a thread was ready to run and had no processor, all in all.
fn waited(schedstat: &Path) -> Duration {
    let text = std::fs::read_to_string(schedstat).unwrap_or_default();
    let nanoseconds = text.split_whitespace().nth(1).and_then(|field| field.parse().ok());
    Duration::from_nanos(nanoseconds.unwrap_or(0))
}
