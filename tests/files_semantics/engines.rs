//! How engines use a cache directory, each in its traced order of system calls.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;

use nix::fcntl::{FallocateFlags, FcntlArg, OFlag, fcntl};

use crate::common::sys::{
    assert_errno, close, getxattr, listxattr, map, map_mut, open, pwrite, rename, setxattr,
    write_and_close,
};
use crate::common::{Mode, Mount, fill};

in_both_modes!(
    vllm_blocks,
    lmcache_files,
    lmcache_gds,
    sglang_hicache,
    sglang_hf3fs,
    mooncake_buckets,
    dynamo_kvbm,
    llama_cpp_slots,
    mlx_prompt_cache,
    batched_negative_lookups,
    exclusive_temporary_names,
    attributes_and_times_go_along_with_a_rename,
);

const NEW: i32 = libc::O_WRONLY | libc::O_CREAT | libc::O_EXCL;
const MIB: usize = 1 << 20;

fn aligned(bytes: &[u8]) -> memmap2::MmapMut {
    let mut memory = memmap2::MmapMut::map_anon(bytes.len()).unwrap();
    memory.copy_from_slice(bytes);
    memory
}

/// A direct write of one piece to a temporary name, a rename, batched access(2), one direct read.
fn vllm_blocks(mode: Mode) {
    let mut mount = Mount::new(mode);
    let root = mount.files("model_1a2b_r0/abc/de_g0");
    fs::create_dir_all(&root).unwrap();
    let probe = root.join("probe");
    drop(open(&probe, NEW | libc::O_DIRECT).unwrap());
    fs::remove_file(&probe).unwrap();
    let block = fill(1, MIB);
    let path = root.join("0123.bin");
    assert_errno(fs::metadata(&path), libc::ENOENT);
    let temporary = root.join("0123.bin_x7.tmp");
    let file = open(&temporary, NEW | libc::O_DIRECT).unwrap();
    assert_eq!(pwrite(&file, &aligned(&block), 0).unwrap(), MIB);
    close(file).unwrap();
    rename(&temporary, &path).unwrap();
    for _ in 0..2 {
        nix::unistd::access(&path, nix::unistd::AccessFlags::F_OK).unwrap();
        let file = open(&path, libc::O_RDONLY | libc::O_DIRECT).unwrap();
        let mut buffer = aligned(&vec![0; MIB]);
        assert_eq!(file.read_at(&mut buffer, 0).unwrap(), MIB, "short reads unlink");
        assert!(buffer[..] == block[..]);
        drop(file);
        mount.remount();
    }
}

/// In place without a rename; or a temporary name in another directory.
fn lmcache_files(mode: Mode) {
    let mount = Mount::new(mode);
    let stat = nix::sys::statvfs::statvfs(&mount.files("")).unwrap();
    let length = usize::try_from(stat.block_size()).unwrap() * 16;
    let chunk = fill(2, length);
    let path = mount.files("model@1@0@ab12@bfloat16.pt");
    let flags = libc::O_WRONLY | libc::O_CREAT | libc::O_TRUNC | libc::O_DIRECT;
    let file = open(&path, flags).unwrap();
    assert_eq!(pwrite(&file, &aligned(&chunk), 0).unwrap(), length);
    drop(file);
    assert!(fs::read(&path).unwrap() == chunk);

    fs::create_dir(mount.files("tmp")).unwrap();
    let temporary = mount.files("tmp/chunk.data.tmp");
    for round in 0..2 {
        // Two writers use one temporary name; the last wins.
        fs::write(&temporary, fill(round, 5000)).unwrap();
        rename(&temporary, mount.files("chunk.data")).unwrap();
    }
    assert!(fs::read(mount.files("chunk.data")).unwrap() == fill(1, 5000));
}

/// A truncated file filled through a shared mapping that lives on over the rename.
fn lmcache_gds(mode: Mode) {
    let mut mount = Mount::new(mode);
    fs::create_dir_all(mount.files("ab/cd")).unwrap();
    let path = mount.files("ab/cd/key.kvcache.safetensors");
    let temporary = mount.files("ab/cd/key.kvcache.safetensors.tmp");
    let file = open(&temporary, libc::O_RDWR | libc::O_CREAT).unwrap();
    file.set_len(MIB as u64).unwrap();
    let mut mapped = map_mut(&file);
    let bytes = fill(3, MIB);
    mapped[..MIB / 2].copy_from_slice(&bytes[..MIB / 2]);
    rename(&temporary, &path).unwrap();
    mapped[MIB / 2..].copy_from_slice(&bytes[MIB / 2..]);
    drop((mapped, file));
    mount.remount();
    let reader = open(&path, libc::O_RDONLY | libc::O_NOATIME).unwrap();
    let mut header = [0; 4096];
    reader.read_exact_at(&mut header, 0).unwrap();
    assert_eq!(header[..], bytes[..4096]);
    assert!(map(&reader)[..] == bytes[..]);
}

