//! What the end of a sequence and a state that is read must have.

use std::fs;
use std::io::Read as _;

use kvfs::page::{Layer, LayerKind};
use kvfs::sequence::{SequenceError, Sequences};

use super::{Engine, append};
use crate::common::{Mode, Model, Mount};

/// What is done to the names and bytes of an archive.
type Change<'a> = &'a dyn Fn(&mut Vec<(String, Vec<u8>)>);

/// The files of an archive.
fn files(state: &[u8]) -> Vec<(String, Vec<u8>)> {
    let mut archive = tar::Archive::new(state);
    let entries = archive.entries().unwrap().map(|entry| {
        let mut entry = entry.unwrap();
        let mut bytes = Vec::new();
        entry.read_to_end(&mut bytes).unwrap();
        (entry.path().unwrap().to_str().unwrap().to_owned(), bytes)
    });
    entries.collect()
}

fn archive(files: &[(String, Vec<u8>)]) -> Vec<u8> {
    let mut archive = tar::Builder::new(Vec::new());
    for (path, bytes) in files {
        let mut header = tar::Header::new_gnu();
        header.set_size(bytes.len() as u64);
        header.set_mode(0o644);
        archive.append_data(&mut header, path, &bytes[..]).unwrap();
    }
    archive.into_inner().unwrap()
}

#[test]
fn a_state_that_is_not_whole_is_refused() {
    let mut engine = Engine::new();
    engine.append("a", 40);
    let all = engine.sequences();
    let mut state = Vec::new();
    all.state_write("a", &mut state).unwrap();
    let whole = files(&state);
    let check = |change: Change<'_>, expected: &str| {
        let mut changed = whole.clone();
        change(&mut changed);
        let error = all.state_read("b", &archive(&changed)[..]).unwrap_err();
        assert!(matches!(error, SequenceError::State(_)), "{error}");
        assert!(error.to_string().contains(expected), "{error}");
        assert!(!engine.path("b").exists() && !engine.path("b~").exists());
    };
    let without = |part: &'static str| {
        move |files: &mut Vec<(String, Vec<u8>)>| files.retain(|(path, _)| !path.contains(part))
    };
    check(&without("001/0000016"), "is not whole: layer 1 lacks the rows from token 16 on");
    check(&without("000/0000032.tail"), "is not whole: layer 0 lacks the rows from token 32 on");
    check(&without("001/"), "is not whole: layer 1 lacks the rows from token 0 on");
    let tokens = |bytes: &'static [u8]| {
        move |files: &mut Vec<(String, Vec<u8>)>| files.last_mut().unwrap().1.extend(bytes)
    };
    check(&tokens(&[1; 8]), "is not whole: layer 0 has rows of 40 of 42 tokens");
    check(&tokens(&[1; 1]), "tokens");
    let positions = |json: &'static str| {
        move |files: &mut Vec<(String, Vec<u8>)>| {
            files.insert(1, ("positions.json".to_owned(), json.as_bytes().to_vec()));
        }
    };
    check(&positions("{}"), "positions.json cannot be read");
    let json = r#"{"schema_version":1,"edited_at":0,"runs":[[0,90,0,0]],"next":[90,90]}"#;
    check(&positions(json), "is not whole: positions.json is about 90 tokens, and there are 40");
    // What differs of another cache is said.
    let manifest = |from: &'static str, to: &'static str| {
        move |files: &mut Vec<(String, Vec<u8>)>| {
            let text = String::from_utf8(files[0].1.clone()).unwrap();
            assert!(text.contains(from), "{text}");
            files[0].1 = text.replacen(from, to, 1).into_bytes();
        }
    };
    let revision = manifest("{", r#"{"model_revision": "r2", "salt": "secret","#);
    let said = "is of another cache: model_revision is \"r2\", here it is absent; salt differs";
    check(&revision, said);
    all.state_read("b", &archive(&whole)[..]).unwrap();
}

#[test]
fn an_end_that_looks_at_rows_that_are_gone_is_refused() {
    let mount = Mount::new(Mode::Passthrough);
    let model = Model::with(|fields| {
        fields.layers = Some(vec![LayerKind::Attention, LayerKind::Sliding { window: 20 }]);
        fields.page_tokens = 16;
    });
    model.install(&mount);
    for layer in 0..2 {
        for (index, rows) in model.rows(9, 200).chunks(16 * model.row_bytes()).enumerate() {
            append(model.tail_path(&mount, "a", layer, 16 * index as u64), rows);
        }
    }
    append(model.tokens_path(&mount, "a"), &[1; 4 * 200]);
    let all = Sequences::open(&model.directory(&mount)).unwrap();
    // Of the window's layer only rows from 176 on stay.
    all.drop_outside_window("a").unwrap();
    let names = || {
        let entries = fs::read_dir(model.layer(&mount, "a", 1)).unwrap();
        let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name()).collect();
        names.sort_unstable();
        names
    };
    let before = names();
    for (end, rows) in [(190, 160..176), (165, 144..165), (150, 128..150)] {
        let error = all.seq_rm("a", end..).unwrap_err();
        let SequenceError::NoWindow { layer, rows: gone, tokens, least } = &error else {
            panic!("{error}");
        };
        assert_eq!((*layer, gone.clone(), *tokens, *least), (Layer(1), rows, end, 196));
        assert!(matches!(all.seq_cp("a", "b", ..end), Err(SequenceError::NoWindow { .. })));
        assert_eq!(names(), before);
    }
    let said = all.seq_rm("a", 190..).unwrap_err().to_string();
    let expected = "layer 1 has a window, and its rows 160 to 175 are gone, which an end after 190 tokens \
                    looks at: it can end after 196 tokens or more, or be cleared";
    assert_eq!(said, expected);
    all.seq_rm("a", 196..).unwrap();
    assert_eq!(all.seq_pos("a").unwrap(), Some((176, 195)));
    all.seq_rm("a", ..).unwrap();
    assert_eq!(all.seq_pos("a").unwrap(), None);
}

