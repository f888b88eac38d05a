//! A limit is its owner's, and deletes nothing that its owner could not.

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};

use crate::common::forks::{output, shell_as};
use crate::common::sys::{getxattr, removexattr, setxattr};
use crate::common::{Mode, Model, Mount, eventually};
use crate::writer::Sequence;
use crate::{limit, settle, wait_until_gone, write_files};

const ALICE: u32 = 1001;
const BOB: u32 = 1002;

as_root!(
    (fuse, root, setpriv, setfattr)
    limits_belong_to_the_owner,
    a_limit_deletes_what_its_owner_could,
    in_a_sticky_directory_everybody_keeps_his_own,
    what_is_closed_while_a_limit_deletes_stays,
    a_file_with_a_time_of_its_own_keeps_names_that_its_owner_cannot_reach,
    limits_end_with_their_owner,
    the_owner_of_a_sequence_limits_it,
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

fn what_is_closed_while_a_limit_deletes_stays(mode: Mode) {
    let mount = Mount::new(mode);
    let team = mount.files("team");
    directory(&team, BOB, 0o777);
    let shared = team.join("shared");
    directory(&shared, ALICE, 0o777);
    let names: Vec<PathBuf> = (0..4000).map(|number| shared.join(format!("{number:04}"))).collect();
    for name in &names {
        fs::write(name, "bytes").unwrap();
    }
    let count = || fs::read_dir(&shared).unwrap().count();
    setxattr(&team, "user.kvfs.quota", b"1").unwrap();
    // The walk has seen all of them and goes on with what it saw.
    eventually("the first to go", || (!names[0].exists()).then_some(()));
    fs::set_permissions(&shared, Permissions::from_mode(0o755)).unwrap();
    let left = count();
    assert!(left > 0, "all went before it was closed");
    settle();
    // One was on its way.
    assert!(count() + 1 >= left, "{} of {left} are left", count());
}

fn a_file_with_a_time_of_its_own_keeps_names_that_its_owner_cannot_reach(mode: Mode) {
    let mount = Mount::new(mode);
    directory(&mount.files("alice"), ALICE, 0o755);
    directory(&mount.files("bob"), BOB, 0o700);
    directory(&mount.files("bob/inner"), BOB, 0o777);
    // Alice is in no group but her own; the file got its group from a directory that it was made in.
    let team = mount.files("team");
    directory(&team, BOB, 0o775);
    let own = mount.files("alice/file");
    fs::write(&own, "bytes").unwrap();
    chown(&own, Some(ALICE), Some(BOB)).unwrap();
    let others = [mount.files("bob/inner/name"), team.join("name")];
    for other in &others {
        fs::hard_link(&own, other).unwrap();
    }
    assert_eq!(hears(&mount, ALICE, "setfattr -n user.kvfs.ttl -v 1 files/alice/file"), "nothing");
    wait_until_gone(&own);
    settle();
    assert_eq!(others.map(|other| other.exists()), [true, true]);
}

/// Who takes a directory over does not delete for the one who had it.
fn limits_end_with_their_owner(mode: Mode) {
    let mount = Mount::new(mode);
    let team = mount.files("team");
    directory(&team, ALICE, 0o777);
    for name in ["quota", "age", "ttl"] {
        let set = format!("setfattr -n user.kvfs.{name} -v 1000000 files/team");
        assert_eq!(hears(&mount, ALICE, &set), "nothing");
    }
    // Who keeps the owner, keeps the limits.
    chown(&team, Some(ALICE), Some(BOB)).unwrap();
    assert_eq!(getxattr(&team, "user.kvfs.quota").unwrap(), "1000000");
    let set = "setfattr -n user.kvfs.quota -v 1 files/team";
    assert_eq!(hears(&mount, ALICE, set), "nothing");
    chown(&team, Some(0), Some(0)).unwrap();
    let files = write_files(&mount, &team, 2);
    settle();
    assert!(files.iter().all(|path| path.exists()));
    for name in ["quota", "age", "ttl"] {
        assert!(getxattr(&team, &format!("user.kvfs.{name}")).is_err(), "{name}");
    }
    // What root has set holds for who gets it.
    limit(&team, "quota", 1);
    chown(&team, Some(ALICE), Some(ALICE)).unwrap();
    wait_until_gone(&files[1]);
}

fn the_owner_of_a_sequence_limits_it(mode: Mode) {
    let (mount, model) = (Mount::new(mode), Model::small());
    model.install(&mount);
    let sequences = model.sequence(&mount, "");
    fs::set_permissions(&sequences, Permissions::from_mode(0o1777)).unwrap();
    for (name, user) in [("hers", ALICE), ("his", BOB)] {
        let tokens: Vec<u32> = (user * 100..user * 100 + 40).collect();
        Sequence::new(&model, name).append(&mount, &model, &tokens);
        let mut own = std::process::Command::new("chown");
        own.args(["-R", &user.to_string()]).arg(sequences.join(name));
        crate::common::forks::succeed(&mut own);
    }
    let set = "setfattr -n user.kvfs.ttl -v 1 models/small/sequences/hers";
    assert_eq!(hears(&mount, ALICE, set), "nothing");
    wait_until_gone(&sequences.join("hers"));
    assert!(sequences.join("his/tokens").exists());
}
