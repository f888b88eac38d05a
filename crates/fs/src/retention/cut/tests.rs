//! What a cut takes off the end of a sequence, and what it leaves.

use super::*;
use crate::FileSystem;
use crate::retention::tests::{ago, run};
use crate::retention::{QUOTA, Retainer};
use crate::unmounted::{Model, PAGE_TOKENS, Unmounted, at, place};

/// Tokens of four bytes of a page.
const TOKENS_OF_PAGE: u64 = 4 * PAGE_TOKENS as u64;

fn cut(fs: &FileSystem, sequence: InodeId, bytes_max: u64) -> Removal {
    fs.enforcer().cut_from_end(sequence, bytes_max, (Right::Directory, "test")).unwrap()
}

fn bytes_of_page(model: &Model<'_>) -> u64 {
    model.page(0, 0).len() as u64
}

fn tokens_of(unmounted: &Unmounted, sequence: InodeId) -> (u64, Time) {
    let id = unmounted.id_of(sequence, names::TOKENS).unwrap();
    let shown = unmounted.fs.attributes(id).unwrap();
    (shown.size, shown.mtime)
}

fn layer_of(unmounted: &Unmounted, sequence: InodeId, layer: u32) -> InodeId {
    unmounted.id_of(sequence, &format!("{layer:03}")).unwrap()
}

fn pages_of(unmounted: &Unmounted, sequence: InodeId, layer: u32) -> usize {
    unmounted.names(layer_of(unmounted, sequence, layer)).len()
}

fn page_of(unmounted: &Unmounted, sequence: InodeId, start: u64) -> InodeId {
    let name = names::format_page(kvfs_page::TokenStart(start));
    unmounted.id_of(layer_of(unmounted, sequence, 0), &name).unwrap()
}

#[test]
fn the_last_pages_of_all_layers_go_with_their_tokens() {
    let unmounted = Unmounted::new();
    let (fs, model) = (&unmounted.fs, unmounted.make_model(2));
    let (sequence, page) = (model.make_sequence("s", &[0, 1], 4), bytes_of_page(&model));
    let dated = tokens_of(&unmounted, sequence).1;
    let Removal { files, bytes, kept, has_more } = cut(fs, sequence, 1);
    assert_eq!((files, bytes, kept, has_more), (2, 2 * page, None, false));
    assert_eq!([0, 1].map(|layer| pages_of(&unmounted, sequence, layer)), [3, 3]);
    assert_eq!(tokens_of(&unmounted, sequence), (3 * TOKENS_OF_PAGE, dated));
    let told = unmounted.deleted().pop().unwrap();
    assert_eq!((told.files, told.bytes, told.from_token), (2, Some(2 * page), Some(48)));
    assert_eq!(told.path.as_deref(), Some("models/m/sequences/s"));
    assert_eq!((told.inode, told.reason.as_str()), (Some(sequence), "test"));
    // As many as so many bytes take.
    let removal = cut(fs, sequence, 2 * page + 1);
    assert_eq!((removal.files, removal.bytes, removal.has_more), (4, 4 * page, false));
    assert_eq!(tokens_of(&unmounted, sequence), (TOKENS_OF_PAGE, dated));
    // With the last page goes what is left, and the sequence.
    let removal = cut(fs, sequence, u64::MAX);
    assert_eq!((removal.files, removal.bytes, removal.kept), (3, 2 * page, None));
    assert_eq!(unmounted.names(model.sequences), [""; 0]);
    let told = unmounted.deleted().pop().unwrap();
    assert_eq!((told.files, told.bytes, told.from_token), (1, Some(0), None));
}

#[test]
fn one_cut_takes_so_many_pages_or_one_range() {
    let unmounted = Unmounted::new();
    let (fs, model) = (&unmounted.fs, unmounted.make_model(65));
    let mut sequences = 0;
    let mut check = |layers: u32, pages: u32, bytes_max: u64, ranges: u64, has_more: bool| {
        let numbers: Vec<_> = (0..layers).collect();
        sequences += 1;
        let sequence = model.make_sequence_like(&sequences.to_string(), &numbers, pages, sequences);
        let bytes_max = bytes_max.saturating_mul(bytes_of_page(&model));
        let removal = cut(fs, sequence, bytes_max);
        assert_eq!(removal.files, ranges * u64::from(layers), "{layers} layers");
        assert_eq!((removal.kept, removal.has_more), (None, has_more), "{layers} layers");
        let left = (u64::from(pages) - ranges) * TOKENS_OF_PAGE;
        assert_eq!(tokens_of(&unmounted, sequence).0, left, "{layers} layers");
    };
    check(32, 3, u64::MAX, 2, true);
    check(32, 3, 64, 2, false);
    check(32, 3, 65, 2, true);
    check(33, 2, u64::MAX, 1, true);
    check(65, 2, u64::MAX, 1, true);
}

