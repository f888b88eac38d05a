//! The PTX that is checked in.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::Command;

use sha2::{Digest, Sha256};

use crate::library::root;

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
    // What the assembler said of it, of every kernel.
    let resources = std::fs::read_to_string(root().join("kernels/resources.txt")).unwrap();
    let mut lines = resources.lines();
    let first = lines.next().unwrap();
    assert!(first.contains(&hash), "run kernels/build.py: the sources are {hash}, not `{first}`");
    assert_eq!(lines.next(), Some("module kernel sm_52 sm_61 sm_75 sm_80 sm_90a shared"));
    let mut told: Vec<String> = Vec::new();
    for line in lines {
        let words: Vec<&str> = line.split(' ').collect();
        let numbers = words[2..].iter().map(|word| word.parse().unwrap());
        let numbers: Vec<u32> = numbers.collect();
        assert!(numbers.len() == 6 && numbers[..5].iter().all(|registers| *registers <= 255));
        assert!(numbers[5] <= 48 << 10, "{line}");
        told.push(words[..2].join(" "));
    }
    let mut module = "";
    let mut kernels: Vec<String> = Vec::new();
    for line in text.lines() {
        if let Some(name) = line.strip_prefix("// module ") {
            module = name;
        } else if let Some(rest) = line.split(".entry ").nth(1) {
            kernels.push(format!("{module} {}", rest.trim_end_matches('(')));
        }
    }
    kernels.sort();
    told.sort();
    assert_eq!(told, kernels);
}

/// The compiler makes it from the sources, and the assembler takes it for every chip without
/// spilling registers, as it says of all modules in the table.
#[test]
fn is_what_the_tools_make() {
    require!(python3, nvrtc, zstd);
    let output =
        Command::new("python3").arg(root().join("kernels/build.py")).arg("--check").output();
    let output = output.unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
}
