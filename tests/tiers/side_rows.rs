//! Index keys and whatever else a layer keeps beside K and V: they are written, appended, sealed, sent away and
//! brought back with their page, and nothing is answered from one that lacks them.

use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use kvfs::page::{Layer, PageView, names, pack_rows};
use kvfs::reader::{Sequence, longest_prefix};
use kvfs::sequence::Sequences;

use crate::common::sys::{
    assert_errno, getxattr, open, pwrite, rename, sync_directory, write, write_and_close,
};
use crate::common::{Mode, Model, Mount, eventually};
use crate::place::{Place, complaint, kvfs, printed, tier};

in_both_modes!(
    index_keys_go_where_their_page_goes,
    rows_without_index_keys_are_refused_or_no_rows,
    a_copy_of_a_tail_may_come_in_pieces,
    what_a_crash_left_of_a_row_is_cut_off,
    index_keys_are_never_rounded,
);

const APPEND: i32 = libc::O_WRONLY | libc::O_CREAT | libc::O_APPEND;
/// Of a token in the second layer, behind 128 bytes of K and V.
const SIDE: u32 = 20;
const ROW: usize = 128 + SIDE as usize;

fn matched(mount: &Mount, model: &Model, tokens: u32) -> u64 {
    let prompt: Vec<u32> = (0..tokens).collect();
    longest_prefix(&model.directory(mount), &prompt).unwrap().tokens
}

fn append(path: &Path, bytes: &[u8]) -> std::io::Result<usize> {
    write(&open(path, APPEND)?, bytes)
}

/// A sequence of 70 tokens: a page by rename, one written in place, one of appended rows, and a tail.
fn written(mount: &Mount, model: &Model) -> Vec<(PathBuf, Vec<u8>)> {
    let ids: Vec<u8> = (0..102_u32).flat_map(u32::to_le_bytes).collect();
    write_and_close(model.tokens_path(mount, "chat"), &ids).unwrap();
    let mut pages = Vec::new();
    for layer in 0..2 {
        let paths = [0, 32, 64].map(|start| model.page_path(mount, "chat", layer, start));
        let bytes = [0, 32, 64].map(|start| model.page(layer, start, start));
        let staged = paths[0].with_file_name("p.tmp");
        write_and_close(&staged, &bytes[0]).unwrap();
        rename(&staged, &paths[0]).unwrap();
        write_and_close(&paths[1], &bytes[1]).unwrap();
        let (rows, tail) =
            (model.layer_rows(layer, 64, 32), model.tail_path(mount, "chat", layer, 64));
        let row = rows.len() / 32;
        append(&tail, &rows[..7 * row]).unwrap();
        append(&tail, &rows[7 * row..]).unwrap();
        append(&model.tail_path(mount, "chat", layer, 96), &model.layer_rows(layer, 96, 6))
            .unwrap();
        pages.extend(paths.into_iter().zip(bytes));
    }
    pages
}

/// The side rows of all tokens of the second layer, as a reader has them.
fn side_rows(mount: &Mount, model: &Model) -> Vec<u8> {
    let sequence = Sequence::open(&model.sequence(mount, "chat")).unwrap();
    let mut stream = sequence.stream_layers(&[Layer(1)], 0..102).unwrap();
    let mut found = Vec::new();
    while let Some(run) = stream.next_run().unwrap() {
        for block in run.side_blocks() {
            assert_eq!(block.first_position * u64::from(SIDE), found.len() as u64);
            (0..block.tokens).for_each(|token| found.extend(block.row(token)));
        }
    }
    let mut stream = sequence.stream_layers(&[Layer(0)], 0..102).unwrap();
    assert!(stream.next_run().unwrap().unwrap().side_blocks().is_empty());
    found
}

fn expected_side_rows(model: &Model) -> Vec<u8> {
    let rows = [(0, 32), (32, 32), (64, 32), (96, 6)]
        .map(|(seed, tokens)| model.layer_rows(1, seed, tokens))
        .concat();
    rows.chunks(ROW).flat_map(|row| row[128..].to_vec()).collect()
}

