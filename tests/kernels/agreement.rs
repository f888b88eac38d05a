//! Partial results of the kernels and of the runtime on the CPU are of the same kind: over page
//! files and tails of all layouts they agree, and merge into the whole.

use std::io::Write as _;
use std::process::{Command, Stdio};

use half::f16;
use kvfs::attention::{Attention, KvBlock, Options, Partials, Queries, Shape, Values};
use kvfs::page::{Dtype, Layout, PageView, pack_page};

use crate::common::Model;
use crate::library::{ModuleName, Watch, can_build, directory, module, program, root};

const GROUP: usize = 3;

/// Rows with a finite number in each element.
fn rows(model: &Model, seed: u64, tokens: u32) -> Vec<u8> {
    let noise = model.rows(seed, tokens);
    match model.manifest.geometry().dtype() {
        Dtype::F8E4m3 => noise.into_iter().map(|byte| byte & 0xbf).collect(),
        Dtype::F16 => {
            let number =
                |bits: &[u8]| f16::from_f32(f32::from(bits[0].cast_signed()) / 64.0).to_le_bytes();
            noise.chunks_exact(2).flat_map(number).collect()
        }
        other => unreachable!("{other} is not asked for"),
    }
}

fn offset(bytes: &[u8], part: &[u8]) -> u64 {
    (part.as_ptr().addr() - bytes.as_ptr().addr()) as u64
}

/// What `agree.cpp` reads.
fn question(
    shape: Shape, queries: &Queries<'_>, options: &Options<'_>, blocks: &[KvBlock<'_>],
    bytes: &[u8],
) -> Vec<u8> {
    let mut input = Vec::new();
    let mut words = |words: &[usize]| {
        for word in words {
            input.extend(u32::try_from(*word).unwrap().to_le_bytes());
        }
    };
    words(&[queries.positions.len(), shape.num_kv_heads(), shape.group()]);
    words(&[shape.head_dim(), shape.v_head_dim()]);
    words(&[usize::try_from(options.window.unwrap_or(0)).unwrap(), 1]);
    words(&[blocks.len(), 2, bytes.len()]);
    input.extend(options.sm_scale.unwrap().to_le_bytes());
    input.extend(options.soft_cap.unwrap_or(0.0).to_le_bytes());
    input.extend(queries.q.iter().flat_map(|q| q.to_le_bytes()));
    input.extend(queries.positions.iter().flat_map(|position| position.to_le_bytes()));
    let mut tokens = 0;
    for block in blocks {
        let Values::Rows(v) = block.v else { unreachable!("these models have values") };
        for part in [block.k.bytes, v.bytes] {
            input.extend(offset(bytes, part).to_le_bytes());
        }
        let strides = [block.k.strides, v.strides];
        for stride in strides.iter().flat_map(|strides| [strides.head, strides.token]) {
            input.extend(u32::try_from(stride).unwrap().to_le_bytes());
        }
        input.extend(block.first_position.to_le_bytes());
        for number in [block.tokens, tokens, 0, 0] {
            input.extend(u32::try_from(number).unwrap().to_le_bytes());
        }
        tokens += block.tokens;
    }
    // Two splits, which meet within the first page.
    for number in [0, 0, 5, 0, 5, tokens - 5] {
        input.extend(u32::try_from(number).unwrap().to_le_bytes());
    }
    input.extend(bytes);
    input
}

fn ask(name: ModuleName<'_>, input: &[u8], shape: Shape, num_queries: usize) -> Partials {
    let (_, dtype, width) = name;
    let mut agree = Command::new(program("agree", Watch::Nothing));
    agree.args([dtype, &width.to_string()]);
    for name in [Some(name), None] {
        let kernels = &root().join("kernels");
        agree.arg(module(&directory(Watch::Nothing), kernels, Watch::Nothing, name));
    }
    let mut child = agree.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(input).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", output.status);
    let mut values = output.stdout.as_chunks().0.iter().map(|value| f32::from_le_bytes(*value));
    let heads = num_queries * shape.num_qo_heads();
    let mut take = |count: usize| values.by_ref().take(count).collect::<Vec<_>>();
    let (o, m, l) = (take(heads * shape.v_head_dim()), take(heads), take(heads));
    Partials::from_parts(shape, o, m, l).unwrap()
}

#[track_caller]
fn assert_close(found: &[f32], expected: &[f32]) {
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(expected) {
        assert!((found - expected).abs() <= 2e-6 * (1.0 + expected.abs()), "{found} {expected}");
    }
}

fn check(name: ModuleName<'_>, dtype: Dtype, layout: Layout, options: &Options<'_>) {
    let model = Model::with(|fields| (fields.dtype, fields.layout) = (dtype, layout));
    let geometry = model.manifest.geometry();
    let (heads, dim) = (geometry.num_kv_heads() as usize, geometry.head_dim() as usize);
    let shape = Shape::new(GROUP * heads, heads, dim, dim).unwrap();
    // Two page files, the second one short, and a tail.
    let mut bytes = Vec::new();
    for (start, tokens) in [(0, 32), (32, 20)] {
        bytes.extend(
            pack_page(&model.place(0, start), &rows(&model, start, tokens), tokens).unwrap(),
        );
    }
    let tail_start = bytes.len();
    bytes.extend(rows(&model, 9, 11));
    let (pages, tail) = bytes.split_at(tail_start);
    let (first, second) = pages.split_at(pages.len() / 2);
    let views = [first, second].map(|file| PageView::parse(file, geometry).unwrap());
    let blocks = [
        KvBlock::page(&views[0], 0),
        KvBlock::page(&views[1], 32),
        KvBlock::tail(tail, geometry, 52),
    ];
    let positions = [40, 62];
    let count = positions.len() * shape.num_qo_heads() * dim;
    let q: Vec<f32> = (0..17_u8).map(|i| f32::from(i) / 8.0 - 1.0).cycle().take(count).collect();
    let queries = Queries { q: &q, positions: &positions };
    let attention = Attention::new(shape, 1).unwrap();
    let run = |blocks: &[KvBlock<'_>]| attention.run(&queries, blocks, options).unwrap();

    let all = ask(name, &question(shape, &queries, options, &blocks, &bytes), shape, 2);
    assert_close(&all.lse(), &run(&blocks).lse());
    let mut both = ask(name, &question(shape, &queries, options, &blocks[..2], &bytes), shape, 2);
    both.merge(&run(&blocks[2..])).unwrap();
    let expected = run(&blocks).finish(None).unwrap();
    assert_close(&all.finish(None).unwrap(), &expected);
    assert_close(&both.finish(None).unwrap(), &expected);
}

#[test]
fn with_the_cpu() {
    if !can_build() {
        return;
    }
    for (dtype, name) in
        [(Dtype::F16, ("F16", "f16", 64)), (Dtype::F8E4m3, ("F8E4m3", "f8_e4m3", 64))]
    {
        for layout in [Layout::Hnd, Layout::Nhd] {
            let plain = Options { sm_scale: Some(0.3), ..Options::default() };
            check(name, dtype, layout, &plain);
            let capped = Options { soft_cap: Some(2.0), window: Some(25), ..plain };
            check(name, dtype, layout, &capped);
        }
    }
}
