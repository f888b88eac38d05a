//! A remote in which somebody else puts what he likes under the names of objects: what he puts is an
//! error for whoever opens the file, never bytes, never a way out of the remote, never much memory.

use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use kvfs::tier::encoding::{Lossless, Subject, ZstdLevel, encode};

use crate::common::mount::scratch_directory;
use crate::common::sys::open;
use crate::common::{Mode, eventually};
use crate::faults::files_below;
use crate::place::{Place, tier};

in_both_modes!(what_somebody_else_put_there_is_an_error, nothing_is_readable_by_others);

/// What a bomb unpacks to.
const BOMB_BYTES: u64 = 1 << 30;
/// What the daemon may take more because of it.
const MEMORY_MAX: u64 = 64 << 20;

/// Most memory that the daemon has had, in bytes.
fn peak(place: &Place) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", place.mount.pid())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}

/// Files that only the remote has, and its copies of all files, after a mount that knows no bytes.
fn away(place: &mut Place) -> (Vec<PathBuf>, Vec<PathBuf>) {
    let files = place.write("f", 12);
    place.wait_until_it_fits();
    place.wait_until_uploaded();
    place.mount.remount();
    let paths = files.into_iter().map(|(path, _)| path);
    let away: Vec<PathBuf> = paths.filter(|path| tier(path) == "remote").collect();
    assert!(away.len() >= 5, "{} files are away", away.len());
    (away, files_below(&place.remote.join("blobs")))
}

/// A copy that decodes to a gigabyte of zeros, in the encoding of the copies here.
fn bomb() -> Vec<u8> {
    let mut blob = Vec::new();
    let mut zeros = std::io::Read::take(std::io::repeat(0), BOMB_BYTES);
    let how = Lossless::Zstd(ZstdLevel::FASTEST);
    encode(&mut zeros, BOMB_BYTES, how, &Subject::File, &mut blob).unwrap();
    assert!(blob.len() < 1 << 20);
    blob
}

fn replace(blob: &Path, attack: impl FnOnce(&Path)) {
    std::fs::remove_file(blob).unwrap();
    attack(blob);
}

fn what_somebody_else_put_there_is_an_error(mode: Mode) {
    let mut place = Place::with_budget(mode, &["--cold", "zstd:1"]);
    let (away, blobs) = away(&mut place);
    let outside = scratch_directory();
    let secret = outside.path().join("secret");
    let bomb = bomb();
    let healthy: Vec<Vec<u8>> = blobs.iter().map(|blob| std::fs::read(blob).unwrap()).collect();
    // All copies are attacked, since names do not tell whose they are.
    let attacks: [(&str, &dyn Fn(usize)); 6] = [
        ("another object's copy", &|at| {
            let other = &healthy[(at + 1) % healthy.len()];
            replace(&blobs[at], |blob| std::fs::write(blob, other).unwrap());
        }),
        ("a bomb", &|at| replace(&blobs[at], |blob| std::fs::write(blob, &bomb).unwrap())),
        ("a link to the right bytes elsewhere", &|at| {
            let target = secret.with_extension(at.to_string());
            std::fs::write(&target, &healthy[at]).unwrap();
            replace(&blobs[at], |blob| symlink(target, blob).unwrap());
        }),
        ("a pipe", &|at| {
            let mode = nix::sys::stat::Mode::from_bits_truncate(0o600);
            replace(&blobs[at], |blob| nix::unistd::mkfifo(blob, mode).unwrap());
        }),
        ("a directory", &|at| replace(&blobs[at], |blob| std::fs::create_dir(blob).unwrap())),
        ("nothing", &|at| replace(&blobs[at], |_| {})),
    ];
    let before = peak(&place);
    for (what, attack) in attacks {
        (0..blobs.len()).for_each(attack);
        for path in &away {
            let error = open(path, libc::O_RDONLY).expect_err(what);
            let errno = error.raw_os_error();
            assert!(matches!(errno, Some(libc::EIO | libc::ETIMEDOUT)), "{what}: {error}");
            assert_eq!(tier(path), "remote", "{what}: nothing of it became visible");
        }
        for (blob, bytes) in blobs.iter().zip(&healthy) {
            let _ = std::fs::remove_file(blob);
            let _ = std::fs::remove_dir(blob);
            std::fs::write(blob, bytes).unwrap();
        }
    }
    let taken = peak(&place) - before;
    assert!(taken < MEMORY_MAX, "{taken} bytes");
    assert_eq!(place.mount.staging(), Vec::<PathBuf>::new());
    // A directory of the remote that leads out of it.
    let shards = place.remote.join("blobs");
    crate::common::sys::rename(&shards, outside.path().join("blobs")).unwrap();
    symlink(outside.path().join("blobs"), &shards).unwrap();
    assert!(open(&away[0], libc::O_RDONLY).is_err());
    std::fs::remove_file(&shards).unwrap();
    crate::common::sys::rename(outside.path().join("blobs"), &shards).unwrap();
    eventually("the remote to be back", || open(&away[0], libc::O_RDONLY).ok());
}

fn nothing_is_readable_by_others(mode: Mode) {
    let mut place = Place::with_budget(mode, &["--cold", "zstd:1"]);
    // What is made in a remote may be read by those who may read the remote.
    std::fs::set_permissions(&place.remote, std::fs::Permissions::from_mode(0o700)).unwrap();
    place.mount.remount();
    away(&mut place);
    let store = place.mount.store().to_owned();
    let places = ["blobs", "names", "chunks"].map(|name| place.remote.join(name));
    for path in places.iter().chain([&store]).flat_map(|place| files_below(place)) {
        let mode = path.metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o077, 0, "{}: {mode:o}", path.display());
    }
}
