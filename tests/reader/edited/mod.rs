//! Operations on sequences of a mount, against a plain cache in memory.

mod cache;
mod files;
mod meanwhile;
mod states;

use std::fs::File;
use std::io::Write;
use std::ops::Range;
use std::path::PathBuf;

use kvfs::attention::{
    Attention, KvBlock, Options, Pairing, Partials, Queries, Rotation, Shape, Tensor, Values,
};
use kvfs::page::{Dtype, Rope, Strides};
use kvfs::reader::Sequence;
use kvfs::sequence::{SequenceError, Sequences};

use self::cache::{Cache, Cell};
use crate::common::random::{Random, seeds};
use crate::common::{Mode, Model, Mount};

const LAYERS: u32 = 2;
const HEADS: usize = 2;
const DIM: usize = 16;
const PAGE: u64 = 16;

/// A model on a mount, with an engine that appends to its sequences.
struct Engine {
    mount: Mount,
    model: Model,
    rotation: Rotation,
    attention: Attention,
    tokens: u32,
}

impl Engine {
    fn new() -> Engine {
        let rope =
            || Rope { theta: 10_000.0, scaling: None, dims: None, other: serde_json::Map::new() };
        let model = Model::with(|fields| {
            (fields.dtype, fields.page_tokens) = (Dtype::F32, u32::try_from(PAGE).unwrap());
            fields.rope = Some(rope());
        });
        let mount = Mount::new(Mode::Passthrough);
        model.install(&mount);
        Engine {
            mount,
            model,
            rotation: Rotation::new(&rope(), DIM, Pairing::Halves).unwrap(),
            attention: Attention::new(Shape::new(2 * HEADS, HEADS, DIM, DIM).unwrap(), 1).unwrap(),
            tokens: 0,
        }
    }

    fn sequences(&self) -> Sequences {
        Sequences::open(&self.model.directory(&self.mount)).unwrap()
    }

    fn path(&self, name: &str) -> PathBuf {
        self.model.sequence(&self.mount, name)
    }

    /// K as it is before rotation, and V: `[heads, dim]` each, from -1 to 1.
    fn values(layer: u32, token: u32) -> (Vec<f32>, Vec<f32>) {
        let mut random = Random::of(u64::from(layer) << 32 | u64::from(token));
        let mut next = || f32::from(i16::try_from(random.below(2001)).unwrap() - 1000) / 1000.0;
        let mut row = || (0..HEADS * DIM).map(|_| next()).collect();
        (row(), row())
    }

    /// A row of the tail for a position.
    fn row(&self, layer: u32, token: u32, position: u64) -> Vec<f32> {
        let (mut k, v) = Self::values(layer, token);
        for head in k.chunks_exact_mut(DIM) {
            self.rotation.rotate(head, position.cast_signed());
        }
        [k, v].concat()
    }

    /// Computes new tokens, as an engine does that goes on where the sequence ends.
    fn append(&mut self, name: &str, count: u32) -> Vec<u32> {
        let ids: Vec<u32> = (self.tokens..self.tokens + count).collect();
        self.tokens += count;
        let path = self.model.tokens_path(&self.mount, name);
        let rows = std::fs::metadata(&path).map_or(0, |metadata| metadata.len() / 4);
        let next = if rows == 0 {
            0
        } else {
            let sequence = Sequence::open(&self.path(name)).unwrap();
            sequence.positions().within(rows..rows + 1).next().unwrap().position
        };
        for layer in 0..LAYERS {
            for (index, id) in (0..).zip(&ids) {
                let row = rows + index;
                let tail = self.model.tail_path(&self.mount, name, layer, row / PAGE * PAGE);
                let values = self.row(layer, *id, next + index);
                let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
                append(tail, &bytes);
            }
        }
        append(path, &ids.iter().flat_map(|id| id.to_le_bytes()).collect::<Vec<u8>>());
        ids
    }

    /// Attention of one query behind everything, over a layer's cells with K rotated for where they
    /// stand now.
    fn expected(&self, layer: u32, cells: &[Cell], queries: &Queries<'_>) -> Partials {
        let rows = cells.iter().flat_map(|cell| self.row(layer, cell.token, cell.position));
        let bytes: Vec<u8> = rows.flat_map(f32::to_le_bytes).collect();
        let row = 2 * HEADS * DIM * 4;
        let strides = Strides { head: DIM * 4, token: row };
        let blocks = cells.iter().zip(bytes.chunks_exact(row)).map(|(cell, row)| KvBlock {
            k: Tensor { bytes: row, strides },
            v: Values::Rows(Tensor { bytes: &row[HEADS * DIM * 4..], strides }),
            dtype: Dtype::F32,
            tokens: 1,
            first_position: cell.position,
            shift: 0,
        });
        let blocks: Vec<_> = blocks.collect();
        self.attention.run(queries, &blocks, &Options::default()).unwrap()
    }

