//! Sequences lose their last pages first, in all layers, and the tokens with them.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use kvfs::page::{
    Dtype, Layer, LayerKind, StatePlace, StateShape, StateTensor, TokenStart, names, pack_state,
};

use crate::common::sys::{assert_errno, open, set_modified, setxattr};
use crate::common::{Mode, Model, Mount, eventually};
use crate::writer::Sequence;
use crate::{limit, removed, settle, wait_until_gone};

in_both_modes!(a_sequence_in_use_loses_nothing_before_what_is_used, a_cut_is_one_step_for_a_crash,);
in_served_mode!(
    many_states_go_before_the_page_that_they_come_after,
    states_go_with_the_pages_that_they_come_after,
    the_end_of_the_oldest_sequence_goes_first,
    a_sequence_that_is_too_old_goes_whole,
    a_conversation_that_is_read_as_a_slot_stays,
    a_copy_that_is_being_made_stays,
    shared_pages_free_nothing_until_the_last_sequence_goes,
    pages_that_another_model_shares_let_no_more_sequences_go,
    a_sequence_whose_tokens_were_moved_goes_whole,
    limits_are_for_directories_that_hold_whole_things,
);

/// 32 tokens of one layer.
const PAGE_BYTES: u64 = 8192;

fn sequence(mount: &Mount, model: &Model, name: &str, first: u32, tokens: u32) -> Sequence {
    let mut sequence = Sequence::new(model, name);
    let ids: Vec<u32> = (first..first + tokens).collect();
    sequence.append(mount, model, &ids);
    sequence
}

/// Tokens of which `tokens` tells, and pages of each layer; nothing else may be there.
fn shape(mount: &Mount, model: &Model, name: &str) -> Option<(u64, Vec<Vec<String>>)> {
    let directory = model.sequence(mount, name);
    let tokens = fs::metadata(directory.join("tokens")).ok()?.len() / 4;
    let list = |layer: u32| {
        let mut names: Vec<String> = fs::read_dir(model.layer(mount, name, layer))
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    };
    Some((tokens, (0..2).map(list).collect()))
}

fn pages(starts: &[u32]) -> Vec<Vec<String>> {
    let names: Vec<String> = starts.iter().map(|start| format!("{start:07}.safetensors")).collect();
    vec![names.clone(), names]
}

fn the_end_of_the_oldest_sequence_goes_first(mode: Mode) {
    let mount = Mount::new(mode);
    let model = Model::small();
    model.install(&mount);
    // Three full pages and a tail in each of two layers.
    let old = sequence(&mount, &model, "old", 0, 100);
    std::thread::sleep(std::time::Duration::from_millis(20));
    let new = sequence(&mount, &model, "new", 5000, 100);
    let prompt = &old.tokens[..90];
    let held = |name: &str| shape(&mount, &model, name).unwrap();
    let tail = |start: u32, pages: Vec<Vec<String>>| -> Vec<Vec<String>> {
        let name = format!("{start:07}.tail");
        pages.into_iter().map(|names| [names, vec![name.clone()]].concat()).collect()
    };
    assert_eq!(held("old"), (100, tail(96, pages(&[0, 32, 64]))));
    let total = 2 * (6 * PAGE_BYTES + 2 * 4 * 128 + 400);
    limit(&model.directory(&mount), "quota", total - PAGE_BYTES / 2);
    let directory = model.sequence(&mount, "old");
    wait_until_gone(&directory.join("000/0000064.safetensors"));
    settle();
    let (tokens, left) = held("old");
    assert_eq!((tokens, left), (64, pages(&[0, 32])));
    assert_eq!(held("new"), (100, tail(96, pages(&[0, 32, 64]))));
    // What is left is found, and goes on.
    let found = kvfs::reader::longest_prefix(&model.directory(&mount), prompt).unwrap();
    assert_eq!(found.tokens, 64);
    let mut old = Sequence { tokens: old.tokens[..64].to_vec(), rows: vec![64; 2], ..old };
    old.append(&mount, &model, &[7, 8, 9]);
    assert_eq!(held("old"), (67, tail(64, pages(&[0, 32]))));
    assert!(removed(&mount, "size") >= 4);
    drop(new);
}

