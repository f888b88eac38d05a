//! The program as people and mount(8) call it: a real mount from start to end.
//!
//! Without /dev/fuse these tests are skipped; if `KVFS_REQUIRE` names fuse that is a failure.

#![expect(clippy::unwrap_used, reason = "a test ends where it cannot go on")]

#[path = "common/skips.rs"]
mod skips;

use std::fs::{File, OpenOptions};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// A store and a mountpoint of their own, unmounted at the end.
struct Place {
    base: tempfile::TempDir,
    mountpoint: PathBuf,
}

impl Place {
    /// None, with the reason printed, where nothing can be mounted.
    fn new() -> Option<Place> {
        let opened = OpenOptions::new().read(true).write(true).open("/dev/fuse");
        let missing = opened.err().map(|error| format!("/dev/fuse: {error}"));
        if !skips::is_there("fuse", missing) {
            return None;
        }
        let base = tempfile::tempdir().unwrap();
        let mountpoint = base.path().canonicalize().unwrap().join("mount point");
        std::fs::create_dir(&mountpoint).unwrap();
        Some(Place { base, mountpoint })
    }

    fn command(&self, name: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvfs"));
        command.arg0(name).current_dir(self.base.path());
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("KVFS_") {
                command.env_remove(name);
            }
        }
        command.env("KVFS_LOG_FILE", self.base.path().join("log"));
        command
    }

    /// Runs `kvfs` with arguments in which `STORE` and `MNT` stand for this place.
    fn run(&self, line: &str) -> Output {
        self.run_as("kvfs", line)
    }

    fn run_as(&self, name: &str, line: &str) -> Output {
        let mut command = self.command(name);
        for word in line.split(' ') {
            match word {
                "MNT" => command.arg(&self.mountpoint),
                "STORE" => command.arg(self.base.path().join("store")),
                word => command.arg(word),
            };
        }
        command.output().unwrap()
    }

    /// Runs, expects an exit code, and a text in what is printed.
    fn check(&self, name: &str, line: &str, exit: i32, expected: &str) {
        let output = self.run_as(name, line);
        let said = String::from_utf8_lossy(&output.stderr).into_owned()
            + &String::from_utf8_lossy(&output.stdout);
        assert_eq!(output.status.code(), Some(exit), "{name} {line}: {said}\n{}", self.log());
        assert!(said.contains(expected), "{name} {line}: {said}");
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.base.path().join("log")).unwrap_or_default()
    }

    fn is_mounted(&self) -> bool {
        let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
        let escaped = self.mountpoint.to_str().unwrap().replace(' ', "\\040");
        mounts.lines().any(|line| line.contains(&escaped) && line.contains(" - fuse.kvfs "))
    }

    fn signal_daemon(&self, signal: &str) {
        let status = self.run("status --json MNT");
        let status: serde_json::Value = serde_json::from_slice(&status.stdout).unwrap();
        let pid = status["pid"].to_string();
        assert!(Command::new("kill").args([signal, &pid]).status().unwrap().success());
    }

    fn wait_for_log(&self, text: &str) {
        let end = Instant::now() + Duration::from_secs(20);
        while !self.log().contains(text) {
            assert!(Instant::now() < end, "no {text:?} in the log:\n{}", self.log());
            sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if self.is_mounted() {
            self.run("umount --force MNT");
        }
    }
}

