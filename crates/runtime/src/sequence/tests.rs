//! What others may put into the directories of a sequence, in a plain directory. What operations do to one that is
//! sound is in `tests/reader/edited`.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::Duration;

use nix::sys::stat::Mode;
use nix::unistd::mkfifo;

use super::*;
use crate::page::{Dtype, ManifestFields, PagePlace, TokenStart, pack_page};

const PAGE_TOKENS: u32 = 16;
const PAGES: u32 = 2;

/// Two models of one cache, each with a sequence `x` of two pages and some rows in a tail.
struct Place(tempfile::TempDir);

impl Place {
    fn new() -> Self {
        let place = Self(tempfile::tempdir().unwrap());
        let fields = ManifestFields {
            page_tokens: PAGE_TOKENS,
            ..ManifestFields::new("test", Dtype::F32, 1, 2, 16)
        };
        let manifest = Manifest::new(fields).unwrap();
        for model in ["his", "priv"] {
            let layer = place.layer(model);
            fs::create_dir_all(&layer).unwrap();
            fs::write(place.model(model).join(names::MANIFEST), manifest.to_json()).unwrap();
            let row_bytes = usize::try_from(manifest.geometry().row_bytes()).unwrap();
            let rows = vec![0; PAGE_TOKENS as usize * row_bytes];
            for start in (0..PAGES).map(|page| TokenStart(u64::from(page * PAGE_TOKENS))) {
                let at = PagePlace::new(&manifest, Layer(0), start).unwrap();
                let page = pack_page(&at, &rows, PAGE_TOKENS).unwrap();
                fs::write(layer.join(names::format_page(start)), page).unwrap();
            }
            let start = TokenStart(u64::from(PAGES * PAGE_TOKENS));
            fs::write(layer.join(names::format_tail(start)), &rows[..4 * row_bytes]).unwrap();
            fs::write(place.sequence(model).join(names::TOKENS), [0; 36 * 4]).unwrap();
        }
        place
    }

    fn model(&self, model: &str) -> PathBuf {
        self.0.path().join("models").join(model)
    }

    fn sequence(&self, model: &str) -> PathBuf {
        self.model(model).join("sequences/x")
    }

    fn layer(&self, model: &str) -> PathBuf {
        self.sequence(model).join("000")
    }

    fn his(&self) -> Sequences {
        Sequences::open(&self.model("his")).unwrap()
    }

    /// Every name below the private model, in order.
    fn private(&self) -> Vec<PathBuf> {
        let sequences = self.model("priv").join("sequences");
        let mut found = vec![sequences];
        for at in 0.. {
            let Some(path) = found.get(at).cloned() else { break };
            if path.is_dir() && !path.is_symlink() {
                found.extend(fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path()));
            }
        }
        found.sort();
        found
    }
}

/// What operations on sequence `name` say; none may wait for anybody.
fn told(all: &Sequences, name: &'static str) -> Vec<(&'static str, Result<(), SequenceError>)> {
    let (all, (done, outcomes)) = (all.clone(), mpsc::channel());
    let run = move || {
        let outcomes = vec![
            ("rm", all.seq_rm(name, 0..20)),
            ("rm to the end", all.seq_rm(name, 20..)),
            ("add", all.seq_add(name, 0..20, 7)),
            ("cp", all.seq_cp(name, "copy", ..)),
            ("shift", all.context_shift(name, 4..8, "full")),
            ("clear", all.clear(name)),
            ("save", all.state_write(name, std::io::sink())),
        ];
        done.send(outcomes).unwrap();
    };
    Builder::new().name("operations".to_owned()).spawn(run).unwrap();
    outcomes.recv_timeout(Duration::from_secs(60)).expect("nothing waits")
}

fn assert_refused(all: &Sequences, name: &'static str, path: &Path, why: &str) {
    for (operation, outcome) in told(all, name) {
        let line = outcome.expect_err(operation).to_string();
        assert!(line.starts_with(&format!("{}: {why}", path.display())), "{operation}: {line}");
    }
}

#[test]
fn a_layer_that_is_a_link_is_refused() {
    let place = Place::new();
    let before = place.private();
    fs::remove_dir_all(place.layer("his")).unwrap();
    symlink(place.layer("priv"), place.layer("his")).unwrap();
    assert_refused(&place.his(), "x", &place.layer("his"), "is a symbolic link: ");
    assert_eq!(place.private(), before);
    assert_eq!(place.his().names().unwrap(), ["x"]);
}

#[test]
fn a_sequence_that_is_a_link_is_not_changed() {
    let place = Place::new();
    let before = place.private();
    let link = place.model("his").join("sequences/link");
    symlink("../../priv/sequences/x", &link).unwrap();
    assert_refused(&place.his(), "link", &link, "is a symbolic link: ");
    let onto = place.his().seq_cp("x", "link", ..).unwrap_err().to_string();
    let filled = place.his().make("link", |_| Ok(())).unwrap_err().to_string();
    assert!(onto.contains("symbolic link") && filled.contains("symbolic link"), "{onto}, {filled}");
    assert_eq!(place.private(), before);
}

