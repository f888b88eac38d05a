//! Where a rebuild puts what it finds.

use super::*;
use crate::store::fsck::salvage::{Place, Salvaged};
use crate::store::fsck::tree::Tree;
use crate::store::record::PageRecord;

const EPOCH: u32 = 5;
const SUFFIX: &[u8] = b".rebuilt";

/// What is made gets such numbers.
fn made(counter: u64) -> InodeId {
    InodeId(u64::from(EPOCH) << 32 | counter)
}

fn file(role: Role) -> Inode {
    let file = FileRecord { role, object: Some(object(B)), size: 0, blocks: 0, unsettled: false };
    let base = directory(DirectoryClass::Plain, ROOT, b"", 1);
    Inode { kind: Kind::File(file), uid: 12, gid: 34, ..base }
}

fn page(layer: u32, start: u64, tokens: u32) -> Role {
    let (model, checksum) = ([0; 16], [0; 16]);
    let dtype = crate::page::Dtype::F16;
    Role::Page(PageRecord { model, layer, start, tokens, dtype, checksum })
}

/// A tree with the directories of the sound store.
fn tree() -> Tree {
    let mut salvaged = Salvaged::default();
    for id in [MODEL, SEQUENCES, SEQUENCE, LAYER, STATES, D, E] {
        salvaged.inodes.insert(id, Patient::new().records.get(&keys::inode(id)));
    }
    Tree::new(EPOCH, &salvaged)
}

fn path(tree: &Tree, path: &str) -> Option<InodeId> {
    let mut parts = path.split('/');
    parts.try_fold(ROOT, |at, part| tree.names.get(&(at, part.as_bytes().to_vec())).copied())
}

#[test]
fn directories_of_the_old_records_stand_where_they_did() {
    let found = tree();
    for (id, name) in [(MODELS, "models"), (LAYER, "models/m/sequences/s/000"), (E, "files/d/e")] {
        assert_eq!(path(&found, name), Some(id), "{name}");
    }
    assert_eq!((found.inodes.len(), found.names.len()), (10, 9));
    let mut salvaged = Salvaged::default();
    let mut put = |counter, class, parent, name: &[u8]| {
        let id = InodeId(number(counter));
        salvaged.inodes.insert(id, directory(class, parent, name, 2));
        id
    };
    let plain = DirectoryClass::Plain;
    // Marked as something else, in the place of another one, in a circle, in the root, or with a name that none has.
    let first = put(0x50, DirectoryClass::Models, FILES, b"d");
    let second = put(0x51, plain, FILES, b"d");
    put(0x52, plain, InodeId(number(0x53)), b"ring");
    put(0x53, plain, InodeId(number(0x52)), b"ring");
    put(0x54, plain, ROOT, b"top");
    put(0x55, plain, FILES, b"..");
    put(0x56, plain, second, b"below");
    let found = Tree::new(EPOCH, &salvaged);
    assert_eq!(path(&found, "files/d"), Some(first));
    assert_eq!(found.inodes[&first].kind, directory(plain, FILES, b"d", 2).kind);
    assert_eq!(found.inodes.len(), 4);
}

#[test]
fn a_file_has_the_names_that_it_can_have() {
    let check = |role, parent: InodeId, name: &[u8], expected: bool| {
        let mut tree = tree();
        let places: Vec<Place> = vec![(parent, name.to_vec())];
        assert_eq!(tree.add(B, file(role), &places, &[]), expected, "{role:?}");
        let found = tree.names.get(&(parent, name.to_vec())).copied();
        assert_eq!(found, expected.then_some(B), "{role:?}");
        tree.inodes[&B].file().unwrap().role
    };
    let tail = |directory| Role::Tail { start: 16, directory };
    for (name, is_name) in
        [(&b"x"[..], true), (b"", false), (b".", false), (b"..", false), (b"a\0", false)]
    {
        check(Role::Plain, FILES, name, is_name);
    }
    check(Role::Plain, FILES, &[b'n'; 255], true);
    check(Role::Plain, FILES, &[b'n'; 256], false);
    check(Role::Plain, ROOT, b"x", false);
    check(Role::Plain, InodeId(number(0x99)), b"x", false);
    check(Role::Manifest, MODEL, b"manifest.json", true);
    check(Role::Plain, MODEL, b"manifest.json", false);
    check(Role::Tokens, SEQUENCE, b"tokens", true);
    check(Role::Plain, SEQUENCE, b"tokens", false);
    check(page(0, 0, 16), LAYER, PAGE_NAME, true);
    check(page(0, 16, 16), LAYER, PAGE_NAME, false);
    check(page(1, 0, 16), LAYER, PAGE_NAME, false);
    check(Role::Plain, LAYER, PAGE_NAME, false);
    check(page(1, 16, 0), STATES, STATE_NAME, true);
    check(page(1, 16, 16), STATES, STATE_NAME, false);
    check(page(1, 32, 0), STATES, STATE_NAME, false);
    check(Role::Plain, STATES, STATE_NAME, true);
    assert_eq!(check(tail(SEQUENCE), LAYER, TAIL_NAME, true), tail(LAYER));
    assert_eq!(check(tail(SEQUENCE), LAYER, b"0000032.tail", false), tail(SEQUENCE));
}

