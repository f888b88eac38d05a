//! What keeps the house in order and no compiler says: files stay short, types do not grow into everything, and what
//! documents name is there.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// A file is one concept.
const LINES_MAX: usize = 500;
/// Whoever begins here reads all of `ARCHITECTURE.md`.
const ARCHITECTURE_LINES_MAX: usize = 200;
/// A type with more methods does the work of several.
const METHODS_MAX: usize = 60;
/// Types that are larger, and may only shrink.
const TOO_LARGE: [(&str, usize); 1] = [("Metadata", 85)];
/// Crates from the bottom upwards: each may use those before it, and nothing else. The engine's half stands apart, and
/// uses nothing of the daemon's.
const ORDER: [&str; 9] =
    ["os", "page", "encoding", "formats", "remote", "storage", "observe", "fs", "daemon"];
const ENGINE_ORDER: [&str; 5] = ["os", "page", "formats", "runtime", "clib"];
/// Where documents speak of what is in this repository.
const PLACES: [&str; 13] = [
    "src/",
    "crates/",
    "tests/",
    "docs/",
    "dashboards/",
    "kernels/",
    "mount-scripts/",
    "examples/",
    "include/",
    "benches/",
    "python/",
    ".ci/",
    ".config/",
];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Files below the repository with such an ending, whatever cargo makes apart.
fn files(extension: &str) -> Vec<PathBuf> {
    fn walk(directory: &Path, extension: &str, found: &mut Vec<PathBuf>) {
        for entry in std::fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                let is_ours = path != root().join("target") && path != root().join(".git");
                if is_ours {
                    walk(&path, extension, found);
                }
            } else if path.extension().is_some_and(|found| found == extension) {
                found.push(path);
            }
        }
    }
    let mut found = Vec::new();
    walk(root(), extension, &mut found);
    assert!(!found.is_empty(), "no file ends with {extension}");
    found
}

#[test]
fn files_are_short() {
    for path in files("rs") {
        let lines = std::fs::read_to_string(&path).unwrap().lines().count();
        assert!(lines <= LINES_MAX, "{}: {lines} lines, at most {LINES_MAX}", path.display());
    }
    let architecture = std::fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap();
    let lines = architecture.lines().count();
    assert!(lines <= ARCHITECTURE_LINES_MAX, "ARCHITECTURE.md: {lines} lines");
}

#[test]
fn crates_use_each_other_downwards() {
    let mut checked = 0;
    for order in [ORDER.as_slice(), ENGINE_ORDER.as_slice()] {
        for (rank, name) in order.iter().enumerate() {
            let manifest = root().join("crates").join(name).join("Cargo.toml");
            let text = std::fs::read_to_string(manifest).unwrap();
            for line in text.lines().filter_map(|line| line.strip_prefix("kvfs-")) {
                let used = line.split('.').next().unwrap();
                assert!(order[..rank].contains(&used), "{name} uses {used}");
                checked += 1;
            }
        }
    }
    let crates = std::fs::read_dir(root().join("crates")).unwrap();
    for directory in crates {
        let name = directory.unwrap().file_name().into_string().unwrap();
        let is_placed = ORDER.contains(&&*name) || ENGINE_ORDER.contains(&&*name);
        assert!(is_placed, "{name} has no place in the order");
    }
    assert!(checked > 20, "only {checked} uses were found");
}

/// The type that a line begins the methods of.
fn type_of(line: &str) -> Option<&str> {
    let rest = line.strip_prefix("impl")?;
    let rest = match rest.strip_prefix('<') {
        Some(generics) => generics.split_once("> ")?.1,
        None => rest.strip_prefix(' ')?,
    };
    let name = rest.split(['<', ' ']).next()?;
    (rest.ends_with('{') && !rest.contains(" for ")).then_some(name)
}

fn is_method(line: &str) -> bool {
    let Some(line) = line.strip_prefix("    ") else { return false };
    let line = line.strip_prefix("pub ").unwrap_or(line);
    let line = if line.starts_with("pub(") {
        line.split_once(") ").map_or(line, |(_, rest)| rest)
    } else {
        line
    };
    let line = line.strip_prefix("const ").unwrap_or(line);
    line.strip_prefix("unsafe ").unwrap_or(line).starts_with("fn ")
}

