//! Programs that others wrote to try filesystems, or that are demanding users of one, on `files/`: each
//! checks itself what it reads back. `tests/pjdfstest.rs` and `tests/fsx.rs` run two more.
//!
//! What may fail is listed where it is run, with the reason, and exactly that has to.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::path::Path;
use std::process::Command;

use common::forks::{output, shell, succeed};
use common::{Mode, Mount, fill};

in_both_modes!(stress_ng, fio, sqlite, git, rsync);

/// Stressors of stress-ng's class `filesystem` that work on files of a directory. Left out are those
/// that try something else: mounts and devices (bind-mount, binderfs, fanotify, procfs, ioprio,
/// chattr, file-ioctl, fiemap and verity: ioctls that FUSE does not pass on), and descriptors without
/// files (dup, eventfd, inotify, dnotify).
const STRESSORS: [&str; 34] = [
    "access",
    "chdir",
    "chmod",
    "chown",
    "copy-file",
    "dentry",
    "dir",
    "dirdeep",
    "dirmany",
    "fallocate",
    "fcntl",
    "filename",
    "flock",
    "fpunch",
    "fsize",
    "fstat",
    "getdent",
    "handle",
    "hdd",
    "inode-flags",
    "io",
    "iomix",
    "lease",
    "link",
    "locka",
    "lockf",
    "lockofd",
    "mknod",
    "open",
    "rename",
    "symlink",
    "sync-file",
    "touch",
    "utime",
];

/// Stressors that may end with anything but success: none may fail, and none may be left out either
/// (3: it could not be run here, 4: it does not exist in this version).
const EXPECTED_FAILURES: [(&str, i32); 0] = [];

fn stress_ng(mode: Mode) {
    require!(fuse, root);
    if !common::available("stress-ng") {
        return;
    }
    let mount = Mount::new(mode);
    let mut failed = Vec::new();
    for stressor in STRESSORS {
        let mut command = Command::new("stress-ng");
        command.args([&format!("--{stressor}"), "1", &format!("--{stressor}-ops"), "200"]);
        command.args(["--verify", "--timeout", "1", "--no-rand-seed", "--temp-path", "."]);
        let ended = output(command.current_dir(mount.files("")));
        if !ended.status.success() {
            eprintln!("{}", String::from_utf8_lossy(&ended.stderr));
            failed.push((stressor, ended.status.code().unwrap_or(-1)));
        }
    }
    assert_eq!(failed, EXPECTED_FAILURES);
    assert_healthy(&mount);
}

/// Random writes of two jobs, read back and compared, through system calls, mappings and past the page
/// cache; then once more after the store was mounted anew.
fn fio(mode: Mode) {
    require!(fuse, root, fio);
    let mut mount = Mount::new(mode);
    for (name, how) in [
        ("psync", "--ioengine=psync --rw=randwrite --bsrange=512-64k --fsync=32"),
        ("mmap", "--ioengine=mmap --rw=randwrite --bs=4k"),
        ("direct", "--ioengine=psync --rw=randwrite --bs=16k --direct=1"),
        ("append", "--ioengine=psync --rw=write --bs=100k --file_append=1"),
    ] {
        let job = format!(
            "fio --name={name} {how} --size=8m --numjobs=2 --verify=xxhash --verify_fatal=1 \
             --do_verify=1 --randseed=7 --group_reporting --output=/dev/null"
        );
        shell(&mount.files(""), &job);
    }
    let before = shell(&mount.files(""), "sha256sum *");
    mount.remount();
    assert_eq!(shell(&mount.files(""), "sha256sum *"), before);
    assert_healthy(&mount);
}

/// Writers in several processes with a write-ahead log, which lives in a shared mapping; one is
/// killed in the middle of a transaction.
fn sqlite(mode: Mode) {
    require!(fuse, root, python);
    let mut mount = Mount::new(mode);
    let program = mount.beside("sqlite.py");
    std::fs::write(&program, SQLITE).unwrap();
    let run = |directory: &Path| succeed(Command::new("python3").arg(&program).arg(directory));
    let first = run(&mount.files(""));
    assert!(first.contains("ok"), "{first}");
    mount.remount();
    // The same again finds the rows of the first time.
    let second = run(&mount.files(""));
    assert!(second.contains("ok"), "{second}");
    assert_healthy(&mount);
}

