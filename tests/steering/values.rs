//! Settings besides budgets.

use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::common::sys::{assert_errno, open, sync_directory, write_and_close};
use crate::common::{Mode, Mount, eventually, fill};
use crate::{assert_refused, kvfs, set, setting, shown};

in_both_modes!(
    opens_compare_as_often_as_they_are_told,
    what_is_damaged_can_become_a_miss,
    the_log_tells_more_and_less,
    the_remote_gets_what_the_bandwidth_lets_through,
    cold_files_are_encoded_from_now_on,
    every_setting_is_shown_with_its_origin,
    a_mount_that_takes_no_changes_can_be_told_as_well,
);

const BYTES: usize = 300_000;

fn damage(object: &Path) {
    let before = std::fs::metadata(object).unwrap();
    let file = open(object, libc::O_RDWR).unwrap();
    file.write_all_at(b"damage", 100_000).unwrap();
    file.set_modified(before.modified().unwrap()).unwrap();
}

/// A durable file that a new daemon has not looked at, with damaged bytes.
fn damaged(mode: Mode, options: &[&str]) -> (Mount, std::path::PathBuf) {
    let mut mount = Mount::with_options(mode, options);
    let path = mount.files("f");
    write_and_close(&path, &fill(1, BYTES)).unwrap();
    sync_directory(mount.path()).unwrap();
    let [object] = &mount.objects()[..] else { panic!("one file, one object") };
    damage(object);
    mount.remount();
    (mount, path)
}

fn opens_compare_as_often_as_they_are_told(mode: Mode) {
    let (mount, path) = damaged(mode, &["--verify", "never"]);
    drop(open(&path, libc::O_RDONLY).unwrap());
    // What was opened without a look is looked at.
    set(&mount, &["verify=first"]);
    assert_errno(open(&path, libc::O_RDONLY), libc::EIO);
    set(&mount, &["verify=never"]);
    drop(open(&path, libc::O_RDONLY).unwrap());
    set(&mount, &["verify=always"]);
    assert_errno(open(&path, libc::O_RDONLY), libc::EIO);
    let good = mount.files("g");
    write_and_close(&good, &fill(2, BYTES)).unwrap();
    sync_directory(mount.path()).unwrap();
    assert!(std::fs::read(&good).unwrap() == fill(2, BYTES));
    let objects = mount.objects();
    let object = objects.iter().find(|object| std::fs::read(object).unwrap() == fill(2, BYTES));
    damage(object.unwrap());
    assert_errno(open(&good, libc::O_RDONLY), libc::EIO);
}

fn what_is_damaged_can_become_a_miss(mode: Mode) {
    let (mount, path) = damaged(mode, &[]);
    assert_errno(open(&path, libc::O_RDONLY), libc::EIO);
    set(&mount, &["on_corrupt=miss"]);
    assert_errno(open(&path, libc::O_RDONLY), libc::ENOENT);
}

fn the_log_tells_more_and_less(mode: Mode) {
    let mount = Mount::new(mode);
    assert_eq!(setting(&mount, "log_level").1, "variable");
    set(&mount, &["log_level=off"]);
    let before = mount.log();
    set(&mount, &["verify=always"]);
    assert_eq!(mount.log(), before);
    set(&mount, &["log_level=info,kvfs=debug"]);
    set(&mount, &["verify=never"]);
    assert!(mount.log().contains("verify is never from now on, it was always"));
    assert_eq!(setting(&mount, "log_level"), ("info,kvfs=debug".to_owned(), "set live".to_owned()));
}

