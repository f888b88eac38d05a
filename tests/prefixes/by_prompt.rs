//! `prefixes/match`: written a prompt, it tells who has most of it.

use std::io::{Read, Write};
use std::os::unix::fs::FileExt;

use kvfs::page::LayerKind;
use kvfs::reader::{PrefixMatch, ReadError, longest_prefix};

use crate::common::sys::{assert_errno, errno, open, write};
use crate::common::{Mode, Model, Mount};
use crate::writer::{Sequence, bytes};

in_both_modes!(
    a_match_ends_in_the_middle_of_a_page,
    a_window_needs_only_what_it_covers,
    a_recurrent_layer_shares_nothing,
    pages_of_many_tokens_are_told_apart_to_the_end,
    a_question_is_asked_with_a_shell,
    many_questions_through_one_descriptor,
    processes_that_share_a_descriptor_ask_in_turn,
    questions_are_bounded,
    pages_written_in_place_count_as_soon_as_they_are_closed,
);

fn ask(mount: &Mount, model: &Model, prompt: &[u32]) -> PrefixMatch {
    longest_prefix(&model.directory(mount), prompt).unwrap()
}

fn a_match_ends_in_the_middle_of_a_page(mode: Mode) {
    let (mount, model) = (Mount::new(mode), Model::small());
    model.install(&mount);
    assert_eq!(ask(&mount, &model, &[1, 2]), PrefixMatch { tokens: 0, sequence: None });
    let mut sequence = Sequence::new(&model, "chat");
    sequence.append(&mount, &model, &(0..70).collect::<Vec<_>>());
    for count in [0, 1, 31, 32, 33, 64, 69, 70] {
        let mut prompt: Vec<u32> = (0..count).collect();
        prompt.push(1000);
        let found = ask(&mount, &model, &prompt);
        assert_eq!(found.tokens, u64::from(count));
        let expected = (count > 0).then(|| model.sequence(&mount, "chat"));
        assert_eq!(found.sequence, expected);
    }
    assert_eq!(ask(&mount, &model, &(0..50).collect::<Vec<_>>()).tokens, 50);
    assert_eq!(ask(&mount, &model, &[]).tokens, 0);
    // Tokens whose rows are not there yet do not count.
    sequence.append_tokens(&mount, &model, &[70, 71]);
    assert_eq!(ask(&mount, &model, &(0..80).collect::<Vec<_>>()).tokens, 70);
}

fn pages_written_in_place_count_as_soon_as_they_are_closed(mode: Mode) {
    // No commit comes in between that would seal them.
    let mount = Mount::with_options(mode, &["--commit-interval", "3600"]);
    let model = Model::small();
    model.install(&mount);
    let prompt: Vec<u32> = (0..320).collect();
    std::fs::write(model.tokens_path(&mount, "chat"), bytes(&prompt)).unwrap();
    for start in (0..320).step_by(32) {
        for layer in 0..2 {
            let path = model.page_path(&mount, "chat", layer, start);
            std::fs::write(path, model.page(layer, start, start)).unwrap();
        }
        let found = ask(&mount, &model, &prompt);
        assert_eq!(found.tokens, start + 32);
        // Of one that is still being written nothing counts.
        let path = model.page_path(&mount, "other", 0, start);
        let _writer = std::fs::File::create(path).unwrap();
        assert_eq!(ask(&mount, &model, &prompt), found);
    }
}

fn a_window_needs_only_what_it_covers(mode: Mode) {
    let mount = Mount::new(mode);
    let model = Model::with(|fields| {
        fields.layers = Some(vec![LayerKind::Attention, LayerKind::Sliding { window: 40 }]);
    });
    model.install(&mount);
    let mut sequence = Sequence::new(&model, "chat");
    let tokens: Vec<u32> = (0..160).collect();
    sequence.append(&mount, &model, &tokens);
    std::fs::remove_file(sequence.page(&mount, &model, 1, 0)).unwrap();
    std::fs::remove_file(sequence.page(&mount, &model, 1, 1)).unwrap();
    // 160 - 40 lies in page 3, which is there.
    assert_eq!(ask(&mount, &model, &tokens).tokens, 160);
    // 100 - 40 lies in page 1, which is not, and so on down to the beginning.
    assert_eq!(ask(&mount, &model, &tokens[..100]).tokens, 0);
    assert_eq!(ask(&mount, &model, &tokens[..104]).tokens, 104);
}

