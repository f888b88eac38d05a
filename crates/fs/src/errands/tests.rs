//! What is asked of directories, sequences and prefixes, without a mount.

use super::*;
use crate::lookup::Lookup;
use crate::unmounted::{FILES, Model, PAGE_TOKENS, Unmounted};
use crate::{SetAttributes, check_limit};
use kvfs_page::names;

const ALICE: Caller = Caller { uid: 7, gid: 7 };
const BOB: Caller = Caller { uid: 8, gid: 8 };
const ROOT: Caller = Caller { uid: 0, gid: 0 };

impl Unmounted {
    fn ask(&self, id: InodeId, name: &[u8], value: &[u8], caller: Caller) -> Result<bool, FsError> {
        ask_below(&self.fs, id, (name, value), caller)
    }

    /// Does what was asked until nothing is left; how many steps it took.
    fn do_all(&self) -> usize {
        let mut steps = 1;
        while self.fs.errands.step(&self.fs) {
            steps += 1;
        }
        steps
    }

    fn is_pinned(&self, id: InodeId) -> bool {
        self.fs.core.state().is_pinned(id).unwrap()
    }

    fn hand(&self, id: InodeId, uid: u32) {
        let set = SetAttributes { uid: Some(uid), ..SetAttributes::default() };
        self.fs.set_attributes(id, &set).unwrap();
    }

    /// A sequence and all that is in it become a user's.
    fn hand_all(&self, directory: InodeId, uid: u32) {
        self.hand(directory, uid);
        for name in self.names(directory) {
            let id = self.id_of(directory, &name).unwrap();
            let is_directory = self.fs.core.state().inode(id).unwrap().is_directory();
            if is_directory { self.hand_all(id, uid) } else { self.hand(id, uid) }
        }
    }

    fn found(&self, parent: InodeId, name: &str) -> InodeId {
        match self.fs.lookup(parent, name.as_bytes()).unwrap() {
            Lookup::Found(found) => found.attributes.inode,
            Lookup::Absent { .. } => panic!("{name} is absent"),
        }
    }

    /// Which pages of a layer are pinned.
    fn pinned_pages(&self, sequence: InodeId, layer: &str) -> Vec<String> {
        let directory = self.id_of(sequence, layer).unwrap();
        let names = self.names(directory).into_iter();
        names.filter(|name| self.is_pinned(self.id_of(directory, name).unwrap())).collect()
    }
}

impl Model<'_> {
    /// The virtual directory of the prefix of so many pages of the sequences that tests make.
    fn prefix(&self, unmounted: &Unmounted, pages: u32) -> InodeId {
        let tokens: Vec<u8> = (0..pages * PAGE_TOKENS).flat_map(u32::to_le_bytes).collect();
        let hash = self.manifest.prefix_of(&tokens).unwrap().to_string();
        let all = unmounted.found(self.directory, names::PREFIXES);
        unmounted.found(unmounted.found(all, &hash[..2]), &hash)
    }
}

#[track_caller]
fn assert_refused(outcome: Result<bool, FsError>, errno: i32) {
    assert_eq!(outcome.map_err(|error| error.errno()), Err(errno));
}

#[test]
fn a_sequence_is_pinned_as_a_whole_and_what_comes_later_is_not() {
    let unmounted = Unmounted::new();
    let model = unmounted.make_model(2);
    let sequence = model.make_sequence("s", &[0, 1], 3);
    let other = model.make_sequence_like("t", &[0, 1], 3, 1);
    assert!(unmounted.ask(sequence, PIN, b"1", ROOT).unwrap());
    assert_eq!(unmounted.fs.extended_attribute(sequence, b"user.kvfs.moving").unwrap(), b"walking");
    unmounted.do_all();
    let moving = unmounted.fs.extended_attribute(sequence, b"user.kvfs.moving");
    assert!(matches!(moving, Err(FsError::NoAttribute)), "{moving:?}");
    for layer in ["000", "001"] {
        assert_eq!(unmounted.pinned_pages(sequence, layer).len(), 3);
        assert_eq!(unmounted.pinned_pages(other, layer).len(), 0);
    }
    assert!(unmounted.is_pinned(unmounted.id_of(sequence, names::TOKENS).unwrap()));
    let layer = unmounted.id_of(sequence, "000").unwrap();
    let late = model.write_page(layer, 0, u64::from(3 * PAGE_TOKENS));
    assert!(!unmounted.is_pinned(late));
    unmounted.ask(sequence, PIN, b"0", ROOT).unwrap();
    unmounted.do_all();
    assert_eq!(unmounted.pinned_pages(sequence, "000").len(), 0);
}

