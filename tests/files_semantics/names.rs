//! Directories and names.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use crate::common::sys::{assert_errno, open, rename};
use crate::common::{Mode, Mount, forks::succeed};

in_both_modes!(
    a_listing_shows_each_untouched_name_once,
    a_listing_goes_on_where_it_was_told,
    many_threads_make_rename_and_remove_names,
    names_may_have_255_bytes,
    a_directory_holds_fifty_thousand_files,
    special_files_are_what_they_were_made,
    directories_move_with_all_below,
    a_removed_directory_stays_a_directory_for_its_users,
);

fn names(directory: &Path) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for entry in fs::read_dir(directory).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        assert!(found.insert(name.clone()), "{name} is listed twice");
    }
    found
}

fn a_listing_shows_each_untouched_name_once(mode: Mode) {
    let mount = Mount::new(mode);
    let directory = mount.files("many");
    fs::create_dir(&directory).unwrap();
    let stay = |index: usize| format!("stays-{index:04}");
    for index in 0..1500 {
        fs::write(directory.join(stay(index)), b"").unwrap();
        fs::write(directory.join(format!("goes-{index:04}")), b"").unwrap();
    }
    let mut counts = BTreeMap::new();
    for (seen, entry) in fs::read_dir(&directory).unwrap().enumerate() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        *counts.entry(name).or_insert(0) += 1;
        if seen % 3 == 0 && seen / 3 < 1500 {
            let index = seen / 3;
            fs::remove_file(directory.join(format!("goes-{index:04}"))).unwrap();
            fs::write(directory.join(format!("new-{index:04}")), b"").unwrap();
        }
    }
    for index in 0..1500 {
        assert_eq!(counts.get(&stay(index)), Some(&1), "{}", stay(index));
    }
    assert!(counts.values().all(|count| *count == 1));
}

fn a_listing_goes_on_where_it_was_told(mode: Mode) {
    let mount = Mount::new(mode);
    let directory = mount.files("many");
    fs::create_dir(&directory).unwrap();
    for index in 0..300 {
        fs::write(directory.join(format!("{index}")), b"").unwrap();
    }
    let path = std::ffi::CString::new(directory.as_os_str().as_encoded_bytes()).unwrap();
    // SAFETY: the path ends in a zero byte.
    let stream = unsafe { libc::opendir(path.as_ptr()) };
    assert!(!stream.is_null());
    let next = || {
        // SAFETY: the stream is open.
        let entry = unsafe { libc::readdir(stream) };
        // SAFETY: an entry is valid until the next call.
        let entry = unsafe { entry.as_ref() }?;
        // SAFETY: its name ends in a zero byte.
        let name = unsafe { std::ffi::CStr::from_ptr(entry.d_name.as_ptr()) };
        Some(name.to_str().unwrap().to_owned())
    };
    let mut places = Vec::new();
    loop {
        // SAFETY: the stream is open.
        let place = unsafe { libc::telldir(stream) };
        let Some(name) = next() else { break };
        places.push((place, name));
    }
    assert_eq!(places.len(), 302);
    for (place, name) in places.iter().rev().step_by(7) {
        // SAFETY: the stream is open and the place is one that it told.
        unsafe { libc::seekdir(stream, *place) };
        assert_eq!(next().as_ref(), Some(name));
    }
    // SAFETY: the stream is open and not used again.
    unsafe { libc::closedir(stream) };
}

fn many_threads_make_rename_and_remove_names(mode: Mode) {
    let mut mount = Mount::new(mode);
    let directory = mount.files("many");
    fs::create_dir(&directory).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..100 {
            let directory = &directory;
            scope.spawn(move || {
                for round in 0..6_u8 {
                    let temporary = directory.join(format!("{thread}-{round}.tmp"));
                    fs::write(&temporary, [round; 100]).unwrap();
                    let shared = directory.join(format!("shared-{}", thread % 5));
                    let own = directory.join(format!("own-{thread}-{round}"));
                    fs::hard_link(&temporary, &own).unwrap();
                    rename(&temporary, &shared).unwrap();
                    assert_eq!(fs::read(&own).unwrap(), [round; 100]);
                    assert_eq!(fs::read(&shared).unwrap().len(), 100);
                    if round % 2 == 0 {
                        fs::remove_file(&own).unwrap();
                    }
                }
            });
        }
    });
    let expected = 100 * 3 + 5;
    assert_eq!(names(&directory).len(), expected);
    mount.remount();
    let found = names(&directory);
    assert_eq!(found.len(), expected);
    for name in &found {
        assert_eq!(fs::read(directory.join(name)).unwrap().len(), 100);
    }
    for name in &found {
        fs::remove_file(directory.join(name)).unwrap();
    }
    fs::remove_dir(&directory).unwrap();
    mount.remount();
    assert_eq!((mount.objects().len(), mount.staging().len()), (0, 0));
    assert_eq!(mount.status_number("stored_bytes"), 0);
}