#[test]
fn what_is_no_file_stands_among_ordinary_ones() {
    let target = b"a".to_vec();
    let base = directory(DirectoryClass::Plain, ROOT, b"", 1);
    let mut tree = tree();
    for (id, kind) in [
        (InodeId(number(0x50)), Kind::Symlink { target }),
        (InodeId(number(0x51)), Kind::Special { file_type: libc::S_IFIFO, device: 0 }),
    ] {
        let inode = Inode { kind, ..base.clone() };
        let name = id.0.to_string().into_bytes();
        assert!(tree.add(id, inode.clone(), &[(FILES, name)], &[]));
        assert!(!tree.add(id, inode, &[(LAYER, PAGE_NAME.to_vec())], &[]));
    }
    let is_directory = tree.add(InodeId(number(0x52)), base, &[(FILES, b"x".to_vec())], &[]);
    assert!(!is_directory, "those have been taken over already");
}

#[test]
fn a_note_makes_up_for_names_that_are_missing() {
    let add = |links, places: &[Place], paths: &[&str]| {
        let mut tree = tree();
        let paths: Vec<_> = paths.iter().map(|path| path.as_bytes().to_vec()).collect();
        let is_named = tree.add(B, Inode { links, ..file(Role::Plain) }, places, &paths);
        let mut found: Vec<_> = tree.names.into_iter().filter(|(_, id)| *id == B).collect();
        found.sort_unstable();
        let names = found.into_iter().map(|((_, name), _)| String::from_utf8(name).unwrap());
        (is_named, names.collect::<Vec<_>>())
    };
    let of = |names: &[&str]| (!names.is_empty(), names.iter().map(ToString::to_string).collect());
    let place = [(FILES, b"x".to_vec())];
    assert_eq!(add(1, &place, &["files/y"]), of(&["x"]));
    assert_eq!(add(2, &place, &["files/y", "files/z"]), of(&["x", "y"]));
    assert_eq!(add(1, &[], &["files/y", "files/z"]), of(&["y"]));
    assert_eq!(add(2, &[], &["files/y", "files/d/z"]), of(&["y", "z"]));
    assert_eq!(add(0, &[], &["files/y"]), of(&["y"]));
    // A directory is in the way, or a name is no name.
    assert_eq!(add(1, &[], &["files/d", "files/", "", "files/../x", "x", "new/x"]), of(&[]));
    assert_eq!(add(2, &place, &["files/x/below", "files/x"]), of(&["x"]));
}

#[test]
fn directories_are_made_for_the_owner_of_what_stands_in_them() {
    let mut tree = tree();
    let paths = [b"models/n/sequences/t/000/0000000.safetensors".to_vec()];
    assert!(tree.add(B, file(page(0, 0, 16)), &[], &paths));
    let layer = path(&tree, "models/n/sequences/t/000").unwrap();
    // Ten directories were there, and the file.
    assert_eq!(layer, made(14));
    let inode = &tree.inodes[&layer];
    assert_eq!((inode.mode, inode.uid, inode.gid), (0o700, 12, 34));
    let parent = path(&tree, "models/n/sequences/t").unwrap();
    let expected = directory(DirectoryClass::Layer(0), parent, b"000", 2).kind;
    assert_eq!(inode.kind, expected);
}

