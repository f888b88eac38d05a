//! Sealed and growing files stand where they mean what they were made as.

use super::*;

/// A second name of a file.
fn link(parent: InodeId, name: &'static [u8], id: InodeId) -> impl Fn(&mut Patient) {
    move |patient| {
        patient.records.name(parent, name, id);
        patient.records.inode(id, |inode| inode.links += 1);
    }
}

fn check_misplaced(parent: InodeId, name: &'static [u8], id: InodeId, expected: &str) {
    let unlink = |patient: &mut Patient| patient.records.name(parent, name, id);
    check(unlink, &[&format!("{expected}; the name is removed")], |_| ());
}

#[test]
fn a_name_that_means_something_else_is_removed() {
    const IN_LAYER: &str = "models/m/sequences/s/000";
    let elsewhere = "holds the page of another place";
    let another_kind = "holds another kind of file";
    let next = b"0000016.safetensors";
    check_misplaced(ROOT, b"x", A, "x: nothing can stand there");
    check_misplaced(LAYER, next, PAGE, &format!("{IN_LAYER}/0000016.safetensors: {elsewhere}"));
    check_misplaced(LAYER, next, STATE, &format!("{IN_LAYER}/0000016.safetensors: {elsewhere}"));
    let in_states = "models/m/sequences/s/001/0000000.safetensors";
    check_misplaced(STATES, PAGE_NAME, PAGE, &format!("{in_states}: {elsewhere}"));
    let no_file = "no ordinary file, stands where one must be";
    let place = format!("{IN_LAYER}/0000016.safetensors: {no_file}");
    check_misplaced(LAYER, next, SYMLINK, &place);
    let place = format!("{IN_LAYER}/0000032.tail: {another_kind}");
    check_misplaced(LAYER, b"0000032.tail", TAIL, &place);
    let place = format!("{IN_LAYER}/0000032.tail: {another_kind}");
    check_misplaced(LAYER, b"0000032.tail", A, &place);
    let place = format!("{IN_LAYER}/0000016.safetensors: {another_kind}");
    check_misplaced(LAYER, next, MANIFEST, &place);
}

#[test]
fn a_sealed_file_may_stand_among_ordinary_ones() {
    for (parent, name, id) in
        [(D, &b"m.json"[..], MANIFEST), (LAYER, b"copy", PAGE), (D, b"s", STATE)]
    {
        let same = link(parent, name, id);
        let mut expected = Patient::new();
        same(&mut expected);
        check(same, &[], |records| records.clone_from(&expected.records));
    }
}

#[test]
fn rows_that_stand_elsewhere_are_marked_so() {
    let mark =
        |role| move |patient: &mut Patient| patient.records.file(TAIL, |file| file.role = role);
    let what = "models/m/sequences/s/000/0000016.tail: marked as another kind of file";
    let of_another_layer = Role::Tail { start: 16, directory: STATES };
    check(mark(of_another_layer), &[what], |_| ());
    for (id, old) in [(TAIL, (LAYER, TAIL_NAME)), (TOKENS, (SEQUENCE, b"tokens"))] {
        let move_it = |records: &mut Records| {
            records.unname(old.0, old.1);
            records.name(D, b"moved", id);
        };
        let (_, report) = check(
            |patient| move_it(&mut patient.records),
            &["files/d/moved: marked as another kind of file"],
            |records| {
                move_it(records);
                records.file(id, |file| (file.role, file.unsettled) = (Role::Plain, false));
                records.remove(&keys::unsettled(id));
            },
        );
        assert_eq!(report.leftovers, Leftovers { unsettled: 1, ..Leftovers::default() });
    }
}

/// The file is a miss, and its bytes are kept.
fn check_lost(
    damage: impl FnOnce(&mut Patient), id: InodeId, (parent, name): (InodeId, &[u8]),
    expected: &[&str],
) {
    let (patient, _) = check(damage, expected, |records| {
        records.unname(parent, name);
        records.lose(id);
    });
    assert_eq!(patient.quarantined(), [object(id).to_string()]);
}

const PAGE_PLACE: (InodeId, &[u8]) = (LAYER, PAGE_NAME);
const STATE_PLACE: (InodeId, &[u8]) = (STATES, STATE_NAME);

#[test]
fn what_was_never_sealed_is_no_page() {
    check_lost(
        |patient| patient.records.file(PAGE, |file| file.role = Role::Plain),
        PAGE,
        PAGE_PLACE,
        &[
            "models/m/sequences/s/000/0000000.safetensors: was never sealed; a miss after repair, its bytes are kept in quarantine",
        ],
    );
}

#[test]
fn a_state_may_be_older_than_its_manifest() {
    let reseal = |records: &mut Records| {
        records.file(STATE, |file| file.role = Role::Plain);
        let change = |record: &mut ObjectRecord| record.kind = ObjectKind::File;
        records.change(keys::object(object(STATE)), change);
        records.count();
    };
    check(
        |patient| {
            reseal(&mut patient.records);
            let file = patient.store.open_object(object(STATE), Access::Read).unwrap();
            let checksum = Some(seal::content_checksum(file.as_ref()).unwrap());
            let change = |record: &mut ObjectRecord| record.checksum = checksum;
            patient.records.change(keys::object(object(STATE)), change);
        },
        &[],
        |records| {
            reseal(records);
            let patient = Patient::new();
            let file = patient.store.open_object(object(STATE), Access::Read).unwrap();
            let checksum = Some(seal::content_checksum(file.as_ref()).unwrap());
            let change = |record: &mut ObjectRecord| record.checksum = checksum;
            records.change(keys::object(object(STATE)), change);
        },
    );
}

