//! A slot that is open while its sequence changes: it is what it was, or it ends with ESTALE, and is nothing in between.

use std::fs::File;
use std::io::{ErrorKind, Write};
use std::os::unix::fs::{FileExt, MetadataExt, symlink};
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::common::forks::{self, no_forks};
use crate::common::sys::{assert_errno, close, open, rename, write_and_close};
use crate::common::{Mode, Model, Mount};
use crate::writer::Sequence;

in_both_modes!(
    rows_that_come_later_change_nothing,
    pages_that_come_later_change_nothing,
    a_page_that_hides_a_tail_ends_it,
    ids_that_go_while_it_is_opened_end_it,
    without_layers_it_is_its_ids,
    replaced_files_are_not_taken_for_those_before,
    a_name_is_there_while_it_is_saved,
    what_is_made_in_a_replaced_sequence_goes_with_it,
    who_has_saved_sees_what_was_saved,
);

const TOKENS: u32 = 72;

/// A mount with a sequence of two whole pages and some rows, and its slot.
fn prepared(mode: Mode) -> (Mount, Model, Sequence, std::path::PathBuf) {
    let (mount, model) = (Mount::new(mode), Model::small());
    model.install(&mount);
    let mut sequence = Sequence::new(&model, "chat");
    sequence.append(&mount, &model, &(0..TOKENS).collect::<Vec<_>>());
    let slot = model.directory(&mount).join("slots/chat.bin");
    (mount, model, sequence, slot)
}

/// The rest of an open file, or the error that reading it ends with.
fn rest(file: &File, from: usize) -> std::io::Result<Vec<u8>> {
    let mut bytes = vec![0; 1 << 20];
    let mut filled = 0;
    loop {
        match file.read_at(&mut bytes[filled..], (from + filled) as u64)? {
            0 => break,
            count => filled += count,
        }
    }
    bytes.truncate(filled);
    Ok(bytes)
}

/// The rows that fill the page, too: the tail becomes a page, and another one begins.
fn rows_that_come_later_change_nothing(mode: Mode) {
    let (mount, model, mut sequence, slot) = prepared(mode);
    let before = std::fs::read(&slot).unwrap();
    let opened = open(&slot, libc::O_RDONLY).unwrap();
    sequence.append(&mount, &model, &(TOKENS..TOKENS + 40).collect::<Vec<_>>());
    assert!(model.page_path(&mount, "chat", 0, 64).exists());
    assert!(rest(&opened, 0).unwrap() == before);
    assert!(std::fs::read(&slot).unwrap().len() > before.len());
}

/// As engines write them: under a temporary name beside the others, which is renamed.
fn pages_that_come_later_change_nothing(mode: Mode) {
    let (mount, model) = (Mount::new(mode), Model::small());
    model.install(&mount);
    let mut sequence = Sequence::new(&model, "chat");
    sequence.append(&mount, &model, &(0..64).collect::<Vec<_>>());
    let slot = model.directory(&mount).join("slots/chat.bin");
    let before = std::fs::read(&slot).unwrap();
    let opened = open(&slot, libc::O_RDONLY).unwrap();
    let layer = model.layer(&mount, "chat", 1);
    std::fs::remove_file(model.tail_path(&mount, "chat", 1, 64)).unwrap();
    let staged = layer.join("w.tmp");
    write_and_close(&staged, &model.page(1, 64, 5)).unwrap();
    rename(&staged, model.page_path(&mount, "chat", 1, 64)).unwrap();
    write_and_close(&staged, b"something else").unwrap();
    std::fs::remove_file(&staged).unwrap();
    // The same page once more.
    let first = model.page_path(&mount, "chat", 1, 0);
    write_and_close(&staged, &std::fs::read(&first).unwrap()).unwrap();
    rename(&staged, &first).unwrap();
    assert!(rest(&opened, 0).unwrap() == before);
}

