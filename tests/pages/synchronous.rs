//! `O_SYNC` and `O_DSYNC`: what a write has returned for is there after a crash, and its name too.

use std::os::unix::fs::FileExt;

use crate::common::disk::SmallDisk;
use crate::common::sys::{open, sync_directory, write, write_and_close};
use crate::common::{Mode, Model, Mount, fill};

in_both_modes!(
    a_synchronous_write_survives,
    a_synchronous_row_survives,
    nothing_synchronous_is_in_memory,
    it_survives_a_power_cut,
);

const SYNCHRONOUS: [i32; 2] = [libc::O_SYNC, libc::O_DSYNC];

/// Commits only when asked.
const OPTIONS: [&str; 2] = ["--commit-interval", "3600"];

fn a_synchronous_write_survives(mode: Mode) {
    for flag in SYNCHRONOUS {
        let mut mount = Mount::with_options(mode, &OPTIONS);
        let [new, changed, cut] = ["new", "changed", "cut"].map(|name| mount.files(name));
        for path in [&changed, &cut] {
            write_and_close(path, &fill(1, 6000)).unwrap();
        }
        sync_directory(mount.path()).unwrap();
        let held = [(&new, libc::O_CREAT | libc::O_EXCL), (&changed, 0), (&cut, libc::O_TRUNC)]
            .map(|(path, flags)| {
                let file = open(path, libc::O_WRONLY | flag | flags).unwrap();
                file.write_all_at(&fill(2, 8192), 4096).unwrap();
                file
            });
        mount.kill();
        drop(held);
        mount.mount();
        let expected = |first: Vec<u8>| [first, fill(2, 8192)].concat();
        assert!(std::fs::read(&new).unwrap() == expected(vec![0; 4096]), "{flag:o}");
        assert!(std::fs::read(&changed).unwrap() == expected(fill(1, 4096)), "{flag:o}");
        assert!(std::fs::read(&cut).unwrap() == expected(vec![0; 4096]), "{flag:o}");
    }
}

fn a_synchronous_row_survives(mode: Mode) {
    let mut mount = Mount::with_options(mode, &OPTIONS);
    let model = Model::small();
    model.install(&mount);
    let flags = libc::O_WRONLY | libc::O_CREAT | libc::O_APPEND | libc::O_DSYNC;
    let (tail_path, tokens_path) =
        (model.tail_path(&mount, "chat", 0, 0), model.tokens_path(&mount, "chat"));
    let [tail, tokens] = [&tail_path, &tokens_path].map(|path| open(path, flags).unwrap());
    write(&tokens, &fill(1, 128)).unwrap();
    write(&tail, &model.rows(1, 31)).unwrap();
    assert_eq!(mount.status("uncommitted_changes"), "0");
    write(&tail, &model.rows(1, 32)[31 * model.row_bytes()..]).unwrap();
    assert_eq!(mount.status("uncommitted_changes"), "0");
    mount.kill();
    drop((tail, tokens));
    mount.mount();
    assert!(std::fs::read(&tokens_path).unwrap() == fill(1, 128));
    let page = std::fs::read(model.page_path(&mount, "chat", 0, 0)).unwrap();
    assert!(page == model.page(0, 0, 1));
}

/// Syncing memory means nothing.
fn nothing_synchronous_is_in_memory(mode: Mode) {
    let mut mount = Mount::with_options(mode, &["--commit-interval", "3600", "--ram", "16M"]);
    let model = Model::small();
    model.install(&mount);
    let layer = model.layer(&mount, "chat", 0);
    let (new, known) = (layer.join(".new"), layer.join(".known"));
    write_and_close(&known, &fill(1, 8192)).unwrap();
    let held = [(&new, libc::O_CREAT), (&known, 0)].map(|(path, flags)| {
        let file = open(path, libc::O_WRONLY | libc::O_SYNC | flags).unwrap();
        file.write_all_at(&fill(2, 8192), 0).unwrap();
        file
    });
    mount.kill();
    drop(held);
    mount.mount();
    for path in [new, known] {
        assert!(std::fs::read(&path).unwrap() == fill(2, 8192), "{}", path.display());
    }
}

fn it_survives_a_power_cut(mode: Mode) {
    crate::require!(root, r#loop);
    let disk = SmallDisk::new();
    let mut mount = Mount::of_store_with(mode, &OPTIONS, &disk.mountpoint.join("store"));
    let path = mount.files("journal");
    let file = open(&path, libc::O_WRONLY | libc::O_CREAT | libc::O_SYNC).unwrap();
    for number in 0..20 {
        file.write_all_at(&fill(number, 5000), number * 5000).unwrap();
    }
    disk.cut_power();
    mount.kill();
    drop(file);
    crate::common::forks::output(std::process::Command::new("umount").arg("-l").arg(mount.path()));
    disk.restore_power();
    mount.mount();
    let found = std::fs::read(&path).unwrap();
    assert!(found == (0..20).flat_map(|number| fill(number, 5000)).collect::<Vec<_>>());
}
