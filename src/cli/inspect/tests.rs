//! What is said about every kind of file, in a tree as a mount shows it.

use super::*;
use crate::page::{
    Dtype, Layer, ManifestFields, Metadata as PageMetadata, PagePlace, TokenStart, pack_page,
    pack_rows,
};

fn asked(json: bool, path: PathBuf) -> InspectArguments {
    InspectArguments { json, heat: HeatArguments::default(), path }
}

struct Tree {
    base: tempfile::TempDir,
    manifest: Manifest,
}

impl Tree {
    /// One sequence with one full page, one tail of 3 rows and 19 tokens.
    fn new() -> Tree {
        let base = tempfile::tempdir().unwrap();
        let mut fields = ManifestFields::new("m", Dtype::F16, 1, 2, 4);
        fields.page_tokens = 16;
        let manifest = Manifest::new(fields).unwrap();
        let layer = base.path().join("m/sequences/chat/000");
        std::fs::create_dir_all(&layer).unwrap();
        std::fs::write(base.path().join("m").join(MANIFEST), manifest.to_json()).unwrap();
        let place = PagePlace::new(&manifest, Layer(0), TokenStart(0)).unwrap();
        let page = pack_page(&place, &[7; 16 * 32], 16).unwrap();
        std::fs::write(layer.join("0000000.safetensors"), page).unwrap();
        std::fs::write(layer.join("0000016.tail"), [7; 3 * 32]).unwrap();
        let ids: Vec<u8> = (0..19u32).flat_map(u32::to_le_bytes).collect();
        std::fs::write(base.path().join("m/sequences/chat/tokens"), ids).unwrap();
        Tree { base, manifest }
    }

    fn facts(&self, path: &str) -> Value {
        let path = self.base.path().join(path);
        let report = run(&asked(true, path.clone())).unwrap();
        let text = run(&asked(false, path)).unwrap();
        assert!(text.text.starts_with("path: "));
        serde_json::from_str(&report.text).unwrap()
    }

    fn check(&self, path: &str, expected: &Value) {
        let found = self.facts(path);
        for (name, value) in expected.as_object().unwrap() {
            assert_eq!(&found[name], value, "{path} {name}: {found:#}");
        }
    }
}

#[test]
fn every_kind_is_explained() {
    let tree = Tree::new();
    let page = "m/sequences/chat/000/0000000.safetensors";
    tree.check(
        page,
        &serde_json::json!({
            "kind": "page", "layer": 0, "start": 0, "tokens": 16, "dtype": "F16",
            "k_shape": [2, 16, 4], "v_shape": [2, 16, 4], "layout": "hnd",
            "verified": "declared checksum matches", "refused": null,
        }),
    );
    let checksum = tree.facts(page)["checksum"].clone();
    assert_eq!(tree.facts(page)["metadata"]["kvfs.checksum"], checksum);
    tree.check(
        "m/sequences/chat/000/0000016.tail",
        &serde_json::json!({ "kind": "tail", "start": 16, "rows": 3, "row_bytes": 32 }),
    );
    tree.check(
        "m/sequences/chat/tokens",
        &serde_json::json!({
            "kind": "tokens", "tokens": 19, "first": [0, 1, 2, 3, 4, 5, 6, 7],
            "last": [11, 12, 13, 14, 15, 16, 17, 18],
        }),
    );
    tree.check(
        "m/manifest.json",
        &serde_json::json!({ "kind": "manifest", "model_id": "m", "token_bytes": 32 }),
    );
    let bytes = 4096 + 4096 + 96 + 76;
    let sequence = serde_json::json!({
        "kind": "sequence", "layers": 1, "tokens": 19, "pages": 1, "tails": 1, "bytes": bytes
    });
    tree.check("m/sequences/chat", &sequence);
    tree.check(
        "m",
        &serde_json::json!({ "kind": "model", "sequences": 1, "pages": 1, "bytes": bytes }),
    );
    tree.check("m/sequences/chat/000", &serde_json::json!({ "kind": "layer", "pages": 1 }));
    tree.check("", &serde_json::json!({ "kind": "directory" }));
}

