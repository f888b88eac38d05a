//! `kvfs log` and `kvfs explain` find what happened under any name, and tell no more than is proven.

use std::ffi::OsStr;
use std::fs::{self, Permissions};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use crate::common::sys::removexattr;
use crate::common::{Mode, Model, Mount, eventually, forks};
use crate::history::{events, kvfs, printed};
use crate::writer::Sequence;
use crate::{FILE_BYTES, limit, wait_until_gone, write_files};

in_served_mode!(
    a_path_that_was_shortened_is_found,
    what_was_made_again_is_not_told_to_be_gone,
    a_directory_did_not_go_with_the_file_that_had_its_name,
    what_goes_before_it_is_told,
    names_control_no_terminal,
    what_is_virtual_is_told_to_be,
);
as_root!((fuse, root) others_are_told_who_may_ask);

const FOREVER: &str = "if it was made again since, what became of that is not remembered";

/// Writes a file into a directory below which a limit then deletes it.
fn deleted_below(limited: &Path, file: &Path) {
    fs::write(file, vec![1; FILE_BYTES]).unwrap();
    limit(limited, "quota", 10);
    wait_until_gone(file);
    removexattr(limited, "user.kvfs.quota").unwrap();
}

/// Why something is not there, or is again.
#[track_caller]
fn why(path: &Path) -> String {
    let text = printed(&["explain"], path);
    let line = text.lines().find_map(|line| line.strip_prefix("why: "));
    line.unwrap_or_else(|| panic!("{text}")).to_owned()
}

#[track_caller]
fn complaint(path: &Path) -> String {
    let ended = kvfs(&["explain"], path);
    assert_eq!(ended.status.code(), Some(1), "{}", String::from_utf8_lossy(&ended.stdout));
    String::from_utf8(ended.stderr).unwrap()
}

fn a_path_that_was_shortened_is_found(mode: Mode) {
    let mount = Mount::new(mode);
    let top = mount.files("cache");
    let deep: PathBuf = (0..70).map(|number| format!("directory-{number}")).collect();
    let many = top.join(deep);
    // Fewer directories, but more bytes.
    let long: PathBuf = (0..6).map(|number| format!("{number}").repeat(200)).collect();
    let long = top.join(long);
    for directory in [&many, &long] {
        fs::create_dir_all(directory).unwrap();
        let file = directory.join("file");
        deleted_below(&top, &file);
        let told = events(&file);
        assert_eq!(told.len(), 1, "{told:?}");
        let path = told[0]["path"].as_str().unwrap();
        assert!(path.starts_with("...") && path.ends_with("/file") && path.len() <= 1024, "{path}");
        assert!(why(&file).starts_with("deleted 20"));
        assert_eq!(events(directory), told);
        assert!(events(&directory.join("fil")).is_empty());
        assert!(events(&directory.parent().unwrap().join("file")).is_empty());
    }
    assert_eq!(events(&top).len(), 2, "they were in directories that are below it");
    fs::remove_dir_all(top.join("directory-0")).unwrap();
    assert!(why(&many.join("file")).starts_with("deleted 20"), "the directory is gone as well");
}

fn what_was_made_again_is_not_told_to_be_gone(mode: Mode) {
    let mount = Mount::new(mode);
    let directory = mount.files("cache");
    fs::create_dir(&directory).unwrap();
    let file = directory.join("file");
    deleted_below(&directory, &file);
    let deleted = why(&file);
    assert!(deleted.contains("files/cache may hold 10 bytes"), "{deleted}");
    assert!(deleted.ends_with(FOREVER), "{deleted}");
    fs::write(&file, "again").unwrap();
    let again = why(&file);
    assert!(
        again.starts_with("deleted 20")
            && again.ends_with("; made again since, or renamed to this"),
        "{again}"
    );
    // Its user removes it: the limit is not the cause, and it is not said to be.
    fs::remove_file(&file).unwrap();
    assert_eq!(why(&file), deleted);
    assert!(complaint(&directory.join("other")).contains("nothing is known of it"));
}

fn a_directory_did_not_go_with_the_file_that_had_its_name(mode: Mode) {
    let mount = Mount::new(mode);
    let directory = mount.files("cache");
    fs::create_dir(&directory).unwrap();
    let file = directory.join("name");
    deleted_below(&directory, &file);
    fs::create_dir(&file).unwrap();
    assert!(complaint(&file.join("inner")).contains("nothing is known of it"));
    // A sequence takes all in it along.
    let model = Model::small();
    model.install(&mount);
    let mut sequence = Sequence::new(&model, "old");
    sequence.append(&mount, &model, &(0..40).collect::<Vec<_>>());
    limit(&model.directory(&mount), "quota", 10);
    wait_until_gone(&model.sequence(&mount, "old"));
    let told = why(&model.page_path(&mount, "old", 0, 0));
    assert!(told.starts_with("models/small/sequences/old was deleted 20"), "{told}");
}