#[test]
fn what_is_in_use_stays_with_what_precedes_it() {
    let unmounted = Unmounted::new();
    let (fs, model) = (&unmounted.fs, unmounted.make_model(1));
    let sequence = model.make_sequence("s", &[0], 4);
    let opened = fs.open_file(page_of(&unmounted, sequence, 16), libc::O_RDONLY).unwrap();
    let removal = cut(fs, sequence, u64::MAX);
    assert_eq!((removal.files, removal.kept, removal.has_more), (2, Some(Kept::InUse), false));
    assert_eq!(pages_of(&unmounted, sequence, 0), 2);
    assert_eq!(tokens_of(&unmounted, sequence).0, 2 * TOKENS_OF_PAGE);
    fs.release(opened.handle).unwrap();
    let first = page_of(&unmounted, sequence, 0);
    fs.set_extended_attribute(first, b"user.kvfs.pin", b"1", 0).unwrap();
    let removal = cut(fs, sequence, u64::MAX);
    assert_eq!((removal.files, removal.kept), (1, Some(Kept::Pinned)));
    assert_eq!(pages_of(&unmounted, sequence, 0), 1);
    // Whoever has the tokens open may write them.
    fs.set_extended_attribute(first, b"user.kvfs.pin", b"0", 0).unwrap();
    let tokens = unmounted.id_of(sequence, names::TOKENS).unwrap();
    let opened = fs.open_file(tokens, libc::O_WRONLY).unwrap();
    let removal = cut(fs, sequence, u64::MAX);
    assert_eq!((removal.files, removal.kept), (0, Some(Kept::InUse)));
    assert_eq!(tokens_of(&unmounted, sequence).0, TOKENS_OF_PAGE);
    fs.release(opened.handle).unwrap();
    assert_eq!(cut(fs, sequence, u64::MAX).files, 2);
}

#[test]
fn what_has_moved_tokens_goes_as_a_whole_or_not_at_all() {
    let unmounted = Unmounted::new();
    let (fs, model) = (&unmounted.fs, unmounted.make_model(1));
    let sequence = model.make_sequence("s", &[0], 3);
    unmounted.write(sequence, names::POSITIONS, b"{}");
    let opened = fs.open_file(page_of(&unmounted, sequence, 0), libc::O_RDONLY).unwrap();
    let removal = cut(fs, sequence, 1);
    assert_eq!((removal.files, removal.kept), (0, Some(Kept::InUse)));
    assert_eq!(tokens_of(&unmounted, sequence).0, 3 * TOKENS_OF_PAGE);
    fs.release(opened.handle).unwrap();
    assert_eq!(cut(fs, sequence, 1).files, 5);
    assert_eq!(unmounted.names(model.sequences), [""; 0]);
    assert_eq!(unmounted.deleted().pop().unwrap().files, 2, "tokens and positions.json");
}

#[test]
fn shared_pages_free_nothing() {
    let unmounted = Unmounted::new();
    let (fs, model) = (&unmounted.fs, unmounted.make_model(1));
    let sequence = model.make_sequence("s", &[0], 3);
    let other = model.make_sequence("t", &[], 0);
    let layer = model.make_layer(other, 0);
    let shared = model.write_page(layer, 0, 32);
    assert_eq!(fs.attributes(shared).unwrap().links, 2);
    let removal = cut(fs, sequence, 1);
    assert_eq!((removal.files, removal.bytes), (2, bytes_of_page(&model)));
    assert_eq!(unmounted.names(layer).len(), 1);
}

