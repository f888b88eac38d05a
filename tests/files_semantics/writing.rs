//! Ways of writing: anywhere, at the end, around holes, without the page cache, by copying.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::{FileExt, MetadataExt};

use nix::fcntl::{FallocateFlags, FcntlArg, OFlag, fcntl};
use nix::unistd::{Whence, lseek};

use crate::common::sys::{assert_errno, close, open};
use crate::common::{Mode, Mount, fill};

in_both_modes!(
    two_appenders_share_the_end,
    holes_are_found_and_cost_nothing,
    what_is_written_to_a_mapping_is_no_hole,
    space_is_allocated_punched_and_zeroed,
    direct_io_reads_and_writes_whole_blocks,
    copies_between_files_stay_in_the_kernel,
    locks_exclude_each_other,
    unnamed_files_are_not_offered,
    free_space_follows_the_disk,
);

const CREATE: i32 = libc::O_RDWR | libc::O_CREAT;

fn two_appenders_share_the_end(mode: Mode) {
    let mount = Mount::new(mode);
    let path = mount.files("log");
    let mut one = open(&path, CREATE | libc::O_APPEND).unwrap();
    let mut two = open(&path, libc::O_WRONLY | libc::O_APPEND).unwrap();
    let mut expected = Vec::new();
    for line in 0..200 {
        let text = format!("{line}\n");
        let file = if line % 2 == 0 { &mut one } else { &mut two };
        file.write_all(text.as_bytes()).unwrap();
        expected.extend_from_slice(text.as_bytes());
    }
    assert_eq!(fs::read(&path).unwrap(), expected);
}

fn holes_are_found_and_cost_nothing(mode: Mode) {
    let mount = Mount::new(mode);
    let file = open(mount.files("sparse"), CREATE).unwrap();
    file.set_len(1 << 40).unwrap();
    file.write_all_at(&[1; 4096], 1 << 30).unwrap();
    let blocks = file.metadata().unwrap().blocks();
    assert!((8..1000).contains(&blocks), "{blocks} blocks");
    if mode == Mode::Served {
        // What is written to a mapping of it is the kernel's alone.
        assert_eq!(lseek(&file, 0, Whence::SeekData), Ok(0));
        assert_eq!(lseek(&file, 0, Whence::SeekHole), Ok(1 << 40));
        assert_eq!(lseek(&file, 1 << 40, Whence::SeekData), Err(nix::errno::Errno::ENXIO));
        close(file).unwrap();
    }
    let file = open(mount.files("sparse"), libc::O_RDONLY).unwrap();
    let seek = |offset, whence| lseek(&file, offset, whence);
    assert_eq!(seek(0, Whence::SeekData).unwrap(), 1 << 30);
    assert_eq!(seek(1 << 30, Whence::SeekHole).unwrap(), (1 << 30) + 4096);
    assert_eq!(seek(0, Whence::SeekHole).unwrap(), 0);
    let past_end = seek(1 << 40, Whence::SeekData);
    assert_eq!(past_end, Err(nix::errno::Errno::ENXIO));
    drop(file);

    let empty = open(mount.files("hole"), CREATE).unwrap();
    empty.set_len(10 << 20).unwrap();
    assert!(empty.metadata().unwrap().blocks() >= 1, "tar -S would drop it");
}

/// Also where it began as a small file in memory.
fn what_is_written_to_a_mapping_is_no_hole(mode: Mode) {
    let mount = Mount::new(mode);
    for middle in [10_000, 82_768, 35_000, 150_000] {
        let length = 2 * middle;
        for _ in 0..20 {
            let path = mount.files("mapped");
            let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
            file.set_len(length as u64).unwrap();
            let mut mapping = crate::common::sys::map_mut(&file);
            mapping[middle] = 7;
            let found = lseek(&file, 0, Whence::SeekData);
            let found = found.unwrap_or_else(|error| panic!("{length}: {error}"));
            assert!(usize::try_from(found).unwrap() <= middle, "{length}: {found}");
            drop((mapping, file));
            fs::remove_file(path).unwrap();
        }
    }
}

fn space_is_allocated_punched_and_zeroed(mode: Mode) {
    let mount = Mount::new(mode);
    let file = open(mount.files("file"), CREATE).unwrap();
    let allocate = |flags: FallocateFlags, offset, length| {
        Ok::<(), std::io::Error>(nix::fcntl::fallocate(&file, flags, offset, length)?)
    };
    let keep = FallocateFlags::FALLOC_FL_KEEP_SIZE;
    allocate(keep, 0, 1 << 20).unwrap();
    assert_eq!(file.metadata().unwrap().len(), 0);
    assert!(file.metadata().unwrap().blocks() >= 2048);
    allocate(FallocateFlags::empty(), 0, 64 << 10).unwrap();
    assert_eq!(file.metadata().unwrap().len(), 64 << 10);

    let bytes = fill(3, 64 << 10);
    file.write_all_at(&bytes, 0).unwrap();
    allocate(keep | FallocateFlags::FALLOC_FL_PUNCH_HOLE, 4096, 8192).unwrap();
    allocate(FallocateFlags::FALLOC_FL_ZERO_RANGE, 32768, 10).unwrap();
    let mut expected = bytes;
    expected[4096..4096 + 8192].fill(0);
    expected[32768..32778].fill(0);
    assert!(fs::read(mount.files("file")).unwrap() == expected);
    let collapse = allocate(FallocateFlags::FALLOC_FL_COLLAPSE_RANGE, 0, 4096);
    assert_errno(collapse, libc::EOPNOTSUPP);

    let reader = open(mount.files("file"), libc::O_RDONLY).unwrap();
    let refused = nix::fcntl::fallocate(&reader, keep, 0, 10);
    assert_eq!(refused, Err(nix::errno::Errno::EBADF));
}

