//! One client's long request is nobody else's wait.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::common::disk::SmallDisk;
use crate::common::sys::{assert_errno, open, rename, threads_of, write};
use crate::common::{Mode, Model, Mount, eventually, fill};

in_both_modes!(
    a_long_copy_holds_up_nobody,
    a_giant_that_is_no_page_is_refused_at_once,
    a_tail_that_is_linked_holds_up_nobody,
    a_row_that_completes_a_page_holds_up_nobody,
    a_descriptor_that_stays_open_is_waited_for_once,
    holes_hold_up_no_commit,
);

/// Longer than this nobody waits for a `stat`, on a machine that does other things as well. One request
/// that copied all would take a second.
const STAT_MAX: Duration = Duration::from_millis(400);

/// The longest that an answer about a file took while something ran.
fn longest_stat(absent: &Path, work: impl FnOnce()) -> Duration {
    let ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let watcher = scope.spawn(|| {
            let mut longest = Duration::ZERO;
            while !ended.load(Ordering::Relaxed) {
                let begun = Instant::now();
                // A name that is not there is asked for each time.
                assert_errno(std::fs::metadata(absent), libc::ENOENT);
                longest = longest.max(begun.elapsed());
                std::thread::sleep(Duration::from_millis(1));
            }
            longest
        });
        work();
        ended.store(true, Ordering::Relaxed);
        watcher.join().unwrap()
    })
}

fn a_long_copy_holds_up_nobody(mode: Mode) {
    const BYTES: usize = 2 << 30;
    let mount = Mount::new(mode);
    let (from, to) = (mount.files("from"), mount.files("to"));
    let piece = fill(1, 16 << 20);
    let source = File::create(&from).unwrap();
    for number in 0..BYTES / piece.len() {
        source.write_all_at(&piece, (number * piece.len()) as u64).unwrap();
    }
    let absent = mount.files("absent");
    let longest = longest_stat(&absent, || {
        let source = File::open(&from).unwrap();
        let target = File::create(&to).unwrap();
        let mut copied = 0;
        while copied < BYTES {
            let left = BYTES - copied;
            let count = nix::fcntl::copy_file_range(&source, None, &target, None, left).unwrap();
            assert!(count > 0);
            copied += count;
        }
    });
    assert!(longest < STAT_MAX, "{longest:?}");
    let mut end = vec![0; piece.len()];
    File::open(&to).unwrap().read_exact_at(&mut end, (BYTES - piece.len()) as u64).unwrap();
    assert!(end == piece);
}

fn a_giant_that_is_no_page_is_refused_at_once(mode: Mode) {
    let (mount, model) = (Mount::new(mode), Model::small());
    model.install(&mount);
    let page = model.page_path(&mount, "chat", 0, 0);
    let giant = page.with_file_name(".giant.tmp");
    let page_bytes = model.page(0, 0, 1).len() as u64;
    for has_writer in [false, true] {
        let file = File::create(&giant).unwrap();
        file.write_all_at(b"no header", 0).unwrap();
        file.set_len(1 << 40).unwrap();
        let writer = has_writer.then_some(file);
        let begun = Instant::now();
        assert_errno(rename(&giant, &page), libc::EINVAL);
        assert!(begun.elapsed() < Duration::from_secs(2), "{:?}", begun.elapsed());
        drop(writer);
        std::fs::remove_file(&giant).unwrap();
    }
    // Written in place.
    let file = File::create(&page).unwrap();
    file.set_len(1 << 40).unwrap();
    assert_errno(crate::common::sys::close(file), libc::EINVAL);
    for kept in mount.quarantined() {
        let taken = std::os::unix::fs::MetadataExt::blocks(&kept.metadata().unwrap()) * 512;
        assert!(taken <= page_bytes, "{}: {taken}", kept.display());
    }
    assert_eq!(mount.status("state"), "ok");
}

/// Pages of 512 MiB, so that a tail is a large file.
fn large_pages() -> Model {
    Model::with(|fields| {
        fields.head_dim = 128;
        fields.num_kv_heads = 8;
        fields.page_tokens = 131_072;
    })
}

/// A tail that lacks the last of its 32 parts, and that part.
fn tail_of_31_parts(mount: &Mount, model: &Model) -> (File, Vec<u8>) {
    model.install(mount);
    let tail = model.tail_path(mount, "chat", 0, 0);
    let file = open(&tail, libc::O_WRONLY | libc::O_CREAT | libc::O_APPEND).unwrap();
    let rows = vec![7; model.row_bytes() * model.page_tokens() as usize / 32];
    for _ in 0..31 {
        assert_eq!(write(&file, &rows).unwrap(), rows.len());
    }
    (file, rows)
}

fn a_row_that_completes_a_page_holds_up_nobody(mode: Mode) {
    let (mount, model) = (Mount::new(mode), large_pages());
    let (file, rows) = tail_of_31_parts(&mount, &model);
    let absent = mount.files("absent");
    let longest = longest_stat(&absent, || assert_eq!(write(&file, &rows).unwrap(), rows.len()));
    assert!(longest < STAT_MAX, "{longest:?}");
    let page = model.page_path(&mount, "chat", 0, 0);
    assert!(page.metadata().unwrap().len() >= 32 * rows.len() as u64);
}

