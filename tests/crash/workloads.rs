//! What programs do to a mount, in the cases that differ in what the disk is asked to do.

use kvfs::page::{
    Dtype, Layer, LayerKind, StatePlace, StateShape, StateTensor, TokenStart, names, pack_page,
    pack_state,
};
use kvfs::tier::encoding::{ColdEncoding, ZstdLevel};

use crate::common::random::Random;
use crate::common::{Model, fill};
use crate::driver::Driver;
use crate::mounted::Setup;

const ZSTD: ColdEncoding = ColdEncoding::Zstd(ZstdLevel::DEFAULT);
/// Large enough to be encoded.
const COLD_BYTES: usize = 72 << 10;
const COLD_FILES: u64 = 4;
/// Two of those fit.
const BUDGET_BYTES: u64 = 2 * (COLD_BYTES as u64) + (32 << 10);

/// So that a row crosses the borders of sectors.
pub(crate) const SIDE_ROW_BYTES: u32 = 300;

/// A named sequence of operations.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Workload {
    pub(crate) name: &'static str,
    pub(crate) setup: Setup,
    pub(crate) run: fn(&mut Driver<'_>),
}

const ENCODING: Setup = Setup { cold: ZSTD, budget_bytes: Some(BUDGET_BYTES), ..Setup::PLAIN };
const LEAVING: Setup = Setup { has_remote: true, budget_bytes: Some(BUDGET_BYTES), ..Setup::PLAIN };

/// New pages go to the remote in place of the disk.
const SPARING: Setup =
    Setup { has_remote: true, ram_bytes: Some(1 << 20), spares_disk: true, ..Setup::PLAIN };

const PACKING: Setup = Setup { packed_bytes_max: 8 << 10, ..Setup::PLAIN };

/// Little enough for room to be given back where it is, and enough for what is valid to be copied.
const NEARLY_FULL: Setup =
    Setup { packed_bytes_max: 64 << 10, available_bytes: 100 << 20, ..Setup::PLAIN };

pub(crate) const ALL: [Workload; 18] = [
    Workload { name: "files", setup: Setup::PLAIN, run: files },
    Workload { name: "removals", setup: Setup::PLAIN, run: removals },
    Workload { name: "pages", setup: Setup::PLAIN, run: pages },
    Workload {
        name: "pages-in-memory",
        setup: Setup { ram_bytes: Some(1 << 20), ..Setup::PLAIN },
        run: pages,
    },
    Workload { name: "pages-spared", setup: SPARING, run: pages },
    Workload { name: "spared", setup: SPARING, run: spared },
    Workload { name: "states", setup: Setup::PLAIN, run: states },
    Workload { name: "rows", setup: Setup::PLAIN, run: rows },
    Workload { name: "side-rows", setup: Setup::PLAIN, run: side_rows },
    Workload { name: "files-packed", setup: PACKING, run: files },
    Workload {
        name: "pages-packed-from-memory",
        setup: Setup { ram_bytes: Some(1 << 20), ..PACKING },
        run: pages,
    },
    Workload { name: "short-packs", setup: PACKING, run: short_packs },
    Workload { name: "hollow-packs", setup: NEARLY_FULL, run: hollow_packs },
    Workload {
        name: "encoding-packed",
        setup: Setup { packed_bytes_max: 64 << 10, ..ENCODING },
        run: moving,
    },
    Workload {
        name: "leaving-packed",
        setup: Setup { packed_bytes_max: 64 << 10, ..LEAVING },
        run: moving,
    },
    Workload { name: "encoding", setup: ENCODING, run: moving },
    Workload { name: "leaving", setup: LEAVING, run: moving },
    Workload {
        name: "rounding",
        setup: Setup { budget_bytes: Some(160 << 10), ..ENCODING },
        run: rounding,
    },
];

