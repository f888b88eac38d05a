//! Partial results, which merge wherever they were computed.
//!
//! Attention over part of a sequence is, for each query head, `(o, m, l)`: the largest logit `m`,
//! the sum `l` of `exp(logit - m)`, and `o`, the same sum weighted by V. Two of them merge by
//! log-sum-exp (Milakov and Gimelshein 2018; the attention states of `FlashInfer`), so pages in
//! different tiers, on different threads, or attended to by a GPU and by a CPU give one result.

use super::{AttentionError, Shape};

/// `m` of a part without tokens: finite, so that no difference of two is NaN.
pub const EMPTY_M: f32 = -1e30;

/// Attention of some queries over some tokens, not normalised. All values are f32.
#[derive(Debug, Clone, PartialEq)]
pub struct Partials {
    shape: Shape,
    num_queries: usize,
    /// `[num_queries, num_qo_heads, v_head_dim]`
    pub(super) o: Vec<f32>,
    /// `[num_queries, num_qo_heads]`
    pub(super) m: Vec<f32>,
    /// `[num_queries, num_qo_heads]`
    pub(super) l: Vec<f32>,
}

impl Partials {
    /// The part without tokens: `m` is [`EMPTY_M`], `l` and `o` are 0.
    pub fn empty(shape: Shape, num_queries: usize) -> Self {
        let heads = num_queries * shape.num_qo_heads();
        Self {
            shape,
            num_queries,
            o: vec![0.0; heads * shape.v_head_dim()],
            m: vec![EMPTY_M; heads],
            l: vec![0.0; heads],
        }
    }

    /// A part that another backend computed.
    ///
    /// # Errors
    /// [`AttentionError::Arguments`] if a length is not that of the shape.
    pub fn from_parts(
        shape: Shape, o: Vec<f32>, m: Vec<f32>, l: Vec<f32>,
    ) -> Result<Self, AttentionError> {
        let num_queries = m.len() / shape.num_qo_heads();
        let expected = Self::empty(shape, num_queries);
        if (o.len(), m.len(), l.len()) != (expected.o.len(), expected.m.len(), expected.l.len()) {
            return Err(AttentionError::Arguments(format!(
                "o has {} values, m {}, l {}: for {} heads of {} there must be queries x heads x \
                 {2} of o and queries x heads of m and l",
                o.len(),
                m.len(),
                l.len(),
                shape.num_qo_heads(),
                shape.v_head_dim()
            )));
        }
        Ok(Self { shape, num_queries, o, m, l })
    }

    /// The heads.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// How many queries.
    pub fn num_queries(&self) -> usize {
        self.num_queries
    }

    /// `[num_queries, num_qo_heads, v_head_dim]`: the sum of V, each token weighted by
    /// `exp(logit - m)`.
    pub fn o(&self) -> &[f32] {
        &self.o
    }

    /// `[num_queries, num_qo_heads]`: the largest logit, natural, or [`EMPTY_M`].
    pub fn m(&self) -> &[f32] {
        &self.m
    }

    /// `[num_queries, num_qo_heads]`: the sum of `exp(logit - m)`.
    pub fn l(&self) -> &[f32] {
        &self.l
    }

    /// `[num_queries, num_qo_heads]`: `m + ln(l)`, -infinity without tokens.
    pub fn lse(&self) -> Vec<f32> {
        self.m
            .iter()
            .zip(&self.l)
            .map(|(m, l)| if *l == 0.0 { f32::NEG_INFINITY } else { m + l.ln() })
            .collect()
    }

    /// Adds the tokens of another part, which must not be in this one. The order of merging changes
    /// the result by rounding alone.
    ///
    /// # Errors
    /// [`AttentionError::Arguments`] if the other has another shape or number of queries.
    pub fn merge(&mut self, other: &Self) -> Result<(), AttentionError> {
        if (self.shape, self.num_queries) != (other.shape, other.num_queries) {
            return Err(AttentionError::Arguments(format!(
                "partials of {} queries with {:?} do not merge with {} queries and {:?}",
                other.num_queries, other.shape, self.num_queries, self.shape
            )));
        }
        let dim = self.shape.v_head_dim();
        let heads = self.o.chunks_exact_mut(dim).zip(other.o.chunks_exact(dim));
        for (head, (o, other_o)) in heads.enumerate() {
            let m = self.m[head].max(other.m[head]);
            let (here, there) = (weight(self.m[head], m), weight(other.m[head], m));
            for (o, other_o) in o.iter_mut().zip(other_o) {
                *o = *o * here + other_o * there;
            }
            self.l[head] = self.l[head] * here + other.l[head] * there;
            self.m[head] = m;
        }
        Ok(())
    }

