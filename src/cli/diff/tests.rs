//! Pages, sequences and models that differ in a known way.

use half::f16;
use serde_json::json;

use super::*;
use crate::page::names::{SEQUENCES, format_page, format_tail};
use crate::page::{
    Dtype, Layer, Layout, Manifest, ManifestFields, PagePlace, TokenStart, pack_page,
};
use crate::tier::encoding::{Quantisation, Quantised, quantise_page};

const PAGE_TOKENS: u64 = 16;
const HEADS: u64 = 2;
const CHANNELS: u64 = 32;

/// A model directory of two layers.
struct Model {
    path: PathBuf,
    manifest: Manifest,
}

impl Model {
    fn new(base: &Path, name: &str, change: impl FnOnce(&mut ManifestFields)) -> Model {
        let mut fields = ManifestFields::new("m", Dtype::F16, 2, 2, 32);
        fields.page_tokens = 16;
        change(&mut fields);
        let manifest = Manifest::new(fields).unwrap();
        let path = base.join(name);
        std::fs::create_dir_all(path.join(SEQUENCES)).unwrap();
        std::fs::write(path.join(MANIFEST), manifest.to_json()).unwrap();
        Model { path, manifest }
    }

    fn sequence(&self, name: &str, tokens: &[u32]) -> PathBuf {
        let path = self.path.join(SEQUENCES).join(name);
        for layer in ["000", "001"] {
            std::fs::create_dir_all(path.join(layer)).unwrap();
        }
        let ids: Vec<u8> = tokens.iter().flat_map(|id| id.to_le_bytes()).collect();
        std::fs::write(path.join(TOKENS), ids).unwrap();
        path
    }

    fn place(&self, start: u64) -> PagePlace {
        PagePlace::new(&self.manifest, Layer(0), TokenStart(start)).unwrap()
    }

    fn page(&self, sequence: &str, start: u64, change: impl Fn(u64, f32) -> f32) -> PathBuf {
        let file = pack_page(&self.place(start), &rows(PAGE_TOKENS, change), 16).unwrap();
        let path = self.path.join(SEQUENCES).join(sequence).join("000");
        let path = path.join(format_page(TokenStart(start)));
        std::fs::write(&path, file).unwrap();
        path
    }
}

/// Rows of values that `change` makes of their number and a value from -1 to 1.
fn rows(tokens: u64, change: impl Fn(u64, f32) -> f32) -> Vec<u8> {
    let values = 0..tokens * 2 * HEADS * CHANNELS;
    let value = |number: u64| f32::from(u8::try_from(number * 37 % 251).unwrap()) / 125.0 - 1.0;
    values.flat_map(|n| f16::from_f32(change(n, value(n))).to_le_bytes()).collect()
}

fn same(_: u64, value: f32) -> f32 {
    value
}

/// Value 7 of head 1 of V in token 9.
fn with_one_changed(number: u64, value: f32) -> f32 {
    if number == 9 * 2 * HEADS * CHANNELS + HEADS * CHANNELS + CHANNELS + 7 { 4.0 } else { value }
}

fn diff(a: &Path, b: &Path) -> (u8, Value) {
    let arguments = |json| DiffArguments { json, fetch: false, a: a.to_owned(), b: b.to_owned() };
    let [text, report] = [false, true].map(|json| run(&arguments(json)).unwrap());
    assert_eq!(text.exit, report.exit);
    let json: Value = serde_json::from_str(&report.text).unwrap();
    assert!(text.text.contains(&format!("result: {}\n", json["result"].as_str().unwrap())));
    (report.exit, json)
}

fn check(found: &Value, expected: &Value) {
    for (name, value) in expected.as_object().unwrap() {
        assert_eq!(&found[name], value, "{name}: {found:#}");
    }
}

