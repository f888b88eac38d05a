//! What limits delete, which nobody asks for by path at the time.
//!
//! Trees of files and of pages whose directories belong to several users. In rounds each tree changes once, by a
//! limit that somebody sets or takes away, or by another owner or mode, and then the daemon looks. The oracle of
//! each name that went is what the owner of a limit above it could have removed, before that change or after it.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::{self, File, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::Path;
use std::time::Duration;

use crate::History;
use crate::common::forks::no_forks;
use crate::common::random::Random;
use crate::common::sys::{removexattr, setxattr};
use crate::common::{Mode, Model, Mount};
use crate::rights::Owned;
use crate::user::{TEAM, User, below, everybody};
use crate::writer::Sequence;

as_root!((fuse, root) limits_delete_what_their_owners_could);

/// Operations that a tree stands for: making it, and its changes.
const OPERATIONS_OF_TREE: usize = 25;
/// Trees at a time.
const TREES_MAX: usize = 200;
const ROUNDS: usize = 4;
/// The daemon looks each second.
const ROUND: Duration = Duration::from_millis(2200);
const OWNERS: [(u32, u32); 7] =
    [(0, 0), (1001, 1001), (1001, TEAM), (1002, 1002), (1002, TEAM), (1003, 1003), (1003, TEAM)];
const DIRECTORY_MODES: [u32; 14] = [
    0o755, 0o755, 0o777, 0o777, 0o777, 0o1777, 0o1777, 0o700, 0o770, 0o1770, 0o707, 0o733, 0o555,
    0o077,
];
const LIMITS: [&str; 4] = ["quota", "quota", "age", "ttl"];

/// A name that is there.
#[derive(Clone, Copy, Debug)]
struct Node {
    owned: Owned,
    is_directory: bool,
    inode: u64,
    /// It has a limit.
    is_limited: bool,
}

/// Everything below one directory, by path.
type Tree = BTreeMap<String, Node>;

/// A tree as it was before its last change, and as it is.
struct Changed {
    before: Tree,
    after: Tree,
    change: String,
}

/// A mount with such trees, and what came of the limits in it.
struct Limits {
    opened: File,
    users: [User; 4],
    random: Random,
    history: History,
    trees: Vec<Changed>,
    removed: usize,
    /// Names below a limit that its owner could not have removed.
    kept: usize,
    set: usize,
    refused: usize,
}

fn parent(path: &str) -> &str {
    path.rsplit_once('/').map_or("", |(parent, _)| parent)
}

/// Whether some limit may delete a name, by the user whose it is.
fn may_go(users: &[User], tree: &Tree, path: &str) -> bool {
    let Some(node) = tree.get(path) else { return false };
    let owner = |node: &Node| users.iter().find(|user| user.uid == node.owned.uid).unwrap();
    // From where a descriptor of its owner could be, or from the root of the mount.
    let may_remove = |user: &User, from: &str| {
        let mut at = parent(path);
        let Some(directory) = tree.get(at) else { return false };
        let removes = directory.owned.lets_remove(user, node.owned.uid);
        while at != from && !at.is_empty() {
            at = parent(at);
            if tree.get(at).is_some_and(|above| above.owned.grants(user) & 0o1 == 0) {
                return false;
            }
        }
        removes
    };
    let inode = node.inode;
    let own = tree.values().any(|other| other.inode == inode && other.is_limited);
    if !node.is_directory && own && may_remove(owner(node), "") {
        return true;
    }
    let limited = tree.iter().filter(|(_, limited)| limited.is_directory && limited.is_limited);
    limited.into_iter().any(|(above, limited)| match path.strip_prefix(above.as_str()) {
        // A sequence goes with its directory.
        Some("") => may_remove(owner(limited), ""),
        Some(inside) => inside.starts_with('/') && may_remove(owner(limited), above),
        None => false,
    })
}

impl Limits {
    fn new(mount: &Mount, seed: u64) -> Limits {
        Limits {
            opened: File::open(mount.path()).unwrap(),
            users: everybody(),
            random: Random::of(seed),
            history: History::of(seed),
            trees: Vec::new(),
            removed: 0,
            kept: 0,
            set: 0,
            refused: 0,
        }
    }