#[test]
fn mount_ask_sync_and_unmount() {
    let Some(place) = Place::new() else { return };
    place.check("kvfs", "mount STORE MNT", 0, "");
    assert!(place.is_mounted());
    place.check("kvfs", "status MNT", 0, "state: ok");
    place.check("kvfs", "status --json MNT", 0, "\"uptime_seconds\": ");
    place.check("kvfs", "sync MNT", 0, "");
    place.check("kvfs", "mount STORE MNT", 1, "already has the store");
    std::fs::create_dir(place.base.path().join("second")).unwrap();
    place.check("kvfs", "mount STORE second", 1, "is already mounted at");
    place.check("kvfs", "fsck STORE", 1, "is in use by another kvfs");
    place.check("kvfs", "umount MNT", 0, "");
    assert!(!place.is_mounted());
    assert!(place.log().contains("everything is durable"));
    place.check("kvfs", "umount MNT", 1, "is not a mountpoint of kvfs");
    place.check("kvfs", "mount STORE MNT", 0, "");
    assert!(
        Command::new("fusermount3").arg("-u").arg(&place.mountpoint).status().unwrap().success()
    );
    place.check("kvfs", "mount STORE MNT", 0, "");
    place.check("kvfs", "umount MNT", 0, "");
    place.check("kvfs", "status MNT", 1, "is not a mountpoint of kvfs");
    place.check("kvfs", "fsck STORE", 0, "no errors");
}

#[test]
fn a_used_mount_stays_and_its_users_are_named() {
    let Some(place) = Place::new() else { return };
    place.check("kvfs", "mount STORE MNT", 0, "");
    let open = File::open(&place.mountpoint).unwrap();
    place.check("kvfs", "umount MNT", 1, &format!("(pid {}, open file", std::process::id()));
    assert!(place.is_mounted());
    place.check("kvfs", "umount --lazy MNT", 0, "goes on until the last user ends");
    assert!(!place.is_mounted());
    drop(open);
    place.wait_for_log("everything is durable");
}

#[test]
fn a_mount_is_found_behind_a_link_and_by_a_store_that_was_moved() {
    let Some(place) = Place::new() else { return };
    place.check("kvfs", "mount STORE MNT", 0, "");
    let [store, moved, second, link] =
        ["store", "moved", "second", "link"].map(|name| place.base.path().join(name));
    std::fs::create_dir(second).unwrap();
    nix::fcntl::renameat(nix::fcntl::AT_FDCWD, &store, nix::fcntl::AT_FDCWD, &moved).unwrap();
    let told = format!("is already mounted at {}", place.mountpoint.display());
    place.check("kvfs", "mount moved second", 1, &told);
    nix::fcntl::renameat(nix::fcntl::AT_FDCWD, &moved, nix::fcntl::AT_FDCWD, &store).unwrap();
    std::os::unix::fs::symlink(&place.mountpoint, link).unwrap();
    place.check("kvfs", "log link", 0, "");
    place.check("kvfs", "log second", 1, "is not in a mount of kvfs");
    place.check("kvfs", "umount MNT", 0, "");
}

#[test]
fn a_mount_inside_another_is_named() {
    let Some(place) = Place::new() else { return };
    place.check("kvfs", "mount STORE MNT", 0, "");
    let inside = place.mountpoint.join("files/inside");
    std::fs::create_dir(&inside).unwrap();
    let mut mount = place.command("kvfs");
    mount.args(["mount", "other"]).arg(&inside);
    assert!(mount.status().unwrap().success());
    let told = format!("another mount lies in it, at {}", inside.display());
    place.check("kvfs", "umount MNT", 1, &told);
    assert!(place.command("kvfs").arg("umount").arg(&inside).status().unwrap().success());
    place.check("kvfs", "umount MNT", 0, "");
}

#[test]
fn a_copy_of_the_mount_in_another_namespace_is_told_of() {
    let Some(place) = Place::new() else { return };
    let made = Command::new("unshare").args(["-m", "true"]).output();
    let can_unshare = made.is_ok_and(|output| output.status.success());
    if !skips::is_there("unshare", (!can_unshare).then(|| "unshare -m fails".to_owned())) {
        return;
    }
    place.check("kvfs", "mount STORE MNT", 0, "");
    let script = "echo; exec sleep 60";
    let mut container = Command::new("unshare")
        .args(["-m", "--propagation", "private", "sh", "-c", script])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = [0; 1];
    std::io::Read::read_exact(container.stdout.as_mut().unwrap(), &mut line).unwrap();
    let told = format!("another mount namespace has it still (process {})", container.id());
    let begun = Instant::now();
    place.check("kvfs", "umount MNT", 1, &told);
    assert!(begun.elapsed() < Duration::from_secs(30) && !place.is_mounted());
    container.kill().unwrap();
    container.wait().unwrap();
    place.wait_for_log("everything is durable");
}

