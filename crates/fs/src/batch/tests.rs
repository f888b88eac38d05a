use std::sync::Arc;

use super::{BYTES_OF_EACH, OPEN_OF_EACH, inode_of, is_batch};
use crate::{Caller, FileSystem, Lookup, NewNode, Place, SetAttributes};
use kvfs_observe::Observer;
use kvfs_page::batch::{
    ANSWER_HEAD_BYTES, AnswerHead, Ask, FILE_BYTES_MAX, NAMES_MAX, QUESTION_BYTES_MAX, Question,
    RECORD_BYTES, Record, Status,
};
use kvfs_storage::store::Store;
use kvfs_storage::store::record::InodeId;

const ALICE: Caller = Caller { uid: 1000, gid: 100 };
const BOB: Caller = Caller { uid: 1001, gid: 101 };

/// A store without a mount.
struct Fixture {
    fs: FileSystem,
    files: InodeId,
    _directory: tempfile::TempDir,
}

impl Fixture {
    fn new() -> Fixture {
        let directory = tempfile::tempdir().unwrap();
        let store = Store::open_or_create(&directory.path().join("store")).unwrap();
        let (sender, _invalidations) = crossbeam_channel::bounded(1);
        let (fs, _) = FileSystem::open(store, Arc::new(Observer::new()), sender).unwrap();
        let files = fs.core.state().entry(InodeId::ROOT, b"files").unwrap().unwrap().inode;
        Fixture { fs, files, _directory: directory }
    }

    fn directory(&self, parent: InodeId, name: &str, mode: u16) -> InodeId {
        let place = Place { parent, name: name.into() };
        let found = self.fs.make(&place, &NewNode::Directory, mode, ALICE).unwrap();
        found.attributes.inode
    }

    fn file(&self, parent: InodeId, name: &[u8], mode: u16, bytes: &[u8]) -> InodeId {
        let place = Place { parent, name: name.to_vec() };
        let created = self.fs.create(&place, mode, ALICE, true).unwrap();
        self.fs.write(created.opened.handle, 0, bytes, false).unwrap();
        self.fs.flush(created.opened.handle).unwrap();
        self.fs.release(created.opened.handle).unwrap();
        created.found.attributes.inode
    }

    fn open(&self, caller: Caller) -> Result<u64, i32> {
        let opened = self.fs.open_for(inode_of(caller.uid), libc::O_RDWR, caller);
        opened.map(|opened| opened.handle).map_err(|error| error.errno())
    }

    fn write(&self, handle: u64, bytes: &[u8]) -> Result<(), i32> {
        self.fs.write(handle, 0, bytes, false).map_err(|error| error.errno())
    }

    fn read(&self, handle: u64) -> Result<Vec<u8>, i32> {
        let mut answer = vec![0; 32 << 20];
        let count = self.fs.read(handle, 0, &mut answer).map_err(|error| error.errno())?;
        answer.truncate(count);
        Ok(answer)
    }

    /// What is said of names, and of the bytes of all of them.
    fn ask(
        &self, caller: Caller, ask: Ask, directory: &str, names: &[&[u8]],
    ) -> Result<(Vec<Record>, Vec<u8>), i32> {
        let handle = self.open(caller).unwrap();
        let question =
            Question { ask, id: 77, directory: directory.as_bytes(), names: names.to_vec() };
        self.write(handle, &question.to_bytes().unwrap()).unwrap();
        let answer = self.read(handle);
        self.fs.release(handle).unwrap();
        let answer = answer?;
        let (head, rest) = answer.split_at(ANSWER_HEAD_BYTES);
        let head = AnswerHead::parse(head).unwrap();
        let (records, contents) = rest.split_at(names.len() * RECORD_BYTES);
        let (count, bytes) = (u32::try_from(names.len()).unwrap(), contents.len() as u64);
        assert_eq!(head, AnswerHead { id: 77, names: count, bytes });
        let records = records.chunks(RECORD_BYTES).map(|record| Record::parse(record).unwrap());
        Ok((records.collect(), contents.to_vec()))
    }

    fn statuses(
        &self, caller: Caller, ask: Ask, directory: &str, names: &[&[u8]],
    ) -> Result<Vec<Status>, i32> {
        let (records, _) = self.ask(caller, ask, directory, names)?;
        Ok(records.into_iter().map(|record| record.status).collect())
    }
}

