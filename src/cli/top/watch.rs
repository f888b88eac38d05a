//! What is known of the mount while it is shown: answers, silence, a daemon that went and came again.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::draw::View;
use super::figures::Figures;
use super::sample::Sample;
use super::sampler::{EVENTS_MAX, Sampler, Told};
use crate::cli::output::Failure;
use crate::cli::probe::{ANSWER_DEADLINE, Answer};
use crate::cli::status;

/// A healthy mount answers within milliseconds: whoever looks is told that these are no figures of now.
const SILENCE_SHOWN: Duration = Duration::from_secs(2);
/// For how long somebody who looks waits for a mount to come back, as one does whose daemon is started anew.
const ABSENCE_MAX: Duration = Duration::from_secs(10);

/// A mount that is asked again and again.
#[derive(Debug)]
pub(super) struct Watch {
    mountpoint: PathBuf,
    /// `None` after it has ended, until the next question.
    pub(super) sampler: Option<Sampler>,
    last: Sample,
    pub(super) view: View,
    last_event: u64,
    absent_since: Option<Instant>,
}

/// The text of an answer, or why there is none.
pub(super) fn checked(told: Option<Told>, mountpoint: &Path) -> Result<Told, Failure> {
    let answer = match &told {
        None => Answer::Stuck,
        Some(told) => Answer::of(told.errno, String::new()),
    };
    status::told(answer, mountpoint, ANSWER_DEADLINE).map(|_| told.unwrap_or_default())
}

/// The number of the last event that a sample knows of.
pub(in crate::cli) fn last_event(sample: &Sample, before: u64) -> u64 {
    let seen = sample.events.last().map_or(0, |event| event.number);
    // What is not told again, as after a mount of another store, must not be waited for.
    sample.number("last_event").map_or(before, |last| last.min(before).max(seen))
}

impl Watch {
    /// After a first answer.
    pub(super) fn new(mountpoint: &Path, sampler: Sampler, first: Sample, view: View) -> Watch {
        let mut watch = Watch {
            mountpoint: mountpoint.to_owned(),
            sampler: Some(sampler),
            last: first.clone(),
            view,
            last_event: 0,
            absent_since: None,
        };
        watch.show(first);
        watch
    }

    fn show(&mut self, sample: Sample) {
        self.view.figures = Some(Figures::of(Some(&self.last), &sample));
        if self.last.status("store") != sample.status("store") {
            self.view.events.clear();
        }
        self.last_event = last_event(&sample, self.last_event);
        self.view.events.extend(sample.events.iter().cloned());
        let too_many = self.view.events.len().saturating_sub(EVENTS_MAX.into());
        drop(self.view.events.drain(..too_many));
        self.view.notice = None;
        self.absent_since = None;
        self.last = sample;
    }

    /// It is time for the next sample. False once the mount has been gone for too long.
    pub(super) fn ask(&mut self) -> bool {
        let asked = match &mut self.sampler {
            Some(sampler) => sampler.ask(self.last_event),
            None => Sampler::start(&self.mountpoint).and_then(|mut sampler| {
                sampler.ask(self.last_event)?;
                self.sampler = Some(sampler);
                Ok(())
            }),
        };
        if let Err(error) = asked {
            self.sampler = None;
            self.lacks(&format!("it cannot be asked: {error}"));
        }
        let silence = self.sampler.as_ref().and_then(Sampler::silence).unwrap_or_default();
        if silence >= SILENCE_SHOWN {
            self.lacks(&format!("it has not answered for {} s", silence.as_secs()));
        }
        if silence >= ANSWER_DEADLINE
            && let Some(sampler) = &mut self.sampler
        {
            sampler.kill();
        }
        self.absent_since.is_none_or(|since| since.elapsed() < ABSENCE_MAX)
    }

    /// Something has come from the child.
    pub(super) fn receive(&mut self) {
        let Some(sampler) = &mut self.sampler else { return };
        match sampler.receive() {
            Ok(None) => {}
            Ok(Some(told)) => match Answer::of(told.errno, String::new()) {
                Answer::Alive(_) => self.show(Sample::of(told, Instant::now())),
                Answer::Refused(error) => self.lacks(&format!("it answers: {error}")),
                Answer::Dead | Answer::Stuck => {
                    self.lacks("its daemon is gone: mount the store again");
                }
            },
            Err(_) => self.sampler = None,
        }
    }

    /// There are no figures of now, for this reason or because nothing is mounted.
    fn lacks(&mut self, why: &str) {
        if status::is_mounted(&self.mountpoint) {
            self.absent_since = None;
            self.view.notice = Some(why.to_owned());
            return;
        }
        let since = *self.absent_since.get_or_insert_with(Instant::now);
        let left = ABSENCE_MAX.saturating_sub(since.elapsed()).as_secs();
        self.view.notice =
            Some(format!("it is not mounted any more: waiting for {left} s whether it comes back"));
    }
}
