//! States that are damaged, closed to who asks, of other tokens, or beside no manifest promise nothing.

use std::fs::Permissions;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::Path;

use kvfs::page::{Layer, LayerKind, names};
use kvfs::sequence::{SequenceError, Sequences};

use crate::by_hash::{chain, directory};
use crate::common::sys::{
    assert_errno, getxattr, open, rename, setxattr, sync_directory, write_and_close,
};
use crate::common::{Mode, Model, Mount};
use crate::states::{check, hybrid, keep, kinds, path, state, with_states};
use crate::writer::Sequence;

in_both_modes!(
    what_is_damaged_is_replaced_by_its_own_bytes,
    a_state_that_is_closed_to_who_asks_is_not_promised,
    without_a_manifest_there_are_no_states,
);
in_served_mode!(
    moves_of_a_state_tell_its_path,
    a_sequence_goes_back_only_to_states_of_its_tokens,
    tokens_of_recurrent_layers_alone_are_tokens,
);

/// Changes a byte of the object that holds these bytes.
fn damage(mount: &mut Mount, bytes: &[u8]) {
    sync_directory(mount.path()).unwrap();
    assert!(mount.unmount().success());
    let is_it = |object: &std::path::PathBuf| std::fs::read(object).unwrap() == bytes;
    let object = mount.objects().into_iter().find(is_it).unwrap();
    open(&object, libc::O_RDWR).unwrap().write_all_at(&[!bytes[5000]], 5000).unwrap();
    mount.mount();
}

fn what_is_damaged_is_replaced_by_its_own_bytes(mode: Mode) {
    let (mut mount, model) = (Mount::with_own_files(mode, &[]), hybrid());
    model.install(&mount);
    let sequence = with_states(&mount, &model, "chat", &[32, 64]);
    let page = sequence.page(&mount, &model, 3, 1);
    let kept = path(&mount, &model, "chat", 1, 64);
    for (file, found) in [(&kept, 32), (&page, 32)] {
        let bytes = std::fs::read(file).unwrap();
        for is_known in [true, false] {
            damage(&mut mount, &bytes);
            if is_known {
                assert_errno(open(file, libc::O_RDONLY), libc::EIO);
                check(&mount, &model, &sequence.tokens, found);
            }
            let temporary = file.with_extension("tmp");
            write_and_close(&temporary, &bytes).unwrap();
            rename(&temporary, file).unwrap();
            assert!(std::fs::read(file).unwrap() == bytes, "{}: {is_known}", file.display());
            assert_errno(getxattr(file, "user.kvfs.damaged"), libc::ENODATA);
            check(&mount, &model, &sequence.tokens, 64);
        }
        // What is there already stays.
        let inode = file.metadata().unwrap().ino();
        let temporary = file.with_extension("tmp");
        write_and_close(&temporary, &bytes).unwrap();
        rename(&temporary, file).unwrap();
        assert_eq!(file.metadata().unwrap().ino(), inode);
    }
}

fn chmod(path: &Path, mode: u32) {
    std::fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
}

fn a_state_that_is_closed_to_who_asks_is_not_promised(mode: Mode) {
    let (mount, model) = (Mount::new(mode), hybrid());
    model.install(&mount);
    let sequence = with_states(&mount, &model, "chat", &[32, 64]);
    let by_hash = directory(&mount, &model, chain(&model, &sequence.tokens)[1]);
    let kept = path(&mount, &model, "chat", 2, 64);
    for closed in [kept.clone(), sequence.page(&mount, &model, 3, 1)] {
        assert!(by_hash.exists());
        // What mkstemp(3) makes.
        chmod(&closed, 0o600);
        assert!(!by_hash.exists());
        chmod(&closed, 0o644);
    }
    check(&mount, &model, &sequence.tokens, 64);
    chmod(&kept, 0o600);
    check(&mount, &model, &sequence.tokens, 32);
    // Where nobody else may ask, nobody is told too much.
    chmod(&model.directory(&mount), 0o700);
    check(&mount, &model, &sequence.tokens, 64);
}

