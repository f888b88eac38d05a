use super::*;
use crate::FileSystem;
use crate::unmounted::{FILES, Unmounted, place};
use crate::{Caller, IoMode};
use kvfs_page::names;

/// Bytes that are read where the request came in, and more than are sealed there.
const AT_ONCE: u64 = 256 << 10;
const MUCH: u64 = SEAL_AT_ONCE_BYTES + 1;

fn create(fs: &FileSystem, at: &Place) -> (InodeId, u64) {
    let created = fs.create(at, 0o644, Caller::DAEMON, true).unwrap();
    (created.found.attributes.inode, created.opened.handle)
}

/// Makes a file as long as that, without its bytes.
fn lengthen(fs: &FileSystem, id: InodeId, length: u64) {
    let object = {
        let state = fs.core.state();
        let inode = state.inode(id).unwrap();
        state.current_object(id, inode.file().unwrap()).unwrap()
    };
    let file =
        fs.core.store.open_object(object, kvfs_storage::store::disk::Access::ReadWrite).unwrap();
    file.set_length(length).unwrap();
}

/// A layer in which one page is being written.
fn with_page(unmounted: &Unmounted) -> (InodeId, Place, InodeId, u64) {
    let model = unmounted.make_model(1);
    let sequence = model.make_sequence("s", &[0], 0);
    let layer = unmounted.id_of(sequence, "000").unwrap();
    let page = place(layer, "0000000.safetensors");
    let (id, handle) = create(&unmounted.fs, &page);
    (layer, page, id, handle)
}

#[test]
fn a_link_waits_where_much_is_copied() {
    let unmounted = Unmounted::new();
    let (fs, model) = (&unmounted.fs, unmounted.make_model(1));
    let sequence = model.make_sequence("s", &[0], 1);
    let tokens = unmounted.id_of(sequence, names::TOKENS).unwrap();
    let file = unmounted.write(FILES, "file", b"bytes");
    let link = |id| fs.core.waits().link(id);
    lengthen(fs, tokens, AT_ONCE);
    lengthen(fs, file, MUCH);
    assert_eq!((link(tokens), link(file), link(InodeId(1_000_000))), (None, None, None));
    lengthen(fs, tokens, AT_ONCE + 1);
    assert_eq!(link(tokens), Some(Awaited::Sealing));
}

#[test]
fn a_rename_waits_where_much_is_sealed_or_copied() {
    let unmounted = Unmounted::new();
    let (fs, model) = (&unmounted.fs, unmounted.make_model(1));
    let sequence = model.make_sequence("s", &[0], 1);
    let layer = unmounted.id_of(sequence, "000").unwrap();
    let (from, page) = (place(layer, ".new"), place(layer, "0000016.safetensors"));
    let (id, handle) = create(fs, &from);
    let reads = |to: &Place| fs.core.waits().rename_reads(&from, to);
    lengthen(fs, id, AT_ONCE);
    assert_eq!(reads(&page), None);
    lengthen(fs, id, AT_ONCE + 1);
    assert_eq!(reads(&page), Some(Awaited::Sealing), "somebody writes to it: it is copied");
    assert_eq!(reads(&place(layer, "notes")), None, "it keeps its meaning");
    fs.release(handle).unwrap();
    fs.core.settle_idle().unwrap();
    assert_eq!(reads(&page), None);
    let set_length = |bytes| {
        let set = crate::SetAttributes { size: Some(bytes), ..Default::default() };
        fs.set_attributes(id, &set).unwrap();
    };
    set_length(SEAL_AT_ONCE_BYTES);
    assert_eq!(reads(&page), None);
    set_length(MUCH);
    assert_eq!(reads(&page), Some(Awaited::Sealing));
    set_length(10);
    let turn = fs.core.sealing_turns.take(&page);
    assert_eq!(reads(&page), Some(Awaited::Sealing), "something is sealed under that name");
    drop(turn);
    assert_eq!(reads(&page), None);
    assert_eq!(fs.core.waits().rename_reads(&place(layer, "absent"), &page), None);
}

#[test]
fn who_needs_a_page_waits_for_its_writer_or_its_sealing() {
    let unmounted = Unmounted::new();
    let (layer, page, id, handle) = with_page(&unmounted);
    let (fs, waits) = (&unmounted.fs, unmounted.fs.core.waits());
    let tail = place(layer, "0000000.tail");
    let kind = fs.core.state().inode(layer).unwrap().kind;
    let kvfs_storage::store::record::Kind::Directory { parent: sequence, .. } = kind else {
        panic!("a layer is a directory");
    };
    let above = place(sequence, "000");
    let all = || {
        [waits.lookup(&page), waits.making(&tail), waits.listing(layer), waits.replacing(&above)]
    };
    assert_eq!(all(), [None; 4]);
    fs.flush(handle).ok();
    assert_eq!(all(), [Some(Awaited::Local); 4], "a descriptor was closed, its release comes");
    assert_eq!(waits.lookup(&tail), None);
    assert_eq!(waits.listing(FILES), None);
    assert_eq!(waits.replacing(&place(layer, "absent")), None);
    fs.core.state().nodes.get_mut(&id).unwrap().release = ComingRelease::Overdue;
    assert_eq!(all(), [None; 4]);
    // The kernel writes back what was mapped: that may be its end.
    waits.note_written_back(handle);
    assert_eq!(fs.core.state().nodes[&id].release, ComingRelease::BehindWriteBack);
    assert_eq!(all(), [Some(Awaited::Local); 4]);
    fs.core.state().nodes.get_mut(&id).unwrap().release = ComingRelease::Soon;
    waits.note_written_back(handle);
    assert_eq!(fs.core.state().nodes[&id].release, ComingRelease::Soon, "it was not waited for");
    fs.core.state().nodes.get_mut(&id).unwrap().release = ComingRelease::Overdue;
    waits.note_written_back(handle + 1);
    assert_eq!(fs.core.state().nodes[&id].release, ComingRelease::Overdue, "another handle");
    lengthen(fs, id, SEAL_AT_ONCE_BYTES);
    assert_eq!(all(), [None; 4]);
    lengthen(fs, id, MUCH);
    assert_eq!(all(), [Some(Awaited::Sealing); 4], "there is much to seal");
    lengthen(fs, id, 0);
    let turn = fs.core.sealing_turns.take(&page);
    assert_eq!(
        (waits.lookup(&page), waits.making(&tail)),
        (Some(Awaited::Sealing), Some(Awaited::Sealing))
    );
    drop(turn);
    assert_eq!(all(), [None; 4]);
}