fn a_recurrent_layer_shares_nothing(mode: Mode) {
    let mount = Mount::new(mode);
    let model = Model::with(|fields| {
        fields.layers = Some(vec![LayerKind::Attention, LayerKind::Recurrent]);
    });
    model.install(&mount);
    let mut sequence = Sequence::new(&model, "chat");
    sequence.append_tokens(&mount, &model, &[1, 2, 3]);
    sequence.append_rows(&mount, &model, 0, 3);
    assert_eq!(ask(&mount, &model, &[1, 2, 3]).tokens, 0);
}

fn pages_of_many_tokens_are_told_apart_to_the_end(mode: Mode) {
    let mount = Mount::new(mode);
    let model = Model::with(|fields| {
        (fields.num_layers, fields.num_kv_heads) = (1, 1);
        fields.page_tokens = 2048;
    });
    model.install(&mount);
    // They differ behind what the index keeps of a page.
    let common: Vec<u32> = (0..1500).collect();
    for (name, last) in [("one", 1), ("two", 2), ("three", 3)] {
        let mut sequence = Sequence::new(&model, name);
        let tokens = [common.as_slice(), &[last; 600]].concat();
        sequence.append_tokens(&mount, &model, &tokens);
        let rows = model.rows(7, 2048);
        let path = model.tail_path(&mount, name, 0, 0);
        write(&open(path, crate::writer::APPEND).unwrap(), &rows).unwrap();
    }
    for (name, last) in [("one", 1), ("two", 2), ("three", 3)] {
        let prompt = [common.as_slice(), &[last; 100], &[9]].concat();
        let found = ask(&mount, &model, &prompt);
        assert_eq!(found.tokens, 1600);
        assert_eq!(found.sequence, Some(model.sequence(&mount, name)));
    }
}

fn a_question_is_asked_with_a_shell(mode: Mode) {
    let (mount, model) = (Mount::new(mode), Model::small());
    model.install(&mount);
    let mut sequence = Sequence::new(&model, "chat");
    sequence.append(&mount, &model, &[1, 2, 3, 4]);
    let path = model.directory(&mount).join("prefixes/match");
    let expected = "{\"sequence\":\"chat\",\"tokens\":3}\n";
    // Reading goes on where writing ended, or begins at 0.
    let mut file = std::fs::File::options().read(true).write(true).open(&path).unwrap();
    file.write_all(&bytes(&[1, 2])).unwrap();
    file.write_all(&bytes(&[3, 9])).unwrap();
    let mut text = String::new();
    file.read_to_string(&mut text).unwrap();
    assert_eq!(text, expected);
    let mut again = vec![0; expected.len()];
    file.read_exact_at(&mut again, bytes(&[1, 2, 3, 9]).len() as u64).unwrap();
    assert_eq!(again, expected.as_bytes());
    let file = std::fs::File::options().read(true).write(true).open(&path).unwrap();
    (&file).write_all(&bytes(&[1, 2, 3])).unwrap();
    file.read_exact_at(&mut again, 0).unwrap();
    assert_eq!(again, expected.as_bytes());
    // What is written after an answer continues the question.
    (&file).write_all(&bytes(&[4])).unwrap();
    file.read_exact_at(&mut again, 0).unwrap();
    assert_eq!(String::from_utf8(again).unwrap(), expected.replace('3', "4"));
}

fn answer_of(tokens: usize) -> String {
    format!("{{\"sequence\":\"chat\",\"tokens\":{tokens}}}\n")
}