fn index_keys_go_where_their_page_goes(mode: Mode) {
    let mut place = Place::new(mode, &["--cold", "zstd"]);
    let model = Model::with_side_rows(SIDE);
    model.install(&place.mount);
    let pages = written(&place.mount, &model);
    for (path, bytes) in &pages {
        assert!(std::fs::read(path).unwrap() == *bytes, "{}", path.display());
    }
    let geometry = model.manifest.layer_geometry(Layer(1));
    let page = PageView::parse(&pages[5].1, &geometry).unwrap();
    assert_eq!(page.side().len(), 32 * SIDE as usize);
    assert_eq!(matched(&place.mount, &model, 200), 102);
    assert!(side_rows(&place.mount, &model) == expected_side_rows(&model));

    place.wait_until_uploaded();
    let sequence = model.sequence(&place.mount, "chat");
    printed(&kvfs(&["evict"], &[&sequence]));
    assert!(pages.iter().all(|(path, _)| tier(path) == "remote"));
    // A page is away with its index keys or here with them, and promised all the same.
    assert_eq!(matched(&place.mount, &model, 200), 102);
    place.mount.remount();
    assert_eq!(matched(&place.mount, &model, 200), 102);
    assert!(side_rows(&place.mount, &model) == expected_side_rows(&model));
    for (path, bytes) in &pages {
        assert!(std::fs::read(path).unwrap() == *bytes, "{}", path.display());
    }

    // The beginning of a sequence ends in a page: its first rows become a tail, each with its index key.
    let sequences = Sequences::open(&model.directory(&place.mount)).unwrap();
    sequences.seq_cp("chat", "begin", ..40).unwrap();
    let tail = std::fs::read(model.tail_path(&place.mount, "begin", 1, 32)).unwrap();
    assert!(tail == model.layer_rows(1, 32, 8));
    let said = printed(&kvfs(&["inspect"], &[&pages[3].0]));
    assert!(said.contains("side_shape: [32,20]") && said.contains("declared checksum"), "{said}");
    let said = printed(&kvfs(&["inspect"], &[&model.directory(&place.mount)]));
    assert!(said.contains("side_layers: 1\nside_name: index_k\nside_row_bytes: 20\n"), "{said}");
    let said = printed(&kvfs(&["inspect"], &[&model.tail_path(&place.mount, "begin", 1, 32)]));
    assert!(said.contains("rows: 8\nrow_bytes: 148\nside_row_bytes: 20\n"), "{said}");
    let to = place.mount.beside("chat.safetensors");
    let said = complaint(&kvfs(&["export"], &[&sequence, &to]));
    assert!(said.contains("layers keep side rows beside K and V"), "{said}");
    assert!(place.mount.errors().is_empty(), "{:?}", place.mount.errors());
}

fn refusal(mount: &Mount, words: &str) {
    let errors = mount.errors();
    assert!(errors.last().is_some_and(|line| line.contains(words)), "{words}: {errors:?}");
}

