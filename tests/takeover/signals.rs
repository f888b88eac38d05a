//! Exchanges beside a signal that ends the mount: it is never lost between two programs.

use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::common::{Mount, eventually, forks};
use crate::steps::check_store;
use crate::{any_mode, exchanges, mounted, refusal, upgrade_command};

fn ask_to_end(mount: &Mount) {
    kill(Pid::from_raw(i32::try_from(mount.pid()).unwrap()), Signal::SIGTERM).unwrap();
}

fn wait_until_it_has_ended(mount: &mut Mount) {
    mount.wait_until_it_ends();
    check_store(mount);
}

#[test]
fn a_mount_that_was_asked_to_end_is_given_to_nobody() {
    crate::require!(fuse);
    let mut mount = mounted(any_mode(), &[]);
    let used = std::fs::File::create(mount.files("used")).unwrap();
    ask_to_end(&mount);
    eventually("the daemon to wait for who uses the mount", || {
        mount.log().contains("cut off in").then_some(())
    });
    let line = refusal(&mount, None);
    assert!(line.contains("was asked to end"), "{line}");
    assert_eq!(exchanges(&mount), 0);
    drop(used);
    wait_until_it_has_ended(&mut mount);
    assert!(!mount.log().contains("were cut off"), "{}", mount.log());
}

#[test]
fn a_signal_beside_an_exchange_ends_the_mount() {
    crate::require!(fuse);
    let mut mount = mounted(any_mode(), &[]);
    for round in 0..12 {
        let mut command = upgrade_command(&mount, None);
        command.stderr(std::process::Stdio::null());
        let mut upgrading = forks::spawn(&mut command).unwrap();
        std::thread::sleep(Duration::from_millis(8 * round));
        ask_to_end(&mount);
        wait_until_it_has_ended(&mut mount);
        upgrading.wait().unwrap();
        mount.mount();
    }
}
