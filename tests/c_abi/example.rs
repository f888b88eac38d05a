//! `examples/c/attend_page.c` on page files.

use std::path::Path;
use std::process::Command;

use half::f16;
use kvfs::attention::{Attention, KvBlock, Options, Queries, Shape};
use kvfs::page::{LayerKind, Layout, PageView, names, pack_page};

use crate::common::mount::scratch_directory;
use crate::common::{Mode, Model, Mount, sys};
use crate::program::{Link, build, run};

const START: u64 = 64;

fn model(layout: Layout) -> Model {
    Model::with(|fields| {
        fields.layout = layout;
        fields.layers = Some(vec![LayerKind::Attention, LayerKind::Sliding { window: 10 }]);
    })
}

/// A page with numbers in all rows.
fn page(model: &Model, layer: u32, tokens: u32) -> Vec<u8> {
    let noise = model.rows(u64::from(layer), tokens);
    let number = |bits: &[u8]| f16::from_f32(f32::from(bits[0].cast_signed()) / 64.0).to_le_bytes();
    let rows: Vec<u8> = noise.chunks_exact(2).flat_map(number).collect();
    pack_page(&model.place(layer, START), &rows, tokens).unwrap()
}

/// What the example computes.
fn expected(model: &Model, layer: u32, file: &[u8]) -> Vec<f32> {
    let geometry = model.manifest.geometry();
    let (heads, dim) = (geometry.num_kv_heads() as usize, geometry.head_dim() as usize);
    let attention = Attention::new(Shape::new(2 * heads, heads, dim, dim).unwrap(), 1).unwrap();
    let view = PageView::parse(file, geometry).unwrap();
    let q: Vec<f32> =
        (0..7_u8).map(|i| f32::from(i) / 4.0 - 0.75).cycle().take(2 * heads * dim).collect();
    let queries = Queries { q: &q, positions: &[START + u64::from(view.tokens()) - 1] };
    let window = (layer == 1).then_some(10);
    let options = Options { window, ..Options::default() };
    let partials = attention.run(&queries, &[KvBlock::page(&view, START)], &options).unwrap();
    partials.finish(None).unwrap()
}

#[track_caller]
fn check(program: &Path, manifest: &Path, page: &Path, layer: u32, expected: &[f32]) {
    let mut command = Command::new(program);
    command.arg(manifest).arg(page).args([layer.to_string(), START.to_string()]);
    let text = String::from_utf8(run(&mut command).stdout).unwrap();
    let found: Vec<f32> = text.lines().map(|line| line.parse().unwrap()).collect();
    assert_eq!(found.len(), expected.len());
    // The number of threads is not the same, so neither is the rounding.
    for (found, expected) in found.iter().zip(expected) {
        assert!((found - expected).abs() <= 1e-6 * (1.0 + expected.abs()), "{found} {expected}");
    }
}

#[test]
fn attends_to_a_page_file() {
    require!(cc);
    let directory = scratch_directory();
    let program = build("examples/c/attend_page.c", Link::Shared, directory.path());
    for layout in [Layout::Hnd, Layout::Nhd] {
        let model = model(layout);
        let manifest = directory.path().join(names::MANIFEST);
        std::fs::write(&manifest, model.manifest.to_json()).unwrap();
        for (layer, tokens) in [(0, 32), (1, 32), (0, 5)] {
            let file = page(&model, layer, tokens);
            let path = directory.path().join("page");
            std::fs::write(&path, &file).unwrap();
            check(&program, &manifest, &path, layer, &expected(&model, layer, &file));
        }
    }
}

#[test]
fn attends_to_a_page_of_a_mount() {
    require!(cc, fuse);
    let directory = scratch_directory();
    let program = build("examples/c/attend_page.c", Link::Static, directory.path());
    let mount = Mount::new(Mode::Served);
    let model = model(Layout::Hnd);
    model.install(&mount);
    let manifest = model.directory(&mount).join(names::MANIFEST);
    let file = page(&model, 1, 32);
    let path = model.layer(&mount, "chat", 1).join("0000064.safetensors");
    sys::write_and_close(&path, &file).unwrap();
    check(&program, &manifest, &path, 1, &expected(&model, 1, &file));
}