#[test]
fn sequences_behind_a_link_are_not_those_of_a_model() {
    let place = Place::new();
    let before = place.private();
    let sequences = place.model("his").join("sequences");
    fs::remove_dir_all(&sequences).unwrap();
    symlink("../priv/sequences", &sequences).unwrap();
    let opened = Sequences::open(&place.model("his")).unwrap_err().to_string();
    let bumped = begin_revision(&place.model("his"), "r2").unwrap_err().to_string();
    for line in [opened, bumped] {
        assert!(line.contains("his/sequences: is a symbolic link: "), "{line}");
    }
    assert_eq!(place.private(), before);
    // The way to the model may lead through one.
    let link = place.0.path().join("link");
    symlink(place.model("priv"), &link).unwrap();
    Sequences::open(&link).unwrap().seq_cp("x", "copy", ..).unwrap();
}

#[test]
fn files_that_are_links_are_not_read() {
    let place = Place::new();
    let secret = place.0.path().join("secret");
    fs::write(&secret, vec![7; 1 << 16]).unwrap();
    let (sequence, layer) = (place.sequence("his"), place.layer("his"));
    let checkpoints = sequence.join(names::format_checkpoints(TokenStart(36)));
    let [page, tail] = [names::format_page(TokenStart(16)), names::format_tail(TokenStart(32))];
    for path in [checkpoints, sequence.join(names::TOKENS), layer.join(page), layer.join(tail)] {
        let aside = place.0.path().join("aside");
        let was_there = files::rename(&path, &aside).is_ok();
        symlink(&secret, &path).unwrap();
        let mut archive = Vec::new();
        let line = place.his().state_write("x", &mut archive).unwrap_err().to_string();
        assert!(line.starts_with(&format!("{}: is a symbolic link: ", path.display())), "{line}");
        assert!(!archive.windows(8).any(|bytes| bytes == [7; 8]));
        // Pages and tails are looked at wherever a sequence is listed.
        let is_of_layer = path.starts_with(&layer);
        assert!(!is_of_layer || place.his().seq_cp("x", "copy", ..).is_err());
        fs::remove_file(&path).unwrap();
        if was_there {
            files::rename(&aside, &path).unwrap();
        }
    }
    place.his().state_write("x", std::io::sink()).unwrap();
}

#[test]
fn a_full_disk_is_that_of_the_file_that_is_written() {
    let place = Place::new();
    let full = fs::File::options().write(true).open("/dev/full").unwrap();
    let line = place.his().state_write("x", &full).unwrap_err().to_string();
    assert!(line.starts_with("the stream: No space left"), "{line}");
}

#[test]
fn a_pipe_is_not_waited_for() {
    let place = Place::new();
    let path = place.sequence("his").join(names::POSITIONS);
    mkfifo(&path, Mode::S_IRWXU).unwrap();
    assert_refused(&place.his(), "x", &path, "is no regular file");
    let opened = crate::reader::Sequence::open(&place.sequence("his")).unwrap_err().to_string();
    assert!(opened.ends_with("positions.json: is no regular file"), "{opened}");
}

/// What makes a sequence of a state in which a layer is called so.
fn fill(work: &Path) -> Result<(), SequenceError> {
    let layer = work.join("000");
    fs::create_dir(&layer)
        .and_then(|()| fs::write(layer.join("0000000.page"), "made"))
        .map_err(SequenceError::io(&layer))
}

#[test]
fn nobody_else_gets_into_what_is_being_filled() {
    let place = Place::new();
    let sequences = place.model("his").join("sequences");
    let (empty, work) = (sequences.join("empty"), sequences.join("empty~"));
    fs::create_dir(&empty).unwrap();
    fs::set_permissions(&empty, fs::Permissions::from_mode(0o2775)).unwrap();
    // Without privileges everything is the user's own, and only the permissions can tell.
    let of_other = chown(&empty, Some(4711), Some(4711)).is_ok();
    fs::set_permissions(&empty, fs::Permissions::from_mode(0o2775)).unwrap();
    let access = |path: &Path| {
        let found = path.metadata().unwrap();
        (found.uid(), found.mode() & 0o7777)
    };
    let expected = access(&empty);
    place
        .his()
        .make("empty", |into| {
            assert_eq!(access(&work).1 & 0o777, 0o700);
            assert!(!of_other || access(&work).0 != 4711);
            fill(into)
        })
        .unwrap();
    assert_eq!(access(&empty), expected);
    assert_eq!(fs::read(empty.join("000/0000000.page")).unwrap(), b"made");
    // As in any directory that hands its group down.
    let layer = empty.join("000").metadata().unwrap();
    assert!(!of_other || (layer.gid(), layer.mode() & libc::S_ISGID) == (4711, libc::S_ISGID));
    let usual = sequences.join("usual");
    fs::create_dir(&usual).unwrap();
    place.his().make("new", fill).unwrap();
    assert_eq!(access(&sequences.join("new")), access(&usual));
}

