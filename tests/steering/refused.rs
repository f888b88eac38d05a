//! What makes no sense, or cannot change, is refused in one line and changes nothing.

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;

use crate::common::sys::assert_errno;
use crate::common::{Mode, Mount};
use crate::{assert_refused, complaint, kvfs, set, setting};

in_both_modes!(
    values_that_make_no_sense,
    what_a_mount_was_made_without,
    a_mount_that_is_not_there,
    requests_of_other_programs,
    many_requests_through_one_descriptor,
    what_controls_a_terminal,
);

fn values_that_make_no_sense(mode: Mode) {
    let mount = Mount::with_options(mode, &["--ram", "64M", "--cold", "zstd", "--ssd", "1G"]);
    let check = |settings: &[&str], expected: &str| assert_refused(&mount, settings, expected);
    let no_size = "is no size: write bytes or a number with K, M, G or T";
    for text in ["-1", "18446744073709551616", "4X", "", "many", "1.5"] {
        check(&[&format!("ram={text}")], no_size);
        check(&[&format!("ssd={text}")], no_size);
    }
    check(&["ssd=0"], "ssd is 0: must be at least 16777216 bytes");
    check(&["ram=16383T"], "this machine has");
    check(&["ram=18446744073709551615"], "this machine has");
    check(&["verify=twice"], "verify: \"twice\" is neither first, always nor never");
    check(&["on_corrupt=maybe"], "on_corrupt: \"maybe\" is neither miss nor eio");
    check(&["log_level=loud"], "log_level \"loud\": must be off, error");
    check(&["log_level=info/a/b"], "what follows the first / may have no other /");
    check(&["log_level="], "log_level \"\": says no level");
    check(&["log_level=,,"], "log_level \",,\": says no level");
    check(&["cold=q8_0"], "lossy encodings are a model's choice");
    check(&["rma=1G"], "unknown setting \"rma\": did you mean ram?");
    check(&["config=/c"], "unknown setting \"config\"");
    check(&["ram"], "\"ram\" is no setting: write KEY=VALUE");
    check(&["ram=8M", "ram=16M"], "ram is given twice");
    check(&["ram=8M", "verify=twice"], "verify: \"twice\"");
    check(
        &["verify=always", "commit_interval=17", "ram=8M"],
        "commit_interval cannot change while the mount is used",
    );
    let live = "What can change: ram, pack, ssd, ssd_writes, cold, remote_bandwidth, verify";
    check(&["threads=64"], live);
    check(&["ssd_writes=1G/day"], "ssd_writes is set, but not both of ram and remote");
    check(&["ssd_writes=1G/hour"], "ssd_writes: \"1G/hour\" is no size for a day");
    check(&["ssd_writes=1K"], "ssd_writes is 1K: must be at least 1048576 bytes a day");
    check(&["cold=none"], "ssd is set, but neither remote nor cold");
    assert_eq!(mount.status_number("ram_budget_bytes"), 64 << 20);
    assert_eq!(mount.status_number("ssd_budget_bytes"), 1 << 30);
    // What is so already is no change, also where there is no value.
    let log = setting(&mount, "log_file").0;
    let nothing = [
        "remote",
        "remote_key",
        "remote_key_command",
        "metrics_addr",
        "metrics_host",
        "rebuild_from",
    ];
    for name in nothing {
        assert_eq!(setting(&mount, name).0, "none", "{name}");
        set(&mount, &[&format!("{name}=none")]);
        check(&[&format!("{name}=/x")], &format!("{name} cannot change"));
    }
    set(&mount, &[&format!("log_file={log}")]);
    check(&["log_file=/x"], "log_file cannot change");
    let passthrough = if mode == Mode::Passthrough { "yes" } else { "no" };
    set(&mount, &[&format!("passthrough={passthrough}")]);
}

fn what_a_mount_was_made_without(mode: Mode) {
    let mount = Mount::new(mode);
    assert_refused(
        &mount,
        &["ram=1G"],
        "ram: this mount has no memory tier to change: mount it again",
    );
    assert_refused(
        &mount,
        &["cold=zstd", "ssd=1G"],
        "this mount was made with neither remote nor cold",
    );
    assert_refused(&mount, &["ssd=1G"], "ssd is set, but neither remote nor cold");
    assert_refused(&mount, &["remote_bandwidth=1M"], "remote_bandwidth is set, but no remote");
    set(&mount, &["ram=0", "ssd=none", "cold=none", "remote_bandwidth=none"]);
    assert_eq!(setting(&mount, "ram"), ("0".to_owned(), "set live".to_owned()));
}

