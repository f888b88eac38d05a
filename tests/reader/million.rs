//! A million tokens in 80 layers, with the mappings that a process may have.
//!
//! The pages are names of one page file on a tmpfs that says of itself what a mount says of its RAM
//! tier: each of the 78,160 is opened, mapped and let go like a page of its own, in a second or two.

use std::collections::HashSet;
use std::fs;
use std::path::Path;
use std::sync::Arc;

use kvfs::page::{
    Dtype, Layer, Manifest, ManifestFields, Metadata, TokenStart, build_header, names,
};
use kvfs::reader::{Limits, Residents, Sequence, Settings};

use crate::common::sys::setxattr;

const LAYERS: u32 = 80;
const PAGE_TOKENS: u32 = 1024;
const PAGES: u64 = 977;
const TOKENS: u64 = PAGES * PAGE_TOKENS as u64;
const _: () = assert!(TOKENS > 1_000_000);

#[test]
fn eighty_layers_of_a_million_tokens_stay_within_the_kernels_mappings() {
    require!(tmpfs_attributes);
    let directory = tempfile::tempdir_in("/dev/shm").unwrap();
    let sequence = write_sequence(directory.path());
    let limits = Limits { kept_bytes: 0, ..Limits::default() };
    let pages = usize::try_from(PAGES).unwrap() * LAYERS as usize;
    assert!(limits.pages < pages, "the limit of {} pages is to be felt", limits.pages);
    let settings = Settings { residents: Arc::new(Residents::new(limits)), ..Settings::default() };
    let sequence = Sequence::open_with(&sequence, settings).unwrap();
    let bound: usize =
        fs::read_to_string("/proc/sys/vm/max_map_count").unwrap().trim().parse().unwrap();
    let mut most = 0;
    // In the second scan the pages that stay are there already.
    for _ in 0..2 {
        let mut stream = sequence.stream(0..TOKENS).unwrap();
        let mut seen = 0;
        while let Some(layer) = stream.layer() {
            let mut last = None;
            while let Some(run) = stream.next_run().unwrap() {
                seen += run.blocks().iter().filter(|block| block.k.bytes[0] == 7).count();
                last = Some(run);
            }
            // Once in a while, since it takes long; with what is mapped for the moment.
            if layer.0 % 20 == 19 {
                most = most.max(mappings(directory.path()).1);
            }
            drop(last);
        }
        assert_eq!(seen, pages);
    }
    let (of_pages, all) = mappings(directory.path());
    assert_eq!(of_pages, limits.pages, "each page that stays is a mapping");
    let most = most.max(all);
    eprintln!("{most} mappings for {pages} pages, of {bound} that may be");
    assert!(most < bound, "{most} mappings");
    drop(sequence);
    assert_eq!(mappings(directory.path()).0, 0);
}

/// Pages of one KV head of one element in f16, all of them names of the same file.
fn write_sequence(directory: &Path) -> std::path::PathBuf {
    let fields = ManifestFields {
        page_tokens: PAGE_TOKENS,
        ..ManifestFields::new("million", Dtype::F16, LAYERS, 1, 1)
    };
    let manifest = Manifest::new(fields).unwrap();
    let model = directory.join("models/million");
    let sequence = model.join(names::SEQUENCES).join("s");
    fs::create_dir_all(&sequence).unwrap();
    let manifest_path = model.join(names::MANIFEST);
    fs::write(&manifest_path, manifest.to_json()).unwrap();
    setxattr(&manifest_path, "user.kvfs.served_by", b"kernel").unwrap();
    let geometry = manifest.geometry();
    let mut page = build_header(geometry, PAGE_TOKENS, &Metadata::new()).unwrap();
    page.resize(usize::try_from(geometry.file_bytes(PAGE_TOKENS)).unwrap(), 7);
    let shared = directory.join("page");
    fs::write(&shared, page).unwrap();
    setxattr(&shared, "user.kvfs.tier", b"ram").unwrap();
    for layer in (0..LAYERS).map(Layer) {
        let layer = sequence.join(names::format_layer(layer));
        fs::create_dir(&layer).unwrap();
        for index in 0..PAGES {
            let start = TokenStart(index * u64::from(PAGE_TOKENS));
            fs::hard_link(&shared, layer.join(names::format_page(start))).unwrap();
        }
    }
    sequence
}

/// Mappings of files below a directory, and of this process.
fn mappings(directory: &Path) -> (usize, usize) {
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let prefix = format!(" {}/", directory.display());
    let addresses: HashSet<&str> = maps
        .lines()
        .filter(|line| line.contains(&prefix))
        .filter_map(|line| line.split_once(' ').map(|(addresses, _)| addresses))
        .collect();
    (addresses.len(), maps.lines().count())
}