#[test]
fn pages_that_are_equal_or_differ_in_a_value() {
    let base = tempfile::tempdir().unwrap();
    let model = Model::new(base.path(), "m", |_| {});
    for name in ["a", "b"] {
        model.sequence(name, &[]);
    }
    let a = model.page("a", 0, same);
    let (exit, found) = diff(&a, &model.page("b", 16, same));
    assert_eq!(exit, 0);
    let equal = "K and V have the same bits";
    check(&found, &serde_json::json!({ "values": equal, "first_different_token": null }));
    check(&found, &serde_json::json!({ "start": [0, 16], "tokens": [16, 16] }));

    let (exit, found) = diff(&a, &model.page("b", 0, with_one_changed));
    assert_eq!(exit, 1);
    check(&found, &serde_json::json!({ "values": "K or V differ", "first_different_token": 9 }));
    let heads = found["heads"].as_array().unwrap();
    let differing: Vec<_> =
        heads.iter().filter(|head| head["largest_difference"].as_f64() != Some(0.0)).collect();
    assert_eq!(differing.len(), 1);
    check(differing[0], &serde_json::json!({ "part": "v", "head": 1, "not_finite": 0 }));
    let [largest, mean] =
        ["largest_difference", "mean_difference"].map(|name| differing[0][name].as_f64().unwrap());
    assert!((largest - 5.0).abs() < 1e-9, "from -1 to 4");
    assert!((mean * 16.0 * 32.0 - largest).abs() < 1e-9);

    let nan = model.page("b", 0, |number, value| if number == 0 { f32::NAN } else { value });
    let (exit, found) = diff(&a, &nan);
    assert_eq!((exit, &found["heads"][0]["not_finite"]), (1, &serde_json::json!(1)));
    assert_eq!(diff(&nan, &nan).0, 0);
}

#[test]
fn shapes_that_differ() {
    let base = tempfile::tempdir().unwrap();
    let model = Model::new(base.path(), "m", |_| {});
    model.sequence("a", &[]);
    let a = model.page("a", 0, same);
    // The same rows in another order are the same rows.
    let other = Model::new(base.path(), "n", |fields| fields.layout = Layout::Nhd);
    other.sequence("a", &[]);
    let (exit, found) = diff(&a, &other.page("a", 0, same));
    assert_eq!(exit, 0, "{found:#}");
    check(&found, &serde_json::json!({ "layout": ["hnd", "nhd"] }));
    // Half as many channels and twice as many heads.
    let other = Model::new(base.path(), "o", |fields| {
        (fields.num_kv_heads, fields.head_dim) = (4, 16);
    });
    other.sequence("a", &[]);
    let (exit, found) = diff(&a, &other.page("a", 0, same));
    assert_eq!(exit, 1);
    check(&found, &serde_json::json!({ "num_kv_heads": [2, 4], "heads": null }));
    // A tail against the page that it begins like.
    let tail = a.with_file_name(format_tail(TokenStart(16)));
    std::fs::write(&tail, rows(5, same)).unwrap();
    let (exit, found) = diff(&a, &tail);
    assert_eq!(exit, 1);
    check(&found, &serde_json::json!({ "tokens": [16, 5], "first_different_token": null }));
}

#[test]
fn a_lossy_copy_is_told() {
    let base = tempfile::tempdir().unwrap();
    let model = Model::new(base.path(), "m", |_| {});
    for name in ["a", "b"] {
        model.sequence(name, &[]);
    }
    let a = model.page("a", 0, same);
    let b = model.page("b", 0, same);
    for (quantisation, name) in [(Quantisation::Q8_0, "q8_0"), (Quantisation::Q4_0, "q4_0")] {
        let file = std::fs::read(&a).unwrap();
        let version = quantise_page(&file, &model.place(0), quantisation).unwrap();
        let Quantised::Version(version) = version else { panic!("{version:?}") };
        std::fs::write(&b, version.page).unwrap();
        for (first, second, copy, original) in [(&a, &b, "b", "a"), (&b, &a, "a", "b")] {
            let (exit, found) = diff(first, second);
            let words = format!("{copy} is the lossy copy of {original}, rounded to {name}");
            assert_eq!((exit, found["values"].as_str()), (1, Some(&*words)));
        }
        let (_, found) = diff(&model.path.join("sequences/a"), &model.path.join("sequences/b"));
        check(&found, &serde_json::json!({ "files": { "000/0000000.safetensors": "rounded" } }));
    }
}

