//! Which headers are accepted, and what is said about the others.

use super::*;
use crate::{Dtype, GeometrySpec};

/// Pages of 2 heads x 64 (K) and 2 x 32 (V) in f16: 1024 and 512 bytes for 4 tokens, no V for
/// `v_head_dim` 0.
pub(super) fn geometry(layout: Layout, v_head_dim: u32) -> Geometry {
    Geometry::new(GeometrySpec {
        dtype: Dtype::F16,
        layout,
        num_layers: 1,
        num_kv_heads: 2,
        head_dim: 64,
        v_head_dim,
        page_tokens: 16,
    })
    .unwrap()
}

pub(super) const K: &str = r#""k":{"dtype":"F16","shape":[2,4,64],"data_offsets":[0,1024]}"#;
pub(super) const V: &str = r#""v":{"dtype":"F16","shape":[2,4,32],"data_offsets":[1024,1536]}"#;
pub(super) const P: &str = r#""_pad":{"dtype":"U8","shape":[2560],"data_offsets":[1536,4096]}"#;

/// A header with this JSON, padded with spaces.
fn padded(json: &str) -> Vec<u8> {
    let mut header = 4088u64.to_le_bytes().to_vec();
    header.extend(json.as_bytes());
    header.resize(4096, b' ');
    header
}

pub(super) fn parse(json: &str) -> Result<PageHeader, PageError> {
    PageHeader::parse(&padded(json), 8192, &geometry(Layout::Hnd, 32))
}

fn refused(json: &str, reason: &str, expected: &str) {
    let error = parse(json).unwrap_err();
    assert_eq!(error.to_string(), expected, "{json}");
    assert_eq!(error.reason(), reason);
}

#[test]
fn accepted_however_it_is_written() {
    fn check(json: &str) {
        assert_eq!(parse(json).map(|header| header.tokens), Ok(4), "{json}");
    }
    check(&format!("{{{K},{V},{P}}}"));
    check(&format!("{{{P},{V},{K}}}"));
    check(&format!("{{ {K} ,\n\t{V}, {P}\r\n}}"));
    check(&format!("{{\"__metadata__\":{{}},{K},{V},{P}}}"));
    check(&format!("{{\"__metadata__\":{{\"format\":\"pt\"}},{K},{V},{P}}}"));
    check(&format!("{{{},{V},{P}}}", K.replace("\"k\"", "\"\\u006b\"")));
    let reordered = r#""k":{"data_offsets":[0,1024],"shape":[2,4,64],"dtype":"F16"}"#;
    check(&format!("{{{reordered},{V},{P}}}"));
}

#[test]
fn side_rows() {
    const S: &str = r#""side":{"dtype":"U8","shape":[4,100],"data_offsets":[1536,1936]}"#;
    const P: &str = r#""_pad":{"dtype":"U8","shape":[2160],"data_offsets":[1936,4096]}"#;
    let geometry = geometry(Layout::Hnd, 32).with_side_rows(100).unwrap();
    let parse = |json: &str| PageHeader::parse(&padded(json), 8192, &geometry);
    assert_eq!(parse(&format!("{{{K},{V},{S},{P}}}")).unwrap().tokens, 4);
    let refused = |json: &str, reason: &str, expected: &str| {
        let error = parse(json).unwrap_err();
        assert_eq!((error.reason(), error.to_string().as_str()), (reason, expected), "{json}");
    };
    // A page of a writer that knows of no side rows.
    refused(
        &format!("{{{K},{V},{}}}", super::tests::P),
        "shape",
        "tensor side is missing: 4 tokens need one of shape [4, 100]",
    );
    for (from, to, reason, expected) in [
        ("[4,100]", "[4,99]", "shape", "tensor side has shape [4, 99], this cache has [4, 100]"),
        ("[4,100]", "[3,100]", "shape", "tensor side has shape [3, 100], this cache has [4, 100]"),
        ("U8", "F16", "dtype", "tensor side has dtype \"F16\", this cache has U8"),
        (
            "[1536,1936]",
            "[1536,1935]",
            "offsets",
            "tensor side has data_offsets [1536, 1935], must have [1536, 1936]: k, v, side and _pad follow \
             each other without holes",
        ),
    ] {
        refused(&format!("{{{K},{V},{},{P}}}", S.replace(from, to)), reason, expected);
    }
    let file = padded(&format!("{{{K},{V},{S},{P}}}"));
    let plain = PageHeader::parse(&file, 8192, &super::tests::geometry(Layout::Hnd, 32));
    assert_eq!(
        plain.unwrap_err().to_string(),
        "tensor side is present, the manifest says of no side rows in this layer: leave it out"
    );
    let cut = PageHeader::parse(&file, 8191, &geometry).unwrap_err();
    assert_eq!(cut.reason(), "size");
}

