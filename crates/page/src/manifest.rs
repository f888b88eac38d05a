//! `manifest.json`: the geometry and identity of one cache, written once.
//!
//! [`ManifestFields`] is the file as written; [`Manifest`] is the same after it was found free of
//! contradictions, so whoever holds one need not check again.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::dtype::Dtype;
use super::error::{PageError, one_line};
use super::geometry::{Geometry, GeometrySpec, Layout};
use super::identity::{ModelIdentity, canonical_bytes, isolation_bytes};
use super::layer_kind::{LayerKind, SideRows, StateShape};
use super::limits::{DEFAULT_PAGE_TOKENS, MAX_MANIFEST_BYTES, MAX_SHARDS};
use super::{Layer, PrefixHash, checksum::content_checksum};

/// The format that this program writes, and the newest it reads.
const SCHEMA_VERSION: u64 = 1;

/// Rotation of K and V before they were stored (Hadamard, for quantised caches).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum KvRotation {
    /// `true`: the engine's default rotation; `false`: none.
    Flag(bool),
    /// A named rotation.
    Named(String),
}

/// The position encoding that is already in K.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Rope {
    /// Base frequency, finite and above 0.
    pub theta: f64,
    /// The model's scaling object, as the engine writes it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scaling: Option<Value>,
    /// Rotated elements of a row, even; all of them where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dims: Option<u32>,
    /// Anything else. It is part of the identity, as all of the position encoding is.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

impl Rope {
    /// The field `pairing`: which two elements of a row turn together, `halves` (`i` and `i + dims / 2`, as
    /// Hugging Face has Llama) or `interleaved` (`2i` and `2i + 1`, as llama.cpp has it).
    pub fn pairing(&self) -> Option<&str> {
        self.other.get("pairing")?.as_str()
    }
}

/// Which part of the heads of a model split over devices.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shard {
    /// From 0 to `size` - 1.
    pub rank: u32,
    /// Number of shards.
    pub size: u32,
    /// Fields that this version does not know.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

/// The fields of `manifest.json`, not yet validated. An optional text that is empty means absent.
///
/// ```json
/// {
///   "schema_version": 1, "model_id": "meta-llama/Llama-3-8B", "dtype": "f16",
///   "num_layers": 2, "layers": ["attention", {"sliding": {"window": 4096}}],
///   "num_kv_heads": 8, "head_dim": 128, "rope": {"theta": 500000.0}
/// }
/// ```
///
/// Fields that this version does not know are kept through a rewrite; `null` in an optional field
/// means absent.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ManifestFields {
    /// Major version of the format; 1.
    pub schema_version: u64,
    /// The model, as its users name it; not empty.
    pub model_id: String,
    /// Commit or version of the weights.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model_revision: Option<String>,
    /// Who writes the pages, for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub engine: Option<String>,
    /// How elements are stored.
    pub dtype: Dtype,
    /// Layers of the model.
    pub num_layers: u32,
    /// What each layer keeps; all attention where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layers: Option<Vec<LayerKind>>,
    /// KV heads of one layer (of this shard).
    pub num_kv_heads: u32,
    /// Elements of one K row.
    pub head_dim: u32,
    /// Elements of one V row; `head_dim` where absent, 0 for no V.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub v_head_dim: Option<u32>,
    /// Tokens of a full page.
    #[serde(default = "default_page_tokens")]
    pub page_tokens: u32,
    /// Order of heads and tokens.
    #[serde(default)]
    pub layout: Layout,
    /// Rotation applied before K and V were stored.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kv_rotation: Option<KvRotation>,
    /// The position encoding that is already in K.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rope: Option<Rope>,
    /// Whose cache this is; tenants never share.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tenant: Option<String>,
    /// Seed that keeps caches apart.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub salt: Option<String>,
    /// Adapter that the values were computed with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lora: Option<String>,
    /// Part of a model split over devices.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shard: Option<Shard>,
    /// `q8_0` or `q4_0` lets pages be rounded when they go cold; it is no part of the identity.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cold_encoding: Option<String>,
    /// Fields that this version does not know.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

fn default_page_tokens() -> u32 {
    DEFAULT_PAGE_TOKENS
}

impl ManifestFields {
    /// The least that a manifest needs, everything else at its default.
    pub fn new(
        model_id: &str, dtype: Dtype, num_layers: u32, num_kv_heads: u32, head_dim: u32,
    ) -> Self {
        Self {
            schema_version: SCHEMA_VERSION,
            model_id: model_id.to_owned(),
            model_revision: None,
            engine: None,
            dtype,
            num_layers,
            layers: None,
            num_kv_heads,
            head_dim,
            v_head_dim: None,
            page_tokens: DEFAULT_PAGE_TOKENS,
            layout: Layout::default(),
            kv_rotation: None,
            rope: None,
            tenant: None,
            salt: None,
            lora: None,
            shard: None,
            cold_encoding: None,
            other: Map::new(),
        }
    }
}

