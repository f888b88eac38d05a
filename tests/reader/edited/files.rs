//! What operations leave of the files.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};

use kvfs::page::{Layer, LayerKind, Manifest, names};
use kvfs::reader::{Sequence, longest_prefix};
use kvfs::sequence::{SequenceError, Sequences};

use super::cache::Cell;
use super::{Engine, append};
use crate::common::{Mode, Model, Mount, sys};

/// The names in a layer, in order.
fn layer(engine: &Engine, sequence: &str, layer: u32) -> Vec<String> {
    let path = engine.path(sequence).join(format!("{layer:03}"));
    let entries = fs::read_dir(path).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.collect();
    names.sort_unstable();
    names
}

const FIRST: &str = "0000000.safetensors";
const SECOND: &str = "0000016.safetensors";

#[test]
fn pages_are_shared_and_tails_are_copied() {
    let mut engine = Engine::new();
    let ids = engine.append("a", 40);
    let all = engine.sequences();
    assert_eq!(layer(&engine, "a", 0), [FIRST, SECOND, "0000032.tail"]);

    all.seq_cp("a", "b", ..).unwrap();
    assert_eq!(layer(&engine, "b", 1), [FIRST, SECOND, "0000032.tail"]);
    let inode = |path: &str| fs::metadata(engine.path(path)).unwrap().ino();
    assert_eq!(inode("a/000").min(inode("b/000")), inode("a/000"));
    assert_eq!(inode(&format!("a/000/{FIRST}")), inode(&format!("b/000/{FIRST}")));
    assert_ne!(inode("a/000/0000032.tail"), inode("b/000/0000032.tail"));
    assert!(!engine.path("b").join(names::POSITIONS).exists());

    // The end: a page that is cut becomes a tail again, and no file is needed to say so.
    let directory = inode("b/000");
    all.seq_rm("b", 20..).unwrap();
    assert_eq!(layer(&engine, "b", 1), [FIRST, "0000016.tail"]);
    assert_eq!(fs::metadata(engine.path("b").join(names::TOKENS)).unwrap().len(), 80);
    assert!(!engine.path("b").join(names::POSITIONS).exists());
    assert_ne!(inode("b/000"), directory);
    assert_eq!(layer(&engine, "a", 0), [FIRST, SECOND, "0000032.tail"]);

    // The middle: a page without a token goes, one that has some stays.
    all.seq_rm("a", 10..34).unwrap();
    assert_eq!(layer(&engine, "a", 0), [FIRST, "0000032.tail"]);
    let json = fs::read_to_string(engine.path("a").join(names::POSITIONS)).unwrap();
    let expected = "{\"schema_version\":1,\"edited_at\":40,\"runs\":[[0,10,0,0],[34,6,34,0]],\"next\":[40,40]}\n";
    assert_eq!(json, expected);
    all.seq_add("a", 34.., -24).unwrap();
    assert_eq!(all.seq_pos("a").unwrap(), Some((0, 15)));

    // By its prefix only the untouched part is found; what was copied before is found as a whole.
    let model = engine.model.directory(&engine.mount);
    let found = longest_prefix(&model, &ids).unwrap();
    assert_eq!((found.tokens, found.sequence), (20, Some(engine.path("b"))));
    all.clear("b").unwrap();
    assert_eq!(longest_prefix(&model, &ids).unwrap().tokens, 10);
    let more = engine.append("a", 4);
    assert_eq!(longest_prefix(&model, &[ids, more].concat()).unwrap().tokens, 10);
    // A slot file cannot say that tokens have moved.
    assert!(!model.join("slots/a.bin").exists());
}