#[test]
fn types_do_not_grow_into_everything() {
    let mut methods = BTreeMap::<(PathBuf, String), usize>::new();
    let sources = files("rs").into_iter();
    for path in sources.filter(|path| {
        let path = path.strip_prefix(root()).unwrap();
        path.starts_with("src") || path.starts_with("crates")
    }) {
        let crate_name = path.strip_prefix(root()).unwrap().components().take(2).collect();
        let text = std::fs::read_to_string(&path).unwrap();
        let mut current = None;
        for line in text.lines() {
            if let Some(name) = type_of(line) {
                current = Some((PathBuf::clone(&crate_name), name.to_owned()));
            } else if line.starts_with('}') {
                current = None;
            } else if let Some(current) = current.as_ref().filter(|_| is_method(line)) {
                *methods.entry(current.clone()).or_default() += 1;
            }
        }
    }
    assert!(methods.len() > 300, "only {} types were found", methods.len());
    for ((crate_name, name), count) in methods {
        let known = TOO_LARGE.iter().find(|(known, _)| *known == name);
        let most = known.map_or(METHODS_MAX, |(_, most)| *most);
        let place = crate_name.display();
        assert!(count <= most, "{place}: {name} has {count} methods, at most {most}");
    }
}

/// What stands between single backticks, outside of blocks of code, and what links point to.
fn named_in(document: &str) -> Vec<&str> {
    let mut is_code = false;
    let mut named = Vec::new();
    for line in document.lines() {
        if line.trim_start().starts_with("```") {
            is_code = !is_code;
        } else if !is_code {
            named.extend(line.split('`').skip(1).step_by(2));
            let links = line.split("](").skip(1).filter_map(|rest| rest.split(')').next());
            named.extend(links.filter(|link| !link.contains(':') && !link.starts_with('#')));
        }
    }
    named
}

#[test]
fn what_documents_name_is_there() {
    let mut checked = 0;
    for document in files("md") {
        let name = document.strip_prefix(root()).unwrap();
        // A changelog tells of what was, a fixture of what others have.
        if name == Path::new("CHANGELOG.md") || name.starts_with("tests/fixtures") {
            continue;
        }
        let text = std::fs::read_to_string(&document).unwrap();
        for named in named_in(&text) {
            let path = named.split(['#', ' ', ':']).next().unwrap();
            let is_pattern = path.contains(['*', '<', '{', '$']) || path.contains("...");
            let from = if PLACES.iter().any(|place| path.starts_with(place)) {
                root()
            } else if Path::new(path).extension().is_some_and(|found| found == "md") {
                document.parent().unwrap()
            } else {
                continue;
            };
            // What a build makes is named as well.
            if !is_pattern {
                let is_there = from.join(path).exists() || root().join(path).exists();
                assert!(is_there, "{}: {path} is not there", name.display());
                checked += 1;
            }
        }
    }
    assert!(checked > 100, "only {checked} references were found");
}

/// What a call of a macro or method has in its parentheses, wherever a source calls it.
fn calls<'a>(source: &'a str, name: &str) -> Vec<&'a str> {
    let mut found = Vec::new();
    for (at, _) in source.match_indices(name) {
        let arguments = &source[at + name.len()..];
        let (mut depth, mut is_text, mut is_escaped) = (1, false, false);
        let end = arguments.find(|letter| {
            match letter {
                _ if is_escaped => is_escaped = false,
                '\\' if is_text => is_escaped = true,
                '"' => is_text = !is_text,
                '(' if !is_text => depth += 1,
                ')' if !is_text => depth -= 1,
                _ => {}
            }
            depth == 0
        });
        found.push(&arguments[..end.unwrap_or(arguments.len())]);
    }
    found
}

