//! `.kvfs/` tells about the mount, and nobody who lists the mount sees it.

use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt;

use crate::common::sys::{assert_errno, open, write_and_close};
use crate::common::{Mode, Model, Mount};

in_both_modes!(views_are_read_only_text, nothing_virtual_is_listed, metrics_parse_and_count);

fn views_are_read_only_text(mode: Mode) {
    let mount = Mount::new(mode);
    assert_eq!(mount.status("state"), "ok");
    assert_eq!(mount.status("store"), mount.store().display().to_string());
    assert_eq!(mount.status("mountpoint"), mount.path().display().to_string());
    assert_eq!(mount.status("pages"), "0");
    for view in ["status", "metrics", "config", "errors", "events", "hottest", "page", "uses"] {
        let path = mount.join(".kvfs").join(view);
        let stat = std::fs::metadata(&path).unwrap();
        assert!(stat.is_file());
        assert_eq!(stat.mode() & 0o222, 0, "{view} is writable");
        std::fs::read_to_string(&path).unwrap();
        assert_errno(open(&path, libc::O_RDWR), libc::EPERM);
        assert_errno(std::fs::remove_file(&path), libc::EPERM);
    }
    assert_errno(open(mount.join(".kvfs/other"), libc::O_RDONLY), libc::ENOENT);
    let created = open(mount.join(".kvfs/made"), libc::O_CREAT | libc::O_WRONLY);
    assert_errno(created, libc::EPERM);
    assert_errno(std::fs::create_dir(mount.join(".kvfs/made")), libc::EPERM);
    assert_errno(std::fs::remove_dir(mount.join(".kvfs")), libc::EPERM);
}

fn nothing_virtual_is_listed(mode: Mode) {
    let mount = Mount::new(mode);
    let names: BTreeSet<_> =
        std::fs::read_dir(mount.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names, ["files", "models"].map(Into::into).into());
}

fn metrics_parse_and_count(mode: Mode) {
    let mount = Mount::new(mode);
    let model = Model::small();
    model.install(&mount);
    let path = model.page_path(&mount, "chat", 0, 0);
    write_and_close(&path, &model.page(0, 0, 1)).unwrap();
    assert!(path.exists());
    let text = std::fs::read_to_string(mount.join(".kvfs/metrics")).unwrap();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let (name, value) = line.rsplit_once(' ').expect(line);
        assert!(name.starts_with("kvfs_"), "{line}");
        value.parse::<f64>().expect(line);
    }
    let passthrough = u64::from(mode == Mode::Passthrough);
    assert_eq!(mount.metric("kvfs_passthrough_enabled"), passthrough);
    assert_eq!(mount.metric("kvfs_mount_ready"), 1);
    // The manifest and the page.
    assert_eq!(mount.metric("kvfs_sealed_total"), 2);
    assert_eq!(mount.metric("kvfs_pages"), 1);
}
