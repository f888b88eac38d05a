//! Models with recurrent layers: an engine goes on from a row after which each of them has its state.

use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::PathBuf;
use std::process::Command;

use kvfs::page::{
    Dtype, Layer, LayerKind, Manifest, StatePlace, StateShape, StateTensor, TokenStart, names,
    pack_state,
};
use kvfs::reader::longest_prefix;

use crate::by_hash::{chain, directory, names as names_in};
use crate::common::sys::{assert_errno, getxattr, open, rename, sync_directory, write_and_close};
use crate::common::{Mode, Model, Mount, fill};
use crate::writer::{Sequence, bytes};

in_both_modes!(
    a_prefix_ends_where_all_states_are,
    a_state_for_another_place_is_refused,
    a_state_is_sealed_and_stored_once,
    what_nobody_describes_is_the_engines_own,
);

/// Three recurrent layers, one that attends, one with a window.
pub(crate) fn kinds(width: u32) -> Vec<LayerKind> {
    let tensor = |name: &str, dtype, shape: &[u32]| StateTensor {
        name: name.to_owned(),
        dtype,
        shape: shape.to_vec(),
    };
    let state =
        vec![tensor("conv", Dtype::F16, &[8, 3]), tensor("ssm", Dtype::F32, &[2, width, 64])];
    let recurrent = LayerKind::State(StateShape { state });
    let mut kinds = vec![recurrent; 3];
    kinds.extend([LayerKind::Attention, LayerKind::Sliding { window: 40 }]);
    kinds
}

/// States of 16 KiB, twice as long as pages.
pub(crate) fn hybrid() -> Model {
    Model::with(|fields| (fields.num_layers, fields.layers) = (5, Some(kinds(20))))
}

/// The state that a model has after these tokens.
pub(crate) fn state(manifest: &Manifest, layer: u32, tokens: &[u32]) -> Vec<u8> {
    let row = TokenStart(tokens.len() as u64);
    let place = StatePlace::new(manifest, Layer(layer), row).unwrap();
    let seed = tokens.iter().fold(u64::from(layer) + 1, |sum, token| {
        (sum ^ u64::from(*token)).wrapping_mul(0x0100_0000_01b3)
    });
    let tensors = fill(seed, usize::try_from(place.shape().payload_bytes()).unwrap());
    let prefix = manifest.prefix_of(&bytes(tokens)).unwrap();
    pack_state(&place, prefix, &tensors).unwrap()
}

pub(crate) fn path(mount: &Mount, model: &Model, sequence: &str, layer: u32, row: u64) -> PathBuf {
    model.layer(mount, sequence, layer).join(names::format_state(TokenStart(row)))
}

/// Writes the state of a layer after a row, as the sequence has its tokens.
pub(crate) fn keep(mount: &Mount, model: &Model, sequence: &Sequence, layer: u32, row: usize) {
    let bytes = state(&model.manifest, layer, &sequence.tokens[..row]);
    let path = path(mount, model, &sequence.name, layer, row as u64);
    let temporary = path.with_extension("tmp");
    write_and_close(&temporary, &bytes).unwrap();
    rename(temporary, path).unwrap();
}

/// A sequence of 160 tokens with states after these rows.
pub(crate) fn with_states(mount: &Mount, model: &Model, name: &str, rows: &[usize]) -> Sequence {
    let mut sequence = Sequence::new(model, name);
    sequence.append_tokens(mount, model, &(0..160).collect::<Vec<_>>());
    for layer in [3, 4] {
        sequence.append_rows(mount, model, layer, 160);
    }
    for row in rows {
        (0..3).for_each(|layer| keep(mount, model, &sequence, layer, *row));
    }
    sequence
}

#[track_caller]
pub(crate) fn check(mount: &Mount, model: &Model, prompt: &[u32], expected: u64) {
    assert_eq!(longest_prefix(&model.directory(mount), prompt).unwrap().tokens, expected);
}