#[test]
fn a_page_without_its_place() {
    let tree = Tree::new();
    let base = tree.base.path();
    let page = "m/sequences/chat/000/0000000.safetensors";
    std::fs::copy(base.join(page), base.join("copy.safetensors")).unwrap();
    tree.check(
        "copy.safetensors",
        &serde_json::json!({
            "kind": "page", "k_shape": [2, 16, 4], "note": "no manifest.json above: not verified"
        }),
    );
    std::fs::copy(base.join(page), base.join("m/copy")).unwrap();
    tree.check(
        "m/copy",
        &serde_json::json!({ "tokens": 16, "verified": "declared checksum matches", "layer": 0 }),
    );
    let rows = [7; 32];
    let plain = pack_rows(tree.manifest.geometry(), &rows, 1, &PageMetadata::new()).unwrap();
    std::fs::write(base.join("m/bare"), plain).unwrap();
    tree.check("m/bare", &serde_json::json!({ "tokens": 1, "verified": null, "refused": null }));
}

#[test]
fn what_is_wrong_is_said() {
    let tree = Tree::new();
    let base = tree.base.path();
    let page = base.join("m/sequences/chat/000/0000000.safetensors");
    let check = |path: &str, expected: &str| {
        let refused = tree.facts(path)["refused"].as_str().unwrap_or_default().to_owned();
        assert!(refused.contains(expected), "{refused}");
    };
    std::fs::copy(&page, base.join("m/sequences/chat/000/0000016.safetensors")).unwrap();
    check("m/sequences/chat/000/0000016.safetensors", "the page belongs elsewhere");
    std::fs::copy(&page, base.join("m/sequences/chat/000/0000001.safetensors")).unwrap();
    check("m/sequences/chat/000/0000001.safetensors", "no page starts at token 1");
    let mut bytes = std::fs::read(&page).unwrap();
    bytes[5000] ^= 1;
    std::fs::write(&page, bytes).unwrap();
    check("m/sequences/chat/000/0000000.safetensors", "damaged");
    std::fs::write(base.join("m/manifest.json"), "{}").unwrap();
    check("m/manifest.json", "schema_version");
    std::fs::write(base.join("notes.txt"), "hello").unwrap();
    tree.check("notes.txt", &serde_json::json!({ "kind": "file", "bytes": 5 }));
    std::fs::write(base.join("empty"), "").unwrap();
    tree.check("empty", &serde_json::json!({ "kind": "file", "bytes": 0 }));
    let absent = asked(false, base.join("absent"));
    assert!(matches!(run(&absent), Err(Failure::Failed(_))));
}

#[test]
fn side_rows_of_a_page_a_tail_and_a_model() {
    let mut tree = Tree::new();
    let mut fields = tree.manifest.fields().clone();
    (fields.num_layers, fields.model_id) = (2, "sparse".to_owned());
    let side = crate::page::SideRows { name: "index_k".to_owned(), row_bytes: 5 };
    fields.layers = Some(vec![LayerKind::Attention, LayerKind::WithSide(side)]);
    tree.manifest = Manifest::new(fields).unwrap();
    let layer = tree.base.path().join("m/sequences/chat/001");
    std::fs::create_dir_all(&layer).unwrap();
    std::fs::write(tree.base.path().join("m").join(MANIFEST), tree.manifest.to_json()).unwrap();
    let place = PagePlace::new(&tree.manifest, Layer(1), TokenStart(0)).unwrap();
    let page = pack_page(&place, &[7; 16 * 37], 16).unwrap();
    std::fs::write(layer.join("0000000.safetensors"), &page).unwrap();
    std::fs::write(tree.base.path().join("m/copy"), &page).unwrap();
    std::fs::write(layer.join("0000016.tail"), [7; 3 * 37]).unwrap();
    let told = serde_json::json!({
        "kind": "page", "layer": 1, "side_shape": [16, 5], "verified": "declared checksum matches"
    });
    tree.check("m/sequences/chat/001/0000000.safetensors", &told);
    // Out of its directory the page itself says where it belongs.
    tree.check("m/copy", &told);
    let tail = "m/sequences/chat/001/0000016.tail";
    tree.check(tail, &serde_json::json!({"rows": 3, "row_bytes": 37, "side_row_bytes": 5}));
    std::fs::write(tree.base.path().join(tail), [7; 3 * 32]).unwrap();
    tree.check(tail, &serde_json::json!({"rows": 0, "unfinished_row_bytes": 22}));
    tree.check(
        "m",
        &serde_json::json!({
            "side_layers": 1, "side_name": "index_k", "side_row_bytes": 5, "token_bytes": 32 + 37,
        }),
    );
}
