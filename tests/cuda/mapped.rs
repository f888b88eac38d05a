//! Pages of a mount's RAM tier, which the device reads where they are mapped, if it may.

use half::f16;
use kvfs::attention::{Attention, Options, Queries, Shape};
use kvfs::cuda::{CudaAttention, Settings};
use kvfs::page::pack_page;
use kvfs::reader::Sequence;

use crate::common::sys::{rename, write_and_close};
use crate::common::{Mode, Model, Mount};
use crate::fake::{F16_64, Plan, SLOW_COPIES, SLOW_KERNELS, under};
use crate::fixture::Random;

const PAGES: u64 = 9;

/// Writes a sequence of full pages.
fn publish(mount: &Mount, model: &Model) {
    let mut random = Random(21);
    for layer in 0..2 {
        for start in (0..PAGES * 32).step_by(32) {
            let values = model.row_bytes() / 2 * 32;
            let rows = random.floats(values, 1.0).into_iter();
            let rows: Vec<u8> = rows.flat_map(|x| f16::from_f32(x).to_le_bytes()).collect();
            let page = pack_page(&model.place(layer, start), &rows, 32).unwrap();
            let path = model.page_path(mount, "s", layer, start);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            write_and_close(path.with_extension("tmp"), &page).unwrap();
            rename(path.with_extension("tmp"), path).unwrap();
        }
    }
}

#[test]
fn pages_are_read_where_they_are_mapped() {
    require!(fuse, root);
    // Refused at the trial, from the fifth page on, and from the first page on.
    let refused = ["1+:801", "6+:801", "2+:2"].map(|when| format!("cuMemHostRegister:{when}"));
    let refused = refused.each_ref().map(|plan| [("KVFS_FAKE_FAIL", plan.as_str())]);
    let plans: Vec<Plan<'_>> =
        [SLOW_COPIES, SLOW_KERNELS].into_iter().chain(refused.iter().map(|p| &p[..])).collect();
    let name = concat!(module_path!(), "::pages_are_read_where_they_are_mapped");
    under(name, &[F16_64], &plans, || {
        let mount = Mount::with_options(Mode::Passthrough, &["--ram", "64M"]);
        let model = Model::with(|fields| fields.head_dim = 64);
        model.install(&mount);
        publish(&mount, &model);
        let sequence = Sequence::open(&model.sequence(&mount, "s")).unwrap();
        let shape = Shape::new(6, 2, 64, 64).unwrap();
        let place = 4096 + 16384 + 2048;
        for hot_bytes in [0, 2 * 3 * place] {
            let settings = Settings {
                slot_bytes: 36 << 10,
                copy_threads: 1,
                hot_bytes,
                registered_bytes: 1 << 20,
                device: 0,
            };
            let mut cuda = CudaAttention::new(shape, settings).unwrap();
            for _ in 0..3 {
                compare(&mut cuda, &sequence, shape);
            }
            if std::env::var_os("KVFS_FAKE_FAIL").is_none() {
                assert!(cuda.reads_mapped_pages());
            }
        }
    });
}

fn compare(cuda: &mut CudaAttention, sequence: &Sequence, shape: Shape) {
    let cpu = Attention::new(shape, 1).unwrap();
    let options = Options { sm_scale: Some(0.2), ..Options::default() };
    let mut expected = sequence.stream(0..PAGES * 32).unwrap();
    let mut scan = cuda.scan(sequence, 0..PAGES * 32).unwrap();
    let mut random = Random(4);
    while scan.layer().is_some() {
        let q = random.floats(6 * 64, 2.0);
        let queries = Queries { q: &q, positions: &[PAGES * 32 - 1] };
        let found = scan.attend(&queries, &options).unwrap().finish(None).unwrap();
        let wanted = expected.attend(&cpu, &queries, &options).unwrap().finish(None).unwrap();
        for (found, wanted) in found.iter().zip(&wanted) {
            assert!((found - wanted).abs() <= 3e-6 * (1.0 + wanted.abs()), "{found}, {wanted}");
        }
    }
}
