//! A slot that is saved takes the place of a sequence, also for who is on the way into it.

use std::fs::File;
use std::io::Write;

use crate::common::forks::no_forks;
use crate::common::sys::close;
use crate::common::{Mode, Model, Mount};
use crate::writer::Sequence;

in_both_modes!(names_in_a_sequence_that_was_replaced_are_there_at_once);

const SAVES: usize = 50;

fn names_in_a_sequence_that_was_replaced_are_there_at_once(mode: Mode) {
    let (mount, model) = (Mount::new(mode), Model::small());
    model.install(&mount);
    let mut sequence = Sequence::new(&model, "chat");
    sequence.append(&mount, &model, &(0..40).collect::<Vec<_>>());
    let slot = model.directory(&mount).join("slots/chat.bin");
    let bytes = std::fs::read(&slot).unwrap();
    let directory = model.sequence(&mount, "chat");
    for round in 0..SAVES {
        let _quiet = no_forks();
        let mut file = File::options().write(true).truncate(true).open(&slot).unwrap();
        file.write_all(&bytes).unwrap();
        close(file).unwrap();
        // The kernel may still believe that the name is the directory that went.
        let found = ["tokens", "000/0000000.safetensors", "001"]
            .map(|name| std::fs::metadata(directory.join(name)).map(drop));
        let is_there = found.iter().all(Result::is_ok);
        assert!(is_there, "save {round}: {found:?}");
        let outcome = std::fs::create_dir(directory.join("made"));
        assert!(outcome.is_ok(), "save {round}: {outcome:?}");
    }
}
