//! The daemon is killed at every single change that it makes to the disk while objects are encoded,
//! rounded, uploaded, leave and come back: each file has its bytes afterwards, and moving goes on.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvfs::fs::{
    Caller, FileSystem, FsError, IoMode, Lookup, Mover, NewNode, Place, RemoteMemory, Tiers,
    move_objects, survey, sweep_after_crash,
};
use kvfs::observe::Observer;
use kvfs::page::{Dtype, PageView};
use kvfs::store::Store;
use kvfs::store::fsck::{self, FsckOptions};
use kvfs::store::record::InodeId;
use kvfs::tier::counters::Counters;
use kvfs::tier::encoded::EncodedCopies;
use kvfs::tier::encoding::{ColdEncoding, ZstdLevel};
use kvfs::tier::exchange::Exchange;
use kvfs::tier::remote::hold::Grace;
use kvfs::tier::remote::names::Publisher;
use kvfs::tier::remote::{self, BlobStore, Remote, RemoteSpec};
use kvfs::tier::ssd::SsdTier;

use crate::common::forks::no_forks;
use crate::common::{Model, fill};
use crate::dying_disk::{DyingDisk, Life};

const FILES: InodeId = InodeId(3);
const MODELS: InodeId = InodeId(2);
const COUNT: u64 = 4;
const FILE_BYTES: usize = 160 << 10;
/// Two of the files fit.
const BUDGET_BYTES: u64 = 2 * (FILE_BYTES as u64) + (64 << 10);
const CALLER: Caller = Caller { uid: 0, gid: 0 };

const ZSTD: ColdEncoding = ColdEncoding::Zstd(ZstdLevel::DEFAULT);

/// What moves, and how.
#[derive(Clone, Copy)]
struct Case {
    has_remote: bool,
    cold: ColdEncoding,
    /// Pages of a model that may be rounded, instead of plain files.
    is_lossy: bool,
    /// Everything that moves has moved before, and is read while the daemon dies.
    comes_back: bool,
}

const LEAVING: Case =
    Case { has_remote: true, cold: ColdEncoding::None, is_lossy: false, comes_back: false };
const ENCODING: Case = Case { has_remote: false, cold: ZSTD, ..LEAVING };

#[test]
fn leaving_for_the_remote() {
    kill_at_every_step(LEAVING);
}

#[test]
fn encoding_on_the_disk() {
    kill_at_every_step(ENCODING);
}

#[test]
fn rounding_pages() {
    kill_at_every_step(Case { is_lossy: true, ..ENCODING });
}

#[test]
fn coming_back_from_the_remote() {
    kill_at_every_step(Case { comes_back: true, ..LEAVING });
}

#[test]
fn decoding() {
    kill_at_every_step(Case { comes_back: true, ..ENCODING });
}

fn kill_at_every_step(case: Case) {
    let _quiet = no_forks();
    let template = directory_in_memory();
    let files = case.write(template.path());
    let mut killed = 0;
    for changes in 0.. {
        let directory = directory_in_memory();
        for part in ["store", "remote"] {
            copy_tree(&template.path().join(part), &directory.path().join(part));
        }
        let life = Life::of(changes);
        if case.comes_back {
            case.read_all(directory.path(), &files, &life);
        } else {
            case.move_until_it_fits(directory.path(), Some(&life));
        }
        killed += u64::from(life.is_over());
        case.check(directory.path(), &files, changes);
        case.move_until_it_fits(directory.path(), None);
        case.check(directory.path(), &files, changes);
        let store = Store::open(&directory.path().join("store")).unwrap();
        let report = fsck::run(&store, &FsckOptions::default(), &|_, _| {}).unwrap();
        assert!(report.findings.is_empty(), "{changes} changes: {:?}", report.findings);
        if !life.is_over() {
            break;
        }
    }
    eprintln!("killed at {killed} changes");
    assert!(killed >= 20, "{killed}");
}

/// Killing leaves what the page cache has, so nothing here needs a disk, and its syncs take long.
fn directory_in_memory() -> tempfile::TempDir {
    let memory = Path::new("/dev/shm");
    if memory.is_dir() {
        tempfile::tempdir_in(memory).unwrap()
    } else {
        crate::common::mount::scratch_directory()
    }
}

fn copy_tree(from: &Path, to: &Path) {
    std::fs::create_dir(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy_tree(&entry.path(), &target);
        } else {
            std::fs::copy(entry.path(), target).unwrap();
        }
    }
}

