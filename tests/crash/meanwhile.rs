//! Somebody goes on writing to a file, and makes it a page, while a commit that another descriptor asked
//! for copies it from memory to the disk.

use std::sync::Arc;

use crate::common::model::Model;
use crate::disk::SimulatedDisk;
use crate::driver::{Driver, WentWrong};
use crate::mounted::{Berth, Mounted, Setup};
use crate::workloads::{add_sequence, install, page_path};

#[test]
fn what_was_written_while_a_commit_copied_the_file_is_copied_too() {
    let berth = Berth::new();
    let setup = Setup { ram_bytes: Some(1 << 20), ..Setup::PLAIN };
    let mut driver = Driver::new(&berth, setup, &WentWrong::default());
    let model = Model::small();
    install(&mut driver, &model);
    add_sequence(&mut driver, "chat");
    driver.commit();
    let (disk, mounted) = driver.into_mounted();
    let mounted = Arc::new(mounted);
    let (page, path) = (model.page(0, 0, 1), page_path("chat", 0, 0));
    let temporary = path.replace("/000/", "/000/.");
    let half = page.len() / 2;
    let handle = mounted.create(&temporary).unwrap();
    mounted.fs.write(handle, 0, &page[..half], false).unwrap();
    let rest = page[half..].to_vec();
    let (client, to) = (Arc::downgrade(&mounted), path.clone());
    disk.at_next_sync(move || {
        let client = client.upgrade().unwrap();
        client.fs.write(handle, half as u64, &rest, false).unwrap();
        client.close(handle).unwrap();
        client.rename(&temporary, &to).unwrap();
    });
    mounted.fs.sync_file(handle).unwrap();
    assert_eq!(mounted.read(&path).unwrap(), page, "it was renamed meanwhile");
    mounted.fs.commit().unwrap();
    drop(mounted);
    let disk = SimulatedDisk::holding(&disk.image());
    let mounted = Mounted::open(&berth, &disk, &Arc::default(), Setup::PLAIN).unwrap();
    assert_eq!(mounted.read(&path).unwrap(), page);
}

#[test]
fn what_its_writer_has_closed_is_in_the_commit_that_comes_next() {
    let berth = Berth::new();
    let driver = Driver::new(&berth, Setup::PLAIN, &WentWrong::default());
    let (disk, mounted) = driver.into_mounted();
    let handle = mounted.create("files/closed").unwrap();
    mounted.fs.write(handle, 0, b"what was written", false).unwrap();
    mounted.fs.flush(handle).unwrap();
    std::thread::scope(|scope| {
        // The kernel tells of the last descriptor after close(2) has returned.
        scope.spawn(|| {
            std::thread::sleep(std::time::Duration::from_millis(10));
            mounted.fs.release(handle).unwrap();
        });
        mounted.fs.commit().unwrap();
    });
    drop(mounted);
    let disk = SimulatedDisk::holding(&disk.image());
    let mounted = Mounted::open(&berth, &disk, &Arc::default(), Setup::PLAIN).unwrap();
    assert_eq!(mounted.read("files/closed").unwrap(), b"what was written");
}