fn rows_without_index_keys_are_refused_or_no_rows(mode: Mode) {
    let place = Place::new(mode, &[]);
    let (mount, model) = (&place.mount, Model::with_side_rows(SIDE));
    model.install(mount);
    let plain = Model::small();
    let other = Model::with_side_rows(SIDE + 1);
    let geometry = plain.manifest.geometry();
    let undeclared = pack_rows(geometry, &plain.rows(1, 32), 32, &kvfs::page::Metadata::new());
    let whole = model.page(1, 0, 1);
    let mut flipped = whole.clone();
    flipped[4096 + 32 * 128 + 5] ^= 1;
    let path = model.page_path(mount, "chat", 1, 0);
    for (what, page, why) in [
        ("without index keys", undeclared.unwrap(), "tensor side is missing"),
        ("of a model that keeps none", plain.page(1, 0, 1), "tensor side is missing"),
        ("with other ones", other.page(1, 0, 1), "tensor side has shape [32, 21]"),
        ("cut in the index keys", whole[..4096 + 32 * 128 + 100].to_vec(), "its header describes"),
        ("cut before them", whole[..8192].to_vec(), "its header describes"),
        ("with a changed one", flipped, "kvfs.checksum"),
    ] {
        let staged = path.with_file_name("p.tmp");
        write_and_close(&staged, &page).unwrap();
        assert_errno(rename(&staged, &path), libc::EINVAL);
        refusal(mount, why);
        assert!(!path.exists(), "{what}");
        std::fs::remove_file(&staged).unwrap();
    }
    // And the layer that keeps none takes none.
    let staged = path.with_file_name("p.tmp");
    write_and_close(&staged, &whole).unwrap();
    assert_errno(rename(&staged, model.page_path(mount, "chat", 0, 0)), libc::EINVAL);
    // Who changes his mind about a layer makes another model.
    let manifest = model.directory(mount).join(names::MANIFEST);
    for changed in [&plain, &other] {
        let json = changed.manifest.to_json();
        let staged = manifest.with_file_name("m.tmp");
        write_and_close(&staged, json.as_bytes()).unwrap();
        assert_errno(rename(&staged, &manifest), libc::EINVAL);
        std::fs::remove_file(&staged).unwrap();
    }

    let tail = model.tail_path(mount, "tail", 1, 0);
    let rows = model.layer_rows(1, 5, 32);
    append(&model.tail_path(mount, "tail", 0, 0), &model.rows(1, 9)).unwrap();
    append(
        &model.tokens_path(mount, "tail"),
        &(0..9_u32).flat_map(u32::to_le_bytes).collect::<Vec<_>>(),
    )
    .unwrap();
    append(&tail, &rows[..4 * ROW]).unwrap();
    assert_eq!(matched(mount, &model, 9), 4);
    // K and V alone, of one token and of several, and a row that ends too early.
    for bytes in [128, 5 * 128, ROW - 1] {
        assert_errno(append(&tail, &rows[..bytes]), libc::EINVAL);
        refusal(mount, "each has 20 bytes of side rows behind K and V");
    }
    let writer = open(&tail, libc::O_WRONLY).unwrap();
    assert_errno(pwrite(&writer, &rows[..128], 4 * 148), libc::EINVAL);
    assert!(std::fs::read(&tail).unwrap() == rows[..4 * ROW]);
    append(&tail, &rows[4 * ROW..9 * ROW]).unwrap();
    assert_eq!(matched(mount, &model, 9), 9);
    // Nor by rename.
    let staged = tail.with_file_name("t.tmp");
    write_and_close(&staged, &plain.rows(1, 9)).unwrap();
    assert_errno(rename(&staged, &tail), libc::EINVAL);
    refusal(mount, "are not 0..=32 rows of 148 bytes");
}

fn a_copy_of_a_tail_may_come_in_pieces(mode: Mode) {
    let place = Place::new(mode, &[]);
    let (mount, model) = (&place.mount, Model::with_side_rows(1 << 14));
    model.install(mount);
    let rows = model.layer_rows(1, 3, 20);
    append(&model.tail_path(mount, "copy", 0, 0), &model.rows(1, 20)).unwrap();
    let ids: Vec<u8> = (0..20_u32).flat_map(u32::to_le_bytes).collect();
    append(&model.tokens_path(mount, "copy"), &ids).unwrap();
    let tail = model.tail_path(mount, "copy", 1, 0);
    let writer = open(&tail, libc::O_WRONLY | libc::O_CREAT).unwrap();
    let mut at = 0;
    for piece in rows.chunks(128 << 10) {
        writer.write_all_at(piece, at as u64).unwrap();
        at += piece.len();
        // Until it ends with a row, nobody can tell that it will.
        let whole = if at == rows.len() { 20 } else { 0 };
        assert_eq!(matched(mount, &model, 20), whole);
        let reader = Sequence::open(&model.sequence(mount, "copy")).unwrap();
        assert_eq!(reader.layer_tokens(Layer(1)).unwrap(), whole);
    }
    assert!(rows.len() > 2 * (128 << 10) && std::fs::read(&tail).unwrap() == rows);
}

