use super::*;
use crate::FileSystem;
use crate::unmounted::{Unmounted, place};
use crate::{Lookup, OnCorrupt, Verify};
use kvfs_page::names;

/// A sequence of a page and a row behind it, of an earlier mount; the files of its tail and of its tokens are lost.
fn with_lost_rows() -> (Unmounted, [(InodeId, &'static str); 2]) {
    let unmounted = Unmounted::new();
    {
        let model = unmounted.make_model(1);
        let sequence = model.make_sequence("s", &[0], 1);
        let layer = unmounted.id_of(sequence, "000").unwrap();
        unmounted.write(layer, "0000016.tail", &[7; 64]);
    }
    // The next mount knows how long they are, and has nothing open.
    let unmounted = unmounted.again();
    let of = |parent, name| unmounted.id_of(parent, name).unwrap();
    let sequences = of(of(crate::unmounted::MODELS, "m"), names::SEQUENCES);
    let sequence = of(sequences, "s");
    let places = [(of(sequence, "000"), "0000016.tail"), (sequence, names::TOKENS)];
    for (parent, name) in places {
        let id = of(parent, name);
        let inode = unmounted.fs.core.state().inode(id).unwrap();
        let object = inode.file().unwrap().object.unwrap();
        unmounted.fs.core.store.remove_raw(object).unwrap();
    }
    (unmounted, places)
}

fn scrub(fs: &FileSystem) -> String {
    let (way, asked) = crossbeam_channel::bounded(1);
    fs.scrubs.through(way);
    fs.scrubs.ask(InodeId::ROOT, b"start").unwrap();
    crate::scrub(fs, &asked.recv().unwrap(), &|| false);
    fs.scrubs.report()
}

#[test]
fn rows_that_are_lost_are_told_of_and_can_be_removed() {
    let (unmounted, places) = with_lost_rows();
    let fs = &unmounted.fs;
    assert_eq!(fs.core.state().count_known_damage(), 0);
    for (parent, name) in places {
        let Ok(Lookup::Found(found)) = fs.lookup(parent, name.as_bytes()) else { panic!("{name}") };
        let id = found.attributes.inode;
        assert_eq!(found.attributes.size, 64, "{name}");
        assert_eq!(fs.attributes(id).unwrap().size, 64, "{name}");
        for flags in [libc::O_RDONLY, libc::O_WRONLY, libc::O_RDWR | libc::O_TRUNC] {
            assert!(matches!(fs.open_file(id, flags), Err(FsError::Corrupt)), "{name}");
        }
        let told = fs.core.observer.errors();
        let expected = format!("{name}: object ");
        let is_told =
            |line: &str| line.contains(&expected) && line.ends_with("is missing: run kvfs fsck");
        assert!(told.lines().any(is_told), "{told}");
    }
    assert_eq!(fs.core.state().count_known_damage(), 2);
    for (parent, name) in places {
        fs.unlink(&place(parent, name)).unwrap();
        assert!(unmounted.id_of(parent, name).is_none());
        unmounted.write(parent, name, &[8; 64]);
    }
    assert_eq!(fs.core.state().count_known_damage(), 0);
}

#[test]
fn a_scrub_finds_rows_that_are_lost() {
    let (unmounted, _) = with_lost_rows();
    let report = scrub(&unmounted.fs);
    assert!(report.contains("scrub_damaged_files: 2\n"), "{report}");
    assert!(report.contains("scrub_files_skipped: 0\n"), "{report}");
    assert_eq!(unmounted.fs.core.state().count_known_damage(), 2);
}

#[test]
fn rows_that_are_lost_may_count_as_a_miss() {
    let (unmounted, places) = with_lost_rows();
    let fs = &unmounted.fs;
    fs.choices.set(Verify::First, OnCorrupt::Miss);
    for (parent, name) in places {
        let id = unmounted.id_of(parent, name).unwrap();
        assert!(matches!(fs.open_file(id, libc::O_RDONLY), Err(FsError::Stale)), "{name}");
        assert!(matches!(fs.lookup(parent, name.as_bytes()), Ok(Lookup::Absent { .. })), "{name}");
        unmounted.write(parent, name, &[8; 64]);
    }
}