fn files(driver: &mut Driver<'_>) {
    driver.write("files/a", &fill(1, 3000));
    driver.directory("files/d");
    driver.write("files/d/b", &fill(2, 9000));
    driver.commit();
    // A new version, and one that is renamed over the old.
    driver.write("files/a", &fill(3, 5000));
    driver.write("files/.b.tmp", &fill(4, 7000));
    driver.rename("files/.b.tmp", "files/d/b");
    driver.symlink("files/s", "d/b");
    driver.commit();
    driver.link("files/a", "files/d/l");
    driver.unlink("files/a");
    driver.set_attribute("files/d/l", "user.colour", b"blue");
    driver.commit();
    // In place, within and beyond the end.
    driver.overwrite("files/d/l", 1000, &fill(5, 2000));
    driver.overwrite("files/d/l", 4500, &fill(6, 4000));
    driver.commit();
    driver.overwrite("files/d/l", 0, &fill(7, 600));
    let held = driver.write_and_sync("files/held", &fill(8, 2500));
    driver.rename("files/d", "files/e");
    driver.commit();
    driver.close("files/held", held);
    driver.unlink("files/e/b");
    driver.write("files/empty", b"");
    driver.remount();
    driver.unlink("files/e/l");
    driver.remove_directory("files/e");
    driver.write("files/held", &fill(9, 100));
    driver.commit();
}

/// So many at once that their files go after the commit.
fn removals(driver: &mut Driver<'_>) {
    let files = |first: u64| (first..first + 20).map(|number| (number, format!("files/{number}")));
    for (number, path) in files(0).chain(files(100)) {
        driver.write(&path, &fill(number, 1500));
    }
    driver.commit();
    for (_, path) in files(0) {
        driver.unlink(&path);
    }
    driver.write("files/between", &fill(50, 3000));
    // A commit more, while they wait.
    driver.commit_alone();
    driver.write("files/meanwhile", &fill(52, 3000));
    driver.commit_alone();
    for (number, path) in files(100) {
        driver.write(&path, &fill(number + 1000, 1200));
    }
    driver.commit();
    driver.remount();
    for (_, path) in files(100) {
        driver.unlink(&path);
    }
    driver.commit_alone();
    // The mount ends while they wait.
    driver.remount();
    driver.write("files/after", &fill(51, 3000));
    driver.commit();
}

/// Each mount begins a pack, and what is removed and changed makes room in those of the mounts before.
fn short_packs(driver: &mut Driver<'_>) {
    driver.directory("files/d");
    for mount in 0..4 {
        for file in 0..4 {
            driver.write(&format!("files/d/{mount}-{file}"), &fill(mount * 4 + file, 700));
        }
        driver.commit();
        if let Some(before) = mount.checked_sub(1) {
            for file in 0..3 {
                driver.unlink(&format!("files/d/{before}-{file}"));
            }
            driver.overwrite(&format!("files/d/{before}-3"), 100, &fill(90 + mount, 300));
        }
        driver.commit();
        driver.remount();
        driver.commit();
    }
}

/// Less than half of a pack goes, then more; of one that is written to, and of one that has its index.
fn hollow_packs(driver: &mut Driver<'_>) {
    driver.directory("files/d");
    let path = |file: u64| format!("files/d/{file}");
    let unlink_and_commit = |driver: &mut Driver<'_>, files: [u64; 4]| {
        for file in files {
            driver.unlink(&path(file));
        }
        driver.commit();
    };
    for file in 0..12 {
        driver.write(&path(file), &fill(file, 20_000));
    }
    driver.commit();
    unlink_and_commit(driver, [1, 2, 3, 5]);
    driver.overwrite(&path(4), 100, &fill(90, 300));
    driver.remount();
    driver.write(&path(12), &fill(12, 20_000));
    driver.commit();
    unlink_and_commit(driver, [7, 8, 9, 10]);
    driver.overwrite(&path(11), 100, &fill(91, 300));
    driver.commit();
}

pub(crate) fn install(driver: &mut Driver<'_>, model: &Model) {
    driver.directory("models/small");
    driver.seal_in_place("models/small/manifest.json", model.manifest.to_json().as_bytes());
    driver.directory("models/small/sequences");
}

