//! Too much of something: attributes, handles, requests. Memory stays bounded, errors are clear, and
//! afterwards all is as before.

use std::fs::File;

use crate::common::sys::{assert_errno, errno, getxattr, listxattr, setxattr, sync_directory};
use crate::common::{Mode, Mount, eventually};

in_both_modes!(
    attributes_of_one_file_are_bounded,
    attributes_of_many_files_do_not_wait_in_memory,
    many_handles_cost_little,
);

/// Kilobytes from the daemon's `/proc/PID/status`.
fn kilobytes(mount: &Mount, key: &str) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", mount.pid())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(key)).unwrap();
    line.trim_start_matches(':').trim().trim_end_matches(" kB").parse().unwrap()
}

fn attributes_of_one_file_are_bounded(mode: Mode) {
    let mut mount = Mount::new(mode);
    let file = mount.files("file");
    std::fs::write(&file, "x").unwrap();
    let value = vec![7; 60_000];
    let set = |number: usize, value: &[u8]| setxattr(&file, &format!("user.x{number}"), value);
    let fit = (0..100).find(|number| errno(&set(*number, &value)) != 0).unwrap();
    assert_eq!(fit, 17, "a MiB in all");
    assert_errno(set(99, &value), libc::ENOSPC);
    // Replacing and removing go on, and other files have room of their own.
    set(3, &value).unwrap();
    crate::common::sys::removexattr(&file, "user.x4").unwrap();
    set(99, &value).unwrap();
    std::fs::write(mount.files("other"), "x").unwrap();
    setxattr(mount.files("other"), "user.x", &value).unwrap();
    mount.remount();
    assert_eq!(listxattr(mount.files("file")).unwrap().len(), fit);
    assert_eq!(mount.status("errors"), "0");
}

fn attributes_of_many_files_do_not_wait_in_memory(mode: Mode) {
    const FILES: usize = 800;
    const EACH: usize = 4;
    let mount = Mount::with_options(mode, &["--commit-interval", "60"]);
    for number in 0..FILES {
        std::fs::write(mount.files(number.to_string()), "x").unwrap();
    }
    sync_directory(mount.path()).unwrap();
    let before = kilobytes(&mount, "VmHWM");
    let value = "v".repeat(60_000);
    for number in 0..FILES {
        for name in 0..EACH {
            let file = mount.files(number.to_string());
            setxattr(file, &format!("user.x{name}"), value.as_bytes()).unwrap();
        }
    }
    // 190 MB were set; a commit that waits and one that is written may be in memory.
    let grown = kilobytes(&mount, "VmHWM") - before;
    assert!(grown < 140 << 10, "{grown} kB");
    assert_eq!(getxattr(mount.files("77"), "user.x3").unwrap(), value);
}

/// One process may have 20,000 here; what a handle costs is the same for a million.
fn many_handles_cost_little(mode: Mode) {
    const HANDLES: usize = 8_000;
    let mount = Mount::new(mode);
    let paths: Vec<_> = (0..50).map(|number| mount.files(format!("f{number}"))).collect();
    for path in &paths {
        std::fs::write(path, "some bytes").unwrap();
    }
    sync_directory(mount.path()).unwrap();
    let (_, most) =
        nix::sys::resource::getrlimit(nix::sys::resource::Resource::RLIMIT_NOFILE).unwrap();
    nix::sys::resource::setrlimit(nix::sys::resource::Resource::RLIMIT_NOFILE, most, most).unwrap();
    if most < HANDLES as u64 + 1000 {
        eprintln!("skipped: a process may have {most} descriptors only");
        return;
    }
    let before = kilobytes(&mount, "VmRSS");
    let handles: Vec<File> =
        paths.iter().cycle().take(HANDLES).map(|path| File::open(path).unwrap()).collect();
    assert_eq!(mount.status_number("open_files"), HANDLES as u64);
    let each = kilobytes(&mount, "VmRSS").saturating_sub(before) * 1024 / HANDLES as u64;
    assert!(each < 2048, "{each} bytes for each handle");
    drop(handles);
    eventually("handles to be closed", || (mount.status_number("open_files") == 0).then_some(()));
    assert_eq!(mount.status("errors"), "0");
}
