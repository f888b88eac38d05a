//! `kvfs upgrade`: who asks for another daemon, and what came of it.
//!
//! It is asked through `.kvfs/settings`, by those who may change settings. The request only begins the exchange: the one
//! that hears the outcome is asked of whichever daemon serves then.

use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use crossbeam_channel::Sender;

/// How an exchange is asked for: this, and in the next line the program, or nothing.
const BEGIN: &str = "upgrade\n";
/// What asks for its outcome.
const OUTCOME: &str = "upgrade?\n";

const UNDER_WAY: &str = "an upgrade is under way";
const NOT_ALLOWED: &str = "only a process with the daemon's capabilities, in its user and mount namespaces, may exchange it";

/// How far an exchange has come.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Progress {
    /// Nobody has asked for one.
    #[default]
    None,
    /// It is under way.
    Running,
    /// This daemon is the new one: the mount had so many before.
    Done(u64),
    /// This daemon stays, and why.
    Refused(String),
}

/// Exchanges of the daemon of a mount.
#[derive(Debug, Default)]
pub struct Upgrades {
    progress: Mutex<Progress>,
    wanted: OnceLock<Sender<Option<PathBuf>>>,
    settings: OnceLock<Sender<()>>,
}

impl Upgrades {
    /// Who carries exchanges out is told of each.
    pub fn carry_out_through(&self, wanted: Sender<Option<PathBuf>>) {
        let _ = self.wanted.set(wanted);
    }

    /// Who tells others how the mount is made hears of each change of its settings.
    pub fn on_settings(&self, changed: Sender<()>) {
        let _ = self.settings.set(changed);
    }

    /// A setting was changed.
    pub(crate) fn note_settings(&self) {
        // Who has not heard of the last one yet will see both.
        self.settings.get().into_iter().for_each(|changed| _ = changed.try_send(()));
    }

    /// Notes how far one has come.
    pub fn note(&self, progress: Progress) {
        *self.progress() = progress;
    }

    fn progress(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The answer to a request, if it is about an exchange, of somebody who may have one or may not.
    pub(crate) fn answer(&self, request: &[u8], may_begin: bool) -> Option<String> {
        let request = std::str::from_utf8(request).ok()?;
        if request == OUTCOME {
            return Some(match &*self.progress() {
                Progress::None => "none\n".to_owned(),
                Progress::Running => "running\n".to_owned(),
                Progress::Done(count) => format!("ok {count}\n"),
                Progress::Refused(why) => format!("error: {why}\n"),
            });
        }
        let program = request.strip_prefix(BEGIN)?;
        let program = (!program.is_empty()).then(|| PathBuf::from(program));
        let begun = if may_begin { self.begin(program) } else { Err(NOT_ALLOWED) };
        Some(match begun {
            Ok(()) => "running\n".to_owned(),
            Err(why) => format!("error: {why}\n"),
        })
    }

    fn begin(&self, program: Option<PathBuf>) -> Result<(), &'static str> {
        let wanted = self.wanted.get().ok_or("this mount has no program to run anew")?;
        let mut progress = self.progress();
        if *progress == Progress::Running {
            return Err(UNDER_WAY);
        }
        wanted.try_send(program).map_err(|_| UNDER_WAY)?;
        *progress = Progress::Running;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_exchange_at_a_time_is_begun_and_its_outcome_told() {
        let upgrades = Upgrades::default();
        let answer = |request: &str| upgrades.answer(request.as_bytes(), true);
        assert_eq!(answer("verify=always\n"), None);
        assert_eq!(answer(OUTCOME).as_deref(), Some("none\n"));
        assert!(answer(BEGIN).unwrap().starts_with("error: this mount has no program"));
        let (wanted, requests) = crossbeam_channel::bounded(1);
        upgrades.carry_out_through(wanted);
        let refused = upgrades.answer(BEGIN.as_bytes(), false);
        assert!(refused.unwrap().starts_with("error: only a process with"));
        assert_eq!(answer("upgrade\n/bin/kvfs").as_deref(), Some("running\n"));
        assert_eq!(requests.try_recv(), Ok(Some(PathBuf::from("/bin/kvfs"))));
        assert_eq!(answer(BEGIN).as_deref(), Some("error: an upgrade is under way\n"));
        assert_eq!(answer(OUTCOME).as_deref(), Some("running\n"));
        upgrades.note(Progress::Refused("it is another version".to_owned()));
        assert_eq!(answer(OUTCOME).as_deref(), Some("error: it is another version\n"));
        assert_eq!(answer(BEGIN).as_deref(), Some("running\n"));
        assert_eq!(requests.try_recv(), Ok(None));
        upgrades.note(Progress::Done(2));
        assert_eq!(answer(OUTCOME).as_deref(), Some("ok 2\n"));
    }
}