#[test]
fn a_model_without_a_directory_of_sequences_has_none() {
    let place = Place::new();
    fs::remove_dir_all(place.model("his").join("sequences")).unwrap();
    let all = place.his();
    assert!(all.names().unwrap().is_empty());
    assert!(matches!(all.positions("x"), Err(SequenceError::NoSuchSequence(_))));
    assert!(matches!(all.seq_keep("x"), Err(SequenceError::NoSuchSequence(_))));
    all.clear_all().unwrap();
}

#[test]
fn an_operation_works_in_the_directory_that_it_has_opened() {
    let place = Place::new();
    let before = place.private();
    let sequences = place.model("his").join("sequences");
    let moved = place.model("his").join("moved");
    let all = place.his();
    let exchanged = |into: &Path| {
        files::rename(&sequences, &moved)?;
        symlink("../priv/sequences", &sequences).unwrap();
        fill(into)
    };
    all.make("new", exchanged).unwrap();
    assert_eq!(fs::read(moved.join("new/000/0000000.page")).unwrap(), b"made");
    assert_eq!(place.private(), before);
    for (operation, outcome) in told(&all, "x") {
        let line = outcome.expect_err(operation).to_string();
        assert!(line.contains("his/sequences: is a symbolic link: "), "{operation}: {line}");
    }
    assert_eq!(place.private(), before);
}

#[test]
fn what_takes_the_place_of_what_was_made_gets_no_name() {
    let place = Place::new();
    let before = place.private();
    let sequences = place.model("his").join("sequences");
    let (work, aside) = (sequences.join("new~"), sequences.join("aside"));
    let link = || symlink("../../priv/sequences/x", &work).unwrap();
    let directory = || fs::create_dir(&work).unwrap();
    let exchanges: [(&dyn Fn(), &str); 2] =
        [(&link, "is a symbolic link: "), (&directory, "somebody put something else")];
    for (exchange, why) in exchanges {
        let made = place.his().make("new", |into| {
            files::rename(&work, &aside)?;
            exchange();
            fill(into)
        });
        let said = made.unwrap_err().to_string();
        assert!(said.starts_with(&format!("{}: {why}", work.display())), "{said}");
        assert!(!sequences.join("new").exists() && work.symlink_metadata().is_err());
        fs::remove_dir_all(&aside).unwrap();
    }
    assert_eq!(place.private(), before);
}

/// An access list (acl(5)) as the kernel keeps it: of a user by name, and nothing for the group.
fn access_list(user: u32) -> Vec<u8> {
    const NOBODY: u32 = u32::MAX;
    let entries = [(1, 7, NOBODY), (2, 7, user), (4, 0, NOBODY), (16, 7, NOBODY), (32, 0, NOBODY)];
    let mut list = 2_u32.to_le_bytes().to_vec();
    for (tag, rights, id) in entries {
        list.extend(u16::to_le_bytes(tag));
        list.extend(u16::to_le_bytes(rights));
        list.extend(u32::to_le_bytes(id));
    }
    list
}

#[test]
fn access_lists_stay_what_they_are() {
    let place = Place::new();
    let (sequence, sequences) = (place.sequence("his"), place.model("his").join("sequences"));
    let (access, default) = (c"system.posix_acl_access", c"system.posix_acl_default");
    let list = access_list(4712);
    sys::set_extended_attribute(&sequence, access, &list).unwrap();
    sys::set_extended_attribute(&sequence.join(names::TOKENS), access, &list).unwrap();
    // What comes from above is not what the sequence has.
    sys::set_extended_attribute(&sequences, default, &access_list(4713)).unwrap();
    let all = place.his();
    all.seq_rm("x", 34..).unwrap();
    all.seq_cp("x", "copy", ..).unwrap();
    for sequence in [sequence, sequences.join("copy")] {
        let lists = |name: &str, list| sys::extended_attribute(&sequence.join(name), list).unwrap();
        assert_eq!(lists("", access).as_ref(), Some(&list));
        assert_eq!(lists("", default), None);
        assert_eq!(lists(names::TOKENS, access).as_ref(), Some(&list));
        assert_eq!(lists("000", access), None);
    }
    all.make("new", fill).unwrap();
    let new = sys::extended_attribute(&sequences.join("new"), default).unwrap();
    assert_eq!(new, Some(access_list(4713)));
}