#[test]
fn only_the_owner_asks_and_only_his_own_files_are_met() {
    let unmounted = Unmounted::new();
    let directory = unmounted.make_directory(FILES, "d", (0o777, ALICE.uid));
    let hers = unmounted.write_as(ALICE.uid, directory, "hers", b"bytes");
    let his = unmounted.write_as(BOB.uid, directory, "his", b"bytes");
    // What she may not enter she could not reach.
    let closed = unmounted.make_directory(directory, "closed", (0o700, BOB.uid));
    let inside = unmounted.write_as(ALICE.uid, closed, "inside", b"bytes");
    assert_refused(unmounted.ask(directory, PIN, b"1", BOB), libc::EPERM);
    assert_refused(unmounted.ask(directory, HINT, FINISHED, BOB), libc::EPERM);
    assert_refused(unmounted.ask(directory, TIER, b"ssd", BOB), libc::EPERM);
    assert_refused(unmounted.ask(hers, HINT, FINISHED, BOB), libc::EPERM);
    // Nor is one file moved or pinned by who may only write to it, which is all that the kernel asks for.
    for name in [PIN, TIER] {
        assert_refused(
            check_limit(&unmounted.fs.core, hers, name, BOB).map(|()| true),
            libc::EPERM,
        );
        for caller in [ALICE, ROOT] {
            check_limit(&unmounted.fs.core, hers, name, caller).unwrap();
        }
    }
    unmounted.ask(directory, PIN, b"1", ALICE).unwrap();
    unmounted.do_all();
    assert_eq!([hers, his, inside].map(|id| unmounted.is_pinned(id)), [true, false, false]);
    // Nor does she take away what somebody else has pinned.
    for id in [his, inside] {
        unmounted.fs.pins().set(id, b"1").unwrap();
    }
    unmounted.ask(directory, PIN, b"0", ALICE).unwrap();
    unmounted.do_all();
    assert_eq!([hers, his, inside].map(|id| unmounted.is_pinned(id)), [false, true, true]);
    unmounted.ask(directory, PIN, b"0", ROOT).unwrap();
    unmounted.do_all();
    assert_eq!([hers, his, inside].map(|id| unmounted.is_pinned(id)), [false; 3]);
}

#[test]
fn what_is_none_of_these_is_refused_or_left_to_others() {
    let unmounted = Unmounted::new();
    let file = unmounted.write(FILES, "file", b"bytes");
    for (name, value) in [(PIN, "2"), (HINT, "finish"), (TIER, "disk"), (HINT, "")] {
        assert_refused(unmounted.ask(FILES, name, value.as_bytes(), ROOT), libc::EINVAL);
    }
    // No remote and no memory.
    assert_refused(unmounted.ask(FILES, TIER, b"remote", ROOT), libc::EOPNOTSUPP);
    assert_refused(unmounted.ask(FILES, TIER, b"ram", ROOT), libc::EOPNOTSUPP);
    assert!(!unmounted.ask(FILES, b"user.note", b"1", ROOT).unwrap());
    assert!(!unmounted.ask(file, PIN, b"1", ROOT).unwrap(), "of a file it is set as ever");
    assert!(unmounted.ask(file, HINT, WAITING, ROOT).unwrap());
    let model = unmounted.make_model(1);
    let slots = unmounted.found(model.directory, names::SLOTS);
    assert_refused(unmounted.ask(slots, PIN, b"1", ROOT), libc::EOPNOTSUPP);
    assert_eq!(unmounted.do_all(), 1);
}

/// However much there is, a step is short, and errands of others go on between.
#[test]
fn a_large_directory_is_walked_in_steps_by_turns() {
    let unmounted = Unmounted::new();
    let [large, small] =
        ["large", "small"].map(|name| unmounted.make_directory(FILES, name, (0o755, ALICE.uid)));
    for number in 0..300 {
        let inner = unmounted.make_directory(large, &format!("s{number}"), (0o755, ALICE.uid));
        unmounted.write_as(ALICE.uid, inner, "file", b"x");
    }
    let last = unmounted.write_as(BOB.uid, small, "file", b"x");
    unmounted.ask(large, PIN, b"1", ALICE).unwrap();
    unmounted.ask(small, PIN, b"1", ROOT).unwrap();
    assert!(unmounted.fs.errands.step(&unmounted.fs));
    assert!(unmounted.fs.errands.step(&unmounted.fs));
    assert!(unmounted.is_pinned(last), "it came after one step of the large one");
    // Each of the directories is one, and their own names take five.
    assert!(unmounted.do_all() >= 300);
    let files = (0..300).map(|number| {
        let inner = unmounted.id_of(large, &format!("s{number}")).unwrap();
        unmounted.id_of(inner, "file").unwrap()
    });
    assert!(files.into_iter().all(|id| unmounted.is_pinned(id)));
}

