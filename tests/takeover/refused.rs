//! What cannot be exchanged is told in a line, and the daemon stays.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use crate::common::sys::{rename, setxattr, sync_directory, write_and_close};
use crate::common::{Mode, Mount, forks};
use crate::programs::program;
use crate::{any_mode, exchanges, mounted, refusal, upgrade};

fn is_used(mount: &Mount, what: &str) {
    write_and_close(mount.files(what), what.as_bytes()).unwrap();
    assert_eq!(std::fs::read(mount.files(what)).unwrap(), what.as_bytes());
    assert_eq!(exchanges(mount), 0);
}

#[test]
fn a_program_that_cannot_go_on_is_refused_and_the_daemon_stays() {
    crate::require!(fuse, cc);
    let mount = mounted(any_mode(), &[]);
    let check = |name: &str, script: &str, expected: &str| {
        let line = refusal(&mount, Some(&program(&mount, name, script)));
        assert!(line.contains(expected), "{line}");
        is_used(&mount, name);
    };
    check("silent", "return 0;", "is no kvfs that can go on");
    check("crashes", "raise(SIGSEGV);", "it ended with an error");
    check("other", "puts(\"kvfs take-over 999\");", "is no kvfs that can go on");
    check("older", "fputs(\"kvfs: unknown command\\n\", stderr); return 2;", "unknown command");
    check("slow", "pause();", "did not say within 10 seconds");
    let script = mount.beside("script");
    std::fs::write(&script, "#!/bin/sh\nexec kvfs \"$@\"\n").unwrap();
    let script = refusal(&mount, Some(&script));
    assert!(script.contains("it is a script"), "{script}");
    let pipe = mount.beside("pipe");
    nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let pipe = refusal(&mount, Some(&pipe));
    assert!(pipe.contains("it is no file"), "{pipe}");
    let absent = refusal(&mount, Some(Path::new("/nonexistent/kvfs")));
    assert!(absent.contains("/nonexistent/kvfs: No such file"), "{absent}");
    let inside = mount.files("kvfs");
    std::fs::copy("/bin/true", &inside).unwrap();
    std::fs::set_permissions(&inside, PermissionsExt::from_mode(0o755)).unwrap();
    let inside = refusal(&mount, Some(&inside));
    assert!(inside.contains("lies in the mount itself"), "{inside}");
    is_used(&mount, "after");
    upgrade(&mount);
}

#[test]
fn a_mount_that_cannot_be_exchanged_says_why() {
    crate::require!(fuse, root);
    let mount = mounted(Mode::Passthrough, &["--read-only"]);
    let line = refusal(&mount, None);
    assert!(line.contains("it is mounted read-only; stop the programs that use it"), "{line}");
    assert_eq!(exchanges(&mount), 0);
}

/// Whoever runs where the daemon may not has a queue of the kernel that the daemon cannot empty.
#[test]
fn a_daemon_that_may_not_run_everywhere_keeps_its_rings() {
    crate::require!(fuse, root, io_uring);
    let mut mount = mounted(any_mode(), &[]);
    if mount.status("io_uring").starts_with("no") {
        println!("requests come from the device here, which one thread can empty");
        return;
    }
    assert!(mount.unmount().success());
    let all = nix::sched::sched_getaffinity(nix::unistd::Pid::from_raw(0)).unwrap();
    if !all.is_set(1).unwrap() {
        println!("skipped: there is one processor");
        return;
    }
    let mut one = nix::sched::CpuSet::new();
    one.set(0).unwrap();
    let this_thread = nix::unistd::Pid::from_raw(0);
    nix::sched::sched_setaffinity(this_thread, &one).unwrap();
    mount.mount();
    nix::sched::sched_setaffinity(this_thread, &all).unwrap();
    let line = refusal(&mount, None);
    assert!(
        line.contains("programs may run on processor 1, and the daemon has no thread there"),
        "{line}"
    );
    is_used(&mount, "used");
}

#[test]
fn somebody_else_may_not() {
    crate::require!(fuse, root);
    let mount = mounted(Mode::Passthrough, &[]);
    let script = format!(
        "'{}' upgrade '{}' 2>&1; printf 'upgrade\\n' 2>&1 1<>'{}'",
        env!("CARGO_BIN_EXE_kvfs"),
        mount.path().display(),
        mount.join(".kvfs/settings").display()
    );
    let outcome = forks::output(&mut forks::shell_as(Path::new("/"), 65_534, &script));
    let text = String::from_utf8_lossy(&outcome.stdout).into_owned()
        + &String::from_utf8_lossy(&outcome.stderr);
    assert!(!outcome.status.success(), "{text}");
    assert!(
        text.contains("Permission denied") || text.contains("only root and the user"),
        "{text}"
    );
    is_used(&mount, "used");
}

/// A program that asks for an exchange and prints the answer.
const ASKS: &str = "import os, sys\n\
    settings = os.open(sys.argv[1], os.O_RDWR)\n\
    os.write(settings, b'upgrade\\n')\n\
    print(os.read(settings, 4096).decode())\n";

/// Root of a container has number 0, and none of the capabilities that the daemon would run the program with.
#[test]
fn root_without_capabilities_may_not() {
    crate::require!(fuse, root, setpriv, python3);
    let mount = mounted(Mode::Passthrough, &[]);
    let mut command = std::process::Command::new("setpriv");
    command.args(["--bounding-set=-all", "--inh-caps=-all", "python3", "-c", ASKS]);
    let outcome = forks::output(command.arg(mount.join(".kvfs/settings")));
    let text = String::from_utf8_lossy(&outcome.stdout);
    assert!(text.contains("only a process with the daemon's capabilities"), "{outcome:?}");
    is_used(&mount, "used");
    upgrade(&mount);
}

#[test]
fn a_mount_that_would_be_another_one_is_refused() {
    crate::require!(fuse);
    let file = tempfile::NamedTempFile::new().unwrap();
    let write = |text: &str| std::fs::write(file.path(), text).unwrap();
    write("commit_interval = \"2s\"\n");
    let mount = mounted(any_mode(), &["--config", file.path().to_str().unwrap()]);
    write("commit_interval = \"3s\"\n");
    let line = refusal(&mount, None);
    assert!(line.contains("commit_interval would be"), "{line}");
    is_used(&mount, "used");
    write("commit_interval = \"2s\"\n");
    upgrade(&mount);
}

#[test]
fn a_store_that_was_moved_keeps_its_daemon() {
    crate::require!(fuse);
    let mount = mounted(any_mode(), &[]);
    let elsewhere = mount.beside("elsewhere");
    rename(mount.store(), &elsewhere).unwrap();
    let line = refusal(&mount, None);
    assert!(line.contains("the store is not at"), "{line}");
    is_used(&mount, "used");
    rename(&elsewhere, mount.store()).unwrap();
    upgrade(&mount);
}

#[test]
fn what_only_this_daemon_would_finish_is_waited_for() {
    crate::require!(fuse);
    let mount = mounted(any_mode(), &[]);
    write_and_close(mount.files("large"), &vec![7; 8 << 20]).unwrap();
    sync_directory(mount.path()).unwrap();
    let scrub = b"start 100000";
    setxattr(mount.files(""), "user.kvfs.scrub", scrub).unwrap();
    let line = refusal(&mount, None);
    assert!(line.contains("a scrub is running"), "{line}");
    is_used(&mount, "used");
}
