//! New rows get to the files of a sequence in their order, whatever takes long, and what fails is heard
//! of while what is there stays whole.

use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use kvfs::attention::Shape;
use kvfs::cuda::{CudaAttention, CudaError, Settings, WriteBack};
use kvfs::page::{Dtype, Layer, Manifest, ManifestFields, TokenStart, names};

use crate::common::{Mode, Model, Mount};
use crate::engine::Engine;
use crate::fake::{F16_64, Plan, under};

const LAYERS: u32 = 3;
const SLOW_BACK: Plan<'_> = &[("KVFS_FAKE_BACK_US", "2000")];
const SLOW_UPLOADS: Plan<'_> = &[("KVFS_FAKE_COPY_US", "3000"), ("KVFS_FAKE_BACK_US", "100")];

fn cuda() -> CudaAttention {
    let settings = Settings {
        slot_bytes: 16 << 10,
        copy_threads: 1,
        hot_bytes: 0,
        registered_bytes: 0,
        device: 0,
    };
    CudaAttention::new(Shape::new(2, 2, 64, 64).unwrap(), settings).unwrap()
}

/// A sequence in a plain directory, of pages of 32 tokens, 2 KV heads x 64 in f16: rows of 512 bytes.
fn sequence(directory: &Path) -> (PathBuf, Manifest) {
    let fields = ManifestFields {
        page_tokens: 32,
        ..ManifestFields::new("test", Dtype::F16, LAYERS, 2, 64)
    };
    for layer in 0..LAYERS {
        fs::create_dir_all(directory.join(names::format_layer(Layer(layer)))).unwrap();
    }
    (directory.to_owned(), Manifest::new(fields).unwrap())
}

fn rows(layer: u32, tokens: Range<u64>) -> Vec<u8> {
    let byte = |token: u64, i: u64| (token * 31 + i * 7 + u64::from(layer) * 101).to_le_bytes()[0];
    tokens.flat_map(|token| (0..512).map(move |i| byte(token, i))).collect()
}

fn tail(sequence: &Path, layer: u32, start: u64) -> PathBuf {
    sequence.join(names::format_layer(Layer(layer))).join(names::format_tail(TokenStart(start)))
}

/// A prompt of 40 tokens and then one at a time.
fn steps(end: u64) -> impl Iterator<Item = Range<u64>> {
    std::iter::once(0..40).chain((40..end).map(|token| token..token + 1))
}

#[test]
fn rows_of_the_device_and_of_the_host() {
    let name = concat!(module_path!(), "::rows_of_the_device_and_of_the_host");
    under(name, &[F16_64], &[SLOW_BACK, SLOW_UPLOADS, &[]], || {
        let directory = tempfile::tempdir().unwrap();
        let (path, manifest) = sequence(directory.path());
        let cuda = cuda();
        let engine = Engine::new(LAYERS, 40 * 512);
        let mut write_back = WriteBack::new(&cuda, &path, &manifest, 0).unwrap();
        for step in steps(75) {
            for layer in 0..LAYERS {
                let bytes = rows(layer, step.clone());
                if layer == 1 {
                    write_back.append(Layer(layer), &bytes).unwrap();
                } else {
                    engine.give(&mut write_back, layer, &bytes).unwrap();
                }
            }
            let ids: Vec<u32> = step.map(|token| u32::try_from(token).unwrap() + 7).collect();
            write_back.complete(&ids).unwrap();
            // Rows are there before their ids.
            let ids = fs::metadata(path.join(names::TOKENS)).map_or(0, |file| file.len() / 4);
            let held = |layer| -> u64 {
                let of =
                    |start| fs::metadata(tail(&path, layer, start)).map_or(0, |file| file.len());
                [0, 32, 64].map(of).iter().sum::<u64>() / 512
            };
            assert!((0..LAYERS).all(|layer| held(layer) >= ids));
        }
        assert_eq!(write_back.next(Layer(2)), Some(75));
        write_back.sync().unwrap();
        for layer in 0..LAYERS {
            for (start, end) in [(0, 32), (32, 64), (64, 75)] {
                let found = fs::read(tail(&path, layer, start)).unwrap();
                assert!(found == rows(layer, start..end), "layer {layer} at {start}");
            }
        }
        let ids = fs::read(path.join(names::TOKENS)).unwrap();
        let expected: Vec<u8> = (7..82_u32).flat_map(u32::to_le_bytes).collect();
        assert_eq!(ids, expected);
        // What is no row, and no layer.
        for (layer, bytes) in [(0, 511), (LAYERS, 512)] {
            let refused = write_back.append(Layer(layer), &vec![0; bytes]);
            assert!(matches!(refused, Err(CudaError::WriteBack { .. })), "{refused:?}");
        }
        drop(write_back);
        // Somebody else goes on.
        let mut write_back = WriteBack::new(&cuda, &path, &manifest, 75).unwrap();
        write_back.append(Layer(0), &rows(0, 75..76)).unwrap();
        write_back.flush().unwrap();
        assert!(fs::read(tail(&path, 0, 64)).unwrap() == rows(0, 64..76));
    });
}