#[test]
fn one_user_does_not_take_the_errands_of_others() {
    let unmounted = Unmounted::new();
    let [hers, his] = [ALICE, BOB]
        .map(|user| unmounted.make_directory(FILES, &user.uid.to_string(), (0o755, user.uid)));
    for _ in 0..ERRANDS_OF_EACH {
        unmounted.ask(hers, HINT, FINISHED, ALICE).unwrap();
    }
    assert_refused(unmounted.ask(hers, HINT, FINISHED, ALICE), libc::EAGAIN);
    assert!(unmounted.ask(his, HINT, FINISHED, BOB).unwrap());
    unmounted.do_all();
    assert!(!unmounted.fs.errands.are_under_way(hers));
    assert!(unmounted.ask(hers, HINT, FINISHED, ALICE).unwrap(), "her share came back");
}

#[test]
fn a_prefix_is_the_pages_up_to_its_end_in_the_sequences_of_who_asks() {
    let unmounted = Unmounted::new();
    let model = unmounted.make_model(2);
    let hers = model.make_sequence_like("hers", &[0, 1], 3, 1);
    let his = model.make_sequence_like("his", &[0, 1], 3, 2);
    unmounted.hand_all(hers, ALICE.uid);
    unmounted.hand_all(his, BOB.uid);
    let prefix = model.prefix(&unmounted, 2);
    let somebody = Caller { uid: 9, gid: 9 };
    assert_refused(unmounted.ask(prefix, PIN, b"1", somebody), libc::EPERM);
    assert_refused(unmounted.ask(prefix, HINT, FINISHED, somebody), libc::EPERM);
    unmounted.ask(prefix, PIN, b"1", ALICE).unwrap();
    assert_eq!(unmounted.fs.extended_attribute(prefix, b"user.kvfs.moving").unwrap(), b"walking");
    unmounted.do_all();
    let expected: [&str; 2] = ["0000000.safetensors", "0000016.safetensors"];
    for layer in ["000", "001"] {
        assert_eq!(unmounted.pinned_pages(hers, layer), expected);
        assert!(unmounted.pinned_pages(his, layer).is_empty());
    }
    assert!(!unmounted.is_pinned(unmounted.id_of(hers, names::TOKENS).unwrap()));
    unmounted.ask(prefix, PIN, b"1", ROOT).unwrap();
    unmounted.do_all();
    assert_eq!(unmounted.pinned_pages(his, "001"), expected);
    // Nothing of it can be deleted alone.
    for name in [&b"user.kvfs.ttl"[..], b"user.kvfs.age", b"user.kvfs.quota"] {
        let outcome = check_limit(&unmounted.fs.core, prefix, name, ROOT).map(|()| true);
        assert_refused(outcome, libc::EOPNOTSUPP);
    }
}

#[test]
fn a_prefix_that_nobody_has_any_more_is_absent() {
    let unmounted = Unmounted::new();
    let model = unmounted.make_model(1);
    let sequence = model.make_sequence("s", &[0], 2);
    let prefix = model.prefix(&unmounted, 2);
    unmounted.ask(prefix, PIN, b"1", ROOT).unwrap();
    // It goes before anything was done.
    let place = crate::unmounted::place(sequence, names::TOKENS);
    unmounted.fs.unlink(&place).unwrap();
    assert_refused(unmounted.ask(prefix, PIN, b"1", ROOT), libc::ENOENT);
    unmounted.do_all();
}

/// The walk stands on inodes, not on names.
#[test]
fn a_directory_that_is_renamed_meanwhile_is_walked_to_its_end() {
    let unmounted = Unmounted::new();
    let directory = unmounted.make_directory(FILES, "d", (0o755, 0));
    let ids: Vec<_> =
        (0..200).map(|n| unmounted.write(directory, &format!("f{n}"), b"x")).collect();
    unmounted.ask(directory, PIN, b"1", ROOT).unwrap();
    unmounted.fs.errands.step(&unmounted.fs);
    let [from, to] = ["d", "e"].map(|name| crate::unmounted::place(FILES, name));
    unmounted.fs.rename(&from, &to, 0).unwrap();
    unmounted.do_all();
    assert!(ids.into_iter().all(|id| unmounted.is_pinned(id)));
}

#[test]
fn what_is_pinned_already_is_not_changed() {
    let unmounted = Unmounted::new();
    let directory = unmounted.make_directory(FILES, "d", (0o755, 0));
    let id = unmounted.write(directory, "file", b"x");
    unmounted.fs.pins().set(id, b"1").unwrap();
    let changed = || unmounted.fs.core.state().inode(id).unwrap().ctime;
    let before = changed();
    unmounted.ask(directory, PIN, b"1", ROOT).unwrap();
    unmounted.do_all();
    assert_eq!(changed(), before);
}
