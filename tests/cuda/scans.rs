//! Sequences, layer by layer: what the ring, the hot window and the CPU attend to together is what
//! the CPU attends to alone.

use std::fs;
use std::path::PathBuf;

use half::f16;
use kvfs::attention::select::TokenSet;
use kvfs::attention::{Attention, Options, Queries, Shape};
use kvfs::cuda::{CudaAttention, CudaError, Runtime, Settings};
use kvfs::page::{
    Dtype, Layer, Layout, Manifest, ManifestFields, PagePlace, TokenStart, names, pack_page,
};
use kvfs::reader::{Backend, Sequence};

use crate::common::sys::rename;
use crate::fake::{F16_64, Plan, SLOW_COPIES, SLOW_KERNELS, under};
use crate::fixture::Random;

const PLANS: &[Plan<'_>] = &[SLOW_COPIES, SLOW_KERNELS, &[]];
const PAGE_TOKENS: u32 = 32;
const LAYERS: u32 = 3;

/// A sequence in a plain directory: pages of 32 tokens, 2 KV heads x 64 in f16 (16 KiB).
struct Directory {
    directory: tempfile::TempDir,
    manifest: Manifest,
}

impl Directory {
    fn new(layout: Layout, tokens: u64) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let fields = ManifestFields {
            page_tokens: PAGE_TOKENS,
            layout,
            ..ManifestFields::new("test", Dtype::F16, LAYERS, 2, 64)
        };
        let made = Self { directory, manifest: Manifest::new(fields).unwrap() };
        fs::create_dir_all(made.sequence()).unwrap();
        let model = made.directory.path().join("models/m");
        fs::write(model.join(names::MANIFEST), made.manifest.to_json()).unwrap();
        for layer in 0..LAYERS {
            fs::create_dir(made.sequence().join(names::format_layer(Layer(layer)))).unwrap();
        }
        made.grow(0, tokens);
        made
    }

    fn sequence(&self) -> PathBuf {
        self.directory.path().join("models/m/sequences/s")
    }

    /// The rows of some tokens, the same whenever they are asked for.
    fn rows(&self, layer: u32, tokens: std::ops::Range<u64>) -> Vec<u8> {
        let values = usize::try_from(self.manifest.geometry().row_bytes()).unwrap() / 2;
        let of_token = |token: u64| {
            let mut random = Random(1 + token * 1000 + u64::from(layer));
            random.next();
            random.floats(values, 1.0).into_iter().flat_map(|x| f16::from_f32(x).to_le_bytes())
        };
        tokens.flat_map(|token| of_token(token).collect::<Vec<u8>>()).collect()
    }

    /// Seals pages and writes the tail.
    fn grow(&self, from: u64, to: u64) {
        let page_tokens = u64::from(PAGE_TOKENS);
        for layer in 0..LAYERS {
            let directory = self.sequence().join(names::format_layer(Layer(layer)));
            for start in (from / page_tokens * page_tokens..to).step_by(32) {
                let tail = directory.join(names::format_tail(TokenStart(start)));
                if start + page_tokens > to {
                    fs::write(tail, self.rows(layer, start..to)).unwrap();
                    continue;
                }
                let place = PagePlace::new(&self.manifest, Layer(layer), TokenStart(start));
                let rows = self.rows(layer, start..start + page_tokens);
                let page = pack_page(&place.unwrap(), &rows, PAGE_TOKENS).unwrap();
                fs::write(directory.join(names::format_page(TokenStart(start))), page).unwrap();
                let _ = fs::remove_file(tail);
            }
        }
    }

    /// Makes short pages of the tails, as a converter leaves them.
    fn seal_tails(&self, end: u64) {
        let start = TokenStart(end / u64::from(PAGE_TOKENS) * u64::from(PAGE_TOKENS));
        for layer in 0..LAYERS {
            let directory = self.sequence().join(names::format_layer(Layer(layer)));
            let tail = directory.join(names::format_tail(start));
            let place = PagePlace::new(&self.manifest, Layer(layer), start).unwrap();
            let tokens = u32::try_from(end - start.0).unwrap();
            let page = pack_page(&place, &fs::read(&tail).unwrap(), tokens).unwrap();
            fs::write(directory.join(names::format_page(start)), page).unwrap();
            fs::remove_file(tail).unwrap();
        }
    }
}

