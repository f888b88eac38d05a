//! While a file is verified to become a page nobody gets a way to its bytes, and afterwards nobody
//! has one: not by `/proc/self/fd`, which leads to a file whatever its names are.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, SystemTime};

use crate::common::sys::{
    assert_errno, close, errno, open, rename, set_modified, setxattr, write_and_close,
};
use crate::common::{Mode, Model, Mount, eventually, forks, forks::no_forks};

in_both_modes!(
    nobody_writes_to_a_page_that_is_being_sealed,
    nobody_writes_to_a_file_that_becomes_a_page,
    a_page_that_is_being_written_has_one_name,
    an_identical_page_leaves_the_other_names_alone,
);

/// So often, and until something came while a page was verified: on a busy machine that takes longer.
const ROUNDS: u64 = 12;
const ROUNDS_MAX: u64 = 150;

const NEW: i32 = libc::O_RDWR | libc::O_CREAT | libc::O_EXCL;

/// Verifying a page takes some 20 ms; several requests are served meanwhile.
fn with_large_pages(mode: Mode) -> (Mount, Model) {
    let threads = ("KVFS_THREADS".to_owned(), "4".to_owned());
    let mount = Mount::with_environment(mode, &[], vec![threads]);
    let model = Model::with(|fields| {
        (fields.num_kv_heads, fields.head_dim) = (16, 256);
        fields.page_tokens = 1024;
    });
    model.install(&mount);
    (mount, model)
}

/// Where a descriptor leads, whether the file has a name or not.
fn descriptor(file: &File) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

/// No store that a test leaves has anything to complain of.
fn assert_clean(mut mount: Mount) {
    assert!(mount.unmount().success(), "{}", mount.log());
    forks::succeed(Command::new(env!("CARGO_BIN_EXE_kvfs")).arg("fsck").arg(mount.store()));
}

/// Opens for writing what a reader has open, until it is sealed; how often that was refused.
fn attack(reader: &File, path: &Path) -> usize {
    let mut refused = 0;
    loop {
        match open(descriptor(reader), libc::O_RDWR) {
            Ok(writer) => {
                assert_errno(std::fs::metadata(path), libc::ENOENT);
                close(writer).unwrap();
                std::thread::sleep(Duration::from_millis(1));
            }
            Err(error) if error.raw_os_error() == Some(libc::ETXTBSY) => refused += 1,
            Err(error) => {
                assert_eq!(error.raw_os_error(), Some(libc::ESTALE));
                return refused;
            }
        }
    }
}

/// Seals a large page again and again, each under a name of its own, until an attack on it was refused often
/// enough; `attacked` counts how often.
fn until_refused(mode: Mode, attacked: impl Fn(u64, &Path, &[u8]) -> usize) {
    let (mount, model) = with_large_pages(mode);
    let page = model.page(0, 0, 1);
    let mut refused = 0;
    for round in 0..ROUNDS_MAX {
        if round >= ROUNDS && refused > 0 {
            break;
        }
        let _quiet = no_forks();
        let path = model.page_path(&mount, &round.to_string(), 0, 0);
        refused += attacked(round, &path, &page);
        assert!(!path.exists() || std::fs::read(&path).unwrap() == page, "round {round}");
    }
    assert!(refused > 0, "nothing came while a page was verified");
    assert_clean(mount);
}

fn nobody_writes_to_a_page_that_is_being_sealed(mode: Mode) {
    until_refused(mode, |round, path, page| {
        let half = i64::try_from(page.len() / 2).unwrap();
        let file = open(path, NEW).unwrap();
        file.write_all_at(page, 0).unwrap();
        let reader = open(descriptor(&file), libc::O_RDONLY).unwrap();
        // Through one ring, requests of one processor wait for each other.
        let closing = std::thread::Builder::new().spawn(|| close(file)).unwrap();
        if round % 2 == 0 {
            let refused = attack(&reader, path);
            closing.join().unwrap().unwrap();
            assert!(path.exists());
            return refused;
        }
        std::thread::sleep(Duration::from_millis(round % 16));
        let outcome = nix::unistd::truncate(&descriptor(&reader), half).map_err(io::Error::from);
        let code = errno(&closing.join().unwrap());
        assert!([0, libc::EINVAL].contains(&code), "{code}");
        // Either it came before, and what is left is no page, or it was refused.
        assert_eq!(path.exists(), outcome.is_err(), "{outcome:?}");
        usize::from(errno(&outcome) == libc::ETXTBSY)
    });
}

