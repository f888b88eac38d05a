//! The steps of the demo, in order.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::engine::{Reference, Stage};
use crate::mount_cache::Counts;
use crate::printer::Printer;
use crate::sandbox::{KvfsLine, MODEL, MOUNT, STORE, Sandbox};
use crate::{Result, Size, interrupt};

/// Where the sequence lies in the model.
const SEQUENCE: &str = "mnt/models/tiny-llama/sequences/ruth";

/// The layer and page that are removed: in the middle, so that later pages depend on it.
const LOST_LAYER: &str = "002";
const LOST_PAGE: usize = 2;

/// Lines of the status that are worth a look here.
const STATUS: [&str; 4] = ["state", "passthrough", "pages", "stored_bytes"];

/// Lines of `kvfs inspect` that are worth a look here.
const HEADER: [&str; 5] = ["kind", "dtype", "k_shape", "checksum", "verified"];

/// Runs everything; the error names the step.
pub(crate) fn tell(size: Size) -> Result<()> {
    let mut printer = Printer::new();
    let sandbox = Sandbox::new()?;
    interrupt::watch(sandbox.give_up())?;
    printer.say("The KV cache of a language model, kept in files: a small Llama reads, and nothing is read twice.")?;
    let mut story =
        Story { size, sequence: sandbox.path(SEQUENCE), sandbox: &sandbox, printer: &mut printer };
    let told = story.tell();
    drop(sandbox);
    let step = printer.step();
    told.map_err(|error| format!("step \"{step}\": {error}"))?;
    printer.say("\nAll as without interruption. The mount and everything in it are removed.")
}

struct Story<'a> {
    size: Size,
    sandbox: &'a Sandbox,
    sequence: PathBuf,
    printer: &'a mut Printer,
}