#[test]
fn names_and_bytes_are_told() {
    let fixture = Fixture::new();
    let values = fixture.directory(fixture.files, "values", 0o755);
    fixture.file(values, b"one", 0o644, b"1");
    fixture.file(values, b"empty", 0o644, b"");
    fixture.file(values, b"line\nbreak\xff", 0o644, b"odd name");
    fixture.directory(values, "directory", 0o755);
    let place = Place { parent: values, name: b"link".to_vec() };
    let link = NewNode::Symlink(b"one".to_vec());
    fixture.fs.make(&place, &link, 0o777, ALICE).unwrap();
    let names: [&[u8]; 7] =
        [b"one", b"none", b"empty", b"line\nbreak\xff", b"directory", b"link", b"one"];

    let (records, contents) = fixture.ask(BOB, Ask::Have, "files/values", &names).unwrap();
    let told: Vec<_> = records.iter().map(|record| (record.status, record.size)).collect();
    let (here, other) = (Status::Here, (Status::Other, 0));
    let absent = (Status::Absent, 0);
    assert_eq!(told, [(here, 1), absent, (here, 0), (here, 8), other, other, (here, 1)]);
    assert_eq!(contents, b"");

    let (records, contents) = fixture.ask(BOB, Ask::Get, "files/values", &names).unwrap();
    assert_eq!(records.iter().map(|r| (r.status, r.size)).collect::<Vec<_>>(), told);
    assert_eq!(contents, b"1odd name1");
    let metrics = crate::exposition(&fixture.fs);
    let mut told = metrics.lines().filter(|line| line.starts_with("kvfs_batch_names_total"));
    assert!(told.any(|line| line.contains("absent") && line.ends_with(" 2")), "{metrics}");
}

#[test]
fn nobody_learns_what_a_path_would_not_tell() {
    use Status::{Absent, Denied, Here, Other};
    let fixture = Fixture::new();
    for (name, mode) in [("open", 0o755), ("closed", 0o700), ("team", 0o750), ("listed", 0o744)] {
        let directory = fixture.directory(fixture.files, name, mode);
        let inner = fixture.directory(directory, "inner", 0o755);
        for parent in [directory, inner] {
            fixture.file(parent, b"all", 0o644, b"for all");
            fixture.file(parent, b"own", 0o600, b"for one");
            fixture.file(parent, b"team", 0o640, b"for some");
        }
    }
    let names: [&[u8]; 4] = [b"all", b"own", b"team", b"none"];
    let get = |caller, path: &str| fixture.statuses(caller, Ask::Get, path, &names);
    let have = |caller, path: &str| fixture.statuses(caller, Ask::Have, path, &names);
    let everything = Ok(vec![Here, Here, Here, Absent]);
    for path in ["files/open", "files/open/inner"] {
        assert_eq!(get(ALICE, path), everything);
        assert_eq!(get(Caller::DAEMON, path), everything);
        assert_eq!(have(BOB, path), everything);
        assert_eq!(get(BOB, path), Ok(vec![Here, Denied, Other, Absent]));
        assert_eq!(
            get(Caller { gid: ALICE.gid, ..BOB }, path),
            Ok(vec![Here, Denied, Here, Absent])
        );
    }
    for path in ["files/closed", "files/closed/inner", "files/closed/none", "files/listed"] {
        assert_eq!(get(BOB, path), Err(libc::EACCES), "{path}");
        assert_eq!(have(BOB, path), Err(libc::EACCES), "{path}");
    }
    // He may be in the group, and then what is not there is not told to him here either.
    for path in ["files/team", "files/team/inner", "files/team/none", "files/team/all"] {
        assert_eq!(have(BOB, path), Ok(vec![Other; 4]), "{path}");
    }
    for (path, errno) in [
        ("files/none", libc::ENOENT),
        ("files/open/all", libc::ENOTDIR),
        ("files/open/all/x", libc::ENOTDIR),
    ] {
        assert_eq!(have(BOB, path), Err(errno), "{path}");
    }
    let question = Question { ask: Ask::Have, id: 0, directory: b"files/closed", names: vec![] };
    let handle = fixture.open(BOB).unwrap();
    fixture.write(handle, &question.to_bytes().unwrap()).unwrap();
    assert_eq!(fixture.read(handle), Err(libc::EACCES));
}

#[test]
fn what_is_being_written_or_large_is_left_to_who_opens_it() {
    let fixture = Fixture::new();
    let id = fixture.file(fixture.files, b"written", 0o644, b"before");
    let large = usize::try_from(FILE_BYTES_MAX).unwrap();
    fixture.file(fixture.files, b"large", 0o644, &vec![1; large + 1]);
    fixture.file(fixture.files, b"fits", 0o644, &vec![1; large]);
    let names: [&[u8]; 3] = [b"written", b"large", b"fits"];
    let statuses = || fixture.statuses(BOB, Ask::Get, "files", &names).unwrap();
    assert_eq!(statuses(), [Status::Here, Status::Large, Status::Here]);
    let writer = fixture.fs.open_for(id, libc::O_RDWR, ALICE).unwrap().handle;
    fixture.fs.write(writer, 0, b"longer than before", false).unwrap();
    assert_eq!(statuses()[0], Status::Other);
    let (records, _) = fixture.ask(BOB, Ask::Have, "files", &names).unwrap();
    assert_eq!(records[0], Record { status: Status::Here, size: 18 });
    fixture.fs.flush(writer).unwrap();
    fixture.fs.release(writer).unwrap();
    let (_, contents) = fixture.ask(BOB, Ask::Get, "files", &names[..1]).unwrap();
    assert_eq!(contents, b"longer than before");
}

