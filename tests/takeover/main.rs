//! The daemon of a mount is exchanged while programs use the mount, and they notice nothing; whatever cannot be
//! exchanged stays as it was.
//!
//! | variable | |
//! |---|---|
//! | `KVFS_EXCHANGES` | exchanges under load (10; a night takes 1,000) |
//! | `KVFS_TOLD_ROUNDS`, `KVFS_TOLD_SEED` | random work before a death (10 rounds), the first round's seed (1) |

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(clippy::print_stdout, reason = "how much was tested")]

#[path = "../common/mod.rs"]
#[macro_use]
mod common;

mod clients;
mod deaths;
mod disks;
mod dying;
mod handles;
mod load;
mod memory;
mod misled;
mod programs;
mod refused;
mod relied;
mod signals;
mod steps;
mod told;

use std::path::Path;
use std::process::{Command, Output};

use common::{Mode, Mount, forks};

/// Passthrough, where this user may ask for it.
fn any_mode() -> Mode {
    if nix::unistd::geteuid().is_root() { Mode::Passthrough } else { Mode::Served }
}

/// A mount that can be exchanged.
fn mounted(mode: Mode, options: &[&str]) -> Mount {
    Mount::with_options(mode, options)
}

fn upgrade_command(mount: &Mount, program: Option<&Path>) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvfs"));
    command.arg("upgrade");
    if let Some(program) = program {
        command.arg("--program").arg(program);
    }
    command.arg(mount.path());
    command
}

fn try_upgrade(mount: &Mount, program: Option<&Path>) -> Output {
    forks::output(&mut upgrade_command(mount, program))
}

#[track_caller]
fn upgrade(mount: &Mount) {
    let outcome = try_upgrade(mount, None);
    assert!(outcome.status.success(), "{}", String::from_utf8_lossy(&outcome.stderr));
}

/// What an upgrade says that is refused.
#[track_caller]
fn refusal(mount: &Mount, program: Option<&Path>) -> String {
    let outcome = try_upgrade(mount, program);
    assert_eq!(outcome.status.code(), Some(1), "{outcome:?}");
    let line = String::from_utf8(outcome.stderr).unwrap();
    assert_eq!(line.lines().count(), 1, "{line}");
    line
}

/// How often this mount has changed its daemon.
fn exchanges(mount: &Mount) -> usize {
    mount.log().matches("this daemon goes on with the mount").count()
}
