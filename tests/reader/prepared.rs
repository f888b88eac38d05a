//! A mount with a sequence whose values are known without it.

use std::path::PathBuf;
use std::sync::Arc;

use half::f16;
use kvfs::attention::{Attention, Options, Queries, Shape};
use kvfs::page::{Dtype, Layer, Manifest, ManifestFields, names, pack_page};
use kvfs::reader::{Limits, ReadError, Residents, Sequence, Settings, Stream};

use crate::common::sys::{rename, sync_directory, write_and_close};
use crate::common::{Mode, Model, Mount};

/// Query heads for each KV head.
const GROUP: usize = 2;

/// A mount with one sequence.
#[derive(Debug)]
pub(crate) struct Prepared {
    pub(crate) mount: Mount,
    pub(crate) model: Model,
    /// Values that K and V consist of.
    values: Vec<f16>,
}

impl Prepared {
    /// A model in f16 with these many layers, KV heads, elements of a row and tokens of a page.
    pub(crate) fn new(mode: Mode, options: &[&str], dimensions: [u32; 4]) -> Prepared {
        let [layers, heads, head_dim, page_tokens] = dimensions;
        let fields = ManifestFields {
            page_tokens,
            ..ManifestFields::new("test", Dtype::F16, layers, heads, head_dim)
        };
        let model = Model { name: "m".to_owned(), manifest: Manifest::new(fields).unwrap() };
        let mount = Mount::with_options(mode, options);
        model.install(&mount);
        let values = (0..1024_u16).map(|i| f16::from_f32(f32::from(i) / 512.0 - 1.0)).collect();
        Prepared { mount, model, values }
    }

    pub(crate) fn sequence(&self) -> PathBuf {
        self.model.sequence(&self.mount, "chat")
    }

    pub(crate) fn page_path(&self, layer: u32, start: u64) -> PathBuf {
        self.model.page_path(&self.mount, "chat", layer, start)
    }

    pub(crate) fn page_bytes(&self) -> u64 {
        let geometry = self.model.manifest.geometry();
        geometry.file_bytes(geometry.page_tokens())
    }

    /// Publishes the page with tokens from `start` on, whose values are those of `version`.
    pub(crate) fn publish(&self, layer: u32, start: u64, version: u64) {
        let tokens = self.model.page_tokens();
        let rows = self.rows(layer, start, u64::from(tokens), version);
        let page = pack_page(&self.model.place(layer, start), &rows, tokens).unwrap();
        let path = self.page_path(layer, start);
        write_and_close(path.with_extension("tmp"), &page).unwrap();
        rename(path.with_extension("tmp"), path).unwrap();
    }

    /// Publishes `pages` of every layer and appends `tail` rows behind them.
    pub(crate) fn fill(&self, pages: u64, tail: u64) {
        let page_tokens = u64::from(self.model.page_tokens());
        for layer in 0..self.model.manifest.geometry().num_layers() {
            for index in 0..pages {
                self.publish(layer, index * page_tokens, 0);
            }
            if tail > 0 {
                let start = pages * page_tokens;
                let path = self.model.tail_path(&self.mount, "chat", layer, start);
                write_and_close(path, &self.rows(layer, start, tail, 0)).unwrap();
            }
        }
    }

    /// Makes everything so far durable, so that it may leave memory.
    pub(crate) fn commit(&self) {
        sync_directory(self.mount.path()).unwrap();
    }

    pub(crate) fn rows(&self, layer: u32, start: u64, tokens: u64, version: u64) -> Vec<u8> {
        let width = self.model.row_bytes() as u64 / 2;
        let all = (start..start + tokens).flat_map(|token| (0..width).map(move |i| (token, i)));
        let values = all.map(|(token, i)| self.value(layer, token, i, version));
        values.flat_map(f16::to_le_bytes).collect()
    }

    /// The `index`-th value of a row.
    fn value(&self, layer: u32, token: u64, index: u64, version: u64) -> f16 {
        let mut z = (token << 20 | u64::from(layer) << 12 | index) + (version << 60);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        self.values[(z >> 54) as usize]
    }

    /// Opens the sequence; its pages stay in memory within the limits.
    pub(crate) fn open(&self, limits: Limits, stream_bytes: u64) -> Sequence {
        let residents = Arc::new(Residents::new(limits));
        Sequence::open_with(
            &self.sequence(),
            Settings { residents, stream_bytes, ..Settings::default() },
        )
        .unwrap()
    }

