//! `kvfs model bump`: other weights begin with an empty cache under the same name.

use std::io::Read;
use std::path::Path;
use std::process::Command;

use kvfs::page::Manifest;

use crate::by_hash::{chain, directory, names};
use crate::common::sys::{assert_errno, getxattr, rename, setxattr, write_and_close};
use crate::common::{Mode, Model, Mount};
use crate::writer::Sequence;

in_both_modes!(
    other_weights_find_nothing_of_the_old,
    what_an_interrupted_change_left_goes_with_the_next,
    pages_of_the_old_weights_are_refused,
);

/// What it says, and its exit code.
fn bump(model: &Path, arguments: &[&str]) -> (Option<i32>, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvfs"));
    let output = command.args(["model", "bump"]).arg(model).args(arguments).output().unwrap();
    let text = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
    (output.status.code(), text)
}

fn manifest(model: &Path) -> Manifest {
    Manifest::parse(&std::fs::read(model.join("manifest.json")).unwrap()).unwrap()
}

fn revision(model: &Path) -> Option<String> {
    manifest(model).fields().model_revision.clone()
}

/// A model with a sequence of two pages and a tail.
fn with_sequence(mode: Mode) -> (Mount, Model, Sequence) {
    let (mount, model) = (Mount::new(mode), Model::small());
    model.install(&mount);
    let mut sequence = Sequence::new(&model, "chat");
    sequence.append(&mount, &model, &(0..70).collect::<Vec<_>>());
    (mount, model, sequence)
}

fn other_weights_find_nothing_of_the_old(mode: Mode) {
    let (mut mount, model, sequence) = with_sequence(mode);
    let path = model.directory(&mount);
    setxattr(&path, "user.kvfs.quota", b"1000000000").unwrap();
    let hash = chain(&model, &sequence.tokens)[0];
    assert!(directory(&mount, &model, hash).is_dir());
    let page = sequence.page(&mount, &model, 0, 0);
    let bytes = std::fs::read(&page).unwrap();
    let mut reader = std::fs::File::open(&page).unwrap();

    // Nobody was asked.
    let (exit, text) = bump(&path, &["r2"]);
    assert_eq!(exit, Some(2), "{text}");
    assert!(text.contains("1 sequences, 7 files") && text.contains("--yes"), "{text}");
    assert_eq!(bump(&path, &["r2", "--dry-run"]).0, Some(0));
    assert!(page.exists() && revision(&path).is_none());

    let (exit, text) = bump(&path, &["r2", "--yes"]);
    assert_eq!(exit, Some(0), "{text}");
    let check = |mount: &Mount| {
        assert_eq!(revision(&path).as_deref(), Some("r2"));
        assert_eq!(std::fs::read_dir(path.join("sequences")).unwrap().count(), 0);
        assert_eq!(getxattr(&path, "user.kvfs.quota").unwrap(), "1000000000");
        assert_errno(std::fs::metadata(directory(mount, &model, hash)), libc::ENOENT);
        assert_eq!(names(&mount.join("models")), ["small"]);
    };
    check(&mount);
    // Who has pages of the old ones open reads them on.
    let mut read = Vec::new();
    reader.read_to_end(&mut read).unwrap();
    assert!(read == bytes);
    drop(reader);
    mount.kill();
    mount.mount();
    check(&mount);

    // The same once more changes nothing, and what the new ones computed stays.
    let mut new = model.clone();
    new.manifest = manifest(&path);
    let mut sequence = Sequence::new(&new, "chat");
    sequence.append(&mount, &new, &(0..70).collect::<Vec<_>>());
    let (exit, text) = bump(&path, &["r2"]);
    assert_eq!((exit, text.contains("has revision r2")), (Some(0), true), "{text}");
    assert!(directory(&mount, &new, hash).is_dir());
}

fn what_an_interrupted_change_left_goes_with_the_next(mode: Mode) {
    let (mount, model, sequence) = with_sequence(mode);
    let path = model.directory(&mount);
    let left = path.with_file_name(format!("{}~", model.name));
    // Before the names change places, and behind that.
    std::fs::create_dir(&left).unwrap();
    std::fs::write(left.join("manifest.json"), model.manifest.to_json()).unwrap();
    std::fs::create_dir_all(left.join("sequences/chat/000")).unwrap();
    let (exit, text) = bump(&path, &["r2", "--yes"]);
    assert_eq!(exit, Some(0), "{text}");
    assert!(!left.exists() && !sequence.page(&mount, &model, 0, 0).exists());
    std::fs::create_dir_all(left.join("sequences/chat/000")).unwrap();
    assert_eq!(bump(&path, &["r2"]).0, Some(0));
    assert!(!left.exists());
    // Somebody else's model has that name.
    let mut fields = model.manifest.fields().clone();
    "other".clone_into(&mut fields.model_id);
    std::fs::create_dir(&left).unwrap();
    std::fs::write(left.join("manifest.json"), Manifest::new(fields).unwrap().to_json()).unwrap();
    let (exit, text) = bump(&path, &["r3", "--yes"]);
    assert_eq!((exit, text.contains("small~: File exists")), (Some(1), true), "{text}");
    assert!(left.exists() && revision(&path).as_deref() == Some("r2"));
    // No model, and no revision.
    for (model, revision, exit) in
        [(path.join("sequences"), "r3", 1), (path.with_file_name("no"), "r3", 1), (path, "", 2)]
    {
        let (seen, text) = bump(&model, &[revision, "--yes"]);
        assert_eq!((seen, text.lines().count()), (Some(exit), 1), "{text}");
    }
}

/// An engine that did not hear of it goes on writing.
fn pages_of_the_old_weights_are_refused(mode: Mode) {
    let (mount, model, _) = with_sequence(mode);
    let path = model.directory(&mount);
    assert_eq!(bump(&path, &["r2", "--yes"]).0, Some(0));
    let page = model.page_path(&mount, "late", 0, 0);
    let staged = page.with_extension("tmp");
    write_and_close(&staged, &model.page(0, 0, 1)).unwrap();
    assert!(rename(&staged, &page).is_err());
    std::fs::remove_file(&staged).unwrap();
    let mut new = model.clone();
    new.manifest = manifest(&path);
    write_and_close(&staged, &new.page(0, 0, 1)).unwrap();
    rename(&staged, &page).unwrap();
    assert!(page.exists());
}
