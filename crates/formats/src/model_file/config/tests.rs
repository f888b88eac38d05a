use super::*;
use serde_json::json;

fn described(config: &Value) -> Result<ModelFile, String> {
    describe(config.to_string().as_bytes())
}

const ATTENTION: LayerKind = LayerKind::Attention;
const RECURRENT: LayerKind = LayerKind::Recurrent;

fn sliding(window: u32) -> LayerKind {
    LayerKind::Sliding { window }
}

#[test]
fn llama() {
    // Llama 3.1 8B.
    let found = described(&json!({
        "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "rope_theta": 500_000.0, "torch_dtype": "bfloat16", "head_dim": null,
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0},
    }));
    let mut expected = rope(500_000.0, None, Some("halves"));
    expected.scaling = Some(json!({"rope_type": "llama3", "factor": 8.0}));
    assert_eq!(
        found.unwrap(),
        ModelFile {
            architecture: "llama".to_owned(),
            layers: vec![ATTENTION; 32],
            index_keys: None,
            kv_heads: 8,
            head_dim: 128,
            v_head_dim: 128,
            dtype: Ok(Dtype::Bf16),
            layout: Layout::Hnd,
            rope: Some(expected),
        }
    );
}

#[test]
fn which_layers_see_what() {
    fn check(fields: Value, expected: &[LayerKind]) {
        let mut config = json!({
            "model_type": "new", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 4
        });
        let Value::Object(fields) = fields else { panic!("{fields}") };
        config.as_object_mut().unwrap().extend(fields);
        assert_eq!(described(&config).unwrap().layers, expected, "{config}");
    }
    check(json!({}), &[ATTENTION; 4]);
    // gpt-oss, Gemma 3, Qwen3-Next, Jamba.
    check(
        json!({"sliding_window": 128,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]}),
        &[sliding(128), ATTENTION, sliding(128), ATTENTION],
    );
    check(
        json!({"model_type": "gemma3_text", "sliding_window": 512, "num_hidden_layers": 7}),
        &[vec![sliding(512); 5].as_slice(), &[ATTENTION, sliding(512)]].concat(),
    );
    check(
        json!({"full_attention_interval": 4, "linear_num_value_heads": 32}),
        &[RECURRENT, RECURRENT, RECURRENT, ATTENTION],
    );
    check(
        json!({"attn_layer_period": 3, "attn_layer_offset": 1, "mamba_d_state": 16}),
        &[RECURRENT, ATTENTION, RECURRENT, RECURRENT],
    );
    check(json!({"model_type": "mistral", "sliding_window": 4096}), &vec![sliding(4096); 4]);
    check(json!({"model_type": "mistral", "sliding_window": null}), &[ATTENTION; 4]);
    check(json!({"sliding_window": 4096, "use_sliding_window": false}), &[ATTENTION; 4]);
}

