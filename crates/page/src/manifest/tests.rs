//! Which manifests are accepted, and what is said about the others.

use super::*;

const MINIMAL: &str = r#"{"schema_version":1,"model_id":"m","dtype":"f16","num_layers":2,"num_kv_heads":2,"head_dim":64}"#;

/// `MINIMAL` with one field replaced or added; `null` leaves a field out.
fn with(field: &str, value: &str) -> String {
    let mut object: Map<String, Value> = serde_json::from_str(MINIMAL).unwrap();
    object.insert(field.to_owned(), serde_json::from_str(value).unwrap());
    Value::Object(object).to_string()
}

#[test]
fn minimal_and_defaults() {
    let manifest = Manifest::parse(MINIMAL.as_bytes()).unwrap();
    let geometry = manifest.geometry();
    assert_eq!(geometry.v_head_dim(), 64);
    assert_eq!(geometry.page_tokens(), 1024);
    assert_eq!(geometry.layout(), Layout::Hnd);
    assert_eq!(manifest.layer_kind(Layer(1)), Some(LayerKind::Attention));
    assert_eq!(manifest.layer_kind(Layer(2)), None);
    let fields = ManifestFields::new("m", Dtype::F16, 2, 2, 64);
    assert_eq!(Manifest::new(fields), Ok(manifest));
}

