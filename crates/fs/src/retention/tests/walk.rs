//! What a walk finds, and in which order it goes.

use super::*;
use crate::FileSystem;
use kvfs_storage::store::metadata::Life;
use kvfs_storage::store::record::Entry;

const DAY: i64 = 86_400;

/// Files of 100 bytes, the first one used longest ago.
fn filled(unmounted: &Unmounted, directory: InodeId, count: i64) -> Vec<InodeId> {
    let write = |number: i64| {
        let id = unmounted.write(directory, &format!("{number:02}"), &[7; 100]);
        unmounted.date(id, ago((count - number) * DAY));
        id
    };
    (0..count).map(write).collect()
}

#[test]
fn what_was_used_longest_ago_goes_until_a_twentieth_is_free() {
    let unmounted = Unmounted::new();
    let fs = &unmounted.fs;
    let directory = unmounted.make_directory(FILES, "d", (0o755, 0));
    let ids = filled(&unmounted, directory, 12);
    unmounted.limit(directory, QUOTA, "1000");
    // It was read a moment ago, which is not on record yet.
    fs.retention.note_use(&fs.core, ids[1], libc::O_RDONLY);
    let used = fs.core.state().inode(ids[0]).unwrap().atime;
    let mut retainer = Retainer::default();
    run(fs, &mut retainer);
    assert!(!retainer.walked[&directory].is_unfinished);
    let expected = ["01", "04", "05", "06", "07", "08", "09", "10", "11"];
    assert_eq!(unmounted.names(directory), expected);
    let Report { bytes, files, removed_bytes, removed_files } = unmounted.report(directory);
    assert_eq!((bytes, files, removed_bytes, removed_files), (900, 9, 300, 3));
    assert_eq!(fs.retention.limited_bytes(directory), Some(900));
    assert_eq!(fs.retention.limited_bytes(FILES), None);
    let counters = fs.retention.counters();
    assert_eq!((counters.removed_files(), counters.removed_bytes()), (3, 300));
    let deleted = unmounted.deleted();
    assert_eq!(deleted.len(), 3);
    assert_eq!(deleted[0].reason, "files/d may hold 1000 bytes");
    assert_eq!(deleted[0].path.as_deref(), Some("files/d/00"));
    assert_eq!((deleted[0].bytes, deleted[0].used), (Some(100), Some(used)));
    let status = unmounted.status();
    let line = "quota files/d: size=1000 used_bytes=900 files=9 removed_bytes=300 removed_files=3";
    for line in [
        "retention_directories: 1",
        "retention_removed_files: 3",
        "retention_removed_bytes: 300",
        line,
    ] {
        assert!(status.lines().any(|found| found == line), "{line} is not in {status}");
    }
}

#[test]
fn what_is_just_full_stays_whole() {
    let unmounted = Unmounted::new();
    let directory = unmounted.make_directory(FILES, "d", (0o755, 0));
    filled(&unmounted, directory, 10);
    unmounted.limit(directory, QUOTA, "1000");
    run(&unmounted.fs, &mut Retainer::default());
    assert_eq!(unmounted.names(directory).len(), 10);
    assert_eq!(unmounted.report(directory).bytes, 1000);
}

#[test]
fn several_names_count_once_and_free_nothing_until_the_last_one_goes() {
    let unmounted = Unmounted::new();
    let fs = &unmounted.fs;
    let directory = unmounted.make_directory(FILES, "d", (0o755, 0));
    let ids = filled(&unmounted, directory, 3);
    fs.link(ids[0], &place(directory, "again")).unwrap();
    unmounted.limit(directory, QUOTA, "300");
    run(fs, &mut Retainer::default());
    assert_eq!(unmounted.names(directory).len(), 4);
    let Report { bytes, files, .. } = unmounted.report(directory);
    assert_eq!((bytes, files), (300, 3));
    // Both names of the oldest one go, for 100 bytes.
    unmounted.limit(directory, QUOTA, "299");
    run(fs, &mut Retainer::default());
    assert_eq!(unmounted.names(directory), ["01", "02"]);
    assert_eq!(unmounted.report(directory).bytes, 200);
    let bytes: Vec<_> = unmounted.deleted().iter().map(|event| event.bytes).collect();
    assert_eq!(bytes, [Some(0), Some(100)]);
}

