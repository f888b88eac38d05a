//! Whoever reads a conversation as a slot file uses it.

use super::*;
use crate::Lookup;
use kvfs_page::{Layout, names};

const DAY: i64 = 86_400;

impl Unmounted {
    fn seen_as(&self, parent: InodeId, name: &str) -> InodeId {
        match self.fs.lookup(parent, name.as_bytes()).unwrap() {
            Lookup::Found(found) => found.attributes.inode,
            Lookup::Absent { .. } => panic!("{name} is not there"),
        }
    }

    /// What a sequence of one layer consists of.
    fn pieces(&self, sequence: InodeId) -> Vec<InodeId> {
        let layer = self.id_of(sequence, "000").unwrap();
        let pages = self.names(layer).into_iter().map(|name| self.id_of(layer, &name));
        pages.chain([self.id_of(sequence, names::TOKENS)]).flatten().collect()
    }

    /// Opens a slot and reads so much of it.
    fn read_slot_of(&self, model: InodeId, (name, flags): (&str, i32), bytes: usize) {
        let slots = self.seen_as(model, names::SLOTS);
        let slot = self.seen_as(slots, name);
        let opened = self.fs.open_file(slot, libc::O_RDONLY | flags).unwrap();
        let mut buffer = vec![0; bytes];
        assert_eq!(self.fs.read(opened.handle, 0, &mut buffer).unwrap(), bytes);
        self.fs.release(opened.handle).unwrap();
    }
}

#[test]
fn a_conversation_that_is_read_as_a_slot_is_used() {
    let unmounted = Unmounted::new();
    // As references need it.
    let model = unmounted.make_model_of(1, |fields| fields.layout = Layout::Nhd);
    let all = ["opened", "read", "referred", "silent", "looked-at", "unread"];
    for (seed, name) in (0..).zip(all) {
        let sequence = model.make_sequence_like(name, &[0], 2, seed);
        for id in unmounted.pieces(sequence) {
            unmounted.date(id, ago(6 * DAY));
        }
    }
    let read = |name, flags, bytes| {
        unmounted.read_slot_of(model.directory, (name, flags), bytes);
    };
    read("opened.bin", 0, 0);
    // Two pages of 16 tokens, K and V of 16 elements of 2 bytes.
    read("read.bin", 0, 2 * 16 * 64);
    read("referred.ref", 0, 0);
    read("silent.bin", libc::O_NOATIME, 2 * 16 * 64);
    unmounted.seen_as(unmounted.seen_as(model.directory, names::SLOTS), "looked-at.bin");
    let noted = |name: &str| {
        let sequence = unmounted.id_of(model.sequences, name).unwrap();
        let pieces = unmounted.pieces(sequence).into_iter();
        let uses = unmounted.fs.retention.uses();
        pieces.filter(|id| uses.of(*id).is_some()).count()
    };
    assert_eq!(all.map(noted), [1, 3, 1, 0, 0, 0], "pages are used when they are read");
    unmounted.limit(model.directory, AGE, &(5 * DAY).to_string());
    unmounted.fs.commit().unwrap();
    run(&unmounted.fs, &mut Retainer::default());
    assert_eq!(unmounted.names(model.sequences), ["opened", "read", "referred"]);
}