fn names_may_have_255_bytes(mode: Mode) {
    let mut mount = Mount::new(mode);
    let longest = "é".repeat(127) + "x";
    fs::write(mount.files(&longest), b"x").unwrap();
    fs::create_dir(mount.files("y".repeat(255))).unwrap();
    let too_long = "x".repeat(256);
    assert_errno(fs::write(mount.files(&too_long), b""), libc::ENAMETOOLONG);
    assert_errno(fs::metadata(mount.files(&too_long)), libc::ENAMETOOLONG);
    let renamed = rename(mount.files(&longest), mount.files(&too_long));
    assert_errno(renamed, libc::ENAMETOOLONG);
    mount.remount();
    assert!(names(&mount.files("")).contains(&longest));
}

fn a_directory_holds_fifty_thousand_files(mode: Mode) {
    const FILES: usize = 50_000;
    let mount = Mount::new(mode);
    let directory = mount.files("flat");
    fs::create_dir(&directory).unwrap();
    std::thread::scope(|scope| {
        for part in 0..4 {
            let directory = &directory;
            scope.spawn(move || {
                for index in (part..FILES).step_by(4) {
                    let path = directory.join(format!("{index:08x}.bin"));
                    std::os::unix::fs::symlink("x", path).unwrap();
                }
            });
        }
    });
    assert_eq!(names(&directory).len(), FILES);
    for index in (0..FILES).step_by(97) {
        fs::symlink_metadata(directory.join(format!("{index:08x}.bin"))).unwrap();
        let missing = fs::symlink_metadata(directory.join(format!("{index:08x}.no")));
        assert_errno(missing, libc::ENOENT);
    }
}

fn special_files_are_what_they_were_made(mode: Mode) {
    let mut mount = Mount::new(mode);
    // A socket's path may have 107 bytes: it is bound from inside the directory.
    let script = "import os, socket; os.mkfifo('fifo'); os.symlink('fifo', 'link'); \
                  socket.socket(socket.AF_UNIX).bind('socket')";
    succeed(
        std::process::Command::new("python3").args(["-c", script]).current_dir(mount.files("")),
    );
    let check = |mount: &Mount| {
        let kind = |name| fs::symlink_metadata(mount.files(name)).unwrap().file_type();
        assert!(kind("fifo").is_fifo() && kind("socket").is_socket());
        assert_eq!(fs::read_link(mount.files("link")).unwrap(), Path::new("fifo"));
        assert_eq!(fs::symlink_metadata(mount.files("link")).unwrap().len(), 4);
    };
    check(&mount);
    mount.remount();
    check(&mount);
}

fn directories_move_with_all_below(mode: Mode) {
    let mut mount = Mount::new(mode);
    fs::create_dir_all(mount.files("a/b/c")).unwrap();
    fs::create_dir(mount.files("z")).unwrap();
    let file = open(mount.files("a/b/c/file"), libc::O_RDWR | libc::O_CREAT).unwrap();
    rename(mount.files("a/b"), mount.files("z/b")).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, b"late", 0).unwrap();
    drop(file);
    assert_eq!(fs::metadata(mount.files("a")).unwrap().nlink(), 2);
    assert_eq!(fs::metadata(mount.files("z")).unwrap().nlink(), 3);
    assert_errno(rename(mount.files("z"), mount.files("z/b/z")), libc::EINVAL);
    assert_errno(rename(mount.files("a"), mount.files("z")), libc::ENOTEMPTY);
    rename(mount.files("z/b"), mount.files("a")).unwrap();
    mount.remount();
    assert_eq!(fs::read(mount.files("a/c/file")).unwrap(), b"late");
}

fn a_removed_directory_stays_a_directory_for_its_users(mode: Mode) {
    let mount = Mount::new(mode);
    let path = mount.files("gone");
    fs::create_dir(&path).unwrap();
    let directory = fs::File::open(&path).unwrap();
    let before = directory.metadata().unwrap();
    fs::remove_dir(&path).unwrap();
    let after = directory.metadata().unwrap();
    assert_eq!((after.mode(), after.uid()), (before.mode(), before.uid()));
    assert_eq!(after.nlink(), 0);
    let created = nix::fcntl::openat(
        &directory,
        "x",
        nix::fcntl::OFlag::O_CREAT | nix::fcntl::OFlag::O_WRONLY,
        nix::sys::stat::Mode::S_IRUSR,
    );
    assert_eq!(created.err(), Some(nix::errno::Errno::ENOENT));
}