    /// The result, `[num_queries, num_qo_heads, v_head_dim]`: `o / l`, 0 without tokens.
    ///
    /// `sinks`, `[num_qo_heads]`, are logits that take part in the softmax without a value, as in
    /// gpt-oss.
    ///
    /// # Errors
    /// [`AttentionError::Arguments`] if there is not one sink for each head.
    pub fn finish(mut self, sinks: Option<&[f32]>) -> Result<Vec<f32>, AttentionError> {
        let num_qo_heads = self.shape.num_qo_heads();
        if let Some(sinks) = sinks
            && sinks.len() != num_qo_heads
        {
            return Err(AttentionError::Arguments(format!(
                "{} sinks for {num_qo_heads} query heads",
                sinks.len()
            )));
        }
        for (head, o) in self.o.chunks_exact_mut(self.shape.v_head_dim()).enumerate() {
            let (mut m, mut l) = (self.m[head], self.l[head]);
            if let Some(sinks) = sinks {
                let sink = sinks[head % num_qo_heads];
                m = m.max(sink);
                l = l * weight(self.m[head], m) + weight(sink, m);
            }
            let factor = if l == 0.0 { 0.0 } else { weight(self.m[head], m) / l };
            for o in o {
                *o *= factor;
            }
        }
        Ok(self.o)
    }
}

/// `exp(m - reference)`. In f64, because the error of the exponent is one of all of the tokens.
#[allow(clippy::cast_possible_truncation, reason = "f32 is what the partials hold")]
fn weight(m: f32, reference: f32) -> f32 {
    (f64::from(m) - f64::from(reference)).exp() as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(o: f32, m: f32, l: f32) -> Partials {
        Partials::from_parts(Shape::new(1, 1, 1, 1).unwrap(), vec![o], vec![m], vec![l]).unwrap()
    }

    fn close(a: f32, b: f32) {
        assert!((a - b).abs() <= 1e-6 * b.abs(), "{a} is not {b}");
    }

    #[test]
    fn merging_is_the_softmax_of_all_tokens() {
        // One token each, with logits 1, 3, -2 and values 10, 20, 40.
        let parts = [part(10.0, 1.0, 1.0), part(20.0, 3.0, 1.0), part(40.0, -2.0, 1.0)];
        let weights = [1_f32.exp(), 3_f32.exp(), (-2_f32).exp()];
        let sum: f32 = weights.iter().sum();
        let expected = (10.0 * weights[0] + 20.0 * weights[1] + 40.0 * weights[2]) / sum;
        for order in [[0, 1, 2], [2, 1, 0], [1, 2, 0]] {
            let mut all = Partials::empty(parts[0].shape(), 1);
            for index in order {
                all.merge(&parts[index]).unwrap();
            }
            close(all.lse()[0], sum.ln());
            close(all.finish(None).unwrap()[0], expected);
        }
    }

    #[test]
    fn sinks_take_weight() {
        let sunk = part(10.0, 1.0, 1.0).finish(Some(&[1.0])).unwrap();
        close(sunk[0], 5.0);
        let sunk = part(10.0, 1.0, 1.0).finish(Some(&[100.0])).unwrap();
        assert!(sunk[0] < 1e-30);
        assert!(part(10.0, 1.0, 1.0).finish(Some(&[])).is_err());
    }

    #[test]
    fn without_tokens() {
        let mut empty = part(0.0, EMPTY_M, 0.0);
        empty.merge(&empty.clone()).unwrap();
        assert_eq!((empty.m()[0], empty.l()[0]), (EMPTY_M, 0.0));
        assert_eq!(empty.lse(), [f32::NEG_INFINITY]);
        assert_eq!(empty.clone().finish(Some(&[0.0])).unwrap(), [0.0]);
        assert_eq!(empty.finish(None).unwrap(), [0.0]);
    }

    #[test]
    fn other_shapes_are_refused() {
        let other = Partials::empty(Shape::new(1, 1, 1, 2).unwrap(), 1);
        assert!(part(0.0, 0.0, 0.0).merge(&other).is_err());
        assert!(Partials::from_parts(other.shape(), vec![0.0], vec![0.0], vec![0.0]).is_err());
    }
}