pub(crate) fn add_sequence(driver: &mut Driver<'_>, name: &str) {
    let sequence = format!("models/small/sequences/{name}");
    driver.directory(&sequence);
    for layer in 0..2 {
        driver.directory(&format!("{sequence}/{}", names::format_layer(Layer(layer))));
    }
}

pub(crate) fn page_path(sequence: &str, layer: u32, start: u64) -> String {
    let (layer, page) = (names::format_layer(Layer(layer)), TokenStart(start));
    format!("models/small/sequences/{sequence}/{layer}/{}", names::format_page(page))
}

fn pages(driver: &mut Driver<'_>) {
    let model = Model::small();
    install(driver, &model);
    add_sequence(driver, "chat");
    driver.seal(&page_path("chat", 0, 0), &model.page(0, 0, 1));
    driver.seal_in_place(&page_path("chat", 1, 0), &model.page(1, 0, 2));
    driver.commit();
    driver.seal(&page_path("chat", 0, 32), &model.page(0, 32, 3));
    // Another page onto the same name, and the same page again.
    driver.seal(&page_path("chat", 0, 0), &model.page(0, 0, 4));
    driver.seal(&page_path("chat", 1, 0), &model.page(1, 0, 2));
    driver.commit();
    add_sequence(driver, "copy");
    driver.link(&page_path("chat", 0, 0), &page_path("copy", 0, 0));
    // The bytes are there already: it becomes a link.
    driver.seal(&page_path("copy", 1, 0), &model.page(1, 0, 2));
    driver.commit();
    driver.unlink(&page_path("chat", 0, 0));
    driver.unlink(&page_path("chat", 1, 0));
    driver.seal(&page_path("chat", 0, 0), &model.page(0, 0, 5));
    driver.remount();
    driver.unlink(&page_path("copy", 0, 0));
    driver.seal_in_place(&page_path("chat", 1, 32), &model.short_page(1, 32, 6, 7));
    driver.commit();
}

/// Pages that only memory and the remote have, one after the other: what comes later never is there without what came
/// before.
fn spared(driver: &mut Driver<'_>) {
    let model = Model::small();
    install(driver, &model);
    add_sequence(driver, "chat");
    driver.commit();
    let before = driver.disk.used_bytes();
    for (number, start) in [0, 32, 64].into_iter().enumerate() {
        driver.seal(&page_path("chat", 0, start), &model.page(0, start, number as u64));
        driver.move_to_remote();
    }
    driver.commit();
    assert!(driver.disk.used_bytes() == before || driver.has_failed(), "the disk has them");
    // On its way there when somebody asks for it to be durable, and when it goes.
    driver.seal_in_place(&page_path("chat", 1, 0), &model.page(1, 0, 10));
    driver.commit();
    driver.seal(&page_path("chat", 1, 32), &model.page(1, 32, 11));
    driver.unlink(&page_path("chat", 1, 32));
    driver.seal(&page_path("chat", 1, 32), &model.page(1, 32, 12));
    driver.link(&page_path("chat", 1, 32), "files/l");
    driver.commit();
    driver.seal(&page_path("chat", 0, 0), &model.page(0, 0, 13));
    driver.unlink(&page_path("chat", 0, 64));
    driver.move_to_remote();
    driver.commit();
    driver.remount();
    driver.read(&page_path("chat", 0, 32));
    driver.seal(&page_path("chat", 1, 64), &model.page(1, 64, 14));
    driver.move_to_remote();
    driver.rename(&page_path("chat", 1, 64), "files/moved");
    driver.commit();
}

/// A layer that keeps pages, and one that keeps states of 8 KiB.
fn hybrid() -> Model {
    let tensor = StateTensor { name: "ssm".to_owned(), dtype: Dtype::F32, shape: vec![2, 512] };
    let kept = LayerKind::State(StateShape { state: vec![tensor] });
    Model::with(|fields| fields.layers = Some(vec![LayerKind::Attention, kept]))
}

/// The state of the second layer after so many tokens, which begin with this one.
fn state(model: &Model, row: u32, first: u32) -> Vec<u8> {
    let place = StatePlace::new(&model.manifest, Layer(1), TokenStart(u64::from(row))).unwrap();
    let seen: Vec<u8> = (first..first + row).flat_map(u32::to_le_bytes).collect();
    let prefix = model.manifest.prefix_of(&seen).unwrap();
    pack_state(&place, prefix, &fill(u64::from(first), 4096)).unwrap()
}

