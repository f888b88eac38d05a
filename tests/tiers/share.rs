//! What uploads makes way for everybody, but not for ever: engines that spin while they wait leave a processor to nobody.

use crate::common::sys::{Thread, threads_of};
use crate::common::{Mode, eventually};
use crate::place::Place;

in_both_modes!(what_uploads_makes_way_until_the_disk_is_full);

/// Slow enough to be seen.
const BANDWIDTH: [&str; 2] = ["--remote-bandwidth", "2M"];

fn what_uploads_makes_way_until_the_disk_is_full(mode: Mode) {
    let place = Place::with_budget(mode, &BANDWIDTH);
    let movers = || {
        let mut threads = threads_of(place.mount.pid());
        threads.retain(|thread| thread.name == "kvfs-mover");
        threads
    };
    let usual = eventually("a thread that moves objects", || movers().first().cloned());
    let uploads = || movers().split_off(1);
    let nicer_by = |increment| Thread { nice: usual.nice + increment, ..usual.clone() };
    place.write("f", 1);
    eventually("an upload that makes way", || {
        let uploads = uploads();
        assert!(!uploads.contains(&nicer_by(5)), "{uploads:?}: there is room");
        uploads.contains(&nicer_by(10)).then_some(())
    });
    // More than the disk may hold.
    place.write("g", 8);
    eventually("an upload that insists", || uploads().contains(&nicer_by(5)).then_some(()));
    // What a slow remote has got leaves before it gets the rest.
    let status = |key| place.mount.status_number(key);
    eventually("a file to leave", || (status("remote_only_objects") > 0).then_some(()));
    assert!(status("remote_waiting_files") > 0, "all of them were uploaded first");
}
