//! A limit deletes what the owner of its directory could, and nothing else.

use super::*;
use crate::retention::below::NamesBelow;
use crate::retention::pass::{Unit, What};
use crate::retention::rights::{Right, Root};
use crate::unmounted::MODELS;
use crate::{NewTime, SetAttributes};

const OWNER: u32 = 7;
const OTHER: u32 = 8;

impl Unmounted {
    fn set_mode(&self, id: InodeId, mode: u16) {
        let set = SetAttributes { mode: Some(mode), ..SetAttributes::default() };
        self.fs.set_attributes(id, &set).unwrap();
    }

    /// A limit of this user's under which nothing may stay.
    fn empty(&self, directory: InodeId) {
        self.limit(directory, QUOTA, "1");
        run(&self.fs, &mut Retainer::default());
    }
}

/// A directory of the owner's, below others that everybody may enter.
fn limited(unmounted: &Unmounted) -> InodeId {
    unmounted.make_directory(FILES, "d", (0o755, OWNER))
}

#[test]
fn what_lies_in_directories_of_others_stays_and_does_not_count() {
    let unmounted = Unmounted::new();
    let directory = limited(&unmounted);
    let closed = unmounted.make_directory(directory, "closed", (0o755, OTHER));
    let open = unmounted.make_directory(directory, "open", (0o777, OTHER));
    let sticky = unmounted.make_directory(directory, "sticky", (0o1777, OTHER));
    for (parent, uid) in
        [(directory, OTHER), (closed, OWNER), (open, OTHER), (sticky, OTHER), (sticky, OWNER)]
    {
        unmounted.write_as(uid, parent, &format!("of {uid}"), &[1; 10]);
    }
    unmounted.empty(directory);
    assert_eq!(unmounted.names(directory), ["closed", "open", "sticky"]);
    assert_eq!(unmounted.names(closed), ["of 7"]);
    assert_eq!(unmounted.names(open), [""; 0]);
    assert_eq!(unmounted.names(sticky), ["of 8"]);
    let Report { bytes, files, removed_files, .. } = unmounted.report(directory);
    assert_eq!((bytes, files, removed_files), (0, 0, 3));
}

#[test]
fn a_limit_of_root_deletes_everything() {
    let unmounted = Unmounted::new();
    let directory = unmounted.make_directory(FILES, "d", (0o700, 0));
    let closed = unmounted.make_directory(directory, "closed", (0o1700, OTHER));
    unmounted.write_as(OTHER, closed, "file", &[1; 10]);
    unmounted.empty(directory);
    assert_eq!(unmounted.names(closed), [""; 0]);
}

/// A sequence of a new model, below a directory of the owner's.
fn sequence(unmounted: &Unmounted, (mode, uid): (u16, u32), files: &[u32]) -> (InodeId, InodeId) {
    let name = format!("m{}", unmounted.names(MODELS).len());
    let model = unmounted.make_model_of(1, |fields| fields.model_id = name);
    let set = SetAttributes { uid: Some(OWNER), ..SetAttributes::default() };
    unmounted.fs.set_attributes(model.sequences, &set).unwrap();
    let sequence = unmounted.make_directory(model.sequences, "s", (mode, uid));
    let inner = unmounted.make_directory(sequence, "inner", (0o777, uid));
    for uid in files {
        unmounted.write_as(*uid, inner, &format!("of {uid}"), &[1; 10]);
        unmounted.write_as(*uid, sequence, &format!("of {uid}"), &[1; 10]);
    }
    (model.sequences, sequence)
}

#[test]
fn a_sequence_goes_whole_or_not_at_all() {
    let unmounted = Unmounted::new();
    let check = |(mode, uid): (u16, u32), files: &[u32], goes: bool| {
        let (sequences, _) = sequence(&unmounted, (mode, uid), files);
        unmounted.empty(sequences);
        assert_eq!(unmounted.names(sequences).is_empty(), goes, "{mode:o} {uid} {files:?}");
    };
    check((0o755, OWNER), &[OWNER], true);
    check((0o755, OWNER), &[OTHER], true);
    check((0o755, OTHER), &[OWNER], false);
    check((0o777, OTHER), &[OTHER], true);
    check((0o1777, OTHER), &[OWNER], false);
    check((0o1755, OWNER), &[OTHER], true);
}

/// In a directory with a sticky bit names belong to their owners, but what is in a directory that everybody may
/// change does not.
#[test]
fn sticky_directories_keep_the_sequences_of_others() {
    let unmounted = Unmounted::new();
    let (fs, model) = (&unmounted.fs, unmounted.make_model(1));
    let give = |id, uid, mode| {
        let (uid, mode) = (Some(uid), Some(mode));
        fs.set_attributes(id, &SetAttributes { mode, uid, ..Default::default() }).unwrap();
    };
    give(model.directory, OWNER, 0o755);
    give(model.sequences, OTHER, 0o1777);
    let make = |name, uid| {
        let sequence = unmounted.make_directory(model.sequences, name, (0o777, uid));
        unmounted.write_as(OWNER, sequence, "file", &[1; 10]);
        sequence
    };
    let [_, _, mixed] =
        [("mine", OWNER), ("other", OTHER), ("mixed", OWNER)].map(|(name, uid)| make(name, uid));
    let sticky = unmounted.make_directory(mixed, "sticky", (0o1777, OTHER));
    let inside = unmounted.make_directory(sticky, "inside", (0o777, OTHER));
    unmounted.write_as(OWNER, inside, "file", &[1; 10]);
    unmounted.empty(model.directory);
    assert_eq!(unmounted.names(model.sequences), ["mixed", "other"]);
    let Report { files, removed_files, .. } = unmounted.report(model.directory);
    // The manifest counts, and the file in what is mixed, which stays with the rest of it.
    assert_eq!((files, removed_files), (2, 1));
    let directory = limited(&unmounted);
    let sticky = unmounted.make_directory(directory, "sticky", (0o1777, OTHER));
    let inside = unmounted.make_directory(sticky, "inside", (0o777, OTHER));
    unmounted.write_as(OTHER, inside, "file", &[1; 10]);
    unmounted.empty(directory);
    assert_eq!(unmounted.names(inside), [""; 0]);
}

