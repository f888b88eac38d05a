//! A program in C says what will become of pages.

use std::process::Command;

use crate::common::mount::scratch_directory;
use crate::common::sys::{getxattr, rename, write_and_close};
use crate::common::{Mode, Model, Mount};
use crate::program::{Link, build, run};

#[test]
fn a_program_gives_hints() {
    require!(cc, fuse, root);
    let mount = Mount::with_options(Mode::Passthrough, &["--ram", "16M"]);
    let model = Model::small();
    model.install(&mount);
    let [ended, going_on] = ["a", "b"].map(|sequence| {
        let path = model.page_path(&mount, sequence, 0, 0);
        let temporary = path.with_extension("tmp");
        write_and_close(&temporary, &model.page(0, 0, u64::from(sequence.as_bytes()[0]))).unwrap();
        rename(&temporary, &path).unwrap();
        path
    });
    let scratch = scratch_directory();
    let program = build("tests/c_abi/hint.c", Link::Shared, scratch.path());
    run(Command::new(program).args([&ended, &going_on]).arg(mount.files("nothing")));
    assert_eq!(getxattr(&ended, "user.kvfs.hint").unwrap(), "finished");
    assert!(getxattr(&going_on, "user.kvfs.hint").is_err());
}
