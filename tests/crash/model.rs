//! What should be there: the tree after each step, and the bytes that each file had when.
//!
//! After a crash the store may be as it was after any step from the last one that was acknowledged
//! as durable to the one that was running; nothing in between, and no mixture of two. Only bytes that
//! were written in place since then may be of any of the versions since then.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// The bytes behind a name; hard links share them, a truncating writer makes new ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ObjectKey(pub(crate) usize);

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum What<Bytes> {
    Directory,
    Symlink(String),
    File(Bytes),
}

/// One name, with what can be seen of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Named<Bytes> {
    pub(crate) what: What<Bytes>,
    pub(crate) mode: u16,
    pub(crate) attributes: BTreeMap<Vec<u8>, Vec<u8>>,
}

/// By path from the mount's root.
pub(crate) type Tree = BTreeMap<String, Named<ObjectKey>>;

/// What a walk finds.
pub(crate) type Seen = BTreeMap<String, Named<Vec<u8>>>;

/// The first block of a page file.
const HEADER_BYTES: usize = 4096;

/// How the versions of some bytes go together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Changes {
    /// One version or the other.
    AsAWhole,
    /// In place: after a crash each byte may be of any version.
    InPlace,
    /// As in place, but the first block tells of the bytes behind it: a recovery makes a page of the
    /// rows that a cut has left.
    OfRows,
    /// A page was rounded, and the failing disk did not let it be read.
    Unknown,
}

#[derive(Clone, Debug)]
struct Object {
    changes: Changes,
    /// From which version of the tree on.
    versions: Vec<(usize, Arc<Vec<u8>>)>,
}

/// All versions.
#[derive(Clone, Debug)]
pub(crate) struct History {
    trees: Vec<Tree>,
    objects: Vec<Object>,
    /// Paths of which a failed operation left nobody knows what, and what their files may be.
    uncertain: BTreeMap<String, Vec<Arc<Vec<u8>>>>,
}

impl History {
    pub(crate) fn new() -> History {
        let directory = Named { what: What::Directory, mode: 0o755, attributes: BTreeMap::new() };
        let tree = ["files", "models"].map(|name| (name.to_owned(), directory.clone()));
        let uncertain = BTreeMap::new();
        History { trees: vec![BTreeMap::from(tree)], objects: Vec::new(), uncertain }
    }

    /// Number of the newest version.
    pub(crate) fn newest(&self) -> usize {
        self.trees.len() - 1
    }

    pub(crate) fn tree(&self) -> &Tree {
        self.trees.last().unwrap()
    }

    pub(crate) fn begin(&mut self, tree: Tree) {
        self.trees.push(tree);
    }

    /// Bytes of the version that comes next.
    pub(crate) fn add_object(&mut self, changes: Changes, bytes: Vec<u8>) -> ObjectKey {
        let versions = vec![(self.trees.len(), Arc::new(bytes))];
        self.objects.push(Object { changes, versions });
        ObjectKey(self.objects.len() - 1)
    }

    /// Other bytes in the version that comes next.
    pub(crate) fn change_object(&mut self, key: ObjectKey, bytes: Vec<u8>) {
        let from = self.trees.len();
        self.objects[key.0].versions.push((from, Arc::new(bytes)));
    }

    /// What became of a file as a whole in some version.
    pub(crate) fn became(&mut self, key: ObjectKey, bytes: Vec<u8>, from: usize) {
        self.objects[key.0].versions.push((from, Arc::new(bytes)));
    }

    pub(crate) fn has_changed(&self, key: ObjectKey) -> bool {
        self.objects[key.0].versions.len() > 1
    }

    pub(crate) fn bytes(&self, key: ObjectKey) -> Arc<Vec<u8>> {
        Arc::clone(&self.objects[key.0].versions.last().unwrap().1)
    }

    pub(crate) fn set_changes(&mut self, key: ObjectKey, changes: Changes) {
        self.objects[key.0].changes = changes;
    }

    pub(crate) fn is_as_a_whole(&self, key: ObjectKey) -> bool {
        self.objects[key.0].changes == Changes::AsAWhole
    }

