//! `include/kvfs.h` is what `crates/clib/src/c/` says.

use std::path::Path;

/// In the order in which a reader of C needs them.
const SOURCES: [&str; 15] = [
    "status",
    "attention",
    "block",
    "options",
    "partials",
    "cuda",
    "rotation",
    "manifest",
    "page",
    "sequence",
    "scan",
    "summaries",
    "write_back",
    "batch",
    "hint",
];

fn generate() -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let config = cbindgen::Config::from_file(root.join("cbindgen.toml")).unwrap();
    let mut builder = cbindgen::Builder::new().with_config(config);
    for name in SOURCES {
        builder = builder.with_src(root.join("crates/clib/src/c").join(name).with_extension("rs"));
    }
    let mut header = Vec::new();
    builder.generate().unwrap().write(&mut header);
    String::from_utf8(header).unwrap()
}

#[test]
fn covers_all_sources() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("crates/clib/src/c");
    for file in std::fs::read_dir(directory).unwrap() {
        let path = file.unwrap().path();
        let exports =
            path.is_file() && std::fs::read_to_string(&path).unwrap().contains("no_mangle");
        let stem = path.file_stem().unwrap().to_str().unwrap();
        assert!(!exports || SOURCES.contains(&stem), "{} is not in the header", path.display());
    }
}

/// With `KVFS_BLESS=1` it writes the file instead.
#[test]
fn is_up_to_date() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("include/kvfs.h");
    let generated = generate();
    if std::env::var_os("KVFS_BLESS").is_some() {
        std::fs::write(&path, &generated).unwrap();
    }
    let current = std::fs::read_to_string(&path).unwrap();
    assert!(current == generated, "include/kvfs.h is old: run this test with KVFS_BLESS=1");
}