fn without_a_manifest_there_are_no_states(mode: Mode) {
    let (mount, model) = (Mount::new(mode), hybrid());
    model.install(&mount);
    let mut sequence = with_states(&mount, &model, "chat", &[32]);
    let manifest = model.directory(&mount).join(names::MANIFEST);
    std::fs::remove_file(&manifest).unwrap();
    let [old, new] = [32, 64].map(|row| path(&mount, &model, "chat", 0, row));
    assert_errno(rename(&old, &new), libc::EPERM);
    assert_errno(std::fs::hard_link(&old, &new), libc::EPERM);
    let bytes = state(&model.manifest, 0, &sequence.tokens[..64]);
    assert_errno(write_and_close(&new, &bytes), libc::EINVAL);
    let temporary = new.with_extension("tmp");
    write_and_close(&temporary, &bytes).unwrap();
    assert_errno(rename(&temporary, &new), libc::EINVAL);
    assert!(!new.exists());
    assert!(mount.errors().last().unwrap().contains("no manifest.json"));
    // Tokens that come now are looked at, but nobody can say what they are; later somebody can.
    sequence.append_tokens(&mount, &model, &[7]);
    let by_hash = directory(&mount, &model, chain(&model, &sequence.tokens)[0]);
    assert_errno(by_hash.metadata(), libc::ENOENT);
    write_and_close(manifest, model.manifest.to_json().as_bytes()).unwrap();
    check(&mount, &model, &sequence.tokens, 32);
    rename(&temporary, &new).unwrap();
    assert!(std::fs::read(new).unwrap() == bytes);
}

fn moves_of_a_state_tell_its_path(mode: Mode) {
    let (mount, model) = (Mount::with_options(mode, &["--ram", "16M"]), hybrid());
    model.install(&mount);
    with_states(&mount, &model, "chat", &[64]);
    sync_directory(mount.path()).unwrap();
    let kept = path(&mount, &model, "chat", 1, 64);
    for tier in ["ssd", "ram"] {
        setxattr(&kept, "user.kvfs.tier", tier.as_bytes()).unwrap();
    }
    let events = std::fs::read_to_string(mount.join(".kvfs/events")).unwrap();
    let told = format!("\"path\":\"{}\"", kept.strip_prefix(mount.path()).unwrap().display());
    assert!(events.contains("\"what\":\"promoted\"") && events.contains(&told), "{events}");
    assert!(!events.contains("\"path\":null"), "{events}");
}

fn a_sequence_goes_back_only_to_states_of_its_tokens(mode: Mode) {
    let (mount, model) = (Mount::new(mode), hybrid());
    model.install(&mount);
    let sequence = with_states(&mount, &model, "chat", &[32, 64, 100]);
    let all = Sequences::open(&model.directory(&mount)).unwrap();
    let refuses = |row: u64| {
        let error = all.seq_rm("chat", row..).unwrap_err();
        assert!(
            matches!(error, SequenceError::NoSnapshot { layer: Layer(2), tokens } if tokens == row),
            "{error}"
        );
        assert_eq!(all.positions("chat").unwrap().1, 160);
    };
    let mut others = sequence.tokens[..100].to_vec();
    others[7] = 9999;
    let kept = path(&mount, &model, "chat", 2, 100);
    write_and_close(kept.with_extension("tmp"), &state(&model.manifest, 2, &others)).unwrap();
    rename(kept.with_extension("tmp"), &kept).unwrap();
    refuses(100);
    std::fs::remove_dir_all(kept.parent().unwrap()).unwrap();
    refuses(64);
    keep(&mount, &model, &sequence, 2, 64);
    all.seq_rm("chat", 64..).unwrap();
    assert_eq!(all.positions("chat").unwrap().1, 64);
    check(&mount, &model, &sequence.tokens, 64);
}

fn tokens_of_recurrent_layers_alone_are_tokens(mode: Mode) {
    let mount = Mount::new(mode);
    let model = Model::with(|fields| {
        (fields.num_layers, fields.layers) = (3, Some(kinds(20)[..3].to_vec()));
    });
    assert!(matches!(model.manifest.layer_kind(Layer(2)), Some(LayerKind::State(_))));
    model.install(&mount);
    let mut sequence = Sequence::new(&model, "chat");
    sequence.append_tokens(&mount, &model, &(0..160).collect::<Vec<_>>());
    for row in [20, 64, 100] {
        (0..3).for_each(|layer| keep(&mount, &model, &sequence, layer, row));
    }
    check(&mount, &model, &sequence.tokens, 100);
    let all = Sequences::open(&model.directory(&mount)).unwrap();
    assert_eq!(all.positions("chat").unwrap().1, 160);
    // Nothing of it lacks anything.
    assert!(!all.trim("chat").unwrap());
    all.seq_cp("chat", "copy", ..64).unwrap();
    assert_eq!(all.positions("copy").unwrap().1, 64);
    let error = all.seq_rm("chat", 90..).unwrap_err();
    assert!(matches!(error, SequenceError::NoSnapshot { tokens: 90, .. }), "{error}");
    all.seq_rm("chat", 100..).unwrap();
    assert_eq!(all.positions("chat").unwrap().1, 100);
    check(&mount, &model, &sequence.tokens, 100);
}
