//! The index of prefixes takes more room than the tokens that it is of: it fills no disk, and what it took comes back.

use crate::common::disk::SmallDisk;
use crate::common::sys::{assert_errno, sync_directory, write_and_close};
use crate::common::{Mode, Model, Mount, eventually, fill};

/// A long prompt: 8,192 pages of 32 tokens.
const TOKENS_BYTES: usize = 1 << 20;
const SEQUENCES_MAX: u64 = 20;

fn lacks_room(mount: &Mount) -> bool {
    let reason = mount.try_status("state_reason").unwrap_or_default();
    reason.contains("the index of prefixes leaves")
}

/// Asks for a prefix that nobody has: the index is brought up to date before the answer.
fn ask(mount: &Mount, model: &Model) {
    let hash = "0".repeat(64);
    let path = model.directory(mount).join("prefixes").join("00").join(hash);
    assert_errno(std::fs::metadata(path).map(drop), libc::ENOENT);
}

#[test]
fn tokens_without_end_leave_room_to_what_removes_them() {
    crate::require!(fuse, root, r#loop);
    let disk = SmallDisk::new();
    let store = disk.mountpoint.join("store");
    let mut mount = Mount::of_store(Mode::Passthrough, &store);
    let model = Model::small();
    model.install(&mount);
    let name = |number: u64| format!("prompt-{number}");
    let mut written = 0;
    while !lacks_room(&mount) {
        assert!(written < SEQUENCES_MAX, "the index took no room");
        let path = model.tokens_path(&mount, &name(written));
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        write_and_close(&path, &fill(written, TOKENS_BYTES)).unwrap();
        sync_directory(mount.path()).unwrap();
        // Who asks waits for the index.
        ask(&mount, &model);
        written += 1;
    }
    assert!(written > 1);
    assert!(mount.unmount().success(), "what it cannot take keeps nobody");
    mount.mount();
    // Tokens alone take the rest of the disk, and it is emptied all the same.
    let others = disk.fill_up();
    for number in 0..written {
        std::fs::remove_dir_all(model.sequence(&mount, &name(number))).unwrap();
    }
    sync_directory(mount.path()).unwrap();
    std::fs::remove_file(others).unwrap();
    eventually("the index to be emptied", || {
        ask(&mount, &model);
        (mount.status("state") == "ok").then_some(())
    });
    write_and_close(mount.files("large"), &fill(7, 8 << 20)).unwrap();
    sync_directory(mount.path()).unwrap();
    assert!(mount.unmount().success());
    let metadata_bytes = std::fs::metadata(store.join("meta.redb")).unwrap().len();
    assert!(metadata_bytes < 8 << 20, "{metadata_bytes}");
    crate::kills::assert_sound(&store);
}