#[test]
fn accepted_and_kept_through_a_round_trip() {
    fn check(json: &str) {
        let manifest = Manifest::parse(json.as_bytes()).unwrap();
        let again = Manifest::parse(manifest.to_json().as_bytes()).unwrap();
        assert_eq!(again, manifest);
        let before: Map<String, Value> = serde_json::from_str(json).unwrap();
        let after: Map<String, Value> = serde_json::from_str(&again.to_json()).unwrap();
        for (key, value) in before.iter().filter(|(_, value)| !value.is_null()) {
            assert_eq!(after.get(key), Some(value), "{key}");
        }
    }
    check(MINIMAL);
    check(&with("future", r#"{"deep":[1,{"x":null}],"n":18446744073709551615}"#));
    check(&with("layers", r#"["recurrent",{"sliding":{"window":4096}}]"#));
    check(&with("layers", r#"["cross","attention"]"#));
    check(&with(
        "layers",
        r#"["attention",{"recurrent":{"state":[{"name":"conv","dtype":"f16","shape":[64,3]},
            {"name":"ssm.0","dtype":"f32","shape":[2,16,16]}]}}]"#,
    ));
    check(&with("v_head_dim", "0"));
    check(&with("v_head_dim", "null"));
    check(&with("page_tokens", "544"));
    check(&with("layout", r#""nhd""#));
    check(&with("dtype", r#""q8_0""#));
    check(&with("kv_rotation", "true"));
    check(&with("kv_rotation", r#""hadamard""#));
    check(&with("rope", r#"{"theta":500000.0,"scaling":{"factor":8.0},"dims":64,"new":1}"#));
    // A number whose nearest f64 a hasty reader misses by one: the identity would change.
    check(&with("rope", r#"{"theta":500000.1099511627776}"#));
    check(&with("shard", r#"{"rank":3,"size":4,"axis":"heads"}"#));
    check(&with("tenant", r#""a\nb""#));
    check(&with("cold_encoding", r#""q8_0""#));
}

#[test]
fn refused() {
    fn check(json: &str, expected: &str) {
        let error = Manifest::parse(json.as_bytes()).unwrap_err();
        assert_eq!(error.to_string(), expected);
        assert_eq!(error.reason(), "manifest");
    }
    let read = |rest: &str| format!("manifest cannot be read: {rest}");
    check("", &read("EOF while parsing a value at line 1 column 0"));
    check("[]", &read("invalid type: sequence, expected a map at line 1 column 0"));
    check(&format!("{MINIMAL}x"), &read("trailing characters at line 1 column 96"));
    check(
        &MINIMAL.replace("\"m\"", "\"m\",\"model_id\":\"n\""),
        &read("duplicate field `model_id` at line 1 column 45"),
    );
    check(&with("model_id", r#""""#), "model_id is empty: name the model");
    check(&with("num_layers", "0"), "num_layers is 0: must be from 1 to 4096");
    check(&with("head_dim", "0"), "head_dim is 0: must be from 1 to 4096");
    check(&with("v_head_dim", "5000"), "v_head_dim is 5000: must be from 0 to 4096");
    check(&with("page_tokens", "0"), "page_tokens is 0: must be from 1 to 1048576");
    check(
        &with("layers", r#"["attention"]"#),
        "layers has 1 entries, num_layers is 2: list every layer or leave layers out",
    );
    check(
        &with("layers", r#"["attention",{"sliding":{"window":0}}]"#),
        "layers[1] has a window of 0 tokens: at least 1",
    );
    check(&with("rope", r#"{"theta":0}"#), "rope.theta is 0: must be a finite number above 0");
    check(
        &with("rope", r#"{"theta":1,"dims":66}"#),
        "rope.dims is 66, head_dim is 64: a row cannot rotate more elements than it has",
    );
    check(&with("rope", r#"{"theta":1,"dims":63}"#), "rope.dims is 63: elements rotate in pairs");
    check(
        &with("shard", r#"{"rank":2,"size":2}"#),
        "shard.rank is 2, shard.size is 2: ranks count from 0",
    );
    check(&with("shard", r#"{"rank":0,"size":0}"#), "shard.size is 0: must be from 1 to 65536");
}

#[test]
fn refused_states() {
    fn check(json: &str, expected: &str) {
        assert_eq!(Manifest::parse(json.as_bytes()).unwrap_err().to_string(), expected);
    }
    let state = |tensors: &str| {
        with("layers", &format!(r#"["attention",{{"recurrent":{{"state":[{tensors}]}}}}]"#))
    };
    let tensor = |name: &str, dtype: &str, shape: &str| {
        format!(r#"{{"name":"{name}","dtype":"{dtype}","shape":{shape}}}"#)
    };
    let good = tensor("s", "f32", "[2]");
    check(&state(""), "layers[1] has a state of 0 tensors: 1 to 8");
    check(&state(&[&*good; 9].join(",")), "layers[1] has a state of 9 tensors: 1 to 8");
    check(&state(&format!("{good},{good}")), "layers[1] has two state tensors s");
    check(
        &state(&tensor("a b", "f32", "[2]")),
        "layers[1] has a state tensor that is called \"a b\": 1 to 64 letters, digits, '_', '.' and \
         '-'",
    );
    check(
        &state(&tensor("_pad", "f32", "[2]")),
        "layers[1] has a state tensor _pad: names with '_' first are taken",
    );
    check(
        &state(&tensor("s", "q8_0", "[32]")),
        "layers[1] has a state tensor s of q8_0: no blocks here",
    );
    for shape in ["[]", "[2,0]"] {
        let list = shape.replace(',', ", ");
        check(
            &state(&tensor("s", "f32", shape)),
            &format!("layers[1] has a state tensor s of shape {list}: 1 to 6 dimensions, none 0"),
        );
    }
    for shape in ["[4294967295,4294967295,4294967295]", "[268435456]"] {
        check(
            &state(&tensor("s", "f32", shape)),
            "layers[1] has a state of more bytes than a file may have: the limit is 1073741824",
        );
    }
    check(
        &with("layers", &format!(r#"["recurrent",{{"recurrent":{{"state":[{good}]}}}}]"#)),
        "layers[0] is recurrent without a state, layers[1] tells its own: tell that of every \
         recurrent layer or of none",
    );
}

#[test]
fn bad_versions() {
    fn check(json: &str, expected: &str) {
        let error = Manifest::parse(json.as_bytes()).unwrap_err();
        assert_eq!(error.to_string(), expected);
        assert_eq!(error.reason(), "manifest");
    }
    let missing = "manifest has no whole number schema_version: set it to 1";
    check("{}", missing);
    check(&with("schema_version", r#""1""#), missing);
    check(&with("schema_version", "1.5"), missing);
    check(&with("schema_version", "-1"), missing);
    check(&with("schema_version", "0"), "schema_version is 0: the first is 1");
}

#[test]
fn refused_by_the_kind_of_a_value() {
    fn check(json: &str, expected: &str) {
        let error = Manifest::parse(json.as_bytes()).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
        assert!(!error.contains('\n'), "{error}");
    }
    check(&with("num_layers", "-1"), "invalid value: integer `-1`");
    check(&with("num_layers", "4294967296"), "invalid value: integer `4294967296`");
    check(&with("head_dim", "64.5"), "invalid type: floating point `64.5`");
    check(&with("head_dim", "null"), "invalid type: null");
    check(&with("dtype", r#""in\nt4""#), "unknown dtype \"in\\nt4\"");
    check(&with("layout", r#""n\nhd""#), "unknown variant `n\\nhd`");
    check(&with("layers", r#"["mamba","attention"]"#), "unknown variant `mamba`");
    check(&with("layers", r#"[{"sliding":{"windw":1}},"attention"]"#), "unknown field `windw`");
    check(&with("layers", r#"["sliding","attention"]"#), "unknown variant `sliding`");
    check(
        &with("layers", r#"[7,"attention"]"#),
        "invalid type: integer `7`, expected what a layer",
    );
    check(&with("layers", r#"[{"recurrent":{}},"attention"]"#), "missing field `state`");
    check(
        &with("layers", r#"[{"recurrent":{"state":[],"more":1}},"attention"]"#),
        "unknown field `more`",
    );
    check(&with("layers", r#"[{"recurrent":null,"cross":null},"attention"]"#), "manifest cannot");
    check(&with("rope", "{}"), "missing field `theta`");
    check(&with("kv_rotation", "7"), "did not match any variant");
    let deep = format!("{}{}", "[".repeat(200), "]".repeat(200));
    check(&MINIMAL.replace("\"m\"", &deep), "recursion limit exceeded");
}

#[test]
fn newer_and_oversized() {
    let newer = r#"{"schema_version":2,"everything":"else changed"}"#;
    let error = Manifest::parse(newer.as_bytes()).unwrap_err();
    assert_eq!(error.reason(), "version");
    assert_eq!(
        error.to_string(),
        "manifest has schema_version 2, this program reads up to 1: written by a newer kvfs, \
         upgrade to use it"
    );
    let oversized = vec![b' '; (1 << 20) + 1];
    assert_eq!(
        Manifest::parse(&oversized).unwrap_err().to_string(),
        "manifest is 1048577 bytes as kvfs writes it, the limit is 1048576: not a kvfs manifest"
    );
    let grows = with("future", &format!("[{}1]", "1,".repeat(300_000)));
    let error = Manifest::parse(grows.as_bytes()).unwrap_err();
    assert!(error.to_string().starts_with("manifest is 2"), "{error}");
}

#[test]
fn kinds_that_are_words_may_be_objects() {
    let words = Manifest::parse(with("layers", r#"["recurrent","cross"]"#).as_bytes()).unwrap();
    let objects = with("layers", r#"[{"recurrent":null},{"cross":null}]"#);
    assert_eq!(Manifest::parse(objects.as_bytes()), Ok(words));
}

#[test]
fn side_rows_of_some_layers() {
    let side = r#"{"attention":{"side":{"name":"index_k","row_bytes":132}}}"#;
    let text = with("layers", &format!(r#"[{side},{{"attention":null}}]"#));
    let manifest = Manifest::parse(text.as_bytes()).unwrap();
    assert_eq!(Manifest::parse(manifest.to_json().as_bytes()), Ok(manifest.clone()));
    let rows = manifest.side_rows(Layer(0)).unwrap();
    assert_eq!((rows.name.as_str(), rows.row_bytes), ("index_k", 132));
    assert!(manifest.has_side_rows() && manifest.side_rows(Layer(1)).is_none());
    let bytes = [0, 1].map(|layer| manifest.layer_geometry(Layer(layer)).row_bytes());
    assert_eq!(bytes[0], bytes[1] + 132);
    assert_eq!(manifest.largest_geometry().row_bytes(), bytes[0]);
    assert_eq!(manifest.geometry().row_bytes(), bytes[1]);
    let plain = Manifest::parse(with("layers", r#"["attention","attention"]"#).as_bytes()).unwrap();
    assert!(!plain.has_side_rows() && !plain.same_cache(&manifest));
}

#[test]
fn side_rows_that_nothing_can_be_made_of() {
    fn check(beside: &str, expected: &str) {
        let text = with("layers", &format!(r#"["attention",{{"attention":{beside}}}]"#));
        let error = Manifest::parse(text.as_bytes()).unwrap_err();
        assert_eq!(error.reason(), "manifest");
        assert!(error.to_string().contains(expected), "{error}");
    }
    let of = |bytes: u64| format!(r#"{{"side":{{"name":"index_k","row_bytes":{bytes}}}}}"#);
    check(&of(0), "layers[1] has side rows of 0 bytes: 1 to 65536");
    check(&of(65537), "layers[1] has side rows of 65537 bytes");
    check(&of(1 << 32), "manifest cannot be read");
    check(r#"{"side":{"name":"","row_bytes":1}}"#, "layers[1] has side rows that are called \"\"");
    check(r#"{"side":{"name":"a b","row_bytes":1}}"#, "layers[1] has side rows that are called");
    check(r#"{"side":{"name":"a","row_bytes":1,"dtype":"u8"}}"#, "manifest cannot be read");
    check(r#"{"side":[]}"#, "manifest cannot be read");
    check("{}", "manifest cannot be read");
}

#[test]
fn what_of_a_layer_must_be_there() {
    use crate::{Needed, StateShape};
    let kinds = [
        (LayerKind::Attention, Needed::All),
        (LayerKind::WithSide(crate::SideRows { name: "s".to_owned(), row_bytes: 1 }), Needed::All),
        (LayerKind::Sliding { window: 7 }, Needed::End { window: 7 }),
        (LayerKind::State(StateShape { state: Vec::new() }), Needed::State),
        (LayerKind::Recurrent, Needed::Untold),
        (LayerKind::Cross, Needed::Untold),
    ];
    for (kind, expected) in kinds {
        assert_eq!(kind.needed(), expected, "{kind:?}");
    }
}