    fn shape(&self) -> Shape {
        let geometry = self.model.manifest.geometry();
        let (heads, dim) = (geometry.num_kv_heads() as usize, geometry.head_dim() as usize);
        Shape::new(GROUP * heads, heads, dim, dim).unwrap()
    }

    pub(crate) fn attention(&self) -> Attention {
        Attention::new(self.shape(), 2).unwrap()
    }

    pub(crate) fn query(&self) -> Vec<f32> {
        let values = self.shape().num_qo_heads() * self.shape().head_dim();
        (0_u16..).take(values).map(|i| f32::from(i * 7 % 31) / 31.0 - 0.4).collect()
    }

    /// Attends to the next layer.
    pub(crate) fn attend(
        &self, stream: &mut Stream<'_>, tokens: u64,
    ) -> Result<Vec<f32>, ReadError> {
        let q = self.query();
        let queries = Queries { q: &q, positions: &[tokens - 1] };
        let partials = stream.attend(&self.attention(), &queries, &Options::default())?;
        Ok(partials.finish(None).unwrap())
    }

    /// Compares every layer with attention in f64 over the values that were written.
    pub(crate) fn check(&self, sequence: &Sequence, tokens: u64) {
        let mut stream = sequence.stream(0..tokens).unwrap();
        while let Some(layer) = stream.layer() {
            let found = self.attend(&mut stream, tokens).unwrap();
            compare(&found, &self.reference(layer, tokens, |_| 0));
        }
    }

    /// Attention of the query over a layer, each page in its version, in one pass per head.
    pub(crate) fn reference(
        &self, layer: Layer, tokens: u64, version: impl Fn(u64) -> u64,
    ) -> Vec<f64> {
        let page_tokens = u64::from(self.model.page_tokens());
        let version = |token| Some(version(token / page_tokens * page_tokens));
        self.attention_in_f64(layer, tokens, version)
    }

    /// The same over the tokens that are seen.
    pub(crate) fn reference_of(
        &self, layer: Layer, tokens: u64, is_seen: impl Fn(u64) -> bool,
    ) -> Vec<f64> {
        self.attention_in_f64(layer, tokens, |token| is_seen(token).then_some(0))
    }

    /// Of each token that is seen, the version of its page.
    fn attention_in_f64(
        &self, layer: Layer, tokens: u64, version: impl Fn(u64) -> Option<u64>,
    ) -> Vec<f64> {
        let (shape, q) = (self.shape(), self.query());
        let dim = shape.head_dim();
        let v_start = (shape.num_kv_heads() * dim) as u64;
        #[allow(clippy::cast_precision_loss, reason = "a head dimension")]
        let scale = 1.0 / (dim as f64).sqrt();
        let mut out = Vec::new();
        for (head, q) in q.chunks_exact(dim).enumerate() {
            let row = (head / GROUP * dim) as u64;
            let (mut sum, mut o) = (0.0, vec![0.0; dim]);
            for (token, version) in (0..tokens).filter_map(|token| Some((token, version(token)?))) {
                let value = |index| self.value(layer.0, token, index, version).to_f64();
                let k = (row..).map(value).zip(q).map(|(k, q)| k * f64::from(*q));
                let weight = (k.sum::<f64>() * scale).exp();
                sum += weight;
                for (o, index) in o.iter_mut().zip(v_start + row..) {
                    *o += weight * value(index);
                }
            }
            out.extend(o.into_iter().map(|o| o / sum));
        }
        out
    }
}

/// Asserts that two results are the same up to rounding.
#[track_caller]
pub(crate) fn compare(found: &[f32], expected: &[f64]) {
    assert_eq!(found.len(), expected.len());
    let pairs = found.iter().zip(expected);
    let difference: f64 = pairs.map(|(f, e)| (f64::from(*f) - e).powi(2)).sum();
    let length: f64 = expected.iter().map(|e| e * e).sum();
    let error = (difference / length).sqrt();
    assert!(error < 1e-5, "relative error {error}");
}

/// Everything stays in memory.
pub(crate) const EVERYTHING: Limits = Limits { pages: 10_000, kept_bytes: 1 << 30 };

/// Nothing does.
pub(crate) const NOTHING: Limits = Limits { pages: 0, kept_bytes: 0 };

/// Lines of `/proc/self/maps` of files below the mount.
pub(crate) fn mapped_files(mount: &Mount) -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let prefix = format!(" {}/", mount.path().display());
    maps.lines().filter(|line| line.contains(&prefix)).count()
}

/// Where the directory of names that mean something is.
pub(crate) fn tail_name(start: u64) -> String {
    names::format_tail(kvfs::page::TokenStart(start))
}
