//! Which caches the state of a sequence consists of, by the model's manifest.
//!
//! llama.cpp has a class of memory for each kind of model (`llama_model::create_memory`), and each writes its parts one
//! behind the other, with nothing between that says which comes (read in the sources of `@node-llama-cpp` 3.22.1):
//!
//! | memory | `state_write` gives |
//! |---|---|
//! | `llama_kv_cache` (`src/llama-kv-cache.cpp`) | cells and rows of all layers |
//! | `llama_kv_cache_iswa` (`src/llama-kv-cache-iswa.cpp`) | that of the layers that see everything, then that of the layers with a window |
//! | `llama_memory_recurrent` (`src/llama-memory-recurrent.cpp`) | a cell and the states of the recurrent layers |
//! | `llama_memory_hybrid` (`src/llama-memory-hybrid.cpp`) | `llama_kv_cache` of the layers that attend, then the recurrent one |
//! | `llama_memory_hybrid_iswa` (`src/llama-memory-hybrid-iswa.cpp`) | `llama_kv_cache_iswa`, then the recurrent one |
//!
//! A cache of layers with a window leaves out the cells that the window has passed (`is_masked_swa`): of N
//! tokens it has the last `window`, and their positions say so.

use kvfs_page::{Layer, LayerKind, Manifest, StateShape};

/// Layers whose rows stand in one cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowsCache {
    /// In the order of the model.
    pub layers: Vec<Layer>,
    /// Of how many tokens at the end it has rows, if not of all.
    pub window: Option<u32>,
}

impl RowsCache {
    /// The first of so many tokens that has a row.
    pub fn first(&self, tokens: u32) -> u32 {
        self.window.map_or(0, |window| tokens.saturating_sub(window))
    }
}

/// The caches of a model, in the order of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Caches {
    /// Those that have rows: none, one, or two of which the second has a window.
    pub rows: Vec<RowsCache>,
    /// The recurrent layers, and what their states consist of.
    pub states: Vec<(Layer, StateShape)>,
}

impl Caches {
    /// # Errors
    /// The end of a line about a slot file that says why there can be none.
    pub fn of(manifest: &Manifest) -> Result<Self, String> {
        let (mut whole, mut windowed, mut states) = (Vec::new(), Vec::new(), Vec::new());
        let mut windows = Vec::new();
        for layer in (0..manifest.geometry().num_layers()).map(Layer) {
            match manifest.layer_kind(layer) {
                Some(LayerKind::Attention) | None => whole.push(layer),
                Some(LayerKind::Sliding { window }) => {
                    windowed.push(layer);
                    windows.push(window);
                }
                Some(LayerKind::State(shape)) => states.push((layer, shape)),
                Some(LayerKind::Recurrent) => {
                    return Err("has states of recurrent layers, and the manifest does not say \
                                what they consist of"
                        .to_owned());
                }
                Some(LayerKind::WithSide(side)) => {
                    return Err(format!(
                        "has no rows beside K and V, and the manifest has {}",
                        side.name
                    ));
                }
                Some(LayerKind::Cross) => {
                    return Err("has no layers of kind cross, as the manifest has".to_owned());
                }
            }
        }
        windows.dedup();
        let window = match windows[..] {
            [] => None,
            [window] if !whole.is_empty() => Some(window),
            [_] => return Err("has a layer that sees everything, the manifest none".to_owned()),
            _ => return Err("has layers of one window, the manifest of several".to_owned()),
        };
        if states.iter().any(|(_, shape)| shape.state.len() > 2) {
            let line = "has states of one or two tensors, the manifest of more";
            return Err(line.to_owned());
        }
        let mut rows = Vec::new();
        if !whole.is_empty() {
            rows.push(RowsCache { layers: whole, window: None });
        }
        if window.is_some() {
            rows.push(RowsCache { layers: windowed, window });
        }
        Ok(Self { rows, states })
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.rows.len() + usize::from(!self.states.is_empty())
    }

    /// Whether there is nothing but rows of all tokens in all layers.
    pub fn is_plain(&self) -> bool {
        self.states.is_empty() && self.rows.iter().all(|cache| cache.window.is_none())
    }
}