    /// A step failed: these paths, and other names of their files, may be as before or after it,
    /// or, if they are ordinary files, half of each.
    pub(crate) fn is_uncertain(&mut self, paths: &[&str], before: &Tree) {
        let mut all: BTreeSet<String> = paths.iter().map(|path| (*path).to_owned()).collect();
        for tree in [before, self.tree()] {
            for path in paths {
                let what = tree.get(*path).map(|named| &named.what);
                let Some(what @ What::File(_)) = what else { continue };
                let links = tree.iter().filter(|(_, named)| named.what == *what);
                all.extend(links.map(|(path, _)| path.clone()));
            }
        }
        // Any of them may be what another one was: a link to a file that failed to become another, for one.
        let mut possible: Vec<Arc<Vec<u8>>> = Vec::new();
        for path in &all {
            possible.extend(self.uncertain.remove(path).unwrap_or_default());
            for tree in &self.trees {
                if let Some(Named { what: What::File(key), .. }) = tree.get(path) {
                    let versions = &self.objects[key.0].versions;
                    possible.extend(versions.iter().map(|(_, bytes)| Arc::clone(bytes)));
                }
            }
        }
        possible.sort_unstable_by_key(Arc::as_ptr);
        possible.dedup_by_key(|bytes| Arc::as_ptr(bytes));
        self.uncertain.extend(all.into_iter().map(|path| (path, possible.clone())));
    }

    /// What a step makes of files of which nobody knows what a failure left is as uncertain, and so are the names
    /// that it gave to them.
    pub(crate) fn follow_uncertain(&mut self, paths: &[&str], before: &Tree) {
        if paths.iter().any(|path| self.uncertain.contains_key(*path)) {
            self.is_uncertain(paths, before);
        }
        let file = |tree: &Tree, path: &str| match tree.get(path).map(|named| &named.what) {
            Some(What::File(key)) => Some(*key),
            _ => None,
        };
        let trees = [before, self.tree()];
        let keys: Vec<ObjectKey> = self
            .uncertain
            .keys()
            .flat_map(|path| trees.iter().filter_map(|tree| file(tree, path)))
            .collect();
        let tree = self.tree();
        let is_new = |path: &&String| {
            !self.uncertain.contains_key(*path)
                && file(tree, path).is_some_and(|key| keys.contains(&key))
        };
        let paths: Vec<String> = tree.keys().filter(is_new).cloned().collect();
        let paths: Vec<&str> = paths.iter().map(String::as_str).collect();
        self.is_uncertain(&paths, before);
    }

    /// Whether this is a state that may be found; else how it differs from the nearest.
    pub(crate) fn check(
        &self, seen: &Seen, acknowledged: usize, begun: usize,
    ) -> Result<usize, String> {
        self.check_uncertain(seen)?;
        let mut nearest: Option<Vec<String>> = None;
        for version in (acknowledged..=begun).rev() {
            let differences = self.differences(seen, version, acknowledged, begun);
            if differences.is_empty() {
                return Ok(version);
            }
            if nearest.as_ref().is_none_or(|least| differences.len() < least.len()) {
                nearest = Some(differences);
            }
        }
        let lines = nearest.unwrap_or_default().join("\n  ");
        Err(format!("no version from {acknowledged} to {begun} is like this:\n  {lines}"))
    }

    /// A page is never seen in part, whatever failed. What it became by rounding, the disk may have kept from
    /// being read.
    fn check_uncertain(&self, seen: &Seen) -> Result<(), String> {
        for (path, possible) in &self.uncertain {
            let objects = self.trees.iter().filter_map(|tree| match tree.get(path)?.what {
                What::File(key) => Some(&self.objects[key.0]),
                _ => None,
            });
            let is_of = |object: &Object, bytes: &Vec<u8>| {
                object.changes == Changes::Unknown
                    || object.versions.iter().any(|(_, known)| known.as_ref() == bytes)
            };
            if let Some(Named { what: What::File(bytes), .. }) = seen.get(path)
                && path.ends_with(".safetensors")
                && !possible.iter().any(|known| known.as_ref() == bytes)
                && !objects.clone().any(|object| is_of(object, bytes))
            {
                return Err(format!("{path}: {} bytes that nobody wrote", bytes.len()));
            }
        }
        Ok(())
    }

    fn is_known(&self, path: &str) -> bool {
        !self.uncertain.keys().any(|uncertain| {
            let below = path.strip_prefix(uncertain.as_str());
            below.is_some_and(|below| below.is_empty() || below.starts_with('/'))
        })
    }

