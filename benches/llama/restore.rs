//! A conversation of 8192 tokens in a new process, and what two of them that begin alike take.

use std::fs::File;
use std::hint::black_box;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use crate::common::Mount;
use crate::engine::{Ran, command, finish};
use crate::figure::{ENGINE, Rounds, is_wanted, milliseconds};
use crate::gguf::Model;
use crate::speed::narrow_rows;
use crate::{program, slot_file};

const TOKENS: usize = 8192;
/// What a conversation has that begins like another.
const SHARED_TOKENS: usize = 6144;
/// Besides the time that reading takes of what is touched.
const TARGET_MS: f64 = 20.0;

/// A model of the mount with conversations of noise.
struct Conversations<'a> {
    mount: &'a Mount,
    directory: &'a Path,
    model: Model,
    gguf: PathBuf,
    pages: PathBuf,
}

pub(crate) fn measure(mount: &Mount, directory: &Path, rounds: usize) {
    let (restored, shared) = ("restored, 8192 tokens", "shared prefix");
    if !is_wanted(restored) && !is_wanted(shared) {
        return;
    }
    let conversations = Conversations::new(mount, directory);
    conversations.import("whole", TOKENS);
    if is_wanted(restored) {
        conversations.restored(rounds);
    }
    if is_wanted(shared) {
        conversations.shared();
    }
}

impl<'a> Conversations<'a> {
    fn new(mount: &'a Mount, directory: &'a Path) -> Self {
        let model = narrow_rows();
        let gguf = directory.join("model.gguf");
        model.write_random(7, &gguf);
        let pages = mount.join("models/bench");
        let numbers = [model.layers, model.kv_heads, model.head_dim].map(|it| it.to_string());
        let names = ["--layers", "--kv-heads", "--head-dim"];
        let mut create = Command::new(env!("CARGO_BIN_EXE_kvfs"));
        create.arg("create").arg(&pages).args(["--layout", "nhd"]);
        for (name, number) in names.iter().zip(&numbers) {
            create.arg(name).arg(number);
        }
        program::run(&mut create);
        Self { mount, directory, model, gguf, pages }
    }

    fn slot(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    /// Writes a slot file, which becomes a sequence.
    fn import(&self, name: &str, tokens: usize) {
        slot_file::write(&self.slot(name), &self.model, tokens);
        let mut import = Command::new(env!("CARGO_BIN_EXE_kvfs"));
        import.arg("import").arg(self.slot(name)).arg(self.pages.join("sequences").join(name));
        program::run(&mut import);
        self.sync();
    }

    fn sync(&self) {
        program::run(Command::new(env!("CARGO_BIN_EXE_kvfs")).arg("sync").arg(self.mount.path()));
    }

    /// A new engine goes on from a slot.
    fn load(&self, slot: &Path) -> Ran {
        let sizes = "--context 8448 --predict 4";
        let arguments = format!("{ENGINE} {sizes} --load {}", slot.display());
        let mut command = command(&self.gguf, &arguments, Some(self.mount.path()));
        let run = finish(None, command.env("KVFS_MODEL", &self.pages));
        run.assert_attention_was_ours();
        run
    }

    /// From the bytes of a slot file, and from references to pages. With those the first step reads
    /// what loading has mapped, so what it takes longer than others counts.
    fn restored(&self, rounds: usize) {
        let references = self.pages.join("slots/whole.ref");
        let (mut copied, mut mapped) = (Rounds::default(), Rounds::default());
        for _ in 0..rounds {
            let start = Instant::now();
            black_box(std::fs::read(self.slot("whole")).unwrap().len());
            let read = milliseconds(&[start.elapsed()]);
            copied.push(until_usual(&self.load(&self.slot("whole"))), read);
            let touched = milliseconds(&[self.touch()]);
            mapped.push(until_usual(&self.load(&references)), touched);
        }
        let beyond = |ours: f64, reading: f64| ours - reading;
        let target = format!("<={TARGET_MS}");
        mapped.print("restored, 8192 tokens, by reference", "ms", &target, beyond);
        copied.print("restored, 8192 tokens, the bytes of a slot file", "ms", "", beyond);
    }

    /// Reads all pages of the sequence into memory that is used again, with two threads.
    fn touch(&self) -> Duration {
        let sequence = self.pages.join("sequences/whole");
        let layers = (0..self.model.layers).map(|layer| sequence.join(format!("{layer:03}")));
        let pages = layers.flat_map(|layer| std::fs::read_dir(layer).unwrap());
        let pages: Vec<PathBuf> = pages.map(|page| page.unwrap().path()).collect();
        let start = Instant::now();
        std::thread::scope(|scope| {
            for half in pages.chunks(pages.len().div_ceil(2)) {
                scope.spawn(move || {
                    let mut buffer = Vec::new();
                    for page in half {
                        buffer.clear();
                        File::open(page).unwrap().read_to_end(&mut buffer).unwrap();
                        black_box(&buffer);
                    }
                });
            }
        });
        start.elapsed()
    }

    /// A second conversation, whose rows are the beginning of the first one's.
    fn shared(&self) {
        // The cache of the last engine is among them.
        self.sync();
        let objects = self.mount.store().join("objects");
        let first = allocated(&objects);
        self.import("beginning", SHARED_TOKENS);
        let second = allocated(&objects) - first;
        let row_bytes = 4 * self.model.layers * self.model.kv_heads * self.model.head_dim;
        println!(
            "shared prefix: {:.1} MiB for a second conversation of which {:.1} MiB are the first one's",
            second as f64 / f64::from(1 << 20),
            (SHARED_TOKENS * row_bytes) as f64 / f64::from(1 << 20)
        );
    }
}

/// From the beginning of loading until steps take what they usually do.
fn until_usual(run: &Ran) -> f64 {
    let (first, others) = run.decode.split_first().unwrap();
    let usual = others.iter().min().unwrap();
    milliseconds(&[run.prefill + first.saturating_sub(*usual)])
}

/// Bytes that files below a directory take.
fn allocated(directory: &Path) -> u64 {
    let entries = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    let bytes = |path: PathBuf| match path.symlink_metadata().unwrap() {
        metadata if metadata.is_dir() => allocated(&path),
        metadata => metadata.blocks() * 512,
    };
    entries.map(bytes).sum()
}