fn nobody_writes_to_a_file_that_becomes_a_page(mode: Mode) {
    until_refused(mode, |round, path, page| {
        let temporary = path.with_extension("tmp");
        write_and_close(&temporary, page).unwrap();
        let reader = open(&temporary, libc::O_RDONLY).unwrap();
        let (mut writers, mut refused) = (Vec::new(), 0);
        std::thread::scope(|scope| {
            let renaming = scope.spawn(|| rename(&temporary, path));
            std::thread::sleep(Duration::from_millis(round % 6 * 2));
            while !renaming.is_finished() {
                match open(descriptor(&reader), libc::O_RDWR) {
                    Ok(writer) => writers.push(writer),
                    outcome => refused += usize::from(errno(&outcome) == libc::ETXTBSY),
                }
            }
            renaming.join().unwrap().unwrap();
        });
        for writer in writers {
            writer.write_all_at(&[0xff; 4096], 4096).unwrap();
        }
        assert!(path.exists());
        refused
    });
}

fn a_page_that_is_being_written_has_one_name(mode: Mode) {
    let mount = Mount::new(mode);
    let model = Model::small();
    model.install(&mount);
    let link = |file: &File, to: &Path| {
        let here = nix::fcntl::AT_FDCWD;
        let follow = nix::fcntl::AtFlags::AT_SYMLINK_FOLLOW;
        nix::unistd::linkat(here, &descriptor(file), here, to, follow).map_err(io::Error::from)
    };
    let quiet = no_forks();
    for (start, bytes) in [(0, model.page(0, 0, 1)), (32, vec![7; 5000])] {
        let path = model.page_path(&mount, "chat", 0, start);
        let file = open(&path, NEW).unwrap();
        file.write_all_at(&bytes, 0).unwrap();
        let other = mount.files(start.to_string());
        assert_errno(link(&file, &other), libc::EPERM);
        let page = model.page_path(&mount, "other", 0, start);
        assert_errno(link(&file, &page), libc::EPERM);
        file.sync_all().unwrap();
        let is_page = start == 0;
        assert_eq!(close(file).is_ok(), is_page);
        assert_eq!(path.exists(), is_page);
        assert_errno(std::fs::metadata(&other), libc::ENOENT);
        assert_errno(std::fs::metadata(&page), libc::ENOENT);
    }
    // A page that is there may have as many as it likes.
    let path = model.page_path(&mount, "chat", 0, 0);
    std::fs::hard_link(&path, mount.files("x")).unwrap();
    rename(mount.files("x"), mount.files("y")).unwrap();
    assert!(std::fs::read(mount.files("y")).unwrap() == model.page(0, 0, 1));
    drop(quiet);
    assert_clean(mount);
}

fn an_identical_page_leaves_the_other_names_alone(mode: Mode) {
    let mount = Mount::new(mode);
    let model = Model::small();
    model.install(&mount);
    let page = model.page(0, 0, 1);
    let path = model.page_path(&mount, "chat", 0, 0);
    let other = model.page_path(&mount, "other", 0, 0);
    write_and_close(&path, &page).unwrap();
    std::fs::hard_link(&path, &other).unwrap();
    let before = std::fs::metadata(&other).unwrap();
    let temporary = mount.files("again");
    write_and_close(&temporary, &page).unwrap();
    std::fs::set_permissions(&temporary, PermissionsExt::from_mode(0o600)).unwrap();
    setxattr(&temporary, "user.note", b"mine").unwrap();
    let then = SystemTime::UNIX_EPOCH + Duration::from_secs(1_400_000_000);
    set_modified(&temporary, then).unwrap();
    rename(&temporary, &path).unwrap();
    let after = eventually("the other name alone", || {
        let stat = std::fs::metadata(&other).unwrap();
        (stat.nlink() == 1).then_some(stat)
    });
    let rights =
        |stat: &std::fs::Metadata| (stat.ino(), stat.mode(), stat.mtime(), stat.mtime_nsec());
    assert_eq!(rights(&after), rights(&before));
    assert_errno(crate::common::sys::getxattr(&other, "user.note"), libc::ENODATA);
    let replaced = std::fs::metadata(&path).unwrap();
    assert_eq!((replaced.mode() & 0o7777, replaced.modified().unwrap()), (0o600, then));
    assert!(std::fs::read(&path).unwrap() == page && std::fs::read(&other).unwrap() == page);
    assert_clean(mount);
}