fn states(driver: &mut Driver<'_>) {
    let model = hybrid();
    install(driver, &model);
    add_sequence(driver, "chat");
    let path = |sequence: &str, row| {
        let name = names::format_state(TokenStart(row));
        format!("models/small/sequences/{sequence}/001/{name}")
    };
    let tokens: Vec<u8> = (0..64_u32).flat_map(u32::to_le_bytes).collect();
    driver.append("models/small/sequences/chat/tokens", &tokens, None);
    driver.seal(&page_path("chat", 0, 0), &model.page(0, 0, 1));
    driver.seal(&path("chat", 32), &state(&model, 32, 0));
    driver.commit();
    driver.seal_in_place(&path("chat", 40), &state(&model, 40, 0));
    // That of other tokens in its place, and the same again.
    driver.seal(&path("chat", 32), &state(&model, 32, 7));
    driver.seal(&path("chat", 40), &state(&model, 40, 0));
    driver.commit();
    add_sequence(driver, "copy");
    driver.link(&path("chat", 32), &path("copy", 32));
    // The bytes are there already: it becomes a link.
    driver.seal(&path("copy", 40), &state(&model, 40, 0));
    driver.commit();
    driver.unlink(&path("chat", 32));
    driver.seal_in_place(&path("chat", 32), &state(&model, 32, 0));
    driver.remount();
    driver.unlink(&path("copy", 40));
    driver.seal(&path("chat", 50), &state(&model, 50, 0));
    driver.commit();
}

fn rows(driver: &mut Driver<'_>) {
    let model = Model::small();
    install(driver, &model);
    add_sequence(driver, "chat");
    let rows = model.rows(1, 32);
    let (row, above) = (model.row_bytes(), "models/small/sequences/chat");
    let tail = |start| format!("{above}/000/{}", names::format_tail(TokenStart(start)));
    let tokens = format!("{above}/tokens");
    driver.append(&tokens, &fill(2, 4 * 10), None);
    driver.append(&tail(0), &rows[..10 * row], None);
    driver.commit();
    driver.append(&tail(0), &rows[10 * row..20 * row], None);
    driver.append(&tokens, &fill(3, 4 * 10), None);
    driver.commit();
    driver.append(&tail(0), &rows[20 * row..31 * row], None);
    let mut committed = rows[..20 * row].to_vec();
    committed.resize(rows.len(), 0);
    let page =
        [committed, rows.clone()].map(|rows| pack_page(&model.place(0, 0), &rows, 32).unwrap());
    driver.append(&tail(0), &rows[31 * row..], Some((&page_path("chat", 0, 0), page, &tail(32))));
    driver.append(&tokens, &fill(4, 4 * 12), None);
    driver.commit();
    driver.append(&tail(32), &model.rows(5, 3), None);
    driver.remount();
    driver.append(&tail(32), &model.rows(6, 3), None);
    driver.commit();
}

/// Pages and rows of a layer that keeps something beside K and V.
fn side_rows(driver: &mut Driver<'_>) {
    let model = Model::with_side_rows(SIDE_ROW_BYTES);
    install(driver, &model);
    add_sequence(driver, "chat");
    let (rows, above) = (model.layer_rows(1, 1, 32), "models/small/sequences/chat");
    let row = rows.len() / 32;
    let tail = |start| format!("{above}/001/{}", names::format_tail(TokenStart(start)));
    let tokens = format!("{above}/tokens");
    driver.seal(&page_path("chat", 1, 64), &model.page(1, 64, 9));
    driver.append(&tail(0), &rows[..10 * row], None);
    driver.append(&tokens, &fill(2, 4 * 10), None);
    driver.commit();
    driver.append(&tail(0), &rows[10 * row..31 * row], None);
    driver.append(&tokens, &fill(3, 4 * 21), None);
    let mut committed = rows[..10 * row].to_vec();
    committed.resize(rows.len(), 0);
    let page =
        [committed, rows.clone()].map(|rows| pack_page(&model.place(1, 0), &rows, 32).unwrap());
    driver.append(&tail(0), &rows[31 * row..], Some((&page_path("chat", 1, 0), page, &tail(32))));
    driver.commit();
    driver.append(&tail(32), &model.layer_rows(1, 5, 3), None);
    driver.remount();
    driver.append(&tail(32), &model.layer_rows(1, 6, 3), None);
    driver.commit();
}