/// A directory with a limit on it, a nearer one, and a file with its own.
#[test]
fn the_nearest_time_to_live_counts_and_that_of_age_as_well() {
    let unmounted = Unmounted::new();
    let fs = &unmounted.fs;
    let directory = unmounted.make_directory(FILES, "d", (0o755, 0));
    let near = unmounted.make_directory(directory, "near", (0o755, 0));
    let write = |parent, name, days| {
        let id = unmounted.write(parent, name, b"bytes");
        unmounted.date(id, ago(days * DAY));
        id
    };
    let [read, own] = ["read", "own"].map(|name| write(directory, name, 6));
    write(directory, "old", 6);
    write(directory, "new", 4);
    write(near, "old", 15);
    write(near, "new", 14 - 5);
    unmounted.limit(directory, TTL, &(5 * DAY).to_string());
    unmounted.limit(near, TTL, &(10 * DAY).to_string());
    unmounted.limit(own, TTL, &(7 * DAY).to_string());
    // What it is about is the last change.
    fs.retention.note_use(&fs.core, read, libc::O_RDONLY);
    run(fs, &mut Retainer::default());
    assert_eq!(unmounted.names(directory), ["near", "new", "own"]);
    assert_eq!(unmounted.names(near), ["new"]);
    let reasons: Vec<_> = unmounted.deleted().into_iter().map(|event| event.reason).collect();
    let of_near = "written longer ago than the limits below files/d/near allow";
    let of_all = "written longer ago than the limits below files/d allow";
    assert!(
        reasons.iter().all(|reason| [of_near, of_all].contains(&reason.as_str())),
        "{reasons:?}"
    );
    unmounted.limit(directory, AGE, &(3 * DAY).to_string());
    fs.retention.note_use(&fs.core, own, libc::O_RDONLY);
    run(fs, &mut Retainer::default());
    // A limit of age of a directory above holds, whatever lives how long.
    assert_eq!(unmounted.names(directory), ["near", "own"]);
    assert_eq!(unmounted.names(near), [""; 0]);
    let last = unmounted.deleted().pop().unwrap().reason;
    assert_eq!(last, format!("not used for {} s, the limit of files/d", 3 * DAY));
}

#[test]
fn by_a_clock_that_is_doubted_only_room_is_made() {
    let unmounted = Unmounted::new();
    let fs = &unmounted.fs;
    let directory = unmounted.make_directory(FILES, "d", (0o755, 0));
    filled(&unmounted, directory, 4);
    unmounted.limit(directory, AGE, "1");
    unmounted.limit(directory, QUOTA, "350");
    let mut retainer = Retainer::default();
    run_by(fs, &mut retainer, false);
    assert_eq!(unmounted.names(directory), ["01", "02", "03"]);
    assert!(retainer.walked[&directory].is_unfinished);
    assert_eq!(retainer.walked[&directory].next_expiry, None);
    run(fs, &mut Retainer::default());
    assert_eq!(unmounted.names(directory), [""; 0]);
}

#[test]
fn a_walk_says_when_the_next_file_is_too_old() {
    let unmounted = Unmounted::new();
    let fs = &unmounted.fs;
    let directory = unmounted.make_directory(FILES, "d", (0o755, 0));
    let ids = filled(&unmounted, directory, 3);
    unmounted.limit(directory, TTL, &(10 * DAY).to_string());
    let mut retainer = Retainer::default();
    run(fs, &mut retainer);
    let first = fs.core.state().inode(ids[0]).unwrap().mtime;
    let expected = Time { seconds: first.seconds + 10 * DAY, ..first };
    assert_eq!(retainer.walked[&directory].next_expiry, Some(expected));
    assert!(!retainer.walked[&directory].is_unfinished);
}

#[test]
fn everything_is_seen_however_many_names_and_directories_there_are() {
    let unmounted = Unmounted::new();
    let fs = &unmounted.fs;
    let top = unmounted.make_directory(FILES, "d", (0o755, 0));
    let mut directories = vec![top];
    for depth in 0..4 {
        directories.push(unmounted.make_directory(directories[depth], "m", (0o755, 0)));
    }
    // More than are looked at at once, before and behind the directory's own name.
    for number in 0..70 {
        unmounted.write(top, &format!("a{number}"), b"1");
        unmounted.write(top, &format!("z{number}"), b"1");
    }
    for directory in &directories[1..] {
        unmounted.write(*directory, "file", b"1");
    }
    fs.make(&place(top, "pipe"), &pipe(), 0o644, crate::Caller::DAEMON).unwrap();
    unmounted.limit(top, QUOTA, "1000000");
    run(fs, &mut Retainer::default());
    let Report { bytes, files, .. } = unmounted.report(top);
    assert_eq!((bytes, files), (144, 144));
}

