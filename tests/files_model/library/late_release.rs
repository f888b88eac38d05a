//! A release that the daemon has taken, and a request that overtakes it.

use std::time::Duration;

use kvfs::fs::{Awaited, FileSystem, Lookup, Place};

use super::{Driver, FILES, page_name};
use crate::common::forks::no_forks;
use crate::common::{mount::scratch_directory, random::Random};

#[test]
fn a_page_is_there_when_its_release_was_overdue_and_comes_late() {
    let _quiet = no_forks();
    let driver = Driver::new(Random::of(1), scratch_directory());
    let fs = driver.fs();
    let place = Place { parent: driver.layer, name: page_name(0) };
    let created = fs.create(&place, 0o640, Driver::caller(), true).unwrap();
    let (handle, inode) = (created.opened.handle, created.found.attributes.inode);
    fs.write(handle, 0, &driver.model.page(0, 0, 1), false).unwrap();
    fs.flush(handle).unwrap();
    let look = || fs.lookup(place.parent, &place.name).unwrap();

    // A mapping keeps the file open behind its descriptor: nobody waits for its end again and again.
    assert!(matches!(look(), Lookup::Absent { .. }));
    assert_eq!(fs.core.waits().lookup(&place), None);

    // What was written through it goes out before it ends: now there may be a release to wait for.
    fs.core.waits().note_written_back(handle);
    assert_eq!(fs.core.waits().lookup(&place), Some(Awaited::Local));
    assert!(matches!(look(), Lookup::Absent { .. }));
    assert_eq!(fs.core.waits().lookup(&place), None);

    // It went, and its release was taken from the kernel before the next lookup.
    let in_hand = fs.core.releases.begin(inode);
    assert_eq!(fs.core.waits().lookup(&place), Some(Awaited::Local));
    while_it_is_released_late(fs, (handle, in_hand), || {
        assert!(matches!(look(), Lookup::Found(_)));
    });
}

#[test]
fn a_commit_waits_for_a_release_that_was_overdue_and_comes_late() {
    let _quiet = no_forks();
    let mut driver = Driver::new(Random::of(1), scratch_directory());
    let place = Place { parent: FILES, name: b"block".to_vec() };
    let fs = driver.fs();
    let created = fs.create(&place, 0o640, Driver::caller(), true).unwrap();
    let (handle, inode) = (created.opened.handle, created.found.attributes.inode);
    fs.write(handle, 0, b"bytes", false).unwrap();
    fs.flush(handle).unwrap();
    // A mapping keeps it open behind its descriptor.
    fs.commit().unwrap();

    let in_hand = fs.core.releases.begin(inode);
    while_it_is_released_late(fs, (handle, in_hand), || fs.commit().unwrap());
    driver.fs = None;
    driver.reopen();
    assert!(matches!(driver.fs().lookup(FILES, b"block").unwrap(), Lookup::Found(_)));
}

fn while_it_is_released_late(
    fs: &FileSystem, (handle, in_hand): (u64, impl Send), act: impl FnOnce(),
) {
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(120));
            fs.release(handle).unwrap();
            drop(in_hand);
        });
        act();
    });
}
