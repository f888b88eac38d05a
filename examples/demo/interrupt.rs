//! Ctrl-C ends the demo at the next token, so that it can clean up.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use nix::sys::signal::{SigSet, Signal};

use crate::Result;

/// The exit code of a program that Ctrl-C ended, as shells expect it.
pub(crate) const EXIT: u8 = 130;

static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// Fails after a signal.
pub(crate) fn check() -> Result<()> {
    if INTERRUPTED.load(Ordering::Relaxed) {
        return Err("interrupted".into());
    }
    Ok(())
}

/// Takes signals from now on, instead of being ended by them. The second one does not wait for
/// the demo: it calls `give_up`, and the program ends.
pub(crate) fn watch(give_up: impl Fn() + Send + 'static) -> Result<()> {
    let signals: SigSet = [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP].into_iter().collect();
    // Before any other thread starts: they all inherit this.
    signals.thread_block().map_err(io::Error::from)?;
    let wait = move || {
        while signals.wait().is_ok() {
            if INTERRUPTED.swap(true, Ordering::Relaxed) {
                give_up();
                std::process::exit(i32::from(EXIT));
            }
        }
    };
    thread::Builder::new().name("signals".to_owned()).spawn(wait)?;
    Ok(())
}
