//! Bytes per second of what every page passes through: checksum, verification, transpose.
#![allow(missing_docs, reason = "criterion's macros define public functions")]

use std::hint::black_box;
use std::io;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use kvfs::page::{
    ContentHasher, Dtype, Layer, Layout, Manifest, ManifestFields, Metadata, PageHasher, PagePlace,
    PageView, TokenStart, content_checksum, pack_page, pack_rows, unpack_rows,
};

/// The default page: 8 KV heads x 128, 1024 tokens, f16; 4 MiB.
fn place(layout: Layout) -> PagePlace {
    let mut fields = ManifestFields::new("bench", Dtype::F16, 1, 8, 128);
    fields.layout = layout;
    let manifest = Manifest::new(fields).expect("these numbers are within the limits");
    PagePlace::new(&manifest, Layer(0), TokenStart(0)).expect("every cache has this page")
}

fn rows() -> Vec<u8> {
    (0..4u32 << 20).map(|i| i.wrapping_mul(0x9e37_79b9).to_be_bytes()[0]).collect()
}

fn checksum(criterion: &mut Criterion) {
    let place = place(Layout::Hnd);
    let file = pack_page(&place, &rows(), 1024).expect("the rows fill the page");
    let mut group = criterion.benchmark_group("checksum");
    group.throughput(Throughput::Bytes(file.len() as u64));
    group.bench_function("content_oneshot", |b| {
        b.iter(|| content_checksum(black_box(&file)));
    });
    group.bench_function("content_128k_pieces", |b| {
        b.iter(|| {
            let mut hasher = ContentHasher::new();
            black_box(&file).chunks(128 << 10).for_each(|piece| hasher.update(piece));
            hasher.finish()
        });
    });
    group.bench_function("page_128k_pieces", |b| {
        b.iter(|| {
            let mut hasher = PageHasher::new();
            black_box(&file).chunks(128 << 10).for_each(|piece| hasher.update(piece));
            hasher.finish(&place.identity(1024))
        });
    });
    group.bench_function("verify_from_memory", |b| {
        b.iter(|| {
            let mut read_at = |offset: u64, buffer: &mut [u8]| -> io::Result<usize> {
                let start = usize::try_from(offset).expect("the page is in memory");
                let bytes = buffer.len().min(file.len() - start);
                buffer[..bytes].copy_from_slice(&file[start..start + bytes]);
                Ok(bytes)
            };
            place.verify(&mut read_at, file.len() as u64).expect("the page is whole")
        });
    });
    group.finish();
    criterion.bench_function("check_header", |b| {
        b.iter(|| place.check_header(black_box(&file), file.len() as u64));
    });
}

fn transpose(criterion: &mut Criterion) {
    let rows = rows();
    for layout in [Layout::Hnd, Layout::Nhd] {
        let place = place(layout);
        let geometry = *place.geometry();
        let file = pack_rows(&geometry, &rows, 1024, &Metadata::new()).expect("they fill it");
        let view = PageView::parse(&file, &geometry).expect("the page is whole");
        let mut group = criterion.benchmark_group(format!("transpose_{}", layout.name()));
        group.throughput(Throughput::Bytes(rows.len() as u64));
        group.bench_function("pack_rows", |b| {
            b.iter(|| pack_rows(&geometry, black_box(&rows), 1024, &Metadata::new()));
        });
        group.bench_function("unpack_rows", |b| b.iter(|| unpack_rows(black_box(&view))));
        group.finish();
    }
}

criterion_group!(benches, checksum, transpose);
criterion_main!(benches);
