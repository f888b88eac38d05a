//! What others may put into the directories of a sequence, in a plain directory. What operations do to one that is
//! sound is in `tests/reader/edited`.

use std::fs;
use std::os::unix::fs::symlink;
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