fn a_prefix_ends_where_all_states_are(mode: Mode) {
    let (mut mount, model) = (Mount::new(mode), hybrid());
    model.install(&mount);
    let sequence = with_states(&mount, &model, "chat", &[32, 64, 100]);
    let tokens = sequence.tokens.clone();
    for (count, expected) in [(160, 100), (100, 100), (99, 64), (64, 64), (63, 32), (31, 0)] {
        check(&mount, &model, &tokens[..count], expected);
    }
    check(&mount, &model, &[&tokens[..70], &[9999]].concat(), 64);
    // Of a prefix that ends a page all is listed that goes on from there.
    let hashes = chain(&model, &tokens);
    let all: Vec<String> = (0..5).map(|layer| format!("{layer:03}.safetensors")).collect();
    for hash in &hashes[..2] {
        assert_eq!(names_in(&directory(&mount, &model, *hash)), all);
    }
    let listed = directory(&mount, &model, hashes[1]).join("000.safetensors");
    let there = path(&mount, &model, "chat", 0, 64);
    assert_eq!(listed.metadata().unwrap().ino(), there.metadata().unwrap().ino());
    assert_errno(directory(&mount, &model, hashes[2]).metadata(), libc::ENOENT);

    sync_directory(mount.path()).unwrap();
    mount.crash();
    check(&mount, &model, &tokens, 100);
    // One layer's is enough to lose a row.
    std::fs::remove_file(path(&mount, &model, "chat", 2, 100)).unwrap();
    check(&mount, &model, &tokens, 64);
    // A state of other tokens is none of these.
    let mut others = tokens[..100].to_vec();
    others[7] = 1;
    let foreign = state(&model.manifest, 2, &others);
    write_and_close(path(&mount, &model, "chat", 2, 100), &foreign).unwrap();
    check(&mount, &model, &tokens, 64);
    keep(&mount, &model, &sequence, 2, 100);
    check(&mount, &model, &tokens, 100);
    // The window after row 100 begins in the second page, that after 64 in the first.
    std::fs::remove_file(sequence.page(&mount, &model, 4, 0)).unwrap();
    check(&mount, &model, &tokens, 100);
    check(&mount, &model, &tokens[..99], 0);
    // A layer that attends needs all of it.
    std::fs::remove_file(sequence.page(&mount, &model, 3, 1)).unwrap();
    check(&mount, &model, &tokens, 0);
    // The next sequence has less of the prompt, and can be continued.
    with_states(&mount, &model, "other", &[32]);
    check(&mount, &model, &tokens, 32);
    let store = mount.store().to_owned();
    assert!(mount.unmount().success());
    let fsck = Command::new(env!("CARGO_BIN_EXE_kvfs")).arg("fsck").arg(store).output().unwrap();
    assert!(fsck.status.success(), "{}", String::from_utf8_lossy(&fsck.stdout));
}

fn a_state_for_another_place_is_refused(mode: Mode) {
    let (mount, model) = (Mount::new(mode), hybrid());
    model.install(&mount);
    let tokens: Vec<u32> = (0..64).collect();
    let right = state(&model.manifest, 1, &tokens);
    let salted = Model::with(|fields| {
        (fields.num_layers, fields.layers) = (5, Some(kinds(20)));
        fields.salt = Some("s".to_owned());
    });
    let wider = Model::with(|fields| (fields.num_layers, fields.layers) = (5, Some(kinds(21))));
    let mut undeclared = right.clone();
    let at = undeclared.windows(11).position(|word| word == b"kvfs.prefix").unwrap();
    undeclared[at] = b'x';
    let mut damaged = right.clone();
    damaged[5000] ^= 1;
    let place = |layer, row| path(&mount, &model, "chat", layer, row);
    let check = |at: PathBuf, bytes: &[u8], why: &str| {
        let temporary = at.with_extension("tmp");
        write_and_close(&temporary, bytes).unwrap();
        for in_place in [false, true] {
            let before = mount.errors().len();
            if in_place {
                assert_errno(write_and_close(&at, bytes), libc::EINVAL);
            } else {
                assert_errno(rename(&temporary, &at), libc::EINVAL);
            }
            assert!(!at.exists());
            let errors = mount.errors();
            assert_eq!(errors.len(), before + 1, "{errors:#?}");
            assert!(errors.last().unwrap().contains(why), "no {why:?} in {errors:#?}");
        }
        std::fs::remove_file(temporary).unwrap();
    };
    check(place(1, 65), &right, "header declares kvfs.row 64, this place is 65");
    check(place(2, 64), &right, "header declares kvfs.layer 1, this place is 2");
    check(place(3, 64), &right, "layer 3 is not recurrent: it keeps pages, not states");
    check(place(7, 64), &right, "layer 7 does not exist");
    check(place(1, 0), &right, "no state is after 0 tokens");
    check(place(1, 64), &state(&salted.manifest, 1, &tokens), "header declares kvfs.model");
    check(place(1, 64), &state(&wider.manifest, 1, &tokens), "tensor ssm has shape [2, 21, 64]");
    check(place(1, 64), &undeclared, "kvfs.prefix is missing");
    check(place(1, 64), &damaged, "checksum");
    check(place(1, 64), &right[..right.len() - 1], "the copy or the writer has not finished");
    check(place(1, 64), &[&right[..], b"x"].concat(), "bytes behind the last tensor");
    check(place(1, 64), &model.page(3, 64, 1), "tensor \"k\" is unknown");
    write_and_close(place(1, 64), &right).unwrap();
    assert!(std::fs::read(place(1, 64)).unwrap() == right);
}

