//! Many names in one question.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;
use std::io::{Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, symlink};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use kvfs::batch::{have_many, read_many};
use kvfs::page::batch::{Ask, Status};

use crate::asking::{answer, ask, open_batch, parse, question};
use crate::common::random::{Random, seeds};
use crate::common::sys::{assert_errno, duplicate, open, rename, write_and_close};
use crate::common::{Mode, Mount, fill};

in_both_modes!(
    a_question_says_what_system_calls_say,
    a_value_is_whole_while_it_is_replaced,
    who_shares_a_descriptor_gets_answers_to_whole_questions,
    what_is_no_question_is_refused,
    questions_come_by_every_way,
);

const LARGE: usize = (256 << 10) + 1;

/// Fills a directory with everything that a name can be.
fn make_names(directory: &Path, random: &mut Random) -> Vec<Vec<u8>> {
    let mut names = Vec::new();
    for number in 0..200_u64 {
        let mut name = format!("{number} ").into_bytes();
        name.extend([b"\n", b"\\", b" ", b"\xff"][usize::try_from(number % 4).unwrap()]);
        let path = directory.join(OsStr::from_bytes(&name));
        match random.below(12) {
            0 => {}
            1 => fs::create_dir(&path).unwrap(),
            2 => symlink("nowhere", &path).unwrap(),
            3 => symlink(directory.join("target"), &path).unwrap(),
            4 if number % 10 == 0 => write_and_close(&path, &fill(number, LARGE)).unwrap(),
            5 => write_and_close(&path, b"").unwrap(),
            _ => {
                let length = random.below(20_000);
                write_and_close(&path, &fill(number, length)).unwrap();
            }
        }
        names.push(name);
    }
    names
}

fn a_question_says_what_system_calls_say(mode: Mode) {
    let mut mount = Mount::new(mode);
    for (round, seed) in seeds(2).into_iter().enumerate() {
        let directory = mount.files(format!("round{round}"));
        fs::create_dir(&directory).unwrap();
        write_and_close(directory.join("target"), b"of a link").unwrap();
        let names = make_names(&directory, &mut Random::of(seed));
        for remounted in [false, true] {
            if remounted {
                mount.remount();
            }
            let sizes = have_many(&directory, &names).unwrap();
            let values = read_many(&directory, &names).unwrap();
            let borrowed: Vec<&[u8]> = names.iter().map(Vec::as_slice).collect();
            let path = format!("files/round{round}");
            let told = ask(mount.path(), Ask::Get, &path, &borrowed).unwrap();
            assert!(told.iter().filter(|(status, ..)| *status == Status::Here).count() > 20);
            for (name, ((size, value), told)) in
                names.iter().zip(sizes.iter().zip(values).zip(told))
            {
                let path = directory.join(OsStr::from_bytes(name));
                let expected = fs::metadata(&path).ok().map(|metadata| metadata.len());
                assert_eq!(*size, expected, "KVFS_SEED={seed}: {}", path.display());
                match (fs::read(&path), value) {
                    (Ok(expected), Ok(Some(value))) => {
                        assert!(value == expected, "{}", path.display());
                    }
                    (Err(error), Ok(None)) => {
                        assert_eq!(error.kind(), std::io::ErrorKind::NotFound);
                    }
                    (Err(error), Err(other)) => {
                        assert_eq!(
                            error.raw_os_error(),
                            other.raw_os_error(),
                            "{}",
                            path.display()
                        );
                    }
                    (expected, value) => panic!("{}: {expected:?}, told {value:?}", path.display()),
                }
                match told.0 {
                    Status::Here => {
                        assert!(told.2 == fs::read(&path).unwrap(), "{}", path.display());
                    }
                    Status::Absent => {
                        assert!(fs::symlink_metadata(&path).is_err(), "{}", path.display());
                    }
                    Status::Large => assert_eq!(told.1, LARGE as u64),
                    Status::Other => {
                        assert!(
                            !fs::symlink_metadata(&path).unwrap().is_file(),
                            "{}",
                            path.display()
                        );
                    }
                    Status::Again => {}
                    other => panic!("{}: {other:?}", path.display()),
                }
            }
        }
    }
    // Outside of a mount, the same function asks the disk.
    let beside = mount.beside("plain");
    fs::create_dir(&beside).unwrap();
    write_and_close(beside.join("a"), b"12").unwrap();
    let names: Vec<String> =
        (0..20).map(|number| format!("n{number}")).chain(["a".into()]).collect();
    let found = have_many(&beside, &names).unwrap();
    assert_eq!((found[..20].iter().flatten().count(), found[20]), (0, Some(2)));
}

