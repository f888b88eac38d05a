use super::*;
use crate::SetAttributes;
use crate::unmounted::{FILES, Model, Unmounted};
use kvfs_storage::store::record::{DirectoryClass, Time};

fn inode(is_directory: bool, mode: u16, uid: u32, gid: u32) -> Inode {
    let class = DirectoryClass::Plain;
    let kind = if is_directory {
        Kind::Directory { class, parent: InodeId::ROOT, name: Vec::new() }
    } else {
        Kind::Symlink { target: Vec::new() }
    };
    let (atime, mtime, ctime) = (Time::default(), Time::default(), Time::default());
    Inode { kind, mode, uid, gid, links: 1, atime, mtime, ctime }
}

#[test]
fn who_is_let_in() {
    fn check(is_directory: bool, (mode, uid, gid): (u16, u32, u32), expected: u16) {
        let inode = inode(is_directory, mode, uid, gid);
        let readers = Readers { uid: 7, gid: 8, bits: 0o444 };
        assert_eq!(readers.let_in(&inode), expected, "{mode:o} {uid} {gid}");
    }
    check(false, (0o644, 7, 8), 0o444);
    check(false, (0o640, 7, 8), 0o440);
    check(false, (0o600, 7, 8), 0o400);
    // Others may be in its group.
    check(false, (0o604, 7, 8), 0o400);
    // Somebody else's.
    check(false, (0o644, 1, 1), 0o444);
    check(false, (0o640, 1, 8), 0o440);
    check(false, (0o604, 1, 8), 0);
    check(true, (0o700, 1, 1), 0);
    check(false, (0o600, 1, 1), 0);
    // Of directories it counts who may enter.
    check(true, (0o711, 7, 8), 0o444);
    check(true, (0o744, 7, 8), 0o400);
}

#[test]
fn readers_may_read_what_lets_all_of_them_in() {
    let readers = |bits| Readers { uid: 7, gid: 8, bits };
    let file = |mode| inode(false, mode, 7, 8);
    assert!(readers(0o444).may_read(&file(0o644)));
    assert!(!readers(0o444).may_read(&file(0o640)));
    assert!(readers(0o440).may_read(&file(0o640)));
    assert!(readers(0).may_read(&file(0)));
}

impl Unmounted {
    fn give(&self, id: InodeId, (mode, uid, gid): (u16, u32, u32)) {
        let (mode, uid, gid) = (Some(mode), Some(uid), Some(gid));
        self.fs
            .set_attributes(id, &SetAttributes { mode, uid, gid, ..Default::default() })
            .unwrap();
    }
}

/// A model with a sequence of which everything is open to everybody, and the parts of that.
fn open_sequence(unmounted: &Unmounted) -> (Model<'_>, [InodeId; 5]) {
    let model = unmounted.make_model(1);
    let sequence = model.make_sequence("s", &[0], 1);
    let layer = unmounted.id_of(sequence, "000").unwrap();
    let tokens = unmounted.id_of(sequence, names::TOKENS).unwrap();
    let parts = [model.directory, model.sequences, sequence, layer, tokens];
    (model, parts)
}

#[test]
fn a_sequence_is_found_by_those_to_whom_all_of_it_is_open() {
    let unmounted = Unmounted::new();
    let (model, parts) = open_sequence(&unmounted);
    let [directory, sequences, sequence, layer, tokens] = parts;
    let is_open = || {
        let state = unmounted.fs.core.state();
        state.is_open_to_askers(directory, sequence, model.manifest.geometry()).unwrap()
    };
    let check = |changes: &[(InodeId, (u16, u32, u32))], expected: bool| {
        for id in parts {
            unmounted.give(id, (if id == tokens { 0o644 } else { 0o755 }, 0, 0));
        }
        for (id, to) in changes {
            unmounted.give(*id, *to);
        }
        assert_eq!(is_open(), expected, "{changes:?}");
    };
    check(&[], true);
    check(&[(sequence, (0o755, 7, 8))], true);
    check(&[(sequence, (0o750, 0, 0))], false);
    check(&[(sequences, (0o750, 0, 0))], false);
    check(&[(layer, (0o750, 0, 0))], false);
    check(&[(tokens, (0o640, 0, 0))], false);
    // Only root asks.
    check(&[(directory, (0o700, 0, 5)), (sequence, (0o700, 0, 6))], true);
    // Only its owner asks, who comes to it, or does not.
    let mine = [(directory, (0o700, 7, 5)), (sequence, (0o700, 7, 5))];
    check(&mine, true);
    check(&[mine[0], mine[1], (sequences, (0o700, 0, 0))], false);
    check(&[mine[0], (sequence, (0o700, 8, 5))], false);
    check(&[mine[0], (sequence, (0o755, 8, 5))], true);
    // The members of a group ask.
    let ours = (directory, (0o750, 0, 5));
    check(
        &[ours, (sequence, (0o750, 0, 5)), (layer, (0o750, 0, 5)), (tokens, (0o640, 0, 5))],
        true,
    );
    check(&[ours, (sequence, (0o700, 0, 5))], false);
    check(&[ours, (sequence, (0o750, 0, 6))], false);
    check(&[ours, (sequence, (0o755, 0, 6))], true);
}