fn shape() -> Shape {
    Shape::new(10, 2, 64, 64).unwrap()
}

/// Two pages to a slot; the hot window as it is asked for.
fn settings(hot_pages: u64) -> Settings {
    let place = 4096 + 16384 + 2048;
    Settings {
        slot_bytes: 36 << 10,
        copy_threads: 2,
        hot_bytes: hot_pages * place * 3,
        registered_bytes: 1 << 30,
        device: 0,
    }
}

/// One decode step: all layers, on the device and on the CPU.
#[track_caller]
fn step(
    cuda: &mut CudaAttention, sequence: &Sequence, end: u64, options: &Options<'_>, share: f64,
) -> u64 {
    let cpu = Attention::new(shape(), 1).unwrap();
    let mut random = Random(end + 77);
    let mut expected = sequence.stream(0..end).unwrap();
    let mut scan = cuda.scan(sequence, 0..end).unwrap();
    if share > 0.0 {
        scan = scan.with_cpu(&cpu, share).unwrap();
    }
    let hot = scan.hot_tokens();
    while let Some(layer) = scan.layer() {
        assert_eq!(expected.layer(), Some(layer));
        let q = random.floats(10 * 64, 2.0);
        let queries = Queries { q: &q, positions: &[end - 1] };
        let found = scan.attend(&queries, options).unwrap().finish(None).unwrap();
        let wanted = expected.attend(&cpu, &queries, options).unwrap().finish(None).unwrap();
        for (found, wanted) in found.iter().zip(&wanted) {
            let is_close = (found - wanted).abs() <= 3e-6 * (1.0 + wanted.abs());
            assert!(is_close, "layer {layer} of {end} tokens: {found}, not {wanted}");
        }
    }
    assert!(scan.attend(&Queries { q: &[], positions: &[] }, options).is_err());
    hot
}

fn plain() -> Options<'static> {
    Options { sm_scale: Some(0.15), ..Options::default() }
}

#[test]
fn cold_pages_and_a_tail() {
    let name = concat!(module_path!(), "::cold_pages_and_a_tail");
    under(name, &[F16_64], PLANS, || {
        for layout in [Layout::Hnd, Layout::Nhd] {
            let directory = Directory::new(layout, 32 * 13 + 5);
            let sequence = Sequence::open(&directory.sequence()).unwrap();
            let mut cuda = CudaAttention::new(shape(), settings(0)).unwrap();
            for end in [421, 416, 400, 1, 33] {
                assert_eq!(step(&mut cuda, &sequence, end, &plain(), 0.0), 0);
            }
        }
    });
}

/// Sixty pages of each layer and a short one, two to a slot: each slot is used some twenty times in a
/// scan, with pages of one layer behind those of another.
#[test]
fn a_ring_that_goes_round_many_times() {
    let name = concat!(module_path!(), "::a_ring_that_goes_round_many_times");
    under(name, &[F16_64], PLANS, || {
        let end = 32 * 60 + 13;
        let directory = Directory::new(Layout::Hnd, end);
        directory.seal_tails(end);
        let sequence = Sequence::open(&directory.sequence()).unwrap();
        let mut cuda = CudaAttention::new(shape(), settings(0)).unwrap();
        assert_eq!(step(&mut cuda, &sequence, end, &plain(), 0.0), 0);
        // As if rows had been taken back, and with the CPU.
        step(&mut cuda, &sequence, end - 40, &plain(), 0.2);
        // The last page is short, and stays on the device with those before it.
        let mut cuda = CudaAttention::new(shape(), settings(20)).unwrap();
        assert_eq!(step(&mut cuda, &sequence, end, &plain(), 0.0), 0);
        assert!(step(&mut cuda, &sequence, end, &plain(), 0.0) >= 19 * 3 * 32);
    });
}

