//! Two sequences: their tokens, and the files of their layers.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use super::pages::Relation;
use super::{Found, Verdict, add_both, explain};
use crate::cli::inspect::{is_away, manifest_above};
use crate::cli::output::Failure;
use crate::cli::page_values::{Away, PageValues};
use crate::cli::summary::Summary;
use crate::page::Layer;
use crate::page::names::{LayerEntry, POSITIONS, TOKENS, format_layer, layer_entry, parse_layer};
use crate::sys;

/// Names of files that differ, for people; JSON has them all.
const NAMES_SHOWN: usize = 10;

/// What a file of a layer is to the one of the same name in the other sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Likeness {
    /// Stored once.
    Shared,
    Identical,
    Rounded,
    Different,
    OnlyA,
    OnlyB,
    NotCompared,
}

impl Likeness {
    const ALL: [Likeness; 7] = [
        Likeness::Shared,
        Likeness::Identical,
        Likeness::Rounded,
        Likeness::Different,
        Likeness::OnlyA,
        Likeness::OnlyB,
        Likeness::NotCompared,
    ];

    fn name(self) -> &'static str {
        match self {
            Likeness::Shared => "shared",
            Likeness::Identical => "identical",
            Likeness::Rounded => "rounded",
            Likeness::Different => "different",
            Likeness::OnlyA => "only_a",
            Likeness::OnlyB => "only_b",
            Likeness::NotCompared => "not_compared",
        }
    }

    fn in_words(self) -> &'static str {
        match self {
            Likeness::OnlyA => "only in a",
            Likeness::OnlyB => "only in b",
            Likeness::NotCompared => "not compared",
            other => other.name(),
        }
    }

    fn verdict(self) -> Verdict {
        match self {
            Likeness::Shared | Likeness::Identical => Verdict::Equal,
            Likeness::NotCompared => Verdict::Unknown,
            Likeness::Rounded | Likeness::Different | Likeness::OnlyA | Likeness::OnlyB => {
                Verdict::Different
            }
        }
    }
}

type OfKind = fn(LayerEntry) -> bool;

/// What two sequences are to each other.
#[derive(Debug, Default)]
pub(super) struct Comparison {
    /// Tokens of both, and of the beginning that is the same.
    tokens: [u64; 3],
    has_same_positions: bool,
    /// Pages, tails and states, by their name below the sequence.
    files: BTreeMap<PathBuf, (LayerEntry, Likeness)>,
    /// Why the first file that could not be compared was not.
    why_not: Option<String>,
}

/// The layers of a sequence, with their directories.
pub(super) fn layers(sequence: &Path) -> io::Result<BTreeMap<Layer, PathBuf>> {
    let mut layers = BTreeMap::new();
    for entry in sequence.read_dir()? {
        let entry = entry?;
        if let Some(layer) = parse_layer(entry.file_name().as_bytes())
            && entry.file_type()?.is_dir()
        {
            layers.insert(layer, entry.path());
        }
    }
    Ok(layers)
}

/// Pages, tails and states of a sequence by their name below it. A tail without rows says nothing, so it counts as
/// absent.
fn files(sequence: &Path) -> Result<BTreeMap<PathBuf, LayerEntry>, Failure> {
    let mut files = BTreeMap::new();
    for (layer, directory) in layers(sequence).map_err(|error| explain(sequence, error))? {
        for entry in directory.read_dir().map_err(|error| explain(&directory, error))? {
            let entry = entry.map_err(|error| explain(&directory, error))?;
            let name = entry.file_name();
            match layer_entry(name.as_bytes()) {
                LayerEntry::Staging | LayerEntry::Other => {}
                LayerEntry::Tail(_) if entry.metadata().is_ok_and(|tail| tail.len() == 0) => {}
                kept => {
                    files.insert(Path::new(&format_layer(layer)).join(name), kept);
                }
            }
        }
    }
    Ok(files)
}