#[test]
fn metadata() {
    let json = format!(
        "{{\"__metadata__\":{{\"kvfs.layer\":\"7\",\"kvfs.start\":\"1024\",\"kvfs.new\":\"x\",\
         \"kvfs.sequence\":\"chat\"}},{K},{V},{P}}}"
    );
    let header = parse(&json).unwrap();
    assert_eq!(header.metadata.len(), 4);
    assert_eq!(
        header.declared,
        Declared {
            layer: Some(crate::Layer(7)),
            start: Some(crate::TokenStart(1024)),
            sequence: Some("chat".to_owned()),
            ..Declared::default()
        }
    );
}

#[test]
fn bad_prefix_and_padding() {
    fn check(header: &[u8], expected: &str) {
        let error = PageHeader::parse(header, 8192, &geometry(Layout::Hnd, 32)).unwrap_err();
        assert_eq!(error.to_string(), expected);
        assert_eq!(error.reason(), "header");
    }
    let good = padded(&format!("{{{K},{V},{P}}}"));
    let length = |length: u64| [&length.to_le_bytes(), &good[8..]].concat();
    let exceeds =
        |length: u64| format!("header length {length} exceeds the limit 4088: not a kvfs page");
    let pad = |length: u64| {
        format!(
            "header length {length} is not 4088: pad the header with spaces so that the payload \
             starts at byte 4096"
        )
    };
    check(&length(4089), &exceeds(4089));
    check(&length(1 << 40), &exceeds(1_099_511_627_776));
    check(&length(u64::MAX), &exceeds(u64::MAX));
    check(&length(4087), &pad(4087));
    check(&length(0), &pad(0));
    check(&good[..7], "file is 8192 bytes: not a kvfs page");
    check(&[], "file is 8192 bytes: not a kvfs page");
    check(
        &good[..4095],
        "header ends after 4095 of 4096 bytes: the copy or the writer has not finished",
    );
    let object = "header is not a JSON object padded with spaces: not a safetensors file";
    let nul: Vec<u8> = good.iter().rev().skip_while(|byte| **byte == b' ').copied().collect();
    let mut nul: Vec<u8> = nul.into_iter().rev().collect();
    nul.resize(4096, 0);
    check(&nul, "header is padded with NUL bytes: pad it with spaces");
    let mut newline = good.clone();
    newline[4095] = b'\n';
    check(&newline, object);
    let mut not_utf8 = good.clone();
    not_utf8[20] = 0xff;
    check(&not_utf8, "header is not UTF-8: not a safetensors file");
    check(&padded(""), object);
    check(&padded("[]"), object);
    check(&padded(" {}"), object);
    check(&padded("{}x"), object);
    check(
        &padded(&format!("{{{K}")),
        "header cannot be read: EOF while parsing an object at line 1 column 61",
    );
    check(&padded("{}{}"), "header cannot be read: trailing characters at line 1 column 3");
}

