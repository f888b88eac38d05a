//! Looking whether the remote still is, and has, what it was and had.
//!
//! Whoever keeps a remote may empty it, lose parts of it, or put back an older state of all of it,
//! while a mount relies on what it sent there. So the mover looks now and then, and as often as
//! somebody who waits for the remote (`kvfs sync --remote`) reads the status: whether the place is
//! the remote, whether the store's last manifest of names and its parts are there, and by turns for
//! copies of files. Where any of those is lost, others may be as well: then each copy is asked for, and
//! what the disk still has goes there again.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use super::demotion::Mover;
use super::tiers::Tiers;
use super::{FileSystem, FsError};
use crate::core::Core;
use kvfs_os::{Share, in_background};
use kvfs_storage::store::record::{
    FileRecord, Inode, InodeId, ObjectId, Publications, RemoteCopy, RemoteState,
};
use kvfs_storage::tier::counters::Tier;
use kvfs_storage::tier::exchange::Exchange;
use kvfs_storage::tier::remote::names::{Found, OwnManifests, Publisher};
use kvfs_storage::tier::remote::{RemoteError, Sequence};
use std::sync::atomic::Ordering;

/// How often it is looked whether the place still is the remote, while nothing goes there.
const LOOK_EVERY: Duration = Duration::from_secs(5);
/// The same while somebody reads the status.
const LOOK_EVERY_MIN: Duration = Duration::from_millis(250);
/// How often it is looked for the names while nobody asks: what is lost may be sent again only as long as
/// the disk lives.
const NAMES_EVERY: Duration = Duration::from_secs(3600);
/// How often files that the remote refused are tried again; whoever repairs what refused them need not mount anew.
const REFUSED_EVERY: Duration = Duration::from_secs(3600);
/// Looking for names and copies while somebody reads the status takes one of so many parts of the time: a million files
/// have thousands of parts, each of which is a request.
const NAMES_APART: u32 = 20;
/// Who waits for the remote waits no longer than this between two looks, or than one of them takes: a machine that stood
/// still for a second during a look would hold that up for twenty.
const NAMES_APART_MAX: Duration = Duration::from_secs(5);
/// Copies of files that are asked for by turns when the names are there: all of them being gone is noticed at once, a
/// single one in time.
const COPIES_SAMPLED: usize = 32;
/// Copies of files that are asked for between two looks at everything else.
const COPIES_BATCH: usize = 512;
/// Of them, those that are asked for at a time; opens find most of the remote's calls free.
const ASKED_AT_ONCE: usize = 3;

/// What was seen of the remote through one connection.
#[derive(Debug, Default)]
pub(super) struct Sight {
    /// When the place was last looked at.
    place: Option<Instant>,
    /// When the names were last looked for, and how long that took.
    names: Option<(Instant, Duration)>,
    names_are_lost: bool,
    /// Why it could not be seen whether the names are there.
    trouble: Option<String>,
    /// Files whose copies have to be asked for, since something was lost.
    suspects: Vec<(InodeId, ObjectId)>,
    /// Objects of which no copy is left.
    lost: HashSet<ObjectId>,
    /// The copy that is asked for next.
    turn: u64,
    /// When files that were refused were last tried again.
    refused: Option<Instant>,
}

impl Sight {
    /// Whether names were lost and not published since.
    pub(super) fn is_name_lost(&self) -> bool {
        self.names_are_lost
    }

    /// Whether copies of files are still to be asked for.
    pub(super) fn is_asking(&self) -> bool {
        !self.suspects.is_empty()
    }

    /// Why it cannot be told whether the remote has everything.
    pub(super) fn trouble(&self) -> Option<&str> {
        self.trouble.as_deref()
    }

    /// The names are there again.
    pub(super) fn note_published(&mut self) {
        self.names_are_lost = false;
        self.trouble = None;
    }

    fn are_names_due(&self, is_asked: bool) -> bool {
        let Some((when, took)) = self.names else { return true };
        when.elapsed() >= names_apart(took, is_asked)
    }
}

/// From the end of a look for names that took this long to the next one.
fn names_apart(took: Duration, is_asked: bool) -> Duration {
    if !is_asked {
        return NAMES_EVERY;
    }
    (took * NAMES_APART).min(NAMES_APART_MAX.max(took))
}

