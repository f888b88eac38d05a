//! The PTX that is checked in.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::Command;

use sha2::{Digest, Sha256};

use crate::shim::root;

/// As `source_hash` in `kernels/build.py`.
fn source_hash() -> String {
    let files = std::fs::read_dir(root().join("kernels")).unwrap();
    let is_source = |path: &PathBuf| {
        let extension = path.extension().and_then(|extension| extension.to_str());
        matches!(extension, Some("h" | "cu" | "py"))
    };
    let mut sources: Vec<PathBuf> =
        files.map(|file| file.unwrap().path()).filter(is_source).collect();
    sources.sort();
    let mut digest = Sha256::new();
    for path in sources {
        let (name, bytes) = (path.file_name().unwrap(), std::fs::read(&path).unwrap());
        digest.update(format!("{} {}\n", name.to_str().unwrap(), bytes.len()));
        digest.update(bytes);
    }
    let (hash, mut text) = (digest.finalize(), String::new());
    for byte in hash.as_slice() {
        write!(text, "{byte:02x}").unwrap();
    }
    text
}

#[test]
fn is_of_these_sources() {
    let packed = std::fs::read(root().join("kernels/kernels.ptx.zst")).unwrap();
    let text = String::from_utf8(zstd::decode_all(&*packed).unwrap()).unwrap();
    let first = text.lines().next().unwrap();
    let hash = source_hash();
    assert!(first.contains(&hash), "run kernels/build.py: the sources are {hash}, not `{first}`");
}

/// The compiler makes it from the sources, and the assembler takes it for every chip without
/// spilling registers.
#[test]
fn is_what_the_tools_make() {
    require!(python3, nvrtc, zstd);
    let output =
        Command::new("python3").arg(root().join("kernels/build.py")).arg("--check").output();
    let output = output.unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
}
