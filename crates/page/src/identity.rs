//! Which caches hold interchangeable bytes: the identity of a model's cache.

use std::fmt;
use std::str::FromStr;

use serde_json::Value;

use super::checksum::{Checksum, ParseChecksumError};
use super::geometry::Geometry;
use super::layer_kind::{LayerKind, StateShape};
use super::manifest::{KvRotation, ManifestFields, Rope};

/// Identity of a cache.
///
/// The identity is XXH3-128 over this encoding, so that two manifests that mean the same agree,
/// however they are written. It starts with the text `kvfs-model-v1`; each field then is the
/// length of its name (u32 little endian), its name, the length of its value (u32), its value.
/// The fields come in the order of the table. One that is absent, or has the value that means
/// absent, is left out; a later version can thus add fields without changing what older manifests
/// give.
///
/// | field | value | left out when |
/// |---|---|---|
/// | `model_id` | UTF-8 | never |
/// | `model_revision` | UTF-8 | absent or empty |
/// | `dtype` | its name, `f16` | never |
/// | `num_layers` | u32 little endian | never |
/// | `layers` | per layer `a`, `r`, `x`, `s` and the window (u32), or `t` and its state, see below | all are attention |
/// | `num_kv_heads`, `head_dim`, `v_head_dim`, `page_tokens` | u32 each, defaults filled in | never |
/// | `layout` | `hnd` or `nhd` | never |
/// | `kv_rotation` | its name, or `true` | absent, false or empty |
/// | `rope` | the whole object as canonical JSON, see below | absent |
/// | `tenant`, `salt`, `lora` | UTF-8 | absent or empty |
/// | `shard` | rank and size, u32 each | absent or size 1 |
///
/// `engine`, `cold_encoding` and unknown fields do not count: they change neither the bytes of a
/// page nor what they mean.
///
/// A state is the number of its tensors (u32), and of each its name and the name of its dtype (length,
/// bytes), the number of its dimensions and these (u32 each).
///
/// Canonical JSON is one tag byte and then: nothing for `z` null, `t` true, `f` false; the f64 bits
/// (little endian, so that 8 and 8.0 agree) for `n`; length (u32) and bytes for text `s`; the count
/// (u32) and the values for a list `l`; the count, then key (length, bytes) and value of every
/// entry that is not null, sorted by key, for an object `o`.
///
/// It tells caches apart that differ by accident. XXH3 is no defence against someone who builds
/// collisions: where that matters, compare with `Manifest::same_cache`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ModelIdentity(pub [u8; 16]);

impl fmt::Display for ModelIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Checksum(self.0).fmt(f)
    }
}

impl FromStr for ModelIdentity {
    type Err = ParseChecksumError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        text.parse().map(|Checksum(bytes)| Self(bytes))
    }
}

/// The encoding that is hashed.
pub(super) fn canonical_bytes(fields: &ManifestFields, geometry: &Geometry) -> Vec<u8> {
    let mut out = Encoder(b"kvfs-model-v1".to_vec());
    out.text("model_id", &fields.model_id);
    out.optional_text("model_revision", fields.model_revision.as_deref());
    out.text("dtype", geometry.dtype().name());
    out.number("num_layers", geometry.num_layers());
    if let Some(kinds) = &fields.layers {
        out.layers(kinds);
    }
    out.number("num_kv_heads", geometry.num_kv_heads());
    out.number("head_dim", geometry.head_dim());
    out.number("v_head_dim", geometry.v_head_dim());
    out.number("page_tokens", geometry.page_tokens());
    out.text("layout", geometry.layout().name());
    out.optional_text("kv_rotation", rotation_name(fields.kv_rotation.as_ref()));
    if let Some(rope) = &fields.rope {
        out.field("rope", &rope_bytes(rope));
    }
    out.isolation(fields);
    if let Some(shard) = fields.shard.as_ref().filter(|shard| shard.size > 1) {
        let value = [shard.rank.to_le_bytes(), shard.size.to_le_bytes()].concat();
        out.field("shard", &value);
    }
    out.0
}

/// What keeps prefix hashes of different tenants, salts and adapters apart; empty without any.
pub(super) fn isolation_bytes(fields: &ManifestFields) -> Vec<u8> {
    let mut out = Encoder(Vec::new());
    out.isolation(fields);
    out.0
}

fn rotation_name(rotation: Option<&KvRotation>) -> Option<&str> {
    match rotation? {
        KvRotation::Flag(true) => Some("true"),
        KvRotation::Flag(false) => None,
        KvRotation::Named(name) => Some(name),
    }
}

fn rope_bytes(rope: &Rope) -> Vec<u8> {
    let mut object = rope.other.clone();
    object.insert("theta".to_owned(), rope.theta.into());
    if let Some(scaling) = &rope.scaling {
        object.insert("scaling".to_owned(), scaling.clone());
    }
    if let Some(dims) = rope.dims {
        object.insert("dims".to_owned(), dims.into());
    }
    let mut out = Vec::new();
    encode_json(&Value::Object(object), &mut out);
    out
}

