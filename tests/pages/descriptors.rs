//! Every way to get another descriptor of a file, in any order: duplicates, children that inherit
//! one, `/proc/self/fd` for reading and for writing, names by `linkat`. However they are closed,
//! a page is absent, or whole and never changes again.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use crate::common::random::{Random, seeds};
use crate::common::sys::{assert_errno, close, duplicate, errno, open, pwrite, rename};
use crate::common::{Mode, Model, Mount, eventually, fill, forks};

in_both_modes!(no_descriptor_reaches_a_page);

const SEEDS: u64 = 3;
const FILES: u64 = 24;
const STEPS: usize = 12;

/// What an operation may answer that comes too late or asks for too much.
const REFUSALS: [i32; 10] = [
    libc::EPERM,
    libc::ETXTBSY,
    libc::ESTALE,
    libc::ENOENT,
    libc::EINVAL,
    libc::EEXIST,
    libc::EFBIG,
    libc::EBADF,
    libc::EACCES,
    libc::EBUSY,
];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum What {
    Plain,
    PageInPlace,
    PageByRename,
    Tail,
    Tokens,
    Manifest,
}

const ALL: [What; 6] =
    [What::Plain, What::PageInPlace, What::PageByRename, What::Tail, What::Tokens, What::Manifest];

/// A file, and whoever has it.
struct Held<'a> {
    mount: &'a Mount,
    what: What,
    /// Where it is made, and where it is to be.
    paths: [PathBuf; 2],
    bytes: Vec<u8>,
    descriptors: Vec<File>,
    children: Vec<Child>,
    links: usize,
}

fn descriptor(file: &File) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

#[track_caller]
fn may_be_refused<T>(outcome: io::Result<T>) -> Option<T> {
    let code = errno(&outcome);
    assert!(code == 0 || REFUSALS.contains(&code), "{:?}", outcome.err());
    outcome.ok()
}