#[test]
fn an_interrupted_operation_leaves_nothing_that_counts() {
    let mut engine = Engine::new();
    engine.append("a", 20);
    let all = engine.sequences();
    // What a crash leaves of a copy that was being made.
    let left = engine.path("a~");
    fs::create_dir_all(left.join("000")).unwrap();
    fs::write(left.join(names::TOKENS), [0; 40]).unwrap();
    assert_eq!(all.names().unwrap(), ["a"]);
    all.seq_rm("a", 18..).unwrap();
    assert!(!left.exists());
    assert_eq!(all.seq_pos("a").unwrap(), Some((0, 17)));
    // Limits and permissions stay with the name.
    let quota = std::process::Command::new(env!("CARGO_BIN_EXE_kvfs"))
        .args(["quota", "--size", "1G"])
        .arg(engine.path("a"))
        .status();
    assert!(quota.unwrap().success());
    all.seq_rm("a", 9..).unwrap();
    let shown = std::process::Command::new(env!("CARGO_BIN_EXE_kvfs"))
        .arg("quota")
        .arg(engine.path("a"))
        .output()
        .unwrap();
    let shown = String::from_utf8(shown.stdout).unwrap();
    assert!(shown.contains('1'), "{shown}");

    let refused = |name: &str| matches!(all.seq_rm(name, ..), Err(SequenceError::Name(_)));
    assert!(refused("") && refused("a~") && refused(".a") && refused("a.tmp") && refused("a/b"));
    assert!(matches!(all.seq_rm("b", ..), Err(SequenceError::NoSuchSequence(_))));
    assert!(matches!(all.seq_keep("b"), Err(SequenceError::NoSuchSequence(_))));
    assert!(matches!(all.seq_add("a", .., i64::MAX), Err(SequenceError::Positions(_))));
}

/// It had written where the tokens stand, and not yet removed what is about none.
#[test]
fn a_removal_that_was_interrupted_is_completed_by_the_same_one() {
    let mut engine = Engine::new();
    engine.append("a", 50);
    let all = engine.sequences();
    let page = engine.path("a").join("000").join(SECOND);
    let bytes = fs::read(&page).unwrap();
    all.seq_rm("a", 16..32).unwrap();
    assert!(!page.exists());
    sys::write_and_close(page.with_extension("tmp"), &bytes).unwrap();
    sys::rename(page.with_extension("tmp"), &page).unwrap();
    all.seq_rm("a", 16..32).unwrap();
    assert!(!page.exists());
    // What was removed is gone, also after a crash.
    engine.mount.kill();
    engine.mount.mount();
    assert!(!page.exists());
}

#[test]
fn what_a_writer_left_in_some_layers_is_taken_out() {
    let mut engine = Engine::new();
    engine.append("a", 15);
    let all = engine.sequences();
    assert!(!all.trim("a").unwrap());
    assert_eq!(layer(&engine, "a", 0), ["0000000.tail"]);
    let before = fs::read(engine.path("a/000/0000000.tail")).unwrap();

    // It came as far as the second row of the first layer, which has sealed a page.
    let row = before.len() / 15;
    append(engine.path("a/000/0000000.tail"), &before[..row]);
    append(engine.path("a/000/0000016.tail"), &before[..row]);
    assert_eq!(layer(&engine, "a", 0), [FIRST, "0000016.tail"]);
    assert!(all.trim("a").unwrap());
    assert_eq!(layer(&engine, "a", 0), ["0000000.tail"]);
    assert_eq!(fs::read(engine.path("a/000/0000000.tail")).unwrap(), before);
    assert!(!all.trim("a").unwrap());

    // Ids without rows go as well, and an edited sequence stays where it stands.
    all.seq_rm("a", 3..5).unwrap();
    let (stands, rows) = all.positions("a").unwrap();
    append(engine.path("a").join(names::TOKENS), &7_u32.to_le_bytes());
    assert!(all.trim("a").unwrap());
    assert_eq!(all.positions("a").unwrap(), (stands, rows));
    assert_eq!(fs::metadata(engine.path("a").join(names::TOKENS)).unwrap().len(), 4 * rows);
}