/// Looks, if it is time.
///
/// # Errors
/// Those of the remote; that somebody else publishes under the id of this store is one as well.
pub(super) fn look(
    fs: &FileSystem, tiers: &Tiers, exchange: &Exchange, mover: &mut Mover,
) -> Result<(), FsError> {
    let since = mover.sight.place.map_or(Duration::MAX, |when| when.elapsed());
    let is_asked = since >= LOOK_EVERY_MIN && tiers.look_asked.swap(false, Ordering::AcqRel);
    if is_asked || since >= LOOK_EVERY {
        exchange.remote().check_place().map_err(FsError::Remote)?;
        mover.sight.place = Some(Instant::now());
        if mover.sight.refused.is_none_or(|when| when.elapsed() >= REFUSED_EVERY) {
            mover.sight.refused = Some(Instant::now());
            fs.core.state().metadata.arrivals.try_again();
        }
        if !mover.sight.names_are_lost && mover.sight.are_names_due(is_asked) {
            look_for_names(fs, tiers, exchange, mover)?;
        } else if is_asked {
            // What was asked for is still owed.
            tiers.look_asked.store(true, Ordering::Release);
        }
    }
    ask_for_copies(fs, tiers, exchange, mover)
}

fn look_for_names(
    fs: &FileSystem, tiers: &Tiers, exchange: &Exchange, mover: &mut Mover,
) -> Result<(), FsError> {
    let Some(publisher) = &mut mover.publisher else { return Ok(()) };
    let begin = Instant::now();
    let outcome = publisher.look();
    mover.sight.names = Some((Instant::now(), begin.elapsed()));
    mover.sight.trouble = outcome.as_ref().err().map(ToString::to_string);
    let found = match outcome {
        Err(error @ RemoteError::Foreign(_)) => return Err(FsError::Remote(error)),
        Err(error) if error.is_outage() => return Err(FsError::Remote(error)),
        // Where no names can be read or put, the bytes of files go there all the same.
        Err(_) => return Ok(()),
        Ok(found) => found,
    };
    if mover.sight.is_asking() && found == Found::All {
        return Ok(());
    }
    let why = match found {
        Found::Less(why) => {
            mover.sight.names_are_lost = true;
            // Whoever waits for the names waits until they are there again.
            tiers.names_published.store(0, Ordering::Release);
            why
        }
        Found::All => {
            let Some(object) = ask_for_some(fs, tiers, exchange, &mut mover.sight)? else {
                mover.sight.names = Some((Instant::now(), begin.elapsed()));
                tiers.looks.fetch_add(1, Ordering::AcqRel);
                return Ok(());
            };
            format!("object {object}: its copy in the remote is gone, or not as long as it was")
        }
    };
    fs.core.observer.failed(&format!("{why}: all that this store has there is looked for"));
    mover.distrust(&fs.core, tiers)?;
    mover.sight.suspects = files_with_copies(&fs.core)?;
    Ok(())
}

/// Asks for the next copies of all; one that the remote does not have.
fn ask_for_some(
    fs: &FileSystem, tiers: &Tiers, exchange: &Exchange, sight: &mut Sight,
) -> Result<Option<ObjectId>, FsError> {
    let objects = tiers.copies.disk().some_in_remote(ObjectId(sight.turn), COPIES_SAMPLED);
    sight.turn = objects.last().map_or(0, |last| last.0 + 1);
    let mut copies = Vec::new();
    for object in objects.into_iter().filter(|object| !sight.lost.contains(object)) {
        let copy = fs.core.state().metadata.remote_copy(object)?;
        copies.extend(copy.map(|copy| (object, copy)));
    }
    let outcomes =
        in_background(ASKED_AT_ONCE, Share::Quarter, &copies, |(_, copy)| exchange.has(copy));
    for ((object, copy), outcome) in copies.into_iter().zip(outcomes) {
        match outcome {
            Err(error) if error.is_outage() => return Err(FsError::Remote(error)),
            // What changed meanwhile has no copy there any more.
            Ok(false) if fs.core.state().metadata.remote_copy(object)? == Some(copy) => {
                return Ok(Some(object));
            }
            Ok(_) | Err(_) => {}
        }
    }
    Ok(None)
}

