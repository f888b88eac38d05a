//! A program in C with a stream and memory of its own on a GPU, which is none.

use std::process::Command;

use crate::common::mount::scratch_directory;
use crate::library::{can_build, driver};
use crate::program::{Link, build, run};

#[test]
fn of_the_stream_of_a_caller() {
    require!(cc);
    let directory = scratch_directory();
    let program = build("tests/c_abi/on_stream.c", Link::Shared, directory.path());
    if can_build() {
        let driver = driver(&[("F32", "f32", 64)]);
        // What takes long shows which wait is missing.
        for (name, microseconds) in [("KVFS_FAKE_COPY_US", "3000"), ("KVFS_FAKE_KERNEL_US", "3000")]
        {
            let mut command = Command::new(&program);
            command.env("LD_LIBRARY_PATH", &driver).env("KVFS_FAKE_MODULES", &driver);
            let output = run(command.env(name, microseconds));
            let said = String::from_utf8_lossy(&output.stdout).into_owned();
            assert!(said.contains("gives what the CPU gives"), "{said}");
        }
    }
    let said = run(&mut Command::new(&program)).stdout;
    let said = String::from_utf8_lossy(&said);
    assert!(said.contains("driver") || said.contains("gives what the CPU gives"), "{said}");
}
