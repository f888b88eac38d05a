//! What records say of files, copies and times.

use super::*;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

#[test]
fn times_before_and_after_1970_survive_the_round_trip() {
    fn check(time: SystemTime) {
        assert_eq!(SystemTime::from(Time::from(time)), time);
    }
    check(UNIX_EPOCH);
    check(UNIX_EPOCH + Duration::new(1_700_000_000, 123_456_789));
    check(UNIX_EPOCH - Duration::new(5, 1));
    check(UNIX_EPOCH - Duration::new(5, 0));
}

#[test]
fn the_clock_is_that_of_the_machine() {
    let now = SystemTime::from(Time::now());
    assert!(now.elapsed().unwrap_or_default() < Duration::from_secs(60));
}

fn file(role: Role, object: Option<ObjectId>, unsettled: bool) -> FileRecord {
    FileRecord { role, object, size: 0, blocks: 0, unsettled }
}

fn page() -> PageRecord {
    let (model, checksum) = ([1; 16], [2; 16]);
    PageRecord { model, layer: 0, start: 0, tokens: 32, dtype: Dtype::F16, checksum }
}

#[test]
fn a_file_is_settled_where_its_object_says_all() {
    let object = Some(ObjectId(1));
    assert!(file(Role::Plain, object, false).is_settled());
    assert!(!file(Role::Plain, object, true).is_settled());
    assert!(!file(Role::Plain, None, false).is_settled());
    assert!(!file(Role::Tokens, object, false).is_settled());
}

#[test]
fn a_role_says_who_may_write() {
    let tail = Role::Tail { start: 0, directory: InodeId(1) };
    let rules = |role: Role| (role.is_sealed(), role.is_append_only());
    assert_eq!([Role::Page(page()), Role::Manifest].map(rules), [(true, false); 2]);
    assert_eq!([tail, Role::Tokens].map(rules), [(false, true); 2]);
    assert_eq!(rules(Role::Plain), (false, false));
}

#[test]
fn a_state_is_told_by_the_tokens_that_it_has_seen() {
    let seen = |last: u8| {
        let mut hash: [u8; 32] = std::array::from_fn(|index| u8::try_from(index).unwrap_or(0));
        hash[15] = last;
        PrefixHash(hash)
    };
    let state = PageRecord { tokens: 0, checksum: half(seen(7)), ..page() };
    assert!(state.is_state() && state.is_state_of(seen(7)) && !state.is_state_of(seen(8)));
    let page = PageRecord { checksum: half(seen(7)), ..page() };
    assert!(!page.is_state() && !page.is_state_of(seen(7)));
}

#[test]
fn only_what_the_disk_has_not_is_counted_as_the_remotes() {
    let copy = |state, stored_bytes| {
        let encoding = crate::tier::encoding::Encoding::Raw;
        RemoteCopy { content: [0; 32], encoding, stored_bytes, state }
    };
    let mut only = OnlyRemote::default();
    for bytes in [10, 20] {
        only.add(&copy(RemoteState::Only, bytes));
        only.add(&copy(RemoteState::Named, 1000));
    }
    assert_eq!((only.objects, only.stored_bytes), (2, 30));
    only.subtract(&copy(RemoteState::Held, 1000));
    only.subtract(&copy(RemoteState::Only, 20));
    assert_eq!((only.objects, only.stored_bytes), (1, 10));
}

#[test]
fn an_inode_says_what_it_is() {
    let inode = |kind| {
        let (atime, mtime, ctime) = (Time::default(), Time::default(), Time::default());
        Inode { kind, mode: 0, uid: 0, gid: 0, links: 1, atime, mtime, ctime }
    };
    let directory =
        Kind::Directory { class: DirectoryClass::Plain, parent: InodeId(1), name: vec![] };
    let expected = [
        (Kind::File(file(Role::Plain, None, true)), libc::S_IFREG, true, false),
        (Kind::Symlink { target: vec![] }, libc::S_IFLNK, false, false),
        (Kind::Special { file_type: libc::S_IFIFO, device: 0 }, libc::S_IFIFO, false, false),
        (directory, libc::S_IFDIR, false, true),
    ];
    for (kind, file_type, is_file, is_directory) in expected {
        let mut inode = inode(kind);
        assert_eq!((inode.file_type(), inode.is_directory()), (file_type, is_directory));
        assert_eq!((inode.file().is_some(), inode.file_mut().is_some()), (is_file, is_file));
    }
}