/// Whoever replaces values by rename, as engines do, is read as a whole or not at all.
fn a_value_is_whole_while_it_is_replaced(mode: Mode) {
    let mount = Mount::new(mode);
    let directory = mount.files("values");
    fs::create_dir(&directory).unwrap();
    let names: Vec<String> = (0..16).map(|number| format!("v{number}")).collect();
    let is_over = AtomicBool::new(false);
    let write = |version: u8| {
        for name in &names {
            let temporary = directory.join(format!(".{name}.tmp"));
            write_and_close(&temporary, &vec![version; 1000 + usize::from(version)]).unwrap();
            rename(&temporary, directory.join(name)).unwrap();
        }
    };
    write(0);
    let versions = std::thread::scope(|scope| {
        scope.spawn(|| {
            for version in (1..=100).cycle().take_while(|_| !is_over.load(Ordering::Relaxed)) {
                write(version);
            }
        });
        let mut versions = BTreeSet::new();
        for _ in 0..300 {
            for value in read_many(&directory, &names).unwrap() {
                let value = value.unwrap().expect("a name is always there");
                assert!(value.iter().all(|byte| *byte == value[0]));
                assert_eq!(value.len(), 1000 + usize::from(value[0]));
                versions.insert(value[0]);
            }
        }
        is_over.store(true, Ordering::Relaxed);
        versions
    });
    assert!(versions.len() > 2, "only {versions:?} were seen");
}

