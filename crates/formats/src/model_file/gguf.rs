//! The metadata of a GGUF.
//!
//! Format: `docs/gguf.md` of ggml. Which layers have a window, and how rows are rotated, is in llama.cpp's code
//! (`llama-model.cpp`: `set_swa_pattern`, `llama_model_rope_type`), not in the file; the tables here are of 2026-09.

use std::collections::HashMap;
use std::io::{Read, Seek, SeekFrom};

use kvfs_page::limits::MAX_LAYERS;
use kvfs_page::{Dtype, LayerKind, Layout, StateShape, StateTensor};

use super::{ModelFile, every, narrow, rope};

pub(super) const MAGIC: [u8; 4] = *b"GGUF";

/// Fields, and bytes of a name and of a text: far more than any model has, and little memory.
const FIELDS_MAX: u64 = 1 << 16;
const NAME_BYTES_MAX: u64 = 1 << 10;
const TEXT_BYTES_MAX: u64 = 1 << 12;
/// Bytes before the tensors: the largest vocabularies of this year have 20 MiB.
const METADATA_BYTES_MAX: u64 = 1 << 30;

/// Architectures with windows: every how many layers one sees everything.
const PATTERNS: [(&str, u64); 4] = [("gemma2", 2), ("gemma3", 6), ("gpt-oss", 2), ("cohere2", 4)];

/// Architectures of which every fourth layer attends unless the file says otherwise.
const HYBRIDS: [&str; 3] = ["qwen3next", "qwen35", "qwen35moe"];

/// How rows are rotated, where that is known.
const PAIRINGS: [(&str, &str); 10] = [
    ("llama", "interleaved"),
    ("gemma", "halves"),
    ("gemma2", "halves"),
    ("gemma3", "halves"),
    ("gpt-oss", "halves"),
    ("phi3", "halves"),
    ("qwen2", "halves"),
    ("qwen2moe", "halves"),
    ("qwen3", "halves"),
    ("qwen3moe", "halves"),
];

/// A field that may matter here.
#[derive(Clone, Debug, PartialEq)]
enum Field {
    Count(u64),
    Number(f64),
    Text(String),
    Counts(Vec<u64>),
}

pub(super) fn describe(reader: impl Read + Seek, length: u64) -> Result<ModelFile, String> {
    let fields = Reader { inner: reader, at: 0, length }.fields()?;
    let fields = Metadata::of(fields)?;
    let count = fields.needed("block_count")?;
    if count > u64::from(MAX_LAYERS) {
        return Err(format!("block_count is {count}"));
    }
    if fields.count("attention.shared_kv_layers")?.is_some_and(|layers| layers > 0) {
        return Err(
            "shared_kv_layers: its layers keep rows for one another, which a manifest cannot say"
                .to_owned(),
        );
    }
    if fields.field("attention.indexer.key_length").is_some() {
        return Err("attention.indexer: its layers keep index keys beside K and V, which no file says how: write \
                    manifest.json by hand"
            .to_owned());
    }
    let heads = fields.needed("attention.head_count")?;
    let per_layer = fields.per_layer("attention.head_count_kv", count)?;
    let kv_heads = *per_layer.iter().max().unwrap_or(&heads);
    if per_layer.iter().any(|layer| *layer != 0 && *layer != kv_heads) {
        return Err("head_count_kv differs between layers, which a manifest cannot say".to_owned());
    }
    let layers = fields.layers(count, &per_layer)?;
    // An engine keeps one row of the latent models and takes V from it.
    let is_latent = fields.count("attention.key_length_mla")?.is_some();
    let usual = || {
        let width = fields.needed("embedding_length")?;
        let is_whole = heads > 0 && width % heads == 0;
        is_whole.then(|| width / heads).ok_or(format!("{width} elements are not {heads} heads"))
    };
    let head_dim = fields.count("attention.key_length")?.map_or_else(usual, Ok)?;
    let v_head_dim = fields.count("attention.value_length")?.map_or_else(usual, Ok)?;
    for name in ["attention.key_length_swa", "attention.value_length_swa"] {
        if fields.count(name)?.is_some_and(|swa| swa != head_dim && swa != v_head_dim) {
            return Err(format!("{name}: rows of different shapes, which a manifest cannot say"));
        }
    }
    let head_dim = narrow(head_dim, "key_length")?;
    let rotated = fields.count("rope.dimension_count")?.map(|dims| narrow(dims, "dimension_count"));
    let rotated = rotated.transpose()?.filter(|dims| *dims != head_dim);
    let pairing = PAIRINGS.iter().find(|(name, _)| *name == fields.architecture);
    let theta = fields.number("rope.freq_base");
    Ok(ModelFile {
        layers,
        index_keys: None,
        kv_heads: if is_latent { 1 } else { narrow(kv_heads, "head_count_kv")? },
        head_dim,
        v_head_dim: if is_latent { 0 } else { narrow(v_head_dim, "value_length")? },
        dtype: Ok(Dtype::F16),
        layout: Layout::Nhd,
        rope: theta.map(|theta| rope(theta, rotated, pairing.map(|(_, name)| *name))),
        architecture: fields.architecture,
    })
}