fn change_page(
    id: InodeId, change: impl Fn(&mut crate::store::record::PageRecord),
) -> impl FnOnce(&mut Patient) {
    move |patient| {
        patient.records.file(id, |file| {
            let Role::Page(page) = &mut file.role else { panic!("no page") };
            change(page);
        });
    }
}

#[test]
fn a_page_of_another_model_is_removed() {
    check_lost(
        change_page(PAGE, |page| page.model = [1; 16]),
        PAGE,
        PAGE_PLACE,
        &[
            "models/m/sequences/s/000/0000000.safetensors: holds a page of another model; the name is removed",
            "inode 0000000100000021: the bytes of object 0000000100000121 are not those that were written (checksum \
             mismatch); a miss after repair, its bytes are kept in quarantine",
        ],
    );
}

#[test]
fn a_header_tells_the_same_as_the_record() {
    check_lost(
        change_page(PAGE, |page| page.tokens = 8),
        PAGE,
        PAGE_PLACE,
        &[
            "models/m/sequences/s/000/0000000.safetensors: its header tells of other tokens; a miss after repair, its bytes are kept in quarantine",
        ],
    );
    check_lost(
        change_page(STATE, |page| page.checksum = [1; 16]),
        STATE,
        STATE_PLACE,
        &[
            "models/m/sequences/s/001/state-0000016.safetensors: its header tells of other tokens; a miss after repair, its bytes are kept in quarantine",
        ],
    );
    check_lost(
        |patient| patient.overwrite(PAGE, &[0xff; 8], 0),
        PAGE,
        PAGE_PLACE,
        &["models/m/sequences/s/000/0000000.safetensors: header length *"],
    );
}

#[test]
fn what_the_remote_has_is_compared_as_a_whole() {
    let damage = |patient: &mut Patient| {
        patient.copy_to_remote(PAGE, RemoteState::Named);
        patient.overwrite(PAGE, &[0xff; 8], 0);
    };
    let (patient, _) = check(
        damage,
        &[
            "object 0000000100000121: the bytes of object 0000000100000121 are not those that were written (checksum mismatch); the remote's copy takes its place",
        ],
        |records| {
            let copy = RemoteCopy {
                content: [9; 32],
                encoding: Encoding::Raw,
                stored_bytes: 5,
                state: RemoteState::Only,
            };
            records.put(keys::remote_copy(object(PAGE)), &copy);
        },
    );
    assert_eq!(patient.quarantined(), [object(PAGE).to_string()]);
}

const CANNOT_COMPARE: &str = "the pages of the model cannot be compared with it: create it anew";

#[test]
fn a_layer_that_the_model_does_not_have_has_no_pages() {
    let rename = |records: &mut Records| {
        let place = DirectoryClass::Layer(5);
        records.unname(SEQUENCE, b"000");
        records.put(keys::inode(LAYER), &directory(place, SEQUENCE, b"005", 2));
        records.name(SEQUENCE, b"005", LAYER);
    };
    check(
        |patient| {
            rename(&mut patient.records);
            change_page(PAGE, |page| page.layer = 5)(patient);
        },
        &["models/m/sequences/s/005/0000000.safetensors: layer 5 does not exist*"],
        |records| {
            rename(records);
            records.unname(LAYER, PAGE_NAME);
            records.lose(PAGE);
        },
    );
}

#[test]
fn without_a_manifest_pages_are_left_as_they_are() {
    let path = "! models/m/manifest.json";
    let lost = "models/m/manifest.json: the bytes of object 0000000100000120";
    let forget = |records: &mut Records| {
        records.unname(MODEL, b"manifest.json");
        records.lose(MANIFEST);
    };
    check(
        |patient| {
            forget(&mut patient.records);
            patient.remove_raw(MANIFEST);
        },
        &[&format!("{path}: is missing; {CANNOT_COMPARE}")],
        forget,
    );
    // Nor does anybody say what a state is.
    let among_states = |records: &mut Records| {
        records.name(STATES, b"state-0000032.safetensors", PAGE);
        records.inode(PAGE, |inode| inode.links = 2);
        forget(records);
    };
    check(
        |patient| {
            among_states(&mut patient.records);
            patient.remove_raw(MANIFEST);
        },
        &[&format!("{path}: is missing; {CANNOT_COMPARE}")],
        among_states,
    );
    check(
        |patient| patient.remove_raw(MANIFEST),
        &[
            &format!("{path}: its bytes are missing; {CANNOT_COMPARE}"),
            &format!("{lost} are missing; a miss after repair"),
        ],
        forget,
    );
    check(
        |patient| patient.overwrite(MANIFEST, b"}", 0),
        &[
            &format!("{path}: manifest cannot be read*"),
            &format!(
                "{lost} are not those that were written (checksum mismatch); a miss after repair, its bytes are kept in quarantine"
            ),
        ],
        forget,
    );
    for state in [RemoteState::Only, RemoteState::Named] {
        let (_, report) = check(
            |patient| {
                patient.copy_to_remote(MANIFEST, state);
                patient.remove_raw(MANIFEST);
            },
            &[],
            |records| {
                let copy = RemoteCopy {
                    content: [9; 32],
                    encoding: Encoding::Raw,
                    stored_bytes: 5,
                    state: RemoteState::Only,
                };
                records.put(keys::remote_copy(object(MANIFEST)), &copy);
            },
        );
        assert_eq!(report.only_remote, 1);
    }
}
