//! The `kvfs` program, also `mount.kvfs`, `mount.fuse.kvfs` and `umount.fuse.kvfs`: everything is
//! in the library, so that tests and other programs can use it.

use std::process::ExitCode;

fn main() -> ExitCode {
    kvfs::cli::run(&std::env::args_os().collect::<Vec<_>>())
}