fn many_questions_through_one_descriptor(mode: Mode) {
    let (mount, model) = (Mount::new(mode), Model::small());
    model.install(&mount);
    let mut sequence = Sequence::new(&model, "chat");
    let tokens: Vec<u32> = (1..41).collect();
    sequence.append(&mount, &model, &tokens);
    let path = model.directory(&mount).join("prefixes/match");
    let converse = |options: &mut std::fs::OpenOptions, is_begun: bool| {
        let mut file = options.read(true).write(true).open(&path).unwrap();
        if is_begun {
            // A program that looks before it asks.
            let mut nothing = String::new();
            file.read_to_string(&mut nothing).unwrap();
            assert_eq!(nothing, "{\"sequence\":null,\"tokens\":0}\n");
        }
        // What reads is another descriptor of the same open file.
        let mut other = file.try_clone().unwrap();
        let mut asked = 0;
        for piece in [2, 1, 1, 30, 6] {
            file.write_all(&bytes(&tokens[asked..asked + piece])).unwrap();
            asked += piece;
            let mut answer = String::new();
            other.read_to_string(&mut answer).unwrap();
            assert_eq!(answer, answer_of(asked));
            // The same from the beginning, as pread(2) asks.
            let mut again = vec![0; answer.len()];
            file.read_exact_at(&mut again, 0).unwrap();
            assert_eq!(again, answer.as_bytes());
        }
    };
    converse(&mut std::fs::File::options(), false);
    converse(&mut std::fs::File::options(), true);
    converse(std::fs::File::options().append(true), false);
}

fn processes_that_share_a_descriptor_ask_in_turn(mode: Mode) {
    let (mount, model) = (Mount::new(mode), Model::small());
    model.install(&mount);
    let mut sequence = Sequence::new(&model, "chat");
    sequence.append(&mount, &model, &[1, 2, 3, 4, 5, 6]);
    let path = model.directory(&mount).join("prefixes/match");
    let mut file = std::fs::File::options().read(true).write(true).open(path).unwrap();
    for first in [1, 3, 5] {
        file.write_all(&bytes(&[first])).unwrap();
        let mut answer = String::new();
        file.read_to_string(&mut answer).unwrap();
        assert_eq!(answer, answer_of(first as usize));
        let script = format!("printf '\\{:03o}\\0\\0\\0' >&0; cat", first + 1);
        let mut child = std::process::Command::new("sh");
        child.args(["-c", &script]).stdin(file.try_clone().unwrap());
        child.stdout(std::process::Stdio::piped());
        let child = crate::common::forks::spawn(&mut child).unwrap();
        let told = child.wait_with_output().unwrap();
        assert_eq!(String::from_utf8(told.stdout).unwrap(), answer_of(first as usize + 1));
    }
}

fn questions_are_bounded(mode: Mode) {
    let (mount, model) = (Mount::new(mode), Model::small());
    model.install(&mount);
    let path = model.directory(&mount).join("prefixes/match");
    let mut open_files: Vec<_> = (0..64).map(|_| open(&path, libc::O_RDWR).unwrap()).collect();
    assert_errno(open(&path, libc::O_RDWR), libc::EAGAIN);
    open_files.pop();
    let file =
        crate::common::eventually("a question to be closed", || open(&path, libc::O_RDWR).ok());
    let piece = vec![0; 1 << 20];
    for _ in 0..16 {
        write(&file, &piece).unwrap();
    }
    assert_eq!(errno(&write(&file, &piece)), libc::EFBIG);
    let prompt = vec![0; (16 << 20) / 4 + 1];
    let refused = longest_prefix(&model.directory(&mount), &prompt);
    assert!(matches!(refused, Err(ReadError::Io { .. } | ReadError::Arguments(_))), "{refused:?}");
    drop(open_files);
    let nowhere = longest_prefix(mount.path(), &[1]);
    assert!(matches!(nowhere, Err(ReadError::Manifest { .. })), "{nowhere:?}");
    drop(file);
    let model_without_manifest = mount.join("models/empty");
    std::fs::create_dir(&model_without_manifest).unwrap();
    let refused = longest_prefix(&model_without_manifest, &[1]);
    assert!(matches!(refused, Err(ReadError::Manifest { .. })), "{refused:?}");
}
