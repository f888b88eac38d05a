//! A limit is its owner's, and deletes nothing that its owner could not.

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::Path;

use crate::common::forks::{output, shell_as};
use crate::common::sys::{getxattr, removexattr, setxattr};
use crate::common::{Mode, Mount, eventually};
use crate::{limit, settle, wait_until_gone, write_files};

const ALICE: u32 = 1001;
const BOB: u32 = 1002;

as_root!(
    (fuse, root, setpriv, setfattr)
    limits_belong_to_the_owner,
    a_limit_deletes_what_its_owner_could,
    in_a_sticky_directory_everybody_keeps_his_own,
);

/// A directory of a user.
fn directory(path: &Path, user: u32, mode: u32) {
    fs::create_dir(path).unwrap();
    chown(path, Some(user), Some(user)).unwrap();
    fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
}

/// What a user hears who runs a command in the mount.
fn hears(mount: &Mount, user: u32, script: &str) -> String {
    let ended = output(&mut shell_as(mount.path(), user, script));
    let text = String::from_utf8_lossy(&ended.stderr).into_owned();
    if ended.status.success() { "nothing".to_owned() } else { text }
}

fn limits_belong_to_the_owner(mode: Mode) {
    let mount = Mount::new(mode);
    let team = mount.files("team");
    directory(&team, ALICE, 0o777);
    let files = write_files(&mount, &team, 3);
    for name in ["quota", "age", "ttl"] {
        let set = format!("setfattr -n user.kvfs.{name} -v 1 files/team");
        let told = hears(&mount, BOB, &set);
        assert!(told.contains("not permitted"), "{name}: {told}");
    }
    let ttl = "setfattr -n user.kvfs.ttl -v 1 files/team/block-000.bin";
    fs::set_permissions(&files[0], Permissions::from_mode(0o666)).unwrap();
    assert!(hears(&mount, BOB, ttl).contains("not permitted"));
    settle();
    assert!(files.iter().all(|path| path.exists()));

    assert_eq!(hears(&mount, ALICE, "setfattr -n user.kvfs.quota -v 1T files/team"), {
        "setfattr: files/team: Invalid argument\n"
    });
    let quota = "setfattr -n user.kvfs.quota -v 1000000000 files/team";
    assert_eq!(hears(&mount, ALICE, quota), "nothing");
    let used = || getxattr(&team, "user.kvfs.used_bytes").ok();
    eventually("a walk", used);
    let look = "getfattr -n user.kvfs.used_bytes files/team";
    assert!(hears(&mount, BOB, look).contains("not permitted"));
    assert_eq!(hears(&mount, ALICE, look), "nothing");
    let remove = "setfattr -x user.kvfs.quota files/team";
    assert!(hears(&mount, BOB, remove).contains("not permitted"));
    removexattr(&team, "user.kvfs.quota").unwrap();
}

fn a_limit_deletes_what_its_owner_could(mode: Mode) {
    let mount = Mount::new(mode);
    let team = mount.files("team");
    directory(&team, BOB, 0o777);
    // Alice's are: closed to others, open to read, open to change.
    let names = ["closed", "readable", "shared"];
    for (name, mode) in names.into_iter().zip([0o700, 0o755, 0o777]) {
        directory(&team.join(name), ALICE, mode);
        write_files(&mount, &team.join(name), 3);
    }
    setxattr(&team, "user.kvfs.quota", b"1").unwrap();
    wait_until_gone(&team.join("shared/block-002.bin"));
    settle();
    let count = |name: &str| fs::read_dir(team.join(name)).unwrap().count();
    assert_eq!(names.map(count), [3, 3, 0]);
    assert_eq!(getxattr(&team, "user.kvfs.used_bytes").unwrap(), "0");
    // What root limits goes wherever it is.
    limit(&mount.files(""), "quota", 1);
    wait_until_gone(&team.join("closed/block-002.bin"));
    settle();
    assert_eq!(names.map(count), [0, 0, 0]);
}

fn in_a_sticky_directory_everybody_keeps_his_own(mode: Mode) {
    let mount = Mount::new(mode);
    let team = mount.files("team");
    directory(&team, BOB, 0o755);
    directory(&team.join("drop"), ALICE, 0o1777);
    let files = write_files(&mount, &team.join("drop"), 4);
    for path in &files[..2] {
        chown(path, Some(BOB), Some(BOB)).unwrap();
    }
    setxattr(&team, "user.kvfs.quota", b"1").unwrap();
    wait_until_gone(&files[1]);
    settle();
    let left: Vec<bool> = files.iter().map(|path| path.exists()).collect();
    assert_eq!(left, [false, false, true, true]);
}