/// Memory whose address is a multiple of a page.
fn aligned(bytes: &[u8]) -> memmap2::MmapMut {
    let mut memory = memmap2::MmapMut::map_anon(bytes.len()).unwrap();
    memory.copy_from_slice(bytes);
    memory
}

fn direct_io_reads_and_writes_whole_blocks(mode: Mode) {
    let mount = Mount::new(mode);
    let path = mount.files("file");
    let bytes = fill(5, 1 << 20);
    let writer = open(&path, CREATE | libc::O_DIRECT).unwrap();
    writer.write_all_at(&aligned(&bytes), 0).unwrap();
    close(writer).unwrap();
    let reader = open(&path, libc::O_RDONLY | libc::O_DIRECT).unwrap();
    let mut buffer = aligned(&vec![0; 1 << 20]);
    assert_eq!(reader.read_at(&mut buffer, 0).unwrap(), 1 << 20);
    assert!(buffer[..] == bytes[..]);

    let later = open(&path, libc::O_RDWR).unwrap();
    let flags = OFlag::from_bits_retain(fcntl(&later, FcntlArg::F_GETFL).unwrap());
    fcntl(&later, FcntlArg::F_SETFL(flags | OFlag::O_DIRECT)).unwrap();
    later.write_all_at(&aligned(&[9; 8192]), 4096).unwrap();
    assert_eq!(later.read_at(&mut buffer, 0).unwrap(), 1 << 20);
    assert!(buffer[..4096] == bytes[..4096] && buffer[4096..12288] == [9; 8192]);
}

fn copies_between_files_stay_in_the_kernel(mode: Mode) {
    let mount = Mount::new(mode);
    let bytes = fill(7, 300_000);
    fs::write(mount.files("from"), &bytes).unwrap();
    let from = open(mount.files("from"), libc::O_RDONLY).unwrap();
    let to = open(mount.files("to"), CREATE).unwrap();
    let mut copied = 0;
    while copied < bytes.len() {
        let mut source = i64::try_from(copied).unwrap();
        let mut target = source;
        let (source, target) = (Some(&mut source), Some(&mut target));
        let count = nix::fcntl::copy_file_range(&from, source, &to, target, 1 << 20).unwrap();
        assert!(count > 0);
        copied += count;
    }
    assert!(fs::read(mount.files("to")).unwrap() == bytes);

    let sent = open(mount.files("sent"), CREATE).unwrap();
    let mut offset = 0;
    while usize::try_from(offset).unwrap() < bytes.len() {
        let count = nix::sys::sendfile::sendfile(&sent, &from, Some(&mut offset), 1 << 20);
        assert!(count.unwrap() > 0);
    }
    assert!(fs::read(mount.files("sent")).unwrap() == bytes);
    fs::copy(mount.files("sent"), mount.files("again")).unwrap();
    assert!(fs::read(mount.files("again")).unwrap() == bytes);
}

fn locks_exclude_each_other(mode: Mode) {
    let mount = Mount::new(mode);
    let path = mount.files("lock");
    let one = open(&path, CREATE).unwrap();
    let two = open(&path, libc::O_RDWR).unwrap();
    one.lock().unwrap();
    assert!(matches!(two.try_lock(), Err(fs::TryLockError::WouldBlock)));
    one.unlock().unwrap();
    two.try_lock().unwrap();

    let region = libc::flock {
        l_type: i16::try_from(libc::F_WRLCK).unwrap(),
        l_whence: i16::try_from(libc::SEEK_SET).unwrap(),
        l_start: 0,
        l_len: 10,
        l_pid: 0,
    };
    let lock = |file: &File| fcntl(file, FcntlArg::F_OFD_SETLK(&region));
    lock(&one).unwrap();
    assert_eq!(lock(&two), Err(nix::errno::Errno::EAGAIN));
}

fn unnamed_files_are_not_offered(mode: Mode) {
    let mount = Mount::new(mode);
    let outcome = open(mount.files(""), libc::O_TMPFILE | libc::O_RDWR);
    assert_errno(outcome, libc::EOPNOTSUPP);
    fs::write(mount.files("there"), b"").unwrap();
    let again = open(mount.files("there"), CREATE | libc::O_EXCL);
    assert_errno(again, libc::EEXIST);
}

fn free_space_follows_the_disk(mode: Mode) {
    let mount = Mount::new(mode);
    let ours = nix::sys::statvfs::statvfs(&mount.files("")).unwrap();
    let theirs = nix::sys::statvfs::statvfs(mount.store()).unwrap();
    assert_eq!(ours.block_size(), 4096);
    assert_eq!(ours.name_max(), 255);
    let bytes = |stat: &nix::sys::statvfs::Statvfs| stat.blocks_available() * stat.fragment_size();
    let apart = bytes(&ours).abs_diff(bytes(&theirs));
    assert!(apart < 1 << 30, "{apart} bytes apart");
    assert_eq!(ours.blocks() * 4096, theirs.blocks() * theirs.fragment_size());
}
