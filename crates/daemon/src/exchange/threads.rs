//! Threads that no signal reaches, for they wait in the kernel for a disk or a server.

use std::fs::{read_dir, read_to_string};
use std::io;
use std::thread;
use std::time::{Duration, Instant};

/// Between two looks.
const LOOK_INTERVAL: Duration = Duration::from_millis(2);

/// Waits until no thread of this process is in a sleep that cannot be interrupted: `execve(2)` waits for such a thread,
/// and nobody would serve the mount meanwhile. False if that takes longer than `patience`.
///
/// # Errors
/// `/proc` cannot be read.
pub(super) fn wait_until_interruptible(patience: Duration) -> io::Result<bool> {
    let end = Instant::now() + patience;
    while has_uninterruptible_thread()? {
        if Instant::now() >= end {
            return Ok(false);
        }
        thread::sleep(LOOK_INTERVAL);
    }
    Ok(true)
}

fn has_uninterruptible_thread() -> io::Result<bool> {
    for thread in read_dir("/proc/self/task")? {
        // A thread that has ended meanwhile waits for nothing.
        let Ok(stat) = read_to_string(thread?.path().join("stat")) else { continue };
        if is_uninterruptible(&stat) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// State D of `proc_pid_stat(5)`, which stands behind the name, in which anything may be.
fn is_uninterruptible(stat: &str) -> bool {
    stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('D'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_state_is_behind_the_name() {
        assert!(is_uninterruptible("7 (kvfs) D 1 7 7"));
        assert!(is_uninterruptible("7 (a) S (b) D 1 7 7"));
        assert!(!is_uninterruptible("7 (a) D (b) S 1 7 7"));
        assert!(!is_uninterruptible(""));
    }
}
