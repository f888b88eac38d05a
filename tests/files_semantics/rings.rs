//! Requests through rings (FUSE over `io_uring`). That every operation works through them is what all the other
//! tests show where the kernel has them; here is what only rings have.

use std::fs;
use std::path::Path;

use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;

use crate::common::sys::{rename, write_and_close};
use crate::common::{Mode, Mount};

/// The processors that this thread may run on.
fn processors() -> Vec<usize> {
    let allowed = sched_getaffinity(Pid::from_raw(0)).unwrap();
    (0..CpuSet::count()).filter(|number| allowed.is_set(*number).unwrap()).collect()
}

/// Lets this thread, and what it starts, run on these alone.
fn stay_on(processors: &[usize]) {
    let mut set = CpuSet::new();
    for number in processors {
        set.set(*number).unwrap();
    }
    sched_setaffinity(Pid::from_raw(0), &set).unwrap();
}

/// Some of everything.
fn use_files(mount: &Mount, name: &str) {
    let directory = mount.files(name);
    fs::create_dir(&directory).unwrap();
    for number in 0..20 {
        let (path, moved) =
            (directory.join(number.to_string()), directory.join(format!("m{number}")));
        write_and_close(&path, name.as_bytes()).unwrap();
        rename(&path, &moved).unwrap();
        assert_eq!(fs::read(&moved).unwrap(), name.as_bytes());
    }
    assert_eq!(fs::read_dir(&directory).unwrap().count(), 20);
    fs::remove_dir_all(&directory).unwrap();
}

/// Turned on again by each mount that may: so the test can turn it off beside others.
#[test]
fn a_mount_of_roots_turns_rings_on() {
    const PARAMETER: &str = "/sys/module/fuse/parameters/enable_uring";
    crate::require!(fuse, io_uring, root);
    fs::write(PARAMETER, "N").unwrap();
    let mount = Mount::new(Mode::Served);
    assert_eq!(mount.status("io_uring"), "yes");
    assert_eq!(fs::read_to_string(PARAMETER).unwrap().trim(), "Y");
}

#[test]
fn the_status_says_how_requests_come() {
    crate::require!(fuse, io_uring);
    let mount = Mount::new(Mode::Served);
    assert_eq!(mount.status("io_uring"), "yes");
    let tasks = fs::read_dir(format!("/proc/{}/task", mount.pid())).unwrap();
    let names = tasks.map(|task| fs::read_to_string(task.unwrap().path().join("comm")).unwrap());
    assert_eq!(names.filter(|name| name.starts_with("kvfs-ring-")).count(), processors().len());
    drop(mount);
    let mount = Mount::with_options(Mode::Served, &["--no-io-uring"]);
    assert_eq!(mount.status("io_uring"), "no: turned off by option");
    use_files(&mount, "through-the-device");
}

/// The kernel has a queue for each processor, and one that nobody serves would stop whoever runs there.
#[test]
fn a_daemon_on_one_processor_serves_the_others() {
    crate::require!(fuse, io_uring);
    let all = processors();
    stay_on(&all[..1]);
    let mount = Mount::new(Mode::Served);
    assert_eq!(mount.status("io_uring"), "yes");
    for number in &all {
        stay_on(&[*number]);
        use_files(&mount, &format!("on-{number}"));
    }
    stay_on(&all);
}

/// Requests that wait keep their slots; those for which there is none come later.
#[test]
fn more_requests_than_slots_are_answered() {
    const CLIENTS: usize = 700;
    crate::require!(fuse, io_uring);
    let mount = Mount::new(Mode::Served);
    let all = processors();
    let sync = |path: &Path| {
        let file = fs::File::create(path).unwrap();
        for _ in 0..3 {
            std::io::Write::write_all(&mut &file, b"x").unwrap();
            file.sync_all().unwrap();
        }
    };
    std::thread::scope(|scope| {
        for number in 0..CLIENTS {
            let (path, processor) = (mount.files(number.to_string()), all[0]);
            scope.spawn(move || {
                stay_on(&[processor]);
                sync(&path);
            });
        }
    });
    for number in 0..CLIENTS {
        assert_eq!(fs::read(mount.files(number.to_string())).unwrap(), b"xxx");
    }
}