#[test]
fn a_state_is_a_tar_archive() {
    let mut engine = Engine::new();
    let ids = engine.append("a", 40);
    let all = engine.sequences();
    all.seq_rm("a", 20..22).unwrap();
    let mut state = Vec::new();
    all.state_write("a", &mut state).unwrap();
    all.state_read("b", &state[..]).unwrap();
    assert_eq!(layer(&engine, "b", 0), [FIRST, SECOND, "0000032.tail"]);
    assert_eq!(all.positions("b").unwrap(), all.positions("a").unwrap());
    assert_eq!(Sequence::open(&engine.path("b")).unwrap().token_ids().unwrap(), ids);
    let mut again = Vec::new();
    all.state_write("b", &mut again).unwrap();
    assert_eq!(again.len(), state.len());
    // Pages of equal bytes are stored once.
    let inode = |path: &str| fs::metadata(engine.path(path).join(FIRST)).unwrap().ino();
    assert_eq!(inode("a/000"), inode("b/000"));

    assert!(matches!(all.state_read("b", &state[..]), Err(SequenceError::Exists(_))));
    let check = |bytes: &[u8], expected: &str| {
        let error = all.state_read("c", bytes).unwrap_err();
        assert!(error.to_string().contains(expected), "{error}");
        assert!(!engine.path("c").exists() && !engine.path("c~").exists());
    };
    check(&[], "is not complete");
    check(b"no archive", "state of a sequence");
    for part in [2, 3, 5] {
        check(&state[..state.len() / part], "");
    }
    let other = Model::small().named("other");
    other.install(&engine.mount);
    let other = Sequences::open(&other.directory(&engine.mount)).unwrap();
    let error = other.state_read("a", &state[..]).unwrap_err();
    assert!(error.to_string().contains("another cache"), "{error}");
    // A page that is not what its place says is refused by the mount.
    let at = state.windows(FIRST.len()).position(|bytes| bytes == FIRST.as_bytes()).unwrap();
    let mut damaged = state.clone();
    damaged[at - 4 + 512] ^= 1;
    check(&damaged, "");
}

#[test]
fn windows_and_recurrent_layers() {
    let mount = Mount::new(Mode::Passthrough);
    let model = Model::with(|fields| {
        fields.layers = Some(vec![LayerKind::Sliding { window: 20 }, LayerKind::Recurrent]);
        fields.page_tokens = 16;
    });
    model.install(&mount);
    let rows = model.rows(1, 100);
    for start in (0..100).step_by(16) {
        let bytes = model.row_bytes();
        let rows = &rows[start * bytes..(start + 16).min(100) * bytes];
        append(model.tail_path(&mount, "a", 0, start as u64), rows);
    }
    append(model.tokens_path(&mount, "a"), &[7; 400]);
    let snapshot = |tokens: u32| {
        let directory = model.layer(&mount, "a", 1);
        fs::write(directory.join(".state.tmp"), tokens.to_le_bytes()).unwrap();
        let name = format!("state-{tokens:07}.safetensors");
        sys::rename(directory.join(".state.tmp"), directory.join(name)).unwrap();
    };
    [40, 64, 100].into_iter().for_each(snapshot);
    let all = Sequences::open(&model.directory(&mount)).unwrap();
    assert_eq!(all.seq_pos("a").unwrap(), Some((0, 99)));
    // Recurrent layers go back to where a snapshot was taken, and nowhere else.
    let error = all.seq_rm("a", 90..).unwrap_err();
    assert!(matches!(error, SequenceError::NoSnapshot { tokens: 90, .. }), "{error}");
    assert_eq!(all.seq_pos("a").unwrap(), Some((0, 99)));
    snapshot(90);
    all.seq_rm("a", 90..).unwrap();
    assert_eq!(all.seq_pos("a").unwrap(), Some((0, 89)));
    let states = fs::read_dir(model.layer(&mount, "a", 1)).unwrap().count();
    assert_eq!(states, 3);
    let latest = all.latest_snapshot("a", Layer(1)).unwrap();
    let (tokens, path) = latest.unwrap();
    assert_eq!((tokens, fs::read(path).unwrap()), (90, 90_u32.to_le_bytes().to_vec()));
    // The last token, 89, sees from 70 on.
    assert_eq!(all.drop_outside_window("a").unwrap(), 4);
    assert_eq!(all.drop_outside_window("a").unwrap(), 0);
    assert_eq!(all.seq_pos("a").unwrap(), Some((64, 89)));
    let sequence = Sequence::open(&model.sequence(&mount, "a")).unwrap();
    let mut stream = sequence.stream(0..90).unwrap();
    assert_eq!(stream.next_run().unwrap().unwrap().tokens(), 26);
    // Layers with a window go back to where it is whole.
    snapshot(75);
    let error = all.seq_rm("a", 75..).unwrap_err();
    assert!(matches!(error, SequenceError::NoWindow { tokens: 75, .. }), "{error}");
    assert_eq!(all.seq_pos("a").unwrap(), Some((64, 89)));
    snapshot(84);
    all.seq_rm("a", 84..).unwrap();
    assert_eq!(all.seq_pos("a").unwrap(), Some((64, 83)));
}