/// A model with a window that begins in the middle of a page, and a sequence of 102 tokens as a slot leaves it.
fn with_window_rows(mount: &Mount) -> (Model, Sequences) {
    let model = Model::with(|fields| {
        fields.layers = Some(vec![LayerKind::Attention, LayerKind::Sliding { window: 20 }]);
        fields.page_tokens = 16;
    });
    model.install(mount);
    let (rows, bytes) = (model.rows(9, 102), model.row_bytes());
    for (index, rows) in rows.chunks(16 * bytes).enumerate() {
        append(model.tail_path(mount, "a", 0, 16 * index as u64), rows);
    }
    append(model.layer(mount, "a", 1).join("window-0000082.rows"), &rows[82 * bytes..96 * bytes]);
    append(model.tail_path(mount, "a", 1, 96), &rows[96 * bytes..]);
    for tokens in [20, 102] {
        let path = model.sequence(mount, "a").join(format!("checkpoints-{tokens:07}.llama"));
        append(path, format!("after {tokens}").as_bytes());
    }
    append(model.tokens_path(mount, "a"), &[1; 4 * 102]);
    let all = Sequences::open(&model.directory(mount)).unwrap();
    (model, all)
}

#[test]
fn rows_of_a_window_and_checkpoints_come_along() {
    let mount = Mount::new(Mode::Passthrough);
    let (model, all) = with_window_rows(&mount);
    let beside = |name: &str| {
        let sequence = model.sequence(&mount, name);
        let names =
            ["001/window-0000082.rows", "checkpoints-0000020.llama", "checkpoints-0000102.llama"];
        names.map(|name| fs::read(sequence.join(name)).ok())
    };
    let expected = beside("a");
    assert!(expected.iter().all(Option::is_some));
    all.seq_cp("a", "b", ..).unwrap();
    assert_eq!(beside("b"), expected);
    let mut state = Vec::new();
    all.state_write("a", &mut state).unwrap();
    all.state_read("c", &state[..]).unwrap();
    assert_eq!(beside("c"), expected);
    assert_eq!(all.positions("c").unwrap().1, 102);
    let whole = files(&state);
    let refused = |change: Change<'_>| {
        let mut changed = whole.clone();
        change(&mut changed);
        let error = all.state_read("d", &archive(&changed)[..]).unwrap_err().to_string();
        assert!(error.contains("is not whole") && error.contains("layer 1"), "{error}");
    };
    refused(&|files| files.retain(|(path, _)| !path.contains("window")));
    refused(&|files| {
        let (_, rows) = files.iter_mut().find(|(path, _)| path.contains("window")).unwrap();
        rows.truncate(rows.len() - model.row_bytes());
    });
}

#[test]
fn what_is_about_tokens_that_go_goes_with_them() {
    let mount = Mount::new(Mode::Passthrough);
    let (model, all) = with_window_rows(&mount);
    let beside = |name: &str| {
        let layers = [model.sequence(&mount, name), model.layer(&mount, name, 1)];
        let names = layers.iter().flat_map(|directory| fs::read_dir(directory).unwrap());
        let names = names.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<_> =
            names.filter(|name| name.contains("window") || name.contains("checkpoints")).collect();
        names.sort_unstable();
        names
    };
    all.seq_cp("a", "b", ..).unwrap();
    all.seq_rm("b", ..).unwrap();
    assert_eq!(beside("b"), [""; 0], "all tokens went");
    all.seq_cp("a", "c", ..).unwrap();
    all.clear("c").unwrap();
    assert_eq!(beside("c"), [""; 0]);

    let model = Model::small().named("plain");
    model.install(&mount);
    for layer in 0..model.manifest.geometry().num_layers() {
        append(model.tail_path(&mount, "a", layer, 0), &model.rows(3, 10));
    }
    append(model.tokens_path(&mount, "a"), &[1; 40]);
    for name in ["checkpoints-0000004.llama", "checkpoints-0000010.llama", "notes"] {
        append(model.sequence(&mount, "a").join(name), b"beside");
    }
    let all = Sequences::open(&model.directory(&mount)).unwrap();
    all.seq_rm("a", 6..).unwrap();
    let directory = model.sequence(&mount, "a");
    let is_there = |name: &str| directory.join(name).exists();
    assert!(is_there("notes") && is_there("checkpoints-0000004.llama"));
    assert!(!is_there("checkpoints-0000010.llama"), "others may come to be ten again");
}