impl Comparison {
    pub(super) fn of(a: &Path, b: &Path, away: Away) -> Result<Comparison, Failure> {
        let mut comparison = Comparison {
            tokens: tokens(a, b)?,
            has_same_positions: content(&a.join(POSITIONS))? == content(&b.join(POSITIONS))?,
            ..Comparison::default()
        };
        let is_one_cache = is_one_cache(a, b);
        let (of_a, of_b) = (files(a)?, files(b)?);
        let names: BTreeSet<_> = of_a.keys().chain(of_b.keys()).collect();
        for name in names {
            let (entry, likeness) = match (of_a.get(name), of_b.get(name)) {
                (Some(entry), Some(_)) => {
                    let pair =
                        Pair { a: a.join(name), b: b.join(name), entry: *entry, is_one_cache };
                    let likeness = pair.likeness(away).unwrap_or_else(|failure| {
                        let why = failure.line().to_owned();
                        comparison.why_not.get_or_insert(why);
                        Likeness::NotCompared
                    });
                    (entry, likeness)
                }
                (Some(entry), None) => (entry, Likeness::OnlyA),
                (None, Some(entry)) => (entry, Likeness::OnlyB),
                (None, None) => continue,
            };
            comparison.files.insert(name.clone(), (*entry, likeness));
        }
        Ok(comparison)
    }

    pub(super) fn verdict(&self) -> Verdict {
        let [a, b, common] = self.tokens;
        let rest = Verdict::of(a == common && b == common && self.has_same_positions);
        let files = self.files.values().map(|(_, likeness)| likeness.verdict());
        files.fold(rest, Verdict::max)
    }

    /// How many of each likeness there are among the files of a kind.
    fn count(&self, is_of_kind: OfKind) -> [(Likeness, u64); Likeness::ALL.len()] {
        let mut counts = Likeness::ALL.map(|likeness| (likeness, 0));
        for (entry, likeness) in self.files.values() {
            if is_of_kind(*entry) {
                counts[*likeness as usize].1 += 1;
            }
        }
        counts
    }

    pub(super) fn to_summary(&self) -> Summary {
        let mut summary = Summary::default();
        let [a, b, common] = self.tokens;
        add_both(&mut summary, "tokens", [json!(a), json!(b)]);
        summary.add("common_tokens", common);
        if !self.has_same_positions {
            summary.add("positions", "differ");
        }
        let kinds: [(_, OfKind); 3] = [
            ("pages", |entry| matches!(entry, LayerEntry::Page(_))),
            ("tails", |entry| matches!(entry, LayerEntry::Tail(_))),
            ("states", |entry| matches!(entry, LayerEntry::State(_))),
        ];
        for (name, is_of_kind) in kinds {
            let counts = self.count(is_of_kind);
            if name == "pages" || counts.iter().any(|(_, count)| *count > 0) {
                let object = counts.iter().map(|(is, count)| (is.name().to_owned(), json!(count)));
                let object = Value::Object(object.collect::<Map<_, _>>());
                summary.add_with_text(name, object, in_words(&counts));
            }
        }
        if let Some(why) = &self.why_not {
            summary.add("not_compared_because", why.clone());
        }
        let others = self.files.iter().filter(|(_, (_, is))| is.verdict() != Verdict::Equal);
        let others: Vec<_> =
            others.map(|(name, (_, is))| (name.display().to_string(), is.name())).collect();
        if !others.is_empty() {
            let text = first_of(&others);
            let all = others.into_iter().map(|(name, is)| (name, json!(is)));
            summary.add_with_text("files", Value::Object(all.collect::<Map<_, _>>()), text);
        }
        summary
    }
}

/// The first files that differ, for people.
fn first_of(others: &[(String, &str)]) -> String {
    let first = others.iter().take(NAMES_SHOWN).map(|(name, is)| format!("{name} {is}"));
    let mut words: Vec<_> = first.collect();
    if others.len() > NAMES_SHOWN {
        words.push(format!("and {} more", others.len() - NAMES_SHOWN));
    }
    words.join(", ")
}