#[test]
fn a_dead_daemon_is_cleared_by_mount_and_by_umount() {
    let Some(place) = Place::new() else { return };
    place.check("kvfs", "mount STORE MNT", 0, "");
    place.signal_daemon("-KILL");
    place.check("kvfs", "mount STORE MNT", 0, "had a mount whose daemon is gone: unmounted");
    place.signal_daemon("-KILL");
    place.check("kvfs", "umount MNT", 0, "was already gone: unmounted");
    assert!(!place.is_mounted());
}

#[test]
fn a_signal_unmounts_and_a_second_one_cuts_users_off() {
    let Some(place) = Place::new() else { return };
    place.check("kvfs", "mount STORE MNT", 0, "");
    place.signal_daemon("-TERM");
    place.wait_for_log("everything is durable");
    assert!(!place.is_mounted());

    std::fs::remove_file(place.base.path().join("log")).unwrap();
    place.check("kvfs", "mount STORE MNT", 0, "");
    let open = File::open(&place.mountpoint).unwrap();
    place.signal_daemon("-TERM");
    place.wait_for_log("in use by");
    assert!(place.is_mounted());
    place.signal_daemon("-INT");
    place.wait_for_log("everything is durable");
    drop(open);
}

#[test]
fn an_interrupted_benchmark_leaves_nothing_behind() {
    let Some(place) = Place::new() else { return };
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let mut bench = place
        .command("kvfs")
        .args(["bench", "fs", "--quick", "--dir"])
        .arg(directory.path())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mounted = || {
        let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
        mounts.contains(directory.path().to_str().unwrap())
    };
    let end = Instant::now() + Duration::from_secs(60);
    while !mounted() {
        assert!(bench.try_wait().unwrap().is_none() && Instant::now() < end, "it never mounted");
        sleep(Duration::from_millis(2));
    }
    let pid = bench.id().to_string();
    assert!(Command::new("kill").args(["-INT", &pid]).status().unwrap().success());
    assert_eq!(bench.wait().unwrap().code(), Some(128 + 2));
    assert!(!mounted());
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
}

#[test]
fn every_benchmark_measures() {
    let Some(place) = Place::new() else { return };
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    for what in ["fs", "attention", "tiers", "engines", "names", "small"] {
        let mut bench = place.command("kvfs");
        bench.args(["bench", what, "--quick", "--json", "--allow-served", "--dir"]);
        let output = bench.arg(directory.path()).output().unwrap();
        let (status, error) = (output.status, String::from_utf8_lossy(&output.stderr));
        assert!(status.success(), "{what}: {error}");
        let found: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        let figures = found["figures"].as_array().unwrap();
        let is_measured = |figure: &serde_json::Value| figure["value"].as_f64() >= Some(0.0);
        assert!(!figures.is_empty() && figures.iter().all(is_measured), "{what}: {figures:#?}");
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0, "{what}");
    }
}

#[test]
fn what_mount_and_umount_of_the_system_expect() {
    let Some(place) = Place::new() else { return };
    let mount = |line: &str, exit, expected: &str| place.check("mount.kvfs", line, exit, expected);
    mount("STORE MNT -f -o rw", 0, "");
    assert!(!place.is_mounted());
    mount("STORE MNT -o rw,noexec,_netdev,nofail,x-systemd.automount", 0, "");
    assert!(place.is_mounted());
    mount("STORE MNT -o rw", 32, "already has the store");
    mount("STORE MNT -o rw,nvme=1G", 1, "unknown mount option \"nvme=1G\"");
    mount("STORE", 1, "usage: mount.kvfs");
    place.check("umount.fuse.kvfs", "MNT -v", 0, "");
    place.check("umount.fuse.kvfs", "MNT", 32, "is not a mountpoint of kvfs");
    place.check("kvfs", "STORE MNT -o rw,dev,suid", 0, "");
    place.check("umount.fuse.kvfs", "MNT -l", 0, "");
}