fn a_page_that_hides_a_tail_ends_it(mode: Mode) {
    let (mount, model, _, slot) = prepared(mode);
    let old = mount.files("old");
    write_and_close(&old, &model.page(1, 64, 5)).unwrap();
    let before = std::fs::read(&slot).unwrap();
    let opened = open(&slot, libc::O_RDONLY).unwrap();
    let half = before.len() / 2;
    let mut begun = vec![0; half];
    opened.read_exact_at(&mut begun, 0).unwrap();
    rename(&old, model.page_path(&mount, "chat", 1, 64)).unwrap();
    match rest(&opened, half) {
        Ok(bytes) => assert!(bytes == before[half..]),
        Err(error) => assert_eq!(error.raw_os_error(), Some(libc::ESTALE)),
    }
}

/// The head was shorter than the slot, and the thread that read it never came to its end.
fn ids_that_go_while_it_is_opened_end_it(mode: Mode) {
    let (mount, model, _, slot) = prepared(mode);
    let tokens = model.tokens_path(&mount, "chat");
    let ids = std::fs::read(&tokens).unwrap();
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                let file = open(&tokens, libc::O_WRONLY | libc::O_TRUNC).unwrap();
                (&file).write_all(&ids).unwrap();
            }
        });
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_secs(1) {
            let expected = [libc::ESTALE, libc::ENOENT];
            match std::fs::read(&slot) {
                Ok(_) => {}
                Err(error) => assert!(expected.contains(&error.raw_os_error().unwrap()), "{error}"),
            }
        }
        is_over.store(true, Ordering::Relaxed);
    });
}

fn without_layers_it_is_its_ids(mode: Mode) {
    let (mount, model) = (Mount::new(mode), Model::small());
    model.install(&mount);
    let tokens = model.tokens_path(&mount, "ids");
    std::fs::create_dir_all(tokens.parent().unwrap()).unwrap();
    write_and_close(&tokens, &[1; 4 * 15]).unwrap();
    let slot = model.directory(&mount).join("slots/ids.bin");
    let length = std::fs::metadata(&slot).unwrap().len();
    assert_eq!(std::fs::read(&slot).unwrap().len() as u64, length);
}

fn replaced_files_are_not_taken_for_those_before(mode: Mode) {
    let (mount, model, _, slot) = prepared(mode);
    let check = |what: &str, change: &dyn Fn()| {
        let before = std::fs::read(&slot).unwrap();
        for read in [0, 100, before.len() / 2] {
            let opened = open(&slot, libc::O_RDONLY).unwrap();
            let mut begun = vec![0; read];
            opened.read_exact_at(&mut begun, 0).unwrap();
            change();
            match rest(&opened, read) {
                Ok(bytes) => assert!(bytes == before[read..], "{what}, {read} bytes read before"),
                Err(error) => assert_eq!(error.raw_os_error(), Some(libc::ESTALE), "{what}"),
            }
        }
    };
    let seed = std::cell::Cell::new(100);
    let replace = |layer: u32, start: u64| {
        seed.set(seed.get() + 1);
        let page = model.page_path(&mount, "chat", layer, start);
        let temporary = page.with_extension("tmp");
        write_and_close(&temporary, &model.page(layer, start, seed.get())).unwrap();
        rename(&temporary, &page).unwrap();
    };
    check("a page is replaced", &|| replace(0, 0));
    check("pages of two layers", &|| {
        replace(0, 32);
        replace(1, 0);
    });
    check("a page that was written before", &|| {
        let old = mount.files("old");
        seed.set(seed.get() + 1);
        write_and_close(&old, &model.page(1, 32, seed.get())).unwrap();
        rename(&old, model.page_path(&mount, "chat", 1, 32)).unwrap();
    });
    let tail = model.tail_path(&mount, "chat", 1, 64);
    check("other rows in the same file", &|| {
        let rows = model.rows(9, 8);
        let file = open(&tail, libc::O_WRONLY | libc::O_TRUNC).unwrap();
        (&file).write_all(&rows).unwrap();
    });
    check("other rows in another one", &|| {
        std::fs::remove_file(&tail).unwrap();
        write_and_close(&tail, &model.rows(10, 8)).unwrap();
    });
    let opened = open(&slot, libc::O_RDONLY).unwrap();
    std::fs::remove_dir_all(model.sequence(&mount, "chat")).unwrap();
    assert_errno(rest(&opened, 0), libc::ESTALE);
}