#[test]
fn a_context_shift_keeps_what_it_drops_to_be_found() {
    let mut engine = Engine::new();
    let ids = engine.append("chat", 60);
    let all = engine.sequences();
    let shift = all.start_context_shift("chat", 4..36, "chat.full").unwrap();
    shift.join().unwrap().unwrap();
    let ids: Vec<u32> = [&ids[..], &engine.append("chat", 10)].concat();
    let kept = ids[..4].iter().chain(&ids[36..]);
    let cells: Vec<Cell> =
        (0..).zip(kept).map(|(position, token)| Cell { token: *token, position }).collect();
    engine.check("chat", &cells);
    // The prompt comes again: all that was computed of it is there.
    let found = longest_prefix(&engine.model.directory(&engine.mount), &ids).unwrap();
    assert_eq!((found.tokens, found.sequence), (60, Some(engine.path("chat.full"))));
    all.seq_cp("chat.full", "again", ..50).unwrap();
    let cells: Vec<Cell> =
        (0..).zip(&ids[..50]).map(|(position, token)| Cell { token: *token, position }).collect();
    engine.check("again", &cells);
}

/// Files below a directory.
fn files_below(directory: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    entries.flat_map(|path| if path.is_dir() { files_below(&path) } else { vec![path] }).collect()
}

#[test]
fn what_an_operation_writes_may_be_read_by_those_who_could_read_the_sequence() {
    crate::require!(fuse, root);
    let mut engine = Engine::new();
    engine.append("a", 60);
    let all = engine.sequences();
    let check = |name: &str| {
        for path in files_below(&engine.path(name)) {
            let found = fs::metadata(&path).unwrap();
            let mode = found.mode() & 0o777;
            assert_eq!((found.uid(), found.gid(), mode & 0o077), (1001, 1002, 0), "{path:?}");
            assert!(
                path.extension().is_none_or(|kind| kind != "tail") || mode == 0o600,
                "{path:?}"
            );
        }
    };
    for path in files_below(&engine.path("a")) {
        chown(&path, Some(1001), Some(1002)).unwrap();
        let mode =
            if path.extension().is_some_and(|kind| kind == "safetensors") { 0o400 } else { 0o600 };
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
    }
    // In the middle of a page.
    all.seq_rm("a", 40..).unwrap();
    check("a");
    all.seq_rm("a", 20..22).unwrap();
    check("a");
    all.context_shift("a", 4..20, "b").unwrap();
    all.seq_cp("b", "c", ..30).unwrap();
    ["a", "b", "c"].into_iter().for_each(check);
}

/// Its first step was done, and then it was ended.
#[test]
fn a_context_shift_that_was_interrupted_is_completed_by_the_same_one() {
    let mut engine = Engine::new();
    engine.append("a", 50);
    engine.append("other", 50);
    let all = engine.sequences();
    all.seq_cp("a", "full", ..).unwrap();
    // Its second step had begun.
    fs::write(engine.path("a").join(".positions.json.tmp"), b"{").unwrap();
    all.context_shift("a", 4..20, "full").unwrap();
    assert!(!engine.path("a").join(".positions.json.tmp").exists());
    assert_eq!(all.seq_pos("a").unwrap(), Some((0, 33)));
    assert_eq!(all.seq_pos("full").unwrap(), Some((0, 49)));
    // What is no copy of the sequence as it is stays, and is an error.
    let taken = |outcome| matches!(outcome, Err(SequenceError::Exists(name)) if name == "full");
    assert!(taken(all.context_shift("other", 4..20, "full")));
    assert!(taken(all.context_shift("a", 4..20, "full")));
    assert_eq!(all.seq_pos("other").unwrap(), Some((0, 49)));
}