    fn differences(
        &self, seen: &Seen, version: usize, acknowledged: usize, begun: usize,
    ) -> Vec<String> {
        let tree = &self.trees[version];
        let paths: BTreeSet<&String> = tree.keys().chain(seen.keys()).collect();
        let mut differences = Vec::new();
        for path in paths.into_iter().filter(|path| self.is_known(path)) {
            let difference = match (tree.get(path), seen.get(path)) {
                (Some(_), None) => "is missing".to_owned(),
                (None, Some(_)) => "should not be there".to_owned(),
                (Some(expected), Some(found)) => {
                    match self.difference(expected, found, acknowledged, begun) {
                        None => continue,
                        Some(difference) => difference,
                    }
                }
                (None, None) => continue,
            };
            differences.push(format!("{path} {difference}"));
        }
        differences
    }

    fn difference(
        &self, expected: &Named<ObjectKey>, found: &Named<Vec<u8>>, acknowledged: usize,
        begun: usize,
    ) -> Option<String> {
        if expected.mode != found.mode {
            return Some(format!("has mode {:o}, not {:o}", found.mode, expected.mode));
        }
        if expected.attributes != found.attributes {
            return Some(format!("has the attributes {:?}", found.attributes));
        }
        match (&expected.what, &found.what) {
            (What::Directory, What::Directory) => None,
            (What::Symlink(expected), What::Symlink(found)) if expected == found => None,
            (What::File(key), What::File(bytes)) => {
                let object = &self.objects[key.0];
                let first = object.versions.partition_point(|(from, _)| *from <= acknowledged);
                let end = object.versions.partition_point(|(from, _)| *from <= begun);
                let versions = &object.versions[first.saturating_sub(1)..end];
                object.changes.difference(versions, bytes)
            }
            (_, found) => Some(format!("is something else: {found:?}").chars().take(80).collect()),
        }
    }
}

impl Changes {
    fn difference(self, versions: &[(usize, Arc<Vec<u8>>)], found: &[u8]) -> Option<String> {
        if self == Changes::Unknown {
            return None;
        }
        let all = || versions.iter().map(|(_, bytes)| bytes.as_slice());
        if all().any(|bytes| bytes == found) {
            return None;
        }
        let shortest = all().map(<[u8]>::len).min().unwrap_or(0);
        let longest = all().map(<[u8]>::len).max().unwrap_or(0);
        let wrong = format!("has {} bytes of no version ({} known)", found.len(), versions.len());
        if self == Changes::AsAWhole || found.len() < shortest || found.len() > longest {
            return Some(wrong);
        }
        // Where a file grew, a later write may have come without an earlier one.
        let is_of_one = |at: usize, byte: u8| {
            all().any(|bytes| bytes.get(at) == Some(&byte)) || (byte == 0 && at >= shortest)
        };
        let is_told = self == Changes::OfRows && versions.len() > 1;
        let first = if is_told { HEADER_BYTES } else { 0 };
        let mut bytes = found.iter().enumerate().skip(first);
        let (at, _) = bytes.find(|(at, byte)| !is_of_one(*at, **byte))?;
        Some(format!("{wrong}, the first at {at}"))
    }
}

#[test]
fn only_what_may_be_found_is_accepted() {
    let mut history = History::new();
    let key = history.add_object(Changes::InPlace, b"aaaa".to_vec());
    let mut tree = history.tree().clone();
    let named = |what| Named { what, mode: 0o644, attributes: BTreeMap::new() };
    tree.insert("files/f".to_owned(), named(What::File(key)));
    history.begin(tree.clone());
    history.change_object(key, b"bbbbbb".to_vec());
    history.begin(tree);
    let check = |bytes: Option<&[u8]>, acknowledged: usize, expected: Option<usize>| {
        let directory = Named { what: What::Directory, mode: 0o755, attributes: BTreeMap::new() };
        let mut seen: Seen =
            ["files", "models"].map(|name| (name.to_owned(), directory.clone())).into();
        let file = |bytes: &[u8]| Named {
            what: What::File(bytes.to_vec()),
            mode: 0o644,
            attributes: BTreeMap::new(),
        };
        seen.extend(bytes.map(|bytes| ("files/f".to_owned(), file(bytes))));
        assert_eq!(history.check(&seen, acknowledged, 2).ok(), expected, "{bytes:?}");
    };
    check(None, 0, Some(0));
    check(None, 1, None);
    check(Some(b"aaaa"), 1, Some(2));
    check(Some(b"abab"), 1, Some(2));
    check(Some(b"abab\0b"), 1, Some(2));
    check(Some(b"abac"), 1, None);
    check(Some(b"aaa"), 1, None);
    check(Some(b"aaaa"), 2, None);
    check(Some(b"bbbbbb"), 2, Some(2));
}