fn a_mount_that_is_not_there(mode: Mode) {
    let mut mount = Mount::with_options(mode, &["--ram", "64M"]);
    let check = |path: &std::path::Path, expected: &str| {
        for words in [&["config", "set", "ram=1M"][..], &["config", "show"][..]] {
            let ended = kvfs(words, path);
            assert!(!ended.status.success());
            assert!(complaint(&ended).contains(expected), "{}", complaint(&ended));
        }
    };
    check(mount.store(), "is not a mountpoint of kvfs");
    check(&mount.join("files"), "is not a mountpoint of kvfs");
    set(&mount, &["ram=32M"]);
    mount.kill();
    check(mount.path(), "is gone: mount the store again");
    // What was set lasted as long as the daemon.
    mount.mount();
    assert_eq!(setting(&mount, "ram"), ("64M".to_owned(), "option".to_owned()));
}

fn requests_of_other_programs(mode: Mode) {
    let mount = Mount::with_options(mode, &["--ram", "64M"]);
    let path = mount.join(".kvfs/settings");
    let ask = |request: &[u8]| {
        let mut file = File::options().read(true).write(true).open(&path).unwrap();
        file.write_all(request).unwrap();
        std::io::read_to_string(file).unwrap()
    };
    assert_eq!(ask(b"ram=8M\nverify=always\n"), "ok\n");
    assert_eq!(setting(&mount, "verify").0, "always");
    assert_eq!(ask(b"ram"), "error: \"ram\" is no setting: write KEY=VALUE\n");
    assert_eq!(ask(b"\xff=1"), "error: the request is not UTF-8\n");
    let mut file = File::options().read(true).write(true).open(&path).unwrap();
    assert_errno(file.write_all(&vec![b'\n'; 70_000]), libc::EFBIG);
    assert_errno(File::options().write(true).open(&path), libc::EPERM);
    assert_errno(std::fs::write(&path, "ram=1M"), libc::EPERM);
    assert_eq!(mount.status_number("ram_budget_bytes"), 8 << 20);
}

fn many_requests_through_one_descriptor(mode: Mode) {
    let mount = Mount::with_options(mode, &["--ram", "64M"]);
    let path = mount.join(".kvfs/settings");
    let requests = [
        ("ram=20M", "ok\n"),
        ("ram=21M\n", "ok\n"),
        ("ram=bad", "error: ram: \"bad\" is no size"),
        ("ram=22M\nverify=always\n", "ok\n"),
    ];
    let converse = |options: &mut std::fs::OpenOptions, is_begun: bool| {
        let mut file = options.read(true).write(true).open(&path).unwrap();
        if is_begun {
            // Some of the JSON, as a program that looks before it asks.
            file.read_exact(&mut [0; 100]).unwrap();
        }
        for (request, expected) in requests {
            file.write_all(request.as_bytes()).unwrap();
            let mut answer = String::new();
            file.read_to_string(&mut answer).unwrap();
            assert!(answer.starts_with(expected), "{request:?}: {answer:?}");
            // The same from the beginning, as pread(2) asks.
            let mut again = [0; 4096];
            let length = file.read_at(&mut again, 0).unwrap();
            assert_eq!(String::from_utf8_lossy(&again[..length]), answer, "{request:?}");
        }
        assert_eq!(mount.status_number("ram_budget_bytes"), 22 << 20);
    };
    converse(&mut File::options(), false);
    converse(&mut File::options(), true);
    converse(File::options().append(true), false);
}

fn what_controls_a_terminal(mode: Mode) {
    let mount = Mount::with_options(mode, &["--ram", "64M"]);
    let title = "log_level=info/\u{1b}]0;title\u{7}";
    let expected = "log_level has control characters: info/\\u{1b}]0;title\\u{7}";
    assert_refused(&mount, &[title], expected);
    assert_refused(&mount, &["log_level=info/\u{7f}"], "log_level has control characters");
    assert_refused(&mount, &["log_level=info/\u{9b}2J"], "log_level has control characters");
    assert!(!mount.log().contains('\u{1b}'));
}