    fn give(&mut self, path: &Path, is_directory: bool) {
        let (uid, gid) = *self.random.pick(&OWNERS);
        chown(path, Some(uid), Some(gid)).unwrap();
        if is_directory {
            let mode = *self.random.pick(&DIRECTORY_MODES);
            fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
        }
    }

    /// Directories in each other, and files in them of which some have two names.
    fn make_files(&mut self, top: &Path) {
        let mut directories = vec![top.to_owned()];
        fs::create_dir(top).unwrap();
        for name in ["a", "b", "c"] {
            let path = self.random.pick(&directories).join(name);
            fs::create_dir(&path).unwrap();
            directories.push(path);
        }
        let mut files = Vec::new();
        for number in 0..6 {
            let path = self.random.pick(&directories).join(format!("f{number}"));
            fs::write(&path, [0; 100]).unwrap();
            if self.random.one_in(4) {
                let other = self.random.pick(&directories).join(format!("g{number}"));
                fs::hard_link(&path, other).unwrap();
            }
            files.push(path);
        }
        for path in &files {
            self.give(path, false);
        }
        for path in &directories {
            self.give(path, true);
        }
    }

    /// A model with two sequences, whose pages no other tree has.
    fn make_sequences(&mut self, mount: &Mount, name: &str, token: u32) {
        let model = Model::small().named(name);
        model.install(mount);
        let mut paths = vec![model.directory(mount), model.sequence(mount, "")];
        for name in ["first", "second"] {
            Sequence::new(&model, name).append(mount, &model, &[token; 40]);
            let sequence = model.sequence(mount, name);
            for inside in ["", "000", "001", "tokens", "000/0000000.safetensors"] {
                paths.push(sequence.join(inside));
            }
        }
        for path in paths.into_iter().filter(|path| path.exists()) {
            if path.is_dir() || self.random.one_in(3) {
                self.give(&path, path.is_dir());
            }
        }
    }

    fn make(&mut self, mount: &Mount, number: usize) {
        let top = if number.is_multiple_of(5) {
            self.make_sequences(mount, &format!("m{number}"), u32::try_from(number).unwrap());
            format!("models/m{number}")
        } else {
            self.make_files(&mount.files(number.to_string()));
            format!("files/{number}")
        };
        let mut tree = Tree::new();
        let mut left = vec![top];
        while let Some(path) = left.pop() {
            let metadata = fs::symlink_metadata(mount.join(&path)).unwrap();
            if metadata.is_dir() {
                let names = fs::read_dir(mount.join(&path)).unwrap();
                let name = |entry: fs::DirEntry| entry.file_name().into_string().unwrap();
                left.extend(names.map(|entry| format!("{path}/{}", name(entry.unwrap()))));
            }
            let (is_directory, inode) = (metadata.is_dir(), metadata.ino());
            let owned = Owned::from(&metadata);
            tree.insert(path, Node { owned, is_directory, inode, is_limited: false });
        }
        self.trees.push(Changed { before: tree.clone(), after: tree, change: String::new() });
    }

    fn note(&mut self, number: usize, change: String) {
        self.history.note(&change);
        self.trees[number].change = change;
    }

    /// One change of a tree. What the daemon has deleted by now cannot be changed any more.
    fn change(&mut self, number: usize) {
        let paths: Vec<String> = self.trees[number].after.keys().cloned().collect();
        let path = self.random.pick(&paths).clone();
        let is_directory = self.trees[number].after[&path].is_directory;
        let at = below(&self.opened, &path);
        let mut changed = self.trees[number].after[&path];
        match self.random.below(if is_directory { 9 } else { 3 }) {
            0 => {
                let (uid, gid) = *self.random.pick(&OWNERS);
                self.note(number, format!("root chown {uid}:{gid} {path}"));
                if chown(&at, Some(uid), Some(gid)).is_err() {
                    return;
                }
                // Setuid bits go; a limit of somebody else does, too.
                changed.is_limited &= [0, uid].contains(&changed.owned.uid);
                changed.owned = Owned { uid, gid, ..changed.owned };
            }
            3..=5 => {
                let mode = *self.random.pick(&DIRECTORY_MODES);
                self.note(number, format!("root chmod {mode:o} {path}"));
                if fs::set_permissions(at, Permissions::from_mode(mode)).is_err() {
                    return;
                }
                changed.owned.mode = mode;
            }
            kind => {
                let is_set = kind != 8;
                if !self.set_limit(number, &path, is_set) {
                    return;
                }
                changed.is_limited = is_set;
            }
        }
        let same = self.trees[number].after.values_mut().filter(|node| node.inode == changed.inode);
        same.for_each(|node| *node = changed);
    }

