//! Resuming from whatever an interruption or a person left of a sequence.
//!
//! An ordinary directory stands for the mount, so no append here may fill a tail: that needs the
//! mount to seal it. `tests/demo.rs` does the same on a mount.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

use kvfs::page::{
    Dtype, Layer, Manifest, ManifestFields, PagePlace, PageView, TokenStart, pack_page, unpack_rows,
};

use super::{Counts, MountCache, Resumed, read};
use crate::Result;
use crate::generate::prefill;
use crate::model::Model;
use crate::tests::{bits, empty_cache, small_model};

/// Tokens of a page here; the text below is two pages and a half.
const PAGE: usize = 16;
const TOKENS: usize = 40;

/// Bytes of a row of the model of the tests.
const ROW: usize = 2 * 2 * 16 * 2;

fn text() -> Vec<u32> {
    (0..50).map(|index| index * 7 % 50).take(TOKENS).collect()
}

fn manifest() -> Manifest {
    let mut fields = ManifestFields::new("test/small", Dtype::F16, 2, 2, 16);
    fields.page_tokens = 16;
    Manifest::new(fields).unwrap()
}

/// A sequence that holds the text.
fn filled(directory: &Path, model: &Model) -> PathBuf {
    fs::write(directory.join("manifest.json"), manifest().to_json()).unwrap();
    let sequence = directory.join("sequences/chat");
    let mut cache = MountCache::open(&sequence, model.config()).unwrap();
    let (_, resumed) = read(model, &mut cache, &text()).unwrap();
    assert_eq!((resumed.held, cache.tokens()), (0, &text()[..]));
    cache.durable().unwrap();
    sequence
}

fn add(path: PathBuf, bytes: &[u8]) {
    let mut options = OpenOptions::new();
    let file = options.append(true).create(true).open(path);
    file.unwrap().write_all(bytes).unwrap();
}

/// Makes a tail of the page of layer 0 that starts at `start`, and returns its rows.
fn open_page(sequence: &Path, start: usize, rows: usize) {
    let page = sequence.join(format!("000/{start:07}.safetensors"));
    let bytes = fs::read(&page).unwrap();
    let manifest = manifest();
    let unpacked = unpack_rows(&PageView::parse(&bytes, manifest.geometry()).unwrap());
    fs::remove_file(page).unwrap();
    let tail = sequence.join(format!("000/{start:07}.tail"));
    fs::write(tail, &unpacked[..rows * ROW]).unwrap();
}

/// What a run does with `tokens` after `spoil` has changed the sequence; its logits must be those
/// of a run that started from nothing, and the next run must find everything.
fn check(
    tokens: &[u32], spoil: impl Fn(&Path), (held, missing): (usize, &[usize]),
    (refilled, repeated, added): (usize, usize, usize),
) {
    let model = small_model();
    let directory = tempfile::tempdir().unwrap();
    let sequence = filled(directory.path(), &model);
    spoil(&sequence);
    let expected = prefill(&model, &mut empty_cache(&model, 16), 0, tokens).unwrap();

    let mut cache = MountCache::open(&sequence, model.config()).unwrap();
    let (logits, resumed) = read(&model, &mut cache, tokens).unwrap();
    let missing = missing.iter().map(|&start| start..start + PAGE).collect();
    assert_eq!(resumed, Resumed { held, missing });
    let counts = Counts { refilled, repeated, added };
    assert_eq!(cache.counts(), counts);
    assert_eq!(bits(&logits), bits(&expected));
    assert_eq!(cache.tokens(), tokens);

    let mut cache = MountCache::open(&sequence, model.config()).unwrap();
    let (logits, resumed) = read(&model, &mut cache, tokens).unwrap();
    assert_eq!((resumed.usable(), cache.counts().repeated), (tokens.len(), 1));
    assert_eq!(bits(&logits), bits(&expected));
}

#[test]
fn what_is_there_is_not_computed_again() {
    check(&text(), |_| (), (40, &[]), (0, 1, 0));
    // A shorter text drops the rest, also in the middle of a page and at its border.
    check(&text()[..20], |_| (), (20, &[]), (0, 1, 0));
    check(&text()[..32], |_| (), (32, &[]), (0, 1, 0));
    let mut other = text();
    other[35] = 1;
    check(&other, |_| (), (35, &[]), (0, 0, 5));
}

#[test]
fn missing_pages_are_computed_again_and_nothing_else() {
    let without = |paths: &'static [&'static str]| {
        move |sequence: &Path| {
            for path in paths {
                fs::remove_file(sequence.join(path)).unwrap();
            }
        }
    };
    let text = text();
    check(&text, without(&["001/0000016.safetensors"]), (40, &[16]), (16, 1, 0));
    check(&text, without(&["000/0000000.safetensors"]), (40, &[0]), (16, 1, 0));
    let both = ["000/0000000.safetensors", "001/0000016.safetensors"];
    let both: &[&str] = Box::leak(Box::new(both));
    check(&text, without(both), (40, &[0, 16]), (32, 1, 0));
    // Of a tail nothing can be told from its neighbours: the layer ends where its pages do.
    check(&text, without(&["001/0000032.tail"]), (32, &[]), (0, 0, 8));
    check(&text[..20], without(&["001/0000016.safetensors"]), (16, &[]), (0, 0, 4));
}