#[test]
fn sequences() {
    let base = tempfile::tempdir().unwrap();
    let model = Model::new(base.path(), "m", |_| {});
    let [a, b] = [("a", &[1, 2, 3][..]), ("b", &[1, 2, 4, 5])].map(|(n, t)| model.sequence(n, t));
    let shared = model.page("a", 0, same);
    std::fs::hard_link(&shared, b.join("000/0000000.safetensors")).unwrap();
    let (exit, found) = diff(&a, &b);
    assert_eq!(exit, 1);
    check(&found, &serde_json::json!({ "tokens": [3, 4], "common_tokens": 2 }));
    assert_eq!((&found["pages"]["shared"], &found["files"]), (&1.into(), &Value::Null));
    model.page("a", 16, same);
    model.page("b", 16, same);
    model.page("a", 32, same);
    model.page("b", 32, with_one_changed);
    model.page("a", 48, same);
    std::fs::write(b.join("000/0000048.tail"), rows(3, same)).unwrap();
    std::fs::write(a.join("001/0000000.tail"), rows(2, same)).unwrap();
    std::fs::write(b.join("001/0000000.tail"), rows(2, same)).unwrap();
    std::fs::write(a.join("000/0000064.tail"), "").unwrap();
    let (_, found) = diff(&a, &b);
    let pages = serde_json::json!({
        "shared": 1, "identical": 1, "rounded": 0, "different": 1, "only_a": 1, "only_b": 0,
        "not_compared": 0,
    });
    assert_eq!(found["pages"], pages);
    check(&found["tails"], &serde_json::json!({ "identical": 1, "only_b": 1 }));
    let files = serde_json::json!({
        "000/0000032.safetensors": "different", "000/0000048.safetensors": "only_a",
        "000/0000048.tail": "only_b",
    });
    assert_eq!(found["files"], files);
    // What cannot be read is told, and hides nothing else.
    std::fs::write(b.join("000/0000016.safetensors"), "no page").unwrap();
    let (exit, found) = diff(&a, &b);
    assert_eq!((exit, &found["pages"]["not_compared"]), (1, &1.into()));
    assert!(found["not_compared_because"].as_str().unwrap().contains("0000016.safetensors: "));
}

#[test]
fn models() {
    let base = tempfile::tempdir().unwrap();
    let [a, b] = ["a", "b"].map(|name| Model::new(base.path(), name, |_| {}));
    for model in [&a, &b] {
        model.sequence("chat", &[1, 2]);
        model.page("chat", 0, same);
    }
    assert_eq!(diff(&a.path, &b.path).0, 0);
    // What cannot be compared leaves the answer open.
    let [page_a, page_b] =
        [&a, &b].map(|model| model.path.join("sequences/chat/000/0000000.safetensors"));
    std::fs::write(&page_b, "no page").unwrap();
    assert_eq!(diff(&a.path, &b.path).0, 2);
    std::fs::copy(page_a, page_b).unwrap();
    b.page("chat", 0, with_one_changed);
    b.sequence("other", &[]);
    let (exit, found) = diff(&a.path, &b.path);
    assert_eq!(exit, 1);
    check(&found, &serde_json::json!({ "only_a": null, "only_b": ["other"] }));
    check(
        &found["sequences"]["chat"],
        &serde_json::json!({ "result": "different", "common_tokens": 2 }),
    );
    let c = Model::new(base.path(), "c", |fields| fields.tenant = Some("t".to_owned()));
    let (exit, found) = diff(&c.path, &Model::new(base.path(), "d", |_| {}).path);
    assert_eq!(exit, 1);
    assert_ne!(found["identity"][0], found["identity"][1]);
}