fn states_go_with_the_pages_that_they_come_after(mode: Mode) {
    let mount = Mount::new(mode);
    let tensor = StateTensor { name: "ssm".to_owned(), dtype: Dtype::F32, shape: vec![1024] };
    let state = StateShape { state: vec![tensor] };
    let model = Model::with(|fields| {
        fields.layers = Some(vec![LayerKind::Attention, LayerKind::State(state)]);
    });
    model.install(&mount);
    let mut sequence = Sequence::new(&model, "chat");
    sequence.append_tokens(&mount, &model, &(0..96).collect::<Vec<_>>());
    sequence.append_rows(&mount, &model, 0, 96);
    let name = |row: u64| names::format_state(TokenStart(row));
    for row in [32, 64, 90, 96] {
        let place = StatePlace::new(&model.manifest, Layer(1), TokenStart(row)).unwrap();
        let seen: Vec<u8> = (0..u32::try_from(row).unwrap()).flat_map(u32::to_le_bytes).collect();
        let prefix = model.manifest.prefix_of(&seen).unwrap();
        let file = pack_state(&place, prefix, &[7; 4096]).unwrap();
        fs::write(model.layer(&mount, "chat", 1).join(name(row)), file).unwrap();
    }
    let directory = model.sequence(&mount, "chat");
    // Three pages and four states of as many bytes.
    limit(&directory, "quota", 7 * PAGE_BYTES);
    wait_until_gone(&directory.join("001").join(name(96)));
    settle();
    let left = [pages(&[0, 32])[0].clone(), vec![name(32), name(64)]].to_vec();
    assert_eq!(shape(&mount, &model, "chat"), Some((64, left)));
    let found = kvfs::reader::longest_prefix(&model.directory(&mount), &sequence.tokens).unwrap();
    assert_eq!(found.tokens, 64);
}

fn a_sequence_whose_tokens_were_moved_goes_whole(mode: Mode) {
    let mount = Mount::new(mode);
    let model = Model::small();
    model.install(&mount);
    sequence(&mount, &model, "old", 0, 100);
    let all = kvfs::sequence::Sequences::open(&model.directory(&mount)).unwrap();
    all.seq_rm("old", 4..10).unwrap();
    std::thread::sleep(std::time::Duration::from_millis(20));
    sequence(&mount, &model, "new", 5000, 100);
    let held = shape(&mount, &model, "new");
    let total = 2 * (6 * PAGE_BYTES + 2 * 4 * 128 + 400);
    limit(&model.directory(&mount), "quota", total - PAGE_BYTES / 2);
    // Rows in the place of its last ones would stand elsewhere.
    wait_until_gone(&model.sequence(&mount, "old"));
    assert_eq!(shape(&mount, &model, "new"), held);
}

fn a_sequence_in_use_loses_nothing_before_what_is_used(mode: Mode) {
    let mount = Mount::new(mode);
    let model = Model::small();
    model.install(&mount);
    sequence(&mount, &model, "a", 0, 128);
    let directory = model.sequence(&mount, "a");
    let reader = open(directory.join("001/0000064.safetensors"), libc::O_RDONLY).unwrap();
    limit(directory.parent().unwrap(), "quota", 1);
    wait_until_gone(&directory.join("000/0000096.safetensors"));
    settle();
    assert_eq!(shape(&mount, &model, "a").unwrap(), (96, pages(&[0, 32, 64])));
    // A pin holds everything before it as well.
    setxattr(directory.join("000/0000032.safetensors"), "user.kvfs.pin", b"1").unwrap();
    drop(reader);
    wait_until_gone(&directory.join("000/0000064.safetensors"));
    settle();
    assert_eq!(shape(&mount, &model, "a").unwrap(), (64, pages(&[0, 32])));
    // Whoever appends to `tokens` is using the sequence.
    let writer = open(directory.join("tokens"), libc::O_WRONLY | libc::O_APPEND).unwrap();
    setxattr(directory.join("000/0000032.safetensors"), "user.kvfs.pin", b"0").unwrap();
    settle();
    assert_eq!(shape(&mount, &model, "a").unwrap(), (64, pages(&[0, 32])));
    drop(writer);
    wait_until_gone(&directory);
    assert!(mount.join("models/small/manifest.json").exists());
}

fn a_sequence_that_is_too_old_goes_whole(mode: Mode) {
    let mount = Mount::new(mode);
    let model = Model::small();
    model.install(&mount);
    sequence(&mount, &model, "a", 0, 70);
    sequence(&mount, &model, "b", 500, 70);
    limit(&model.sequence(&mount, "a"), "ttl", 1);
    wait_until_gone(&model.sequence(&mount, "a"));
    settle();
    assert_eq!(shape(&mount, &model, "b").unwrap().0, 70);
    assert_eq!(removed(&mount, "ttl"), 7);
    // The same name begins anew.
    let again = sequence(&mount, &model, "a", 900, 40);
    assert_eq!(shape(&mount, &model, "a").unwrap().0, again.tokens.len() as u64);
}

