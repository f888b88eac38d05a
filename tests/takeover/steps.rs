//! Exchanges beside other things that happen: kills, unmounts, syncs, transfers, other exchanges.

use std::time::Duration;

use crate::common::sys::write_and_close;
use crate::common::{Mode, Mount, forks};
use crate::{any_mode, exchanges, mounted, upgrade, upgrade_command};

pub(crate) fn check_store(mount: &Mount) {
    let mut fsck = std::process::Command::new(env!("CARGO_BIN_EXE_kvfs"));
    let checked = forks::output(fsck.arg("fsck").arg(mount.store()));
    assert!(checked.status.success(), "{}", String::from_utf8_lossy(&checked.stdout));
}

#[test]
fn a_daemon_that_is_killed_meanwhile_loses_nothing_that_was_synced() {
    crate::require!(fuse, root);
    let mut mount = mounted(Mode::Passthrough, &[]);
    for round in 0..24_u64 {
        let name = format!("synced-{round}");
        let file = std::fs::File::create(mount.files(&name)).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, name.as_bytes(), 0).unwrap();
        file.sync_all().unwrap();
        let mut command = upgrade_command(&mount, None);
        command.stderr(std::process::Stdio::null());
        let mut upgrading = forks::spawn(&mut command).unwrap();
        std::thread::sleep(Duration::from_millis(4 * round));
        mount.kill();
        upgrading.wait().unwrap();
        drop(file);
        nix::mount::umount2(mount.path(), nix::mount::MntFlags::MNT_DETACH).unwrap();
        check_store(&mount);
        mount.mount();
        for known in 0..=round {
            let name = format!("synced-{known}");
            assert_eq!(std::fs::read(mount.files(&name)).unwrap(), name.as_bytes());
        }
    }
}

#[test]
fn of_two_exchanges_at_once_each_happens_or_is_refused() {
    crate::require!(fuse, root);
    let mount = mounted(Mode::Passthrough, &[]);
    let mut begun: Vec<_> = (0..4)
        .map(|_| {
            let mut command = upgrade_command(&mount, None);
            command.stderr(std::process::Stdio::piped());
            forks::spawn(&mut command).unwrap()
        })
        .collect();
    let mut well = 0;
    for upgrading in &mut begun {
        let status = upgrading.wait().unwrap();
        let mut text = String::new();
        std::io::Read::read_to_string(&mut upgrading.stderr.take().unwrap(), &mut text).unwrap();
        assert!(status.success() || text.contains("under way"), "{text}");
        well += usize::from(status.success());
    }
    assert!(well >= 1 && (1..=well).contains(&exchanges(&mount)), "{well}");
}

#[test]
fn after_an_exchange_it_is_unmounted_in_good_order() {
    crate::require!(fuse);
    let mut mount = mounted(any_mode(), &[]);
    for round in 0..3 {
        write_and_close(mount.files(format!("file-{round}")), b"bytes").unwrap();
        upgrade(&mount);
        assert!(mount.unmount().success());
        check_store(&mount);
        mount.mount();
    }
    assert_eq!(std::fs::read_dir(mount.files("")).unwrap().count(), 3);
    assert!(!mount.log().contains("a crash had left"), "{}", mount.log());
}

#[test]
fn syncs_and_transfers_go_on() {
    crate::require!(fuse, root);
    let remote = crate::common::mount::scratch_directory();
    let place = remote.path().display().to_string();
    let mut mount = mounted(Mode::Passthrough, &["--remote", &place, "--ssd", "32M"]);
    mount.may_be_slow("everything is synced and copied at the same time");
    let over = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        let writing = scope.spawn(|| {
            let mut count = 0_u8;
            while !crate::clients::is_over(&over) {
                let path = mount.files(format!("moved-{count}"));
                std::fs::write(&path, vec![count; 2 << 20]).unwrap();
                std::fs::File::open(&path).unwrap().sync_all().unwrap();
                count = count.saturating_add(1);
            }
            count
        });
        for _ in 0..5 {
            std::thread::sleep(Duration::from_millis(300));
            upgrade(&mount);
        }
        over.store(true, std::sync::atomic::Ordering::Relaxed);
        for number in 0..writing.join().unwrap() {
            let read = std::fs::read(mount.files(format!("moved-{number}"))).unwrap();
            assert!(read == vec![number; 2 << 20], "{number}");
        }
    });
    assert!(mount.unmount().success());
    check_store(&mount);
}

#[test]
fn settings_that_were_changed_stay_changed() {
    crate::require!(fuse);
    let mount = mounted(any_mode(), &[]);
    let mut set = std::process::Command::new(env!("CARGO_BIN_EXE_kvfs"));
    let set = forks::output(set.args(["config", "set", "verify=always"]).arg(mount.path()));
    assert!(set.status.success());
    for _ in 0..2 {
        upgrade(&mount);
        let config = std::fs::read_to_string(mount.join(".kvfs/config")).unwrap();
        assert!(config.contains("verify = \"always\""), "{config}");
    }
}

#[test]
fn damage_that_is_known_stays_known() {
    crate::require!(fuse);
    let mut mount = mounted(any_mode(), &["--pack", "0"]);
    write_and_close(mount.files("damaged"), &[7; 10_000]).unwrap();
    assert!(mount.unmount().success());
    let object = std::fs::OpenOptions::new().write(true).open(&mount.objects()[0]).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&object, b"x", 5000).unwrap();
    drop(object);
    mount.mount();
    assert!(std::fs::read(mount.files("damaged")).is_err());
    let known = |mount: &Mount| (mount.status("state"), mount.status("damaged_files"));
    let expected = ("degraded".to_owned(), "1".to_owned());
    assert_eq!(known(&mount), expected);
    upgrade(&mount);
    assert_eq!(known(&mount), expected);
    std::fs::remove_file(mount.files("damaged")).unwrap();
    assert_eq!(mount.status("damaged_files"), "0");
}

#[test]
fn exchanges_while_files_are_made_leave_nothing_behind() {
    crate::require!(fuse, root);
    let mut mount = mounted(Mode::Passthrough, &[]);
    let over = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| crate::clients::write_by_rename(&mount.files("made"), 100_000, &over));
        for _ in 0..12 {
            upgrade(&mount);
        }
        over.store(true, std::sync::atomic::Ordering::Relaxed);
    });
    assert!(mount.unmount().success());
    let staging = std::fs::read_dir(mount.store().join("staging")).unwrap();
    assert_eq!(staging.count(), 0);
}
