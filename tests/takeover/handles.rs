//! What is open, mapped, locked or has no name goes on.

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::process::{Command, Stdio};

use nix::fcntl::{Flock, FlockArg};

use crate::common::model::Model;
use crate::common::sys::{duplicate, map_mut, rename, write_and_close};
use crate::common::{Mode, forks};
use crate::{mounted, upgrade};

fn check(mode: Mode, options: &[&str]) {
    let mut mount = mounted(mode, options);
    let open = |name: &str| {
        let mut how = OpenOptions::new();
        how.read(true).write(true).create(true).open(mount.files(name)).unwrap()
    };
    let read = |file: &File| {
        let mut bytes = [0; 5];
        file.read_exact_at(&mut bytes, 0).unwrap();
        bytes
    };
    let mut written = open("written");
    written.write_all(b"first").unwrap();
    let copy = duplicate(&written);
    let unlinked = open("unlinked");
    unlinked.write_all_at(b"gone!", 0).unwrap();
    std::fs::remove_file(mount.files("unlinked")).unwrap();
    write_and_close(mount.files("at-rest"), b"quiet").unwrap();
    let reader = File::open(mount.files("at-rest")).unwrap();
    let replaced = File::open(mount.files("at-rest")).unwrap();
    let mapped = (mode == Mode::Passthrough).then(|| {
        let file = open("mapped");
        file.set_len(4096).unwrap();
        map_mut(&file)
    });
    let locked = Flock::lock(open("locked"), FlockArg::LockExclusiveNonblock).unwrap();
    write_and_close(mount.files("truncated"), b"old bytes").unwrap();
    let mut truncated = File::create(mount.files("truncated")).unwrap();
    truncated.write_all(b"new").unwrap();

    upgrade(&mount);
    assert_eq!(read(&copy), *b"first");
    written.write_all(b" second").unwrap();
    assert_eq!(std::fs::read(mount.files("written")).unwrap(), b"first second");
    assert_eq!(read(&unlinked), *b"gone!");
    unlinked.write_all_at(b"still", 0).unwrap();
    assert_eq!((read(&unlinked), read(&reader)), (*b"still", *b"quiet"));
    assert_eq!(unlinked.metadata().unwrap().len(), 5);
    let other = open("locked");
    assert!(Flock::lock(other, FlockArg::LockExclusiveNonblock).is_err(), "it is locked");
    drop(locked);
    assert!(Flock::lock(open("locked"), FlockArg::LockExclusiveNonblock).is_ok());
    if let Some(mut mapped) = mapped {
        mapped[0] = 7;
        assert_eq!(std::fs::read(mount.files("mapped")).unwrap()[0], 7);
    }
    truncated.write_all(b"er").unwrap();
    drop(truncated);
    assert_eq!(std::fs::read(mount.files("truncated")).unwrap(), b"newer");
    write_and_close(mount.files("at-rest.new"), b"other").unwrap();
    rename(mount.files("at-rest.new"), mount.files("at-rest")).unwrap();

    upgrade(&mount);
    assert_eq!(read(&replaced), *b"quiet");
    assert_eq!(std::fs::read(mount.files("at-rest")).unwrap(), b"other");
    assert_eq!(read(&unlinked), *b"still");
    written.sync_all().unwrap();
    drop((written, copy, unlinked, reader, replaced));
    mount.remount();
    assert_eq!(std::fs::read(mount.files("written")).unwrap(), b"first second");
    assert_eq!(std::fs::read(mount.files("truncated")).unwrap(), b"newer");
    assert!(!mount.files("unlinked").exists());
}

#[test]
fn what_is_open_goes_on_where_the_kernel_reads_files() {
    crate::require!(fuse, root);
    check(Mode::Passthrough, &[]);
    check(Mode::Passthrough, &["--pack", "0"]);
    check(Mode::Passthrough, &["--ram", "64M"]);
}

#[test]
fn what_is_open_goes_on_where_the_daemon_reads_files() {
    crate::require!(fuse);
    check(Mode::Served, &[]);
    check(Mode::Served, &["--ram", "64M"]);
}

