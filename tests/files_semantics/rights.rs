//! Whose a new file is, and who may do what.

use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt};

use crate::common::forks::{output, shell_as, succeed};
use crate::common::{Mode, Mount};

const NOBODY: u32 = 65534;
const DAEMON: u32 = 1;

as_root!(
    (fuse, root, setpriv)
    a_file_belongs_to_its_maker,
    others_are_denied,
    a_group_directory_hands_its_group_down,
    only_the_owner_sees_the_store,
    cutting_a_program_takes_its_privileges_away,
);

fn open_to_all(mount: &Mount) {
    fs::set_permissions(mount.files(""), Permissions::from_mode(0o1777)).unwrap();
}

fn a_file_belongs_to_its_maker(mode: Mode) {
    let mut mount = Mount::new(mode);
    open_to_all(&mount);
    let script = "umask 027; echo x > file; mkdir directory; ln -s file link; mkfifo fifo";
    succeed(&mut shell_as(&mount.files(""), NOBODY, script));
    for round in 0..2 {
        for (name, mode) in
            [("file", 0o640), ("directory", 0o750), ("link", 0o777), ("fifo", 0o640)]
        {
            let metadata = fs::symlink_metadata(mount.files(name)).unwrap();
            let found = (metadata.uid(), metadata.gid(), metadata.mode() & 0o7777);
            assert_eq!(found, (NOBODY, NOBODY, mode), "{name}, round {round}");
        }
        mount.remount();
    }
}

fn others_are_denied(mode: Mode) {
    let mount = Mount::new(mode);
    open_to_all(&mount);
    fs::write(mount.files("secret"), b"x").unwrap();
    fs::set_permissions(mount.files("secret"), Permissions::from_mode(0o600)).unwrap();
    fs::create_dir(mount.files("closed")).unwrap();
    fs::set_permissions(mount.files("closed"), Permissions::from_mode(0o755)).unwrap();
    for (script, reason) in [
        ("cat secret", "Permission denied"),
        ("echo y >> secret", "Permission denied"),
        ("echo y > closed/new", "Permission denied"),
        ("chmod 666 secret", "Operation not permitted"),
        ("chown 65534 secret", "Operation not permitted"),
        ("touch -d @0 secret", "Permission denied"),
        ("rm -f secret", "Operation not permitted"),
        ("mv secret mine", "Operation not permitted"),
        ("cat ../.kvfs/status", "Permission denied"),
        ("mkdir ../models/mine", "Permission denied"),
    ] {
        let output = output(&mut shell_as(&mount.files(""), NOBODY, script));
        let message = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success(), "{script}");
        assert!(message.contains(reason), "{script}: {message}");
    }
    assert_eq!(fs::read(mount.files("secret")).unwrap(), b"x");
}

fn a_group_directory_hands_its_group_down(mode: Mode) {
    let mount = Mount::new(mode);
    let directory = mount.files("team");
    fs::create_dir(&directory).unwrap();
    std::os::unix::fs::chown(&directory, Some(NOBODY), Some(DAEMON)).unwrap();
    fs::set_permissions(&directory, Permissions::from_mode(0o2775)).unwrap();
    let script = "cd team && echo x > file && mkdir below && echo x > below/file";
    succeed(&mut shell_as(&mount.files(""), NOBODY, script));
    for name in ["file", "below", "below/file"] {
        let metadata = fs::metadata(directory.join(name)).unwrap();
        assert_eq!((metadata.uid(), metadata.gid()), (NOBODY, DAEMON), "{name}");
    }
    let mode_of = |name: &str| fs::metadata(directory.join(name)).unwrap().mode() & 0o7000;
    assert_eq!((mode_of("below"), mode_of("file")), (0o2000, 0));
}

fn only_the_owner_sees_the_store(mode: Mode) {
    let mount = Mount::with_own_files(mode, &[]);
    open_to_all(&mount);
    succeed(&mut shell_as(&mount.files(""), NOBODY, "echo x > file; sync file"));
    let mode = |path: &std::path::Path| fs::metadata(path).unwrap().mode() & 0o7777;
    assert_eq!(mode(mount.store()), 0o700);
    for name in ["objects", "staging", "quarantine"] {
        assert_eq!(mode(&mount.store().join(name)), 0o700, "{name}");
    }
    let objects = mount.objects();
    assert_eq!(objects.len(), 1);
    assert_eq!(mode(&objects[0]), 0o600);
    assert_eq!(mode(&mount.store().join("meta.redb")), 0o600);
}

fn cutting_a_program_takes_its_privileges_away(mode: Mode) {
    let mount = Mount::new(mode);
    let program = mount.files("program");
    for (before, after) in [(0o6777, 0o777), (0o4766, 0o766), (0o2767, 0o767)] {
        fs::write(&program, b"#!/bin/sh\n").unwrap();
        fs::set_permissions(&program, Permissions::from_mode(before)).unwrap();
        let cut =
            "python3 -c 'import os; os.close(os.open(\"program\", os.O_WRONLY | os.O_TRUNC))'";
        succeed(&mut shell_as(&mount.files(""), NOBODY, cut));
        assert_eq!(fs::metadata(&program).unwrap().mode() & 0o7777, after, "{before:o}");
    }
    // Root keeps what it has set.
    fs::set_permissions(&program, Permissions::from_mode(0o6755)).unwrap();
    fs::write(&program, b"").unwrap();
    assert_eq!(fs::metadata(&program).unwrap().mode() & 0o7000, 0o6000);
}
