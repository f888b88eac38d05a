//! How often the driver is called for a layer whose pages stay on the device: what a captured graph would
//! save. `docs/internals/attention.md` says what follows from it.

use std::ffi::{CStr, CString, c_char, c_long};

use half::f16;
use kvfs::attention::{Options, Queries, Shape};
use kvfs::cuda::{CudaAttention, Settings};
use kvfs::page::{Dtype, Layer, Manifest, ManifestFields, PagePlace, TokenStart, names, pack_page};
use kvfs::reader::Sequence;

use crate::fake::{F16_64, under};
use crate::fixture::Random;

const LAYERS: u32 = 4;

/// Calls so far.
fn calls(name: &str) -> i64 {
    // SAFETY: the driver is loaded already, and stays.
    let library = unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW) };
    let symbol: &CStr = c"kvfs_fake_calls";
    // SAFETY: the library is open, and the name ends with a 0.
    let address = unsafe { libc::dlsym(library, symbol.as_ptr()) };
    assert!(!address.is_null());
    // SAFETY: it is this function (fake_cuda.cpp).
    let count: extern "C" fn(*const c_char) -> c_long = unsafe { std::mem::transmute(address) };
    let name = CString::new(name).unwrap();
    count(name.as_ptr())
}

#[test]
fn of_a_hot_layer() {
    under(concat!(module_path!(), "::of_a_hot_layer"), &[F16_64], &[&[]], || {
        let directory = tempfile::tempdir().unwrap();
        let fields = ManifestFields {
            page_tokens: 32,
            ..ManifestFields::new("test", Dtype::F16, LAYERS, 2, 64)
        };
        let manifest = Manifest::new(fields).unwrap();
        let model = directory.path().join("models/m");
        let sequence = model.join("sequences/s");
        let mut random = Random(5);
        for layer in (0..LAYERS).map(Layer) {
            let place = sequence.join(names::format_layer(layer));
            std::fs::create_dir_all(&place).unwrap();
            let of_tokens = |tokens: u32, random: &mut Random| -> Vec<u8> {
                let values = random.floats(tokens as usize * 256, 1.0).into_iter();
                values.flat_map(|value| f16::from_f32(value).to_le_bytes()).collect()
            };
            for start in (0..128).step_by(32).map(TokenStart) {
                let page = PagePlace::new(&manifest, layer, start).unwrap();
                let page = pack_page(&page, &of_tokens(32, &mut random), 32).unwrap();
                std::fs::write(place.join(names::format_page(start)), page).unwrap();
            }
            let tail = place.join(names::format_tail(TokenStart(128)));
            std::fs::write(tail, of_tokens(5, &mut random)).unwrap();
        }
        std::fs::write(model.join(names::MANIFEST), manifest.to_json()).unwrap();
        let sequence = Sequence::open(&sequence).unwrap();
        let settings = Settings { hot_bytes: 4 << 20, slot_bytes: 64 << 10, ..Settings::default() };
        let mut cuda = CudaAttention::new(Shape::new(4, 2, 64, 64).unwrap(), settings).unwrap();
        let names = [
            "cuLaunchKernel",
            "cuMemcpyHtoDAsync",
            "cuMemcpyDtoHAsync",
            "cuEventRecord",
            "cuStreamWaitEvent",
            "cuEventSynchronize",
        ];
        let mut counts = [0; 6];
        for step in 0..3 {
            let before = names.map(calls);
            let mut scan = cuda.scan(&sequence, 0..133).unwrap();
            assert_eq!(scan.hot_tokens() > 0, step > 0);
            while scan.layer().is_some() {
                let queries = Queries { q: &[0.5; 256], positions: &[132] };
                scan.attend(&queries, &Options::default()).unwrap();
            }
            counts = std::array::from_fn(|at| calls(names[at]) - before[at]);
        }
        let layers = i64::from(LAYERS);
        for (name, count) in names.iter().zip(counts) {
            eprintln!("{name}: {} for a layer", count / layers);
        }
        // Queries, window, tail, two merges at most; what is uploaded is queries, two tables, the tail.
        assert!(counts[0] <= 5 * layers && counts[1] <= 4 * layers, "{counts:?}");
        assert!(counts[2] <= 3 * layers && counts[5] <= 10 * layers, "{counts:?}");
    });
}