#[test]
fn with_passthrough_the_bytes_tell_who_is_left() {
    let unmounted = Unmounted::new();
    let (_, page, _, handle) = with_page(&unmounted);
    let fs = &unmounted.fs;
    fs.flush(handle).ok();
    assert_eq!(fs.core.waits().lookup(&page), Some(Awaited::Local));
    fs.io_mode(|| IoMode::Passthrough);
    assert_eq!(fs.core.waits().lookup(&page), None);
}

#[test]
fn a_close_waits_for_what_it_seals_and_for_others() {
    let unmounted = Unmounted::new();
    let (_, page, id, handle) = with_page(&unmounted);
    let (fs, waits) = (&unmounted.fs, unmounted.fs.core.waits());
    let plain = create(fs, &place(FILES, "file"));
    lengthen(fs, plain.0, MUCH);
    assert_eq!((waits.close(plain.1), waits.close(plain.1 + 1)), (None, None));
    fs.flush(handle).ok();
    assert_eq!(waits.close(handle), None, "its own release is what others wait for");
    let (_, other) = create(fs, &page);
    assert_eq!(waits.close(handle), None);
    assert_eq!(waits.close(other), Some(Awaited::Local));
    fs.core.state().nodes.get_mut(&id).unwrap().release = ComingRelease::Overdue;
    assert_eq!(waits.close(other), None);
    let turn = fs.core.sealing_turns.take(&page);
    assert_eq!(waits.close(other), Some(Awaited::Sealing));
    drop(turn);
    lengthen(fs, id, SEAL_AT_ONCE_BYTES);
    assert_eq!(waits.close(handle), None);
    lengthen(fs, id, MUCH);
    assert_eq!(waits.close(handle), Some(Awaited::Sealing));
    assert!(!waits.close_saves(handle) && !waits.close_saves(plain.1));
}

#[test]
fn a_page_waits_for_its_manifest() {
    let unmounted = Unmounted::new();
    let fs = &unmounted.fs;
    let model = unmounted.make_directory(crate::unmounted::MODELS, "m", (0o755, 0));
    let sequences = unmounted.make_directory(model, "sequences", (0o755, 0));
    let sequence = unmounted.make_directory(sequences, "s", (0o755, 0));
    let layer = unmounted.make_directory(sequence, "000", (0o755, 0));
    let page = place(layer, "0000000.safetensors");
    let (_, handle) = create(fs, &page);
    let waits = fs.core.waits();
    assert_eq!((waits.making(&page), waits.close(handle)), (None, None));
    let manifest = place(model, names::MANIFEST);
    let (_, writer) = create(fs, &manifest);
    assert_eq!((waits.making(&page), waits.close(handle)), (None, None));
    fs.flush(writer).ok();
    let expected = Some(Awaited::Local);
    assert_eq!((waits.making(&page), waits.close(handle)), (expected, expected));
    assert_eq!(waits.close(writer), None, "it does not wait for itself");
}

#[test]
fn making_a_file_waits_for_the_disk_unless_one_is_ready() {
    let unmounted = Unmounted::new();
    let (fs, model) = (&unmounted.fs, unmounted.make_model(1));
    let sequence = model.make_sequence("s", &[0], 0);
    let layer = unmounted.id_of(sequence, "000").unwrap();
    let creating = |parent, name| fs.core.waits().creating(&place(parent, name));
    assert!(creating(FILES, "file"));
    fs.core.make_spares();
    assert!(!creating(FILES, "file"));
    assert!(creating(layer, "0000000.tail") && creating(sequence, names::TOKENS));
}

#[test]
fn a_page_of_many_bytes_takes_long_to_seal() {
    fn check(heads: u32, page_tokens: u32, expected: bool) {
        let mut fields = kvfs_page::ManifestFields::new("m", kvfs_page::Dtype::F16, 1, heads, 128);
        fields.page_tokens = page_tokens;
        let manifest = kvfs_page::Manifest::new(fields).unwrap();
        let page =
            PagePlace::new(&manifest, kvfs_page::Layer(0), kvfs_page::TokenStart(0)).unwrap();
        assert_eq!(sealing_takes_long(&page), expected, "{heads} heads, {page_tokens} tokens");
    }
    check(8, 1024, false);
    check(16, 1024, true);
    // With its header a page of 8 MiB exactly.
    check(8, 2047, false);
    check(8, 2048, true);
}