/// The walk has found a sequence; what changes before it is removed counts.
#[test]
fn what_changed_since_the_walk_is_asked_again() {
    let unmounted = Unmounted::new();
    let fs = &unmounted.fs;
    let check = |goes: bool, change: &dyn Fn(&Unmounted, InodeId, InodeId)| {
        let (sequences, sequence) = sequence(&unmounted, (0o755, OWNER), &[OWNER]);
        unmounted.limit(sequences, QUOTA, "1");
        let policy = fs.retention.policies().directories[&sequences];
        let (owned, class) = fs.core.state().directory(sequences).unwrap();
        let root = Root { id: sequences, class, policy, owner: owned.uid };
        change(&unmounted, sequences, sequence);
        let unit = Unit { used: ago(-100), what: What::Sequence(sequence) };
        let removal = fs
            .enforcer()
            .remove_unit((&root, &NamesBelow::default()), &unit, u64::MAX, "quota")
            .unwrap();
        assert_eq!(removal.kept.is_none(), goes);
        assert_eq!(unmounted.names(sequences).is_empty(), goes);
    };
    check(true, &|_, _, _| {});
    check(false, &|unmounted, sequences, _| unmounted.set_mode(sequences, 0o555));
    check(false, &|unmounted, _, sequence| unmounted.set_mode(sequence, 0o555));
    check(false, &|unmounted, _, sequence| {
        let inner = unmounted.id_of(sequence, "inner").unwrap();
        unmounted.set_mode(inner, 0o555);
    });
    // A directory of somebody else, in which only he removes what is his.
    check(false, &|unmounted, _, sequence| {
        let inner = unmounted.id_of(sequence, "inner").unwrap();
        let sticky = unmounted.make_directory(inner, "sticky", (0o1777, OTHER));
        unmounted.write_as(OTHER, sticky, "file", &[1; 10]);
    });
    check(true, &|unmounted, _, sequence| {
        let inner = unmounted.id_of(sequence, "inner").unwrap();
        let sticky = unmounted.make_directory(inner, "sticky", (0o1777, OTHER));
        unmounted.write_as(OWNER, sticky, "file", &[1; 10]);
    });
    check(false, &|unmounted, sequences, _| {
        let set = SetAttributes { uid: Some(OTHER), ..SetAttributes::default() };
        unmounted.fs.set_attributes(sequences, &set).unwrap();
        unmounted.limit(sequences, QUOTA, "1");
    });
}

#[test]
fn a_sequence_with_a_limit_of_its_own_goes_if_its_owner_could_remove_it() {
    let unmounted = Unmounted::new();
    let check = |mode: u16, goes: bool| {
        let (sequences, sequence) = sequence(&unmounted, (0o755, OWNER), &[OWNER]);
        unmounted.set_mode(sequences, mode);
        unmounted.empty(sequence);
        assert_eq!(unmounted.names(sequences).is_empty(), goes, "{mode:o}");
    };
    check(0o755, true);
    check(0o555, false);
    // Who cannot come to it cannot remove it.
    let (sequences, sequence) = sequence(&unmounted, (0o755, OWNER), &[OWNER]);
    let kind = unmounted.fs.core.state().inode(sequences).unwrap().kind;
    let Kind::Directory { parent: model, .. } = kind else {
        panic!("sequences lie in a directory");
    };
    unmounted.set_mode(model, 0o700);
    unmounted.empty(sequence);
    assert_eq!(unmounted.names(sequences), ["s"]);
}

/// A user's file that has outlived its own time, in directories of this mode that are his or another's.
#[test]
fn a_time_to_live_takes_the_names_that_its_owner_could_remove() {
    let unmounted = Unmounted::new();
    let fs = &unmounted.fs;
    let check = |modes: [u16; 2], owners: [u32; 2], goes: bool| {
        let name = format!("{modes:?} {owners:?}");
        let outer = unmounted.make_directory(FILES, &name, (modes[0], owners[0]));
        let inner = unmounted.make_directory(outer, "inner", (modes[1], owners[1]));
        let file = unmounted.write_as(OWNER, inner, "file", b"bytes");
        unmounted.limit(file, TTL, "1");
        let old = Some(NewTime::At(at(1)));
        let set = SetAttributes { mtime: old, ..SetAttributes::default() };
        fs.set_attributes(file, &set).unwrap();
        let right =
            Right::OwnTime(file, &place(inner, "file")).holds(&fs.enforcer(), &fs.core.state());
        assert_eq!(right.unwrap(), goes, "{name}");
    };
    check([0o755, 0o755], [OTHER, OWNER], true);
    check([0o755, 0o755], [OTHER, OTHER], false);
    check([0o755, 0o1777], [OTHER, OTHER], true);
    check([0o700, 0o755], [OTHER, OWNER], false);
    check([0o700, 0o755], [OWNER, OWNER], true);
    check([0o755, 0o555], [OWNER, OWNER], false);
}