fn in_words(counts: &[(Likeness, u64)]) -> String {
    let some = counts.iter().filter(|(_, count)| *count > 0);
    let words: Vec<_> = some.map(|(is, count)| format!("{count} {}", is.in_words())).collect();
    if words.is_empty() { "none".to_owned() } else { words.join(", ") }
}

/// Two files of one name.
struct Pair {
    a: PathBuf,
    b: PathBuf,
    entry: LayerEntry,
    /// Whether checksums of both are bound to the same model.
    is_one_cache: bool,
}

impl Pair {
    fn likeness(&self, away: Away) -> Result<Likeness, Failure> {
        let [place_a, place_b] = [place(&self.a)?, place(&self.b)?];
        if place_a == place_b {
            return Ok(Likeness::Shared);
        }
        let is_sealed = !matches!(self.entry, LayerEntry::Tail(_));
        let [checksum_a, checksum_b] = [checksum(&self.a), checksum(&self.b)];
        if is_sealed && checksum_a.is_some() && checksum_a == checksum_b {
            return Ok(Likeness::Identical);
        }
        if away == Away::Refuse
            && let Some(path) = [&self.a, &self.b].into_iter().find(|path| is_away(path))
        {
            if is_sealed && self.is_one_cache && checksum_a.is_some() && checksum_b.is_some() {
                return Ok(Likeness::Different);
            }
            let why = "its bytes are not here as they are read: --fetch brings them";
            return Err(explain(path, why));
        }
        if let LayerEntry::Page(_) = self.entry {
            let [a, b] = [PageValues::read(&self.a, away)?, PageValues::read(&self.b, away)?];
            return Ok(match Relation::of(&a, &b) {
                Relation::Identical => Likeness::Identical,
                Relation::Rounded(_) | Relation::RoundedFirst(_) => Likeness::Rounded,
                Relation::OtherSide | Relation::Different => Likeness::Different,
            });
        }
        let is_same = content(&self.a)? == content(&self.b)?;
        Ok(if is_same { Likeness::Identical } else { Likeness::Different })
    }
}

/// What is the same for names of one file only.
fn place(path: &Path) -> Result<(u64, u64), Failure> {
    let metadata = sys::metadata_no_follow(path).map_err(|error| explain(path, error))?;
    Ok((metadata.dev(), metadata.ino()))
}

/// What a mount has on record; a copy of a page has nothing.
fn checksum(path: &Path) -> Option<Vec<u8>> {
    sys::extended_attribute(path, c"user.kvfs.checksum").ok().flatten()
}

fn is_one_cache(a: &Path, b: &Path) -> bool {
    let identity = |sequence: &Path| {
        let absolute = std::path::absolute(sequence).ok()?;
        manifest_above(&absolute).map(|(_, manifest)| manifest.identity())
    };
    identity(a).is_some_and(|identity_a| identity(b) == Some(identity_a))
}

/// The bytes of a file; nothing where there is none.
fn content(path: &Path) -> Result<Vec<u8>, Failure> {
    match sys::read_no_follow(path, u64::MAX) {
        Ok(bytes) => Ok(bytes),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(explain(path, error)),
    }
}

/// Tokens of both, and of the beginning that is the same.
fn tokens(a: &Path, b: &Path) -> Result<[u64; 3], Failure> {
    let (a, b) = (content(&a.join(TOKENS))?, content(&b.join(TOKENS))?);
    let [(ids_a, _), (ids_b, _)] = [a.as_chunks::<4>(), b.as_chunks::<4>()];
    let common = ids_a.iter().zip(ids_b).take_while(|(a, b)| a == b).count();
    Ok([ids_a.len(), ids_b.len(), common].map(|count| count as u64))
}

pub(super) fn compare(a: &Path, b: &Path, away: Away) -> Result<Found, Failure> {
    let comparison = Comparison::of(a, b, away)?;
    let summary = comparison.to_summary();
    Ok(Found { verdict: comparison.verdict(), summary, table: String::new() })
}