/// Copies of a descriptor, as dup and fork make them.
fn who_shares_a_descriptor_gets_answers_to_whole_questions(mode: Mode) {
    let mount = Mount::new(mode);
    write_and_close(mount.files("a"), b"there").unwrap();
    let file = open_batch(mount.path(), 0).unwrap();
    let answered: usize = std::thread::scope(|scope| {
        let threads: Vec<_> = (1..5_u32)
            .map(|id| {
                let file = duplicate(&file);
                scope.spawn(move || {
                    let names = vec![&b"a"[..]; id as usize];
                    let question = question(Ask::Get, id, "files", &names);
                    let mut answered = 0;
                    let mut bytes = [0; 1 << 12];
                    for _ in 0..500 {
                        // Another one's question is not answered, or being written. Two reads might be of two answers.
                        if file.write_at(&question, 0).is_ok()
                            && let Ok(length) = file.read_at(&mut bytes, 0)
                        {
                            let (found, told) = parse(&bytes[..length]);
                            assert_eq!(told.len(), found as usize, "the id tells whose it is");
                            assert!(told.iter().all(|(_, _, value)| value == b"there"));
                            answered += usize::from(found == id);
                        }
                    }
                    answered
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    });
    assert!(answered > 0);
}

fn what_is_no_question_is_refused(mode: Mode) {
    let mount = Mount::new(mode);
    let raw = |names: u32, body: &[u8]| {
        let length = u32::try_from(body.len()).unwrap();
        let head = [1, names, length, 0].map(u32::to_le_bytes).concat();
        [&head[..], body].concat()
    };
    let file = open_batch(mount.path(), 0).unwrap();
    assert_errno(file.read_at(&mut [0; 16], 0), libc::EINVAL);
    for (names, body) in [
        (1, &b"files\0\0"[..]),
        (1, b"files\0.\0"),
        (1, b"files\0..\0"),
        (1, b"files\0a/b\0"),
        (1, b"files\0a"),
        (2, b"files\0a\0"),
        (0, b"files\0a\0"),
        (1, b"../etc\0passwd\0"),
        (1, b"files/..\0a\0"),
        (1, b".kvfs\0status\0"),
        (1, b"/files\0a\0"),
        (1, b"\0a\0"),
    ] {
        file.write_all_at(&raw(names, body), 0).unwrap();
        assert_errno(file.read_at(&mut [0; 100], 0), libc::EINVAL);
        assert_errno(file.read_at(&mut [0; 100], 0), libc::EINVAL);
    }
    // Four gigabytes of it, were they taken.
    let much = vec![b'a'; 1 << 20];
    let [first, endless] = [(1, 4_000_000_u32), (1, u32::MAX)]
        .map(|(names, length)| [1, names, length, 0].map(u32::to_le_bytes).concat());
    assert_errno(file.write_at(&endless, 0), libc::EFBIG);
    file.write_all_at(&first, 0).unwrap();
    let outcomes: Vec<_> = (0..4096).map(|_| file.write_at(&much, 0)).collect();
    assert!(
        outcomes[..3].iter().all(|outcome| matches!(outcome, Ok(count) if *count == much.len()))
    );
    assert!(outcomes[3..].iter().any(Result::is_err));
    // The handle goes on.
    drop(file);
    let file = open_batch(mount.path(), 0).unwrap();
    file.write_all_at(&question(Ask::Have, 9, "files", &[b"none"]), 0).unwrap();
    assert_eq!(answer(&file).unwrap(), (9, vec![(Status::Absent, 0, Vec::new())]));
    for flags in [libc::O_RDONLY, libc::O_WRONLY, libc::O_RDWR | libc::O_TRUNC] {
        assert!(open(mount.join(".kvfs/batch"), flags).is_err(), "{flags:o}");
    }
    assert_errno(file.set_len(0), libc::EPERM);
    assert!(fs::remove_file(mount.join(".kvfs/batch")).is_err());
}

fn questions_come_by_every_way(mode: Mode) {
    for options in [&["--no-io-uring"][..], &[]] {
        let mut mount = Mount::with_options(mode, options);
        for number in 0..2000 {
            write_and_close(mount.files(format!("n{number}")), &fill(number, 4096)).unwrap();
        }
        let names: Vec<Vec<u8>> = (0..2000).map(|number| format!("n{number}").into()).collect();
        let borrowed: Vec<&[u8]> = names.iter().map(Vec::as_slice).collect();
        let values = read_many(&mount.files(""), &names).unwrap();
        for (number, value) in (0..).zip(values) {
            assert!(value.unwrap().unwrap() == fill(number, 4096));
        }
        // Past the page cache, and with one position for question and answer.
        let direct = open_batch(mount.path(), libc::O_DIRECT).unwrap();
        direct.write_all_at(&question(Ask::Get, 1, "files", &borrowed[..100]), 0).unwrap();
        assert!(answer(&direct).unwrap().1.iter().all(|(status, ..)| *status == Status::Here));
        let mut plain = open_batch(mount.path(), 0).unwrap();
        plain.write_all(&question(Ask::Have, 2, "files", &borrowed[..100])).unwrap();
        std::io::Seek::rewind(&mut plain).unwrap();
        let mut text = Vec::new();
        plain.read_to_end(&mut text).unwrap();
        assert_eq!(text.len(), 16 + 100 * 16);
        drop((direct, plain));
        if options.is_empty() {
            assert!(mount.unmount().success());
            let read_only = Mount::of_store_with(mode, &["--read-only"], mount.store());
            let told = ask(read_only.path(), Ask::Get, "files", &borrowed[..3]).unwrap();
            assert!(told.iter().all(|(status, ..)| *status == Status::Here));
        }
    }
}