fn a_descriptor_that_stays_open_is_waited_for_once(mode: Mode) {
    const LOOKS: u32 = 20;
    let (mount, model) = (Mount::new(mode), Model::small());
    model.install(&mount);
    let page = model.page_path(&mount, "chat", 0, 0);
    let file = open(&page, libc::O_WRONLY | libc::O_CREAT | libc::O_EXCL).unwrap();
    file.write_all_at(&model.page(0, 0, 1), 0).unwrap();
    let other = file.try_clone().unwrap();
    drop(file);
    let (absent, begun) = (mount.files("absent"), Instant::now());
    let longest = longest_stat(&absent, || {
        for _ in 0..LOOKS {
            assert_errno(std::fs::metadata(&page), libc::ENOENT);
        }
    });
    // Waiting for its release each time would take a second and more.
    assert!(begun.elapsed() < Duration::from_millis(25) * LOOKS, "{:?}", begun.elapsed());
    assert!(longest < STAT_MAX, "{longest:?}");
    drop(other);
    assert!(std::fs::read(&page).unwrap() == model.page(0, 0, 1));
}

fn holes_hold_up_no_commit(mode: Mode) {
    const FILES: usize = 8;
    let mount = Mount::new(mode);
    for number in 0..FILES {
        File::create(mount.files(format!("holes {number}"))).unwrap().set_len(1 << 30).unwrap();
    }
    let small = mount.files("small");
    let begun = Instant::now();
    crate::common::sys::write_and_close(&small, b"what is synced").unwrap();
    File::open(&small).unwrap().sync_all().unwrap();
    // Reading 8 GiB of zeros takes longer.
    assert!(begun.elapsed() < Duration::from_secs(2), "{:?}", begun.elapsed());
}

fn a_tail_that_is_linked_holds_up_nobody(mode: Mode) {
    let (mount, model) = (Mount::new(mode), large_pages());
    let (_file, _rows) = tail_of_31_parts(&mount, &model);
    let tail = model.tail_path(&mount, "chat", 0, 0);
    let copy = mount.files("copy");
    // In a directory of its own: the kernel keeps the one locked in which the link is made.
    std::fs::create_dir(mount.files("other")).unwrap();
    let absent = mount.files("other/absent");
    let longest = longest_stat(&absent, || std::fs::hard_link(&tail, &copy).unwrap());
    assert!(longest < STAT_MAX, "{longest:?}");
    assert_eq!(copy.metadata().unwrap().len(), tail.metadata().unwrap().len());
}

/// Through the device: a ring has one thread. As many write to the disk as there are threads that take requests, and one more.
#[test]
fn a_disk_that_stands_still_holds_up_nobody_who_does_not_write_to_it() {
    const PIECE: usize = 1 << 20;
    // More than is kept in memory until a commit.
    const BYTES: usize = 8 * PIECE;
    require!(fuse, root, loop);
    let disk = SmallDisk::of(256 << 20);
    let store = disk.mountpoint.join("store");
    let mut mount = Mount::of_store_with(Mode::Served, &["--no-io-uring"], &store);
    mount.may_be_slow("its disk stands still");
    let known = mount.files("known");
    std::fs::write(&known, b"what was read before").unwrap();
    let is_taking = |name: &str| name.starts_with("kvfs-device-");
    let device_threads = || threads_of(mount.pid()).into_iter().filter(|one| is_taking(&one.name));
    // Served, there is a thread for each core, between two and four (`default_threads`).
    let writers = std::thread::available_parallelism().unwrap().get().clamp(2, 4) + 1;
    let files: Vec<File> = (0..writers)
        .map(|number| {
            let path = mount.files(format!("written {number}"));
            std::fs::write(&path, fill(number as u64, BYTES)).unwrap();
            File::options().write(true).open(path).unwrap()
        })
        .collect();
    assert!(std::fs::read(&known).is_ok());
    std::thread::scope(|scope| {
        // Thawed before the writers are waited for, whatever fails.
        let frozen = disk.freeze();
        for file in &files {
            scope.spawn(|| file.write_all_at(&fill(99, PIECE), 0).unwrap());
        }
        eventually("every write to wait for the disk", || {
            (device_threads().filter(|one| one.state == 'D').count() == writers).then_some(())
        });
        // Longer than a thread that rests looks for requests where there are none.
        std::thread::sleep(Duration::from_secs(3));
        let longest = longest_stat(&mount.files("absent"), || {
            for _ in 0..20 {
                assert!(std::fs::read(&known).unwrap() == b"what was read before");
                std::thread::sleep(Duration::from_millis(5));
            }
        });
        drop(frozen);
        assert!(longest < STAT_MAX, "{longest:?}");
    });
    for (number, file) in files.into_iter().enumerate() {
        drop(file);
        let mut whole = fill(number as u64, BYTES);
        whole[..PIECE].copy_from_slice(&fill(99, PIECE));
        assert!(std::fs::read(mount.files(format!("written {number}"))).unwrap() == whole);
    }
    assert_eq!(mount.status("state"), "ok");
}