fn save(slot: &Path, bytes: &[u8]) {
    let _quiet = no_forks();
    let mut file = File::options().write(true).create(true).truncate(true).open(slot).unwrap();
    file.write_all(bytes).unwrap();
    close(file).unwrap();
}

fn a_name_is_there_while_it_is_saved(mode: Mode) {
    const SAVES: usize = 100;
    let (_mount, _model, _, slot) = prepared(mode);
    let bytes = std::fs::read(&slot).unwrap();
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let watching = scope.spawn(|| {
            let mut looks = 0;
            while !is_over.load(Ordering::Relaxed) {
                let found = std::fs::metadata(&slot).map(|found| found.len());
                let is_absent =
                    found.as_ref().is_err_and(|error| error.kind() == ErrorKind::NotFound);
                assert!(!is_absent, "look {looks}");
                looks += 1;
            }
            looks
        });
        for _ in 0..SAVES {
            save(&slot, &bytes);
        }
        is_over.store(true, Ordering::Relaxed);
        assert!(watching.join().unwrap() > SAVES);
    });
}

/// Whoever makes a name in its directory meanwhile has it, or hears that the directory is gone: nothing is left that
/// no name leads to.
fn what_is_made_in_a_replaced_sequence_goes_with_it(mode: Mode) {
    const SAVES: usize = 150;
    let (mut mount, model, _, slot) = prepared(mode);
    let bytes = std::fs::read(&slot).unwrap();
    let sequence = model.sequence(&mount, "chat");
    let is_over = AtomicBool::new(false);
    let make_many = |name: &str, make: &dyn Fn(&Path) -> std::io::Result<()>| {
        let mut count = 0;
        for number in 0.. {
            if is_over.load(Ordering::Relaxed) {
                break;
            }
            match make(&sequence.join(format!("{name}-{number}"))) {
                Ok(()) => count += 1,
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                Err(error) => assert_eq!(error.raw_os_error(), Some(libc::ESTALE), "{error}"),
            }
        }
        count
    };
    std::thread::scope(|scope| {
        let makers = [
            scope.spawn(|| make_many(".file", &|path| File::create(path).map(drop))),
            scope.spawn(|| make_many("000/.file", &|path| File::create(path).map(drop))),
            scope.spawn(|| make_many(".directory", &|path| std::fs::create_dir(path))),
            scope.spawn(|| make_many(".link", &|path| symlink("tokens", path))),
        ];
        for _ in 0..SAVES {
            save(&slot, &bytes);
        }
        is_over.store(true, Ordering::Relaxed);
        for maker in makers {
            assert!(maker.join().unwrap() > 0, "nothing was made");
        }
    });
    assert!(mount.unmount().success(), "{}", mount.log());
    forks::succeed(Command::new(env!("CARGO_BIN_EXE_kvfs")).arg("fsck").arg(mount.store()));
}

/// Not what the kernel remembers of the sequence that had the name before.
fn who_has_saved_sees_what_was_saved(mode: Mode) {
    let (mount, model, _, slot) = prepared(mode);
    let bytes = std::fs::read(&slot).unwrap();
    let sequence = model.sequence(&mount, "chat");
    let numbers = |path: &Path| {
        let by_path = std::fs::metadata(path).unwrap().ino();
        (by_path, open(path, libc::O_RDONLY).unwrap().metadata().unwrap().ino())
    };
    let mut last = numbers(&sequence).0;
    for _ in 0..100 {
        save(&slot, &bytes);
        let (by_path, opened) = numbers(&sequence);
        assert!(by_path == opened && by_path != last, "{last}, {by_path}, {opened}");
        last = by_path;
    }
}