/// The fields of the model's architecture.
struct Metadata {
    architecture: String,
    fields: HashMap<String, Field>,
}

impl Metadata {
    fn of(fields: HashMap<String, Field>) -> Result<Self, String> {
        let Some(Field::Text(architecture)) = fields.get("general.architecture") else {
            return Err("general.architecture is missing: no model, or not the first of its files"
                .to_owned());
        };
        Ok(Self { architecture: architecture.clone(), fields })
    }

    fn field(&self, name: &str) -> Option<&Field> {
        self.fields.get(&format!("{}.{name}", self.architecture))
    }

    fn count(&self, name: &str) -> Result<Option<u64>, String> {
        match self.field(name) {
            None => Ok(None),
            Some(Field::Count(count)) => Ok(Some(*count)),
            Some(Field::Counts(counts)) if counts.windows(2).all(|two| two[0] == two[1]) => {
                Ok(counts.first().copied())
            }
            Some(_) => Err(format!("{name} is no count")),
        }
    }

    fn needed(&self, name: &str) -> Result<u64, String> {
        self.count(name)?.ok_or_else(|| format!("{}.{name} is missing", self.architecture))
    }

    fn number(&self, name: &str) -> Option<f64> {
        match self.field(name)? {
            Field::Number(number) => Some(*number),
            _ => None,
        }
    }

    /// A field that is one for all layers, or one for each; the heads of queries where it is missing.
    fn per_layer(&self, name: &str, layers: u64) -> Result<Vec<u64>, String> {
        match self.field(name) {
            Some(Field::Counts(counts)) if counts.len() as u64 == layers => Ok(counts.clone()),
            Some(Field::Counts(counts)) => {
                Err(format!("{name} has {} of {layers} layers", counts.len()))
            }
            Some(Field::Count(count)) => Ok((0..layers).map(|_| *count).collect()),
            Some(_) => Err(format!("{name} is no count")),
            None => {
                let heads = self.needed("attention.head_count")?;
                Ok((0..layers).map(|_| heads).collect())
            }
        }
    }

    /// What a recurrent layer keeps: what its convolution has seen and its state, in f32, as
    /// `llama_hparams::n_embd_r` and `n_embd_s` of llama.cpp tell; of models that have neither field it is not told.
    fn recurrent(&self) -> Result<LayerKind, String> {
        let too_many = || "its states have more elements than a file may".to_owned();
        let (conv, ssm) = if let Some(length) = self.count("shortconv.l_cache")? {
            let width = self.needed("embedding_length")?;
            (length.saturating_sub(1).checked_mul(width), Some(0))
        } else if let (Some(inner), Some(state), Some(kernel)) = (
            self.count("ssm.inner_size")?,
            self.count("ssm.state_size")?,
            self.count("ssm.conv_kernel")?,
        ) {
            let groups = self.count("ssm.group_count")?.unwrap_or(0);
            let width = groups.checked_mul(state).and_then(|width| width.checked_mul(2));
            let width = width.and_then(|width| width.checked_add(inner));
            let conv = width.and_then(|width| width.checked_mul(kernel.saturating_sub(1)));
            (conv, inner.checked_mul(state))
        } else {
            return Ok(LayerKind::Recurrent);
        };
        let mut tensors = Vec::new();
        for (name, elements) in [("conv", conv), ("ssm", ssm)] {
            let elements = narrow(elements.ok_or_else(too_many)?, name)?;
            if elements > 0 {
                let shape = vec![elements];
                tensors.push(StateTensor { name: name.to_owned(), dtype: Dtype::F32, shape });
            }
        }
        Ok(LayerKind::State(StateShape { state: tensors }))
    }