#[test]
fn pages_of_an_encoder_are_not_about_tokens() {
    let mount = Mount::new(Mode::Passthrough);
    let model = Model::with(|fields| {
        fields.layers = Some(vec![LayerKind::Attention, LayerKind::Cross]);
        fields.page_tokens = 16;
    });
    model.install(&mount);
    // 40 frames of the encoder, 20 tokens of the decoder.
    for (layer, rows) in [(0, 20), (1, 40)] {
        let bytes = model.rows(u64::from(layer), rows);
        for (index, rows) in bytes.chunks(16 * model.row_bytes()).enumerate() {
            append(model.tail_path(&mount, "a", layer, 16 * index as u64), rows);
        }
    }
    let ids: Vec<u32> = (0..20).collect();
    let bytes: Vec<u8> = ids.iter().flat_map(|id: &u32| id.to_le_bytes()).collect();
    append(model.tokens_path(&mount, "a"), &bytes);
    // A page is checked as any other.
    let page = model.page(1, 48, 9);
    let path = model.page_path(&mount, "a", 1, 48);
    assert!(sys::write_and_close(&path, &page[..page.len() - 1]).is_err());

    let all = Sequences::open(&model.directory(&mount)).unwrap();
    all.seq_cp("a", "b", ..10).unwrap();
    all.seq_rm("a", 2..18).unwrap();
    for (name, tokens) in [("a", 20), ("b", 10)] {
        let sequence = Sequence::open(&model.sequence(&mount, name)).unwrap();
        assert_eq!(sequence.valid_tokens().unwrap(), tokens);
        let (decoder, encoder) = (sequence.layers(), sequence.cross_layers());
        assert_eq!((decoder, &encoder[..]), (vec![Layer(0)], &[Layer(1)][..]));
        assert_eq!(sequence.layer_tokens(Layer(1)).unwrap(), 40);
        let mut stream = sequence.stream_layers(&encoder, 0..40).unwrap();
        let mut rows = Vec::new();
        while let Some(run) = stream.next_run().unwrap() {
            for block in run.blocks() {
                assert_eq!(block.shift, 0);
                rows.push((block.first_position, block.tokens));
            }
        }
        assert_eq!(rows, [(0, 16), (16, 16), (32, 8)]);
    }
    // The tokens do not say what the encoder read.
    assert_eq!(longest_prefix(&model.directory(&mount), &ids).unwrap().tokens, 0);
}

#[test]
fn a_copy_outside_of_a_mount_can_be_edited_too() {
    let directory = tempfile::tempdir().unwrap();
    let model = Model::small();
    let sequence = directory.path().join("m/sequences/a");
    fs::create_dir_all(sequence.join("000")).unwrap();
    fs::create_dir_all(sequence.join("001")).unwrap();
    let manifest: &Manifest = &model.manifest;
    fs::write(directory.path().join("m/manifest.json"), manifest.to_json()).unwrap();
    for layer in 0..2 {
        let path = sequence.join(format!("00{layer}"));
        fs::write(path.join("0000000.safetensors"), model.page(layer, 0, 3)).unwrap();
        fs::write(path.join("0000032.tail"), model.rows(4, 5)).unwrap();
    }
    fs::write(sequence.join(names::TOKENS), [1; 4 * 37]).unwrap();
    let all = Sequences::open(&directory.path().join("m")).unwrap();
    all.seq_rm("a", ..4).unwrap();
    all.seq_add("a", .., -4).unwrap();
    all.seq_rm("a", 20..).unwrap();
    assert_eq!(all.seq_pos("a").unwrap(), Some((0, 19)));
    let tail = |layer: &Path| fs::read(layer.join("0000000.tail")).unwrap();
    assert_eq!(tail(&sequence.join("001")), model.rows(3, 24));
}

