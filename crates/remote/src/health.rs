//! Whether a remote answers: a circuit breaker.
//!
//! A remote that is down is not asked again by every caller. One silence longer than a deadline,
//! or a few failures in a row, open the breaker; from then on calls fail at once, and one thread
//! connects anew, less and less often, until the remote is back.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use super::BlobStore;
use super::error::{RemoteError, Result};
use super::marker::RemoteId;

/// Failures in a row that open the breaker: one may be a packet, three are an outage.
const FAILURES_MAX: u32 = 3;

/// How long a transfer that was too slow is told of, unless one that was not ends before.
const SLOW_TOLD: Duration = Duration::from_secs(600);

/// Whether a remote answers.
#[derive(Clone, Debug)]
pub enum State {
    /// It has not answered yet.
    Connecting,
    /// It answers.
    Up {
        /// Which remote it is.
        id: RemoteId,
        /// Since when.
        since: SystemTime,
        /// The number of the connection: what was found out through another one may be of another place.
        connection: u64,
    },
    /// It does not, or what is there is not usable. It is tried again in the background.
    Down {
        /// Since when.
        since: SystemTime,
        /// The last failure.
        error: RemoteError,
    },
}

/// A connected store, and which connection it is: failures of an older one do not count.
#[derive(Clone, Debug)]
pub(super) struct Connection {
    pub(super) store: Arc<dyn BlobStore>,
    generation: u64,
}

#[derive(Debug)]
struct Inner {
    state: State,
    connection: Option<Connection>,
    failures: u32,
    /// The last transfer, if it was too slow.
    slow: Option<(Instant, RemoteError)>,
    generation: u64,
    closing: bool,
}

/// The breaker.
#[derive(Debug)]
pub(super) struct Health {
    inner: Mutex<Inner>,
    changed: Condvar,
}

impl Health {
    pub(super) fn new() -> Health {
        let inner = Inner {
            state: State::Connecting,
            connection: None,
            failures: 0,
            slow: None,
            generation: 0,
            closing: false,
        };
        Health { inner: Mutex::new(inner), changed: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn state(&self) -> State {
        self.lock().state.clone()
    }

    /// The connection, or why there is none.
    pub(super) fn connection(&self, place: &str) -> Result<Connection> {
        let inner = self.lock();
        if let Some(connection) = &inner.connection {
            return Ok(connection.clone());
        }
        Err(match &inner.state {
            State::Down { error, .. } if !error.is_outage() => error.clone(),
            State::Down { since, error } => {
                let seconds = since.elapsed().unwrap_or_default().as_secs();
                RemoteError::Unreachable(format!("{}; down for {seconds} s", error.text()))
            }
            _ => RemoteError::Unreachable(format!("remote {place}: not connected yet")),
        })
    }

    /// Takes note of how a call on a connection ended.
    pub(super) fn record<T>(&self, connection: &Connection, outcome: &Result<T>) {
        let mut inner = self.lock();
        if inner.generation != connection.generation {
            return;
        }
        match outcome {
            // It answers, and what else is asked of it may be quick.
            Err(RemoteError::Slow(_)) => {}
            Err(error) if error.is_outage() => {
                inner.failures += 1;
                let is_silent = matches!(error, RemoteError::Timeout(_));
                if is_silent || inner.failures >= FAILURES_MAX {
                    self.set_down(&mut inner, error.clone());
                }
            }
            // Our own disk says nothing about the remote.
            Err(RemoteError::Local(_)) => {}
            _ => inner.failures = 0,
        }
    }

    /// Takes note of how a transfer ended.
    pub(super) fn record_transfer<T>(&self, outcome: &Result<T>) {
        let slow = match outcome {
            Err(error @ RemoteError::Slow(_)) => Some((Instant::now(), error.clone())),
            Ok(_) => None,
            Err(_) => return,
        };
        self.lock().slow = slow;
    }

    /// Why the last transfer was too slow, if it was.
    pub(super) fn slow(&self) -> Option<RemoteError> {
        let inner = self.lock();
        let (at, error) = inner.slow.as_ref()?;
        (at.elapsed() < SLOW_TOLD).then(|| error.clone())
    }

    /// The place is not what it was: it is connected to anew.
    pub(super) fn lose(&self, error: RemoteError) {
        self.set_down(&mut self.lock(), error);
    }

    fn set_down(&self, inner: &mut Inner, error: RemoteError) {
        let since = if let State::Down { since, .. } = &inner.state {
            *since
        } else {
            log::warn!("{error}");
            SystemTime::now()
        };
        inner.state = State::Down { since, error };
        inner.connection = None;
        self.changed.notify_all();
    }

    /// An attempt to connect ended.
    pub(super) fn connected(&self, outcome: Result<(Arc<dyn BlobStore>, RemoteId)>) {
        let mut inner = self.lock();
        if inner.closing {
            return;
        }
        match outcome {
            Ok((store, id)) => {
                inner.generation += 1;
                inner.failures = 0;
                inner.connection = Some(Connection { store, generation: inner.generation });
                let (since, connection) = (SystemTime::now(), inner.generation);
                inner.state = State::Up { id, since, connection };
                self.changed.notify_all();
            }
            Err(error) => self.set_down(&mut inner, error),
        }
    }

    /// Ends [`Health::wait_until_down`] and [`Health::pause`] for good.
    pub(super) fn close(&self) {
        self.lock().closing = true;
        self.changed.notify_all();
    }

    /// Waits until there is no connection; false if it is closing.
    pub(super) fn wait_until_down(&self) -> bool {
        let is_idle = |inner: &mut Inner| inner.connection.is_some() && !inner.closing;
        let waited = self.changed.wait_while(self.lock(), is_idle);
        !waited.unwrap_or_else(PoisonError::into_inner).closing
    }

    /// Waits, unless it is closing.
    pub(super) fn pause(&self, pause: Duration) {
        drop(self.changed.wait_timeout_while(self.lock(), pause, |inner| !inner.closing));
    }

    /// Waits for the first answer, or for the first failure to get one.
    pub(super) fn wait_for_answer(&self, patience: Duration) -> State {
        let is_open = |inner: &mut Inner| matches!(inner.state, State::Connecting);
        let waited = self.changed.wait_timeout_while(self.lock(), patience, is_open);
        waited.unwrap_or_else(PoisonError::into_inner).0.state.clone()
    }
}