#[test]
fn without_tokens_pages_go_all_the_same_and_other_files_stay() {
    let unmounted = Unmounted::new();
    let (fs, model) = (&unmounted.fs, unmounted.make_model(1));
    let sequence = model.make_sequence("s", &[0], 2);
    fs.unlink(&place(sequence, names::TOKENS)).unwrap();
    let notes = unmounted.make_directory(sequence, "notes", (0o755, 0));
    unmounted.write(notes, &names::format_page(kvfs_page::TokenStart(16)), b"no page");
    assert_eq!(cut(fs, sequence, 1).files, 1);
    assert_eq!((pages_of(&unmounted, sequence, 0), unmounted.names(notes).len()), (1, 1));
}

/// States are ordinary files where the manifest does not say what they consist of.
#[test]
fn states_beyond_what_one_cut_takes_go_first_and_the_last_of_them() {
    let unmounted = Unmounted::new();
    let fs = &unmounted.fs;
    let model = unmounted.make_model_of(2, |fields| fields.page_tokens = 512);
    let check = |states: u64, bytes_max: u64, (gone, from): (u64, u64)| {
        let name = format!("{states} {bytes_max}");
        let sequence = unmounted.make_directory(model.sequences, &name, (0o755, 0));
        unmounted.write(sequence, names::TOKENS, &[0; 4 * 512]);
        let layer = model.make_layer(sequence, 1);
        for row in 1..=states {
            let name = names::format_state(kvfs_page::TokenStart(row));
            unmounted.write(layer, &name, &[1; 10]);
        }
        fs.core.settle_idle().unwrap();
        let removal = cut(fs, sequence, bytes_max);
        assert_eq!((removal.files, removal.bytes), (gone, 10 * gone), "of {states}");
        assert_eq!(removal.kept, None);
        let left = unmounted.names(layer);
        assert_eq!(left.len() as u64, states - gone);
        assert_eq!(
            left.last().unwrap(),
            &names::format_state(kvfs_page::TokenStart(states - gone))
        );
        assert_eq!(tokens_of(&unmounted, sequence).0, 4 * 512);
        let told = unmounted.deleted().pop().unwrap();
        assert_eq!(told.from_token, Some(from), "of {states}");
    };
    check(70, 1, (6, 64));
    check(70, 60, (6, 64));
    check(140, 1, (64, 76));
    check(140, 641, (76, 64));
}

#[test]
fn after_the_surplus_of_states_the_rest_goes_as_one() {
    let unmounted = Unmounted::new();
    let fs = &unmounted.fs;
    let model = unmounted.make_model_of(2, |fields| fields.page_tokens = 512);
    let sequence = unmounted.make_directory(model.sequences, "s", (0o755, 0));
    unmounted.write(sequence, names::TOKENS, &[0; 4 * 512]);
    let layer = model.make_layer(sequence, 1);
    for row in 1..=66 {
        let name = names::format_state(kvfs_page::TokenStart(row));
        unmounted.write(layer, &name, &[1; 10]);
    }
    fs.core.settle_idle().unwrap();
    // Two of them are surplus; who asks for more gets all that goes with them.
    let removal = cut(fs, sequence, 21);
    assert_eq!((removal.files, removal.bytes, removal.kept), (67, 660, None));
    assert_eq!(unmounted.names(model.sequences), [""; 0]);
    let from: Vec<_> = unmounted.deleted().iter().map(|event| event.from_token).collect();
    assert_eq!(from, [Some(64), Some(0), None]);
}

#[test]
fn what_states_have_freed_counts() {
    let unmounted = Unmounted::new();
    let fs = &unmounted.fs;
    let model = unmounted.make_model_of(2, |fields| fields.page_tokens = 512);
    let sequence = unmounted.make_directory(model.sequences, "s", (0o755, 0));
    let layer = model.make_layer(sequence, 1);
    for row in (1..=1).chain(513..=578) {
        let name = names::format_state(kvfs_page::TokenStart(row));
        unmounted.write(layer, &name, &[1; 10]);
    }
    fs.core.settle_idle().unwrap();
    // Two of the last range first, then the rest of it, which is enough.
    let Removal { files, bytes, kept, has_more } = cut(fs, sequence, 650);
    assert_eq!((files, bytes, kept, has_more), (66, 660, None, false));
    assert_eq!(unmounted.names(layer), [names::format_state(kvfs_page::TokenStart(1))]);
}

