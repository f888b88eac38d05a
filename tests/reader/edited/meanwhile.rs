//! Operations on a sequence that others write to at the same time, which wait for nobody.
//!
//! On files without a mount, where a row is an id and each step is as short as it can be.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use kvfs::page::names;
use kvfs::sequence::{SequenceError, Sequences};
use nix::fcntl::{AT_FDCWD, RenameFlags, renameat2};

use crate::common::Model;

/// A model whose rows each are the id of their token, again and again.
struct Beside {
    directory: tempfile::TempDir,
    model: Model,
}

impl Beside {
    fn new() -> Beside {
        let model = Model::with(|fields| fields.page_tokens = 16);
        let directory = tempfile::tempdir().unwrap();
        let beside = Beside { directory, model };
        fs::create_dir_all(beside.home().join(names::SEQUENCES)).unwrap();
        fs::write(beside.home().join(names::MANIFEST), beside.model.manifest.to_json()).unwrap();
        beside
    }

    fn home(&self) -> PathBuf {
        self.directory.path().join("m")
    }

    fn path(&self, name: &str) -> PathBuf {
        self.home().join(names::SEQUENCES).join(name)
    }

    fn all(&self) -> Sequences {
        Sequences::open(&self.home()).unwrap()
    }

    fn rows(&self, ids: &[u32]) -> Vec<u8> {
        let row = |id: &u32| id.to_le_bytes().repeat(self.model.row_bytes() / 4);
        ids.iter().flat_map(row).collect()
    }

    /// Makes a sequence of tails: 16 tokens are a page of a mount, here they are not more than 15.
    fn make(&self, name: &str, ids: &[u32]) {
        for layer in 0..2 {
            fs::create_dir_all(self.path(name).join(format!("{layer:03}"))).unwrap();
        }
        self.append(name, ids);
    }

    fn append_rows(&self, name: &str, ids: &[u32]) {
        for layer in 0..2 {
            let tail = self.path(name).join(format!("{layer:03}/0000000.tail"));
            let mut file = File::options().append(true).create(true).open(tail).unwrap();
            file.write_all(&self.rows(ids)).unwrap();
        }
    }

    fn append_ids(&self, name: &str, ids: &[u32]) {
        let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        let path = self.path(name).join(names::TOKENS);
        let mut file = File::options().append(true).create(true).open(path).unwrap();
        file.write_all(&bytes).unwrap();
    }

    fn append(&self, name: &str, ids: &[u32]) {
        self.append_rows(name, ids);
        self.append_ids(name, ids);
    }

    /// The ids of a sequence whose rows are those of its ids, in every layer.
    fn ids(&self, name: &str) -> Vec<u32> {
        let bytes = fs::read(self.path(name).join(names::TOKENS)).unwrap();
        let ids = bytes.chunks_exact(4).map(|id| u32::from_le_bytes(id.try_into().unwrap()));
        let ids: Vec<u32> = ids.collect();
        for layer in 0..2 {
            let tail = self.path(name).join(format!("{layer:03}/0000000.tail"));
            let found = fs::read(tail).unwrap_or_default();
            assert!(
                found == self.rows(&ids),
                "layer {layer} of {name} has other rows than {ids:?}"
            );
        }
        ids
    }
}

/// Does something at the nth write that it gets.
struct Meddler<F> {
    written: Vec<u8>,
    left: usize,
    meddle: F,
}

impl<F: FnMut()> Write for Meddler<F> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.left == 0 {
            (self.meddle)();
        }
        self.left = self.left.wrapping_sub(1);
        self.written.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn exchange(one: &Path, other: &Path) {
    renameat2(AT_FDCWD, one, AT_FDCWD, other, RenameFlags::RENAME_EXCHANGE).unwrap();
}

const OURS: [u32; 6] = [1, 2, 3, 4, 5, 6];
const THEIRS: [u32; 6] = [1, 2, 3, 70, 80, 90];

#[test]
fn a_state_that_is_written_while_rows_come_has_none_that_is_torn() {
    for at in 0..20 {
        let beside = Beside::new();
        beside.make("a", &OURS);
        let meddle = || beside.append("a", &[7, 8]);
        let mut to = Meddler { written: Vec::new(), left: at, meddle };
        beside.all().state_write("a", &mut to).unwrap();
        beside.all().state_read("b", &to.written[..]).unwrap();
        let (found, whole) = (beside.ids("b"), [&OURS[..], &[7, 8]].concat());
        assert!(found == OURS || found == whole, "{at}: {found:?}");
    }
}