/// A manifest without contradictions.
#[derive(Debug, Clone, PartialEq)]
pub struct Manifest {
    fields: ManifestFields,
    geometry: Geometry,
    identity: ModelIdentity,
}

impl Manifest {
    /// Reads `manifest.json`.
    ///
    /// # Errors
    /// [`PageError::Newer`] for a newer format, [`PageError::Manifest`] for everything else that
    /// is wrong, with the field and what to do.
    pub fn parse(json: &[u8]) -> Result<Self, PageError> {
        check_length(json.len())?;
        // The version comes first: a newer format may have changed any other field.
        let object: Map<String, Value> = serde_json::from_slice(json).map_err(|e| malformed(&e))?;
        let version = object.get("schema_version").and_then(Value::as_u64);
        let Some(version) = version else {
            return Err(PageError::Manifest(format!(
                "manifest has no whole number schema_version: set it to {SCHEMA_VERSION}"
            )));
        };
        check_version(version)?;
        Self::new(serde_json::from_slice(json).map_err(|e| malformed(&e))?)
    }

    /// Validates fields that a program filled in.
    ///
    /// # Errors
    /// As [`parse`](Self::parse).
    pub fn new(fields: ManifestFields) -> Result<Self, PageError> {
        check_version(fields.schema_version)?;
        let geometry = Geometry::new(GeometrySpec {
            dtype: fields.dtype,
            layout: fields.layout,
            num_layers: fields.num_layers,
            num_kv_heads: fields.num_kv_heads,
            head_dim: fields.head_dim,
            v_head_dim: fields.v_head_dim.unwrap_or(fields.head_dim),
            page_tokens: fields.page_tokens,
        })?;
        if let Some(contradiction) = contradiction(&fields) {
            return Err(PageError::Manifest(contradiction));
        }
        for kind in fields.layers.iter().flatten() {
            if let LayerKind::WithSide(side) = kind {
                geometry.with_side_rows(side.row_bytes)?;
            }
        }
        let identity = ModelIdentity(content_checksum(&canonical_bytes(&fields, &geometry)).0);
        let manifest = Self { fields, geometry, identity };
        // A rewrite adds white space: what is accepted must stay readable after it.
        check_length(manifest.to_json().len())?;
        Ok(manifest)
    }

    /// The file's text, ending in a line feed. Parsing it gives an equal manifest.
    pub fn to_json(&self) -> String {
        let mut json = serde_json::to_string_pretty(&self.fields)
            .expect("every field is a plain value with text keys");
        json.push('\n');
        json
    }

    /// The fields as written.
    pub fn fields(&self) -> &ManifestFields {
        &self.fields
    }

    /// What the pages of all layers have in common: K and V. Where layers keep side rows, rows and files
    /// are as long as [`layer_geometry`](Self::layer_geometry) says.
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// The shape of a layer's pages.
    pub fn layer_geometry(&self, layer: Layer) -> Geometry {
        let row_bytes = self.side_rows(layer).map_or(0, |side| side.row_bytes);
        self.geometry.with_side_rows(row_bytes).expect("each was looked at when it was made")
    }

    /// The shape of the largest pages that a layer has.
    pub fn largest_geometry(&self) -> Geometry {
        let layers = (0..self.geometry.num_layers()).map(Layer);
        let largest =
            layers.map(|layer| self.layer_geometry(layer)).max_by_key(Geometry::row_bytes);
        largest.unwrap_or(self.geometry)
    }

    /// What a layer keeps beside K and V.
    pub fn side_rows(&self, layer: Layer) -> Option<&SideRows> {
        match self.fields.layers.as_ref()?.get(layer.0 as usize)? {
            LayerKind::WithSide(side) => Some(side),
            _ => None,
        }
    }

    /// Whether any layer keeps something beside K and V.
    pub fn has_side_rows(&self) -> bool {
        self.fields.layers.iter().flatten().any(|kind| matches!(kind, LayerKind::WithSide(_)))
    }

    /// What decides whether bytes of two caches are interchangeable, as one value.
    pub fn identity(&self) -> ModelIdentity {
        self.identity
    }

    /// What the prefix hash of the first page is seeded with; `None` without tenant, salt and
    /// adapter, so that the hashes are those that engines compute by themselves.
    pub fn prefix_root(&self) -> Option<PrefixHash> {
        PrefixHash::root(&isolation_bytes(&self.fields))
    }

    /// The hash of some tokens, four bytes each, little endian: that of the page that ends there, where
    /// one does, and else of one that would be so short. A state says by it which tokens it has seen.
    /// `None` of no tokens where nothing seeds the hash.
    pub fn prefix_of(&self, tokens: &[u8]) -> Option<PrefixHash> {
        let page_bytes = self.geometry.page_tokens() as usize * 4;
        tokens
            .chunks(page_bytes)
            .fold(self.prefix_root(), |parent, page| Some(PrefixHash::next(parent, page)))
    }