fn a_state_is_sealed_and_stored_once(mode: Mode) {
    // Files in memory have room for what their layer keeps: states are longer than pages here.
    let (mount, model) = (Mount::with_options(mode, &["--ram", "64M"]), hybrid());
    model.install(&mount);
    let sequence = with_states(&mount, &model, "chat", &[64]);
    with_states(&mount, &model, "again", &[64]);
    let [one, other] = ["chat", "again"].map(|name| path(&mount, &model, name, 0, 64));
    assert_eq!(one.metadata().unwrap().ino(), other.metadata().unwrap().ino());
    assert_errno(open(&one, libc::O_RDWR), libc::EPERM);
    assert_errno(open(&one, libc::O_WRONLY | libc::O_TRUNC), libc::EPERM);
    // Names of the same place share it, others cannot.
    let third = path(&mount, &model, "third", 0, 64);
    std::fs::hard_link(&one, &third).unwrap();
    assert_errno(std::fs::hard_link(&one, path(&mount, &model, "third", 1, 64)), libc::EPERM);
    assert_errno(std::fs::hard_link(&one, path(&mount, &model, "third", 0, 65)), libc::EPERM);
    let page = model.page_path(&mount, "third", 0, 64);
    assert_errno(std::fs::hard_link(&one, &page), libc::EPERM);
    assert_errno(rename(&third, &page), libc::EPERM);
    assert_eq!(getxattr(&one, "user.kvfs.checksum").unwrap().len(), 32);
    let output = Command::new(env!("CARGO_BIN_EXE_kvfs")).arg("inspect").arg(&one).output();
    let text = String::from_utf8(output.unwrap().stdout).unwrap();
    let prefix = model.manifest.prefix_of(&bytes(&sequence.tokens[..64])).unwrap();
    for expected in ["kind: recurrent state", "declared checksum matches", &prefix.to_string()] {
        assert!(text.contains(expected), "no {expected} in {text}");
    }
    // It can be replaced by another of its place, and removed.
    let mut others = sequence.tokens[..64].to_vec();
    others[0] = 77;
    write_and_close(third.with_extension("tmp"), &state(&model.manifest, 0, &others)).unwrap();
    rename(third.with_extension("tmp"), &third).unwrap();
    assert_ne!(third.metadata().unwrap().ino(), one.metadata().unwrap().ino());
    std::fs::remove_file(third).unwrap();
}

fn what_nobody_describes_is_the_engines_own(mode: Mode) {
    let mount = Mount::new(mode);
    let model = Model::with(|fields| {
        fields.layers = Some(vec![LayerKind::Attention, LayerKind::Recurrent]);
    });
    model.install(&mount);
    let mut sequence = Sequence::new(&model, "chat");
    sequence.append_tokens(&mount, &model, &(0..32).collect::<Vec<_>>());
    sequence.append_rows(&mount, &model, 0, 32);
    let path = path(&mount, &model, "chat", 1, 32);
    for bytes in [&b"anything"[..], b"else"] {
        std::fs::write(&path, bytes).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), bytes);
    }
    check(&mount, &model, &sequence.tokens, 0);
}

mod private {
    use super::*;

    as_root!(
        (fuse, root)
        a_private_sequence_is_found_by_nobody,
    );

    fn a_private_sequence_is_found_by_nobody(mode: Mode) {
        let (mount, model) = (Mount::new(mode), hybrid());
        model.install(&mount);
        let sequence = with_states(&mount, &model, "chat", &[64]);
        let above = model.sequence(&mount, "chat");
        let chown = Command::new("chown").args(["-R", "1:1"]).arg(&above).status().unwrap();
        assert!(chown.success());
        let by_hash = directory(&mount, &model, chain(&model, &sequence.tokens)[1]);
        check(&mount, &model, &sequence.tokens, 64);
        assert!(by_hash.exists());
        // The sequence, and one layer that keeps nothing but states.
        for closed in [above.clone(), above.join("001")] {
            let change = |mode| {
                std::fs::set_permissions(&closed, std::fs::Permissions::from_mode(mode)).unwrap();
            };
            change(0o700);
            check(&mount, &model, &sequence.tokens, 0);
            assert!(!by_hash.exists());
            change(0o755);
        }
        check(&mount, &model, &sequence.tokens, 64);
    }
}
