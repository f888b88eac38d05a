use std::fs;

use super::*;

fn event(what: &str, path: Option<&str>, from_token: Option<u64>) -> Event {
    let path = path.map(str::to_owned);
    Event { what: what.to_owned(), path, from_token, ..Event::default() }
}

fn subject(shown: &str) -> Subject {
    let path = Path::new("/mnt").join(shown);
    Subject { shown: shown.to_owned(), path, ..Subject::whole(Path::new("/mnt")) }
}

#[test]
fn what_happened_above_concerns_what_went_with_it() {
    let sequence = Some("models/m/sequences/a");
    let page = subject("models/m/sequences/a/000/0002048.safetensors");
    let deleted = |from_token| event("deleted", sequence, from_token);
    assert_eq!(page.relation(&deleted(Some(2048))), Some(Relation::Sequence));
    assert_eq!(page.relation(&deleted(None)), Some(Relation::Sequence));
    assert!(!page.concerns(&deleted(Some(4096))));
    assert!(!page.concerns(&event("damaged", sequence, None)));
    assert!(!page.concerns(&event("deleted", Some("models/m/sequences/ab"), None)));
    let tail = subject("models/m/sequences/a/000/0004096.tail");
    assert!(tail.concerns(&deleted(Some(4096))));
    let state = subject("models/m/sequences/a/000/state-0002048.safetensors");
    assert!(state.concerns(&deleted(Some(0))));
    assert!(!state.concerns(&deleted(Some(2048))), "it is what the first 2048 rows left");
    for other in ["tokens", "000", "x/0004096.tail", "000/note"] {
        let other = subject(&format!("models/m/sequences/a/{other}"));
        assert!(!other.concerns(&deleted(Some(0))));
        assert!(other.concerns(&deleted(None)));
    }
}

#[test]
fn what_happened_to_a_file_that_had_the_name_of_a_directory_is_not_what_happened_in_it() {
    for above in
        ["files/a", "models/m/notes", "models/m", "models/m/sequences", "models/.m/sequences/a"]
    {
        let below = subject(&format!("{above}/000/0000000.safetensors"));
        assert!(!below.concerns(&event("deleted", Some(above), None)), "{above}");
    }
}

#[test]
fn a_directory_concerns_what_is_below_it_and_no_namesake() {
    let directory = subject("files/pool");
    let relation = |path, what| directory.relation(&event(what, Some(path), None));
    assert_eq!(relation("files/pool/a/b", "deleted"), Some(Relation::Other));
    assert_eq!(relation("files/pool", "refused"), Some(Relation::Itself));
    assert_eq!(relation("files/pool2/a", "deleted"), None);
    assert!(!directory.concerns(&event("evicted", None, None)));
    let held = Subject { inodes: [7].into(), ..subject("files/pool") };
    assert!(held.concerns(&Event { inode: Some(7), ..event("evicted", None, None) }));
    assert!(!held.concerns(&Event { inode: Some(8), ..event("evicted", None, None) }));
    assert!(subject("").concerns(&event("evicted", None, None)));
    let lost = event(LOST, None, None);
    assert!(directory.concerns(&lost) && directory.relation(&lost).is_none());
}

#[test]
fn a_path_that_was_shortened_is_known_by_its_end() {
    let deep = |from: usize, to: usize| -> String {
        (from..to).flat_map(|number| ["/d".to_owned(), number.to_string()]).collect()
    };
    let told = format!(".../{}", &deep(30, 94)[1..]);
    let event = event("deleted", Some(&told), None);
    let relation = |path: &str| subject(path).relation(&event);
    assert_eq!(relation(&format!("files{}", deep(0, 94))), Some(Relation::Itself));
    assert_eq!(relation(&format!("files{}", deep(0, 93))), Some(Relation::Other));
    assert_eq!(relation(&format!("files{}", deep(0, 31))), Some(Relation::Other));
    for other in [deep(0, 95), deep(0, 92) + "/x/d93", deep(40, 94), deep(0, 5)] {
        assert_eq!(relation(&format!("files{other}")), None, "{other}");
    }
    // What is above what was left of the path is known by the directory in which it was.
    let above = Subject { inodes: [5, 6].into(), ..subject("files/d0/d1") };
    assert!(above.concerns(&Event { directory: Some(6), ..event.clone() }));
    assert!(!above.concerns(&Event { directory: Some(7), ..event.clone() }));
    // Cut within a name, and the directory of a sequence.
    let name = "x".repeat(1100);
    let told = format!("...{}", &format!("{name}/sequences/a")[300..]);
    let cut = Event { path: Some(told), ..event };
    let page = subject(&format!("models/{name}/sequences/a/000/0000000.safetensors"));
    assert_eq!(page.relation(&cut), Some(Relation::Sequence));
}

#[test]
fn what_goes_while_inodes_are_collected_is_passed_over() {
    let directory = tempfile::tempdir().unwrap();
    let kept = directory.path().join("kept");
    fs::create_dir(&kept).unwrap();
    fs::write(kept.join("file"), "").unwrap();
    let gone = directory.path().join("gone");
    let mut inodes = BTreeSet::new();
    collect(&gone, &mut inodes).unwrap();
    assert!(inodes.is_empty());
    collect_below(vec![kept.clone(), gone, kept.join("file")], &mut inodes).unwrap();
    assert_eq!(inodes, [kept.join("file").metadata().unwrap().ino()].into());
}
