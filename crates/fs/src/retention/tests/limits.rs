//! Where limits stand, who may set them, and what they say to those who ask.

use super::*;
use crate::attributes::Place;
use crate::retention::tree::InUse;
use crate::{Caller, FsError, Invalidation};
use kvfs_page::names;
use kvfs_storage::store::record::Entry;

const USED_BYTES: &[u8] = b"user.kvfs.used_bytes";

#[test]
fn only_owners_and_root_set_limits_and_see_how_much_there_is() {
    let unmounted = Unmounted::new();
    let fs = &unmounted.fs;
    let directory = unmounted.make_directory(FILES, "d", (0o755, 7));
    let may = |name, uid| {
        let caller = Caller { uid, gid: 7 };
        let allowed = [
            check_limit(&fs.core, directory, name, caller),
            check_reader(&fs.core, directory, name, caller),
        ];
        allowed.map(|allowed| match allowed {
            Ok(()) => true,
            Err(FsError::NotPermitted) => false,
            Err(error) => panic!("{error}"),
        })
    };
    for name in [QUOTA, AGE, TTL] {
        assert_eq!(
            [0, 7, 8].map(|uid| may(name, uid)),
            [[true, true], [true, true], [false, true]]
        );
    }
    assert_eq!([0, 7, 8].map(|uid| may(USED_BYTES, uid)[1]), [true, true, false]);
    assert_eq!(may(b"user.note", 8), [true, true]);
}

#[test]
fn limits_stand_on_directories_and_times_to_live_on_plain_files() {
    let unmounted = Unmounted::new();
    let (fs, model) = (&unmounted.fs, unmounted.make_model(1));
    let sequence = model.make_sequence("s", &[0], 1);
    let layer = unmounted.id_of(sequence, "000").unwrap();
    let page = unmounted.id_of(layer, &unmounted.names(layer)[0]).unwrap();
    let tokens = unmounted.id_of(sequence, names::TOKENS).unwrap();
    let file = unmounted.write(FILES, "file", b"bytes");
    let takes = |id, name| match fs.retention.set_limit(&fs.core, id, name, b"100") {
        Ok(()) => true,
        Err(FsError::Unsupported) => false,
        Err(error) => panic!("{error}"),
    };
    for name in [QUOTA, AGE, TTL] {
        let ids = [FILES, model.directory, model.sequences, sequence];
        assert_eq!(ids.map(|id| takes(id, name)), [true; 4]);
        let ids = [InodeId::ROOT, layer, page, tokens];
        assert_eq!(ids.map(|id| takes(id, name)), [false; 4]);
        assert_eq!(takes(file, name), name == TTL);
    }
    assert!(matches!(fs.retention.set_limit(&fs.core, FILES, QUOTA, b"0"), Err(FsError::Invalid)));
}

#[test]
fn limits_are_found_when_a_store_is_mounted_again() {
    let unmounted = Unmounted::new();
    let file = unmounted.write(FILES, "file", b"bytes");
    unmounted.limit(FILES, QUOTA, "1000");
    unmounted.limit(FILES, AGE, "2000");
    unmounted.limit(file, TTL, "3000");
    let unmounted = unmounted.again();
    let fs = &unmounted.fs;
    assert!(fs.retention.policies().directories.is_empty());
    fs.retention.find_limits(&fs.core).unwrap();
    assert!(fs.retention.is_active.load(Ordering::Acquire));
    assert_eq!(fs.retention.policies().directories[&FILES].to_string(), "size=1000 age=2000");
    assert!(fs.retention.policies().files.contains(&file));
    // They count until the last one is gone.
    let is_active = || fs.retention.is_active.load(Ordering::Acquire);
    for (id, name, expected) in [(FILES, QUOTA, true), (FILES, AGE, true), (file, TTL, false)] {
        fs.retention.remove_limit(&fs.core, id, name).unwrap();
        assert_eq!(is_active(), expected);
    }
    unmounted.limit(FILES, QUOTA, "1000");
    assert!(is_active());
}

#[test]
fn a_file_that_takes_over_a_time_to_live_is_looked_at() {
    let unmounted = Unmounted::new();
    let fs = &unmounted.fs;
    let attribute = |name: &[u8]| (name.to_vec(), b"5".to_vec());
    fs.retention.note_limits_of(InodeId(50), &[attribute(b"user.note"), attribute(QUOTA)]);
    fs.retention.note_limits_of(InodeId(51), &[attribute(b"user.note"), attribute(TTL)]);
    assert_eq!(fs.retention.policies().files.iter().collect::<Vec<_>>(), [&InodeId(51)]);
    fs.retention.policies().forget(InodeId(51));
    assert!(fs.retention.policies().files.is_empty());
}

