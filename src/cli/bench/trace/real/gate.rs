//! When clients may go on: not while the daemon is dead, nor while the disk holds more than its budget.
//!
//! Arrival times are compressed, and what moves objects to the remote is not: without a pause the disk would
//! take what it never takes in real time, and hits on it would be too many.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Why requests end early.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Stopped {
    /// The daemon was killed meanwhile: the request is to be made again.
    Killed,
    /// The replay ends with an error.
    Over,
}

/// Shared by the clients and who watches the daemon.
#[derive(Debug, Default)]
pub(super) struct Gate {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// Daemons before this one.
    generation: u32,
    is_down: bool,
    is_over: bool,
    paused_since: Option<Instant>,
    paused: Duration,
}

impl Gate {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until the daemon answers; which one that is.
    pub(super) fn enter(&self) -> Result<u32, Stopped> {
        let shut = |state: &mut State| !state.is_over && state.is_down;
        let state = self.changed.wait_while(self.state(), shut);
        let state = state.unwrap_or_else(PoisonError::into_inner);
        if state.is_over { Err(Stopped::Over) } else { Ok(state.generation) }
    }

    /// Waits while the disk is too full, unless the daemon is not the same any more.
    pub(super) fn wait_for_room(&self, generation: u32) -> Result<(), Stopped> {
        let is_same = |state: &State| !state.is_down && state.generation == generation;
        let shut =
            |state: &mut State| !state.is_over && is_same(state) && state.paused_since.is_some();
        let state = self.changed.wait_while(self.state(), shut);
        let state = state.unwrap_or_else(PoisonError::into_inner);
        match (state.is_over, is_same(&state)) {
            (true, _) => Err(Stopped::Over),
            (_, true) => Ok(()),
            (_, false) => Err(Stopped::Killed),
        }
    }

    /// Whether that daemon was killed: what seemed to be an error, or a page that is absent, was none then.
    pub(super) fn was_killed(&self, generation: u32) -> bool {
        let state = self.state();
        state.is_down || state.generation != generation
    }

    /// The daemon is about to be killed.
    pub(super) fn close(&self) {
        let mut state = self.state();
        state.is_down = true;
        state.set_paused(false);
        self.changed.notify_all();
    }

    /// Another one answers.
    pub(super) fn open(&self) {
        let mut state = self.state();
        (state.is_down, state.generation) = (false, state.generation + 1);
        self.changed.notify_all();
    }

    /// Whether the disk holds too much.
    pub(super) fn pause(&self, is_full: bool) {
        self.state().set_paused(is_full);
        self.changed.notify_all();
    }

    /// Nothing goes on.
    pub(super) fn end(&self) {
        self.state().is_over = true;
        self.changed.notify_all();
    }

    /// How long clients had to wait for room.
    pub(super) fn paused(&self) -> Duration {
        self.state().paused
    }
}

impl State {
    fn set_paused(&mut self, is_paused: bool) {
        match (is_paused, self.paused_since) {
            (true, None) => self.paused_since = Some(Instant::now()),
            (false, Some(since)) => {
                self.paused += since.elapsed();
                self.paused_since = None;
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_daemon_that_was_killed_is_not_the_same() {
        let gate = Gate::default();
        let first = gate.enter().unwrap();
        assert!(!gate.was_killed(first) && gate.wait_for_room(first).is_ok());
        gate.pause(true);
        gate.close();
        assert_eq!(
            (gate.was_killed(first), gate.wait_for_room(first)),
            (true, Err(Stopped::Killed))
        );
        gate.open();
        assert_eq!(gate.wait_for_room(first), Err(Stopped::Killed));
        let second = gate.enter().unwrap();
        assert!(gate.was_killed(first) && !gate.was_killed(second));
        gate.end();
        assert_eq!(
            (gate.enter(), gate.wait_for_room(second)),
            (Err(Stopped::Over), Err(Stopped::Over))
        );
    }

    #[test]
    fn who_waits_for_room_goes_on_when_there_is_some() {
        let gate = Gate::default();
        let first = gate.enter().unwrap();
        gate.pause(true);
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| gate.wait_for_room(first));
            std::thread::sleep(Duration::from_millis(20));
            assert!(!waits.is_finished());
            gate.pause(false);
            assert_eq!(waits.join().unwrap(), Ok(()));
        });
        assert!(gate.paused() >= Duration::from_millis(20));
    }
}
