//! A sequence in the mount, loaded through the reader.

use std::fs::{self, File};
use std::hint::black_box;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use nix::fcntl::{AT_FDCWD, renameat};

use super::{failed, shape};
use crate::attention::bench::{pattern, query};
use crate::attention::{Attention, KvBlock, Options, Queries};
use crate::cli::bench::measure::at;
use crate::cli::bench::workplace::Workplace;
use crate::page::{
    Dtype, Layer, Manifest, ManifestFields, Metadata, TokenStart, build_header, names,
};
use crate::reader::{Limits, Residents, Run, Sequence, Settings};

/// Tokens of a page.
pub(super) const PAGE_TOKENS: u32 = 1024;

/// The pages of a sequence of one layer, mapped from the mount's RAM tier.
#[derive(Debug)]
pub(super) struct Mounted {
    mountpoint: PathBuf,
    /// Dropped before the sequence, whose pages they hold.
    runs: Vec<Run>,
    sequence: Sequence,
    pub(super) pages: u64,
}

/// One layer with 8 KV heads x 128.
pub(super) fn manifest(dtype: Dtype) -> Result<Manifest, String> {
    manifest_of(dtype, 1)
}

fn manifest_of(dtype: Dtype, layers: u32) -> Result<Manifest, String> {
    let fields = ManifestFields {
        page_tokens: PAGE_TOKENS,
        ..ManifestFields::new(dtype.name(), dtype, layers, 8, 128)
    };
    Manifest::new(fields).map_err(|error| error.to_string())
}

/// Publishes a sequence of full pages, and the rows of a tail behind them.
pub(super) fn write_sequence(
    workplace: &Workplace, name: &str, dtype: Dtype, pages: u64, tail_tokens: u64,
) -> Result<PathBuf, String> {
    write_layers(workplace, name, &manifest(dtype)?, pages, tail_tokens)
}

/// The same of several layers with f16.
pub(super) fn write_deep_sequence(
    workplace: &Workplace, name: &str, layers: u32, pages: u64,
) -> Result<PathBuf, String> {
    write_layers(workplace, name, &manifest_of(Dtype::F16, layers)?, pages, 0)
}

fn write_layers(
    workplace: &Workplace, name: &str, manifest: &Manifest, pages: u64, tail_tokens: u64,
) -> Result<PathBuf, String> {
    let model = workplace.mount().join("models").join(name);
    let sequence = model.join(names::SEQUENCES).join("s");
    fs::create_dir(&model).map_err(at(&model))?;
    let path = model.join(names::MANIFEST);
    fs::write(&path, manifest.to_json()).map_err(at(&path))?;
    for layer in (0..manifest.geometry().num_layers()).map(Layer) {
        let directory = sequence.join(names::format_layer(layer));
        fs::create_dir_all(&directory).map_err(at(&directory))?;
        write_layer(&directory, manifest, pages, tail_tokens)?;
    }
    Ok(sequence)
}

fn write_layer(
    layer: &Path, manifest: &Manifest, pages: u64, tail_tokens: u64,
) -> Result<(), String> {
    let geometry = manifest.geometry();
    let dtype = geometry.dtype();
    let values = pattern(dtype, 3);
    let values =
        |length: u64| values.iter().copied().cycle().take(usize::try_from(length).unwrap_or(0));
    let mut page =
        build_header(geometry, PAGE_TOKENS, &Metadata::new()).map_err(|error| error.to_string())?;
    page.extend(values(geometry.file_bytes(PAGE_TOKENS) - page.len() as u64));
    for index in 0..pages {
        let start = TokenStart(index * u64::from(PAGE_TOKENS));
        publish(layer, &names::format_page(start), &page)?;
    }
    if tail_tokens > 0 {
        let start = TokenStart(pages * u64::from(PAGE_TOKENS));
        let rows: Vec<u8> = values(tail_tokens * geometry.row_bytes()).collect();
        let path = layer.join(names::format_tail(start));
        fs::write(&path, rows).map_err(at(&path))?;
    }
    Ok(())
}

/// As an engine does it.
fn publish(directory: &Path, name: &str, bytes: &[u8]) -> Result<(), String> {
    let temporary = directory.join(".page.tmp");
    let mut file = File::create_new(&temporary).map_err(at(&temporary))?;
    file.write_all(bytes).map_err(at(&temporary))?;
    // Not by drop: an error of close() is to be seen.
    nix::unistd::close(file).map_err(at(&temporary))?;
    let path = directory.join(name);
    renameat(AT_FDCWD, &temporary, AT_FDCWD, &path).map_err(at(&path))
}