#[test]
fn what_finds_no_room_is_asked_again() {
    let fixture = Fixture::new();
    let most = usize::try_from(FILE_BYTES_MAX).unwrap();
    let names: Vec<Vec<u8>> = (0..48_u8).map(|number| format!("f{number}").into_bytes()).collect();
    for (number, name) in (0..).zip(&names) {
        fixture.file(fixture.files, name, 0o644, &vec![number; most]);
    }
    let mut left: Vec<&[u8]> = names.iter().map(Vec::as_slice).collect();
    let mut all = Vec::new();
    for _ in 0..names.len() {
        if left.is_empty() {
            break;
        }
        let (records, contents) = fixture.ask(BOB, Ask::Get, "files", &left).unwrap();
        let told = records.iter().take_while(|record| record.status != Status::Again).count();
        assert!((1..=32).contains(&told) && contents.len() == told * most);
        assert!(records[told..].iter().all(|record| record.status == Status::Again));
        all.extend(contents);
        left.drain(..told);
    }
    assert!(
        all.chunks(most).zip(0..48_u8).all(|(chunk, number)| chunk.iter().all(|b| *b == number))
    );
    assert_eq!(all.len(), 48 * most);
}

#[test]
fn a_question_is_whole_and_one_at_a_time() {
    let fixture = Fixture::new();
    fixture.file(fixture.files, b"a", 0o644, b"a");
    let question = |id| {
        let names = vec![&b"a"[..], b"b"];
        Question { ask: Ask::Have, id, directory: b"files", names }.to_bytes().unwrap()
    };
    let id_of = |answer: Vec<u8>| AnswerHead::parse(&answer).unwrap().id;
    let handle = fixture.open(BOB).unwrap();
    assert_eq!(fixture.read(handle), Err(libc::EINVAL));
    // In pieces, as a large one comes.
    for byte in question(1) {
        fixture.write(handle, &[byte]).unwrap();
    }
    // Somebody who shares the descriptor.
    assert_eq!(fixture.write(handle, &question(2)), Err(libc::EAGAIN));
    assert_eq!(fixture.read(handle).map(id_of), Ok(1));
    assert_eq!(fixture.read(handle).map(id_of), Ok(1));
    fixture.write(handle, &question(3)).unwrap();
    assert_eq!(fixture.read(handle).map(id_of), Ok(3));
    // What is refused leaves nothing behind.
    let both = [question(4), question(5)].concat();
    assert_eq!(fixture.write(handle, &both), Err(libc::EINVAL));
    let mut unknown = question(6);
    unknown[0] = 3;
    assert_eq!(fixture.write(handle, &unknown), Err(libc::EINVAL));
    fixture.write(handle, &question(7)[..20]).unwrap();
    assert_eq!(fixture.read(handle), Err(libc::EINVAL));
    fixture.write(handle, &question(8)).unwrap();
    assert_eq!(fixture.read(handle).map(id_of), Ok(8));
    for flags in [libc::O_RDONLY, libc::O_WRONLY, libc::O_RDWR | libc::O_TRUNC] {
        let refused = fixture.fs.open_for(inode_of(BOB.uid), flags, BOB);
        assert_eq!(refused.unwrap_err().errno(), libc::EPERM);
    }
}