/// Queries and results on the device: the host goes on while the device attends, and each layer gets
/// what is its own.
#[test]
fn layers_that_nobody_waits_for() {
    let name = concat!(module_path!(), "::layers_that_nobody_waits_for");
    under(name, &[F16_64], PLANS, || {
        let end = 32 * 9 + 7;
        let directory = Directory::new(Layout::Hnd, end);
        let sequence = Sequence::open(&directory.sequence()).unwrap();
        let cpu = Attention::new(shape(), 1).unwrap();
        let mut random = Random(78);
        // All cold, some of them hot, all hot.
        for pages in [0, 4, 9] {
            let mut cuda = CudaAttention::new(shape(), settings(pages)).unwrap();
            for round in 0..3 {
                let q = random.floats(10 * 64, 2.0);
                let queries = Queries { q: &q, positions: &[end - 1] };
                let done = cuda.attend_layers((&sequence, 0..end), &queries, &plain(), 2);
                let (found, times) = done.unwrap();
                assert_eq!(times.len(), 2);
                let mut layers = found.chunks_exact(10 * 64);
                let mut expected = sequence.stream(0..end).unwrap();
                while expected.layer().is_some() {
                    let wanted = expected.attend(&cpu, &queries, &plain()).unwrap();
                    let (found, wanted) = (layers.next().unwrap(), wanted.finish(None).unwrap());
                    for (found, wanted) in found.iter().zip(&wanted) {
                        let is_close = (found - wanted).abs() <= 3e-6 * (1.0 + wanted.abs());
                        assert!(is_close, "{pages} pages, round {round}: {found}, not {wanted}");
                    }
                }
                assert!(layers.next().is_none());
            }
        }
    });
}

#[test]
fn a_window_that_moves() {
    let name = concat!(module_path!(), "::a_window_that_moves");
    under(name, &[F16_64], PLANS, || {
        let directory = Directory::new(Layout::Hnd, 32 * 6);
        let mut sequence = Sequence::open(&directory.sequence()).unwrap();
        let mut cuda = CudaAttention::new(shape(), settings(4)).unwrap();
        assert_eq!(step(&mut cuda, &sequence, 192, &plain(), 0.0), 0);
        assert!(cuda.hot_bytes() > 0);
        // All four pages of three layers.
        assert_eq!(step(&mut cuda, &sequence, 192, &plain(), 0.0), 4 * 3 * 32);
        let mut held = 192;
        for end in [193, 223, 224, 225, 260, 300, 384] {
            directory.grow(held, end);
            held = end;
            sequence.refresh().unwrap();
            assert!(step(&mut cuda, &sequence, end, &plain(), 0.0) > 0, "{end}");
        }
        // A page of the window becomes another file.
        let page = directory.sequence().join("001").join(names::format_page(TokenStart(352)));
        let bytes = fs::read(&page).unwrap();
        let other = page.with_extension("tmp");
        let place = PagePlace::new(&directory.manifest, Layer(1), TokenStart(352)).unwrap();
        let rows = directory.rows(2, 352..384);
        fs::write(&other, pack_page(&place, &rows, PAGE_TOKENS).unwrap()).unwrap();
        assert_ne!(fs::read(&other).unwrap(), bytes);
        rename(&other, &page).unwrap();
        sequence.refresh().unwrap();
        assert_eq!(step(&mut cuda, &sequence, 384, &plain(), 0.0), 11 * 32);
        assert_eq!(step(&mut cuda, &sequence, 384, &plain(), 0.0), 12 * 32);
        // Another sequence begins anew.
        let another = Directory::new(Layout::Hnd, 32 * 5);
        let another = Sequence::open(&another.sequence()).unwrap();
        assert_eq!(step(&mut cuda, &another, 160, &plain(), 0.0), 0);
    });
}

#[test]
fn with_pages_on_the_cpu() {
    let name = concat!(module_path!(), "::with_pages_on_the_cpu");
    under(name, &[F16_64], PLANS, || {
        let directory = Directory::new(Layout::Hnd, 32 * 12 + 9);
        let sequence = Sequence::open(&directory.sequence()).unwrap();
        let mut cuda = CudaAttention::new(shape(), settings(2)).unwrap();
        for share in [0.3, 0.5, 1.0] {
            step(&mut cuda, &sequence, 393, &plain(), share);
        }
    });
}

