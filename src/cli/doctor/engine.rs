//! Whether an engine can keep its KV cache in a mount.
//!
//! Nothing of the engine is run or loaded: its libraries are looked at, and what /proc says of a process.
//! What only the loaded library can prove is in the line that it writes to the engine's standard error.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use kvfs_os::mountinfo;
use nix::unistd::{AccessFlags, access};

use super::Findings;
use crate::cli::output::Failure;

/// The oldest ggml that the backend works with.
const OLDEST: [u32; 3] = [0, 9, 7];
/// What a program's libraries are called.
const BASE: &str = "libggml-base.";
const CPU: &str = "libggml-cpu";
/// Where programs have their libraries, from their own directory on.
const PLACES: [&str; 4] = [".", "../lib", "../lib/ollama", "lib/ollama"];

/// Looks at a program, a running one, or a directory of libraries.
pub(super) fn look(findings: &mut Findings, engine: &Path) -> Result<(), Failure> {
    let number = engine.to_str().and_then(|text| text.parse::<u32>().ok());
    if let Some(number) = number.filter(|_| !engine.exists()) {
        return look_at_process(findings, number);
    }
    let libraries = if engine.is_dir() {
        libraries_in(engine)
    } else {
        let program = engine.canonicalize();
        let program =
            program.map_err(|error| Failure::Failed(format!("{}: {error}", engine.display())))?;
        let directory = program.parent().unwrap_or(Path::new("/"));
        let found = PLACES.iter().map(|place| libraries_in(&directory.join(place)));
        let found = found.max_by_key(|libraries| libraries.iter().any(|path| is(path, BASE)));
        found.unwrap_or_default()
    };
    look_at_libraries(findings, &libraries);
    look_at_variables(findings, &std::env::vars().collect());
    Ok(())
}

fn is(path: &Path, prefix: &str) -> bool {
    path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(prefix))
}

fn libraries_in(directory: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).collect()
}

/// Backends as libraries, and which ggml.
fn look_at_libraries(findings: &mut Findings, libraries: &[PathBuf]) {
    let base = libraries.iter().find(|path| is(path, BASE));
    let cpu = libraries.iter().find(|path| is(path, CPU));
    let (Some(base), Some(_)) = (base, cpu) else {
        let what = if base.is_some() { CPU } else { "libggml-base" };
        findings.bad(
            &format!("there is no {what}, so the engine's backends are built in, or lie elsewhere"),
            "use a build with GGML_BACKEND_DL=ON, as llama.cpp's releases for Linux are, or name \
             the directory of its libraries",
        );
        return;
    };
    findings.good(&format!("its backends are libraries: {}", base.display()));
    match fs::read(base).ok().and_then(|bytes| version(&bytes)) {
        Some((number, text)) if number < OLDEST => {
            findings.bad(&format!("ggml {text}"), "use a build since ggml 0.9.7");
        }
        Some((_, text)) => findings.good(&format!("ggml {text}, which the library tries at load")),
        None => findings.good("a ggml whose version the library finds out at load"),
    }
}

/// The version in a library: the only text in it that is three numbers.
fn version(bytes: &[u8]) -> Option<([u32; 3], String)> {
    let texts = bytes.split(|byte| *byte == 0).filter(|text| (5..12).contains(&text.len()));
    texts.filter_map(|text| std::str::from_utf8(text).ok()).find_map(|text| {
        let numbers: Option<Vec<u32>> = text.split('.').map(|part| part.parse().ok()).collect();
        Some((numbers?.try_into().ok()?, text.to_owned()))
    })
}

/// The variables that turn the backend on.
fn look_at_variables(findings: &mut Findings, variables: &BTreeMap<String, String>) {
    let value = |name| variables.get(name).filter(|value| !value.is_empty());
    match value("GGML_BACKEND_PATH") {
        None => findings.bad("GGML_BACKEND_PATH is not set", "set it to the path of libkvfs.so"),
        Some(path) => match access(Path::new(path), AccessFlags::R_OK) {
            Ok(()) => findings.good(&format!("GGML_BACKEND_PATH={path}")),
            Err(error) => findings.bad(
                &format!("GGML_BACKEND_PATH={path}: {}", error.desc()),
                "name a libkvfs.so that can be read (mount-scripts/build-c-library.sh makes it)",
            ),
        },
    }
    let Some(cache) = value("KVFS_KV") else {
        findings.bad("KVFS_KV is not set", "set it to a mountpoint of kvfs");
        return;
    };
    match (mountinfo::kvfs_above(Path::new(cache)), access(Path::new(cache), AccessFlags::W_OK)) {
        (Ok(_), Ok(())) => findings.good(&format!("KVFS_KV={cache}, in a mount")),
        (Ok(_), Err(error)) => findings.bad(
            &format!("KVFS_KV={cache}: {}", error.desc()),
            "let its user write there, or mount the store again",
        ),
        (Err(_), _) => {
            findings
                .bad(&format!("KVFS_KV={cache} is not in a mount"), "kvfs mount STORE DIRECTORY");
        }
    }
}