#[test]
fn questions_are_bounded_for_each_user() {
    let fixture = Fixture::new();
    let handle = fixture.open(BOB).unwrap();
    let head = |names: u32, bytes: u32| -> Vec<u8> {
        [1, names, bytes, 0].iter().flat_map(|number: &u32| number.to_le_bytes()).collect()
    };
    let most = u32::try_from(NAMES_MAX).unwrap();
    for (names, bytes) in [(1, u32::MAX), (1, 4 << 20), (most + 1, 100), (1_000_000, 4_000_000)] {
        assert_eq!(fixture.write(handle, &head(names, bytes)), Err(libc::EFBIG), "{names} {bytes}");
    }
    // The head says less than there is.
    fixture.write(handle, &head(1, 100)).unwrap();
    assert_eq!(fixture.write(handle, &vec![b'a'; 4 << 20]), Err(libc::EFBIG));
    // What waits to be asked counts, and others have theirs.
    let half = vec![0; QUESTION_BYTES_MAX / 2];
    let long = [head(1, 4_000_000), half].concat();
    let handles: Vec<u64> = (1..OPEN_OF_EACH).map(|_| fixture.open(BOB).unwrap()).collect();
    assert_eq!(fixture.open(BOB), Err(libc::EAGAIN));
    let taken = handles.iter().map(|handle| fixture.write(*handle, &long));
    let taken: Vec<_> = taken.collect();
    // All of each, though only half of it is there: the other half of none is refused.
    let fits =
        usize::try_from(BYTES_OF_EACH).unwrap() / head(1, 4_000_000).len().strict_add(4_000_000);
    assert_eq!(taken.iter().filter(|outcome| outcome.is_ok()).count(), fits);
    assert!(taken[fits..].iter().all(|outcome| *outcome == Err(libc::ENOSPC)));
    let alice = fixture.open(ALICE).unwrap();
    fixture.write(alice, &long).unwrap();
    for handle in handles {
        fixture.fs.release(handle).unwrap();
    }
    fixture.write(handle, &long).unwrap();
}

#[test]
fn most_names_are_told_in_some_answers() {
    let fixture = Fixture::new();
    fixture.file(fixture.files, b"last", 0o644, b"x");
    let mut names: Vec<Vec<u8>> = (1..NAMES_MAX).map(|number| number.to_string().into()).collect();
    names.push(b"last".to_vec());
    let mut left: Vec<&[u8]> = names.iter().map(Vec::as_slice).collect();
    let mut last = None;
    while !left.is_empty() {
        let (records, _) = fixture.ask(BOB, Ask::Have, "files", &left).unwrap();
        let told = records.iter().take_while(|record| record.status != Status::Again).count();
        assert!(told > 0);
        last = Some(records[told - 1]);
        left.drain(..told);
    }
    assert_eq!(last, Some(Record { status: Status::Here, size: 1 }));
}

#[test]
fn a_directory_that_is_removed_is_not_there() {
    let fixture = Fixture::new();
    fixture.directory(fixture.files, "gone", 0o755);
    let handle = fixture.open(BOB).unwrap();
    let question = Question { ask: Ask::Get, id: 0, directory: b"files/gone", names: vec![b"a"] };
    fixture.write(handle, &question.to_bytes().unwrap()).unwrap();
    let place = Place { parent: fixture.files, name: b"gone".to_vec() };
    fixture.fs.remove_directory(&place).unwrap();
    assert_eq!(fixture.read(handle), Err(libc::ENOENT));
}

#[test]
fn damaged_bytes_are_in_no_answer() {
    let fixture = Fixture::new();
    let id = fixture.file(fixture.files, b"good", 0o644, b"good bytes");
    fixture.fs.commit().unwrap();
    let object = fixture.fs.core.state().inode(id).unwrap().file().unwrap().object.unwrap();
    let access = kvfs_storage::store::disk::Access::ReadWrite;
    // A node remembers what was verified: one that nobody holds does not.
    fixture.fs.forget(id, 1);
    let file = fixture.fs.core.store.open_object(object, access).unwrap();
    file.write_all_at(b"evil", 0).unwrap();
    drop(file);
    let (records, contents) = fixture.ask(BOB, Ask::Get, "files", &[b"good"]).unwrap();
    assert_eq!((records[0].status, contents), (Status::Damaged, Vec::new()));
}

#[test]
fn each_user_finds_an_inode_of_his_own_and_nothing_else() {
    let fixture = Fixture::new();
    let look_up = |parent, name: &[u8], caller| {
        let place = Place { parent, name: name.to_vec() };
        let found = fixture.fs.lookup_for(&place, caller).map_err(|error| error.errno())?;
        let Lookup::Found(found) = found else { panic!("{name:?} is absent") };
        Ok::<_, i32>((found.attributes.inode, found.name_is_stable))
    };
    let (views, is_stable) = look_up(InodeId::ROOT, b".kvfs", BOB).unwrap();
    assert!(is_stable);
    let batches = [ALICE, BOB].map(|caller| look_up(views, b"batch", caller).unwrap());
    assert!(batches[0].0 != batches[1].0 && batches.iter().all(|(id, _)| is_batch(*id)));
    assert!(batches.iter().all(|(_, is_stable)| !is_stable));
    for name in [&b"status"[..], b"metrics", b"settings", b"nothing"] {
        assert_eq!(look_up(views, name, BOB), Err(libc::EACCES));
    }
    assert!(look_up(views, b"status", Caller::DAEMON).is_ok());
    let cut = SetAttributes { size: Some(0), ..SetAttributes::default() };
    assert!(fixture.fs.set_attributes(batches[1].0, &cut).is_err());
}
