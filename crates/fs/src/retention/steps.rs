//! What the thread of retention does: a walk where one is due, then what comes of it.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::enforcer::Enforcer;
use super::on_record::Rounds;
use super::pass::Pass;
use super::policy::Policy;
use super::rights::Root;
use crate::FsError;
use kvfs_storage::store::record::{InodeId, Time};

/// Between two looks for something to do.
pub(super) const LOOK_INTERVAL: Duration = Duration::from_secs(1);
/// Walks over one directory take at most one of so many parts of the time.
pub(super) const WALKS_APART: u32 = 20;
/// A step takes some milliseconds; the thread rests three times as long, and not less than this.
pub(super) const REST_MIN: Duration = Duration::from_millis(5);

/// What the thread that removes remembers between two steps.
#[derive(Debug, Default)]
pub struct Retainer {
    pub(super) pass: Option<Pass>,
    pub(super) walked: BTreeMap<InodeId, Walked>,
    /// When files with a time to live of their own were last looked at, and how long that took.
    expired: Option<(Instant, Duration)>,
    reported: bool,
    pub(super) rounds: Rounds,
}

/// How a walk over a directory ended.
#[derive(Debug)]
pub(super) struct Walked {
    pub(super) policy: Policy,
    pub(super) at: Instant,
    pub(super) took: Duration,
    /// [`names_changed`](kvfs_storage::store::metadata::Metadata::names_changed) when it began.
    pub(super) names_changed: u64,
    /// When the next file is too old.
    pub(super) next_expiry: Option<Time>,
    /// It left something to do.
    pub(super) is_unfinished: bool,
}

impl Enforcer<'_> {
    /// One step; says how long to wait before the next.
    pub(crate) fn retain(&self, retainer: &mut Retainer) -> Duration {
        let is_clock_good = self.retention.clock().look(Time::now(), Instant::now());
        let recording = self.retention.record_in_rounds(self.core, retainer);
        let pause = self.enforce(retainer, is_clock_good);
        recording.map_or(pause, |recording| recording.min(pause))
    }

    /// One step of what limits ask for; says how long to wait before the next.
    fn enforce(&self, retainer: &mut Retainer, is_clock_good: bool) -> Duration {
        if self.core.state().refusal.is_some() || !self.retention.is_active() {
            retainer.pass = None;
            return LOOK_INTERVAL;
        }
        let begun = Instant::now();
        match self.step(retainer, is_clock_good) {
            Ok(true) => {
                retainer.reported = false;
                (begun.elapsed() * 3).clamp(REST_MIN, LOOK_INTERVAL)
            }
            Ok(false) => LOOK_INTERVAL,
            Err(error) => {
                if !std::mem::replace(&mut retainer.reported, true) {
                    log::error!("what directories may hold is not enforced: {error}");
                }
                retainer.pass = None;
                LOOK_INTERVAL
            }
        }
    }

    /// Whether there is more to do.
    pub(super) fn step(
        &self, retainer: &mut Retainer, is_clock_good: bool,
    ) -> Result<bool, FsError> {
        if retainer.pass.is_none() {
            retainer.pass = self.next_pass(retainer, is_clock_good)?;
        }
        let Some(pass) = &mut retainer.pass else {
            if is_clock_good {
                self.remove_expired_files(&mut retainer.expired)?;
            }
            return Ok(false);
        };
        if self.advance(pass)? {
            return Ok(true);
        }
        if let Some(pass) = retainer.pass.take() {
            retainer.walked.insert(pass.root, pass.walked());
        }
        Ok(true)
    }

    /// A walk that is due.
    fn next_pass(
        &self, retainer: &mut Retainer, is_clock_good: bool,
    ) -> Result<Option<Pass>, FsError> {
        let directories = self.retention.policies().directories.clone();
        retainer.walked.retain(|id, _| directories.contains_key(id));
        self.retention.reports().retain(|id, _| directories.contains_key(id));
        let walked = &retainer.walked;
        let due = directories.into_iter().filter(|(id, policy)| {
            walked.get(id).is_none_or(|walked| self.is_walk_due(walked, *policy))
        });
        // Those never walked come first.
        let due = due.min_by_key(|(id, _)| walked.get(id).map(|walked| walked.at));
        let Some((id, policy)) = due else {
            return Ok(None);
        };
        // What was closed a moment ago is not in use.
        self.core.settle_idle()?;
        let state = self.core.state_to_change()?;
        let Ok((directory, class)) = state.directory(id) else {
            drop(state);
            self.retention.policies().forget(id);
            return Ok(None);
        };
        let root = Root { id, class, policy, owner: directory.uid };
        Ok(Some(Pass::new(root, state.metadata.names_changed, is_clock_good)))
    }

    pub(super) fn is_walk_due(&self, walked: &Walked, policy: Policy) -> bool {
        if walked.policy != policy {
            return true;
        }
        let is_old = walked.next_expiry.is_some_and(|time| time <= Time::now());
        let is_time = walked.at.elapsed() >= LOOK_INTERVAL.max(walked.took * WALKS_APART);
        is_time
            && (is_old
                || walked.is_unfinished
                || self.core.state().metadata.names_changed != walked.names_changed)
    }
}
