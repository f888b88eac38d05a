//! A model that computes as a transformer does and has learned nothing: what the demonstration keeps must come from
//! somewhere, must have cost something, and must be exactly what it was when it comes back.

use half::f16;

use super::pages;

/// Layers that each keep K and V.
pub(super) const LAYERS: usize = 4;
/// Heads of a layer.
pub(super) const HEADS: usize = 4;
/// Elements of a head.
pub(super) const HEAD_DIM: usize = 64;
/// Elements of K, and of V, of one token in one layer.
pub(super) const WIDTH: usize = HEADS * HEAD_DIM;

/// Token ids are bytes.
const VOCABULARY: usize = 256;
/// Sums of a product that do not wait for each other.
const LANES: usize = 8;

/// The weights of a layer, each a matrix of `WIDTH` rows, one for each element of what goes in.
#[derive(Debug)]
struct Weights {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    out: Vec<f32>,
}

/// The model.
#[derive(Debug)]
pub(super) struct Toy {
    embedding: Vec<f32>,
    layers: Vec<Weights>,
}

/// K and V of the tokens so far, rounded to what files hold.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Cache {
    layers: [Rows; LAYERS],
}

/// K and V of one layer, a row of `WIDTH` for each token.
#[derive(Clone, Debug, Default, PartialEq)]
struct Rows {
    k: Vec<f32>,
    v: Vec<f32>,
}

impl Cache {
    /// How many tokens every layer has.
    pub(super) fn tokens(&self) -> usize {
        self.layers[LAYERS - 1].v.len() / WIDTH
    }

    /// The rows of some tokens of a layer as a page is made of them: K then V of each, in f16.
    pub(super) fn rows(&self, layer: usize, start: usize, count: usize) -> Vec<u8> {
        let Rows { k, v } = &self.layers[layer];
        let of = |values: &[f32], token: usize| -> Vec<u8> {
            let row = &values[token * WIDTH..][..WIDTH];
            row.iter().flat_map(|value| f16::from_f32(*value).to_le_bytes()).collect()
        };
        (start..start + count).flat_map(|token| [of(k, token), of(v, token)].concat()).collect()
    }

    /// Takes rows that were read from a page.
    pub(super) fn extend(&mut self, layer: usize, row: pages::Row<'_>) {
        let widen = |to: &mut Vec<f32>, bytes: &[u8]| {
            let (values, _) = bytes.as_chunks::<2>();
            to.extend(values.iter().map(|value| f16::from_le_bytes(*value).to_f32()));
        };
        widen(&mut self.layers[layer].k, row.k);
        widen(&mut self.layers[layer].v, row.v);
    }
}

impl Toy {
    /// The same one each time.
    pub(super) fn new() -> Toy {
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        let mut matrix = |rows: usize| -> Vec<f32> {
            let scale = (3.0 / width()).sqrt();
            (0..rows * WIDTH).map(|_| scale * random(&mut state)).collect()
        };
        let embedding = matrix(VOCABULARY);
        let layers = (0..LAYERS).map(|_| Weights {
            q: matrix(WIDTH),
            k: matrix(WIDTH),
            v: matrix(WIDTH),
            out: matrix(WIDTH),
        });
        Toy { layers: layers.collect(), embedding }
    }

    /// Runs tokens behind those that the cache has, and tells which one it takes for the next.
    pub(super) fn read(&self, cache: &mut Cache, tokens: &[u8]) -> u8 {
        tokens.iter().fold(0, |_, token| self.step(cache, *token))
    }