    /// Whether pages of `other` may be used here. Unlike comparing identities this compares the
    /// fields themselves, so it holds even if two hashes were made to collide.
    pub fn same_cache(&self, other: &Self) -> bool {
        canonical_bytes(&self.fields, &self.geometry)
            == canonical_bytes(&other.fields, &other.geometry)
    }

    /// What a layer keeps, or `None` beyond the last one.
    pub fn layer_kind(&self, layer: Layer) -> Option<LayerKind> {
        if layer.0 >= self.geometry.num_layers() {
            return None;
        }
        match &self.fields.layers {
            None => Some(LayerKind::Attention),
            Some(kinds) => kinds.get(layer.0 as usize).cloned(),
        }
    }

    /// What the state of a layer consists of, if it is a recurrent one that says so.
    pub fn state_shape(&self, layer: Layer) -> Option<&StateShape> {
        match self.fields.layers.as_ref()?.get(layer.0 as usize)? {
            LayerKind::State(shape) => Some(shape),
            _ => None,
        }
    }

    /// Whether the model has recurrent layers and says what their states consist of. Then states are
    /// verified and sealed as pages are; else they are ordinary files of the engine.
    pub fn describes_states(&self) -> bool {
        self.fields.layers.iter().flatten().any(|kind| matches!(kind, LayerKind::State(_)))
    }
}

fn malformed(error: &serde_json::Error) -> PageError {
    PageError::Manifest(format!("manifest cannot be read: {}", one_line(error)))
}

fn check_length(bytes: usize) -> Result<(), PageError> {
    if bytes <= MAX_MANIFEST_BYTES {
        return Ok(());
    }
    Err(PageError::Manifest(format!(
        "manifest is {bytes} bytes as kvfs writes it, the limit is {MAX_MANIFEST_BYTES}: not a \
         kvfs manifest"
    )))
}

fn check_version(found: u64) -> Result<(), PageError> {
    match found {
        SCHEMA_VERSION => Ok(()),
        0 => {
            Err(PageError::Manifest(format!("schema_version is 0: the first is {SCHEMA_VERSION}")))
        }
        _ => Err(PageError::Newer { found, supported: SCHEMA_VERSION }),
    }
}

/// The first contradiction between fields, if there is one.
fn contradiction(fields: &ManifestFields) -> Option<String> {
    if fields.model_id.is_empty() {
        return Some("model_id is empty: name the model".to_owned());
    }
    layers_contradiction(fields)
        .or_else(|| rope_contradiction(fields))
        .or_else(|| shard_contradiction(fields))
}

fn layers_contradiction(fields: &ManifestFields) -> Option<String> {
    let kinds = fields.layers.as_ref()?;
    if kinds.len() != fields.num_layers as usize {
        return Some(format!(
            "layers has {} entries, num_layers is {}: list every layer or leave layers out",
            kinds.len(),
            fields.num_layers
        ));
    }
    let mut each = kinds.iter().enumerate();
    let wrong = each.find_map(|(layer, kind)| Some((layer, kind.contradiction()?)));
    if let Some((layer, contradiction)) = wrong {
        return Some(format!("layers[{layer}] {contradiction}"));
    }
    // What a name of a state means must not depend on the layer.
    let untold = kinds.iter().position(|kind| *kind == LayerKind::Recurrent)?;
    let told = kinds.iter().position(|kind| matches!(kind, LayerKind::State(_)))?;
    Some(format!(
        "layers[{untold}] is recurrent without a state, layers[{told}] tells its own: tell that of \
         every recurrent layer or of none"
    ))
}

fn rope_contradiction(fields: &ManifestFields) -> Option<String> {
    let rope = fields.rope.as_ref()?;
    if !rope.theta.is_finite() || rope.theta <= 0.0 {
        return Some(format!("rope.theta is {}: must be a finite number above 0", rope.theta));
    }
    let dims = rope.dims?;
    if dims > fields.head_dim {
        return Some(format!(
            "rope.dims is {dims}, head_dim is {}: a row cannot rotate more elements than it has",
            fields.head_dim
        ));
    }
    (dims % 2 == 1).then(|| format!("rope.dims is {dims}: elements rotate in pairs"))
}

fn shard_contradiction(fields: &ManifestFields) -> Option<String> {
    let shard = fields.shard.as_ref()?;
    if shard.size == 0 || shard.size > MAX_SHARDS {
        return Some(format!("shard.size is {}: must be from 1 to {MAX_SHARDS}", shard.size));
    }
    (shard.rank >= shard.size).then(|| {
        format!("shard.rank is {}, shard.size is {}: ranks count from 0", shard.rank, shard.size)
    })
}

#[cfg(test)]
mod tests;