/// What came before a failure is whole, nothing comes after it, and every later call says so.
#[test]
fn a_failure_ends_it() {
    let says = "KVFS_TEST_SAYS";
    let plans: &[Plan<'_>] = &[
        // Another program writes to a tail.
        &[(says, "another program")],
        // The device is lost: at the call, and while a copy is under way.
        &[("KVFS_FAKE_FAIL", "cuMemcpyDtoHAsync:40:700"), (says, "cuMemcpyDtoHAsync")],
        &[("KVFS_FAKE_FAIL", "cuEventRecord:60+:719"), (says, "cuEventRecord")],
    ];
    under(concat!(module_path!(), "::a_failure_ends_it"), &[F16_64], plans, || {
        let says = std::env::var(says).unwrap();
        let directory = tempfile::tempdir().unwrap();
        let (path, manifest) = sequence(directory.path());
        let cuda = cuda();
        let engine = Engine::new(LAYERS, 40 * 512);
        let mut write_back = WriteBack::new(&cuda, &path, &manifest, 0).unwrap();
        let mut give = |step: Range<u64>| -> Result<(), CudaError> {
            for layer in 0..LAYERS {
                engine.give(&mut write_back, layer, &rows(layer, step.clone()))?;
            }
            write_back.complete(&[u32::try_from(step.start).unwrap()])?;
            write_back.flush()
        };
        for token in 0..5 {
            give(token..token + 1).unwrap();
        }
        if says == "another program" {
            fs::write(tail(&path, 1, 0), [rows(1, 0..5), vec![9]].concat()).unwrap();
        }
        let outcome = (5..40).find_map(|token| give(token..token + 1).err()).unwrap();
        assert!(outcome.to_string().contains(&says), "{outcome}");
        assert!(matches!(give(6..7), Err(CudaError::WriteBack { .. })));
        drop(write_back);
        // As many ids as all layers have rows, or fewer.
        let ids = fs::metadata(path.join(names::TOKENS)).unwrap().len() / 4;
        assert!(ids >= 5);
        for layer in 0..LAYERS {
            let found = fs::read(tail(&path, layer, 0)).unwrap();
            let whole = rows(layer, 0..ids.min(32));
            assert!(found.starts_with(&whole), "layer {layer}, {ids} ids");
        }
    });
}

/// Who computes faster than files take rows waits, with a bounded number of rows under way.
#[test]
fn a_file_that_takes_nothing() {
    under(concat!(module_path!(), "::a_file_that_takes_nothing"), &[F16_64], &[&[]], || {
        let directory = tempfile::tempdir().unwrap();
        let (path, manifest) = sequence(directory.path());
        let pipe = tail(&path, 0, 0);
        nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
        let cuda = cuda();
        let mut write_back = WriteBack::new(&cuda, &path, &manifest, 0).unwrap();
        let given = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            let given = &given;
            scope.spawn(move || {
                for token in 0..200 {
                    // It has no length, so what comes after the first row is refused.
                    if write_back.append(Layer(0), &rows(0, token..token + 1)).is_err() {
                        return;
                    }
                    given.fetch_add(1, Ordering::Relaxed);
                }
                panic!("nobody heard that the file is none");
            });
            // 64 that wait, and one that is being written.
            for _ in 0..100 {
                std::thread::sleep(Duration::from_millis(100));
                if given.load(Ordering::Relaxed) >= 65 {
                    break;
                }
            }
            std::thread::sleep(Duration::from_millis(100));
            assert_eq!(given.load(Ordering::Relaxed), 65);
            assert_eq!(fs::read(&pipe).unwrap(), rows(0, 0..1));
        });
    });
}

/// On a mount the row that fills a page seals it.
#[test]
fn on_a_mount() {
    require!(fuse, root);
    under(concat!(module_path!(), "::on_a_mount"), &[F16_64], &[SLOW_BACK], || {
        let mount = Mount::with_options(Mode::Passthrough, &[]);
        let model = Model::with(|fields| fields.head_dim = 64);
        model.install(&mount);
        let path = model.sequence(&mount, "s");
        let layers = model.manifest.geometry().num_layers();
        for layer in 0..layers {
            fs::create_dir_all(path.join(names::format_layer(Layer(layer)))).unwrap();
        }
        let cuda = cuda();
        let mut write_back = WriteBack::new(&cuda, &path, &model.manifest, 0).unwrap();
        for step in steps(70) {
            for layer in 0..layers {
                let count = u32::try_from(step.end - step.start).unwrap();
                let bytes = model.rows(step.start * 10 + u64::from(layer), count);
                write_back.append(Layer(layer), &bytes).unwrap();
            }
            let ids: Vec<u32> = step.map(|token| u32::try_from(token).unwrap()).collect();
            write_back.complete(&ids).unwrap();
        }
        write_back.sync().unwrap();
        for layer in 0..layers {
            for start in [0, 32] {
                assert!(model.page_path(&mount, "s", layer, start).is_file());
            }
            let row = usize::try_from(model.manifest.geometry().row_bytes()).unwrap();
            assert_eq!(fs::read(tail(&path, layer, 64)).unwrap().len(), 6 * row);
        }
        let sequence = kvfs::reader::Sequence::open(&path).unwrap();
        assert_eq!(sequence.valid_tokens().unwrap(), 70);
    });
}
