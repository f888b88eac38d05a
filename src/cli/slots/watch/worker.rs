//! The thread that asks the server and touches the mount.

use std::fs::read_dir;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use kvfs_os::mountinfo;

use super::WatchArguments;
use super::seen::Seen;
use super::told::{Subject, Told, say};
use crate::cli::output::Failure;
use crate::cli::probe::{self, Answer, Question};
use crate::cli::slots::directory_name;
use crate::cli::slots::name::Naming;
use crate::cli::slots::restore::{NOT_UNIFIED, Restored, Source, is_apart};
use crate::cli::slots::save::{Saver, remove_rests};
use crate::cli::slots::server::{Refusal, Server};
use crate::cli::slots::state::SlotState;
use crate::cli::status;

/// A mount that does not answer for so long is left alone until the next look.
const MOUNT_ANSWER_MAX: Duration = Duration::from_secs(5);

/// Watches one server.
#[derive(Debug)]
pub(super) struct Worker {
    arguments: WatchArguments,
    server: Server,
    /// How files begin that an earlier watch may have left in the server's directory.
    file_prefix: String,
    seen: Seen,
    told: Told,
    naming: Option<Naming>,
    /// The device of the mount, once what others left there was removed.
    mount: Option<String>,
}

impl Worker {
    pub(super) fn new(arguments: WatchArguments, server: Server, file_prefix: String) -> Self {
        let seen = Seen::new(arguments.interval);
        let told = Told::default();
        Self { arguments, server, file_prefix, seen, told, naming: None, mount: None }
    }

