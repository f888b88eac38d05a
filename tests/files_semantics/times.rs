//! Times that are set stay set, and those that are not follow what happens.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, SystemTime};

use crate::common::sys::{close, getxattr, open, rename, set_modified, setxattr, sync_directory};
use crate::common::{Mode, Mount, eventually, sys};

in_both_modes!(
    a_time_set_right_after_close_stays,
    extended_attributes_go_with_the_file,
    a_file_comes_to_rest_without_being_told,
    a_new_file_is_not_older_than_its_creation,
    a_time_that_is_set_is_kept_whatever_it_was_before,
    while_a_file_is_written_its_name_is_kept_and_its_attributes_are_not,
);

fn modified(path: &Path) -> SystemTime {
    fs::metadata(path).unwrap().modified().unwrap()
}

fn a_new_file_is_not_older_than_its_creation(mode: Mode) {
    let mount = Mount::new(mode);
    // Files are made ahead of need, and a version that replaces another is such a file as well.
    fs::write(mount.files("first"), b"1").unwrap();
    std::thread::sleep(Duration::from_millis(100));
    // The kernel's clock for files ticks every 4 ms.
    let now = SystemTime::now() - Duration::from_millis(10);
    let empty = mount.files("empty");
    close(open(&empty, libc::O_WRONLY | libc::O_CREAT).unwrap()).unwrap();
    assert!(modified(&empty) >= now);
    close(open(mount.files("first"), libc::O_WRONLY | libc::O_TRUNC).unwrap()).unwrap();
    assert!(modified(&mount.files("first")) >= now);
    sync_directory(mount.files("")).unwrap();
    assert!(modified(&empty) >= now);
}

fn a_time_that_is_set_is_kept_whatever_it_was_before(mode: Mode) {
    let mount = Mount::new(mode);
    fs::write(mount.files("first"), b"1").unwrap();
    // Files are made ahead of need: one of them becomes the next.
    let staging = mount.store().join("staging");
    let ahead: Vec<SystemTime> = eventually("files to be made ahead", || {
        let names = fs::read_dir(&staging).unwrap().flatten();
        let times: Vec<_> = names.map(|name| modified(&name.path())).collect();
        (times.len() >= 4).then_some(times)
    });
    let path = mount.files("next");
    let file = open(&path, libc::O_WRONLY | libc::O_CREAT).unwrap();
    for time in ahead {
        set_modified(&path, time).unwrap();
        assert_eq!(modified(&path), time);
    }
    close(file).unwrap();
}

fn while_a_file_is_written_its_name_is_kept_and_its_attributes_are_not(mode: Mode) {
    const LOOKS: u64 = 20;
    let mount = Mount::new(mode);
    let path = mount.files("written");
    let file = open(&path, libc::O_WRONLY | libc::O_CREAT).unwrap();
    sys::write(&file, b"bytes").unwrap();
    // The name that came with the creation is looked up once more.
    modified(&path);
    let requests = |operation| {
        mount.metric(&format!("kvfs_fuse_requests_total{{op=\"{operation}\",result=\"ok\"}}"))
    };
    let (lookups, looks) = (requests("lookup"), requests("getattr"));
    for _ in 0..LOOKS {
        modified(&path);
    }
    assert!(requests("getattr") - looks >= LOOKS);
    assert!(requests("lookup") - lookups < LOOKS / 2);
    close(file).unwrap();
}

fn a_time_set_right_after_close_stays(mode: Mode) {
    let mut mount = Mount::new(mode);
    let past = SystemTime::UNIX_EPOCH + Duration::new(1_000_000_000, 123_456_789);
    let future = SystemTime::UNIX_EPOCH + Duration::new(7_000_000_000, 5);
    let times = [past, future, SystemTime::UNIX_EPOCH];
    for (index, &time) in times.iter().enumerate() {
        let path = mount.files(format!("file {index}"));
        let file = open(&path, libc::O_WRONLY | libc::O_CREAT).unwrap();
        sys::write(&file, b"bytes").unwrap();
        close(file).unwrap();
        set_modified(&path, time).unwrap();
        assert_eq!(modified(&path), time);
        sync_directory(mount.files("")).unwrap();
        assert_eq!(modified(&path), time);
        let ctime = fs::metadata(&path).unwrap().ctime();
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        assert!((now.unwrap().as_secs().cast_signed() - ctime).abs() < 60, "ctime is not set");
    }
    // And before close.
    let path = mount.files("open");
    let file = open(&path, libc::O_WRONLY | libc::O_CREAT).unwrap();
    sys::write(&file, b"bytes").unwrap();
    file.set_modified(past).unwrap();
    close(file).unwrap();
    assert_eq!(modified(&path), past);
    mount.remount();
    assert_eq!(modified(&path), past);
    for (index, &time) in times.iter().enumerate() {
        assert_eq!(modified(&mount.files(format!("file {index}"))), time);
    }
    let file = open(&path, libc::O_WRONLY).unwrap();
    sys::write(&file, b"x").unwrap();
    assert!(modified(&path) > past, "a write changes it again");
}

fn extended_attributes_go_with_the_file(mode: Mode) {
    let mut mount = Mount::new(mode);
    let (one, two) = (mount.files("one"), mount.files("two"));
    let file = open(&one, libc::O_WRONLY | libc::O_CREAT).unwrap();
    setxattr(&one, "user.mine", b"value").unwrap();
    close(file).unwrap();
    rename(&one, &two).unwrap();
    assert_eq!(getxattr(&two, "user.mine").unwrap(), "value");
    fs::write(&two, b"new content").unwrap();
    mount.remount();
    assert_eq!(getxattr(&two, "user.mine").unwrap(), "value");
    assert_eq!(sys::listxattr(&two).unwrap(), ["user.mine"]);
    sys::assert_errno(getxattr(&two, "user.none"), libc::ENODATA);
    sys::assert_errno(setxattr(&two, "security.x", b""), libc::EOPNOTSUPP);
}

/// The last mapping goes without a callback; nothing else happens on the mount.
fn a_file_comes_to_rest_without_being_told(mode: Mode) {
    let mut mount = Mount::with_own_files(mode, &[]);
    let path = mount.files("file");
    let file = open(&path, libc::O_RDWR | libc::O_CREAT).unwrap();
    file.set_len(4096).unwrap();
    let mut mapped = sys::map_mut(&file);
    close(file).unwrap();
    sync_directory(mount.files("")).unwrap();
    mapped[0] = 1;
    drop(mapped);
    eventually("the file to be durable", || (mount.objects().len() == 1).then_some(()));
    eventually("the commit", || (mount.status_number("uncommitted_changes") == 0).then_some(()));
    mount.crash();
    assert_eq!(fs::read(&path).unwrap()[..2], [1, 0]);
}