#[test]
fn a_descriptor_of_another_process_goes_on() {
    crate::require!(fuse, root);
    let mount = mounted(Mode::Passthrough, &[]);
    write_and_close(mount.files("read"), b"by another").unwrap();
    let mut command = Command::new("sh");
    // Its third descriptor is opened before the exchange, and read after it.
    command.args(["-c", "exec 3<\"$0\"; echo open; read line; cat <&3"]).arg(mount.files("read"));
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = forks::spawn(&mut command).unwrap();
    let mut output = child.stdout.take().unwrap();
    let mut open = [0; 5];
    output.read_exact(&mut open).unwrap();
    upgrade(&mount);
    child.stdin.take().unwrap().write_all(b"go\n").unwrap();
    let mut text = String::new();
    output.read_to_string(&mut text).unwrap();
    assert!(child.wait().unwrap().success());
    assert_eq!((&open, text.as_str()), (b"open\n", "by another"));
}

#[test]
fn a_page_that_is_being_written_in_place_appears_when_it_is_closed() {
    crate::require!(fuse, root);
    let mount = mounted(Mode::Passthrough, &[]);
    let model = Model::small();
    model.install(&mount);
    let (page, bytes) = (model.page_path(&mount, "chat", 0, 0), model.page(0, 0, 3));
    std::fs::create_dir_all(page.parent().unwrap()).unwrap();
    let mut file = File::create(&page).unwrap();
    file.write_all(&bytes[..bytes.len() / 2]).unwrap();
    upgrade(&mount);
    assert!(!page.exists(), "it is not whole");
    file.write_all(&bytes[bytes.len() / 2..]).unwrap();
    drop(file);
    assert!(std::fs::read(&page).unwrap() == bytes);
}

/// Whoever follows the events reads each of them once.
#[test]
fn events_are_followed() {
    crate::require!(fuse, root);
    let mount = mounted(Mode::Passthrough, &[]);
    let model = Model::small();
    model.install(&mount);
    let damage = |sequence: &str| {
        let page = model.page_path(&mount, sequence, 0, 0);
        std::fs::create_dir_all(page.parent().unwrap()).unwrap();
        let mut bytes = model.page(0, 0, 1);
        *bytes.last_mut().unwrap() ^= 1;
        // It is refused, which is an event.
        let _ = write_and_close(&page, &bytes);
    };
    let events = File::open(mount.join(".kvfs/events")).unwrap();
    let (mut text, mut at) = (String::new(), 0);
    let mut follow = |at: &mut u64| {
        let mut bytes = [0; 200];
        while let count @ 1.. = events.read_at(&mut bytes, *at).unwrap() {
            text.push_str(std::str::from_utf8(&bytes[..count]).unwrap());
            *at += count as u64;
        }
        text.matches("\"refused\"").count()
    };
    damage("a");
    assert_eq!(follow(&mut at), 1);
    damage("b");
    upgrade(&mount);
    assert_eq!(follow(&mut at), 2);
    upgrade(&mount);
    damage("c");
    assert_eq!(follow(&mut at), 3);
    let all = std::fs::read_to_string(mount.join(".kvfs/events")).unwrap();
    assert_eq!(all, text);
}

#[test]
fn blocks_stay_registered_until_they_are_withdrawn() {
    crate::require!(fuse, root);
    let mount = mounted(Mode::Passthrough, &[]);
    Model::small().install(&mount);
    write_and_close(mount.files("pool"), &vec![0; 1 << 20]).unwrap();
    let block = mount.join(format!("models/small/blocks/{}.000", "ab".repeat(32)));
    let register = |offset: u32| {
        let text = format!(
            r#"{{"file":"files/pool","layer":0,"shape":[2,2,1],"sizes":[2048,2048],"offsets":[0,0,0,{offset}]}}"#
        );
        write_and_close(&block, text.as_bytes()).unwrap();
        std::fs::read_to_string(&block).unwrap()
    };
    let first = register(0);
    upgrade(&mount);
    assert_eq!(std::fs::read_to_string(&block).unwrap(), first);
    assert_eq!(mount.status("registered_blocks"), "1");
    std::fs::remove_file(&block).unwrap();
    let second = register(4096);
    let number = |text: &str| {
        serde_json::from_str::<serde_json::Value>(text).unwrap()["registration"].as_u64().unwrap()
    };
    assert!(number(&second) > number(&first), "{first} {second}");
    upgrade(&mount);
    assert_eq!(std::fs::read_to_string(&block).unwrap(), second);
    // They end with the bytes that they describe.
    std::fs::remove_file(mount.files("pool")).unwrap();
    assert!(!block.exists());
}