impl Story<'_> {
    fn tell(&mut self) -> Result<()> {
        let reference = self.read_in_memory()?;
        self.read_through_the_mount(&reference)?;
        self.look_around()?;
        self.lose_the_daemon(&reference)?;
        self.compare_times(&reference)?;
        self.lose_a_page(&reference)?;
        self.lose_the_store(&reference)
    }

    fn read_in_memory(&mut self) -> Result<Reference> {
        self.printer.begin("To compare with: a run in memory that nobody interrupts")?;
        let started = Instant::now();
        let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tiny-llama");
        let reference = Reference::run(&fixtures, self.size)?;
        let Size { prompt_tokens, stops: [.., last], .. } = self.size;
        let time = seconds(started.elapsed());
        self.printer.tell(format_args!(
            "{prompt_tokens} tokens of the book of Ruth read, {last} generated, in {time}:"
        ))?;
        self.printer.tell(format_args!("\"{}\"", reference.generated()))?;
        Ok(reference)
    }

    fn read_through_the_mount(&mut self, reference: &Reference) -> Result<()> {
        self.printer.begin("The same, with the cache in a mount")?;
        self.mount()?;
        let config = reference.model.config();
        let create = KvfsLine::Create {
            shape: config.shape()?,
            layers: config.num_hidden_layers,
            page_tokens: self.size.page_tokens,
        };
        self.sandbox.kvfs(self.printer, &create)?;
        let stage = self.stage(reference, 0)?;
        let all_new = Counts { added: self.size.prompt_tokens, ..Counts::default() };
        expect_equal("tokens that ran through the model", &stage.reading, &all_new)?;
        let (tokens, time) = (self.size.prompt_tokens, seconds(stage.first_token));
        self.printer.tell(format_args!("{tokens} tokens read in {time}"))?;
        self.tell_generated(&stage)
    }

    fn look_around(&mut self) -> Result<()> {
        self.printer.begin("What that looks like")?;
        let layer = format!("{SEQUENCE}/000");
        let listing = self.sandbox.run(self.printer, &format!("ls -l {layer}"))?;
        self.printer.show(listing.lines().skip(1))?;
        let status = format!("cat {MOUNT}/.kvfs/status");
        let status = self.sandbox.run(self.printer, &status)?;
        self.printer.show(pick(&status, &STATUS))?;
        let page = format!("{layer}/0000000.safetensors");
        let header = self.sandbox.kvfs(self.printer, &KvfsLine::Inspect(&page))?;
        self.printer.show(pick(&header, &HEADER))
    }

    fn lose_the_daemon(&mut self, reference: &Reference) -> Result<()> {
        self.printer.begin("The daemon is killed, and the store mounted again")?;
        // The engine still has its files open when it happens.
        let open = reference.open(&self.sequence)?;
        let pid = self.sandbox.kill_daemon()?;
        drop(open);
        self.printer.tell(format_args!("$ kill -9 {pid}"))?;
        self.mount()?;
        let stage = self.stage(reference, 1)?;
        self.tell_nothing_lost(&stage, 0)?;
        self.tell_tail_sealed()
    }

    /// The rows of the last page of the prompt came one by one, some before the crash.
    fn tell_tail_sealed(&mut self) -> Result<()> {
        let start = self.size.prompt_tokens / self.size.page_tokens * self.size.page_tokens;
        let page = self.sequence.join(format!("{LOST_LAYER}/{start:07}.safetensors"));
        if !page.is_file() || page.with_extension("tail").exists() {
            return Err(format!("{start:07}.tail is full and not a page").into());
        }
        self.printer.tell(format_args!(
            "on the way {start:07}.tail filled up and was sealed as {start:07}.safetensors"
        ))
    }

    fn compare_times(&mut self, reference: &Reference) -> Result<()> {
        self.printer.begin("The time to the next token")?;
        let [with_cache, without] = reference.first_token(&self.sequence, self.size.runs)?;
        let factor = without.as_secs_f64() / with_cache.as_secs_f64();
        let (tokens, runs) = (self.held_after(1), self.size.runs);
        self.printer.tell(format_args!(
            "after {tokens} tokens, median of {runs}: {} with the cache in the mount,",
            seconds(with_cache)
        ))?;
        self.printer.tell(format_args!(
            "{} reading everything again: {factor:.0} times as long",
            seconds(without)
        ))
    }

    fn lose_a_page(&mut self, reference: &Reference) -> Result<()> {
        self.printer.begin("A page is removed")?;
        let start = LOST_PAGE * self.size.page_tokens;
        let page = format!("{SEQUENCE}/{LOST_LAYER}/{start:07}.safetensors");
        self.sandbox.run(self.printer, &format!("rm {page}"))?;
        let stage = self.stage(reference, 2)?;
        let lost = start..start + self.size.page_tokens;
        let page_and_last = Counts { refilled: lost.len(), ..LAST_ONLY };
        expect_equal("tokens that ran through the model", &stage.reading, &page_and_last)?;
        self.printer.tell(format_args!(
            "{} of {} tokens found; exactly the {} from {start} on computed again and written back",
            stage.resumed.usable(),
            stage.resumed.held,
            stage.reading.refilled
        ))?;
        expect_equal("missing tokens", &stage.resumed.missing, &vec![lost])?;
        if !self.sandbox.path(&page).is_file() {
            return Err(format!("{page} was not written again").into());
        }
        self.tell_generated(&stage)
    }

    fn lose_the_store(&mut self, reference: &Reference) -> Result<()> {
        self.printer.begin("A backup is restored into a new, empty store")?;
        let back_up = format!("rsync -a {MODEL}/ backup/");
        self.sandbox.run(self.printer, &back_up)?;
        let (files, bytes) = tree_size(&self.sandbox.path("backup"))?;
        self.sandbox.kvfs(self.printer, &KvfsLine::Umount)?;
        self.sandbox.run(self.printer, &format!("rm -r {STORE}"))?;
        self.mount()?;
        let restore = format!("rsync -ai backup/ {MODEL}/");
        let moved = self.sandbox.run(self.printer, &restore)?;
        let moved = moved.lines().filter(|line| line.starts_with(">f")).count();
        expect_equal("files restored", &moved, &files)?;
        let again = self.sandbox.run(self.printer, &restore)?;
        expect_equal("changes that the second rsync found", again.as_str(), "")?;
        self.printer.tell(format_args!(
            "{files} files of {bytes} bytes went out and back; the second rsync moved nothing"
        ))?;
        let stage = self.stage(reference, 3)?;
        self.tell_nothing_lost(&stage, 2)?;
        self.sandbox.kvfs(self.printer, &KvfsLine::Umount)?;
        Ok(())
    }

    /// After a loss that the cache survives whole.
    fn tell_nothing_lost(&mut self, stage: &Stage, stop: usize) -> Result<()> {
        let held = stage.resumed.held;
        expect_equal("tokens in the cache", &held, &self.held_after(stop))?;
        expect_equal("tokens that ran through the model", &stage.reading, &LAST_ONLY)?;
        let prompt = self.size.prompt_tokens;
        self.printer.tell(format_args!(
            "{held} tokens found; 0 of the {prompt} prompt tokens computed again"
        ))?;
        self.tell_generated(stage)
    }

    /// Every token was compared when it was chosen.
    fn tell_generated(&mut self, stage: &Stage) -> Result<()> {
        self.printer.tell(format_args!(
            "{} tokens generated, the same as without interruption, logits bit for bit; fsync",
            stage.compared
        ))
    }

    fn mount(&mut self) -> Result<()> {
        self.sandbox.kvfs(self.printer, &KvfsLine::Mount)?;
        Ok(())
    }

    fn stage(&self, reference: &Reference, stop: usize) -> Result<Stage> {
        reference.run_stage(&self.sequence, self.size.stops[stop])
    }

    /// Tokens that a sequence holds at a stop: the last one generated has not run yet.
    fn held_after(&self, stop: usize) -> usize {
        self.size.prompt_tokens + self.size.stops[stop] - 1
    }
}

/// The last token, a generated one, runs again after each interruption: logits are not kept.
const LAST_ONLY: Counts = Counts { refilled: 0, repeated: 1, added: 0 };

fn expect_equal<T>(what: &str, found: &T, expected: &T) -> Result<()>
where
    T: PartialEq + std::fmt::Debug + ?Sized,
{
    if found == expected {
        return Ok(());
    }
    Err(format!("{what}: {found:?} instead of {expected:?}").into())
}

/// The lines with these keys.
fn pick<'a>(text: &'a str, keys: &'a [&str]) -> impl Iterator<Item = &'a str> {
    text.lines()
        .filter(move |line| line.split_once(": ").is_some_and(|(key, _)| keys.contains(&key)))
}

/// Files below a directory, and their bytes.
fn tree_size(directory: &Path) -> Result<(usize, u64)> {
    let (mut files, mut bytes) = (0, 0);
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            let below = tree_size(&entry.path())?;
            files += below.0;
            bytes += below.1;
        } else {
            files += 1;
            bytes += entry.metadata()?.len();
        }
    }
    Ok((files, bytes))
}

/// `8.3 ms` or `0.85 s`.
fn seconds(time: Duration) -> String {
    if time < Duration::from_millis(100) {
        format!("{:.1} ms", time.as_secs_f64() * 1e3)
    } else {
        format!("{:.2} s", time.as_secs_f64())
    }
}