/// Half zeros: random bytes would not be encoded.
fn cold_bytes(seed: u64) -> Vec<u8> {
    let mut bytes = fill(seed, COLD_BYTES / 2);
    bytes.resize(COLD_BYTES, 0);
    bytes
}

fn moving(driver: &mut Driver<'_>) {
    for number in 0..COLD_FILES {
        driver.write(&format!("files/f{number}"), &cold_bytes(number));
    }
    driver.commit();
    driver.move_until_it_fits();
    driver.commit();
    for number in 0..COLD_FILES {
        driver.read(&format!("files/f{number}"));
    }
    driver.move_until_it_fits();
    // What went cold changes in place, is replaced, is linked, goes.
    driver.overwrite("files/f0", 1000, &fill(10, 3000));
    driver.commit();
    driver.write("files/f1", &cold_bytes(11));
    driver.link("files/f2", "files/l");
    driver.unlink("files/f2");
    driver.unlink("files/f3");
    driver.move_until_it_fits();
    driver.commit();
    driver.write("files/g", &cold_bytes(12));
    driver.ask_for_tier("files/l", "ssd");
    driver.remount();
    driver.overwrite("files/l", 0, &fill(13, 500));
    driver.commit();
    if !driver.has_remote() {
        driver.collect_garbage();
    }
    driver.move_until_it_fits();
    driver.read("files/g");
    driver.commit();
}

fn rounding(driver: &mut Driver<'_>) {
    let model = Model::with(|fields| {
        (fields.dtype, fields.page_tokens, fields.head_dim) = (Dtype::F16, 304, 32);
        fields.cold_encoding = Some("q8_0".to_owned());
    });
    install(driver, &model);
    add_sequence(driver, "chat");
    for number in 0..3 {
        let start = number * 304;
        let mut rows = model.rows(number, 304);
        // Values of f16 between 1 and 2, with all their bits.
        rows.iter_mut().skip(1).step_by(2).for_each(|high| *high = 0x3c | (*high & 3));
        let page = pack_page(&model.place(0, start), &rows, 304).unwrap();
        driver.seal(&page_path("chat", 0, start), &page);
    }
    driver.link(&page_path("chat", 0, 0), "files/page");
    driver.commit();
    driver.move_until_it_fits();
    driver.commit();
    driver.unlink(&page_path("chat", 0, 304));
    driver.remount();
    driver.move_until_it_fits();
    driver.read(&page_path("chat", 0, 608));
    driver.commit();
}

/// Operations in an order that depends on the seed alone.
pub(crate) fn random(driver: &mut Driver<'_>, random: &mut Random, operations: usize) {
    for _ in 0..operations {
        let number = random.below(6);
        let path = format!("files/f{number}");
        let other = format!("files/f{}", (number + 1 + random.below(5)) % 6);
        let is_there = driver.history.tree().contains_key(&path);
        let bytes = fill(random.next(), 1 + random.below(10_000));
        match random.below(9) {
            0 | 1 => driver.write(&path, &bytes),
            2 if is_there => driver.rename(&path, &other),
            3 if is_there && !driver.history.tree().contains_key(&other) => {
                driver.link(&path, &other);
            }
            4 if is_there => driver.unlink(&path),
            5 if is_there => driver.overwrite(&path, random.below(8000), &bytes),
            6 if is_there => driver.set_attribute(&path, "user.x", &bytes[..bytes.len().min(60)]),
            7 => driver.commit(),
            8 if random.below(4) == 0 => driver.remount(),
            _ => {}
        }
    }
    driver.commit();
}