#[test]
fn of_windows_and_selections() {
    let name = concat!(module_path!(), "::of_windows_and_selections");
    under(name, &[F16_64], PLANS, || {
        let directory = Directory::new(Layout::Hnd, 32 * 9 + 3);
        let sequence = Sequence::open(&directory.sequence()).unwrap();
        let mut cuda = CudaAttention::new(shape(), settings(2)).unwrap();
        let mut selection = TokenSet::none(291);
        for tokens in [0..4, 100..130, 280..291] {
            selection.insert(tokens);
        }
        for share in [0.0, 0.4] {
            let window = Options { window: Some(70), ..plain() };
            step(&mut cuda, &sequence, 291, &window, share);
            step(&mut cuda, &sequence, 291, &plain(), share);
            let selected = Options { selection: Some(&selection), ..plain() };
            step(&mut cuda, &sequence, 291, &selected, share);
            step(&mut cuda, &sequence, 291, &plain(), share);
        }
    });
}

/// A page that goes while the scan is under way is an error, and the next scan is whole again.
#[test]
fn a_page_that_vanishes() {
    let name = concat!(module_path!(), "::a_page_that_vanishes");
    under(name, &[F16_64], PLANS, || {
        let directory = Directory::new(Layout::Hnd, 32 * 8);
        let mut sequence = Sequence::open(&directory.sequence()).unwrap();
        let mut cuda = CudaAttention::new(shape(), settings(0)).unwrap();
        let page = directory.sequence().join("002").join(names::format_page(TokenStart(224)));
        let bytes = fs::read(&page).unwrap();
        fs::remove_file(&page).unwrap();
        let mut scan = cuda.scan(&sequence, 0..256).unwrap();
        let q = vec![0.5; 10 * 64];
        let queries = Queries { q: &q, positions: &[255] };
        let outcomes: Vec<_> = (0..3).map(|_| scan.attend(&queries, &plain())).collect();
        assert!(matches!(outcomes[2], Err(CudaError::Read(_))), "{:?}", outcomes[2]);
        assert!(scan.attend(&queries, &plain()).is_err());
        drop(scan);
        fs::write(&page, bytes).unwrap();
        sequence.refresh().unwrap();
        step(&mut cuda, &sequence, 256, &plain(), 0.0);
    });
}

/// What a plan says.
fn hot_bytes(runtime: &Runtime) -> u64 {
    match runtime.backend() {
        Backend::Cuda { hot_bytes, .. } => hot_bytes,
        Backend::Cpu { why, .. } => panic!("{why:?}"),
    }
}

/// The window takes what there is, and the rest streams.
#[test]
fn a_window_larger_than_the_memory() {
    let plans: &[Plan<'_>] = &[
        &[("KVFS_FAKE_MEMORY", "536870912")],
        &[("KVFS_FAKE_FAIL", "cuMemAlloc:17:2")],
        &[("KVFS_FAKE_FAIL", "cuMemAlloc:20:2")],
        &[("KVFS_FAKE_FAIL", "cuMemAlloc:21:2")],
        &[("KVFS_FAKE_FAIL", "cuMemAlloc:22:2")],
    ];
    let name = concat!(module_path!(), "::a_window_larger_than_the_memory");
    under(name, &[F16_64], plans, || {
        let directory = Directory::new(Layout::Hnd, 32 * 8);
        let sequence = Sequence::open(&directory.sequence()).unwrap();
        let settings = Settings { hot_bytes: 1 << 40, ..settings(0) };
        // A plan says what was asked for, then what there is.
        let mut runtime = Runtime::open(shape(), settings, 1).unwrap();
        assert_eq!(hot_bytes(&runtime), 1 << 40);
        let cuda = runtime.cuda().unwrap();
        if let Err(error) = cuda.scan(&sequence, 0..256) {
            assert!(matches!(error, CudaError::OutOfMemory { .. }), "{error}");
        }
        step(cuda, &sequence, 256, &plain(), 0.0);
        let had = cuda.hot_bytes();
        assert!(had < 1 << 30, "{had}");
        step(cuda, &sequence, 256, &plain(), 0.0);
        assert_eq!(hot_bytes(&runtime), had);
    });
}