#[test]
fn a_state_is_never_of_two_sequences() {
    let mut noticed = 0;
    for at in 0..20 {
        let beside = Beside::new();
        beside.make("a", &OURS);
        beside.make("new", &THEIRS);
        let meddle = || exchange(&beside.path("a"), &beside.path("new"));
        let mut to = Meddler { written: Vec::new(), left: at, meddle };
        match beside.all().state_write("a", &mut to) {
            Ok(()) => {
                beside.all().state_read("b", &to.written[..]).unwrap();
                assert_eq!(beside.ids("b"), OURS);
            }
            Err(error) => {
                let said = error.to_string();
                let expected =
                    "sequence a changed while it was read: another sequence took its place";
                assert_eq!(said, expected);
                let read = beside.all().state_read("b", &to.written[..]);
                assert!(matches!(read, Err(SequenceError::State(_))), "it looks complete");
                noticed += 1;
            }
        }
    }
    assert!(noticed > 2);
}

struct End<'a>(&'a AtomicBool);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Runs something over and over while an operation is tried many times.
fn beside(each: impl Fn() + Sync, mut operation: impl FnMut(u32)) {
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                each();
            }
        });
        // Also where an assertion fails, or the other one would go on.
        let _end = End(&is_over);
        (0..50).for_each(&mut operation);
    });
}

#[test]
fn a_copy_is_never_of_two_sequences() {
    let files = Beside::new();
    files.make("a", &OURS);
    files.make("new", &THEIRS);
    let all = files.all();
    let mut copied = 0;
    let replace = || {
        exchange(&files.path("a"), &files.path("new"));
        thread::sleep(Duration::from_micros(300));
    };
    beside(replace, |round| {
        let name = format!("copy{round}");
        match all.seq_cp("a", &name, ..) {
            Ok(()) => {
                let ids = files.ids(&name);
                assert!(ids == OURS || ids == THEIRS);
                copied += 1;
            }
            Err(error) => {
                let said = error.to_string();
                assert!(said.starts_with("sequence a changed each of 5 times"), "{said}");
                assert!(!files.path(&name).exists() && !files.path(&format!("{name}~")).exists());
            }
        }
    });
    assert!(copied > 0);
}

/// Who appends opens each file by its path, and is slow: the operation comes between the rows and the id.
#[test]
fn an_append_during_an_operation_is_in_it_as_a_whole() {
    for is_clear in [false, true] {
        let files = Beside::new();
        files.make("a", &OURS);
        let all = files.all();
        thread::scope(|scope| {
            let slow = scope.spawn(|| {
                while !files.path("a~").join("tokens").exists() {
                    thread::yield_now();
                }
                files.append_rows("a", &[7]);
                thread::sleep(Duration::from_millis(20));
                files.append_ids("a", &[7]);
            });
            if is_clear { all.clear("a") } else { all.seq_rm("a", 4..) }.unwrap();
            slow.join().unwrap();
        });
        let kept = if is_clear { 0 } else { 4 };
        let ids = files.ids("a");
        assert!(ids == OURS[..kept] || ids == [&OURS[..kept], &[7]].concat(), "{ids:?}");
    }
}

#[test]
fn rows_that_came_before_an_edit_are_in_it() {
    let mut before = 0;
    for _ in 0..20 {
        let files = Beside::new();
        files.make("a", &OURS);
        let edit = files.path("a").join(names::POSITIONS);
        let came_before = thread::scope(|scope| {
            let engine = scope.spawn(|| {
                while !files.path("a").join(".positions.json.tmp").exists() {
                    if edit.exists() {
                        return false;
                    }
                }
                files.append("a", &[7]);
                !edit.exists()
            });
            files.all().seq_add("a", 2.., 100).unwrap();
            engine.join().unwrap()
        });
        if came_before {
            // It stands behind the others, as it was computed.
            assert_eq!(files.all().seq_pos("a").unwrap(), Some((0, 106)));
            let json = fs::read(&edit).unwrap();
            assert_eq!(kvfs::page::Positions::parse(&json).unwrap().closed_rows(), 7);
            before += 1;
        }
    }
    assert!(before > 0);
}