/// A flat directory, least recently used files unlinked by what statvfs says.
fn sglang_hicache(mode: Mode) {
    let mount = Mount::new(mode);
    for index in 0..50_u64 {
        let path = mount.files(format!("{index:064x}_model_1_0.bin"));
        let temporary = path.with_extension("7c1e.tmp");
        fs::write(&temporary, fill(index, 20_000)).unwrap();
        rename(&temporary, &path).unwrap();
    }
    assert_eq!(fs::read_dir(mount.files("")).unwrap().count(), 50);
    for index in 0..25_u64 {
        fs::remove_file(mount.files(format!("{index:064x}_model_1_0.bin"))).unwrap();
    }
    let mut file = open(mount.files(format!("{:064x}_model_1_0.bin", 30)), libc::O_RDONLY).unwrap();
    let mut buffer = vec![0; 20_000];
    file.read_exact(&mut buffer).unwrap();
    assert!(buffer == fill(30, 20_000));
    assert_eq!(fs::read_dir(mount.files("")).unwrap().count(), 25);
}

/// One sparse file of a terabyte, written and synced in place.
fn sglang_hf3fs(mode: Mode) {
    let mut mount = Mount::new(mode);
    let path = mount.files("hicache.0.bin");
    let file = open(&path, libc::O_RDWR | libc::O_CREAT).unwrap();
    file.set_len(1 << 40).unwrap();
    for page in [0, 77, 99_999] {
        file.write_all_at(&fill(page, 65536), page << 16).unwrap();
        file.sync_all().unwrap();
    }
    drop(file);
    mount.crash();
    let file = open(&path, libc::O_RDONLY).unwrap();
    assert_eq!(file.metadata().unwrap().len(), 1 << 40);
    for page in [0, 77, 99_999] {
        let mut buffer = vec![0; 65536];
        file.read_exact_at(&mut buffer, page << 16).unwrap();
        assert!(buffer == fill(page, 65536));
    }
}

fn mooncake_buckets(mode: Mode) {
    let mut mount = Mount::new(mode);
    let path = mount.files("bucket_0001");
    let file = open(&path, libc::O_RDWR | libc::O_CREAT).unwrap();
    let (first, second) = (fill(1, 10_000), fill(2, 30_000));
    let pieces = [std::io::IoSlice::new(&first), std::io::IoSlice::new(&second)];
    assert_eq!(nix::sys::uio::pwritev(&file, &pieces, 0).unwrap(), 40_000);
    file.sync_data().unwrap();
    drop(file);
    mount.crash();
    let file = open(&path, libc::O_RDONLY).unwrap();
    let (mut one, mut two) = (vec![0; 10_000], vec![0; 30_000]);
    let mut pieces = [std::io::IoSliceMut::new(&mut one), std::io::IoSliceMut::new(&mut two)];
    assert_eq!(nix::sys::uio::preadv(&file, &mut pieces, 0).unwrap(), 40_000);
    assert!(one == first && two == second);
}

/// A file without a name, allocated ahead, switched to direct I/O after it was opened.
fn dynamo_kvbm(mode: Mode) {
    let mount = Mount::new(mode);
    let path = mount.files("dynamo-kvbm-XXab12");
    let file = open(&path, libc::O_RDWR | libc::O_CREAT | libc::O_EXCL).unwrap();
    fs::remove_file(&path).unwrap();
    let flags = OFlag::from_bits_retain(fcntl(&file, FcntlArg::F_GETFL).unwrap());
    fcntl(&file, FcntlArg::F_SETFL(flags | OFlag::O_DIRECT)).unwrap();
    let length = i64::try_from(4 * MIB).unwrap();
    nix::fcntl::fallocate(&file, FallocateFlags::empty(), 0, length).unwrap();
    let block = aligned(&fill(9, MIB));
    file.write_all_at(&block, MIB as u64).unwrap();
    let mut buffer = aligned(&vec![0; MIB]);
    file.read_exact_at(&mut buffer, MIB as u64).unwrap();
    assert!(buffer[..] == block[..]);
    assert_eq!(file.metadata().unwrap().len(), 4 * MIB as u64);
}

/// Small writes over the final name; a crash in between leaves the slot that was there.
fn llama_cpp_slots(mode: Mode) {
    let mut mount = Mount::new(mode);
    let path = mount.files("slot.bin");
    let save = |seed: u64, pieces: usize| {
        let mut file = fs::File::create(&path).unwrap();
        for piece in 0..pieces {
            file.write_all(&fill(seed + piece as u64, 24_000)).unwrap();
        }
        file
    };
    close(save(10, 20)).unwrap();
    crate::common::sys::sync_directory(mount.files("")).unwrap();
    let whole = fs::read(&path).unwrap();
    assert_eq!(whole.len(), 20 * 24_000);
    let half = save(50, 7);
    mount.crash();
    drop(half);
    assert!(fs::read(&path).unwrap() == whole);
}