#[test]
fn what_stands_nowhere_is_lost_and_found() {
    let mut tree = tree();
    let tail = Role::Tail { start: 16, directory: LAYER };
    for (counter, role, expected) in [
        (0x50, tail, Role::Plain),
        (0x51, page(0, 0, 16), page(0, 0, 16)),
        (0x52, Role::Tokens, Role::Plain),
    ] {
        let id = InodeId(number(counter));
        assert!(!tree.add(id, file(role), &[], &[]));
        tree.lose(id, ObjectId(counter));
        let name = format!("files/lost+found/#{counter:016x}");
        assert_eq!(path(&tree, &name), Some(id));
        assert_eq!(tree.inodes[&id].file().unwrap().role, expected);
    }
    // Where a file has that name, it comes beside it.
    let mut taken = self::tree();
    taken.add(A, file(Role::Plain), &[(FILES, b"lost+found".to_vec())], &[]);
    taken.add(B, file(Role::Plain), &[], &[]);
    taken.lose(B, object(B));
    assert_eq!(path(&taken, "files/#0000000100000126"), Some(B));
}

#[test]
fn a_sequence_that_an_operation_made_gets_its_name() {
    let name = |paths: &[&str]| {
        let mut tree = tree();
        for (counter, path) in (0x50..).zip(paths) {
            let id = InodeId(number(counter));
            let path = format!("{path}/x").into_bytes();
            assert!(tree.add(id, file(Role::Plain), &[], &[path]));
        }
        tree.name_finished_sequences();
        tree
    };
    let has = |tree: &Tree, name: &str| {
        let id = path(tree, name)?;
        let Kind::Directory { name: known, .. } = &tree.inodes[&id].kind else { return None };
        assert_eq!(known, name.rsplit('/').next().unwrap().as_bytes());
        Some(id)
    };
    let sequences = "models/m/sequences";
    let found = name(&["models/m/sequences/new~"]);
    assert!(has(&found, &format!("{sequences}/new")).is_some());
    assert_eq!(has(&found, &format!("{sequences}/new~")), None);
    let found = name(&["models/m/sequences/new~~"]);
    assert!(has(&found, &format!("{sequences}/new")).is_some());
    // The old records have another one of that name.
    let found = name(&["models/m/sequences/s~"]);
    assert_eq!(has(&found, &format!("{sequences}/s")), Some(SEQUENCE));
    let rebuilt = String::from_utf8([b"s", SUFFIX].concat()).unwrap();
    assert!(has(&found, &format!("{sequences}/{rebuilt}")).is_some());
    // Both names are taken, and elsewhere it means nothing.
    let found = name(&["models/m/sequences/s~", "models/m/sequences/s.rebuilt", "files/d~"]);
    for kept in ["models/m/sequences/s~", "models/m/sequences/s.rebuilt", "files/d~"] {
        assert!(has(&found, kept).is_some(), "{kept}");
    }
    // It has no other name, or one that the old records tell.
    assert!(has(&name(&["models/m/sequences/~"]), "models/m/sequences/.rebuilt").is_some());
    let mut salvaged = Salvaged::default();
    for (id, class, parent, name) in [
        (MODEL, DirectoryClass::Model, MODELS, &b"m"[..]),
        (SEQUENCES, DirectoryClass::Sequences, MODEL, b"sequences"),
        (SEQUENCE, DirectoryClass::Sequence, SEQUENCES, b"t~"),
    ] {
        salvaged.inodes.insert(id, directory(class, parent, name, 2));
    }
    let mut kept = Tree::new(EPOCH, &salvaged);
    kept.name_finished_sequences();
    assert_eq!(has(&kept, "models/m/sequences/t~"), Some(SEQUENCE));
}

#[test]
fn links_follow_from_the_names() {
    let mut tree = tree();
    let places = [(FILES, b"x".to_vec()), (D, b"y".to_vec())];
    tree.add(B, file(Role::Plain), &places, &[]);
    tree.add(A, file(Role::Plain), &[], &[]);
    tree.count_links();
    let links = [ROOT, FILES, D, E, SEQUENCE, A, B].map(|id| tree.inodes[&id].links);
    assert_eq!(links, [4, 3, 3, 2, 4, 0, 2]);
}
