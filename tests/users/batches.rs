//! What a user is told of many names is what his own system calls tell him.
//!
//! Root changes owners and modes of a tree, and then every user asks about all of it. A user's own stat and open are the
//! oracle: the answer may say that they must be asked, but nothing else than they say, and never more.

use std::collections::BTreeMap;
use std::fs::{self, File, Permissions};
use std::os::unix::fs::{PermissionsExt, chown};

use kvfs::page::batch::{Ask, Status};

use crate::asking::ask;
use crate::common::forks::no_forks;
use crate::common::random::Random;
use crate::common::{Mode, Mount};
use crate::user::{TEAM, below, everybody};
use crate::{History, operations, seed};

as_root!((fuse, root) answers_say_what_system_calls_say, the_status_of_root_stays_his);

const MODES: [u32; 14] = [
    0o755, 0o755, 0o755, 0o711, 0o744, 0o750, 0o770, 0o707, 0o701, 0o700, 0o070, 0o007, 0o640,
    0o444,
];
const OWNERS: [(u32, u32); 6] =
    [(0, 0), (1001, 1001), (1001, TEAM), (1002, 1002), (1002, TEAM), (1003, 1003)];
const DIRECTORIES: [&str; 4] = ["files/a", "files/a/b", "files/a/b/c", "files/none"];
const NAMES: [&str; 4] = ["one", "two", "link", "none"];

fn answers_say_what_system_calls_say(mode: Mode) {
    let mount = Mount::new(mode);
    let users = everybody();
    make_tree(&mount);
    let root = File::open(mount.path()).unwrap();
    let (mut random, mut history) = (Random::of(seed()), History::of(seed()));
    let mut counts = BTreeMap::new();
    for _ in 0..operations() / 20 {
        let _quiet = no_forks();
        let (directory, name) = (random.pick(&DIRECTORIES[..3]), random.pick(&["", "one", "two"]));
        let (path, owner, bits) =
            (mount.join(directory).join(name), random.pick(&OWNERS), random.pick(&MODES));
        chown(&path, Some(owner.0), Some(owner.1)).unwrap();
        fs::set_permissions(&path, Permissions::from_mode(*bits)).unwrap();
        history.note(&format!("{directory}/{name} {owner:?} {bits:o}"));
        let (user, directory) = (random.pick(&users), *random.pick(&DIRECTORIES));
        let at = below(&root, "");
        let [have, get] = [Ask::Have, Ask::Get].map(|kind| {
            let at = at.clone();
            user.does(move || {
                ask(&at, kind, directory, &NAMES.map(str::as_bytes))
                    .map_err(|error| error.raw_os_error().unwrap_or(0))
            })
        });
        for (index, name) in NAMES.into_iter().enumerate() {
            let path = at.join(directory).join(name);
            let (stat, read) = user.does(move || {
                let code = |error: std::io::Error| error.raw_os_error().unwrap_or(0);
                (
                    fs::symlink_metadata(&path).map(|m| m.len()).map_err(code),
                    fs::read(&path).map_err(code),
                )
            });
            let told =
                have.as_ref().map(|told| (told[index].0, told[index].1)).map_err(|code| *code);
            let what = || format!("{} of {directory}/{name}: {stat:?} {told:?}", user.name);
            let holds = match told {
                Ok((Status::Here, size)) => stat == Ok(size),
                Ok((Status::Absent, _)) => stat == Err(libc::ENOENT),
                Ok((Status::Other, _)) => true,
                Ok(_) => false,
                Err(code) => stat == Err(code),
            };
            history.assert(holds, what);
            let told = get.as_ref().map(|told| told[index].clone()).map_err(|code| *code);
            let what = || format!("{} of {directory}/{name}: {read:?} {told:?}", user.name);
            let holds = match &told {
                Ok((Status::Here, _, bytes)) => read.as_ref() == Ok(bytes),
                Ok((Status::Absent, ..)) => read == Err(libc::ENOENT),
                Ok((Status::Denied, ..)) => read == Err(libc::EACCES),
                Ok((Status::Other, ..)) => true,
                Ok(_) => false,
                Err(code) => read == Err(*code),
            };
            history.assert(holds, what);
            let kind =
                told.map_or_else(|code| format!("errno {code}"), |told| format!("{:?}", told.0));
            *counts.entry(kind).or_insert(0_usize) += 1;
        }
    }
    println!("{counts:?}");
    for kind in ["Here", "Absent", "Denied", "Other", "errno 13", "errno 2"] {
        assert!(counts.contains_key(kind), "{kind} was never told: {counts:?}");
    }
}

fn make_tree(mount: &Mount) {
    for directory in &DIRECTORIES[..3] {
        fs::create_dir(mount.join(directory)).unwrap();
        for name in &NAMES[..2] {
            fs::write(mount.join(directory).join(name), name).unwrap();
        }
        std::os::unix::fs::symlink("one", mount.join(directory).join("link")).unwrap();
    }
}

fn the_status_of_root_stays_his(mode: Mode) {
    let mount = Mount::new(mode);
    let root = File::open(mount.path()).unwrap();
    let at = below(&root, "");
    let refused = everybody()[1].does(move || {
        let names = [".kvfs/status", ".kvfs/metrics", ".kvfs/none"];
        names.map(|name| fs::metadata(at.join(name)).unwrap_err().raw_os_error())
    });
    assert_eq!(refused, [Some(libc::EACCES); 3]);
}