/// As a disk has it that wrote the last row in part.
fn what_a_crash_left_of_a_row_is_cut_off(mode: Mode) {
    let mut place = Place::new(mode, &[]);
    let model = Model::with_side_rows(SIDE);
    model.install(&place.mount);
    let rows = model.layer_rows(1, 5, 9);
    let tail = model.tail_path(&place.mount, "chat", 1, 0);
    append(&model.tail_path(&place.mount, "chat", 0, 0), &model.rows(1, 9)).unwrap();
    append(&tail, &rows[..8 * ROW]).unwrap();
    let ids: Vec<u8> = (0..7_u32).flat_map(u32::to_le_bytes).collect();
    append(&model.tokens_path(&place.mount, "chat"), &ids).unwrap();
    sync_directory(place.mount.path()).unwrap();
    let object = place.mount.objects().into_iter();
    let object =
        object.filter(|path| std::fs::read(path).is_ok_and(|found| found == rows[..8 * ROW]));
    let object: Vec<_> = object.collect();
    let tear = |bytes: &[u8]| {
        let file = std::fs::File::options().append(true).open(&object[0]).unwrap();
        write(&file, bytes).unwrap();
    };
    place.mount.kill();
    tear(&rows[8 * ROW..8 * ROW + 50]);
    place.mount.mount();
    assert_eq!(std::fs::metadata(&tail).unwrap().len(), 8 * ROW as u64);
    assert_eq!(matched(&place.mount, &model, 9), 7);
    append(&tail, &rows[8 * ROW..]).unwrap();
    assert!(std::fs::read(&tail).unwrap() == rows);

    // Where rows are missing that `tokens` names, nobody can tell whose bytes these are: a miss.
    let ids: Vec<u8> = (7..12_u32).flat_map(u32::to_le_bytes).collect();
    append(&model.tokens_path(&place.mount, "chat"), &ids).unwrap();
    sync_directory(place.mount.path()).unwrap();
    place.mount.kill();
    tear(&rows[..50]);
    place.mount.mount();
    assert_eq!(std::fs::metadata(&tail).unwrap().len(), 9 * ROW as u64 + 50);
    assert_eq!(matched(&place.mount, &model, 12), 0);
}

fn index_keys_are_never_rounded(mode: Mode) {
    let options = ["--ssd", "16M", "--cold", "zstd:1", "--commit-interval", "0.05"];
    let mount = Mount::with_options(mode, &options);
    let side = Model::with_side_rows(64).manifest.fields().layers.clone();
    let model = Model::with(|fields| {
        (fields.layers, fields.page_tokens, fields.head_dim) = (side, 1024, 128);
        fields.cold_encoding = Some("q4_0".to_owned());
    });
    model.install(&mount);
    // More than the disk may hold, of values of f16 between 1 and 2 with all their bits.
    let page = |number: u64| {
        let mut rows = model.layer_rows(1, number, 1024);
        for row in rows.chunks_mut(1024 + 64) {
            row[..1024].iter_mut().skip(1).step_by(2).for_each(|high| *high = 0x3c | (*high & 3));
        }
        kvfs::page::pack_page(&model.place(1, number * 1024), &rows, 1024).unwrap()
    };
    let pages = (0..20).map(|number| {
        let path = model.page_path(&mount, "chat", 1, number * 1024);
        write_and_close(&path, &page(number)).unwrap();
        path
    });
    let pages: Vec<_> = pages.collect();
    sync_directory(mount.path()).unwrap();
    let is_rounded = |path: &PathBuf| getxattr(path, "user.kvfs.lossy").is_ok();
    eventually("pages to be rounded", || {
        (pages.iter().filter(|path| is_rounded(path)).count() > 1).then_some(())
    });
    let geometry = model.manifest.layer_geometry(Layer(1));
    for (number, path) in (0..).zip(&pages).filter(|(_, path)| is_rounded(path)) {
        let (before, after) = (page(number), std::fs::read(path).unwrap());
        let [a, b] = [&before, &after].map(|file| PageView::parse(file, &geometry).unwrap());
        assert!(a.k() != b.k() && a.v() != b.v() && a.side() == b.side());
        model.place(1, number * 1024).verify_bytes(&after).unwrap();
    }
}
