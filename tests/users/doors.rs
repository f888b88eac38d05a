//! What has no twin on a disk: what is found by its content or shown in another form.
//!
//! Root changes owners and modes of a model with three sequences, and in between somebody tries a door
//! ([`tries`]). The oracle of a try is a path: the same user opens what the door has shown. What the doors change
//! is worked out from owners and modes instead ([`rights`]).

use std::collections::BTreeMap;
use std::fs::{self, File, Permissions};
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::PathBuf;

use kvfs::page::PrefixHash;

use crate::common::forks::no_forks;
use crate::common::random::Random;
use crate::common::{Mode, Model, Mount};
use crate::user::{TEAM, User, below, everybody};
use crate::writer::{Sequence, bytes};
use crate::{History, tries};

as_root!((fuse, root) doors_show_no_more_than_paths);

const DIRECTORY_MODES: [u32; 14] = [
    0o755, 0o755, 0o755, 0o755, 0o777, 0o777, 0o1777, 0o1777, 0o700, 0o750, 0o770, 0o707, 0o711,
    0o701,
];
const FILE_MODES: [u32; 9] = [0o644, 0o644, 0o644, 0o644, 0o666, 0o600, 0o640, 0o604, 0o000];
/// Users with a group that they are in: of whom no group but that of a file is known, that much is taken for true.
const OWNERS: [(u32, u32); 6] =
    [(0, 0), (1001, 1001), (1001, TEAM), (1002, 1002), (1002, TEAM), (1003, 1003)];
/// Tokens of a sequence: a page, and some rows in a tail.
const TOKENS: u32 = 40;
pub(crate) const LAYERS: u32 = 2;
const SEQUENCES: [&str; 3] = ["first", "second", "third"];
pub(crate) const POOLS: [&str; 2] = ["files/pools/a", "files/pools/b"];

/// A sequence as it was made.
#[derive(Debug)]
pub(crate) struct Made {
    pub(crate) name: &'static str,
    pub(crate) tokens: Vec<u32>,
    /// Of its page.
    pub(crate) hash: PrefixHash,
    /// Its slot file.
    pub(crate) slot: Vec<u8>,
}

/// A mount with a model, and what is known of it.
pub(crate) struct Doors {
    /// Its root, open, for users who may not enter the directories above it.
    opened: File,
    pub(crate) sequences: Vec<Made>,
    pub(crate) random: Random,
    pub(crate) history: History,
    /// Blocks that are registered, with who did it and the pool.
    pub(crate) blocks: BTreeMap<String, (u32, &'static str)>,
    /// Tries that got through, and all, of each door.
    pub(crate) counts: BTreeMap<&'static str, (usize, usize)>,
}

impl Doors {
    fn new(mount: &Mount, seed: u64) -> Doors {
        let model = Model::small().named("m");
        model.install(mount);
        fs::create_dir(mount.files("pools")).unwrap();
        for pool in POOLS {
            fs::write(mount.join(pool), vec![0; 1 << 16]).unwrap();
        }
        let sequences = SEQUENCES.iter().zip(1..).map(|(&name, number)| {
            let mut sequence = Sequence::new(&model, name);
            let tokens: Vec<u32> = (0..TOKENS).map(|token| number * 1000 + token).collect();
            sequence.append(mount, &model, &tokens);
            let slot = fs::read(model.directory(mount).join(format!("slots/{name}.bin"))).unwrap();
            let page = &bytes(&tokens)[..model.page_tokens() as usize * 4];
            Made { name, tokens, hash: PrefixHash::next(None, page), slot }
        });
        Doors {
            sequences: sequences.collect(),
            opened: File::open(mount.path()).unwrap(),
            random: Random::of(seed),
            history: History::of(seed),
            blocks: BTreeMap::new(),
            counts: BTreeMap::new(),
        }
    }

    /// A path in the mount.
    pub(crate) fn at(&self, path: &str) -> PathBuf {
        below(&self.opened, path)
    }

    /// Notes a try of a door and whether it got through.
    pub(crate) fn count(&mut self, door: &'static str, is_through: bool) {
        let (through, all) = self.counts.entry(door).or_default();
        (*through, *all) = (*through + usize::from(is_through), *all + 1);
    }

    /// Gives a directory or file another mode, or another owner.
    fn change(&mut self) {
        let sequence = format!("models/m/sequences/{}", self.random.pick(&SEQUENCES));
        let layer = format!("{sequence}/{:03}", self.random.below(LAYERS as usize));
        let (path, is_directory) = match self.random.below(10) {
            0 => ("models/m".to_owned(), true),
            1 => ("models/m/sequences".to_owned(), true),
            2 | 3 => (sequence, true),
            4 => (layer, true),
            5 => (format!("{sequence}/tokens"), false),
            6 => (format!("{layer}/0000000.safetensors"), false),
            7 => (format!("{layer}/0000032.tail"), false),
            8 => ("files/pools".to_owned(), true),
            _ => ((*self.random.pick(&POOLS)).to_owned(), false),
        };
        let at = self.at(&path);
        if self.random.one_in(3) {
            let (uid, gid) = *self.random.pick(&OWNERS);
            self.history.note(&format!("root chown {uid}:{gid} {path}"));
            chown(at, Some(uid), Some(gid)).unwrap();
        } else {
            let modes = if is_directory { &DIRECTORY_MODES[..] } else { &FILE_MODES };
            let mode = *self.random.pick(modes);
            self.history.note(&format!("root chmod {mode:o} {path}"));
            fs::set_permissions(at, Permissions::from_mode(mode)).unwrap();
        }
    }

    /// Reads as a user by path.
    pub(crate) fn reads(&self, user: &User, path: &str) -> Option<Vec<u8>> {
        let at = self.at(path);
        user.does(move || fs::read(at).ok())
    }

    /// Whether `stat` of a path tells a user something.
    pub(crate) fn sees(&self, user: &User, path: &str) -> bool {
        let at = self.at(path);
        user.does(move || fs::symlink_metadata(at).is_ok())
    }
}

fn doors_show_no_more_than_paths(mode: Mode) {
    let begun = std::time::Instant::now();
    let mount = Mount::new(mode);
    let users = everybody();
    let (seed, count) = (crate::seed(), crate::operations());
    let mut doors = Doors::new(&mount, seed);
    for _ in 0..count {
        let _quiet = no_forks();
        if doors.random.one_in(3) {
            doors.change();
        } else {
            let user = &users[doors.random.below(users.len())];
            tries::any(&mut doors, user);
        }
    }
    println!("seed {seed}: {:?}, {:?}", doors.counts, begun.elapsed());
    let is_tried = |(through, all): &(usize, usize)| *through > 0 && all > through;
    assert!(count < 5_000 || doors.counts.values().all(is_tried), "{:?}", doors.counts);
}