    /// Somebody, mostly the owner, sets a limit or takes all away; whether he could.
    fn set_limit(&mut self, number: usize, path: &str, is_set: bool) -> bool {
        let node = self.trees[number].after[path];
        let is_owner = |user: &User| user.uid == node.owned.uid;
        let chosen = match self.random.below(4) {
            0 => self.random.below(self.users.len()),
            _ => self.users.iter().position(is_owner).unwrap(),
        };
        let limit = if node.is_directory { *self.random.pick(&LIMITS) } else { "ttl" };
        self.note(number, format!("{} sets {limit} of {path}: {is_set}", self.users[chosen].name));
        let user = &self.users[chosen];
        let at = below(&self.opened, path);
        let is_done = user.does(move || {
            let name = format!("user.kvfs.{limit}");
            if is_set {
                return setxattr(&at, &name, b"1").is_ok();
            }
            let names = ["quota", "age", "ttl"].map(|limit| format!("user.kvfs.{limit}"));
            names.iter().filter(|name| removexattr(&at, name).is_ok()).count() > 0
        });
        self.history
            .assert(!is_done || user.uid == 0 || is_owner(user), || "it was set".to_owned());
        (self.set, self.refused) =
            (self.set + usize::from(is_done), self.refused + usize::from(!is_done));
        is_done
    }

    /// What is gone was for the owner of some limit to remove.
    fn check(&mut self, number: usize) {
        let Changed { before, after, change } = &mut self.trees[number];
        let paths: Vec<String> = after.keys().cloned().collect();
        for path in paths {
            let may = may_go(&self.users, before, &path) || may_go(&self.users, after, &path);
            if fs::symlink_metadata(below(&self.opened, &path)).is_ok() {
                self.kept += usize::from(!may && is_below_a_limit(after, &path));
                continue;
            }
            self.history.assert(may, || told(&path, change, [&*before, &*after]));
            self.removed += 1;
        }
        after.retain(|path, _| fs::symlink_metadata(below(&self.opened, path)).is_ok());
    }

    fn round(&mut self) {
        for number in 0..self.trees.len() {
            let _quiet = no_forks();
            self.trees[number].before = self.trees[number].after.clone();
            self.change(number);
        }
        std::thread::sleep(ROUND);
        for number in 0..self.trees.len() {
            self.check(number);
        }
        self.trees.retain(|tree| !tree.after.is_empty());
    }
}

/// What is to be known of a name that is gone.
fn told(path: &str, change: &str, trees: [&Tree; 2]) -> String {
    let mut text = format!("{path} is gone; the last change: {change}\n");
    for (tree, when) in trees.into_iter().zip(["before", "now"]) {
        for (path, Node { owned, is_limited, .. }) in tree {
            writeln!(text, "{when} {owned:?} limit: {is_limited:5} {path}").unwrap();
        }
    }
    text
}

fn is_below_a_limit(tree: &Tree, path: &str) -> bool {
    let mut at = path;
    while !at.is_empty() {
        at = parent(at);
        if tree.get(at).is_some_and(|node| node.is_limited) {
            return true;
        }
    }
    false
}

fn limits_delete_what_their_owners_could(mode: Mode) {
    let begun = std::time::Instant::now();
    let mount = Mount::new(mode);
    let (seed, count) = (crate::seed(), crate::operations());
    let mut limits = Limits::new(&mount, seed);
    let trees = count.div_ceil(OPERATIONS_OF_TREE);
    for first in (0..trees).step_by(TREES_MAX) {
        for number in first..trees.min(first + TREES_MAX) {
            limits.make(&mount, number);
        }
        // The second one sees what the first one has set.
        (0..ROUNDS).for_each(|_| limits.round());
        limits.trees.clear();
    }
    let Limits { removed, kept, set, refused, .. } = limits;
    println!(
        "seed {seed}: {trees} trees, {set} limits set, {refused} refused, {removed} names deleted, {kept} kept \
         from a limit above them, {:?}",
        begun.elapsed()
    );
    assert!(count < 5_000 || [removed, kept, set, refused].iter().all(|&count| count > 10));
    assert_eq!(mount.status("state"), "ok");
}
