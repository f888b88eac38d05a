//! What was refused or damaged is told.

use std::os::unix::fs::FileExt;
use std::process::Command;

use serde_json::Value;

use crate::common::forks;
use crate::common::sys::{assert_errno, open, rename, sync_directory, write_and_close};
use crate::common::{Mode, Model, Mount};

in_both_modes!(
    what_is_refused_or_damaged_is_told,
    a_mount_for_reading_tells_what_the_store_remembers
);
in_served_mode!(what_finds_no_room_is_counted_and_the_oldest_goes);

fn events(mount: &Mount) -> Vec<Value> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvfs"));
    let output = forks::output(command.args(["log", "--json"]).arg(mount.path()));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn whats(events: &[Value]) -> Vec<&str> {
    events.iter().map(|event| event["what"].as_str().unwrap()).collect()
}

/// A mount that has refused one page and keeps another.
fn with_refusal(mode: Mode) -> (Mount, Model) {
    let (mount, model) = (Mount::with_own_files(mode, &[]), Model::small());
    model.install(&mount);
    write_and_close(model.page_path(&mount, "chat", 0, 0), &model.page(0, 0, 0)).unwrap();
    let temporary = model.page_path(&mount, "chat", 0, 32).with_extension("tmp");
    write_and_close(&temporary, b"no page").unwrap();
    assert_errno(rename(&temporary, model.page_path(&mount, "chat", 0, 32)), libc::EINVAL);
    (mount, model)
}

fn what_is_refused_or_damaged_is_told(mode: Mode) {
    let (mut mount, model) = with_refusal(mode);
    let told = events(&mount);
    assert!(whats(&told).contains(&"refused"), "{told:#?}");
    assert!(whats(&told).contains(&"quarantined"), "{told:#?}");
    let path = "models/small/sequences/chat/000/0000032.safetensors";
    assert!(told.iter().all(|event| event["path"] == path), "{told:#?}");
    sync_directory(mount.path()).unwrap();
    let page = model.page(0, 0, 0);
    let is_it = |object: &std::path::PathBuf| std::fs::read(object).unwrap() == page;
    let object = mount.objects().into_iter().find(is_it).unwrap();
    assert!(mount.unmount().success());
    open(&object, libc::O_RDWR).unwrap().write_all_at(b"x", 8000).unwrap();
    mount.mount();
    let path = model.page_path(&mount, "chat", 0, 0);
    assert_errno(open(&path, libc::O_RDONLY), libc::EIO);
    let after = events(&mount);
    assert_eq!(after[..told.len()], told);
    let damage = &after[told.len()];
    assert_eq!(damage["what"], "damaged");
    assert_eq!(damage["path"], "models/small/sequences/chat/000/0000000.safetensors");
    assert!(damage["reason"].as_str().unwrap().contains("checksum mismatch"), "{damage}");
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvfs"));
    let output = forks::output(command.arg("explain").arg(&path));
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("where: nowhere: no good copy is left: 1 file"), "{text}");
    assert!(text.contains("  damaged "), "{text}");
    // Whoever opens it again and again pushes nothing out of the events ...
    let opened_thrice = |mount: &Mount| {
        for _ in 0..3 {
            assert_errno(open(&path, libc::O_RDONLY), libc::EIO);
        }
        let told = events(mount);
        whats(&told).into_iter().filter(|what| *what == "damaged").count()
    };
    assert_eq!(opened_thrice(&mount), 1);
    // ... in the next mount, too, which knows of the damage.
    assert!(mount.unmount().success());
    mount.mount();
    assert_eq!((mount.status("state"), mount.status("damaged_files")), {
        ("degraded".to_owned(), "1".to_owned())
    });
    assert_eq!(opened_thrice(&mount), 1);
}

fn a_mount_for_reading_tells_what_the_store_remembers(mode: Mode) {
    let (mut mount, _) = with_refusal(mode);
    let told = events(&mount);
    assert!(mount.unmount().success());
    let again = Mount::of_store_with(mode, &["--read-only"], mount.store());
    assert_eq!(events(&again), told);
    assert_errno(open(again.join(".kvfs/events"), libc::O_RDWR), libc::EROFS);
}

fn what_finds_no_room_is_counted_and_the_oldest_goes(mode: Mode) {
    const ROOM: usize = 8192;
    let mount = Mount::with_options(mode, &["--commit-interval", "3600"]);
    let model = Model::small();
    model.install(&mount);
    let page = model.page_path(&mount, "chat", 0, 0);
    let temporary = page.with_extension("tmp");
    write_and_close(&temporary, b"no page").unwrap();
    // Two events each: it was refused, and a copy is in quarantine.
    let refuse = |times: usize| {
        for _ in 0..times {
            assert_errno(rename(&temporary, &page), libc::EINVAL);
        }
    };
    sync_directory(mount.path()).unwrap();
    refuse(ROOM / 2 + 3);
    // Events are no change that a commit is made for.
    write_and_close(mount.files("change"), b"1").unwrap();
    sync_directory(mount.path()).unwrap();
    let told = events(&mount);
    assert_eq!(told.len(), ROOM + 1);
    let lost = &told[ROOM];
    assert_eq!((&lost["what"], &lost["files"]), (&"events lost".into(), &6.into()));
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvfs"));
    let output = forks::output(command.arg("explain").arg(mount.files("never")));
    let complaint = String::from_utf8(output.stderr).unwrap();
    assert!(
        complaint.contains("is not there, and why cannot be told: 6 events found no room"),
        "{complaint}"
    );
    refuse(5);
    let after = events(&mount);
    assert_eq!(after.len(), ROOM + 1);
    assert_eq!(after[0], told[10], "the ring of refusals is full, and forgets its oldest");
    assert_eq!(after[ROOM - 10], *lost, "the other ring does not");
}
