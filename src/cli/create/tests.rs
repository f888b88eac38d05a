//! What the options and files of models make of a manifest.

use super::super::arguments::{Arguments, Command};
use super::*;
use clap::Parser;

fn create(path: &Path, options: &str) -> Outcome {
    let mut line = vec!["kvfs", "create", path.to_str().unwrap()];
    line.extend(options.split(' ').filter(|word| !word.is_empty()));
    match Arguments::try_parse_from(line).unwrap().command {
        Command::Create(arguments) => run(&arguments),
        other => panic!("{other:?}"),
    }
}

const LLAMA: &str = "--layers 32 --kv-heads 8 --head-dim 128";

#[test]
fn a_model_is_made_once() {
    let base = tempfile::tempdir().unwrap();
    let path = base.path().join("models/llama");
    let missing = create(&path, LLAMA).unwrap_err();
    assert!(missing.line().ends_with("models does not exist: is the cache mounted?"));
    std::fs::create_dir(base.path().join("models")).unwrap();
    let report = create(&path, LLAMA).unwrap();
    let expected = format!(
        "{}\npage: 1024 tokens of one layer, 4198400 bytes (4.0 MiB)\n\
         token: 131072 bytes over 32 layers (128.0 KiB)\n",
        path.display()
    );
    assert_eq!(report.text, expected);
    let again = create(&path, LLAMA).unwrap_err();
    assert!(again.line().ends_with("llama exists already"), "{}", again.line());
    let manifest = Manifest::parse(&std::fs::read(path.join(MANIFEST)).unwrap()).unwrap();
    assert_eq!(manifest.fields().model_id, "llama");
    let mut names: Vec<_> =
        path.read_dir().unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, [MANIFEST, SEQUENCES]);
}

#[test]
fn every_option_reaches_the_manifest() {
    let base = tempfile::tempdir().unwrap();
    std::fs::create_dir(base.path().join("models")).unwrap();
    let path = base.path().join("models/m");
    let options = "--layers 2 --kv-heads 1 --head-dim 64 --v-head-dim 0 --page-tokens 16 \
        --dtype bf16 --layout nhd --model-id org/m --model-revision r1 --engine e \
        --rope-theta 10000 --rope-dims 32 --rope-pairing interleaved --tenant t --salt s --lora l";
    create(&path, options).unwrap();
    let manifest = Manifest::parse(&std::fs::read(path.join(MANIFEST)).unwrap()).unwrap();
    let json = serde_json::to_value(manifest.fields()).unwrap();
    let expected = json!({
        "schema_version": 1, "num_layers": 2, "num_kv_heads": 1, "head_dim": 64,
        "v_head_dim": 0, "page_tokens": 16, "dtype": "bf16", "layout": "nhd",
        "model_id": "org/m", "model_revision": "r1", "engine": "e",
        "rope": { "theta": 10000.0, "dims": 32, "pairing": "interleaved" }, "tenant": "t", "salt": "s", "lora": "l",
    });
    assert_eq!(json, expected);
}

#[test]
fn what_a_file_of_the_model_says() {
    let base = tempfile::tempdir().unwrap();
    std::fs::create_dir(base.path().join("models")).unwrap();
    let fixture = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/tiny-llama");
    let path = base.path().join("models/tiny");
    let report = create(&path, &format!("--from {fixture}")).unwrap();
    let expected = format!(
        "{}\nllama: layers: 4 attention; 2 KV heads of 64 and 64\n\
         page: 4096 tokens of one layer, 2101248 bytes (2.0 MiB)\n\
         token: 2048 bytes over 4 layers (2.0 KiB)\n",
        path.display()
    );
    assert_eq!(report.text, expected);
    let read = |path: &Path| {
        let manifest = Manifest::parse(&std::fs::read(path.join(MANIFEST)).unwrap()).unwrap();
        serde_json::to_value(manifest.fields()).unwrap()
    };
    let expected = json!({
        "schema_version": 1, "model_id": "tiny", "dtype": "f16", "num_layers": 4, "num_kv_heads": 2,
        "head_dim": 64, "page_tokens": 4096, "layout": "hnd",
        "rope": { "theta": 10000.0, "pairing": "halves" },
    });
    assert_eq!(read(&path), expected);

    // What is said on the line counts.
    let path = base.path().join("models/other");
    let options = "--dtype f32 --page-tokens 16 --layout nhd --kv-heads 1 --rope-theta 5";
    create(&path, &format!("--from {fixture}/config.json {options}")).unwrap();
    let found = read(&path);
    for (name, expected) in [
        ("dtype", json!("f32")),
        ("page_tokens", json!(16)),
        ("layout", json!("nhd")),
        ("num_kv_heads", json!(1)),
        ("rope", json!({ "theta": 5.0 })),
    ] {
        assert_eq!(found[name], expected, "{name}");
    }

    // Nothing is made of a file that does not tell.
    let path = base.path().join("models/none");
    let failure = create(&path, &format!("--from {fixture}/README.md")).unwrap_err();
    assert!(failure.line().contains("README.md: neither a GGUF nor a config.json"));
    assert!(matches!(failure, Failure::Usage(_)) && !path.exists());
}

