//! What `files/` should hold: a POSIX tree, and what of it a crash must leave.

use std::collections::BTreeMap;

pub(crate) const ROOT: usize = 0;

/// Number of a node or of an object in the model.
pub(crate) type Id = usize;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Directory(BTreeMap<String, Id>),
    Symlink(String),
    File(File),
}

/// The bytes lie in [`Tree::objects`], since a truncating writer makes new ones.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct File {
    pub(crate) object: Id,
    /// The version that a writer that truncated is making.
    pub(crate) replacement: Option<Id>,
    /// Written for the first time, and no writer has closed it: a crash forgets its one name.
    pub(crate) fresh: bool,
    pub(crate) readers: u32,
    pub(crate) writers: u32,
}

impl File {
    pub(crate) fn current(&self) -> Id {
        self.replacement.unwrap_or(self.object)
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Node {
    pub(crate) kind: Kind,
    pub(crate) mode: u16,
    pub(crate) links: u32,
    pub(crate) attributes: BTreeMap<Vec<u8>, Vec<u8>>,
    /// A time that was set and that nothing has changed since.
    pub(crate) mtime: Option<i64>,
}

#[derive(Clone, Debug)]
pub(crate) struct Tree {
    pub(crate) nodes: BTreeMap<Id, Node>,
    pub(crate) objects: BTreeMap<Id, Vec<u8>>,
    /// Sealed pages of one layer, by their first token.
    pub(crate) pages: BTreeMap<u64, Seen>,
    next: Id,
}

/// What a walk sees at one path: everything that must survive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Seen {
    pub(crate) what: What,
    pub(crate) mode: u16,
    pub(crate) links: u32,
    pub(crate) attributes: BTreeMap<Vec<u8>, Vec<u8>>,
}

#[derive(Clone, PartialEq, Eq)]
pub(crate) enum What {
    Directory,
    Symlink(String),
    /// In a view of the model the object, in a walk its bytes.
    Object(Id),
    Bytes(Vec<u8>),
}

impl std::fmt::Debug for What {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            What::Directory => write!(formatter, "directory"),
            What::Symlink(target) => write!(formatter, "link to {target}"),
            What::Object(object) => write!(formatter, "object {object}"),
            What::Bytes(bytes) => {
                let sum = kvfs::page::content_checksum(bytes);
                write!(formatter, "{} bytes {sum}", bytes.len())
            }
        }
    }
}

/// Paths at which two views differ, with both sides.
pub(crate) fn difference(left: &View, right: &View) -> String {
    let paths: std::collections::BTreeSet<_> = left.keys().chain(right.keys()).collect();
    let differing = paths.into_iter().filter(|path| left.get(*path) != right.get(*path));
    let lines = differing.map(|path| format!("{path}: {:?} {:?}", left.get(path), right.get(path)));
    lines.collect::<Vec<_>>().join("\n")
}

/// The path of a page in a view.
pub(crate) fn page_path(start: u64) -> String {
    format!("page {start}")
}

/// Everything by path.
pub(crate) type View = BTreeMap<String, Seen>;

impl Tree {
    pub(crate) fn new() -> Tree {
        let mut tree = Tree {
            nodes: BTreeMap::new(),
            objects: BTreeMap::new(),
            pages: BTreeMap::new(),
            next: 0,
        };
        tree.add(Kind::Directory(BTreeMap::new()), 0o755, 2);
        tree
    }

    fn number(&mut self) -> Id {
        self.next += 1;
        self.next - 1
    }

    pub(crate) fn add(&mut self, kind: Kind, mode: u16, links: u32) -> Id {
        let id = self.number();
        let node = Node { kind, mode, links, attributes: BTreeMap::new(), mtime: None };
        self.nodes.insert(id, node);
        id
    }

    pub(crate) fn new_object(&mut self, bytes: Vec<u8>) -> Id {
        let id = self.number();
        self.objects.insert(id, bytes);
        id
    }

    pub(crate) fn node(&mut self, id: Id) -> &mut Node {
        self.nodes.get_mut(&id).unwrap()
    }

    pub(crate) fn names(&mut self, id: Id) -> &mut BTreeMap<String, Id> {
        match &mut self.node(id).kind {
            Kind::Directory(names) => names,
            other => panic!("no directory: {other:?}"),
        }
    }

    pub(crate) fn file(&mut self, id: Id) -> &mut File {
        match &mut self.node(id).kind {
            Kind::File(file) => file,
            other => panic!("no file: {other:?}"),
        }
    }

    pub(crate) fn is_directory(&self, id: Id) -> bool {
        matches!(self.nodes[&id].kind, Kind::Directory(_))
    }

    pub(crate) fn is_file(&self, id: Id) -> bool {
        matches!(self.nodes[&id].kind, Kind::File(_))
    }

    pub(crate) fn is_empty(&self, id: Id) -> bool {
        matches!(&self.nodes[&id].kind, Kind::Directory(names) if names.is_empty())
    }

    pub(crate) fn bytes(&mut self, id: Id) -> &mut Vec<u8> {
        let object = self.file(id).current();
        self.objects.get_mut(&object).unwrap()
    }

    /// The last writer has closed.
    pub(crate) fn settle(&mut self, id: Id) {
        let file = self.file(id);
        if let Some(new) = file.replacement.take() {
            file.object = new;
        }
        file.fresh = false;
    }

    /// One writer of several has closed. What replaces an older version is none before the last.
    pub(crate) fn note_closed(&mut self, id: Id) {
        let file = self.file(id);
        file.fresh &= file.replacement.is_some();
    }

    /// Takes one name away.
    pub(crate) fn drop_link(&mut self, id: Id) {
        let node = self.node(id);
        node.links -= 1;
        let open = matches!(&node.kind, Kind::File(file) if file.readers + file.writers > 0);
        if node.links == 0 && !open {
            self.nodes.remove(&id);
        }
    }

    /// Directories that can be reached, with their paths.
    pub(crate) fn directories(&self) -> Vec<(String, Id)> {
        let mut found = vec![(String::new(), ROOT)];
        let mut next = 0;
        while next < found.len() {
            let (path, id) = found[next].clone();
            next += 1;
            if let Kind::Directory(names) = &self.nodes[&id].kind {
                for (name, &child) in names {
                    if self.is_directory(child) {
                        found.push((format!("{path}/{name}"), child));
                    }
                }
            }
        }
        found
    }

    /// What a commit at this moment makes durable.
    pub(crate) fn durable(&self) -> View {
        let pages = self.pages.iter();
        let mut view: View = pages.map(|(start, page)| (page_path(*start), page.clone())).collect();
        for (path, directory) in self.directories() {
            let Kind::Directory(names) = &self.nodes[&directory].kind else {
                continue;
            };
            for (name, id) in names {
                let node = &self.nodes[id];
                let what = match &node.kind {
                    Kind::File(file) if file.fresh => continue,
                    Kind::File(file) => What::Object(file.object),
                    Kind::Symlink(target) => What::Symlink(target.clone()),
                    Kind::Directory(_) => What::Directory,
                };
                let seen = Seen {
                    what,
                    mode: node.mode,
                    links: node.links,
                    attributes: node.attributes.clone(),
                };
                view.insert(format!("{path}/{name}"), seen);
            }
        }
        view
    }

    /// A view with the bytes that the objects have now.
    pub(crate) fn resolve(&self, view: &View) -> View {
        let mut view = view.clone();
        for seen in view.values_mut() {
            if let What::Object(object) = seen.what {
                seen.what = What::Bytes(self.objects[&object].clone());
            }
        }
        view
    }
}
