//! Names: of pages in a directory, of objects in a remote and in a store, and of places.
//!
//! What is taken for a name must be spelled so when it is written, or one thing had two names.

use kvfs::page::names;
use kvfs::store::disk::DiskPath;
use kvfs::tier::remote::{RemoteName, RemoteSpec};

use super::engine::{Outcome, Target};

pub(crate) fn target() -> Target {
    let hash = "0123456789abcdef".repeat(4);
    let seeds = [
        "0001024.safetensors".to_owned(),
        "0002048.tail".to_owned(),
        "state-0000512.safetensors".to_owned(),
        "012".to_owned(),
        ".x.tmp".to_owned(),
        format!("blobs/01/{hash}.shuf.zst"),
        format!("chunks/01/{hash}"),
        format!("names/{}/{}", &hash[..32], &hash[..16]),
        "KVFS-REMOTE".to_owned(),
        "0000000100000002".to_owned(),
        "0000000100000002.z".to_owned(),
        "0000000100000002.in".to_owned(),
        "scratch-12".to_owned(),
        "s3://bucket/some/prefix".to_owned(),
        "/mnt/share".to_owned(),
    ];
    Target {
        name: "text",
        length_max: 300,
        seeds: seeds.into_iter().map(String::into_bytes).collect(),
        words: &[
            b"..",
            b"/",
            b".safetensors",
            b".tail",
            b".tmp",
            b".z",
            b"s3://",
            b"\0",
            b"+",
            b"-",
        ],
        allocation_max: 64 << 10,
        run: Box::new(|input| {
            let mut known = vec![in_a_layer(input)];
            if let Ok(text) = std::str::from_utf8(input) {
                known.extend([in_a_remote(text), in_a_store(text), a_place(text)]);
            }
            if known.iter().any(Option::is_some) {
                Outcome::accepted(known)
            } else {
                Outcome::refused(&"no name of anything")
            }
        }),
    }
}

fn in_a_layer(name: &[u8]) -> Option<&'static str> {
    let check = |kind, spelled: Option<String>| {
        let spelled = spelled?;
        assert_eq!(spelled.as_bytes(), name);
        Some(kind)
    };
    check("page", names::parse_page(name).map(names::format_page))
        .or_else(|| check("tail", names::parse_tail(name).map(names::format_tail)))
        .or_else(|| check("state", names::parse_state(name).map(names::format_state)))
        .or_else(|| check("layer", names::parse_layer(name).map(names::format_layer)))
}

fn in_a_remote(text: &str) -> Option<&'static str> {
    let name: RemoteName = text.parse().ok()?;
    assert_eq!(name.to_string(), text);
    assert!(!text.contains("..") && !text.starts_with('/'));
    Some("remote")
}

/// Nothing that a directory of the store may hold leads out of it.
fn in_a_store(text: &str) -> Option<&'static str> {
    let found = DiskPath::staged(text).into_iter().chain(DiskPath::stored(text));
    let paths: Vec<_> = found.map(|path| path.relative()).collect();
    for path in &paths {
        assert!(path.components().all(|part| matches!(part, std::path::Component::Normal(_))));
    }
    (!paths.is_empty()).then_some("store")
}

fn a_place(text: &str) -> Option<&'static str> {
    let spec: RemoteSpec = text.parse().ok()?;
    assert_eq!(spec.to_string().parse(), Ok(spec));
    Some("place")
}