const SQLITE: &str = r#"
import multiprocessing, os, signal, sqlite3, sys, time
path = os.path.join(sys.argv[1], "database")

def connect():
    database = sqlite3.connect(path, timeout=30)
    mode = database.execute("pragma journal_mode=wal").fetchone()[0]
    assert mode == "wal", mode
    database.execute("pragma synchronous=full")
    return database

def write(number, count):
    database = connect()
    for step in range(count):
        with database:
            for _ in range(20):
                database.execute("insert into rows (writer, step, text) values (?, ?, ?)",
                                 (number, step, "x" * (step * 37 % 4000)))

def killed():
    database = connect()
    database.execute("begin immediate")
    for _ in range(3000):
        database.execute("insert into rows (writer, step, text) values (-1, 0, ?)", ("y" * 900,))
    os.kill(os.getpid(), signal.SIGKILL)

database = connect()
database.execute("create table if not exists rows (writer int, step int, text text)")
before = database.execute("select count(*) from rows").fetchone()[0]
writers = [multiprocessing.Process(target=write, args=(number, 15)) for number in range(3)]
for writer in writers: writer.start()
for writer in writers:
    writer.join()
    assert writer.exitcode == 0
victim = multiprocessing.Process(target=killed)
victim.start(); victim.join()
assert victim.exitcode == -signal.SIGKILL
after = database.execute("select count(*) from rows").fetchone()[0]
assert after == before + 3 * 15 * 20, (before, after)
assert database.execute("select count(*) from rows where writer = -1").fetchone()[0] == 0
database.execute("pragma wal_checkpoint(truncate)")
print(database.execute("pragma integrity_check").fetchone()[0])
"#;

/// A repository that is cloned by copying and by hard links, changed, packed and checked.
fn git(mode: Mode) {
    require!(fuse, root, git);
    let mount = Mount::new(mode);
    for number in 0..40 {
        let path = mount.beside("source").join(format!("d{}/f{number}", number % 7));
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, fill(number, 5_000)).unwrap();
    }
    let git = "git -c user.name=n -c user.email=n@n -c init.defaultBranch=main -c gc.auto=0";
    shell(
        &mount.files(""),
        &format!(
            "export HOME=$PWD GIT_CONFIG_NOSYSTEM=1
             cp -r ../../source origin
             cd origin && {git} init -q && {git} add . && {git} commit -qm first
             cd .. && {git} clone -q --no-local origin copied && {git} clone -q origin linked
             cd linked && {git} mv d0 moved && {git} commit -qam second && {git} push -q origin HEAD:b
             {git} gc -q --aggressive && {git} fsck --full --strict
             cd ../copied && {git} fetch -q && {git} merge -q origin/b && {git} fsck --full --strict
             {git} status --porcelain | grep . && exit 1
             diff -r moved ../../../source/d0"
        ),
    );
    assert_healthy(&mount);
}

/// A tree there, changed, and there again by checksum; back it is the same.
fn rsync(mode: Mode) {
    require!(fuse, root, rsync);
    let mount = Mount::new(mode);
    for number in 0..60 {
        let path = mount.beside("source").join(format!("d{}/f{number}", number % 5));
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        let length = usize::try_from(number * 997).unwrap();
        std::fs::write(path, fill(number, length)).unwrap();
    }
    shell(
        &mount.files(""),
        "cd ../..
         ln source/d0/f0 source/link && ln -s d1/f1 source/symlink
         rsync -aHAXS source/ mnt/files/there/
         for file in source/d1/*; do echo changed >> $file; done
         rm -r source/d2
         rsync -aHAXS --checksum --inplace --delete source/ mnt/files/there/
         test -z \"$(rsync -aHAXSn --checksum --delete --itemize-changes source/ mnt/files/there/)\"
         rsync -aHAXS --checksum mnt/files/there/ back/
         diff -r --no-dereference source back",
    );
    assert_healthy(&mount);
}

#[track_caller]
fn assert_healthy(mount: &Mount) {
    assert_eq!(mount.errors(), Vec::<String>::new());
    assert_eq!(mount.status("errors"), "0");
}