#[test]
fn side_rows_of_layers() {
    let base = tempfile::tempdir().unwrap();
    std::fs::create_dir(base.path().join("models")).unwrap();
    let made = |name: &str, options: &str| {
        let path = base.path().join("models").join(name);
        let report = create(&path, options).unwrap();
        let manifest = Manifest::parse(&std::fs::read(path.join(MANIFEST)).unwrap()).unwrap();
        (report.text, manifest)
    };
    let latent = "--layers 2 --kv-heads 1 --head-dim 576 --v-head-dim 0 --dtype bf16";
    let (text, manifest) = made("by-hand", &format!("{latent} --side index_k_fp8:132"));
    assert!(
        text.contains("\nside rows: index_k_fp8 of 132 bytes in 2 layers\npage: 1024"),
        "{text}"
    );
    assert!(text.contains("1318912 bytes") && text.contains("token: 2568 bytes over 2"), "{text}");
    let side = SideRows { name: "index_k_fp8".to_owned(), row_bytes: 132 };
    assert_eq!(manifest.fields().layers, Some(vec![LayerKind::WithSide(side); 2]));

    let config = base.path().join("config.json");
    let text = json!({
        "model_type": "glm_moe_dsa", "num_hidden_layers": 4, "num_attention_heads": 64, "kv_lora_rank": 512,
        "qk_rope_head_dim": 64, "index_head_dim": 128, "index_n_heads": 32, "index_topk": 2048,
        "indexer_types": ["full", "shared", "full", "shared"], "dtype": "bfloat16",
    });
    std::fs::write(&config, text.to_string()).unwrap();
    let from = format!("--from {}", config.display());
    for (options, row_bytes) in [("", 256), (" --dtype f8_e4m3 --side k:132", 132)] {
        let (_, manifest) = made(&format!("m{row_bytes}"), &format!("{from}{options}"));
        let rows = (0..4).map(|layer| manifest.layer_geometry(Layer(layer)).side_row_bytes());
        assert_eq!(rows.collect::<Vec<_>>(), [row_bytes, 0, row_bytes, 0]);
    }
    let path = base.path().join("models/none");
    let failure = create(&path, &format!("{from} --dtype q8_0")).unwrap_err();
    assert!(failure.line().contains("say with --side NAME:BYTES"), "{}", failure.line());
    let failure = create(&path, &format!("{latent} --side k:0")).unwrap_err();
    assert!(failure.line().contains("layers[0] has side rows of 0 bytes"), "{}", failure.line());
    assert!(!path.exists());
}

#[test]
fn pages_of_some_mebibytes() {
    // 8 KV heads of 128 in f16, the latent rows of DeepSeek V3, and what is out of the ordinary.
    for (row_bytes, expected) in [(4096, 1024), (1152, 2048), (64, 4096), (1 << 20, 16)] {
        assert_eq!(page_tokens(row_bytes), expected, "{row_bytes}");
    }
}

#[test]
fn refused() {
    fn check(path: &str, options: &str, expected: &str) {
        let failure = create(Path::new(path), options).unwrap_err();
        assert!(matches!(failure, Failure::Usage(_)));
        assert!(failure.line().contains(expected), "{}", failure.line());
    }
    check("/mnt/kv/llama", LLAMA, "is not in a directory called models");
    check("/mnt/kv/models/.a", LLAMA, "which means unfinished");
    check("/mnt/kv/models/a.tmp", LLAMA, "which means unfinished");
    check("/m/models/a", "--layers 0 --kv-heads 8 --head-dim 128", "num_layers is 0");
    let rope = "--layers 1 --kv-heads 8 --head-dim 128 --rope-theta 1 --rope-dims 3";
    check("/m/models/a", rope, "rope.dims is 3");
}
