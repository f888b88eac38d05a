//! What every integration test shares: a mount served by a daemon of its own, rules for skipping,
//! models with pages of known content, and system calls that report errno.
//!
//! The daemon is a separate process, so that a test can kill it. Its store and mountpoint lie in
//! a directory below `$KVFS_TEST_DIR`, or below the target directory; that must be on a real
//! disk filesystem, since an overlay needs another stack depth.

#![allow(dead_code, unused_imports, reason = "each test binary uses its own part")]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

pub(crate) mod disk;
pub(crate) mod forks;
pub(crate) mod ganesha;
pub(crate) mod injection;
pub(crate) mod memory_group;
pub(crate) mod model;
pub(crate) mod mount;
pub(crate) mod nfs;
pub(crate) mod random;
pub(crate) mod require;
pub(crate) mod s3_server;
pub(crate) mod s3_stub;
pub(crate) mod skips;
pub(crate) mod sys;
pub(crate) mod tls;

pub(crate) use model::{Model, fill};
pub(crate) use mount::{Mode, Mount};
pub(crate) use require::available;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// Longest wait for anything that is bound to happen; only a hanging daemon reaches it.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// An example beside the program; `cargo test --test NAME` alone does not build it.
pub(crate) fn example(name: &str) -> PathBuf {
    let kvfs = Path::new(env!("CARGO_BIN_EXE_kvfs"));
    let path = kvfs.with_file_name("examples").join(name);
    if !path.exists() {
        let mut build = Command::new(env!("CARGO"));
        build.args(["build", "--example", name]);
        if !cfg!(debug_assertions) {
            build.arg("--release");
        }
        assert!(build.status().unwrap().success());
    }
    path
}

/// Polls until `done` answers, and panics after [`PATIENCE`].
#[track_caller]
pub(crate) fn eventually<T>(what: &str, done: impl FnMut() -> Option<T>) -> T {
    within(PATIENCE, what, done)
}

/// The same for what takes longer.
#[track_caller]
pub(crate) fn within<T>(longest: Duration, what: &str, mut done: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + longest;
    loop {
        if let Some(value) = done() {
            return value;
        }
        assert!(Instant::now() < deadline, "waited in vain for: {what}");
        std::thread::sleep(longest / 10_000);
    }
}

/// Leaves the test, with a printed reason, unless the machine has everything named:
/// `require!(fuse, root)`. A word in `KVFS_REQUIRE` (a comma list) turns its absence into a
/// failure.
#[macro_export]
macro_rules! require {
    ($($what:ident),+ $(,)?) => {
        $(if !$crate::common::available(stringify!($what)) { return; })+
    };
}

/// Makes a test of each scenario that takes seconds and to which it does not matter who moves the
/// bytes: `scenario::served`.
#[macro_export]
macro_rules! in_served_mode {
    ($($scenario:ident),+ $(,)?) => {
        $(mod $scenario {
            #[test]
            fn served() {
                $crate::require!(fuse);
                super::$scenario($crate::common::Mode::Served);
            }
        })+
    };
}

/// Makes two tests of each scenario, a function of [`Mode`]: `scenario::passthrough` and
/// `scenario::served`.
#[macro_export]
macro_rules! in_both_modes {
    ($($scenario:ident),+ $(,)?) => {
        $(mod $scenario {
            #[test]
            fn passthrough() {
                $crate::require!(fuse, root);
                super::$scenario($crate::common::Mode::Passthrough);
            }
            #[test]
            fn served() {
                $crate::require!(fuse);
                super::$scenario($crate::common::Mode::Served);
            }
        })+
    };
}

/// The same where other users act too, with all that it needs:
/// `as_root!((fuse, root, setpriv) scenario)`.
#[macro_export]
macro_rules! as_root {
    ($needed:tt $($scenario:ident),+ $(,)?) => {
        $(mod $scenario {
            #[test]
            fn passthrough() {
                $crate::require! $needed;
                super::$scenario($crate::common::Mode::Passthrough);
            }
            #[test]
            fn served() {
                $crate::require! $needed;
                super::$scenario($crate::common::Mode::Served);
            }
        })+
    };
}
