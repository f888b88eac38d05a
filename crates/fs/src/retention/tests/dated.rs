//! Times that somebody sets neither make a use nor undo one.

use super::*;
use crate::{NewTime, SetAttributes};
use kvfs_page::names;

const DAY: i64 = 86_400;

impl Unmounted {
    /// As `cp -a` does, which keeps the times of what it copies.
    fn set_times(&self, id: InodeId, time: Time) {
        let time = Some(NewTime::At(time));
        let set = SetAttributes { atime: time, mtime: time, ..SetAttributes::default() };
        self.fs.set_attributes(id, &set).unwrap();
    }

    fn times(&self, id: InodeId) -> (Time, Time) {
        let shown = self.fs.core.state().attributes(&self.fs.core.store, id).unwrap();
        (shown.atime, shown.mtime)
    }

    fn walk(&self) {
        run(&self.fs, &mut Retainer::default());
        self.fs.commit().unwrap();
        run(&self.fs, &mut Retainer::default());
    }
}

#[test]
fn what_was_just_copied_with_its_times_stays() {
    let mut unmounted = Unmounted::new();
    let [idle, renewed] =
        ["idle", "renewed"].map(|name| unmounted.make_directory(FILES, name, (0o755, 0)));
    let own = unmounted.write(FILES, "own", b"bytes");
    unmounted.limit(idle, AGE, &(30 * DAY).to_string());
    for id in [renewed, own] {
        unmounted.limit(id, TTL, &format!("{} renewed", 30 * DAY));
    }
    let old = at(1_000_000);
    let [here, there] = [idle, renewed].map(|parent| unmounted.write(parent, "copy", b"bytes"));
    for id in [here, there, own] {
        unmounted.set_times(id, old);
    }
    for _ in 0..2 {
        unmounted.walk();
        for id in [here, there, own] {
            assert_eq!(unmounted.times(id), (old, old), "what stat shows is what was set");
            assert_eq!(
                unmounted.fs.list_extended_attributes(id, crate::Caller::DAEMON).unwrap().len(),
                0
            );
        }
        assert_eq!((unmounted.names(idle).len(), unmounted.names(renewed).len()), (1, 1));
        assert!(unmounted.names(FILES).contains(&"own".to_owned()));
        unmounted = unmounted.again();
        unmounted.fs.retention.find_limits(&unmounted.fs.core).unwrap();
    }
    assert!(unmounted.deleted().is_empty());
    // Another ttl is about the last change, which is what somebody says that it is.
    unmounted.limit(renewed, TTL, &(30 * DAY).to_string());
    unmounted.walk();
    assert_eq!((unmounted.names(idle).len(), unmounted.names(renewed).len()), (1, 0));
}

#[test]
fn what_was_copied_last_goes_last_and_the_use_that_is_told_was_one() {
    let unmounted = Unmounted::new();
    let directory = unmounted.make_directory(FILES, "d", (0o755, 0));
    for (number, name) in (0..).zip(["first", "second", "third"]) {
        let id = unmounted.write(directory, name, &[7; 100]);
        // It was made then, and got times that say the contrary.
        unmounted.date(id, ago((3 - number) * DAY));
        unmounted.set_times(id, ago((100 + number) * DAY));
    }
    unmounted.limit(directory, QUOTA, "250");
    unmounted.walk();
    assert_eq!(unmounted.names(directory), ["second", "third"]);
    let told: Vec<_> = unmounted.deleted().into_iter().filter_map(|event| event.used).collect();
    assert_eq!(told.len(), 1);
    assert!(told[0] > ago(4 * DAY) && told[0] < ago(2 * DAY), "{told:?}");
}

#[test]
fn times_that_are_set_undo_no_use_and_make_none() {
    let unmounted = Unmounted::new();
    let fs = &unmounted.fs;
    let directory = unmounted.make_directory(FILES, "d", (0o755, 0));
    let [read, unread] = ["read", "unread"].map(|name| unmounted.write(directory, name, b"bytes"));
    for id in [read, unread] {
        unmounted.date(id, ago(40 * DAY));
    }
    fs.retention.note_use(&fs.core, read, libc::O_RDONLY);
    let old = ago(50 * DAY);
    for id in [read, unread] {
        unmounted.set_times(id, old);
    }
    record_uses(fs).unwrap();
    assert_eq!(unmounted.times(read), (old, old), "the read was before");
    unmounted.limit(directory, AGE, &(30 * DAY).to_string());
    unmounted.walk();
    assert_eq!(unmounted.names(directory), ["read"]);
    // Nobody but the daemon says when something was used.
    let name = b"user.kvfs.used";
    assert!(fs.set_extended_attribute(read, name, b"1 1", 0).is_err());
    assert!(fs.remove_extended_attribute(read, name).is_err());
    assert!(fs.extended_attribute(read, name).is_err());
}

#[test]
fn a_sequence_that_was_copied_with_its_times_stays_and_shares_its_pages() {
    let unmounted = Unmounted::new();
    let (fs, model) = (&unmounted.fs, unmounted.make_model(1));
    let old = ago(40 * DAY);
    let copy = |name: &str| {
        let sequence = unmounted.make_directory(model.sequences, name, (0o755, 0));
        let tokens: Vec<u8> = (0..16_u32).flat_map(u32::to_le_bytes).collect();
        let tokens = unmounted.write(sequence, names::TOKENS, &tokens);
        unmounted.set_times(tokens, old);
        let layer = model.make_layer(sequence, 0);
        let caller = crate::Caller { uid: 0, gid: 0 };
        let page = names::format_page(kvfs_page::TokenStart(0));
        let created = fs.create(&place(layer, &page), 0o644, caller, true).unwrap();
        fs.write(created.opened.handle, 0, &model.page(0, 0), false).unwrap();
        // Before it is closed.
        unmounted.set_times(created.found.attributes.inode, old);
        fs.flush(created.opened.handle).unwrap();
        fs.release(created.opened.handle).unwrap();
        unmounted.id_of(layer, &page).unwrap()
    };
    let first = copy("first");
    assert_eq!(unmounted.times(first), (old, old));
    unmounted.limit(model.directory, AGE, &(30 * DAY).to_string());
    unmounted.walk();
    assert_eq!(copy("second"), first, "it is the same page");
    unmounted.walk();
    assert_eq!(unmounted.names(model.sequences), ["first", "second"]);
}