struct Encoder(Vec<u8>);

impl Encoder {
    fn field(&mut self, name: &str, value: &[u8]) {
        push_bytes(&mut self.0, name.as_bytes());
        push_bytes(&mut self.0, value);
    }

    fn text(&mut self, name: &str, value: &str) {
        self.field(name, value.as_bytes());
    }

    fn optional_text(&mut self, name: &str, value: Option<&str>) {
        if let Some(value) = value.filter(|value| !value.is_empty()) {
            self.text(name, value);
        }
    }

    fn isolation(&mut self, fields: &ManifestFields) {
        self.optional_text("tenant", fields.tenant.as_deref());
        self.optional_text("salt", fields.salt.as_deref());
        self.optional_text("lora", fields.lora.as_deref());
    }

    fn number(&mut self, name: &str, value: u32) {
        self.field(name, &value.to_le_bytes());
    }

    fn layers(&mut self, kinds: &[LayerKind]) {
        if kinds.iter().all(|kind| *kind == LayerKind::Attention) {
            return;
        }
        let mut value = Vec::new();
        for kind in kinds {
            match kind {
                LayerKind::Attention => value.push(b'a'),
                LayerKind::Recurrent => value.push(b'r'),
                LayerKind::Cross => value.push(b'x'),
                LayerKind::Sliding { window } => {
                    value.push(b's');
                    value.extend(window.to_le_bytes());
                }
                LayerKind::State(shape) => {
                    value.push(b't');
                    push_state(&mut value, shape);
                }
                LayerKind::WithSide(side) => {
                    value.push(b'b');
                    push_bytes(&mut value, side.name.as_bytes());
                    value.extend(side.row_bytes.to_le_bytes());
                }
            }
        }
        self.field("layers", &value);
    }
}

fn push_bytes(out: &mut Vec<u8>, bytes: &[u8]) {
    push_length(out, bytes.len());
    out.extend(bytes);
}

fn push_state(out: &mut Vec<u8>, shape: &StateShape) {
    push_length(out, shape.state.len());
    for tensor in &shape.state {
        push_bytes(out, tensor.name.as_bytes());
        push_bytes(out, tensor.dtype.name().as_bytes());
        push_length(out, tensor.shape.len());
        tensor.shape.iter().for_each(|dimension| out.extend(dimension.to_le_bytes()));
    }
}

fn push_length(out: &mut Vec<u8>, length: usize) {
    let length = u32::try_from(length).expect("a manifest value is far below 4 GiB");
    out.extend(length.to_le_bytes());
}