    fn step(&self, cache: &mut Cache, token: u8) -> u8 {
        #[expect(clippy::cast_precision_loss, reason = "a prompt is short")]
        let position = cache.tokens() as f32;
        let mut x = self.embedding[usize::from(token) * WIDTH..][..WIDTH].to_vec();
        for (index, value) in (0_u16..).zip(&mut x) {
            *value += (position / f32::from(1 + index / 16)).sin();
        }
        for (weights, rows) in self.layers.iter().zip(&mut cache.layers) {
            let input = normalized(&x);
            rows.k.extend(rounded(multiply(&weights.k, &input)));
            rows.v.extend(rounded(multiply(&weights.v, &input)));
            let seen = attend(&multiply(&weights.q, &input), rows);
            x.iter_mut().zip(multiply(&weights.out, &seen)).for_each(|(x, more)| *x += more);
        }
        let x = normalized(&x);
        let likeness = |id: &u8| dot(&x, &self.embedding[usize::from(*id) * WIDTH..][..WIDTH]);
        let best = |a: &u8, b: &u8| likeness(a).total_cmp(&likeness(b));
        (0..=u8::MAX).max_by(best).unwrap_or_default()
    }
}

fn width() -> f32 {
    f32::from(u16::try_from(WIDTH).unwrap_or(u16::MAX))
}

/// From -1 to 1.
fn random(state: &mut u64) -> f32 {
    // xorshift64
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    let [low, high, ..] = state.to_le_bytes();
    f32::from(i16::from_le_bytes([low, high])) / 32768.0
}

fn rounded(values: Vec<f32>) -> impl Iterator<Item = f32> {
    values.into_iter().map(|value| f16::from_f32(value).to_f32())
}

fn normalized(x: &[f32]) -> Vec<f32> {
    let scale = (width() / dot(x, x)).sqrt();
    x.iter().map(|value| value * scale).collect()
}

fn multiply(matrix: &[f32], x: &[f32]) -> Vec<f32> {
    let mut out = vec![0.0; WIDTH];
    for (row, value) in matrix.chunks_exact(WIDTH).zip(x) {
        out.iter_mut().zip(row).for_each(|(out, weight)| *out += weight * value);
    }
    out
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0.0; LANES];
    for (a, b) in a.as_chunks::<LANES>().0.iter().zip(b.as_chunks::<LANES>().0) {
        (0..LANES).for_each(|lane| sums[lane] += a[lane] * b[lane]);
    }
    sums.iter().sum()
}

/// What each head sees of all tokens so far.
fn attend(q: &[f32], rows: &Rows) -> Vec<f32> {
    let mut out = vec![0.0; WIDTH];
    for (head, out) in out.chunks_exact_mut(HEAD_DIM).enumerate() {
        let of = |row: usize| row * WIDTH + head * HEAD_DIM;
        let q = &q[of(0)..][..HEAD_DIM];
        let tokens = rows.k.len() / WIDTH;
        let scale = 1.0 / 8.0; // 1 / sqrt(HEAD_DIM)
        let scores = (0..tokens).map(|token| scale * dot(q, &rows.k[of(token)..][..HEAD_DIM]));
        let scores: Vec<f32> = scores.collect();
        let highest = scores.iter().copied().fold(f32::MIN, f32::max);
        let mut total = 0.0;
        for (token, score) in scores.into_iter().enumerate() {
            let mass = (score - highest).exp();
            total += mass;
            let v = &rows.v[of(token)..][..HEAD_DIM];
            out.iter_mut().zip(v).for_each(|(out, v)| *out += mass * v);
        }
        for out in out {
            *out /= total;
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_read_before_decides_what_comes_next() {
        let toy = Toy::new();
        let mut whole = Cache::default();
        let next = toy.read(&mut whole, b"a prompt");
        assert_eq!(whole.tokens(), 8);
        // In two parts it is the same, and with another beginning it is not.
        let mut parts = Cache::default();
        toy.read(&mut parts, b"a pro");
        assert_eq!(toy.read(&mut parts, b"mpt"), next);
        assert!(parts == whole);
        let mut other = Cache::default();
        toy.read(&mut other, b"no prompt");
        assert!(other.rows(3, 8, 1) != whole.rows(3, 7, 1));
    }
}
