//! Which tokens are worth reading. Selection is opt-in, and deletes nothing.
//!
//! Every policy yields a [`TokenSet`] over the tokens of a list of blocks, which
//! [`Options::selection`](super::Options::selection) takes; attention under it equals full
//! attention under the same mask to the last bit, and what is not selected is not read.

mod heavy_hitters;
mod page_top_k;
mod token_set;
mod window;

pub use heavy_hitters::HeavyHitters;
pub use page_top_k::{PageTopK, SelectedPages};
pub use token_set::TokenSet;
pub use window::sinks_and_window;

use super::{AttentionError, Partials};

/// The share of the full attention that a selection kept: `exp(lse - lse of all)` of each query
/// and head, `[num_queries, num_qo_heads]`, from 0 to 1.
///
/// # Errors
/// [`AttentionError::Arguments`] if the two are of different shapes.
pub fn kept_mass(selected: &Partials, all: &Partials) -> Result<Vec<f32>, AttentionError> {
    if (selected.shape(), selected.num_queries()) != (all.shape(), all.num_queries()) {
        return Err(AttentionError::Arguments(
            "kept mass of partials with different shapes".to_owned(),
        ));
    }
    let share = |(kept, all): (f32, f32)| {
        if all == f32::NEG_INFINITY { 1.0 } else { (kept - all).exp() }
    };
    Ok(selected.lse().into_iter().zip(all.lse()).map(share).collect())
}
