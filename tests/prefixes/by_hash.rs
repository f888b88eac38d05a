//! `prefixes/ab/HASH/`: stat says whether a page is there, and the page is the one in the sequence.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use kvfs::page::{LayerKind, PrefixHash};

use crate::common::sys::{assert_errno, open, rename, sync_directory, write_and_close};
use crate::common::{Mode, Model, Mount};
use crate::writer::{Sequence, bytes};

in_both_modes!(
    a_full_page_is_found_by_its_hash,
    a_page_that_is_missing_in_a_layer_is_not_found,
    the_index_outlives_the_daemon,
    hashes_of_other_salts_are_other_hashes,
    nothing_can_be_made_or_seen_there,
);

/// Hashes of the full pages of these tokens.
pub(crate) fn chain(model: &Model, tokens: &[u32]) -> Vec<PrefixHash> {
    let mut parent = model.manifest.prefix_root();
    let mut hashes = Vec::new();
    for page in bytes(tokens).chunks_exact(model.page_tokens() as usize * 4) {
        let hash = PrefixHash::next(parent, page);
        parent = Some(hash);
        hashes.push(hash);
    }
    hashes
}

pub(crate) fn directory(mount: &Mount, model: &Model, hash: PrefixHash) -> PathBuf {
    let hash = hash.to_string();
    model.directory(mount).join("prefixes").join(&hash[..2]).join(hash)
}

