//! Requests that wait while there is no daemon. The kernel has found what they are for in the tree that is lost, and they must not
//! be carried out on what is there instead.

use std::fs::{File, OpenOptions, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::common::sys::{getxattr, rename, setxattr, sync_directory};
use crate::common::{Mode, Mount, eventually};
use crate::deaths::{daemon, kept, wait_until_kept};

/// Whether each thread of a process is stopped that has not ended meanwhile.
fn stands_still(pid: Pid) -> bool {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    tasks
        .filter_map(|task| std::fs::read_to_string(task.unwrap().path().join("status")).ok())
        .all(|status| status.contains("State:\tT"))
}

/// Calls something while the daemon does nothing any more, and kills it.
fn while_it_dies<T: Send>(mount: &Mount, call: impl FnOnce() -> T + Send) -> T {
    let dying = daemon(mount);
    kill(dying, Signal::SIGSTOP).unwrap();
    eventually("the daemon to stand still", || stands_still(dying).then_some(()));
    std::thread::scope(|scope| {
        let calling = scope.spawn(call);
        std::thread::sleep(Duration::from_millis(100));
        kill(dying, Signal::SIGKILL).unwrap();
        calling.join().unwrap()
    })
}

type Call = fn(&Path) -> io::Result<()>;

/// What is durable, and is there again after each death.
struct Tree {
    mount: Mount,
    keepers: u32,
}

const DURABLE: [(&str, &str); 4] =
    [("x", "durable x"), ("a", "durable a"), ("d1/k", "durable d1/k"), ("d2/k", "durable d2/k")];

impl Tree {
    fn new(mode: Mode) -> Tree {
        let mount = kept(mode, &[]);
        for directory in ["d1", "d2"] {
            std::fs::create_dir(mount.files(directory)).unwrap();
        }
        Tree { mount, keepers: 0 }.made_durable()
    }

    fn path(&self, name: &str) -> PathBuf {
        self.mount.files(name)
    }

    /// Makes all of it as it should be. A keeper replaces three daemons in a row.
    fn made_durable(mut self) -> Tree {
        if self.keepers == 3 {
            assert!(self.mount.unmount().success() || self.mount.unmount().success());
            self.mount.mount();
            wait_until_kept(&self.mount);
            self.keepers = 0;
        }
        self.keepers += 1;
        for (name, content) in DURABLE {
            std::fs::write(self.path(name), content).unwrap();
        }
        let _ = sync_directory(self.mount.path());
        sync_directory(self.mount.path()).unwrap();
        self
    }

    /// All but this one are what they were.
    #[track_caller]
    fn check(&self, but: &str) {
        for (name, content) in DURABLE.into_iter().filter(|(name, _)| *name != but) {
            let found = std::fs::read_to_string(self.path(name)).unwrap();
            assert_eq!(found, content, "{name}");
        }
    }
}

fn write_anew(path: &Path) -> io::Result<()> {
    let mut file = OpenOptions::new().create(true).write(true).truncate(true).open(path)?;
    file.write_all(b"new")
}

fn what_had_the_name_is_left_alone(mode: Mode) {
    let mut tree = Tree::new(mode);
    // A name that leads to another file in the tree that is lost.
    let changes: [(Call, &str); 4] = [
        (write_anew, "new"),
        (|path| OpenOptions::new().write(true).open(path)?.set_len(3), "dur"),
        (|path| nix::unistd::truncate(path, 7).map_err(io::Error::from), "durable"),
        (|path| setxattr(path, "user.mark", b"a"), "durable a"),
    ];
    for (change, expected) in changes {
        rename(tree.path("x"), tree.path("a")).unwrap();
        let path = tree.path("a");
        while_it_dies(&tree.mount, || change(&path)).unwrap();
        tree.check("a");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), expected);
        assert!(getxattr(tree.path("x"), "user.mark").is_err());
        std::fs::remove_file(&path).unwrap();
        tree = tree.made_durable();
    }
    // And one that led through another directory.
    let exchanged = |tree: &Tree| {
        rename(tree.path("d1"), tree.path("d3")).unwrap();
        rename(tree.path("d2"), tree.path("d1")).unwrap();
        assert_eq!(std::fs::read_to_string(tree.path("d1/k")).unwrap(), "durable d2/k");
    };
    exchanged(&tree);
    let path = tree.path("d1/k");
    while_it_dies(&tree.mount, || std::fs::remove_file(&path)).unwrap();
    tree.check("d1/k");
    assert!(!path.exists());
    tree = tree.made_durable();
    exchanged(&tree);
    while_it_dies(&tree.mount, || write_anew(&path)).unwrap();
    tree.check("d1/k");
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "new");
    tree = tree.made_durable();
    exchanged(&tree);
    let directory = tree.path("d1/made");
    while_it_dies(&tree.mount, || std::fs::create_dir(&directory)).unwrap();
    tree.check("");
    assert!(directory.exists() && !tree.path("d2/made").exists());
}

#[test]
fn what_had_the_name_is_left_alone_where_the_kernel_reads_files() {
    crate::require!(fuse, root);
    what_had_the_name_is_left_alone(Mode::Passthrough);
}

#[test]
fn what_had_the_name_is_left_alone_where_the_daemon_reads_files() {
    crate::require!(fuse);
    what_had_the_name_is_left_alone(Mode::Served);
}

/// Each version of the file is lost, and there has been one all the time.
#[test]
fn a_name_that_was_always_there_is_found() {
    crate::require!(fuse);
    let mut tree = Tree::new(crate::any_mode());
    let calls: [Call; 7] = [
        |path| File::open(path).map(drop),
        |path| OpenOptions::new().read(true).write(true).open(path).map(drop),
        write_anew,
        |path| std::fs::metadata(path).map(drop),
        |path| std::fs::set_permissions(path, Permissions::from_mode(0o640)),
        |path| setxattr(path, "user.mark", b"a"),
        |path| std::fs::hard_link(path, path.with_file_name("linked")),
    ];
    for call in calls {
        let path = tree.path("a");
        std::fs::write(tree.path("t"), b"lost").unwrap();
        rename(tree.path("t"), &path).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"lost");
        while_it_dies(&tree.mount, || call(&path)).unwrap();
        tree.check("a");
        tree = tree.made_durable();
    }
}