impl Mounted {
    /// Publishes pages of 1024 tokens and maps all of them.
    pub(super) fn create(workplace: &Workplace, dtype: Dtype, pages: u64) -> Result<Self, String> {
        let path = write_sequence(workplace, dtype.name(), dtype, pages, 0)?;
        let limits = Limits { pages: usize::try_from(pages).unwrap_or(0), kept_bytes: 0 };
        let settings =
            Settings { residents: Arc::new(Residents::new(limits)), ..Settings::default() };
        let sequence = Sequence::open_with(&path, settings).map_err(|error| error.to_string())?;
        let runs = load(&sequence).map_err(|error| error.to_string())?;
        Ok(Self { mountpoint: workplace.mount(), runs, sequence, pages })
    }

    /// All pages, in order.
    pub(super) fn blocks(&self) -> Vec<KvBlock<'_>> {
        self.runs.iter().flat_map(Run::blocks).collect()
    }

    /// K and V of a page.
    pub(super) fn page_bytes(&self) -> u64 {
        self.sequence.manifest().geometry().row_bytes() * u64::from(PAGE_TOKENS)
    }

    /// How many pages have their K and V in files of the mount, by `/proc/self/maps`.
    pub(super) fn mapped_pages(&self) -> Result<u64, String> {
        let maps = fs::read_to_string("/proc/self/maps").map_err(|error| error.to_string())?;
        let ranges: Vec<(usize, usize)> =
            maps.lines().filter_map(|line| mapping(line, &self.mountpoint)).collect();
        let is_mapped = |bytes: &[u8]| {
            let (first, end) = (bytes.as_ptr().addr(), bytes.as_ptr().addr() + bytes.len());
            ranges.iter().any(|range| range.0 <= first && end <= range.1)
        };
        let is_there = |block: &KvBlock<'_>| {
            let values = match block.v {
                crate::attention::Values::Rows(tensor) => tensor.bytes,
                crate::attention::Values::Latent => block.k.bytes,
            };
            is_mapped(block.k.bytes) && is_mapped(values)
        };
        Ok(self.blocks().iter().filter(|block| is_there(block)).count() as u64)
    }
}

fn load(sequence: &Sequence) -> Result<Vec<Run>, crate::reader::ReadError> {
    let mut stream = sequence.stream(0..sequence.valid_tokens()?)?;
    let mut runs = Vec::new();
    while let Some(run) = stream.next_run()? {
        runs.push(run);
    }
    Ok(runs)
}

/// Addresses of a line of `/proc/self/maps`, if it is that of a file below a directory.
fn mapping(line: &str, directory: &Path) -> Option<(usize, usize)> {
    let path = line.split_once(" /")?.1;
    if !Path::new("/").join(path).starts_with(directory) {
        return None;
    }
    let (first, end) = line.split_once(' ')?.0.split_once('-')?;
    let address = |text| usize::from_str_radix(text, 16).ok();
    Some((address(first)?, address(end)?))
}

/// Seconds for a context of `pages`, the mean of as many as there are in `blocks`.
#[allow(clippy::cast_precision_loss, reason = "a few contexts")]
pub(super) fn attend(
    attention: &Attention, blocks: &[KvBlock<'_>], pages: usize,
) -> Result<f64, String> {
    let q = query(shape()?);
    // After all of them, so it sees all of them.
    let position = blocks.last().map_or(0, |block| block.first_position + block.tokens as u64);
    let queries = Queries { q: &q, positions: &[position] };
    let start = Instant::now();
    for context in blocks.chunks_exact(pages) {
        black_box(attention.run(&queries, context, &Options::default()).map_err(failed)?);
    }
    Ok(start.elapsed().as_secs_f64() / (blocks.len() / pages) as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_maps() {
        fn check(line: &str, expected: Option<(usize, usize)>) {
            assert_eq!(mapping(line, Path::new("/mnt/kv")), expected);
        }
        let line =
            "7f00-7fff r--s 00000000 00:2b 4294967313   /mnt/kv/models/m/0000000.safetensors";
        check(line, Some((0x7f00, 0x7fff)));
        check("7f00-7fff r--s 00000000 00:2b 43   /mnt/kv2/models/m/0000000.safetensors", None);
        check("7f00-7fff rw-p 00000000 00:00 0", None);
        check("7f00-7fff rw-p 00000000 00:00 0   [heap]", None);
    }
}
