//! What uploads makes way for everybody, but not for ever: engines that spin while they wait leave a processor to nobody.

use crate::common::{Mode, eventually};
use crate::place::Place;

in_both_modes!(what_uploads_makes_way_until_the_disk_is_full);

/// Slow enough to be seen.
const BANDWIDTH: [&str; 2] = ["--remote-bandwidth", "2M"];

/// The nice value and the policy of a thread: see `proc_pid_stat(5)`.
type Scheduling = (i32, i32);

/// Those of all threads that move objects, the one that has begun first of all.
fn of_movers(pid: u32) -> Vec<Scheduling> {
    let mut tasks: Vec<u32> = std::fs::read_dir(format!("/proc/{pid}/task"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().to_str().unwrap().parse().unwrap())
        .collect();
    tasks.sort_unstable();
    let scheduling = |task| {
        // It may have ended meanwhile.
        let stat = std::fs::read_to_string(format!("/proc/{pid}/task/{task}/stat")).ok()?;
        let (name, fields) = stat.rsplit_once(") ")?;
        let fields: Vec<&str> = fields.split(' ').collect();
        name.ends_with("(kvfs-mover")
            .then(|| (fields[16].parse().unwrap(), fields[38].parse().unwrap()))
    };
    tasks.into_iter().filter_map(scheduling).collect()
}

fn what_uploads_makes_way_until_the_disk_is_full(mode: Mode) {
    let place = Place::with_budget(mode, &BANDWIDTH);
    let pid = place.mount.pid();
    let usual = eventually("a thread that moves objects", || of_movers(pid).first().copied());
    let uploads = || of_movers(pid).split_off(1);
    place.write("f", 1);
    let insists = (usual.0 + 5, usual.1);
    eventually("an upload that makes way", || {
        let uploads = uploads();
        assert!(!uploads.contains(&insists), "{uploads:?}: there is room");
        uploads.contains(&(usual.0 + 10, usual.1)).then_some(())
    });
    // More than the disk may hold.
    place.write("g", 8);
    eventually("an upload that insists", || uploads().contains(&insists).then_some(()));
    // What a slow remote has got leaves before it gets the rest.
    let status = |key| place.mount.status_number(key);
    eventually("a file to leave", || (status("remote_only_objects") > 0).then_some(()));
    assert!(status("remote_waiting_files") > 0, "all of them were uploaded first");
}
