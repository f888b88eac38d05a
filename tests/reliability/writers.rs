//! Programs that write to a mount until it fails them, each in its own way, and write down what they
//! were promised.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use kvfs::page::{TokenStart, names};

use crate::common::sys::{open, rename, sync_directory, write};
use crate::common::{Model, Mount, eventually};
use crate::ledger::{Content, Ledger, Version, bytes_of, is_expected};

/// Names that each writer uses in turn, so that versions replace each other.
const NAMES: u64 = 5;
const FILE_BYTES: usize = 20_000;
/// A tail holds 32 rows: the writer crosses the border with each fourth append.
const TAIL_ROWS: u64 = 32;
const ROWS_AT_ONCE: u64 = 8;

/// Makes the model and the layers that the writers use, durably.
pub(crate) fn prepare(mount: &Mount, model: &Model) {
    model.install(mount);
    for sequence in ["renamed", "in-place", "rows"] {
        model.layer(mount, sequence, 0);
    }
    sync_directory(mount.path()).unwrap();
}

/// Whether a file is one that nobody writes again.
pub(crate) fn is_written_once(name: &Path) -> bool {
    let above = name.ancestors().nth(2).and_then(Path::file_name);
    above.is_some_and(|sequence| sequence == "in-place" || sequence == "rows")
}

/// Whoever appended rows goes on, wherever the last append ended.
pub(crate) fn rows_go_on(mount: &Path, model: &Model) {
    let layer = mount.join("models").join(&model.name).join("sequences/rows/000");
    for entry in std::fs::read_dir(layer).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "tail") {
            let tail = open(&path, libc::O_WRONLY | libc::O_APPEND).unwrap();
            let row = model.row_bytes();
            let length = usize::try_from(tail.metadata().unwrap().len()).unwrap();
            // To the end of the row that a cut may have left in part.
            let rest = row - length % row;
            let outcome = write(&tail, &vec![1; rest]);
            assert_eq!(outcome.unwrap(), rest, "{}, {length} bytes", path.display());
        }
    }
}

/// Runs all writers until `work` has returned and they have failed or stopped; `round` tells their
/// versions from those of earlier rounds. `work`
/// begins some time after something was acknowledged in this round.
pub(crate) fn write_during(
    mount: &Path, (model, round): (&Model, u64), ledger: &mut Ledger, life: Duration,
    work: impl FnOnce(),
) {
    let is_over = AtomicBool::new(false);
    let writers: [Writer; 6] =
        [renamed_file, copied_file, file_in_place, renamed_page, page_in_place, rows];
    let acknowledged = &AtomicU64::new(0);
    let is_dying = &AtomicBool::new(false);
    let program = Program { mount, model, round, acknowledged, is_dying };
    std::thread::scope(|scope| {
        let (program, is_over) = (&program, &is_over);
        let threads: Vec<_> = writers
            .into_iter()
            .map(|writer| scope.spawn(move || program.run(writer, is_over)))
            .collect();
        eventually("something to be acknowledged", || {
            (acknowledged.load(Ordering::Acquire) > 0).then_some(())
        });
        std::thread::sleep(life);
        is_dying.store(true, Ordering::Release);
        work();
        is_over.store(true, Ordering::Release);
        for thread in threads {
            ledger.absorb(thread.join().expect("a writer panicked"));
        }
    });
}

/// Writes once, under a name that follows from the number.
type Writer = fn(&Program<'_>, &mut Ledger, u64) -> io::Result<()>;

struct Program<'a> {
    mount: &'a Path,
    model: &'a Model,
    round: u64,
    acknowledged: &'a AtomicU64,
    /// The disk or the daemon ends now, or has.
    is_dying: &'a AtomicBool,
}

impl Program<'_> {
    fn run(
        &self, write: fn(&Program<'_>, &mut Ledger, u64) -> io::Result<()>, is_over: &AtomicBool,
    ) -> Ledger {
        let mut ledger = Ledger::default();
        for number in 0.. {
            if is_over.load(Ordering::Acquire) {
                break;
            }
            let before = ledger.acknowledged;
            let outcome = write(self, &mut ledger, number);
            self.acknowledged.fetch_add(ledger.acknowledged - before, Ordering::AcqRel);
            if let Err(error) = outcome {
                // Seen on XFS whose power was just cut: names that are there count as absent.
                let is_dead = self.is_dying.load(Ordering::Acquire)
                    && error.raw_os_error() == Some(libc::ENOENT);
                assert!(is_dead || is_expected(&error), "a writer: {error}");
                ledger.interrupted = 1;
                break;
            }
        }
        ledger
    }

    fn version(&self, number: u64) -> Version {
        self.round << 32 | number
    }

    fn layer(&self, sequence: &str) -> PathBuf {
        Path::new("models").join(&self.model.name).join("sequences").join(sequence).join("000")
    }

    /// Writes a new file, and syncs it if asked to.
    fn write(&self, name: &Path, bytes: &[u8], sync: bool) -> io::Result<()> {
        self.write_counted(name, bytes, sync, &mut 0)
    }

    /// The same; `written` is how many bytes it was told are written. An error may come in the middle of a write:
    /// the kernel hands it on in several requests unless it begins where a page of memory does.
    fn write_counted(
        &self, name: &Path, bytes: &[u8], sync: bool, written: &mut usize,
    ) -> io::Result<()> {
        let path = self.mount.join(name);
        let file = open(path, libc::O_WRONLY | libc::O_CREAT | libc::O_TRUNC)?;
        let (first, second) = bytes.split_at(bytes.len() / 2);
        for part in [first, second] {
            let count = write(&file, part)?;
            *written += count;
            if count < part.len() {
                return Err(io::Error::from_raw_os_error(libc::ENOSPC));
            }
        }
        if sync { file.sync_all() } else { crate::common::sys::close(file) }
    }
}