fn what_goes_before_it_is_told(mode: Mode) {
    let mount = Mount::new(mode);
    let directory = mount.files("cache");
    fs::create_dir(&directory).unwrap();
    let files = write_files(&mount, &directory, 3);
    assert!(!printed(&["explain"], &files[2]).contains("order: "), "there is no limit");
    limit(&directory, "quota", 1_000_000);
    let text = printed(&["explain"], &files[2]);
    let line = text.lines().find(|line| line.starts_with("order: last used ")).unwrap();
    assert!(line.contains("2 files, 195.3 KiB were used longer ago"), "{line}");
    let model = Model::small();
    model.install(&mount);
    for name in ["old", "new"] {
        let mut sequence = Sequence::new(&model, name);
        sequence.append(&mount, &model, &(0..40).collect::<Vec<_>>());
    }
    limit(&model.directory(&mount), "age", 1_000_000);
    let json = printed(&["explain", "--json"], &model.page_path(&mount, "new", 0, 0));
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    // Two pages, two tails and the tokens of the other sequence, and the manifest, which stays.
    assert_eq!(json["order"]["files_before"], 5, "{json:#}");
}

fn names_control_no_terminal(mode: Mode) {
    let mount = Mount::new(mode);
    let name = OsStr::from_bytes(b"a\x1b[31m\xe2\x80\xae\\n\n\xff");
    let shown = r"a\u{1b}[31m\u{202e}\\n\n\xff";
    let directory = mount.files(name);
    fs::create_dir(&directory).unwrap();
    let file = directory.join(name);
    deleted_below(&directory, &file);
    limit(&directory, "quota", 1_000_000);
    let path = format!("files/{shown}/{shown}");
    assert_eq!(events(&file)[0]["path"], path);
    let texts = [
        printed(&["log"], &directory),
        printed(&["explain"], &file),
        printed(&["explain"], &directory),
        printed(&["status", "--plan"], &directory),
        complaint(&directory.join("other").join(name)),
    ];
    for text in texts {
        assert!(text.contains(shown), "{text}");
        let is_control = |letter: char| letter != '\n' && letter.is_control();
        assert!(!text.contains(is_control) && !text.contains('\u{202e}'), "{text:?}");
    }
    // Other names are shown otherwise.
    let plain = directory.join(OsStr::from_bytes(b"a\\u{1b}[31m"));
    deleted_below(&directory, &plain);
    assert_eq!(events(&plain)[0]["path"], format!(r"files/{shown}/a\\u{{1b}}[31m"));
}

fn what_is_virtual_is_told_to_be(mode: Mode) {
    let mount = Mount::new(mode);
    let model = Model::small();
    model.install(&mount);
    let mut sequence = Sequence::new(&model, "chat");
    sequence.append(&mount, &model, &(0..40).collect::<Vec<_>>());
    let virtual_places = [".kvfs", ".kvfs/events", "models/small/blocks", "models/small/prefixes"];
    for place in virtual_places {
        let text = printed(&["explain"], &mount.join(place));
        assert!(text.contains("where: nowhere: it is virtual, and made when it is read"), "{text}");
    }
    let text = printed(&["explain"], &model.sequence(&mount, "chat"));
    assert!(text.contains("where: on the disk: 5 files"), "{text}");
}

fn others_are_told_who_may_ask(mode: Mode) {
    const NOBODY: u32 = 65534;
    let mount = Mount::new(mode);
    // The tests' directories are their user's alone.
    let above = mount.path().parent().unwrap();
    fs::set_permissions(above, Permissions::from_mode(0o755)).unwrap();
    let kvfs = mount.beside("kvfs");
    fs::copy(env!("CARGO_BIN_EXE_kvfs"), &kvfs).unwrap();
    let kvfs = kvfs.display();
    for command in ["log", "log -f", "explain", "status"] {
        let script = format!("{kvfs} {command} {}", mount.path().display());
        let ended = eventually("a program that is being written to be closed", || {
            let ended = forks::output(&mut forks::shell_as(Path::new("/"), NOBODY, &script));
            (ended.status.code() != Some(126)).then_some(ended)
        });
        let line =
            format!("{}: only root and whoever mounted it may ask\n", mount.path().display());
        assert_eq!(String::from_utf8_lossy(&ended.stderr), format!("kvfs: {line}"));
        assert_eq!(ended.status.code(), Some(1));
    }
}
