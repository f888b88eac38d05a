//! How far something is: told on a terminal, and nowhere else.

use std::process::Command;

use crate::common::sys::write_and_close;
use crate::common::{Mode, Mount, fill, forks};
use crate::terminal::Terminal;

in_both_modes!(bytes_and_their_rate_are_told_on_a_terminal);

fn bytes_and_their_rate_are_told_on_a_terminal(mode: Mode) {
    let mut mount = Mount::new(mode);
    write_and_close(mount.files("a"), &fill(1, 8 << 20)).unwrap();
    assert!(mount.unmount().success());
    let fsck = || {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvfs"));
        command.arg("fsck").arg(mount.store());
        command
    };
    let quiet = forks::output(&mut fsck());
    assert!(quiet.status.success() && quiet.stderr.is_empty());
    let mut terminal = Terminal::start(&mut fsck(), 100, 24);
    assert!(terminal.child.wait().unwrap().success());
    let shown = crate::common::eventually("the bar", || {
        let shown = terminal.written();
        shown.contains("no errors").then_some(shown)
    });
    assert!(shown.contains("checking ") && shown.contains(" of 8.00 MiB, "), "{shown:?}");
    assert!(shown.contains("B/s, ") && shown.contains(" left"), "{shown:?}");
}