#[test]
fn a_sequence_of_many_pages_goes_in_one_walk() {
    let unmounted = Unmounted::new();
    let (fs, model) = (&unmounted.fs, unmounted.make_model(33));
    model.make_sequence("s", &(0..33).collect::<Vec<_>>(), 3);
    fs.retention.set_limit(&fs.core, model.sequences, QUOTA, b"1").unwrap();
    run(fs, &mut Retainer::default());
    assert_eq!(unmounted.names(model.sequences), [""; 0]);
}

#[test]
fn a_state_goes_with_the_page_in_which_its_last_row_is() {
    fn check(name: &str, page_tokens: Option<u64>, expected: Option<u64>) {
        assert_eq!(range_of(name.as_bytes(), page_tokens), expected, "{name}");
    }
    let state = |row| names::format_state(kvfs_page::TokenStart(row));
    check(&state(1), Some(16), Some(0));
    check(&state(16), Some(16), Some(0));
    check(&state(17), Some(16), Some(16));
    check(&state(47), Some(16), Some(32));
    check(&state(47), None, None);
    check(&names::format_page(kvfs_page::TokenStart(48)), None, Some(48));
    check(&names::format_tail(kvfs_page::TokenStart(48)), None, Some(48));
    check("notes.txt", Some(16), None);
}

#[test]
fn a_sequence_that_somebody_writes_to_stays() {
    let unmounted = Unmounted::new();
    let (fs, model) = (&unmounted.fs, unmounted.make_model(1));
    let sequence = model.make_sequence("s", &[0], 2);
    let layer = layer_of(&unmounted, sequence, 0);
    let listed = fs.enforcer().list_sequence(sequence, Right::Directory).unwrap();
    let followed =
        || fs.enforcer().is_followed(&mut fs.core.state(), (sequence, &listed), 16).unwrap();
    assert!(!followed());
    let tail = names::format_tail(kvfs_page::TokenStart(32));
    unmounted.write(layer, &tail, b"");
    assert!(followed());
    fs.unlink(&place(layer, &tail)).unwrap();
    assert!(!followed());
    model.write_page(layer, 0, 32);
    assert!(followed());
    // What was listed before is not cut off.
    let ranges = [(16, listed.pieces[&16].clone())];
    let going = Going { right: Right::Directory, ranges: &ranges, beside: None };
    let event = Event::new(What::Deleted, "test");
    let removal = fs.enforcer().cut(&event, sequence, &listed, &going).unwrap();
    assert_eq!((removal.files, removal.kept), (0, Some(Kept::InUse)));
    assert_eq!(tokens_of(&unmounted, sequence).0, 3 * TOKENS_OF_PAGE - TOKENS_OF_PAGE);
}

#[test]
fn tokens_that_grew_behind_the_look_are_not_cut() {
    let unmounted = Unmounted::new();
    let (fs, model) = (&unmounted.fs, unmounted.make_model(1));
    let sequence = model.make_sequence("s", &[0], 2);
    let listed = fs.enforcer().list_sequence(sequence, Right::Directory).unwrap();
    assert!(fs.enforcer().copy_tokens(listed.tokens, 32).unwrap().is_none(), "nothing is cut off");
    assert!(fs.enforcer().copy_tokens(None, 0).unwrap().is_none());
    let copied = fs.enforcer().copy_tokens(listed.tokens, 16).unwrap();
    assert!(copied.is_some());
    let is_same =
        |used| fs.enforcer().is_same(&fs.core.state(), (&listed, used), copied.as_ref()).unwrap();
    assert!(is_same(None));
    assert!(!is_same(Some(at(1))), "they were written later");
    let opened = fs.open_file(listed.tokens.unwrap(), libc::O_WRONLY).unwrap();
    assert!(!is_same(None), "somebody may write them");
    fs.write(opened.handle, 2 * TOKENS_OF_PAGE, &[1; 4], true).unwrap();
    fs.release(opened.handle).unwrap();
    assert!(!is_same(None), "there are more");
    let copied = fs.enforcer().copy_tokens(listed.tokens, 16).unwrap();
    unmounted.write(sequence, ".new", &[1; 132]);
    fs.rename(&place(sequence, ".new"), &place(sequence, names::TOKENS), 0).unwrap();
    let listed = fs.enforcer().list_sequence(sequence, Right::Directory).unwrap();
    let is_same =
        fs.enforcer().is_same(&fs.core.state(), (&listed, None), copied.as_ref()).unwrap();
    assert!(!is_same, "it is another file");
}

