//! The terminal: drawn anew when there is something new, left as it was found however this ends.

use std::io::{self, IsTerminal};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use ratatui::DefaultTerminal;

use super::watch::Watch;
use crate::cli::interrupt::Interrupts;
use crate::cli::output::Failure;

/// What Ctrl-C sends where the terminal makes no signal of it.
const CONTROL_C: u8 = 3;
const ESCAPE: u8 = 27;

/// Why nothing is shown any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ended {
    /// Somebody wants an end, or the terminal is gone.
    Asked,
    /// The mount is gone.
    Unmounted,
}

/// Whether somebody looks who can press keys.
pub(super) fn is_there() -> bool {
    let can_draw = std::env::var_os("TERM").is_some_and(|term| term != "dumb" && !term.is_empty());
    can_draw && io::stdin().is_terminal() && io::stdout().is_terminal()
}

/// Shows the mount until somebody wants an end.
pub(super) fn show(watch: &mut Watch, interval: Duration) -> Result<Ended, Failure> {
    let interrupts = Interrupts::hold_with_resizes().map_err(Failure::failed)?;
    // From here on a panic restores the terminal before it tells what happened.
    let mut terminal = ratatui::try_init().map_err(|error| {
        ratatui::restore();
        Failure::Failed(format!("the terminal cannot be used: {error}"))
    })?;
    let ended = follow(watch, interval, &interrupts, &mut terminal);
    let _ = terminal.show_cursor();
    drop(terminal);
    // A terminal that is gone needs nothing any more.
    let _ = ratatui::try_restore();
    ended
}

fn follow(
    watch: &mut Watch, interval: Duration, interrupts: &Interrupts, terminal: &mut DefaultTerminal,
) -> Result<Ended, Failure> {
    let mut due = Instant::now() + interval;
    loop {
        let drawn = terminal.draw(|frame| watch.view.draw(frame.area(), frame.buffer_mut()));
        if drawn.is_err() {
            return Ok(Ended::Asked);
        }
        let left = due.saturating_duration_since(Instant::now());
        let [key, signal, answer] = wait(watch, interrupts, left).map_err(Failure::failed)?;
        if key && is_end_pressed().map_err(Failure::failed)? {
            return Ok(Ended::Asked);
        }
        if signal && interrupts.have_ended().map_err(Failure::failed)? {
            return Ok(Ended::Asked);
        }
        if answer {
            watch.receive();
        }
        if Instant::now() >= due {
            due = Instant::now() + interval;
            if !watch.ask() {
                return Ok(Ended::Unmounted);
            }
        }
    }
}

/// Waits for a key, a signal or an answer, but not longer.
fn wait(watch: &Watch, interrupts: &Interrupts, time: Duration) -> Result<[bool; 3], Errno> {
    let input = io::stdin();
    let mut descriptors = vec![
        PollFd::new(input.as_fd(), PollFlags::POLLIN),
        PollFd::new(interrupts.descriptor(), PollFlags::POLLIN),
    ];
    let sampler = watch.sampler.as_ref();
    descriptors.extend(sampler.map(|found| PollFd::new(found.descriptor(), PollFlags::POLLIN)));
    // Rounded up, or the last part of a millisecond would be waited for without rest.
    let time = time + Duration::from_millis(1);
    let time = PollTimeout::try_from(time).unwrap_or(PollTimeout::MAX);
    match poll(&mut descriptors, time) {
        Ok(_) | Err(Errno::EINTR) => {}
        Err(errno) => return Err(errno),
    }
    let is_ready = |at: usize| descriptors.get(at).is_some_and(|one| one.any() == Some(true));
    Ok([0, 1, 2].map(is_ready))
}

/// Reads what was pressed. The end of the input is an end as well.
fn is_end_pressed() -> Result<bool, Errno> {
    let mut keys = [0; 256];
    match nix::unistd::read(io::stdin().as_fd(), &mut keys) {
        Ok(count) => Ok(is_end(&keys[..count])),
        Err(Errno::EINTR | Errno::EAGAIN) => Ok(false),
        // The terminal is gone.
        Err(Errno::EIO) => Ok(true),
        Err(errno) => Err(errno),
    }
}

/// An escape alone is the key; one with more behind it is what another key sends.
fn is_end(keys: &[u8]) -> bool {
    let is_escape = keys.iter().all(|key| *key == ESCAPE);
    let is_sequence = keys.first() == Some(&ESCAPE);
    is_escape || !is_sequence && keys.iter().any(|key| matches!(key, b'q' | b'Q' | &CONTROL_C))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_that_end() {
        for keys in [b"q".as_slice(), b"Q", b"\x03", b"\x1b", b"xxq", b""] {
            assert!(is_end(keys), "{keys:?}");
        }
        for keys in [b"x".as_slice(), b"\x1b[A", b"\x1bOq", b"\r"] {
            assert!(!is_end(keys), "{keys:?}");
        }
    }
}
