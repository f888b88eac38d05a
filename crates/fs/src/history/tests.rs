use std::sync::Arc;

use super::*;
use crate::FileSystem;
use crate::core::happened;
use kvfs_observe::Observer;
use kvfs_storage::store::event::What;
use kvfs_storage::store::record::InodeId;
use kvfs_storage::store::{Store, database};

#[test]
fn times_are_those_of_the_calendar() {
    fn check(seconds: i64, expected: &str) {
        assert_eq!(written(Time { seconds, nanoseconds: 7_999_999 }), expected);
    }
    check(0, "1970-01-01T00:00:00.007Z");
    check(-1, "1969-12-31T23:59:59.007Z");
    check(951_782_399, "2000-02-28T23:59:59.007Z");
    check(951_782_400, "2000-02-29T00:00:00.007Z");
    check(951_868_800, "2000-03-01T00:00:00.007Z");
    check(1_709_251_199, "2024-02-29T23:59:59.007Z");
    check(1_798_761_599, "2026-12-31T23:59:59.007Z");
    check(4_107_542_400, "2100-03-01T00:00:00.007Z");
    // Whatever a clock says.
    for seconds in [i64::MIN, i64::MAX] {
        assert!(written(Time { seconds, nanoseconds: u32::MAX }).ends_with('Z'));
    }
}

fn mounted() -> (tempfile::TempDir, FileSystem) {
    let directory = tempfile::tempdir().unwrap();
    let store = Store::open_or_create(&directory.path().join("store")).unwrap();
    let (sender, _invalidations) = crossbeam_channel::bounded(1);
    let (fs, _) = FileSystem::open(store, Arc::new(Observer::new()), sender).unwrap();
    (directory, fs)
}

/// Reads up to the end, so many bytes at a time.
fn read_on(fs: &FileSystem, history: &History, offset: &mut u64, count: usize) -> String {
    let mut text = Vec::new();
    let mut buffer = vec![0; count];
    loop {
        let read = history.read(&fs.core, *offset, &mut buffer).unwrap();
        if read == 0 {
            return String::from_utf8(text).unwrap();
        }
        *offset += read as u64;
        text.extend_from_slice(&buffer[..read]);
    }
}

#[test]
fn lines_come_whole_however_they_are_read_and_go_on_where_they_ended() {
    let (_directory, fs) = mounted();
    let note = |number: u64| {
        let event = Event::new(What::Deleted, "tést").of(InodeId(number));
        fs.core.store.events.note(event.at(format!("files/{number}\u{e9}")));
    };
    (0..200).for_each(note);
    fs.commit().unwrap();
    (200..300).for_each(note);
    let (history, mut offset) = (History::default(), 0);
    let text = read_on(&fs, &history, &mut offset, 1000);
    let (again, mut other) = (History::default(), 0);
    assert_eq!(read_on(&fs, &again, &mut other, 7), text);
    let inodes = |text: &str| -> Vec<u64> {
        let lines = text.lines().map(serde_json::from_str::<serde_json::Value>);
        lines.map(|line| line.unwrap()["inode"].as_u64().unwrap()).collect()
    };
    assert_eq!(inodes(&text), (0..300).collect::<Vec<_>>());
    note(300);
    assert_eq!(inodes(&read_on(&fs, &history, &mut offset, 4096)), [300]);
    // What was read last can be read again, and all from the beginning, but nothing else.
    let mut buffer = [0; 8];
    assert_eq!(history.read(&fs.core, offset - 5, &mut buffer).unwrap(), 5);
    assert!(matches!(history.read(&fs.core, 10, &mut buffer), Err(FsError::Invalid)));
    assert!(matches!(history.read(&fs.core, offset + 1, &mut buffer), Err(FsError::Invalid)));
    assert_eq!(read_on(&fs, &history, &mut 0, 4096).lines().count(), 301);
}

#[test]
fn whoever_opens_it_anew_goes_on_after_the_number_it_read_last() {
    let (_directory, fs) = mounted();
    let note = |number: u64| {
        fs.core.store.events.note(Event::new(What::Deleted, "test").of(InodeId(number)));
    };
    (1..=100).for_each(note);
    let all = read_on(&fs, &History::default(), &mut 0, 4096);
    let from = |number: u64| read_on(&fs, &History::default(), &mut (AFTER + number), 100);
    assert_eq!(from(0), all);
    let rest: Vec<_> = all.lines().skip(40).map(|line| format!("{line}\n")).collect();
    assert_eq!(from(40), rest.concat());
    assert_eq!(from(100), "");
    assert_eq!(from(101), "", "it may have read what a crash took");
    // At the end it goes on as one that was read from the beginning.
    let (history, mut offset) = (History::default(), AFTER + 99);
    assert_eq!(read_on(&fs, &history, &mut offset, 4096).lines().count(), 1);
    note(101);
    assert_eq!(read_on(&fs, &history, &mut offset, 4096).lines().count(), 1);
    let later = history.read(&fs.core, offset + 1, &mut [0; 8]);
    assert!(matches!(later, Err(FsError::Invalid)));
    assert_eq!(read_on(&fs, &history, &mut 0, 4096).lines().count(), 101);
}

#[test]
fn events_alone_are_no_reason_for_a_commit_until_they_waited() {
    let (_directory, fs) = mounted();
    fs.commit().unwrap();
    let generation = || fs.core.state().metadata.generation;
    let before = generation();
    fs.core.store.events.note(Event::new(What::Evicted, "test"));
    fs.commit().unwrap();
    happened::take_waiting_events(&fs.core);
    fs.commit().unwrap();
    assert_eq!(generation(), before);
    // A mount that ends has them.
    fs.commit_and_close().unwrap();
    assert!(generation() > before);
    assert_eq!(read_on(&fs, &History::default(), &mut 0, 4096).lines().count(), 1);
}

/// Wherever a reader is: within what it was given, behind it, at the end, or before the first read.
#[test]
fn a_reader_goes_on_with_another_daemon() {
    let (_directory, fs) = mounted();
    let note = |number: u64| {
        fs.core.store.events.note(Event::new(What::Deleted, "test").of(InodeId(number)));
    };
    let exchanged = |history: &History| {
        let bytes = database::encode(&history.so_far().unwrap());
        History::from(database::decode(&bytes).unwrap())
    };
    (1..=100).for_each(note);
    let all = read_on(&fs, &History::default(), &mut 0, 4096);
    for (first, count) in [(0, 100), (0, 4096), (AFTER, 333)] {
        let (mut history, mut offset) = (exchanged(&History::default()), first);
        let (mut text, mut buffer) = (Vec::new(), vec![0; count]);
        while let read @ 1.. = history.read(&fs.core, offset, &mut buffer).unwrap() {
            text.extend_from_slice(&buffer[..read]);
            history = exchanged(&history);
            let again = history.read(&fs.core, offset, &mut buffer).unwrap();
            assert_eq!(&text[text.len() - read..], &buffer[..again], "it may ask again");
            offset += read as u64;
        }
        assert_eq!(String::from_utf8(text).unwrap(), all, "{first} {count}");
    }
    let (history, mut offset) = (History::default(), AFTER + 100);
    assert_eq!(read_on(&fs, &history, &mut offset, 100), "");
    note(101);
    assert_eq!(read_on(&fs, &exchanged(&history), &mut offset, 4096).lines().count(), 1);
}
