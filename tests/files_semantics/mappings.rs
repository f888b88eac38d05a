//! Shared mappings: what is written through one is never lost and seen by everybody.

use std::fs;
use std::time::{Duration, SystemTime};

use crate::common::sys::{close, map, map_mut, open, rename, sync_directory};
use crate::common::{Mode, Mount, eventually};

in_both_modes!(
    a_mapping_outlives_close_and_rename,
    a_mapped_file_is_not_at_rest,
    mappings_of_two_descriptors_are_one,
    writes_and_mappings_see_each_other,
    an_unlinked_mapped_file_goes_with_its_mapping,
);

const CREATE: i32 = libc::O_RDWR | libc::O_CREAT;

fn a_mapping_outlives_close_and_rename(mode: Mode) {
    let mut mount = Mount::new(mode);
    let (from, to) = (mount.files("block.tmp"), mount.files("block"));
    let file = open(&from, CREATE).unwrap();
    file.set_len(8192).unwrap();
    let mut mapped = map_mut(&file);
    mapped[0] = 1;
    close(file).unwrap();
    mapped[1] = 2;
    rename(&from, &to).unwrap();
    mapped[2] = 3;
    assert_eq!(fs::read(&to).unwrap()[..4], [1, 2, 3, 0]);
    sync_directory(mount.files("")).unwrap();
    mapped[3] = 4;
    assert_eq!(fs::read(&to).unwrap()[..4], [1, 2, 3, 4]);
    drop(mapped);
    mount.remount();
    let bytes = fs::read(&to).unwrap();
    assert_eq!((&bytes[..5], bytes.len()), (&[1, 2, 3, 4, 0][..], 8192));
    assert!(!from.exists());
    assert_eq!(mount.errors(), Vec::<String>::new());
}

/// As long as it is mapped for writing: its time is that of the last change, not of the commit before.
fn a_mapped_file_is_not_at_rest(mode: Mode) {
    let mut mount = Mount::new(mode);
    let path = mount.files("block");
    let file = open(&path, CREATE).unwrap();
    file.set_len(8192).unwrap();
    let mut mapped = map_mut(&file);
    mapped[0] = 1;
    close(file).unwrap();
    sync_directory(mount.files("")).unwrap();
    let committed = SystemTime::now();
    std::thread::sleep(Duration::from_millis(50));
    mapped[4096] = 2;
    drop(mapped);
    sync_directory(mount.files("")).unwrap();
    let modified = || fs::metadata(&path).unwrap().modified().unwrap();
    assert!(modified() > committed, "{:?} before", committed.duration_since(modified()));
    let before = modified();
    mount.crash();
    assert_eq!(modified(), before);
    assert_eq!(fs::read(&path).unwrap()[4096], 2);
    assert_eq!(mount.errors(), Vec::<String>::new());
}

fn mappings_of_two_descriptors_are_one(mode: Mode) {
    let mount = Mount::new(mode);
    let path = mount.files("file");
    fs::write(&path, [0; 4096]).unwrap();
    let (one, two) = (open(&path, libc::O_RDWR).unwrap(), open(&path, libc::O_RDWR).unwrap());
    let (mut first, second) = (map_mut(&one), map(&two));
    for round in 0..100 {
        first[usize::from(round)] = round;
        assert_eq!(second[usize::from(round)], round);
    }
}

fn writes_and_mappings_see_each_other(mode: Mode) {
    use std::os::unix::fs::FileExt;
    let mount = Mount::new(mode);
    let file = open(mount.files("file"), CREATE).unwrap();
    file.set_len(4096).unwrap();
    let mut mapped = map_mut(&file);
    file.write_all_at(b"written", 10).unwrap();
    assert_eq!(&mapped[10..17], b"written");
    mapped[10..13].copy_from_slice(b"map");
    let mut buffer = [0; 7];
    file.read_exact_at(&mut buffer, 10).unwrap();
    assert_eq!(&buffer, b"maptten");
}

/// The way of POSIX shared memory; a commit must not trip over what is gone.
fn an_unlinked_mapped_file_goes_with_its_mapping(mode: Mode) {
    let mount = Mount::new(mode);
    let path = mount.files("shared");
    let file = open(&path, CREATE).unwrap();
    fs::remove_file(&path).unwrap();
    file.set_len(4096).unwrap();
    let mut mapped = map_mut(&file);
    close(file).unwrap();
    for round in 0..3_u8 {
        mapped[usize::from(round)] = round;
        fs::write(mount.files(format!("other {round}")), [round]).unwrap();
        sync_directory(mount.files("")).unwrap();
    }
    drop(mapped);
    fs::write(mount.files("last"), b"").unwrap();
    sync_directory(mount.files("")).unwrap();
    assert_eq!(mount.status("state"), "ok");
    // The last close may come to the daemon after the commit.
    eventually("everything to be committed", || {
        (mount.status_number("uncommitted_changes") == 0).then_some(())
    });
}