impl<'a> Held<'a> {
    fn make(mount: &'a Mount, model: &Model, what: What, number: u64) -> Held<'a> {
        let sequence = format!("chat-{number}");
        let page = model.page_path(mount, &sequence, 0, 0);
        let (from, bytes) = match what {
            What::Plain => (mount.files(number.to_string()), fill(number, 9000)),
            What::PageInPlace => (page.clone(), model.page(0, 0, number)),
            What::PageByRename => (page.with_extension("tmp"), model.page(0, 0, number)),
            What::Tail => (page.with_extension("tail"), model.rows(number, 32)),
            What::Tokens => (model.tokens_path(mount, &sequence), fill(number, 400)),
            What::Manifest => {
                let directory = mount.join(format!("models/m{number}"));
                std::fs::create_dir(&directory).unwrap();
                (directory.join("manifest.json"), model.manifest.to_json().into_bytes())
            }
        };
        let to = if what == What::PageByRename || what == What::Tail { page } else { from.clone() };
        let file = open(&from, libc::O_RDWR | libc::O_CREAT | libc::O_EXCL).unwrap();
        // The rest of it comes through whatever descriptor there will be.
        let half = if what == What::Tail { bytes.len() / 4 } else { bytes.len() / 2 };
        assert_eq!(pwrite(&file, &bytes[..half], 0).unwrap(), half);
        let paths = [from, to];
        let (descriptors, children) = (vec![file], Vec::new());
        Held { mount, what, paths, bytes, descriptors, children, links: 0 }
    }

    fn step(&mut self, random: &mut Random) {
        let count = self.descriptors.len();
        if count == 0 {
            return;
        }
        let at = random.below(count);
        let file = &self.descriptors[at];
        match random.below(9) {
            0 => self.descriptors.push(duplicate(file)),
            1 => {
                let reader = may_be_refused(open(descriptor(file), libc::O_RDONLY));
                self.descriptors.extend(reader);
            }
            2 => {
                let writer = may_be_refused(open(descriptor(file), libc::O_RDWR));
                self.descriptors.extend(writer);
            }
            3 => {
                let mut child = Command::new("cat");
                child.stdin(Stdio::piped()).stdout(Stdio::null());
                // close() of the copy that it inherits may say that this is no page yet.
                self.children.extend(may_be_refused(forks::spawn_with(&mut child, file)));
            }
            4 => self.link(at),
            5 => self.write_rest(at),
            6 if self.what == What::PageByRename => {
                may_be_refused(rename(&self.paths[0], &self.paths[1]));
            }
            7 => self.end_child(random),
            _ => drop(may_be_refused(close(self.descriptors.swap_remove(at)))),
        }
        self.check();
    }

    fn link(&mut self, at: usize) {
        let name = self.paths[0].file_name().unwrap().to_string_lossy().into_owned();
        let layer = self.paths[0].parent().unwrap();
        let to = if self.links.is_multiple_of(2) {
            self.mount.files(format!("{name}-{}-{}", self.links, layer.display()).replace('/', "-"))
        } else {
            layer.join(format!(".{name}-{}.tmp", self.links))
        };
        self.links += 1;
        let here = nix::fcntl::AT_FDCWD;
        let follow = nix::fcntl::AtFlags::AT_SYMLINK_FOLLOW;
        let from = descriptor(&self.descriptors[at]);
        may_be_refused(
            nix::unistd::linkat(here, &from, here, &to, follow).map_err(io::Error::from),
        );
    }

    fn write_rest(&self, at: usize) {
        let file = &self.descriptors[at];
        let have = usize::try_from(file.metadata().map_or(0, |stat| stat.len())).unwrap();
        if have < self.bytes.len() {
            let offset = i64::try_from(have).unwrap();
            may_be_refused(pwrite(file, &self.bytes[have..], offset));
        }
    }

    fn end_child(&mut self, random: &mut Random) {
        if !self.children.is_empty() {
            let mut child = self.children.swap_remove(random.below(self.children.len()));
            drop(child.stdin.take());
            assert!(child.wait().unwrap().success());
        }
    }

    /// Whatever is visible of a page is whole, and nobody who has a descriptor changes it.
    fn check(&self) {
        let is_sealed =
            matches!(self.what, What::PageInPlace | What::PageByRename | What::Manifest);
        if !is_sealed || !self.paths[1].exists() {
            return;
        }
        for file in &self.descriptors {
            may_be_refused(pwrite(file, &[0xee; 64], 4200));
            may_be_refused(nix::unistd::ftruncate(file, 5000).map_err(io::Error::from));
        }
        self.check_whole(&self.paths[1]);
    }

    fn check_whole(&self, path: &Path) {
        assert!(std::fs::read(path).unwrap() == self.bytes, "{:?}: {}", self.what, path.display());
        assert_errno(open(path, libc::O_RDWR), libc::EPERM);
    }

    fn end(mut self, random: &mut Random) {
        while !self.descriptors.is_empty() || !self.children.is_empty() {
            if !self.descriptors.is_empty() {
                let at = random.below(self.descriptors.len());
                may_be_refused(close(self.descriptors.swap_remove(at)));
            }
            self.end_child(random);
        }
        let is_page = matches!(self.what, What::PageInPlace | What::PageByRename | What::Manifest);
        if is_page && self.paths[1].exists() {
            self.check_whole(&self.paths[1]);
        }
        if self.what == What::Tail && self.paths[1].exists() {
            let expected = std::fs::read(&self.paths[1]).unwrap();
            assert_errno(open(&self.paths[1], libc::O_RDWR), libc::EPERM);
            assert!(std::fs::read(&self.paths[1]).unwrap() == expected);
        }
    }
}

fn no_descriptor_reaches_a_page(mode: Mode) {
    let mut mount = Mount::new(mode);
    let model = Model::small();
    model.install(&mount);
    for seed in seeds(SEEDS) {
        let mut random = Random::of(seed);
        for number in 0..FILES {
            let what = *random.pick(&ALL);
            eprintln!("seed {seed}, file {number}: {what:?}");
            let mut held = Held::make(&mount, &model, what, seed * 1000 + number);
            for _ in 0..STEPS {
                held.step(&mut random);
            }
            held.end(&mut random);
        }
    }
    eventually("nothing to be held any more", || {
        crate::common::sys::sync_directory(mount.path()).unwrap();
        (mount.status("uncommitted_changes") == "0").then_some(())
    });
    assert_eq!(mount.status("state"), "ok");
    assert!(mount.unmount().success(), "{}", mount.log());
    let mut fsck = Command::new(env!("CARGO_BIN_EXE_kvfs"));
    forks::succeed(fsck.arg("fsck").args(["--read-data-subset", "1/1"]).arg(mount.store()));
}
