use super::*;
use std::io::Cursor;

/// A GGUF of fields alone.
#[derive(Clone, Default)]
struct Written {
    count: u64,
    bytes: Vec<u8>,
}

impl Written {
    fn of(architecture: &str) -> Self {
        Self::default().text("general.architecture", architecture)
    }

    fn field(mut self, name: &str, kind: u32, value: &[u8]) -> Self {
        self.count += 1;
        self.bytes.extend((name.len() as u64).to_le_bytes());
        self.bytes.extend(name.as_bytes());
        self.bytes.extend(kind.to_le_bytes());
        self.bytes.extend(value);
        self
    }

    fn text(self, name: &str, text: &str) -> Self {
        let value = [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat();
        self.field(name, 8, &value)
    }

    fn counts(mut self, fields: &[(&str, u32)]) -> Self {
        for (name, count) in fields {
            self = self.field(name, 4, &count.to_le_bytes());
        }
        self
    }

    fn array(self, name: &str, kind: u32, count: u64, values: &[u8]) -> Self {
        self.field(name, 9, &[&kind.to_le_bytes()[..], &count.to_le_bytes(), values].concat())
    }

    fn bytes(&self) -> Vec<u8> {
        let head = [0_u64.to_le_bytes(), self.count.to_le_bytes()].concat();
        [&MAGIC[..], &3_u32.to_le_bytes(), &head, &self.bytes].concat()
    }

    fn described(&self) -> Result<ModelFile, String> {
        let bytes = self.bytes();
        let length = bytes.len() as u64;
        describe(Cursor::new(bytes), length)
    }
}

const ATTENTION: LayerKind = LayerKind::Attention;
const RECURRENT: LayerKind = LayerKind::Recurrent;

/// Two layers of four heads over 64 elements.
fn small(architecture: &str) -> Written {
    let names = ["block_count", "attention.head_count", "embedding_length"];
    let names = names.map(|name| format!("{architecture}.{name}"));
    Written::of(architecture).counts(&[(&names[0], 2), (&names[1], 4), (&names[2], 64)])
}

#[test]
fn llama() {
    let vocabulary = [&2_u64.to_le_bytes()[..], b"ab", &1_u64.to_le_bytes(), b"c"].concat();
    let file = Written::of("llama")
        .array("tokenizer.ggml.tokens", 8, 2, &vocabulary)
        .array("tokenizer.ggml.scores", 6, 3, &[0; 12])
        .text("tokenizer.chat_template", &"x".repeat(5000))
        .field("llama.rope.freq_base", 6, &500_000_f32.to_le_bytes())
        .counts(&[
            ("llama.block_count", 32),
            ("llama.attention.head_count", 32),
            ("llama.attention.head_count_kv", 8),
            ("llama.embedding_length", 4096),
            ("llama.rope.dimension_count", 128),
        ]);
    let expected = ModelFile {
        architecture: "llama".to_owned(),
        layers: vec![ATTENTION; 32],
        index_keys: None,
        kv_heads: 8,
        head_dim: 128,
        v_head_dim: 128,
        dtype: Ok(Dtype::F16),
        layout: Layout::Nhd,
        rope: Some(rope(500_000.0, None, Some("interleaved"))),
    };
    assert_eq!(file.described().unwrap(), expected);

    // Wherever it ends, it says so and no more.
    let bytes = file.bytes();
    for length in (0..bytes.len()).step_by(7) {
        let error = describe(Cursor::new(&bytes[..length]), length as u64).unwrap_err();
        assert!(error.contains("file") || error.contains("missing"), "{length}: {error}");
    }
}

#[test]
fn which_layers_see_what() {
    fn check(file: &Written, expected: &[LayerKind]) {
        assert_eq!(file.described().unwrap().layers, expected);
    }
    let window = LayerKind::Sliding { window: 128 };
    check(&small("new"), &[ATTENTION; 2]);
    let name = "gpt-oss.attention.sliding_window";
    check(&small("gpt-oss").counts(&[(name, 128)]), &[window.clone(), ATTENTION]);
    // The engine does not use the window of these.
    check(&small("llama").counts(&[("llama.attention.sliding_window", 128)]), &[ATTENTION; 2]);
    let told = small("new").counts(&[("new.attention.sliding_window", 128)]);
    check(&told.array("new.attention.sliding_window_pattern", 7, 2, &[1, 0]), &[window, ATTENTION]);
    let heads = [0_u32.to_le_bytes(), 2_u32.to_le_bytes()].concat();
    let hybrid = small("lfm2").array("lfm2.attention.head_count_kv", 5, 2, &heads);
    check(&hybrid, &[RECURRENT, ATTENTION]);
    assert_eq!(hybrid.described().unwrap().kv_heads, 2);
    let next = small("qwen3next").counts(&[("qwen3next.ssm.state_size", 128)]);
    check(&next, &[RECURRENT; 2]);
    check(&next.counts(&[("qwen3next.full_attention_interval", 2)]), &[RECURRENT, ATTENTION]);
}

#[test]
fn latent_rows() {
    let found = small("deepseek2").counts(&[
        ("deepseek2.attention.head_count_kv", 1),
        ("deepseek2.attention.key_length", 576),
        ("deepseek2.attention.value_length", 512),
        ("deepseek2.attention.key_length_mla", 192),
        ("deepseek2.rope.dimension_count", 64),
    ]);
    let found = found.described().unwrap();
    assert_eq!((found.kv_heads, found.head_dim, found.v_head_dim), (1, 576, 0));
    assert_eq!(found.rope, None);
}

#[test]
fn refused() {
    fn check(file: &Written, expected: &str) {
        let error = file.described().unwrap_err();
        assert!(error.contains(expected), "{error}");
    }
    check(&Written::default(), "general.architecture is missing");
    check(&Written::of("llama"), "llama.block_count is missing");
    check(&small("m").counts(&[("m.attention.head_count", 0)]), "64 elements are not 0 heads");
    check(&small("m").counts(&[("m.block_count", u32::MAX)]), "block_count is 4294967295");
    check(&small("m").counts(&[("m.ssm.state_size", 16)]), "no field says which attend");
    let uneven = [4_u32.to_le_bytes(), 8_u32.to_le_bytes()].concat();
    let name = "m.attention.head_count_kv";
    check(&small("m").array(name, 4, 2, &uneven), "differs between layers");
    check(&small("m").array(name, 4, 1, &uneven[..4]), "has 1 of 2 layers");
    check(&small("m").text(name, "eight"), "is no count");
    check(&small("m").counts(&[("m.attention.shared_kv_layers", 10)]), "rows for one another");
    check(&small("m").counts(&[("m.attention.indexer.key_length", 128)]), "index keys beside K");
    check(&small("m").counts(&[("m.attention.key_length_swa", 32)]), "rows of different shapes");
    check(&small("m").field("x", 99, &[]), "a field of kind 99");
    check(&small("m").array("x", 99, 1, &[0]), "an array of kind 99");
    check(&small("m").array("x", 12, u64::MAX, &[0]), "longer than the file");
    check(&small("m").array("x", 12, u64::MAX / 8, &[0]), "longer than the file");
    check(&small("m").array("x", 8, u64::MAX, &[0]), "cannot be read");
    check(&small("m").field("x", 8, &u64::MAX.to_le_bytes()), "longer than the file");
    let many = Written { count: FIELDS_MAX + 1, ..Written::default() };
    check(&many, "65537 fields");
    let error = describe(Cursor::new(b"GGUF\x01\0\0\0"), 8).unwrap_err();
    assert!(error.contains("version 1; 2 and 3 are known"), "{error}");
}