#[test]
fn a_limited_directory_shows_no_more_room_than_its_limits_leave() {
    let unmounted = Unmounted::new();
    let fs = &unmounted.fs;
    let whole = fs.space_at(FILES).unwrap();
    assert!(whole.total_bytes > 1 << 20);
    let directory = unmounted.make_directory(FILES, "d", (0o755, 0));
    let below = unmounted.make_directory(directory, "below", (0o755, 0));
    let beside = unmounted.make_directory(FILES, "beside", (0o755, 0));
    unmounted.write(below, "file", &[1; 300]);
    unmounted.write(below, "other", &[1; 100]);
    unmounted.limit(directory, QUOTA, "1000");
    unmounted.limit(below, QUOTA, "2000");
    run(fs, &mut Retainer::default());
    let room = |id| {
        let space = fs.space_at(id).unwrap();
        assert!(space.available_bytes <= space.free_bytes);
        (space.total_bytes, space.available_bytes)
    };
    assert_eq!(room(directory), (1000, 600));
    assert_eq!(room(below), (1000, 600));
    assert!(room(beside).0 > 1 << 20);
    // What somebody removes is free at once, in both.
    fs.unlink(&place(below, "file")).unwrap();
    assert_eq!(room(below), (1000, 900));
    assert_eq!((unmounted.report(directory).bytes, unmounted.report(below).bytes), (100, 100));
    fs.unlink(&place(below, "other")).unwrap();
    assert_eq!((unmounted.report(directory).bytes, unmounted.report(below).bytes), (0, 0));
}

#[test]
fn nothing_is_told_without_limits() {
    let unmounted = Unmounted::new();
    assert_eq!(unmounted.status(), "");
    let mut retainer = Retainer::default();
    assert_eq!(retain(&unmounted.fs, &mut retainer), LOOK_INTERVAL);
    assert!(retainer.walked.is_empty());
}

#[test]
fn a_store_that_takes_no_changes_deletes_nothing() {
    let unmounted = Unmounted::new();
    unmounted.write(FILES, "file", &[1; 100]);
    unmounted.limit(FILES, QUOTA, "10");
    unmounted.fs.core.state().refusal = Some(crate::health::Refusal::DiskFailed);
    let mut retainer = Retainer::default();
    for _ in 0..5 {
        assert_eq!(retain(&unmounted.fs, &mut retainer), LOOK_INTERVAL);
    }
    assert!(retainer.pass.is_none() && retainer.walked.is_empty());
    assert_eq!(unmounted.names(FILES), ["file"]);
}

#[test]
fn the_thread_rests_between_its_steps() {
    let unmounted = Unmounted::new();
    let fs = &unmounted.fs;
    unmounted.write(FILES, "file", &[1; 100]);
    unmounted.limit(FILES, QUOTA, "10");
    let mut retainer = Retainer::default();
    let mut steps = 0;
    while !unmounted.names(FILES).is_empty() {
        let rest = retain(fs, &mut retainer);
        assert!(rest >= REST_MIN && rest < LOOK_INTERVAL, "{rest:?}");
        steps += 1;
        assert!(steps < 10);
    }
    while retain(fs, &mut retainer) < LOOK_INTERVAL {}
    assert!(retainer.walked.contains_key(&FILES));
    // A limit that was taken away ends what was begun for it.
    fs.retention.remove_limit(&fs.core, FILES, QUOTA).unwrap();
    assert_eq!(retain(fs, &mut retainer), LOOK_INTERVAL);
    assert!(retainer.pass.is_none());
}

#[test]
fn a_directory_that_is_gone_has_no_limit() {
    let unmounted = Unmounted::new();
    let fs = &unmounted.fs;
    let directory = unmounted.make_directory(FILES, "d", (0o755, 0));
    unmounted.limit(directory, QUOTA, "10");
    fs.remove_directory(&place(FILES, "d")).unwrap();
    fs.forget(directory, 1);
    run(fs, &mut Retainer::default());
    assert!(fs.retention.policies().directories.is_empty());
}

#[test]
fn a_clock_that_went_ahead_while_nothing_was_mounted_is_doubted() {
    let unmounted = Unmounted::new();
    let retention = &unmounted.fs.retention;
    assert!(retention.believed_time().is_some_and(|time| time > ago(60)));
    retention.begin(Some(ago(2 * 3600)));
    assert_eq!(retention.believed_time(), None);
    unmounted.limit(FILES, QUOTA, "10");
    let told = unmounted.status();
    let line = told.lines().find(|line| line.starts_with("retention_clock: ")).unwrap();
    assert!(line.ends_with("nothing is deleted for its age for 3599 s"), "{line}");
}