/// Temporary name, fsync, rename, fsync of the directory: what careful programs do.
fn renamed_file(program: &Program<'_>, ledger: &mut Ledger, number: u64) -> io::Result<()> {
    let name = Path::new("files").join(format!("renamed-{}", number % NAMES));
    let (content, version) = (Content::Plain(FILE_BYTES), program.version(number));
    ledger.begin(&name, content, version);
    let staged = Path::new("files").join(".renamed.tmp");
    program.write(&staged, &bytes_of(program.model, content, version), true)?;
    rename(program.mount.join(&staged), program.mount.join(&name))?;
    sync_directory(program.mount.join("files"))?;
    ledger.acknowledge(&name, version);
    Ok(())
}

/// What was written is cut to its length and copied by the kernel or the daemon.
fn copied_file(program: &Program<'_>, ledger: &mut Ledger, number: u64) -> io::Result<()> {
    let name = Path::new("files").join(format!("copied-{}", number % NAMES));
    let (content, version) = (Content::Plain(FILE_BYTES), program.version(number));
    ledger.begin(&name, content, version);
    let staged = [".source.tmp", ".copied.tmp"].map(|name| Path::new("files").join(name));
    let bytes = bytes_of(program.model, content, version);
    program.write(&staged[0], &[&bytes[..], b"too long"].concat(), false)?;
    let source = open(program.mount.join(&staged[0]), libc::O_RDWR)?;
    source.set_len(FILE_BYTES as u64)?;
    let flags = libc::O_WRONLY | libc::O_CREAT | libc::O_TRUNC;
    let target = open(program.mount.join(&staged[1]), flags)?;
    let mut left = FILE_BYTES;
    while left > 0 {
        match nix::fcntl::copy_file_range(&source, None, &target, None, left)? {
            0 => return Err(io::Error::from_raw_os_error(libc::EIO)),
            count => left -= count,
        }
    }
    target.sync_all()?;
    drop(target);
    rename(program.mount.join(&staged[1]), program.mount.join(&name))?;
    sync_directory(program.mount.join("files"))?;
    ledger.acknowledge(&name, version);
    Ok(())
}

/// Opened with `O_TRUNC`, and nobody waits for anything: all or nothing still.
fn file_in_place(program: &Program<'_>, ledger: &mut Ledger, number: u64) -> io::Result<()> {
    let name = Path::new("files").join(format!("in-place-{}", number % NAMES));
    let (content, version) = (Content::Plain(FILE_BYTES), program.version(number));
    ledger.begin(&name, content, version);
    let mut written = 0;
    let bytes = bytes_of(program.model, content, version);
    program
        .write_counted(&name, &bytes, false, &mut written)
        .inspect_err(|_| ledger.break_off(&name, version, written))
}

fn page_at(program: &Program<'_>, sequence: &str, number: u64) -> (PathBuf, Content, Version) {
    let start = number % NAMES * 32;
    let name = program.layer(sequence).join(names::format_page(TokenStart(start)));
    (name, Content::Page(0, start), program.version(number))
}

fn renamed_page(program: &Program<'_>, ledger: &mut Ledger, number: u64) -> io::Result<()> {
    let (name, content, version) = page_at(program, "renamed", number);
    ledger.begin(&name, content, version);
    let staged = name.with_file_name(".page.tmp");
    program.write(&staged, &bytes_of(program.model, content, version), false)?;
    rename(program.mount.join(&staged), program.mount.join(&name))?;
    if number.is_multiple_of(2) {
        // Together with whatever else happened before.
        sync_directory(program.mount.join(program.layer("renamed")))?;
        ledger.acknowledge(&name, version);
    }
    Ok(())
}

/// One page after the other under its own name.
fn page_in_place(program: &Program<'_>, ledger: &mut Ledger, number: u64) -> io::Result<()> {
    let start = number * 32;
    let name = program.layer("in-place").join(names::format_page(TokenStart(start)));
    let (content, version) = (Content::Page(0, start), program.version(number));
    ledger.begin(&name, content, version);
    program.write(&name, &bytes_of(program.model, content, version), false)?;
    File::open(program.mount.join(&name))?.sync_all()?;
    ledger.acknowledge(&name, version);
    std::thread::sleep(Duration::from_millis(1));
    Ok(())
}

/// Rows of one tail after the other, which become pages.
fn rows(program: &Program<'_>, ledger: &mut Ledger, number: u64) -> io::Result<()> {
    let end = (number + 1) * ROWS_AT_ONCE;
    let start = (end - 1) / TAIL_ROWS * TAIL_ROWS;
    let name = program.layer("rows").join(names::format_tail(TokenStart(start)));
    let count = end - start;
    ledger.begin(&name, Content::Rows, if count == ROWS_AT_ONCE { 0 } else { count });
    let flags = libc::O_WRONLY | libc::O_CREAT | libc::O_APPEND;
    let tail = open(program.mount.join(&name), flags)?;
    let all = bytes_of(program.model, Content::Rows, count);
    let added = program.model.row_bytes() * usize::try_from(ROWS_AT_ONCE).unwrap();
    write(&tail, &all[all.len() - added..])?;
    tail.sync_all()?;
    ledger.acknowledge(&name, count);
    Ok(())
}
