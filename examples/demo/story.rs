//! The steps of the demo, in order.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::engine::{Reference, Stage};
use crate::mount_cache::Counts;
use crate::printer::Printer;
use crate::sandbox::{KvfsLine, MODEL, MOUNT, Sandbox};
use crate::{Result, Size, interrupt};

/// Where the sequence lies in the model.
const SEQUENCE: &str = "mnt/models/tiny-llama/sequences/ruth";

/// The layer and page that are removed: in the middle, so that later pages depend on it.
const LOST_LAYER: &str = "002";
const LOST_PAGE: usize = 2;

/// Lines of the status that are worth a look here.
const STATUS: [&str; 6] = [
    "state",
    "passthrough",
    "objects",
    "pages",
    "stored_bytes",
    "errors",
];

/// Lines of `kvfs inspect` that are worth a look here.
const HEADER: [&str; 6] = [
    "kind", "dtype", "k_shape", "v_shape", "checksum", "verified",
];

/// Runs everything; the error names the step.
pub(crate) fn tell(size: Size) -> Result<()> {
    let mut printer = Printer::new();
    let sandbox = Sandbox::new()?;
    interrupt::watch(sandbox.give_up())?;
    printer.say("kvfs: the KV cache of a language model, kept in files")?;
    let mut story = Story {
        size,
        sequence: sandbox.path(SEQUENCE),
        sandbox: &sandbox,
        printer: &mut printer,
    };
    let told = story.tell();
    drop(sandbox);
    let step = printer.step();
    told.map_err(|error| format!("step \"{step}\": {error}"))?;
    printer.say("\nEverything as in the uninterrupted run; the mount and its files are removed.")
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
        self.printer
            .begin("A run in memory that nobody interrupts, to compare with")?;
        let started = Instant::now();
        let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tiny-llama");
        let reference = Reference::run(&fixtures, self.size)?;
        let Size {
            prompt_tokens,
            stops: [.., last],
            ..
        } = self.size;
        let time = seconds(started.elapsed());
        self.printer.tell(format_args!(
            "{prompt_tokens} tokens of the book of Ruth read, {last} generated, in {time}:"
        ))?;
        self.printer
            .tell(format_args!("\"{}\"", reference.generated()))?;
        Ok(reference)
    }

    fn read_through_the_mount(&mut self, reference: &Reference) -> Result<()> {
        self.printer
            .begin("The same with the cache in a mount, up to its first stop")?;
        self.mount()?;
        let config = reference.model.config();
        let create = KvfsLine::Create {
            shape: config.shape(),
            layers: config.num_hidden_layers,
            page_tokens: self.size.page_tokens,
        };
        self.sandbox.kvfs(self.printer, &create)?;
        let stage = self.stage(reference, 0)?;
        let all_new = Counts {
            added: self.size.prompt_tokens,
            ..Counts::default()
        };
        expect_equal("tokens that ran through the model", stage.reading, all_new)?;
        let time = seconds(stage.first_token);
        self.printer.tell(format_args!(
            "{} tokens read in {time}, {} generated as in memory; fsync: all of it is durable",
            self.size.prompt_tokens, stage.compared
        ))
    }

    fn look_around(&mut self) -> Result<()> {
        self.printer.begin("What it looks like")?;
        let layer = format!("{SEQUENCE}/000");
        let listing = self.sandbox.run(self.printer, &format!("ls -l {layer}"))?;
        self.printer.show(listing.lines())?;
        let status = self
            .sandbox
            .run(self.printer, &format!("cat {MOUNT}/.kvfs/status"))?;
        self.printer.show(pick(&status, &STATUS))?;
        let page = format!("{layer}/0000000.safetensors");
        let header = self.sandbox.kvfs(self.printer, &KvfsLine::Inspect(&page))?;
        self.printer.show(pick(&header, &HEADER))
    }

    fn lose_the_daemon(&mut self, reference: &Reference) -> Result<()> {
        self.printer
            .begin("The daemon is killed, and the store mounted again")?;
        // The engine still has its files open when it happens.
        let open = reference.open(&self.sequence)?;
        let pid = self.sandbox.kill_daemon()?;
        drop(open);
        self.printer.tell(format_args!("$ kill -9 {pid}"))?;
        self.mount()?;
        let stage = self.stage(reference, 1)?;
        expect_equal(
            "tokens in the cache",
            stage.resumed.held,
            self.held_after(0),
        )?;
        expect_equal(
            "tokens that ran through the model",
            stage.reading,
            LAST_ONLY,
        )?;
        self.printer.tell(format_args!(
            "{} tokens found, 0 of {} prompt tokens computed again; the next {} generated tokens \
             and their logits are the same to the last bit",
            stage.resumed.held, self.size.prompt_tokens, stage.compared
        ))
    }

    fn compare_times(&mut self, reference: &Reference) -> Result<()> {
        self.printer.begin("The time to the first token")?;
        let [with_cache, without] = reference.first_token(&self.sequence, self.size.runs)?;
        let factor = without.as_secs_f64() / with_cache.as_secs_f64();
        self.printer.tell(format_args!(
            "{} from the cache in the mount, {} without a cache: {factor:.0} times faster \
             ({} tokens, medians of {})",
            seconds(with_cache),
            seconds(without),
            self.held_after(1),
            self.size.runs
        ))
    }

    fn lose_a_page(&mut self, reference: &Reference) -> Result<()> {
        self.printer.begin("A page is removed")?;
        let start = LOST_PAGE * self.size.page_tokens;
        let page = format!("{SEQUENCE}/{LOST_LAYER}/{start:07}.safetensors");
        self.sandbox.run(self.printer, &format!("rm {page}"))?;
        let stage = self.stage(reference, 2)?;
        let end = start + self.size.page_tokens;
        expect_equal("missing tokens", &stage.resumed.missing[..], &[start..end])?;
        let page_and_last = Counts {
            refilled: self.size.page_tokens,
            ..LAST_ONLY
        };
        expect_equal(
            "tokens that ran through the model",
            stage.reading,
            page_and_last,
        )?;
        if !self.sandbox.path(&page).is_file() {
            return Err(format!("{page} was not written again").into());
        }
        self.printer.tell(format_args!(
            "{} of {} tokens found, exactly its {} computed again and written back; the next {} \
             generated tokens are the same",
            stage.resumed.usable(),
            stage.resumed.held,
            stage.reading.refilled,
            stage.compared
        ))
    }

    fn lose_the_store(&mut self, reference: &Reference) -> Result<()> {
        self.printer
            .begin("A backup goes into a new, empty store")?;
        self.sandbox
            .run(self.printer, &format!("rsync -a {MODEL}/ backup/"))?;
        let (files, bytes) = tree_size(&self.sandbox.path("backup"))?;
        self.sandbox.kvfs(self.printer, &KvfsLine::Umount)?;
        self.sandbox.wipe_store()?;
        self.printer.tell("$ rm -r store")?;
        self.mount()?;
        let restore = format!("rsync -a --itemize-changes backup/ {MODEL}/");
        let moved = self.sandbox.run(self.printer, &restore)?;
        let moved = moved.lines().filter(|line| line.starts_with(">f")).count();
        expect_equal("files restored", moved, files)?;
        let again = self.sandbox.run(self.printer, &restore)?;
        expect_equal("changes found by the second rsync", again.as_str(), "")?;
        self.printer.tell(format_args!(
            "{files} files, {bytes} bytes went out and back; the second rsync found nothing to move"
        ))?;
        let stage = self.stage(reference, 3)?;
        expect_equal(
            "tokens in the cache",
            stage.resumed.held,
            self.held_after(2),
        )?;
        expect_equal(
            "tokens that ran through the model",
            stage.reading,
            LAST_ONLY,
        )?;
        self.printer.tell(format_args!(
            "{} tokens found, 0 computed again; the last {} generated tokens are the same",
            stage.resumed.held, stage.compared
        ))?;
        self.sandbox.kvfs(self.printer, &KvfsLine::Umount)?;
        Ok(())
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

/// The last token, a generated one, runs again: logits are not kept.
const LAST_ONLY: Counts = Counts {
    refilled: 0,
    repeated: 1,
    added: 0,
};

fn expect_equal<T: PartialEq + std::fmt::Debug>(what: &str, found: T, expected: T) -> Result<()> {
    if found == expected {
        return Ok(());
    }
    Err(format!("{what}: {found:?} instead of {expected:?}").into())
}

/// The lines with these keys.
fn pick<'a>(text: &'a str, keys: &'a [&str]) -> impl Iterator<Item = &'a str> {
    text.lines().filter(move |line| {
        line.split_once(": ")
            .is_some_and(|(key, _)| keys.contains(&key))
    })
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