#[test]
fn a_mount_that_cannot_be_says_why() {
    let Some(place) = Place::new() else { return };
    let base: &Path = place.base.path();
    for directory in ["full", "other", "other/inside", "foreign"] {
        std::fs::create_dir(base.join(directory)).unwrap();
    }
    std::fs::write(base.join("full/file"), "").unwrap();
    std::fs::write(base.join("foreign/FORMAT"), "kvfs store 99\n").unwrap();
    let check = |line: &str, exit, expected: &str| place.check("kvfs", line, exit, expected);
    check("mount STORE absent", 1, "does not exist: make the directory first");
    check("mount STORE log", 1, "mountpoint");
    check("mount STORE full", 1, "is not empty");
    check("mount full MNT", 1, "is not a kvfs store");
    check("mount foreign MNT", 1, "format");
    check("mount other other/inside", 1, "is inside the store");
    check("mount full/store full", 1, "is inside the mountpoint");
    check("mount other other", 1, "both store and mountpoint");
    let (mountpoint, store) = (place.mountpoint.display(), base.join("store"));
    let inside = |option: &str, path: &str, expected: &str| {
        let output = place.command("kvfs");
        refused_in(output, (option, Path::new(path)), [&store, &place.mountpoint], expected);
    };
    let hidden = "is inside the mountpoint";
    inside("--remote", &format!("{mountpoint}"), hidden);
    inside("--remote", &format!("{mountpoint}/files/r"), hidden);
    inside("--log", &format!("{mountpoint}/log"), hidden);
    inside("--remote", &format!("{}/r", store.display()), "is inside the store");
    std::os::unix::fs::symlink(place.mountpoint.join("files"), base.join("link")).unwrap();
    inside("--remote", base.join("link/r").to_str().unwrap(), hidden);
    assert_eq!(place.mountpoint.read_dir().unwrap().count(), 0);
    assert!(!store.exists() && !base.join("KVFS-REMOTE").exists());
    check("mount --config absent.toml STORE MNT", 1, "absent.toml");
    check("mount --commit-interval 0 STORE MNT", 2, "must be from");
    check("mount --nvme 1G STORE MNT", 2, "unexpected argument");
    check("mount --ssd 1G STORE MNT", 2, "ssd is set, but neither remote nor cold");
    check("mount --remote gs://bucket STORE MNT", 2, "remote: ");
    check("mount --ram 1X STORE MNT", 2, "is no size");
    check("mount --ram 100T STORE MNT", 2, "of memory, give less");
    check("umount /proc", 1, "is a mount of type proc, not of kvfs");
    assert!(!place.is_mounted());
}

/// A mount with one option more, which says why it is not made. A relative path is where the test's directory is.
fn refused_in(
    mut command: Command, (option, path): (&str, &Path), places: [&Path; 2], expected: &str,
) {
    command.env_remove("KVFS_LOG_FILE");
    let output = command.arg("mount").arg(option).arg(path).args(places).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{option} {}: {said}", path.display());
    assert!(said.contains(expected), "{option} {}: {said}", path.display());
}

#[test]
fn a_remote_that_appears_in_its_own_mount_never_answers() {
    let Some(place) = Place::new() else { return };
    let link = place.base.path().join("link");
    let mut command = place.command("kvfs");
    command.args(["mount", "--rebuild-from", "none", "--ssd", "16M", "--remote"]);
    let output = command.arg(&link).arg(place.base.path().join("store")).arg(&place.mountpoint);
    let output = output.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let remote = place.mountpoint.join("files/r");
    std::fs::create_dir(&remote).unwrap();
    std::os::unix::fs::symlink(&remote, &link).unwrap();
    std::fs::write(place.mountpoint.join("files/x"), vec![7; 1 << 20]).unwrap();
    let status = || std::fs::read_to_string(place.mountpoint.join(".kvfs/status")).unwrap();
    let end = Instant::now() + Duration::from_secs(60);
    while !status().contains("lies in the mount of the store whose bytes it is to keep") {
        assert!(Instant::now() < end && !status().contains("remote_state: up"), "{}", status());
        sleep(Duration::from_millis(50));
    }
    assert_eq!(remote.read_dir().unwrap().count(), 0);
    place.check("kvfs", "umount MNT", 0, "");
}