fn the_remote_gets_what_the_bandwidth_lets_through(mode: Mode) {
    let remote = crate::common::mount::scratch_directory();
    let place = remote.path().to_str().unwrap();
    let options = ["--remote", place, "--remote-bandwidth", "20K", "--commit-interval", "0.1"];
    let mount = Mount::with_options(mode, &options);
    for number in 0..4 {
        write_and_close(mount.files(format!("f{number}")), &fill(number, 1 << 20)).unwrap();
    }
    sync_directory(mount.path()).unwrap();
    // 4 MiB take 200 s at this rate.
    std::thread::sleep(std::time::Duration::from_secs(2));
    assert!(mount.status_number("remote_waiting_bytes") > 3 << 20);
    assert_eq!(setting(&mount, "remote_bandwidth"), ("20K".to_owned(), "option".to_owned()));
    set(&mount, &["remote_bandwidth=none"]);
    eventually("the remote to have everything", || {
        (mount.status_number("remote_waiting_files") == 0).then_some(())
    });
    set(&mount, &["remote_bandwidth=100M"]);
    assert_eq!(setting(&mount, "remote_bandwidth").0, "100M");
}

fn cold_files_are_encoded_from_now_on(mode: Mode) {
    let options = ["--cold", "zstd", "--commit-interval", "0.1"];
    let mount = Mount::with_options(mode, &options);
    set(&mount, &["cold=none"]);
    for number in 0..40 {
        let mut bytes = fill(number, 1 << 20);
        bytes[1 << 17..].fill(7);
        write_and_close(mount.files(format!("f{number}")), &bytes).unwrap();
    }
    sync_directory(mount.path()).unwrap();
    assert_eq!(mount.status_number("ssd_encoded_objects"), 0);
    set(&mount, &["cold=zstd:5", "ssd=24M"]);
    assert_eq!(setting(&mount, "cold"), ("zstd:5".to_owned(), "set live".to_owned()));
    eventually("files to be encoded", || {
        (mount.status_number("ssd_encoded_objects") > 0).then_some(())
    });
}

fn every_setting_is_shown_with_its_origin(mode: Mode) {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("kvfs.toml");
    std::fs::write(&file, "verify = \"always\"\nremote_index = \"5m\"\nremote = \"/nowhere\"\n")
        .unwrap();
    let options = ["--config", file.to_str().unwrap(), "-o", "on_corrupt=miss", "--offline"];
    let mount = Mount::with_options(mode, &options);
    let origin = format!("file {}", file.display());
    assert_eq!(setting(&mount, "verify"), ("always".to_owned(), origin.clone()));
    assert_eq!(setting(&mount, "remote_index"), ("300".to_owned(), origin));
    assert_eq!(setting(&mount, "on_corrupt"), ("miss".to_owned(), "option".to_owned()));
    assert_eq!(setting(&mount, "ram"), ("0".to_owned(), "default".to_owned()));
    assert_eq!(shown(&mount).lines().count(), 27);
    let ended = kvfs(&["config", "show", "--json"], mount.path());
    let settings: serde_json::Value = serde_json::from_slice(&ended.stdout).unwrap();
    let of =
        |name: &str| settings.as_array().unwrap().iter().find(|row| row["name"] == name).unwrap();
    assert_eq!(of("verify")["origin"], format!("file {}", file.display()));
    assert_eq!(of("ram")["value"], 0);
    assert_eq!(
        (&of("ram")["can_change"], &of("threads")["can_change"]),
        (&true.into(), &false.into())
    );
    assert_eq!(of("remote_index")["value"], 300.0);
    // A file with these settings gives the same mount.
    let again = directory.path().join("again.toml");
    std::fs::copy(mount.join(".kvfs/config"), &again).unwrap();
    let ended = kvfs(&["config", "check"], &again);
    let told = String::from_utf8_lossy(&ended.stdout).into_owned();
    assert!(ended.status.success() && told.is_empty(), "{told}");
}

fn a_mount_that_takes_no_changes_can_be_told_as_well(mode: Mode) {
    let (mut first, path) = damaged(mode, &["--verify", "never"]);
    let file = path.strip_prefix(first.path()).unwrap().to_owned();
    assert!(first.unmount().success());
    let options = ["--read-only", "--verify", "never", "--ram", "64M"];
    let mount = Mount::of_store_with(mode, &options, first.store());
    drop(open(mount.join(&file), libc::O_RDONLY).unwrap());
    set(&mount, &["verify=first"]);
    assert_errno(open(mount.join(&file), libc::O_RDONLY), libc::EIO);
    assert_refused(&mount, &["read_only=no"], "read_only cannot change while the mount is used");
}