/// Bytes of raw objects on the disk, and of encoded ones.
fn used_bytes(directory: &Path) -> u64 {
    let mut used = 0;
    let mut directories = vec![directory.join("store/objects")];
    while let Some(next) = directories.pop() {
        for entry in std::fs::read_dir(next).unwrap() {
            let entry = entry.unwrap();
            if entry.file_type().unwrap().is_dir() {
                directories.push(entry.path());
            } else {
                used += entry.metadata().unwrap().len();
            }
        }
    }
    used
}

fn open(directory: &Path, life: Option<&Arc<Life>>) -> Option<FileSystem> {
    let mut store = Store::open_or_create(&directory.join("store")).unwrap();
    if let Some(life) = life {
        let below = Arc::clone(&store.disk);
        store.disk = Arc::new(DyingDisk { below, life: Arc::clone(life) });
    }
    let (invalidations, _) = crossbeam_channel::bounded(1);
    let opened = FileSystem::open(store, Arc::new(Observer::new()), invalidations);
    let (fs, _) = match (opened, life) {
        (Err(_), Some(life)) if life.is_over() => return None,
        (outcome, _) => outcome.unwrap(),
    };
    fs.io_mode(|| IoMode::Served("no kernel".to_owned()));
    Some(fs)
}

impl Case {
    fn model() -> Model {
        Model::with(|fields| {
            (fields.dtype, fields.page_tokens, fields.head_dim) = (Dtype::F16, 304, 64);
            fields.cold_encoding = Some("q8_0".to_owned());
        })
    }

    /// Makes a store with files in it, durable and at rest.
    fn write(self, directory: &Path) -> Vec<(Place, Vec<u8>)> {
        let fs = open(directory, None).unwrap();
        let files = if self.is_lossy { write_pages(&fs) } else { write_files(&fs) };
        fs.commit_and_close().unwrap();
        drop(fs);
        std::fs::create_dir(directory.join("remote")).unwrap();
        if self.comes_back {
            self.move_until_it_fits(directory, None);
        }
        files
    }

    /// Reads everything until the life is over; then moving goes on as always.
    fn read_all(self, directory: &Path, files: &[(Place, Vec<u8>)], life: &Arc<Life>) {
        let Some(mut fs) = open(directory, Some(life)) else { return };
        if RemoteMemory::of(&fs.core).identity().is_err() && life.is_over() {
            return;
        }
        let _mover = self.attach(&mut fs, directory);
        let surveyed = survey(&fs);
        assert!(surveyed.is_ok() || life.is_over(), "{surveyed:?}");
        for (place, expected) in files {
            match read(&fs, place, expected.len()) {
                Ok(found) => assert!(found == *expected, "{place:?}"),
                Err(error) => assert!(life.is_over(), "{place:?}: {error}"),
            }
        }
        if !life.is_over() {
            let outcome = fs.commit_and_close();
            assert!(outcome.is_ok() || life.is_over(), "{outcome:?}");
        }
    }

    fn attach(self, fs: &mut FileSystem, directory: &Path) -> Mover {
        let (exchange, publisher) = self.has_remote.then(|| self.connect(fs, directory)).unzip();
        let ssd = SsdTier::new(Some(BUDGET_BYTES));
        let encoded = EncodedCopies::new(self.cold, Some(BUDGET_BYTES));
        fs.attach(Tiers::new(exchange, ssd, encoded, Counters::default()));
        Mover::new(publisher)
    }

    fn connect(self, fs: &FileSystem, directory: &Path) -> (Exchange, Publisher) {
        let (id, expected) = RemoteMemory::of(&fs.core).identity().unwrap();
        let options = remote::Options { expected, ..remote::Options::default() };
        let place = RemoteSpec::Directory(directory.join("remote"));
        let remote = Arc::new(Remote::open(&place, options).unwrap());
        let store = Arc::clone(&remote) as Arc<dyn BlobStore>;
        let grace = Grace::default();
        (Exchange::new(remote, grace, self.cold), Publisher::new(store, id, grace).unwrap())
    }

    /// Lets objects move until the disk holds no more than it should, or its life is over.
    fn move_until_it_fits(self, directory: &Path, life: Option<&Arc<Life>>) {
        let is_over = || life.is_some_and(|life| life.is_over());
        let Some(mut fs) = open(directory, life) else { return };
        if RemoteMemory::of(&fs.core).identity().is_err() && is_over() {
            return;
        }
        let mut mover = self.attach(&mut fs, directory);
        let _ = sweep_after_crash(&fs);
        let surveyed = survey(&fs);
        assert!(surveyed.is_ok() || is_over(), "{surveyed:?}");
        let deadline = Instant::now() + crate::common::PATIENCE;
        while !is_over() && used_bytes(directory) > BUDGET_BYTES {
            assert!(Instant::now() < deadline, "it does not fit");
            let pause = move_objects(&fs, &mut mover);
            std::thread::sleep(pause.min(Duration::from_millis(2)));
        }
        if !is_over() {
            let outcome = fs.commit_and_close();
            assert!(outcome.is_ok() || is_over(), "{outcome:?}");
        }
    }