    fn layers(&self, count: u64, kv_heads: &[u64]) -> Result<Vec<LayerKind>, String> {
        if kv_heads.contains(&0) {
            let recurrent = self.recurrent()?;
            let kind =
                |heads: &u64| if *heads == 0 { recurrent.clone() } else { LayerKind::Attention };
            return Ok(kv_heads.iter().map(kind).collect());
        }
        let usual = HYBRIDS.contains(&self.architecture.as_str()).then_some(4);
        if let Some(interval) = self.count("full_attention_interval")?.or(usual) {
            let recurrent = self.recurrent()?;
            return Ok((0..count).map(|layer| every(interval, layer, recurrent.clone())).collect());
        }
        if self.fields.keys().any(|name| name.starts_with(&format!("{}.ssm.", self.architecture))) {
            return Err("layers keep a state, and no field says which attend: give --layers and the rest by hand".to_owned());
        }
        let window = self.count("attention.sliding_window")?.filter(|window| *window > 0);
        let sliding = window.map(|window| narrow(window, "sliding_window")).transpose()?;
        let Some(sliding) = sliding.map(|window| LayerKind::Sliding { window }) else {
            return Ok((0..count).map(|_| LayerKind::Attention).collect());
        };
        if let Some(Field::Counts(is_sliding)) = self.field("attention.sliding_window_pattern")
            && is_sliding.len() as u64 == count
        {
            let kind = |is_sliding: &u64| {
                if *is_sliding == 0 { LayerKind::Attention } else { sliding.clone() }
            };
            return Ok(is_sliding.iter().map(kind).collect());
        }
        let pattern = PATTERNS.iter().find(|(name, _)| *name == self.architecture);
        // The engine keeps every token of a layer whose window it does not use.
        let interval = pattern.map_or(1, |(_, interval)| *interval);
        Ok((0..count).map(|layer| every(interval, layer, sliding.clone())).collect())
    }
}

/// Reads what is small, and passes over what is large: vocabularies.
struct Reader<R> {
    inner: R,
    at: u64,
    length: u64,
}

impl<R: Read + Seek> Reader<R> {
    fn fields(mut self) -> Result<HashMap<String, Field>, String> {
        let magic: [u8; 4] = self.bytes()?;
        let version = u32::from_le_bytes(self.bytes()?);
        if magic != MAGIC || !(2..=3).contains(&version) {
            return Err(format!("a GGUF of version {version}; 2 and 3 are known"));
        }
        let _tensors = self.count()?;
        let count = self.count()?;
        if count > FIELDS_MAX {
            return Err(format!("{count} fields"));
        }
        let mut fields = HashMap::new();
        for _ in 0..count {
            let name =
                self.text(NAME_BYTES_MAX)?.ok_or("a name of a field is longer than 1 KiB")?;
            if let Some(field) = self.field()? {
                fields.insert(name, field);
            }
        }
        Ok(fields)
    }

    /// A value; none if it is of a kind, or so long, that nothing here needs it.
    fn field(&mut self) -> Result<Option<Field>, String> {
        let kind = u32::from_le_bytes(self.bytes()?);
        if kind != ARRAY {
            return self.value(kind);
        }
        let (kind, count) = (u32::from_le_bytes(self.bytes()?), self.count()?);
        if kind != TEXT && (count > u64::from(MAX_LAYERS) || !is_count(kind)) {
            let bytes = count.checked_mul(width(kind)?).ok_or("an array longer than the file")?;
            self.skip(bytes)?;
            return Ok(None);
        }
        // Each has a byte at least, so the file bounds them.
        let mut counts = Vec::new();
        for _ in 0..count {
            if let Some(Field::Count(count)) = self.value(kind)? {
                counts.push(count);
            }
        }
        Ok((kind != TEXT).then_some(Field::Counts(counts)))
    }