pub(crate) fn names(directory: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(directory).unwrap();
    let mut names: Vec<_> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn with_sequence(mode: Mode, count: u32) -> (Mount, Model, Sequence) {
    let (mount, model) = (Mount::new(mode), Model::small());
    model.install(&mount);
    let mut sequence = Sequence::new(&model, "chat");
    sequence.append(&mount, &model, &(0..count).collect::<Vec<_>>());
    (mount, model, sequence)
}

fn a_full_page_is_found_by_its_hash(mode: Mode) {
    let (mount, model, sequence) = with_sequence(mode, 70);
    let hashes = chain(&model, &sequence.tokens);
    assert_eq!(hashes.len(), 2);
    for (number, hash) in (0..).zip(&hashes) {
        let found = directory(&mount, &model, *hash);
        assert_eq!(names(&found), ["000.safetensors", "001.safetensors"]);
        for layer in 0..2 {
            let here = found.join(format!("{layer:03}.safetensors"));
            let there = sequence.page(&mount, &model, layer, number);
            assert_eq!(here.metadata().unwrap().ino(), there.metadata().unwrap().ino());
            assert!(std::fs::read(&here).unwrap() == std::fs::read(&there).unwrap());
        }
        assert_errno(open(found.join("002.safetensors"), libc::O_RDONLY), libc::ENOENT);
    }
    let other = PrefixHash([7; 32]);
    assert_errno(std::fs::metadata(directory(&mount, &model, other)), libc::ENOENT);
    // It is there as soon as it is asked for, and goes with its page.
    let mut longer = sequence;
    longer.append(&mount, &model, &(70..96).collect::<Vec<_>>());
    let last = chain(&model, &longer.tokens)[2];
    assert!(directory(&mount, &model, last).is_dir());
    std::fs::remove_dir_all(model.sequence(&mount, "chat")).unwrap();
    for hash in hashes.into_iter().chain([last]) {
        assert_errno(std::fs::metadata(directory(&mount, &model, hash)), libc::ENOENT);
    }
}

fn a_page_that_is_missing_in_a_layer_is_not_found(mode: Mode) {
    let (mount, mut sequence) = (Mount::new(mode), None);
    let model = Model::with(|fields| {
        fields.num_layers = 3;
        fields.layers = Some(vec![
            LayerKind::Attention,
            LayerKind::Sliding { window: 32 },
            LayerKind::Recurrent,
        ]);
    });
    model.install(&mount);
    let sequence: &mut Sequence = sequence.insert(Sequence::new(&model, "chat"));
    sequence.append_tokens(&mount, &model, &(0..64).collect::<Vec<_>>());
    let hashes = chain(&model, &sequence.tokens);
    let is_there = |hash: PrefixHash| directory(&mount, &model, hash).exists();
    sequence.append_rows(&mount, &model, 0, 64);
    assert!(!is_there(hashes[0]) && !is_there(hashes[1]));
    sequence.append_rows(&mount, &model, 1, 32);
    // A recurrent layer keeps no pages.
    assert!(is_there(hashes[0]) && !is_there(hashes[1]));
    sequence.append_rows(&mount, &model, 1, 32);
    assert!(is_there(hashes[0]) && is_there(hashes[1]));
    std::fs::remove_file(sequence.page(&mount, &model, 1, 0)).unwrap();
    assert!(!is_there(hashes[0]) && is_there(hashes[1]));
}

fn the_index_outlives_the_daemon(mode: Mode) {
    let (mut mount, model, mut sequence) = with_sequence(mode, 70);
    mount.remount();
    sequence.append(&mount, &model, &(70..100).collect::<Vec<_>>());
    let hashes = chain(&model, &sequence.tokens);
    assert_eq!(hashes.len(), 3);
    // No round of indexing comes between the writing and the crash: what is durable is the tokens.
    sync_directory(mount.path()).unwrap();
    mount.crash();
    for hash in hashes {
        crate::common::eventually("the page to be found after the crash", || {
            directory(&mount, &model, hash).exists().then_some(())
        });
    }
}

fn hashes_of_other_salts_are_other_hashes(mode: Mode) {
    let (mount, plain, sequence) = with_sequence(mode, 32);
    let salted = Model::with(|fields| fields.salt = Some("pepper".to_owned())).named("salted");
    salted.install(&mount);
    let mut other = Sequence::new(&salted, "chat");
    other.append(&mount, &salted, &sequence.tokens);
    let [of_plain, of_salted] = [&plain, &salted].map(|model| chain(model, &sequence.tokens)[0]);
    assert_ne!(of_plain, of_salted);
    assert!(directory(&mount, &plain, of_plain).exists());
    assert!(directory(&mount, &salted, of_salted).exists());
    assert!(!directory(&mount, &plain, of_salted).exists());
    assert!(!directory(&mount, &salted, of_plain).exists());
}

fn nothing_can_be_made_or_seen_there(mode: Mode) {
    let (mount, model, sequence) = with_sequence(mode, 32);
    let model_directory = model.directory(&mount);
    assert_eq!(names(&model_directory), ["manifest.json", "sequences"]);
    let root = model_directory.join("prefixes");
    assert!(names(&root).is_empty());
    let page = directory(&mount, &model, chain(&model, &sequence.tokens)[0]);
    let shard = page.parent().unwrap();
    assert!(names(shard).is_empty());
    for place in [&root, shard, &page] {
        assert_errno(std::fs::create_dir(place.join("made")), libc::EPERM);
        assert_errno(write_and_close(place.join("made"), b"x"), libc::EPERM);
        let plain = mount.files("plain");
        std::fs::write(&plain, b"x").unwrap();
        assert_errno(rename(&plain, place.join("made")), libc::EPERM);
        assert_errno(std::fs::hard_link(&plain, place.join("made")), libc::EPERM);
        assert_errno(crate::common::sys::setxattr(place, "user.x", b"1"), libc::EOPNOTSUPP);
    }
    assert_errno(std::fs::remove_file(page.join("000.safetensors")), libc::EPERM);
    assert_errno(std::fs::remove_dir(&page), libc::EPERM);
    assert_errno(std::fs::remove_dir(&root), libc::EPERM);
    let target = mount.files("moved");
    assert_errno(rename(page.join("000.safetensors"), target), libc::EPERM);
    for name in ["0", "xyz", "AB", "+f", "match/x", "match2"] {
        assert!(!root.join(name).exists(), "{name}");
    }
    let hash = page.file_name().unwrap().to_str().unwrap();
    assert!(!root.join(if hash.starts_with("00") { "01" } else { "00" }).join(hash).exists());
    assert!(!shard.join(hash.to_uppercase()).exists() || hash.to_uppercase() == hash);
    assert!(sequence.page(&mount, &model, 0, 0).exists());
}