    /// Every file has its bytes; a page may have those that it was rounded to.
    fn check(self, directory: &Path, files: &[(Place, Vec<u8>)], changes: u64) {
        let mut fs = open(directory, None).unwrap();
        self.attach(&mut fs, directory);
        survey(&fs).unwrap();
        let mut rounded = 0;
        for (place, expected) in files {
            let found = read(&fs, place, expected.len()).unwrap();
            if self.is_lossy && found != *expected {
                assert_is_rounded(&found, expected);
                rounded += 1;
            } else {
                assert!(found == *expected, "{changes} changes: {place:?}");
            }
        }
        if self.is_lossy && used_bytes(directory) <= BUDGET_BYTES {
            assert!(rounded > 0, "{changes} changes: nothing was rounded");
        }
    }
}

fn write(fs: &FileSystem, place: &Place, bytes: &[u8]) {
    let made = fs.create(place, 0o644, CALLER, true).unwrap();
    fs.write(made.opened.handle, 0, bytes, false).unwrap();
    fs.flush(made.opened.handle).unwrap();
    fs.release(made.opened.handle).unwrap();
    fs.forget(made.found.attributes.inode, 1);
}

fn write_files(fs: &FileSystem) -> Vec<(Place, Vec<u8>)> {
    let write = |number: u64| {
        let place = Place { parent: FILES, name: format!("f{number}").into_bytes() };
        // Random bytes would not be encoded: half of these are zeros.
        let mut bytes = fill(number, FILE_BYTES / 2);
        bytes.resize(FILE_BYTES, 0);
        write(fs, &place, &bytes);
        (place, bytes)
    };
    (0..COUNT).map(write).collect()
}

fn write_pages(fs: &FileSystem) -> Vec<(Place, Vec<u8>)> {
    let model = Case::model();
    let mut parent = MODELS;
    for name in ["small", "sequences", "chat", "000"] {
        let place = Place { parent, name: name.as_bytes().to_vec() };
        parent = fs.make(&place, &NewNode::Directory, 0o755, CALLER).unwrap().attributes.inode;
        if name == "small" {
            let place = Place { parent, name: b"manifest.json".to_vec() };
            write(fs, &place, model.manifest.to_json().as_bytes());
        }
    }
    let tokens = u64::from(model.page_tokens());
    let write_page = |number: u64| {
        let start = number * tokens;
        // Values of f16 between 1 and 2, with all their bits.
        let count = model.row_bytes() * usize::try_from(tokens).unwrap();
        let mut rows = fill(number, count);
        rows.iter_mut().skip(1).step_by(2).for_each(|high| *high = 0x3c | (*high & 3));
        let place = model.place(0, start);
        let bytes = kvfs::page::pack_page(&place, &rows, model.page_tokens()).unwrap();
        let name = kvfs::page::names::format_page(kvfs::page::TokenStart(start)).into_bytes();
        let place = Place { parent, name };
        write(fs, &place, &bytes);
        (place, bytes)
    };
    (0..COUNT).map(write_page).collect()
}

fn read(fs: &FileSystem, place: &Place, length: usize) -> Result<Vec<u8>, FsError> {
    let Lookup::Found(found) = fs.lookup(place.parent, &place.name)? else {
        panic!("{place:?} is gone");
    };
    let inode = found.attributes.inode;
    let opened = fs.open_file(inode, libc::O_RDONLY)?;
    let mut bytes = vec![0; length + 1];
    let outcome = fs.read(opened.handle, 0, &mut bytes);
    fs.release(opened.handle)?;
    fs.forget(inode, 1);
    bytes.truncate(outcome?);
    Ok(bytes)
}

/// Values of eight bits with a scale for each 32: they are off by at most half a step.
fn assert_is_rounded(found: &[u8], original: &[u8]) {
    let model = Case::model();
    let geometry = model.manifest.geometry();
    let [found, original] =
        [found, original].map(|bytes| PageView::parse(bytes, geometry).unwrap());
    let value = |row: &[u8], index: usize| {
        half::f16::from_le_bytes([row[2 * index], row[2 * index + 1]]).to_f32()
    };
    let mut differs = false;
    for token in 0..model.page_tokens() {
        let [a, b] = [&found, &original].map(|page| page.k_row(1, token));
        for index in 0..64 {
            let (a, b) = (value(a, index), value(b, index));
            assert!((a - b).abs() <= 0.5 * 2.0 / 127.0 + 0.002, "{a} of {b}");
            differs |= a.to_bits() != b.to_bits();
        }
    }
    assert!(differs);
}