fn files_with_copies(core: &Core) -> Result<Vec<(InodeId, ObjectId)>, FsError> {
    let snapshot = core.state().metadata.snapshot()?;
    let mut objects = HashSet::new();
    snapshot.for_each::<RemoteCopy>(b'R', |object, _| {
        objects.insert(ObjectId(object));
    })?;
    let mut files = Vec::new();
    snapshot.for_each::<Inode>(b'I', |id, inode| {
        let file = inode.file().filter(|file| FileRecord::is_settled(file));
        let object = file.and_then(|file| file.object).filter(|object| objects.contains(object));
        files.extend(object.map(|object| (InodeId(id), object)));
    })?;
    Ok(files)
}

/// Asks the remote for the next of the copies that may be lost.
fn ask_for_copies(
    fs: &FileSystem, tiers: &Tiers, exchange: &Exchange, mover: &mut Mover,
) -> Result<(), FsError> {
    let suspects = &mut mover.sight.suspects;
    if suspects.is_empty() || tiers.is_closing() {
        return Ok(());
    }
    let batch = suspects.split_off(suspects.len().saturating_sub(COPIES_BATCH));
    let mut copies = Vec::new();
    for &(id, object) in &batch {
        let copy = fs.core.state().metadata.remote_copy(object)?;
        copies.extend(copy.map(|copy| ((id, object), copy)));
    }
    let outcomes =
        in_background(ASKED_AT_ONCE, Share::Quarter, &copies, |(_, copy)| exchange.has(copy));
    for ((file, copy), outcome) in copies.into_iter().zip(outcomes) {
        match outcome {
            Ok(true) => {}
            Ok(false) => {
                if lose_copy(fs, tiers, file, &copy)? {
                    mover.sight.lost.insert(file.1);
                }
            }
            Err(error) if error.is_outage() => {
                mover.sight.suspects.extend(batch);
                return Err(FsError::Remote(error));
            }
            // One that cannot be looked at is looked at again before the disk's copy leaves.
            Err(error) => log::warn!("object {}: {error}", file.1),
        }
    }
    let lost = mover.sight.lost.len();
    if mover.sight.suspects.is_empty() && lost > 0 {
        fs.core.observer.failed(&format!("the remote has lost the only copy of {lost} files"));
    }
    Ok(())
}

/// The remote does not have the copy that is on record: the disk's goes there again. Whether there is none.
fn lose_copy(
    fs: &FileSystem, tiers: &Tiers, (id, object): (InodeId, ObjectId), copy: &RemoteCopy,
) -> Result<bool, FsError> {
    let mut state = fs.core.state_to_change()?;
    let now = state.metadata.remote_copy(object)?;
    // Somebody changed the file meanwhile, or it was uploaded again.
    if now.as_ref() != Some(copy) {
        return Ok(false);
    }
    // Memory still has what was held back until it had its name there.
    let ram = fs.core.store.ram.as_ref();
    if copy.state != RemoteState::Only || ram.is_some_and(|ram| ram.dirty_version(object).is_some())
    {
        tiers.forget_upload(&mut state, (id, object))?;
        return Ok(false);
    }
    drop(state);
    fs.residency().corrupt(id, object, Tier::Remote, "the remote does not have it any more");
    fs.residency().note_damage(id, object, true);
    Ok(true)
}

/// Notes which manifests are the store's own, as part of the next commit.
pub(super) fn note_publications(core: &Core, names: &Publisher) -> Result<(), FsError> {
    let OwnManifests { highest, authors } = names.own_manifests();
    let publications = Publications { highest: highest.0, authors };
    let mut state = core.state_to_change()?;
    if state.metadata.single()?.as_ref() != Some(&publications) {
        state.metadata.put_single(&publications);
    }
    Ok(())
}

/// The manifests that a store knows to be its own, if it ever noted any.
///
/// # Errors
/// Those of the store.
pub fn own_manifests(fs: &FileSystem) -> Result<Option<OwnManifests>, FsError> {
    let publications = fs.core.state().metadata.single()?;
    Ok(publications.map(|Publications { highest, authors }| OwnManifests {
        highest: Sequence(highest),
        authors,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_waits_for_the_remote_is_not_held_up_by_one_slow_look() {
        let ms = Duration::from_millis;
        assert_eq!(names_apart(ms(10), true), ms(200));
        assert_eq!(names_apart(ms(1000), true), ms(5000));
        assert_eq!(names_apart(ms(60_000), true), ms(60_000));
        assert_eq!(names_apart(ms(60_000), false), NAMES_EVERY);
    }
}