#[test]
fn an_interrupted_run_is_continued_where_everything_is_there() {
    let text = text();
    // More rows than ids, in one layer, and the beginning of another row.
    let longer = |sequence: &Path| add(sequence.join("000/0000032.tail"), &[1; ROW + 3]);
    check(&text, longer, (40, &[]), (0, 1, 0));
    // Fewer rows than ids in one layer.
    let shorter = |sequence: &Path| {
        let tail = OpenOptions::new().write(true).open(sequence.join("001/0000032.tail"));
        tail.unwrap().set_len(3 * ROW as u64 + 1).unwrap();
    };
    check(&text, shorter, (35, &[]), (0, 0, 5));
    // Ids of another text, fewer ids, a part of an id.
    let replace = |count: usize, extra: &'static [u8]| {
        move |sequence: &Path| {
            let bytes = fs::read(sequence.join("tokens")).unwrap();
            fs::write(sequence.join("tokens"), [&bytes[..4 * count], extra].concat()).unwrap();
        }
    };
    check(&text, replace(36, &[]), (36, &[]), (0, 0, 4));
    check(&text, replace(36, &[49, 0, 0, 0]), (36, &[]), (0, 0, 4));
    check(&text, replace(40, &[1, 2]), (40, &[]), (0, 1, 0));
    check(&text, replace(0, &[]), (0, &[]), (0, 0, 40));
    let layer_gone = |sequence: &Path| fs::remove_dir_all(sequence.join("001")).unwrap();
    check(&text, layer_gone, (0, &[]), (0, 0, 40));
}

#[test]
fn tails_and_short_pages_in_unusual_places_are_understood() {
    // Full, but not sealed: the rows count as a page.
    let full = |sequence: &Path| {
        fs::remove_file(sequence.join("000/0000032.tail")).unwrap();
        open_page(sequence, 16, 16);
    };
    check(&text(), full, (32, &[]), (0, 0, 8));
    // In the middle, where only a page means something.
    let middle = |sequence: &Path| open_page(sequence, 0, 5);
    check(&text(), middle, (40, &[0]), (16, 1, 0));
    // Beside its page.
    let beside = |sequence: &Path| add(sequence.join("000/0000016.tail"), &[]);
    check(&text(), beside, (40, &[]), (0, 1, 0));
    // A short page at the end, as a converter writes it.
    let short = |sequence: &Path| {
        let tail = sequence.join("000/0000032.tail");
        let place = PagePlace::new(&manifest(), Layer(0), TokenStart(32)).unwrap();
        let page = pack_page(&place, &fs::read(&tail).unwrap(), 8).unwrap();
        fs::remove_file(tail).unwrap();
        fs::write(sequence.join("000/0000032.safetensors"), page).unwrap();
    };
    check(&text(), short, (40, &[]), (0, 1, 0));
}

#[test]
fn another_model_and_another_writer_are_noticed() -> Result<()> {
    let model = small_model();
    let directory = tempfile::tempdir()?;
    let sequence = filled(directory.path(), &model);
    let fresh = directory.path().join("sequences/fresh");
    let mut cache = MountCache::open(&fresh, model.config())?;
    read(&model, &mut cache, &text()[..32])?;
    add(fresh.join("000/0000032.tail"), &[0; ROW]);
    let error = model.forward(&[1], 32, &mut cache).unwrap_err();
    assert!(error.to_string().ends_with("another program writes to the sequence"));

    let mut config = model.config().clone();
    config.num_hidden_layers = 3;
    let error = MountCache::open(&sequence, &config).unwrap_err();
    assert!(error.to_string().contains("--layers 3"), "{error}");
    Ok(())
}

#[test]
fn a_restored_prompt_is_compared_with_a_computed_one() {
    let model = small_model();
    let directory = tempfile::tempdir().unwrap();
    let sequence = filled(directory.path(), &model);
    let compared = crate::compare::compare_sequence(&model, &sequence, &text(), 3).unwrap();
    assert!(!compared.restored.is_zero() && !compared.computed.is_zero());
    assert!(crate::compare::compare_sequence(&model, &sequence, &text(), 0).is_err());
    // Rows that are not those of the text are noticed.
    let page = sequence.join("000/0000000.safetensors");
    let mut bytes = fs::read(&page).unwrap();
    bytes[4096..8192].fill(0);
    fs::write(&page, bytes).unwrap();
    assert!(crate::compare::compare_sequence(&model, &sequence, &text(), 1).is_err());
}