fn shared_pages_free_nothing_until_the_last_sequence_goes(mode: Mode) {
    let mount = Mount::new(mode);
    let model = Model::small();
    model.install(&mount);
    let first = sequence(&mount, &model, "a", 0, 64);
    std::thread::sleep(std::time::Duration::from_millis(20));
    first.fork(&mount, &model, "b");
    let mut second = Sequence { name: "b".to_owned(), ..first.clone() };
    second.append(&mount, &model, &(64..96).collect::<Vec<u32>>());
    let shared = model.sequence(&mount, "a").join("000/0000000.safetensors");
    assert_eq!(std::os::unix::fs::MetadataExt::nlink(&fs::metadata(&shared).unwrap()), 2);
    let sequences = model.directory(&mount).join("sequences");
    // Four pages that are shared, two that are not.
    limit(&sequences, "quota", 100 * PAGE_BYTES);
    settle();
    let used = crate::common::sys::getxattr(&sequences, "user.kvfs.used_bytes").unwrap();
    assert_eq!(used, (6 * PAGE_BYTES + 256 + 384).to_string());
    limit(&sequences, "quota", 5 * PAGE_BYTES);
    wait_until_gone(&model.sequence(&mount, "a"));
    settle();
    assert_eq!(shape(&mount, &model, "b").unwrap(), (64, pages(&[0, 32])));
}

fn a_cut_is_one_step_for_a_crash(mode: Mode) {
    let mut mount = Mount::with_options(mode, &["--commit-interval", "0.01"]);
    let model = Model::small();
    model.install(&mount);
    let whole = sequence(&mount, &model, "a", 0, 32 * 40);
    crate::common::sys::sync_directory(mount.path()).unwrap();
    for round in 0..8_u64 {
        limit(&model.directory(&mount), "quota", (70 - round * 8) * PAGE_BYTES);
        std::thread::sleep(std::time::Duration::from_millis(700 + round * 97));
        mount.crash();
        // Cutting goes on right after the mount; what is read between two cuts belongs together.
        let read = || {
            let directory = model.directory(&mount);
            let found = kvfs::reader::longest_prefix(&directory, &whole.tokens).unwrap();
            (shape(&mount, &model, "a").unwrap(), found.tokens)
        };
        let ((tokens, mut layers), found) = eventually("no cut while looking", || {
            let seen = read();
            (seen == read()).then_some(seen)
        });
        if tokens == 32 * 40 {
            // The tail behind the last page.
            for names in &mut layers {
                names.retain(|name| name.ends_with("safetensors"));
            }
        }
        let starts: Vec<u32> = (0..u32::try_from(tokens).unwrap()).step_by(32).collect();
        assert_eq!(layers, pages(&starts), "round {round}");
        assert_eq!(found, tokens, "round {round}");
    }
    assert!(shape(&mount, &model, "a").unwrap().0 < 32 * 40);
}

fn limits_are_for_directories_that_hold_whole_things(mode: Mode) {
    let mount = Mount::new(mode);
    let model = Model::small();
    model.install(&mount);
    sequence(&mount, &model, "a", 0, 40);
    let directory = model.sequence(&mount, "a");
    let set = |path: &Path, name: &str, value: &[u8]| setxattr(path, name, value);
    assert_errno(set(&directory.join("000"), "user.kvfs.quota", b"1"), libc::EOPNOTSUPP);
    assert_errno(set(mount.path(), "user.kvfs.quota", b"1"), libc::EOPNOTSUPP);
    assert_errno(set(&directory.join("tokens"), "user.kvfs.ttl", b"1"), libc::EOPNOTSUPP);
    let page = directory.join("000/0000000.safetensors");
    assert_errno(set(&page, "user.kvfs.ttl", b"1"), libc::EOPNOTSUPP);
    let plain = mount.files("plain");
    fs::write(&plain, b"x").unwrap();
    assert_errno(set(&plain, "user.kvfs.quota", b"1"), libc::EOPNOTSUPP);
    for wrong in ["", "0", "-1", "1K", "1.5"] {
        assert_errno(set(&directory, "user.kvfs.quota", wrong.as_bytes()), libc::EINVAL);
    }
    settle();
    assert_eq!(shape(&mount, &model, "a").unwrap().0, 40);
}

