//! The steps of the demonstration, in order.

use std::fs;
use std::io::{self, Write};
use std::time::{Duration, Instant};

use super::pages::{PAGE_TOKENS, Pages, token_ids};
use super::sandbox::{MOUNT, Sandbox};
use super::toy::{Cache, HEAD_DIM, HEADS, LAYERS, Toy};
use crate::cli::output::bytes;
use crate::reader::longest_prefix;

const MODEL: &str = "mnt/models/toy";
/// What all prompts begin with, to the token.
const SHARED_TOKENS: usize = 1024;
const SYSTEM: &str = "You work in the library of a small town by the sea. Answer in one sentence. ";
/// What a user adds, to the token.
const OWN_TOKENS: usize = 128;
/// How many tokens are compared before and after the restart.
const NEXT_TOKENS: usize = 8;

/// What is told, and what it has measured so far.
#[derive(Debug)]
pub(super) struct Story<'a> {
    sandbox: &'a Sandbox,
    toy: Toy,
    step: &'static str,
    steps: usize,
    /// What the first `SHARED_TOKENS` took to compute, and the whole first prompt.
    shared_time: Duration,
    prompt_time: Duration,
}

/// One line, or several, for people.
pub(super) fn say(text: &str) -> Result<(), String> {
    let mut out = io::stdout().lock();
    let written = writeln!(out, "{text}").and_then(|()| out.flush());
    written.map_err(|error| format!("standard output: {error}"))
}

/// A line that belongs to a step.
fn tell(line: &str) -> Result<(), String> {
    say(&format!("   {line}"))
}

/// What a program has printed.
fn show<'a>(lines: impl Iterator<Item = &'a str>) -> Result<(), String> {
    for line in lines {
        tell(&format!("  {line}"))?;
    }
    Ok(())
}