#[test]
fn what_is_no_file_is_not_waited_for() {
    let Some(place) = Place::new() else { return };
    place.check("kvfs", "mount STORE MNT", 0, "");
    let base = place.base.path();
    let made = Command::new("mkfifo").arg(base.join("fifo")).status().unwrap();
    assert!(made.success());
    let model = place.mountpoint.join("models/toy").display().to_string();
    let model = model.replace(' ', "\u{1}");
    let check = |line: &str| {
        let mut command = place.command("kvfs");
        command.args(line.split(' ').map(|word| word.replace('\u{1}', " ")));
        let output = command.output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(said.contains("fifo: is no regular file"), "{line}: {said}");
    };
    check(&format!("create --from fifo {model}"));
    place.check("kvfs", "umount MNT", 0, "");
}

#[test]
fn nothing_is_left_of_a_file_that_a_signal_kept_from_its_name() {
    let Some(place) = Place::new() else { return };
    place.check("kvfs", "mount STORE MNT", 0, "");
    let model = place.mountpoint.join("models/toy");
    let shape = ["--layers", "2", "--kv-heads", "64", "--head-dim", "128", "--layout", "nhd"];
    let created = place.command("kvfs").arg("create").args(shape).arg(&model).output().unwrap();
    assert!(created.status.success(), "{}", String::from_utf8_lossy(&created.stderr));
    let sequence = model.join("sequences/a");
    let tokens = 1000_u32;
    for layer in ["000", "001"] {
        std::fs::create_dir_all(sequence.join(layer)).unwrap();
        // K and V of f16.
        let rows = vec![1; 2 * 2 * 64 * 128 * tokens as usize];
        let tail = sequence.join(layer).join("0000000.tail");
        let tail = OpenOptions::new().append(true).create(true).open(tail);
        std::io::Write::write_all(&mut tail.unwrap(), &rows).unwrap();
    }
    let ids: Vec<u8> = (0..tokens).flat_map(u32::to_le_bytes).collect();
    std::fs::write(sequence.join("tokens"), ids).unwrap();
    // A FUSE filesystem has no files without a name, a local disk has them.
    for directory in [place.base.path().join("out"), place.mountpoint.join("files/out")] {
        std::fs::create_dir(&directory).unwrap();
        for signal in ["INT", "TERM"] {
            stop_while_it_writes(&place, [&sequence, &directory], signal);
            let left: Vec<_> = directory.read_dir().unwrap().collect();
            assert!(left.is_empty(), "{signal}: {left:?}");
        }
    }
    place.check("kvfs", "umount MNT", 0, "");
}

/// Exports a sequence into a directory, and sends a signal as soon as a file there is open.
fn stop_while_it_writes(place: &Place, [sequence, directory]: [&Path; 2], signal: &str) {
    for _ in 0..20 {
        let mut command = place.command("kvfs");
        command.arg("export").arg(sequence).arg(directory.join("a.bin"));
        let mut child = command.stdout(Stdio::null()).spawn().unwrap();
        let files = PathBuf::from(format!("/proc/{}/fd", child.id()));
        let writes = || {
            let open = files.read_dir().into_iter().flatten().flatten();
            open.filter_map(|file| file.path().read_link().ok()).any(|to| to.starts_with(directory))
        };
        while child.try_wait().unwrap().is_none() {
            if writes() {
                let id = child.id().to_string();
                Command::new("kill").args(["-s", signal, &id]).status().unwrap();
                break;
            }
        }
        if !child.wait().unwrap().success() {
            return;
        }
        // It was faster.
        std::fs::remove_file(directory.join("a.bin")).unwrap();
    }
    panic!("it was always faster than SIG{signal}");
}