#[test]
fn files_go_when_their_own_time_is_over() {
    let unmounted = Unmounted::new();
    let fs = &unmounted.fs;
    let [old, again, new, kept] =
        ["old", "again", "new", "kept"].map(|name| unmounted.write(FILES, name, &[1; 10]));
    fs.link(old, &place(FILES, "old too")).unwrap();
    for id in [old, again, new, kept] {
        unmounted.date(id, ago(1000));
        unmounted.limit(id, TTL, "500");
    }
    unmounted.limit(new, TTL, "2000");
    fs.retention.remove_limit(&fs.core, again, TTL).unwrap();
    fs.set_extended_attribute(kept, b"user.kvfs.pin", b"1", 0).unwrap();
    fs.commit().unwrap();
    let mut last = None;
    fs.enforcer().remove_expired_files(&mut last).unwrap();
    assert_eq!(unmounted.names(FILES), ["again", "kept", "new"]);
    let deleted = unmounted.deleted();
    assert_eq!(deleted.len(), 2);
    assert!(deleted.iter().all(|event| event.reason == "its own time to live was over"));
    assert_eq!(deleted.iter().filter_map(|event| event.bytes).sum::<u64>(), 10);
    let counters = fs.retention.counters();
    assert_eq!((counters.removed_files(), counters.removed_bytes()), (2, 10));
    // It is not looked again at once, and after a long look for longer.
    unmounted.limit(new, TTL, "1");
    fs.enforcer().remove_expired_files(&mut last).unwrap();
    let now = Instant::now();
    let long_ago = |seconds| now.checked_sub(Duration::from_secs(seconds)).unwrap();
    last = Some((long_ago(10), Duration::from_secs(1)));
    fs.enforcer().remove_expired_files(&mut last).unwrap();
    assert!(unmounted.id_of(FILES, "new").is_some());
    last = Some((long_ago(30), Duration::from_secs(1)));
    fs.enforcer().remove_expired_files(&mut last).unwrap();
    assert!(unmounted.id_of(FILES, "new").is_none());
    assert!(last.is_some_and(
        |(at, took)| at.elapsed() < Duration::from_secs(5) && took < Duration::from_secs(5)
    ));
}

fn tree(unmounted: &Unmounted) -> (Place, Entry) {
    let top = unmounted.make_directory(FILES, "t", (0o755, 0));
    let inner = unmounted.make_directory(top, "inner", (0o755, 0));
    unmounted.write(top, "a", &[1; 10]);
    unmounted.write(inner, "b", &[1; 20]);
    unmounted.write(inner, "c", &[1; 30]);
    (place(FILES, "t"), Entry { inode: top, file_type: libc::S_IFDIR })
}

#[test]
fn a_directory_goes_with_all_that_is_in_it() {
    let unmounted = Unmounted::new();
    let (at, entry) = tree(&unmounted);
    let removal = unmounted.fs.enforcer().remove_tree(&at, entry, InUse::Stays).unwrap();
    assert_eq!((removal.files, removal.bytes, removal.kept), (3, 60, None));
    assert_eq!(unmounted.names(FILES), [""; 0]);
    let (at, entry) = tree(&unmounted);
    let file = unmounted.id_of(entry.inode, "a").unwrap();
    let opened = unmounted.fs.open_file(file, libc::O_RDONLY).unwrap();
    unmounted.told.try_iter().for_each(drop);
    unmounted.fs.enforcer().remove_tree(&at, entry, InUse::Goes).unwrap();
    assert_eq!(unmounted.names(FILES), [""; 0]);
    let told: Vec<_> = unmounted.told.try_iter().collect();
    for what in
        [Invalidation::Names(file), Invalidation::Names(entry.inode), Invalidation::Inode(FILES)]
    {
        assert!(told.contains(&what), "{what:?} is not in {told:?}");
    }
    let mut buffer = [0; 16];
    assert_eq!(unmounted.fs.read(opened.handle, 0, &mut buffer).unwrap(), 10);
}

#[test]
fn what_is_in_use_keeps_the_directories_above_it() {
    let unmounted = Unmounted::new();
    let (at, entry) = tree(&unmounted);
    let inner = unmounted.id_of(entry.inode, "inner").unwrap();
    let file = unmounted.id_of(inner, "b").unwrap();
    let opened = unmounted.fs.open_file(file, libc::O_RDONLY).unwrap();
    let removal = unmounted.fs.enforcer().remove_tree(&at, entry, InUse::Stays).unwrap();
    assert_eq!(removal.kept, Some(super::super::remove::Kept::InUse));
    assert!(unmounted.names(inner).contains(&"b".to_string()));
    // Directories go first: what stands beside them stays as long as they do.
    assert_eq!(unmounted.names(entry.inode), ["a", "inner"]);
    unmounted.fs.release(opened.handle).unwrap();
    assert!(unmounted.fs.enforcer().remove_tree(&at, entry, InUse::Stays).unwrap().kept.is_none());
    assert_eq!(unmounted.names(FILES), [""; 0]);
}