    /// Looks again and again until somebody lets go of the other end, and then for the last time.
    pub(super) fn run(&mut self, stopped: &Receiver<()>, grace: Duration) {
        let server = self.arguments.server.server.clone();
        say(&format!("{server}: watched; conversations go to {}", self.arguments.model.display()));
        loop {
            self.look(false);
            match stopped.recv_timeout(self.arguments.interval) {
                Err(RecvTimeoutError::Timeout) => {}
                Ok(()) | Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        self.server.ends = Some(Instant::now() + grace);
        self.look(true);
    }

    fn look(&mut self, is_last: bool) {
        match self.slots() {
            Ok(Some(slots)) => {
                if self.told.right(Subject::Server) {
                    say(&format!("{}: answers again", self.arguments.server.server));
                }
                self.attend(&slots, is_last);
            }
            Ok(None) => {}
            Err(refusal) => {
                if refusal.is_absent {
                    self.forget();
                }
                self.told.wrong(Subject::Server, Failure::from(refusal).line());
            }
        }
    }

    /// The server is another one at the next look.
    fn forget(&mut self) {
        self.seen.forget();
        self.told.forget_slots();
        self.naming = None;
    }

    /// What the slots are, unless the server sleeps: it would wake up, with empty slots.
    fn slots(&mut self) -> Result<Option<Vec<SlotState>>, Refusal> {
        let properties = self.server.properties()?;
        if properties["is_sleeping"].as_bool() == Some(true) {
            self.forget();
            return Ok(None);
        }
        let mut slots = self.server.slots()?;
        if let Some(only) = self.arguments.server.slot {
            slots.retain(|slot| slot.number == u64::from(only));
        }
        let news = self.seen.look(properties["media_marker"].as_str(), &slots);
        if news.is_new {
            self.told.forget_slots();
            self.naming = None;
        }
        for slot in news.lost {
            let why = "the server cleared it before its last turn was saved, as it does with idle slots when \
                       another one begins: start it with --no-cache-idle-slots";
            self.told.wrong(Subject::Slot(slot), &format!("slot {slot}: {why}"));
        }
        Ok(Some(slots))
    }

    /// Saves and restores what there is to.
    fn attend(&mut self, slots: &[SlotState], is_last: bool) {
        let now = Instant::now();
        let due = if is_last { self.seen.unsaved(slots) } else { self.seen.due(slots, now) };
        let fills = !is_last && self.seen.is_filling_due(now);
        if due.is_empty() && !fills {
            return;
        }
        if let Err(failure) = self.check_places() {
            self.told.wrong(Subject::Model, failure.line());
            return;
        }
        if self.told.right(Subject::Model) {
            say(&format!("{}: is there again", self.arguments.model.display()));
        }
        let model = directory_name(&self.arguments.model);
        let server = &self.server;
        self.naming.get_or_insert_with(|| Naming::of(server, &model));
        for slot in due {
            let is_busy = slots.iter().any(|state| state.number == slot && state.is_processing);
            if is_last && (is_busy || self.has_ended()) {
                let why = if is_busy { "it works" } else { "there was no time" };
                say(&format!("slot {slot}: its last turn is not saved: {why}"));
            } else {
                self.save(slot);
            }
        }
        if fills {
            self.fill(slots);
        }
    }

    fn has_ended(&self) -> bool {
        self.server.ends.is_some_and(|ends| ends <= Instant::now())
    }

    fn save(&mut self, slot: u64) {
        let Some(naming) = &self.naming else { return };
        let begin = Instant::now();
        let to = Saver { server: &self.server, model: &self.arguments.model, naming };
        let saved = to.save(slot);
        let now = Instant::now();
        match saved {
            Ok(saved) => {
                self.told.right(Subject::Slot(slot));
                if saved.is_new {
                    say(&saved.to_string());
                }
                self.seen.saved(slot, saved.sequence, saved.stopped, now);
            }
            Err(failure) => {
                self.told.wrong(Subject::Slot(slot), &format!("slot {slot}: {}", failure.line()));
                self.seen.failed(slot, now - begin, now);
            }
        }
    }

    /// Gives slots that had no task the latest conversations.
    fn fill(&mut self, slots: &[SlotState]) {
        let Some(unused) = slots.iter().find(|slot| slot.is_unused()) else {
            return self.seen.filled();
        };
        match self.restore(unused.number) {
            Ok(restored) => {
                self.told.right(Subject::Filling);
                self.seen.filled();
                for restored in restored {
                    let line = restored.line();
                    match restored.outcome {
                        Ok(_) => {
                            say(&line);
                            self.seen.restored(restored.slot, restored.sequence);
                        }
                        Err(_) => self.told.wrong(Subject::Slot(restored.slot), &line),
                    }
                }
            }
            Err(failure) => {
                self.told.wrong(Subject::Filling, failure.line());
                self.seen.not_filled(Instant::now());
            }
        }
    }

    /// Tries by a slot that had no task whether the server saves where it is expected to, and takes what others saved.
    fn restore(&self, unused: u64) -> Result<Vec<Restored>, Failure> {
        if is_apart(&self.server, unused, &self.arguments.model)? {
            return Err(Failure::Failed(NOT_UNIFIED.to_owned()));
        }
        let source = Source::new(&self.server, &self.arguments.model, self.arguments.mapped);
        source.restore_latest(&self.seen.held())
    }

    /// The model is in a mount that answers, and the server's directory is there. Nothing is touched before the
    /// kernel's list of mounts and a child process say so.
    fn check_places(&mut self) -> Result<(), Failure> {
        let model = &self.arguments.model;
        let mounts = mountinfo::read().map_err(Failure::failed)?;
        let find = |path: &Path| {
            let above = path.ancestors().find_map(|above| mountinfo::top_at(&mounts, above));
            above.filter(|mount| mount.is_kvfs()).cloned()
        };
        // Links are followed only where the path as it stands is none of a mount, which might not answer.
        let found = find(model).or_else(|| find(&model.canonicalize().ok()?));
        let Some(mount) = found else {
            let line = format!(
                "{}: is not in a mount of kvfs: kvfs mount STORE DIRECTORY",
                model.display()
            );
            return Err(Failure::Failed(line));
        };
        let asked = probe::ask(&mount.mountpoint, Question::Status, MOUNT_ANSWER_MAX);
        match asked.map_err(Failure::failed)? {
            // Only whoever mounted it may ask for its status, others use it.
            Answer::Refused(_) => {}
            answer => {
                status::told(answer, &mount.mountpoint, MOUNT_ANSWER_MAX)?;
            }
        }
        let directory = &self.arguments.server.directory;
        if !directory.is_dir() {
            let line = format!(
                "{}: is no directory: --directory is the server's --slot-save-path",
                directory.display()
            );
            return Err(Failure::Failed(line));
        }
        if self.mount.as_ref() != Some(&mount.device) {
            remove_rests(model)?;
            self.remove_exchanged();
            // Another mount may have another store.
            if self.mount.is_some() {
                self.seen.forget_saved();
            }
            self.mount = Some(mount.device.clone());
        }
        Ok(())
    }

    /// Removes what watches of this server left in its directory that were killed.
    fn remove_exchanged(&self) {
        let entries = read_dir(&self.arguments.server.directory).into_iter().flatten().flatten();
        let paths = entries.filter(|entry| {
            entry.file_name().to_str().is_some_and(|name| name.starts_with(&self.file_prefix))
        });
        for path in paths.map(|entry| entry.path()).collect::<Vec<PathBuf>>() {
            // Another look may be luckier.
            let _ = std::fs::remove_file(path);
        }
    }
}