    /// Everything that a reader sees of a sequence is what the cells say.
    fn check(&self, name: &str, cells: &[Cell]) {
        let sequences = self.sequences();
        let ends = cells.iter().map(|cell| cell.position);
        assert_eq!(sequences.seq_pos(name).unwrap(), ends.clone().min().zip(ends.max()));
        let sequence = Sequence::open(&self.path(name)).unwrap();
        let rows = sequence.valid_tokens().unwrap();
        let ids = sequence.token_ids().unwrap();
        let found = sequence.positions().within(0..rows).flat_map(|run| {
            run.rows()
                .zip(run.positions())
                .map(|(row, position)| Cell { token: ids[usize::try_from(row).unwrap()], position })
        });
        assert_eq!(found.collect::<Vec<_>>(), cells);
        let last = cells.iter().map(|cell| cell.position).max().unwrap_or(0);
        let positions = [last, last / 2];
        let mut random = Random::of(u64::from(self.tokens));
        let q = (0..2 * 2 * HEADS * DIM).map(|_| f32::from(u8::try_from(random.below(9)).unwrap()));
        let q: Vec<f32> = q.map(|value| value / 4.0 - 1.0).collect();
        let queries = Queries { q: &q, positions: &positions };
        let options = Options { rotation: Some(&self.rotation), ..Options::default() };
        let mut stream = sequence.stream(0..rows).unwrap();
        while let Some(layer) = stream.layer() {
            let found = stream.attend(&self.attention, &queries, &options).unwrap();
            let expected = self.expected(layer.0, cells, &queries);
            let pairs = found.lse().into_iter().zip(expected.lse());
            for (found, expected) in pairs {
                let is_same =
                    found.to_bits() == expected.to_bits() || (found - expected).abs() < 1e-4;
                assert!(is_same, "layer {layer}: {found} is not {expected}");
            }
            let pairs = found.finish(None).unwrap().into_iter().zip(expected.finish(None).unwrap());
            for (found, expected) in pairs {
                assert!((found - expected).abs() < 1e-4, "layer {layer}: {found}, not {expected}");
            }
        }
    }
}

fn append(path: PathBuf, bytes: &[u8]) {
    let file = File::options().append(true).create(true).open(path);
    file.unwrap().write_all(bytes).unwrap();
}

fn some_positions(random: &mut Random, end: u64) -> Range<u64> {
    let mut pick = || random.below(usize::try_from(end).unwrap() + 2) as u64;
    let (a, b) = (pick(), pick());
    let open = if random.one_in(3) { u64::MAX } else { a.max(b) };
    a.min(b)..open
}

/// Does the same to both.
fn step(random: &mut Random, engine: &mut Engine, cache: &mut Cache) -> String {
    let all = engine.sequences();
    let name = random.pick(&cache.names()).clone();
    let end = cache.next(&name);
    let range = some_positions(random, end);
    match random.below(10) {
        0..=2 => {
            let ids = engine.append(&name, u32::try_from(random.below(24)).unwrap() + 1);
            cache.append(&name, &ids);
            format!("append {} to {name}", ids.len())
        }
        3 | 4 => {
            all.seq_rm(&name, range.clone()).unwrap();
            cache.seq_rm(&name, &range);
            format!("rm {name} {range:?}")
        }
        5 => {
            let to = format!("s{}", random.below(4));
            let has_tokens = cache.sequences.get(&to).is_some_and(|cells| !cells.is_empty());
            match all.seq_cp(&name, &to, range.clone()) {
                Ok(()) if name == to => {}
                Ok(()) => {
                    assert!(!has_tokens);
                    cache.seq_cp(&name, &to, &range);
                }
                Err(SequenceError::Exists(_)) => assert!(has_tokens),
                Err(error) => panic!("{error}"),
            }
            format!("cp {name} {to} {range:?}")
        }
        6 | 7 => {
            let delta = i64::try_from(random.below(60)).unwrap() - 30;
            all.seq_add(&name, range.clone(), delta).unwrap();
            cache.seq_add(&name, &range, delta);
            format!("add {name} {range:?} {delta}")
        }
        8 => {
            let range = range.start..range.end.min(range.start + 20);
            let divisor = random.below(3) as u64 + 1;
            all.seq_div(&name, range.clone(), divisor).unwrap();
            cache.seq_div(&name, &range, divisor);
            format!("div {name} {range:?} {divisor}")
        }
        _ if random.one_in(3) => {
            all.seq_keep(&name).unwrap();
            cache.sequences.retain(|other, _| *other == name);
            format!("keep {name}")
        }
        _ => {
            all.clear(&name).unwrap();
            cache.cells(&name).clear();
            format!("clear {name}")
        }
    }
}

#[test]
fn operations_mean_what_they_mean_in_memory() {
    for seed in seeds(3) {
        let (mut random, mut engine) = (Random::of(seed), Engine::new());
        let mut cache = Cache::default();
        let ids = engine.append("s0", 50);
        cache.append("s0", &ids);
        for _ in 0..40 {
            eprintln!("seed {seed}: {}", step(&mut random, &mut engine, &mut cache));
            assert_eq!(engine.sequences().names().unwrap(), cache.names());
            for (name, cells) in &cache.sequences {
                engine.check(name, cells);
            }
        }
        // An operation is durable when it returns, with all that was before.
        let name = random.pick(&cache.names()).clone();
        engine.sequences().seq_add(&name, .., 1).unwrap();
        cache.seq_add(&name, &(0..u64::MAX), 1);
        engine.mount.crash();
        for (name, cells) in &cache.sequences {
            engine.check(name, cells);
        }
    }
}
