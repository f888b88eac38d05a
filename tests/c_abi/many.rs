//! A program in C asks about many names.

use std::process::Command;

use crate::common::mount::scratch_directory;
use crate::common::{Mode, Mount};
use crate::program::{Link, build, run};

#[test]
fn a_program_asks_about_many_names() {
    require!(cc, fuse, root);
    let mount = Mount::new(Mode::Passthrough);
    let scratch = scratch_directory();
    let program = build("tests/c_abi/many.c", Link::Shared, scratch.path());
    // A mount, and what is none.
    for directory in [mount.files("values"), scratch.path().join("values")] {
        std::fs::create_dir(&directory).unwrap();
        for number in (0..100).step_by(2) {
            std::fs::write(directory.join(number.to_string()), format!("{number}.")).unwrap();
        }
        std::fs::write(directory.join("large"), vec![b'x'; 3 << 20]).unwrap();
        run(Command::new(&program).arg(&directory));
    }
    // What is read right after it was written may be left to system calls.
    assert!(mount.metric(r#"kvfs_batch_names_total{answer="here"}"#) >= 51);
}
