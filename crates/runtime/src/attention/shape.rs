//! The heads of one layer.

use super::AttentionError;
use crate::page::limits::{MAX_HEAD_DIM, MAX_KV_HEADS};

/// Most query heads: 64 for each of the most KV heads, twice what the largest models have.
const QO_HEADS_MAX: usize = 64 * MAX_KV_HEADS as usize;

/// How many heads, and how long their rows are. Query head `h` reads KV head
/// `h / (num_qo_heads / num_kv_heads)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shape {
    num_qo_heads: usize,
    num_kv_heads: usize,
    head_dim: usize,
    v_head_dim: usize,
}

impl Shape {
    /// Query heads, KV heads, elements of a K row (and of a query), elements of a V row.
    ///
    /// # Errors
    /// [`AttentionError::Arguments`] if a number is 0 or too large, or the query heads are not a
    /// multiple of the KV heads.
    pub fn new(
        num_qo_heads: usize, num_kv_heads: usize, head_dim: usize, v_head_dim: usize,
    ) -> Result<Self, AttentionError> {
        let bounds = [
            ("num_qo_heads", num_qo_heads, QO_HEADS_MAX),
            ("num_kv_heads", num_kv_heads, MAX_KV_HEADS as usize),
            ("head_dim", head_dim, MAX_HEAD_DIM as usize),
            ("v_head_dim", v_head_dim, MAX_HEAD_DIM as usize),
        ];
        for (name, value, most) in bounds {
            if value == 0 || value > most {
                return Err(AttentionError::Arguments(format!(
                    "{name} is {value}: must be from 1 to {most}"
                )));
            }
        }
        if !num_qo_heads.is_multiple_of(num_kv_heads) {
            return Err(AttentionError::Arguments(format!(
                "{num_qo_heads} query heads are not a multiple of {num_kv_heads} KV heads"
            )));
        }
        Ok(Self { num_qo_heads, num_kv_heads, head_dim, v_head_dim })
    }

    /// Query heads.
    pub fn num_qo_heads(&self) -> usize {
        self.num_qo_heads
    }

    /// KV heads.
    pub fn num_kv_heads(&self) -> usize {
        self.num_kv_heads
    }

    /// Elements of a K row and of a query.
    pub fn head_dim(&self) -> usize {
        self.head_dim
    }

    /// Elements of a V row and of an output.
    pub fn v_head_dim(&self) -> usize {
        self.v_head_dim
    }

    /// Query heads that share a KV head.
    pub fn group(&self) -> usize {
        self.num_qo_heads / self.num_kv_heads
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refused() {
        fn check(heads: (usize, usize), dims: (usize, usize), expected: &str) {
            let error = Shape::new(heads.0, heads.1, dims.0, dims.1).unwrap_err();
            assert_eq!(error.to_string(), format!("attention: {expected}"));
        }
        check((40, 0), (128, 128), "num_kv_heads is 0: must be from 1 to 1024");
        check((40, 8), (0, 128), "head_dim is 0: must be from 1 to 4096");
        check((40, 8), (128, 4097), "v_head_dim is 4097: must be from 1 to 4096");
        check((9, 2), (64, 64), "9 query heads are not a multiple of 2 KV heads");
        assert_eq!(Shape::new(40, 8, 128, 64).unwrap().group(), 5);
    }
}