#[test]
fn a_forged_name_leads_nowhere() {
    let unmounted = Unmounted::new();
    let (top, beside) = (
        unmounted.make_directory(FILES, "d", (0o755, 0)),
        unmounted.make_directory(FILES, "beside", (0o755, 0)),
    );
    let inner = unmounted.make_directory(top, "inner", (0o755, 0));
    for directory in [inner, beside] {
        unmounted.write(directory, "file", &[1; 10]);
    }
    for (name, inode) in [("elsewhere", beside), ("ring", top)] {
        let entry = Entry { inode, file_type: libc::S_IFDIR };
        unmounted.fs.core.state().metadata.put_entry(Life::Durable, inner, name.as_bytes(), entry);
    }
    unmounted.limit(top, QUOTA, "1");
    run(&unmounted.fs, &mut Retainer::default());
    assert_eq!(unmounted.names(beside), ["file"]);
    assert_eq!(unmounted.report(top).removed_files, 1);
}

fn pipe() -> crate::NewNode {
    crate::NewNode::Special { file_type: libc::S_IFIFO, device: 0 }
}

#[test]
fn what_is_in_use_or_pinned_stays_and_is_counted() {
    let unmounted = Unmounted::new();
    let fs = &unmounted.fs;
    let directory = unmounted.make_directory(FILES, "d", (0o755, 0));
    let ids = filled(&unmounted, directory, 4);
    fs.set_extended_attribute(ids[0], b"user.kvfs.pin", b"1", 0).unwrap();
    let opened = fs.open_file(ids[1], libc::O_RDONLY).unwrap();
    unmounted.limit(directory, QUOTA, "250");
    let mut retainer = Retainer::default();
    run(fs, &mut retainer);
    assert_eq!(unmounted.names(directory), ["00", "01"]);
    assert!(retainer.walked[&directory].is_unfinished, "what is in use is tried again");
    fs.release(opened.handle).unwrap();
    unmounted.limit(directory, QUOTA, "100");
    run(fs, &mut Retainer::default());
    assert_eq!(unmounted.names(directory), ["00"]);
}

#[test]
fn a_directory_is_walked_again_when_something_changed_but_not_at_once() {
    let unmounted = Unmounted::new();
    let fs = &unmounted.fs;
    let directory = unmounted.make_directory(FILES, "d", (0o755, 0));
    unmounted.limit(directory, QUOTA, "1000");
    let policy = fs.retention.policies().directories[&directory];
    let names_changed = fs.core.state().metadata.names_changed;
    let now = Instant::now();
    let long_ago = now.checked_sub(Duration::from_secs(30)).unwrap();
    let walked = |at: Instant| Walked {
        policy,
        at,
        took: Duration::from_secs(1),
        names_changed,
        next_expiry: None,
        is_unfinished: false,
    };
    let is_due = |walked: &Walked| fs.enforcer().is_walk_due(walked, policy);
    assert!(!is_due(&walked(long_ago)), "nothing happened");
    let changed = |at| Walked { names_changed: names_changed - 1, ..walked(at) };
    assert!(is_due(&changed(long_ago)));
    assert!(!is_due(&changed(now)), "it would be walked all the time");
    // A walk that took so long is followed by as many times that time.
    let slow = Walked { took: Duration::from_secs(2), ..changed(long_ago) };
    assert!(!is_due(&slow));
    assert!(is_due(&Walked { is_unfinished: true, ..walked(long_ago) }));
    assert!(is_due(&Walked { next_expiry: Some(ago(1)), ..walked(long_ago) }));
    assert!(!is_due(&Walked { next_expiry: Some(ago(-100)), ..walked(long_ago) }));
    assert!(!is_due(&Walked { next_expiry: Some(ago(1)), ..walked(now) }));
    let other = Policy { bytes: Some(1), ..policy };
    assert!(fs.enforcer().is_walk_due(&walked(now), other), "the limit is another one");
}