fn mlx_prompt_cache(mode: Mode) {
    let mut mount = Mount::new(mode);
    let path = mount.files("prompt.safetensors");
    for (seed, length) in [(1, 300_000), (2, 100_000)] {
        let bytes = fill(seed, length);
        fs::write(&path, &bytes).unwrap();
        mount.remount();
        let file = open(&path, libc::O_RDONLY).unwrap();
        for offset in (0..length).step_by(30_000) {
            let mut piece = vec![0; 10_000];
            file.read_exact_at(&mut piece, offset as u64).unwrap();
            assert!(piece[..] == bytes[offset..offset + 10_000]);
        }
    }
}

/// All names of a prompt are asked for at once, before and after others have written some of them.
fn batched_negative_lookups(mode: Mode) {
    const NAMES: usize = 3000;
    let mount = Mount::new(mode);
    let path = |index: usize| mount.files(format!("{index:064x}.bin"));
    let there = || -> Vec<usize> {
        let access = |index: &usize| {
            let found = nix::unistd::access(&path(*index), nix::unistd::AccessFlags::F_OK);
            assert!(matches!(found, Ok(()) | Err(nix::errno::Errno::ENOENT)), "{found:?}");
            found.is_ok()
        };
        (0..NAMES).filter(access).collect()
    };
    // The second time the kernel answers.
    assert_eq!(there(), [0; 0]);
    assert_eq!(there(), [0; 0]);
    let staging = mount.files("staging");
    fs::create_dir(&staging).unwrap();
    std::thread::scope(|scope| {
        for writer in 0..3 {
            let (path, staging) = (&path, &staging);
            scope.spawn(move || {
                for index in (writer * 7..NAMES).step_by(70) {
                    let temporary = staging.join(format!("{index}.tmp"));
                    write_and_close(&temporary, &fill(index as u64, 100)).unwrap();
                    if writer == 0 {
                        fs::hard_link(&temporary, path(index)).unwrap();
                    } else {
                        rename(&temporary, path(index)).unwrap();
                    }
                }
            });
        }
    });
    let expected: Vec<usize> =
        (0..NAMES).filter(|index| [0, 7, 14].contains(&(index % 70))).collect();
    assert_eq!(there(), expected);
    for index in &expected {
        assert!(fs::read(path(*index)).unwrap() == fill(*index as u64, 100));
        fs::remove_file(path(*index)).unwrap();
    }
    assert_eq!(there(), [0; 0]);
}

/// Of two writers of one block the second is refused; what a dead one left is gone.
fn exclusive_temporary_names(mode: Mode) {
    let mut mount = Mount::new(mode);
    let (temporary, path) = (mount.files("block.tmp"), mount.files("block"));
    let writer = open(&temporary, NEW).unwrap();
    assert_errno(open(&temporary, NEW), libc::EEXIST);
    pwrite(&writer, &fill(1, 5000), 0).unwrap();
    crate::common::sys::sync_directory(mount.files("")).unwrap();
    mount.crash();
    drop(writer);
    assert_errno(fs::metadata(&temporary), libc::ENOENT);
    write_and_close(&temporary, &fill(2, 5000)).unwrap();
    rename(&temporary, &path).unwrap();
    assert!(fs::read(&path).unwrap() == fill(2, 5000));
}

/// What an engine notes beside its bytes takes the place of what the old file had.
fn attributes_and_times_go_along_with_a_rename(mode: Mode) {
    let mut mount = Mount::new(mode);
    fs::create_dir(mount.files("tmp")).unwrap();
    let (temporary, path) = (mount.files("tmp/chunk"), mount.files("chunk"));
    fs::write(&path, b"old").unwrap();
    setxattr(&path, "user.engine.old", b"1").unwrap();
    fs::write(&temporary, b"new").unwrap();
    setxattr(&temporary, "user.engine.shape", b"[2,4]").unwrap();
    let time =
        |seconds| std::time::SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(seconds);
    let times = fs::FileTimes::new().set_accessed(time(1_000)).set_modified(time(2_000));
    fs::File::options().write(true).open(&temporary).unwrap().set_times(times).unwrap();
    rename(&temporary, &path).unwrap();
    for _ in 0..2 {
        assert_eq!(listxattr(&path).unwrap(), ["user.engine.shape"]);
        assert_eq!(getxattr(&path, "user.engine.shape").unwrap(), "[2,4]");
        let shown = fs::metadata(&path).unwrap();
        assert_eq!(
            (shown.accessed().unwrap(), shown.modified().unwrap()),
            (time(1_000), time(2_000))
        );
        // Or the time of this look would be on record after the unmount.
        let mut bytes = Vec::new();
        let flags = libc::O_RDONLY | libc::O_NOATIME;
        std::io::Read::read_to_end(&mut open(&path, flags).unwrap(), &mut bytes).unwrap();
        assert_eq!(bytes, b"new");
        mount.remount();
    }
}