/// One JSON value as canonical JSON, so that equal meanings give equal bytes.
fn encode_json(value: &Value, out: &mut Vec<u8>) {
    match value {
        Value::Null => out.push(b'z'),
        Value::Bool(flag) => out.push(if *flag { b't' } else { b'f' }),
        Value::Number(number) => {
            out.push(b'n');
            // + 0.0 turns -0.0 into 0.0. Every JSON number has an f64 that is nearest.
            let nearest = number.as_f64().unwrap_or(f64::MAX) + 0.0;
            out.extend(nearest.to_bits().to_le_bytes());
        }
        Value::String(text) => {
            out.push(b's');
            push_bytes(out, text.as_bytes());
        }
        Value::Array(values) => {
            out.push(b'l');
            push_length(out, values.len());
            for value in values {
                encode_json(value, out);
            }
        }
        Value::Object(map) => {
            // Sorted here: whether the map itself is sorted depends on a feature of serde_json.
            let mut entries: Vec<_> = map.iter().filter(|(_, value)| !value.is_null()).collect();
            entries.sort_by_key(|(key, _)| key.as_str());
            out.push(b'o');
            push_length(out, entries.len());
            for (key, value) in entries {
                push_bytes(out, key.as_bytes());
                encode_json(value, out);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Manifest;

    /// A manifest with `fields` added to, or put in the place of, a small valid one.
    fn manifest(fields: &str) -> Manifest {
        let base = r#"{"schema_version":1,"model_id":"m","dtype":"f16","num_layers":2,
            "num_kv_heads":2,"head_dim":64}"#;
        let mut object: serde_json::Map<String, Value> = serde_json::from_str(base).unwrap();
        object.extend(serde_json::from_str::<serde_json::Map<_, _>>(fields).unwrap());
        Manifest::parse(Value::Object(object).to_string().as_bytes()).unwrap()
    }

    #[test]
    fn the_same_cache_written_differently() {
        fn check(left: &str, right: &str) {
            let (left, right) = (manifest(left), manifest(right));
            assert_eq!(left.identity(), right.identity());
            assert!(left.same_cache(&right));
        }
        check("{}", r#"{"v_head_dim":64,"page_tokens":1024,"layout":"hnd"}"#);
        check("{}", r#"{"layers":["attention","attention"]}"#);
        check("{}", r#"{"engine":"vllm","cold_encoding":"zstd","future":[1]}"#);
        check("{}", r#"{"tenant":"","salt":null,"kv_rotation":false}"#);
        check("{}", r#"{"shard":{"rank":0,"size":1}}"#);
        check(
            r#"{"rope":{"theta":10000,"scaling":{"type":"yarn","factor":8}}}"#,
            r#"{"rope":{"scaling":{"factor":8.0,"x":null,"type":"yarn"},"theta":1e4}}"#,
        );
    }

    #[test]
    fn different_caches() {
        fn check(left: &str, right: &str) {
            let (left, right) = (manifest(left), manifest(right));
            assert_ne!(left.identity(), right.identity());
            assert!(!left.same_cache(&right));
        }
        for field in [
            r#"{"model_id":"n"}"#,
            r#"{"model_revision":"r"}"#,
            r#"{"dtype":"bf16"}"#,
            r#"{"num_layers":3}"#,
            r#"{"layers":["attention","recurrent"]}"#,
            r#"{"layers":["attention",{"sliding":{"window":7}}]}"#,
            r#"{"layers":["attention",{"recurrent":{"state":[{"name":"s","dtype":"f32","shape":[7]}]}}]}"#,
            r#"{"num_kv_heads":4}"#,
            r#"{"head_dim":32,"v_head_dim":64}"#,
            r#"{"v_head_dim":32}"#,
            r#"{"page_tokens":512}"#,
            r#"{"layout":"nhd"}"#,
            r#"{"kv_rotation":true}"#,
            r#"{"kv_rotation":"hadamard"}"#,
            r#"{"rope":{"theta":10000}}"#,
            r#"{"tenant":"t"}"#,
            r#"{"salt":"t"}"#,
            r#"{"lora":"t"}"#,
            r#"{"shard":{"rank":0,"size":2}}"#,
        ] {
            check("{}", field);
        }
        check(r#"{"tenant":"t"}"#, r#"{"salt":"t"}"#);
        check(r#"{"tenant":"a","salt":"b"}"#, r#"{"tenant":"ab"}"#);
        check(r#"{"layers":["recurrent","attention"]}"#, r#"{"layers":["attention","recurrent"]}"#);
        let state = |tensors: &str| {
            format!(r#"{{"layers":["attention",{{"recurrent":{{"state":[{tensors}]}}}}]}}"#)
        };
        let one = state(r#"{"name":"s","dtype":"f32","shape":[2,3]}"#);
        for other in [
            r#"{"name":"t","dtype":"f32","shape":[2,3]}"#,
            r#"{"name":"s","dtype":"f16","shape":[2,3]}"#,
            r#"{"name":"s","dtype":"f32","shape":[3,2]}"#,
            r#"{"name":"s","dtype":"f32","shape":[2]},{"name":"t","dtype":"f32","shape":[3]}"#,
        ] {
            check(&one, &state(other));
        }
        check(&one, r#"{"layers":["attention","recurrent"]}"#);
        let side = |name: &str, bytes: u32| {
            format!(
                r#"{{"layers":["attention",{{"attention":{{"side":{{"name":"{name}","row_bytes":{bytes}}}}}}}]}}"#
            )
        };
        check(&side("index_k", 132), &side("index_k", 256));
        check(&side("index_k", 132), &side("index_k_fp8", 132));
        check(&side("index_k", 132), "{}");
        check(r#"{"shard":{"rank":0,"size":2}}"#, r#"{"shard":{"rank":1,"size":2}}"#);
        check(r#"{"rope":{"theta":10000}}"#, r#"{"rope":{"theta":10000,"dims":32}}"#);
        check(r#"{"rope":{"theta":10000,"type":"a"}}"#, r#"{"rope":{"theta":10000,"type":"b"}}"#);
    }

    /// Stores hold this value: if the test fails, the encoding changed and needs a new version.
    #[test]
    fn identity_never_changes() {
        fn check(fields: &str, expected: &str) {
            assert_eq!(manifest(fields).identity().to_string(), expected);
        }
        check("{}", "2ecfa4e525a01a1d86c6eafbc107f58e");
        check(
            r#"{"model_revision":"abc","layers":["recurrent",{"sliding":{"window":4096}}],
                "kv_rotation":"hadamard","rope":{"theta":500000.0,"scaling":{"factor":8},"dims":32},
                "tenant":"t","salt":"s","lora":"l","shard":{"rank":1,"size":2}}"#,
            "21e027e3f85dd983d44bcee93ff05177",
        );
        check(
            r#"{"layers":["cross",{"recurrent":{"state":[{"name":"s","dtype":"f32","shape":[2,3]}]}}]}"#,
            "a5f968168149ced98deb47d80a652b3c",
        );
        check(
            r#"{"layers":["attention",{"attention":{"side":{"name":"index_k","row_bytes":132}}}]}"#,
            "3ea1f52fd6f6e26b5bc5e9cc87e5b083",
        );
    }
}