#[test]
fn the_command_says_what_it_does() {
    let mut engine = Engine::new();
    engine.append("chat", 40);
    let model = engine.model.directory(&engine.mount);
    let run = |arguments: &[&str]| {
        let output = std::process::Command::new(env!("CARGO_BIN_EXE_kvfs"))
            .arg("seq")
            .arg(arguments[0])
            .arg(&model)
            .args(&arguments[1..])
            .output()
            .unwrap();
        let text = [output.stdout, output.stderr].concat();
        (output.status.code(), String::from_utf8(text).unwrap())
    };
    let done = |arguments: &[&str]| assert_eq!(run(arguments), (Some(0), String::new()));
    done(&["cp", "chat", "kept"]);
    done(&["rm", "chat", "4..10"]);
    done(&["add", "chat", "10..", "-6"]);
    let (_, shown) = run(&["show", "chat"]);
    let expected = "chat: 34 tokens in 40 rows, positions 0 to 33\n  \
         first 4 rows can be found by their prefix\n  \
         rows 0..4 at 0..4, moved by 0\n  rows 10..40 at 4..34, moved by -6\n";
    assert_eq!(shown, expected);
    let (_, shown) = run(&["show"]);
    assert!(shown.contains("kept: 40 tokens in 40 rows, positions 0 to 39\n"), "{shown}");
    // One that cannot be read is told beside the others.
    fs::create_dir_all(model.join("sequences/odd/positions.json")).unwrap();
    let (code, shown) = run(&["show"]);
    assert_eq!(code, Some(1));
    assert!(shown.contains("kept: 40 tokens") && shown.contains("odd/positions.json"), "{shown}");
    assert_eq!(run(&["show", "odd"]).0, Some(1));
    fs::remove_dir_all(model.join("sequences/odd")).unwrap();
    let state = engine.mount.beside("state.tar");
    let state = state.to_str().unwrap();
    done(&["save", "chat", state]);
    done(&["load", "again", state]);
    done(&["div", "again", "..4", "2"]);
    let (_, json) = run(&["show", "again", "--json"]);
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!((&json[0]["tokens"], &json[0]["pos_max"]), (&34.into(), &33.into()));
    let said = run(&["clear", "again"]);
    assert!(said.0 == Some(2) && said.1.contains("add --yes"), "{said:?}");
    assert!(run(&["clear", "again", "--dry-run"]).1.starts_with("would be deleted: 1 sequences"));
    assert!(run(&["show", "again"]).1.starts_with("again: 34 tokens"), "it is still there");
    assert!(run(&["clear", "again", "--yes"]).1.starts_with("deleted: 1 sequences"));
    assert_eq!(run(&["show", "again"]).1, "again: 0 tokens in 0 rows, positions none\n");
    done(&["window", "chat"]);
    let said = run(&["remove-others", "chat"]);
    assert!(said.0 == Some(2) && said.1.contains("2 sequences"), "{said:?}");
    assert!(run(&["remove-others", "chat", "--dry-run"]).1.starts_with("would be deleted: 2"));
    assert_eq!(engine.sequences().names().unwrap().len(), 3);
    // The old name still works.
    assert!(run(&["keep", "chat", "--yes"]).1.starts_with("deleted: 2 sequences"));
    assert_eq!(engine.sequences().names().unwrap(), ["chat"]);

    let (code, line) = run(&["cp", "chat", "chat~"]);
    assert!(code == Some(1) && line.contains("no name of a sequence"), "{line}");
    let (code, line) = run(&["rm", "nobody", ".."]);
    assert!(code == Some(1) && line.contains("no such sequence"), "{line}");
    let (code, line) = run(&["rm", "chat", "7"]);
    assert!(code == Some(2) && line.contains("write positions as"), "{line}");
}