#[test]
fn uses_are_kept_when_the_mount_ends() {
    let unmounted = Unmounted::new();
    let fs: &FileSystem = &unmounted.fs;
    let [read, silent, gone] =
        ["read", "silent", "gone"].map(|name| unmounted.write(FILES, name, b"bytes"));
    let before = at(1000);
    for id in [read, silent, gone] {
        unmounted.date(id, before);
    }
    fs.retention.note_use(&fs.core, read, libc::O_RDONLY);
    fs.retention.note_use(&fs.core, silent, libc::O_RDONLY | libc::O_NOATIME);
    fs.retention.note_use(&fs.core, gone, libc::O_RDONLY);
    assert_eq!(fs.retention.latest_uses(), [read, gone]);
    let opened = fs.open_file(gone, libc::O_RDONLY).unwrap();
    fs.unlink(&place(FILES, "gone")).unwrap();
    record_uses(fs).unwrap();
    let atime = |id| fs.core.state().inode(id).unwrap().atime;
    assert_eq!(atime(gone), before, "it has no name any more");
    fs.release(opened.handle).unwrap();
    assert!(atime(read) > ago(100));
    assert_eq!(atime(silent), before);
    // A use that is older than what is on record changes nothing.
    let later = ago(-1000);
    unmounted.date(read, later);
    fs.retention.uses().note(read, ago(0));
    record_uses(fs).unwrap();
    assert_eq!(atime(read), later);
}

/// Who opens it at all is a user, whether or not a walk has come by.
#[test]
fn a_time_to_live_may_begin_anew_with_each_use() {
    let unmounted = Unmounted::new();
    let fs = &unmounted.fs;
    let directory = unmounted.make_directory(FILES, "d", (0o755, 0));
    let write = |directory, name: &str| {
        let id = unmounted.write(directory, name, b"bytes");
        unmounted.date(id, ago(6 * DAY));
        id
    };
    let read = write(directory, "read");
    write(directory, "old");
    // No walk comes by there.
    let [own, own_old] = ["own", "own-old"].map(|name| write(FILES, name));
    unmounted.limit(directory, TTL, &format!("{} renewed", 5 * DAY));
    for id in [own, own_old] {
        unmounted.limit(id, TTL, &format!("{} renewed", 5 * DAY));
    }
    for id in [read, own] {
        fs.retention.note_use(&fs.core, id, libc::O_RDONLY);
    }
    run(fs, &mut Retainer::default());
    fs.commit().unwrap();
    run(fs, &mut Retainer::default());
    assert_eq!(unmounted.names(directory), ["read"]);
    assert_eq!(unmounted.names(FILES), ["d", "own"]);
    // What they live for is on record by then, however many others are opened.
    let atime = |id| fs.core.state().inode(id).unwrap().atime;
    assert!(atime(own) > ago(60) && atime(read) > ago(60));
    // Without the word the last change counts again.
    unmounted.limit(directory, TTL, &(5 * DAY).to_string());
    run(fs, &mut Retainer::default());
    assert_eq!(unmounted.names(directory), [""; 0]);
    assert!(unmounted.status().contains("ttl=432000 "), "{}", unmounted.status());
}

#[test]
fn a_sequence_that_is_read_again_and_again_lives_on() {
    let unmounted = Unmounted::new();
    let model = unmounted.make_model(1);
    let [used, unused] = ["used", "unused"].map(|name| model.make_sequence(name, &[0], 2));
    for sequence in [used, unused] {
        let layer = unmounted.id_of(sequence, "000").unwrap();
        let pages = unmounted.names(layer).into_iter().map(|name| unmounted.id_of(layer, &name));
        let tokens = unmounted.id_of(sequence, "tokens");
        for id in pages.chain([tokens]).flatten() {
            unmounted.date(id, ago(6 * DAY));
        }
    }
    unmounted.fs.retention.note_use(
        &unmounted.fs.core,
        unmounted.id_of(used, "tokens").unwrap(),
        libc::O_RDONLY,
    );
    unmounted.limit(model.sequences, TTL, &format!("{} renewed", 5 * DAY));
    unmounted.fs.commit().unwrap();
    run(&unmounted.fs, &mut Retainer::default());
    assert_eq!(unmounted.names(model.sequences), ["used"]);
}
