//! Operations on the sequences of a model take turns.

use std::fs::TryLockError;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::OnceLock;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread::Builder;
use std::time::Duration;

use super::SequenceError;
use super::held::Held;
use crate::sys;

/// Most operations are shorter.
const PATIENCE: Duration = Duration::from_secs(1);

static TELL: OnceLock<fn(&Path)> = OnceLock::new();

/// Has a function called with the directory that an operation waits for, where it has waited for a second for whoever has
/// locked that: once for each time that it waits, and on another thread. Without, nobody is told.
///
/// A program says so once, when it begins; later calls change nothing.
pub fn tell_of_waits(tell: fn(&Path)) {
    let _ = TELL.set(tell);
}

/// Opens a directory when no other operation is in it; the turn ends when it is closed.
pub(super) fn wait(path: &Path) -> Result<Held, SequenceError> {
    let failed = SequenceError::io(path);
    loop {
        let directory = Held::open(path)?;
        match directory.file().try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                telling(path, || directory.file().lock()).map_err(&failed)?;
            }
            Err(TryLockError::Error(error)) => return Err(failed(error)),
        }
        // Whoever held the lock may have put another one in its place, or a link.
        let now = sys::metadata_no_follow(path).map_err(&failed)?;
        if (now.dev(), now.ino()) == directory.identity()? {
            return Ok(directory);
        }
    }
}

/// Waits, and has it told if that takes long. The lock itself is waited for in one call: whoever came first has it first.
fn telling<T>(directory: &Path, wait: impl FnOnce() -> T) -> T {
    let Some(tell) = TELL.get() else { return wait() };
    let (_ended, end) = channel::<()>();
    let directory = directory.to_owned();
    let watch = move || {
        if end.recv_timeout(PATIENCE) == Err(RecvTimeoutError::Timeout) {
            tell(&directory);
        }
    };
    // Nobody waits for it: what it writes to may be blocked. Without a thread nothing is told.
    let _ = Builder::new().name("kvfs-wait".to_owned()).spawn(watch);
    wait()
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    /// Until somebody waits for the lock of a directory.
    fn wait_for_one_who_waits(directory: &Path) {
        let inode = format!(":{} ", directory.metadata().unwrap().ino());
        let waits = |line: &str| line.contains("->") && line.contains(&inode);
        while !std::fs::read_to_string("/proc/locks").unwrap().lines().any(waits) {
            thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn a_directory_that_was_exchanged_while_it_was_waited_for_is_not_the_one() {
        let place = tempfile::tempdir().unwrap();
        let [his, other] = ["sequences", "other"].map(|name| place.path().join(name));
        for directory in [&his, &other] {
            std::fs::create_dir(directory).unwrap();
        }
        let holder = wait(&his).unwrap();
        let waited = thread::scope(|scope| {
            let waiter = Builder::new().spawn_scoped(scope, || wait(&his)).unwrap();
            wait_for_one_who_waits(&his);
            std::fs::remove_dir(&his).unwrap();
            std::os::unix::fs::symlink(&other, &his).unwrap();
            drop(holder);
            waiter.join().unwrap()
        });
        let told = waited.unwrap_err().to_string();
        assert!(told.contains("sequences: is a symbolic link: "), "{told}");
        std::fs::remove_file(&his).unwrap();
        std::fs::create_dir(&his).unwrap();
        wait(&his).unwrap();
    }
}