#[test]
fn bad_json() {
    fn check(json: &str, expected: &str) {
        let error = parse(json).unwrap_err();
        assert_eq!(error.reason(), "header", "{error}");
        let text = error.to_string();
        assert!(text.contains(expected) && !text.contains('\n'), "{text}");
    }
    check(&format!("{{{K},{K},{V},{P}}}"), "duplicate key \"k\"");
    check(&format!("{{{K},{V},{P},\"\\u006b\":{{}}}}"), "duplicate key \"k\"");
    check(r#"{"k":{"dtype":"F16","dtype":"F16"}}"#, "duplicate key \"dtype\"");
    check(r#"{"__metadata__":{"a\nb":"1","a\nb":"2"}}"#, r#"duplicate key "a\nb""#);
    check(r#"{"__metadata__":{},"__metadata__":{}}"#, "duplicate key \"__metadata__\"");
    check(r#"{"__metadata__":null}"#, "invalid type: null, expected an object");
    check(r#"{"k":[]}"#, "invalid type: sequence, expected an object");
    check(r#"{"k":{"shape":[-1]}}"#, "integer `-1`, expected u64");
    check(r#"{"k":{"shape":[1.5]}}"#, "floating point `1.5`, expected u64");
    check(r#"{"k":{"shape":[18446744073709551616]}}"#, "expected u64");
    check(r#"{"k":{"shape":[[1]]}}"#, "invalid type: sequence, expected u64");
    check(r#"{"k":{"shape":["1"]}}"#, "expected u64");
    check(&format!("{{\"k\":{}1{}}}", "[".repeat(300), "]".repeat(300)), "expected");
    check(
        &format!("{{\"k\":{{\"x\":{{\"y\":{}{}}}}}}}", "[".repeat(300), "]".repeat(300)),
        "tensor k has no shape",
    );
    for value in ["1", "-1", "1.5", "true", "null", "[1]", "{\"x\":1}"] {
        check(
            &format!("{{\"__metadata__\":{{\"a\":{value}}},{K},{V},{P}}}"),
            "header metadata \"a\" is not a string: safetensors allows nothing else",
        );
    }
    check(
        &format!("{{\"__metadata__\":{{\"kvfs.layer\":\"x\"}},{K},{V},{P}}}"),
        "header metadata kvfs.layer is \"x\": must be a decimal number",
    );
}

#[test]
fn malformed_tensor_entries() {
    fn check(k: &str) {
        let text = "tensor k is not described by dtype, shape and data_offsets alone: not a \
                    safetensors file";
        refused(&format!("{{{k},{V},{P}}}"), "header", text);
    }
    check(&K.replace(r#""dtype":"F16","#, ""));
    check(&K.replace(r#","data_offsets":[0,1024]"#, ""));
    check(&K.replace("[0,1024]", "\"0,1024\""));
    check(&K.replace("\"F16\"", "[1]"));
    check(&K.replace("\"F16\"", "null"));
    check(&K.replace("\"F16\"", "\"F16\",\"extra\":\"x\""));
    let no_shape = "tensor k has no shape: not a safetensors file";
    refused(r#"{"k":{"dtype":"F16","data_offsets":[0,1024]}}"#, "header", no_shape);
    refused(r#"{"k":{"shape":"2,4,64"}}"#, "header", no_shape);
    refused(r#"{"k":{}}"#, "header", no_shape);
}

#[test]
fn wrong_tensors_and_shapes() {
    fn check(json: &str, expected: &str) {
        refused(json, "shape", expected);
    }
    let tokens =
        |tokens: u64| format!("page has {tokens} tokens, the manifest allows 1 to 16 (layout hnd)");
    let k_tokens = |tokens: &str| {
        let k = K.replace("[2,4,64]", &format!("[2,{tokens},64]"));
        format!("{{{k},{V},{P}}}")
    };
    check("{}", "tensor k is missing: not a kvfs page");
    check(&format!("{{{V},{P}}}"), "tensor k is missing: not a kvfs page");
    check(&format!("{{{K},{P}}}"), "tensor v is missing: 4 tokens need one of shape [2, 4, 32]");
    check(&format!("{{{K},{V}}}"), "tensor _pad is missing: 4 tokens need one of shape [2560]");
    check(
        &format!("{{{K},{V},{P},\"q\\n\":{{}}}}"),
        "tensor \"q\\n\" is unknown: a page holds k, v, side and _pad",
    );
    check(&k_tokens("0"), &tokens(0));
    check(&k_tokens("17"), &tokens(17));
    check(&k_tokens("18446744073709551615"), &tokens(u64::MAX));
    check(&k_tokens("4294967300"), &tokens(4_294_967_300));
    refused(
        &k_tokens("5"),
        "offsets",
        "tensor k has data_offsets [0, 1024], must have [0, 1280]: k, v, side and _pad follow each \
         other without holes",
    );
}

#[test]
fn wrong_shapes() {
    fn check(shape: &str, expected: &str) {
        refused(&format!("{{{},{V},{P}}}", K.replace("[2,4,64]", shape)), "shape", expected);
    }
    check("[]", "tensor k has 0 dimensions: a page has 3, layout hnd");
    check("[4,64]", "tensor k has 2 dimensions: a page has 3, layout hnd");
    check("[1,2,4,64]", "tensor k has 4 dimensions: a page has 3, layout hnd");
    check("[3,4,64]", "tensor k has shape [3, 4, 64], this cache has [2, 4, 64]");
    check("[2,4,63]", "tensor k has shape [2, 4, 63], this cache has [2, 4, 64]");
    check("[4,2,64]", "tensor k has shape [4, 2, 64], this cache has [2, 2, 64]");
    let long = format!("{{{K},{V},{}}}", P.replace("[2560]", "[1,1,1,1,2560]"));
    refused(&long, "shape", "tensor _pad has shape of 5 numbers, this cache has [2560]");
    let v = format!("{{{K},{},{P}}}", V.replace("4,32", "5,32"));
    refused(&v, "shape", "tensor v has shape [2, 5, 32], this cache has [2, 4, 32]");
    let pad = format!("{{{K},{V},{}}}", P.replace("[2560]", "[6656]"));
    refused(&pad, "shape", "tensor _pad has shape [6656], this cache has [2560]");
}

#[test]
fn wrong_dtypes() {
    fn check(tensor: &str, from: &str, to: &str, expected: &str) {
        let json = format!("{{{K},{V},{P}}}");
        let wrong = tensor.replace(from, to);
        refused(&json.replace(tensor, &wrong), "dtype", expected);
    }
    check(K, "F16", "BF16", "tensor k has dtype \"BF16\", this cache has F16");
    check(V, "F16", "f16", "tensor v has dtype \"f16\", this cache has F16");
    check(P, "U8", "I8", "tensor _pad has dtype \"I8\", this cache has U8");
    check(K, "F16", "\\n", "tensor k has dtype \"\\n\", this cache has F16");
}

#[test]
fn wrong_offsets() {
    fn check(tensor: &str, offsets: &str, expected: &str) {
        let start = tensor.rfind('[').unwrap();
        let wrong = format!("{}{offsets}}}", &tensor[..start]);
        let json = format!("{{{K},{V},{P}}}").replace(tensor, &wrong);
        let text =
            format!("tensor {expected}: k, v, side and _pad follow each other without holes");
        refused(&json, "offsets", &text);
    }
    // A hole, an overlap, the wrong order, overflow, nonsense.
    check(V, "[1025,1537]", "v has data_offsets [1025, 1537], must have [1024, 1536]");
    check(V, "[1023,1535]", "v has data_offsets [1023, 1535], must have [1024, 1536]");
    check(V, "[0,512]", "v has data_offsets [0, 512], must have [1024, 1536]");
    check(K, "[0,1023]", "k has data_offsets [0, 1023], must have [0, 1024]");
    check(K, "[1024,0]", "k has data_offsets [1024, 0], must have [0, 1024]");
    check(K, "[512,1536]", "k has data_offsets [512, 1536], must have [0, 1024]");
    check(P, "[1536,4097]", "_pad has data_offsets [1536, 4097], must have [1536, 4096]");
    check(
        K,
        "[18446744073709551615,1023]",
        "k has data_offsets [18446744073709551615, 1023], must have [0, 1024]",
    );
    check(K, "[]", "k has data_offsets [], must have [0, 1024]");
    check(K, "[0,1024,0]", "k has data_offsets [0, 1024, 0], must have [0, 1024]");
    check(K, "[0,0,0,0,0]", "k has data_offsets of 5 numbers, must have [0, 1024]");
}

#[test]
fn wrong_length_of_the_file() {
    fn check(file_bytes: u64, expected: &str) {
        let header = padded(&format!("{{{K},{V},{P}}}"));
        let error = PageHeader::parse(&header, file_bytes, &geometry(Layout::Hnd, 32));
        let error = error.unwrap_err();
        assert_eq!(error.to_string(), expected);
        assert_eq!(error.reason(), "size");
    }
    let short = |bytes| {
        format!(
            "file is {bytes} bytes, its header describes 8192: the copy or the writer has not \
             finished"
        )
    };
    let long = |bytes| {
        format!(
            "file is {bytes} bytes, its header describes 8192: there are bytes behind the last \
             tensor"
        )
    };
    check(4096, &short(4096));
    check(8191, &short(8191));
    check(8193, &long(8193));
    check(u64::MAX, &long(u64::MAX));
}

#[test]
fn v_and_pad_where_there_must_be_none() {
    fn check(geometry: &Geometry, json: &str, file_bytes: u64, expected: &str) {
        let error = PageHeader::parse(&padded(json), file_bytes, geometry).unwrap_err();
        assert_eq!(error.to_string(), expected);
        assert_eq!(error.reason(), "shape");
    }
    let pad = r#""_pad":{"dtype":"U8","shape":[3072],"data_offsets":[1024,4096]}"#;
    let none = geometry(Layout::Hnd, 0);
    assert!(PageHeader::parse(&padded(&format!("{{{K},{pad}}}")), 8192, &none).is_ok());
    check(
        &none,
        &format!("{{{K},{pad},{V}}}"),
        8192,
        "tensor v is present, the manifest says v_head_dim 0: leave it out",
    );
    let full = r#""k":{"dtype":"F16","shape":[2,16,64],"data_offsets":[0,4096]}"#;
    assert!(PageHeader::parse(&padded(&format!("{{{full}}}")), 8192, &none).is_ok());
    check(
        &none,
        &format!(
            "{{{full},\"_pad\":{{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[4096,4096]}}}}"
        ),
        8192,
        "tensor _pad is present, the others already fill the file: leave it out",
    );
    let nhd = geometry(Layout::Nhd, 0);
    check(
        &nhd,
        &format!("{{{}}}", full.replace("[2,16,64]", "[16,3,64]")),
        8192,
        "tensor k has shape [16, 3, 64], this cache has [16, 2, 64]",
    );
}
