//! A program in C changes the sequences of a mount.

use std::process::Command;

use kvfs::sequence::Sequences;

use crate::common::mount::scratch_directory;
use crate::common::{Mode, Model, Mount};
use crate::program::{Link, build, run};
use crate::writer::Sequence;

#[test]
fn a_program_changes_sequences() {
    require!(cc, fuse, root);
    let mount = Mount::new(Mode::Passthrough);
    let model = Model::small();
    model.install(&mount);
    Sequence::new(&model, "chat").append(&mount, &model, &(0..100).collect::<Vec<_>>());
    let directory = scratch_directory();
    let program = build("tests/c_abi/sequences.c", Link::Shared, directory.path());
    run(Command::new(program).arg(model.directory(&mount)));

    // Rust finds what C has left.
    let all = Sequences::open(&model.directory(&mount)).unwrap();
    assert_eq!(all.names().unwrap(), ["chat", "full", "half", "steps"]);
    assert_eq!(all.positions("chat").unwrap(), all.positions("steps").unwrap());
    assert_eq!(all.seq_pos("full").unwrap(), Some((0, 99)));
    assert_eq!(all.seq_pos("half").unwrap(), None);
}