#[test]
fn who_is_told_of_a_file_can_read_it() {
    let unmounted = Unmounted::new();
    let (_, [directory, _, sequence, _, tokens]) = open_sequence(&unmounted);
    let lets = || unmounted.fs.core.state().lets_askers_read(directory, sequence, tokens).unwrap();
    assert!(lets());
    unmounted.give(tokens, (0o640, 0, 0));
    assert!(!lets());
}

#[test]
fn the_readers_of_a_sequence_get_what_all_of_them_may_read() {
    let unmounted = Unmounted::new();
    let id = unmounted.write(FILES, "file", b"some bytes");
    let readers = Readers { uid: 7, gid: 8, bits: 0o444 };
    let whole = |name| unmounted.fs.whole_file((FILES, name), readers);
    assert_eq!(whole("file").unwrap().as_deref(), Some(&b"some bytes"[..]));
    assert!(whole("absent").unwrap().is_none());
    unmounted.give(id, (0o640, 0, 0));
    assert!(matches!(whole("file"), Err(FsError::NotPermitted)));
    assert!(unmounted.fs.core.state().handles.is_empty());
}

const ME: Caller = Caller { uid: 7, gid: 7 };

#[test]
fn a_user_replaces_what_he_could_remove() {
    let unmounted = Unmounted::new();
    let replaces = |caller, parent, name: &str| {
        unmounted.fs.core.state().may_replace(caller, parent, name.as_bytes()).unwrap()
    };
    let mine = unmounted.make_directory(FILES, "mine", (0o755, 7));
    assert!(!replaces(ME, FILES, "absent") && replaces(Caller::DAEMON, FILES, "absent"));
    assert!(replaces(ME, mine, "absent"));
    assert!(!replaces(ME, FILES, "mine"));
    let whole = unmounted.make_directory(mine, "whole", (0o755, 7));
    let inner = unmounted.make_directory(whole, "inner", (0o755, 7));
    unmounted.write_as(8, inner, "file", b"bytes");
    assert!(replaces(ME, mine, "whole"));
    let closed = unmounted.make_directory(inner, "closed", (0o755, 8));
    assert!(replaces(ME, mine, "whole"), "it is empty");
    unmounted.write_as(7, closed, "file", b"bytes");
    assert!(!replaces(ME, mine, "whole") && replaces(Caller::DAEMON, mine, "whole"));
    // Where a bit is sticky only what is his own goes.
    let sticky = unmounted.make_directory(mine, "sticky", (0o1777, 7));
    let other = unmounted.make_directory(sticky, "other", (0o1777, 8));
    unmounted.write_as(7, other, "file", b"bytes");
    assert!(replaces(ME, mine, "sticky"));
    unmounted.write_as(8, other, "file of 8", b"bytes");
    assert!(!replaces(ME, mine, "sticky"));
}

#[test]
fn there_is_an_end_to_what_is_looked_through_for_a_user() {
    let unmounted = Unmounted::new();
    let mine = unmounted.make_directory(FILES, "mine", (0o755, 7));
    let many = unmounted.make_directory(mine, "many", (0o755, 7));
    let replaces = || unmounted.fs.core.state().may_replace(ME, mine, b"many").unwrap();
    for number in 1..DIRECTORIES_MAX {
        unmounted.make_directory(many, &number.to_string(), (0o755, 7));
    }
    assert!(replaces());
    unmounted.make_directory(many, "last", (0o755, 7));
    assert!(!replaces());
}

#[test]
fn a_user_finds_ordinary_files_by_paths_that_are_open_to_him() {
    let unmounted = Unmounted::new();
    let directory = unmounted.make_directory(FILES, "d", (0o755, 0));
    let file = unmounted.write(directory, "file", b"bytes");
    let finds = |path: &str| unmounted.fs.core.state().readable_file(ME, Path::new(path)).unwrap();
    assert_eq!(finds("files/d/file"), Some(file));
    for path in
        ["files/d", "files/d/absent", "files/d/file/x", "files/../files/d/file", "/files/d/file"]
    {
        assert_eq!(finds(path), None, "{path}");
    }
    unmounted.give(file, (0o600, 0, 0));
    assert_eq!(finds("files/d/file"), None);
    unmounted.give(file, (0o644, 0, 0));
    unmounted.give(directory, (0o744, 0, 0));
    assert_eq!(finds("files/d/file"), None);
    // What means something in a model is no ordinary file.
    let (_, [.., tokens]) = open_sequence(&unmounted);
    unmounted.give(tokens, (0o644, 0, 0));
    assert_eq!(finds("models/m/sequences/s/tokens"), None);
}