    fn value(&mut self, kind: u32) -> Result<Option<Field>, String> {
        let signed = |number: i64| u64::try_from(number).ok().map(Field::Count);
        Ok(match kind {
            0 | 7 => Some(Field::Count(u64::from(u8::from_le_bytes(self.bytes()?)))),
            1 => signed(i64::from(i8::from_le_bytes(self.bytes()?))),
            2 => Some(Field::Count(u64::from(u16::from_le_bytes(self.bytes()?)))),
            3 => signed(i64::from(i16::from_le_bytes(self.bytes()?))),
            4 => Some(Field::Count(u64::from(u32::from_le_bytes(self.bytes()?)))),
            5 => signed(i64::from(i32::from_le_bytes(self.bytes()?))),
            6 => Some(Field::Number(f64::from(f32::from_le_bytes(self.bytes()?)))),
            TEXT => self.text(TEXT_BYTES_MAX)?.map(Field::Text),
            10 => Some(Field::Count(u64::from_le_bytes(self.bytes()?))),
            11 => signed(i64::from_le_bytes(self.bytes()?)),
            12 => Some(Field::Number(f64::from_le_bytes(self.bytes()?))),
            other => return Err(format!("a field of kind {other}, which GGUF does not have")),
        })
    }

    /// A text; none if it is longer than that, and then it is passed over.
    fn text(&mut self, bytes_max: u64) -> Result<Option<String>, String> {
        let bytes = self.count()?;
        if bytes > bytes_max {
            self.skip(bytes)?;
            return Ok(None);
        }
        let mut text = Vec::new();
        self.take(bytes, &mut text)?;
        Ok(Some(String::from_utf8_lossy(&text).into_owned()))
    }

    fn count(&mut self) -> Result<u64, String> {
        Ok(u64::from_le_bytes(self.bytes()?))
    }

    fn bytes<const N: usize>(&mut self) -> Result<[u8; N], String> {
        if self.at > METADATA_BYTES_MAX {
            return Err("more than 1 GiB before the tensors".to_owned());
        }
        let mut bytes = [0; N];
        self.inner.read_exact(&mut bytes).map_err(|error| ends(self.at, &error))?;
        self.at += N as u64;
        Ok(bytes)
    }

    fn take(&mut self, bytes: u64, into: &mut Vec<u8>) -> Result<(), String> {
        let read = self.inner.by_ref().take(bytes).read_to_end(into);
        let read = read.map_err(|error| ends(self.at, &error))? as u64;
        self.at += read;
        if read < bytes {
            return Err(format!("the file ends at byte {} in the middle of a field", self.at));
        }
        Ok(())
    }

    fn skip(&mut self, bytes: u64) -> Result<(), String> {
        let end = self.at.checked_add(bytes).filter(|end| *end <= self.length);
        let Some(end) = end else {
            return Err(format!("the field at byte {} is longer than the file", self.at));
        };
        self.inner.seek(SeekFrom::Start(end)).map_err(|error| ends(self.at, &error))?;
        self.at = end;
        Ok(())
    }
}

const TEXT: u32 = 8;
const ARRAY: u32 = 9;

/// Whether numbers of layers, or of heads, come as this.
fn is_count(kind: u32) -> bool {
    matches!(kind, 0..=5 | 7 | 10 | 11)
}

/// Bytes of a value that is no text.
fn width(kind: u32) -> Result<u64, String> {
    match kind {
        0 | 1 | 7 => Ok(1),
        2 | 3 => Ok(2),
        4..=6 => Ok(4),
        10..=12 => Ok(8),
        other => Err(format!("an array of kind {other}")),
    }
}

fn ends(at: u64, error: &std::io::Error) -> String {
    format!("the file cannot be read at byte {at}: {error}")
}

#[cfg(test)]
mod tests;