/// A process: its libraries, variables, arguments, and whether a cache is mapped.
fn look_at_process(findings: &mut Findings, number: u32) -> Result<(), Failure> {
    let read = |name: &str| {
        let path = PathBuf::from(format!("/proc/{number}/{name}"));
        fs::read(&path).map_err(|error| Failure::Failed(format!("process {number}: {error}")))
    };
    let words = |bytes: &[u8]| -> Vec<String> {
        let words = bytes.split(|byte| *byte == 0).filter(|word| !word.is_empty());
        words.map(|word| String::from_utf8_lossy(word).into_owned()).collect()
    };
    let maps = String::from_utf8_lossy(&read("maps")?).into_owned();
    let files = maps.lines().filter_map(|line| line.find('/').map(|at| PathBuf::from(&line[at..])));
    let files: Vec<PathBuf> = files.collect();
    look_at_libraries(findings, &files);
    let variables = words(&read("environ")?);
    let pairs = variables.iter().filter_map(|pair| pair.split_once('='));
    let variables = pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
    look_at_variables(findings, &variables);
    look_at_arguments(findings, &words(&read("cmdline")?), &variables);
    if files.iter().any(|path| is(path, "cache_k_l")) {
        findings.good("its KV cache is in the mount");
    } else if files.iter().any(|path| is(path, "libkvfs")) {
        findings.bad(
            "it has loaded the library, but no KV cache is in the mount",
            "its standard error has a line that starts with kvfs:",
        );
    } else {
        findings.bad("it has not loaded the library", "start it again with the variables above");
    }
    Ok(())
}

/// What turns attention in kvfs off, or keeps slots apart.
fn look_at_arguments(
    findings: &mut Findings, words: &[String], variables: &BTreeMap<String, String>,
) {
    let given = |names: &[&str], variable: &str| {
        let at = words.iter().position(|word| names.contains(&word.as_str()));
        let value = at.and_then(|at| words.get(at + 1)).or_else(|| variables.get(variable));
        value.map(String::as_str)
    };
    match given(&["-fa", "--flash-attn"], "LLAMA_ARG_FLASH_ATTN") {
        Some("off" | "0" | "disabled") => {
            findings.bad("flash attention is off", "--flash-attn on, or auto");
        }
        _ => findings.good("flash attention is not turned off"),
    }
    let types = [("-ctk", "--cache-type-k", "K"), ("-ctv", "--cache-type-v", "V")];
    let [k, v] = types.map(|(short, long, letter)| {
        given(&[short, long], &format!("LLAMA_ARG_CACHE_TYPE_{letter}")).unwrap_or("f16")
    });
    if k != v {
        findings.bad(&format!("K is of {k} and V of {v}"), "give -ctk and -ctv the same type");
    }
    if words.iter().any(|word| word == "-no-kvu" || word == "--no-kv-unified") {
        findings.bad("slots are kept apart (-no-kvu)", "leave it out to save and restore them");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_among_other_texts() {
        let found = version(b"ELF\x001.2\x00a.b.c\x000.25.1\x00");
        assert_eq!(found, Some(([0, 25, 1], "0.25.1".to_owned())));
        assert_eq!(version(b"1.2.3.4\x00"), None);
    }

    #[test]
    fn what_arguments_turn_off() {
        let said = |line: &str| {
            let words: Vec<String> = line.split(' ').map(str::to_owned).collect();
            let mut findings = Findings::default();
            look_at_arguments(&mut findings, &words, &BTreeMap::new());
            (findings.is_ill(), findings.text())
        };
        assert!(!said("llama-server -m model -fa on -ctk q8_0 -ctv q8_0").0);
        for (line, expected) in [
            ("llama-server --flash-attn off", "flash attention is off"),
            ("llama-server -ctk q8_0", "K is of q8_0 and V of f16"),
            ("llama-server -np 4 -no-kvu", "slots are kept apart"),
        ] {
            let (is_ill, text) = said(line);
            assert!(is_ill && text.contains(expected), "{text}");
        }
    }
}