#[test]
fn what_is_not_compared() {
    let base = tempfile::tempdir().unwrap();
    let model = Model::new(base.path(), "m", |_| {});
    let sequence = model.sequence("a", &[]);
    let page = model.page("a", 0, same);
    let check = |a: &Path, b: &Path, expected: &str| {
        let arguments = DiffArguments { json: false, fetch: false, a: a.into(), b: b.into() };
        match run(&arguments) {
            Err(Failure::Usage(line)) => assert!(line.contains(expected), "{line}"),
            other => panic!("{other:?}"),
        }
    };
    check(&page, &sequence, "is a sequence, ");
    check(&model.path, &page, "name two of one kind");
    check(&page, &base.path().join("absent"), "No such file");
    check(base.path(), base.path(), "is neither a page");
    check(&page, &model.path.join(MANIFEST), "manifest.json: ");
}

#[test]
fn side_rows_that_differ() {
    let base = tempfile::tempdir().unwrap();
    let with_side = |name: &str| {
        Model::new(base.path(), name, |fields| {
            let side = crate::page::SideRows { name: "index_k".to_owned(), row_bytes: 3 };
            fields.layers = Some(vec![
                crate::page::LayerKind::WithSide(side),
                crate::page::LayerKind::Attention,
            ]);
        })
    };
    let [a, b] = ["a", "b"].map(with_side);
    let row_bytes = 2 * usize::try_from(2 * HEADS * CHANNELS).unwrap();
    let page = |model: &Model, key: u8| {
        model.sequence("chat", &[]);
        let kv = rows(PAGE_TOKENS, same);
        let rows = kv.chunks(row_bytes).flat_map(|row| [row, &[key, 1, 2]].concat());
        let file = pack_page(&model.place(0), &rows.collect::<Vec<_>>(), 16).unwrap();
        let path = model.path.join(SEQUENCES).join("chat/000").join(format_page(TokenStart(0)));
        std::fs::write(&path, file).unwrap();
        path
    };
    let (exit, found) = diff(&page(&a, 7), &page(&b, 7));
    assert_eq!((exit, &found["values"]), (0, &json!("K and V have the same bits")));
    assert_eq!(
        (&found["side_rows"], &found["side_row_bytes"]),
        (&json!("the same bytes"), &json!([3, 3]))
    );
    let (exit, found) = diff(&page(&a, 7), &page(&b, 8));
    assert_eq!(exit, 1);
    assert_eq!(found["values"], "K and V have the same bits, the side rows differ");
    assert_eq!(
        (&found["first_different_token"], &found["side_rows"]),
        (&Value::Null, &json!("differ"))
    );

    // Models that keep something else, and a page that nobody tells the layer of.
    let plain = Model::new(base.path(), "plain", |_| {});
    let (exit, found) = diff(&a.path, &plain.path);
    assert_eq!((exit, &found["side_rows"]), (1, &json!([[[0, "index_k", 3]], []])));
    let copy = a.path.join("copy");
    std::fs::copy(page(&a, 7), &copy).unwrap();
    let (exit, found) = diff(&copy, &page(&a, 7));
    assert_eq!((exit, &found["side_rows"]), (0, &json!("the same bytes")));
    // K and V alone in a tail: nobody takes them for rows.
    let tail = a.path.join(SEQUENCES).join("chat/000").join(format_tail(TokenStart(16)));
    std::fs::write(&tail, rows(4, same)).unwrap();
    let arguments = DiffArguments { json: false, fetch: false, a: tail.clone(), b: tail };
    let failure = run(&arguments).unwrap_err();
    assert!(
        failure.line().contains("no whole rows of 259: side rows are missing"),
        "{}",
        failure.line()
    );
}