/// Who reads a log knows no type of this program: a name in quotes is escaped by whoever shows it, and all else has words.
#[test]
fn logs_show_no_value_as_debug_does() {
    const TOLD: [&str; 7] = [
        "log::error!(",
        "log::warn!(",
        "log::info!(",
        "observer.failed(",
        "observer.corrupt(",
        "note_failure(",
        "note_failure_of_all(",
    ];
    let mut seen = 0;
    for path in files("rs") {
        let is_source = path.strip_prefix(root()).is_ok_and(|path| {
            path.starts_with("src") || path.components().any(|part| part.as_os_str() == "src")
        });
        if !is_source {
            continue;
        }
        let source = std::fs::read_to_string(&path).unwrap();
        for call in TOLD.iter().flat_map(|name| calls(&source, name)) {
            seen += 1;
            assert!(!call.contains(":?}") && !call.contains(":#?}"), "{}: {call}", path.display());
        }
    }
    assert!(seen > 100, "only {seen} calls were found");
}

#[test]
fn a_call_ends_with_its_own_parenthesis() {
    let source = r#"log::info!("a \" ) {}", of(1)); log::info!("{b:?}")"#;
    assert_eq!(calls(source, "log::info!("), [r#""a \" ) {}", of(1)"#, r#""{b:?}""#]);
}

/// A word of treaties, which says neither who does something nor whether it is done. Put together, for this file is
/// looked through as well.
const TREATY_WORD: &str = concat!("sh", "all");
/// What users read says these in plain words, or with the term of the field.
const PHRASES: [(&str, &str); 7] = [
    ("longest beginning", "longest prefix"),
    ("nobody refers to", "unreferenced"),
    ("at rest", "closed by its last writer"),
    ("come to rest", "is closed by its last writer"),
    ("comes to rest", "is closed by its last writer"),
    ("came to rest", "was closed by its last writer"),
    ("coming to rest", "is closed by its last writer"),
];
/// What people read in files with these endings are documents, comments and messages.
const TEXTS: [&str; 11] = ["md", "rs", "py", "pyi", "sh", "c", "h", "cpp", "cu", "toml", "service"];
/// The glossary explains the first of its words by what it means, and the second by the first.
const GLOSSARY: [&str; 2] = ["| at rest |", "| settled |"];

/// The words of a text with a space on both sides of each, as phrases run over the ends of lines.
fn running(text: &str) -> String {
    let lines = text.lines().filter(|line| !GLOSSARY.iter().any(|row| line.starts_with(row)));
    let is_between = |character: char| !character.is_alphanumeric() && character != '_';
    let words = lines.flat_map(|line| line.split(is_between)).filter(|word| !word.is_empty());
    format!(" {} ", words.collect::<Vec<_>>().join(" ").to_lowercase())
}

/// Whether a running text has a word or a phrase.
fn says(text: &str, phrase: &str) -> bool {
    text.contains(&format!(" {phrase} "))
}

/// Documents that users need not read.
const OF_DEVELOPERS: [&str; 4] =
    ["ARCHITECTURE.md", "CHANGELOG.md", "docs/internals", "docs/measurements.md"];

/// Whether users read a file: a document, the help of a command or of Python's calls.
fn is_for_users(name: &Path) -> bool {
    let is_document = name.extension().is_some_and(|found| found == "md");
    let is_of_developers = OF_DEVELOPERS.iter().any(|developers| name.starts_with(developers));
    (is_document && !is_of_developers) || name.starts_with("src/cli") || name.starts_with("python")
}

#[test]
fn words_are_plain() {
    let mut checked = [0; 2];
    for path in TEXTS.into_iter().flat_map(files) {
        let name = path.strip_prefix(root()).unwrap();
        if name.starts_with("tests/fixtures") {
            continue;
        }
        let text = running(&std::fs::read_to_string(&path).unwrap());
        assert!(!says(&text, TREATY_WORD), "{}: {TREATY_WORD:?}", name.display());
        checked[0] += 1;
        if is_for_users(name) {
            for (phrase, plain) in PHRASES {
                assert!(!says(&text, phrase), "{}: {phrase:?}, say {plain:?}", name.display());
            }
            checked[1] += 1;
        }
    }
    assert!(checked[0] > 800 && checked[1] > 100, "only {checked:?} files were looked through");
    let text =
        running("/// What nobody\n    /// refers to: `is_at_rest`.\n| at rest | not open |\n");
    assert_eq!(text, " what nobody refers to is_at_rest ");
    assert!(says(&text, "nobody refers to") && !says(&text, "at rest"));
}