#[test]
fn what_was_used_since_the_walk_stays_unless_others_share_it() {
    let unmounted = Unmounted::new();
    let (fs, model) = (&unmounted.fs, unmounted.make_model(1));
    let sequence = model.make_sequence("s", &[0], 2);
    let listed = fs.enforcer().list_sequence(sequence, Right::Directory).unwrap();
    let pieces = &listed.pieces[&16];
    let keeps = |used| fs.enforcer().keeps_any(&fs.core.state(), pieces, Some(used)).unwrap();
    assert_eq!(keeps(ago(-100)), None);
    assert_eq!(keeps(at(1)), Some(Kept::Changed));
    let other = model.make_sequence("t", &[], 0);
    model.write_page(model.make_layer(other, 0), 0, 16);
    assert_eq!(keeps(at(1)), None);
    let Place { parent, name } = pieces[0].place.clone();
    fs.unlink(&Place { parent, name }).unwrap();
    assert_eq!(keeps(ago(-100)), Some(Kept::Changed), "the name is gone");
}

#[test]
fn a_limit_cuts_what_was_used_longest_ago_until_enough_is_free() {
    let unmounted = Unmounted::new();
    let (fs, model) = (&unmounted.fs, unmounted.make_model(1));
    let page = bytes_of_page(&model);
    let make = |(name, seed, days): (&str, u64, i64)| {
        let sequence = model.make_sequence_like(name, &[0], 4, seed);
        let layer = layer_of(&unmounted, sequence, 0);
        let pages = unmounted.names(layer).into_iter().map(|name| (layer, name));
        for (directory, name) in pages.chain([(sequence, names::TOKENS.to_owned())]) {
            unmounted.date(unmounted.id_of(directory, &name).unwrap(), ago(days * 86_400));
        }
        sequence
    };
    let [old, new] = [("old", 1, 10), ("new", 2, 9)].map(make);
    // What is cut off takes tokens with it.
    let limit = 7 * page;
    unmounted.limit(model.sequences, QUOTA, &limit.to_string());
    run(fs, &mut Retainer::default());
    assert_eq!([old, new].map(|sequence| pages_of(&unmounted, sequence, 0)), [2, 4]);
    let told = unmounted.deleted().pop().unwrap();
    assert!(told.used.is_some_and(|used| used < ago(9 * 86_400) && used > ago(11 * 86_400)));
    assert_eq!(told.reason, format!("models/m/sequences may hold {limit} bytes"));
}

#[test]
fn rows_of_a_window_and_checkpoints_go_with_the_tokens_that_they_are_about() {
    let unmounted = Unmounted::new();
    let (fs, model) = (&unmounted.fs, unmounted.make_model(1));
    let sequence = model.make_sequence("s", &[0], 4);
    let layer = layer_of(&unmounted, sequence, 0);
    let first_of_last = 3 * u64::from(PAGE_TOKENS);
    for row in [first_of_last - 1, first_of_last, first_of_last + 1] {
        let name = names::format_window_rows(kvfs_page::TokenStart(row));
        unmounted.write(layer, &name, &[1; 10]);
        let name = names::format_checkpoints(kvfs_page::TokenStart(row));
        unmounted.write(sequence, &name, &[1; 10]);
    }
    fs.core.settle_idle().unwrap();
    let removal = cut(fs, sequence, 1);
    assert_eq!((removal.files, removal.kept), (4, None), "a page, two, and one that is after it");
    let left = |directory: InodeId, beginning: &str| {
        let names = unmounted.names(directory);
        names.into_iter().filter(|name| name.starts_with(beginning)).collect::<Vec<_>>()
    };
    let token = kvfs_page::TokenStart;
    assert_eq!(left(layer, "window"), [names::format_window_rows(token(first_of_last - 1))]);
    let before =
        [first_of_last - 1, first_of_last].map(|row| names::format_checkpoints(token(row)));
    assert_eq!(left(sequence, "checkpoints"), before);
}
