//! `kvfs import` is killed between two files: the sequence is not there, and the next attempt makes it.

use std::path::Path;
use std::process::{Command, Stdio};

use crate::common::sys::write_and_close;
use crate::common::{Mode, Model, Mount, eventually, forks};

/// Of a layer; enough that an import can be met in the middle.
const PAGES: u64 = 40;

fn command(words: &[&str], paths: [&Path; 2]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvfs"));
    command.args(words).args(paths);
    command
}

#[test]
fn an_import_that_is_killed_leaves_no_sequence_and_can_be_tried_again() {
    crate::require!(fuse);
    let mount = Mount::new(Mode::Served);
    let model = Model::small();
    model.install(&mount);
    let tokens = PAGES * u64::from(model.page_tokens());
    for layer in 0..model.manifest.geometry().num_layers() {
        for start in (0..tokens).step_by(model.page_tokens() as usize) {
            let path = model.page_path(&mount, "source", layer, start);
            write_and_close(&path, &model.page(layer, start, start + 1)).unwrap();
        }
    }
    let ids: Vec<u8> = (0..u32::try_from(tokens).unwrap()).flat_map(u32::to_le_bytes).collect();
    write_and_close(model.tokens_path(&mount, "source"), &ids).unwrap();
    let (source, made) = (model.sequence(&mount, "source"), model.sequence(&mount, "made"));
    let file = mount.beside("slot.bin");
    forks::succeed(&mut command(&["export"], [&source, &file]));

    let work = model.sequence(&mount, "made~");
    let mut import = command(&["import"], [&file, &made]);
    let mut killed = forks::spawn(import.stdout(Stdio::null())).unwrap();
    eventually("the import to write", || {
        let pages = std::fs::read_dir(work.join("000")).ok()?.count();
        (pages > 1).then_some(())
    });
    killed.kill().unwrap();
    assert!(!killed.wait().unwrap().success(), "it was met in the middle");
    assert!(!made.exists() && work.exists());

    forks::succeed(&mut command(&["import"], [&file, &made]));
    assert!(!work.exists());
    assert_eq!(std::fs::read(made.join("tokens")).unwrap(), ids);
    let last = model.page_path(&mount, "made", 0, tokens - u64::from(model.page_tokens()));
    let name = last.file_name().unwrap();
    assert!(std::fs::read(&last).unwrap() == std::fs::read(source.join("000").join(name)).unwrap());
    let again = forks::output(&mut command(&["import"], [&file, &made]));
    let said = String::from_utf8_lossy(&again.stderr).into_owned();
    assert!(!again.status.success() && said.contains("sequence made has tokens"), "{said}");
}
