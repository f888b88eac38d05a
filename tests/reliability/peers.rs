//! Two failures that other caches are known for, and that must not happen here: a store that failed
//! and is found all the same, and the bytes of one key served for another.

use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::common::disk::SmallDisk;
use crate::common::random::Random;
use crate::common::sys::{assert_errno, map, open, rename, sync_directory, write_and_close};
use crate::common::{Mode, Model, Mount};

/// How long keys are mixed up, in each mode.
const STORM: Duration = Duration::from_secs(2);
const KEYS: u64 = 24;
const THREADS: u64 = 4;

/// A page whose bytes did not all get to the disk is found by nobody: not by its name, not in a
/// listing, not by its tokens, not after a crash.
#[test]
fn a_failed_store_is_found_by_nobody() {
    crate::require!(fuse, root, r#loop);
    let disk = SmallDisk::new();
    let store = disk.mountpoint.join("store");
    let mut mount = Mount::of_store(Mode::Passthrough, &store);
    let model = Model::with(|fields| {
        fields.num_layers = 1;
        fields.head_dim = 128;
        fields.num_kv_heads = 8;
        fields.page_tokens = 256;
    });
    model.install(&mount);
    let tokens: Vec<u8> = (0..512_u32).flat_map(u32::to_le_bytes).collect();
    let (first, second) = (0, 256);
    let paths = [first, second].map(|start| model.page_path(&mount, "chat", 0, start));
    write_and_close(&paths[0], &model.page(0, first, 1)).unwrap();
    write_and_close(model.tokens_path(&mount, "chat"), &tokens).unwrap();
    sync_directory(mount.path()).unwrap();
    let ballast = disk.fill_up();
    let outcome = write_and_close(&paths[1], &model.page(0, second, 2));
    assert_errno(outcome, libc::ENOSPC);
    let staged = paths[1].with_file_name(".page.tmp");
    let outcome = write_and_close(&staged, &model.page(0, second, 2));
    assert_errno(outcome, libc::ENOSPC);
    assert!(rename(&staged, &paths[1]).is_err());
    let check = |mount: &Mount| {
        assert_errno(std::fs::metadata(&paths[1]), libc::ENOENT);
        let layer = std::fs::read_dir(paths[0].parent().unwrap()).unwrap();
        let pages =
            layer.flatten().filter(|entry| entry.file_name() == paths[1].file_name().unwrap());
        assert_eq!(pages.count(), 0);
        let question = model.directory(mount).join("prefixes/match");
        let question = open(question, libc::O_RDWR).unwrap();
        question.write_all_at(&tokens, 0).unwrap();
        let mut answer = vec![0; 200];
        let count = question.read_at(&mut answer, 0).unwrap();
        let answer = String::from_utf8_lossy(&answer[..count]).into_owned();
        assert!(answer.contains("\"tokens\":256"), "{answer}");
        assert!(std::fs::read(&paths[0]).unwrap() == model.page(0, first, 1));
    };
    check(&mount);
    mount.kill();
    std::fs::remove_file(ballast).unwrap();
    mount.mount();
    check(&mount);
    // And can be stored again.
    write_and_close(&paths[1], &model.page(0, second, 2)).unwrap();
    assert!(std::fs::read(&paths[1]).unwrap() == model.page(0, second, 2));
}

/// Pages of many keys are stored, replaced, removed and read by several programs at once, while they
/// move between memory, the disk and its encoded copies. Whatever is read under a key is one of the
/// values that were stored under it, whole.
fn no_key_shows_another_ones_bytes(mode: Mode) {
    let options = ["--ram", "2M", "--ssd", "16M", "--cold", "zstd:1", "--commit-interval", "0.05"];
    let mount = Mount::with_options(mode, &options);
    // Pages of 257 KiB, all of one shape: only what is in them tells them apart.
    let model = Model::with(|fields| {
        fields.head_dim = 128;
        fields.page_tokens = 256;
    });
    model.install(&mount);
    let path = |key: u64| model.page_path(&mount, &format!("s{}", key % 3), 0, key / 3 * 256);
    let paths: Vec<PathBuf> = (0..KEYS).map(path).collect();
    let value = |key: u64, version: u64| {
        // Half of each page compresses well.
        let mut rows = model.rows(key << 8 | version, 256);
        let half = rows.len() / 2;
        rows[half..].fill(u8::try_from(key).unwrap());
        let place = model.place(0, key / 3 * 256);
        kvfs::page::pack_page(&place, &rows, 256).unwrap()
    };
    let values: Vec<[Vec<u8>; 2]> = (0..KEYS).map(|key| [value(key, 0), value(key, 1)]).collect();
    let (reads, misses) = (AtomicU64::new(0), AtomicU64::new(0));
    let end = Instant::now() + STORM;
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (paths, values, reads, misses) = (&paths, &values, &reads, &misses);
            scope.spawn(move || {
                let mut random = Random::of(thread);
                while Instant::now() < end {
                    let key = random.below(paths.len());
                    let (path, own) = (&paths[key], &values[key]);
                    match random.below(8) {
                        0 => drop(std::fs::remove_file(path)),
                        1 | 2 => {
                            let staged = path.with_file_name(format!(".{thread}.tmp"));
                            let bytes = &own[random.below(2)];
                            let written = write_and_close(&staged, bytes);
                            written.and_then(|()| rename(&staged, path)).unwrap();
                        }
                        _ => {
                            let Ok(file) = open(path, libc::O_RDONLY) else {
                                misses.fetch_add(1, Ordering::Relaxed);
                                continue;
                            };
                            let mut bytes = vec![0; own[0].len()];
                            file.read_exact_at(&mut bytes, 0).unwrap();
                            let is_own = |found: &[u8]| own.iter().any(|value| value == found);
                            assert!(is_own(&bytes), "key {key} shows other bytes");
                            assert!(is_own(&map(&file)), "key {key} maps other bytes");
                            reads.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                }
            });
        }
    });
    let (reads, misses) = (reads.into_inner(), misses.into_inner());
    println!("{mode:?}: {reads} reads, {misses} misses");
    assert!(reads > 200, "only {reads} reads");
    assert_eq!(mount.status("errors"), "0", "{:?}", mount.errors());
}

in_both_modes!(no_key_shows_another_ones_bytes);