fn many_states_go_before_the_page_that_they_come_after(mode: Mode) {
    let mount = Mount::new(mode);
    let tensor = StateTensor { name: "ssm".to_owned(), dtype: Dtype::F32, shape: vec![1024] };
    let state = StateShape { state: vec![tensor] };
    let model = Model::with(|fields| {
        fields.layers = Some(vec![LayerKind::Attention, LayerKind::State(state)]);
        fields.page_tokens = 256;
    });
    model.install(&mount);
    let mut sequence = Sequence::new(&model, "chat");
    sequence.append_tokens(&mount, &model, &(0..200).collect::<Vec<_>>());
    sequence.append_rows(&mount, &model, 0, 200);
    let layer = model.layer(&mount, "chat", 1);
    for row in 1..=200_u32 {
        let at = TokenStart(u64::from(row));
        let place = StatePlace::new(&model.manifest, Layer(1), at).unwrap();
        let seen: Vec<u8> = (0..row).flat_map(u32::to_le_bytes).collect();
        let prefix = model.manifest.prefix_of(&seen).unwrap();
        let file = pack_state(&place, prefix, &[7; 4096]).unwrap();
        fs::write(layer.join(names::format_state(at)), file).unwrap();
    }
    let directory = model.sequence(&mount, "chat");
    let found =
        || kvfs::reader::longest_prefix(&model.directory(&mount), &sequence.tokens).unwrap();
    assert_eq!(found().tokens, 200);
    // More than one cut removes would go at once, with the page and all the tokens.
    limit(&directory, "quota", 120 * PAGE_BYTES);
    wait_until_gone(&layer.join(names::format_state(TokenStart(150))));
    settle();
    assert_eq!(fs::metadata(directory.join("tokens")).unwrap().len(), 800);
    assert!(directory.join("000/0000000.tail").exists());
    let left = fs::read_dir(&layer).unwrap().count() as u64;
    assert!((64..120).contains(&left), "{left} states are left");
    assert_eq!(found().tokens, left, "the last go first");
    // What is in use holds the page, its tokens and the states before it.
    let reader = open(directory.join("000/0000000.tail"), libc::O_RDONLY).unwrap();
    limit(&directory, "quota", 1);
    settle();
    assert_eq!(found().tokens, left);
    drop(reader);
    wait_until_gone(&directory);
}

fn a_conversation_that_is_read_as_a_slot_stays(mode: Mode) {
    let mount = Mount::new(mode);
    let model = Model::small();
    model.install(&mount);
    for (first, name) in [(0, "read"), (500, "opened"), (1000, "idle")] {
        sequence(&mount, &model, name, first, 70);
    }
    let slots = model.directory(&mount).join(names::SLOTS);
    limit(&model.directory(&mount), "age", 5);
    eventually("a sequence to go", || {
        assert!(fs::read(slots.join("read.bin")).unwrap().len() > 70 * 128);
        drop(open(slots.join("opened.bin"), libc::O_RDONLY).unwrap());
        (!model.sequence(&mount, "idle").exists()).then_some(())
    });
    for name in ["read", "opened"] {
        assert_eq!(shape(&mount, &model, name).unwrap().0, 70, "{name}");
    }
}

/// Pages were written long before their limit, the tokens just now: the sequence stays, and so do copies of it while
/// an operation links its pages.
fn a_copy_that_is_being_made_stays(mode: Mode) {
    let mount = Mount::new(mode);
    let model = Model::small();
    model.install(&mount);
    sequence(&mount, &model, "chat", 0, 3200);
    let long_ago = std::time::SystemTime::now() - std::time::Duration::from_secs(100_000);
    let layers = (0..2).map(|layer| model.layer(&mount, "chat", layer));
    for page in layers.flat_map(|layer| fs::read_dir(layer).unwrap()) {
        set_modified(page.unwrap().path(), long_ago).unwrap();
    }
    limit(&model.directory(&mount), "ttl", 1000);
    let all = kvfs::sequence::Sequences::open(&model.directory(&mount)).unwrap();
    let begun = std::time::Instant::now();
    let copies = (0..).take_while(|_| begun.elapsed().as_secs() < 5);
    let copies: Vec<String> = copies
        .map(|copy| {
            let name = format!("copy-{copy}");
            all.seq_cp("chat", &name, ..).unwrap();
            name
        })
        .collect();
    settle();
    for name in copies {
        let (tokens, pages) = shape(&mount, &model, &name).unwrap();
        assert_eq!((tokens, pages[0].len(), pages[1].len()), (3200, 100, 100), "{name}");
    }
}

/// A directory for each user of the same model: equal pages are stored once.
fn pages_that_another_model_shares_let_no_more_sequences_go(mode: Mode) {
    let mount = Mount::with_own_files(mode, &[]);
    let models = ["one", "two"].map(|name| Model::small().named(name));
    for model in &models {
        model.install(&mount);
        for number in 0..6 {
            sequence(&mount, model, &number.to_string(), number * 1000, 64);
        }
    }
    let links = fs::metadata(models[0].page_path(&mount, "0", 0, 0)).unwrap().nlink();
    assert_eq!(links, 2, "they share their pages");
    // Four pages each, and their tokens.
    let each = 4 * PAGE_BYTES + 256;
    limit(&models[0].directory(&mount), "quota", 4 * each);
    wait_until_gone(&models[0].sequence(&mount, "1"));
    settle();
    let sequences =
        |model: &Model| fs::read_dir(model.directory(&mount).join("sequences")).unwrap().count();
    assert_eq!((sequences(&models[0]), sequences(&models[1])), (4, 6));
}
