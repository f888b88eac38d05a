//! Programs that use a mount, and count what fails.

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::common::model::Model;
use crate::common::{Mount, sys};

/// What all clients of this process have called so far.
static CALLS: AtomicU64 = AtomicU64::new(0);

/// Calls that ended by now, of all clients.
pub(crate) fn calls() -> u64 {
    CALLS.load(Ordering::Relaxed)
}

/// What a client did.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Done {
    pub(crate) calls: u64,
    pub(crate) longest: Duration,
}

impl Done {
    pub(crate) fn timed<T>(&mut self, call: impl FnOnce() -> T) -> T {
        let begin = Instant::now();
        let outcome = call();
        self.calls += 1;
        CALLS.fetch_add(1, Ordering::Relaxed);
        self.longest = self.longest.max(begin.elapsed());
        outcome
    }

    pub(crate) fn and(self, other: Done) -> Done {
        let longest = self.longest.max(other.longest);
        Done { calls: self.calls + other.calls, longest }
    }
}

/// Until this is so, clients go on.
pub(crate) fn is_over(over: &AtomicBool) -> bool {
    over.load(Ordering::Relaxed)
}

/// Writes files under another name, renames them, and reads and removes an older one.
pub(crate) fn write_by_rename(directory: &Path, bytes: usize, over: &AtomicBool) -> Done {
    std::fs::create_dir_all(directory).unwrap();
    let content = |round: u64| vec![u8::try_from(round % 251).unwrap(); bytes];
    let (mut done, mut round) = (Done::default(), 0);
    while !is_over(over) {
        let (temporary, path) = (directory.join(".tmp"), directory.join(round.to_string()));
        let mut file = done.timed(|| File::create(&temporary)).unwrap();
        done.timed(|| file.write_all(&content(round))).unwrap();
        if round % 16 == 0 {
            done.timed(|| file.sync_all()).unwrap();
        }
        drop(file);
        done.timed(|| sys::rename(&temporary, &path)).unwrap();
        if let Some(old) = round.checked_sub(8) {
            let path = directory.join(old.to_string());
            let mut read = Vec::new();
            let mut file = done.timed(|| File::open(&path)).unwrap();
            done.timed(|| file.read_to_end(&mut read)).unwrap();
            assert!(read == content(old), "{}", path.display());
            done.timed(|| std::fs::remove_file(&path)).unwrap();
        }
        round += 1;
    }
    done
}

/// Writes a few files anew, again and again.
pub(crate) fn rewrite(directory: &Path, bytes: usize, over: &AtomicBool) -> Done {
    std::fs::create_dir_all(directory).unwrap();
    let (mut done, content) = (Done::default(), vec![7; bytes]);
    for round in 0_u64.. {
        if is_over(over) {
            break;
        }
        let path = directory.join((round % 40).to_string());
        done.timed(|| std::fs::write(path, &content)).unwrap();
    }
    done
}

/// Appends token ids, and compares all of them.
pub(crate) fn append_tokens(mount: &Mount, model: &Model, over: &AtomicBool) -> Done {
    let path = model.tokens_path(mount, "appended");
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    let mut file = OpenOptions::new().append(true).create(true).open(&path).unwrap();
    let (mut done, mut count) = (Done::default(), 0_u32);
    while !is_over(over) {
        done.timed(|| file.write_all(&count.to_le_bytes())).unwrap();
        count += 1;
        if count % 64 == 0 {
            let read = done.timed(|| std::fs::read(&path)).unwrap();
            let expected: Vec<u8> = (0..count).flat_map(u32::to_le_bytes).collect();
            assert_eq!(read, expected, "after {count}");
        }
    }
    done
}

/// Changes an open file in place, and reads it through another descriptor of it.
pub(crate) fn change_in_place(path: &Path, over: &AtomicBool) -> Done {
    let mut how = OpenOptions::new();
    let file = how.read(true).write(true).create(true).truncate(true).open(path).unwrap();
    let copy = sys::duplicate(&file);
    let (mut done, mut round) = (Done::default(), 0_u64);
    while !is_over(over) {
        let at = 4096 * (round % 64);
        done.timed(|| file.write_all_at(&round.to_le_bytes(), at)).unwrap();
        let mut read = [0; 8];
        done.timed(|| copy.read_exact_at(&mut read, at)).unwrap();
        assert_eq!(u64::from_le_bytes(read), round);
        if round % 256 == 0 {
            // Opened once more beside it: the kernel refuses a second backing file.
            let again = done.timed(|| File::open(path)).unwrap();
            done.timed(|| again.read_exact_at(&mut read, at)).unwrap();
            assert_eq!(u64::from_le_bytes(read), round);
        }
        round += 1;
    }
    done
}

/// Lists a directory of so many files half-way, waits, lists the rest, and looks at each.
pub(crate) fn list(directory: &Path, count: usize, over: &AtomicBool) -> Done {
    std::fs::create_dir_all(directory).unwrap();
    let names: Vec<PathBuf> = (0..count).map(|n| directory.join(format!("file-{n:04}"))).collect();
    for name in &names {
        std::fs::write(name, b"x").unwrap();
    }
    let mut done = Done::default();
    while !is_over(over) {
        let mut entries = done.timed(|| std::fs::read_dir(directory)).unwrap();
        let mut found: Vec<PathBuf> = Vec::new();
        for entry in entries.by_ref().take(count / 2) {
            found.push(entry.unwrap().path());
        }
        std::thread::sleep(Duration::from_millis(50));
        while let Some(entry) = done.timed(|| entries.next()) {
            found.push(entry.unwrap().path());
        }
        found.sort();
        assert!(found == names, "{} of {count}", found.len());
        for name in &found {
            assert_eq!(done.timed(|| std::fs::metadata(name)).unwrap().len(), 1);
        }
    }
    done
}

/// Maps a page anew and anew, and keeps one mapping all the time.
pub(crate) fn map(page: &Path, expected: &[u8], over: &AtomicBool) -> Done {
    let kept = sys::map(&File::open(page).unwrap());
    let mut done = Done::default();
    while !is_over(over) {
        let file = done.timed(|| File::open(page)).unwrap();
        let mapped = done.timed(|| sys::map(&file));
        assert!(mapped[..] == *expected && kept[..] == *expected);
        std::thread::sleep(Duration::from_millis(1));
    }
    done
}