#[test]
fn rows_of_other_shapes() {
    fn check(fields: Value, expected: (u32, u32, u32)) {
        let Value::Object(mut fields) = fields else { panic!("{fields}") };
        fields.insert("num_hidden_layers".to_owned(), 2.into());
        let found = described(&Value::Object(fields.clone())).unwrap();
        assert_eq!((found.kv_heads, found.head_dim, found.v_head_dim), expected, "{fields:?}");
    }
    // DeepSeek V3: one latent row of 512 and 64 rotated elements, of which V is a part.
    check(
        json!({"num_attention_heads": 128, "num_key_value_heads": 128, "kv_lora_rank": 512,
            "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "hidden_size": 7168}),
        (1, 576, 0),
    );
    check(json!({"num_attention_heads": 8, "head_dim": 256, "hidden_size": 640}), (8, 256, 256));
    check(json!({"n_head": 48, "n_embd": 6144, "multi_query": true}), (1, 128, 128));
    check(
        json!({"num_attention_heads": 32, "num_key_value_heads": null, "hidden_size": 64}),
        (32, 2, 2),
    );
}

/// The beginning of that of GLM-5.3, and what differs.
fn sparse(fields: Value) -> Value {
    let mut config = json!({
        "model_type": "glm_moe_dsa", "num_hidden_layers": 8, "num_attention_heads": 64, "num_key_value_heads": 64,
        "hidden_size": 6144, "head_dim": 192, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 192,
        "v_head_dim": 256, "index_head_dim": 128, "index_n_heads": 32, "index_topk": 2048, "dtype": "bfloat16",
        "index_topk_pattern": null,
    });
    let Value::Object(fields) = fields else { panic!("{fields}") };
    config.as_object_mut().unwrap().extend(fields);
    config
}

#[test]
fn index_keys_of_sparse_attention() {
    fn check(fields: Value, expected: &str) {
        let found = described(&sparse(fields)).unwrap();
        let keys = found.index_keys.clone().unwrap();
        let letters: String = keys.layers.iter().map(|has| if *has { 'F' } else { 'S' }).collect();
        assert_eq!((letters.as_str(), keys.head_dim), (expected, 128));
        assert_eq!((found.kv_heads, found.head_dim, found.v_head_dim), (1, 576, 0));
        let side = keys.rows(found.dtype.clone().unwrap()).unwrap();
        assert_eq!((side.name.as_str(), side.row_bytes), ("index_k", 256));
        let has = |kind: &LayerKind| *kind == LayerKind::WithSide(side.clone());
        assert!(found.layers_with(&side).iter().map(has).eq(keys.layers));
    }
    // DeepSeek V3.2 and GLM-5: every layer.
    check(json!({"model_type": "deepseek_v32"}), "FFFFFFFF");
    check(json!({"index_topk_freq": 1}), "FFFFFFFF");
    // GLM-5.3, in the three ways of saying so.
    check(json!({"index_topk_freq": 4, "index_skip_topk_offset": 3}), "FFFSSSFS");
    check(json!({"index_topk_freq": 4, "index_topk_pattern": "FSSFSSSF"}), "FSSFSSSF");
    let types = ["full", "full", "full", "shared", "shared", "shared", "full", "shared"];
    check(json!({"index_topk_freq": 4, "indexer_types": types}), "FFFSSSFS");
}

#[test]
fn index_keys_that_no_file_tells() {
    fn check(fields: Value, expected: &str) {
        let error = described(&sparse(fields)).unwrap_err();
        assert!(error.contains(expected), "{error}");
    }
    check(json!({"model_type": "deepseek_v4"}), "of \"deepseek_v4\" it is not known");
    check(json!({"index_head_dim": null}), "index_head_dim is missing");
    check(json!({"index_topk_freq": 4}), "index_skip_topk_offset is missing");
    check(json!({"indexer_types": ["full"]}), "indexer_types has 1 of 8 layers");
    check(json!({"indexer_types": vec!["full"; 7]}), "indexer_types has 7 of 8 layers");
    check(json!({"indexer_types": [3, 3, 3, 3, 3, 3, 3, 3]}), "full and shared are known");
    check(json!({"index_topk_pattern": "FFFFFFFX"}), "F and S are known");
    check(json!({"index_topk_pattern": "FS"}), "index_topk_pattern has 2 of 8 layers");
    let keys = described(&sparse(json!({}))).unwrap().index_keys.unwrap();
    let why = keys.rows(Dtype::F8E4m3).unwrap_err();
    assert!(why.contains("say with --side NAME:BYTES"), "{why}");
}

#[test]
fn the_language_model_of_one_that_sees() {
    let found = described(&json!({
        "model_type": "gemma3", "torch_dtype": "bfloat16", "vision_config": {"num_hidden_layers": 27},
        "text_config": {"model_type": "gemma3_text", "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 1, "head_dim": 256, "sliding_window": 1024, "rope_theta": 1e6,
            "rope_local_base_freq": 10000.0},
    }))
    .unwrap();
    assert_eq!((found.layers, found.dtype), (vec![sliding(1024); 2], Ok(Dtype::Bf16)));
    // The layers with a window are rotated otherwise, which is part of what K means.
    assert_eq!(found.rope.unwrap().other.get("local_theta"), Some(&json!(10000.0)));
}

#[test]
fn position_encodings_of_transformers_5() {
    let mut config = json!({
        "model_type": "phi", "num_hidden_layers": 1, "num_attention_heads": 1, "hidden_size": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    });
    let found = described(&config).unwrap().rope.unwrap();
    assert_eq!((found.theta, found.dims, found.scaling), (10000.0, Some(32), None));
    config["rope_parameters"]["rope_type"] = "yarn".into();
    assert!(described(&config).unwrap_err().contains("rope_parameters has no factor"));
    config["rope_parameters"]["factor"] = 4.into();
    let found = described(&config).unwrap().rope.unwrap();
    assert_eq!(found.scaling.as_ref(), config.get("rope_parameters"));
}

#[test]
fn element_types() {
    fn check(fields: Value, expected: Result<Dtype, &str>) {
        let mut config =
            json!({"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64});
        let Value::Object(fields) = fields else { panic!("{fields}") };
        config.as_object_mut().unwrap().extend(fields);
        match (described(&config).unwrap().dtype, expected) {
            (Err(why), Err(expected)) => assert!(why.contains(expected), "{config}: {why}"),
            (found, expected) => {
                assert_eq!(found.as_ref().ok(), expected.as_ref().ok(), "{config}");
            }
        }
    }
    check(json!({}), Ok(Dtype::F16));
    check(json!({"torch_dtype": null}), Ok(Dtype::F16));
    check(json!({"dtype": "float32", "torch_dtype": "float16"}), Ok(Dtype::F32));
    check(json!({"torch_dtype": "torch.bfloat16"}), Ok(Dtype::Bf16));
    check(json!({"torch_dtype": "int8"}), Err("torch_dtype is \"int8\": say with --dtype"));
    check(json!({"dtype": {}}), Err("dtype is {}"));
}

#[test]
fn refused() {
    fn check(fields: Value, expected: &str) {
        let mut config =
            json!({"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64});
        let Value::Object(fields) = fields else { panic!("{fields}") };
        config.as_object_mut().unwrap().extend(fields);
        let error = described(&config).unwrap_err();
        assert!(error.contains(expected), "{config}: {error}");
    }
    check(json!({"num_hidden_layers": null}), "num_hidden_layers is missing");
    check(json!({"num_hidden_layers": -3}), "num_hidden_layers is -3, and no count");
    check(json!({"num_hidden_layers": 1e300}), "no count");
    check(json!({"hidden_size": 66}), "66 elements are not 4 heads");
    check(json!({"num_attention_heads": 0}), "are not 0 heads");
    check(json!({"num_key_value_heads": 1_u64 << 40}), "num_key_value_heads is 1099511627776");
    check(json!({"layer_types": ["full_attention"]}), "1 kinds for 2 layers");
    check(json!({"layer_types": ["full_attention", "moe"]}), "has \"moe\"");
    check(json!({"layer_types": ["sliding_attention", 3]}), "sliding_window is missing");
    check(json!({"sliding_window": 4096}), "which layers have it");
    check(json!({"mamba_d_state": 16}), "which layers attend");
    check(json!({"linear_attn_config": {"kda_layers": [1]}}), "which layers attend");
    check(json!({"num_kv_shared_layers": 10}), "rows for one another");
    check(json!({"index_head_dim": 128}), "index keys, and of \"unknown\" it is not known");
    check(json!({"compress_ratios": [4, 128]}), "rows that stand for several tokens");
    check(json!({"is_encoder_decoder": true}), "is_encoder_decoder");
    check(json!({"global_head_dim": 512}), "rows of different shapes");
    check(json!({"rope_theta": 1.0, "partial_rotary_factor": 0.3}), "4.8 of 16 elements");
    check(json!({"rope_theta": "x"}), "rope_theta is \"x\", and no number");
    check(json!({"rope_theta": 0}), "rope_theta is 0, and no number above 0");
    check(json!({"rope_parameters": {"rope_theta": []}}), "rope_theta is [], and no number");
    check(json!({"rope_theta": 1, "partial_rotary_factor": "x"}), "partial_rotary_factor is");
    check(json!({"rope_theta": 1, "rope_local_base_freq": -1}), "rope_local_base_freq is -1");
    check(json!({"rope_scaling": []}), "rope_scaling is [], and no object");
    check(json!({"rope_scaling": {"factor": 2}}), "rope_scaling has no rope_type");
    check(json!({"rope_scaling": {"type": 7}}), "rope_scaling has the rope_type 7");
    let scaled = |kind, factor: Value| json!({"rope_scaling": {"type": kind, "factor": factor}});
    check(scaled("yarn", json!("x")), "factor is \"x\", and no number");
    check(scaled("linear", json!(0)), "factor is 0, and no number above 0");
    check(json!({"rope_scaling": {"rope_type": "llama3"}}), "rope_scaling has no factor");
    check(json!({"rope_scaling": {"type": "longrope", "long_factor": [1, "x"]}}), "long_factor");
    assert!(describe(b"\x7fELF").unwrap_err().contains("neither a GGUF nor a config.json"));
    assert_eq!(describe(b"[]").unwrap_err(), "no JSON object");
}