impl<'a> Story<'a> {
    pub(super) fn new(sandbox: &'a Sandbox) -> Story<'a> {
        let (shared_time, prompt_time) = (Duration::ZERO, Duration::ZERO);
        Story { sandbox, toy: Toy::new(), step: "start", steps: 0, shared_time, prompt_time }
    }

    /// Tells everything; the error names the step.
    pub(super) fn tell(mut self) -> Result<(), String> {
        let outcome = self.all();
        outcome.map_err(|error| format!("demo, step {} ({}): {error}", self.steps, self.step))
    }

    fn all(&mut self) -> Result<(), String> {
        say(&format!(
            "A model of {LAYERS} layers with random weights keeps its KV cache in a mount. It has learned nothing, but it\n\
             computes as others do; all figures are of this run, on this machine."
        ))?;
        let pages = self.compute()?;
        self.begin("Another prompt begins like it")?;
        let bob = self.share(&pages, "bob", "When do you close on Sundays?")?;
        self.begin("A third one finds whichever sequence has most of it")?;
        self.share(&pages, "carol", "Who wrote the book of Ruth?")?;
        self.look_around()?;
        self.evict_and_fetch(&pages)?;
        self.restart(&pages, &bob)
    }

    fn compute(&mut self) -> Result<Pages, String> {
        self.begin("A prompt is computed, and its cache becomes files")?;
        self.kvfs(&Sandbox::mount_line())?;
        self.kvfs(&format!(
            "create {MODEL} --layers {LAYERS} --kv-heads {HEADS} --head-dim {HEAD_DIM} --page-tokens {PAGE_TOKENS}"
        ))?;
        let pages = Pages::open(self.sandbox.path(MODEL))?;
        let prompt = prompt("May I bring my dog?");
        let mut cache = Cache::default();
        let started = Instant::now();
        self.toy.read(&mut cache, &prompt[..SHARED_TOKENS]);
        self.shared_time = started.elapsed();
        self.toy.read(&mut cache, &prompt[SHARED_TOKENS..]);
        self.prompt_time = started.elapsed();
        let started = Instant::now();
        let written = pages.write("alice", &cache, &prompt, 0)?;
        tell(&format!(
            "alice: {} tokens computed in {}, {} of pages written in {}",
            prompt.len(),
            seconds(self.prompt_time),
            bytes(written),
            seconds(started.elapsed())
        ))?;
        Ok(pages)
    }

    /// A prompt that begins like the first.
    fn share(&self, pages: &Pages, name: &str, question: &str) -> Result<Cache, String> {
        let prompt = prompt(question);
        let asked = format!("{name}.tokens");
        let path = self.sandbox.path(&asked);
        fs::write(&path, token_ids(&prompt))
            .map_err(|error| format!("{}: {error}", path.display()))?;
        self.kvfs(&format!("match {MODEL} --tokens {asked}"))?;
        let ids: Vec<u32> = prompt.iter().map(|token| u32::from(*token)).collect();
        let found = longest_prefix(&self.sandbox.path(MODEL), &ids);
        let found = found.map_err(|error| error.to_string())?.tokens;
        let kept = usize::try_from(found).unwrap_or(0) / PAGE_TOKENS * PAGE_TOKENS;
        expect("tokens in pages that can be shared", &kept, &SHARED_TOKENS)?;
        self.kvfs(&format!("seq cp {MODEL} alice {name} ..{kept}"))?;
        let started = Instant::now();
        let (mut cache, _) = pages.read(name, kept)?;
        let restored = started.elapsed();
        let started = Instant::now();
        self.toy.read(&mut cache, &prompt[kept..]);
        let computed = started.elapsed();
        pages.write(name, &cache, &prompt, kept)?;
        tell(&format!(
            "{name}: {kept} tokens restored in {}, which took {} to compute; the other {} computed in {}",
            seconds(restored),
            seconds(self.shared_time),
            prompt.len() - kept,
            seconds(computed)
        ))?;
        Ok(cache)
    }

    fn look_around(&mut self) -> Result<(), String> {
        self.begin("What that looks like: pages that are shared have several links")?;
        let line = format!("ls -l {MODEL}/sequences/bob/000");
        tell(&format!("$ {line}"))?;
        let listing = self.sandbox.run(&line)?;
        show(listing.lines().skip(1))
    }

    fn evict_and_fetch(&mut self, pages: &Pages) -> Result<(), String> {
        self.begin("A sequence leaves the disk for the remote, and comes back when it is read")?;
        let before = pages.read("alice", SHARED_TOKENS + OWN_TOKENS)?;
        let alice = format!("{MODEL}/sequences/alice");
        self.kvfs(&format!("evict {alice}"))?;
        self.kvfs(&format!("status --plan {alice}"))?;
        let started = Instant::now();
        let fetched = pages.read("alice", SHARED_TOKENS + OWN_TOKENS)?;
        let time = started.elapsed();
        if fetched != before {
            return Err("what came back is not what left".to_owned());
        }
        tell(&format!(
            "alice: {} fetched in {}, bit for bit what it was; computing it took {}",
            bytes(fetched.1),
            seconds(time),
            seconds(self.prompt_time)
        ))
    }

    fn restart(&mut self, pages: &Pages, before: &Cache) -> Result<(), String> {
        self.begin("The daemon is killed, and the store mounted again")?;
        self.kvfs(&format!("sync {MOUNT}"))?;
        let pid = self.sandbox.kill_daemon()?;
        tell(&format!("$ kill -9 {pid}"))?;
        let started = Instant::now();
        self.kvfs(&Sandbox::mount_line())?;
        let mounted = started.elapsed();
        let started = Instant::now();
        let (mut restored, _) = pages.read("bob", before.tokens())?;
        let time = started.elapsed();
        if restored != *before {
            return Err("what was restored is not what was computed".to_owned());
        }
        let mut uninterrupted = before.clone();
        let next = self.continued(&mut uninterrupted);
        expect("the next tokens", &self.continued(&mut restored), &next)?;
        tell(&format!(
            "bob: mounted in {}, {} tokens restored in {}, 0 computed; the next {NEXT_TOKENS} tokens are the same as",
            seconds(mounted),
            before.tokens(),
            seconds(time),
        ))?;
        let factor = self.prompt_time.as_secs_f64() / time.as_secs_f64();
        tell(&format!(
            "without the kill. Computing as many took {}: {factor:.0} times as long as restoring them.",
            seconds(self.prompt_time)
        ))
    }

    /// Each token follows from all before it.
    fn continued(&self, cache: &mut Cache) -> Vec<u8> {
        let mut next = b'.';
        let mut continue_once = |_| {
            next = self.toy.read(cache, &[next]);
            next
        };
        (0..NEXT_TOKENS).map(&mut continue_once).collect()
    }

    fn begin(&mut self, step: &'static str) -> Result<(), String> {
        self.step = step;
        self.steps += 1;
        say(&format!("\n{}. {step}", self.steps))
    }

    /// A command, as a person types it, and what it prints.
    fn kvfs(&self, line: &str) -> Result<(), String> {
        tell(&format!("$ kvfs {line}"))?;
        let printed = self.sandbox.kvfs(line)?;
        show(printed.lines())
    }
}

fn prompt(question: &str) -> Vec<u8> {
    let system = SYSTEM.bytes().cycle().take(SHARED_TOKENS);
    system.chain(question.bytes().cycle().take(OWN_TOKENS)).collect()
}

fn expect<T: PartialEq + std::fmt::Debug>(
    what: &str, found: &T, expected: &T,
) -> Result<(), String> {
    if found == expected {
        return Ok(());
    }
    Err(format!("{what}: {found:?} instead of {expected:?}"))
}

/// `8.3 ms` or `0.85 s`.
fn seconds(time: Duration) -> String {
    if time < Duration::from_millis(100) {
        format!("{:.1} ms", time.as_secs_f64() * 1e3)
    } else {
        format!("{:.2} s", time.as_secs_f64())
    }
}
